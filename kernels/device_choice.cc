#include "kernels/device_choice.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kernels/hip/gpu_runtime.h"
#include "kernels/hip/lane_shuffler.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

enum class Where : uint8_t { kCpu, kGpu, kFaster };

struct Wish {
  Where where;
  std::optional<int> index;  // stated
  int gpu() const { return index.value_or(0); }
};

absl::StatusOr<Wish> ParseWish(absl::string_view wish) {
  if (wish == "cpu") return Wish{Where::kCpu, std::nullopt};
  for (const auto& [word, where] :
       {std::pair("hip", Where::kGpu), std::pair("auto", Where::kFaster)}) {
    absl::string_view rest = wish;
    if (!absl::ConsumePrefix(&rest, word)) continue;
    if (rest.empty()) return Wish{where, std::nullopt};
    int index = 0;
    if (absl::ConsumePrefix(&rest, ":") && absl::SimpleAtoi(rest, &index) && index >= 0) {
      return Wish{where, index};
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown device '", wish, "', want cpu, hip, hip:N, auto or auto:N"));
}

absl::StatusOr<int> CountGpus() {
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<GpuRuntime> runtime, MakeGpuRuntime());
  return runtime->DeviceCount();
}

absl::StatusOr<std::unique_ptr<Shuffler>> OpenGpu(int device) {
  SP_ASSIGN_OR_RETURN(std::shared_ptr<GpuRuntime> runtime, MakeGpuRuntime());
  return MakeLaneShuffler(std::move(runtime), device);
}

DeviceSource ThisMachine(int threads) {
  return {.count = CountGpus, .open = OpenGpu, .measure = [threads](Shuffler& shuffler) {
            return MeasureShuffler(shuffler, threads);
          }};
}

std::string Rate(const Shuffler& shuffler, double bytes_per_second) {
  return absl::StrFormat("%s %.2f GB/s", shuffler.name(), bytes_per_second * 1e-9);
}

ChosenDevice HostBecause(absl::string_view why, const absl::Status& status) {
  return {MakeHostShuffler(),
          absl::StrCat("no GPU is used, ", why, ": ", std::string(status.message()))};
}

absl::StatusOr<ChosenDevice> OpenFaster(int device, int threads, const DeviceSource& source) {
  const absl::StatusOr<int> count = source.count();
  if (!count.ok()) return HostBecause("there is none", count.status());
  absl::StatusOr<std::unique_ptr<Shuffler>> gpu = source.open(device);
  if (!gpu.ok()) return HostBecause("it cannot be opened", gpu.status());
  const absl::StatusOr<double> gpu_rate = source.measure(**gpu);
  if (!gpu_rate.ok()) return HostBecause("it failed", gpu_rate.status());
  std::unique_ptr<Shuffler> host = MakeHostShuffler();
  SP_ASSIGN_OR_RETURN(const double host_rate, source.measure(*host));
  const bool gpu_wins = *gpu_rate > host_rate;
  std::string reason =
      absl::StrCat("the faster, measured with ", threads, " threads: ", Rate(**gpu, *gpu_rate),
                   ", ", Rate(*host, host_rate));
  return ChosenDevice{gpu_wins ? *std::move(gpu) : std::move(host), std::move(reason)};
}

// Calls of one shape.
struct SampleCalls {
  ShuffleJob job;
  int64_t stride_bytes;
  int times;
};

// What a worker calls for one expert of a model with hidden size 7168 and intermediate size 3072
// and one rank of 8: blocks of about 256 KiB of source rows, of which w2 takes an eighth of each.
constexpr SampleCalls kExpertCalls[] = {
    {{LayoutId::kAiter16x16, RowOrder::kAsIs, 64, 3584, 3584}, 3584, 12},    // w13
    {{LayoutId::kAiter16x16, RowOrder::kAsIs, 160, 192, 192}, 1536, 45},     // w2
    {{LayoutId::kAiterE8m0Expert, RowOrder::kAsIs, 768, 224, 224}, 224, 1},  // scales of w13
    {{LayoutId::kAiterE8m0Expert, RowOrder::kAsIs, 2400, 12, 12}, 96, 3},    // scales of w2
};

// What one thread shuffles.
class SampleExpert {
 public:
  // `out` has LargestOutput() bytes.
  explicit SampleExpert(uint8_t* out) : out_(out) {
    int64_t largest_in = 0;
    for (const SampleCalls& calls : kExpertCalls) {
      largest_in = std::max(largest_in, calls.job.rows * calls.stride_bytes);
    }
    in_.resize(static_cast<size_t>(largest_in));
    for (size_t k = 0; k < in_.size(); ++k) in_[k] = static_cast<uint8_t>(k * 131 + k / 251);
  }

  absl::Status Shuffle(Shuffler& shuffler) {
    for (const SampleCalls& calls : kExpertCalls) {
      const RowsView view{in_.data(), calls.stride_bytes, 0, calls.job.rows};
      for (int k = 0; k < calls.times; ++k) {
        SP_RETURN_IF_ERROR(
            shuffler.Shuffle(calls.job, absl::MakeConstSpan(&view, 1), 0, calls.job.rows, out_));
      }
    }
    return absl::OkStatus();
  }

  static int64_t LargestOutput() {
    int64_t largest = 0;
    for (const SampleCalls& calls : kExpertCalls) {
      largest = std::max(largest, calls.job.rows * OutputCols(calls.job));
    }
    return largest;
  }

  static int64_t OutputBytes() {
    int64_t bytes = 0;
    for (const SampleCalls& calls : kExpertCalls) {
      bytes += calls.times * calls.job.rows * OutputCols(calls.job);
    }
    return bytes;
  }

 private:
  std::vector<uint8_t> in_;
  uint8_t* const out_;
};

}  // namespace

absl::StatusOr<double> MeasureShuffler(Shuffler& shuffler, int threads) {
  constexpr int kPasses = 6;  // the first is not counted
  constexpr int kExperts = 2;
  using Clock = std::chrono::steady_clock;
  std::vector<absl::Status> statuses(static_cast<size_t>(threads));
  std::vector<double> seconds;
  std::barrier pass(threads);
  std::vector<uint8_t> out(static_cast<size_t>(threads * SampleExpert::LargestOutput()));
  // A shuffler that cannot use it is measured without, as it would be run.
  shuffler.UseMemory(absl::MakeSpan(out)).IgnoreError();
  const absl::Cleanup stop_using = [&] { shuffler.UseMemory({}).IgnoreError(); };
  const auto run = [&](int thread) {
    SampleExpert expert(out.data() + thread * SampleExpert::LargestOutput());
    absl::Status& status = statuses[static_cast<size_t>(thread)];
    for (int k = 0; k < kPasses; ++k) {
      pass.arrive_and_wait();
      const auto begin = Clock::now();
      for (int e = 0; e < kExperts && status.ok(); ++e) status = expert.Shuffle(shuffler);
      pass.arrive_and_wait();
      if (thread != 0 || k == 0) continue;
      seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  for (const absl::Status& status : statuses) SP_RETURN_IF_ERROR(status);
  std::nth_element(seconds.begin(), seconds.begin() + kPasses / 2, seconds.end());
  return static_cast<double>(SampleExpert::OutputBytes() * kExperts * threads) /
         seconds[kPasses / 2];
}

absl::Status CheckDeviceName(absl::string_view wish) { return ParseWish(wish).status(); }

absl::Status CheckDevicePresent(absl::string_view wish, const DeviceSource& source) {
  SP_ASSIGN_OR_RETURN(const Wish parsed, ParseWish(wish));
  if (parsed.where != Where::kGpu) return absl::OkStatus();
  const absl::StatusOr<int> count = source.count();
  if (!count.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device '", wish, "': ", std::string(count.status().message())));
  }
  if (parsed.gpu() < *count) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("device '", wish, "': this process sees ", *count, " HIP devices"));
}

absl::Status CheckDevicePresent(absl::string_view wish) {
  return CheckDevicePresent(wish, ThisMachine(1));
}

absl::StatusOr<ChosenDevice> OpenDevice(absl::string_view wish, int threads,
                                        const DeviceSource& source) {
  SP_ASSIGN_OR_RETURN(const Wish parsed, ParseWish(wish));
  if (parsed.where == Where::kFaster) return OpenFaster(parsed.gpu(), threads, source);
  const std::string reason = absl::StrCat("'", wish, "' was asked for");
  if (parsed.where == Where::kCpu) return ChosenDevice{MakeHostShuffler(), reason};
  SP_RETURN_IF_ERROR(CheckDevicePresent(wish, source));
  SP_ASSIGN_OR_RETURN(std::unique_ptr<Shuffler> gpu, source.open(parsed.gpu()));
  return ChosenDevice{std::move(gpu), reason};
}

absl::StatusOr<ChosenDevice> OpenDevice(absl::string_view wish, int threads) {
  return OpenDevice(wish, threads, ThisMachine(threads));
}

std::string DeviceOfWorker(absl::string_view wish, int index, const DeviceSource& source) {
  const absl::StatusOr<Wish> parsed = ParseWish(wish);
  if (!parsed.ok() || parsed->where == Where::kCpu || parsed->index.has_value()) {
    return std::string(wish);
  }
  const absl::StatusOr<int> count = source.count();
  if (!count.ok()) return std::string(wish);
  return absl::StrCat(wish, ":", index % *count);
}

std::string DeviceOfWorker(absl::string_view wish, int index) {
  return DeviceOfWorker(wish, index, ThisMachine(1));
}

}  // namespace shardprep
