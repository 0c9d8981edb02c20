// Region preparation: reads a region's source bytes, places them into each rank's padded matrices,
// shuffles, digests and streams the parts. This is where a checkpoint byte becomes a shard byte.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/shuffle.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/region_progress.h"

namespace shardprep {

struct RegionTask {
  const JobPlan* plan = nullptr;
  int32_t region = 0;          // index into plan->slices.regions()
  std::vector<int32_t> ranks;  // all of a routed region's set, or just kReplicatedRank
  ObjectStore* source = nullptr;
  ObjectStore* destination = nullptr;
  Shuffler* shuffler = nullptr;
  int32_t threads = 1;
  // All buffers come from here; at least MemoryNeedOf(...).Total(ranks, 1), used as FitLease()
  // and BatchesAtOnce() say. Contents are undefined before and after.
  absl::Span<uint8_t> memory;
  // The fence: asked before each rename. ABORTED when the lease is over.
  CommitGate gate;
  // Polled between blocks and while waiting for the source; true ends the work with CANCELLED,
  // unfinished parts removed. A read that is under way is waited for.
  const std::atomic<bool>* stop = nullptr;
  // Called when all parts of a rank are recorded; from any of the threads.
  std::function<void(int32_t rank)> rank_done;
};

// Prepares every part of the region for every rank of the set and records each in the journal.
// Each source byte that the set needs is read once. Parts that were finished before an error stay,
// recorded; one whose record cannot be written is removed.
// Errors: DATA_LOSS when a source file is not what the plan saw, or a written part does not read
// back; FAILED_PRECONDITION, and no part is written, once the destination has a manifest, which
// only another job can have published; ABORTED when the gate refuses; CANCELLED when stopped;
// INVALID_ARGUMENT for too little memory; else what a store or the device answers.
absl::Status PrepareRegion(const RegionTask& task, RegionProgress& progress);

}  // namespace shardprep
