// Preparing one region for ranks of several targets at a time: as region_prep.h, but the source is
// read once for all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/shuffle.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/region_progress.h"

namespace shardprep {

struct JointTask {
  struct Target {
    const JobPlan* plan = nullptr;
    ObjectStore* destination = nullptr;
    std::vector<int32_t> ranks;  // at least one; or just kReplicatedRank
    // Called when all parts of a rank are recorded; from any of the threads.
    std::function<void(int32_t rank)> rank_done;
  };
  std::vector<Target> targets;  // at least one, of one TargetSet
  int32_t region = 0;           // index into the regions of every plan
  ObjectStore* source = nullptr;
  Shuffler* shuffler = nullptr;
  int32_t threads = 1;
  const MemoryNeed* need = nullptr;  // TargetSet::joint_memory()
  // All buffers come from here; at least need->Total(ranks, 1). Contents are undefined before and
  // after.
  absl::Span<uint8_t> memory;
  // As in RegionTask.
  CommitGate gate;
  const std::atomic<bool>* stop = nullptr;
};

// Prepares every part of the region for every rank of the set and records each in the journal of
// its destination. Each source byte that the set needs is read once, but see joint_spans.h. Errors:
// as PrepareRegion().
absl::Status PrepareJointly(const JointTask& task, RegionProgress& progress);

}  // namespace shardprep
