#include "service/controller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <tuple>

#include "tests/service/controller_fixture.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ControllerTest : public ControllerFixture {
 protected:
  void SetUp() override { StartController(Options()); }
};

TEST_F(ControllerTest, JobRunsFromCreateToItsManifest) {
  const absl::StatusOr<v1::PrepJob> job = Create("a", Spec("/models/a", "/out/a"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_PENDING);
  EXPECT_EQ(job->plan().rank_count(), 2);
  EXPECT_EQ(job->progress().rank_tasks_total(), 4);
  WorkUntilDone("w", "a");
  const absl::StatusOr<v1::ManifestReference> manifest = controller_->GetManifest("a", 0);
  ASSERT_TRUE(manifest.ok());
  EXPECT_EQ(manifest->uri(), "/out/a/manifest.json");
  EXPECT_TRUE(backend_.HasArtefact("/out/a"));
  EXPECT_EQ(backend_.calls().clears, 1);
}

TEST_F(ControllerTest, EqualSpecReturnsTheJobAndAnotherIsRefused) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  // The part size is the default that normalising fills in.
  v1::PrepJobSpec same = Spec("/models/a", "/out/a");
  same.set_part_size_bytes(int64_t{2} << 30);
  ASSERT_TRUE(Create("a", same).ok());
  v1::PrepJobSpec other = same;
  other.set_include_mtp(true);
  const absl::Status refused = Create("a", other).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReasonOf(refused).reason, "JOB_ID_TAKEN");
  v1::ListPrepJobsRequest list;
  EXPECT_THAT(controller_->List(list)->prep_jobs(), SizeIs(1));
}

TEST_F(ControllerTest, RacingCreatesOfOneIdMakeOneJob) {
  backend_.Hold();
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id("a");
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  Answer<v1::PrepJob> one;
  Answer<v1::PrepJob> two;
  controller_->Create(request, [] { return false; }, one.Callback());
  controller_->Create(request, [] { return false; }, two.Callback());
  backend_.AwaitWaitingPlans(2);
  backend_.Release();
  EXPECT_TRUE(one.Await().ok());
  EXPECT_TRUE(two.Await().ok());
  EXPECT_THAT(controller_->List({})->prep_jobs(), SizeIs(1));
}

TEST_F(ControllerTest, JobIdsAreChecked) {
  for (const char* id : {"", "-a", "a-", "A", "a_b", "a b", "ä"}) {
    EXPECT_EQ(Create(id, Spec("/models/a", "/out/a")).status().code(),
              absl::StatusCode::kInvalidArgument)
        << id;
  }
  EXPECT_FALSE(Create(std::string(64, 'a'), Spec("/models/a", "/out/a")).ok());
  EXPECT_TRUE(Create(std::string(63, 'a'), Spec("/models/a", "/out/a")).ok());
}

TEST_F(ControllerTest, CompleteDestinationSucceedsAtOnceAndNothingIsWritten) {
  const v1::PrepJobSpec spec = Spec("/models/a", "/out/a");
  backend_.PutArtefact("/out/a", FakeBackend::FingerprintOf(spec));
  const absl::StatusOr<v1::PrepJob> job = Create("a", spec);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(job->manifest().uri(), "/out/a/manifest.json");
  EXPECT_EQ(job->progress().bytes_written(), job->progress().bytes_total());
  EXPECT_EQ(backend_.calls().room_checks, 0);
  EXPECT_EQ(backend_.calls().clears, 0);
}

TEST_F(ControllerTest, WhatIsRefusedIsRefusedBeforeAnythingIsWritten) {
  struct Case {
    const char* what;
    FakeBackend::Failures failures;
    absl::StatusCode code;
  };
  const Case cases[] = {
      {"plan", {.plan = absl::NotFoundError("no such source")}, absl::StatusCode::kNotFound},
      {"inspect",
       {.inspect = absl::FailedPreconditionError("another artefact")},
       absl::StatusCode::kFailedPrecondition},
      {"room",
       {.room = absl::ResourceExhaustedError("1 byte free")},
       absl::StatusCode::kResourceExhausted},
  };
  for (const Case& c : cases) {
    backend_.Fail(c.failures);
    EXPECT_EQ(Create("a", Spec("/models/a", "/out/a")).status().code(), c.code) << c.what;
    EXPECT_THAT(controller_->List({})->prep_jobs(), IsEmpty()) << c.what;
    EXPECT_EQ(backend_.calls().clears, 0) << c.what;
  }
}

TEST_F(ControllerTest, TakenDestinationIsRefusedBeforeItIsProbed) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out")).ok());
  AwaitState("a", v1::PrepJob::STATE_RUNNING);
  const int probes = backend_.calls().room_checks;
  const absl::Status refused = Create("b", Spec("/models/b", "/out")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY");
  EXPECT_EQ(backend_.calls().room_checks, probes);
}

TEST_F(ControllerTest, BudgetOfLocalWorkersIsCheckedAtCreate) {
  ControllerOptions options = Options();
  options.worker_memory_budget_bytes = 9;
  StartController(options);
  const absl::Status refused = Create("a", Spec("/models/a", "/out/a")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("minimum"));
}

TEST_F(ControllerTest, PlanAnswersAndQueuesNothing) {
  v1::PlanPrepJobRequest request;
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  Answer<v1::PlanSummary> answer;
  controller_->Plan(request, [] { return false; }, answer.Callback());
  const absl::StatusOr<v1::PlanSummary> plan = answer.Await();
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->rank_count(), 2);
  EXPECT_THAT(controller_->List({})->prep_jobs(), IsEmpty());
  EXPECT_EQ(backend_.calls().room_checks, 0);
}

TEST_F(ControllerTest, WaitingPlansAreBounded) {
  ControllerOptions options = Options();
  options.planner_threads = 1;
  options.max_waiting_plans = 1;
  StartController(options);
  backend_.Hold();
  v1::PlanPrepJobRequest request;
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  Answer<v1::PlanSummary> running;
  Answer<v1::PlanSummary> waiting;
  Answer<v1::PlanSummary> refused;
  const auto stays = [] { return false; };
  controller_->Plan(request, stays, running.Callback());
  backend_.AwaitWaitingPlans(1);
  controller_->Plan(request, stays, waiting.Callback());
  controller_->Plan(request, stays, refused.Callback());
  ASSERT_TRUE(refused.there());
  EXPECT_EQ(refused.Await().status().code(), absl::StatusCode::kResourceExhausted);
  backend_.Release();
  EXPECT_TRUE(running.Await().ok());
  EXPECT_TRUE(waiting.Await().ok());
}

TEST_F(ControllerTest, CallerThatLeftCreatesNothing) {
  backend_.Hold();
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id("a");
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  std::atomic<bool> left{false};
  Answer<v1::PrepJob> answer;
  controller_->Create(request, [&left] { return left.load(); }, answer.Callback());
  backend_.AwaitWaitingPlans(1);
  left = true;
  backend_.Release();
  EXPECT_EQ(answer.Await().status().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(controller_->List({})->prep_jobs(), IsEmpty());
}

// Several targets ---------------------------------------------------------------------------------

TEST_F(ControllerTest, EachTargetHasAManifest) {
  const v1::PrepJobSpec spec = SpecOfSeveral("/models/a", {"/out/x", "/out/y"});
  ASSERT_TRUE(Create("a", spec).ok());
  WorkUntilDone("w", "a");
  const v1::PrepJob job = controller_->Get("a")->job;
  EXPECT_EQ(job.manifest().uri(), "/out/x/manifest.json");
  ASSERT_EQ(job.other_manifests_size(), 1);
  EXPECT_EQ(controller_->GetManifest("a", 0)->uri(), "/out/x/manifest.json");
  EXPECT_EQ(controller_->GetManifest("a", 1)->uri(), "/out/y/manifest.json");
  EXPECT_EQ(controller_->GetManifest("a", 1)->layout_fingerprint(),
            FakeBackend::FingerprintOf(spec, 1));
  EXPECT_EQ(job.progress().rank_tasks_total(), 8);
}

TEST_F(ControllerTest, TargetThatAJobDoesNotHaveIsNamedWithTheirNumber) {
  ASSERT_TRUE(Create("one", Spec("/models/a", "/out/a")).ok());
  ASSERT_TRUE(Create("two", SpecOfSeveral("/models/a", {"/out/x", "/out/y"})).ok());
  for (const auto& [id, target, number] :
       {std::tuple("one", 1, "1 target,"), std::tuple("two", 2, "2 targets,"),
        std::tuple("two", -1, "2 targets,")}) {
    const absl::Status refused = controller_->GetManifest(id, target).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr(number));
  }
}

TEST_F(ControllerTest, JobSucceedsAtOnceOnlyWhenAllItsTargetsAreComplete) {
  const v1::PrepJobSpec spec = SpecOfSeveral("/models/a", {"/out/x", "/out/y"});
  backend_.PutArtefact("/out/y", FakeBackend::FingerprintOf(spec, 1));
  ASSERT_TRUE(Create("a", spec).ok());
  const v1::PrepJob running = AwaitState("a", v1::PrepJob::STATE_RUNNING);
  EXPECT_EQ(running.progress().rank_tasks_resumed(), 4) << "those of the complete target";
  WorkUntilDone("w", "a");
  EXPECT_EQ(backend_.calls().commits, 1);

  const absl::StatusOr<v1::PrepJob> again = Create("b", spec);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(again->manifest().uri(), "/out/x/manifest.json");
  ASSERT_EQ(again->other_manifests_size(), 1);
  EXPECT_EQ(again->other_manifests(0).uri(), "/out/y/manifest.json");
  EXPECT_EQ(backend_.calls().commits, 1);
}

TEST_F(ControllerTest, CommitThatStopsBetweenTargetsGoesOnWithTheRest) {
  backend_.Fail({.commit = absl::UnavailableError("503"), .published = 1});
  ASSERT_TRUE(Create("a", SpecOfSeveral("/models/a", {"/out/x", "/out/y"})).ok());
  v1::SynchronizeRequest request = Request("w");
  absl::StatusOr<v1::SynchronizeResponse> response = Synchronize(request);
  while (response.ok() && response->leases_size() > 0) {
    request.clear_leases();
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(response->leases(0).lease_id());
    report.set_state(v1::LeaseReport::STATE_DONE);
    response = Synchronize(request);
  }
  AwaitJob("a", [](const v1::PrepJob& job) { return job.progress().attempts_failed() > 0; });
  EXPECT_TRUE(backend_.HasArtefact("/out/x"));
  EXPECT_FALSE(backend_.HasArtefact("/out/y"));
  backend_.Fail({});
  clock_.Advance(Options().queue.retry_delay);
  const v1::PrepJob job = AwaitState("a", v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(job.other_manifests_size(), 1);
  EXPECT_TRUE(backend_.HasArtefact("/out/y"));
}

TEST_F(ControllerTest, AnyDestinationThatIsTakenRefusesTheJob) {
  ASSERT_TRUE(Create("a", SpecOfSeveral("/models/a", {"/out/x", "/out/y"})).ok());
  const absl::Status refused =
      Create("b", SpecOfSeveral("/models/b", {"/out/z", "/out/y"})).status();
  EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY");
  EXPECT_EQ(ReasonOf(refused).metadata["destination"], "/out/y");
}

TEST_F(ControllerTest, RecordWhosePlacesAreNotKnownIsRefused) {
  JobRecord record;
  record.sequence = 1;
  record.job.set_prep_job_id("a");
  record.job.set_state(v1::PrepJob::STATE_RUNNING);
  *record.job.mutable_spec() = SpecOfSeveral("/models/a", {"/out/x", "/out/y"});
  ASSERT_EQ(store_.Insert(record), absl::OkStatus());
  const auto start = [this] {
    return Controller::Start(Options(), &clock_, &backend_, &store_, &metrics_,
                             [this] { return absl::StrCat("id-", ++last_id_); })
        .status();
  };
  const absl::Status refused = start();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("prep job a has 2 targets"));
  // One that is over goes nowhere any more.
  record.job.set_state(v1::PrepJob::STATE_CANCELLED);
  ASSERT_EQ(store_.Update(record), absl::OkStatus());
  EXPECT_EQ(start(), absl::OkStatus());
}

// Workers -----------------------------------------------------------------------------------------

TEST_F(ControllerTest, IdleWorkerIsAnsweredWhenWorkAppears) {
  Answer<v1::SynchronizeResponse> answer;
  controller_->Synchronize(Request("w"), absl::Seconds(30), answer.Callback());
  EXPECT_FALSE(answer.there());
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  const absl::StatusOr<v1::SynchronizeResponse> response = answer.Await();
  ASSERT_TRUE(response.ok());
  ASSERT_EQ(response->leases_size(), 1);
  EXPECT_EQ(response->leases(0).prep_job_id(), "a");
}

TEST_F(ControllerTest, HeldCallEndsEmptyAfterItsTime) {
  Answer<v1::SynchronizeResponse> mine;
  Answer<v1::SynchronizeResponse> short_one;
  controller_->Synchronize(Request("w"), absl::Seconds(30), mine.Callback());
  controller_->Synchronize(Request("hasty"), absl::Seconds(3), short_one.Callback());
  clock_.Advance(absl::Seconds(3));
  EXPECT_TRUE(short_one.Await().ok());
  EXPECT_FALSE(mine.there());
  clock_.Advance(absl::Seconds(7));  // the controller's own bound is 10 s
  const absl::StatusOr<v1::SynchronizeResponse> response = mine.Await();
  ASSERT_TRUE(response.ok());
  EXPECT_EQ(response->leases_size(), 0);
}

TEST_F(ControllerTest, CallerWithoutTimeLeftIsAnsweredAtOnce) {
  Answer<v1::SynchronizeResponse> answer;
  EXPECT_EQ(controller_->Synchronize(Request("w"), absl::ZeroDuration(), answer.Callback()), 0U);
  EXPECT_TRUE(answer.there());
}

TEST_F(ControllerTest, HeldCallIsAnsweredExactlyOnce) {
  Answer<v1::SynchronizeResponse> first;
  const uint64_t token =
      controller_->Synchronize(Request("w"), absl::Seconds(30), first.Callback());
  ASSERT_NE(token, 0U);
  controller_->CancelPoll(token);
  EXPECT_EQ(first.Await().status().code(), absl::StatusCode::kCancelled);
  controller_->CancelPoll(token);  // a second answer would abort in Notification

  Answer<v1::SynchronizeResponse> older;
  Answer<v1::SynchronizeResponse> newer;
  controller_->Synchronize(Request("w"), absl::Seconds(30), older.Callback());
  controller_->Synchronize(Request("w"), absl::Seconds(30), newer.Callback());
  EXPECT_EQ(older.Await().status().code(), absl::StatusCode::kAborted);
  controller_->EndStreams();
  EXPECT_EQ(newer.Await().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ControllerTest, CancelledJobIsRemovedWhenItsWorkerHasStopped) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  const absl::StatusOr<v1::SynchronizeResponse> leased = Synchronize(request);
  ASSERT_TRUE(leased.ok());
  ASSERT_EQ(leased->leases_size(), 1);
  const absl::StatusOr<v1::PrepJob> job = Cancel("a");
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(job->cancel_requested());
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(leased->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  EXPECT_EQ(Synchronize(request)->leases_size(), 0);
  report.set_state(v1::LeaseReport::STATE_RETURNED);
  EXPECT_TRUE(Synchronize(request).ok());
  AwaitState("a", v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(backend_.calls().removals, 1);
}

TEST_F(ControllerTest, RecordedPartsAreReadBeforeTheyCountAndOnlyWhileTheJobIsWanted) {
  backend_.Fail({.forget = absl::FailedPreconditionError("not readable")});
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  AwaitState("a", v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(backend_.calls().forgets, 1);
  EXPECT_EQ(backend_.calls().clears, 0) << "nothing was written";
  backend_.Fail({});
  backend_.while_forgetting = [this] { EXPECT_TRUE(Cancel("b").ok()); };
  ASSERT_TRUE(Create("b", Spec("/models/b", "/out/b")).ok());
  AwaitState("b", v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(backend_.calls().forgets, 2);
  EXPECT_EQ(backend_.calls().clears, 0);
}

TEST_F(ControllerTest, SilentWorkersSupervisorIsTold) {
  Answer<std::string> silent;
  const auto tell = silent.Callback();
  controller_->SetSilentWorkerHandler([&](const std::string& id) { tell(id); });
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  clock_.Advance(absl::Seconds(70));
  EXPECT_EQ(*silent.Await(), "w");
  controller_->SetSilentWorkerHandler(nullptr);
}

TEST_F(ControllerTest, FailedCommitFailsTheJobWithItsCause) {
  backend_.Fail({.commit = absl::DataLossError("rank-1.json: 10 bytes, want 12")});
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  absl::StatusOr<v1::SynchronizeResponse> response = Synchronize(request);
  while (response.ok() && response->leases_size() > 0) {
    request.clear_leases();
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(response->leases(0).lease_id());
    report.set_state(v1::LeaseReport::STATE_DONE);
    response = Synchronize(request);
  }
  const v1::PrepJob job = AwaitState("a", v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(job.error().code(), static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_THAT(job.error().message(), HasSubstr("rank-1.json"));
  EXPECT_EQ(controller_->GetManifest("a", 0).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// Lists, observers ----------------------------------------------------------------------------

TEST_F(ControllerTest, ListChecksItsArguments) {
  v1::ListPrepJobsRequest request;
  request.set_page_size(1001);
  EXPECT_EQ(controller_->List(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.set_page_size(-1);
  EXPECT_EQ(controller_->List(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.set_page_size(1);
  request.add_states(v1::PrepJob::STATE_UNSPECIFIED);
  EXPECT_EQ(controller_->List(request).status().code(), absl::StatusCode::kInvalidArgument);
  request.clear_states();
  request.set_page_token("mine");
  EXPECT_EQ(controller_->List(request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ControllerTest, ObserversAreBoundedAndForgotten) {
  ControllerOptions options = Options();
  options.max_observers = 1;
  StartController(options);
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  const auto one = std::make_shared<ChangeCounter>();
  const auto two = std::make_shared<ChangeCounter>();
  EXPECT_EQ(controller_->Observe("none", one).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(controller_->Observe("a", one), absl::OkStatus());
  EXPECT_EQ(controller_->Observe("a", two).code(), absl::StatusCode::kResourceExhausted);
  controller_->Unobserve("a", one.get());
  EXPECT_EQ(controller_->Observe("a", two), absl::OkStatus());
}

// Restart and drain -------------------------------------------------------------------------------

TEST_F(ControllerTest, RestartGoesOnWithPendingAndRunningJobs) {
  ASSERT_TRUE(Create("done", Spec("/models/done", "/out/done")).ok());
  WorkUntilDone("w", "done");
  ASSERT_TRUE(Create("running", Spec("/models/running", "/out/running")).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  AwaitState("running", v1::PrepJob::STATE_RUNNING);

  StartController(Options());
  EXPECT_EQ(controller_->Get("done")->job.state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(controller_->Get("done")->job.manifest().uri(), "/out/done/manifest.json");
  EXPECT_EQ(controller_->Get("running")->job.state(), v1::PrepJob::STATE_PENDING);
  // The same request gives the same job.
  EXPECT_TRUE(Create("running", Spec("/models/running", "/out/running")).ok());
  EXPECT_THAT(controller_->List({})->prep_jobs(), SizeIs(2));
  // Leases of the first controller may be open until their fence has passed.
  clock_.Advance(absl::Seconds(70));
  WorkUntilDone("w2", "running");
}

// Of a store on a full disk, say.
class ReadOnlyStore : public MemoryJobStore {
 public:
  absl::Status Update(const JobRecord& /*record*/) override {
    return absl::FailedPreconditionError("the job store is read-only");
  }
};

TEST_F(ControllerTest, JobThatCannotBeRecordedAsRunningIsNotLeased) {
  ReadOnlyStore store;
  controller_.reset();
  controller_ = *Controller::Start(Options(), &clock_, &backend_, &store, &metrics_,
                                   [this] { return absl::StrCat("id-", ++last_id_); });
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  const v1::PrepJob job = AwaitState("a", v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(job.error().message(), HasSubstr("read-only"));
  Answer<v1::SynchronizeResponse> answer;
  controller_->Synchronize(Request("w"), absl::ZeroDuration(), answer.Callback());
  EXPECT_EQ(answer.Await()->leases_size(), 0);
  controller_.reset();
}

TEST_F(ControllerTest, DrainAcceptsNothingAndWaitsForLeases) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  const absl::StatusOr<v1::SynchronizeResponse> leased = Synchronize(request);
  ASSERT_EQ(leased->leases_size(), 1);
  controller_->StopLeasing();
  EXPECT_EQ(Create("b", Spec("/models/b", "/out/b")).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_FALSE(controller_->AwaitQuiet(absl::Now()));
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(leased->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  EXPECT_EQ(Synchronize(request)->leases_size(), 1);
  controller_->WithdrawLeases();
  EXPECT_EQ(Synchronize(request)->leases_size(), 0);
  report.set_state(v1::LeaseReport::STATE_RETURNED);
  EXPECT_TRUE(Synchronize(request).ok());
  EXPECT_TRUE(controller_->AwaitQuiet(absl::Now() + absl::Seconds(20)));
  controller_->EndStreams();
  EXPECT_EQ(Synchronize(Request("w")).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(controller_->Observe("a", std::make_shared<ChangeCounter>()).code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(ControllerTest, JobsAreCounted) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  WorkUntilDone("w", "a");
  backend_.Fail({.plan = absl::NotFoundError("none")});
  EXPECT_FALSE(Create("b", Spec("/models/b", "/out/b")).ok());
  controller_.reset();
  const std::string text = prometheus::TextSerializer().Serialize(registry_->Collect());
  EXPECT_THAT(text, HasSubstr("shardprep_jobs_completed_total{result=\"succeeded\"} 1"));
  EXPECT_THAT(text, HasSubstr("shardprep_leases_granted_total 2"));
  EXPECT_THAT(text, HasSubstr("shardprep_plan_failures_total{code=\"NOT_FOUND\"} 1"));
}

}  // namespace
}  // namespace shardprep
