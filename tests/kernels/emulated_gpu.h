// A GPU in host memory: streams are queues, a launch loops over its lanes. It checks that its
// caller keeps the contract of GpuRuntime, and can fail any call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/hip/gpu_runtime.h"

namespace shardprep {

struct EmulatedGpuOptions {
  int devices = 1;
  std::string architecture = "gfx942:sramecc+:xnack-";
  std::vector<std::string> compiled = {"gfx90a", "gfx942"};
  // Queued work runs at once; else when its stream is waited for, as on a slow device.
  bool eager = false;
  // Launches get one bit wrong.
  bool corrupt = false;
  int64_t pinned_bytes = int64_t{1} << 40;
  int64_t device_bytes = int64_t{1} << 40;
  // Called by the thread that waits, before the stream's work runs.
  std::function<void()> on_wait;
};

// Thread safe.
class EmulatedGpu final : public GpuRuntime {
 public:
  explicit EmulatedGpu(EmulatedGpuOptions options = {}) : options_(std::move(options)) {}
  ~EmulatedGpu() override;

  // Every call that can fail is counted; the one with this number, from 0, fails with `status`, and
  // with `lost` all that follow. What a failed call should have queued is not queued.
  void FailCall(int64_t number, absl::Status status, bool lost = false);

  int64_t calls() const;
  // The names of those calls in order, "copy-in 1" with the number of the stream, from 0.
  std::vector<std::string> Log() const;
  // Most streams that had work queued at the same time.
  int MostBusyStreams() const;
  int64_t MostPinnedBytes() const;
  int64_t MostDeviceBytes() const;
  int64_t AllocatedBytes() const;  // now, of both, pinned memory of callers among it
  int64_t BytesToCallers() const;  // that were copied out into pinned memory of callers
  // Breaches of the contract: memory that was not allocated or pinned, freed while in use, a device
  // that the thread has not selected.
  std::vector<std::string> Problems() const;

  std::string kind() const override { return "hip"; }
  std::vector<std::string> CompiledArchitectures() const override { return options_.compiled; }
  absl::StatusOr<int> DeviceCount() override;
  absl::StatusOr<std::string> Architecture(int device) override;
  absl::StatusOr<std::string> PciAddress(int device) override;
  absl::Status Select(int device) override;
  absl::StatusOr<GpuStream> MakeStream() override;
  void DestroyStream(GpuStream stream) override;
  absl::StatusOr<uint8_t*> AllocatePinned(int64_t bytes) override;
  void FreePinned(uint8_t* memory) override;
  absl::Status Pin(uint8_t* memory, int64_t bytes) override;
  void Unpin(uint8_t* memory) override;
  absl::StatusOr<uint8_t*> AllocateOnDevice(int64_t bytes) override;
  void FreeOnDevice(uint8_t* memory) override;
  absl::Status CopyIn(uint8_t* device, const uint8_t* pinned, int64_t bytes,
                      GpuStream stream) override;
  absl::Status CopyOut(uint8_t* pinned, const uint8_t* device, int64_t bytes,
                       GpuStream stream) override;
  absl::Status CopyOnDevice(uint8_t* to, const uint8_t* from, int64_t bytes,
                            GpuStream stream) override;
  absl::Status Launch(const LaneArgs& args, GpuStream stream) override;
  absl::Status Wait(GpuStream stream) override;

 private:
  struct Work {
    std::function<void()> run;
    std::vector<const uint8_t*> memory;  // that it uses
  };
  struct Stream {
    int number = 0;
    std::vector<Work> queue;
  };
  // Memory by its begin.
  struct Pool {
    const char* name;
    std::map<const uint8_t*, int64_t> blocks;
    int64_t bytes = 0;
    int64_t most = 0;
  };

  absl::Status Count(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CheckSelected(const char* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The block of the pool that the bytes lie in; nullptr, with a problem noted, for none.
  const uint8_t* CheckInside(const Pool& pool, const uint8_t* begin, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<uint8_t*> Allocate(Pool& pool, int64_t limit, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Free(Pool& pool, uint8_t* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // False, with a problem noted, for what is not a block of the pool.
  bool Forget(Pool& pool, uint8_t* memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Queue(const char* name, GpuStream stream, Work work)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const EmulatedGpuOptions options_;
  mutable absl::Mutex mu_;
  int64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t failing_call_ ABSL_GUARDED_BY(mu_) = -1;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool lost_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::string> log_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> problems_ ABSL_GUARDED_BY(mu_);
  std::map<std::thread::id, int> selected_ ABSL_GUARDED_BY(mu_);
  std::map<GpuStream, std::unique_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
  int streams_made_ ABSL_GUARDED_BY(mu_) = 0;
  int most_busy_ ABSL_GUARDED_BY(mu_) = 0;
  Pool pinned_ ABSL_GUARDED_BY(mu_) = {"pinned", {}};
  std::set<const uint8_t*> callers_ ABSL_GUARDED_BY(mu_);  // of pinned_, those of Pin()
  int64_t bytes_to_callers_ ABSL_GUARDED_BY(mu_) = 0;
  Pool device_ ABSL_GUARDED_BY(mu_) = {"device", {}};
};

}  // namespace shardprep
