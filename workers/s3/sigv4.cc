#include "workers/s3/sigv4.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

constexpr char kAlgorithm[] = "AWS4-HMAC-SHA256";

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// HMAC-SHA-256 (RFC 2104).
Sha256Bytes Hmac(absl::Span<const uint8_t> key, const std::string& message) {
  Sha256Bytes mac = {};
  unsigned int size = 0;
  SP_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), AsBytes(message).data(),
                message.size(), mac.data(), &size) != nullptr);
  SP_CHECK(size == mac.size());
  return mac;
}

// A header's value as it is signed: no spaces around it, one in place of several inside.
std::string CanonicalValue(const std::string& value) {
  std::string canonical = value;
  absl::RemoveExtraAsciiWhitespace(&canonical);
  return canonical;
}

// "name:value" lines sorted by name, and the names joined by `;`. Headers of one name are one line
// with the values in the order in which they are sent.
struct CanonicalHeaders {
  std::string lines;
  std::string names;
};

CanonicalHeaders CanonicalizeHeaders(const std::vector<HttpHeader>& headers) {
  std::map<std::string, std::string> values;
  for (const HttpHeader& header : headers) {
    const auto [entry, is_first] = values.try_emplace(header.name, CanonicalValue(header.value));
    if (!is_first) absl::StrAppend(&entry->second, ",", CanonicalValue(header.value));
  }
  CanonicalHeaders canonical;
  for (const auto& [name, value] : values) {
    absl::StrAppend(&canonical.lines, name, ":", value, "\n");
    absl::StrAppend(&canonical.names, canonical.names.empty() ? "" : ";", name);
  }
  return canonical;
}

std::string AmzDate(absl::Time now) {
  return absl::FormatTime("%Y%m%dT%H%M%SZ", now, absl::UTCTimeZone());
}

}  // namespace

std::string UriEscape(absl::string_view text, bool keep_slash) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string escaped;
  escaped.reserve(text.size());
  for (const char c : text) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_' ||
        c == '~' || (c == '/' && keep_slash)) {
      escaped += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      escaped += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return escaped;
}

std::string CanonicalQuery(const QueryParameters& parameters) {
  QueryParameters escaped;
  escaped.reserve(parameters.size());
  for (const auto& [name, value] : parameters) {
    escaped.emplace_back(UriEscape(name, false), UriEscape(value, false));
  }
  std::sort(escaped.begin(), escaped.end());
  std::string query;
  for (const auto& [name, value] : escaped) {
    absl::StrAppend(&query, query.empty() ? "" : "&", name, "=", value);
  }
  return query;
}

SignatureSteps SignExactly(const RequestToSign& request, const std::vector<HttpHeader>& headers,
                           const AwsCredentials& credentials, const SignatureScope& scope,
                           absl::Time now) {
  const CanonicalHeaders canonical = CanonicalizeHeaders(headers);
  const std::string date = AmzDate(now);
  const std::string day = date.substr(0, 8);
  const std::string credential_scope =
      absl::StrCat(day, "/", scope.region, "/", scope.service, "/aws4_request");

  SignatureSteps steps;
  steps.canonical_request = absl::StrCat(
      request.method, "\n", request.escaped_path, "\n", request.canonical_query, "\n",
      canonical.lines, "\n", absl::StrCat(canonical.names, "\n", request.payload_sha256));
  steps.string_to_sign = absl::StrCat(kAlgorithm, "\n", date, "\n", credential_scope, "\n",
                                      Sha256Hex(steps.canonical_request));

  Sha256Bytes key = Hmac(AsBytes(absl::StrCat("AWS4", credentials.secret_access_key)), day);
  for (const std::string& part : {scope.region, scope.service, std::string("aws4_request")}) {
    key = Hmac(key, part);
  }
  steps.authorization = absl::StrCat(kAlgorithm, " Credential=", credentials.access_key_id, "/",
                                     credential_scope, ", SignedHeaders=", canonical.names,
                                     ", Signature=", HexEncode(Hmac(key, steps.string_to_sign)));
  return steps;
}

std::vector<HttpHeader> Sign(const RequestToSign& request, const AwsCredentials& credentials,
                             const SignatureScope& scope, absl::Time now) {
  std::vector<HttpHeader> added = {{"host", request.host},
                                   {"x-amz-content-sha256", request.payload_sha256},
                                   {"x-amz-date", AmzDate(now)}};
  if (!credentials.session_token.empty()) {
    added.push_back({"x-amz-security-token", credentials.session_token});
  }
  std::vector<HttpHeader> all = request.headers;
  all.insert(all.end(), added.begin(), added.end());
  added.push_back(
      {"authorization", SignExactly(request, all, credentials, scope, now).authorization});
  return added;
}

}  // namespace shardprep
