// PrepService over the controller: checks what comes off the wire, and turns the controller's
// callbacks into gRPC reactors. Nothing here blocks.
#pragma once

#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace shardprep {

class Controller;

// The controller must outlive the service and every call in hand.
std::unique_ptr<grpc::Service> MakePrepService(Controller* controller);

}  // namespace shardprep
