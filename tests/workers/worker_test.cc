#include "workers/worker.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "kernels/shuffle.h"
#include "tests/support/meeting_shuffler.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/journal.h"
#include "workers/open_store.h"
#include "workers/target_set.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// A controller that holds what the test wants the worker to hold.
class FakeController : public ControllerLink {
 public:
  absl::StatusOr<v1::SynchronizeResponse> Synchronize(
      const v1::SynchronizeRequest& request) override {
    last_request = request;
    if (!answer.ok()) return answer;
    return desired;
  }
  void Interrupt() override {
    absl::MutexLock lock(&mu_);
    ++interruptions_;
  }
  // Until the worker has interrupted this often: each lease that ends does so once.
  void AwaitInterruptions(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [&]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return interruptions_ >= count; };
    mu_.Await(absl::Condition(&enough));
  }

  v1::SynchronizeRequest last_request;
  v1::SynchronizeResponse desired;
  absl::Status answer;

 private:
  absl::Mutex mu_;
  int interruptions_ ABSL_GUARDED_BY(mu_) = 0;
};

// Waits in its first shuffle until the test lets it go on.
class HeldShuffler : public Shuffler {
 public:
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t begin,
                       int64_t end, uint8_t* out) override {
    if (!begun.HasBeenNotified()) begun.Notify();
    go_on.WaitForNotification();
    return host_->Shuffle(job, views, begin, end, out);
  }
  std::string name() const override { return host_->name(); }

  absl::Notification begun, go_on;

 private:
  std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
};

// A device that is lost in its first shuffle.
class LostShuffler : public Shuffler {
 public:
  absl::Status Shuffle(const ShuffleJob& /*job*/, absl::Span<const RowsView> /*views*/,
                       int64_t /*begin*/, int64_t /*end*/, uint8_t* /*out*/) override {
    lost_ = true;
    return LostError();
  }
  std::string name() const override { return "hip:0/gfx942"; }
  absl::Status Health() const override { return lost_ ? LostError() : absl::OkStatus(); }
  static absl::Status LostError() {
    return absl::UnavailableError("hip:0/gfx942: wait for device: fell off the bus");
  }

 private:
  std::atomic<bool> lost_{false};
};

// Notes where outputs lie that the worker asks for.
class NotingShuffler : public Shuffler {
 public:
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t begin,
                       int64_t end, uint8_t* out) override {
    const bool inside = out >= memory.data() &&
                        out + (end - begin) * OutputCols(job) <= memory.data() + memory.size();
    ++(inside ? outputs_inside : outputs_outside);
    return host_->Shuffle(job, views, begin, end, out);
  }
  absl::Status UseMemory(absl::Span<uint8_t> named) override {
    memory = named;
    return refused;
  }
  std::string name() const override { return host_->name(); }

  absl::Span<uint8_t> memory;
  absl::Status refused;
  std::atomic<int> outputs_inside{0}, outputs_outside{0};

 private:
  std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
};

class WorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), {.layers = 1, .mtp_layers = 0}).ok());
    v1::PrepJobSpec spec;
    spec.set_source_uri(source_.path());
    v1::Target& target = *spec.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(2);
    target.set_destination_uri(destination_.path());
    auto plan = PlanJob(spec, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *plan;
  }

  std::unique_ptr<Worker> MakeWorker(Shuffler* shuffler) {
    return std::make_unique<Worker>(WorkerOptions{.worker_id = "w", .threads = 1}, &controller_,
                                    shuffler, &clock_, nullptr);
  }

  v1::Lease Lease(const std::string& id, absl::Duration duration) const {
    v1::Lease lease;
    lease.set_lease_id(id);
    lease.set_prep_job_id("job");
    *lease.mutable_spec() = plan_->spec;
    lease.set_layout_fingerprint(plan_->fingerprint);
    lease.set_source_token(plan_->source_token);
    lease.set_region(0);
    lease.add_rank_tasks()->set_rank(0);
    lease.add_rank_tasks()->set_rank(1);
    lease.set_attempt(1);
    const int64_t nanos = absl::ToInt64Nanoseconds(duration);
    lease.mutable_duration()->set_seconds(nanos / 1'000'000'000);
    lease.mutable_duration()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
    return lease;
  }

  // What the worker reports of its only lease in the next call.
  v1::LeaseReport ReportOf(Worker& worker) {
    EXPECT_TRUE(worker.RunOnce().ok());
    EXPECT_EQ(controller_.last_request.leases_size(), 1);
    return controller_.last_request.leases_size() == 1 ? controller_.last_request.leases(0)
                                                       : v1::LeaseReport();
  }

  std::vector<std::string> DestinationKeys() const {
    std::vector<std::string> keys;
    auto store = OpenStore(destination_.path(), {.create = true});
    const auto entries = (*store)->List("");
    for (const ObjectEntry& entry : entries.value()) keys.push_back(entry.key);
    return keys;
  }

  // A lease that is refused before it writes.
  void ExpectFailure(const v1::Lease& lease, absl::StatusCode code, const std::string& what) {
    const auto shuffler = MakeHostShuffler();
    const auto worker = MakeWorker(shuffler.get());
    *controller_.desired.add_leases() = lease;
    ASSERT_TRUE(worker->RunOnce().ok());
    controller_.AwaitInterruptions(1);
    const v1::LeaseReport report = ReportOf(*worker);
    EXPECT_EQ(report.state(), v1::LeaseReport::STATE_FAILED);
    EXPECT_EQ(report.error().code(), static_cast<int>(code)) << report.error().message();
    EXPECT_THAT(report.error().message(), HasSubstr(what));
    EXPECT_THAT(DestinationKeys(), IsEmpty());
  }

  TempDir source_;
  TempDir destination_;
  FakeClock clock_;
  FakeController controller_;
  std::shared_ptr<const JobPlan> plan_;
};

TEST_F(WorkerTest, PreparesWhatIsLeasedAndReportsItUntilTheControllerHeard) {
  const auto shuffler = MakeHostShuffler();
  const auto worker = MakeWorker(shuffler.get());
  ASSERT_TRUE(worker->RunOnce().ok());
  EXPECT_EQ(controller_.last_request.leases_size(), 0);
  *controller_.desired.add_leases() = Lease("a", absl::Seconds(60));
  ASSERT_TRUE(worker->RunOnce().ok());
  controller_.AwaitInterruptions(1);

  controller_.answer = absl::UnavailableError("lost");
  EXPECT_FALSE(worker->RunOnce().ok());
  EXPECT_EQ(controller_.last_request.leases(0).state(), v1::LeaseReport::STATE_DONE);
  controller_.answer = absl::OkStatus();
  const v1::LeaseReport report = ReportOf(*worker);
  EXPECT_EQ(report.state(), v1::LeaseReport::STATE_DONE) << "said again, since it was lost";
  EXPECT_THAT(report.completed_ranks(), UnorderedElementsAre(0, 1));
  EXPECT_EQ(report.bytes_read(), plan_->slices.regions()[0].source_bytes);
  EXPECT_GT(report.bytes_written(), 2 * plan_->slices.regions()[0].bytes_per_rank);
  EXPECT_TRUE(IsRecorded(*plan_, {0, 0, &plan_->slices.regions()[0].parts[0]},
                         **OpenStore(destination_.path(), {}))
                  .value());

  controller_.desired.clear_leases();
  ASSERT_TRUE(worker->RunOnce().ok());
  EXPECT_EQ(controller_.last_request.leases_size(), 0);
}

TEST_F(WorkerTest, OutputsLieInTheMemoryThatTheShufflerWasToldOf) {
  int leases = 0;
  for (const absl::Status& refused :
       {absl::OkStatus(), absl::ResourceExhaustedError("cannot be pinned")}) {
    NotingShuffler shuffler;
    shuffler.refused = refused;
    auto worker = MakeWorker(&shuffler);
    controller_.desired.Clear();
    *controller_.desired.add_leases() = Lease("a", absl::Seconds(60));
    ASSERT_TRUE(worker->RunOnce().ok());
    controller_.AwaitInterruptions(++leases);
    EXPECT_EQ(ReportOf(*worker).state(), v1::LeaseReport::STATE_DONE);
    EXPECT_GT(shuffler.outputs_inside, 0);
    EXPECT_EQ(shuffler.outputs_outside, 0);
    EXPECT_FALSE(shuffler.memory.empty());
    worker.reset();
    EXPECT_TRUE(shuffler.memory.empty()) << "it is freed";
    std::filesystem::remove_all(destination_.path());  // or there is nothing left to do
  }
}

TEST_F(WorkerTest, ALeaseOfSeveralTargetsReadsTheSourceOnceWhereMemoryAllows) {
  TempDir other;
  v1::PrepJobSpec spec = plan_->spec;
  v1::Target& second = *spec.add_targets();
  second.mutable_parallel_layout()->set_tensor_parallel_size(4);
  second.set_destination_uri(other.path());
  const auto targets = PlanTargets(spec, {});
  ASSERT_TRUE(targets.ok()) << targets.status();
  v1::Lease lease = Lease("a", absl::Seconds(60));
  *lease.mutable_spec() = (*targets)->spec();
  lease.set_layout_fingerprint((*targets)->fingerprint());
  for (int rank = 2; rank < 6; ++rank) lease.add_rank_tasks()->set_rank(rank);
  *controller_.desired.add_leases() = lease;

  const int64_t together = (*targets)->joint_memory().Total(6, 1);
  int leases = 0;
  for (const auto& [budget, times_read] : {std::pair(together, 1), std::pair(together - 1, 2)}) {
    const auto shuffler = MakeHostShuffler();
    Worker worker({.worker_id = "w", .memory_budget_bytes = budget, .threads = 1}, &controller_,
                  shuffler.get(), &clock_, nullptr);
    ASSERT_TRUE(worker.RunOnce().ok());
    controller_.AwaitInterruptions(++leases);
    const v1::LeaseReport report = ReportOf(worker);
    ASSERT_EQ(report.state(), v1::LeaseReport::STATE_DONE) << report.error().message();
    EXPECT_THAT(report.completed_ranks(), UnorderedElementsAre(0, 1, 2, 3, 4, 5));
    EXPECT_EQ(report.bytes_read(), times_read * plan_->slices.regions()[0].source_bytes);
    for (int t = 0; t < 2; ++t) {
      const JobPlan& plan = (*targets)->plan(t);
      const auto store = OpenStore(plan.target().destination_uri(), {.create = true});
      for (int32_t rank = 0; rank < plan.slices.rank_count(); ++rank) {
        const PartPlan& part = plan.slices.regions()[0].parts[0];
        EXPECT_TRUE(IsRecorded(plan, {0, rank, &part}, **store).value()) << t << ", " << rank;
      }
      std::filesystem::remove_all(plan.target().destination_uri());  // for the next round
    }
  }
}

TEST_F(WorkerTest, GroupsOfRanksKeepAllThreadsBusy) {
  v1::PrepJobSpec spec = plan_->spec;
  v1::ParallelLayout& parallel = *spec.mutable_targets(0)->mutable_parallel_layout();
  parallel.set_tensor_parallel_size(4);
  parallel.set_expert_parallel_size(2);
  plan_ = PlanJob(spec, {}).value();
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.add_rank_tasks()->set_rank(2);
  lease.add_rank_tasks()->set_rank(3);
  *controller_.desired.add_leases() = lease;
  MeetingShuffler shuffler(4);
  Worker worker({.worker_id = "w", .threads = 4}, &controller_, &shuffler, &clock_, nullptr);
  ASSERT_TRUE(worker.RunOnce().ok());
  controller_.AwaitInterruptions(1);
  const v1::LeaseReport report = ReportOf(worker);
  EXPECT_EQ(report.state(), v1::LeaseReport::STATE_DONE) << report.error().message();
  EXPECT_THAT(report.completed_ranks(), UnorderedElementsAre(0, 1, 2, 3));
}

TEST_F(WorkerTest, ALeaseThatIsNamedOnIsRenewed) {
  HeldShuffler shuffler;
  const auto worker = MakeWorker(&shuffler);
  *controller_.desired.add_leases() = Lease("a", absl::Seconds(11));
  ASSERT_TRUE(worker->RunOnce().ok());
  shuffler.begun.WaitForNotification();
  clock_.Advance(absl::Seconds(5));  // past the first fence
  ASSERT_TRUE(worker->RunOnce().ok());
  shuffler.go_on.Notify();
  controller_.AwaitInterruptions(1);
  EXPECT_EQ(ReportOf(*worker).state(), v1::LeaseReport::STATE_DONE);
}

TEST_F(WorkerTest, NothingIsPublishedFromTenSecondsBeforeTheEndOfALease) {
  for (const absl::Duration late : {absl::ZeroDuration(), absl::Nanoseconds(1)}) {
    SCOPED_TRACE(late);
    controller_.desired.clear_leases();
    HeldShuffler shuffler;
    const auto worker = MakeWorker(&shuffler);
    const std::vector<std::string> before = DestinationKeys();
    *controller_.desired.add_leases() = Lease("a", absl::Seconds(11) + late);
    ASSERT_TRUE(worker->RunOnce().ok());
    shuffler.begun.WaitForNotification();
    clock_.Advance(absl::Seconds(1));
    shuffler.go_on.Notify();
    controller_.AwaitInterruptions(late == absl::ZeroDuration() ? 1 : 2);
    const v1::LeaseReport report = ReportOf(*worker);
    if (late == absl::ZeroDuration()) {
      EXPECT_EQ(report.state(), v1::LeaseReport::STATE_FAILED);
      EXPECT_EQ(report.error().code(), static_cast<int>(absl::StatusCode::kAborted));
      EXPECT_EQ(DestinationKeys(), before);
    } else {
      EXPECT_EQ(report.state(), v1::LeaseReport::STATE_DONE);
    }
  }
}

TEST_F(WorkerTest, ALeaseThatIsNoLongerNamedIsStoppedAndGivenBack) {
  HeldShuffler shuffler;
  const auto worker = MakeWorker(&shuffler);
  *controller_.desired.add_leases() = Lease("a", absl::Seconds(60));
  ASSERT_TRUE(worker->RunOnce().ok());
  shuffler.begun.WaitForNotification();
  controller_.desired.clear_leases();
  ASSERT_TRUE(worker->RunOnce().ok());
  shuffler.go_on.Notify();
  controller_.AwaitInterruptions(1);
  EXPECT_EQ(ReportOf(*worker).state(), v1::LeaseReport::STATE_RETURNED);
  EXPECT_THAT(DestinationKeys(), IsEmpty());
}

TEST_F(WorkerTest, ADrainingWorkerGivesBackAndTakesNothing) {
  HeldShuffler shuffler;
  const auto worker = MakeWorker(&shuffler);
  *controller_.desired.add_leases() = Lease("a", absl::Seconds(60));
  ASSERT_TRUE(worker->RunOnce().ok());
  shuffler.begun.WaitForNotification();
  worker->Drain();
  *controller_.desired.add_leases() = Lease("b", absl::Seconds(60));
  shuffler.go_on.Notify();
  EXPECT_TRUE(worker->Run().ok());
  EXPECT_TRUE(controller_.last_request.draining());
  EXPECT_EQ(controller_.last_request.leases(0).lease_id(), "a");
  EXPECT_EQ(controller_.last_request.leases(0).state(), v1::LeaseReport::STATE_RETURNED);
  EXPECT_EQ(controller_.last_request.leases_size(), 1);
}

TEST_F(WorkerTest, AWorkerWhoseDeviceIsLostGivesTheTaskBackAndEnds) {
  LostShuffler shuffler;
  const auto worker = MakeWorker(&shuffler);
  *controller_.desired.add_leases() = Lease("a", absl::Seconds(60));
  ASSERT_TRUE(worker->RunOnce().ok());
  controller_.AwaitInterruptions(2);
  // Further leases are not taken.
  *controller_.desired.add_leases() = Lease("b", absl::Seconds(60));
  EXPECT_EQ(worker->Run(), LostShuffler::LostError());
  EXPECT_TRUE(controller_.last_request.draining());
  ASSERT_EQ(controller_.last_request.leases_size(), 1);
  const v1::LeaseReport& report = controller_.last_request.leases(0);
  EXPECT_EQ(report.lease_id(), "a");
  EXPECT_EQ(report.state(), v1::LeaseReport::STATE_FAILED);
  EXPECT_EQ(report.error().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(report.error().message(), HasSubstr("fell off the bus"));
  EXPECT_THAT(DestinationKeys(), IsEmpty());
}

TEST_F(WorkerTest, ARefusedBuildEndsTheWorker) {
  const auto shuffler = MakeHostShuffler();
  const auto worker = MakeWorker(shuffler.get());
  controller_.answer = absl::FailedPreconditionError("build differs");
  EXPECT_EQ(worker->Run(), controller_.answer);
}

TEST_F(WorkerTest, APlanThatDiffersFromTheLeaseIsNotWritten) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.set_layout_fingerprint(std::string(64, '0'));
  ExpectFailure(lease, absl::StatusCode::kFailedPrecondition, std::string(64, '0'));
}

TEST_F(WorkerTest, ASourceThatDiffersFromTheLeaseIsNotRead) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.set_source_token("{}");
  ExpectFailure(lease, absl::StatusCode::kFailedPrecondition, "changed since the job was planned");
}

TEST_F(WorkerTest, AnUnsetRankIsAnErrorAndNotRankZero) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.mutable_rank_tasks(1)->clear_rank();
  ExpectFailure(lease, absl::StatusCode::kInvalidArgument, "rank_tasks.rank is not set");
}

TEST_F(WorkerTest, AnUnsetRegionIsAnErrorAndNotRegionZero) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.clear_region();
  ExpectFailure(lease, absl::StatusCode::kInvalidArgument, "region is not set");
}

TEST_F(WorkerTest, RegionsAndRanksOutsideThePlanAreRefused) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.set_region(2);
  ExpectFailure(lease, absl::StatusCode::kInvalidArgument, "region 2, want less than 2");
}

TEST_F(WorkerTest, ARankWithoutPartsInTheRegionIsRefused) {
  v1::Lease lease = Lease("a", absl::Seconds(60));
  lease.mutable_rank_tasks(1)->set_rank(2);
  ExpectFailure(lease, absl::StatusCode::kInvalidArgument, "rank 2 has no part");
}

}  // namespace
}  // namespace shardprep
