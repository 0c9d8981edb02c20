// The targets of a job together: the plan of each, and how their ranks share one source.
//
// Ranks are numbered through over the targets, as v1::RankTask has them: rank r of target t is r
// plus the ranks of the targets before it, and the replicated stream of target t is -1 - t. Regions
// cut the source, not the output, so the targets of a job have the same regions: region g of each
// is made of the same source tensors, and a lease of region g may cover ranks of any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/target.pb.h"
#include "workers/block_plan.h"
#include "workers/job_plan.h"

namespace shardprep {

struct JointSpans;

// A rank, which may be kReplicatedRank, of one target.
struct TargetRank {
  int32_t target = 0;  // index into TargetSet::plans()
  int32_t rank = 0;
  friend bool operator==(const TargetRank&, const TargetRank&) = default;
};

// Immutable and thread safe.
class TargetSet {
 public:
  // At least one plan, of one source and one job. INTERNAL when their regions differ.
  static absl::StatusOr<std::shared_ptr<const TargetSet>> Make(
      v1::PrepJobSpec spec, std::vector<std::shared_ptr<const JobPlan>> plans,
      int64_t memory_budget_bytes);

  // By target; the spec of each has that target alone.
  const std::vector<std::shared_ptr<const JobPlan>>& plans() const { return plans_; }
  const JobPlan& plan(int32_t target) const { return *plans_[static_cast<size_t>(target)]; }
  int32_t target_count() const { return static_cast<int32_t>(plans_.size()); }
  const v1::PrepJobSpec& spec() const { return spec_; }  // of the job, normalised
  // Of the job: the layout fingerprint of its target; of several, see v1::Lease.
  const std::string& fingerprint() const { return fingerprint_; }
  const std::string& source_token() const { return plans_.front()->source_token; }
  // Of the first target, with those of the others in it.
  const v1::PlanSummary& summary() const { return summary_; }

  int32_t region_count() const;
  // The numbers of the ranks that have tasks in a region, by target and rank.
  std::vector<int32_t> RanksOf(int32_t region) const;

  int32_t NumberOf(const TargetRank& rank) const;
  // INVALID_ARGUMENT when no rank has the number.
  absl::StatusOr<TargetRank> RankOf(int32_t number) const;

  // Whether ranks of a lease are prepared jointly (joint_prep.h) where the budget allows it: they
  // are of several targets, or hold copies of an expert, which is read once for all that way.
  bool is_joint() const { return is_joint_; }
  // Buffers of such a lease.
  const MemoryNeed& joint_memory() const { return joint_memory_; }
  // How many ranks, in the order of RanksOf(), one lease can cover under a budget, at least 1.
  // INVALID_ARGUMENT stating the minimum when not even one fits.
  absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const;

 private:
  TargetSet() = default;
  bool RegionIsRouted(int32_t region) const;
  JointSpans SpansOf(int32_t region, absl::Span<const int32_t> numbers, int64_t span_bytes) const;
  int64_t ReadBytesOf(int32_t region, int32_t per_lease) const;
  absl::Status PlanJoint(int64_t memory_budget_bytes);
  absl::Status SummarizeJoint(int64_t minimum_budget, int64_t memory_budget_bytes);
  absl::Status SummarizeTargets(int64_t memory_budget_bytes);

  v1::PrepJobSpec spec_;
  std::vector<std::shared_ptr<const JobPlan>> plans_;
  std::vector<int32_t> first_number_;  // by target
  std::string fingerprint_;
  v1::PlanSummary summary_;
  bool is_joint_ = false;
  MemoryNeed joint_memory_;
};

// Reads the checkpoint's headers once and plans every target. Writes nothing. Errors: those of
// PlanJob(); of several targets the message begins with which one it is ("targets[1]: ").
absl::StatusOr<std::shared_ptr<const TargetSet>> PlanTargets(const v1::PrepJobSpec& spec,
                                                             const PlanOptions& options);

}  // namespace shardprep
