// The open source files of a region, each pinned to the version that the plan saw.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "workers/checkpoint.h"
#include "workers/object_store.h"
#include "workers/region_progress.h"

namespace shardprep {

// Thread safe. DATA_LOSS when a file is not the version that the plan saw; else the store's errors.
class SourceFiles {
 public:
  // All three must outlive this.
  SourceFiles(const Checkpoint& checkpoint, ObjectStore& store, RegionProgress& progress)
      : checkpoint_(checkpoint), store_(store), progress_(progress) {}

  // Opened when it is asked for first. `file` is an index into Checkpoint::files().
  absl::StatusOr<ObjectReader*> Get(int64_t file);

  // Fills `out` from an offset of a file; counted and timed.
  absl::Status Read(int64_t file, int64_t offset, absl::Span<uint8_t> out);

  // Of every file that was opened.
  absl::Status CheckUnchanged();

 private:
  struct File {
    absl::Mutex mu;
    std::unique_ptr<ObjectReader> reader ABSL_GUARDED_BY(mu);
  };

  File& EntryOf(int64_t file);

  const Checkpoint& checkpoint_;
  ObjectStore& store_;
  RegionProgress& progress_;
  absl::Mutex mu_;
  std::map<int64_t, std::unique_ptr<File>> files_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardprep
