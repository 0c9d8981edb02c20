// How a region is streamed: rows per block, and the memory that takes. Pure.
//
// A block is a multiple of 32 output rows whose source bytes come to about kBlockBytes, so that
// reading, shuffling and digesting it stay within a core's second-level cache.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "workers/object_store.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Measured: 256 KiB reads and writes are fastest on ext4 and tmpfs; larger ones leave the cache.
inline constexpr int64_t kBlockBytes = int64_t{256} << 10;

// How one fused tensor is cut into blocks; equal for all experts and ranks.
struct BlockShape {
  int64_t rows = 0;          // output rows of a block (the last of an expert may have fewer)
  int64_t source_bytes = 0;  // most source bytes of one block
  int64_t output_bytes = 0;  // most output bytes of one block
  // Slices take some columns of each row, so one read serves every rank of the set.
  bool shared = false;
};

BlockShape BlockShapeOf(const SlicePlan& plan, const FusedTensor& tensor);

// True when gate and up rows alternate in the output, so that a block needs rows of both halves.
bool AlternatesHalves(const FusedTensor& tensor);

// Buffers of one lease, in bytes.
struct MemoryNeed {
  int64_t per_rank = 0;      // write buffer of a rank's stream
  int64_t per_thread = 0;    // block that only one thread reads
  int64_t shared_block = 0;  // a block that all threads share; threads + 1 of them are in flight

  int64_t Total(int64_t ranks, int64_t threads) const {
    return ranks * per_rank + threads * per_thread + (threads + 1) * shared_block;
  }
};

MemoryNeed MemoryNeedOf(const SlicePlan& plan, const ObjectStore& destination);

// How a lease uses a budget.
struct LeaseShape {
  int32_t ranks = 0;
  int32_t threads = 0;
};

// As many of `rank_count` ranks as fit, with at most `threads` threads (fewer when the budget
// demands it, and never more than ranks). INVALID_ARGUMENT stating the minimum budget when not even
// one rank on one thread fits.
absl::StatusOr<LeaseShape> FitLease(const MemoryNeed& need, int64_t budget_bytes,
                                    int32_t rank_count, int32_t threads);

}  // namespace shardprep
