#include "workers/s3/s3_options.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// A value and the flag or variable that it comes from, for messages.
struct Stated {
  std::string value;
  std::string by;
};

std::optional<std::string> NonEmpty(std::optional<std::string> value) {
  if (value && value->empty()) value.reset();
  return value;
}

// The flag's value, else that of the first variable that is set, else an empty one.
Stated FirstStated(const std::string& flag_value, const std::string& flag,
                   const std::vector<std::string>& variables, const ReadEnvironment& environment) {
  if (!flag_value.empty()) return {flag_value, flag};
  for (const std::string& variable : variables) {
    if (auto value = NonEmpty(environment(variable))) return {*std::move(value), variable};
  }
  return {};
}

absl::Status Refuse(const Stated& stated, absl::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat(stated.by, " is \"", stated.value, "\", want ", want));
}

bool IsIpv4(const std::string& host) {
  in_addr ignored = {};
  return ::inet_pton(AF_INET, host.c_str(), &ignored) == 1;
}

bool IsIpv6(const std::string& host) {
  in6_addr ignored = {};
  return ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

// Letters, digits, `-`, `_` and single dots inside. Container networks have host names with `_`.
bool IsHostName(const std::string& host) {
  if (host.empty() || host.size() > 253) return false;
  for (const absl::string_view label : absl::StrSplit(host, '.')) {
    if (label.empty() || label.front() == '-' || label.back() == '-') return false;
    for (const char c : label) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '_') return false;
    }
  }
  return true;
}

struct Endpoint {
  bool tls = false;
  std::string host;  // lower case, IPv6 without brackets
  bool ip_literal = false;
  std::string url;  // scheme://host[:port]
};

// Splits host[:port] or [IPv6][:port]; false when it is neither. `port` lies in `authority`.
bool SplitAuthority(const std::string& authority, Endpoint* endpoint, absl::string_view* port) {
  const bool bracketed = absl::StartsWith(authority, "[");
  const size_t host_end = bracketed ? authority.find(']') : authority.find(':');
  if (bracketed && host_end == std::string::npos) return false;
  endpoint->host = bracketed ? authority.substr(1, host_end - 1) : authority.substr(0, host_end);
  *port = authority;
  port->remove_prefix(std::min(authority.size(), bracketed ? host_end + 1 : host_end));
  endpoint->ip_literal = bracketed || IsIpv4(endpoint->host);
  if (bracketed ? !IsIpv6(endpoint->host) : !IsHostName(endpoint->host)) return false;
  return port->empty() || absl::ConsumePrefix(port, ":");
}

absl::StatusOr<Endpoint> ParseEndpoint(const Stated& stated) {
  std::string text = stated.value;
  if (text.find('@') != std::string::npos) {
    // The value may hold a password.
    return absl::InvalidArgumentError(
        absl::StrCat(stated.by, " holds a user, want http(s)://host[:port]"));
  }
  absl::Status malformed = Refuse(stated, "http(s)://host[:port]");
  absl::AsciiStrToLower(&text);
  absl::string_view rest = text;
  Endpoint endpoint;
  endpoint.tls = absl::ConsumePrefix(&rest, "https://");
  if (!endpoint.tls && !absl::ConsumePrefix(&rest, "http://")) return malformed;
  absl::ConsumeSuffix(&rest, "/");
  if (rest.find('/') != absl::string_view::npos) {
    return Refuse(stated, "http(s)://host[:port] without a path");
  }
  const std::string authority(rest);
  absl::string_view port_text;
  if (!SplitAuthority(authority, &endpoint, &port_text)) return malformed;
  const int default_port = endpoint.tls ? 443 : 80;
  int port = default_port;
  if (authority.back() == ':') return malformed;
  if (!port_text.empty() && (!absl::ascii_isdigit(static_cast<unsigned char>(port_text.front())) ||
                             !absl::SimpleAtoi(port_text, &port) || port < 1 || port > 65535)) {
    return Refuse(stated, "a port from 1 to 65535");
  }
  const bool ipv6 = authority.front() == '[';
  endpoint.url = absl::StrCat(endpoint.tls ? "https://" : "http://", ipv6 ? "[" : "", endpoint.host,
                              ipv6 ? "]" : "");
  if (port != default_port) absl::StrAppend(&endpoint.url, ":", port);
  return endpoint;
}

// Goes into signatures, and for Amazon into host names.
absl::Status CheckRegion(const Stated& stated) {
  const bool fits = stated.value.size() <= 63 && IsHostName(stated.value);
  return fits ? absl::OkStatus() : Refuse(stated, "a region such as us-east-1");
}

// The region in the name of an Amazon endpoint: [...].s3[-fips][.dualstack].<region>[.vpce]
// .amazonaws.com[.cn]. Nothing for other names, the global s3.amazonaws.com among them.
std::optional<std::string> RegionOfHost(const std::string& host) {
  absl::string_view name = host;
  absl::ConsumeSuffix(&name, ".cn");
  if (!absl::ConsumeSuffix(&name, ".amazonaws.com")) return std::nullopt;
  absl::ConsumeSuffix(&name, ".vpce");
  std::vector<std::string> labels = absl::StrSplit(name, '.');
  std::string region = labels.back();
  labels.pop_back();
  if (!labels.empty() && labels.back() == "dualstack") labels.pop_back();
  if (labels.empty() || (labels.back() != "s3" && labels.back() != "s3-fips")) return std::nullopt;
  return region;
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || absl::EndsWith(host, ".localhost") || host == "::1" ||
         (IsIpv4(host) && absl::StartsWith(host, "127."));
}

void SetProxy(const Endpoint& endpoint, const ReadEnvironment& environment, S3Options* options) {
  if (IsLoopback(endpoint.host)) return;
  const std::vector<std::string> variables =
      endpoint.tls ? std::vector<std::string>{"https_proxy", "HTTPS_PROXY"}
                   : std::vector<std::string>{"http_proxy"};
  options->proxy = FirstStated("", "", variables, environment).value;
  options->no_proxy = FirstStated("", "", {"no_proxy", "NO_PROXY"}, environment).value;
}

absl::Status SetAddressing(const std::string& flag, const std::optional<Endpoint>& endpoint,
                           S3Options* options) {
  const Stated stated{flag, "flag s3_addressing"};
  if (flag.empty()) {
    options->addressing =
        endpoint ? S3Options::Addressing::kPath : S3Options::Addressing::kVirtualHost;
  } else if (flag == "path") {
    options->addressing = S3Options::Addressing::kPath;
  } else if (flag == "virtual") {
    options->addressing = S3Options::Addressing::kVirtualHost;
    if (endpoint && endpoint->ip_literal) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag s3_addressing is \"virtual\", but the endpoint ", endpoint->url,
                       " is an address that no bucket name can stand in front of; want \"path\" "
                       "or a host name"));
    }
  } else {
    return Refuse(stated, "\"path\" or \"virtual\"");
  }
  return absl::OkStatus();
}

absl::Status SetPayload(const std::string& flag, const std::optional<Endpoint>& endpoint,
                        S3Options* options) {
  if (flag.empty() || flag == "signed") return absl::OkStatus();
  if (flag != "unsigned") return Refuse({flag, "flag s3_payload"}, "\"signed\" or \"unsigned\"");
  if (endpoint && !endpoint->tls) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag s3_payload is \"unsigned\", but the endpoint ", endpoint->url,
                     " has no TLS that would protect the payload; want https:// or \"signed\""));
  }
  options->unsigned_payload = true;
  return absl::OkStatus();
}

CredentialsSource ReadCredentialsSource(const ReadEnvironment& environment) {
  const auto read = [&environment](const std::string& name) {
    return NonEmpty(environment(name)).value_or("");
  };
  CredentialsSource source;
  source.environment = {read("AWS_ACCESS_KEY_ID"), read("AWS_SECRET_ACCESS_KEY"),
                        read("AWS_SESSION_TOKEN")};
  const std::string profile = read("AWS_PROFILE");
  if (!profile.empty()) source.profile = profile;
  const std::string home = read("HOME");
  source.file = read("AWS_SHARED_CREDENTIALS_FILE");
  if (source.file.empty() && !home.empty()) source.file = "~/.aws/credentials";
  if (absl::StartsWith(source.file, "~/") && !home.empty()) source.file.replace(0, 1, home);
  return source;
}

}  // namespace

std::string DefaultS3Endpoint(const std::string& region) {
  return absl::StrCat("https://s3.", region, ".amazonaws.com",
                      absl::StartsWith(region, "cn-") ? ".cn" : "");
}

absl::StatusOr<S3Options> MakeS3Options(const S3Flags& flags, const ReadEnvironment& environment) {
  S3Options options;
  const Stated region = FirstStated(flags.region, "flag s3_region",
                                    {"AWS_REGION", "AWS_DEFAULT_REGION"}, environment);
  if (!region.value.empty()) {
    SP_RETURN_IF_ERROR(CheckRegion(region));
    options.region = region.value;
  }
  const Stated endpoint_text = FirstStated(
      flags.endpoint, "flag s3_endpoint", {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, environment);
  std::optional<Endpoint> endpoint;
  if (!endpoint_text.value.empty()) {
    SP_ASSIGN_OR_RETURN(endpoint, ParseEndpoint(endpoint_text));
    options.endpoint = endpoint->url;
    if (region.value.empty()) {
      options.region = RegionOfHost(endpoint->host).value_or(options.region);
    }
  }
  SP_RETURN_IF_ERROR(SetAddressing(flags.addressing, endpoint, &options));
  SP_RETURN_IF_ERROR(SetPayload(flags.payload, endpoint, &options));
  options.ca_bundle =
      FirstStated(flags.ca_bundle, "flag s3_ca_bundle", {"AWS_CA_BUNDLE"}, environment).value;
  SetProxy(endpoint.value_or(Endpoint{.tls = true}), environment, &options);
  options.credentials = ReadCredentialsSource(environment);
  return options;
}

}  // namespace shardprep
