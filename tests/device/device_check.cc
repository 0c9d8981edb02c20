// Checks a GPU against the host: every layout through the worker's own path, bit for bit, then how
// fast. Per geometry of a checkpoint the kernel is timed against a copy on the device of as many
// bytes, alternately in one run (medians); then the whole path, copies over the bus included,
// against the host's.
//
//   device_check               every GPU that the runtime of this build shows
//   device_check --device=1    one
//   device_check --emulated    no GPU: launches loop over their lanes in host memory
//
// device_check is built with HIP where the build has it; device_check_cuda is the same source with
// CUDA. Exit code 0: all equal; 1: a byte differs or a call fails; 77: there is no GPU.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/device_choice.h"
#include "kernels/extents.h"
#include "kernels/hip/gpu_runtime.h"
#include "kernels/hip/lane_shuffler.h"
#include "kernels/layout.h"
#include "kernels/shuffle.h"
#include "kernels/status_macros.h"
#include "tests/kernels/emulated_gpu.h"

ABSL_FLAG(int, device, -1, "Number of the GPU; -1: all.");
ABSL_FLAG(bool, emulated, false, "Run launches in host memory, without a GPU.");
ABSL_FLAG(int64_t, mebibytes, 256, "Size of what is timed.");

namespace shardprep {
namespace {

constexpr int kNoDevice = 77;  // what ctest takes for skipped

struct Geometry {
  const char* name;
  ShuffleJob job;
};

// One rank of 8 of a model with hidden size 7168 and intermediate size 3072.
constexpr Geometry kGeometries[] = {
    {"w13", {LayoutId::kAiter16x16, RowOrder::kAsIs, 768, 3584, 3584}},
    {"w13 gate-up", {LayoutId::kAiter16x16GateUp, RowOrder::kAsIs, 768, 3584, 3584}},
    {"w2", {LayoutId::kAiter16x16, RowOrder::kAsIs, 7168, 192, 192}},
    {"w2 padded", {LayoutId::kAiter16x16, RowOrder::kAsIs, 7168, 192, 256}},
    {"w13 scales", {LayoutId::kAiterE8m0Expert, RowOrder::kAsIs, 768, 224, 224}},
    {"w2 scales", {LayoutId::kAiterE8m0Expert, RowOrder::kAsIs, 7168, 12, 12}},
    {"w13 n32k4", {LayoutId::kAiterN32K4, RowOrder::kGateUpRows, 768, 224, 224}},
};

// Every layout in either row order, around the edges of tiles, and the geometries.
std::vector<ShuffleJob> JobsOf(LayoutId layout) {
  std::vector<ShuffleJob> jobs;
  for (const RowOrder order : {RowOrder::kAsIs, RowOrder::kGateUpRows}) {
    for (const int64_t rows : {32, 64, 96, 160}) {
      for (const int64_t padded : {1, 4, 8, 12, 16, 20, 32, 64, 96, 128, 192, 256, 416}) {
        for (const int64_t native : {0, 1, 5, 12, 15, 16, 17, 64, 100, 127, 128, 129, 192, 416}) {
          const ShuffleJob job{layout, order, rows, native, padded};
          if (native <= padded && CheckShuffleJob(job).ok()) jobs.push_back(job);
        }
      }
    }
  }
  for (const Geometry& geometry : kGeometries) {
    if (geometry.job.layout == layout) jobs.push_back(geometry.job);
  }
  return jobs;
}

std::string Describe(const ShuffleJob& job) {
  return absl::StrCat(GetLayoutInfo(job.layout).name,
                      job.row_order == RowOrder::kAsIs ? "" : " of g0,u0 rows", ", ", job.rows,
                      " rows, ", job.native_cols, " of ", job.padded_cols, " columns");
}

// INTERNAL when the outputs differ. Rows of both halves are pad rows in part, and stand further
// apart than they are long.
absl::Status CompareJob(Shuffler& device, Shuffler& host, const ShuffleJob& job) {
  const int64_t stride = job.native_cols + 3;
  std::vector<uint8_t> source(static_cast<size_t>(job.rows * stride));
  for (int64_t k = 0; k < static_cast<int64_t>(source.size()); ++k) {
    source[static_cast<size_t>(k)] = static_cast<uint8_t>(k * 167 + k / 256 * 13 + k / stride);
  }
  const int64_t half = job.rows / 2;
  const std::vector<RowsView> views = {
      {source.data(), stride, 0, half - 3},
      {source.data() + half * stride, stride, half, job.rows - half - 5}};
  std::vector<uint8_t> want(static_cast<size_t>(job.rows * OutputCols(job)), 0x55);
  std::vector<uint8_t> found(want.size());
  SP_RETURN_IF_ERROR(host.Shuffle(job, views, 0, job.rows, want.data()));
  const absl::Cleanup stop_using = [&] { device.UseMemory({}).IgnoreError(); };
  for (const bool straight : {false, true}) {
    if (straight) SP_RETURN_IF_ERROR(device.UseMemory(absl::MakeSpan(found)));
    std::fill(found.begin(), found.end(), 0xAA);
    SP_RETURN_IF_ERROR(device.Shuffle(job, views, 0, job.rows, found.data()));
    const auto differ = std::mismatch(want.begin(), want.end(), found.begin());
    if (differ.first == want.end()) continue;
    return absl::InternalError(absl::StrCat(Describe(job), straight ? ", copied straight" : "",
                                            ": byte ", differ.first - want.begin(), " is 0x",
                                            absl::Hex(*differ.second, absl::kZeroPad2), ", want 0x",
                                            absl::Hex(*differ.first, absl::kZeroPad2)));
  }
  return absl::OkStatus();
}

absl::Status CompareLayouts(Shuffler& device) {
  const std::unique_ptr<Shuffler> host = MakeHostShuffler(HostIsa::kScalar);
  for (const LayoutInfo& layout : AllLayouts()) {
    const std::vector<ShuffleJob> jobs = JobsOf(layout.id);
    int64_t bytes = 0;
    for (const ShuffleJob& job : jobs) {
      SP_RETURN_IF_ERROR(CompareJob(device, *host, job));
      bytes += job.rows * OutputCols(job);
    }
    std::printf("  %-22s %4zu shapes, %9lld bytes: equal\n", layout.name, jobs.size(),
                static_cast<long long>(bytes));
  }
  return absl::OkStatus();
}

// What the runtime refuses must fail nothing that follows: here, to pin memory that is pinned.
absl::Status CheckRefusal(GpuRuntime& runtime, int device, Shuffler& shuffler) {
  std::vector<uint8_t> memory(size_t{1} << 20);
  SP_RETURN_IF_ERROR(runtime.Select(device));
  SP_RETURN_IF_ERROR(runtime.Pin(memory.data(), static_cast<int64_t>(memory.size())));
  const absl::Cleanup unpin = [&] { runtime.Unpin(memory.data()); };
  const absl::Status refused = shuffler.UseMemory(absl::MakeSpan(memory));
  std::printf("  memory that is pinned already: %s\n", refused.ToString().c_str());
  if (!absl::IsFailedPrecondition(refused)) {
    return absl::InternalError("pinned twice, want FAILED_PRECONDITION");
  }
  const std::unique_ptr<Shuffler> host = MakeHostShuffler(HostIsa::kScalar);
  return CompareJob(shuffler, *host, kGeometries[0].job);
}

// Buffers on the device for timing, and a stream.
class Bench {
 public:
  explicit Bench(GpuRuntime& runtime) : runtime_(runtime) {}
  ~Bench() {
    if (in_ != nullptr) runtime_.FreeOnDevice(in_);
    if (out_ != nullptr) runtime_.FreeOnDevice(out_);
    if (stream_ != nullptr) runtime_.DestroyStream(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  absl::Status Open(int device, int64_t bytes) {
    SP_RETURN_IF_ERROR(runtime_.Select(device));
    SP_ASSIGN_OR_RETURN(stream_, runtime_.MakeStream());
    SP_ASSIGN_OR_RETURN(in_, runtime_.AllocateOnDevice(bytes));
    SP_ASSIGN_OR_RETURN(out_, runtime_.AllocateOnDevice(bytes));
    bytes_ = bytes;
    return absl::OkStatus();
  }

  // Output bytes per second of the kernel and of a copy of as many.
  absl::StatusOr<std::pair<double, double>> Rates(const ShuffleJob& job) {
    LaneArgs args = LaneArgsOf(job);
    const int64_t row_bytes = std::max(args.src_pitch, args.out_cols);
    const int64_t block_rows = BlockRows(job);
    args = WithRows(args, bytes_ / (row_bytes * block_rows) * block_rows);
    args.src = in_;
    args.dst = out_;
    const int64_t bytes = args.rows * args.out_cols;
    std::vector<double> kernel, copy;
    constexpr int kRuns = 7;
    for (int run = 0; run <= kRuns; ++run) {
      SP_ASSIGN_OR_RETURN(const double kernel_seconds,
                          Time([&] { return runtime_.Launch(args, stream_); }));
      SP_ASSIGN_OR_RETURN(const double copy_seconds,
                          Time([&] { return runtime_.CopyOnDevice(out_, in_, bytes, stream_); }));
      if (run == 0) continue;  // warm-up
      kernel.push_back(kernel_seconds);
      copy.push_back(copy_seconds);
    }
    return std::pair(static_cast<double>(bytes) / Median(kernel),
                     static_cast<double>(bytes) / Median(copy));
  }

 private:
  // Seconds of one of several that are queued together, so that queueing hides behind running.
  absl::StatusOr<double> Time(const std::function<absl::Status()>& queue) {
    constexpr int kTimes = 8;
    const auto begin = std::chrono::steady_clock::now();
    for (int k = 0; k < kTimes; ++k) SP_RETURN_IF_ERROR(queue());
    SP_RETURN_IF_ERROR(runtime_.Wait(stream_));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kTimes;
  }

  static double Median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                     values.end());
    return values[values.size() / 2];
  }

  GpuRuntime& runtime_;
  GpuStream stream_ = nullptr;
  uint8_t* in_ = nullptr;
  uint8_t* out_ = nullptr;
  int64_t bytes_ = 0;
};

absl::Status PrintRates(GpuRuntime& runtime, int device, Shuffler& shuffler) {
  Bench bench(runtime);
  SP_RETURN_IF_ERROR(bench.Open(device, absl::GetFlag(FLAGS_mebibytes) << 20));
  std::printf("  %-22s %12s %12s %6s\n", "on the device, GB/s", "kernel", "copy", "ratio");
  for (const Geometry& geometry : kGeometries) {
    SP_ASSIGN_OR_RETURN(const auto rates, bench.Rates(geometry.job));
    std::printf("  %-22s %12.1f %12.1f %6.2f\n", geometry.name, rates.first * 1e-9,
                rates.second * 1e-9, rates.first / rates.second);
  }
  std::printf("  %-22s %12s %12s %6s\n", "over the bus, GB/s", "device", "host", "ratio");
  const std::unique_ptr<Shuffler> host = MakeHostShuffler();
  for (const int threads : {1, 4, 8}) {
    SP_ASSIGN_OR_RETURN(const double device_rate, MeasureShuffler(shuffler, threads));
    SP_ASSIGN_OR_RETURN(const double host_rate, MeasureShuffler(*host, threads));
    std::printf("  %d threads %24.2f %12.2f %6.2f\n", threads, device_rate * 1e-9, host_rate * 1e-9,
                device_rate / host_rate);
  }
  return absl::OkStatus();
}

absl::Status CheckDevice(const std::shared_ptr<GpuRuntime>& runtime, int device) {
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<Shuffler> shuffler, MakeLaneShuffler(runtime, device));
  std::printf("%s%s\n", shuffler->name().c_str(),
              absl::GetFlag(FLAGS_emulated) ? ", emulated" : "");
  SP_RETURN_IF_ERROR(CheckRefusal(*runtime, device, *shuffler));
  SP_RETURN_IF_ERROR(CompareLayouts(*shuffler));
  SP_RETURN_IF_ERROR(PrintRates(*runtime, device, *shuffler));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<GpuRuntime>> Runtime(bool emulated) {
  if (emulated) return std::shared_ptr<GpuRuntime>(std::make_shared<EmulatedGpu>());
  SP_ASSIGN_OR_RETURN(std::unique_ptr<GpuRuntime> runtime, MakeGpuRuntime());
  return std::shared_ptr<GpuRuntime>(std::move(runtime));
}

int Main() {
  const auto runtime = Runtime(absl::GetFlag(FLAGS_emulated));
  const auto count = runtime.ok() ? (*runtime)->DeviceCount() : runtime.status();
  if (!count.ok()) {
    std::printf("no GPU is checked: %s\n", count.status().ToString().c_str());
    return kNoDevice;
  }
  const int wanted = absl::GetFlag(FLAGS_device);
  for (int device = std::max(wanted, 0); device < (wanted < 0 ? *count : wanted + 1); ++device) {
    const absl::Status status = CheckDevice(*runtime, device);
    if (status.ok()) continue;
    std::printf("device %d: FAILED: %s\n", device, status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Compares every layout on a GPU with the host, then times both.");
  absl::ParseCommandLine(argc, argv);
  return shardprep::Main();
}
