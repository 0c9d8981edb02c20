// The gRPC server: both services, health, reflection.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/peer.h"
#include "workers/grpc_channel.h"

namespace shardprep {

class Controller;

struct ServerOptions {
  std::vector<std::string> listen;
  ConnectionSecurity security;
  RoleNames roles;  // who may call what (service/peer.h)
  bool reflection = true;
  // A further address, of which the port may be 0, with the health service and nothing else, in
  // plaintext: for probes that cannot show a certificate. Empty: none.
  std::string health_listen;
};

// Health names: "" and "shardprep.v1.PrepService" are readiness, "liveness" is liveness. Readiness
// starts off and does not depend on any store.
class Server {
 public:
  // The controller must outlive the server. Errors of CheckAddress() (workers/grpc_channel.h) and
  // PeerPolicy::Make(); UNAVAILABLE when an address cannot be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       Controller* controller);
  virtual ~Server() = default;  // Shutdown(absl::ZeroDuration())

  // Addresses with the ports chosen, in the order of the options.
  virtual const std::vector<std::string>& addresses() const = 0;

  // The same for health_listen; empty without one.
  virtual const std::string& health_address() const = 0;

  virtual void SetReady(bool ready) = 0;

  // Takes no new calls, waits for those in hand until `grace` has passed, then cancels them.
  // Returns when every call has ended. Idempotent.
  virtual void Shutdown(absl::Duration grace) = 0;
};

}  // namespace shardprep
