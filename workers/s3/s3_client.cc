// How a request is repeated.
//   1. A request waits for one of max_connections places, so retries never add to what is in
//      flight. Its gate is asked when it has one.
//   2. Each attempt takes the credentials of that moment and is signed anew; its body is memory
//      that stays as it is, so every attempt sends the same bytes under the same digest.
//   3. Worth repeating: no whole answer; 408, 429 and 5xx but 501, 505, 507; the codes of
//      IsRetryable(); what S3Call::accept finds short. Everything else is final at once.
//   4. Before a repetition: a random pause of up to first_pause, doubled each time, capped by
//      max_pause ("full jitter": clients that failed together must not return together). A server's
//      Retry-After is the least pause, up to max_pause.
//   5. Repetitions take from a budget that all requests of the connection share and that successes
//      fill again. When a store is down for all, this ends the storm early: each caller then gets
//      UNAVAILABLE at its first failure, and whoever runs the task decides when to come back.
//   6. Answers that say what to change are not failures, and each leads to at most one repetition
//      of a request: expired credentials are looked up again; a bucket of another region is asked
//      there, where the endpoint is Amazon's own (any other endpoint is what the user meant).
//   HEAD answers have no body and so no code: for those refused with 400 or 403, and with 404 while
//   the bucket has never answered, the same is asked as a GET of one byte to learn the reason.
#include "workers/s3/s3_client.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/digest.h"
#include "workers/log.h"
#include "workers/object_store.h"
#include "workers/s3/curl_transport.h"

namespace shardprep {
namespace {

// The retry budget in tenths of a repetition: a success gives one back, so that in the long run no
// more than a tenth of the requests are repetitions.
constexpr int64_t kRetryCost = 10;
constexpr int64_t kSuccessGain = 1;

// How soon a call that pauses notices that it is to stop.
constexpr absl::Duration kStopPoll = absl::Milliseconds(200);

// An error document is small; a page of a proxy need not be read whole.
constexpr int64_t kMaxErrorBytes = int64_t{64} << 10;
constexpr size_t kMaxMessageBytes = 300;

bool IsRetryable(const std::string& code) {
  static const char* const kCodes[] = {
      "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling",
      "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequests",
      "OperationAborted", "ConditionalRequestConflict", "RequestTimeoutException",
      // The body was damaged or cut on its way.
      "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"};
  return std::any_of(std::begin(kCodes), std::end(kCodes),
                     [&](const char* known) { return code == known; });
}

bool IsRetryable(int status) {
  if (status == 408 || status == 429) return true;
  return status >= 500 && status != 501 && status != 505 && status != 507;
}

bool SaysExpired(const std::string& code) {
  // A rotated key may be deleted before its successor is read.
  return code == "ExpiredToken" || code == "ExpiredTokenException" ||
         code == "TokenRefreshRequired" || code == "InvalidToken" || code == "InvalidAccessKeyId";
}

// The region that a refusal names when it is about that, else "".
std::string BucketRegion(const HttpResponse& response, const S3Error& error) {
  const std::string* header = response.Header("x-amz-bucket-region");
  const bool is_about_region = response.status / 100 == 3 ||
                               error.code == "AuthorizationHeaderMalformed" ||
                               error.code == "IllegalLocationConstraintException" ||
                               (response.status == 400 && header != nullptr);
  if (!is_about_region) return "";
  return header != nullptr ? *header : error.region;
}

// Server text for a message: one line, bounded.
std::string Printable(const std::string& text) {
  std::string out = text.substr(0, kMaxMessageBytes);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return out;
}

// Scheme, host and base path of a bucket.
struct BucketAddress {
  std::string scheme;  // "https://"
  std::string host;    // value of the Host header
  std::string path;    // "" or "/bucket"
};

BucketAddress AddressOf(const S3Options& options, const std::string& region,
                        const std::string& bucket) {
  const std::string endpoint =
      options.endpoint.empty() ? DefaultS3Endpoint(region) : options.endpoint;
  BucketAddress address;
  const size_t host = endpoint.find("://") + 3;
  address.scheme = endpoint.substr(0, host);
  address.host = endpoint.substr(host);
  // A certificate for *.s3.amazonaws.com does not cover a bucket name with dots.
  const bool dotted = absl::StrContains(bucket, ".") && address.scheme == "https://";
  if (options.addressing == S3Options::Addressing::kVirtualHost && !dotted) {
    address.host = absl::StrCat(bucket, ".", address.host);
  } else {
    address.path = absl::StrCat("/", bucket);
  }
  return address;
}

// A fixed number of threads at most, started when they are needed.
class ThreadPool {
 public:
  explicit ThreadPool(int max_threads) : max_threads_(static_cast<size_t>(max_threads)) {}

  ~ThreadPool() {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  void Run(std::function<void()> work) {
    absl::MutexLock lock(&mu_);
    queue_.push_back(std::move(work));
    if (queue_.size() > idle_ && threads_.size() < max_threads_) {
      threads_.emplace_back([this] { Loop(); });
    }
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !queue_.empty(); }

  void Loop() {
    pthread_setname_np(pthread_self(), "s3");
    for (;;) {
      std::function<void()> work;
      {
        absl::MutexLock lock(&mu_);
        ++idle_;
        mu_.Await(absl::Condition(this, &ThreadPool::HasNews));
        --idle_;
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  const size_t max_threads_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  size_t idle_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;  // grows under mu_; joined by the destructor alone
};

// A number of places, each held by one request.
class Places {
 public:
  explicit Places(int places) : free_(places) {}
  void Take() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(this, &Places::HasFree));
    --free_;
  }
  void GiveBack() {
    absl::MutexLock lock(&mu_);
    ++free_;
  }

 private:
  bool HasFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return free_ > 0; }
  absl::Mutex mu_;
  int free_ ABSL_GUARDED_BY(mu_);
};

class HttpS3Connection final : public S3Connection {
 public:
  HttpS3Connection(S3Options options, std::unique_ptr<HttpTransport> transport,
                   std::unique_ptr<CredentialsProvider> credentials, S3Environment environment)
      : options_(std::move(options)),
        environment_(std::move(environment)),
        transport_(std::move(transport)),
        credentials_(std::move(credentials)),
        clock_(environment_.clock != nullptr ? environment_.clock : &system_clock_),
        places_(options_.max_connections),
        full_budget_(kRetryCost * options_.max_connections * (options_.max_attempts - 1)),
        budget_(full_budget_),
        pool_(options_.max_connections) {
    std::random_device device;
    const uint64_t chosen = (uint64_t{device()} << 32) | device();
    random_.seed(environment_.seed.value_or(chosen));
    unique_ = absl::StrCat(absl::Hex(environment_.seed.value_or(chosen), absl::kZeroPad16));
  }

  S3Answer Exchange(S3Call call) override;
  absl::Status ErrorStatus(const S3Call& call, const S3Error& error) const override {
    return WhatItMeans(call.bucket, 200, error);
  }
  void Run(std::function<void()> work) override { pool_.Run(std::move(work)); }
  void PauseBefore(int attempt) override { Sleep(LongestPause(attempt)); }
  std::string NewId() override { return absl::StrCat(unique_, "-", next_id_.fetch_add(1)); }

  ConditionalPut conditional_put(const std::string& bucket) const override {
    absl::MutexLock lock(&mu_);
    const auto found = buckets_.find(bucket);
    return found == buckets_.end() ? ConditionalPut::kUnknown : found->second.conditional_put;
  }
  void set_conditional_put(const std::string& bucket, ConditionalPut support) override {
    absl::MutexLock lock(&mu_);
    buckets_[bucket].conditional_put = support;
  }

  std::unique_ptr<Turn> TakeTurn(const std::string& name) override;

  const S3Options& options() const override { return options_; }
  const S3Environment& environment() const override { return environment_; }

 private:
  struct Bucket {
    std::string region;  // empty: that of the options
    ConditionalPut conditional_put = ConditionalPut::kUnknown;
    bool has_answered = false;
  };
  // What one request has been through.
  struct Progress {
    std::string payload_sha256;
    AwsCredentials used;
    std::string region;
    bool refreshed = false;
    bool moved = false;
    absl::Duration retry_after;
  };
  enum class Next { kReturn, kRepeat, kPauseAndRepeat };
  class HeldTurn;

  HttpRequest MakeRequest(const S3Call& call, const Progress& progress) const;
  HttpResponse SendOnce(const S3Call& call, const Progress& progress, int attempt);
  Next Judge(S3Call* call, Progress* progress, S3Answer* answer);
  Next JudgeRefusal(const S3Call& call, Progress* progress, S3Answer* answer);
  bool LearnReason(const S3Call& call, const Progress& progress, S3Answer* answer);
  Next JudgeRegion(const S3Call& call, const std::string& region, Progress* progress,
                   S3Answer* answer);
  bool MayRetry(const S3Answer& answer);
  void Pause(int attempt, absl::Duration retry_after, const std::atomic<bool>* stop);

  absl::Status WhatItMeans(const std::string& bucket, int status, const S3Error& error) const;
  bool HoldsSecret(const std::string& text) const;
  absl::Status Skewed(const HttpResponse& response) const;
  absl::Status Fail(const absl::Status& status, const S3Call& call) const;
  std::string EndpointOf(const S3Call& call, const std::string& region) const {
    const BucketAddress address = AddressOf(options_, region, call.bucket);
    return absl::StrCat(address.scheme, address.host);
  }

  std::string RegionOf(const std::string& bucket) const {
    absl::MutexLock lock(&mu_);
    const auto found = buckets_.find(bucket);
    if (found == buckets_.end() || found->second.region.empty()) return options_.region;
    return found->second.region;
  }
  bool HasAnswered(const std::string& bucket) const {
    absl::MutexLock lock(&mu_);
    const auto found = buckets_.find(bucket);
    return found != buckets_.end() && found->second.has_answered;
  }
  absl::Duration LongestPause(int attempt) const {
    return std::min(options_.max_pause,
                    options_.first_pause * (int64_t{1} << std::min(attempt - 1, 30)));
  }
  void Sleep(absl::Duration pause) const {
    if (environment_.sleep) {
      environment_.sleep(pause);
    } else {
      absl::SleepFor(pause);
    }
  }

  const S3Options options_;
  const S3Environment environment_;
  const std::unique_ptr<HttpTransport> transport_;
  const std::unique_ptr<CredentialsProvider> credentials_;
  const SystemClock system_clock_;
  const Clock* const clock_;
  Places places_;
  std::string unique_;
  std::atomic<int64_t> next_id_{0};

  const int64_t full_budget_;
  mutable absl::Mutex mu_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  int64_t budget_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> turns_ ABSL_GUARDED_BY(mu_);

  ThreadPool pool_;  // last: its threads use the rest
};

class HttpS3Connection::HeldTurn final : public Turn {
 public:
  HeldTurn(HttpS3Connection* connection, std::string name)
      : connection_(connection), name_(std::move(name)) {}
  ~HeldTurn() override {
    absl::MutexLock lock(&connection_->mu_);
    connection_->turns_.erase(name_);
  }

 private:
  HttpS3Connection* const connection_;
  const std::string name_;
};

std::unique_ptr<S3Connection::Turn> HttpS3Connection::TakeTurn(const std::string& name) {
  absl::MutexLock lock(&mu_);
  const auto is_free = [this, &name]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !turns_.contains(name); };
  mu_.Await(absl::Condition(&is_free));
  turns_.insert(name);
  return std::make_unique<HeldTurn>(this, name);
}

// With what the status is about in front.
absl::Status HttpS3Connection::Fail(const absl::Status& status, const S3Call& call) const {
  return WithMessage(
      status, absl::StrCat("s3://", call.bucket, call.key.empty() ? "" : "/", call.key, ": ",
                           call.operation, " at ", EndpointOf(call, RegionOf(call.bucket)), ": ",
                           status.message()));
}

HttpRequest HttpS3Connection::MakeRequest(const S3Call& call, const Progress& progress) const {
  const BucketAddress address = AddressOf(options_, progress.region, call.bucket);
  RequestToSign to_sign;
  to_sign.method = call.method;
  to_sign.host = address.host;
  to_sign.escaped_path = address.path;
  if (!call.key.empty() || address.path.empty()) {
    absl::StrAppend(&to_sign.escaped_path, "/", UriEscape(call.key, true));
  }
  to_sign.canonical_query = CanonicalQuery(call.query);
  to_sign.headers = call.headers;
  to_sign.payload_sha256 = progress.payload_sha256;

  HttpRequest request;
  request.method = call.method;
  request.url = absl::StrCat(address.scheme, address.host, to_sign.escaped_path,
                             to_sign.canonical_query.empty() ? "" : "?", to_sign.canonical_query);
  request.headers = call.headers;
  SignatureScope scope;
  scope.region = progress.region;
  for (HttpHeader& header : Sign(to_sign, progress.used, scope, clock_->Wall())) {
    request.headers.push_back(std::move(header));
  }
  request.body = call.body;
  request.into = call.into;
  request.arrived = call.arrived;
  request.max_body_bytes = std::max(call.max_body_bytes, kMaxErrorBytes);
  request.connect_timeout = options_.connect_timeout;
  request.stall_timeout = options_.stall_timeout;
  request.timeout = call.timeout;
  request.stop = call.stop;
  return request;
}

HttpResponse HttpS3Connection::SendOnce(const S3Call& call, const Progress& progress, int attempt) {
  const HttpRequest request = MakeRequest(call, progress);
  const absl::Duration start = clock_->Monotonic();
  HttpResponse response = transport_->Send(request);
  if (environment_.observer != nullptr) {
    S3Exchange exchange;
    exchange.operation = call.operation;
    exchange.http_status = response.status;
    exchange.transport = response.transport.code();
    exchange.attempt = attempt;
    exchange.latency = clock_->Monotonic() - start;
    exchange.sent_bytes = static_cast<int64_t>(call.body.size());
    exchange.received_bytes = response.into_bytes + static_cast<int64_t>(response.body.size());
    environment_.observer->OnExchange(exchange);
  }
  return response;
}

S3Answer HttpS3Connection::Exchange(S3Call call) {
  S3Answer answer;
  Progress progress;
  progress.payload_sha256 = options_.unsigned_payload  ? kUnsignedPayload
                            : call.body_sha256.empty() ? Sha256Hex(call.body)
                                                       : call.body_sha256;
  for (;;) {
    Next next = Next::kReturn;
    {
      places_.Take();
      const absl::Cleanup give_back = [this] { places_.GiveBack(); };
      if (call.stop != nullptr && *call.stop) {
        answer.status = Fail(absl::CancelledError("stopped"), call);
        return answer;
      }
      if (call.gate) answer.status = call.gate();
      if (!answer.status.ok()) return answer;
      absl::StatusOr<AwsCredentials> credentials = credentials_->Get();
      if (!credentials.ok()) {
        answer.status = credentials.status();
        return answer;
      }
      progress.used = *std::move(credentials);
      progress.region = RegionOf(call.bucket);
      progress.retry_after = absl::ZeroDuration();
      answer.response = SendOnce(call, progress, ++answer.attempts);
      answer.error = S3Error();
      next = Judge(&call, &progress, &answer);
    }
    if (next == Next::kReturn) return answer;
    if (next == Next::kPauseAndRepeat) {
      if (!MayRetry(answer)) {
        answer.status =
            Fail(absl::UnavailableError(absl::StrCat("gave up after ", answer.attempts,
                                                     " attempts: ", answer.status.message())),
                 call);
        return answer;
      }
      Pause(answer.attempts, progress.retry_after, call.stop);
    }
    answer.status = absl::OkStatus();
  }
}

bool HttpS3Connection::MayRetry(const S3Answer& answer) {
  if (answer.attempts >= options_.max_attempts) return false;
  absl::MutexLock lock(&mu_);
  if (budget_ < kRetryCost) return false;
  budget_ -= kRetryCost;
  return true;
}

void HttpS3Connection::Pause(int attempt, absl::Duration retry_after,
                             const std::atomic<bool>* stop) {
  absl::Duration pause;
  {
    absl::MutexLock lock(&mu_);
    // The server's wish is spread as well: it said the same to everybody.
    const absl::Duration spread =
        retry_after > absl::ZeroDuration() ? options_.first_pause : LongestPause(attempt);
    pause = spread * std::uniform_real_distribution<double>(0, 1)(random_);
  }
  pause = std::min(options_.max_pause, retry_after + pause);
  while (stop != nullptr && !*stop && pause > kStopPoll) {
    Sleep(kStopPoll);
    pause -= kStopPoll;
  }
  if (stop == nullptr || !*stop) Sleep(pause);
}

// Sets answer->status; with kPauseAndRepeat its message is the cause.
HttpS3Connection::Next HttpS3Connection::Judge(S3Call* call, Progress* progress, S3Answer* answer) {
  const HttpResponse& response = answer->response;
  if (response.status / 100 == 2) {
    answer->status = call->accept ? call->accept(response, call) : absl::OkStatus();
    if (answer->status.ok()) answer->status = response.transport;
    if (absl::IsUnavailable(answer->status)) {
      answer->in_doubt = true;
      return Next::kPauseAndRepeat;
    }
    if (answer->status.ok()) {
      absl::MutexLock lock(&mu_);
      buckets_[call->bucket].has_answered = true;
      // A repetition that helped is given back whole: the store is up again.
      const int64_t gain = answer->attempts > 1 ? kRetryCost : kSuccessGain;
      budget_ = std::min(full_budget_, budget_ + gain);
      return Next::kReturn;
    }
    answer->status = Fail(answer->status, *call);
    return Next::kReturn;
  }
  answer->status = response.transport;
  if (absl::IsUnavailable(answer->status)) {
    answer->in_doubt = true;
    return Next::kPauseAndRepeat;
  }
  if (response.status == 0) {
    answer->status = Fail(answer->status, *call);
    return Next::kReturn;
  }
  return JudgeRefusal(*call, progress, answer);
}

// Asks as a GET what a HEAD was refused for. False: the GET was served, so the reason has passed.
bool HttpS3Connection::LearnReason(const S3Call& call, const Progress& progress, S3Answer* answer) {
  S3Call why = call;
  why.method = "GET";
  why.operation = "GetObject";
  why.headers.push_back({"range", "bytes=0-0"});
  const HttpResponse response = SendOnce(why, progress, answer->attempts);
  // An empty object has no first byte.
  if (response.status / 100 == 2 || response.status == 416) return false;
  const auto error = ParseS3Error(response.body);
  if (error.ok()) answer->error = *error;
  if (response.status != 0) answer->response = response;
  return true;
}

HttpS3Connection::Next HttpS3Connection::JudgeRefusal(const S3Call& call, Progress* progress,
                                                      S3Answer* answer) {
  const auto parsed = ParseS3Error(answer->response.body);
  if (parsed.ok()) answer->error = *parsed;
  const int head_status = call.method == "HEAD" ? answer->response.status : 0;
  if (head_status == 400 || head_status == 403 ||
      (head_status == 404 && !HasAnswered(call.bucket))) {
    if (!LearnReason(call, *progress, answer)) {
      answer->status = absl::UnavailableError(
          absl::StrCat("HTTP ", head_status, " for HEAD, while GET is served"));
      return Next::kPauseAndRepeat;
    }
  }
  const HttpResponse& response = answer->response;
  const S3Error& error = answer->error;
  if (error.code == "NoSuchKey") {
    absl::MutexLock lock(&mu_);
    buckets_[call.bucket].has_answered = true;
  }

  const std::string region = BucketRegion(response, error);
  if (!region.empty() && region != progress->region) {
    return JudgeRegion(call, region, progress, answer);
  }
  if (SaysExpired(error.code) && !progress->refreshed && credentials_->Refresh(progress->used)) {
    progress->refreshed = true;
    return Next::kRepeat;
  }
  answer->status = error.code == "RequestTimeTooSkewed"
                       ? Skewed(response)
                       : WhatItMeans(call.bucket, response.status, error);
  if (!absl::IsUnavailable(answer->status)) {
    answer->status = Fail(answer->status, call);
    return Next::kReturn;
  }
  if (response.status >= 500) answer->in_doubt = true;
  int64_t seconds = 0;
  const std::string* retry_after = response.Header("retry-after");
  if (retry_after != nullptr && absl::SimpleAtoi(*retry_after, &seconds) && seconds > 0) {
    progress->retry_after = absl::Seconds(seconds);
  }
  return Next::kPauseAndRepeat;
}

HttpS3Connection::Next HttpS3Connection::JudgeRegion(const S3Call& call, const std::string& region,
                                                     Progress* progress, S3Answer* answer) {
  answer->status = Fail(absl::FailedPreconditionError(absl::StrCat(
                            "the bucket is in region ", Printable(region), ", asked in ",
                            progress->region, "; want that region, or the endpoint that has it")),
                        call);
  if (!options_.endpoint.empty() || progress->moved) return Next::kReturn;
  // What a server says becomes part of a host name.
  if (!std::all_of(region.begin(), region.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
      })) {
    return Next::kReturn;
  }
  progress->moved = true;
  absl::MutexLock lock(&mu_);
  Bucket& bucket = buckets_[call.bucket];
  if (bucket.region.empty()) bucket.region = region;
  // Another request may have learned it while this one was under way.
  return bucket.region == region ? Next::kRepeat : Next::kReturn;
}

absl::Status HttpS3Connection::Skewed(const HttpResponse& response) const {
  const absl::Time here = clock_->Wall();
  std::string what = absl::StrCat("RequestTimeTooSkewed: the clock here says ",
                                  absl::FormatTime(here, absl::UTCTimeZone()));
  const std::string* date = response.Header("date");
  absl::Time there;
  std::string why;
  if (date != nullptr && absl::ParseTime("%a, %d %b %Y %H:%M:%S GMT", *date, &there, &why)) {
    absl::StrAppend(&what, ", the server's ", absl::FormatTime(there, absl::UTCTimeZone()), ", ",
                    absl::ToInt64Seconds(absl::AbsDuration(here - there)), " s apart");
  }
  return absl::FailedPreconditionError(absl::StrCat(what, "; set the clock"));
}

bool HttpS3Connection::HoldsSecret(const std::string& text) const {
  if (absl::StrContains(text, "Signature=") || absl::StrContains(text, "Credential=")) return true;
  const auto credentials = credentials_->Get();
  if (!credentials.ok()) return false;
  const auto holds = [&](const std::string& part) {
    return !part.empty() && absl::StrContains(text, part);
  };
  return holds(credentials->access_key_id) || holds(credentials->secret_access_key) ||
         holds(credentials->session_token);
}

// UNAVAILABLE: to be repeated. Names neither object nor operation.
absl::Status HttpS3Connection::WhatItMeans(const std::string& bucket, int status,
                                           const S3Error& error) const {
  const std::string& code = error.code;
  std::string what = absl::StrCat("HTTP ", status);
  if (!code.empty()) absl::StrAppend(&what, " ", Printable(code));
  // A server or proxy that repeats the request's headers would put secrets into logs.
  if (!error.message.empty() && !HoldsSecret(error.message)) {
    absl::StrAppend(&what, ": ", Printable(error.message));
  }
  if (code == "NoSuchBucket") {
    return absl::NotFoundError(absl::StrCat("no bucket ", bucket, " (", what, ")"));
  }
  if (SaysExpired(code)) {
    return absl::FailedPreconditionError(
        absl::StrCat("credentials expired or unknown, and no others found: ", what));
  }
  if (IsRetryable(code) || (status != 200 && IsRetryable(status))) {
    return absl::UnavailableError(what);
  }
  if (status == 404 || code == "NoSuchKey") return absl::NotFoundError(what);
  if (status == 507 || code == "QuotaExceeded") return NoSpaceError(what);
  if (code == "KeyTooLongError" || code == "EntityTooLarge")
    return absl::InvalidArgumentError(what);
  if (code == "InvalidPart" || code == "InvalidPartOrder") return absl::DataLossError(what);
  if (status / 100 == 3) {
    absl::StrAppend(&what, "; redirected to ",
                    error.endpoint.empty() ? "an unnamed endpoint" : Printable(error.endpoint));
  }
  return absl::FailedPreconditionError(what);
}

}  // namespace

std::shared_ptr<S3Connection> MakeS3Connection(const S3Options& options,
                                               std::unique_ptr<HttpTransport> transport,
                                               std::unique_ptr<CredentialsProvider> credentials,
                                               S3Environment environment) {
  SP_CHECK(options.max_connections > 0 && options.max_attempts > 0);
  return std::make_shared<HttpS3Connection>(options, std::move(transport), std::move(credentials),
                                            std::move(environment));
}

absl::StatusOr<std::shared_ptr<S3Connection>> ConnectS3(const S3Options& options,
                                                        S3Environment environment) {
  if (options.max_connections < 1 || options.max_attempts < 1 || options.upload_part_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "S3: ", options.max_connections, " connections, ", options.max_attempts, " attempts, ",
        options.upload_part_bytes, " bytes in a part: want at least 1 of each"));
  }
  return MakeS3Connection(options, MakeCurlTransport(options),
                          MakeCredentialsProvider(options.credentials), std::move(environment));
}

}  // namespace shardprep
