#include "service/plan_report.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/target.pb.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;

v1::PrepJobSpec Spec() {
  v1::PrepJobSpec spec;
  spec.set_source_uri("/data/model");
  v1::Target& target = *spec.add_targets();
  target.set_destination_uri("/data/prepared");
  target.mutable_parallel_layout()->set_tensor_parallel_size(4);
  target.mutable_parallel_layout()->set_data_parallel_size(2);
  return spec;
}

// DeepSeek-V4-Pro at 8 ranks under AITER_MXFP4_BF16 with SILU.
v1::PlanSummary ProPlan() {
  v1::PlanSummary plan;
  plan.set_layout_fingerprint(std::string(64, 'f'));
  plan.set_family("deepseek_v4");
  plan.set_hidden_size(7168);
  plan.set_intermediate_size(3072);
  plan.set_expert_count(384);
  plan.set_routed_layer_count(61);
  plan.mutable_kernel_target()->set_backend("AITER_MXFP4_BF16");
  plan.mutable_kernel_target()->set_activation("SILU");
  plan.mutable_kernel_target()->set_architecture("gfx950");
  plan.mutable_kernel_target()->set_profile("aiter-separated");
  plan.set_gate_mode("SEPARATED");
  v1::AlignmentSummary& alignment = *plan.mutable_alignment();
  alignment.set_rule_id("aiter-mxfp4-bf16/silu/128");
  alignment.set_rule_source("vLLM #51473");
  alignment.set_intermediate_alignment(128);
  alignment.set_hidden_alignment(128);
  plan.mutable_extents()->set_hidden(7168);
  plan.mutable_extents()->set_padded_hidden(7168);
  plan.mutable_extents()->set_intermediate(192);
  plan.mutable_extents()->set_padded_intermediate(256);
  v1::FusedTensorSummary& scale = *plan.add_fused_tensors();
  scale.set_role("w2_weight_scale");
  scale.set_dtype("U8");
  scale.add_shape(2752512);
  scale.add_shape(16);
  scale.set_layout("aiter-e8m0");
  scale.set_size_bytes(44'040'192);
  scale.set_native_bytes(33'030'144);
  plan.set_minimum_aiter_version("0.1.16");
  plan.set_rank_count(8);
  plan.set_routed_bytes_per_rank(103'428'390'912);
  plan.set_routed_bytes_per_rank_without_mtp(103'428'390'912);
  plan.set_padding_bytes_per_rank(671'612'928);
  plan.set_generic_rule_bytes_per_rank(137'009'037'312);
  plan.set_generic_rule_id("rocm/generic/256");
  plan.set_saved_bytes_per_rank(33'580'646'400);
  plan.set_source_routed_bytes(835'530'522'624);
  plan.set_needed_bytes(100 * kGiB);
  plan.set_read_bytes(100 * kGiB);
  plan.set_read_amplification(1);
  plan.set_output_bytes(90 * kGiB);
  plan.set_destination_free_bytes(91 * kGiB);
  plan.set_ranks_per_lease(8);
  return plan;
}

TEST(PlanReport, SizesAreExactAndInGibibytes) {
  const std::string report = PlanReport(Spec(), ProPlan());
  for (const char* text :
       {"103,428,390,912 B", "96.325 GiB", "137,009,037,312 B", "127.600 GiB", "31.274 GiB",
        "835,530,522,624 B", "778.148 GiB", "44,040,192", "33,030,144", "11,010,048"}) {
    EXPECT_THAT(report, HasSubstr(text));
  }
}

TEST(PlanReport, NamesTheRuleItsSourceAndBothExtents) {
  const std::string report = PlanReport(Spec(), ProPlan());
  EXPECT_THAT(report, HasSubstr("aiter-mxfp4-bf16/silu/128"));
  EXPECT_THAT(report, HasSubstr("vLLM #51473"));
  EXPECT_THAT(report, HasSubstr("under the generic rule rocm/generic/256"));
  EXPECT_THAT(report, HasSubstr("  intermediate            192        128     256   64\n"));
  EXPECT_THAT(report, HasSubstr("  hidden                7,168        128   7,168    0\n"));
  EXPECT_THAT(report, HasSubstr("tensor parallel 4 x data parallel 2, 8 ranks"));
}

TEST(PlanReport, SaysWhichRowsOfThePolicyApplyAndWhichSizesDivide) {
  v1::PlanSummary plan = ProPlan();
  EXPECT_THAT(PlanReport(Spec(), plan), Not(HasSubstr("sizes that divide")));
  for (const int32_t size : {1, 2, 96}) plan.add_moe_tensor_parallel_sizes(size);
  v1::PolicyNote& note = *plan.add_policy_notes();
  note.set_kind("constraint");
  note.set_text("padded width a multiple of 256");
  note.set_source("ROCm/aiter #5233");
  const std::string report = PlanReport(Spec(), plan);
  EXPECT_THAT(report, HasSubstr("sizes that divide  1, 2, 96\n"));
  EXPECT_THAT(report, HasSubstr("padded width a multiple of 256 (ROCm/aiter #5233)"));
}

TEST(PlanReport, MtpLayersAreCountedApart) {
  v1::PlanSummary plan = ProPlan();
  EXPECT_THAT(PlanReport(Spec(), plan), Not(HasSubstr("without MTP")));
  plan.set_routed_layer_count(62);
  plan.set_mtp_layer_count(1);
  const std::string report = PlanReport(Spec(), plan);
  EXPECT_THAT(report, HasSubstr("62, of them 1 MTP"));
  EXPECT_THAT(report, HasSubstr("without MTP layers"));
}

TEST(PlanReport, ListsTenOfWhatIsLeftBehindAndCountsTheRest) {
  v1::PlanSummary plan = ProPlan();
  for (int i = 0; i < 100; ++i) {
    v1::NotCarried& tensor = *plan.add_not_carried();
    tensor.set_name(absl::StrCat("mtp.0.tensor-", i, "."));
    tensor.set_size_bytes(1000 + i);
    tensor.set_reason("mtp layer without include_mtp");
  }
  plan.set_not_carried_count(2345);
  plan.set_not_carried_bytes(3 * kGiB);
  const std::string report = PlanReport(Spec(), plan);
  EXPECT_THAT(report, HasSubstr("not carried: 2,345 tensors, 3,221,225,472 B  3.000 GiB"));
  EXPECT_THAT(report, HasSubstr("mtp.0.tensor-9."));
  EXPECT_THAT(report, HasSubstr("1,009 B"));
  EXPECT_THAT(report, Not(HasSubstr("mtp.0.tensor-10.")));
  EXPECT_THAT(report, HasSubstr("and 2,335 more"));
}

TEST(PlanReport, WarnsOfTooLittleSpaceAndOfReadingTwice) {
  v1::PlanSummary plan = ProPlan();
  EXPECT_THAT(PlanReport(Spec(), plan), Not(HasSubstr("warning")));
  plan.set_destination_free_bytes(90 * kGiB - 5);
  plan.set_read_bytes(plan.needed_bytes() + 1);
  plan.set_ranks_per_lease(3);
  plan.add_warnings("something else");
  const std::string report = PlanReport(Spec(), plan);
  EXPECT_THAT(report, HasSubstr("warning: the destination has 5 B too little space"));
  EXPECT_THAT(report, HasSubstr("a lease covers 3 of 8 ranks"));
  EXPECT_THAT(report, HasSubstr("warning: something else"));
}

// ProPlan() with a second target.
v1::PlanSummary PlanOfTwo() {
  v1::PlanSummary plan = ProPlan();
  v1::PlanSummary& other = *plan.add_other_targets();
  other = ProPlan();
  other.set_layout_fingerprint(std::string(64, 'e'));
  other.mutable_kernel_target()->set_profile("aiter-interleaved");
  other.set_rank_count(4);
  v1::JointPlan& joint = *plan.mutable_joint();
  joint.set_needed_bytes(110 * kGiB);
  joint.set_read_bytes(110 * kGiB);
  joint.set_read_amplification(1);
  joint.set_output_bytes(180 * kGiB);
  joint.set_ranks_per_lease(12);
  return plan;
}

v1::PrepJobSpec SpecOfTwo() {
  v1::PrepJobSpec spec = Spec();
  *spec.add_targets() = spec.targets(0);
  spec.mutable_targets(1)->set_destination_uri("/data/interleaved");
  spec.mutable_targets(1)->mutable_parallel_layout()->set_data_parallel_size(1);
  return spec;
}

TEST(PlanReport, SeveralTargetsHaveASectionEachAndOneTogether) {
  const std::string report = PlanReport(SpecOfTwo(), PlanOfTwo());
  const size_t first = report.find("targets[0]\n");
  const size_t second = report.find("targets[1]\n");
  const size_t together = report.find("all targets together\n");
  ASSERT_LT(first, second);
  ASSERT_LT(second, together);
  ASSERT_NE(together, std::string::npos);
  const std::string of_first = report.substr(first, second - first);
  EXPECT_THAT(of_first, HasSubstr("/data/prepared\n"));
  EXPECT_THAT(of_first, HasSubstr("tensor parallel 4 x data parallel 2, 8 ranks"));
  EXPECT_THAT(of_first, HasSubstr(std::string(64, 'f')));
  const std::string of_second = report.substr(second, together - second);
  EXPECT_THAT(of_second, HasSubstr("/data/interleaved\n"));
  EXPECT_THAT(of_second, HasSubstr("tensor parallel 4 x data parallel 1, 4 ranks"));
  EXPECT_THAT(of_second, HasSubstr("aiter-interleaved"));
  EXPECT_THAT(of_second, HasSubstr(std::string(64, 'e')));
  const std::string joint = report.substr(together);
  EXPECT_THAT(joint, HasSubstr("110.000 GiB"));
  EXPECT_THAT(joint, HasSubstr("180.000 GiB"));
  EXPECT_THAT(joint, HasSubstr("12 of 12\n"));
  EXPECT_THAT(joint, Not(HasSubstr("warning")));
}

TEST(PlanReport, WhatAllTargetsLeaveBehindIsListedOnce) {
  v1::PlanSummary plan = PlanOfTwo();
  plan.set_not_carried_count(5);
  plan.mutable_other_targets(0)->set_not_carried_count(5);
  EXPECT_THAT(PlanReport(SpecOfTwo(), plan), Not(HasSubstr("targets[1]: not carried")));
  plan.mutable_other_targets(0)->set_not_carried_count(6);
  const std::string report = PlanReport(SpecOfTwo(), plan);
  EXPECT_THAT(report, HasSubstr("\nnot carried: 5 tensors"));
  EXPECT_THAT(report, HasSubstr("\ntargets[1]: not carried: 6 tensors"));
}

TEST(PlanReport, WarningsOfSeveralTargetsAreOfTheReadsTogetherAndOfEachPlace) {
  v1::PlanSummary plan = PlanOfTwo();
  v1::PlanSummary& other = *plan.mutable_other_targets(0);
  // Each alone would read twice; together they do not.
  plan.set_read_bytes(plan.needed_bytes() + 1);
  other.set_read_bytes(other.needed_bytes() + 1);
  EXPECT_THAT(PlanReport(SpecOfTwo(), plan), Not(HasSubstr("warning")));
  other.set_destination_free_bytes(90 * kGiB - 5);
  other.add_warnings("something else");
  plan.mutable_joint()->set_read_bytes(111 * kGiB);
  plan.mutable_joint()->set_ranks_per_lease(7);
  const std::string report = PlanReport(SpecOfTwo(), plan);
  EXPECT_THAT(report, HasSubstr("warning: the destination of targets[1] has 5 B too little space"));
  EXPECT_THAT(report, HasSubstr("a lease covers 7 of 12 ranks"));
  EXPECT_THAT(report, HasSubstr("warning: targets[1]: something else"));
  plan.mutable_joint()->set_ranks_per_lease(12);
  EXPECT_THAT(PlanReport(SpecOfTwo(), plan), HasSubstr("orders that contradict each other"))
      << "a larger budget would not help";
}

TEST(PlanReport, UnknownSpaceIsNotShownAsNone) {
  v1::PlanSummary plan = ProPlan();
  plan.set_destination_free_bytes(-1);
  const std::string report = PlanReport(Spec(), plan);
  EXPECT_THAT(report, Not(HasSubstr("free at the destination")));
  EXPECT_THAT(report, Not(HasSubstr("too little space")));
}

TEST(AlignedTable, AlignsColumnsAndLeavesNoTrailingSpace) {
  EXPECT_EQ(AlignedTable({{"a", "bb", "1"}, {"ccc", "d", "1000"}, {"e", "", ""}}, 2),
            "  a    bb     1\n  ccc  d   1000\n  e\n");
  EXPECT_EQ(AlignedTable({}, 1), "");
}

TEST(AlignedRows, ContinuesValuesInTheirColumn) {
  EXPECT_EQ(AlignedRows({{"name", "first\nsecond"}, {"n", "x"}}),
            "  name  first\n        second\n  n     x\n");
}

}  // namespace
}  // namespace shardprep
