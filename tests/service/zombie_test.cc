// A worker that sleeps past its lease, wakes up in the middle of its work, and finds another job at
// its destination: controller, backend, workers and files are the real ones, only time is not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>

#include "absl/synchronization/notification.h"
#include "kernels/shuffle.h"
#include "service/prep_backend.h"
#include "tests/service/controller_fixture.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/worker.h"

namespace shardprep {
namespace {

// Calls the controller without a wire between.
class DirectLink : public ControllerLink {
 public:
  explicit DirectLink(Controller* controller) : controller_(controller) {}

  absl::StatusOr<v1::SynchronizeResponse> Synchronize(
      const v1::SynchronizeRequest& request) override {
    Answer<v1::SynchronizeResponse> answer;
    controller_->Synchronize(request, absl::ZeroDuration(), answer.Callback());
    last_request = request;
    return answer.Await();
  }
  void Interrupt() override {
    absl::MutexLock lock(&mu_);
    ++interruptions_;
  }
  void AwaitInterruptions(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return interruptions_ >= count; };
    mu_.Await(absl::Condition(&enough));
  }

  v1::SynchronizeRequest last_request;

 private:
  Controller* const controller_;
  absl::Mutex mu_;
  int interruptions_ ABSL_GUARDED_BY(mu_) = 0;
};

// Sleeps in its first shuffle.
class SleepingShuffler : public Shuffler {
 public:
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t begin,
                       int64_t end, uint8_t* out) override {
    if (!asleep.HasBeenNotified()) asleep.Notify();
    wake_up.WaitForNotification();
    return host_->Shuffle(job, views, begin, end, out);
  }
  std::string name() const override { return host_->name(); }

  absl::Notification asleep, wake_up;

 private:
  std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
};

std::map<std::string, std::string> FilesBelow(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().lexically_relative(directory)] = {std::istreambuf_iterator<char>(file),
                                                         std::istreambuf_iterator<char>()};
  }
  return files;
}

class ZombieTest : public ControllerFixture {
 protected:
  void SetUp() override {
    ASSERT_EQ(WriteTestCheckpoint(dir_ / "model", {.layers = 1, .mtp_layers = 0}),
              absl::OkStatus());
    backend_ = *MakePrepBackend({});
    ControllerOptions options = Options();
    options.queue.build = ThisBuild();
    controller_ = *Controller::Start(options, &clock_, backend_.get(), Store(), &metrics_,
                                     [this] { return absl::StrCat("id-", ++last_id_); });
  }

  void TearDown() override { controller_.reset(); }

  v1::PrepJobSpec SpecWith(const std::string& profile) {
    v1::PrepJobSpec spec = Spec(dir_ / "model", dir_ / "out");
    spec.mutable_targets(0)->mutable_parallel_layout()->set_tensor_parallel_size(2);
    spec.mutable_targets(0)->mutable_kernel_target()->set_profile(profile);
    return spec;
  }

  std::unique_ptr<Worker> MakeWorker(const std::string& id, DirectLink* link, Shuffler* shuffler) {
    return std::make_unique<Worker>(WorkerOptions{.worker_id = id, .threads = 1}, link, shuffler,
                                    &clock_, nullptr);
  }

  TempDir dir_;
  std::unique_ptr<JobBackend> backend_;
};

TEST_F(ZombieTest, WakesAfterAnotherJobTookTheDestinationAndHarmsNothing) {
  ASSERT_TRUE(Create("old", SpecWith("logical")).ok());
  AwaitState("old", v1::PrepJob::STATE_RUNNING);
  SleepingShuffler sleeping;
  DirectLink zombie_link(controller_.get());
  const auto zombie = MakeWorker("zombie", &zombie_link, &sleeping);
  ASSERT_EQ(zombie->RunOnce(), absl::OkStatus());
  sleeping.asleep.WaitForNotification();
  ASSERT_TRUE(Cancel("old").ok());

  // Nothing may be published under the lease from 10 s before its end, nobody else may write there
  // until 10 s after it.
  clock_.Advance(absl::Seconds(70) - absl::Nanoseconds(1));
  controller_->Tick();
  EXPECT_EQ(Create("new", SpecWith("aiter-separated")).status().code(),
            absl::StatusCode::kFailedPrecondition);
  clock_.Advance(absl::Nanoseconds(1));
  AwaitState("old", v1::PrepJob::STATE_CANCELLED);
  ASSERT_TRUE(Create("new", SpecWith("aiter-separated")).ok());
  AwaitState("new", v1::PrepJob::STATE_RUNNING);

  const auto shuffler = MakeHostShuffler();
  DirectLink link(controller_.get());
  const auto worker = MakeWorker("worker", &link, shuffler.get());
  for (int leases = 0; !IsTerminal(controller_->Get("new")->job.state()); ++leases) {
    ASSERT_EQ(worker->RunOnce(), absl::OkStatus());
    if (controller_->Get("new")->job.progress().rank_tasks_done() ==
        controller_->Get("new")->job.progress().rank_tasks_total()) {
      break;
    }
    link.AwaitInterruptions(leases + 1);
  }
  EXPECT_EQ(AwaitState("new", v1::PrepJob::STATE_SUCCEEDED).error().message(), "");
  const std::map<std::string, std::string> published = FilesBelow(dir_ / "out");
  EXPECT_EQ(published.count("manifest.json"), 1U);

  sleeping.wake_up.Notify();
  zombie_link.AwaitInterruptions(1);
  ASSERT_EQ(zombie->RunOnce(), absl::OkStatus());
  ASSERT_EQ(zombie_link.last_request.leases_size(), 1);
  EXPECT_EQ(zombie_link.last_request.leases(0).state(), v1::LeaseReport::STATE_FAILED);
  EXPECT_EQ(zombie_link.last_request.leases(0).error().code(),
            static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_TRUE(FilesBelow(dir_ / "out") == published);
  EXPECT_EQ(controller_->Get("new")->job.state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(controller_->Get("old")->job.state(), v1::PrepJob::STATE_CANCELLED);
  EXPECT_EQ(controller_->Get("old")->job.progress().rank_tasks_done(), 0);
}

}  // namespace
}  // namespace shardprep
