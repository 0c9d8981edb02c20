#include "tests/workers/s3/loopback_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/status_macros.h"

namespace shardprep {

TestCertificate::TestCertificate() : key_(EVP_EC_gen("P-256")), certificate_(X509_new()) {
  SP_CHECK(key_ != nullptr && certificate_ != nullptr);
  X509_set_version(certificate_, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate_), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate_), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate_), 86400);
  X509_set_pubkey(certificate_, key_);
  X509_NAME* const name = X509_get_subject_name(certificate_);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("loopback test"), -1, -1, 0);
  X509_set_issuer_name(certificate_, name);
  X509_EXTENSION* const names =
      X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "IP:127.0.0.1");
  SP_CHECK(names != nullptr);
  X509_add_ext(certificate_, names, -1);
  X509_EXTENSION_free(names);
  SP_CHECK(X509_sign(certificate_, key_, EVP_sha256()) > 0);
}

TestCertificate::~TestCertificate() {
  X509_free(certificate_);
  EVP_PKEY_free(key_);
}

std::string TestCertificate::Pem() const {
  BIO* const memory = BIO_new(BIO_s_mem());
  SP_CHECK(PEM_write_bio_X509(memory, certificate_) == 1);
  char* data = nullptr;
  const auto size = BIO_get_mem_data(memory, &data);
  std::string pem(data, static_cast<size_t>(size));
  BIO_free(memory);
  return pem;
}

std::string WholeAnswer(int status, const std::string& body) {
  return absl::StrCat("HTTP/1.1 ", status, " Scripted\r\nContent-Length: ", body.size(), "\r\n\r\n",
                      body);
}

// Bytes in both directions, with or without TLS.
class LoopbackServer::Connection {
 public:
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection() { SSL_free(tls_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool StartTls(SSL_CTX* context) {
    tls_ = SSL_new(context);
    SSL_set_fd(tls_, fd_);
    return SSL_accept(tls_) == 1;
  }

  // Appends what comes next to `text`; false at the end.
  bool ReadSome(std::string* text) {
    char piece[64 << 10];
    const int64_t got =
        tls_ != nullptr ? SSL_read(tls_, piece, sizeof piece) : ::recv(fd_, piece, sizeof piece, 0);
    if (got <= 0) return false;
    text->append(piece, static_cast<size_t>(got));
    return true;
  }

  bool Write(const std::string& bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
      const size_t left = bytes.size() - done;
      const int64_t sent = tls_ != nullptr
                               ? SSL_write(tls_, bytes.data() + done, static_cast<int>(left))
                               : ::send(fd_, bytes.data() + done, left, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      done += static_cast<size_t>(sent);
    }
    return true;
  }

  // Reads nothing: a client that sends finds its buffers full.
  void WaitForEnd() const {
    pollfd end = {fd_, POLLRDHUP, 0};
    while (::poll(&end, 1, -1) < 0) {
    }
  }

  std::string unread;  // received after the last request

 private:
  const int fd_;
  SSL* tls_ = nullptr;
};

LoopbackServer::LoopbackServer(const ScriptedAnswer& answer)
    : LoopbackServer(Options{.answer = [answer](const ReceivedRequest&) { return answer; }}) {}

LoopbackServer::LoopbackServer(const Options& options) : options_(options) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  SP_CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0);
  SP_CHECK(::listen(listener_, 64) == 0);
  SP_CHECK(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const bool secure = options_.certificate != nullptr;
  url_ = absl::StrCat(secure ? "https" : "http", "://127.0.0.1:", ntohs(address.sin_port));
  if (secure) {
    tls_ = SSL_CTX_new(TLS_server_method());
    SP_CHECK(SSL_CTX_use_certificate(tls_, options_.certificate->certificate()) == 1);
    SP_CHECK(SSL_CTX_use_PrivateKey(tls_, options_.certificate->key()) == 1);
  }
  acceptor_ = std::thread([this] { Accept(); });
}

LoopbackServer::~LoopbackServer() {
  Stop();
  SSL_CTX_free(tls_);
}

void LoopbackServer::Stop() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    for (const int fd : open_fds_) ::shutdown(fd, SHUT_RDWR);
  }
  acceptor_.join();
  {
    absl::MutexLock lock(&mutex_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  ::close(listener_);
}

int LoopbackServer::connections() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(threads_.size());
}

std::vector<ReceivedRequest> LoopbackServer::requests() const {
  absl::MutexLock lock(&mutex_);
  return requests_;
}

void LoopbackServer::WaitForRequests(size_t count) const {
  absl::MutexLock lock(&mutex_);
  const auto there = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return requests_.size() >= count;
  };
  mutex_.Await(absl::Condition(&there));
}

void LoopbackServer::Accept() {
  while (true) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    absl::MutexLock lock(&mutex_);
    if (fd < 0 || stopping_) {
      if (fd >= 0) ::close(fd);
      return;
    }
    open_fds_.push_back(fd);
    const int number = static_cast<int>(threads_.size());
    threads_.emplace_back([this, fd, number] { Serve(fd, number); });
  }
}

void LoopbackServer::Serve(int fd, int number) {
  // OpenSSL writes without MSG_NOSIGNAL.
  sigset_t sigpipe;
  sigemptyset(&sigpipe);
  sigaddset(&sigpipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &sigpipe, nullptr);
  {
    Connection connection(fd);
    if (tls_ == nullptr || connection.StartTls(tls_)) {
      while (AnswerOne(&connection, number)) {
      }
    }
  }
  absl::MutexLock lock(&mutex_);
  open_fds_.erase(std::find(open_fds_.begin(), open_fds_.end(), fd));
  ::close(fd);
}

bool LoopbackServer::AnswerOne(Connection* connection, int number) {
  ReceivedRequest request;
  request.connection = number;
  size_t head_end = std::string::npos;
  while ((head_end = connection->unread.find("\r\n\r\n")) == std::string::npos) {
    if (!connection->ReadSome(&connection->unread)) return false;
  }
  request.head = connection->unread.substr(0, head_end + 4);
  connection->unread.erase(0, head_end + 4);
  const std::vector<std::string> lines = absl::StrSplit(request.head, "\r\n");
  const std::vector<std::string> first = absl::StrSplit(lines[0], ' ');
  request.method = first[0];
  request.target = first.size() > 1 ? first[1] : "";
  size_t body_bytes = 0;
  for (size_t i = 1; i + 2 < lines.size(); ++i) {
    const size_t colon = lines[i].find(':');
    SP_CHECK(colon != std::string::npos);
    const std::string value(absl::StripAsciiWhitespace(lines[i].substr(colon + 1)));
    request.headers.push_back({absl::AsciiStrToLower(lines[i].substr(0, colon)), value});
    if (request.headers.back().name == "content-length") {
      SP_CHECK(absl::SimpleAtoi(value, &body_bytes));
    }
  }
  while (options_.read_bodies && connection->unread.size() < body_bytes) {
    if (!connection->ReadSome(&connection->unread)) return false;
  }
  request.body = connection->unread.substr(0, body_bytes);
  connection->unread.erase(0, body_bytes);
  {
    absl::MutexLock lock(&mutex_);
    requests_.push_back(request);
  }
  const ScriptedAnswer answer = options_.answer(request);
  if (!connection->Write(answer.bytes)) return false;
  if (answer.then == ScriptedAnswer::Then::kHang) connection->WaitForEnd();
  return answer.then == ScriptedAnswer::Then::kKeep;
}

}  // namespace shardprep
