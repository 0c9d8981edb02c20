// Where the controller keeps its jobs, so that a restart can go on with them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

struct JobRecord {
  v1::PrepJob job;  // progress as of the last record
  std::string destination;
  std::string fingerprint;
};

// Thread safe. May block; the controller calls it from one thread of its own.
class JobStore {
 public:
  virtual ~JobStore() = default;
  // A new job, durable when this returns. ALREADY_EXISTS.
  virtual absl::Status Insert(const JobRecord& record) = 0;
  // Replaces the record of a job. NOT_FOUND.
  virtual absl::Status Update(const JobRecord& record) = 0;
  // Forgets a job; an unknown one is OK.
  virtual absl::Status Remove(const std::string& job_id) = 0;
  // Every record, in the order of insertion.
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
  struct Entry {
    int sequence = 0;
    JobRecord record;
  };
  absl::Mutex mu_;
  int next_sequence_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardprep
