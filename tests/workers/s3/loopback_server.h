// A small HTTP/1.1 server on a loopback port of its own, whose answers are scripted byte for byte.
#pragma once

#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "workers/s3/http_transport.h"

namespace shardprep {

// A certificate for 127.0.0.1, not for `localhost`, that signs itself.
class TestCertificate {
 public:
  TestCertificate();
  ~TestCertificate();
  TestCertificate(const TestCertificate&) = delete;
  TestCertificate& operator=(const TestCertificate&) = delete;

  std::string Pem() const;
  EVP_PKEY* key() const { return key_; }
  X509* certificate() const { return certificate_; }

 private:
  EVP_PKEY* key_ = nullptr;
  X509* certificate_ = nullptr;
};

struct ReceivedRequest {
  std::string head;  // request line and headers, as they came, with the empty line
  std::string method;
  std::string target;
  std::vector<HttpHeader> headers;  // in the order they came, names lower case
  std::string body;
  int connection = 0;  // counted from 0
};

struct ScriptedAnswer {
  std::string bytes;  // sent as they are
  enum class Then {
    kKeep,   // waits for the next request
    kClose,  // closes the connection
    kHang,   // sends and reads nothing more until the client or Stop() ends the connection
  };
  Then then = Then::kKeep;
};

// "HTTP/1.1 200 OK" and the like with a content-length and `body`.
std::string WholeAnswer(int status, const std::string& body);

class LoopbackServer {
 public:
  struct Options {
    // Called on the connection's own thread, in any number at a time.
    std::function<ScriptedAnswer(const ReceivedRequest&)> answer;
    const TestCertificate* certificate = nullptr;  // serves TLS when there is one
    bool read_bodies = true;                       // else answers when the headers are there
  };

  explicit LoopbackServer(const Options& options);
  // Always the same answer.
  explicit LoopbackServer(const ScriptedAnswer& answer);
  ~LoopbackServer();

  // Ends all connections, and whatever hangs on one.
  void Stop();

  const std::string& url() const { return url_; }  // without a path
  int connections() const;
  std::vector<ReceivedRequest> requests() const;
  // Blocks until so many requests have been received.
  void WaitForRequests(size_t count) const;

 private:
  class Connection;

  void Accept();
  void Serve(int fd, int number);
  // Receives one request and answers it; false when the connection is over.
  bool AnswerOne(Connection* connection, int number);

  const Options options_;
  int listener_ = -1;
  std::string url_;
  SSL_CTX* tls_ = nullptr;
  std::thread acceptor_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<int> open_fds_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReceivedRequest> requests_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace shardprep
