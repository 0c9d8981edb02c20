#include "workers/grpc_channel.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr unsigned kReloadSeconds = 10;
// Pings only to notice dead peers on quiet streams; the server permits this interval.
constexpr int kKeepaliveMillis = 60'000;

bool HasTls(const TlsFiles& tls) {
  return !tls.certificate.empty() || !tls.key.empty() || !tls.ca.empty();
}

absl::Status CheckTls(const TlsFiles& tls) {
  if (tls.certificate.empty() || tls.key.empty() || tls.ca.empty()) {
    return absl::InvalidArgumentError("TLS: certificate, key and CA must be given together");
  }
  for (const std::string* file : {&tls.certificate, &tls.key, &tls.ca}) {
    if (::access(file->c_str(), R_OK) != 0) {
      return absl::FailedPreconditionError(absl::StrCat("TLS: cannot read ", *file));
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> WatchFiles(const TlsFiles& tls) {
  return std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      tls.key, tls.certificate, tls.ca, kReloadSeconds);
}

std::string HostOf(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  }
  return host;
}

bool IsLoopbackV4(const std::string& host) {
  if (!absl::StartsWith(host, "127.")) return false;
  int dots = 0;
  for (const char c : host) {
    if (c == '.') {
      ++dots;
    } else if (c < '0' || c > '9') {
      return false;  // a name such as 127.example.com
    }
  }
  return dots == 3;
}

}  // namespace

bool IsLocalAddress(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return true;
  const std::string host = HostOf(address);
  return IsLoopbackV4(host) || host == "::1" || host == "localhost";
}

absl::Status CheckAddress(const std::string& address, const ConnectionSecurity& security) {
  if (absl::StartsWith(address, "unix:")) {
    // sockaddr_un holds 108 bytes, the terminating zero included.
    if (address.size() == 5 || address.size() - 5 > 107) {
      return absl::InvalidArgumentError(
          absl::StrCat("address \"", address, "\": want a socket path of 1 to 107 bytes"));
    }
  } else {
    const size_t colon = address.rfind(':');
    int port = -1;
    if (colon == std::string::npos || colon == 0 ||
        !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535 ||
        absl::StrContains(address, "/")) {
      return absl::InvalidArgumentError(
          absl::StrCat("address \"", address, "\": want host:port or unix:/path"));
    }
  }
  if (HasTls(security.tls)) return CheckTls(security.tls);
  if (!IsLocalAddress(address) && !security.allow_insecure) {
    return absl::FailedPreconditionError(
        absl::StrCat("address ", address,
                     ": not loopback and no TLS files given; plaintext needs --allow-insecure"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& address,
                                                           const ConnectionSecurity& security) {
  SP_RETURN_IF_ERROR(CheckAddress(address, security));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMillis);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  // Proxies named in the environment are for the internet, not for a controller.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  if (HasTls(security.tls)) {
    grpc::experimental::TlsChannelCredentialsOptions options;
    options.set_certificate_provider(WatchFiles(security.tls));
    options.watch_root_certs();
    options.watch_identity_key_cert_pairs();
    credentials = grpc::experimental::TlsCredentials(options);
  } else {
    credentials = grpc::InsecureChannelCredentials();
  }
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const ConnectionSecurity& security) {
  if (!HasTls(security.tls)) return grpc::InsecureServerCredentials();
  SP_RETURN_IF_ERROR(CheckTls(security.tls));
  grpc::experimental::TlsServerCredentialsOptions options(WatchFiles(security.tls));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace shardprep
