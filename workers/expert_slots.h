// Expert parallelism: which experts each group of ranks holds. Pure and thread safe.
//
// Physical experts are slots; each holds a copy of a logical expert of the checkpoint. The slots
// beyond the logical experts are redundant copies. Source of the rules: vLLM
// model_executor/layers/fused_moe/expert_map_manager.py and its expert-parallel load balancing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardprep {

// With base = slots // groups and rem = slots % groups, group g holds base + (g < rem) slots:
// contiguous ones, or g, g + groups, g + 2 * groups...
enum class ExpertPlacement { kLinear, kRoundRobin };

// "linear" and "round-robin".
absl::string_view PlacementName(ExpertPlacement placement);
// INVALID_ARGUMENT for an unknown name; the message lists the known ones.
absl::StatusOr<ExpertPlacement> ParsePlacement(absl::string_view name);

struct ExpertSlotInputs {
  int64_t experts = 1;  // logical
  int32_t groups = 1;   // the expert parallel size
  ExpertPlacement placement = ExpertPlacement::kLinear;
  int64_t redundant = 0;  // slots beyond the logical experts; slot j holds expert j % experts
  // Logical expert of each slot, instead of `redundant`. Empty: the rule above.
  std::vector<int32_t> physical_to_logical;
};

class ExpertSlots {
 public:
  // INVALID_ARGUMENT: more groups than slots; redundant slots that do not divide among the groups,
  // or with round-robin placement or a single group, where engines have none; an explicit map with
  // a number that is no expert, or without a slot for some expert, or beside `redundant` or
  // round-robin placement.
  static absl::StatusOr<ExpertSlots> Make(const ExpertSlotInputs& inputs);

  int64_t logical_count() const { return inputs_.experts; }
  int64_t physical_count() const { return static_cast<int64_t>(physical_to_logical_.size()); }
  int32_t groups() const { return inputs_.groups; }
  ExpertPlacement placement() const { return inputs_.placement; }
  const std::vector<int32_t>& physical_to_logical() const { return physical_to_logical_; }

  // Of one group, in the order in which its ranks store them.
  const std::vector<int32_t>& PhysicalOf(int32_t group) const { return physical_[group]; }
  const std::vector<int32_t>& LogicalOf(int32_t group) const { return logical_[group]; }

 private:
  ExpertSlotInputs inputs_;
  std::vector<int32_t> physical_to_logical_;
  std::vector<std::vector<int32_t>> physical_;  // by group
  std::vector<std::vector<int32_t>> logical_;   // by group
};

// An explicit map as text: a JSON list with the logical expert of each slot, or one such list for
// each of `groups` groups, which must be as long as linear placement makes them. INVALID_ARGUMENT
// for any other text.
absl::StatusOr<std::vector<int32_t>> ParseExpertMap(const std::string& text, int32_t groups);

}  // namespace shardprep
