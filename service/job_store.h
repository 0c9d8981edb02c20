// Where the controller keeps its jobs, so that a restart can go on with them. Kept in memory here;
// on disk by service/sqlite_job_store.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

struct JobRecord {
  v1::PrepJob job;          // progress as of the last record
  int64_t sequence = 0;     // order of creation; of one job only
  std::string fingerprint;  // of the job: Lease.layout_fingerprint
  // For how long after this controller's end leases of the job may still be open: duration and
  // margin as it was set; next to nothing when it has seen all of them closed. Zero when none was
  // ever given.
  absl::Duration lease_span;
};

// Thread safe. May block; the controller calls it from one thread of its own.
//
// Errors: RESOURCE_EXHAUSTED when there is no space, UNAVAILABLE when a passing fault of the medium
// is to blame, DATA_LOSS when what lies there is damaged, FAILED_PRECONDITION when the medium may
// not be written. After an error the store holds what it held before the call.
class JobStore {
 public:
  virtual ~JobStore() = default;
  // A new job, durable when this returns. ALREADY_EXISTS when its id or its sequence is taken.
  virtual absl::Status Insert(const JobRecord& record) = 0;
  // Replaces the record of a job, all but its sequence. NOT_FOUND.
  virtual absl::Status Update(const JobRecord& record) = 0;
  // Forgets a job; an unknown one is OK.
  virtual absl::Status Remove(const std::string& job_id) = 0;
  // Every record, in the order of their sequence.
  virtual absl::StatusOr<std::vector<JobRecord>> LoadAll() = 0;
};

// Lives as long as the process: for `prepare`, and where journals at the destinations are enough
// to resume resubmitted jobs.
class MemoryJobStore : public JobStore {
 public:
  absl::Status Insert(const JobRecord& record) override;
  absl::Status Update(const JobRecord& record) override;
  absl::Status Remove(const std::string& job_id) override;
  absl::StatusOr<std::vector<JobRecord>> LoadAll() override;

 private:
  absl::Mutex mu_;
  std::map<std::string, JobRecord> records_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardprep
