// S3 requests over an HTTP transport: where a bucket is, signing, retries, expired credentials and
// what errors mean. What the requests are for is said in s3_store.cc; how one is repeated, at the
// top of s3_client.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "workers/clock.h"
#include "workers/object_store.h"
#include "workers/s3/credentials.h"
#include "workers/s3/http_transport.h"
#include "workers/s3/s3_options.h"
#include "workers/s3/s3_xml.h"
#include "workers/s3/sigv4.h"

namespace shardprep {

// What a store takes at most. Amazon's numbers ("Multipart upload limits", S3 User Guide); other
// stores allow no less.
struct S3Limits {
  int64_t least_part_bytes = int64_t{5} << 20;    // of every part but the last
  int64_t largest_part_bytes = int64_t{5} << 30;  // of a part, and of an object put in one request
  int64_t largest_parts = 10'000;
  int64_t largest_object_bytes = int64_t{5} << 40;
};

// One HTTP exchange that has ended.
struct S3Exchange {
  const char* operation = "";  // the API's name: "GetObject", "UploadPart"; a bounded set
  int http_status = 0;         // 0: no answer
  absl::StatusCode transport = absl::StatusCode::kOk;
  int attempt = 1;  // from 1; more than 1 is a retry
  absl::Duration latency;
  int64_t sent_bytes = 0;      // of the request's body
  int64_t received_bytes = 0;  // of the answer's
};

// Thread safe; called on the threads that make the requests, so it must not block.
class S3Observer {
 public:
  virtual ~S3Observer() = default;
  virtual void OnExchange(const S3Exchange& /*exchange*/) {}
  // A multipart upload could not be aborted; its record stays for the next clean-up.
  virtual void OnAbortFailed() {}
};

// What a connection needs besides its options. What is pointed to outlives the connection.
struct S3Environment {
  const Clock* clock = nullptr;               // null: the system's
  std::function<void(absl::Duration)> sleep;  // empty: absl::SleepFor
  std::optional<uint64_t> seed;               // of jitter and ids; nothing: a random one
  S3Observer* observer = nullptr;
  S3Limits limits;
  // Bound on each request that makes bytes visible, which must have ended before another worker may
  // hold the lease: less than the 10 s by which a worker stops before its lease does.
  absl::Duration publish_timeout = absl::Seconds(9);
};

// One request, however often it is sent.
struct S3Call {
  const char* operation = "";
  std::string method;
  std::string bucket;
  std::string key;  // from the bucket's root on; empty: the bucket itself
  QueryParameters query;
  std::vector<HttpHeader> headers;  // besides those of the signature
  absl::Span<const uint8_t> body;
  std::string body_sha256;   // of `body`, hexadecimal, where it is known already
  absl::Span<uint8_t> into;  // as HttpRequest::into
  std::function<void(int64_t into_bytes)> arrived;  // as HttpRequest::arrived, of each attempt
  int64_t max_body_bytes = int64_t{1} << 20;
  absl::Duration timeout = absl::InfiniteDuration();
  CommitGate gate;  // asked immediately before each attempt
  // Once true, the call ends as CANCELLED within about a second, also while it pauses.
  const std::atomic<bool>* stop = nullptr;
  // Judges each answer with a 2xx status, also one whose body was cut off. OK: done, if the body is
  // whole. UNAVAILABLE: to be repeated, with the call as it was changed here. Others are final. The
  // message need not name object and operation.
  std::function<absl::Status(const HttpResponse&, S3Call*)> accept;
};

struct S3Answer {
  absl::Status status;    // OK: a 2xx answer, whole and accepted
  HttpResponse response;  // the last one
  S3Error error;          // what an answer other than 2xx said
  int attempts = 0;
  // Of some attempt without success it is not known whether it was carried out.
  bool in_doubt = false;
};

enum class ConditionalPut { kUnknown, kHonoured, kMissing };

// Shared by all stores of a process: what is bounded (requests in flight, retries) is bounded for
// all of them, and what was learned about a bucket is learned once. Thread safe.
class S3Connection {
 public:
  virtual ~S3Connection() = default;

  // Sends the call until it is answered, within the bounds of S3Options. Codes of the status:
  // NOT_FOUND for a missing bucket or object; FAILED_PRECONDITION for refused or expired
  // credentials, a clock that is wrong, another region, a server that does not speak S3;
  // RESOURCE_EXHAUSTED for a quota; UNAVAILABLE when attempts or the shared retry budget are used
  // up; the gate's. Messages name bucket, key, operation, endpoint, HTTP status and the server's
  // code, and hold nothing of credentials or signatures.
  virtual S3Answer Exchange(S3Call call) = 0;

  // What an <Error> means that came with a status of 200, for S3Call::accept.
  virtual absl::Status ErrorStatus(const S3Call& call, const S3Error& error) const = 0;

  // Runs `work` on a thread of the connection's pool of S3Options::max_connections threads. Work
  // must not wait for other work of the pool.
  virtual void Run(std::function<void()> work) = 0;

  // Sleeps before repetition `attempt` (from 1) of something that is not an Exchange(): doubling
  // from first_pause up to max_pause.
  virtual void PauseBefore(int attempt) = 0;

  // An id that no other connection or call gives: 1 to 128 of a-z, 0-9 and `-`.
  virtual std::string NewId() = 0;

  // Whether the bucket's PUT honours If-None-Match, as far as is known; set by who finds out.
  virtual ConditionalPut conditional_put(const std::string& bucket) const = 0;
  virtual void set_conditional_put(const std::string& bucket, ConditionalPut support) = 0;

  // Excludes other holders of the same name in this process until its destruction; no lock is held
  // meanwhile. Of threads only: it is no lease.
  class Turn {
   public:
    virtual ~Turn() = default;
  };
  virtual std::unique_ptr<Turn> TakeTurn(const std::string& name) = 0;

  virtual const S3Options& options() const = 0;
  virtual const S3Environment& environment() const = 0;
};

// `options` as MakeS3Options() gives them.
std::shared_ptr<S3Connection> MakeS3Connection(const S3Options& options,
                                               std::unique_ptr<HttpTransport> transport,
                                               std::unique_ptr<CredentialsProvider> credentials,
                                               S3Environment environment);

// The same over libcurl and with the provider of MakeCredentialsProvider(). INVALID_ARGUMENT for
// bounds that leave nothing to do: no connection, no attempt, no bytes in a part.
absl::StatusOr<std::shared_ptr<S3Connection>> ConnectS3(const S3Options& options,
                                                        S3Environment environment = {});

}  // namespace shardprep
