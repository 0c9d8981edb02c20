// Who is at the other end of a call, and which calls are theirs.
//
// With mutual TLS every peer shows a certificate. Its names are the subject alternative names, or,
// where it has none, the common name. Two roles keep apart what may be asked: callers have
// PrepService, workers have WorkerService. Health and reflection are for whoever has a certificate.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "workers/grpc_channel.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace shardprep {

enum class PeerRole { kCaller, kWorker };

// Patterns of certificate names, for each role. In a pattern `*` stands for one or more characters
// other than `.` and `/`: "*.gpu.example", "spiffe://example/ns/*/sa/shardprep-worker".
struct RoleNames {
  std::vector<std::string> callers;
  std::vector<std::string> workers;
};

struct Peer {
  std::vector<std::string> names;  // of its certificate; empty without one
  // For logs: the names, separated by commas; "unix", "loopback" or the address without one.
  std::string text;
};

// Of the caller. Does no I/O.
Peer PeerOf(const grpc::ServerContextBase& context);

// Whether a name fits a pattern.
bool FitsNamePattern(const std::string& pattern, const std::string& name);

// Immutable and thread safe.
class PeerPolicy {
 public:
  // Without any pattern every peer has both roles. INVALID_ARGUMENT for an empty pattern or one
  // with a space, and when one role has patterns and the other has none; FAILED_PRECONDITION when
  // there are patterns and no TLS, so no names.
  static absl::StatusOr<PeerPolicy> Make(const RoleNames& names,
                                         const ConnectionSecurity& security);

  // PERMISSION_DENIED, reason ROLE_NOT_ALLOWED, naming peer, role and method, unless one of the
  // peer's names fits one of the role's patterns.
  absl::Status Check(const Peer& peer, PeerRole role, const std::string& method) const;

 private:
  RoleNames names_;
};

}  // namespace shardprep
