#include "service/job_report.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "service/plan_report.h"
#include "workers/byte_size.h"

namespace shardprep {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

std::string TimeText(const google::protobuf::Timestamp& time) {
  const absl::Time instant = absl::FromUnixSeconds(time.seconds());
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", instant, absl::UTCTimeZone());
}

absl::Time Instant(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

std::string PercentText(const v1::PrepJob& job) {
  if (job.state() == v1::PrepJob::STATE_SUCCEEDED) return "100%";
  const v1::Progress& progress = job.progress();
  if (progress.bytes_total() <= 0) return "-";
  return absl::StrFormat("%d%%",
                         static_cast<int>(100.0 * static_cast<double>(progress.bytes_written()) /
                                          static_cast<double>(progress.bytes_total())));
}

std::string StageText(const v1::Progress& progress) {
  std::vector<std::string> stages;
  for (const char* stage : {"read", "shuffle", "digest", "write"}) {
    const auto found = progress.stage_seconds().find(stage);
    if (found == progress.stage_seconds().end()) continue;
    stages.push_back(absl::StrFormat("%s %.1f s", stage, found->second));
  }
  return absl::StrJoin(stages, ", ");
}

void AddProgress(const v1::Progress& progress, Rows& rows) {
  std::string tasks = absl::StrCat(progress.rank_tasks_done(), " of ", progress.rank_tasks_total());
  if (progress.rank_tasks_resumed() > 0) {
    absl::StrAppend(&tasks, ", of them ", progress.rank_tasks_resumed(), " from an earlier run");
  }
  rows.emplace_back("rank tasks done", tasks);
  rows.emplace_back("written", absl::StrCat(FormatThousands(progress.bytes_written()), " of ",
                                            FormatThousands(progress.bytes_total()), " B"));
  rows.emplace_back("read", absl::StrCat(FormatThousands(progress.bytes_read()), " B"));
  if (progress.attempts_failed() > 0) {
    rows.emplace_back("failed attempts", absl::StrCat(progress.attempts_failed()));
  }
  if (const std::string stages = StageText(progress); !stages.empty()) {
    rows.emplace_back("thread time", stages);
  }
  if (!progress.device().empty()) rows.emplace_back("device", progress.device());
}

Rows ManifestRows(const v1::ManifestReference& manifest) {
  return {{"manifest", manifest.uri()},
          {"manifest sha256", manifest.sha256()},
          {"fingerprint", manifest.layout_fingerprint()},
          {"content id", manifest.content_id()},
          {"ranks", absl::StrCat(manifest.rank_count())},
          {"files", FormatThousands(manifest.file_count())},
          {"bytes", ExactSize(manifest.total_bytes())}};
}

// Of one target, by its plan: "8 ranks, intermediate 192 padded to 256 (<rule>), <profile>, ...".
std::string OutputText(const v1::PlanSummary& plan) {
  return absl::StrCat(plan.rank_count(), " ranks, intermediate ", plan.extents().intermediate(),
                      " padded to ", plan.extents().padded_intermediate(), " (",
                      plan.alignment().rule_id(), "), ", plan.kernel_target().profile(), ", each ",
                      ExactSize(plan.routed_bytes_per_rank()));
}

void AddPlan(const v1::PlanSummary& plan, Rows& rows) {
  const v1::KernelTarget& kernel = plan.kernel_target();
  rows.emplace_back("kernel", absl::StrCat(kernel.backend(), ", ", kernel.activation(), ", ",
                                           kernel.architecture(), ", ", kernel.profile()));
  rows.emplace_back("each rank", ExactSize(plan.routed_bytes_per_rank()));
}

void AddManifest(const v1::ManifestReference& manifest, Rows& rows) {
  for (auto& row : ManifestRows(manifest)) rows.push_back(std::move(row));
}

const v1::PlanSummary& PlanOf(const v1::PrepJob& job, int target) {
  return target == 0 ? job.plan() : job.plan().other_targets(target - 1);
}

const v1::ManifestReference& ManifestOf(const v1::PrepJob& job, int target) {
  return target == 0 ? job.manifest() : job.other_manifests(target - 1);
}

// A section for each target of several.
std::string TargetSections(const v1::PrepJob& job) {
  std::string text;
  for (int t = 0; t < job.spec().targets_size(); ++t) {
    Rows rows = {{"destination", job.spec().targets(t).destination_uri()}};
    if (job.has_plan() && t <= job.plan().other_targets_size()) AddPlan(PlanOf(job, t), rows);
    if (job.has_manifest() && t <= job.other_manifests_size())
      AddManifest(ManifestOf(job, t), rows);
    absl::StrAppend(&text, "targets[", t, "]\n", AlignedRows(rows));
  }
  return text;
}

}  // namespace

std::string JobStateText(const v1::PrepJob& job) {
  if (job.state() == v1::PrepJob::STATE_RUNNING && job.cancel_requested()) return "CANCELLING";
  return std::string(absl::StripPrefix(v1::PrepJob::State_Name(job.state()), "STATE_"));
}

ProgressState JobProgress(const v1::PrepJob& job) {
  const v1::Progress& progress = job.progress();
  ProgressState state{
      .done_bytes = progress.bytes_written(), .total_bytes = progress.bytes_total(), .note = ""};
  if (job.state() == v1::PrepJob::STATE_PENDING) {
    state.note = "pending";
  } else if (progress.rank_tasks_total() > 0) {
    state.note =
        absl::StrCat("rank tasks ", progress.rank_tasks_done(), "/", progress.rank_tasks_total());
  }
  return state;
}

std::vector<std::string> JobAnnouncement(const v1::PrepJob& job) {
  const v1::PlanSummary& plan = job.plan();
  const std::string start =
      absl::StrCat("preparing ", plan.routed_layer_count(), " routed layers for ");
  if (plan.other_targets_size() == 0) return {absl::StrCat(start, OutputText(plan))};
  std::vector<std::string> lines = {
      absl::StrCat(start, plan.other_targets_size() + 1, " targets, reading the source once")};
  if (plan.joint().read_bytes() > plan.joint().needed_bytes()) {
    lines[0] =
        absl::StrCat(start, plan.other_targets_size() + 1, " targets, reading each source byte ",
                     absl::StrFormat("%.3f", plan.joint().read_amplification()), " times");
  }
  for (int t = 0; t <= plan.other_targets_size(); ++t) {
    lines.push_back(absl::StrCat("targets[", t, "]: ", OutputText(PlanOf(job, t))));
  }
  return lines;
}

std::string JobReport(const v1::PrepJob& job) {
  const bool is_alone = job.spec().targets_size() <= 1;
  Rows rows = {{"job", job.prep_job_id()}, {"state", JobStateText(job)}};
  if (job.has_error()) {
    const auto code = static_cast<absl::StatusCode>(job.error().code());
    rows.emplace_back("error",
                      absl::StrCat(absl::StatusCodeToString(code), ": ", job.error().message()));
  }
  rows.emplace_back("source", job.spec().source_uri());
  if (is_alone && job.spec().targets_size() == 1) {
    rows.emplace_back("destination", job.spec().targets(0).destination_uri());
  }
  if (is_alone && job.has_plan()) AddPlan(job.plan(), rows);
  if (job.has_create_time()) rows.emplace_back("created", TimeText(job.create_time()));
  if (job.has_start_time()) rows.emplace_back("started", TimeText(job.start_time()));
  if (job.has_end_time()) {
    rows.emplace_back("ended", TimeText(job.end_time()));
  } else if (job.has_deadline_time()) {
    rows.emplace_back("deadline", TimeText(job.deadline_time()));
  }
  if (job.has_start_time() && job.has_end_time()) {
    rows.emplace_back("took", ClockText(Instant(job.end_time()) - Instant(job.start_time())));
  }
  if (job.has_progress()) AddProgress(job.progress(), rows);
  if (is_alone && job.has_manifest()) AddManifest(job.manifest(), rows);
  return absl::StrCat(AlignedRows(rows), is_alone ? "" : TargetSections(job));
}

std::string JobTable(const std::vector<v1::PrepJob>& jobs) {
  if (jobs.empty()) return "no jobs\n";
  std::vector<std::vector<std::string>> table = {
      {"job", "state", "done", "created", "destination"}};
  for (const v1::PrepJob& job : jobs) {
    const int targets = job.spec().targets_size();
    std::string destination = targets > 0 ? job.spec().targets(0).destination_uri() : "";
    if (targets > 1) absl::StrAppend(&destination, " (+", targets - 1, ")");
    table.push_back({job.prep_job_id(), JobStateText(job), PercentText(job),
                     job.has_create_time() ? TimeText(job.create_time()) : "-", destination});
  }
  return AlignedTable(table, 5);
}

std::string ManifestReport(const v1::PrepJob& job) {
  if (job.other_manifests_size() == 0) return AlignedRows(ManifestRows(job.manifest()));
  std::string text;
  for (int t = 0; t <= job.other_manifests_size(); ++t) {
    absl::StrAppend(&text, "targets[", t, "]\n", AlignedRows(ManifestRows(ManifestOf(job, t))));
  }
  return text;
}

}  // namespace shardprep
