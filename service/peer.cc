#include "service/peer.h"

#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"
#include "workers/grpc_status.h"
#include "workers/printable.h"

namespace shardprep {
namespace {

constexpr size_t kMaxPeerText = 512;

const char* RoleName(PeerRole role) { return role == PeerRole::kCaller ? "caller" : "worker"; }

bool FitsFrom(const std::string& pattern, size_t p, const std::string& name, size_t n) {
  while (p < pattern.size() && pattern[p] != '*') {
    if (n == name.size() || pattern[p] != name[n]) return false;
    ++p;
    ++n;
  }
  if (p == pattern.size()) return n == name.size();
  // Each star ends at the next separator, so the recursion stays within one segment.
  while (n < name.size() && name[n] != '.' && name[n] != '/') {
    if (FitsFrom(pattern, p + 1, name, ++n)) return true;
  }
  return false;
}

absl::Status CheckPatterns(const char* flag, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    const bool good = !pattern.empty() && std::all_of(pattern.begin(), pattern.end(), [](char c) {
      return absl::ascii_isgraph(static_cast<unsigned char>(c));
    });
    if (!good || absl::StrContains(pattern, "**")) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": \"", Printable(pattern), "\" is no pattern of a certificate name"));
    }
  }
  return absl::OkStatus();
}

// "ipv4:127.0.0.1:4711" and the like, as gRPC writes peers.
std::string TextOfAddress(const std::string& peer) {
  if (absl::StartsWith(peer, "unix")) return "unix";
  const size_t colon = peer.find(':');
  const std::string address = colon == std::string::npos ? peer : peer.substr(colon + 1);
  if (IsLocalAddress(address)) return "loopback";
  return Printable(address.substr(0, address.rfind(':')));
}

}  // namespace

Peer PeerOf(const grpc::ServerContextBase& context) {
  Peer peer;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    for (const grpc::string_ref& name : auth->GetPeerIdentity()) {
      peer.names.emplace_back(name.data(), name.size());
    }
  }
  peer.text = peer.names.empty()
                  ? TextOfAddress(context.peer())
                  : Printable(absl::StrJoin(peer.names, ",").substr(0, kMaxPeerText));
  return peer;
}

bool FitsNamePattern(const std::string& pattern, const std::string& name) {
  return FitsFrom(pattern, 0, name, 0);
}

absl::StatusOr<PeerPolicy> PeerPolicy::Make(const RoleNames& names,
                                            const ConnectionSecurity& security) {
  SP_RETURN_IF_ERROR(CheckPatterns("caller names", names.callers));
  SP_RETURN_IF_ERROR(CheckPatterns("worker names", names.workers));
  if (names.callers.empty() != names.workers.empty()) {
    return absl::InvalidArgumentError(
        "caller names and worker names: give both or neither; with one alone the other role would "
        "be open to every certificate");
  }
  if (!names.callers.empty() && security.tls.certificate.empty()) {
    return absl::FailedPreconditionError(
        "caller names and worker names are those of certificates: they need TLS");
  }
  PeerPolicy policy;
  policy.names_ = names;
  return policy;
}

absl::Status PeerPolicy::Check(const Peer& peer, PeerRole role, const std::string& method) const {
  const std::vector<std::string>& patterns =
      role == PeerRole::kCaller ? names_.callers : names_.workers;
  if (patterns.empty()) return absl::OkStatus();
  for (const std::string& name : peer.names) {
    for (const std::string& pattern : patterns) {
      if (FitsNamePattern(pattern, name)) return absl::OkStatus();
    }
  }
  return WithReason(
      absl::PermissionDeniedError(absl::StrCat(method, " is for the role ", RoleName(role),
                                               ", and ", peer.text, " does not have it")),
      "ROLE_NOT_ALLOWED", {{"method", method}, {"role", RoleName(role)}, {"peer", peer.text}});
}

}  // namespace shardprep
