// The worker's side of WorkerService over gRPC.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "workers/worker.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace shardprep {

// Each call has `deadline`, which must exceed the controller's longest poll.
std::unique_ptr<ControllerLink> MakeGrpcLink(std::shared_ptr<grpc::Channel> channel,
                                             absl::Duration deadline);

}  // namespace shardprep
