// Shuffling on a GPU, over any GpuRuntime.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/hip/gpu_runtime.h"
#include "kernels/shuffle.h"

namespace shardprep {

struct LaneShufflerOptions {
  // Each slot has a stream, and buffers of its own for either direction, pinned and on the device.
  // So many pieces are under way at once: one is copied in, one runs, one is copied out, one is
  // filled or emptied by the host.
  int slots = 4;
  // Each of a slot's four buffers. One that must hold a larger row block grows to that and stays.
  int64_t slot_bytes = int64_t{4} << 20;
};

// A shuffler on `device` of `runtime`. All memory is allocated here, slots * 4 * slot_bytes, half
// of it pinned on the host. Threads that shuffle at the same time share the slots, and their copies
// and kernels overlap; so do those of one call that is larger than a slot.
// First a small matrix goes through every tile kind and is compared with the host: a device that
// differs is refused with INTERNAL, one that fails with its error. FAILED_PRECONDITION for a device
// that does not exist or has an architecture that was not compiled for.
absl::StatusOr<std::unique_ptr<Shuffler>> MakeLaneShuffler(std::shared_ptr<GpuRuntime> runtime,
                                                           int device,
                                                           LaneShufflerOptions options = {});

// What a launch for `job` is told, but for pointers and rows: the source rows of native_cols bytes
// lie 16-byte aligned, one after the other.
LaneArgs LaneArgsOf(const ShuffleJob& job);

}  // namespace shardprep
