#include "service/job_report.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardprep/v1/prep.pb.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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
