#include "service/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "shardprep/v1/prep.grpc.pb.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(20);
constexpr absl::Duration kPlanTimeout = absl::Minutes(5);
// A stream is opened again after this time, so that each call has a deadline.
constexpr absl::Duration kStreamTimeout = absl::Hours(1);
// How long calls are tried again: a server that is being restarted comes back within seconds.
constexpr absl::Duration kPatience = absl::Seconds(10);
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLastPause = absl::Seconds(2);

class GrpcPrepClient : public PrepClient {
 public:
  explicit GrpcPrepClient(std::shared_ptr<grpc::Channel> channel)
      : stub_(v1::PrepService::NewStub(std::move(channel))) {}

  absl::StatusOr<v1::PlanSummary> Plan(const v1::PlanPrepJobRequest& request) override {
    return Call<v1::PlanSummary>(&v1::PrepService::Stub::PlanPrepJob, request, kPlanTimeout);
  }
  absl::StatusOr<v1::PrepJob> Create(const v1::CreatePrepJobRequest& request) override {
    return Call<v1::PrepJob>(&v1::PrepService::Stub::CreatePrepJob, request, kPlanTimeout);
  }
  absl::StatusOr<v1::PrepJob> Get(const std::string& job_id) override {
    v1::GetPrepJobRequest request;
    request.set_prep_job_id(job_id);
    return Call<v1::PrepJob>(&v1::PrepService::Stub::GetPrepJob, request, kCallTimeout);
  }
  absl::StatusOr<v1::ListPrepJobsResponse> List(const v1::ListPrepJobsRequest& request) override {
    return Call<v1::ListPrepJobsResponse>(&v1::PrepService::Stub::ListPrepJobs, request,
                                          kCallTimeout);
  }
  absl::StatusOr<v1::PrepJob> Cancel(const std::string& job_id) override {
    v1::CancelPrepJobRequest request;
    request.set_prep_job_id(job_id);
    return Call<v1::PrepJob>(&v1::PrepService::Stub::CancelPrepJob, request, kCallTimeout);
  }
  absl::StatusOr<v1::ManifestReference> GetManifest(const std::string& job_id,
                                                    int32_t target) override {
    v1::GetManifestRequest request;
    request.set_prep_job_id(job_id);
    request.set_target(target);
    return Call<v1::ManifestReference>(&v1::PrepService::Stub::GetManifest, request, kCallTimeout);
  }

  absl::Status Watch(const std::string& job_id,
                     const std::function<bool(const v1::PrepJob&)>& on_state,
                     absl::Duration patience) override {
    absl::Time last_word = absl::Now();
    absl::Duration pause = kFirstPause;
    while (true) {
      bool heard = false;
      const absl::StatusOr<bool> ended = WatchOnce(job_id, on_state, &heard);
      if (ended.ok() && *ended) return absl::OkStatus();
      if (heard) {
        last_word = absl::Now();
        pause = kFirstPause;
      }
      // The stream's own deadline is no failure.
      const bool again = absl::IsUnavailable(ended.status()) ||
                         (heard && absl::IsDeadlineExceeded(ended.status()));
      if (!ended.ok() && !again) return ended.status();
      if (absl::Now() - last_word + pause > patience) {
        return ended.ok() ? absl::UnavailableError("the watch ended early") : ended.status();
      }
      if (!Pause(pause)) return absl::CancelledError("the watch was stopped");
      pause = std::min(pause * 2, kLastPause);
    }
  }

  void StopWatching() override {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
    for (grpc::ClientContext* context : watches_) context->TryCancel();
  }

 private:
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(grpc::Status (v1::PrepService::Stub::*method)(grpc::ClientContext*,
                                                                              const Request&,
                                                                              Response*),
                                const Request& request, absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    const absl::Time last_try = std::min(deadline, absl::Now() + kPatience);
    absl::Duration pause = kFirstPause;
    while (true) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(deadline));
      Response response;
      absl::Status status = FromGrpcStatus((stub_.get()->*method)(&context, request, &response));
      if (status.ok()) return response;
      if (!absl::IsUnavailable(status) || absl::Now() + pause > last_try) return status;
      absl::SleepFor(pause);
      pause = std::min(pause * 2, kLastPause);
    }
  }

  // True when a terminal state came.
  absl::StatusOr<bool> WatchOnce(const std::string& job_id,
                                 const std::function<bool(const v1::PrepJob&)>& on_state,
                                 bool* heard) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kStreamTimeout));
    if (!Register(&context)) return absl::CancelledError("the watch was stopped");
    v1::WatchPrepJobRequest request;
    request.set_prep_job_id(job_id);
    const std::unique_ptr<grpc::ClientReader<v1::PrepJob>> reader =
        stub_->WatchPrepJob(&context, request);
    v1::PrepJob job;
    bool terminal = false;
    bool wanted = true;
    while (reader->Read(&job)) {
      *heard = true;
      terminal = job.state() == v1::PrepJob::STATE_SUCCEEDED ||
                 job.state() == v1::PrepJob::STATE_FAILED ||
                 job.state() == v1::PrepJob::STATE_CANCELLED;
      if (!wanted) continue;
      wanted = on_state(job);
      if (!wanted) context.TryCancel();
    }
    const absl::Status status = FromGrpcStatus(reader->Finish());
    Unregister(&context);
    if (terminal) return true;
    if (!wanted) return absl::CancelledError("the watch was stopped");
    SP_RETURN_IF_ERROR(status);
    return false;
  }

  bool Register(grpc::ClientContext* context) {
    absl::MutexLock lock(&mu_);
    if (stopped_) return false;
    watches_.insert(context);
    return true;
  }

  void Unregister(grpc::ClientContext* context) {
    absl::MutexLock lock(&mu_);
    watches_.erase(context);
  }

  // False when the watches were stopped meanwhile.
  bool Pause(absl::Duration pause) {
    absl::MutexLock lock(&mu_);
    return !mu_.AwaitWithTimeout(absl::Condition(&stopped_), pause);
  }

  const std::unique_ptr<v1::PrepService::Stub> stub_;
  absl::Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::set<grpc::ClientContext*> watches_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrepClient>> PrepClient::Make(const std::string& address,
                                                             const ConnectionSecurity& security) {
  SP_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, MakeChannel(address, security));
  return {std::make_unique<GrpcPrepClient>(std::move(channel))};
}

}  // namespace shardprep
