// The calls of a GPU runtime that a shuffle needs, as an interface: what is built on it is tested
// with a runtime that counts, reorders and fails calls in host memory. Two sources implement
// MakeGpuRuntime(): gpu_runtime.cc, for HIP or CUDA, and gpu_absent.cc in builds without either.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/hip/lane_kernel.h"

namespace shardprep {

using GpuStream = void*;

// Thread safe. Calls that take no device act on the one that the calling thread selected last. Work
// on one stream runs in the order in which it was queued, on two streams in any. Every call may
// also return an error of earlier queued work, but not that of a call that failed at once: what is
// refused fails nothing else. RESOURCE_EXHAUSTED: memory of host or device; FAILED_PRECONDITION: no
// driver, no such device, or one that the compiled kernels do not run on; INTERNAL: a call of ours
// was wrong; UNAVAILABLE: the device or its driver failed, and will not work again in this process.
class GpuRuntime {
 public:
  virtual ~GpuRuntime() = default;

  // "hip" or "cuda"; begins the names of devices.
  virtual std::string kind() const = 0;
  // What the kernels were compiled for, for example {"gfx90a", "gfx942"}.
  virtual std::vector<std::string> CompiledArchitectures() const = 0;

  // Never 0: FAILED_PRECONDITION when there is no driver or no device.
  virtual absl::StatusOr<int> DeviceCount() = 0;
  // For example "gfx942:sramecc+:xnack-".
  virtual absl::StatusOr<std::string> Architecture(int device) = 0;
  // For example "0000:c1:00.0".
  virtual absl::StatusOr<std::string> PciAddress(int device) = 0;
  virtual absl::Status Select(int device) = 0;

  virtual absl::StatusOr<GpuStream> MakeStream() = 0;
  virtual void DestroyStream(GpuStream stream) = 0;
  // Aligned to 64 bytes at least. Pinned host memory can be copied while the host goes on.
  virtual absl::StatusOr<uint8_t*> AllocatePinned(int64_t bytes) = 0;
  virtual void FreePinned(uint8_t* memory) = 0;
  // Pins memory of the caller, which must stay until Unpin(), with the same `memory`, has returned.
  // FAILED_PRECONDITION also where the system pins no such memory, or it is pinned already.
  virtual absl::Status Pin(uint8_t* memory, int64_t bytes) = 0;
  virtual void Unpin(uint8_t* memory) = 0;
  virtual absl::StatusOr<uint8_t*> AllocateOnDevice(int64_t bytes) = 0;
  virtual void FreeOnDevice(uint8_t* memory) = 0;

  // These queue and return; the memory is in use until Wait() for the stream has returned.
  virtual absl::Status CopyIn(uint8_t* device, const uint8_t* pinned, int64_t bytes,
                              GpuStream stream) = 0;
  virtual absl::Status CopyOut(uint8_t* pinned, const uint8_t* device, int64_t bytes,
                               GpuStream stream) = 0;
  virtual absl::Status CopyOnDevice(uint8_t* to, const uint8_t* from, int64_t bytes,
                                    GpuStream stream) = 0;
  // Runs ShuffleLane for every lane of `args`, whose pointers are of the device.
  virtual absl::Status Launch(const LaneArgs& args, GpuStream stream) = 0;

  // Returns when all that was queued on the stream is done.
  virtual absl::Status Wait(GpuStream stream) = 0;
};

// The runtime of this build. FAILED_PRECONDITION when it was built without one.
absl::StatusOr<std::unique_ptr<GpuRuntime>> MakeGpuRuntime();

// The status of error number `code` of this build's runtime, as above; `what` begins the message.
absl::Status GpuStatus(int code, absl::string_view what);

}  // namespace shardprep
