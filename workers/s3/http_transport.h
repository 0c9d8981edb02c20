// The seam below S3: one HTTP exchange. Signing, retries, redirects and what answers mean are above
// it, so each of them can be tested with a transport of the test's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace shardprep {

struct HttpHeader {
  std::string name;  // lower case
  std::string value;
};

struct HttpRequest {
  std::string method;  // GET, HEAD, PUT, POST or DELETE
  std::string url;     // scheme://host[:port]/path?query, escaped; sent byte for byte
  // Sent as they are; `host` replaces the one of the URL. PUT and POST get a content-length;
  // nothing else is added.
  std::vector<HttpHeader> headers;
  // The request's body; must stay as it is until Send() returns. Empty but for PUT and POST.
  absl::Span<const uint8_t> body;
  // When not empty, the body of a 2xx answer goes here, and one that is longer is an error. Any
  // other body goes to HttpResponse::body.
  absl::Span<uint8_t> into;
  // Called by Send(), on its thread, whenever more of `into` is filled, with how many bytes of it
  // are. May be empty.
  std::function<void(int64_t into_bytes)> arrived;
  // Bound on HttpResponse::body; a longer one is an error.
  int64_t max_body_bytes = int64_t{1} << 20;
  // Until the request can be sent: name, TCP and TLS together.
  absl::Duration connect_timeout = absl::Seconds(10);
  // From then on, no byte in either direction for this long ends the exchange. That includes the
  // wait for the first byte of the answer. Found out within another second.
  absl::Duration stall_timeout = absl::Seconds(20);
  // The whole exchange, with any wait for a connection of the transport's bound. Zero or less: the
  // request is not sent.
  absl::Duration timeout = absl::InfiniteDuration();
  // Once true, the exchange ends as CANCELLED, within about a second. May be null.
  const std::atomic<bool>* stop = nullptr;
};

struct HttpResponse {
  // OK when a whole answer arrived, whatever its status code: the body has the announced length, or
  // ended as a chunked body must. (A body without either ends where the connection does.)
  // UNAVAILABLE: no connection, or it was cut, stalled or timed out, and whether the request was
  // carried out is not known. FAILED_PRECONDITION: the peer's certificate is not trusted.
  // RESOURCE_EXHAUSTED: a body, or the headers, longer than their bound. INVALID_ARGUMENT: no such
  // request can be sent. In all cases the fields below hold what had arrived. Messages name method
  // and URL without its query.
  absl::Status transport;
  int status = 0;  // HTTP status code, 0 when none arrived
  std::vector<HttpHeader> headers;
  std::string body;
  int64_t into_bytes = 0;  // bytes that arrived in `into`

  // The value of the first header of that lower-case name; nullptr when there is none.
  const std::string* Header(const std::string& name) const {
    for (const HttpHeader& header : headers) {
      if (header.name == name) return &header.value;
    }
    return nullptr;
  }
};

// Thread safe; calls block. Follows no redirects, decodes nothing, retries nothing.
class HttpTransport {
 public:
  virtual ~HttpTransport() = default;
  virtual HttpResponse Send(const HttpRequest& request) = 0;
};

}  // namespace shardprep
