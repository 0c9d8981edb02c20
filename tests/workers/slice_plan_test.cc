#include "workers/slice_plan.h"

#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/open_store.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Reads and recognises a test checkpoint, which stays on disk until the end of the test.
class SlicePlanTest : public ::testing::Test {
 protected:
  void Load(const CheckpointSpec& spec) {
    ASSERT_TRUE(WriteTestCheckpoint(dir_.path(), spec).ok());
    auto store = OpenStore(dir_.path(), {});
    ASSERT_TRUE(store.ok()) << store.status();
    auto checkpoint = ReadCheckpoint(**store);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = std::make_shared<const Checkpoint>(std::move(*checkpoint));
    auto moe = RecognizeFamily(*checkpoint_);
    ASSERT_TRUE(moe.ok()) << moe.status();
    moe_ = std::make_shared<const MoeCheckpoint>(std::move(*moe));
  }

  absl::StatusOr<SlicePlan> Plan(const SlicePlanInputs& inputs) {
    return SlicePlan::Make(checkpoint_, moe_, inputs);
  }

  static SlicePlanInputs Inputs(int32_t ranks, int64_t alignment) {
    SlicePlanInputs inputs;
    inputs.tensor_parallel_size = ranks;
    inputs.intermediate_alignment = Alignment(alignment);
    inputs.hidden_alignment = Alignment(alignment);
    return inputs;
  }

  TempDir dir_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::shared_ptr<const MoeCheckpoint> moe_;
};

// How many slices take each byte of each source tensor.
using Coverage = std::map<int32_t, std::vector<int>>;

TEST_F(SlicePlanTest, SlicesOfAllRanksTileTheSource) {
  Load({.hidden = 64, .intermediate = 1024, .experts = 2, .layers = 1, .mtp_layers = 0});
  for (const int32_t ranks : {1, 2, 4, 8, 16, 32}) {
    for (const int64_t alignment : {32, 128, 256}) {
      SCOPED_TRACE(::testing::Message() << "T=" << ranks << " alignment " << alignment);
      SlicePlanInputs inputs = Inputs(ranks, alignment);
      // 32 elements are 16 bytes, which the AITER layouts cannot take.
      if (alignment == 32) inputs.profile = ProfileId::kLogical;
      const auto plan = Plan(inputs);
      ASSERT_TRUE(plan.ok()) << plan.status();
      Coverage covered;
      const Region& region = plan->regions().front();
      for (const FusedTensor& tensor : plan->fused_tensors()) {
        for (int32_t rank = 0; rank < ranks; ++rank) {
          for (int64_t expert = 0; expert < 2; ++expert) {
            for (const Slice& slice : plan->SlicesOf(region, tensor, rank, expert)) {
              const TensorInfo info = checkpoint_->tensors().at(slice.tensor);
              std::vector<int>& times = covered[slice.tensor];
              times.resize(info.size_bytes);
              ASSERT_LE(slice.row_begin + slice.rows, info.shape[0]) << info.name;
              ASSERT_LE(slice.col_begin + slice.col_bytes, slice.source_row_bytes) << info.name;
              for (int64_t row = 0; row < slice.rows; ++row) {
                const int64_t begin =
                    (slice.row_begin + row) * slice.source_row_bytes + slice.col_begin;
                for (int64_t at = begin; at < begin + slice.col_bytes; ++at) ++times[at];
              }
            }
          }
        }
      }
      ASSERT_EQ(covered.size(), 2u * 6);
      for (const auto& [index, times] : covered) {
        EXPECT_THAT(times, ::testing::Each(1)) << checkpoint_->tensors().at(index).name;
      }
    }
  }
}

// The fault of vLLM #42595: stepping with the padded width leaves rank 3 without a row.
TEST_F(SlicePlanTest, LastRankGetsItsOwnRows) {
  Load({.hidden = 256, .intermediate = 256});
  const auto plan = Plan(Inputs(4, 128));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->intermediate().elements(), 64);
  EXPECT_EQ(plan->padded_intermediate().elements(), 128);
  const FusedTensor& w13 = plan->fused_tensors()[0];
  ASSERT_EQ(w13.role, Role::kW13Weight);
  EXPECT_EQ(w13.job.rows, 256);
  EXPECT_EQ(w13.native_rows, 128);
  const std::vector<Slice> slices = plan->SlicesOf(plan->regions()[0], w13, 3, 0);
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(slices[0].row_begin, 192);
  EXPECT_EQ(slices[0].rows, 64);
  EXPECT_EQ(slices[0].first_row, 0);
  EXPECT_EQ(slices[1].row_begin, 192);
  EXPECT_EQ(slices[1].first_row, 128) << "the up half starts behind the padded gate half";
  const FusedTensor& w2 = plan->fused_tensors()[1];
  ASSERT_EQ(w2.role, Role::kW2Weight);
  const std::vector<Slice> down = plan->SlicesOf(plan->regions()[0], w2, 3, 0);
  ASSERT_EQ(down.size(), 1u);
  EXPECT_EQ(down[0].col_begin, 96);
  EXPECT_EQ(down[0].col_bytes, 32);
  EXPECT_EQ(w2.job.padded_cols, 64);
}

TEST_F(SlicePlanTest, NativeAndPaddedWidthsOfPublishedGeometry) {
  Load({.hidden = 7168,
        .intermediate = 3072,
        .experts = 1,
        .layers = 1,
        .mtp_layers = 0,
        .sparse = true});
  const struct {
    int32_t ranks;
    int64_t alignment, native, padded;
  } kCases[] = {{8, 128, 384, 384}, {8, 256, 384, 512},   {16, 128, 192, 256}, {32, 128, 96, 128},
                {32, 256, 96, 256}, {1, 128, 3072, 3072}, {96, 128, 32, 128}};
  for (const auto& c : kCases) {
    const auto plan = Plan(Inputs(c.ranks, c.alignment));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->intermediate().elements(), c.native);
    EXPECT_EQ(plan->padded_intermediate().elements(), c.padded);
    EXPECT_EQ(plan->padded_hidden().elements(), 7168);
  }
}

TEST_F(SlicePlanTest, PublishedLayerHasThePublishedSizes) {
  Load({.hidden = 7168,
        .intermediate = 3072,
        .experts = 384,
        .layers = 1,
        .mtp_layers = 0,
        .files = 1,
        .sparse = true});
  const auto plan = Plan(Inputs(8, 128));
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::map<Role, const FusedTensor*> by_role;
  for (const FusedTensor& tensor : plan->fused_tensors()) by_role[tensor.role] = &tensor;
  EXPECT_EQ(by_role[Role::kW13Weight]->size_bytes, 1'056'964'608);
  EXPECT_EQ(by_role[Role::kW13Scale]->size_bytes, 66'060'288);
  EXPECT_EQ(by_role[Role::kW2Weight]->size_bytes, 528'482'304);
  EXPECT_EQ(by_role[Role::kW2Scale]->size_bytes, 44'040'192);
  EXPECT_EQ(by_role[Role::kW2Scale]->native_bytes, 33'030'144);
  EXPECT_THAT(by_role[Role::kW13Weight]->shape, ElementsAre(384, 768, 3584));
  EXPECT_THAT(by_role[Role::kW13Scale]->shape, ElementsAre(384 * 768, 224));
  EXPECT_THAT(by_role[Role::kW2Weight]->shape, ElementsAre(384, 7168, 192));
  EXPECT_THAT(by_role[Role::kW2Scale]->shape, ElementsAre(384 * 7168, 16))
      << "12 scale columns grow to 16, the weights stay native";
  EXPECT_EQ(plan->RoutedBytesPerRank(true) * 61, 103'428'390'912);
  EXPECT_EQ(plan->NeededSourceBytes() - plan->ReplicatedBytes(), 13'476'298'752);
}

TEST_F(SlicePlanTest, IndivisibleSizesAreRefusedWithThoseThatWork) {
  Load({.hidden = 64, .intermediate = 2304, .experts = 1, .layers = 1, .mtp_layers = 0});
  for (const int32_t ranks : {5, 16, 7}) {  // 2304/16 = 144 cuts a block of 32
    const auto plan = Plan(Inputs(ranks, 128));
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(plan.status().message()),
                HasSubstr("sizes that work: 1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72"));
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr("2304"));
  }
  const auto plan = Plan(Inputs(8, 128));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->intermediate().elements(), 288);
  EXPECT_EQ(plan->padded_intermediate().elements(), 384);
}

TEST_F(SlicePlanTest, DataParallelRanksCutTheIntermediateToo) {
  Load({.hidden = 64, .intermediate = 256, .experts = 1, .layers = 1, .mtp_layers = 0});
  SlicePlanInputs inputs = Inputs(2, 64);
  inputs.data_parallel_size = 4;
  const auto plan = Plan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rank_count(), 8);
  EXPECT_EQ(plan->intermediate().elements(), 32);
}

// FP8 in blocks of 128: the check is on the width of one rank and one projection.
TEST_F(SlicePlanTest, SlicesThatCutAScaleBlockAreRefusedWithSizesThatWork) {
  const struct {
    int64_t intermediate;
    int32_t ranks;
    const char* works;
  } kCases[] = {{1536, 8, "sizes that work: 1, 2, 3, 4, 6, 12"},
                {320, 2, "sizes that work: none"},
                {320, 4, "sizes that work: none"},
                {320, 8, "sizes that work: none"}};
  for (const auto& c : kCases) {
    CheckpointSpec spec = FamilySpec(TestFamily::kDeepSeekV3Fp8);
    spec.intermediate = c.intermediate;
    spec.sparse = true;
    Load(spec);
    const absl::Status status = Plan(Inputs(c.ranks, 128)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& part :
         {absl::StrCat("intermediate size ", c.intermediate), absl::StrCat("among ", c.ranks),
          std::string("scales of 128"), std::string(c.works)}) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

// gpt-oss-120b: 90 blocks of 32 among 8 ranks are seven times 12 and once 6.
TEST_F(SlicePlanTest, RanksOfGptOssTakeWholeBlocks) {
  CheckpointSpec spec = FamilySpec(TestFamily::kGptOss);
  spec.hidden = 2880;
  spec.intermediate = 2880;
  spec.experts = 2;
  spec.layers = 1;
  spec.sparse = true;
  Load(spec);
  const struct {
    int32_t ranks;
    int64_t widest, last;
  } kCases[] = {{1, 2880, 2880}, {2, 1440, 1440}, {4, 736, 672}, {8, 384, 192}};
  for (const auto& c : kCases) {
    const auto plan = Plan(Inputs(c.ranks, 256));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->IntermediateOf(0).elements(), c.widest);
    EXPECT_EQ(plan->IntermediateOf(c.ranks - 1).elements(), c.last);
    EXPECT_EQ(plan->padded_hidden().elements(), 3072);
  }
  // 45 blocks of ranks that take two each leave nothing for the others.
  const absl::Status status = Plan(Inputs(64, 256)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sizes that work: 1, 2, 3, 4, 5, 6, 7, 8"));
}

// w1, w3 and w2 whole, the experts of one group only.
TEST_F(SlicePlanTest, WithAGroupForEachRankTheIntermediateIsNotCut) {
  Load({.hidden = 256, .intermediate = 256, .experts = 7, .layers = 1, .mtp_layers = 0});
  SlicePlanInputs inputs = Inputs(2, 128);
  inputs.data_parallel_size = 2;
  inputs.expert_parallel_size = 4;
  const auto plan = Plan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->intermediate().elements(), 256);
  EXPECT_EQ(plan->shape_count(), 2) << "7 experts among 4 groups are 2, 2, 2, 1";
  EXPECT_EQ(plan->FusedTensorsOf(0)[0].experts, 2);
  EXPECT_EQ(plan->FusedTensorsOf(3)[0].experts, 1);
  EXPECT_THAT(plan->FusedTensorsOf(3)[0].shape, ElementsAre(1, 512, 128));
  const auto slices = plan->SlicesOf(plan->regions()[0], plan->FusedTensorsOf(3)[0], 3, 0);
  EXPECT_EQ(checkpoint_->tensors().at(slices[0].tensor).name, "layers.0.ffn.experts.6.w1.weight");
  EXPECT_EQ(slices[0].rows, 256);
}

TEST_F(SlicePlanTest, NamesAndOrderOfFusedTensors) {
  Load({.hidden = 256, .intermediate = 256, .experts = 2, .layers = 2, .mtp_layers = 1});
  SlicePlanInputs inputs = Inputs(2, 128);
  inputs.include_mtp = true;
  const auto plan = Plan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<std::string> names;
  for (const Region& region : plan->regions()) {
    if (region.kind != Region::Kind::kRouted) continue;
    for (const PartPlan& part : region.parts) {
      for (const PartTensor& tensor : part.tensors) names.push_back(tensor.name);
    }
  }
  ASSERT_EQ(names.size(), 12u);
  EXPECT_EQ(names[0], "model.layers.0.ffn.experts.w13_weight");
  EXPECT_EQ(names[1], "model.layers.0.ffn.experts.w2_weight");
  EXPECT_EQ(names[2], "model.layers.0.ffn.experts.w13_weight_scale");
  EXPECT_EQ(names[3], "model.layers.0.ffn.experts.w2_weight_scale");
  EXPECT_EQ(names[8], "model.layers.2.ffn.experts.w13_weight")
      << "mtp.0 becomes layer num_hidden_layers";
}

// Names in all parts, and how often.
std::map<std::string, int> CarriedNames(const SlicePlan& plan) {
  std::map<std::string, int> names;
  for (const Region& region : plan.regions()) {
    if (region.kind != Region::Kind::kReplicated) continue;
    for (const PartPlan& part : region.parts) {
      for (const PartTensor& tensor : part.tensors) ++names[tensor.name];
    }
  }
  return names;
}

TEST_F(SlicePlanTest, EveryOtherTensorIsCarriedOnceOrListed) {
  Load({.hidden = 256, .intermediate = 256, .experts = 2, .layers = 2, .mtp_layers = 1});
  for (const bool include_mtp : {false, true}) {
    for (const bool experts_only : {false, true}) {
      for (const int64_t part_size : {4096, 20'000, 1 << 30}) {
        SlicePlanInputs inputs = Inputs(2, 128);
        inputs.include_mtp = include_mtp;
        inputs.experts_only = experts_only;
        inputs.part_size_bytes = part_size;
        const auto plan = Plan(inputs);
        ASSERT_TRUE(plan.ok()) << plan.status();
        std::map<std::string, int> seen = CarriedNames(*plan);
        for (const OmittedTensor& omitted : plan->omitted()) {
          ++seen[omitted.name];
          EXPECT_FALSE(omitted.reason.empty());
        }
        for (const MoeLayer& layer : moe_->layers) {
          if (layer.is_mtp && !include_mtp) continue;
          for (const int32_t t : layer.Tensors()) {
            ++seen[std::string(checkpoint_->tensors().at(t).name)];
          }
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), checkpoint_->tensors().size());
        for (const auto& [name, times] : seen) EXPECT_EQ(times, 1) << name;
        for (const auto& [name, times] : CarriedNames(*plan)) {
          EXPECT_TRUE(include_mtp || name.rfind("mtp.", 0) != 0) << name;
          EXPECT_FALSE(experts_only) << name;
        }
      }
    }
  }
}

TEST_F(SlicePlanTest, PartsHoldWholeTensorsUpToThePartSize) {
  Load({.hidden = 256, .intermediate = 256, .experts = 4, .layers = 2, .mtp_layers = 0});
  for (const int64_t part_size : {4096, 40'000, 100'000, 1 << 30}) {
    SlicePlanInputs inputs = Inputs(2, 128);
    inputs.part_size_bytes = part_size;
    const auto plan = Plan(inputs);
    ASSERT_TRUE(plan.ok()) << plan.status();
    int32_t next_routed = 0, next_replicated = 0;
    for (const Region& region : plan->regions()) {
      const bool routed = region.kind == Region::Kind::kRouted;
      if (!routed) {
        EXPECT_EQ(region.parts.size(), 1u);
      }
      for (const PartPlan& part : region.parts) {
        EXPECT_EQ(part.part, routed ? next_routed++ : next_replicated++);
        EXPECT_TRUE(part.data_bytes <= part_size || part.tensors.size() == 1)
            << part.data_bytes << " bytes in " << part.tensors.size() << " tensors";
        int64_t at = 0;
        for (const PartTensor& tensor : part.tensors) {
          EXPECT_EQ(tensor.data_offset, at);
          at += tensor.size_bytes;
        }
        EXPECT_EQ(at, part.data_bytes);
      }
    }
  }
}

TEST_F(SlicePlanTest, LogicalProfileKeepsThreeDimensions) {
  Load({.hidden = 256, .intermediate = 256, .experts = 4});
  SlicePlanInputs inputs = Inputs(2, 32);
  inputs.profile = ProfileId::kLogical;
  const auto plan = Plan(inputs);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const FusedTensor& tensor : plan->fused_tensors()) EXPECT_EQ(tensor.shape.size(), 3u);
  EXPECT_EQ(plan->PaddingBytesPerRank(), 0);
}

}  // namespace
}  // namespace shardprep
