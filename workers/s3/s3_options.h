// How S3 stores are reached: everything that flags and the environment can say.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "workers/listing.h"
#include "workers/s3/credentials.h"

namespace shardprep {

struct S3Options {
  // http(s)://host[:port], lower case, without a default port; empty: DefaultS3Endpoint(region).
  std::string endpoint;
  std::string region = "us-east-1";
  // Bucket in the path (endpoint/bucket/key) or in the host name (bucket.endpoint/key).
  enum class Addressing { kPath, kVirtualHost };
  Addressing addressing = Addressing::kPath;
  std::string ca_bundle;  // PEM file; empty: the system's
  // Of the endpoint's scheme, as curl writes it; empty: none. May hold a password.
  std::string proxy;
  // Hosts that are reached without it, as curl writes them.
  std::string no_proxy;
  // Sends payload bytes without hashing them first. Only over TLS.
  bool unsigned_payload = false;
  CredentialsSource credentials;

  // Bytes of an upload part at least; grows with the object (at most 10,000 parts).
  int64_t upload_part_bytes = int64_t{16} << 20;
  // Objects that a listing goes through, at most.
  int64_t max_listed_entries = kMaxListedEntries;
  // Exchanges in flight at a time, at most.
  int max_connections = 32;
  // Attempts at one exchange, and the pauses between them: full jitter, capped.
  int max_attempts = 6;
  absl::Duration first_pause = absl::Milliseconds(100);
  absl::Duration max_pause = absl::Seconds(10);
  absl::Duration connect_timeout = absl::Seconds(10);
  absl::Duration stall_timeout = absl::Seconds(20);
};

// Reads one environment variable; nothing when it is not set. An empty value counts as not set.
using ReadEnvironment = std::function<std::optional<std::string>(const std::string& name)>;

// What flags state; an empty value leaves the choice to the environment.
struct S3Flags {
  std::string endpoint;  // else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL
  // Else AWS_REGION, AWS_DEFAULT_REGION; else the one in the name of an Amazon endpoint
  // (s3.<region>.amazonaws.com and its dual-stack, FIPS and VPC forms); else us-east-1. A stated
  // region is never replaced by the one of the endpoint.
  std::string region;
  std::string addressing;  // "path" or "virtual"; else path with an endpoint, virtual without
  std::string ca_bundle;   // else AWS_CA_BUNDLE
  std::string payload;     // "signed" or "unsigned"; else signed
};

// The proxy is that of https_proxy or HTTPS_PROXY for https endpoints and of http_proxy for http
// ones (as curl has it, HTTP_PROXY is not looked at), with no_proxy or NO_PROXY; none for a
// loopback endpoint. Credentials: credentials.h; "~/" in front of a file's name is HOME.
//
// INVALID_ARGUMENT naming the flag or variable: a malformed endpoint (also one with a path, a query
// or a user), region, addressing or payload, bucket names in front of an IP address, an unsigned
// payload without TLS.
absl::StatusOr<S3Options> MakeS3Options(const S3Flags& flags, const ReadEnvironment& environment);

// The public endpoint of a region: https://s3.<region>.amazonaws.com, with .cn for China's.
std::string DefaultS3Endpoint(const std::string& region);

}  // namespace shardprep
