// A worker: asks the controller what to hold, prepares what it is leased, and says how far it is.
//
// Level-triggered: each call of Synchronize carries the whole state and returns the whole desired
// state, so a lost message is healed by the next. A lease is measured on the worker's own monotonic
// clock from the moment the call that granted or renewed it was sent; ten seconds before it ends
// nothing more is published under it (the fence).
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "shardprep/v1/worker.pb.h"
#include "workers/clock.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/work_memory.h"

namespace shardprep {

class S3Connection;
class Shuffler;
class TargetSet;
class WorkerMetrics;

// No publish step starts in the last of a lease, and the controller waits as long after its end.
inline constexpr absl::Duration kFenceMargin = absl::Seconds(10);

// Sends one Synchronize call. Errors as the service states them.
class ControllerLink {
 public:
  virtual ~ControllerLink() = default;
  virtual absl::StatusOr<v1::SynchronizeResponse> Synchronize(
      const v1::SynchronizeRequest& request) = 0;
  // Makes a call in flight return early with CANCELLED, or does nothing. From any thread.
  virtual void Interrupt() = 0;
};

// What this build writes; leases go only to workers whose build equals the controller's.
v1::WorkerBuild ThisBuild();

struct WorkerOptions {
  std::string worker_id;
  int64_t memory_budget_bytes = int64_t{512} << 20;
  int32_t threads = 1;
  std::vector<std::string> allowed_source_roots;
  std::shared_ptr<S3Connection> s3;  // for s3:// URIs (workers/open_store.h)
};

class Worker {
 public:
  // Everything passed by pointer must outlive the worker; `metrics` may be null.
  Worker(WorkerOptions options, ControllerLink* link, Shuffler* shuffler, const Clock* clock,
         WorkerMetrics* metrics);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // One call and what follows from it: starts, renews and stops leases. Returns the call's status.
  absl::Status RunOnce();

  // RunOnce until drained and every lease is closed. Returns OK then, and FAILED_PRECONDITION or
  // INVALID_ARGUMENT when the controller refuses this worker for good; keeps trying on other
  // errors. A worker whose device is lost drains itself and returns that error, UNAVAILABLE: its
  // leases are attempted again elsewhere, or by the process that is started in its place.
  absl::Status Run();

  // Takes nothing new; leases in hand are stopped and given back. From any thread, also twice.
  void Drain();

  // Time of the last sign of life of the loop, for liveness.
  absl::Duration LastTurn() const;

 private:
  struct HeldLease;
  struct LeasedRanks;
  v1::SynchronizeRequest BuildRequest();
  void Apply(const v1::SynchronizeRequest& request, const v1::SynchronizeResponse& response,
             absl::Duration sent);
  void Start(const v1::Lease& lease, absl::Duration sent);
  void WorkOn(HeldLease& held);
  absl::Status Prepare(HeldLease& held);
  absl::Status PrepareOne(HeldLease& held, const TargetSet& targets, const LeasedRanks& own,
                          ObjectStore& source) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mu_);
  absl::Status PrepareTogether(HeldLease& held, const TargetSet& targets,
                               const std::vector<LeasedRanks>& leased, ObjectStore& source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mu_);
  static absl::StatusOr<std::vector<LeasedRanks>> RanksOfLease(const v1::Lease& lease,
                                                               const TargetSet& targets);
  absl::StatusOr<std::unique_ptr<ObjectStore>> OpenDestination(const HeldLease& held,
                                                               const JobPlan& plan) const;
  CommitGate GateOf(const HeldLease& held);
  void RankDone(HeldLease& held, int32_t number);
  void CountNeeded(const v1::Lease& lease, const TargetSet& targets);
  absl::StatusOr<std::shared_ptr<const TargetSet>> TargetsFor(const v1::Lease& lease)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mu_);
  // Lets go of the memory so far.
  void Use(WorkMemory memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mu_);
  absl::Span<uint8_t> MemoryFor(const MemoryNeed& need, int32_t ranks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mu_);
  void CountMetrics(HeldLease& held);
  void WaitForNextTurn(absl::Duration at_most);

  const WorkerOptions options_;
  ControllerLink* const link_;
  Shuffler* const shuffler_;
  const Clock* const clock_;
  WorkerMetrics* const metrics_;

  mutable absl::Mutex mu_;
  std::list<std::unique_ptr<HeldLease>> held_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool wake_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration next_delay_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
  absl::Duration last_turn_ ABSL_GUARDED_BY(mu_);

  // Leases are worked on one at a time, so one buffer and one cached set of plans serve all of
  // them.
  absl::Mutex work_mu_;
  std::shared_ptr<const TargetSet> targets_ ABSL_GUARDED_BY(work_mu_);
  WorkMemory memory_ ABSL_GUARDED_BY(work_mu_);
};

}  // namespace shardprep
