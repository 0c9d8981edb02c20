// The job store on disk: one SQLite database, `jobs.sqlite3` in the controller's state directory.
// What makes a record durable, and how a second controller is kept out, stands in
// sqlite_job_store.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/job_store.h"

namespace shardprep {

struct SqliteJobStoreOptions {
  // On a file system of this machine or on a block device that only this machine has mounted. Made
  // with mode 0700 when missing; its parent must exist.
  std::string directory;
  // The database grows no further: RESOURCE_EXHAUSTED.
  int64_t max_bytes = int64_t{4} << 30;
  // f_type of statfs(2) for a directory, replaced in tests.
  std::function<absl::StatusOr<int64_t>(const std::string& directory)> file_system_type;
};

// Opens the store and holds it until destroyed. Records of an older schema are taken over.
//
// FAILED_PRECONDITION: the directory is held by another controller, lies on a network file system,
// cannot be made or written, or was written by a newer version or another program. DATA_LOSS: the
// database is damaged, and was not changed. RESOURCE_EXHAUSTED, UNAVAILABLE: as in JobStore.
absl::StatusOr<std::unique_ptr<JobStore>> OpenSqliteJobStore(const SqliteJobStoreOptions& options);

// The name of a file system that other machines may have mounted at the same time, on which neither
// locks nor fsync are to be relied on; empty for every other. `type` is f_type of statfs(2).
// User-space file systems count as such: nothing tells what is behind them.
std::string NetworkFileSystemName(int64_t type);

}  // namespace shardprep
