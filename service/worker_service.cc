#include "service/worker_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "service/audit.h"
#include "service/controller.h"
#include "service/peer.h"
#include "shardprep/v1/worker.grpc.pb.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

// Between our answer and the caller's deadline.
constexpr absl::Duration kDeadlineMargin = absl::Seconds(1);

class SynchronizeReactor : public grpc::ServerUnaryReactor {
 public:
  SynchronizeReactor(Controller* controller, v1::SynchronizeResponse* response)
      : controller_(controller), response_(response) {}

  void Call(const v1::SynchronizeRequest& request, absl::Duration max_wait) {
    // The answer may come, and this object go, before the token is stored; so the token lives
    // apart from it.
    const std::shared_ptr<std::atomic<uint64_t>> token = token_;
    token->store(controller_->Synchronize(request, max_wait,
                                          [this](absl::StatusOr<v1::SynchronizeResponse> result) {
                                            const absl::Status status = result.status();
                                            if (status.ok()) *response_ = *std::move(result);
                                            Finish(ToGrpcStatus(status));
                                          }));
  }

  // Comes only once the handler has returned, so the token is there.
  void OnCancel() override {
    if (const uint64_t token = token_->load(); token != 0) controller_->CancelPoll(token);
  }
  void OnDone() override { delete this; }

 private:
  Controller* const controller_;
  v1::SynchronizeResponse* const response_;
  const std::shared_ptr<std::atomic<uint64_t>> token_ =
      std::make_shared<std::atomic<uint64_t>>(uint64_t{0});
};

class WorkerServiceImpl : public v1::WorkerService::CallbackService {
 public:
  WorkerServiceImpl(Controller* controller, const PeerPolicy* peers)
      : controller_(controller), peers_(peers) {}

  grpc::ServerUnaryReactor* Synchronize(grpc::CallbackServerContext* context,
                                        const v1::SynchronizeRequest* request,
                                        v1::SynchronizeResponse* response) override {
    const Peer peer = PeerOf(*context);
    const absl::Status allowed = peers_->Check(peer, PeerRole::kWorker, "Synchronize");
    if (!allowed.ok()) {
      AuditRefusal(peer.text, "Synchronize", allowed);
      grpc::ServerUnaryReactor* const refusal = context->DefaultReactor();
      refusal->Finish(ToGrpcStatus(allowed));
      return refusal;
    }
    const absl::Duration left = absl::FromChrono(context->deadline()) - absl::Now();
    auto* reactor = new SynchronizeReactor(controller_, response);
    reactor->Call(*request, left - kDeadlineMargin);
    return reactor;
  }

 private:
  Controller* const controller_;
  const PeerPolicy* const peers_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeWorkerService(Controller* controller, const PeerPolicy* peers) {
  return std::make_unique<WorkerServiceImpl>(controller, peers);
}

}  // namespace shardprep
