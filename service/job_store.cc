#include "service/job_store.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace shardprep {

absl::Status MemoryJobStore::Insert(const JobRecord& record) {
  absl::MutexLock lock(&mu_);
  const std::string& id = record.job.prep_job_id();
  if (!entries_.emplace(id, Entry{next_sequence_, record}).second) {
    return absl::AlreadyExistsError(absl::StrCat("job store: ", id, " exists"));
  }
  ++next_sequence_;
  return absl::OkStatus();
}

absl::Status MemoryJobStore::Update(const JobRecord& record) {
  absl::MutexLock lock(&mu_);
  const auto found = entries_.find(record.job.prep_job_id());
  if (found == entries_.end()) {
    return absl::NotFoundError(absl::StrCat("job store: no ", record.job.prep_job_id()));
  }
  found->second.record = record;
  return absl::OkStatus();
}

absl::Status MemoryJobStore::Remove(const std::string& job_id) {
  absl::MutexLock lock(&mu_);
  entries_.erase(job_id);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<JobRecord>> MemoryJobStore::LoadAll() {
  absl::MutexLock lock(&mu_);
  std::map<int, const JobRecord*> ordered;
  for (const auto& [id, entry] : entries_) ordered[entry.sequence] = &entry.record;
  std::vector<JobRecord> records;
  records.reserve(ordered.size());
  for (const auto& [sequence, record] : ordered) records.push_back(*record);
  return records;
}

}  // namespace shardprep
