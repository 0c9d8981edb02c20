// One exchange:
//   1. Take a handle of the pool; over the bound wait for one. A handle owns at most one
//   connection,
//      so the one that was last used for the same origin is preferred, and the newest of those: its
//      connection is the least likely to have been closed meanwhile.
//   2. Set everything anew, and let libcurl carry it out on this thread. It calls back with lines
//   of
//      the header (the status line first, so that a body's place is known), pieces of the body, and
//      about once a second otherwise.
//   3. Give the handle back, or end it after an error: its connection is closed then, and it may
//      still hold on to what the exchange began. After a name that did not resolve, libcurl 7.88
//      refuses to have the size of its buffer set.
#include "workers/s3/curl_transport.h"

#include <curl/curl.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int64_t kBufferBytes = int64_t{256} << 10;
constexpr int64_t kMaxHeaderBytes = int64_t{256} << 10;
// Servers and the middleboxes before them drop connections that idle longer.
constexpr int64_t kMaxIdleSeconds = 30;

using SteadyClock = std::chrono::steady_clock;

absl::Duration Since(SteadyClock::time_point start) {
  return absl::FromChrono(SteadyClock::now() - start);
}

// libcurl and the TLS library below it leave SIGPIPE to the application. Keeps it from this thread,
// and swallows one that a write of ours has raised.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~SigpipeBlock() {
    const timespec no_wait = {};
    if (!was_pending_) sigtimedwait(&sigpipe_, nullptr, &no_wait);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

bool HasBody(const HttpRequest& request) {
  return request.method == "PUT" || request.method == "POST";
}

std::string WithoutQuery(const std::string& url) { return url.substr(0, url.find('?')); }

// scheme://host[:port]
std::string OriginOf(const std::string& url) {
  const size_t host = url.find("://") + 3;
  return url.substr(0, url.find_first_of("/?", host));
}

// A line break in a name, value or URL would let what comes after it pass for a header of its own.
absl::Status CheckRequest(const HttpRequest& request) {
  const auto refuse = [&request](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.method, " ", WithoutQuery(request.url), ": ", what));
  };
  const bool known = HasBody(request) || request.method == "GET" || request.method == "HEAD" ||
                     request.method == "DELETE";
  if (!known) return refuse("want GET, HEAD, PUT, POST or DELETE");
  if (!HasBody(request) && !request.body.empty()) return refuse("has a body, want none");
  if (!absl::StartsWith(request.url, "http://") && !absl::StartsWith(request.url, "https://")) {
    return refuse("want http:// or https://");
  }
  for (const char c : request.url) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) return refuse("URL is not escaped");
  }
  for (const HttpHeader& header : request.headers) {
    for (const char c : header.name) {
      if (!absl::ascii_isgraph(static_cast<unsigned char>(c)) || c == ':' || c == ';') {
        return refuse("a header's name is not a token");
      }
    }
    if (header.value.find_first_of(std::string("\r\n\0", 3)) != std::string::npos) {
      return refuse(absl::StrCat("header ", header.name, " holds a line break"));
    }
  }
  return absl::OkStatus();
}

// Frees itself; grows at its end.
class HeaderList {
 public:
  HeaderList() = default;
  ~HeaderList() { curl_slist_free_all(list_); }
  HeaderList(const HeaderList&) = delete;
  HeaderList& operator=(const HeaderList&) = delete;

  bool Append(const std::string& line) {
    curl_slist* const longer = curl_slist_append(list_, line.c_str());
    if (longer != nullptr) list_ = longer;
    return longer != nullptr;
  }
  curl_slist* list() const { return list_; }

 private:
  curl_slist* list_ = nullptr;
};

// What the callbacks of one exchange share. They run on the thread of Send().
struct Exchange {
  explicit Exchange(const HttpRequest& its_request) : request(its_request) {}

  const HttpRequest& request;
  HttpResponse response;
  int64_t sent_bytes = 0;    // of the body, given to libcurl
  int64_t header_bytes = 0;  // of the answer
  bool header_is_whole = false;
  int times_sent = 0;  // how often libcurl has set about sending the request
  SteadyClock::time_point last_move;
  curl_off_t moved_bytes = 0;
  // Why a callback ended the exchange; libcurl only says that one did.
  absl::Status ended_by_us;
  char error_text[CURL_ERROR_SIZE] = "";
  HeaderList headers;  // of the request

  bool goes_into() const {
    return !request.into.empty() && response.status >= 200 && response.status < 300;
  }
  int64_t body_bound() const {
    return goes_into() ? static_cast<int64_t>(request.into.size()) : request.max_body_bytes;
  }
  absl::Status Error(absl::StatusCode code, absl::string_view what) const {
    return absl::Status(code,
                        absl::StrCat(request.method, " ", WithoutQuery(request.url), ": ", what));
  }
  absl::Status TooLong(absl::string_view length) const {
    return Error(absl::StatusCode::kResourceExhausted,
                 absl::StrCat("HTTP status ", response.status, " with a body of ", length,
                              " bytes, want at most ", body_bound()));
  }
};

// An announced body that is too long is refused before it moves.
bool AcceptAnnouncedLength(Exchange& exchange) {
  const HttpResponse& response = exchange.response;
  if (exchange.request.method == "HEAD" || response.status < 200 || response.status == 204 ||
      response.status == 304) {
    return true;
  }
  const std::string* const length = response.Header("content-length");
  int64_t bytes = 0;
  if (length == nullptr || !absl::SimpleAtoi(*length, &bytes) || bytes <= exchange.body_bound()) {
    return true;
  }
  exchange.ended_by_us = exchange.TooLong(*length);
  return false;
}

// One whole line of the answer's header, or of a chunked body's trailer.
size_t OnHeader(const char* data, size_t size, size_t count, void* user) {
  auto& exchange = *static_cast<Exchange*>(user);
  HttpResponse& response = exchange.response;
  const size_t bytes = size * count;
  exchange.last_move = SteadyClock::now();
  exchange.header_bytes += static_cast<int64_t>(bytes);
  if (exchange.header_bytes > kMaxHeaderBytes) {
    exchange.ended_by_us =
        exchange.Error(absl::StatusCode::kResourceExhausted,
                       absl::StrCat("header of more than ", kMaxHeaderBytes, " bytes"));
    return 0;
  }
  const absl::string_view line = absl::StripAsciiWhitespace(absl::string_view(data, bytes));
  if (line.empty()) {
    exchange.header_is_whole = response.status >= 200;
    return AcceptAnnouncedLength(exchange) ? bytes : 0;
  }
  if (absl::StartsWith(line, "HTTP/")) {
    // Interim answers (1xx) come before the final one.
    response.headers.clear();
    const size_t space = line.find(' ');
    if (space == absl::string_view::npos ||
        !absl::SimpleAtoi(line.substr(space + 1, 3), &response.status)) {
      response.status = 0;
    }
    return bytes;
  }
  const size_t colon = line.find(':');
  if (colon == absl::string_view::npos) return bytes;
  response.headers.push_back({absl::AsciiStrToLower(line.substr(0, colon)),
                              std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)))});
  return bytes;
}

size_t OnBody(const char* data, size_t size, size_t count, void* user) {
  auto& exchange = *static_cast<Exchange*>(user);
  HttpResponse& response = exchange.response;
  const size_t bytes = size * count;
  const bool into = exchange.goes_into();
  exchange.last_move = SteadyClock::now();
  const int64_t filled = into ? response.into_bytes : static_cast<int64_t>(response.body.size());
  if (static_cast<int64_t>(bytes) > exchange.body_bound() - filled) {
    exchange.ended_by_us =
        exchange.TooLong(absl::StrCat(filled + static_cast<int64_t>(bytes), " or more"));
    return 0;
  }
  if (into) {
    std::memcpy(exchange.request.into.data() + filled, data, bytes);
    response.into_bytes += static_cast<int64_t>(bytes);
    if (exchange.request.arrived) exchange.request.arrived(response.into_bytes);
  } else {
    response.body.append(data, bytes);
  }
  return bytes;
}

size_t OnUpload(char* data, size_t size, size_t count, void* user) {
  auto& exchange = *static_cast<Exchange*>(user);
  const absl::Span<const uint8_t> rest =
      exchange.request.body.subspan(static_cast<size_t>(exchange.sent_bytes));
  const size_t bytes = std::min(size * count, rest.size());
  if (bytes > 0) std::memcpy(data, rest.data(), bytes);
  exchange.sent_bytes += static_cast<int64_t>(bytes);
  return bytes;
}

// libcurl rewinds a body before it sends a request again, which OnRequest() then refuses: without
// this it would fail with another error that says nothing about the cause.
int OnSeek(void* user, curl_off_t offset, int origin) {
  auto& exchange = *static_cast<Exchange*>(user);
  const bool inside =
      offset >= 0 && offset <= static_cast<curl_off_t>(exchange.request.body.size());
  if (origin != SEEK_SET || !inside) return CURL_SEEKFUNC_FAIL;
  exchange.sent_bytes = offset;
  return CURL_SEEKFUNC_OK;
}

// The connection is ready and the request is about to be sent.
int OnRequest(void* user, char* /*peer*/, char* /*own*/, int /*peer_port*/, int /*own_port*/) {
  auto& exchange = *static_cast<Exchange*>(user);
  exchange.last_move = SteadyClock::now();
  if (++exchange.times_sent == 1) return CURL_PREREQFUNC_OK;
  exchange.ended_by_us = exchange.Error(absl::StatusCode::kUnavailable,
                                        "the peer closed the kept connection without an answer");
  return CURL_PREREQFUNC_ABORT;
}

// Called whenever something has moved and about once a second. libcurl's own CURLOPT_LOW_SPEED_TIME
// counts whole seconds of an average over several, so it is late by up to five.
int OnProgress(void* user, curl_off_t /*down_total*/, curl_off_t down, curl_off_t /*up_total*/,
               curl_off_t up) {
  auto& exchange = *static_cast<Exchange*>(user);
  if (exchange.request.stop != nullptr && *exchange.request.stop) {
    exchange.ended_by_us = exchange.Error(absl::StatusCode::kCancelled, "stopped");
    return 1;
  }
  if (exchange.times_sent == 0) return 0;
  if (down + up != exchange.moved_bytes) {
    exchange.moved_bytes = down + up;
    exchange.last_move = SteadyClock::now();
  }
  if (Since(exchange.last_move) < exchange.request.stall_timeout) return 0;
  exchange.ended_by_us =
      exchange.Error(absl::StatusCode::kUnavailable,
                     absl::StrCat("stalled: nothing moved for ",
                                  absl::FormatDuration(exchange.request.stall_timeout), " after ",
                                  up, " bytes sent and ", down, " received"));
  return 1;
}

CURLcode FillHeaders(const HttpRequest& request, HeaderList* list) {
  // Names without a value keep libcurl from adding such headers of its own: no type that was not
  // asked for, and no waiting for a "100 Continue" that some servers never send.
  bool ok = list->Append("Accept:") && list->Append("Expect:");
  for (const HttpHeader& header : request.headers) {
    const bool empty = header.value.empty();
    ok = ok && list->Append(empty ? absl::StrCat(header.name, ";")
                                  : absl::StrCat(header.name, ": ", header.value));
  }
  return ok ? CURLE_OK : CURLE_OUT_OF_MEMORY;
}

// Sets options of a handle and keeps the first error.
class HandleOptions {
 public:
  explicit HandleOptions(CURL* handle) : handle_(handle) {}

  template <typename T>
  void Set(CURLoption option, T value) {
    if (first_error_ == CURLE_OK) first_error_ = curl_easy_setopt(handle_, option, value);
  }
  CURLcode first_error() const { return first_error_; }

 private:
  CURL* const handle_;
  CURLcode first_error_ = CURLE_OK;
};

// The type libcurl wants numbers in.
using CurlNumber = decltype(1L);

CurlNumber Milliseconds(absl::Duration duration) {
  const int64_t milliseconds =
      absl::ToInt64Milliseconds(absl::Ceil(duration, absl::Milliseconds(1)));
  return static_cast<CurlNumber>(std::clamp<int64_t>(milliseconds, 1, INT_MAX));
}

void SetConnection(const CurlTransportOptions& options, HandleOptions* handle) {
  handle->Set(CURLOPT_HTTP_VERSION, static_cast<CurlNumber>(CURL_HTTP_VERSION_1_1));
  handle->Set(CURLOPT_PROTOCOLS_STR, "http,https");
  handle->Set(CURLOPT_FOLLOWLOCATION, 0L);
  handle->Set(CURLOPT_NOSIGNAL, 1L);
  handle->Set(CURLOPT_TCP_NODELAY, 1L);
  handle->Set(CURLOPT_TCP_KEEPALIVE, 1L);
  handle->Set(CURLOPT_TCP_KEEPIDLE, 30L);
  handle->Set(CURLOPT_TCP_KEEPINTVL, 10L);
  handle->Set(CURLOPT_MAXCONNECTS, 1L);
  handle->Set(CURLOPT_MAXAGE_CONN, static_cast<CurlNumber>(kMaxIdleSeconds));
  handle->Set(CURLOPT_BUFFERSIZE, static_cast<CurlNumber>(kBufferBytes));
  handle->Set(CURLOPT_UPLOAD_BUFFERSIZE, static_cast<CurlNumber>(kBufferBytes));
  handle->Set(CURLOPT_SSL_VERIFYPEER, 1L);
  handle->Set(CURLOPT_SSL_VERIFYHOST, 2L);
  handle->Set(CURLOPT_SSLVERSION, static_cast<CurlNumber>(CURL_SSLVERSION_TLSv1_2));
  if (!options.ca_bundle.empty()) {
    handle->Set(CURLOPT_CAINFO, options.ca_bundle.c_str());
    // Else the system's directory of authorities would be trusted as well.
    handle->Set(CURLOPT_CAPATH, static_cast<const char*>(nullptr));
  }
  // Empty strings, too, keep libcurl from asking the environment.
  handle->Set(CURLOPT_PROXY, options.proxy.c_str());
  handle->Set(CURLOPT_NOPROXY, options.no_proxy.c_str());
  handle->Set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
}

void SetMethod(const HttpRequest& request, HandleOptions* handle) {
  if (request.method == "HEAD") {
    handle->Set(CURLOPT_NOBODY, 1L);
  } else if (HasBody(request)) {
    handle->Set(CURLOPT_UPLOAD, 1L);
    handle->Set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
  } else {
    handle->Set(CURLOPT_HTTPGET, 1L);
  }
  if (request.method == "POST" || request.method == "DELETE") {
    handle->Set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
}

void SetExchange(Exchange* exchange, absl::Duration timeout, HandleOptions* handle) {
  const HttpRequest& request = exchange->request;
  handle->Set(CURLOPT_URL, request.url.c_str());
  handle->Set(CURLOPT_PATH_AS_IS, 1L);
  handle->Set(CURLOPT_ERRORBUFFER, exchange->error_text);
  handle->Set(CURLOPT_CONNECTTIMEOUT_MS, Milliseconds(request.connect_timeout));
  if (timeout != absl::InfiniteDuration()) {
    handle->Set(CURLOPT_TIMEOUT_MS, Milliseconds(timeout));
  }
  handle->Set(CURLOPT_HEADERFUNCTION, &OnHeader);
  handle->Set(CURLOPT_HEADERDATA, exchange);
  handle->Set(CURLOPT_WRITEFUNCTION, &OnBody);
  handle->Set(CURLOPT_WRITEDATA, exchange);
  handle->Set(CURLOPT_READFUNCTION, &OnUpload);
  handle->Set(CURLOPT_READDATA, exchange);
  handle->Set(CURLOPT_SEEKFUNCTION, &OnSeek);
  handle->Set(CURLOPT_SEEKDATA, exchange);
  handle->Set(CURLOPT_PREREQFUNCTION, &OnRequest);
  handle->Set(CURLOPT_PREREQDATA, exchange);
  handle->Set(CURLOPT_NOPROGRESS, 0L);
  handle->Set(CURLOPT_XFERINFOFUNCTION, &OnProgress);
  handle->Set(CURLOPT_XFERINFODATA, exchange);
}

absl::StatusCode CodeOf(CURLcode code) {
  switch (code) {
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_SSL_CIPHER:
    case CURLE_NOT_BUILT_IN:
    case CURLE_UNKNOWN_OPTION:
      return absl::StatusCode::kFailedPrecondition;
    case CURLE_URL_MALFORMAT:
    case CURLE_BAD_FUNCTION_ARGUMENT:
      return absl::StatusCode::kInvalidArgument;
    // Whatever else may pass: names, connections, handshakes, cut bodies, memory, garbled answers.
    default:
      return absl::StatusCode::kUnavailable;
  }
}

absl::Status StatusOf(CURLcode code, const Exchange& exchange) {
  if (!exchange.ended_by_us.ok()) return exchange.ended_by_us;
  if (code == CURLE_OK) {
    // libcurl takes a connection's end for the end of the header as well.
    if (exchange.header_is_whole) return absl::OkStatus();
    return exchange.Error(absl::StatusCode::kUnavailable, "cut in the header of the answer");
  }
  const char* const text = curl_easy_strerror(code);
  return exchange.Error(CodeOf(code), exchange.error_text[0] == '\0'
                                          ? absl::string_view(text)
                                          : absl::string_view(exchange.error_text));
}

class CurlTransport : public HttpTransport {
 public:
  explicit CurlTransport(const CurlTransportOptions& options) : options_(options) {
    SP_CHECK(options.max_connections > 0);
    // Once in a process, before any other call and by one thread.
    static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
    usable_ = initialised == CURLE_OK;
  }

  ~CurlTransport() override {
    for (const Pooled& pooled : idle_) curl_easy_cleanup(pooled.handle);
  }

  HttpResponse Send(const HttpRequest& request) override {
    Exchange exchange(request);
    exchange.response.transport = CheckRequest(request);
    if (!exchange.response.transport.ok()) return std::move(exchange.response);
    const SteadyClock::time_point start = SteadyClock::now();
    std::optional<Pooled> pooled = Take(OriginOf(request.url), request.timeout);
    const absl::Duration left = request.timeout - Since(start);
    if (!pooled) {
      exchange.response.transport =
          exchange.Error(absl::StatusCode::kUnavailable, "timed out before it could be sent");
    } else if (pooled->handle == nullptr) {
      exchange.response.transport =
          exchange.Error(absl::StatusCode::kUnavailable, "libcurl cannot be set up");
    } else if (left <= absl::ZeroDuration()) {
      exchange.response.transport =
          exchange.Error(absl::StatusCode::kUnavailable, "timed out before it was sent");
    } else {
      const CURLcode code = Perform(pooled->handle, left, &exchange);
      exchange.response.transport = StatusOf(code, exchange);
      pooled->failed = code != CURLE_OK;
    }
    if (pooled) Return(*std::move(pooled));
    if (exchange.response.status < 200) {  // only interim answers
      exchange.response.status = 0;
      exchange.response.headers.clear();
    }
    return std::move(exchange.response);
  }

 private:
  struct Pooled {
    CURL* handle = nullptr;
    std::string origin;  // of its connection
    bool failed = false;
  };

  bool CanTake() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !idle_.empty() || handles_ < options_.max_connections;
  }

  // Nothing when the time is over before there is one to take.
  std::optional<Pooled> Take(const std::string& origin, absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(this, &CurlTransport::CanTake), timeout)) {
      return std::nullopt;
    }
    auto found = std::find_if(idle_.rbegin(), idle_.rend(),
                              [&](const Pooled& pooled) { return pooled.origin == origin; });
    if (found == idle_.rend() && handles_ < options_.max_connections) {
      ++handles_;
      return Pooled{.handle = usable_ ? curl_easy_init() : nullptr, .origin = origin};
    }
    // Without one for the origin, the one that has idled longest.
    const auto taken = found == idle_.rend() ? idle_.begin() : std::prev(found.base());
    Pooled pooled{.handle = taken->handle, .origin = origin};
    idle_.erase(taken);
    return pooled;
  }

  void Return(Pooled pooled) {
    // Forgets all options, not the connection: nothing may point to an exchange that is over.
    if (pooled.handle != nullptr) curl_easy_reset(pooled.handle);
    if (pooled.failed) {
      curl_easy_cleanup(pooled.handle);
      pooled.handle = nullptr;
    }
    absl::MutexLock lock(&mutex_);
    if (pooled.handle == nullptr) {
      --handles_;
    } else {
      idle_.push_back(std::move(pooled));
    }
  }

  CURLcode Perform(CURL* handle, absl::Duration timeout, Exchange* exchange) const {
    const CURLcode filled = FillHeaders(exchange->request, &exchange->headers);
    if (filled != CURLE_OK) return filled;
    HandleOptions set(handle);
    SetConnection(options_, &set);
    SetMethod(exchange->request, &set);
    SetExchange(exchange, timeout, &set);
    set.Set(CURLOPT_HTTPHEADER, exchange->headers.list());
    if (set.first_error() != CURLE_OK) return set.first_error();
    const SigpipeBlock no_sigpipe;
    return curl_easy_perform(handle);
  }

  const CurlTransportOptions options_;
  bool usable_ = false;
  absl::Mutex mutex_;
  std::vector<Pooled> idle_ ABSL_GUARDED_BY(mutex_);  // the one that idled longest first
  int handles_ ABSL_GUARDED_BY(mutex_) = 0;           // idle and in use
};

}  // namespace

std::unique_ptr<HttpTransport> MakeCurlTransport(const CurlTransportOptions& options) {
  return std::make_unique<CurlTransport>(options);
}

std::unique_ptr<HttpTransport> MakeCurlTransport(const S3Options& options) {
  return MakeCurlTransport(CurlTransportOptions{.ca_bundle = options.ca_bundle,
                                                .max_connections = options.max_connections,
                                                .proxy = options.proxy,
                                                .no_proxy = options.no_proxy});
}

}  // namespace shardprep
