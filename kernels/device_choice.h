// Which device a worker shuffles on: the host or one GPU, as it was told to or as measured.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/shuffle.h"

namespace shardprep {

struct ChosenDevice {
  std::unique_ptr<Shuffler> shuffler;
  std::string reason;  // one sentence for the log
};

// Whether `wish` is one of "cpu", "hip", "hip:N", "auto" and "auto:N". Looks at no device.
// INVALID_ARGUMENT.
absl::Status CheckDeviceName(absl::string_view wish);

// The same, and whether the GPU is there that "hip" or "hip:N" asks for: FAILED_PRECONDITION says
// why not. What "auto" and "cpu" ask for is always there.
absl::Status CheckDevicePresent(absl::string_view wish);

// Opens the device of a worker that shuffles with `threads` threads. "hip" is "hip:0". "auto" and
// "auto:N" run both paths, GPU N's with its copies, for some milliseconds on bytes like those of a
// checkpoint, and take the faster; the host when there is no GPU, or one that cannot be used. The
// reason has the rates or the error.
// INVALID_ARGUMENT for another word. "hip": FAILED_PRECONDITION when the build has no HIP, the
// machine no such device, or the device an architecture that was not compiled for;
// RESOURCE_EXHAUSTED when its buffers do not fit; UNAVAILABLE or INTERNAL when it fails or computes
// wrong bytes.
absl::StatusOr<ChosenDevice> OpenDevice(absl::string_view wish, int threads);

// The wish of worker `index` of several that run on one machine with `wish`: "hip" and "auto" are
// dealt out to its GPUs in turn, other wishes hold for all.
std::string DeviceOfWorker(absl::string_view wish, int index);

// Bytes per second that `shuffler` puts out when each of `threads` threads shuffles what a worker
// does for an expert, weights and scales in its block sizes; median of several passes after a
// first. Errors of Shuffle().
absl::StatusOr<double> MeasureShuffler(Shuffler& shuffler, int threads);

// What the functions above look at, for tests.
struct DeviceSource {
  std::function<absl::StatusOr<int>()> count;
  std::function<absl::StatusOr<std::unique_ptr<Shuffler>>(int device)> open;
  std::function<absl::StatusOr<double>(Shuffler&)> measure;
};
absl::Status CheckDevicePresent(absl::string_view wish, const DeviceSource& source);
absl::StatusOr<ChosenDevice> OpenDevice(absl::string_view wish, int threads,
                                        const DeviceSource& source);
std::string DeviceOfWorker(absl::string_view wish, int index, const DeviceSource& source);

}  // namespace shardprep
