// `shardprep bench`: what this machine can do, and how near a job comes to it.
//
// Everything is written below one directory of its own, which is removed at the end, whatever the
// end is: the made source, the files of the rooflines, and in turn a copy of the source and a job's
// destination.
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/device_choice.h"
#include "kernels/status_macros.h"
#include "service/bench_report.h"
#include "service/cli.h"
#include "service/cli_console.h"
#include "service/cli_signals.h"
#include "service/client.h"
#include "service/private_controller.h"
#include "workers/bench_source.h"
#include "workers/byte_size.h"
#include "workers/grpc_status.h"
#include "workers/open_store.h"
#include "workers/resources.h"
#include "workers/roofline.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "bench";
constexpr char kJobId[] = "bench";
constexpr absl::Duration kStopGrace = absl::Seconds(5);
constexpr int64_t kRooflineFileBytes = int64_t{256} << 20;
// What padding and headers may add to a copy of the source.
constexpr double kGrowth = 1.35;

struct BenchFlags {
  std::string directory;
  std::string source;
  int64_t size_bytes = int64_t{1} << 30;
  int64_t tensor_parallel_size = 8;
  int64_t threads = 0;
  int64_t memory_budget_bytes = int64_t{512} << 20;
  std::string device = "auto";
  int64_t repetitions = 5;
  bool json = false;

  int ThreadCount() const { return threads > 0 ? static_cast<int>(threads) : DefaultThreads(); }
};

// Ends the work in hand when a signal comes.
class StopSwitch {
 public:
  void Stop() {
    stop_ = true;
    absl::MutexLock lock(&mu_);
    if (client_ != nullptr) client_->StopWatching();
  }

  const std::atomic<bool>& flag() const { return stop_; }

  // The client to be told, or null.
  void Watch(PrepClient* client) {
    absl::MutexLock lock(&mu_);
    client_ = client;
    if (stop_ && client_ != nullptr) client_->StopWatching();
  }

 private:
  std::atomic<bool> stop_{false};
  absl::Mutex mu_;
  PrepClient* client_ ABSL_GUARDED_BY(mu_) = nullptr;
};

// A directory of its own below another, with all that is in it until destruction.
class WorkDirectory {
 public:
  static absl::StatusOr<std::unique_ptr<WorkDirectory>> Make(const std::string& parent) {
    std::string path = absl::StrCat(parent, "/shardprep-bench-XXXXXX");
    if (::mkdtemp(path.data()) == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(path, ": mkdtemp: ", ::strerror(errno)));
    }
    return std::make_unique<WorkDirectory>(std::move(path));
  }

  explicit WorkDirectory(std::string path) : path_(std::move(path)) {}
  WorkDirectory(const WorkDirectory&) = delete;
  WorkDirectory& operator=(const WorkDirectory&) = delete;
  ~WorkDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    if (error)
      std::fprintf(stderr, "%s: not removed: %s\n", path_.c_str(), error.message().c_str());
  }

  std::string Path(const char* name) const { return absl::StrCat(path_, "/", name); }

  absl::Status Remove(const char* name) const {
    std::error_code error;
    std::filesystem::remove_all(Path(name), error);
    if (!error) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(Path(name), ": ", error.message()));
  }

 private:
  const std::string path_;
};

absl::StatusOr<int64_t> BytesIn(const std::string& directory) {
  SP_ASSIGN_OR_RETURN(const auto store, OpenStore(directory, {}));
  SP_ASSIGN_OR_RETURN(const auto entries, store->List(""));
  int64_t bytes = 0;
  for (const ObjectEntry& entry : entries) bytes += entry.info.size_bytes;
  return bytes;
}

// Refused before anything is written.
absl::Status CheckSpace(const std::string& directory, int64_t want) {
  SP_ASSIGN_OR_RETURN(const auto store, OpenStore(directory, {}));
  SP_ASSIGN_OR_RETURN(const int64_t free, store->FreeBytes());
  if (free >= want) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(directory, ": ", FormatByteSize(free), " free, want ", FormatByteSize(want)));
}

v1::CreatePrepJobRequest RequestOf(const BenchFlags& flags, const std::string& source,
                                   const std::string& destination) {
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id(kJobId);
  v1::PrepJobSpec& spec = *request.mutable_spec();
  spec.set_source_uri(source);
  spec.set_carry(v1::CARRY_REPLICATED);
  spec.set_include_mtp(true);
  v1::Target& target = *spec.add_targets();
  target.set_destination_uri(destination);
  target.set_naming("vllm");
  v1::ParallelLayout& parallel = *target.mutable_parallel_layout();
  parallel.set_tensor_parallel_size(static_cast<int32_t>(flags.tensor_parallel_size));
  parallel.set_data_parallel_size(1);
  parallel.set_expert_parallel_size(1);
  v1::KernelTarget& kernel = *target.mutable_kernel_target();
  kernel.set_backend("AUTO");
  kernel.set_architecture("gfx950");
  kernel.set_profile("aiter-separated");
  return request;
}

// One job as `prepare` runs it: with a controller and a worker of its own.
absl::StatusOr<v1::PrepJob> RunJob(const BenchFlags& flags, const v1::CreatePrepJobRequest& request,
                                   StopSwitch& stop, Console& console, BenchRun& run) {
  const absl::Time begin = absl::Now();
  PrivateControllerOptions options;
  options.worker_threads = flags.ThreadCount();
  options.device = flags.device;
  options.memory_budget_bytes = flags.memory_budget_bytes;
  SP_ASSIGN_OR_RETURN(const auto controller, PrivateController::Start(options));
  SP_ASSIGN_OR_RETURN(const auto client, PrepClient::Make(controller->address()));
  stop.Watch(client.get());
  const absl::Cleanup unwatch = [&stop] { stop.Watch(nullptr); };
  const absl::Time started = absl::Now();
  SP_RETURN_IF_ERROR(client->Create(request).status());
  v1::PrepJob job;
  SP_RETURN_IF_ERROR(client->Watch(kJobId, [&job](const v1::PrepJob& state) {
    job = state;
    return true;
  }));
  run.job_seconds = absl::ToDoubleSeconds(absl::Now() - started);
  run.start_seconds = absl::ToDoubleSeconds(started - begin);
  console.PollLogs();
  console.DropLogs();
  controller->Stop(kStopGrace);
  if (job.state() == v1::PrepJob::STATE_SUCCEEDED) return job;
  const absl::Status error = FromRpcStatus(job.error());
  return error.ok() ? absl::CancelledError("the job did not succeed") : error;
}

// Copies and jobs in turn; the first of each does not count.
absl::Status MeasureJobs(const BenchFlags& flags, const WorkDirectory& place, StopSwitch& stop,
                         BenchResult& result) {
  const auto request = RequestOf(flags, result.source, place.Path("prepared"));
  for (int64_t r = 0; r <= flags.repetitions; ++r) {
    BenchRun run;
    SP_ASSIGN_OR_RETURN(const absl::Duration copied,
                        TimeDurableCopy(result.source, place.Path("copy")));
    run.copy_seconds = absl::ToDoubleSeconds(copied);
    SP_RETURN_IF_ERROR(place.Remove("copy"));
    if (stop.flag()) return absl::CancelledError("stopped");
    Console console(kCommand, /*capture_logs=*/true);
    SP_ASSIGN_OR_RETURN(const v1::PrepJob job, RunJob(flags, request, stop, console, run));
    SP_RETURN_IF_ERROR(place.Remove("prepared"));
    const v1::Progress& progress = job.progress();
    run.bytes_read = progress.bytes_read();
    run.bytes_written = progress.bytes_written();
    run.stage_seconds = {progress.stage_seconds().begin(), progress.stage_seconds().end()};
    result.needed_bytes = job.plan().needed_bytes();
    result.ranks = job.plan().rank_count();
    result.device = progress.device();
    console.Line(absl::StrFormat("repetition %d of %d: copy %.3f s, start %.3f s, job %.3f s%s", r,
                                 flags.repetitions, run.copy_seconds, run.start_seconds,
                                 run.job_seconds, r == 0 ? ", which does not count" : ""));
    if (r > 0) result.runs.push_back(std::move(run));
  }
  return absl::OkStatus();
}

absl::StatusOr<BenchResult> Bench(const BenchFlags& flags, StopSwitch& stop) {
  SP_ASSIGN_OR_RETURN(const ChosenDevice device, OpenDevice(flags.device, flags.ThreadCount()));
  // Rooflines and jobs alike run where a worker of this device does; it takes the binding over.
  const Processors near = ProcessorsNear(device.shuffler->pci_address(), OwnProcessors());
  if (!near.empty()) RunOnlyOn(near);
  BenchResult result;
  result.threads = flags.ThreadCount();
  result.source = flags.source;
  const bool made = flags.source.empty();
  result.source_bytes = flags.size_bytes;
  if (!made) {
    SP_ASSIGN_OR_RETURN(result.source_bytes, BytesIn(flags.source));
  }
  const auto grown = static_cast<int64_t>(kGrowth * static_cast<double>(result.source_bytes));
  SP_RETURN_IF_ERROR(CheckSpace(
      flags.directory, (made ? result.source_bytes : 0) + std::max(grown, kRooflineFileBytes)));
  SP_ASSIGN_OR_RETURN(const auto place, WorkDirectory::Make(flags.directory));
  if (made) {
    result.source = place->Path("source");
    SP_ASSIGN_OR_RETURN(const auto store, OpenStore(result.source, {.create = true}));
    SP_RETURN_IF_ERROR(WriteBenchSource(*store, flags.size_bytes, &stop.flag()));
    SP_ASSIGN_OR_RETURN(result.source_bytes, BytesIn(result.source));
  }
  std::error_code error;
  const std::string files = place->Path("rooflines");
  std::filesystem::create_directory(files, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat(files, ": ", error.message()));
  SP_ASSIGN_OR_RETURN(result.rooflines,
                      MeasureRooflines({.directory = files,
                                        .threads = result.threads,
                                        .file_bytes = kRooflineFileBytes,
                                        .repetitions = static_cast<int>(flags.repetitions),
                                        .shuffler = device.shuffler.get(),
                                        .stop = &stop.flag()}));
  SP_RETURN_IF_ERROR(place->Remove("rooflines"));
  SP_RETURN_IF_ERROR(MeasureJobs(flags, *place, stop, result));
  return result;
}

absl::Status MakeAbsolute(const CliContext& context, BenchFlags& flags) {
  const auto directory = [&](std::string& path) -> absl::Status {
    if (IsS3Uri(path)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": want a directory"));
    }
    SP_ASSIGN_OR_RETURN(path, NormalizeUri(path, context.working_directory));
    return absl::OkStatus();
  };
  if (!flags.source.empty()) SP_RETURN_IF_ERROR(directory(flags.source));
  return directory(flags.directory);
}

}  // namespace

int RunBench(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep bench",
                 .summary =
                     "Measures what this machine can do in a directory (memory, files, digests, "
                     "shuffles), runs jobs there in turn with plain durable copies of the same "
                     "source, and says of each stage of the job how far it is from what bounds it. "
                     "Everything that it writes is removed again.",
                 .example = "  shardprep bench /data --size 2GiB\n"
                            "  shardprep bench /data --source DeepSeek-V4-Pro --json"});
  BenchFlags wish;
  flags.Argument("DIRECTORY", "Existing directory to measure in.", &wish.directory);
  flags.String("source", "DIR", "Checkpoint to prepare. Default: one is made in DIRECTORY.",
               &wish.source);
  flags.Size("size", "Size of the checkpoint that is made, to the nearest expert.",
             &wish.size_bytes);
  flags.Int("tensor-parallel-size", "N", "Ranks of the job.", 1, 4096, &wish.tensor_parallel_size);
  flags.Int("threads", "N", absl::StrCat("Threads of the worker. ", kDefaultThreadsHelp), 0, 4096,
            &wish.threads);
  flags.Size("memory-budget", "Memory for the buffers of the worker.", &wish.memory_budget_bytes);
  flags.String("device", "DEVICE", "Where shuffles run: cpu, hip:N or auto, as for prepare.",
               &wish.device);
  flags.Int("repetitions", "N", "Repetitions that count, after one that does not.", 1, 1000,
            &wish.repetitions);
  flags.Bool("json", "Prints one JSON object.", &wish.json);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const absl::Status paths = MakeAbsolute(context, wish);
  if (!paths.ok()) return Fail(kCommand, paths);
  const absl::Status device = CheckDevicePresent(wish.device);
  if (!device.ok()) return Fail(kCommand, device, "--device cpu shuffles without a GPU.");
  StopSwitch stop;
  context.interrupts->Handle([&stop](int) { stop.Stop(); });
  const auto result = Bench(wish, stop);
  context.interrupts->Handle([](int) {});
  if (const int signal = context.interrupts->taken(); signal != 0) return 128 + signal;
  if (!result.ok()) {
    return Fail(kCommand, result.status(),
                absl::IsResourceExhausted(result.status())
                    ? "Give a smaller --size, or a directory with more room."
                    : "");
  }
  if (wish.json) {
    std::printf("%s\n", BenchJson(*result).c_str());
  } else {
    std::fputs(BenchText(*result).c_str(), stdout);
  }
  return kExitOk;
}

}  // namespace shardprep
