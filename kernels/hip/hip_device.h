// The HIP runtime behind LaneDevice. Two sources implement this header: hip_device.cc, and
// hip_absent.cc in builds without HIP, where both functions return FAILED_PRECONDITION saying so.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/hip/lane_shuffler.h"

namespace shardprep {

// FAILED_PRECONDITION when there is no driver or no device; never 0.
absl::StatusOr<int> HipDeviceCount();

// Device `index` of this process. FAILED_PRECONDITION for an index that does not exist.
absl::StatusOr<std::unique_ptr<LaneDevice>> OpenHipDevice(int index);

}  // namespace shardprep
