#if !defined(SHARDPREP_GPU_CUDA)
#include <hip/hip_runtime.h>
#endif

#include "kernels/hip/lane_launch.h"

namespace shardprep {
namespace {

constexpr uint32_t kThreads = 256;

template <TileKind kTile>
__global__ __launch_bounds__(kThreads) void LaneKernel(LaneArgs args) {
  const uint32_t lane = blockIdx.x * kThreads + threadIdx.x;
  if (lane < args.lanes) ShuffleLane<kTile>(args, lane);
}

// Answers for this launch alone. hipGetLastError() after <<<>>> would also give the error of an
// earlier call of this thread, such as a refusal to pin memory.
template <TileKind kTile>
hipError_t Launch(LaneArgs args, hipStream_t stream) {
  const uint32_t groups = (args.lanes + kThreads - 1) / kThreads;
  void* arguments[] = {&args};
  return hipLaunchKernel(reinterpret_cast<const void*>(&LaneKernel<kTile>), dim3(groups),
                         dim3(kThreads), arguments, 0, stream);
}

}  // namespace

hipError_t LaunchLanes(const LaneArgs& args, hipStream_t stream) {
  switch (args.tile) {
    case TileKind::kRow:
      break;
    case TileKind::k16x16:
      return Launch<TileKind::k16x16>(args, stream);
    case TileKind::kE8m0:
      return Launch<TileKind::kE8m0>(args, stream);
    case TileKind::kN32K4:
      return Launch<TileKind::kN32K4>(args, stream);
  }
  return hipErrorInvalidValue;
}

const char* CompiledArchitectureList() { return SHARDPREP_GPU_ARCHITECTURE_LIST; }

}  // namespace shardprep
