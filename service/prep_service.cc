#include "service/prep_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"
#include "service/audit.h"
#include "service/controller.h"
#include "service/job_queue_types.h"
#include "service/peer.h"
#include "shardprep/v1/prep.grpc.pb.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

constexpr size_t kMaxUriSize = 4096;
constexpr size_t kMaxNameSize = 256;
constexpr size_t kMaxPolicySize = 1 << 20;
constexpr size_t kMaxStateDictSize = 1 << 20;

absl::Status CheckSize(const char* field, size_t size, size_t bound) {
  if (size <= bound) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", size, " bytes, at most ", bound));
}

// Bounds of every field that we keep or print. What the values mean is the planner's business.
absl::Status CheckSpec(const v1::PrepJobSpec& spec) {
  SP_RETURN_IF_ERROR(CheckSize("source_uri", spec.source_uri().size(), kMaxUriSize));
  SP_RETURN_IF_ERROR(
      CheckSize("alignment_policy_json", spec.alignment_policy_json().size(), kMaxPolicySize));
  if (spec.targets_size() > kMaxTargets) {
    return absl::InvalidArgumentError(
        absl::StrCat("targets: ", spec.targets_size(), " entries, at most ", kMaxTargets));
  }
  for (const v1::Target& target : spec.targets()) {
    SP_RETURN_IF_ERROR(CheckSize("destination_uri", target.destination_uri().size(), kMaxUriSize));
    SP_RETURN_IF_ERROR(CheckSize("naming", target.naming().size(), kMaxNameSize));
    SP_RETURN_IF_ERROR(
        CheckSize("state_dict_json", target.state_dict_json().size(), kMaxStateDictSize));
    const v1::KernelTarget& kernel = target.kernel_target();
    SP_RETURN_IF_ERROR(CheckSize("backend", kernel.backend().size(), kMaxNameSize));
    SP_RETURN_IF_ERROR(CheckSize("activation", kernel.activation().size(), kMaxNameSize));
    SP_RETURN_IF_ERROR(CheckSize("architecture", kernel.architecture().size(), kMaxNameSize));
    SP_RETURN_IF_ERROR(CheckSize("profile", kernel.profile().size(), kMaxNameSize));
  }
  return absl::OkStatus();
}

// Answers now.
template <typename Message>
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                 absl::StatusOr<Message> result, Message* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Status status = result.status();
  if (status.ok()) *response = *std::move(result);
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

// Answers later, from a thread of the controller, whether or not the caller is still there.
template <typename Message>
class LaterReactor : public grpc::ServerUnaryReactor {
 public:
  explicit LaterReactor(Message* response) : response_(response) {}

  // Called exactly once.
  void Deliver(absl::StatusOr<Message> result) {
    const absl::Status status = result.status();
    if (status.ok()) *response_ = *std::move(result);
    Finish(ToGrpcStatus(status));
  }
  std::shared_ptr<std::atomic<bool>> cancelled() const { return cancelled_; }

  void OnCancel() override { *cancelled_ = true; }
  void OnDone() override { delete this; }

 private:
  Message* const response_;
  // Outlives the reactor in the hands of the controller's threads.
  const std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
};

// Sends the newest state whenever the last write is through; states in between are skipped, so a
// slow reader costs one message of memory.
class WatchReactor : public grpc::ServerWriteReactor<v1::PrepJob>, public JobObserver {
 public:
  WatchReactor(Controller* controller, std::string job_id)
      : controller_(controller), job_id_(std::move(job_id)) {}

  static WatchReactor* Start(Controller* controller, const std::string& job_id) {
    auto reactor = std::make_shared<WatchReactor>(controller, job_id);
    // gRPC holds a plain pointer until OnDone(); the controller may hold references for longer.
    reactor->self_ = reactor;
    WatchReactor* const raw = reactor.get();
    if (absl::Status status = controller->Observe(job_id, reactor); !status.ok()) {
      raw->End(status);
    } else {
      raw->OnJobChanged();
    }
    return raw;
  }

  void OnJobChanged() override { Next(false); }
  void OnWriteDone(bool ok) override {
    if (ok) {
      Next(true);
    } else {
      End(absl::CancelledError("the caller is gone"));
    }
  }
  void OnCancel() override { End(absl::CancelledError("the caller is gone")); }
  void OnDone() override {
    controller_->Unobserve(job_id_, this);
    const std::shared_ptr<WatchReactor> last = std::move(self_);
  }

 private:
  // Decides under the lock, acts without it: gRPC may run the reaction to StartWrite() or Finish()
  // in this very thread.
  void Next(bool write_done) {
    bool write = false;
    absl::Status end;
    bool finish = false;
    {
      absl::MutexLock lock(&mu_);
      if (write_done) writing_ = false;
      if (finished_ || writing_) return;
      if (terminal_sent_) {
        finished_ = finish = true;
      } else if (controller_->streams_ended()) {
        finished_ = finish = true;
        end = WithReason(absl::UnavailableError("the controller is stopping"), "DRAINING");
      } else {
        absl::StatusOr<JobView> view = controller_->Get(job_id_);
        if (!view.ok()) {
          finished_ = finish = true;
          end = view.status();
        } else if (view->version != sent_version_) {
          sent_version_ = view->version;
          message_ = std::move(view->job);
          terminal_sent_ = IsTerminal(message_.state());
          writing_ = write = true;
        }
      }
    }
    if (write) StartWrite(&message_);
    if (finish) Finish(ToGrpcStatus(end));
  }

  void End(const absl::Status& status) {
    {
      absl::MutexLock lock(&mu_);
      if (finished_) return;
      finished_ = true;
    }
    Finish(ToGrpcStatus(status));
  }

  Controller* const controller_;
  const std::string job_id_;
  std::shared_ptr<WatchReactor> self_;
  absl::Mutex mu_;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool terminal_sent_ ABSL_GUARDED_BY(mu_) = false;
  int64_t sent_version_ ABSL_GUARDED_BY(mu_) = 0;
  v1::PrepJob message_;  // belongs to gRPC while writing_
};

// Answers a stream with an error.
class RefusedWatch : public grpc::ServerWriteReactor<v1::PrepJob> {
 public:
  explicit RefusedWatch(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

class PrepServiceImpl : public v1::PrepService::CallbackService {
 public:
  PrepServiceImpl(Controller* controller, const PeerPolicy* peers)
      : controller_(controller), peers_(peers) {}

  grpc::ServerUnaryReactor* PlanPrepJob(grpc::CallbackServerContext* context,
                                        const v1::PlanPrepJobRequest* request,
                                        v1::PlanSummary* response) override {
    absl::Status status = CheckCaller(PeerOf(*context), "PlanPrepJob");
    if (status.ok()) status = CheckSpec(request->spec());
    if (!status.ok()) return Answer<v1::PlanSummary>(context, status, response);
    auto* reactor = new LaterReactor<v1::PlanSummary>(response);
    controller_->Plan(
        *request, [cancelled = reactor->cancelled()] { return cancelled->load(); },
        [reactor](absl::StatusOr<v1::PlanSummary> r) { reactor->Deliver(std::move(r)); });
    return reactor;
  }

  grpc::ServerUnaryReactor* CreatePrepJob(grpc::CallbackServerContext* context,
                                          const v1::CreatePrepJobRequest* request,
                                          v1::PrepJob* response) override {
    const Peer peer = PeerOf(*context);
    absl::Status status = CheckCaller(peer, "CreatePrepJob");
    if (!status.ok()) return Answer<v1::PrepJob>(context, status, response);
    status = CheckSpec(request->spec());
    if (!status.ok()) {
      AuditCreate(peer.text, *request, status);
      return Answer<v1::PrepJob>(context, status, response);
    }
    auto* reactor = new LaterReactor<v1::PrepJob>(response);
    // The request belongs to the call, and is there until the reactor has finished.
    controller_->Create(
        *request, [cancelled = reactor->cancelled()] { return cancelled->load(); },
        [reactor, who = peer.text, request](absl::StatusOr<v1::PrepJob> r) {
          AuditCreate(who, *request, r.status());
          reactor->Deliver(std::move(r));
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetPrepJob(grpc::CallbackServerContext* context,
                                       const v1::GetPrepJobRequest* request,
                                       v1::PrepJob* response) override {
    const absl::Status allowed = CheckCaller(PeerOf(*context), "GetPrepJob");
    if (!allowed.ok()) return Answer<v1::PrepJob>(context, allowed, response);
    absl::StatusOr<JobView> view = controller_->Get(request->prep_job_id());
    if (!view.ok()) return Answer<v1::PrepJob>(context, view.status(), response);
    return Answer<v1::PrepJob>(context, std::move(view->job), response);
  }

  grpc::ServerUnaryReactor* ListPrepJobs(grpc::CallbackServerContext* context,
                                         const v1::ListPrepJobsRequest* request,
                                         v1::ListPrepJobsResponse* response) override {
    const absl::Status allowed = CheckCaller(PeerOf(*context), "ListPrepJobs");
    if (!allowed.ok()) return Answer<v1::ListPrepJobsResponse>(context, allowed, response);
    return Answer(context, controller_->List(*request), response);
  }

  grpc::ServerUnaryReactor* CancelPrepJob(grpc::CallbackServerContext* context,
                                          const v1::CancelPrepJobRequest* request,
                                          v1::PrepJob* response) override {
    const Peer peer = PeerOf(*context);
    const absl::Status allowed = CheckCaller(peer, "CancelPrepJob");
    if (!allowed.ok()) return Answer<v1::PrepJob>(context, allowed, response);
    auto* reactor = new LaterReactor<v1::PrepJob>(response);
    controller_->Cancel(request->prep_job_id(),
                        [reactor, who = peer.text, request](absl::StatusOr<v1::PrepJob> r) {
                          AuditCancel(who, request->prep_job_id(), r.status());
                          reactor->Deliver(std::move(r));
                        });
    return reactor;
  }

  grpc::ServerWriteReactor<v1::PrepJob>* WatchPrepJob(
      grpc::CallbackServerContext* context, const v1::WatchPrepJobRequest* request) override {
    const absl::Status allowed = CheckCaller(PeerOf(*context), "WatchPrepJob");
    if (!allowed.ok()) return new RefusedWatch(allowed);
    return WatchReactor::Start(controller_, request->prep_job_id());
  }

  grpc::ServerUnaryReactor* GetManifest(grpc::CallbackServerContext* context,
                                        const v1::GetManifestRequest* request,
                                        v1::ManifestReference* response) override {
    const absl::Status allowed = CheckCaller(PeerOf(*context), "GetManifest");
    if (!allowed.ok()) return Answer<v1::ManifestReference>(context, allowed, response);
    return Answer(context, controller_->GetManifest(request->prep_job_id(), request->target()),
                  response);
  }

 private:
  absl::Status CheckCaller(const Peer& peer, const char* method) const {
    absl::Status status = peers_->Check(peer, PeerRole::kCaller, method);
    if (!status.ok()) AuditRefusal(peer.text, method, status);
    return status;
  }

  Controller* const controller_;
  const PeerPolicy* const peers_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakePrepService(Controller* controller, const PeerPolicy* peers) {
  return std::make_unique<PrepServiceImpl>(controller, peers);
}

}  // namespace shardprep
