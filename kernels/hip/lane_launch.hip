#include <hip/hip_runtime.h>

#include "kernels/hip/lane_launch.h"

namespace shardprep {
namespace {

constexpr int64_t kThreads = 256;

template <TileKind kTile>
__global__ __launch_bounds__(kThreads) void LaneKernel(LaneArgs args) {
  const int64_t lane = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (lane < LaneCount(args)) ShuffleLane<kTile>(args, lane);
}

template <TileKind kTile>
hipError_t Launch(const LaneArgs& args, hipStream_t stream) {
  const int64_t groups = (LaneCount(args) + kThreads - 1) / kThreads;
  hipLaunchKernelGGL(HIP_KERNEL_NAME(LaneKernel<kTile>), dim3(static_cast<uint32_t>(groups)),
                     dim3(kThreads), 0, stream, args);
  return hipGetLastError();
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

const char* CompiledArchitectures() { return SHARDPREP_HIP_ARCHITECTURE_LIST; }

}  // namespace shardprep
