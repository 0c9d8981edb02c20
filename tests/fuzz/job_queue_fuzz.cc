// The job queue under sequences of operations, against a model of what must never happen.
//
// The model knows nothing of how the queue works. It plays the world around it: workers that call,
// answers that arrive late or never, workers that sleep past their leases or die, clocks that run
// slow, steps that succeed or fail, late repetitions of old calls, cancels, and controllers that
// die and go on from what they had recorded. It keeps who may still write what, by the rule that a
// worker goes by: until (sending of its call) + duration - margin on its own clock. After each
// operation it demands:
//
//  - of one destination, no rank task has two writers, whatever jobs they belong to;
//  - while a job's start, commit or removal is under way, or once the job is over, nobody writes
//    for it, and at most one job at a time has a destination; a job of several targets has all of
//    its destinations at the same time;
//  - no job starts while an older one that shares a destination with it is unfinished;
//  - a cancelled or draining queue grants nothing; a task is granted at most the bound of times;
//  - states only move forward, and a final state stays what it is, while the controller lives;
//  - a job succeeds, and is committed, only when every rank task was written.
//
// In the end faults stop, and then every job must come to its end.
//
// Input: a sequence of choices.
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/job_queue.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/clock.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using State = v1::PrepJob::State;
using Task = std::pair<int32_t, int32_t>;  // region, rank

constexpr absl::Duration kLease = absl::Seconds(60);
constexpr absl::Duration kMargin = absl::Seconds(10);
constexpr int kMaxAttempts = 3;
constexpr int kMaxUnfinished = 5;
constexpr int kMaxFinished = 3;
constexpr int kJobNames = 8;
constexpr int kDestinations = 4;
// Most jobs have one target.
constexpr int kTargetCounts[] = {1, 1, 2, 3};
constexpr int kWorkerNames = 3;
constexpr int kMaxOperations = 600;
constexpr int kCalmRounds = 300;
// The slowest clock that the margins must bear: it shows 3 s when 4 s have passed.
constexpr double kClockRates[] = {1.0, 0.75, 1.25};

struct ModelJob {
  int64_t serial = 0;  // names are given again once their job was evicted
  std::vector<JobPlace> places;
  std::string fingerprint;
  int32_t ranks_per_target = 0;
  State state = v1::PrepJob::STATE_PENDING;
  bool cancelled = false;
  bool must_fail = false;  // a task failed for good while nobody had cancelled
  bool has_destinations = false;
  bool is_complete = false;  // its start found the very artefacts
  std::optional<JobStep::Kind> step;
  std::set<Task> planned;
  std::set<Task> written;   // parts that lie at the destination, with their records
  std::set<Task> reported;  // of them, those that this controller was told of
  std::map<Task, int> grants;
  std::map<Task, int> given_back;  // by draining workers: these do not count

  // Where the rank of that number is written, and its own number there.
  std::pair<std::string, int32_t> PlaceOf(int32_t number) const {
    const int32_t target = number < 0 ? -1 - number : number / ranks_per_target;
    const int32_t rank = number < 0 ? -1 : number % ranks_per_target;
    return {places[static_cast<size_t>(target)].destination, rank};
  }

  bool SharesAPlaceWith(const ModelJob& other) const {
    return std::any_of(places.begin(), places.end(), [&other](const JobPlace& ours) {
      return std::any_of(other.places.begin(), other.places.end(), [&ours](const JobPlace& theirs) {
        return ours.destination == theirs.destination;
      });
    });
  }
};

struct Granted {
  v1::Lease lease;
  int64_t job_serial = 0;
  int controller = 0;
};

// What outlives a controller, as of its last word.
struct Record {
  v1::PrepJob job;
  int64_t sequence = 0;
  absl::Duration lease_span;
};

struct Holding {
  v1::Lease lease;
  v1::LeaseReport::State state = v1::LeaseReport::STATE_RUNNING;
  absl::StatusCode failure = absl::StatusCode::kOk;
  std::set<int32_t> completed;
  absl::Duration stops_at;  // real time at which its own clock forbids further writes
};

struct ModelWorker {
  std::string id;
  double clock_rate = 1.0;
  bool draining = false;
  std::map<std::string, Holding> held;
  bool is_calling = false;
  absl::Duration sent;
  v1::SynchronizeRequest last_request;
};

class World {
 public:
  explicit World(const std::string& input) : choices_(input) {
    StartController();
    for (int i = 0; i < kWorkerNames; ++i) workers_.push_back(NewWorker(i));
  }

  void Run() {
    for (int i = 0; i < kMaxOperations && !choices_.empty(); ++i) {
      Operate();
      Check();
    }
    if (!queue_->draining()) Calm();
  }

 private:
  static v1::WorkerBuild Build() {
    v1::WorkerBuild build;
    build.set_format_version("1");
    build.set_policy_digest("digest");
    build.set_tool_version("1.0");
    return build;
  }

  ModelWorker NewWorker(int name) {
    ModelWorker worker;
    worker.id = absl::StrCat("worker-", name, "-", ++last_process_);
    worker.clock_rate = kClockRates[name % 3];
    return worker;
  }

  void StartController() {
    JobQueueOptions options;
    options.build = Build();
    options.lease_duration = kLease;
    options.fence_margin = kMargin;
    options.max_attempts = kMaxAttempts;
    options.max_unfinished_jobs = kMaxUnfinished;
    options.max_finished_jobs = kMaxFinished;
    options.max_active_jobs = 2;
    queue_ = std::make_unique<JobQueue>(options, &clock_,
                                        [this] { return absl::StrCat("lease-", ++last_lease_); });
    ++controller_;
  }

  // Operations -----------------------------------------------------------------------------------

  void Operate() {
    switch (choices_.Below(16)) {
      case 0:
      case 1:
        return Add();
      case 2:
        return Cancel();
      case 3:
      case 4:
        return TakeStep();
      case 5:
      case 6:
        return AnswerStep();
      case 7:
      case 8:
      case 9:
        return Call(workers_[static_cast<size_t>(choices_.Below(kWorkerNames))]);
      case 10:
      case 11: {
        ModelWorker& worker = workers_[static_cast<size_t>(choices_.Below(kWorkerNames))];
        return Answer(worker, choices_.OneIn(8));
      }
      case 12:
        return Progress(workers_[static_cast<size_t>(choices_.Below(kWorkerNames))]);
      case 13:
        return PassTime();
      case 14:
        return Repeat(workers_[static_cast<size_t>(choices_.Below(kWorkerNames))]);
      default:
        return DieOrDrain();
    }
  }

  // Some of the destinations, each once.
  std::vector<JobPlace> SomePlaces() {
    std::vector<int> left(kDestinations);
    std::iota(left.begin(), left.end(), 0);
    const int count = kTargetCounts[choices_.Below(4)];
    std::vector<JobPlace> places;
    for (int t = 0; t < count; ++t) {
      const auto at = left.begin() + choices_.Below(static_cast<int>(left.size()));
      const std::string fingerprint = choices_.OneIn(4) ? "other" : "print";
      places.push_back({absl::StrCat("/out/", *at), fingerprint});
      left.erase(at);
    }
    return places;
  }

  void Add() {
    const std::string id = absl::StrCat("job-", choices_.Below(kJobNames));
    const std::vector<JobPlace> places = SomePlaces();
    NewJob job;
    job.job.set_prep_job_id(id);
    job.places = places;
    for (const JobPlace& place : places) absl::StrAppend(&job.fingerprint, place.fingerprint, ";");
    if (choices_.OneIn(6)) job.job.mutable_timeout()->set_seconds(100);
    const absl::StatusCode want = WantOfAdd(id, job);
    FUZZ_REQUIRE(queue_->CheckJob(job).code() == want, queue_->CheckJob(job).ToString());
    const std::string fingerprint = job.fingerprint;
    const absl::Status added = queue_->AddJob(std::move(job));
    FUZZ_REQUIRE(added.code() == want, added.ToString());
    if (!added.ok()) return;
    ModelJob model;
    model.serial = ++last_serial_;
    model.places = places;
    model.fingerprint = fingerprint;
    jobs_[id] = model;
    Write(id);
  }

  void Write(const std::string& id) {
    const auto view = queue_->Get(id);
    FUZZ_REQUIRE(view.ok(), view.status().ToString());
    records_[id] = {view->job, view->sequence, view->lease_span};
  }

  absl::StatusCode WantOfAdd(const std::string& id, const NewJob& job) const {
    if (jobs_.contains(id)) return absl::StatusCode::kAlreadyExists;
    if (queue_->draining()) return absl::StatusCode::kUnavailable;
    int unfinished = 0;
    bool clashes = false;
    for (const auto& [name, other] : jobs_) {
      if (IsTerminal(other.state)) continue;
      ++unfinished;
      for (const JobPlace& ours : job.places) {
        for (const JobPlace& theirs : other.places) {
          clashes = clashes || (ours.destination == theirs.destination &&
                                ours.fingerprint != theirs.fingerprint);
        }
      }
    }
    if (unfinished >= kMaxUnfinished) return absl::StatusCode::kResourceExhausted;
    return clashes ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kOk;
  }

  void Cancel() {
    const std::string id = absl::StrCat("job-", choices_.Below(kJobNames));
    const auto answer = queue_->Cancel(id);
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) {
      FUZZ_REQUIRE(absl::IsNotFound(answer.status()), answer.status().ToString());
      return;
    }
    ModelJob& job = found->second;
    const bool too_late =
        job.state == v1::PrepJob::STATE_SUCCEEDED || job.state == v1::PrepJob::STATE_FAILED;
    FUZZ_REQUIRE(answer.ok() != too_late, answer.status().ToString());
    if (answer.ok()) job.cancelled = true;
  }

  void TakeStep() {
    const std::optional<JobStep> step = queue_->NextStep();
    if (!step.has_value()) return;
    FUZZ_REQUIRE(jobs_.contains(step->job_id), step->job_id);
    ModelJob& job = jobs_.at(step->job_id);
    FUZZ_REQUIRE(!IsTerminal(job.state) && !job.step.has_value(), step->job_id);
    job.step = step->kind;
    job.has_destinations = true;
    if (step->kind == JobStep::Kind::kStart) {
      FUZZ_REQUIRE(!queue_->draining() && !job.cancelled, step->job_id);
      RequireTurn(step->job_id, job);
    }
    if (step->kind == JobStep::Kind::kCommit) RequireAllDone(step->job_id, job);
    if (step->kind == JobStep::Kind::kRemove) FUZZ_REQUIRE(job.cancelled, step->job_id);
    if (step->kind == JobStep::Kind::kTidy) {
      FUZZ_REQUIRE(!job.cancelled && queue_->Get(step->job_id)->job.has_error(), step->job_id);
    }
  }

  void RequireTurn(const std::string& id, const ModelJob& job) const {
    const int64_t sequence = queue_->Get(id)->sequence;
    for (const auto& [other_id, other] : jobs_) {
      if (IsTerminal(other.state) || !other.SharesAPlaceWith(job)) continue;
      FUZZ_REQUIRE(queue_->Get(other_id)->sequence >= sequence, absl::StrCat(id, ", ", other_id));
    }
  }

  void AnswerStep() {
    std::vector<std::string> open;
    for (const auto& [id, job] : jobs_) {
      if (job.step.has_value()) open.push_back(id);
    }
    if (open.empty()) return;
    const std::string id = open[static_cast<size_t>(choices_.Byte()) % open.size()];
    const int outcome = choices_.Below(8);
    absl::Status status;
    if (outcome == 6) status = absl::UnavailableError("the store is away");
    if (outcome == 7) status = absl::FailedPreconditionError("the store is broken");
    FinishStep(id, status);
  }

  void FinishStep(const std::string& id, const absl::Status& status) {
    ModelJob& job = jobs_.at(id);
    const JobStep::Kind kind = *std::exchange(job.step, std::nullopt);
    switch (kind) {
      case JobStep::Kind::kStart:
        if (!status.ok()) {
          job.has_destinations = false;  // tried again, or failed
          queue_->StartFinished(id, status);
        } else {
          FinishStart(id, job);
        }
        break;
      case JobStep::Kind::kCommit:
        if (status.ok()) {
          queue_->CommitFinished(id, Manifests(job));
        } else {
          queue_->CommitFinished(id, status);
        }
        break;
      case JobStep::Kind::kRemove:
      case JobStep::Kind::kTidy:
        queue_->CleanFinished(id, status);
        break;
    }
  }

  static std::vector<v1::ManifestReference> Manifests(const ModelJob& job) {
    std::vector<v1::ManifestReference> manifests(job.places.size());
    for (size_t t = 0; t < manifests.size(); ++t) manifests[t].set_uri(job.places[t].destination);
    return manifests;
  }

  // As the controller does it: that leases may be open is recorded before the first one is given.
  void FinishStart(const std::string& id, ModelJob& job) {
    if (choices_.OneIn(10)) {
      job.has_destinations = false;
      queue_->StartPostponed(id);
      return;
    }
    Write(id);
    Record& record = records_.at(id);
    record.job.set_state(v1::PrepJob::STATE_RUNNING);
    record.lease_span = std::max(record.lease_span, kLease + kMargin);
    if (job.planned.empty()) MakePlan(job);
    job.reported = job.written;
    queue_->StartFinished(id, StartedAs(job));
  }

  void MakePlan(ModelJob& job) {
    if (choices_.OneIn(16)) job.is_complete = true;
    const int regions = choices_.Below(4);
    job.ranks_per_target = 1 + choices_.Below(4);
    const auto targets = static_cast<int32_t>(job.places.size());
    for (int32_t region = 0; region < regions; ++region) {
      const bool is_replicated = choices_.OneIn(4);
      const int32_t begin = is_replicated ? -targets : 0;
      const int32_t end = is_replicated ? 0 : targets * job.ranks_per_target;
      for (int32_t rank = begin; rank < end; ++rank) {
        job.planned.insert({region, rank});
        if (choices_.OneIn(6)) job.written.insert({region, rank});
      }
    }
  }

  static StartedJob StartedAs(const ModelJob& job) {
    StartedJob started;
    started.fingerprint = job.fingerprint;
    started.source_token = "token";
    // One rank for each 10 bytes of memory.
    started.ranks_per_lease = [](int64_t budget) -> absl::StatusOr<int32_t> {
      if (budget < 10) return absl::InvalidArgumentError("below the minimum");
      return static_cast<int32_t>(budget / 10);
    };
    if (job.is_complete) started.complete = Manifests(job);
    for (const auto& [region, rank] : job.planned) {
      started.regions.resize(static_cast<size_t>(region) + 1);
      RegionTasks& tasks = started.regions.back();
      tasks.bytes_per_rank = 100;
      tasks.ranks.push_back(rank);
      if (job.written.contains({region, rank})) tasks.done.push_back(rank);
    }
    return started;
  }

  // A worker reports what it holds. Sometimes the call never arrives.
  void Call(ModelWorker& worker) {
    if (worker.is_calling) return;
    v1::SynchronizeRequest request;
    request.set_worker_id(worker.id);
    *request.mutable_build() = Build();
    request.set_memory_budget_bytes(10 + 10 * choices_.Below(4));
    request.set_draining(worker.draining);
    for (const auto& [id, holding] : worker.held) *request.add_leases() = ReportOf(id, holding);
    worker.sent = clock_.Monotonic();
    if (choices_.OneIn(10)) return;  // lost on the way
    worker.last_request = request;
    worker.is_calling = true;
    Deliver(request);
  }

  static v1::LeaseReport ReportOf(const std::string& id, const Holding& holding) {
    v1::LeaseReport report;
    report.set_lease_id(id);
    report.set_state(holding.state);
    for (const int32_t rank : holding.completed) report.add_completed_ranks(rank);
    report.set_bytes_written(100 * static_cast<int64_t>(holding.completed.size()));
    if (holding.state == v1::LeaseReport::STATE_FAILED) {
      *report.mutable_error() = ToRpcStatus(absl::Status(holding.failure, "as chosen"));
    }
    return report;
  }

  void Deliver(const v1::SynchronizeRequest& request) {
    for (const v1::LeaseReport& report : request.leases()) NoteReport(request, report);
    const absl::Status taken = queue_->Report(request);
    FUZZ_REQUIRE(taken.ok(), taken.ToString());
  }

  // What the controller learns from a report of a lease that it gave. Of one that it has closed it
  // wants to know nothing.
  void NoteReport(const v1::SynchronizeRequest& request, const v1::LeaseReport& report) {
    const auto found = leases_.find(report.lease_id());
    if (found == leases_.end() || closed_leases_.contains(report.lease_id())) return;
    const v1::Lease& lease = found->second.lease;
    ModelJob* const job = JobOf(lease.lease_id());
    if (job == nullptr) return;
    const bool is_done = report.state() == v1::LeaseReport::STATE_DONE;
    const std::set<int32_t> completed(report.completed_ranks().begin(),
                                      report.completed_ranks().end());
    const bool is_free = report.state() == v1::LeaseReport::STATE_RETURNED && request.draining() &&
                         free_leases_.insert(lease.lease_id()).second;
    for (const v1::RankTask& task : lease.rank_tasks()) {
      const Task key{lease.region(), task.rank()};
      if (found->second.controller == controller_ && (is_done || completed.contains(task.rank()))) {
        job->reported.insert(key);
      }
      if (is_free) ++job->given_back[key];
    }
  }

  // The controller answers the call that is open. Sometimes the answer never arrives.
  void Answer(ModelWorker& worker, bool is_lost) {
    if (!worker.is_calling) return;
    const v1::SynchronizeResponse response = queue_->Desired(worker.id);
    for (const v1::Lease& lease : response.leases()) NoteLease(lease);
    worker.is_calling = false;
    if (is_lost) return;
    std::set<std::string> named;
    for (const v1::Lease& lease : response.leases()) {
      named.insert(lease.lease_id());
      Holding& holding = worker.held.try_emplace(lease.lease_id()).first->second;
      holding.lease = lease;
      holding.stops_at = worker.sent + (kLease - kMargin) / worker.clock_rate;
    }
    for (auto at = worker.held.begin(); at != worker.held.end();) {
      Holding& holding = at->second;
      const bool is_over = holding.state != v1::LeaseReport::STATE_RUNNING;
      if (!named.contains(at->first) && is_over) {
        at = worker.held.erase(at);  // the end was heard
        continue;
      }
      ++at;
    }
    withdrawn_[worker.id].clear();
    for (const auto& [id, holding] : worker.held) {
      if (!named.contains(id)) withdrawn_[worker.id].insert(id);
    }
  }

  void NoteLease(const v1::Lease& lease) {
    FUZZ_REQUIRE(jobs_.contains(lease.prep_job_id()), lease.prep_job_id());
    ModelJob& job = jobs_.at(lease.prep_job_id());
    FUZZ_REQUIRE(!job.cancelled && !IsTerminal(job.state), lease.lease_id());
    FUZZ_REQUIRE(lease.rank_tasks_size() > 0, lease.lease_id());
    if (!leases_.try_emplace(lease.lease_id(), Granted{lease, job.serial, controller_}).second) {
      return;
    }
    FUZZ_REQUIRE(!queue_->draining(), lease.lease_id());
    for (const v1::RankTask& task : lease.rank_tasks()) {
      const Task key{lease.region(), task.rank()};
      FUZZ_REQUIRE(job.planned.contains(key) && !job.reported.contains(key), lease.lease_id());
      ++job.grants[key];
      FUZZ_REQUIRE(job.grants[key] <= kMaxAttempts + job.given_back[key], lease.lease_id());
    }
  }

  // Work goes on: a rank is completed, or a lease comes to an end.
  void Progress(ModelWorker& worker) {
    if (worker.held.empty()) return;
    auto at = worker.held.begin();
    std::advance(at, static_cast<size_t>(choices_.Byte()) % worker.held.size());
    Holding& holding = at->second;
    if (holding.state != v1::LeaseReport::STATE_RUNNING) return;
    const bool may_write = clock_.Monotonic() < holding.stops_at;
    const bool is_withdrawn = withdrawn_[worker.id].contains(at->first);
    switch (choices_.Below(6)) {
      case 0:
      case 1:
        if (may_write) Finish(holding);
        break;
      case 2:
        for (const v1::RankTask& task : holding.lease.rank_tasks()) {
          if (!may_write || holding.completed.contains(task.rank())) continue;
          CompleteRank(holding, task.rank());
          break;
        }
        break;
      case 3:
        holding.state = v1::LeaseReport::STATE_FAILED;
        holding.failure =
            choices_.OneIn(4) ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable;
        break;
      default:
        if (is_withdrawn || worker.draining) holding.state = v1::LeaseReport::STATE_RETURNED;
        break;
    }
  }

  void CompleteRank(Holding& holding, int32_t rank) {
    holding.completed.insert(rank);
    ModelJob* const job = JobOf(holding.lease.lease_id());
    FUZZ_REQUIRE(job != nullptr, holding.lease.lease_id());
    job->written.insert({holding.lease.region(), rank});
  }

  void Finish(Holding& holding) {
    for (const v1::RankTask& task : holding.lease.rank_tasks()) CompleteRank(holding, task.rank());
    holding.state = v1::LeaseReport::STATE_DONE;
  }

  void PassTime() {
    static const absl::Duration kSteps[] = {
        absl::Nanoseconds(1), absl::Milliseconds(500), absl::Seconds(2),  absl::Seconds(9),
        absl::Seconds(10),    absl::Seconds(20),       absl::Seconds(50), absl::Seconds(60),
        absl::Seconds(69),    absl::Seconds(70),
    };
    clock_.Advance(kSteps[choices_.Below(10)]);
    if (!choices_.OneIn(4)) queue_->Tick();
  }

  // A call that timed out at its worker still reaches the controller, after later ones.
  void Repeat(ModelWorker& worker) {
    if (worker.last_request.worker_id().empty()) return;
    Deliver(worker.last_request);
    const v1::SynchronizeResponse unheard = queue_->Desired(worker.id);
    for (const v1::Lease& lease : unheard.leases()) NoteLease(lease);
  }

  void DieOrDrain() {
    const int name = choices_.Below(kWorkerNames);
    ModelWorker& worker = workers_[static_cast<size_t>(name)];
    switch (choices_.Below(16)) {
      case 0:
      case 1:
      case 2:
        worker.draining = !worker.draining;
        return;
      case 3:
        if (choices_.OneIn(8)) queue_->StopLeasing();
        return;
      case 4:
        if (queue_->draining()) queue_->WithdrawAll();
        return;
      case 8:
        return Restart();
      case 5:
      case 6:
      case 7: {  // killed, and the controller saw it
        const std::string id = worker.id;
        worker = NewWorker(name);
        queue_->WorkerGone(id, "killed");
        return;
      }
      default:  // killed where nobody sees it
        worker = NewWorker(name);
        return;
    }
  }

  // The controller dies, with it all calls, and another goes on from the records.
  void Restart() {
    StartController();
    for (ModelWorker& worker : workers_) worker.is_calling = false;
    std::map<int64_t, std::string> order;
    for (const auto& [id, record] : records_) order[record.sequence] = id;
    for (const auto& [sequence, id] : order) {
      const Record& record = records_.at(id);
      ModelJob& job = jobs_.at(id);
      NewJob restored;
      restored.job = record.job;
      restored.places = job.places;
      restored.fingerprint = job.fingerprint;
      restored.sequence = record.sequence;
      restored.lease_span = record.lease_span;
      const absl::Status status = queue_->Restore(std::move(restored));
      FUZZ_REQUIRE(status.ok(), status.ToString());
      job.state = IsTerminal(record.job.state()) ? record.job.state() : v1::PrepJob::STATE_PENDING;
      job.cancelled = record.job.cancel_requested();
      job.must_fail = false;  // unless it was recorded, which the job's error shows
      job.has_destinations = false;
      job.step.reset();
      job.reported.clear();
      job.grants.clear();
      job.given_back.clear();
    }
  }

  // What must hold -------------------------------------------------------------------------------

  void Check() {
    TakeEvents();
    CheckStates();
    CheckWriters();
    CheckOwners();
  }

  // One job at a time has a destination. Those that have ended may only wait there, to be cleaned:
  // one because it was started, another because an earlier controller had started it.
  void CheckOwners() const {
    std::map<std::string, int> owners;
    for (const auto& [id, job] : jobs_) {
      if (!job.has_destinations || IsTerminal(job.state)) continue;
      const bool has_ended = job.cancelled || queue_->Get(id)->job.has_error();
      if (has_ended && !job.step.has_value() && !HasWriter(job)) continue;
      for (const JobPlace& place : job.places) {
        FUZZ_REQUIRE(++owners[place.destination] == 1, absl::StrCat(id, " ", place.destination));
      }
    }
  }

  void TakeEvents() {
    const QueueChanges changes = queue_->TakeChanges();
    const std::set<std::string> changed(changes.changed.begin(), changes.changed.end());
    for (const std::string& id : changes.recorded) {
      FUZZ_REQUIRE(changed.contains(id), id);
      // The last words of a controller may be lost; those that a client was told are not.
      if (!choices_.OneIn(6)) Write(id);
    }
    for (const QueueEvent& event : changes.events) {
      if (event.kind == QueueEvent::Kind::kLeaseDone ||
          event.kind == QueueEvent::Kind::kLeaseReturned ||
          event.kind == QueueEvent::Kind::kLeaseFailed) {
        FUZZ_REQUIRE(closed_leases_.insert(event.lease_id).second, event.lease_id);
      }
      if (event.kind != QueueEvent::Kind::kLeaseFailed) continue;
      const auto job = jobs_.find(event.job_id);
      if (job == jobs_.end() || job->second.cancelled) continue;
      if (event.status.code() == absl::StatusCode::kDataLoss) job->second.must_fail = true;
    }
    for (const std::string& id : changes.evicted) {
      FUZZ_REQUIRE(absl::IsNotFound(queue_->Get(id).status()), id);
      // It ended in this very operation, or before.
      const auto job = jobs_.find(id);
      FUZZ_REQUIRE(job != jobs_.end() && !job->second.step.has_value(), id);
      RequireNoWriter(id, job->second);
      jobs_.erase(job);
      records_.erase(id);
    }
  }

  void CheckStates() {
    for (auto& [id, job] : jobs_) {
      const auto view = queue_->Get(id);
      FUZZ_REQUIRE(view.ok(), view.status().ToString());
      const State now = view->job.state();
      if (IsTerminal(job.state)) {
        FUZZ_REQUIRE(now == job.state, id);
        continue;
      }
      FUZZ_REQUIRE(now == job.state || now == v1::PrepJob::STATE_RUNNING || IsTerminal(now), id);
      const v1::Progress& progress = view->job.progress();
      FUZZ_REQUIRE(progress.rank_tasks_done() <= progress.rank_tasks_total(), id);
      FUZZ_REQUIRE(progress.bytes_written() <= progress.bytes_total(), id);
      job.state = now;
      if (IsTerminal(now)) CheckEnd(id, job, view->job);
    }
  }

  void CheckEnd(const std::string& id, const ModelJob& job, const v1::PrepJob& proto) {
    FUZZ_REQUIRE(!job.step.has_value(), id);
    RequireNoWriter(id, job);
    switch (job.state) {
      case v1::PrepJob::STATE_SUCCEEDED:
        FUZZ_REQUIRE(!job.must_fail, id);
        RequireAllDone(id, job);
        RequireManifests(id, job, proto);
        break;
      case v1::PrepJob::STATE_FAILED:
        FUZZ_REQUIRE(!job.cancelled && proto.error().code() != 0, id);
        FUZZ_REQUIRE(!proto.error().message().empty(), id);
        break;
      default:
        FUZZ_REQUIRE(job.cancelled, id);
    }
  }

  static void RequireManifests(const std::string& id, const ModelJob& job,
                               const v1::PrepJob& proto) {
    FUZZ_REQUIRE(proto.other_manifests_size() + 1 == static_cast<int>(job.places.size()), id);
    FUZZ_REQUIRE(proto.manifest().uri() == job.places[0].destination, id);
    for (int t = 1; t < static_cast<int>(job.places.size()); ++t) {
      FUZZ_REQUIRE(proto.other_manifests(t - 1).uri() == job.places[t].destination, id);
    }
  }

  static void RequireAllDone(const std::string& id, const ModelJob& job) {
    if (job.is_complete) return;
    FUZZ_REQUIRE(job.written == job.planned, id);
  }

  bool MayWrite(const Holding& holding) const {
    return holding.state == v1::LeaseReport::STATE_RUNNING && clock_.Monotonic() < holding.stops_at;
  }

  bool HasWriter(const ModelJob& job) const {
    for (const ModelWorker& worker : workers_) {
      for (const auto& [lease, holding] : worker.held) {
        if (leases_.at(lease).job_serial == job.serial && MayWrite(holding)) return true;
      }
    }
    return false;
  }

  void RequireNoWriter(const std::string& id, const ModelJob& job) const {
    FUZZ_REQUIRE(!HasWriter(job), id);
  }

  // The job that a lease is of, unless it was evicted.
  ModelJob* JobOf(const std::string& lease_id) {
    const Granted& granted = leases_.at(lease_id);
    const auto found = jobs_.find(granted.lease.prep_job_id());
    if (found == jobs_.end() || found->second.serial != granted.job_serial) return nullptr;
    return &found->second;
  }

  void CheckWriters() {
    std::map<std::string, std::set<Task>> written;  // by destination, with its own ranks
    for (const ModelWorker& worker : workers_) {
      for (const auto& [id, holding] : worker.held) {
        if (!MayWrite(holding)) continue;
        const ModelJob* job = JobOf(id);
        FUZZ_REQUIRE(job != nullptr, id);
        for (const v1::RankTask& task : holding.lease.rank_tasks()) {
          if (holding.completed.contains(task.rank())) continue;
          const auto [destination, rank] = job->PlaceOf(task.rank());
          FUZZ_REQUIRE(written[destination].insert({holding.lease.region(), rank}).second,
                       absl::StrCat(id, " rank ", task.rank()));
        }
      }
    }
    for (const auto& [id, job] : jobs_) {
      if (!job.step.has_value()) continue;
      for (const JobPlace& place : job.places) {
        FUZZ_REQUIRE(written[place.destination].empty(), id);
      }
    }
  }

  // The end --------------------------------------------------------------------------------------

  // No more faults: everything is heard, done and answered.
  void Calm() {
    for (int round = 0; round < kCalmRounds; ++round) {
      for (ModelWorker& worker : workers_) {
        worker.draining = false;
        FinishWork(worker);
        CallInCalm(worker);
      }
      for (int more = 0; more < kMaxUnfinished; ++more) TakeStep();
      std::vector<std::string> open;
      for (const auto& [id, job] : jobs_) {
        if (job.step.has_value()) open.push_back(id);
      }
      for (const std::string& id : open) {
        FinishStep(id, absl::OkStatus());
        Check();
      }
      clock_.Advance(absl::Seconds(5));
      queue_->Tick();
      Check();
      if (std::all_of(jobs_.begin(), jobs_.end(),
                      [](const auto& entry) { return IsTerminal(entry.second.state); })) {
        return;
      }
    }
    for (const auto& [id, job] : jobs_) {
      FUZZ_REQUIRE(IsTerminal(job.state), absl::StrCat(id, " never ends"));
    }
  }

  void FinishWork(ModelWorker& worker) {
    for (auto& [id, holding] : worker.held) {
      if (holding.state != v1::LeaseReport::STATE_RUNNING) continue;
      if (withdrawn_[worker.id].contains(id) || !MayWrite(holding)) {
        holding.state = v1::LeaseReport::STATE_RETURNED;
      } else {
        Finish(holding);
      }
    }
  }

  void CallInCalm(ModelWorker& worker) {
    if (worker.is_calling) Answer(worker, /*is_lost=*/false);
    v1::SynchronizeRequest request;
    request.set_worker_id(worker.id);
    *request.mutable_build() = Build();
    request.set_memory_budget_bytes(1000);
    for (const auto& [id, holding] : worker.held) *request.add_leases() = ReportOf(id, holding);
    worker.sent = clock_.Monotonic();
    worker.is_calling = true;
    Deliver(request);
    Answer(worker, /*is_lost=*/false);
    Check();
  }

  ChoiceReader choices_;
  FakeClock clock_;
  std::unique_ptr<JobQueue> queue_;
  std::map<std::string, ModelJob> jobs_;  // those that the queue still knows
  std::vector<ModelWorker> workers_;
  std::map<std::string, Granted> leases_;                   // all that were ever granted
  std::map<std::string, std::set<std::string>> withdrawn_;  // by worker: held, but no longer named
  std::set<std::string> closed_leases_;
  std::set<std::string> free_leases_;
  std::map<std::string, Record> records_;
  int controller_ = 0;
  int last_lease_ = 0;
  int last_process_ = 0;
  int64_t last_serial_ = 0;
};

}  // namespace

void FuzzOne(const std::string& input) { World(input).Run(); }

}  // namespace shardprep
