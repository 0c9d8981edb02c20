// `shardprep plan`: what a job would do, without a server and without writing.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_s3.h"
#include "service/plan_report.h"
#include "service/progress_line.h"
#include "workers/artifact.h"
#include "workers/job_plan.h"
#include "workers/open_store.h"
#include "workers/target_set.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "plan";

// What lies at the destination of one target, in a sentence.
absl::StatusOr<std::string> DestinationText(const JobPlan& plan, const PlanOptions& options) {
  SP_ASSIGN_OR_RETURN(const auto source, OpenStore(plan.spec.source_uri(),
                                                   {.create = false,
                                                    .allowed_roots = options.allowed_source_roots,
                                                    .s3 = options.s3}));
  SP_ASSIGN_OR_RETURN(const auto destination,
                      OpenStore(plan.target().destination_uri(),
                                {.create = true, .allowed_roots = {}, .s3 = options.s3}));
  SP_ASSIGN_OR_RETURN(const DestinationState state,
                      InspectDestination(plan, *source, *destination));
  switch (state.kind) {
    case DestinationState::Kind::kComplete:
      return absl::StrCat("already complete: ", state.manifest.file_count(), " files, ",
                          ExactSize(state.manifest.total_bytes()), ", content id ",
                          state.manifest.content_id());
    case DestinationState::Kind::kResumable:
      return absl::StrCat("resumable: ", state.done.size(),
                          " rank tasks of an earlier run are finished");
    case DestinationState::Kind::kFresh:
      break;
  }
  if (!state.damage.empty()) {
    return absl::StrCat("holds this artefact, damaged (", state.damage,
                        "); it would be made again");
  }
  return std::string("fresh");
}

absl::Status Print(const TargetSet& targets, bool json) {
  if (json) return PrintJson(targets.summary());
  std::fputs(PlanReport(targets.spec(), targets.summary()).c_str(), stdout);
  return absl::OkStatus();
}

// Prints what lies at each destination and returns the exit code.
int PrintDestinations(const TargetSet& targets, const PlanOptions& options, bool json) {
  int exit_code = kExitOk;
  for (int32_t t = 0; t < targets.target_count(); ++t) {
    const JobPlan& plan = targets.plan(t);
    const std::string which =
        targets.target_count() == 1
            ? ""
            : absl::StrCat(" targets[", t, "] ", plan.target().destination_uri());
    const auto found = DestinationText(plan, options);
    // JSON stands alone on standard output.
    if (found.ok()) {
      std::fprintf(json ? stderr : stdout, "destination%s: %s\n", which.c_str(), found->c_str());
      continue;
    }
    std::fflush(stdout);
    const std::string next_step =
        which.empty() ? "The destination would be refused. Give another --destination, or empty it."
                      : absl::StrCat("The destination of", which,
                                     " would be refused. Give another, or empty it.");
    exit_code = Fail(kCommand, found.status(), next_step);
  }
  return exit_code;
}

}  // namespace

int RunPlan(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep plan",
                 .summary = "Shows what `shardprep prepare` with the same flags would do: rule, "
                            "extents, sizes, memory and space. Reads headers only and writes "
                            "nothing. Exits with 1 when the job would be refused.",
                 .example = "  shardprep plan --source DeepSeek-V4-Pro --destination prepared \\\n"
                            "    --tensor-parallel-size 8"});
  SpecFlags spec_flags;
  RunFlags run_flags;
  S3CliFlags s3_flags;
  std::string format = "text";
  spec_flags.AddTo(flags);
  run_flags.AddTo(flags);
  s3_flags.AddTo(flags);
  flags.Choice("format", {"text", "json"}, "A table, or shardprep.v1.PlanSummary as JSON.",
               &format);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto spec = spec_flags.Spec(context.working_directory);
  if (!spec.ok()) return Fail(kCommand, spec.status());
  PlanOptions options;
  options.memory_budget_bytes = run_flags.memory_budget_bytes;
  auto roots =
      DirectoryList(run_flags.allow_source_root, "allow-source-root", context.working_directory);
  if (!roots.ok()) return Fail(kCommand, roots.status());
  options.allowed_source_roots = *std::move(roots);
  auto s3 = s3_flags.Connect(context, UrisOf(*spec));
  if (!s3.ok()) return Fail(kCommand, s3.status());
  options.s3 = *std::move(s3);
  const auto targets = PlanTargets(*spec, options);
  if (!targets.ok()) return Fail(kCommand, targets.status());
  const bool json = format == "json";
  const absl::Status printed = Print(**targets, json);
  if (!printed.ok()) return Fail(kCommand, printed);
  return PrintDestinations(**targets, options, json);
}

}  // namespace shardprep
