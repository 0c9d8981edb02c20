#include "workers/expert_slots.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ExpertSlots Slots(const ExpertSlotInputs& inputs) {
  const auto slots = ExpertSlots::Make(inputs);
  EXPECT_TRUE(slots.ok()) << slots.status();
  return *slots;
}

std::vector<size_t> Counts(const ExpertSlots& slots) {
  std::vector<size_t> counts;
  counts.reserve(static_cast<size_t>(slots.groups()));
  for (int32_t g = 0; g < slots.groups(); ++g) counts.push_back(slots.LogicalOf(g).size());
  return counts;
}

TEST(ExpertSlots, TheFirstGroupsHoldOneMore) {
  EXPECT_THAT(Counts(Slots({.experts = 30, .groups = 8})), ElementsAre(4, 4, 4, 4, 4, 4, 3, 3));
  EXPECT_THAT(Counts(Slots({.experts = 128, .groups = 6})), ElementsAre(22, 22, 21, 21, 21, 21));
  EXPECT_THAT(Counts(Slots({.experts = 384, .groups = 16})), ::testing::Each(24));
}

// Contiguous or every G-th; either way each expert is in one slot.
TEST(ExpertSlots, PlacementSaysWhichExpertsAreWhere) {
  const ExpertSlots linear = Slots({.experts = 16, .groups = 4});
  EXPECT_THAT(linear.LogicalOf(1), ElementsAre(4, 5, 6, 7));
  const ExpertSlots robin =
      Slots({.experts = 16, .groups = 4, .placement = ExpertPlacement::kRoundRobin});
  EXPECT_THAT(robin.LogicalOf(0), ElementsAre(0, 4, 8, 12));
  EXPECT_THAT(robin.LogicalOf(3), ElementsAre(3, 7, 11, 15));
  EXPECT_EQ(robin.PhysicalOf(3), robin.LogicalOf(3));
  for (const ExpertPlacement placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    for (const int32_t groups : {1, 2, 3, 7, 30}) {
      const ExpertSlots slots = Slots({.experts = 30, .groups = groups, .placement = placement});
      std::vector<int> held(30, 0);
      for (int32_t g = 0; g < groups; ++g) {
        for (const int32_t expert : slots.LogicalOf(g)) ++held[static_cast<size_t>(expert)];
      }
      EXPECT_THAT(held, ::testing::Each(1)) << groups;
    }
  }
}

TEST(ExpertSlots, RedundantSlotsHoldCopiesFromTheFirstExpertOn) {
  const ExpertSlots slots = Slots({.experts = 8, .groups = 2, .redundant = 2});
  EXPECT_EQ(slots.physical_count(), 10);
  EXPECT_THAT(slots.LogicalOf(0), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(slots.LogicalOf(1), ElementsAre(5, 6, 7, 0, 1));
  EXPECT_THAT(slots.PhysicalOf(1), ElementsAre(5, 6, 7, 8, 9));
}

TEST(ExpertSlots, AnExplicitMapMayHoldAnExpertTwiceInAGroup) {
  const ExpertSlots slots =
      Slots({.experts = 4, .groups = 2, .physical_to_logical = {0, 1, 1, 2, 3, 0}});
  EXPECT_THAT(slots.LogicalOf(0), ElementsAre(0, 1, 1));
  EXPECT_THAT(slots.LogicalOf(1), ElementsAre(2, 3, 0));
}

TEST(ExpertSlots, WrongMapsAreRefused) {
  const struct {
    ExpertSlotInputs inputs;
    const char* what;
  } kCases[] = {
      {{.experts = 4, .groups = 5}, "4 experts leave some of 5"},
      {{.experts = 8, .groups = 2, .redundant = 1}, "9 slots, which do not divide among 2"},
      {{.experts = 8, .groups = 2, .redundant = -1}, "want 0 or more"},
      {{.experts = 8, .groups = 1, .redundant = 1}, "without expert parallelism"},
      {{.experts = 8, .groups = 2, .placement = ExpertPlacement::kRoundRobin, .redundant = 2},
       "placed linear"},
      {{.experts = 2,
        .groups = 2,
        .placement = ExpertPlacement::kRoundRobin,
        .physical_to_logical = {0, 1}},
       "want placement linear"},
      {{.experts = 8, .groups = 2, .redundant = 2'000'000}, "at most"},
      {{.experts = 4, .groups = 2, .physical_to_logical = {0, 1, 2, 4}},
       "slot 3 holds expert 4, want 0 to 3"},
      {{.experts = 4, .groups = 2, .physical_to_logical = {0, 1, 2, -1}}, "expert -1"},
      {{.experts = 4, .groups = 2, .physical_to_logical = {0, 1, 1, 2}}, "no slot holds expert 3"},
      {{.experts = 2, .groups = 2, .redundant = 2, .physical_to_logical = {0, 1}},
       "want no count beside it"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = ExpertSlots::Make(c.inputs).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.what));
  }
}

TEST(ExpertSlots, PlacementNamesAreParsedAsTheyArePrinted) {
  for (const ExpertPlacement placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    EXPECT_EQ(ParsePlacement(PlacementName(placement)).value(), placement);
  }
  EXPECT_THAT(std::string(ParsePlacement("random").status().message()), HasSubstr("round-robin"));
}

TEST(ParseExpertMap, ReadsOneListOrOneForEachGroup) {
  EXPECT_THAT(ParseExpertMap("[0, 1, 1, 2]", 2).value(), ElementsAre(0, 1, 1, 2));
  EXPECT_THAT(ParseExpertMap("[[0,1,1],[2,3]]", 2).value(), ElementsAre(0, 1, 1, 2, 3));
}

TEST(ParseExpertMap, RefusesOtherText) {
  for (const char* text :
       {"", "{}", "[]", "3", "[0,-1]", "[0,1.5]", "[\"0\"]", "[0,[1]]", "[[0],1]", "[[0,1]]",
        "[[0],[1,2]]", "[[0],[1],[2]]", "[4294967296]", "[0,1"}) {
    EXPECT_EQ(ParseExpertMap(text, 2).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace shardprep
