// The launch, which is the only call from host code into device code.
#pragma once

#include "kernels/hip/gpu_api.h"
#include "kernels/hip/lane_kernel.h"

namespace shardprep {

// Queues ShuffleLane for every lane of `args` (device pointers) on `stream`.
hipError_t LaunchLanes(const LaneArgs& args, hipStream_t stream);

// The architectures that the kernels were compiled for, "gfx90a,gfx942".
const char* CompiledArchitectureList();

}  // namespace shardprep
