#include "kernels/hip/gpu_runtime.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/hip/gpu_api.h"
#include "kernels/hip/lane_launch.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

#if defined(SHARDPREP_GPU_CUDA)
constexpr char kKind[] = "cuda";
#else
constexpr char kKind[] = "hip";
#endif

absl::Status Check(hipError_t error, absl::string_view what) {
  if (error == hipSuccess) return absl::OkStatus();
  return GpuStatus(static_cast<int>(error), what);
}

std::string ArchitectureOf(const hipDeviceProp_t& properties) {
#if defined(SHARDPREP_GPU_CUDA)
  return absl::StrCat("sm_", properties.major, properties.minor);
#else
  return properties.gcnArchName;
#endif
}

class Runtime final : public GpuRuntime {
 public:
  std::string kind() const override { return kKind; }

  std::vector<std::string> CompiledArchitectures() const override {
    return absl::StrSplit(CompiledArchitectureList(), ',');
  }

  absl::StatusOr<int> DeviceCount() override {
    int count = 0;
    const hipError_t error = hipGetDeviceCount(&count);
    // Whatever the number, there is nothing here to shuffle on; runtimes differ in what they say.
    if (error != hipSuccess) {
      return absl::FailedPreconditionError(
          GpuStatus(static_cast<int>(error), absl::StrCat("count ", kKind, " devices")).message());
    }
    if (count < 1) {
      return absl::FailedPreconditionError(absl::StrCat("the ", kKind, " runtime finds no device"));
    }
    return count;
  }

  absl::StatusOr<std::string> Architecture(int device) override {
    hipDeviceProp_t properties;
    SP_RETURN_IF_ERROR(Check(hipGetDeviceProperties(&properties, device), "read properties"));
    return ArchitectureOf(properties);
  }

  absl::StatusOr<std::string> PciAddress(int device) override {
    char address[32] = "";
    SP_RETURN_IF_ERROR(
        Check(hipDeviceGetPCIBusId(address, static_cast<int>(sizeof(address)), device),
              "read PCI address"));
    return std::string(address);
  }

  absl::Status Select(int device) override { return Check(hipSetDevice(device), "select device"); }

  absl::StatusOr<GpuStream> MakeStream() override {
    hipStream_t stream = nullptr;
    SP_RETURN_IF_ERROR(
        Check(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking), "create stream"));
    return static_cast<GpuStream>(stream);
  }
  void DestroyStream(GpuStream stream) override { (void)hipStreamDestroy(StreamOf(stream)); }

  absl::StatusOr<uint8_t*> AllocatePinned(int64_t bytes) override {
    void* memory = nullptr;
    SP_RETURN_IF_ERROR(
        Check(hipHostMalloc(&memory, static_cast<size_t>(bytes), hipHostMallocDefault),
              absl::StrCat("allocate ", bytes, " bytes of pinned memory")));
    return static_cast<uint8_t*>(memory);
  }
  void FreePinned(uint8_t* memory) override { (void)hipHostFree(memory); }

  absl::Status Pin(uint8_t* memory, int64_t bytes) override {
    const absl::Status status =
        Check(hipHostRegister(memory, static_cast<size_t>(bytes), hipHostRegisterDefault),
              absl::StrCat("pin ", bytes, " bytes"));
    // About the memory; a device that is lost says so to the calls that use it.
    return absl::IsUnavailable(status) ? absl::FailedPreconditionError(status.message()) : status;
  }
  void Unpin(uint8_t* memory) override { (void)hipHostUnregister(memory); }

  absl::StatusOr<uint8_t*> AllocateOnDevice(int64_t bytes) override {
    void* memory = nullptr;
    SP_RETURN_IF_ERROR(Check(hipMalloc(&memory, static_cast<size_t>(bytes)),
                             absl::StrCat("allocate ", bytes, " bytes of device memory")));
    return static_cast<uint8_t*>(memory);
  }
  void FreeOnDevice(uint8_t* memory) override { (void)hipFree(memory); }

  absl::Status CopyIn(uint8_t* device, const uint8_t* pinned, int64_t bytes,
                      GpuStream stream) override {
    return Check(hipMemcpyAsync(device, pinned, static_cast<size_t>(bytes), hipMemcpyHostToDevice,
                                StreamOf(stream)),
                 "copy to device");
  }
  absl::Status CopyOut(uint8_t* pinned, const uint8_t* device, int64_t bytes,
                       GpuStream stream) override {
    return Check(hipMemcpyAsync(pinned, device, static_cast<size_t>(bytes), hipMemcpyDeviceToHost,
                                StreamOf(stream)),
                 "copy from device");
  }
  absl::Status CopyOnDevice(uint8_t* to, const uint8_t* from, int64_t bytes,
                            GpuStream stream) override {
    return Check(hipMemcpyAsync(to, from, static_cast<size_t>(bytes), hipMemcpyDeviceToDevice,
                                StreamOf(stream)),
                 "copy on device");
  }

  absl::Status Launch(const LaneArgs& args, GpuStream stream) override {
    return Check(LaunchLanes(args, StreamOf(stream)), "launch");
  }

  absl::Status Wait(GpuStream stream) override {
    return Check(hipStreamSynchronize(StreamOf(stream)), "wait for device");
  }

 private:
  static hipStream_t StreamOf(GpuStream stream) { return static_cast<hipStream_t>(stream); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRuntime>> MakeGpuRuntime() {
  return std::unique_ptr<GpuRuntime>(std::make_unique<Runtime>());
}

absl::Status GpuStatus(int code, absl::string_view what) {
  const auto error = static_cast<hipError_t>(code);
  const std::string message =
      absl::StrCat(what, ": ", hipGetErrorString(error), " (", kKind, " error ", code, ")");
  switch (error) {
    case hipErrorOutOfMemory:
      return absl::ResourceExhaustedError(message);
    case hipErrorNoBinaryForGpu:
    case hipErrorInvalidDeviceFunction:
    case hipErrorInvalidImage:
    case hipErrorInvalidKernelFile:
      return absl::FailedPreconditionError(
          absl::StrCat(message, "; kernels were compiled for ", CompiledArchitectureList()));
    case hipErrorNoDevice:
    case hipErrorInvalidDevice:
    case hipErrorInsufficientDriver:
    case hipErrorNotInitialized:
      return absl::FailedPreconditionError(message);
    case hipErrorInvalidValue:
      return absl::InternalError(message);
    default:
      // A fault of the device or its driver: another worker or a restarted one can do the work.
      return absl::UnavailableError(message);
  }
}

}  // namespace shardprep
