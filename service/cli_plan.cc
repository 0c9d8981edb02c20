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

namespace shardprep {
namespace {

constexpr char kCommand[] = "plan";

// What lies at the destination, in a sentence.
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

absl::Status Print(const JobPlan& plan, bool json) {
  if (json) return PrintJson(plan.summary);
  std::fputs(PlanReport(plan.spec, plan.summary).c_str(), stdout);
  return absl::OkStatus();
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
  auto s3 = s3_flags.Connect(context, {spec->source_uri(), spec->targets(0).destination_uri()});
  if (!s3.ok()) return Fail(kCommand, s3.status());
  options.s3 = *std::move(s3);
  const auto plan = PlanJob(*spec, options);
  if (!plan.ok()) return Fail(kCommand, plan.status());
  const bool json = format == "json";
  const absl::Status printed = Print(**plan, json);
  if (!printed.ok()) return Fail(kCommand, printed);
  const auto destination = DestinationText(**plan, options);
  // JSON stands alone on standard output.
  if (destination.ok()) {
    std::fprintf(json ? stderr : stdout, "destination: %s\n", destination->c_str());
    return kExitOk;
  }
  std::fflush(stdout);
  return Fail(kCommand, destination.status(),
              "The destination would be refused. Give another --destination, or empty it.");
}

}  // namespace shardprep
