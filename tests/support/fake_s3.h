// A small S3 server in memory behind an HttpTransport, for tests: no socket, no thread of its own.
//
// It checks signatures by its own arithmetic (not that of workers/s3/sigv4.h) and payload digests,
// and knows objects, ranges, If-Match, If-None-Match, ListObjectsV2 with pages, multipart uploads
// and deletion. A hook decides the fate of each request, so every fault that a network and a store
// can have is a few lines in a test.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "workers/clock.h"
#include "workers/s3/credentials.h"
#include "workers/s3/http_transport.h"

namespace shardprep {

struct FakeS3Options {
  std::string bucket = "bucket";
  std::string region = "us-east-1";
  AwsCredentials credentials = {"AKIDFAKE", "fake-secret+/", "fake-token=="};
  // What If-None-Match of PUT does: 412 when there is an object, nothing (s3rver), or 501 (Swift).
  enum class ConditionalPut { kHonoured, kIgnored, kNotImplemented };
  ConditionalPut conditional_put = ConditionalPut::kHonoured;
  bool empty_complete_etag = false;  // radosgw 16 on memstore
  bool encodes_keys = true;          // honours encoding-type=url
  int64_t least_part_bytes = 1;
  int64_t page_keys = 1000;
  absl::Duration visible_after;  // new objects are 404 for this long
};

struct FakeRequest {
  std::string operation;  // the API's name, "GetObject"
  int number = 1;         // of this operation, from 1
  std::string host;
  std::string key;
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> headers;
  int64_t body_bytes = 0;
};

struct FakeAnswer {
  int status = 200;
  std::vector<HttpHeader> headers;
  std::string body;
  void SetHeader(const std::string& name, const std::string& value);
};

// The <Error> document with a status.
FakeAnswer FakeError(int status, const std::string& code, const std::string& message = "");

// What happens to a request besides being carried out.
struct FakeFault {
  std::optional<FakeAnswer> instead;      // answered so, and not carried out
  bool lose_request = false;              // the connection ends before it arrives whole
  bool lose_answer = false;               // carried out; the connection ends before the answer
  std::function<void(FakeAnswer*)> edit;  // carried out; the answer changed
  int64_t cut_body_after = -1;            // carried out; the answer ends after that many bytes
};

// Thread safe, but for the hook and the clock, which are set before requests are made.
class FakeS3 {
 public:
  // `clock` outlives it.
  FakeS3(FakeS3Options options, const Clock* clock);

  // A way to the server, which must outlive it.
  std::unique_ptr<HttpTransport> Connect();

  // Called for each request before it is carried out, on the thread that makes it.
  void set_fault(std::function<FakeFault(const FakeRequest&)> fault) { fault_ = std::move(fault); }

  // While down, every connection ends: to a client no different from being killed itself.
  void set_down(bool down);
  // The server's clock runs ahead of the tests' by this.
  void set_skew(absl::Duration skew);
  // Credentials that it takes from now on, in place of the others or beside expired ones.
  void set_credentials(const AwsCredentials& credentials);
  void Expire(const std::string& access_key_id);
  void RemoveBucket();

  struct Count {
    int64_t requests = 0;
    int64_t received_bytes = 0;  // of bodies, by the server
    int64_t sent_bytes = 0;
  };
  Count count(const std::string& operation) const;
  int64_t requests() const;
  int most_in_flight() const;

  // The state, from the bucket's root on.
  std::vector<std::string> Keys() const;
  std::optional<std::string> Object(const std::string& key) const;
  void PutObject(const std::string& key, const std::string& bytes);
  // "key upload-id" of each unfinished multipart upload.
  std::vector<std::string> Uploads() const;
  // An unfinished upload with one part, of somebody else.
  std::string BeginUpload(const std::string& key);

 private:
  class Transport;
  struct Stored {
    std::shared_ptr<const std::string> bytes;
    std::string etag;
    absl::Time since;
  };
  struct Part {
    std::shared_ptr<const std::string> bytes;
    std::string md5;
  };
  struct Upload {
    std::string key;
    std::map<int, Part> parts;
  };
  struct Account {
    AwsCredentials credentials;
    bool is_expired = false;
  };

  HttpResponse Serve(const HttpRequest& request);
  FakeAnswer Answer(const HttpRequest& http, const FakeRequest& request);
  std::optional<FakeAnswer> CheckSignature(const HttpRequest& http,
                                           const FakeRequest& request) const;
  FakeAnswer CarryOut(const HttpRequest& http, const FakeRequest& request);
  FakeAnswer Put(const HttpRequest& http, const FakeRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeAnswer Read(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeAnswer List(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeAnswer PutPart(const HttpRequest& http, const FakeRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeAnswer Complete(const HttpRequest& http, const FakeRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Store(const std::string& key, std::shared_ptr<const std::string> bytes,
             const std::string& etag) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Time Now() const;

  const FakeS3Options options_;
  const Clock* const clock_;
  std::function<FakeFault(const FakeRequest&)> fault_;

  mutable absl::Mutex mu_;
  bool is_down_ ABSL_GUARDED_BY(mu_) = false;
  bool has_bucket_ ABSL_GUARDED_BY(mu_) = true;
  absl::Duration skew_ ABSL_GUARDED_BY(mu_);
  std::vector<Account> accounts_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Stored> objects_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Upload> uploads_ ABSL_GUARDED_BY(mu_);
  int next_upload_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<std::string, Count> counts_ ABSL_GUARDED_BY(mu_);
  int in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  int most_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace shardprep
