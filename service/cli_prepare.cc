// `shardprep prepare`: one job on this machine, by a private controller and its own workers.
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/device_choice.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_console.h"
#include "service/cli_follow.h"
#include "service/cli_s3.h"
#include "service/cli_signals.h"
#include "service/client.h"
#include "service/job_report.h"
#include "service/private_controller.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "prepare";
constexpr char kJobId[] = "prepare";
// After the end of the job nothing is left to give back, after Ctrl-C leases are.
constexpr absl::Duration kStopGrace = absl::Seconds(5);

PrivateControllerOptions ControllerOptionsOf(const RunFlags& flags,
                                             const std::vector<std::string>& allowed_roots,
                                             std::shared_ptr<S3Connection> s3,
                                             const S3Flags& s3_flags) {
  PrivateControllerOptions options;
  options.workers = static_cast<int>(flags.workers);
  options.worker_threads = static_cast<int>(flags.threads);
  options.device = flags.device;
  options.memory_budget_bytes = flags.memory_budget_bytes;
  options.metrics_listen = flags.metrics_listen;
  options.allow_source_root = allowed_roots;
  options.sign_key = flags.sign_key;
  options.s3 = std::move(s3);
  options.s3_flags = s3_flags;
  return options;
}

struct Outcome {
  v1::PrepJob job;
  bool was_complete = false;
};

// Runs the job to its end. CANCELLED after a signal.
absl::StatusOr<Outcome> RunJob(const v1::CreatePrepJobRequest& request, PrepClient& client,
                               Console& console) {
  SP_ASSIGN_OR_RETURN(const v1::PrepJob created, client.Create(request));
  // A job that has nothing to do has ended when it is created.
  if (created.state() == v1::PrepJob::STATE_SUCCEEDED) return Outcome{created, true};
  for (const std::string& line : JobAnnouncement(created)) console.Line(line);
  std::atomic<bool> told{false};
  const auto tell_resumed = [&console, &told](const v1::PrepJob& job) {
    const v1::Progress& progress = job.progress();
    if (progress.rank_tasks_resumed() == 0 || told.exchange(true)) return;
    console.Line(absl::StrCat("resuming: ", progress.rank_tasks_resumed(), " of ",
                              progress.rank_tasks_total(),
                              " rank tasks were finished by an earlier run"));
  };
  SP_ASSIGN_OR_RETURN(const v1::PrepJob ended, FollowJob(client, kJobId, console, tell_resumed));
  return Outcome{ended, false};
}

absl::StatusOr<Outcome> Prepare(const CliContext& context, const v1::CreatePrepJobRequest& request,
                                const PrivateControllerOptions& options, Console& console) {
  // Before there is something to stop, a signal only waits for it.
  context.interrupts->Handle([](int) {});
  SP_ASSIGN_OR_RETURN(const auto controller, PrivateController::Start(options));
  SP_ASSIGN_OR_RETURN(const auto client, PrepClient::Make(controller->address()));
  if (!controller->metrics_address().empty()) {
    console.Line(absl::StrCat("metrics: http://", controller->metrics_address(), "/metrics"));
  }
  context.interrupts->Handle([&client](int) { client->StopWatching(); });
  auto outcome = RunJob(request, *client, console);
  if (!outcome.ok() && context.interrupts->taken() != 0) {
    console.Line("stopping; once more Ctrl-C ends at once");
  }
  // Whatever the outcome, it is known; how the workers leave is of no interest.
  console.PollLogs();
  console.DropLogs();
  controller->Stop(kStopGrace);
  // A second signal during the stop ended the process; from here one has nothing to end.
  context.interrupts->Handle([](int) {});
  return outcome;
}

void PrintOutcome(const Outcome& outcome) {
  const bool is_alone = outcome.job.other_manifests_size() == 0;
  if (outcome.was_complete) {
    std::printf(
        "already complete: %s, manifest and file sizes agree; nothing was written\n",
        is_alone ? "the destination holds this artefact" : "each destination holds its artefact");
  } else {
    std::printf("prepared: %s committed\n", is_alone ? "the manifest is" : "the manifests are");
  }
  std::fputs(ManifestReport(outcome.job).c_str(), stdout);
}

std::string NextStep(const absl::Status& status, const v1::PrepJobSpec& spec) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return "Make room at the destination and run the same command again: finished parts are "
             "used.";
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kDeadlineExceeded:
      return absl::StrCat("Finished parts stay in ", DestinationsText(spec),
                          "; run the same command again to resume.");
    case absl::StatusCode::kInvalidArgument:
      return "See: shardprep prepare --help, or shardprep plan with the same flags.";
    default:
      return "";
  }
}

int Interrupted(int signal, const v1::PrepJobSpec& spec) {
  std::fprintf(stderr,
               "shardprep prepare: interrupted; finished parts stay in %s.\n"
               "Run the same command again to resume.\n",
               DestinationsText(spec).c_str());
  return 128 + signal;
}

}  // namespace

int RunPrepare(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep prepare",
                 .summary = "Prepares a checkpoint on this machine: cuts the routed experts into "
                            "one slice per rank, pads and shuffles them for the kernel, and writes "
                            "them with a manifest, which comes last and makes the artefact. "
                            "Interrupted, it resumes when run again; complete, it says so and "
                            "writes nothing. Exits with 0 only when the manifest is committed.",
                 .example = "  shardprep prepare --source DeepSeek-V4-Pro --destination prepared "
                            "\\\n    --tensor-parallel-size 8"});
  SpecFlags spec_flags;
  TimeoutFlag timeout;
  RunFlags run_flags;
  S3CliFlags s3_flags;
  bool verbose = false;
  spec_flags.AddTo(flags);
  timeout.AddTo(flags);
  run_flags.AddTo(flags);
  s3_flags.AddTo(flags);
  flags.Bool("verbose", "Shows the whole log of controller and workers, not only warnings.",
             &verbose);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto spec = spec_flags.Spec(context.working_directory);
  if (!spec.ok()) return Fail(kCommand, spec.status());
  const auto roots =
      DirectoryList(run_flags.allow_source_root, "allow-source-root", context.working_directory);
  if (!roots.ok()) return Fail(kCommand, roots.status());
  const auto s3 = s3_flags.Connect(context, UrisOf(*spec));
  if (!s3.ok()) return Fail(kCommand, s3.status());
  // A device that is not there would only show as workers that do not come up.
  const absl::Status device = CheckDevicePresent(run_flags.device);
  if (!device.ok()) return Fail(kCommand, device, "--device cpu shuffles without a GPU.");

  v1::CreatePrepJobRequest request;
  request.set_prep_job_id(kJobId);
  *request.mutable_spec() = *spec;
  timeout.Apply(request);
  absl::StatusOr<Outcome> outcome;
  {
    Console console(kCommand, /*capture_logs=*/!verbose);
    outcome = Prepare(context, request,
                      ControllerOptionsOf(run_flags, *roots, *s3, s3_flags.given()), console);
  }
  const int signal = context.interrupts->taken();
  if (!outcome.ok() && signal != 0) return Interrupted(signal, *spec);
  if (!outcome.ok()) return Fail(kCommand, outcome.status(), NextStep(outcome.status(), *spec));
  if (outcome->job.state() != v1::PrepJob::STATE_SUCCEEDED) {
    const auto code = static_cast<absl::StatusCode>(outcome->job.error().code());
    return FinishFollowed(kCommand, outcome->job, NextStep(absl::Status(code, ""), *spec));
  }
  PrintOutcome(*outcome);
  return kExitOk;
}

}  // namespace shardprep
