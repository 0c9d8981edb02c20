#include "service/job_report.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardprep/v1/prep.pb.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

v1::PrepJob RunningJob() {
  v1::PrepJob job;
  job.set_prep_job_id("v4-pro");
  job.set_state(v1::PrepJob::STATE_RUNNING);
  job.mutable_spec()->set_source_uri("/models/v4");
  job.mutable_spec()->add_targets()->set_destination_uri("/prepared/v4");
  v1::Progress& progress = *job.mutable_progress();
  progress.set_rank_tasks_total(32);
  progress.set_rank_tasks_done(11);
  progress.set_rank_tasks_resumed(4);
  progress.set_bytes_total(4000);
  progress.set_bytes_written(1999);
  progress.set_bytes_read(12'345);
  (*progress.mutable_stage_seconds())["write"] = 2.25;
  (*progress.mutable_stage_seconds())["read"] = 1.5;
  job.mutable_create_time()->set_seconds(1'700'000'000);
  return job;
}

TEST(JobStateText, SaysWhatAPersonNeedsToKnow) {
  v1::PrepJob job = RunningJob();
  EXPECT_EQ(JobStateText(job), "RUNNING");
  job.set_cancel_requested(true);
  EXPECT_EQ(JobStateText(job), "CANCELLING");
  job.set_state(v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(JobStateText(job), "CANCELLED");
}

TEST(JobProgress, CountsBytesWrittenAndRankTasks) {
  v1::PrepJob job = RunningJob();
  const ProgressState state = JobProgress(job);
  EXPECT_EQ(state.done_bytes, 1999);
  EXPECT_EQ(state.total_bytes, 4000);
  EXPECT_EQ(state.note, "rank tasks 11/32");
  job.set_state(v1::PrepJob::STATE_PENDING);
  EXPECT_EQ(JobProgress(job).note, "pending");
}

TEST(JobReport, ShowsProgressOfARunningJob) {
  const std::string report = JobReport(RunningJob());
  EXPECT_THAT(report, HasSubstr("/models/v4\n"));
  EXPECT_THAT(report, HasSubstr("/prepared/v4\n"));
  EXPECT_THAT(report, HasSubstr("11 of 32, of them 4 from an earlier run"));
  EXPECT_THAT(report, HasSubstr("1,999 of 4,000 B"));
  EXPECT_THAT(report, HasSubstr("read 1.5 s, write 2.2 s"));
  EXPECT_THAT(report, HasSubstr("2023-11-14T22:13:20Z"));
  EXPECT_THAT(report, Not(HasSubstr("error")));
  EXPECT_THAT(report, Not(HasSubstr("manifest")));
}

TEST(JobReport, ShowsWhyAJobFailed) {
  v1::PrepJob job = RunningJob();
  job.set_state(v1::PrepJob::STATE_FAILED);
  job.mutable_error()->set_code(15);
  job.mutable_error()->set_message("model-1.safetensors: truncated");
  EXPECT_THAT(JobReport(job), HasSubstr("DATA_LOSS: model-1.safetensors: truncated"));
}

TEST(JobReport, ShowsTheManifestOfAFinishedJob) {
  v1::PrepJob job = RunningJob();
  job.set_state(v1::PrepJob::STATE_SUCCEEDED);
  job.mutable_start_time()->set_seconds(1'700'000'000);
  job.mutable_end_time()->set_seconds(1'700'003'723);
  v1::ManifestReference& manifest = *job.mutable_manifest();
  manifest.set_uri("/prepared/v4/manifest.json");
  manifest.set_content_id("c0ffee");
  manifest.set_total_bytes(1'073'741'824);
  const std::string report = JobReport(job);
  EXPECT_THAT(report, HasSubstr("1:02:03"));
  EXPECT_THAT(report, HasSubstr("/prepared/v4/manifest.json"));
  EXPECT_THAT(report, HasSubstr("c0ffee"));
  EXPECT_THAT(report, HasSubstr("1,073,741,824 B  1.000 GiB"));
}

// As RunningJob(), with a second target.
v1::PrepJob JobOfTwo() {
  v1::PrepJob job = RunningJob();
  job.mutable_spec()->add_targets()->set_destination_uri("/prepared/v4-tp4");
  v1::PlanSummary& plan = *job.mutable_plan();
  plan.set_routed_layer_count(61);
  plan.set_rank_count(8);
  plan.mutable_kernel_target()->set_profile("aiter-separated");
  v1::PlanSummary& other = *plan.add_other_targets();
  other.set_rank_count(4);
  other.mutable_kernel_target()->set_profile("logical");
  return job;
}

TEST(JobReport, HasASectionForEachOfSeveralTargets) {
  v1::PrepJob job = JobOfTwo();
  job.set_state(v1::PrepJob::STATE_SUCCEEDED);
  job.mutable_manifest()->set_content_id("c0ffee");
  job.add_other_manifests()->set_content_id("7ea");
  const std::string report = JobReport(job);
  const size_t first = report.find("targets[0]\n");
  const size_t second = report.find("targets[1]\n");
  ASSERT_NE(first, std::string::npos);
  ASSERT_NE(second, std::string::npos);
  EXPECT_THAT(report.substr(0, first), Not(HasSubstr("/prepared")));
  EXPECT_THAT(report.substr(0, first), HasSubstr("11 of 32"));
  const std::string of_first = report.substr(first, second - first);
  EXPECT_THAT(of_first, HasSubstr("/prepared/v4\n"));
  EXPECT_THAT(of_first, HasSubstr("aiter-separated"));
  EXPECT_THAT(of_first, HasSubstr("c0ffee"));
  const std::string of_second = report.substr(second);
  EXPECT_THAT(of_second, HasSubstr("/prepared/v4-tp4\n"));
  EXPECT_THAT(of_second, HasSubstr("logical"));
  EXPECT_THAT(of_second, HasSubstr("7ea"));
}

TEST(ManifestReport, NamesTheTargetOnlyWhereThereAreSeveral) {
  v1::PrepJob job;
  job.mutable_manifest()->set_uri("/prepared/v4/manifest.json");
  EXPECT_THAT(ManifestReport(job), StartsWith("  manifest         /prepared/v4/manifest.json\n"));
  job.add_other_manifests()->set_uri("/prepared/v4-tp4/manifest.json");
  EXPECT_THAT(ManifestReport(job), StartsWith("targets[0]\n  manifest         /prepared/v4/"));
  EXPECT_THAT(ManifestReport(job), HasSubstr("targets[1]\n  manifest         /prepared/v4-tp4/"));
}

TEST(JobAnnouncement, IsALineAndOneMoreForEachOfSeveralTargets) {
  v1::PrepJob job = JobOfTwo();
  std::vector<std::string> lines = JobAnnouncement(job);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0], "preparing 61 routed layers for 2 targets, reading the source once");
  EXPECT_THAT(lines[1], StartsWith("targets[0]: 8 ranks, "));
  EXPECT_THAT(lines[2], StartsWith("targets[1]: 4 ranks, "));
  v1::JointPlan& joint = *job.mutable_plan()->mutable_joint();
  joint.set_needed_bytes(100);
  joint.set_read_bytes(150);
  joint.set_read_amplification(1.5);
  EXPECT_EQ(JobAnnouncement(job)[0],
            "preparing 61 routed layers for 2 targets, reading each source byte 1.500 times");
  job.mutable_plan()->clear_other_targets();
  lines = JobAnnouncement(job);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines[0], StartsWith("preparing 61 routed layers for 8 ranks, intermediate 0 "));
}

TEST(JobTable, CountsTheOtherDestinations) {
  v1::PrepJob job = JobOfTwo();
  EXPECT_THAT(JobTable({job}), HasSubstr("/prepared/v4 (+1)\n"));
  job.mutable_spec()->add_targets()->set_destination_uri("/prepared/v4-ep8");
  EXPECT_THAT(JobTable({job}), HasSubstr("/prepared/v4 (+2)\n"));
}

TEST(JobTable, HasALineForEachJob) {
  v1::PrepJob done = RunningJob();
  done.set_prep_job_id("other");
  done.set_state(v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(JobTable({RunningJob(), done}),
            "  job     state      done  created               destination\n"
            "  v4-pro  RUNNING    49%   2023-11-14T22:13:20Z  /prepared/v4\n"
            "  other   SUCCEEDED  100%  2023-11-14T22:13:20Z  /prepared/v4\n");
  EXPECT_EQ(JobTable({}), "no jobs\n");
}

}  // namespace
}  // namespace shardprep
