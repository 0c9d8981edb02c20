// shardprep-worker: composes a worker from its flags and runs it until it is drained.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <prometheus/registry.h>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "kernels/device_choice.h"
#include "workers/byte_size.h"
#include "workers/clock.h"
#include "workers/environment.h"
#include "workers/grpc_channel.h"
#include "workers/log.h"
#include "workers/metrics_http.h"
#include "workers/program_flags.h"
#include "workers/resources.h"
#include "workers/s3/s3_client.h"
#include "workers/s3/s3_metrics.h"
#include "workers/s3/s3_options.h"
#include "workers/version.h"
#include "workers/worker.h"
#include "workers/worker_link.h"
#include "workers/worker_metrics.h"

ABSL_FLAG(std::string, controller, "", "Address of the controller: unix:/path or host:port.");
ABSL_FLAG(std::string, worker_id, "",
          "Unique name of this worker. Default: host name and process id.");
ABSL_FLAG(std::string, memory_budget, "auto",
          "Memory that the worker's buffers may take. auto: 512MiB, or half of the control group's "
          "limit where that is less.");
ABSL_FLAG(int, threads, 0, absl::StrCat("Threads that prepare. ", shardprep::kDefaultThreadsHelp));
ABSL_FLAG(std::string, device, "auto",
          "Where shuffles run: cpu, hip:N (GPU N; hip is hip:0), or auto:N: the faster of both, "
          "measured at start (auto is auto:0).");
ABSL_FLAG(std::string, metrics_listen, "",
          "Address for /metrics and /livez, for example 0.0.0.0:9465. Empty: none.");
ABSL_FLAG(std::string, log_level, "info", "Least level that is logged: info, warning or error.");
ABSL_FLAG(bool, exit_with_stdin, false,
          "End when standard input is closed, so that the worker does not outlive its parent.");
ABSL_FLAG(std::vector<std::string>, allow_source_root, {},
          "Directories that symbolic links inside a source may lead into.");
ABSL_FLAG(std::string, tls_cert, "", "PEM certificate of this worker.");
ABSL_FLAG(std::string, tls_key, "", "PEM key of this worker.");
ABSL_FLAG(std::string, tls_ca, "", "PEM certificates of the authority that the controller uses.");
ABSL_FLAG(bool, allow_insecure, false, "Allow plaintext to addresses that are not local.");

namespace shardprep {
namespace {

constexpr absl::Duration kSynchronizeDeadline = absl::Seconds(30);
constexpr int kMaxThreads = 4096;
constexpr absl::Duration kLiveness = absl::Seconds(120);

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "worker", "cannot go on", {{"status", status}});
  return 1;
}

// Waits in a thread of its own for SIGTERM, SIGINT or the end of standard input, then drains.
// Signals are blocked in every thread before the first is made, so only this one takes them.
class Ending {
 public:
  Ending(Worker& worker, bool watch_stdin) : worker_(worker) {
    thread_ = std::thread([this, watch_stdin] { Wait(watch_stdin); });
  }
  ~Ending() {
    done_ = true;
    pthread_kill(thread_.native_handle(), SIGINT);  // wakes it
    thread_.join();
  }

  static void BlockSignals() {
    sigset_t set = Signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
  }

 private:
  static sigset_t Signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    return set;
  }

  void Wait(bool watch_stdin) {
    const sigset_t set = Signals();
    const timespec turn{.tv_sec = 0, .tv_nsec = 100'000'000};
    while (!done_) {
      if (sigtimedwait(&set, nullptr, &turn) > 0 && !done_) worker_.Drain();
      pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
      if (!watch_stdin || poll(&input, 1, 0) <= 0) continue;
      char ignored[64];
      if (read(STDIN_FILENO, ignored, sizeof(ignored)) > 0) continue;
      // The parent is gone and nobody will take a report: end at once. What is not recorded is
      // redone by whoever resumes the job.
      Log(LogLevel::kWarning, "worker", "parent is gone, ending");
      _exit(3);
    }
  }

  Worker& worker_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

std::string DefaultWorkerId() {
  char host[256] = "host";
  gethostname(host, sizeof(host) - 1);
  return std::string(host) + "-" + std::to_string(getpid());
}

// What goes to a GPU and comes from it should not cross to another memory node. Threads and memory
// that are there already, those of the GPU's runtime among them, would stay where they are, so the
// program starts over, bound to the processors of the device's node, of which then all that it
// makes is. Where nothing is known of nodes, or another binding is in force, that stays.
void StartOverNear(const Shuffler& shuffler, char** argv) {
  const Processors own = OwnProcessors();
  const Processors near = ProcessorsNear(shuffler.pci_address(), own);
  if (near.empty() || near == own) return;
  Log(LogLevel::kInfo, "worker", "starting over near the device",
      {{"device", shuffler.name()},
       {"processors", static_cast<int64_t>(near.size())},
       {"of", static_cast<int64_t>(own.size())}});
  const absl::Status status = StartOverOn(near, argv);
  Log(LogLevel::kWarning, "worker", "not started over", {{"status", status}});
}

// A worker of directories goes on without S3; a job that needs it is then told so.
std::shared_ptr<S3Connection> S3FromFlags(S3Observer* observer) {
  const auto options = MakeS3Options(S3ProgramFlags(), ReadEnvironmentVariable);
  auto connection = options.ok() ? ConnectS3(*options, {.observer = observer}) : options.status();
  if (connection.ok()) return *std::move(connection);
  Log(LogLevel::kWarning, "worker", "S3 cannot be used", {{"status", connection.status()}});
  return nullptr;
}

// `config` is the effective configuration when that is all that is wanted.
int Main(const std::optional<std::string>& config, char** argv) {
  Ending::BlockSignals();
  if (config.has_value()) std::fputs(config->c_str(), stdout);
  const auto log_level = ParseLogLevel(absl::GetFlag(FLAGS_log_level));
  if (!log_level.ok()) return Fail(log_level.status());
  SetLeastLogLevel(*log_level);
  // A stopped worker cannot notice that its parent is gone; the kernel ends it all the same.
  if (absl::GetFlag(FLAGS_exit_with_stdin)) prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::string budget_text = absl::GetFlag(FLAGS_memory_budget);
  const absl::StatusOr<int64_t> budget =
      budget_text == "auto" ? DefaultMemoryBudget(OwnCgroupLimits()) : ParseByteSize(budget_text);
  if (!budget.ok()) return Fail(budget.status());
  const int threads = absl::GetFlag(FLAGS_threads);
  if (threads < 0 || threads > kMaxThreads) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("threads: ", threads, ", want 0 to ", kMaxThreads)));
  }
  WorkerOptions options;
  options.worker_id = absl::GetFlag(FLAGS_worker_id);
  if (options.worker_id.empty()) options.worker_id = DefaultWorkerId();
  options.memory_budget_bytes = *budget;
  options.threads = threads > 0 ? threads : DefaultThreads();
  options.allowed_source_roots = absl::GetFlag(FLAGS_allow_source_root);

  const auto device = OpenDevice(absl::GetFlag(FLAGS_device), options.threads);
  if (!device.ok()) return Fail(device.status());
  if (!config.has_value()) StartOverNear(*device->shuffler, argv);
  // Commands that run a worker show this line to people (service/cli_console.cc).
  Log(LogLevel::kInfo, "worker", "device chosen",
      {{"device", device->shuffler->name()}, {"reason", device->reason}});

  const ConnectionSecurity security{.tls = {.certificate = absl::GetFlag(FLAGS_tls_cert),
                                            .key = absl::GetFlag(FLAGS_tls_key),
                                            .ca = absl::GetFlag(FLAGS_tls_ca)},
                                    .allow_insecure = absl::GetFlag(FLAGS_allow_insecure)};
  const auto channel = MakeChannel(absl::GetFlag(FLAGS_controller), security);
  if (!channel.ok()) return Fail(channel.status());
  if (config.has_value()) return 0;
  const auto link = MakeGrpcLink(*channel, kSynchronizeDeadline);

  const SystemClock clock;
  const auto registry = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics(*registry, kToolVersion);
  metrics.SetMemoryBudget(*budget);
  S3Metrics s3_metrics(*registry);
  options.s3 = S3FromFlags(&s3_metrics);
  Worker worker(options, link.get(), device->shuffler.get(), &clock, &metrics);
  std::unique_ptr<MetricsServer> server;
  if (const std::string address = absl::GetFlag(FLAGS_metrics_listen); !address.empty()) {
    auto started = MetricsServer::Start(
        address, registry, [&] { return clock.Monotonic() - worker.LastTurn() < kLiveness; });
    if (!started.ok()) return Fail(started.status());
    server = std::move(*started);
    Log(LogLevel::kInfo, "worker", "metrics", {{"address", server->address()}});
  }
  const Ending ending(worker, absl::GetFlag(FLAGS_exit_with_stdin));
  const absl::Status status = worker.Run();
  if (!status.ok()) return Fail(status);
  Log(LogLevel::kInfo, "worker", "drained");
  return 0;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  const auto config = shardprep::ParseProgramFlags(
      argc, argv,
      "Prepares what a shardprep controller leases to it, until SIGTERM.\n\n"
      "  shardprep-worker --controller=unix:/run/shardprep/controller.sock --memory_budget=512MiB");
  return shardprep::Main(config, argv);
}
