#include "service/bench_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace shardprep {
namespace {

using ::testing::HasSubstr;

// Rooflines of 1, 2, 3, ... GB/s on one thread and twice that on all.
BenchResult ResultOf(const std::vector<double>& job_seconds) {
  BenchResult result;
  result.source = "/models/v4";
  result.source_bytes = 5'000'000'000;
  result.needed_bytes = 4'000'000'000;
  result.ranks = 8;
  result.threads = 2;
  result.device = "cpu/avx2";
  for (const char* name : kRooflineNames) {
    const double rate = 1e9 * static_cast<double>(result.rooflines.size() + 1);
    result.rooflines.push_back({.name = name, .one_thread = rate, .all_threads = 2 * rate});
  }
  for (const double seconds : job_seconds) {
    BenchRun run{.start_seconds = 0.5, .job_seconds = seconds, .copy_seconds = 2};
    run.bytes_read = 4'000'000'000;
    run.bytes_written = 6'000'000'000;
    run.stage_seconds = {{"read", 1}, {"shuffle", 0.5}, {"digest", 4}, {"write", 2}};
    result.runs.push_back(run);
  }
  return result;
}

TEST(BenchReport, StagesAndWaitAddUpToTheMedianJob) {
  const std::vector<StageFigure> stages = StageFigures(ResultOf({9, 4.5, 5}));
  ASSERT_EQ(stages.size(), 5u);
  double sum = 0;
  for (const StageFigure& stage : stages) sum += stage.seconds;
  EXPECT_DOUBLE_EQ(sum, 5);
  EXPECT_EQ(stages[0].stage, "read");
  EXPECT_DOUBLE_EQ(stages[0].seconds, 0.5) << "thread seconds are shared out over the threads";
  EXPECT_EQ(stages[4].stage, "wait");
  EXPECT_DOUBLE_EQ(stages[4].seconds, 5 - (1 + 0.5 + 4 + 2) / 2);
  EXPECT_EQ(stages[4].roofline, "");
}

TEST(BenchReport, EachStageIsComparedWithTheRateOfAllThreads) {
  const std::vector<StageFigure> stages = StageFigures(ResultOf({5}));
  EXPECT_EQ(stages[0].roofline, "file_read");
  EXPECT_DOUBLE_EQ(stages[0].roofline_seconds, 4e9 / 6e9);
  EXPECT_EQ(stages[1].roofline, "weight_shuffle");
  EXPECT_DOUBLE_EQ(stages[1].roofline_seconds, 6e9 / 12e9);
  EXPECT_EQ(stages[2].roofline, "sha256+crc32c");
  EXPECT_DOUBLE_EQ(stages[2].roofline_seconds, 6e9 / 8e9 + 4e9 / 10e9)
      << "SHA-256 of what is written and CRC-32C of what is read";
  EXPECT_EQ(stages[3].roofline, "file_write");
  EXPECT_DOUBLE_EQ(stages[3].roofline_seconds, 6e9 / 4e9);
}

TEST(BenchReport, JsonHasTheFiguresOfTheTables) {
  const BenchResult result = ResultOf({9, 4.5, 5});
  const nlohmann::json json = nlohmann::json::parse(BenchJson(result));
  EXPECT_EQ(json["job"]["seconds"], 5);
  EXPECT_EQ(json["job"]["bound_by"], "digest");
  EXPECT_EQ(json["job"]["stages"]["digest"]["seconds"], 2);
  EXPECT_EQ(json["job"]["stages"]["digest"]["bytes_per_second"], 3e9);
  EXPECT_DOUBLE_EQ(json["job"]["stages"]["read"]["of_roofline"].get<double>(), 4e9 / 6e9 / 0.5);
  EXPECT_EQ(json["rooflines"]["memcpy"]["all_threads_bytes_per_second"], 2e9);
  EXPECT_EQ(json["rooflines"].size(), std::size(kRooflineNames));
  EXPECT_EQ(json["job_per_copy"], (0.5 + 5) / 2);
  EXPECT_EQ(json["all_job_seconds"], nlohmann::json({9, 4.5, 5}));
}

TEST(BenchReport, TextNamesWhatBindsTheJob) {
  BenchResult result = ResultOf({5});
  EXPECT_THAT(BenchText(result), HasSubstr("bound by digest;"));
  EXPECT_THAT(BenchText(result), HasSubstr("1.000 of what is needed"));
  EXPECT_THAT(BenchText(result), HasSubstr("start and job / copy  2.75"));
  result.runs[0].job_seconds = 50;
  EXPECT_THAT(BenchText(result), HasSubstr("bound by wait;"));
}

}  // namespace
}  // namespace shardprep
