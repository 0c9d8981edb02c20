// The job queue: which jobs there are, which of their rank tasks are done, and which worker may
// write what until when. A pure state machine: no threads, no locks, no I/O; time and ids are
// injected. Its owner serialises all calls. The rules stand at the top of job_queue.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/job_queue_types.h"
#include "workers/clock.h"

namespace shardprep {

class JobQueue {
 public:
  // `new_lease_id` returns a string that no other lease of any controller has.
  JobQueue(JobQueueOptions options, const Clock* clock, std::function<std::string()> new_lease_id);
  ~JobQueue();
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  // Jobs -----------------------------------------------------------------------------------------

  // Whether AddJob() would take the job. ALREADY_EXISTS when the id is taken; FAILED_PRECONDITION
  // when an unfinished job makes something with another fingerprint at one of its places;
  // RESOURCE_EXHAUSTED naming the bound; UNAVAILABLE while draining. A job in a terminal state is
  // refused only for its id.
  absl::Status CheckJob(const NewJob& job) const;
  absl::Status AddJob(NewJob job);
  // The sequence that the next AddJob() gives.
  int64_t next_sequence() const { return next_sequence_; }
  // Takes over a job of an earlier controller, whatever the bounds: it was accepted once. Jobs come
  // in the order of their sequence. ALREADY_EXISTS when the id or a later sequence is there.
  absl::Status Restore(NewJob job);

  // Answers at once. FAILED_PRECONDITION when the job succeeded or failed; NOT_FOUND.
  absl::StatusOr<v1::PrepJob> Cancel(const std::string& job_id);

  // NOT_FOUND.
  absl::StatusOr<JobView> Get(const std::string& job_id) const;
  // Unfinished jobs that have been started, here or by an earlier controller, and of which no lease
  // of either can be open.
  std::vector<std::string> JobsWithoutLeases() const;
  // Newest first, without plans and policy texts, at most `page_size` jobs and about 1 MiB.
  // INVALID_ARGUMENT for a token that is not ours or was made for other states.
  absl::StatusOr<JobPage> List(int page_size, const std::string& page_token,
                               const std::set<v1::PrepJob::State>& states) const;

  // Steps: the owner asks for the next one until there is none, carries each out and answers.
  std::optional<JobStep> NextStep();
  void StartFinished(const std::string& job_id, absl::StatusOr<StartedJob> started);
  // Instead: that the job runs could not be recorded, which is not its fault. No job starts for a
  // while, then it is this one's turn again.
  void StartPostponed(const std::string& job_id);
  // Manifests by target, one for each place of the job.
  void CommitFinished(const std::string& job_id,
                      const absl::StatusOr<std::vector<v1::ManifestReference>>& manifests);
  void CleanFinished(const std::string& job_id, const absl::Status& status);

  // Workers --------------------------------------------------------------------------------------

  // What a worker says. Reports of leases that are closed or unknown are ignored: they are late.
  // INVALID_ARGUMENT: malformed or over a bound (in job_queue.cc), and nothing of it was taken;
  // FAILED_PRECONDITION: another build; RESOURCE_EXHAUSTED: too many workers.
  absl::Status Report(const v1::SynchronizeRequest& request);

  // What the worker should hold, with new leases where it can take some; leases in the answer are
  // renewed from now. Changes nothing when the answer has no leases.
  v1::SynchronizeResponse Desired(const std::string& worker_id);

  // The worker's process is known to have ended, so nothing of its leases is still being written.
  void WorkerGone(const std::string& worker_id, const std::string& how);

  // Ends what time has ended: leases behind their fence, silent workers, jobs past their timeout.
  void Tick();

  // Drain: first no new jobs, starts and leases; then every lease is withdrawn.
  void StopLeasing();
  void WithdrawAll();
  bool draining() const { return draining_; }

  // Everything that happened since the last call.
  QueueChanges TakeChanges();
  QueueStats Stats() const;

 private:
  enum class Phase : int;
  struct Task;
  struct Region;
  struct Job;
  struct Lease;
  struct Worker;

  // Jobs.
  Job* FindJob(const std::string& job_id) const;
  static absl::Status CheckPlaces(const Job& other, const std::vector<JobPlace>& wanted);
  Job& Enter(NewJob added, int64_t sequence);
  void EnterFinished(Job& job);
  void SetTimeout(Job& job);
  void Expire(Job& job);
  void SetPhase(Job& job, Phase phase);
  void Yield(Job& job);
  void Touch(Job& job, bool record);
  void Finish(Job& job, v1::PrepJob::State state, const absl::Status& error);
  void Fail(Job& job, const absl::Status& cause);
  void StopLeasesOf(Job& job);
  void Advance(Job& job);
  void CleanNext(Job& job);
  bool StartOverruled(Job& job);
  bool RetryStep(Job& job, const absl::Status& status);
  void TakePlan(Job& job, StartedJob started);
  void MarkDone(Job& job, int32_t region, int32_t rank);
  void EvictFinished();
  v1::PrepJob Snapshot(const Job& job, bool with_plan) const;

  // Leases.
  absl::Status CheckReport(const v1::SynchronizeRequest& request) const;
  void ApplyReport(Worker& worker, const v1::LeaseReport& report);
  void CloseLease(const std::string& lease_id, QueueEvent::Kind outcome, const absl::Status& cause);
  void CountFailures(Job& job, const Lease& lease, const absl::Status& cause);
  bool Grant(Worker& worker);
  bool GrantFrom(Job& job, Worker& worker);
  bool FitsSomeWorker(const Job& job) const;
  v1::Lease ToProto(const Lease& lease) const;
  void RemoveWorker(const std::string& worker_id, const std::string& how);

  const JobQueueOptions options_;
  const Clock* const clock_;
  const std::function<std::string()> new_lease_id_;

  int64_t next_sequence_ = 1;
  std::map<std::string, std::unique_ptr<Job>> jobs_;
  std::map<int64_t, Job*> by_sequence_;  // all, in order of creation
  std::map<int64_t, Job*> unfinished_;   // in order of creation
  std::list<Job*> finished_;             // in order of their end
  int64_t unfinished_bytes_ = 0;
  int64_t finished_bytes_ = 0;
  // Jobs whose tasks can be leased, by whose turn it is.
  std::map<std::pair<int64_t, int64_t>, Job*> leasing_;
  int64_t last_turn_ = 0;
  absl::Duration starts_not_before_ = -absl::InfiniteDuration();
  std::map<std::string, std::unique_ptr<Worker>> workers_;
  std::map<std::string, std::unique_ptr<Lease>> leases_;
  // Destinations at which leases of an earlier controller may be open, until when.
  std::map<std::string, absl::Duration> fenced_until_;
  bool draining_ = false;
  std::set<std::string> changed_;
  std::set<std::string> recorded_;
  QueueChanges changes_;
};

}  // namespace shardprep
