// A controller over a FakeBackend, with calls that wait for their answer and a worker that is
// stepped by hand.
#pragma once

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "service/controller.h"
#include "service/controller_metrics.h"
#include "service/job_store.h"
#include "tests/service/fake_backend.h"
#include "workers/clock.h"

namespace shardprep {

// Counts changes, so that tests can wait for one.
class ChangeCounter : public JobObserver {
 public:
  void OnJobChanged() override {
    absl::MutexLock lock(&mu_);
    ++changes_;
  }
  // Waits until there were more than `seen` changes; returns how many there were.
  int AwaitMoreThan(int seen) {
    absl::MutexLock lock(&mu_);
    const auto more = [this, seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return changes_ > seen; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&more), absl::Seconds(20)));
    return changes_;
  }

 private:
  absl::Mutex mu_;
  int changes_ ABSL_GUARDED_BY(mu_) = 0;
};

template <typename T>
class Answer {
 public:
  std::function<void(absl::StatusOr<T>)> Callback() {
    return [this](absl::StatusOr<T> result) {
      result_ = std::move(result);
      there_.Notify();
    };
  }
  bool there() const { return there_.HasBeenNotified(); }
  absl::StatusOr<T> Await() {
    if (!there_.WaitForNotificationWithTimeout(absl::Seconds(20))) {
      return absl::DeadlineExceededError("no answer");
    }
    return result_;
  }

 private:
  absl::StatusOr<T> result_;
  absl::Notification there_;
};

class ControllerFixture : public testing::Test {
 protected:
  static v1::WorkerBuild Build() {
    v1::WorkerBuild build;
    build.set_format_version("1");
    build.set_policy_digest("abc");
    build.set_tool_version("0.1.0");
    return build;
  }

  static ControllerOptions Options() {
    ControllerOptions options;
    options.queue.build = Build();
    options.tick = absl::Milliseconds(5);
    return options;
  }

  virtual JobStore* Store() { return &store_; }

  void StartController(const ControllerOptions& options) {
    controller_.reset();
    absl::StatusOr<std::unique_ptr<Controller>> controller =
        Controller::Start(options, &clock_, &backend_, Store(), &metrics_,
                          [this] { return absl::StrCat("id-", ++last_id_); });
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
  }

  static v1::PrepJobSpec Spec(const std::string& source, const std::string& destination) {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source);
    spec.add_targets()->set_destination_uri(destination);
    return spec;
  }

  // Targets of tensor parallel size 1, 2, ..., one for each destination.
  static v1::PrepJobSpec SpecOfSeveral(const std::string& source,
                                       const std::vector<std::string>& destinations) {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source);
    for (const std::string& destination : destinations) {
      v1::Target& target = *spec.add_targets();
      target.set_destination_uri(destination);
      target.mutable_parallel_layout()->set_tensor_parallel_size(spec.targets_size());
    }
    return spec;
  }

  absl::StatusOr<v1::PrepJob> Create(const std::string& id, const v1::PrepJobSpec& spec) {
    v1::CreatePrepJobRequest request;
    request.set_prep_job_id(id);
    *request.mutable_spec() = spec;
    return Create(request);
  }

  absl::StatusOr<v1::PrepJob> Create(const v1::CreatePrepJobRequest& request) {
    auto answer = std::make_shared<Answer<v1::PrepJob>>();
    controller_->Create(
        request, [] { return false; },
        [answer](absl::StatusOr<v1::PrepJob> job) { answer->Callback()(std::move(job)); });
    return answer->Await();
  }

  absl::StatusOr<v1::PrepJob> Cancel(const std::string& id) {
    auto answer = std::make_shared<Answer<v1::PrepJob>>();
    controller_->Cancel(
        id, [answer](absl::StatusOr<v1::PrepJob> job) { answer->Callback()(std::move(job)); });
    return answer->Await();
  }

  // Waits until `good` holds for the job.
  v1::PrepJob AwaitJob(const std::string& id, const std::function<bool(const v1::PrepJob&)>& good) {
    const auto counter = std::make_shared<ChangeCounter>();
    EXPECT_EQ(controller_->Observe(id, counter), absl::OkStatus());
    int seen = 0;
    while (true) {
      const absl::StatusOr<JobView> view = controller_->Get(id);
      EXPECT_TRUE(view.ok()) << view.status();
      if (!view.ok() || good(view->job) || testing::Test::HasFailure()) {
        controller_->Unobserve(id, counter.get());
        return view.ok() ? view->job : v1::PrepJob();
      }
      seen = counter->AwaitMoreThan(seen);
    }
  }
  v1::PrepJob AwaitState(const std::string& id, v1::PrepJob::State state) {
    return AwaitJob(id, [state](const v1::PrepJob& job) { return job.state() == state; });
  }

  static v1::SynchronizeRequest Request(const std::string& worker) {
    v1::SynchronizeRequest request;
    request.set_worker_id(worker);
    *request.mutable_build() = Build();
    request.set_memory_budget_bytes(1000);
    request.set_device("cpu/test");
    return request;
  }

  absl::StatusOr<v1::SynchronizeResponse> Synchronize(const v1::SynchronizeRequest& request) {
    auto answer = std::make_shared<Answer<v1::SynchronizeResponse>>();
    controller_->Synchronize(request, absl::Seconds(30),
                             [answer](absl::StatusOr<v1::SynchronizeResponse> response) {
                               answer->Callback()(std::move(response));
                             });
    return answer->Await();
  }

  // Takes leases and reports them done until the job ends.
  void WorkUntilDone(const std::string& worker, const std::string& job_id) {
    v1::SynchronizeRequest request = Request(worker);
    while (true) {
      const absl::StatusOr<v1::SynchronizeResponse> response = Synchronize(request);
      ASSERT_TRUE(response.ok()) << response.status();
      request.clear_leases();
      for (const v1::Lease& lease : response->leases()) {
        v1::LeaseReport& report = *request.add_leases();
        report.set_lease_id(lease.lease_id());
        report.set_state(v1::LeaseReport::STATE_DONE);
      }
      if (response->leases().empty()) break;
    }
    AwaitState(job_id, v1::PrepJob::STATE_SUCCEEDED);
  }

  FakeClock clock_;
  FakeBackend backend_;
  MemoryJobStore store_;
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  ControllerMetrics metrics_{*registry_, "test"};
  std::atomic<int> last_id_{0};
  std::unique_ptr<Controller> controller_;
};

}  // namespace shardprep
