#include "service/plan_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "service/flag_set.h"
#include "service/progress_line.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/target.pb.h"
#include "workers/byte_size.h"

namespace shardprep {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

constexpr int kListedTensors = 10;
constexpr int kListedStale = 10;

std::string CheckpointSection(const v1::PrepJobSpec& spec, const v1::PlanSummary& plan) {
  const Rows rows = {
      {"source", spec.source_uri()},
      {"family", plan.family()},
      {"geometry", absl::StrCat("hidden ", FormatThousands(plan.hidden_size()), ", intermediate ",
                                FormatThousands(plan.intermediate_size()), ", ",
                                FormatThousands(plan.expert_count()), " routed experts a layer")},
      {"routed experts", ExactSize(plan.source_routed_bytes())},
      {"all tensors", ExactSize(plan.source_bytes())}};
  return absl::StrCat("checkpoint\n", AlignedRows(rows));
}

std::string LayersText(const v1::PlanSummary& plan) {
  if (plan.mtp_layer_count() == 0) return absl::StrCat(plan.routed_layer_count());
  return absl::StrCat(plan.routed_layer_count(), ", of them ", plan.mtp_layer_count(), " MTP");
}

std::string TargetSection(const std::string& title, const v1::Target& target,
                          const v1::PlanSummary& plan) {
  const v1::ParallelLayout& parallel = target.parallel_layout();
  const v1::KernelTarget& kernel = plan.kernel_target();
  Rows rows = {{"destination", target.destination_uri()},
               {"parallel layout", absl::StrCat("tensor parallel ", parallel.tensor_parallel_size(),
                                                " x data parallel ", parallel.data_parallel_size(),
                                                ", ", plan.rank_count(), " ranks")},
               {"kernel", absl::StrCat(kernel.backend(), ", ", kernel.activation(), ", ",
                                       kernel.architecture())}};
  if (!plan.backend_reason().empty()) rows.emplace_back("backend because", plan.backend_reason());
  rows.emplace_back("profile", absl::StrCat(kernel.profile(), ", gate mode ", plan.gate_mode()));
  rows.emplace_back("minimum AITER",
                    plan.minimum_aiter_version().empty() ? "none" : plan.minimum_aiter_version());
  rows.emplace_back("routed layers", LayersText(plan));
  rows.emplace_back("fingerprint", plan.layout_fingerprint());
  return absl::StrCat(title, "\n", AlignedRows(rows));
}

std::string RuleSection(const v1::PlanSummary& plan) {
  const v1::AlignmentSummary& alignment = plan.alignment();
  const v1::Extents& extents = plan.extents();
  Rows rows = {{"rule", alignment.rule_id()},
               {"rule source", WrapText(alignment.rule_source(), 0, 80)},
               {"policy", absl::StrCat("version ", alignment.policy_version(), ", sha256 ",
                                       alignment.policy_digest())}};
  if (plan.moe_tensor_parallel_sizes_size() > 0) {
    rows.emplace_back("sizes that divide",
                      WrapText(absl::StrJoin(plan.moe_tensor_parallel_sizes(), ", "), 0, 80));
  }
  for (const v1::PolicyNote& note : plan.policy_notes()) {
    rows.emplace_back(note.kind(),
                      WrapText(absl::StrCat(note.text(), " (", note.source(), ")"), 0, 80));
  }
  const auto line = [](const char* name, int64_t native, int64_t align, int64_t padded) {
    return std::vector<std::string>{name, FormatThousands(native), FormatThousands(align),
                                    FormatThousands(padded), FormatThousands(padded - native)};
  };
  const std::vector<std::vector<std::string>> table = {
      {"extents of one rank", "native", "alignment", "padded", "pad"},
      line("intermediate", extents.intermediate(), alignment.intermediate_alignment(),
           extents.padded_intermediate()),
      line("hidden", extents.hidden(), alignment.hidden_alignment(), extents.padded_hidden())};
  return absl::StrCat("alignment\n", AlignedRows(rows), AlignedTable(table, 1));
}

std::string TensorSection(const v1::PlanSummary& plan) {
  std::vector<std::vector<std::string>> table = {
      {"tensor", "dtype", "shape", "layout", "source bytes", "stored bytes", "padding"}};
  for (const v1::FusedTensorSummary& tensor : plan.fused_tensors()) {
    table.push_back({tensor.role(), tensor.dtype(),
                     absl::StrCat("[", absl::StrJoin(tensor.shape(), ", "), "]"), tensor.layout(),
                     FormatThousands(tensor.native_bytes()), FormatThousands(tensor.size_bytes()),
                     FormatThousands(tensor.size_bytes() - tensor.native_bytes())});
  }
  return absl::StrCat("one layer on one rank\n", AlignedTable(table, 4));
}

std::vector<std::string> SizeRow(const std::string& name, int64_t bytes) {
  return {name, absl::StrCat(FormatThousands(bytes), " B"),
          absl::StrFormat("%.3f GiB", static_cast<double>(bytes) / (int64_t{1} << 30))};
}

std::string RankSection(const v1::PlanSummary& plan) {
  std::vector<std::vector<std::string>> table;
  table.push_back(SizeRow("prepared routed experts", plan.routed_bytes_per_rank()));
  if (plan.mtp_layer_count() > 0) {
    table.push_back(SizeRow("  without MTP layers", plan.routed_bytes_per_rank_without_mtp()));
  }
  table.push_back(SizeRow("  of them padding", plan.padding_bytes_per_rank()));
  if (plan.dense_bytes_per_rank() > 0) {
    table.push_back(SizeRow("other tensors in its files", plan.dense_bytes_per_rank()));
  }
  table.push_back(SizeRow(absl::StrCat("under the generic rule ", plan.generic_rule_id()),
                          plan.generic_rule_bytes_per_rank()));
  table.push_back(SizeRow("saved by this rule", plan.saved_bytes_per_rank()));
  return absl::StrCat("each rank\n", AlignedTable(table, 1));
}

std::string JobSection(const std::string& title, const v1::PlanSummary& plan) {
  std::vector<std::vector<std::string>> table;
  table.push_back(SizeRow("replicated tensors, stored once", plan.replicated_bytes()));
  table.push_back(SizeRow("source bytes needed", plan.needed_bytes()));
  table.push_back(SizeRow("source bytes read", plan.read_bytes()));
  table.push_back(SizeRow("written, space needed", plan.output_bytes()));
  if (plan.destination_free_bytes() >= 0) {
    table.push_back(SizeRow("free at the destination", plan.destination_free_bytes()));
  }
  table.push_back(SizeRow("least memory of a worker", plan.minimum_memory_budget_bytes()));
  table.push_back(SizeRow("memory to read the source once", plan.read_once_memory_budget_bytes()));
  const Rows rows = {
      {"read amplification", absl::StrFormat("%.3f", plan.read_amplification())},
      {"ranks in one lease", absl::StrCat(plan.ranks_per_lease(), " of ", plan.rank_count())},
      {"work", absl::StrCat(FormatThousands(plan.region_count()), " regions, ",
                            FormatThousands(plan.part_count()), " part files")}};
  return absl::StrCat(title, "\n", AlignedTable(table, 1), AlignedRows(rows));
}

int32_t AllRanks(const v1::PlanSummary& plan) {
  int32_t ranks = plan.rank_count();
  for (const v1::PlanSummary& other : plan.other_targets()) ranks += other.rank_count();
  return ranks;
}

std::string JointSection(const v1::PlanSummary& plan) {
  const v1::JointPlan& joint = plan.joint();
  const std::vector<std::vector<std::string>> table = {
      SizeRow("source bytes needed", joint.needed_bytes()),
      SizeRow("source bytes read", joint.read_bytes()),
      SizeRow("written, space needed", joint.output_bytes()),
      SizeRow("least memory of a worker", joint.minimum_memory_budget_bytes()),
      SizeRow("memory to read the source once", joint.read_once_memory_budget_bytes())};
  const Rows rows = {
      {"read amplification", absl::StrFormat("%.3f", joint.read_amplification())},
      {"ranks in one lease", absl::StrCat(joint.ranks_per_lease(), " of ", AllRanks(plan))}};
  return absl::StrCat("all targets together\n", AlignedTable(table, 1), AlignedRows(rows));
}

std::string LeftBehindSection(const v1::PlanSummary& plan) {
  std::string text = absl::StrCat("not carried: ", FormatThousands(plan.not_carried_count()),
                                  " tensors, ", ExactSize(plan.not_carried_bytes()), "\n");
  std::vector<std::vector<std::string>> table;
  for (const v1::NotCarried& tensor : plan.not_carried()) {
    if (static_cast<int>(table.size()) == kListedTensors) break;
    table.push_back(
        {tensor.name(), tensor.reason(), absl::StrCat(FormatThousands(tensor.size_bytes()), " B")});
  }
  const int64_t more = plan.not_carried_count() - static_cast<int64_t>(table.size());
  absl::StrAppend(&text, AlignedTable(table, 2));
  if (more > 0) absl::StrAppend(&text, "  and ", FormatThousands(more), " more\n");
  return text;
}

std::string StaleSection(const v1::PlanSummary& plan) {
  const int stale = plan.stale_index_entries_size();
  if (stale == 0) return "";
  std::string text = absl::StrCat("stale index entries, not needed: ", stale, "\n");
  for (int i = 0; i < std::min(stale, kListedStale); ++i) {
    absl::StrAppend(&text, "  ", plan.stale_index_entries(i), "\n");
  }
  if (stale > kListedStale) absl::StrAppend(&text, "  and ", stale - kListedStale, " more\n");
  return text;
}

std::string SpaceWarning(const std::string& place, const v1::PlanSummary& plan) {
  const int64_t free = plan.destination_free_bytes();
  if (free < 0 || free >= plan.output_bytes()) return "";
  return absl::StrCat("warning: ", place, " has ", FormatThousands(plan.output_bytes() - free),
                      " B too little space for all of it\n");
}

std::string ReadWarning(int32_t ranks_per_lease, int32_t ranks) {
  if (ranks_per_lease >= ranks) {
    return "warning: ranks hold experts in orders that contradict each other, and parts of the "
           "source are read more than once under any memory budget\n";
  }
  return absl::StrCat("warning: with this memory budget a lease covers ", ranks_per_lease, " of ",
                      ranks, " ranks, and parts of the source are read more than once\n");
}

std::string WarningSection(const v1::PlanSummary& plan) {
  std::string text = SpaceWarning("the destination", plan);
  if (plan.read_bytes() > plan.needed_bytes()) {
    absl::StrAppend(&text, ReadWarning(plan.ranks_per_lease(), plan.rank_count()));
  }
  for (const std::string& warning : plan.warnings()) {
    absl::StrAppend(&text, "warning: ", warning, "\n");
  }
  return text;
}

std::string TitleOf(int target) { return absl::StrCat("targets[", target, "]"); }

// Of several targets: reads and leases are those of all together.
std::string WarningsOfAll(const std::vector<const v1::PlanSummary*>& plans) {
  const v1::PlanSummary& first = *plans.front();
  std::string text;
  for (size_t t = 0; t < plans.size(); ++t) {
    const std::string place = absl::StrCat("the destination of ", TitleOf(static_cast<int>(t)));
    absl::StrAppend(&text, SpaceWarning(place, *plans[t]));
  }
  if (first.joint().read_bytes() > first.joint().needed_bytes()) {
    absl::StrAppend(&text, ReadWarning(first.joint().ranks_per_lease(), AllRanks(first)));
  }
  for (size_t t = 0; t < plans.size(); ++t) {
    for (const std::string& warning : plans[t]->warnings()) {
      absl::StrAppend(&text, "warning: ", TitleOf(static_cast<int>(t)), ": ", warning, "\n");
    }
  }
  return text;
}

// A section of each target, then what holds for all.
std::string ReportOfSeveral(const v1::PrepJobSpec& spec, const v1::PlanSummary& plan) {
  std::vector<const v1::PlanSummary*> plans = {&plan};
  for (const v1::PlanSummary& other : plan.other_targets()) plans.push_back(&other);
  std::string text = CheckpointSection(spec, plan);
  const std::string left_behind = absl::StrCat(LeftBehindSection(plan), StaleSection(plan));
  std::string other_left_behind;  // where it is not the same
  for (size_t t = 0; t < plans.size(); ++t) {
    const v1::PlanSummary& own = *plans[t];
    const std::string title = TitleOf(static_cast<int>(t));
    absl::StrAppend(&text, TargetSection(title, spec.targets(static_cast<int>(t)), own),
                    RuleSection(own), TensorSection(own), RankSection(own),
                    JobSection(absl::StrCat(title, " as a job of its own"), own));
    const std::string left = absl::StrCat(LeftBehindSection(own), StaleSection(own));
    if (left != left_behind) absl::StrAppend(&other_left_behind, title, ": ", left);
  }
  return absl::StrCat(text, JointSection(plan), left_behind, other_left_behind,
                      WarningsOfAll(plans));
}

}  // namespace

std::string AlignedRows(const std::vector<std::pair<std::string, std::string>>& rows) {
  size_t widest = 0;
  for (const auto& [name, value] : rows) widest = std::max(widest, name.size());
  std::string text;
  for (const auto& [name, value] : rows) {
    std::string head = absl::StrCat("  ", name);
    for (const absl::string_view line : absl::StrSplit(value, '\n')) {
      head.resize(widest + 4, ' ');
      absl::StrAppend(&text, head, line, "\n");
      head.clear();
    }
  }
  return text;
}

std::string AlignedTable(const std::vector<std::vector<std::string>>& rows, size_t left) {
  std::vector<size_t> widths;
  for (const std::vector<std::string>& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string space(widths[c] - row[c].size(), ' ');
      absl::StrAppend(&line, "  ", c < left ? row[c] : space, c < left ? space : row[c]);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string PlanReport(const v1::PrepJobSpec& spec, const v1::PlanSummary& plan) {
  if (plan.other_targets_size() > 0) return ReportOfSeveral(spec, plan);
  return absl::StrCat(CheckpointSection(spec, plan), TargetSection("target", spec.targets(0), plan),
                      RuleSection(plan), TensorSection(plan), RankSection(plan),
                      JobSection("job", plan), LeftBehindSection(plan), StaleSection(plan),
                      WarningSection(plan));
}

}  // namespace shardprep
