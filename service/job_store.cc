#include "service/job_store.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardprep {

absl::Status MemoryJobStore::Insert(const JobRecord& record) {
  absl::MutexLock lock(&mu_);
  const std::string& id = record.job.prep_job_id();
  const bool sequence_taken = std::any_of(records_.begin(), records_.end(), [&](const auto& entry) {
    return entry.second.sequence == record.sequence;
  });
  if (sequence_taken || !records_.emplace(id, record).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("job store: ", id, " or sequence ", record.sequence, " exists"));
  }
  return absl::OkStatus();
}

absl::Status MemoryJobStore::Update(const JobRecord& record) {
  absl::MutexLock lock(&mu_);
  const auto found = records_.find(record.job.prep_job_id());
  if (found == records_.end()) {
    return absl::NotFoundError(absl::StrCat("job store: no ", record.job.prep_job_id()));
  }
  const int64_t sequence = found->second.sequence;
  found->second = record;
  found->second.sequence = sequence;
  return absl::OkStatus();
}

absl::Status MemoryJobStore::Remove(const std::string& job_id) {
  absl::MutexLock lock(&mu_);
  records_.erase(job_id);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<JobRecord>> MemoryJobStore::LoadAll() {
  absl::MutexLock lock(&mu_);
  std::vector<JobRecord> records;
  records.reserve(records_.size());
  for (const auto& [id, record] : records_) records.push_back(record);
  std::sort(records.begin(), records.end(),
            [](const JobRecord& a, const JobRecord& b) { return a.sequence < b.sequence; });
  return records;
}

}  // namespace shardprep
