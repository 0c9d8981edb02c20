#include "workers/job_plan.h"

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/default_alignment_policy.h"
#include "workers/digest.h"
#include "workers/version.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

class JobPlanTest : public ::testing::Test {
 protected:
  // Geometry of V4-Pro where it matters to the policy, small elsewhere; data takes no space.
  void SetUp() override { Write({}); }

  void Write(const std::map<std::string, std::string>& config) {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), {.hidden = 7168,
                                                     .intermediate = 3072,
                                                     .experts = 2,
                                                     .layers = 1,
                                                     .mtp_layers = 1,
                                                     .sparse = true,
                                                     .config = config})
                    .ok());
  }

  v1::PrepJobSpec Spec(int32_t ranks = 8) const {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source_.path());
    v1::Target& target = *spec.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(ranks);
    target.set_destination_uri(destination_.path());
    return spec;
  }

  static v1::KernelTarget& Kernel(v1::PrepJobSpec& spec) {
    return *spec.mutable_targets(0)->mutable_kernel_target();
  }

  std::shared_ptr<const JobPlan> Plan(const v1::PrepJobSpec& spec) const {
    auto plan = PlanJob(spec, {});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *plan : nullptr;
  }

  void ExpectRefused(const v1::PrepJobSpec& spec, absl::StatusCode code,
                     const std::string& what) const {
    const absl::Status status = PlanJob(spec, {}).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_TRUE(std::filesystem::is_empty(destination_.path())) << "planning wrote something";
  }

  TempDir source_;
  TempDir destination_;
};

TEST_F(JobPlanTest, DefaultsAreDecidedAndRecorded) {
  const auto plan = Plan(Spec());
  ASSERT_NE(plan, nullptr);
  const v1::PlanSummary& summary = plan->summary;
  EXPECT_EQ(summary.kernel_target().backend(), "AITER_MXFP4_BF16");
  EXPECT_EQ(summary.kernel_target().activation(), "SILU");
  EXPECT_EQ(summary.kernel_target().architecture(), "gfx950");
  EXPECT_EQ(summary.kernel_target().profile(), "aiter-separated");
  EXPECT_THAT(summary.backend_reason(), HasSubstr("42595"));
  EXPECT_EQ(summary.alignment().rule_id(), "aiter-mxfp4-bf16/silu/128");
  EXPECT_EQ(summary.gate_mode(), "SEPARATED");
  EXPECT_EQ(summary.minimum_aiter_version(), "0.1.16");
}

// The alignment belongs to backend and activation. 384 was once padded to 512 on every rank.
TEST_F(JobPlanTest, WidthFollowsFromBackendAndRankCountOnly) {
  const struct {
    const char* backend;
    int32_t ranks;
    int64_t native, padded;
  } kCases[] = {{"AITER_MXFP4_BF16", 8, 384, 384},
                {"AITER_MXFP4_MXFP4", 8, 384, 512},
                {"AITER_MXFP4_BF16", 16, 192, 256},
                {"AITER_MXFP4_BF16", 32, 96, 128}};
  for (const auto& c : kCases) {
    for (const char* routing : {"sqrtsoftplus", "softmax", "sigmoid"}) {
      Write({{"scoring_func", absl::StrCat("\"", routing, "\"")}});
      v1::PrepJobSpec spec = Spec(c.ranks);
      Kernel(spec).set_backend(c.backend);
      const auto plan = Plan(spec);
      ASSERT_NE(plan, nullptr);
      EXPECT_EQ(plan->summary.extents().intermediate(), c.native) << c.backend;
      EXPECT_EQ(plan->summary.extents().padded_intermediate(), c.padded) << c.backend;
    }
  }
  v1::PrepJobSpec fp8 = Spec();
  Kernel(fp8).set_backend("AITER_MXFP4_FP8");
  Kernel(fp8).set_profile("logical");
  const auto plan = Plan(fp8);
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->summary.extents().padded_intermediate(), 512);
}

TEST_F(JobPlanTest, SavingIsAgainstTheGenericRuleOfThePlatform) {
  const auto plan = Plan(Spec());
  ASSERT_NE(plan, nullptr);
  // Bytes of one expert, one layer, one rank: rows of 3584 + 224, columns of 192 + 16 and 256 + 16.
  const int64_t native = 768 * (3584 + 224) + 7168 * (192 + 16);
  const int64_t generic = 1024 * (3584 + 224) + 7168 * (256 + 16);
  EXPECT_EQ(plan->summary.routed_bytes_per_rank(), 2 * native);
  EXPECT_EQ(plan->summary.generic_rule_bytes_per_rank(), 2 * generic);
  EXPECT_EQ(plan->summary.saved_bytes_per_rank(), 2 * (generic - native));
  EXPECT_EQ(plan->summary.padding_bytes_per_rank(), 2 * 7168 * 4);
}

TEST_F(JobPlanTest, RowsOfThePolicyThatApplyAreInThePlan) {
  const auto plan = Plan(Spec());
  ASSERT_NE(plan, nullptr);
  EXPECT_THAT(plan->summary.moe_tensor_parallel_sizes(),
              ::testing::ElementsAre(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96));
  ASSERT_EQ(plan->summary.policy_notes_size(), 1);
  EXPECT_EQ(plan->summary.policy_notes(0).kind(), "minimum AITER");
  EXPECT_THAT(plan->summary.policy_notes(0).text(), HasSubstr("0.1.16"));
  EXPECT_THAT(plan->summary.policy_notes(0).source(), HasSubstr("3476"));
  // 768 a rank is a multiple of 256, so any release will do; W4A4 has a constraint besides.
  EXPECT_EQ(Plan(Spec(4))->summary.policy_notes_size(), 0);
  v1::PrepJobSpec w4a4 = Spec(4);
  Kernel(w4a4).set_backend("AITER_MXFP4_MXFP4");
  const auto constrained = Plan(w4a4);
  ASSERT_NE(constrained, nullptr);
  ASSERT_EQ(constrained->summary.policy_notes_size(), 1);
  EXPECT_EQ(constrained->summary.policy_notes(0).kind(), "constraint");
  EXPECT_THAT(constrained->summary.policy_notes(0).text(), HasSubstr("256"));
  EXPECT_THAT(constrained->summary.policy_notes(0).source(), HasSubstr("5233"));
}

TEST_F(JobPlanTest, MtpCountsOnlyWhenIncluded) {
  v1::PrepJobSpec spec = Spec();
  EXPECT_EQ(Plan(spec)->summary.routed_layer_count(), 1);
  spec.set_include_mtp(true);
  const auto plan = Plan(spec);
  EXPECT_EQ(plan->summary.routed_layer_count(), 2);
  EXPECT_EQ(plan->summary.mtp_layer_count(), 1);
  EXPECT_EQ(plan->summary.routed_bytes_per_rank(),
            2 * plan->summary.routed_bytes_per_rank_without_mtp());
  EXPECT_EQ(plan->summary.not_carried_count(), 0);
}

TEST_F(JobPlanTest, SpecsThatCannotBeMeantAreRefused) {
  const struct {
    const char* what;
    std::function<void(v1::PrepJobSpec&)> change;
    absl::StatusCode code;
  } kCases[] = {
      {"source_uri is not set", [](auto& s) { s.clear_source_uri(); },
       absl::StatusCode::kInvalidArgument},
      {"relative", [](auto& s) { s.set_source_uri("a/b"); }, absl::StatusCode::kInvalidArgument},
      {"targets is empty", [](auto& s) { s.clear_targets(); }, absl::StatusCode::kInvalidArgument},
      {"2 targets, want one",
       [](auto& s) {
         *s.add_targets() = s.targets(0);
         s.mutable_targets(1)->set_destination_uri("/elsewhere");
       },
       absl::StatusCode::kInvalidArgument},
      {"destination_uri is not set", [](auto& s) { s.mutable_targets(0)->clear_destination_uri(); },
       absl::StatusCode::kInvalidArgument},
      {"source itself",
       [](auto& s) { s.mutable_targets(0)->set_destination_uri(s.source_uri() + "/"); },
       absl::StatusCode::kInvalidArgument},
      {"root of the file system",
       [](auto& s) { s.mutable_targets(0)->set_destination_uri("file:///"); },
       absl::StatusCode::kInvalidArgument},
      {"below _shardprep/",
       [](auto& s) { s.mutable_targets(0)->set_destination_uri("s3://bucket/m/_shardprep/x"); },
       absl::StatusCode::kInvalidArgument},
      {"tensor_parallel_size is not set",
       [](auto& s) { s.mutable_targets(0)->clear_parallel_layout(); },
       absl::StatusCode::kInvalidArgument},
      {"tensor_parallel_size is 0",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_tensor_parallel_size(0);
       },
       absl::StatusCode::kInvalidArgument},
      {"expert_parallel_size 3 does not divide",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_expert_parallel_size(3);
       },
       absl::StatusCode::kInvalidArgument},
      {"does not divide among 5",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_tensor_parallel_size(5);
       },
       absl::StatusCode::kInvalidArgument},
      {"AITER_MXFP4_BF61", [](auto& s) { Kernel(s).set_backend("AITER_MXFP4_BF61"); },
       absl::StatusCode::kInvalidArgument},
      {"aiter-seperated", [](auto& s) { Kernel(s).set_profile("aiter-seperated"); },
       absl::StatusCode::kInvalidArgument},
      {"SWIGLUOAI contradicts", [](auto& s) { Kernel(s).set_activation("SWIGLUOAI"); },
       absl::StatusCode::kInvalidArgument},
      {"logical", [](auto& s) { Kernel(s).set_backend("TRITON_UNFUSED"); },
       absl::StatusCode::kFailedPrecondition},
      {"expert_parallel_size is 1",
       [](auto& s) { s.mutable_targets(0)->mutable_parallel_layout()->set_redundant_experts(2); },
       absl::StatusCode::kInvalidArgument},
      {"expert placement 'random'",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_expert_placement("random");
       },
       absl::StatusCode::kInvalidArgument},
      {"leave some of 4",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_expert_parallel_size(4);
       },
       absl::StatusCode::kInvalidArgument},
      {"does not read mxfp4 weights", [](auto& s) { Kernel(s).set_backend("AITER_BF16"); },
       absl::StatusCode::kInvalidArgument},
      {"num_fused_shared_experts 1", [](auto& s) { Kernel(s).set_num_fused_shared_experts(1); },
       absl::StatusCode::kUnimplemented},
      {"num_fused_shared_experts is 2", [](auto& s) { Kernel(s).set_num_fused_shared_experts(2); },
       absl::StatusCode::kInvalidArgument},
      {"part_size_bytes is 17", [](auto& s) { s.set_part_size_bytes(17); },
       absl::StatusCode::kInvalidArgument},
      {"naming scheme 'tensorrt'", [](auto& s) { s.mutable_targets(0)->set_naming("tensorrt"); },
       absl::StatusCode::kInvalidArgument},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.what);
    v1::PrepJobSpec spec = Spec();
    c.change(spec);
    ExpectRefused(spec, c.code, c.what);
  }
}

TEST_F(JobPlanTest, AForcedActivationDecidesTheRule) {
  v1::PrepJobSpec spec = Spec();
  Kernel(spec).set_activation("SWIGLUOAI");
  Kernel(spec).set_force_activation(true);
  Kernel(spec).set_profile("aiter-interleaved");
  const auto plan = Plan(spec);
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->summary.extents().padded_intermediate(), 512);
}

TEST_F(JobPlanTest, BudgetBelowOneRankStatesTheMinimum) {
  const auto plan = Plan(Spec());
  const absl::Status status = PlanJob(Spec(), {.memory_budget_bytes = 1000}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat(plan->summary.minimum_memory_budget_bytes())));
  const auto least =
      PlanJob(Spec(), {.memory_budget_bytes = plan->summary.minimum_memory_budget_bytes()});
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_EQ((*least)->summary.ranks_per_lease(), 1);
  EXPECT_GT((*least)->summary.read_amplification(), 2);  // w2 is read once for each of 8 ranks
  const auto once =
      PlanJob(Spec(), {.memory_budget_bytes = plan->summary.read_once_memory_budget_bytes()});
  ASSERT_TRUE(once.ok()) << once.status();
  EXPECT_EQ((*once)->summary.read_amplification(), 1);
}

// One change each; no two of them may give equal fingerprints.
TEST_F(JobPlanTest, AnySingleInputChangesTheFingerprint) {
  using Change = std::function<void(v1::PrepJobSpec&)>;
  const auto parallel = [](v1::PrepJobSpec& s) -> v1::ParallelLayout& {
    return *s.mutable_targets(0)->mutable_parallel_layout();
  };
  const auto policy = [](const std::string& key, int64_t from, int64_t to) {
    return [=](v1::PrepJobSpec& s) {
      nlohmann::json table = nlohmann::json::parse(kDefaultAlignmentPolicy);
      for (nlohmann::json& row : table["rows"]) {
        if (row["id"] == "aiter-mxfp4-bf16/silu/128" && row[key] == from) row[key] = to;
      }
      s.set_alignment_policy_json(table.dump());
    };
  };
  const std::pair<const char*, Change> kChanges[] = {
      {"nothing", [](auto&) {}},
      {"tensor parallel size", [&](auto& s) { parallel(s).set_tensor_parallel_size(4); }},
      {"ranks numbered over dp",
       [&](auto& s) {
         parallel(s).set_tensor_parallel_size(4);
         parallel(s).set_data_parallel_size(2);
       }},
      {"expert parallel size", [&](auto& s) { parallel(s).set_expert_parallel_size(2); }},
      {"placement",
       [&](auto& s) {
         parallel(s).set_expert_parallel_size(2);
         parallel(s).set_expert_placement("round-robin");
       }},
      {"redundant experts",
       [&](auto& s) {
         parallel(s).set_expert_parallel_size(2);
         parallel(s).set_redundant_experts(2);
       }},
      {"expert map",
       [&](auto& s) {
         parallel(s).set_expert_parallel_size(2);
         parallel(s).add_physical_to_logical(1);
         parallel(s).add_physical_to_logical(0);
       }},
      {"backend", [](auto& s) { Kernel(s).set_backend("AITER_MXFP4_MXFP4"); }},
      {"activation",
       [](auto& s) {
         Kernel(s).set_activation("SITU");
         Kernel(s).set_force_activation(true);
       }},
      {"architecture",
       [](auto& s) {
         Kernel(s).set_profile("logical");
         Kernel(s).set_architecture("gfx942");
         Kernel(s).set_backend("AITER_MXFP4_BF16");
       }},
      {"profile", [](auto& s) { Kernel(s).set_profile("logical"); }},
      {"gate mode", [](auto& s) { Kernel(s).set_profile("aiter-interleaved"); }},
      {"intermediate alignment", policy("intermediate", 128, 256)},
      {"hidden alignment", policy("hidden", 128, 1024)},
      {"naming", [](auto& s) { s.mutable_targets(0)->set_naming("sglang"); }},
      {"newer naming", [](auto& s) { s.mutable_targets(0)->set_naming("vllm-routed-experts"); }},
      {"include MTP", [](auto& s) { s.set_include_mtp(true); }},
      {"self contained", [](auto& s) { s.set_self_contained(true); }},
      {"carry", [](auto& s) { s.set_carry(v1::CARRY_EXPERTS_ONLY); }},
      {"part size", [](auto& s) { s.set_part_size_bytes(1 << 20); }}};
  std::map<std::string, const char*> seen;
  for (const auto& [name, change] : kChanges) {
    v1::PrepJobSpec spec = Spec();
    change(spec);
    const auto plan = Plan(spec);
    ASSERT_NE(plan, nullptr) << name;
    EXPECT_EQ(plan->fingerprint, Sha256Hex(plan->fingerprint_inputs));
    const auto [it, added] = seen.emplace(plan->fingerprint, name);
    EXPECT_TRUE(added) << name << " and " << it->second;
  }
}

// Size, name and header of each file; not the bytes of the data, which the source token stands for.
TEST_F(JobPlanTest, TheSourcesHeadersAreInTheFingerprint) {
  const auto plan = Plan(Spec());
  std::set<std::string> seen = {plan->fingerprint};
  for (const int files : {2, 3}) {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), {.hidden = 7168,
                                                     .intermediate = 3072,
                                                     .experts = 2,
                                                     .layers = 1,
                                                     .mtp_layers = files == 3 ? 0 : 1,
                                                     .files = files,
                                                     .sparse = true})
                    .ok());
    EXPECT_TRUE(seen.insert(Plan(Spec())->fingerprint).second) << files;
  }
}

// A change of this value is a change of what fingerprints mean: artefacts made before would be made
// anew. Raise kFormatVersion when it is meant.
TEST_F(JobPlanTest, TheMeaningOfAFingerprintIsPinned) {
  EXPECT_EQ(Plan(Spec())->fingerprint,
            "27fe0ecf130c969ca8e9210c8a810d7649562c15d09c09032d5933cbe46ad942");
}

TEST_F(JobPlanTest, WhereAndHowAJobRunsIsNotInTheFingerprint) {
  const std::string fingerprint = Plan(Spec())->fingerprint;
  v1::PrepJobSpec spec = Spec();
  spec.mutable_targets(0)->set_destination_uri(destination_ / "elsewhere");
  spec.set_verify_after_write(true);
  Kernel(spec).set_backend("AITER_MXFP4_BF16");  // what AUTO chooses
  Kernel(spec).set_activation("SILU");
  EXPECT_EQ(Plan(spec)->fingerprint, fingerprint);
  const auto small = PlanJob(Spec(), {.memory_budget_bytes = 4 << 20, .thread_count = 7});
  EXPECT_EQ((*small)->fingerprint, fingerprint);
}

TEST_F(JobPlanTest, SourceTokenChangesWithAnyFileThatIsReadOrCopied) {
  const auto before = Plan(Spec());
  std::ofstream(source_ / "tokenizer.json", std::ios::app) << " ";
  const auto after = Plan(Spec());
  EXPECT_NE(before->source_token, after->source_token);
  EXPECT_EQ(before->fingerprint, after->fingerprint);
}

TEST_F(JobPlanTest, AReplacedPolicyDecidesAndAForbiddenWidthIsRefused) {
  nlohmann::json policy = nlohmann::json::parse(kDefaultAlignmentPolicy);
  for (nlohmann::json& row : policy["rows"]) {
    if (row["id"] == "aiter-mxfp4-bf16/silu/128") row["intermediate"] = 256;
  }
  v1::PrepJobSpec spec = Spec();
  spec.set_alignment_policy_json(policy.dump());
  const auto plan = Plan(spec);
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->summary.extents().padded_intermediate(), 512);
  EXPECT_NE(plan->summary.alignment().policy_digest(),
            Plan(Spec())->summary.alignment().policy_digest());

  // 128 for AITER_MXFP4_MXFP4 computes wrong numbers (ROCm/aiter #5233).
  nlohmann::json forbidden = nlohmann::json::parse(kDefaultAlignmentPolicy);
  for (nlohmann::json& row : forbidden["rows"]) {
    if (row["intermediate"] == 256) row["intermediate"] = 128;
  }
  Kernel(spec).set_backend("AITER_MXFP4_MXFP4");
  spec.set_alignment_policy_json(forbidden.dump());
  ExpectRefused(spec, absl::StatusCode::kFailedPrecondition, "5233");
}

TEST_F(JobPlanTest, PartHeadersSayWhoseTheyAre) {
  const auto plan = Plan(Spec());
  const PartPlan& part = plan->slices.regions()[0].parts[0];
  const std::string header = PartHeader(*plan, part, 7).value();
  EXPECT_EQ(header.size() % 4096, 0u);
  EXPECT_THAT(header, HasSubstr(absl::StrCat("\"shardprep.fingerprint\":\"", plan->fingerprint)));
  EXPECT_THAT(header, HasSubstr("\"shardprep.rank\":\"7\""));
  EXPECT_THAT(header, HasSubstr("\"shardprep.profile\":\"aiter-separated\""));
}

}  // namespace
}  // namespace shardprep
