#include "kernels/hip/hip_device.h"

#include <hip/hip_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/extents.h"
#include "kernels/hip/lane_launch.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

absl::Status HipStatus(hipError_t error, const std::string& what) {
  if (error == hipSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", hipGetErrorString(error), " (HIP error ",
                                           static_cast<int>(error), ")");
  switch (error) {
    case hipErrorOutOfMemory:
      return absl::ResourceExhaustedError(message);
    case hipErrorNoBinaryForGpu:
    case hipErrorInvalidDeviceFunction:
    case hipErrorInvalidImage:
    case hipErrorInvalidKernelFile:
      return absl::FailedPreconditionError(
          absl::StrCat(message, "; kernels were compiled for ", CompiledArchitectures()));
    case hipErrorNoDevice:
    case hipErrorInvalidDevice:
    case hipErrorInsufficientDriver:
    case hipErrorNotInitialized:
      return absl::FailedPreconditionError(message);
    default:
      // A fault of the device or its driver: another worker or a restarted one can do the work.
      return absl::UnavailableError(message);
  }
}

struct Slot {
  hipStream_t stream = nullptr;
  void* staging_in = nullptr;
  void* staging_out = nullptr;
  void* device_in = nullptr;
  void* device_out = nullptr;
  bool busy = false;
};

class HipDevice final : public LaneDevice {
 public:
  HipDevice(int index, const std::string& architecture)
      : index_(index), name_(absl::StrCat("hip:", index, "/", architecture)) {}

  ~HipDevice() override {
    if (hipSetDevice(index_) != hipSuccess) return;
    for (Slot& slot : slots_) {
      if (slot.busy) (void)hipStreamSynchronize(slot.stream);
      FreeBuffers(slot);
      if (slot.stream != nullptr) (void)hipStreamDestroy(slot.stream);
    }
  }

  absl::Status Prepare(int64_t in_bytes, int64_t out_bytes) override {
    SP_RETURN_IF_ERROR(Check(hipSetDevice(index_), "select device"));
    if (in_bytes <= in_bytes_ && out_bytes <= out_bytes_) return absl::OkStatus();
    const int64_t new_in = RoundUpTo(std::max(in_bytes, in_bytes_), kGrainBytes);
    const int64_t new_out = RoundUpTo(std::max(out_bytes, out_bytes_), kGrainBytes);
    in_bytes_ = 0;
    out_bytes_ = 0;
    for (Slot& slot : slots_) FreeBuffers(slot);
    for (Slot& slot : slots_) SP_RETURN_IF_ERROR(Allocate(slot, new_in, new_out));
    in_bytes_ = new_in;
    out_bytes_ = new_out;
    return absl::OkStatus();
  }

  uint8_t* StagingIn(int slot) override { return static_cast<uint8_t*>(slots_[slot].staging_in); }
  const uint8_t* StagingOut(int slot) override {
    return static_cast<const uint8_t*>(slots_[slot].staging_out);
  }

  absl::Status Start(int slot_index, const LaneArgs& host_args) override {
    Slot& slot = slots_[slot_index];
    LaneArgs args = host_args;
    args.src = static_cast<const uint8_t*>(slot.device_in);
    args.dst = static_cast<uint8_t*>(slot.device_out);
    const size_t in_bytes = static_cast<size_t>(args.rows * args.src_pitch);
    const size_t out_bytes = static_cast<size_t>(args.rows * args.out_cols);
    slot.busy = true;
    SP_RETURN_IF_ERROR(Check(hipMemcpyAsync(slot.device_in, slot.staging_in, in_bytes,
                                            hipMemcpyHostToDevice, slot.stream),
                             "copy to device"));
    SP_RETURN_IF_ERROR(Check(LaunchLanes(args, slot.stream), "launch"));
    return Check(hipMemcpyAsync(slot.staging_out, slot.device_out, out_bytes, hipMemcpyDeviceToHost,
                                slot.stream),
                 "copy from device");
  }

  absl::Status Wait(int slot_index) override {
    Slot& slot = slots_[slot_index];
    if (!slot.busy) return absl::OkStatus();
    slot.busy = false;
    return Check(hipStreamSynchronize(slot.stream), "wait for device");
  }

  std::string name() const override { return name_; }

 private:
  static constexpr int64_t kGrainBytes = int64_t{64} << 10;

  absl::Status Check(hipError_t error, const char* what) const {
    return HipStatus(error, absl::StrCat(name_, ": ", what));
  }

  absl::Status Allocate(Slot& slot, int64_t in_bytes, int64_t out_bytes) {
    const size_t in_size = static_cast<size_t>(in_bytes);
    const size_t out_size = static_cast<size_t>(out_bytes);
    if (slot.stream == nullptr) {
      SP_RETURN_IF_ERROR(
          Check(hipStreamCreateWithFlags(&slot.stream, hipStreamNonBlocking), "create stream"));
    }
    SP_RETURN_IF_ERROR(Check(hipHostMalloc(&slot.staging_in, in_size, hipHostMallocDefault),
                             "allocate pinned memory"));
    SP_RETURN_IF_ERROR(Check(hipHostMalloc(&slot.staging_out, out_size, hipHostMallocDefault),
                             "allocate pinned memory"));
    SP_RETURN_IF_ERROR(Check(hipMalloc(&slot.device_in, in_size), "allocate device memory"));
    return Check(hipMalloc(&slot.device_out, out_size), "allocate device memory");
  }

  static void FreeBuffers(Slot& slot) {
    if (slot.staging_in != nullptr) (void)hipHostFree(slot.staging_in);
    if (slot.staging_out != nullptr) (void)hipHostFree(slot.staging_out);
    if (slot.device_in != nullptr) (void)hipFree(slot.device_in);
    if (slot.device_out != nullptr) (void)hipFree(slot.device_out);
    slot.staging_in = slot.staging_out = slot.device_in = slot.device_out = nullptr;
  }

  const int index_;
  const std::string name_;
  int64_t in_bytes_ = 0;
  int64_t out_bytes_ = 0;
  Slot slots_[kSlots];
};

}  // namespace

absl::StatusOr<int> HipDeviceCount() {
  int count = 0;
  SP_RETURN_IF_ERROR(HipStatus(hipGetDeviceCount(&count), "count HIP devices"));
  if (count < 1) return absl::FailedPreconditionError("the HIP runtime finds no device");
  return count;
}

absl::StatusOr<std::unique_ptr<LaneDevice>> OpenHipDevice(int index) {
  SP_ASSIGN_OR_RETURN(const int count, HipDeviceCount());
  if (index < 0 || index >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("no HIP device ", index, ", this process sees ", count));
  }
  hipDeviceProp_t properties;
  SP_RETURN_IF_ERROR(HipStatus(hipGetDeviceProperties(&properties, index),
                               absl::StrCat("hip:", index, ": read properties")));
  return std::unique_ptr<LaneDevice>(
      std::make_unique<HipDevice>(index, std::string(properties.gcnArchName)));
}

}  // namespace shardprep
