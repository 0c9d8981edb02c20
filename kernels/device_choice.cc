#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/hip/hip_device.h"
#include "kernels/shuffle.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

absl::StatusOr<DeviceChoice> ChooseHip(int index, const std::string& wish) {
  const absl::StatusOr<int> count = HipDeviceCount();
  if (!count.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device '", wish, "': ", count.status().message()));
  }
  if (index >= *count) {
    return absl::FailedPreconditionError(
        absl::StrCat("device '", wish, "': this process sees ", *count, " HIP devices"));
  }
  return DeviceChoice{DeviceKind::kHip, index, absl::StrCat("device '", wish, "' was asked for")};
}

DeviceChoice ChooseAny() {
  const absl::StatusOr<int> count = HipDeviceCount();
  if (!count.ok()) {
    return {DeviceKind::kCpu, 0,
            absl::StrCat("no GPU is used, the CPU shuffles: ", count.status().message())};
  }
  return {DeviceKind::kHip, 0, absl::StrCat("the first of ", *count, " HIP devices")};
}

// The device that "hip" or "hip:N" names; nothing for another word.
std::optional<int> HipIndex(absl::string_view wish) {
  if (wish == "hip") return 0;
  int index = 0;
  if (!absl::ConsumePrefix(&wish, "hip:") || !absl::SimpleAtoi(wish, &index) || index < 0) {
    return std::nullopt;
  }
  return index;
}

}  // namespace

absl::Status CheckDeviceName(absl::string_view wish) {
  if (wish == "auto" || wish == "cpu" || HipIndex(wish).has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unknown device '", wish, "', want auto, cpu, hip or hip:N"));
}

absl::StatusOr<DeviceChoice> ChooseDevice(absl::string_view wish) {
  SP_RETURN_IF_ERROR(CheckDeviceName(wish));
  if (wish == "auto") return ChooseAny();
  if (wish == "cpu") return DeviceChoice{DeviceKind::kCpu, 0, "device 'cpu' was asked for"};
  return ChooseHip(*HipIndex(wish), std::string(wish));
}

absl::StatusOr<std::unique_ptr<Shuffler>> MakeHipShuffler(int device) {
  SP_ASSIGN_OR_RETURN(std::unique_ptr<LaneDevice> opened, OpenHipDevice(device));
  return MakeLaneShuffler(std::move(opened));
}

absl::StatusOr<std::unique_ptr<Shuffler>> MakeShuffler(const DeviceChoice& choice) {
  if (choice.kind == DeviceKind::kCpu) return MakeHostShuffler();
  return MakeHipShuffler(choice.index);
}

}  // namespace shardprep
