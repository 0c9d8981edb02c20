#include "workers/expert_slots.h"

#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int64_t kMaxSlots = 1'000'000;

// Slots of group `group`.
int64_t SlotsOf(int64_t slots, int32_t groups, int32_t group) {
  return slots / groups + (group < slots % groups ? 1 : 0);
}

absl::Status CheckRedundant(const ExpertSlotInputs& inputs, int64_t slots) {
  if (inputs.redundant == 0) return absl::OkStatus();
  if (inputs.redundant < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("redundant experts: ", inputs.redundant, ", want 0 or more"));
  }
  if (inputs.groups == 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        inputs.redundant, " redundant experts without expert parallelism have no use, want 0"));
  }
  if (inputs.placement == ExpertPlacement::kRoundRobin) {
    return absl::InvalidArgumentError(
        "redundant experts are placed linear, engines have no round-robin placement with them");
  }
  if (slots % inputs.groups == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(inputs.experts, " experts and ", inputs.redundant, " redundant ones are ", slots,
                   " slots, which do not divide among ", inputs.groups, " expert-parallel groups"));
}

absl::Status CheckExplicit(const ExpertSlotInputs& inputs) {
  if (inputs.redundant != 0) {
    return absl::InvalidArgumentError(
        "an explicit expert map says itself what is redundant, want no count beside it");
  }
  if (inputs.placement == ExpertPlacement::kRoundRobin) {
    return absl::InvalidArgumentError(
        "an explicit expert map says itself which slots a group has: neighbours, want placement "
        "linear beside it");
  }
  std::vector<bool> held(static_cast<size_t>(inputs.experts), false);
  for (size_t slot = 0; slot < inputs.physical_to_logical.size(); ++slot) {
    const int32_t expert = inputs.physical_to_logical[slot];
    if (expert < 0 || expert >= inputs.experts) {
      return absl::InvalidArgumentError(absl::StrCat("expert map: slot ", slot, " holds expert ",
                                                     expert, ", want 0 to ", inputs.experts - 1));
    }
    held[static_cast<size_t>(expert)] = true;
  }
  for (int64_t expert = 0; expert < inputs.experts; ++expert) {
    if (held[static_cast<size_t>(expert)]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("expert map: no slot holds expert ", expert, " of ", inputs.experts));
  }
  return absl::OkStatus();
}

absl::Status BadText(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("expert map: ", what));
}

absl::Status AppendExperts(const nlohmann::json& list, std::vector<int32_t>& experts) {
  for (const nlohmann::json& entry : list) {
    if (!entry.is_number_unsigned() ||
        entry.get<uint64_t>() > uint64_t{std::numeric_limits<int32_t>::max()}) {
      return BadText(absl::StrCat("'", entry.dump(), "' is no expert number"));
    }
    experts.push_back(entry.get<int32_t>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view PlacementName(ExpertPlacement placement) {
  return placement == ExpertPlacement::kLinear ? "linear" : "round-robin";
}

absl::StatusOr<ExpertPlacement> ParsePlacement(absl::string_view name) {
  for (const ExpertPlacement placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    if (name == PlacementName(placement)) return placement;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expert placement '", name, "' is unknown; known: linear, round-robin"));
}

absl::StatusOr<ExpertSlots> ExpertSlots::Make(const ExpertSlotInputs& inputs) {
  SP_CHECK(inputs.experts >= 1 && inputs.groups >= 1);
  ExpertSlots map;
  map.inputs_ = inputs;
  if (!inputs.physical_to_logical.empty()) {
    SP_RETURN_IF_ERROR(CheckExplicit(inputs));
    map.physical_to_logical_ = inputs.physical_to_logical;
  } else {
    if (inputs.redundant > kMaxSlots) {
      return absl::InvalidArgumentError(
          absl::StrCat("redundant experts: ", inputs.redundant, ", want at most ", kMaxSlots));
    }
    const int64_t slots = inputs.experts + inputs.redundant;
    SP_RETURN_IF_ERROR(CheckRedundant(inputs, slots));
    for (int64_t slot = 0; slot < slots; ++slot) {
      map.physical_to_logical_.push_back(static_cast<int32_t>(slot % inputs.experts));
    }
  }
  const int64_t slots = map.physical_count();
  if (slots < inputs.groups) {
    return absl::InvalidArgumentError(absl::StrCat(slots, " experts leave some of ", inputs.groups,
                                                   " expert-parallel groups without one"));
  }
  int64_t next = 0;
  for (int32_t group = 0; group < inputs.groups; ++group) {
    std::vector<int32_t> physical, logical;
    for (int64_t k = 0; k < SlotsOf(slots, inputs.groups, group); ++k) {
      const int64_t slot =
          inputs.placement == ExpertPlacement::kLinear ? next++ : group + k * inputs.groups;
      physical.push_back(static_cast<int32_t>(slot));
      logical.push_back(map.physical_to_logical_[static_cast<size_t>(slot)]);
    }
    map.physical_.push_back(std::move(physical));
    map.logical_.push_back(std::move(logical));
  }
  return map;
}

absl::StatusOr<std::vector<int32_t>> ParseExpertMap(const std::string& text, int32_t groups) {
  const auto root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_array() || root.empty()) return BadText("want a JSON list of expert numbers");
  std::vector<int32_t> experts;
  if (!root.front().is_array()) {
    SP_RETURN_IF_ERROR(AppendExperts(root, experts));
    return experts;
  }
  if (static_cast<int64_t>(root.size()) != groups) {
    return BadText(absl::StrCat(root.size(), " lists, want one for each of ", groups,
                                " expert-parallel groups"));
  }
  for (const nlohmann::json& list : root) {
    if (!list.is_array()) return BadText("want lists only, or none");
    SP_RETURN_IF_ERROR(AppendExperts(list, experts));
  }
  const auto slots = static_cast<int64_t>(experts.size());
  for (int32_t group = 0; group < groups; ++group) {
    const auto found = static_cast<int64_t>(root[static_cast<size_t>(group)].size());
    const int64_t want = SlotsOf(slots, groups, group);
    if (found != want) {
      return BadText(absl::StrCat("the list of group ", group, " has ", found, " slots of ", slots,
                                  ", want ", want));
    }
  }
  return experts;
}

}  // namespace shardprep
