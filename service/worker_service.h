// WorkerService over the controller: an idle worker's call is held until there is work, at most
// until a margin before the caller's own deadline. Nothing here blocks.
#pragma once

#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace shardprep {

class Controller;
class PeerPolicy;

// Controller and policy must outlive the service and every call in hand. Only workers may call.
std::unique_ptr<grpc::Service> MakeWorkerService(Controller* controller, const PeerPolicy* peers);

}  // namespace shardprep
