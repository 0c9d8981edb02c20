#include "workers/target_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/joint_spans.h"

namespace shardprep {
namespace {

// The source tensors of a region, in the order in which they are carried.
std::vector<int32_t> SourceTensors(const SlicePlan& plan, const Region& region) {
  std::vector<int32_t> tensors;
  if (region.kind == Region::Kind::kRouted) return tensors;
  for (const PartTensor& tensor : region.parts.front().tensors) {
    const DenseTensor& dense = plan.dense_tensors()[static_cast<size_t>(tensor.source)];
    for (const DenseSource& source : dense.sources) tensors.push_back(source.tensor);
  }
  return tensors;
}

bool SameSource(const SlicePlan& a, const SlicePlan& b) {
  const auto same = [&](const Region& x, const Region& y) {
    return x.kind == y.kind && x.moe_layer == y.moe_layer &&
           SourceTensors(a, x) == SourceTensors(b, y);
  };
  return std::equal(a.regions().begin(), a.regions().end(), b.regions().begin(), b.regions().end(),
                    same);
}

std::string JobFingerprint(const std::vector<std::shared_ptr<const JobPlan>>& plans) {
  if (plans.size() == 1) return plans.front()->fingerprint;
  std::string lines;
  for (const auto& plan : plans) absl::StrAppend(&lines, plan->fingerprint, "\n");
  return Sha256Hex(lines);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TargetSet>> TargetSet::Make(
    v1::PrepJobSpec spec, std::vector<std::shared_ptr<const JobPlan>> plans,
    int64_t memory_budget_bytes) {
  SP_CHECK(!plans.empty());
  std::shared_ptr<TargetSet> set(new TargetSet());
  set->spec_ = std::move(spec);
  set->plans_ = std::move(plans);
  int32_t number = 0;
  for (const auto& plan : set->plans_) {
    set->first_number_.push_back(number);
    number += plan->slices.rank_count();
    if (!SameSource(set->plans_.front()->slices, plan->slices)) {
      return absl::InternalError(absl::StrCat("targets of one job have other regions: ",
                                              set->plans_.front()->target().destination_uri(),
                                              " and ", plan->target().destination_uri()));
    }
  }
  set->fingerprint_ = JobFingerprint(set->plans_);
  set->summary_ = set->plans_.front()->summary;
  const ExpertSlots& slots = set->plans_.front()->slices.expert_slots();
  set->is_joint_ = set->target_count() > 1 || slots.physical_count() > slots.logical_count();
  if (set->is_joint_) SP_RETURN_IF_ERROR(set->PlanJoint(memory_budget_bytes));
  return std::shared_ptr<const TargetSet>(std::move(set));
}

int32_t TargetSet::region_count() const {
  return static_cast<int32_t>(plans_.front()->slices.regions().size());
}

std::vector<int32_t> TargetSet::RanksOf(int32_t region) const {
  std::vector<int32_t> numbers;
  for (int32_t t = 0; t < target_count(); ++t) {
    const SlicePlan& slices = plan(t).slices;
    for (const int32_t rank : slices.RanksOf(slices.regions()[static_cast<size_t>(region)])) {
      numbers.push_back(NumberOf({t, rank}));
    }
  }
  return numbers;
}

int32_t TargetSet::NumberOf(const TargetRank& rank) const {
  if (rank.rank == kReplicatedRank) return -1 - rank.target;
  return first_number_[static_cast<size_t>(rank.target)] + rank.rank;
}

absl::StatusOr<TargetRank> TargetSet::RankOf(int32_t number) const {
  if (number < 0 && -1 - number < target_count()) return TargetRank{-1 - number, kReplicatedRank};
  for (int32_t t = target_count() - 1; t >= 0 && number >= 0; --t) {
    const int32_t rank = number - first_number_[static_cast<size_t>(t)];
    if (rank < 0) continue;
    if (rank < plan(t).slices.rank_count()) return TargetRank{t, rank};
    break;
  }
  return absl::InvalidArgumentError(absl::StrCat("no target has rank number ", number));
}

absl::StatusOr<int32_t> TargetSet::RanksPerLease(int64_t memory_budget_bytes) const {
  if (!is_joint_) return shardprep::RanksPerLease(plan(0), memory_budget_bytes);
  if (memory_budget_bytes >= joint_memory_.Total(1, 1)) {
    int32_t ranks = 0;
    for (const auto& plan : plans_) ranks += plan->slices.rank_count();
    SP_ASSIGN_OR_RETURN(const LeaseShape shape,
                        FitLease(joint_memory_, memory_budget_bytes, ranks, 1));
    return shape.ranks;
  }
  // Ranks of one target at a time need less.
  int32_t fewest = INT32_MAX;
  for (const auto& plan : plans_) {
    SP_ASSIGN_OR_RETURN(const int32_t ranks, shardprep::RanksPerLease(*plan, memory_budget_bytes));
    fewest = std::min(fewest, ranks);
  }
  return fewest;
}

// The spans of some ranks of a region with nothing recorded.
JointSpans TargetSet::SpansOf(int32_t region, absl::Span<const int32_t> numbers,
                              int64_t span_bytes) const {
  std::vector<JointRank> ranks;
  ranks.reserve(numbers.size());
  for (const int32_t number : numbers) {
    const TargetRank rank = *RankOf(number);
    const SlicePlan& slices = plan(rank.target).slices;
    size_t tensors = 0;
    for (const PartPlan& part :
         slices.PartsOf(slices.regions()[static_cast<size_t>(region)], rank.rank)) {
      tensors += part.tensors.size();
    }
    ranks.push_back({&slices, rank.rank, std::vector<bool>(tensors, true)});
  }
  return PlanJointSpans(region, ranks, span_bytes);
}

// What is read of a region when each lease covers `per_lease` ranks.
int64_t TargetSet::ReadBytesOf(int32_t region, int32_t per_lease) const {
  const std::vector<int32_t> numbers = RanksOf(region);
  int64_t bytes = 0;
  for (size_t begin = 0; begin < numbers.size(); begin += static_cast<size_t>(per_lease)) {
    const auto set = absl::MakeConstSpan(numbers).subspan(begin, static_cast<size_t>(per_lease));
    for (const SourceSpan& span : SpansOf(region, set, JointSpanBytes(joint_memory_)).spans) {
      bytes += span.size_bytes;
    }
  }
  return bytes;
}

bool TargetSet::RegionIsRouted(int32_t region) const {
  return plans_.front()->slices.regions()[static_cast<size_t>(region)].kind ==
         Region::Kind::kRouted;
}

absl::Status TargetSet::PlanJoint(int64_t memory_budget_bytes) {
  std::vector<MemoryNeed> needs;
  int64_t single_minimum = 0;
  needs.reserve(plans_.size());
  for (const auto& plan : plans_) {
    needs.push_back(plan->memory);
    single_minimum = std::max(single_minimum, plan->memory.Total(1, 1));
  }
  const int64_t span_bytes = JointSpanBytes(JointMemoryNeed(needs, 0));
  // All routed layers are cut alike, and other regions anywhere between two rows.
  int64_t largest_span = 0;
  bool routed = false;
  for (int32_t region = 0; region < region_count(); ++region) {
    const bool is_routed = RegionIsRouted(region);
    if (is_routed && std::exchange(routed, true)) continue;
    for (const SourceSpan& span : SpansOf(region, RanksOf(region), span_bytes).spans) {
      largest_span = std::max(largest_span, span.size_bytes);
    }
  }
  joint_memory_ = JointMemoryNeed(needs, largest_span);
  const int64_t joint_minimum = joint_memory_.Total(1, 1);
  return SummarizeJoint(std::min(single_minimum, joint_minimum), memory_budget_bytes);
}

namespace {

// The figures about reading and memory, which a target's own summary and that of all have alike.
template <typename Summary>
void SetFigures(int64_t read, int64_t minimum_budget, int64_t read_once_budget, int32_t per_lease,
                Summary& summary) {
  const int64_t needed = summary.needed_bytes();
  summary.set_read_bytes(read);
  summary.set_read_amplification(
      needed == 0 ? 1.0 : static_cast<double>(read) / static_cast<double>(needed));
  summary.set_minimum_memory_budget_bytes(minimum_budget);
  summary.set_read_once_memory_budget_bytes(read_once_budget);
  summary.set_ranks_per_lease(per_lease);
}

}  // namespace

absl::Status TargetSet::SummarizeJoint(int64_t minimum_budget, int64_t memory_budget_bytes) {
  SP_ASSIGN_OR_RETURN(const int32_t per_lease, RanksPerLease(memory_budget_bytes));
  int64_t read = 0, routed_read = -1;
  for (int32_t region = 0; region < region_count(); ++region) {
    const bool is_routed = RegionIsRouted(region);
    const int64_t bytes =
        is_routed && routed_read >= 0 ? routed_read : ReadBytesOf(region, per_lease);
    if (is_routed) routed_read = bytes;
    read += bytes;
  }
  int32_t ranks = 0;
  for (const auto& plan : plans_) ranks += plan->slices.rank_count();
  const int64_t read_once = joint_memory_.Total(ranks, 1);
  if (target_count() == 1) {
    SetFigures(read, minimum_budget, read_once, per_lease, summary_);
    return absl::OkStatus();
  }
  SP_RETURN_IF_ERROR(SummarizeTargets(memory_budget_bytes));
  SetFigures(read, minimum_budget, read_once, per_lease, *summary_.mutable_joint());
  return absl::OkStatus();
}

// The figures of each target are those of a job of its own, which reads copies of experts once too.
absl::Status TargetSet::SummarizeTargets(int64_t memory_budget_bytes) {
  int64_t output_bytes = 0;
  for (size_t t = 0; t < plans_.size(); ++t) {
    SP_ASSIGN_OR_RETURN(const auto own, Make(plans_[t]->spec, {plans_[t]}, memory_budget_bytes));
    (t == 0 ? summary_ : *summary_.add_other_targets()) = own->summary();
    output_bytes += own->summary().output_bytes();
  }
  v1::JointPlan& joint = *summary_.mutable_joint();
  joint.set_output_bytes(output_bytes);
  joint.set_needed_bytes(plans_.front()->slices.NeededSourceBytes());
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const TargetSet>> PlanTargets(const v1::PrepJobSpec& spec,
                                                             const PlanOptions& options) {
  SP_ASSIGN_OR_RETURN(v1::PrepJobSpec normal, NormalizeSpec(spec));
  SP_ASSIGN_OR_RETURN(const PlanSource source, ReadPlanSource(normal, options));
  std::vector<std::shared_ptr<const JobPlan>> plans;
  for (int32_t t = 0; t < normal.targets_size(); ++t) {
    v1::PrepJobSpec own = normal;
    own.clear_targets();
    *own.add_targets() = normal.targets(t);
    auto plan = PlanTarget(own, source, options);
    SP_RETURN_IF_ERROR(InTarget(plan.status(), t, normal.targets_size()));
    plans.push_back(*std::move(plan));
  }
  return TargetSet::Make(std::move(normal), std::move(plans), options.memory_budget_bytes);
}

}  // namespace shardprep
