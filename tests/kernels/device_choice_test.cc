#include "kernels/device_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/hip/lane_shuffler.h"
#include "tests/kernels/emulated_gpu.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

// A machine with emulated GPUs and rates that a test states.
struct Machine {
  int gpus = 2;
  absl::Status open_error, measure_error;
  double gpu_rate = 9e9, host_rate = 8e9;

  DeviceSource Source() const {
    const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.devices = gpus});
    return {
        .count = [gpu] { return gpu->DeviceCount(); },
        .open = [gpu, error = open_error](int device) -> absl::StatusOr<std::unique_ptr<Shuffler>> {
          if (!error.ok()) return error;
          return MakeLaneShuffler(gpu, device);
        },
        .measure = [*this](Shuffler& shuffler) -> absl::StatusOr<double> {
          if (absl::StartsWith(shuffler.name(), "cpu/")) return host_rate;
          if (!measure_error.ok()) return measure_error;
          return gpu_rate;
        }};
  }
};

TEST(DeviceChoice, WordsThatAreNoDeviceAreRefused) {
  for (const char* word : {"", "gpu", "hip:", "hip:-1", "hip:x", "hip0", "auto:", "cpu:0", "CPU"}) {
    EXPECT_EQ(CheckDeviceName(word).code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_EQ(CheckDevicePresent(word).code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_EQ(OpenDevice(word, 1).status().code(), absl::StatusCode::kInvalidArgument) << word;
  }
  for (const char* word : {"cpu", "hip", "hip:0", "hip:12", "auto", "auto:3"}) {
    EXPECT_TRUE(CheckDeviceName(word).ok()) << word;
  }
}

TEST(DeviceChoice, AWishIsMetOrRefusedButNeverReplaced) {
  const DeviceSource source = Machine{}.Source();
  EXPECT_THAT(OpenDevice("cpu", 1, source).value().shuffler->name(), HasSubstr("cpu/"));
  EXPECT_EQ(OpenDevice("hip", 1, source).value().shuffler->name(), "hip:0/gfx942");
  EXPECT_EQ(OpenDevice("hip:1", 1, source).value().shuffler->name(), "hip:1/gfx942");
  EXPECT_EQ(OpenDevice("hip:1", 1, source).value().reason, "'hip:1' was asked for");
  const absl::Status beyond = OpenDevice("hip:2", 1, source).status();
  EXPECT_EQ(beyond.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(beyond.message(), "device 'hip:2': this process sees 2 HIP devices");
  Machine none;
  none.gpus = 0;
  EXPECT_EQ(OpenDevice("hip", 1, none.Source()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  Machine full;
  full.open_error = absl::ResourceExhaustedError("no memory");
  EXPECT_EQ(OpenDevice("hip", 1, full.Source()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(DeviceChoice, AutoTakesWhatMeasuresFasterAndSaysBothRates) {
  const ChosenDevice gpu = OpenDevice("auto:1", 8, Machine{}.Source()).value();
  EXPECT_EQ(gpu.shuffler->name(), "hip:1/gfx942");
  EXPECT_THAT(gpu.reason, HasSubstr("measured with 8 threads: hip:1/gfx942 9.00 GB/s, cpu/"));
  Machine slow;
  slow.gpu_rate = 7.5e9;
  const ChosenDevice host = OpenDevice("auto", 8, slow.Source()).value();
  EXPECT_THAT(host.shuffler->name(), HasSubstr("cpu/"));
  EXPECT_THAT(host.reason, HasSubstr("hip:0/gfx942 7.50 GB/s, cpu/"));
  EXPECT_THAT(host.reason, HasSubstr(" 8.00 GB/s"));
}

TEST(DeviceChoice, AutoGoesOnWithoutAGpuAndSaysWhy) {
  Machine none, unsupported, broken;
  none.gpus = 0;
  unsupported.open_error = absl::FailedPreconditionError("architecture gfx1100");
  broken.measure_error = absl::UnavailableError("fell off the bus");
  const std::pair<Machine, const char*> cases[] = {
      {none, "there is none: emulated: no device"},
      {unsupported, "it cannot be opened: architecture gfx1100"},
      {broken, "it failed: fell off the bus"},
  };
  for (const auto& [machine, why] : cases) {
    const ChosenDevice chosen = OpenDevice("auto", 1, machine.Source()).value();
    EXPECT_THAT(chosen.shuffler->name(), HasSubstr("cpu/"));
    EXPECT_THAT(chosen.reason, HasSubstr(why));
  }
}

TEST(DeviceChoice, WorkersOfOneMachineGetGpusInTurn) {
  const DeviceSource source = Machine{}.Source();
  EXPECT_EQ(DeviceOfWorker("hip", 0, source), "hip:0");
  EXPECT_EQ(DeviceOfWorker("hip", 1, source), "hip:1");
  EXPECT_EQ(DeviceOfWorker("hip", 2, source), "hip:0");
  EXPECT_EQ(DeviceOfWorker("auto", 3, source), "auto:1");
  EXPECT_EQ(DeviceOfWorker("hip:0", 1, source), "hip:0");
  EXPECT_EQ(DeviceOfWorker("cpu", 1, source), "cpu");
  Machine none;
  none.gpus = 0;
  EXPECT_EQ(DeviceOfWorker("auto", 1, none.Source()), "auto");
}

// Passes calls on and counts them.
class CountingShuffler final : public Shuffler {
 public:
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                       int64_t out_end, uint8_t* out) override {
    ++calls;
    bytes += (out_end - out_begin) * OutputCols(job);
    if (calls == failing_call) return absl::UnavailableError("fell off the bus");
    return host_->Shuffle(job, views, out_begin, out_end, out);
  }
  std::string name() const override { return "counting"; }

  std::atomic<int64_t> calls{0}, bytes{0};
  int64_t failing_call = -1;

 private:
  const std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
};

TEST(DeviceChoice, TheMeasureRunsWeightsAndScalesOnEveryThread) {
  CountingShuffler one, three;
  EXPECT_GT(MeasureShuffler(one, 1).value(), 0);
  EXPECT_GT(MeasureShuffler(three, 3).value(), 0);
  EXPECT_EQ(three.calls, 3 * one.calls);
  EXPECT_EQ(three.bytes, 3 * one.bytes);
  // Whole experts: w13, w2 and the scales of both, of 12 columns and 4 of fill in w2.
  const int64_t expert =
      int64_t{768} * 3584 + int64_t{7200} * 192 + int64_t{768} * 224 + int64_t{7200} * 16;
  EXPECT_EQ(one.bytes % expert, 0);
}

TEST(DeviceChoice, AMeasureThatFailsReturnsTheErrorFromAnyThread) {
  for (const int threads : {1, 4}) {
    CountingShuffler failing;
    failing.failing_call = 5;
    EXPECT_EQ(MeasureShuffler(failing, threads).status().code(), absl::StatusCode::kUnavailable);
  }
}

TEST(DeviceChoice, ThisMachineOpensWhatItHas) {
  const ChosenDevice any = OpenDevice("auto", 2).value();
  EXPECT_FALSE(any.reason.empty());
  const absl::Status gpu = CheckDevicePresent("hip");
  EXPECT_EQ(OpenDevice("hip", 1).ok(), gpu.ok());
  if (gpu.ok()) {
    EXPECT_THAT(any.reason, HasSubstr("GB/s"));
    return;
  }
  EXPECT_EQ(gpu.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(any.shuffler->name(), HasSubstr("cpu/"));
  EXPECT_THAT(any.reason, HasSubstr("no GPU is used, there is none: "));
}

}  // namespace
}  // namespace shardprep
