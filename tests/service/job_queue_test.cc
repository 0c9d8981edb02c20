#include "service/job_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "workers/clock.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using State = v1::PrepJob::State;

constexpr absl::Duration kLease = absl::Seconds(60);
constexpr absl::Duration kFence = absl::Seconds(70);  // duration + margin
constexpr absl::Duration kInstant = absl::Nanoseconds(1);

v1::WorkerBuild Build() {
  v1::WorkerBuild build;
  build.set_format_version("1");
  build.set_policy_digest("abc");
  build.set_tool_version("0.1.0");
  return build;
}

// A queue that is stepped by hand.
class JobQueueTest : public testing::Test {
 protected:
  static JobQueueOptions Options() {
    JobQueueOptions options;
    options.build = Build();
    options.lease_duration = kLease;
    options.fence_margin = kFence - kLease;
    return options;
  }

  void Remake(const JobQueueOptions& options) {
    queue_ = std::make_unique<JobQueue>(options, &clock_,
                                        [this] { return absl::StrCat("lease-", ++last_lease_); });
  }

  static NewJob Spec(const std::string& id, const std::string& destination = "",
                     const std::string& fingerprint = "") {
    NewJob job;
    job.job.set_prep_job_id(id);
    job.job.mutable_spec()->set_source_uri("/models/" + id);
    job.fingerprint = fingerprint.empty() ? "print-" + id : fingerprint;
    job.places.push_back({destination.empty() ? "/out/" + id : destination, job.fingerprint});
    return job;
  }

  // One target for each place, "<destination>=<fingerprint>".
  static NewJob SpecOfSeveral(const std::string& id, const std::vector<std::string>& places) {
    NewJob job;
    job.job.set_prep_job_id(id);
    for (const std::string& place : places) {
      const std::pair<std::string, std::string> parts = absl::StrSplit(place, '=');
      job.places.push_back({parts.first, parts.second});
    }
    job.fingerprint = "print-" + id;
    return job;
  }

  static std::vector<v1::ManifestReference> Manifests(int targets) {
    std::vector<v1::ManifestReference> manifests(static_cast<size_t>(targets));
    for (int t = 0; t < targets; ++t) manifests[static_cast<size_t>(t)].set_file_count(1 + t);
    return manifests;
  }

  // As the store has it of a controller that is gone.
  static NewJob Restored(const std::string& id, int64_t sequence, absl::Duration lease_span) {
    NewJob job = Spec(id);
    job.sequence = sequence;
    job.lease_span = lease_span;
    job.job.set_state(lease_span > absl::ZeroDuration() ? v1::PrepJob::STATE_RUNNING
                                                        : v1::PrepJob::STATE_PENDING);
    return job;
  }

  // `regions` regions of ranks [0, ranks), 100 bytes a rank.
  static StartedJob Plan(const std::string& fingerprint, int regions, int ranks) {
    StartedJob started;
    started.fingerprint = fingerprint;
    started.source_token = "token";
    for (int r = 0; r < regions; ++r) {
      RegionTasks tasks;
      for (int rank = 0; rank < ranks; ++rank) tasks.ranks.push_back(rank);
      tasks.bytes_per_rank = 100;
      started.regions.push_back(tasks);
    }
    // One rank for each 10 bytes of budget.
    started.ranks_per_lease = [](int64_t budget) -> absl::StatusOr<int32_t> {
      if (budget < 10) return absl::InvalidArgumentError("budget below the minimum of 10 bytes");
      return static_cast<int32_t>(budget / 10);
    };
    return started;
  }

  // As Plan(), but rank 3 has 40 bytes in each region.
  static StartedJob UnevenPlan(const std::string& fingerprint) {
    StartedJob started = Plan(fingerprint, 2, 4);
    for (RegionTasks& tasks : started.regions) tasks.other_bytes[3] = 40;
    return started;
  }

  void Add(const std::string& id) { ASSERT_EQ(queue_->AddJob(Spec(id)), absl::OkStatus()); }

  void ExpectStep(JobStep::Kind kind, const std::string& id) {
    const std::optional<JobStep> step = queue_->NextStep();
    ASSERT_TRUE(step.has_value()) << "no step is due";
    EXPECT_EQ(step->kind, kind);
    EXPECT_EQ(step->job_id, id);
  }

  // The clean step of a failed job that wrote.
  void Tidy(const std::string& id) {
    ExpectStep(JobStep::Kind::kTidy, id);
    EXPECT_NE(StateOf(id), v1::PrepJob::STATE_FAILED);
    queue_->CleanFinished(id, absl::OkStatus());
  }

  void AddAndStart(const std::string& id, int regions = 2, int ranks = 4) {
    Add(id);
    ExpectStep(JobStep::Kind::kStart, id);
    queue_->StartFinished(id, Plan("print-" + id, regions, ranks));
  }

  static v1::SynchronizeRequest Request(const std::string& worker, int64_t budget = 1000) {
    v1::SynchronizeRequest request;
    request.set_worker_id(worker);
    *request.mutable_build() = Build();
    request.set_memory_budget_bytes(budget);
    request.set_thread_count(1);
    request.set_device("cpu/avx2");
    return request;
  }

  std::vector<v1::Lease> Call(const v1::SynchronizeRequest& request) {
    EXPECT_EQ(queue_->Report(request), absl::OkStatus());
    const v1::SynchronizeResponse response = queue_->Desired(request.worker_id());
    return {response.leases().begin(), response.leases().end()};
  }

  // The one lease that an idle worker is given.
  v1::Lease Take(const std::string& worker, int64_t budget = 1000) {
    const std::vector<v1::Lease> leases = Call(Request(worker, budget));
    EXPECT_EQ(leases.size(), 1U) << worker;
    return leases.empty() ? v1::Lease() : leases[0];
  }

  std::vector<v1::Lease> Say(const std::string& worker, const std::string& lease,
                             v1::LeaseReport::State state, const absl::Status& error = {},
                             const std::vector<int32_t>& completed = {}, bool draining = false) {
    v1::SynchronizeRequest request = Request(worker);
    request.set_draining(draining);
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(lease);
    report.set_state(state);
    if (!error.ok()) *report.mutable_error() = ToRpcStatus(error);
    for (const int32_t rank : completed) report.add_completed_ranks(rank);
    return Call(request);
  }

  // Reports the lease done and returns the next one, if any.
  std::vector<v1::Lease> Done(const std::string& worker, const std::string& lease) {
    return Say(worker, lease, v1::LeaseReport::STATE_DONE);
  }

  static std::vector<int32_t> RanksOf(const v1::Lease& lease) {
    std::vector<int32_t> ranks;
    for (const v1::RankTask& task : lease.rank_tasks()) ranks.push_back(task.rank());
    return ranks;
  }

  v1::PrepJob Job(const std::string& id) {
    const absl::StatusOr<JobView> view = queue_->Get(id);
    EXPECT_TRUE(view.ok()) << view.status();
    return view.ok() ? view->job : v1::PrepJob();
  }
  State StateOf(const std::string& id) { return Job(id).state(); }

  void AdvanceAndTick(absl::Duration by) {
    clock_.Advance(by);
    queue_->Tick();
  }

  FakeClock clock_;
  int last_lease_ = 0;
  std::unique_ptr<JobQueue> queue_ = std::make_unique<JobQueue>(
      Options(), &clock_, [this] { return absl::StrCat("lease-", ++last_lease_); });
};

TEST_F(JobQueueTest, JobGoesFromPendingToSucceeded) {
  Add("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_PENDING);
  ExpectStep(JobStep::Kind::kStart, "a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_PENDING);
  queue_->StartFinished("a", Plan("print-a", 2, 4));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);

  const v1::Lease first = Take("w1");
  EXPECT_EQ(first.prep_job_id(), "a");
  EXPECT_EQ(first.region(), 0);
  EXPECT_THAT(RanksOf(first), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(first.layout_fingerprint(), "print-a");
  EXPECT_EQ(first.source_token(), "token");
  EXPECT_EQ(first.attempt(), 1);
  EXPECT_EQ(first.duration().seconds(), 60);
  const std::vector<v1::Lease> second = Done("w1", first.lease_id());
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].region(), 1);
  EXPECT_FALSE(queue_->NextStep().has_value());
  EXPECT_THAT(Done("w1", second[0].lease_id()), IsEmpty());

  ExpectStep(JobStep::Kind::kCommit, "a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  v1::ManifestReference manifest;
  manifest.set_uri("/out/a/manifest.json");
  queue_->CommitFinished("a", std::vector<v1::ManifestReference>{manifest});
  const v1::PrepJob job = Job("a");
  EXPECT_EQ(job.state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(job.manifest().uri(), "/out/a/manifest.json");
  EXPECT_EQ(job.progress().rank_tasks_done(), 8);
  EXPECT_EQ(job.progress().bytes_written(), 800);
  EXPECT_TRUE(job.has_end_time());
}

TEST_F(JobQueueTest, LeaseTakesTheRanksThatFitTheWorker) {
  AddAndStart("a", 1, 8);
  EXPECT_THAT(RanksOf(Take("small", 30)), ElementsAre(0, 1, 2));
  EXPECT_THAT(RanksOf(Take("smaller", 19)), ElementsAre(3));
  EXPECT_THAT(RanksOf(Take("large", 1000)), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(Call(Request("idle")), IsEmpty());
}

TEST_F(JobQueueTest, WorkerHoldsOneLeaseAndIsToldOfItAgain) {
  AddAndStart("a", 3);
  const v1::Lease lease = Take("w");
  // The answer was lost: the same lease, not another one.
  EXPECT_EQ(Take("w").lease_id(), lease.lease_id());
  const auto again = Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].lease_id(), lease.lease_id());
}

TEST_F(JobQueueTest, ResumedRanksAreNotLeasedAgain) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  StartedJob started = Plan("print-a", 2, 4);
  started.regions[0].done = {0, 1, 2, 3};
  started.regions[1].done = {1, 3};
  queue_->StartFinished("a", started);
  EXPECT_EQ(Job("a").progress().rank_tasks_resumed(), 6);
  const v1::Lease lease = Take("w");
  EXPECT_EQ(lease.region(), 1);
  EXPECT_THAT(RanksOf(lease), ElementsAre(0, 2));
  Done("w", lease.lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, EverythingResumedGoesStraightToItsCommit) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  StartedJob started = Plan("print-a", 1, 2);
  started.regions[0].done = {0, 1};
  queue_->StartFinished("a", started);
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, RegionWithoutRanksNeedsNoLease) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  StartedJob started = Plan("print-a", 2, 1);
  started.regions[0].ranks.clear();
  queue_->StartFinished("a", started);
  const v1::Lease lease = Take("w");
  EXPECT_EQ(lease.region(), 1);
  Done("w", lease.lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, CompleteDestinationIsANoOp) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  StartedJob started;
  started.fingerprint = "print-a";
  started.complete.emplace_back().set_uri("/out/a/manifest.json");
  queue_->StartFinished("a", started);
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(Job("a").manifest().uri(), "/out/a/manifest.json");
  EXPECT_THAT(Call(Request("w")), IsEmpty());
}

TEST_F(JobQueueTest, OnlyUnfinishedRanksAreRedone) {
  AddAndStart("a", 1, 4);
  const v1::Lease lease = Take("w");
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING, {}, {0, 2});
  EXPECT_EQ(Job("a").progress().rank_tasks_done(), 2);
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("slow down"),
      {0, 2, 3});
  clock_.Advance(absl::Seconds(2));
  const v1::Lease second = Take("w");
  EXPECT_THAT(RanksOf(second), ElementsAre(1));
  EXPECT_EQ(second.attempt(), 2);
}

// Under expert parallelism the last groups may hold an expert fewer.
TEST_F(JobQueueTest, RanksOfUnequalSizeCountWithTheirOwnBytes) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", UnevenPlan("print-a"));
  EXPECT_EQ(Job("a").progress().bytes_total(), 2 * 340);
  const v1::Lease lease = Take("w");
  v1::SynchronizeRequest request = Request("w");
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(lease.lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  report.set_bytes_written(4'000'000);  // never more than there is
  report.add_completed_ranks(3);
  Call(request);
  EXPECT_EQ(Job("a").progress().bytes_written(), 340);
  queue_->WorkerGone("w", "killed by signal 9 (Killed)");
  EXPECT_EQ(Job("a").progress().bytes_written(), 40);
}

TEST_F(JobQueueTest, BytesOfAFailedAttemptAreGivenBack) {
  AddAndStart("a", 1, 4);
  const v1::Lease lease = Take("w");
  v1::SynchronizeRequest request = Request("w");
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(lease.lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  report.set_bytes_written(250);
  report.set_bytes_read(500);
  report.add_completed_ranks(0);
  Call(request);
  EXPECT_EQ(Job("a").progress().bytes_written(), 250);
  report.set_bytes_written(4'000'000);  // never more than there is
  Call(request);
  EXPECT_EQ(Job("a").progress().bytes_written(), 400);
  queue_->WorkerGone("w", "killed by signal 9 (Killed)");
  EXPECT_EQ(Job("a").progress().bytes_written(), 100);
  EXPECT_EQ(Job("a").progress().bytes_read(), 500);
}

// Attempts ----------------------------------------------------------------------------------------

struct CodeCase {
  absl::StatusCode code;
  bool again;
};

class JobQueueCodeTest : public JobQueueTest, public testing::WithParamInterface<CodeCase> {};

TEST_P(JobQueueCodeTest, CodeDecidesWhetherATaskIsAttemptedAgain) {
  AddAndStart("a", 1, 2);
  const v1::Lease lease = Take("w");
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_FAILED,
      absl::Status(GetParam().code, "layers.3.w2: broken"));
  clock_.Advance(absl::Seconds(2));
  if (GetParam().again) {
    EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
    EXPECT_EQ(Take("w").attempt(), 2);
  } else {
    Tidy("a");
    EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
    EXPECT_EQ(Job("a").error().code(), static_cast<int>(GetParam().code));
    EXPECT_EQ(Job("a").error().message(), "region 0, ranks 0,1: layers.3.w2: broken");
  }
}

INSTANTIATE_TEST_SUITE_P(Codes, JobQueueCodeTest,
                         testing::Values(CodeCase{absl::StatusCode::kUnavailable, true},
                                         CodeCase{absl::StatusCode::kAborted, true},
                                         CodeCase{absl::StatusCode::kResourceExhausted, true},
                                         CodeCase{absl::StatusCode::kInvalidArgument, false},
                                         CodeCase{absl::StatusCode::kFailedPrecondition, false},
                                         CodeCase{absl::StatusCode::kDataLoss, false},
                                         CodeCase{absl::StatusCode::kInternal, false}),
                         [](const auto& param) {
                           return absl::StatusCodeToString(param.param.code);
                         });

TEST_F(JobQueueTest, ThirdFailureFailsTheJobWithTheFirstCause) {
  AddAndStart("a", 1, 1);
  const char* causes[] = {"disk full", "store 503", "lease lost"};
  for (int attempt = 1; attempt <= 3; ++attempt) {
    const v1::Lease lease = Take("w");
    EXPECT_EQ(lease.attempt(), attempt);
    Say("w", lease.lease_id(), v1::LeaseReport::STATE_FAILED,
        attempt == 1 ? absl::ResourceExhaustedError(causes[0])
                     : absl::UnavailableError(causes[attempt - 1]));
    clock_.Advance(absl::Seconds(10));
  }
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(Job("a").error().message(),
            "region 0, rank 0: 3 attempts failed, the first with: disk full");
  EXPECT_EQ(Job("a").progress().attempts_failed(), 3);
}

TEST_F(JobQueueTest, FailuresOfDifferentTasksDoNotAddUp) {
  AddAndStart("a", 4, 1);
  const char* workers[] = {"w0", "w1", "w2", "w3"};
  for (int attempt = 1; attempt <= 3; ++attempt) {
    std::vector<v1::Lease> leases;
    for (const char* worker : workers) leases.push_back(Take(worker));
    for (int w = 0; w < 4; ++w) {
      EXPECT_EQ(leases[w].attempt(), attempt);
      Say(workers[w], leases[w].lease_id(),
          attempt < 3 ? v1::LeaseReport::STATE_FAILED : v1::LeaseReport::STATE_DONE,
          attempt < 3 ? absl::UnavailableError("503") : absl::OkStatus());
    }
    clock_.Advance(absl::Seconds(10));
  }
  EXPECT_EQ(Job("a").progress().attempts_failed(), 8);
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, RetryWaitsUntilTheLastInstant) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("w");
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("503"));
  clock_.Advance(absl::Seconds(2) - kInstant);
  EXPECT_THAT(Call(Request("w")), IsEmpty());
  clock_.Advance(kInstant);
  EXPECT_EQ(Take("w").attempt(), 2);
}

TEST_F(JobQueueTest, ReapedWorkersTaskIsLeasedAtOnce) {
  AddAndStart("a", 1, 4);
  Take("dies");
  EXPECT_THAT(Call(Request("other")), IsEmpty());
  queue_->WorkerGone("dies", "killed by signal 9 (Killed)");
  EXPECT_EQ(Take("other").attempt(), 2);
}

TEST_F(JobQueueTest, CrashLoopFailsTheJobAndNamesTheSignal) {
  AddAndStart("a", 1, 1);
  for (int attempt = 1; attempt <= 3; ++attempt) {
    const std::string worker = absl::StrCat("local-0-", attempt);
    Take(worker);
    queue_->WorkerGone(worker, "killed by signal 11 (Segmentation fault)");
  }
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(Job("a").error().message(), HasSubstr("killed by signal 11"));
  EXPECT_THAT(Job("a").error().message(), HasSubstr("local-0-1"));
}

TEST_F(JobQueueTest, DrainedLeaseDoesNotCountAsAnAttempt) {
  AddAndStart("a", 1, 2);
  for (int i = 0; i < 5; ++i) {
    const std::string worker = absl::StrCat("w", i);
    const v1::Lease lease = Take(worker);
    EXPECT_EQ(lease.attempt(), 1);
    EXPECT_THAT(
        Say(worker, lease.lease_id(), v1::LeaseReport::STATE_RETURNED, {}, {}, /*draining=*/true),
        IsEmpty());
  }
  EXPECT_EQ(Job("a").progress().attempts_failed(), 0);
}

TEST_F(JobQueueTest, LeaseGivenBackUnaskedCountsAsAnAttempt) {
  AddAndStart("a", 1, 2);
  const v1::Lease lease = Take("w");
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RETURNED);
  EXPECT_EQ(Job("a").progress().attempts_failed(), 1);
}

TEST_F(JobQueueTest, PoisonedJobDoesNotBlockTheNext) {
  AddAndStart("poison", 1, 1);
  AddAndStart("good", 1, 1);
  const v1::Lease lease = Take("w");
  EXPECT_EQ(lease.prep_job_id(), "poison");
  const std::vector<v1::Lease> next =
      Say("w", lease.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("503"));
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(next[0].prep_job_id(), "good");
}

TEST_F(JobQueueTest, JobWithAFailureGoesBehindThoseThatRunAndNotBehindLaterOnes) {
  AddAndStart("bad", 3, 1);
  AddAndStart("good", 3, 1);
  const v1::Lease first = Take("w1");
  EXPECT_EQ(first.prep_job_id(), "bad");
  const auto next =
      Say("w1", first.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("503"));
  ASSERT_EQ(next.size(), 1U);
  // Although other regions of the first job could be leased at once.
  EXPECT_EQ(next[0].prep_job_id(), "good");
  AddAndStart("late", 3, 1);
  EXPECT_EQ(Take("w2").prep_job_id(), "good");
  EXPECT_EQ(Take("w3").prep_job_id(), "good");
  EXPECT_EQ(Take("w4").prep_job_id(), "bad");
  EXPECT_EQ(Take("w5").prep_job_id(), "bad");
  EXPECT_EQ(Take("w6").prep_job_id(), "late");
}

TEST_F(JobQueueTest, FullDiskFailsTheJobAtOnceAndKeepsWhatIsDone) {
  AddAndStart("a", 2, 1);
  const v1::Lease done = Take("w");
  const std::vector<v1::Lease> next = Done("w", done.lease_id());
  ASSERT_EQ(next.size(), 1U);
  Say("w", next[0].lease_id(), v1::LeaseReport::STATE_FAILED,
      WithReason(absl::ResourceExhaustedError("/out/a: write: No space left on device"),
                 "NO_SPACE"));
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(ReasonOf(FromRpcStatus(Job("a").error())).reason, "NO_SPACE");
  EXPECT_FALSE(queue_->NextStep().has_value()) << "nothing is removed";
}

TEST_F(JobQueueTest, JobsAreLeasedInOrderOfCreation) {
  AddAndStart("first", 2, 1);
  AddAndStart("second", 1, 1);
  EXPECT_EQ(Take("w1").prep_job_id(), "first");
  EXPECT_EQ(Take("w2").prep_job_id(), "first");
  EXPECT_EQ(Take("w3").prep_job_id(), "second");
}

TEST_F(JobQueueTest, FailedJobThatWroteIsTidiedBeforeItsEnd) {
  AddAndStart("a", 1, 2);
  Say("w", Take("w").lease_id(), v1::LeaseReport::STATE_FAILED, absl::DataLossError("truncated"));
  ASSERT_EQ(queue_->AddJob(Spec("b", "/out/a", "print-a")), absl::OkStatus());
  ExpectStep(JobStep::Kind::kTidy, "a");
  EXPECT_FALSE(queue_->NextStep().has_value()) << "the destination is not b's yet";
  queue_->CleanFinished("a", absl::UnavailableError("503"));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  clock_.Advance(absl::Seconds(2));
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().message(), "region 0, ranks 0,1: truncated");
  ExpectStep(JobStep::Kind::kStart, "b");
}

TEST_F(JobQueueTest, FailedJobSaysWhatCouldNotBeTidied) {
  AddAndStart("a", 1, 1);
  Say("w", Take("w").lease_id(), v1::LeaseReport::STATE_FAILED, absl::DataLossError("truncated"));
  ExpectStep(JobStep::Kind::kTidy, "a");
  queue_->CleanFinished("a", absl::FailedPreconditionError("/out/a: read-only file system"));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().code(), static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_EQ(Job("a").error().message(),
            "region 0, rank 0: truncated; what it had not recorded could not be removed: /out/a: "
            "read-only file system");
}

TEST_F(JobQueueTest, JobCancelledWhileItIsTidiedIsRemovedAfterAll) {
  AddAndStart("a", 1, 1);
  Say("w", Take("w").lease_id(), v1::LeaseReport::STATE_FAILED, absl::DataLossError("truncated"));
  ExpectStep(JobStep::Kind::kTidy, "a");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  queue_->CleanFinished("a", absl::OkStatus());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  ExpectStep(JobStep::Kind::kRemove, "a");
  queue_->CleanFinished("a", absl::OkStatus());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
}

TEST_F(JobQueueTest, JobThatNoWorkerCanHoldFailsWithTheMinimum) {
  AddAndStart("a", 1, 1);
  EXPECT_THAT(Call(Request("tiny", 5)), IsEmpty());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(Job("a").error().message(), HasSubstr("minimum of 10 bytes"));
}

TEST_F(JobQueueTest, JobThatIsTooLargeForOneWorkerWaitsForAnother) {
  Call(Request("large", 1000));
  AddAndStart("a", 1, 1);
  EXPECT_THAT(Call(Request("tiny", 5)), IsEmpty());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  EXPECT_EQ(Take("large").prep_job_id(), "a");
}

// Time --------------------------------------------------------------------------------------------

TEST_F(JobQueueTest, SilentWorkerIsDeadAfterDurationAndMarginAndNotBefore) {
  AddAndStart("a", 1, 1);
  Take("silent");
  AdvanceAndTick(kFence - kInstant);
  EXPECT_THAT(Call(Request("other")), IsEmpty());
  EXPECT_EQ(queue_->Stats().leases, 1);
  AdvanceAndTick(kInstant);
  const v1::Lease lease = Take("other");
  EXPECT_EQ(lease.attempt(), 2);
  EXPECT_EQ(queue_->Stats().leases, 1);
}

TEST_F(JobQueueTest, EachAnswerRenewsTheLease) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("w");
  for (int i = 0; i < 10; ++i) {
    AdvanceAndTick(kFence - kInstant);
    ASSERT_EQ(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING).size(), 1U);
  }
  AdvanceAndTick(kFence - kInstant);
  EXPECT_EQ(queue_->Stats().leases, 1);
  AdvanceAndTick(kInstant);
  EXPECT_EQ(queue_->Stats().leases, 0);
}

TEST_F(JobQueueTest, LateReportOfAClosedLeaseIsIgnored) {
  AddAndStart("a", 2, 1);
  const v1::Lease lost = Take("zombie");
  AdvanceAndTick(kFence);
  const v1::Lease retaken = Take("other");
  ASSERT_EQ(retaken.region(), 0);
  // It comes back to life: nothing it says about the lost lease counts, and it is told to stop.
  for (const auto state : {v1::LeaseReport::STATE_RUNNING, v1::LeaseReport::STATE_DONE,
                           v1::LeaseReport::STATE_FAILED, v1::LeaseReport::STATE_RETURNED}) {
    for (const v1::Lease& lease :
         Say("zombie", lost.lease_id(), state,
             state == v1::LeaseReport::STATE_FAILED ? absl::DataLossError("bad") : absl::Status(),
             {0})) {
      EXPECT_NE(lease.lease_id(), lost.lease_id());
      EXPECT_EQ(lease.region(), 1);
    }
  }
  EXPECT_EQ(Job("a").progress().rank_tasks_done(), 0);
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
}

TEST_F(JobQueueTest, WorkerThatStillHoldsAnUnknownLeaseGetsNoOther) {
  AddAndStart("a", 1, 1);
  EXPECT_THAT(Say("w", "of-another-controller", v1::LeaseReport::STATE_RUNNING), IsEmpty());
  EXPECT_EQ(Say("w", "of-another-controller", v1::LeaseReport::STATE_RETURNED).size(), 1U);
}

TEST_F(JobQueueTest, ReportOfAnotherWorkersLeaseIsIgnored) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("owner");
  Say("thief", lease.lease_id(), v1::LeaseReport::STATE_DONE);
  EXPECT_EQ(Job("a").progress().rank_tasks_done(), 0);
  EXPECT_EQ(queue_->Stats().leases, 1);
}

TEST_F(JobQueueTest, HeartbeatAfterTheEndOfAJobDoesNoHarm) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("w");
  Done("w", lease.lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
  queue_->CommitFinished("a", Manifests(1));
  EXPECT_THAT(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING), IsEmpty());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(Job("a").error().code(), 0);
}

// Cancelling --------------------------------------------------------------------------------------

TEST_F(JobQueueTest, PendingJobIsCancelledWithoutTouchingItsDestination) {
  Add("a");
  const absl::StatusOr<v1::PrepJob> job = queue_->Cancel("a");
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_CANCELLED);
  EXPECT_FALSE(queue_->NextStep().has_value());
}

TEST_F(JobQueueTest, JobIsCancelledWhenItsLastLeaseIsClosed) {
  AddAndStart("a", 2, 1);
  const v1::Lease one = Take("w1");
  const v1::Lease two = Take("w2");
  const absl::StatusOr<v1::PrepJob> job = queue_->Cancel("a");
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_RUNNING);
  EXPECT_TRUE(job->cancel_requested());
  // Workers are told at once, and the leases stay open until they have stopped.
  EXPECT_THAT(Say("w1", one.lease_id(), v1::LeaseReport::STATE_RUNNING), IsEmpty());
  Say("w1", one.lease_id(), v1::LeaseReport::STATE_RETURNED);
  EXPECT_FALSE(queue_->NextStep().has_value());
  Done("w2", two.lease_id());
  ExpectStep(JobStep::Kind::kRemove, "a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  queue_->CleanFinished("a", absl::OkStatus());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
  // Again is fine.
  EXPECT_TRUE(queue_->Cancel("a").ok());
}

TEST_F(JobQueueTest, CancelledJobsSilentLeaseIsNotRenewedByOtherCalls) {
  AddAndStart("a", 1, 1);
  Take("w");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  for (int i = 0; i < 7; ++i) {
    AdvanceAndTick(absl::Seconds(10) - kInstant);
    EXPECT_THAT(Call(Request("w")), IsEmpty());  // never heard of the lease
  }
  EXPECT_FALSE(queue_->NextStep().has_value());
  AdvanceAndTick(7 * kInstant);
  ExpectStep(JobStep::Kind::kRemove, "a");
}

TEST_F(JobQueueTest, FinishedJobsCannotBeCancelled) {
  AddAndStart("a", 1, 1);
  Say("w", Take("w").lease_id(), v1::LeaseReport::STATE_FAILED, absl::DataLossError("short"));
  Tidy("a");
  EXPECT_EQ(queue_->Cancel("a").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(queue_->Cancel("a").status()).reason, "JOB_FINISHED");
  EXPECT_EQ(queue_->Cancel("none").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JobQueueTest, CancelDuringTheStartEndsTheJobThere) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_PENDING);
  queue_->StartFinished("a", Plan("print-a", 1, 1));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
}

TEST_F(JobQueueTest, CancelDuringTheCommitLosesWhenItSucceeds) {
  AddAndStart("a", 1, 1);
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  queue_->CommitFinished("a", Manifests(1));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_SUCCEEDED);
}

TEST_F(JobQueueTest, CancelDuringTheCommitWinsWhenItFails) {
  AddAndStart("a", 1, 1);
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  queue_->CommitFinished("a", absl::UnavailableError("503"));
  ExpectStep(JobStep::Kind::kRemove, "a");
}

TEST_F(JobQueueTest, ZombieOfACancelledJobCannotReachTheNextJobThere) {
  ASSERT_EQ(queue_->AddJob(Spec("old", "/out", "print-old")), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "old");
  queue_->StartFinished("old", Plan("print-old", 1, 1));
  const v1::Lease lease = Take("zombie");
  ASSERT_TRUE(queue_->Cancel("old").ok());
  // The zombie may still write, so the destination is not free.
  AdvanceAndTick(kFence - kInstant);
  EXPECT_EQ(queue_->AddJob(Spec("new", "/out", "print-new")).code(),
            absl::StatusCode::kFailedPrecondition);
  AdvanceAndTick(kInstant);
  ExpectStep(JobStep::Kind::kRemove, "old");
  EXPECT_EQ(queue_->AddJob(Spec("new", "/out", "print-new")).code(),
            absl::StatusCode::kFailedPrecondition);
  queue_->CleanFinished("old", absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(Spec("new", "/out", "print-new")), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "new");
  queue_->StartFinished("new", Plan("print-new", 1, 1));
  const v1::Lease fresh = Take("w");
  EXPECT_THAT(Say("zombie", lease.lease_id(), v1::LeaseReport::STATE_DONE, {}, {0}), IsEmpty());
  EXPECT_EQ(Job("new").progress().rank_tasks_done(), 0);
  Done("w", fresh.lease_id());
  EXPECT_EQ(Job("new").progress().rank_tasks_done(), 1);
}

// Timeouts ----------------------------------------------------------------------------------------

class JobQueueTimeoutTest : public JobQueueTest {
 protected:
  static constexpr absl::Duration kTimeout = absl::Minutes(10);

  static NewJob Timed(NewJob job) {
    job.job.mutable_timeout()->set_seconds(absl::ToInt64Seconds(kTimeout));
    return job;
  }

  void AddTimed(const std::string& id) {
    ASSERT_EQ(queue_->AddJob(Timed(Spec(id))), absl::OkStatus());
  }

  void ExpectTimedOut(const std::string& id) {
    EXPECT_EQ(StateOf(id), v1::PrepJob::STATE_FAILED);
    EXPECT_EQ(Job(id).error().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
    EXPECT_THAT(Job(id).error().message(), HasSubstr("10m"));
  }
};

TEST_F(JobQueueTimeoutTest, WaitingJobFailsWhenItsTimeIsOverAndNotBefore) {
  AddTimed("a");
  const v1::PrepJob job = Job("a");
  EXPECT_EQ(job.deadline_time().seconds() - job.create_time().seconds(), 600);
  AdvanceAndTick(kTimeout - kInstant);
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_PENDING);
  AdvanceAndTick(kInstant);
  ExpectTimedOut("a");
}

TEST_F(JobQueueTimeoutTest, RunningJobsLeasesAreWithdrawnAndOnlyTheUnrecordedIsRemoved) {
  AddTimed("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", Plan("print-a", 1, 2));
  const v1::Lease lease = Take("w");
  for (int i = 0; i < 60; ++i) {
    AdvanceAndTick(absl::Seconds(10) - (i == 59 ? kInstant : absl::ZeroDuration()));
    ASSERT_EQ(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING, {}, {1}).size(), 1U) << i;
  }
  AdvanceAndTick(kInstant);
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING) << "a lease is open";
  EXPECT_EQ(Job("a").error().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING), IsEmpty());
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RETURNED);
  Tidy("a");
  ExpectTimedOut("a");
  EXPECT_FALSE(queue_->NextStep().has_value());
}

TEST_F(JobQueueTimeoutTest, StepsInHandAreAwaited) {
  AddTimed("starting");
  ExpectStep(JobStep::Kind::kStart, "starting");
  AddTimed("committed");
  ExpectStep(JobStep::Kind::kStart, "committed");
  queue_->StartFinished("committed", Plan("print-committed", 1, 1));
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "committed");
  AddTimed("stuck");
  ExpectStep(JobStep::Kind::kStart, "stuck");
  queue_->StartFinished("stuck", Plan("print-stuck", 1, 1));
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "stuck");
  AdvanceAndTick(kTimeout);
  EXPECT_FALSE(IsTerminal(StateOf("starting")));
  queue_->StartFinished("starting", Plan("print-starting", 1, 1));
  ExpectTimedOut("starting");
  // Others may have seen the manifest.
  queue_->CommitFinished("committed", Manifests(1));
  EXPECT_EQ(StateOf("committed"), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_FALSE(Job("committed").has_error());
  queue_->CommitFinished("stuck", absl::UnavailableError("503"));
  Tidy("stuck");
  ExpectTimedOut("stuck");
}

TEST_F(JobQueueTimeoutTest, CancelledJobsAreNoLongerTimed) {
  AddTimed("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", Plan("print-a", 1, 1));
  const v1::Lease lease = Take("w");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RETURNED);
  ExpectStep(JobStep::Kind::kRemove, "a");
  AdvanceAndTick(kTimeout);
  queue_->CleanFinished("a", absl::OkStatus());
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
}

TEST_F(JobQueueTimeoutTest, TimeGoesOnWhileNoControllerRuns) {
  const auto created_ago = [&](absl::Duration ago) {
    NewJob job = Timed(Restored("a", 1, kFence));
    job.job.mutable_create_time()->set_seconds(absl::ToUnixSeconds(clock_.Wall() - ago));
    return job;
  };
  ASSERT_EQ(queue_->Restore(created_ago(kTimeout - absl::Seconds(1))), absl::OkStatus());
  AdvanceAndTick(absl::Seconds(1) - kInstant);
  EXPECT_FALSE(Job("a").has_error());
  AdvanceAndTick(kInstant);
  EXPECT_TRUE(Job("a").has_error());
  AdvanceAndTick(kFence);  // only then nothing is written there any more
  Tidy("a");
  ExpectTimedOut("a");
  // A wall clock that was set back gives no more time than was asked for.
  Remake(Options());
  ASSERT_EQ(queue_->Restore(created_ago(-absl::Hours(1))), absl::OkStatus());
  AdvanceAndTick(kTimeout);
  EXPECT_TRUE(Job("a").has_error());
}

// Destinations ------------------------------------------------------------------------------------

TEST_F(JobQueueTest, SameArtefactWaitsAndIsThenPlannedAgain) {
  ASSERT_EQ(queue_->AddJob(Spec("a", "/out", "print")), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(Spec("b", "/out", "print")), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "a");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->StartFinished("a", Plan("print", 1, 1));
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->CommitFinished("a", Manifests(1));
  ExpectStep(JobStep::Kind::kStart, "b");
  StartedJob complete;
  complete.fingerprint = "print";
  complete.complete = Manifests(1);
  queue_->StartFinished("b", complete);
  EXPECT_EQ(StateOf("b"), v1::PrepJob::STATE_SUCCEEDED);
}

TEST_F(JobQueueTest, OtherArtefactIsRefusedWhileTheDestinationIsTaken) {
  ASSERT_EQ(queue_->AddJob(Spec("a", "/out", "one")), absl::OkStatus());
  const absl::Status refused = queue_->AddJob(Spec("b", "/out", "two"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY");
  EXPECT_EQ(ReasonOf(refused).metadata["prep_job_id"], "a");
  EXPECT_EQ(queue_->AddJob(Spec("b", "/elsewhere", "two")), absl::OkStatus());
}

TEST_F(JobQueueTest, WaitingForADestinationDoesNotHoldUpOthers) {
  ASSERT_EQ(queue_->AddJob(Spec("a", "/out", "print")), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(Spec("b", "/out", "print")), absl::OkStatus());
  Add("c");
  ExpectStep(JobStep::Kind::kStart, "a");
  ExpectStep(JobStep::Kind::kStart, "c");
}

TEST_F(JobQueueTest, RestoredRunningJobWaitsForTheOldFence) {
  ASSERT_EQ(queue_->Restore(Restored("a", 1, kFence)), absl::OkStatus());
  AdvanceAndTick(kFence - kInstant);
  EXPECT_FALSE(queue_->NextStep().has_value());
  AdvanceAndTick(kInstant);
  ExpectStep(JobStep::Kind::kStart, "a");
}

TEST_F(JobQueueTest, FenceIsAsLongAsTheLeasesOfTheControllerThatGaveThem) {
  const absl::Duration longer = absl::Minutes(20);
  ASSERT_EQ(queue_->Restore(Restored("a", 1, longer)), absl::OkStatus());
  AdvanceAndTick(longer - kInstant);
  EXPECT_FALSE(queue_->NextStep().has_value());
  AdvanceAndTick(kInstant);
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", Plan("print-a", 1, 1));
  // Until this job is over both kinds of leases may be what the next controller finds.
  EXPECT_EQ(queue_->Get("a")->lease_span, longer);
  AddAndStart("b");
  EXPECT_EQ(queue_->Get("b")->lease_span, kFence);
}

TEST_F(JobQueueTest, LeasesAreOnRecordBeforeTheFirstIsGiven) {
  Add("a");
  EXPECT_EQ(queue_->Get("a")->lease_span, absl::ZeroDuration());
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->TakeChanges();
  queue_->StartFinished("a", Plan("print-a", 1, 1));
  EXPECT_EQ(queue_->Get("a")->lease_span, kFence);
  EXPECT_THAT(queue_->TakeChanges().recorded, ElementsAre("a"));
}

TEST_F(JobQueueTest, OtherArtefactIsRefusedWhileTheOldFenceIsOpen) {
  NewJob restored = Restored("a", 1, kFence);
  restored.places[0].destination = "/out";
  *restored.job.mutable_error() = ToRpcStatus(absl::DataLossError("truncated"));
  ASSERT_EQ(queue_->Restore(restored), absl::OkStatus());
  // It had failed, and only its leases kept it from its end: they still do.
  AdvanceAndTick(kFence - kInstant);
  EXPECT_NE(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(ReasonOf(queue_->AddJob(Spec("b", "/out", "print-b"))).reason, "DESTINATION_BUSY");
  AdvanceAndTick(kInstant);
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().message(), "truncated");
  EXPECT_EQ(queue_->AddJob(Spec("b", "/out", "print-b")), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "b");
}

TEST_F(JobQueueTest, WorkerOfAnEarlierControllerIsToldToStopAndGetsWorkOnlyThen) {
  AddAndStart("a", 1, 1);
  EXPECT_THAT(Say("old", "lease-of-before", v1::LeaseReport::STATE_RUNNING), IsEmpty());
  EXPECT_THAT(Say("old", "lease-of-before", v1::LeaseReport::STATE_RUNNING), IsEmpty());
  EXPECT_EQ(Say("old", "lease-of-before", v1::LeaseReport::STATE_RETURNED).size(), 1U);
}

TEST_F(JobQueueTest, BoundsAreForNewJobsAndNotForRestoredOnes) {
  JobQueueOptions options = Options();
  options.max_unfinished_jobs = 1;
  Remake(options);
  for (int64_t i = 1; i <= 3; ++i) {
    ASSERT_EQ(queue_->Restore(Restored(absl::StrCat("job-", i), 10 * i, {})), absl::OkStatus());
  }
  EXPECT_EQ(queue_->AddJob(Spec("new")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(queue_->next_sequence(), 31);
  EXPECT_EQ(queue_->Get("job-2")->sequence, 20);
  EXPECT_EQ(queue_->Restore(Restored("job-4", 30, {})).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(queue_->Restore(Restored("job-3", 40, {})).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(JobQueueTest, RestoredHistoryIsForgottenInTheOrderOfItsEndAndIsNoEvent) {
  JobQueueOptions options = Options();
  options.max_finished_jobs = 2;
  Remake(options);
  // The first created ended last.
  for (int i = 1; i <= 3; ++i) {
    NewJob job = Restored(absl::StrCat("job-", i), i, {});
    job.job.set_state(v1::PrepJob::STATE_FAILED);
    job.job.mutable_end_time()->set_seconds(1'000'000 - i);
    ASSERT_EQ(queue_->Restore(job), absl::OkStatus());
  }
  const QueueChanges changes = queue_->TakeChanges();
  EXPECT_THAT(changes.evicted, ElementsAre("job-3"));
  EXPECT_THAT(changes.events, IsEmpty());
  EXPECT_TRUE(queue_->Get("job-1").ok());
}

TEST_F(JobQueueTest, StartThatCouldNotBeRecordedIsTriedAgainForAsLongAsItTakes) {
  Add("a");
  Add("b");
  for (int i = 0; i < 10; ++i) {
    ExpectStep(JobStep::Kind::kStart, "a");
    queue_->StartPostponed("a");
    // Nor does another job plan in vain meanwhile.
    EXPECT_FALSE(queue_->NextStep().has_value());
    clock_.Advance(absl::Seconds(8) - kInstant);
    EXPECT_FALSE(queue_->NextStep().has_value());
    clock_.Advance(kInstant);
  }
  EXPECT_EQ(Job("a").progress().attempts_failed(), 0);
  ExpectStep(JobStep::Kind::kStart, "a");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  queue_->StartPostponed("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
  // Nothing was given, so there is nothing to remove.
  clock_.Advance(absl::Seconds(8));
  ExpectStep(JobStep::Kind::kStart, "b");
}

TEST_F(JobQueueTest, RestoredRunningJobThatIsCancelledRemovesItsOutputBehindTheFence) {
  // Cancelled before the end of the earlier controller, or after it.
  for (const bool before : {true, false}) {
    Remake(Options());
    NewJob restored = Restored("a", 1, kFence);
    restored.job.set_cancel_requested(before);
    ASSERT_EQ(queue_->Restore(restored), absl::OkStatus());
    ASSERT_TRUE(queue_->Cancel("a").ok());
    AdvanceAndTick(kFence - kInstant);
    EXPECT_FALSE(queue_->NextStep().has_value());
    AdvanceAndTick(kInstant);
    ExpectStep(JobStep::Kind::kRemove, "a");
    queue_->CleanFinished("a", absl::OkStatus());
    EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
  }
}

TEST_F(JobQueueTest, SourceThatChangedBeforeTheStartIsRefused) {
  Add("a");
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", Plan("another print", 1, 1));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(Job("a").error().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

// Failing -----------------------------------------------------------------------------------------

TEST_F(JobQueueTest, FailedJobHoldsItsDestinationUntilItsLeasesAreClosed) {
  AddAndStart("a", 2, 1);
  const v1::Lease bad = Take("w1");
  const v1::Lease other = Take("w2");
  Say("w1", bad.lease_id(), v1::LeaseReport::STATE_FAILED, absl::DataLossError("truncated"));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
  EXPECT_THAT(Job("a").error().message(), HasSubstr("truncated"));
  EXPECT_THAT(Say("w2", other.lease_id(), v1::LeaseReport::STATE_RUNNING), IsEmpty());
  Say("w2", other.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("later"));
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(Job("a").error().message(), HasSubstr("truncated"));
}

TEST_F(JobQueueTest, StepsAreTriedAgainOnlyWhenThatCanHelp) {
  AddAndStart("a", 1, 1);
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
  queue_->CommitFinished("a", absl::UnavailableError("503"));
  EXPECT_FALSE(queue_->NextStep().has_value());
  clock_.Advance(absl::Seconds(2));
  ExpectStep(JobStep::Kind::kCommit, "a");
  queue_->CommitFinished("a", absl::UnavailableError("503"));
  clock_.Advance(absl::Seconds(8));
  ExpectStep(JobStep::Kind::kCommit, "a");
  queue_->CommitFinished("a", absl::UnavailableError("503"));
  Tidy("a");
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_FAILED);

  AddAndStart("b", 1, 1);
  Done("w", Take("w").lease_id());
  ExpectStep(JobStep::Kind::kCommit, "b");
  queue_->CommitFinished("b", absl::DataLossError("rank 3 part 0: 10 bytes, want 12"));
  Tidy("b");
  EXPECT_EQ(StateOf("b"), v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(Job("b").error().message(), HasSubstr("rank 3 part 0"));
}

TEST_F(JobQueueTest, RemovalThatFailsIsToldOnTheCancelledJob) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("w");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RETURNED);
  ExpectStep(JobStep::Kind::kRemove, "a");
  queue_->CleanFinished("a", absl::FailedPreconditionError("read-only"));
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_CANCELLED);
  EXPECT_THAT(Job("a").error().message(), HasSubstr("read-only"));
}

// Bounds ------------------------------------------------------------------------------------------

TEST_F(JobQueueTest, QueueIsBounded) {
  JobQueueOptions options = Options();
  options.max_unfinished_jobs = 2;
  Remake(options);
  Add("a");
  Add("b");
  const absl::Status full = queue_->AddJob(Spec("c"));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full).metadata["bound"], "2");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  EXPECT_EQ(queue_->AddJob(Spec("c")), absl::OkStatus());
}

TEST_F(JobQueueTest, BytesOfJobsAreBounded) {
  const auto sized = [](const std::string& id) {
    NewJob job = Spec(id);
    job.job.mutable_spec()->set_alignment_policy_json(std::string(1000, ' '));
    return job;
  };
  JobQueueOptions options = Options();
  options.max_job_bytes = 2500;
  Remake(options);
  ASSERT_EQ(queue_->AddJob(sized("a")), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(sized("b")), absl::OkStatus());
  const absl::Status full = queue_->AddJob(sized("c"));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full).metadata["bound"], "2500");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  ASSERT_TRUE(queue_->Cancel("b").ok());
  ASSERT_EQ(queue_->AddJob(sized("c")), absl::OkStatus());
  ASSERT_TRUE(queue_->Cancel("c").ok());
  EXPECT_THAT(queue_->TakeChanges().evicted, ElementsAre("a"));
}

TEST_F(JobQueueTest, OldestFinishedJobsAreForgotten) {
  JobQueueOptions options = Options();
  options.max_finished_jobs = 2;
  Remake(options);
  for (const char* id : {"a", "b", "c"}) {
    Add(id);
    ASSERT_TRUE(queue_->Cancel(id).ok());
  }
  EXPECT_EQ(queue_->Get("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(queue_->Get("b").ok());
  EXPECT_THAT(queue_->TakeChanges().evicted, ElementsAre("a"));
  Add("a");  // the id is free again
}

TEST_F(JobQueueTest, ActiveJobsAreBoundedAndWaitingForAFenceIsNotActive) {
  JobQueueOptions options = Options();
  options.max_active_jobs = 1;
  Remake(options);
  AddAndStart("a", 1, 1);
  Add("b");
  EXPECT_FALSE(queue_->NextStep().has_value());
  Take("silent");
  ASSERT_TRUE(queue_->Cancel("a").ok());
  ExpectStep(JobStep::Kind::kStart, "b");
}

TEST_F(JobQueueTest, WorkersAreBounded) {
  JobQueueOptions options = Options();
  options.max_workers = 1;
  Remake(options);
  EXPECT_EQ(queue_->Report(Request("w1")), absl::OkStatus());
  EXPECT_EQ(queue_->Report(Request("w2")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(queue_->Report(Request("w1")), absl::OkStatus());
  AdvanceAndTick(kFence);
  EXPECT_EQ(queue_->Report(Request("w2")), absl::OkStatus());
}

// Requests ----------------------------------------------------------------------------------------

TEST_F(JobQueueTest, OtherBuildsGetNoLeases) {
  AddAndStart("a", 1, 1);
  for (int field = 0; field < 3; ++field) {
    v1::SynchronizeRequest request = Request("w");
    if (field == 0) request.mutable_build()->set_format_version("2");
    if (field == 1) request.mutable_build()->set_policy_digest("abd");
    if (field == 2) request.mutable_build()->set_tool_version("0.1.1");
    const absl::Status status = queue_->Report(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status).reason, "BUILD_MISMATCH");
    EXPECT_THAT(queue_->Desired("w").leases(), IsEmpty());
  }
}

TEST_F(JobQueueTest, MalformedRequestsAreRefusedAndNothingOfThemIsTaken) {
  AddAndStart("a", 1, 2);
  const v1::Lease lease = Take("w");
  const auto refuse = [&](const char* what, const auto& change) {
    v1::SynchronizeRequest request = Request("w");
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(lease.lease_id());
    report.set_state(v1::LeaseReport::STATE_RUNNING);
    report.add_completed_ranks(0);
    change(request, report);
    EXPECT_EQ(queue_->Report(request).code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_EQ(Job("a").progress().rank_tasks_done(), 0) << what;
  };
  refuse("no id", [](auto& request, auto&) { request.set_worker_id(""); });
  refuse("blank in id", [](auto& request, auto&) { request.set_worker_id("a b"); });
  refuse("long id", [](auto& request, auto&) { request.set_worker_id(std::string(129, 'w')); });
  refuse("no budget", [](auto& request, auto&) { request.set_memory_budget_bytes(0); });
  refuse("no state", [](auto&, auto& report) { report.clear_state(); });
  refuse("no error", [](auto&, auto& report) { report.set_state(v1::LeaseReport::STATE_FAILED); });
  refuse("rank of others", [](auto&, auto& report) { report.add_completed_ranks(2); });
  refuse("negative", [](auto&, auto& report) { report.set_bytes_read(-1); });
  refuse("long device", [](auto& request, auto&) { request.set_device(std::string(65, 'd')); });
  refuse("many ranks", [](auto&, auto& report) {
    while (report.completed_ranks_size() < 4097) report.add_completed_ranks(0);
  });
  refuse("long error", [](auto&, auto& report) {
    report.set_state(v1::LeaseReport::STATE_FAILED);
    report.mutable_error()->set_code(14);
    report.mutable_error()->set_message(std::string(65 << 10, 'e'));
  });
  refuse("no name of a stage",
         [](auto&, auto& report) { (*report.mutable_stage_seconds())["Read!"] = 1; });
  refuse("many stages", [](auto&, auto& report) {
    for (char c = 'a'; c <= 'q'; ++c) (*report.mutable_stage_seconds())[std::string(1, c)] = 1;
  });
  refuse("many reports", [](auto& request, auto&) {
    while (request.leases_size() < 17) request.add_leases()->CopyFrom(request.leases(0));
  });
}

TEST_F(JobQueueTest, DrainingWorkerTakesNothingNew) {
  AddAndStart("a", 2, 1);
  v1::SynchronizeRequest request = Request("w");
  request.set_draining(true);
  EXPECT_THAT(Call(request), IsEmpty());
}

// Drain of the controller -------------------------------------------------------------------------

TEST_F(JobQueueTest, DrainFinishesWhatIsInHandAndStartsNothing) {
  AddAndStart("a", 1, 1);
  Add("b");
  const v1::Lease lease = Take("w");
  queue_->StopLeasing();
  EXPECT_EQ(queue_->AddJob(Spec("c")).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(queue_->NextStep().has_value());
  EXPECT_EQ(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING).size(), 1U);
  Done("w", lease.lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, WithdrawnLeaseIsGivenBackWithoutBlame) {
  AddAndStart("a", 1, 1);
  const v1::Lease lease = Take("w");
  queue_->StopLeasing();
  queue_->WithdrawAll();
  EXPECT_THAT(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING), IsEmpty());
  EXPECT_THAT(Say("w", lease.lease_id(), v1::LeaseReport::STATE_RETURNED), IsEmpty());
  EXPECT_EQ(queue_->Stats().leases, 0);
  EXPECT_EQ(Job("a").progress().attempts_failed(), 0);
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_RUNNING);
}

// Listing and changes -----------------------------------------------------------------------------

TEST_F(JobQueueTest, PagesAreNewestFirstAndCoverEveryJobOnce) {
  for (int i = 0; i < 7; ++i) Add(absl::StrCat("job-", i));
  std::vector<std::string> seen;
  std::string token;
  do {
    const absl::StatusOr<JobPage> page = queue_->List(3, token, {});
    ASSERT_TRUE(page.ok());
    EXPECT_LE(page->jobs.size(), 3U);
    for (const v1::PrepJob& job : page->jobs) seen.push_back(job.prep_job_id());
    token = page->next_page_token;
    Add(absl::StrCat("late-", seen.size()));  // does not disturb the pages
  } while (!token.empty());
  EXPECT_THAT(seen, ElementsAre("job-6", "job-5", "job-4", "job-3", "job-2", "job-1", "job-0"));
}

TEST_F(JobQueueTest, ListFiltersByStateAndLeavesPlansOut) {
  NewJob job = Spec("a");
  job.job.mutable_plan()->set_rank_count(8);
  job.job.mutable_spec()->set_alignment_policy_json(std::string(1000, ' '));
  ASSERT_EQ(queue_->AddJob(job), absl::OkStatus());
  Add("b");
  ASSERT_TRUE(queue_->Cancel("b").ok());
  const absl::StatusOr<JobPage> page = queue_->List(10, "", {v1::PrepJob::STATE_PENDING});
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->jobs.size(), 1U);
  EXPECT_EQ(page->jobs[0].prep_job_id(), "a");
  EXPECT_FALSE(page->jobs[0].has_plan());
  EXPECT_EQ(page->jobs[0].spec().alignment_policy_json(), "");
  EXPECT_EQ(Job("a").plan().rank_count(), 8);
}

TEST_F(JobQueueTest, PageTokensOfOthersAreRefused) {
  for (const char* token : {"x", "before-", "before-x-0", "before-0-0", "before--1-0", "before-1",
                            "before-01-0", "after-1-0", "before-1-0-0"}) {
    EXPECT_EQ(queue_->List(3, token, {}).status().code(), absl::StatusCode::kInvalidArgument)
        << token;
  }
}

TEST_F(JobQueueTest, PageTokenBelongsToItsFilter) {
  for (int i = 0; i < 4; ++i) Add(absl::StrCat("job-", i));
  const std::set<State> pending = {v1::PrepJob::STATE_PENDING};
  const std::string token = queue_->List(2, "", pending)->next_page_token;
  EXPECT_TRUE(queue_->List(2, token, pending).ok());
  for (const std::set<State>& other :
       {std::set<State>{}, std::set<State>{v1::PrepJob::STATE_RUNNING},
        std::set<State>{v1::PrepJob::STATE_PENDING, v1::PrepJob::STATE_RUNNING}}) {
    const absl::Status refused = queue_->List(2, token, other).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(refused).reason, "BAD_PAGE_TOKEN");
  }
}

TEST_F(JobQueueTest, EveryChangeIsToldOnceAndOnlyStatesAreRecorded) {
  AddAndStart("a", 1, 2);
  queue_->TakeChanges();
  const int64_t version = queue_->Get("a")->version;
  const v1::Lease lease = Take("w");
  queue_->TakeChanges();
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING, {}, {1});
  const QueueChanges progress = queue_->TakeChanges();
  EXPECT_THAT(progress.changed, ElementsAre("a"));
  EXPECT_THAT(progress.recorded, IsEmpty());
  EXPECT_GT(queue_->Get("a")->version, version);
  EXPECT_THAT(queue_->TakeChanges().changed, IsEmpty());
  ASSERT_TRUE(queue_->Cancel("a").ok());
  EXPECT_THAT(queue_->TakeChanges().recorded, ElementsAre("a"));
}

TEST_F(JobQueueTest, StatsCountWaitingAndLeasedRankTasks) {
  AddAndStart("a", 3, 4);
  Add("b");
  const v1::Lease lease = Take("w");
  Say("w", lease.lease_id(), v1::LeaseReport::STATE_RUNNING, {}, {2});
  Call(Request("idle", 1));
  const QueueStats stats = queue_->Stats();
  EXPECT_EQ(stats.pending, 1);
  EXPECT_EQ(stats.running, 1);
  EXPECT_EQ(stats.rank_tasks_waiting, 8);
  EXPECT_EQ(stats.rank_tasks_leased, 3);
  EXPECT_EQ(stats.leases, 1);
  EXPECT_EQ(stats.workers_busy, 1);
  EXPECT_EQ(stats.workers_idle, 1);
}

// Any sequence of calls keeps the queue's promises: no rank task is leased twice, and every job
// ends once workers behave.
TEST_F(JobQueueTest, RandomWalkNeverLeasesATaskTwiceAndEnds) {
  uint64_t seed = 12345;
  const auto random = [&seed](uint64_t below) {
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    return (seed >> 33) % below;
  };
  for (int i = 0; i < 4; ++i) AddAndStart(absl::StrCat("job-", i), 3, 4);
  std::map<std::string, v1::Lease> held;  // by worker, as the worker knows
  for (int step = 0; step < 3000; ++step) {
    const std::string worker = absl::StrCat("w", random(4));
    const auto mine = held.find(worker);
    v1::SynchronizeRequest request = Request(worker, 10 + static_cast<int64_t>(random(60)));
    if (mine != held.end()) {
      v1::LeaseReport& report = *request.add_leases();
      report.set_lease_id(mine->second.lease_id());
      const uint64_t what = random(10);
      report.set_state(what < 6   ? v1::LeaseReport::STATE_RUNNING
                       : what < 9 ? v1::LeaseReport::STATE_DONE
                                  : v1::LeaseReport::STATE_FAILED);
      if (what == 9) *report.mutable_error() = ToRpcStatus(absl::AbortedError("lost"));
    }
    if (random(20) == 0) AdvanceAndTick(absl::Seconds(static_cast<int64_t>(random(80))));
    if (random(400) == 0) (void)queue_->Cancel(absl::StrCat("job-", random(4)));
    const std::vector<v1::Lease> desired = Call(request);
    held.erase(worker);
    if (!desired.empty() && random(10) != 0) held[worker] = desired[0];  // or the answer got lost
    while (const std::optional<JobStep> next = queue_->NextStep()) {
      if (next->kind == JobStep::Kind::kCommit) {
        queue_->CommitFinished(next->job_id, Manifests(1));
      } else if (next->kind == JobStep::Kind::kRemove) {
        queue_->CleanFinished(next->job_id, absl::OkStatus());
      }
    }
    // Of leases that are desired now, no two name the same task.
    std::set<std::string> tasks;
    for (int w = 0; w < 4; ++w) {
      const v1::SynchronizeResponse now = queue_->Desired(absl::StrCat("w", w));
      for (const v1::Lease& lease : now.leases()) {
        for (const int32_t rank : RanksOf(lease)) {
          const std::string task =
              absl::StrCat(lease.prep_job_id(), "/", lease.region(), "/", rank);
          ASSERT_TRUE(tasks.insert(task).second) << task << " at step " << step;
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    const v1::PrepJob job = Job(absl::StrCat("job-", i));
    EXPECT_TRUE(IsTerminal(job.state())) << job.ShortDebugString();
    if (job.state() == v1::PrepJob::STATE_SUCCEEDED) {
      EXPECT_EQ(job.progress().rank_tasks_done(), 12);
      EXPECT_EQ(job.progress().bytes_written(), 1200);
    }
  }
}

// Found by fuzzing: a controller that died before it had recorded the end of one job leaves two
// that have to be removed from one place.
TEST_F(JobQueueTest, RemovalsAtOneDestinationFollowEachOther) {
  for (int64_t sequence = 1; sequence <= 2; ++sequence) {
    NewJob job = Spec(absl::StrCat("job-", sequence), "/out/same", "print");
    job.job.set_state(v1::PrepJob::STATE_RUNNING);
    job.job.set_cancel_requested(true);
    job.sequence = sequence;
    job.lease_span = kFence;
    ASSERT_EQ(queue_->Restore(std::move(job)), absl::OkStatus());
  }
  clock_.Advance(kFence);
  queue_->Tick();
  ExpectStep(JobStep::Kind::kRemove, "job-1");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->CleanFinished("job-1", absl::OkStatus());
  ExpectStep(JobStep::Kind::kRemove, "job-2");
}

// Several targets ---------------------------------------------------------------------------------

TEST_F(JobQueueTest, JobTakesAllItsPlacesAtOnceAndInOrderOfCreation) {
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("a", {"/x=px"})), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("b", {"/x=px", "/y=py"})), absl::OkStatus());
  // Its place is free, but kept for the older one.
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("c", {"/y=py"})), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("d", {"/z=pz"})), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "a");
  ExpectStep(JobStep::Kind::kStart, "d");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->StartFinished("a", absl::DataLossError("truncated"));
  ExpectStep(JobStep::Kind::kStart, "b");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->StartFinished("b", absl::DataLossError("truncated"));
  ExpectStep(JobStep::Kind::kStart, "c");
}

TEST_F(JobQueueTest, JobThatIsToBeStartedAgainKeepsItsPlaces) {
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("a", {"/x=px", "/y=py"})), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("b", {"/y=py"})), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "a");
  queue_->StartFinished("a", absl::UnavailableError("503"));
  EXPECT_FALSE(queue_->NextStep().has_value());
  clock_.Advance(Options().retry_delay);
  ExpectStep(JobStep::Kind::kStart, "a");
}

TEST_F(JobQueueTest, AnyPlaceWithAnotherFingerprintIsRefusedByName) {
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("a", {"/x=px", "/y=py"})), absl::OkStatus());
  const absl::Status refused = queue_->AddJob(SpecOfSeveral("b", {"/z=pz", "/x=px", "/y=another"}));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY");
  EXPECT_EQ(ReasonOf(refused).metadata["destination"], "/y");
  EXPECT_EQ(ReasonOf(refused).metadata["prep_job_id"], "a");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("fingerprint is py, this one's another"));
  EXPECT_EQ(queue_->AddJob(SpecOfSeveral("b", {"/z=pz", "/y=py"})), absl::OkStatus());
}

// The older job had ended at once, having found its artefact, but that was not recorded.
TEST_F(JobQueueTest, EveryPlaceOfARestoredJobIsFenced) {
  NewJob older = SpecOfSeveral("older", {"/y=py"});
  older.sequence = 1;
  ASSERT_EQ(queue_->Restore(older), absl::OkStatus());
  NewJob running = SpecOfSeveral("running", {"/x=px", "/y=py"});
  running.job.set_state(v1::PrepJob::STATE_RUNNING);
  running.sequence = 2;
  running.lease_span = kFence;
  ASSERT_EQ(queue_->Restore(running), absl::OkStatus());
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("younger", {"/x=px"})), absl::OkStatus());
  AdvanceAndTick(kFence - kInstant);
  EXPECT_FALSE(queue_->NextStep().has_value());
  AdvanceAndTick(kInstant);
  ExpectStep(JobStep::Kind::kStart, "older");
  EXPECT_FALSE(queue_->NextStep().has_value());
}

TEST_F(JobQueueTest, RemovalsThatShareAnyPlaceFollowEachOther) {
  for (int64_t sequence = 1; sequence <= 2; ++sequence) {
    NewJob job = SpecOfSeveral(absl::StrCat("job-", sequence),
                               {absl::StrCat("/own-", sequence, "=print"), "/same=print"});
    job.job.set_state(v1::PrepJob::STATE_RUNNING);
    job.job.set_cancel_requested(true);
    job.sequence = sequence;
    job.lease_span = kFence;
    ASSERT_EQ(queue_->Restore(std::move(job)), absl::OkStatus());
  }
  AdvanceAndTick(kFence);
  ExpectStep(JobStep::Kind::kRemove, "job-1");
  EXPECT_FALSE(queue_->NextStep().has_value());
  queue_->CleanFinished("job-1", absl::OkStatus());
  ExpectStep(JobStep::Kind::kRemove, "job-2");
}

TEST_F(JobQueueTest, ReplicatedStreamsOfSeveralTargetsAreTasksLikeOthers) {
  ASSERT_EQ(queue_->AddJob(SpecOfSeveral("a", {"/x=px", "/y=py"})), absl::OkStatus());
  ExpectStep(JobStep::Kind::kStart, "a");
  StartedJob started = Plan("print-a", 2, 4);
  started.regions[1].ranks = {-1, -2};
  queue_->StartFinished("a", started);
  const v1::Lease ranks = Take("w");
  EXPECT_EQ(ranks.layout_fingerprint(), "print-a") << "of the job, not of a target";
  const v1::Lease replicated = Done("w", ranks.lease_id()).at(0);
  EXPECT_THAT(RanksOf(replicated), ElementsAre(-1, -2));
  queue_->TakeChanges();
  const std::vector<v1::Lease> again =
      Say("w", replicated.lease_id(), v1::LeaseReport::STATE_FAILED, absl::UnavailableError("503"),
          /*completed=*/{-1});
  EXPECT_THAT(again, IsEmpty());
  EXPECT_EQ(queue_->TakeChanges().events.at(0).ranks, "replicated tensors of targets 0,1");
  clock_.Advance(Options().retry_delay);
  const v1::Lease rest = Take("w");
  EXPECT_THAT(RanksOf(rest), ElementsAre(-2));
  EXPECT_EQ(queue_->TakeChanges().events.at(0).ranks, "replicated tensors of target 1");
  Done("w", rest.lease_id());
  ExpectStep(JobStep::Kind::kCommit, "a");
}

TEST_F(JobQueueTest, ManifestsAreThoseOfTheTargetsInTheirOrder) {
  for (const bool is_complete : {false, true}) {
    const std::string id = is_complete ? "complete" : "made";
    ASSERT_EQ(queue_->AddJob(SpecOfSeveral(id, {"/x=px", "/y=py", "/z=pz"})), absl::OkStatus());
    ExpectStep(JobStep::Kind::kStart, id);
    StartedJob started = Plan("print-" + id, 0, 0);
    if (is_complete) started.complete = Manifests(3);
    queue_->StartFinished(id, started);
    if (!is_complete) {
      ExpectStep(JobStep::Kind::kCommit, id);
      queue_->CommitFinished(id, Manifests(3));
    }
    const v1::PrepJob job = Job(id);
    EXPECT_EQ(job.state(), v1::PrepJob::STATE_SUCCEEDED);
    EXPECT_EQ(job.manifest().file_count(), 1);
    ASSERT_EQ(job.other_manifests_size(), 2);
    EXPECT_EQ(job.other_manifests(0).file_count(), 2);
    EXPECT_EQ(job.other_manifests(1).file_count(), 3);
  }
}

}  // namespace
}  // namespace shardprep
