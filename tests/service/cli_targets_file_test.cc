#include "service/targets_file.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

TEST(TargetsFile, EntriesAreTargetsInTheirOrder) {
  const auto targets = ParseTargets(R"([
    {"destination_uri": "out/tp8", "parallel_layout": {"tensor_parallel_size": 8},
     "kernel_target": {"profile": "aiter-separated"}},
    {"destinationUri": "/out/ep8", "naming": "sglang",
     "parallel_layout": {"tensor_parallel_size": 8, "expert_parallel_size": 8,
                         "physical_to_logical": [1, 0]}}
  ])");
  ASSERT_TRUE(targets.ok()) << targets.status();
  ASSERT_EQ(targets->size(), 2U);
  EXPECT_EQ((*targets)[0].destination_uri(), "out/tp8");
  EXPECT_EQ((*targets)[0].parallel_layout().tensor_parallel_size(), 8);
  EXPECT_FALSE((*targets)[0].parallel_layout().has_expert_parallel_size());
  EXPECT_EQ((*targets)[0].kernel_target().profile(), "aiter-separated");
  EXPECT_EQ((*targets)[1].destination_uri(), "/out/ep8");
  EXPECT_EQ((*targets)[1].naming(), "sglang");
  EXPECT_EQ((*targets)[1].parallel_layout().expert_parallel_size(), 8);
  EXPECT_EQ((*targets)[1].parallel_layout().physical_to_logical(0), 1);
}

TEST(TargetsFile, EverythingElseIsRefusedNamingTheEntry) {
  struct Case {
    const char* text;
    const char* message;
  };
  const Case cases[] = {
      {"", "want a JSON list"},
      {"[", "want a JSON list"},
      {"[]", "at least one target"},
      {R"({"destination_uri": "a"})", "want a JSON list"},
      {R"([{"destination_uri": "a"}] [])", "want a JSON list"},
      {R"([{"destination_uri": "a"}, 3])", "targets[1]: want a JSON object"},
      {R"([{"destination_uri": "a"}, {}])", "targets[1]: destination_uri is not set"},
      {R"([{"destination_uri": "a", "destination": "b"}])", "targets[0]: "},
      {R"([{"destination_uri": "a", "destination": "b"}])", "destination"},
      {R"([{"destination_uri": "a", "kernel_target": {"profil": "b"}}])", "profil"},
      {R"([{"destination_uri": "a", "parallel_layout": {"tensor_parallel_size": "x"}}])",
       "targets[0]: "},
      {R"([{"destination_uri": "a", "naming": "vllm", "naming": "sglang"}])",
       "\"naming\" is given twice"},
      {R"([{"destination_uri": "a", "destinationUri": "b"}])", "\"destinationUri\" is given twice"},
  };
  for (const Case& c : cases) {
    const absl::Status refused = ParseTargets(c.text).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(c.message)) << c.text;
  }
}

TEST(TargetsFile, TargetsAreBounded) {
  std::string entries = R"({"destination_uri": "0"})";
  for (int t = 1; t < 16; ++t) {
    absl::StrAppend(&entries, R"(, {"destination_uri": ")", t, R"("})");
  }
  EXPECT_TRUE(ParseTargets(absl::StrCat("[", entries, "]")).ok());
  const absl::Status refused =
      ParseTargets(absl::StrCat("[", entries, R"(, {"destination_uri": "16"}])")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(refused.message()), "17 targets, at most 16");
}

}  // namespace
}  // namespace shardprep
