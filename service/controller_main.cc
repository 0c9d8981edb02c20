// shardprep-controller: composes a controller from its flags and runs it until SIGTERM or SIGINT.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/status_macros.h"
#include "service/controller_host.h"
#include "workers/byte_size.h"
#include "workers/environment.h"
#include "workers/log.h"
#include "workers/program_flags.h"
#include "workers/resources.h"
#include "workers/s3/s3_client.h"
#include "workers/s3/s3_options.h"

ABSL_FLAG(std::vector<std::string>, listen, std::vector<std::string>({"127.0.0.1:7070"}),
          "Addresses to listen on: host:port or unix:/path.");
ABSL_FLAG(std::string, metrics_listen, "",
          "Address for Prometheus, for example 0.0.0.0:9464. Empty: none.");
ABSL_FLAG(std::string, health_listen, "",
          "Address for gRPC health checks alone, in plaintext, for probes that cannot show a "
          "certificate: 0.0.0.0:7071. Empty: none.");
ABSL_FLAG(bool, reflection, true, "Serve gRPC reflection.");
ABSL_FLAG(std::string, tls_cert, "",
          "PEM certificate of the controller; reloaded when it changes.");
ABSL_FLAG(std::string, tls_key, "", "PEM key of the controller.");
ABSL_FLAG(std::string, tls_ca, "", "PEM certificates that sign those of clients and workers.");
ABSL_FLAG(std::vector<std::string>, caller_names, {},
          "With TLS: names of certificates that may create, watch and cancel jobs; * stands for "
          "characters other than . and /. Empty, as --worker_names then has to be: all.");
ABSL_FLAG(std::vector<std::string>, worker_names, {},
          "With TLS: names of certificates that may take work. Local workers show --tls_cert.");
ABSL_FLAG(bool, allow_insecure, false, "Allow plaintext on addresses that are not local.");
ABSL_FLAG(std::vector<std::string>, allow_source, {},
          "Directories or s3:// prefixes that jobs may read; needed off loopback.");
ABSL_FLAG(std::vector<std::string>, allow_destination, {},
          "Directories or s3:// prefixes that jobs may write; needed off loopback.");
ABSL_FLAG(std::vector<std::string>, allow_source_root, {},
          "Directories that symbolic links inside a source may lead into.");
ABSL_FLAG(std::string, sign_key, "",
          "PEM file of the Ed25519 private key that signs manifests. Empty: none is signed.");
ABSL_FLAG(int, local_workers, 0, "Worker processes to run on this machine.");
ABSL_FLAG(std::string, device, "auto",
          "Device of the local workers: cpu, hip, hip:N, auto or auto:N.");
ABSL_FLAG(int, threads, 0,
          absl::StrCat("Threads of each local worker. ", shardprep::kDefaultThreadsHelp));
ABSL_FLAG(std::string, memory_budget, "512MiB",
          "Memory that the buffers of each local worker may take; also what plans assume.");
ABSL_FLAG(std::string, state_dir, "",
          "Directory in which jobs outlive the controller; on a local file system, and this "
          "controller's alone. Empty: jobs are forgotten at its end.");
ABSL_FLAG(absl::Duration, lease_duration, absl::Seconds(60),
          "Time for which a worker may write without being heard of; at least 20s.");
ABSL_FLAG(int, max_queued_jobs, 1000, "Unfinished jobs that are kept at most.");
ABSL_FLAG(int, max_finished_jobs, 1000, "Finished jobs that are remembered at most.");
ABSL_FLAG(std::string, log_level, "info", "Least level that is logged: info, warning or error.");
ABSL_FLAG(absl::Duration, drain_grace, absl::Seconds(25),
          "Time between SIGTERM and the end at most; a second SIGTERM ends at once.");

namespace shardprep {
namespace {

// After the grace time a drain has nothing to wait for but calls into the system.
constexpr absl::Duration kHungDrain = absl::Seconds(10);
constexpr absl::Duration kMaxDrainGrace = absl::Hours(24);

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "controller", "cannot start", {{"status", status}});
  return 1;
}

absl::StatusOr<ControllerHostOptions> OptionsFromFlags() {
  ControllerHostOptions options;
  const absl::StatusOr<int64_t> budget = ParseByteSize(absl::GetFlag(FLAGS_memory_budget));
  if (!budget.ok()) return budget.status();
  options.memory_budget_bytes = *budget;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.security = {.tls = {.certificate = absl::GetFlag(FLAGS_tls_cert),
                              .key = absl::GetFlag(FLAGS_tls_key),
                              .ca = absl::GetFlag(FLAGS_tls_ca)},
                      .allow_insecure = absl::GetFlag(FLAGS_allow_insecure)};
  options.roles = {.callers = absl::GetFlag(FLAGS_caller_names),
                   .workers = absl::GetFlag(FLAGS_worker_names)};
  options.health_listen = absl::GetFlag(FLAGS_health_listen);
  options.reflection = absl::GetFlag(FLAGS_reflection);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.allow_source = absl::GetFlag(FLAGS_allow_source);
  options.allow_destination = absl::GetFlag(FLAGS_allow_destination);
  options.allow_source_root = absl::GetFlag(FLAGS_allow_source_root);
  options.sign_key = absl::GetFlag(FLAGS_sign_key);
  options.s3_flags = S3ProgramFlags();
  SP_ASSIGN_OR_RETURN(const S3Options s3, MakeS3Options(options.s3_flags, ReadEnvironmentVariable));
  SP_ASSIGN_OR_RETURN(options.s3, ConnectS3(s3));
  options.local_workers = absl::GetFlag(FLAGS_local_workers);
  options.device = absl::GetFlag(FLAGS_device);
  options.worker_threads = absl::GetFlag(FLAGS_threads);
  options.state_directory = absl::GetFlag(FLAGS_state_dir);
  options.lease_duration = absl::GetFlag(FLAGS_lease_duration);
  options.max_queued_jobs = absl::GetFlag(FLAGS_max_queued_jobs);
  options.max_finished_jobs = absl::GetFlag(FLAGS_max_finished_jobs);
  return options;
}

absl::Status CheckDrainGrace() {
  const absl::Duration grace = absl::GetFlag(FLAGS_drain_grace);
  if (grace >= absl::ZeroDuration() && grace <= kMaxDrainGrace) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--drain_grace: ", absl::FormatDuration(grace),
                                                 ", want 0 to ",
                                                 absl::FormatDuration(kMaxDrainGrace)));
}

// What is wrong with the options, without starting.
int Validate(const std::string& config, const absl::StatusOr<ControllerHostOptions>& options) {
  std::fputs(config.c_str(), stdout);
  const absl::Status status = options.ok() ? ControllerHost::Check(*options) : options.status();
  return status.ok() ? 0 : Fail(status);
}

// `config` is the effective configuration when that is all that is wanted.
int Main(const std::optional<std::string>& config) {
  // Blocked before the first thread is made, so that only sigwait() takes them.
  sigset_t endings;
  sigemptyset(&endings);
  sigaddset(&endings, SIGTERM);
  sigaddset(&endings, SIGINT);
  pthread_sigmask(SIG_BLOCK, &endings, nullptr);
  const absl::StatusOr<LogLevel> level = ParseLogLevel(absl::GetFlag(FLAGS_log_level));
  if (!level.ok()) return Fail(level.status());
  SetLeastLogLevel(*level);
  if (absl::Status status = CheckDrainGrace(); !status.ok()) return Fail(status);
  const absl::StatusOr<ControllerHostOptions> options = OptionsFromFlags();
  if (config.has_value()) return Validate(*config, options);
  if (!options.ok()) return Fail(options.status());
  const absl::StatusOr<std::unique_ptr<ControllerHost>> host = ControllerHost::Start(*options);
  if (!host.ok()) return Fail(host.status());
  if (options->state_directory.empty()) {
    Log(LogLevel::kWarning, "controller",
        "jobs are kept in memory and forgotten at the end: --state_dir names a place for them");
  }
  // For whoever started us with port 0.
  for (const std::string& address : (*host)->addresses()) {
    std::printf("listening on %s\n", address.c_str());
  }
  if (const std::string health = (*host)->health_address(); !health.empty()) {
    std::printf("health on %s\n", health.c_str());
  }
  if (const std::string metrics = (*host)->metrics_address(); !metrics.empty()) {
    std::printf("metrics on %s\n", metrics.c_str());
  }
  std::fflush(stdout);
  int signal = 0;
  sigwait(&endings, &signal);
  // From here on either signal ends the process at once, as does a drain that hangs, say in I/O
  // that never returns: nothing that is durable depends on an orderly end.
  const absl::Duration grace = absl::GetFlag(FLAGS_drain_grace);
  pthread_sigmask(SIG_UNBLOCK, &endings, nullptr);
  ::alarm(static_cast<unsigned>(absl::ToInt64Seconds(grace + kHungDrain)));
  (*host)->Drain(grace);
  return 0;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  const auto config = shardprep::ParseProgramFlags(
      argc, argv,
      "Takes prep jobs over gRPC and hands them to workers.\n\n"
      "  shardprep-controller --listen=127.0.0.1:7070 --local_workers=1");
  return shardprep::Main(config);
}
