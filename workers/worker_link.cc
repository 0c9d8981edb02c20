#include "workers/worker_link.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "shardprep/v1/worker.grpc.pb.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

class GrpcLink : public ControllerLink {
 public:
  GrpcLink(std::shared_ptr<grpc::Channel> channel, absl::Duration deadline)
      : stub_(v1::WorkerService::NewStub(std::move(channel))), deadline_(deadline) {}

  absl::StatusOr<v1::SynchronizeResponse> Synchronize(
      const v1::SynchronizeRequest& request) override {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline_));
    {
      absl::MutexLock lock(&mu_);
      // An interruption between building the request and this point would be lost otherwise.
      if (std::exchange(interrupted_, false)) return absl::CancelledError("interrupted");
      in_flight_ = &context;
    }
    v1::SynchronizeResponse response;
    const grpc::Status status = stub_->Synchronize(&context, request, &response);
    {
      absl::MutexLock lock(&mu_);
      in_flight_ = nullptr;
      interrupted_ = false;
    }
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }

  void Interrupt() override {
    absl::MutexLock lock(&mu_);
    interrupted_ = true;
    if (in_flight_ != nullptr) in_flight_->TryCancel();
  }

 private:
  const std::unique_ptr<v1::WorkerService::Stub> stub_;
  const absl::Duration deadline_;
  absl::Mutex mu_;
  grpc::ClientContext* in_flight_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool interrupted_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

std::unique_ptr<ControllerLink> MakeGrpcLink(std::shared_ptr<grpc::Channel> channel,
                                             absl::Duration deadline) {
  return std::make_unique<GrpcLink>(std::move(channel), deadline);
}

}  // namespace shardprep
