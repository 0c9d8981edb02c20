// Channels and credentials for both ends of a connection.
//
// Plaintext is for loopback and Unix sockets; any other address needs mutual TLS, or the operator's
// explicit word that the network is trusted. Certificate files are watched and reloaded, so they
// can be rotated under a running process.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace grpc {
class Channel;
class ServerCredentials;
}  // namespace grpc

namespace shardprep {

// PEM files. All three are set, or none.
struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string ca;
};

struct ConnectionSecurity {
  TlsFiles tls;
  bool allow_insecure = false;
};

// Largest message either end sends or accepts. Bulk bytes never travel over gRPC.
inline constexpr int kMaxMessageBytes = 4 << 20;

// True for "unix:..." and for hosts that are 127.0.0.0/8, ::1 or localhost.
bool IsLocalAddress(const std::string& address);

// Checks an address ("unix:/path", "host:port", "[v6]:port"; a port is needed) and whether the
// security given suffices for it. INVALID_ARGUMENT says what is wrong; FAILED_PRECONDITION when the
// address is not local and there is neither TLS nor allow_insecure, or a TLS file cannot be read.
absl::Status CheckAddress(const std::string& address, const ConnectionSecurity& security);

// A lazy channel to `address`. Errors of CheckAddress.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& address,
                                                           const ConnectionSecurity& security);

// What a server listens with. The files must exist and match: FAILED_PRECONDITION otherwise.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const ConnectionSecurity& security);

}  // namespace shardprep
