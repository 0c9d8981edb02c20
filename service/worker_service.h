// WorkerService over the controller: an idle worker's call is held until there is work, at most
// until a margin before the caller's own deadline. Nothing here blocks.
#pragma once

#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace shardprep {

class Controller;

// The controller must outlive the service and every call in hand.
std::unique_ptr<grpc::Service> MakeWorkerService(Controller* controller);

}  // namespace shardprep
