// Controllers that end at any moment and the ones that go on from what they recorded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/sqlite_job_store.h"
#include "tests/service/controller_fixture.h"
#include "tests/support/temp_dir.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kFence = absl::Seconds(70);

// A store in front of the one that lasts. After Kill() nothing reaches it any more, as after the
// end of the process.
class KillableStore : public JobStore {
 public:
  explicit KillableStore(JobStore* lasting) : lasting_(lasting) {}

  void Kill() {
    absl::MutexLock lock(&mu_);
    killed_ = true;
  }
  // Within the next Insert(), once it is durable.
  void KillAfterInsert() {
    absl::MutexLock lock(&mu_);
    kill_after_insert_ = true;
  }
  // Later inserts and updates fail with it; OK ends that.
  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    failure_ = status;
  }
  void AwaitFailedUpdates(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return failed_updates_ >= count; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(20)));
  }

  absl::Status Insert(const JobRecord& record) override {
    absl::MutexLock lock(&mu_);
    if (killed_) return absl::UnavailableError("killed");
    if (!failure_.ok()) return failure_;
    absl::Status status = lasting_->Insert(record);
    killed_ = kill_after_insert_;
    return status;
  }
  absl::Status Update(const JobRecord& record) override {
    absl::MutexLock lock(&mu_);
    if (killed_) return absl::UnavailableError("killed");
    if (!failure_.ok()) {
      ++failed_updates_;
      return failure_;
    }
    return lasting_->Update(record);
  }
  absl::Status Remove(const std::string& job_id) override {
    absl::MutexLock lock(&mu_);
    return killed_ ? absl::UnavailableError("killed") : lasting_->Remove(job_id);
  }
  absl::StatusOr<std::vector<JobRecord>> LoadAll() override { return lasting_->LoadAll(); }

 private:
  JobStore* const lasting_;
  absl::Mutex mu_;
  bool killed_ ABSL_GUARDED_BY(mu_) = false;
  bool kill_after_insert_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  int failed_updates_ ABSL_GUARDED_BY(mu_) = 0;
};

class RestartTest : public ControllerFixture, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { StartController(Options()); }

  void TearDown() override {
    if (killable_ != nullptr) killable_->Kill();
    controller_.reset();
  }

  JobStore* Store() override {
    if (lasting_ == nullptr) OpenLasting();
    killable_ = std::make_unique<KillableStore>(lasting_.get());
    killable_->Fail(store_failure_);
    return killable_.get();
  }

  // The controller is gone from one moment to the next, and another one starts on what it left.
  void KillAndRestart(const ControllerOptions& options = Options()) {
    killable_->Kill();
    controller_.reset();
    if (std::string(GetParam()) == "Sqlite") OpenLasting();
    StartController(options);
  }

  // The controller ends in order, and another one starts on what it recorded.
  void Restart(const ControllerOptions& options = Options()) {
    controller_.reset();
    if (std::string(GetParam()) == "Sqlite") OpenLasting();
    StartController(options);
    clock_.Advance(absl::Milliseconds(1));
    controller_->Tick();
  }

  // All records, by id, as they are now.
  std::vector<std::string> Recorded() {
    std::vector<std::string> ids;
    const absl::StatusOr<std::vector<JobRecord>> records = lasting_->LoadAll();
    EXPECT_TRUE(records.ok()) << records.status();
    for (const JobRecord& record : *records) ids.push_back(record.job.prep_job_id());
    return ids;
  }

  std::vector<std::string> Listed() {
    std::vector<std::string> ids;
    const absl::StatusOr<v1::ListPrepJobsResponse> page = controller_->List({});
    for (const v1::PrepJob& job : page->prep_jobs()) ids.push_back(job.prep_job_id());
    return ids;
  }

  v1::PrepJob::State StateOf(const std::string& id) { return controller_->Get(id)->job.state(); }

  // What a worker without time to wait is given now.
  absl::StatusOr<v1::SynchronizeResponse> Poll(const v1::SynchronizeRequest& request) {
    auto answer = std::make_shared<Answer<v1::SynchronizeResponse>>();
    controller_->Synchronize(request, absl::ZeroDuration(),
                             [answer](absl::StatusOr<v1::SynchronizeResponse> response) {
                               answer->Callback()(std::move(response));
                             });
    return answer->Await();
  }

  TempDir dir_;
  std::unique_ptr<JobStore> lasting_;
  std::unique_ptr<KillableStore> killable_;
  absl::Status store_failure_;  // of the next controller's store, from the start

 private:
  void OpenLasting() {
    lasting_.reset();
    if (std::string(GetParam()) == "Memory") {
      lasting_ = std::make_unique<MemoryJobStore>();
      return;
    }
    absl::StatusOr<std::unique_ptr<JobStore>> store =
        OpenSqliteJobStore({.directory = dir_ / "state", .file_system_type = nullptr});
    ASSERT_TRUE(store.ok()) << store.status();
    lasting_ = *std::move(store);
  }
};

INSTANTIATE_TEST_SUITE_P(Stores, RestartTest, testing::Values("Memory", "Sqlite"),
                         [](const auto& param_info) { return std::string(param_info.param); });

TEST_P(RestartTest, EveryJobIsKnownAfterAKillWhateverItsState) {
  ASSERT_TRUE(Create("done", Spec("/models/done", "/out/done")).ok());
  WorkUntilDone("w", "done");
  ASSERT_TRUE(Create("running", Spec("/models/running", "/out/running")).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  AwaitState("running", v1::PrepJob::STATE_RUNNING);
  KillAndRestart();
  ASSERT_TRUE(Create("waiting", Spec("/models/waiting", "/out/waiting")).ok());
  KillAndRestart();

  EXPECT_THAT(Listed(), ElementsAre("waiting", "running", "done"));
  EXPECT_FALSE(IsTerminal(StateOf("running"))) << "leases of the first may be open";
  clock_.Advance(kFence);
  // The end of a job is recorded when it has ended; a kill before that finds the artefact there.
  AwaitState("done", v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(controller_->GetManifest("done", 0)->uri(), "/out/done/manifest.json");
  AwaitState("running", v1::PrepJob::STATE_RUNNING);
  AwaitState("waiting", v1::PrepJob::STATE_RUNNING);
  WorkUntilDone("w2", "waiting");
  AwaitState("running", v1::PrepJob::STATE_SUCCEEDED);
}

TEST_P(RestartTest, JobWhoseCreationWasNotAnsweredRunsAndTheRetryFindsIt) {
  killable_->KillAfterInsert();
  (void)Create("a", Spec("/models/a", "/out/a"));  // nobody hears this
  KillAndRestart();
  EXPECT_THAT(Listed(), ElementsAre("a"));
  EXPECT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  EXPECT_THAT(Recorded(), ElementsAre("a"));
  WorkUntilDone("w", "a");
}

TEST_P(RestartTest, CreateIsIdempotentAcrossRestartsForFinishedJobsToo) {
  ASSERT_TRUE(Create("done", Spec("/models/done", "/out/done")).ok());
  WorkUntilDone("w", "done");
  ASSERT_TRUE(Create("open", Spec("/models/open", "/out/open")).ok());
  KillAndRestart();
  clock_.Advance(kFence);
  AwaitState("done", v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(Create("done", Spec("/models/done", "/out/done"))->state(),
            v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_TRUE(Create("open", Spec("/models/open", "/out/open")).ok());
  for (const char* id : {"done", "open"}) {
    EXPECT_EQ(ReasonOf(Create(id, Spec("/models/other", "/out/other")).status()).reason,
              "JOB_ID_TAKEN");
  }
}

TEST_P(RestartTest, FenceIsThatOfTheControllerThatGaveTheLeases) {
  ControllerOptions long_leases = Options();
  long_leases.queue.lease_duration = absl::Minutes(10);
  StartController(long_leases);
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  KillAndRestart();
  const int plans = backend_.calls().plans;
  clock_.Advance(kFence);
  controller_->Tick();
  EXPECT_EQ(backend_.calls().plans, plans);
  // And once more: the second controller gave none itself.
  KillAndRestart();
  clock_.Advance(absl::Minutes(10));
  controller_->Tick();
  EXPECT_EQ(Poll(Request("w2"))->leases_size(), 0);
  EXPECT_EQ(backend_.calls().plans, plans);
  clock_.Advance(absl::Seconds(10));
  WorkUntilDone("w2", "a");
}

TEST_P(RestartTest, EveryPlaceOfAnUnfinishedJobIsKnownAfterAKill) {
  const v1::PrepJobSpec spec = SpecOfSeveral("/models/a", {"/out/x", "/out/y"});
  ASSERT_TRUE(Create("a", spec).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  AwaitState("a", v1::PrepJob::STATE_RUNNING);
  for (int kill = 0; kill < 2; ++kill) {  // the second reads what the first restart recorded
    KillAndRestart();
    const absl::Status refused = Create("b", Spec("/models/b", "/out/y")).status();
    EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY") << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(FakeBackend::FingerprintOf(spec, 1)));
    // The same artefact waits behind it.
    v1::PrepJobSpec same = Spec("/models/a", "/out/y");
    *same.mutable_targets(0) = spec.targets(1);
    ASSERT_TRUE(Create("same", same).ok());
    EXPECT_EQ(StateOf("same"), v1::PrepJob::STATE_PENDING);
  }
  clock_.Advance(kFence);
  WorkUntilDone("w2", "a");
  EXPECT_EQ(controller_->GetManifest("a", 1)->uri(), "/out/y/manifest.json");
  AwaitState("same", v1::PrepJob::STATE_SUCCEEDED);
  KillAndRestart();
  EXPECT_EQ(controller_->GetManifest("a", 1)->uri(), "/out/y/manifest.json");
}

TEST_P(RestartTest, AJobWhoseLeasesADrainHasClosedGoesOnAtOnce) {
  ASSERT_TRUE(Create("open", Spec("/models/b", "/out/b")).ok());
  for (const char* worker : {"u", "v"}) {  // one for each of its regions
    ASSERT_EQ(Synchronize(Request(worker))->leases_size(), 1);
  }
  ASSERT_TRUE(Create("closed", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  const absl::StatusOr<v1::SynchronizeResponse> leased = Synchronize(request);
  ASSERT_EQ(leased->leases_size(), 1);
  controller_->StopLeasing();
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(leased->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RETURNED);
  ASSERT_EQ(Poll(request)->leases_size(), 0);
  Restart();

  WorkUntilDone("w2", "closed");
  EXPECT_FALSE(IsTerminal(StateOf("open"))) << "its lease may be open";
  EXPECT_EQ(Poll(Request("w2"))->leases_size(), 0);
  clock_.Advance(kFence);
  WorkUntilDone("w2", "open");
}

TEST_P(RestartTest, AJobThatADrainHasStoppedIsRemovedWhenItIsCancelledLater) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  const absl::StatusOr<v1::SynchronizeResponse> leased = Synchronize(request);
  ASSERT_EQ(leased->leases_size(), 1);
  controller_->StopLeasing();
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(leased->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RETURNED);
  ASSERT_EQ(Poll(request)->leases_size(), 0);
  const int removals = backend_.calls().removals;
  Restart();
  ASSERT_TRUE(Cancel("a").ok());
  AwaitState("a", v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(backend_.calls().removals, removals + 1);
}

TEST_P(RestartTest, WorkersOfTheKilledControllerAreToldToStop) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  const absl::StatusOr<v1::SynchronizeResponse> leased = Synchronize(request);
  ASSERT_EQ(leased->leases_size(), 1);
  KillAndRestart();
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(leased->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  EXPECT_EQ(Poll(request)->leases_size(), 0);
  // What it says at last is late as well.
  report.set_state(v1::LeaseReport::STATE_DONE);
  EXPECT_EQ(Poll(request)->leases_size(), 0);
  EXPECT_EQ(controller_->Get("a")->job.progress().rank_tasks_done(), 0);
}

TEST_P(RestartTest, CancelHoldsAcrossAKillAndRemovesBehindTheFence) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  ASSERT_EQ(Synchronize(Request("w"))->leases_size(), 1);
  ASSERT_TRUE(Cancel("a").ok());
  KillAndRestart();
  EXPECT_TRUE(controller_->Get("a")->job.cancel_requested());
  EXPECT_EQ(backend_.calls().removals, 0);
  // Another kill, when the record no longer says RUNNING.
  KillAndRestart();
  controller_->Tick();
  EXPECT_EQ(backend_.calls().removals, 0);
  clock_.Advance(kFence);
  AwaitState("a", v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(backend_.calls().removals, 1);
}

TEST_P(RestartTest, TimeoutHoldsAcrossAKill) {
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id("a");
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  request.mutable_timeout()->set_seconds(100);
  ASSERT_TRUE(Create(request).ok());
  // It is no part of the spec.
  request.mutable_timeout()->set_seconds(5);
  EXPECT_EQ(Create(request)->timeout().seconds(), 100);
  clock_.Advance(absl::Seconds(60));
  KillAndRestart();
  clock_.Advance(absl::Seconds(40));
  AwaitJob("a", [](const v1::PrepJob& job) { return job.has_error(); });
  clock_.Advance(kFence);
  const v1::PrepJob job = AwaitState("a", v1::PrepJob::STATE_FAILED);
  EXPECT_EQ(job.error().code(), static_cast<int>(absl::StatusCode::kDeadlineExceeded));
}

TEST_P(RestartTest, ForgottenJobsAreForgottenOnDiskAndTheirIdsAreFree) {
  ControllerOptions options = Options();
  options.queue.max_finished_jobs = 2;
  StartController(options);
  for (const char* id : {"a", "b", "c"}) {
    ASSERT_TRUE(Create(id, Spec(absl::StrCat("/models/", id), absl::StrCat("/out/", id))).ok());
    WorkUntilDone("w", id);
  }
  EXPECT_EQ(controller_->Get("a").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Create("a", Spec("/models/other", "/out/other")).ok());
  controller_.reset();  // writes what is due
  EXPECT_THAT(Recorded(), ElementsAre("b", "c", "a"));
  KillAndRestart(options);
  EXPECT_THAT(Listed(), ElementsAre("a", "c", "b"));
  options.queue.max_finished_jobs = 1;
  clock_.Advance(kFence);
  WorkUntilDone("w", "a");
  KillAndRestart(options);
  clock_.Advance(kFence);
  AwaitState("a", v1::PrepJob::STATE_SUCCEEDED);
  // A smaller bound holds from the start on.
  controller_.reset();
  EXPECT_THAT(Recorded(), ElementsAre("a"));
}

TEST_P(RestartTest, PageTokensOutliveTheController) {
  for (const char* id : {"a", "b", "c"}) {
    ASSERT_TRUE(Create(id, Spec(absl::StrCat("/models/", id), absl::StrCat("/out/", id))).ok());
  }
  v1::ListPrepJobsRequest request;
  request.set_page_size(1);
  const absl::StatusOr<v1::ListPrepJobsResponse> first = controller_->List(request);
  EXPECT_EQ(first->prep_jobs(0).prep_job_id(), "c");
  ASSERT_TRUE(Cancel("a").ok());
  KillAndRestart();
  request.set_page_token(first->next_page_token());
  EXPECT_EQ(controller_->List(request)->prep_jobs(0).prep_job_id(), "b");
}

TEST_P(RestartTest, PlaceThatWasFilledMeanwhileFailsTheJobAtOnce) {
  killable_->KillAfterInsert();
  (void)Create("a", Spec("/models/a", "/out/a"));
  backend_.Fail(
      {.room = WithReason(absl::ResourceExhaustedError("/out/a: 1 byte is free"), "NO_SPACE")});
  KillAndRestart();
  const v1::PrepJob job = AwaitState("a", v1::PrepJob::STATE_FAILED);
  EXPECT_THAT(job.error().message(), HasSubstr("1 byte is free"));
  EXPECT_EQ(job.progress().attempts_failed(), 0);
  EXPECT_EQ(backend_.calls().removals, 0);
}

// A full disk under the state directory --------------------------------------------------------

TEST_P(RestartTest, JobThatCannotBeMadeDurableDoesNotExist) {
  killable_->Fail(absl::ResourceExhaustedError("no space"));
  EXPECT_EQ(Create("a", Spec("/models/a", "/out/a")).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(controller_->Get("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Recorded(), IsEmpty());
  killable_->Fail(absl::OkStatus());
  EXPECT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  WorkUntilDone("w", "a");
}

TEST_P(RestartTest, RunningJobsGoOnAndAreRecordedWhenThereIsSpaceAgain) {
  ASSERT_TRUE(Create("a", Spec("/models/a", "/out/a")).ok());
  v1::SynchronizeRequest request = Request("w");
  absl::StatusOr<v1::SynchronizeResponse> response = Synchronize(request);
  ASSERT_EQ(response->leases_size(), 1);
  killable_->Fail(absl::ResourceExhaustedError("no space"));
  while (response.ok() && response->leases_size() > 0) {
    request.clear_leases();
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(response->leases(0).lease_id());
    report.set_state(v1::LeaseReport::STATE_DONE);
    response = Poll(request);
  }
  AwaitState("a", v1::PrepJob::STATE_SUCCEEDED);
  killable_->AwaitFailedUpdates(1);
  EXPECT_EQ(lasting_->LoadAll()->front().job.state(), v1::PrepJob::STATE_RUNNING);
  killable_->Fail(absl::OkStatus());
  clock_.Advance(absl::Seconds(5));
  controller_->Tick();
  controller_.reset();
  EXPECT_EQ(lasting_->LoadAll()->front().job.state(), v1::PrepJob::STATE_SUCCEEDED);
}

TEST_P(RestartTest, JobsWaitToStartUntilThatCanBeRecorded) {
  killable_->KillAfterInsert();
  (void)Create("a", Spec("/models/a", "/out/a"));
  store_failure_ = absl::UnavailableError("input/output error");
  KillAndRestart();
  for (int i = 1; i <= 5; ++i) {
    killable_->AwaitFailedUpdates(i);
    // And that was taken note of: each time the job has changed.
    AwaitJob("a", [&](const v1::PrepJob&) { return controller_->Get("a")->version >= 2 + i; });
    EXPECT_EQ(Poll(Request("w"))->leases_size(), 0) << "not on record, so not leased";
    clock_.Advance(absl::Seconds(8));
  }
  EXPECT_EQ(StateOf("a"), v1::PrepJob::STATE_PENDING);
  killable_->Fail(absl::OkStatus());
  clock_.Advance(absl::Seconds(8));
  AwaitState("a", v1::PrepJob::STATE_RUNNING);
  WorkUntilDone("w", "a");
}

}  // namespace
}  // namespace shardprep
