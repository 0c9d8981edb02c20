// AWS Signature Version 4 for S3. Pure: time and credentials are arguments.
//
// Source: "Signature Calculations for the Authorization Header", Amazon S3 API Reference.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "workers/s3/credentials.h"
#include "workers/s3/http_transport.h"

namespace shardprep {

// RFC 3986 escaping as SigV4 wants it: everything but A-Z a-z 0-9 - . _ ~ becomes %XX, upper case.
// `/` stays when `keep_slash`.
std::string UriEscape(absl::string_view text, bool keep_slash);

// Query parameters by name, unescaped.
using QueryParameters = std::vector<std::pair<std::string, std::string>>;

// "a=1&b=" with names sorted by escaped bytes, equal names by their values, as it is signed and
// sent. A parameter without a value keeps its "=".
std::string CanonicalQuery(const QueryParameters& parameters);

inline constexpr char kUnsignedPayload[] = "UNSIGNED-PAYLOAD";

struct SignatureScope {
  std::string region;
  std::string service = "s3";
};

// What a signature covers.
struct RequestToSign {
  std::string method;
  std::string host;          // value of the Host header, with the port when it is not the default
  std::string escaped_path;  // UriEscape(path, true), starts with `/`; signed as it stands
  std::string canonical_query;      // CanonicalQuery()
  std::vector<HttpHeader> headers;  // further headers that are sent and signed; names lower case
  std::string payload_sha256;       // hexadecimal, or kUnsignedPayload
};

// The headers to send besides `request.headers`: host, x-amz-date, x-amz-content-sha256,
// x-amz-security-token when there is one, authorization.
std::vector<HttpHeader> Sign(const RequestToSign& request, const AwsCredentials& credentials,
                             const SignatureScope& scope, absl::Time now);

// The steps of a signature. A server that refuses one (SignatureDoesNotMatch) says which canonical
// request and string it has expected.
struct SignatureSteps {
  std::string canonical_request;
  std::string string_to_sign;
  std::string authorization;  // value of the header
};

// Signs exactly `headers`, of which host and x-amz-date must be two, and adds none; `request.host`
// and `request.headers` are not looked at. Sign() is this over the headers that S3 wants.
SignatureSteps SignExactly(const RequestToSign& request, const std::vector<HttpHeader>& headers,
                           const AwsCredentials& credentials, const SignatureScope& scope,
                           absl::Time now);

}  // namespace shardprep
