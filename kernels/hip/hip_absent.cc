#include "kernels/hip/hip_device.h"

namespace shardprep {
namespace {

absl::Status BuiltWithout() {
  return absl::FailedPreconditionError(
      "this program was built without HIP (SHARDPREP_HIP); use the CPU or a build with HIP");
}

}  // namespace

absl::StatusOr<int> HipDeviceCount() { return BuiltWithout(); }

absl::StatusOr<std::unique_ptr<LaneDevice>> OpenHipDevice(int /*index*/) { return BuiltWithout(); }

}  // namespace shardprep
