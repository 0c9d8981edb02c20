// The host side of a device shuffle, over an interface small enough to stand in for in tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/hip/lane_kernel.h"
#include "kernels/shuffle.h"

namespace shardprep {

// A device with two slots, each a staging buffer for either direction and an order of its own, so
// that one slot transfers while the host fills the other. Not thread safe.
class LaneDevice {
 public:
  static constexpr int kSlots = 2;
  virtual ~LaneDevice() = default;

  // Makes the calling thread one that may use the device, and every slot at least this large.
  // Slots must be idle. RESOURCE_EXHAUSTED when memory, of host or device, does not suffice.
  virtual absl::Status Prepare(int64_t in_bytes, int64_t out_bytes) = 0;

  // Host memory of a slot, 64-byte aligned, valid until the next Prepare().
  virtual uint8_t* StagingIn(int slot) = 0;
  virtual const uint8_t* StagingOut(int slot) = 0;

  // Begins: copy args.rows * args.src_pitch bytes in, run ShuffleLane for every lane, copy the
  // output back. src and dst of `args` are the device's to set. The slot is busy until Wait().
  virtual absl::Status Start(int slot, const LaneArgs& args) = 0;

  // Ends what Start() began; no-op for an idle slot. UNAVAILABLE when the device was lost.
  virtual absl::Status Wait(int slot) = 0;

  virtual std::string name() const = 0;
};

// A shuffler on `device`. It first shuffles a small matrix through every tile kind and compares
// with the host: a device that differs is refused with INTERNAL, one that fails with its error.
absl::StatusOr<std::unique_ptr<Shuffler>> MakeLaneShuffler(std::unique_ptr<LaneDevice> device);

}  // namespace shardprep
