// Drain
//
// 1. Readiness goes off, so that callers look elsewhere; nothing new is accepted, started or
//    leased. Commits and removals in hand go on.
// 2. Work in hand may finish, for half of the grace time.
// 3. What is left is withdrawn: workers stop and give it back. Recorded parts stay, and the next
//    controller goes on from them.
// 4. Local workers are ended and reaped, while they can still report that they hold nothing.
// 5. Watches and held calls end with UNAVAILABLE, so that clients open them elsewhere.
// 6. The server stops: calls in hand may end by themselves, then they are cancelled.
// 7. Threads are joined, the state directory is let go, the metrics port closes last.
#include "service/controller_host.h"

#include <prometheus/registry.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/device_choice.h"
#include "kernels/status_macros.h"
#include "service/controller.h"
#include "service/controller_metrics.h"
#include "service/job_store.h"
#include "service/local_workers.h"
#include "service/prep_backend.h"
#include "service/server.h"
#include "service/sqlite_job_store.h"
#include "workers/clock.h"
#include "workers/log.h"
#include "workers/metrics_http.h"
#include "workers/version.h"
#include "workers/worker.h"

namespace shardprep {
namespace {

// Time that steps 5 to 7 of a drain take at most, kept back from the grace time.
constexpr absl::Duration kTailOfDrain = absl::Seconds(2);

absl::Duration Left(absl::Time deadline) {
  return std::max(absl::ZeroDuration(), deadline - absl::Now());
}

// 64 random bits in hexadecimal: ids that no other controller gives.
std::string RandomId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x", random(), random());
}

class Host : public ControllerHost {
 public:
  explicit Host(ControllerHostOptions options)
      : options_(std::move(options)),
        instance_(RandomId()),
        registry_(std::make_shared<prometheus::Registry>()),
        metrics_(*registry_, kToolVersion) {}

  ~Host() override { Host::Drain(absl::ZeroDuration()); }

  // All that can be said of the options without starting. Leaves the backend made.
  absl::Status CheckOptions() {
    SP_RETURN_IF_ERROR(CheckNumbers());
    SP_RETURN_IF_ERROR(CheckDeviceName(options_.device));
    SP_RETURN_IF_ERROR(CheckAllowLists());
    if (options_.listen.empty()) return absl::InvalidArgumentError("no address to listen on");
    for (const std::string& address : options_.listen) {
      SP_RETURN_IF_ERROR(CheckAddress(address, options_.security));
    }
    for (const std::string& address : {options_.health_listen, options_.metrics_listen}) {
      if (address.empty()) continue;
      SP_RETURN_IF_ERROR(CheckAddress(address, {.tls = {}, .allow_insecure = true}));
    }
    SP_RETURN_IF_ERROR(PeerPolicy::Make(options_.roles, options_.security).status());
    if (!options_.sign_key.empty()) {
      SP_ASSIGN_OR_RETURN(signer_, SigningKey::Read(options_.sign_key));
    }
    SP_ASSIGN_OR_RETURN(backend_, MakePrepBackend({.allow_source = options_.allow_source,
                                                   .allow_destination = options_.allow_destination,
                                                   .allow_source_root = options_.allow_source_root,
                                                   .s3 = options_.s3,
                                                   .signer = signer_}));
    return absl::OkStatus();
  }

  absl::Status Start() {
    SP_RETURN_IF_ERROR(CheckOptions());
    SP_RETURN_IF_ERROR(OpenStore());
    SP_RETURN_IF_ERROR(StartController());
    SP_ASSIGN_OR_RETURN(server_, Server::Start({.listen = options_.listen,
                                                .security = options_.security,
                                                .roles = options_.roles,
                                                .reflection = options_.reflection,
                                                .health_listen = options_.health_listen},
                                               controller_.get()));
    if (!options_.metrics_listen.empty()) {
      SP_ASSIGN_OR_RETURN(metrics_server_,
                          MetricsServer::Start(options_.metrics_listen, registry_));
    }
    if (options_.local_workers > 0) SP_RETURN_IF_ERROR(StartWorkers());
    server_->SetReady(true);
    Log(LogLevel::kInfo, "controller", "ready",
        {{"version", kToolVersion},
         {"listen", absl::StrJoin(server_->addresses(), ",")},
         {"metrics", metrics_address()},
         {"local_workers", options_.local_workers},
         {"signs_as", signer_ == nullptr ? "" : signer_->key_id()}});
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return server_->addresses(); }

  std::string health_address() const override {
    return server_ == nullptr ? "" : server_->health_address();
  }

  std::string metrics_address() const override {
    return metrics_server_ == nullptr ? "" : metrics_server_->address();
  }

  void Drain(absl::Duration grace) override {
    if (std::exchange(drained_, true) || controller_ == nullptr) return;
    const absl::Time deadline = absl::Now() + grace;
    const absl::Time withdraw_by = deadline - std::min(kTailOfDrain, grace / 4);
    Log(LogLevel::kInfo, "controller", "draining", {{"grace", grace}});
    if (server_ != nullptr) server_->SetReady(false);
    controller_->StopLeasing();
    if (!controller_->AwaitQuiet(absl::Now() + grace / 2)) {
      controller_->WithdrawLeases();
      if (!controller_->AwaitQuiet(withdraw_by)) {
        Log(LogLevel::kWarning, "controller", "leases are still open at the end of the grace time");
      }
    }
    if (workers_ != nullptr) workers_->Stop(Left(withdraw_by));
    controller_->EndStreams();
    if (server_ != nullptr) server_->Shutdown(Left(deadline));
    // Joins the threads that may still be in the handler; only then may the workers' object go.
    controller_.reset();
    store_.reset();
    workers_.reset();
    metrics_server_.reset();
    Log(LogLevel::kInfo, "controller", "drained");
  }

 private:
  absl::Status CheckNumbers() const {
    const auto check = [](const char* flag, int64_t value, int64_t least, int64_t most) {
      if (value >= least && value <= most) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": ", value, ", want ", least, " to ", most));
    };
    SP_RETURN_IF_ERROR(check("local workers", options_.local_workers, 0, 256));
    SP_RETURN_IF_ERROR(check("worker threads", options_.worker_threads, 0, 4096));
    SP_RETURN_IF_ERROR(check("memory budget", options_.memory_budget_bytes, 1, int64_t{1} << 50));
    SP_RETURN_IF_ERROR(check("queued jobs", options_.max_queued_jobs, 1, 1'000'000));
    SP_RETURN_IF_ERROR(check("finished jobs", options_.max_finished_jobs, 1, 1'000'000));
    // Below that the fence leaves a worker no time in which it may write.
    return check("lease duration in seconds", absl::ToInt64Seconds(options_.lease_duration),
                 2 * absl::ToInt64Seconds(kFenceMargin), 3600);
  }

  absl::Status CheckAllowLists() const {
    for (const std::string& address : options_.listen) {
      if (IsLocalAddress(address)) continue;
      if (!options_.allow_source.empty() && !options_.allow_destination.empty()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "listening on ", address,
          " lets others name files of this machine: give --allow-source and --allow-destination"));
    }
    return absl::OkStatus();
  }

  absl::Status OpenStore() {
    if (options_.state_directory.empty()) {
      store_ = std::make_unique<MemoryJobStore>();
      return absl::OkStatus();
    }
    SP_ASSIGN_OR_RETURN(store_, OpenSqliteJobStore({.directory = options_.state_directory,
                                                    .file_system_type = nullptr}));
    return absl::OkStatus();
  }

  absl::Status StartController() {
    ControllerOptions options;
    options.queue.build = ThisBuild();
    options.queue.lease_duration = options_.lease_duration;
    options.queue.fence_margin = kFenceMargin;
    options.queue.max_unfinished_jobs = options_.max_queued_jobs;
    options.queue.max_finished_jobs = options_.max_finished_jobs;
    options.plan_memory_budget_bytes = options_.memory_budget_bytes;
    if (options_.local_workers > 0) {
      options.worker_memory_budget_bytes = options_.memory_budget_bytes;
    }
    SP_ASSIGN_OR_RETURN(controller_,
                        Controller::Start(options, &clock_, backend_.get(), store_.get(), &metrics_,
                                          [] { return RandomId(); }));
    return absl::OkStatus();
  }

  absl::Status StartWorkers() {
    LocalWorkersOptions workers;
    workers.count = options_.local_workers;
    workers.id_prefix = absl::StrCat("local-", instance_);
    workers.program = options_.worker_program;
    if (workers.program.empty()) {
      SP_ASSIGN_OR_RETURN(workers.program, BinaryBesideOwn("shardprep-worker"));
    }
    workers.arguments = {absl::StrCat("--controller=", LocalAddress()),
                         "--worker_id={id}",
                         absl::StrCat("--memory_budget=", options_.memory_budget_bytes),
                         absl::StrCat("--threads=", options_.worker_threads),
                         "--exit_with_stdin",
                         absl::StrCat("--log_level=", LogLevelName(LeastLogLevel()))};
    for (int slot = 0; slot < workers.count; ++slot) {
      const std::string device =
          workers.count == 1 ? options_.device : DeviceOfWorker(options_.device, slot);
      workers.slot_arguments.push_back({absl::StrCat("--device=", device)});
    }
    if (!options_.allow_source_root.empty()) {
      workers.arguments.push_back(
          absl::StrCat("--allow_source_root=", absl::StrJoin(options_.allow_source_root, ",")));
    }
    const S3Flags& s3 = options_.s3_flags;
    for (const auto& [name, value] :
         {std::pair("endpoint", s3.endpoint), std::pair("region", s3.region),
          std::pair("addressing", s3.addressing), std::pair("ca_bundle", s3.ca_bundle),
          std::pair("payload", s3.payload)}) {
      if (!value.empty()) workers.arguments.push_back(absl::StrCat("--s3_", name, "=", value));
    }
    const TlsFiles& tls = options_.security.tls;
    if (!tls.certificate.empty()) {
      workers.arguments.push_back(absl::StrCat("--tls_cert=", tls.certificate));
      workers.arguments.push_back(absl::StrCat("--tls_key=", tls.key));
      workers.arguments.push_back(absl::StrCat("--tls_ca=", tls.ca));
    }
    if (options_.security.allow_insecure) workers.arguments.push_back("--allow_insecure");
    SP_ASSIGN_OR_RETURN(workers_, LocalWorkers::Start(workers, [this](const std::string& worker_id,
                                                                      const std::string& how) {
                          controller_->WorkerGone(worker_id, how);
                        }));
    controller_->SetSilentWorkerHandler(
        [this](const std::string& worker_id) { workers_->Kill(worker_id); });
    return absl::OkStatus();
  }

  // The address that local workers call: a Unix socket where there is one.
  std::string LocalAddress() const {
    for (const std::string& address : server_->addresses()) {
      if (absl::StartsWith(address, "unix:")) return address;
    }
    const std::string& first = server_->addresses().front();
    const std::string port = first.substr(first.rfind(':'));
    if (absl::StartsWith(first, "0.0.0.0:")) return "127.0.0.1" + port;
    if (absl::StartsWith(first, "[::]:")) return "[::1]" + port;
    return first;
  }

  const ControllerHostOptions options_;
  const std::string instance_;
  const SystemClock clock_;
  std::unique_ptr<JobStore> store_;
  const std::shared_ptr<prometheus::Registry> registry_;
  ControllerMetrics metrics_;
  std::shared_ptr<const SigningKey> signer_;
  std::unique_ptr<JobBackend> backend_;
  std::unique_ptr<Controller> controller_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<LocalWorkers> workers_;
  bool drained_ = false;
};

}  // namespace

absl::Status ControllerHost::Check(const ControllerHostOptions& options) {
  return Host(options).CheckOptions();
}

absl::StatusOr<std::unique_ptr<ControllerHost>> ControllerHost::Start(
    const ControllerHostOptions& options) {
  auto host = std::make_unique<Host>(options);
  SP_RETURN_IF_ERROR(host->Start());
  return {std::move(host)};
}

}  // namespace shardprep
