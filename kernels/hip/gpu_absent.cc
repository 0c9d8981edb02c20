#include "kernels/hip/gpu_runtime.h"

namespace shardprep {
namespace {

absl::Status BuiltWithout() {
  return absl::FailedPreconditionError(
      "this program was built without HIP (SHARDPREP_HIP); use the CPU or a build with HIP");
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRuntime>> MakeGpuRuntime() { return BuiltWithout(); }

absl::Status GpuStatus(int /*code*/, absl::string_view /*what*/) { return BuiltWithout(); }

}  // namespace shardprep
