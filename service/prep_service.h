// PrepService over the controller: checks what comes off the wire, and turns the controller's
// callbacks into gRPC reactors. Nothing here blocks.
//
// Each CreatePrepJob and CancelPrepJob, and every call that its peer may not make, leaves an audit
// line: who, method, job, source, destinations, and how it was answered.
#pragma once

#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace shardprep {

class Controller;
class PeerPolicy;

// Controller and policy must outlive the service and every call in hand. Only callers may call.
std::unique_ptr<grpc::Service> MakePrepService(Controller* controller, const PeerPolicy* peers);

}  // namespace shardprep
