// `shardprep submit | get | list | watch | cancel`: jobs of a controller that runs elsewhere.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_console.h"
#include "service/cli_follow.h"
#include "service/client.h"
#include "service/job_report.h"
#include "workers/grpc_channel.h"

namespace shardprep {
namespace {

constexpr int64_t kMaxListed = 100'000;
constexpr int32_t kPageSize = 1000;

// How to reach the controller, and how to print what it says.
struct ControllerFlags {
  void AddTo(FlagSet& flags) {
    flags.String("controller", "ADDR", "Address of the controller: host:port or unix:/path.",
                 &address);
    flags.String("tls-cert", "FILE", "PEM certificate of this client.", &security.tls.certificate);
    flags.String("tls-key", "FILE", "PEM key of this client.", &security.tls.key);
    flags.String("tls-ca", "FILE", "PEM certificates of the authority that the controller uses.",
                 &security.tls.ca);
    flags.Bool("allow-insecure", "Allows plaintext to an address that is not local.",
               &security.allow_insecure);
    flags.Choice("format", {"text", "json"}, "Text, or the service's messages as JSON.", &format);
  }

  absl::StatusOr<std::unique_ptr<PrepClient>> Client() const {
    return PrepClient::Make(address, security);
  }

  bool json() const { return format == "json"; }

  std::string address = "127.0.0.1:7070";
  ConnectionSecurity security;
  std::string format = "text";
};

std::string NextStep(const absl::Status& status, const ControllerFlags& flags) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return absl::StrCat("Is a controller running at ", flags.address,
                          "? --controller names another address.");
    case absl::StatusCode::kNotFound:
      return "`shardprep list` shows the jobs that the controller knows.";
    case absl::StatusCode::kAlreadyExists:
      return "Give the new job another --job-id, or none.";
    default:
      return "";
  }
}

int FailCall(const std::string& command, const absl::Status& status, const ControllerFlags& flags) {
  return Fail(command, status, NextStep(status, flags));
}

// Prints one job and returns the exit code.
int PrintJob(const std::string& command, const v1::PrepJob& job, const ControllerFlags& flags) {
  if (!flags.json()) {
    std::fputs(JobReport(job).c_str(), stdout);
    return kExitOk;
  }
  const absl::Status printed = PrintJson(job);
  return printed.ok() ? kExitOk : Fail(command, printed);
}

void AddJobId(FlagSet& flags, std::string* job_id) {
  flags.String("job-id", "ID", "The job.", job_id, FlagSet::Presence::kRequired);
}

std::string NewJobId() {
  std::random_device random;
  return absl::StrFormat("job-%08x%08x", random(), random());
}

// Follows a job to its end: a progress line, or each state as a line of JSON.
int Follow(const std::string& command, PrepClient& client, const std::string& job_id,
           const ControllerFlags& flags) {
  if (flags.json()) {
    v1::PrepJob last;
    absl::Status printed;
    const absl::Status watched = client.Watch(job_id, [&](const v1::PrepJob& job) {
      last = job;
      printed = PrintJson(job, /*one_line=*/true);
      return printed.ok() && std::ferror(stdout) == 0;
    });
    if (!printed.ok()) return Fail(command, printed);
    if (!watched.ok()) return FailCall(command, watched, flags);
    return FinishFollowed(command, last, "");
  }
  absl::StatusOr<v1::PrepJob> job;
  {
    Console console(job_id, /*capture_logs=*/false);
    job = FollowJob(client, job_id, console, nullptr);
  }
  if (!job.ok()) return FailCall(command, job.status(), flags);
  std::fputs(JobReport(*job).c_str(), stdout);
  std::fflush(stdout);
  return FinishFollowed(command, *job, "");
}

// Every page, up to `limit` jobs.
absl::StatusOr<v1::ListPrepJobsResponse> ListJobs(PrepClient& client, int64_t limit,
                                                  const std::string& state) {
  v1::ListPrepJobsRequest request;
  request.set_page_size(static_cast<int32_t>(std::min<int64_t>(limit, kPageSize)));
  if (state != "any") {
    v1::PrepJob::State wanted = v1::PrepJob::STATE_UNSPECIFIED;
    SP_CHECK(
        v1::PrepJob::State_Parse(absl::StrCat("STATE_", absl::AsciiStrToUpper(state)), &wanted));
    request.add_states(wanted);
  }
  v1::ListPrepJobsResponse all;
  while (true) {
    SP_ASSIGN_OR_RETURN(v1::ListPrepJobsResponse page, client.List(request));
    for (v1::PrepJob& job : *page.mutable_prep_jobs()) {
      if (all.prep_jobs_size() == limit) return all;
      *all.add_prep_jobs() = std::move(job);
    }
    if (page.next_page_token().empty() || all.prep_jobs_size() == limit) return all;
    request.set_page_token(page.next_page_token());
  }
}

}  // namespace

int RunSubmit(const CliContext& context, const CliArguments& arguments) {
  constexpr char kCommand[] = "submit";
  FlagSet flags({.command = "shardprep submit",
                 .summary = "Gives a job to a running controller and prints it. Its machines must "
                            "see source and destination under the same paths. Repeating the "
                            "command with the same --job-id is safe.",
                 .example =
                     "  shardprep submit --controller 127.0.0.1:7070 --job-id v4-pro-tp8 \\\n"
                     "    --source /models/DeepSeek-V4-Pro --destination /prepared/v4 \\\n"
                     "    --tensor-parallel-size 8 --watch"});
  SpecFlags spec_flags;
  ControllerFlags controller;
  TimeoutFlag timeout;
  std::string job_id;
  bool watch = false;
  spec_flags.AddTo(flags);
  timeout.AddTo(flags);
  flags.String("job-id", "ID",
               "1 to 63 of a-z, 0-9 and -, chosen by the caller. Default: a random one.", &job_id);
  flags.Bool("watch", "Follows the job to its end.", &watch);
  controller.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto spec = spec_flags.Spec(context.working_directory);
  if (!spec.ok()) return Fail(kCommand, spec.status());
  const auto client = controller.Client();
  if (!client.ok()) return FailCall(kCommand, client.status(), controller);
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id(job_id.empty() ? NewJobId() : job_id);
  *request.mutable_spec() = *spec;
  timeout.Apply(request);
  const auto job = (*client)->Create(request);
  if (!job.ok()) return FailCall(kCommand, job.status(), controller);
  if (watch) return Follow(kCommand, **client, job->prep_job_id(), controller);
  return PrintJob(kCommand, *job, controller);
}

int RunGet(const CliContext& /*context*/, const CliArguments& arguments) {
  constexpr char kCommand[] = "get";
  FlagSet flags({.command = "shardprep get",
                 .summary = "Shows a job of a running controller.",
                 .example = "  shardprep get --job-id v4-pro-tp8 --format json"});
  ControllerFlags controller;
  std::string job_id;
  AddJobId(flags, &job_id);
  controller.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto client = controller.Client();
  if (!client.ok()) return FailCall(kCommand, client.status(), controller);
  const auto job = (*client)->Get(job_id);
  if (!job.ok()) return FailCall(kCommand, job.status(), controller);
  return PrintJob(kCommand, *job, controller);
}

int RunList(const CliContext& /*context*/, const CliArguments& arguments) {
  constexpr char kCommand[] = "list";
  FlagSet flags({.command = "shardprep list",
                 .summary = "Lists the jobs of a running controller, newest first.",
                 .example = "  shardprep list --state running"});
  ControllerFlags controller;
  std::string state = "any";
  int64_t limit = 50;
  flags.Choice("state", {"any", "pending", "running", "succeeded", "failed", "cancelled"},
               "Only jobs in this state.", &state);
  flags.Int("limit", "N", "Jobs to list at most.", 1, kMaxListed, &limit);
  controller.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto client = controller.Client();
  if (!client.ok()) return FailCall(kCommand, client.status(), controller);
  const auto jobs = ListJobs(**client, limit, state);
  if (!jobs.ok()) return FailCall(kCommand, jobs.status(), controller);
  if (controller.json()) {
    const absl::Status printed = PrintJson(*jobs);
    return printed.ok() ? kExitOk : Fail(kCommand, printed);
  }
  std::fputs(JobTable({jobs->prep_jobs().begin(), jobs->prep_jobs().end()}).c_str(), stdout);
  return kExitOk;
}

int RunWatch(const CliContext& /*context*/, const CliArguments& arguments) {
  constexpr char kCommand[] = "watch";
  FlagSet flags({.command = "shardprep watch",
                 .summary = "Follows a job of a running controller to its end. Exits with 0 when "
                            "it succeeded, with 1 when it failed or was cancelled. With --format "
                            "json each state is one line.",
                 .example = "  shardprep watch --job-id v4-pro-tp8"});
  ControllerFlags controller;
  std::string job_id;
  AddJobId(flags, &job_id);
  controller.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto client = controller.Client();
  if (!client.ok()) return FailCall(kCommand, client.status(), controller);
  return Follow(kCommand, **client, job_id, controller);
}

int RunCancel(const CliContext& /*context*/, const CliArguments& arguments) {
  constexpr char kCommand[] = "cancel";
  FlagSet flags({.command = "shardprep cancel",
                 .summary = "Cancels a job of a running controller. What it wrote is removed once "
                            "its workers have stopped.",
                 .example = "  shardprep cancel --job-id v4-pro-tp8"});
  ControllerFlags controller;
  std::string job_id;
  AddJobId(flags, &job_id);
  controller.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto client = controller.Client();
  if (!client.ok()) return FailCall(kCommand, client.status(), controller);
  const auto job = (*client)->Cancel(job_id);
  if (!job.ok()) return FailCall(kCommand, job.status(), controller);
  return PrintJob(kCommand, *job, controller);
}

}  // namespace shardprep
