// What goes into the job queue and what comes out of it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardprep/v1/prep.pb.h"
#include "shardprep/v1/worker.pb.h"

namespace shardprep {

// Of one job, a bound of the wire (prep.proto).
inline constexpr int kMaxTargets = 16;

struct JobQueueOptions {
  // Leases go only to workers whose build is equal to this one.
  v1::WorkerBuild build;
  absl::Duration lease_duration = absl::Seconds(60);
  // What the controller waits longer than the worker does, on top of the worker stopping its
  // writes this much before the end: room for clocks that run at different speeds.
  absl::Duration fence_margin = absl::Seconds(10);
  // How often a worker with work must call.
  absl::Duration busy_delay = absl::Milliseconds(500);
  int max_attempts = 3;
  // Before the second attempt at a task whose worker reported a failure; four times that before
  // the third.
  absl::Duration retry_delay = absl::Seconds(2);
  int max_unfinished_jobs = 1000;
  int max_finished_jobs = 1000;
  // What jobs take when serialised, those that are finished and the others each: more unfinished
  // ones are refused, older finished ones dropped.
  int64_t max_job_bytes = int64_t{256} << 20;
  // Jobs that hold a plan in memory at the same time.
  int max_active_jobs = 8;
  int max_workers = 1000;

  // For how long after its last renewal a lease may be open.
  absl::Duration LeaseSpan() const { return lease_duration + fence_margin; }
};

// Where one target of a job goes, and what goes there.
struct JobPlace {
  std::string destination;  // normalised URI: equal strings are the same place
  std::string fingerprint;  // layout fingerprint
};

struct NewJob {
  // Id, normalised spec, timeout and plan summary; in a terminal state also error, manifests and
  // times: such a job is history from the start. The queue sets everything else.
  v1::PrepJob job;
  std::vector<JobPlace> places;  // by target, at least one unless the state is terminal
  std::string fingerprint;       // of the job: Lease.layout_fingerprint
  int32_t rank_tasks_total = 0;
  int64_t bytes_total = 0;
  // For Restore() only. Zero `lease_span`: no earlier controller gave leases for the job. Else how
  // long, from now, they may still be open.
  int64_t sequence = 0;
  absl::Duration lease_span;
};

// The rank tasks of one region.
struct RegionTasks {
  std::vector<int32_t> ranks;
  std::vector<int32_t> done;  // of them, those that are recorded already
  int64_t bytes_per_rank = 0;
  std::map<int32_t, int64_t> other_bytes;  // of ranks that have another number of bytes

  int64_t BytesOf(int32_t rank) const {
    const auto it = other_bytes.find(rank);
    return it == other_bytes.end() ? bytes_per_rank : it->second;
  }
  int64_t BytesOf(const std::vector<int32_t>& some) const {
    int64_t bytes = 0;
    for (const int32_t rank : some) bytes += BytesOf(rank);
    return bytes;
  }
};

// What planning a job again at its start came to.
struct StartedJob {
  std::string fingerprint;
  std::string source_token;
  std::vector<RegionTasks> regions;
  // By target, when every destination holds the very artefact already; else empty.
  std::vector<v1::ManifestReference> complete;
  // Ranks that one lease covers under a worker's memory budget; INVALID_ARGUMENT when not even one
  // fits. Pure and quick.
  std::function<absl::StatusOr<int32_t>(int64_t memory_budget_bytes)> ranks_per_lease;
};

// A piece of work that takes I/O, for the owner of the queue to carry out.
struct JobStep {
  enum class Kind {
    kStart,   // plan again, remove leftovers of other jobs: answer with StartFinished()
    kCommit,  // publish the manifests: answer with CommitFinished()
    kRemove,  // delete what the cancelled job wrote: answer with CleanFinished()
    kTidy,    // delete what the failed job wrote and has not recorded: CleanFinished()
  };
  Kind kind = Kind::kStart;
  std::string job_id;
};

// What happened, for logs and metrics. Fields that do not apply are empty.
struct QueueEvent {
  enum class Kind {
    kJobAdded,
    kJobStarted,
    kJobFinished,
    kLeaseGranted,
    kLeaseDone,
    kLeaseReturned,
    kLeaseFailed,  // reported by its worker, or its worker died or went silent
    kWorkerJoined,
    kWorkerLeft,
  };
  Kind kind = Kind::kJobAdded;
  std::string job_id;
  std::string worker_id;
  std::string lease_id;
  int32_t region = -1;
  std::string ranks;       // of the lease, by number, for people: "rank 3", "ranks 0,1"
  int32_t rank_count = 0;  // of the lease; for failures those left undone
  int32_t attempt = 0;
  int32_t lost_leases = 0;                                    // kWorkerLeft
  absl::Status status;                                        // failures, and how a job finished
  v1::PrepJob::State state = v1::PrepJob::STATE_UNSPECIFIED;  // kJobFinished
  absl::Duration duration;  // started: time queued; finished: time since creation
};

struct JobView {
  v1::PrepJob job;
  int64_t version = 0;   // grows with each change of the job
  int64_t sequence = 0;  // order of creation
  std::string fingerprint;
  // Longest time that a lease of the job, given by this controller or an earlier one, may be open
  // after its last renewal. Zero when none was given.
  absl::Duration lease_span;
};

struct JobPage {
  std::vector<v1::PrepJob> jobs;
  std::string next_page_token;
};

struct QueueChanges {
  std::vector<std::string> changed;   // jobs with anything new, progress included
  std::vector<std::string> recorded;  // of them, those whose durable record is out of date
  std::vector<std::string> evicted;   // finished jobs that were dropped
  std::vector<QueueEvent> events;
  bool leasable = false;  // work may have appeared for idle workers
};

struct QueueStats {
  int pending = 0;
  int running = 0;
  int64_t rank_tasks_waiting = 0;  // of running jobs; not leased and not done
  int64_t rank_tasks_leased = 0;
  int leases = 0;
  int workers_idle = 0;
  int workers_busy = 0;
  int workers_draining = 0;
};

inline bool IsTerminal(v1::PrepJob::State state) {
  return state == v1::PrepJob::STATE_SUCCEEDED || state == v1::PrepJob::STATE_FAILED ||
         state == v1::PrepJob::STATE_CANCELLED;
}

// Those of all targets, at least one, in their order.
inline void SetManifests(v1::PrepJob& job, const std::vector<v1::ManifestReference>& manifests) {
  *job.mutable_manifest() = manifests.front();
  job.mutable_other_manifests()->Assign(manifests.begin() + 1, manifests.end());
}

}  // namespace shardprep
