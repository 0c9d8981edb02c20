// The controller: the job queue, and the threads that carry out what it decides. Services call it;
// it knows nothing of gRPC.
//
// Threads: planners (PlanPrepJob, CreatePrepJob), steps (start, commit and removal of jobs), one
// that owns the job store (creating, cancelling, recording), one that ticks. No call from outside
// blocks on I/O: the slow ones answer through a callback, from one of these threads. A callback
// must not block and is called exactly once, with no lock held.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/job_backend.h"
#include "service/job_queue.h"
#include "service/job_store.h"
#include "service/work_pool.h"
#include "workers/clock.h"

namespace shardprep {

class ControllerMetrics;

struct ControllerOptions {
  JobQueueOptions queue;
  int planner_threads = 2;
  int max_waiting_plans = 64;
  int step_threads = 2;
  int max_observers = 1000;
  absl::Duration tick = absl::Milliseconds(250);
  // Between attempts at records that the job store did not take.
  absl::Duration record_retry = absl::Seconds(5);
  // Longest time that an idle worker's call is held.
  absl::Duration poll = absl::Seconds(10);
  // Budget for the figures of a plan when the caller names none.
  int64_t plan_memory_budget_bytes = int64_t{512} << 20;
  // When > 0, jobs that a worker of this budget could not do are refused at once.
  int64_t worker_memory_budget_bytes = 0;
};

// Told that a job changed, by the thread that changed it, with no lock held. Must not block.
class JobObserver {
 public:
  virtual ~JobObserver() = default;
  virtual void OnJobChanged() = 0;
};

class Controller {
 public:
  template <typename T>
  using Done = std::function<void(absl::StatusOr<T>)>;
  using IsCancelled = std::function<bool()>;

  // Everything passed in must outlive the controller. `new_id` returns ids that no other process
  // returns. Jobs of the store that are not finished are queued again; those that were running
  // wait until leases given by the earlier controller cannot be open any more: the lease duration
  // and margin that it had, from now.
  static absl::StatusOr<std::unique_ptr<Controller>> Start(const ControllerOptions& options,
                                                           const Clock* clock, JobBackend* backend,
                                                           JobStore* store,
                                                           ControllerMetrics* metrics,
                                                           std::function<std::string()> new_id);
  // Stops: answers what waits with UNAVAILABLE and joins the threads.
  ~Controller();

  // PrepService ------------------------------------------------------------------------------
  // Contracts as in prep.proto. `cancelled` is asked between steps, from other threads: work for a
  // caller that left ends early, and nothing is created for it.
  void Plan(const v1::PlanPrepJobRequest& request, IsCancelled cancelled,
            const Done<v1::PlanSummary>& done);
  void Create(const v1::CreatePrepJobRequest& request, IsCancelled cancelled,
              const Done<v1::PrepJob>& done);
  // The cancel holds although its record may still have to be written when the job store fails;
  // it is written as soon as that can be.
  void Cancel(const std::string& job_id, const Done<v1::PrepJob>& done);
  absl::StatusOr<JobView> Get(const std::string& job_id);
  absl::StatusOr<v1::ListPrepJobsResponse> List(const v1::ListPrepJobsRequest& request);
  absl::StatusOr<v1::ManifestReference> GetManifest(const std::string& job_id, int32_t target);

  // Tells `observer` of changes until it is destroyed or Unobserve(). RESOURCE_EXHAUSTED over the
  // bound; NOT_FOUND; UNAVAILABLE when streams have ended.
  absl::Status Observe(const std::string& job_id, const std::shared_ptr<JobObserver>& observer);
  void Unobserve(const std::string& job_id, const JobObserver* observer);
  // True once streams must end with UNAVAILABLE; observers are told.
  bool streams_ended();

  // WorkerService ----------------------------------------------------------------------------
  // Holds the call of an idle worker for at most min(max_wait, options.poll). Returns a token for
  // CancelPoll(), which answers a call that is still held with CANCELLED; 0 when it was not held.
  uint64_t Synchronize(const v1::SynchronizeRequest& request, absl::Duration max_wait,
                       const Done<v1::SynchronizeResponse>& done);
  void CancelPoll(uint64_t token);

  // The worker's process has ended: `how` says so in words ("killed by signal 9").
  void WorkerGone(const std::string& worker_id, const std::string& how);
  // Told of each worker that went silent with leases open, so that its supervisor can kill it.
  void SetSilentWorkerHandler(std::function<void(const std::string& worker_id)> handler);

  // Drain, in this order (service/controller_host.cc) -------------------------------------------
  void StopLeasing();
  void WithdrawLeases();
  // Waits until no lease is open and no step runs: true. False at the deadline.
  bool AwaitQuiet(absl::Time deadline);
  void EndStreams();

  // One tick of the tick thread, for tests.
  void Tick();

 private:
  struct Poll {
    std::string worker_id;
    absl::Duration until;
    Done<v1::SynchronizeResponse> done;
  };
  // Calls to make once the lock is released.
  using Calls = std::vector<std::function<void()>>;

  Controller(const ControllerOptions& options, const Clock* clock, JobBackend* backend,
             JobStore* store, ControllerMetrics* metrics, std::function<std::string()> new_id);

  bool stopping();
  absl::Status Load();
  void RunTicks();
  absl::StatusOr<v1::PlanSummary> DoPlan(const v1::PlanPrepJobRequest& request,
                                         const IsCancelled& cancelled);
  absl::StatusOr<std::unique_ptr<PlannedJob>> TimedPlan(const v1::PrepJobSpec& spec,
                                                        int64_t memory_budget_bytes);
  // The existing job of that id: the job when the spec is equal, ALREADY_EXISTS when not, nothing
  // when there is none.
  absl::StatusOr<std::optional<v1::PrepJob>> Existing(const std::string& job_id,
                                                      const v1::PrepJobSpec& spec)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::optional<v1::PrepJob>> Admit(const std::string& job_id,
                                                   const v1::PrepJobSpec& spec,
                                                   const IsCancelled& cancelled, NewJob* added);
  absl::StatusOr<v1::PrepJob> Store(NewJob added, const IsCancelled& cancelled);

  void RunStep(const JobStep& step);
  absl::StatusOr<StartedJob> StartJob(const std::string& job_id);
  absl::Status CheckWanted(const std::string& job_id);
  void FinishStart(const std::string& job_id, absl::StatusOr<StartedJob> started);
  static JobRecord RecordOf(JobView view);
  void DropPlan(const std::string& job_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Why the recorder took no more.
  absl::Status RecorderRefuses();
  absl::StatusOr<std::shared_ptr<PlannedJob>> PlanOf(const std::string& job_id);

  // Carries on with whatever the queue's last changes ask for.
  void Settle(Calls* calls) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AnswerPolls(Calls* calls) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Notify(const std::string& job_id, Calls* calls) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Report(const QueueEvent& event) const;
  void SubmitRecords() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteRecords();
  // Records, at an orderly end, which jobs the next controller need not hold back.
  void RecordQuiet();

  const ControllerOptions options_;
  const Clock* const clock_;
  JobBackend* const backend_;
  JobStore* const store_;
  ControllerMetrics* const metrics_;

  absl::Mutex mu_;
  JobQueue queue_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<PlannedJob>> plans_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Poll> polls_ ABSL_GUARDED_BY(mu_);
  uint64_t last_token_ ABSL_GUARDED_BY(mu_) = 0;
  std::multimap<std::string, std::weak_ptr<JobObserver>> observers_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> unrecorded_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> evicted_ ABSL_GUARDED_BY(mu_);
  bool records_submitted_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration records_not_before_ ABSL_GUARDED_BY(mu_) = -absl::InfiniteDuration();
  std::function<void(const std::string&)> silent_worker_handler_ ABSL_GUARDED_BY(mu_);
  int steps_ ABSL_GUARDED_BY(mu_) = 0;
  bool leasing_stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool streams_ended_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  WorkPool planners_;
  WorkPool stepper_;
  WorkPool recorder_;
  std::thread ticker_;
};

}  // namespace shardprep
