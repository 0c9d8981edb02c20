#include "service/cli_follow.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/cli.h"
#include "service/job_report.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);

// The newest state, from the watching thread to the drawing one.
class NewestState {
 public:
  void Set(const v1::PrepJob& job) {
    absl::MutexLock lock(&mu_);
    job_ = job;
  }

  void End(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    status_ = status;
    ended_ = true;
  }

  // Waits for the end, but no longer than `at_most`. True when it came.
  bool AwaitEnd(absl::Duration at_most) {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&ended_), at_most);
  }

  v1::PrepJob Job() {
    absl::MutexLock lock(&mu_);
    return job_;
  }

  absl::Status status() {
    absl::MutexLock lock(&mu_);
    return status_;
  }

 private:
  absl::Mutex mu_;
  v1::PrepJob job_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

absl::StatusOr<v1::PrepJob> FollowJob(PrepClient& client, const std::string& job_id,
                                      Console& console,
                                      const std::function<void(const v1::PrepJob&)>& on_state) {
  NewestState newest;
  std::thread watcher([&] {
    newest.End(client.Watch(job_id, [&](const v1::PrepJob& job) {
      if (on_state) on_state(job);
      newest.Set(job);
      return true;
    }));
  });
  // Drawn between states too: the time left counts down and the log is passed on.
  bool ended = false;
  while (!ended) {
    ended = newest.AwaitEnd(kRedraw);
    const v1::PrepJob job = newest.Job();
    if (job.prep_job_id().empty()) {
      console.PollLogs();
    } else {
      console.Progress(JobProgress(job));
    }
  }
  watcher.join();
  console.EndProgress();
  if (!newest.status().ok()) return newest.status();
  return newest.Job();
}

int FinishFollowed(const std::string& command, const v1::PrepJob& job,
                   const std::string& next_step) {
  if (job.state() == v1::PrepJob::STATE_SUCCEEDED) return kExitOk;
  absl::Status status = FromRpcStatus(job.error());
  if (status.ok()) {
    status = absl::CancelledError(absl::StrCat("the job ended as ", JobStateText(job)));
  }
  return Fail(command, status, next_step);
}

}  // namespace shardprep
