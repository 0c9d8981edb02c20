#include "workers/tensor_naming.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

const ExpertFormat& Format(const std::string& id) {
  for (const FamilyRow& row : FamilyRows()) {
    for (const ExpertFormat* format : row.formats) {
      if (format->id == id) return *format;
    }
  }
  ADD_FAILURE() << id;
  return *FamilyRows().front().formats.front();
}

TEST(TensorNaming, EachSchemeHasTheNamesOfItsEngine) {
  MoeCheckpoint moe;
  moe.experts_module = "ffn.experts";
  moe.engine_prefix = "model.";
  const struct {
    const char* scheme;
    const char* format;
    Role role;
    const char* name;
  } kCases[] = {
      {"vllm", "mxfp4", Role::kW13Weight, "model.layers.7.ffn.experts.w13_weight"},
      {"vllm", "mxfp4", Role::kW2Scale, "model.layers.7.ffn.experts.w2_weight_scale"},
      {"vllm", "fp8-block-f32", Role::kW13Scale, "model.layers.7.ffn.experts.w13_weight_scale_inv"},
      {"vllm", "mxfp4-compressed-tensors", Role::kW2Weight,
       "model.layers.7.ffn.experts.w2_weight_packed"},
      {"vllm", "mxfp4-gpt-oss", Role::kW13Bias, "model.layers.7.ffn.experts.w13_bias"},
      {"vllm-routed-experts", "mxfp4", Role::kW13Scale,
       "model.layers.7.ffn.experts.routed_experts.w13_weight_scale"},
      {"sglang", "mxfp4", Role::kW13Scale, "model.layers.7.ffn.experts.w13_weight_scale_inv"},
      {"sglang", "mxfp4", Role::kW2Weight, "model.layers.7.ffn.experts.w2_weight"},
      {"sglang", "mxfp4-quark", Role::kW2Scale, "model.layers.7.ffn.experts.w2_weight_scale"},
  };
  for (const auto& c : kCases) {
    const NamingScheme& naming = **FindNaming(c.scheme);
    EXPECT_EQ(FusedTensorName(naming, moe, 7, LeafName(naming, Format(c.format), c.role)), c.name);
  }
}

TEST(TensorNaming, UnknownSchemesAreRefusedWithThoseThatAreKnown) {
  const auto naming = FindNaming("tensorrt");
  EXPECT_EQ(naming.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(naming.status().message()),
              HasSubstr("vllm, vllm-routed-experts, sglang"));
}

}  // namespace
}  // namespace shardprep
