#include "workers/state_dict.h"

#include <functional>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/test_artifact.h"
#include "tests/support/test_checkpoint.h"
#include "workers/journal.h"

namespace shardprep {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kW13[] = "model.layers.0.ffn.experts.w13_weight";
constexpr char kSink[] = "model.layers.0.attn.attn_sink";

class StateDictTest : public ::testing::Test {
 protected:
  static std::unique_ptr<TestArtifact> Artifact(int32_t expert_parallel = 1, int64_t experts = 4) {
    CheckpointSpec checkpoint = SmallV4Spec();
    checkpoint.experts = experts;
    auto artifact = std::make_unique<TestArtifact>(
        TestArtifactOptions{.checkpoint = checkpoint, .profile = "logical"});
    artifact->Replan([&](v1::PrepJobSpec& spec) {
      spec.set_self_contained(true);
      spec.set_slice_dense(true);
      spec.mutable_targets(0)->mutable_parallel_layout()->set_expert_parallel_size(expert_parallel);
    });
    return artifact;
  }

  // What the files of rank 1 hold.
  static json Parameters(const JobPlan& plan) {
    json parameters = json::object();
    for (const PlannedPart& planned : PlannedParts(plan)) {
      if (planned.rank != 1) continue;
      for (const PartTensor& tensor : planned.part->tensors) {
        parameters[tensor.name] = {{"dtype", std::string(DtypeName(tensor.dtype))},
                                   {"shape", tensor.shape}};
      }
    }
    return parameters;
  }

  void ExpectRefused(const std::string& text, const std::vector<std::string>& texts) {
    const absl::Status status = CheckStateDict(text, artifact_->plan().slices);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& wanted : texts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(wanted));
    }
  }

  std::unique_ptr<TestArtifact> artifact_ = Artifact();
  json parameters_ = Parameters(artifact_->plan());
};

TEST_F(StateDictTest, EveryParameterByEitherSpellingOfItsDtypeFits) {
  EXPECT_EQ(CheckStateDict(parameters_.dump(), artifact_->plan().slices), absl::OkStatus());
  parameters_[kSink]["dtype"] = "torch.float32";
  parameters_["model.norm.weight"]["dtype"] = "bfloat16";
  parameters_[kW13]["dtype"] = "torch.float4_e2m1fn_x2";
  EXPECT_EQ(CheckStateDict(parameters_.dump(), artifact_->plan().slices), absl::OkStatus());
}

TEST_F(StateDictTest, OneDifferenceOfAnyKindIsNamed) {
  const struct {
    std::function<void(json&)> change;
    std::vector<std::string> texts;
  } kCases[] = {
      {[](json& p) { p.erase(kSink); }, {kSink, "is none of the engine's", "in 1 of"}},
      {[](json& p) {
         p["model.layers.0.attn.k_scale"] = {{"dtype", "F32"}, {"shape", json::array()}};
       },
       {"model.layers.0.attn.k_scale: missing, want F32"}},
      {[](json& p) { p[kSink]["shape"] = {4}; }, {kSink, "[64], want", "[4]"}},
      {[](json& p) { p[kW13]["shape"][1] = 1024; }, {kW13, "want"}},
      {[](json& p) { p[kSink]["dtype"] = "BF16"; }, {kSink, "F32", "want BF16"}},
      // A scale that is converted by value instead of viewed would be wrong.
      {[](json& p) { p["model.layers.0.ffn.experts.w13_weight_scale"]["dtype"] = "F8_E8M0"; },
       {"w13_weight_scale", "U8", "want F8_E8M0"}},
      {[](json& p) {
         p["model.layers.0.ffn.experts.w13_weight_scale"]["dtype"] = "float4_e2m1fn_x2";
       },
       {"w13_weight_scale", "want float4_e2m1fn_x2"}}};
  for (const auto& c : kCases) {
    json changed = parameters_;
    c.change(changed);
    ExpectRefused(changed.dump(), c.texts);
  }
}

TEST_F(StateDictTest, TheFirstTenDifferencesAreNamedAndAllAreCounted) {
  for (int i = 10; i < 30; ++i) {
    parameters_[absl::StrCat("a.", i)] = {{"dtype", "F32"}, {"shape", {1}}};
  }
  const absl::Status status = CheckStateDict(parameters_.dump(), artifact_->plan().slices);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("in 20 of"));
  EXPECT_THAT(message, HasSubstr("a.10: missing"));
  EXPECT_THAT(message, HasSubstr("a.19: missing"));
  EXPECT_THAT(message, Not(HasSubstr("a.20")));
}

TEST_F(StateDictTest, TextThatListsNoParametersIsRefused) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"[]", "want a JSON object"},
      {"{", "want a JSON object"},
      {R"({"a": {"dtype": "F32", "shape": [1]}, "a": {"dtype": "F32", "shape": [1]}})", "twice"},
      {R"({"a": {"dtype": "F32"}})", "a: want {"},
      {R"({"a": {"dtype": "F32", "shape": [1], "stride": 1}})", "a: want {"},
      {R"({"a": {"dtype": "F33", "shape": [1]}})", "dtype 'F33'"},
      {R"({"a": {"dtype": "F32", "shape": [-1]}})", "'-1' is no extent"},
      {R"({"a": {"dtype": "F32", "shape": [1.5]}})", "'1.5' is no extent"}};
  for (const auto& [text, what] : kTexts) ExpectRefused(text, {what});
}

// Every rank has to fit, and ranks with another number of experts do not.
TEST_F(StateDictTest, ARankOfAnotherShapeIsRefused) {
  artifact_ = Artifact(/*expert_parallel=*/2, /*experts=*/5);
  ASSERT_EQ(artifact_->plan().slices.shape_count(), 2);
  ExpectRefused(Parameters(artifact_->plan()).dump(), {"rank 0", kW13});
}

TEST_F(StateDictTest, AJobIsRefusedAndTheTextChangesNoFingerprint) {
  v1::PrepJobSpec spec = artifact_->plan().spec;
  spec.mutable_targets(0)->set_state_dict_json(parameters_.dump());
  const auto fits = PlanJob(spec, {});
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_EQ((*fits)->fingerprint, artifact_->plan().fingerprint);
  parameters_.erase(kSink);
  spec.mutable_targets(0)->set_state_dict_json(parameters_.dump());
  EXPECT_EQ(PlanJob(spec, {}).status().code(), absl::StatusCode::kInvalidArgument);
  spec.set_self_contained(false);
  EXPECT_THAT(std::string(PlanJob(spec, {}).status().message()), HasSubstr("self_contained"));
}

}  // namespace
}  // namespace shardprep
