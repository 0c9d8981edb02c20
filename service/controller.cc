#include "service/controller.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/time_util.h"
#include "kernels/status_macros.h"
#include "service/audit.h"
#include "service/controller_metrics.h"
#include "workers/grpc_status.h"
#include "workers/log.h"

namespace shardprep {
namespace {

constexpr int kDefaultPageSize = 50;
constexpr int kMaxPageSize = 1000;
constexpr int kMaxRecorderQueue = 10'000;
// Of one job, its plan's summary included: what a client may be sent is 4 MiB.
constexpr size_t kMaxJobBytes = 2 << 20;
constexpr absl::Duration kMinTimeout = absl::Milliseconds(1);
constexpr absl::Duration kMaxTimeout = absl::Hours(24 * 366);
// Of one step kind or another; the queue's own bounds keep far below it.
constexpr int kMaxStepperQueue = 100'000;

absl::Status CheckJobId(const std::string& id) {
  const auto alphanumeric = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  const bool good =
      !id.empty() && id.size() <= 63 && alphanumeric(id.front()) && alphanumeric(id.back()) &&
      std::all_of(id.begin(), id.end(), [&](char c) { return alphanumeric(c) || c == '-'; });
  if (good) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError(
                        "prep_job_id: want 1 to 63 characters of [a-z0-9-], starting and ending "
                        "with a letter or digit"),
                    "BAD_JOB_ID");
}

absl::Status CheckTimeout(const google::protobuf::Duration& timeout) {
  const bool good = timeout.nanos() >= 0 && timeout.nanos() < 1'000'000'000;
  const absl::Duration value =
      absl::Seconds(timeout.seconds()) + absl::Nanoseconds(good ? timeout.nanos() : 0);
  if (good && value >= kMinTimeout && value <= kMaxTimeout) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("timeout: ", timeout.seconds(), " s and ", timeout.nanos(), " ns, want ",
                   absl::FormatDuration(kMinTimeout), " to ", absl::FormatDuration(kMaxTimeout)));
}

absl::Status CheckCreate(const v1::CreatePrepJobRequest& request) {
  SP_RETURN_IF_ERROR(CheckJobId(request.prep_job_id()));
  return request.has_timeout() ? CheckTimeout(request.timeout()) : absl::OkStatus();
}

absl::Status Left() { return absl::CancelledError("the caller is gone"); }

absl::Status Stopping() {
  return WithReason(absl::UnavailableError("the controller is stopping"), "DRAINING");
}

void RunAll(const std::vector<std::function<void()>>& calls) {
  for (const auto& call : calls) call();
}

// Where an unfinished job of an earlier controller goes: spec and plan say it.
absl::StatusOr<std::vector<JobPlace>> PlacesOf(const v1::PrepJob& job) {
  const int targets = job.spec().targets_size();
  const v1::PlanSummary& plan = job.plan();
  if (targets == 0 || plan.other_targets_size() != targets - 1) {
    return absl::DataLossError(absl::StrCat("the record of prep job ", job.prep_job_id(), " has ",
                                            targets, " targets and the plans of ",
                                            plan.other_targets_size() + 1));
  }
  std::vector<JobPlace> places;
  for (int t = 0; t < targets; ++t) {
    const v1::PlanSummary& own = t == 0 ? plan : plan.other_targets(t - 1);
    places.push_back({job.spec().targets(t).destination_uri(), own.layout_fingerprint()});
  }
  return places;
}

const char* EventText(QueueEvent::Kind kind) {
  switch (kind) {
    case QueueEvent::Kind::kJobAdded:
      return "job created";
    case QueueEvent::Kind::kJobStarted:
      return "job started";
    case QueueEvent::Kind::kJobFinished:
      return "job finished";
    case QueueEvent::Kind::kLeaseGranted:
      return "lease granted";
    case QueueEvent::Kind::kLeaseDone:
      return "lease done";
    case QueueEvent::Kind::kLeaseReturned:
      return "lease returned";
    case QueueEvent::Kind::kLeaseFailed:
      return "lease failed";
    case QueueEvent::Kind::kWorkerJoined:
      return "worker joined";
    case QueueEvent::Kind::kWorkerLeft:
      return "worker left";
  }
  return "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Controller>> Controller::Start(const ControllerOptions& options,
                                                              const Clock* clock,
                                                              JobBackend* backend, JobStore* store,
                                                              ControllerMetrics* metrics,
                                                              std::function<std::string()> new_id) {
  std::unique_ptr<Controller> controller(
      new Controller(options, clock, backend, store, metrics, std::move(new_id)));
  SP_RETURN_IF_ERROR(controller->Load());
  controller->ticker_ = std::thread([c = controller.get()] { c->RunTicks(); });
  ::pthread_setname_np(controller->ticker_.native_handle(), "sp-tick");
  return {std::move(controller)};
}

Controller::Controller(const ControllerOptions& options, const Clock* clock, JobBackend* backend,
                       JobStore* store, ControllerMetrics* metrics,
                       std::function<std::string()> new_id)
    : options_(options),
      clock_(clock),
      backend_(backend),
      store_(store),
      metrics_(metrics),
      queue_(options.queue, clock, std::move(new_id)),
      planners_("sp-plan", options.planner_threads, options.max_waiting_plans),
      stepper_("sp-step", options.step_threads, kMaxStepperQueue),
      recorder_("sp-record", 1, kMaxRecorderQueue) {}

Controller::~Controller() {
  EndStreams();
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (ticker_.joinable()) ticker_.join();
  planners_.Stop();
  stepper_.Stop();
  recorder_.Stop();
  WriteRecords();
  RecordQuiet();
}

absl::Status Controller::Load() {
  SP_ASSIGN_OR_RETURN(const std::vector<JobRecord> records, store_->LoadAll());
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    for (const JobRecord& record : records) {
      NewJob restored;
      restored.job = record.job;
      if (!IsTerminal(record.job.state())) {
        SP_ASSIGN_OR_RETURN(restored.places, PlacesOf(record.job));
      }
      restored.fingerprint = record.fingerprint;
      restored.rank_tasks_total = record.job.progress().rank_tasks_total();
      restored.bytes_total = record.job.progress().bytes_total();
      restored.sequence = record.sequence;
      restored.lease_span = record.lease_span;
      SP_RETURN_IF_ERROR(queue_.Restore(std::move(restored)));
    }
    Settle(&calls);
  }
  RunAll(calls);
  return absl::OkStatus();
}

// PrepService -------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<PlannedJob>> Controller::TimedPlan(const v1::PrepJobSpec& spec,
                                                                  int64_t memory_budget_bytes) {
  const absl::Duration begin = clock_->Monotonic();
  absl::StatusOr<std::unique_ptr<PlannedJob>> planned = backend_->Plan(spec, memory_budget_bytes);
  metrics_->Planned(clock_->Monotonic() - begin, planned.status().code());
  return planned;
}

void Controller::Plan(const v1::PlanPrepJobRequest& request, IsCancelled cancelled,
                      const Done<v1::PlanSummary>& done) {
  auto work = [this, request, cancelled = std::move(cancelled), done] {
    done(DoPlan(request, cancelled));
  };
  if (planners_.Submit(std::move(work))) return;
  done(WithReason(absl::ResourceExhaustedError(absl::StrCat(
                      options_.max_waiting_plans, " plans are waiting to be made, the bound")),
                  "TOO_MANY_PLANS", {{"bound", absl::StrCat(options_.max_waiting_plans)}}));
}

absl::StatusOr<v1::PlanSummary> Controller::DoPlan(const v1::PlanPrepJobRequest& request,
                                                   const IsCancelled& cancelled) {
  if (stopping()) return Stopping();
  if (cancelled()) return Left();
  if (request.memory_budget_bytes() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory_budget_bytes: ", request.memory_budget_bytes(), ", want >= 0"));
  }
  SP_ASSIGN_OR_RETURN(const v1::PrepJobSpec spec, backend_->Normalize(request.spec()));
  const int64_t budget = request.memory_budget_bytes() > 0 ? request.memory_budget_bytes()
                                                           : options_.plan_memory_budget_bytes;
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<PlannedJob> planned, TimedPlan(spec, budget));
  return planned->facts().summary;
}

void Controller::Create(const v1::CreatePrepJobRequest& request, IsCancelled cancelled,
                        const Done<v1::PrepJob>& done) {
  auto work = [this, request, cancelled = std::move(cancelled), done] {
    if (stopping()) return done(Stopping());
    if (absl::Status status = CheckCreate(request); !status.ok()) return done(status);
    absl::StatusOr<v1::PrepJobSpec> spec = backend_->Normalize(request.spec());
    if (!spec.ok()) return done(spec.status());
    auto added = std::make_shared<NewJob>();
    if (request.has_timeout()) *added->job.mutable_timeout() = request.timeout();
    absl::StatusOr<std::optional<v1::PrepJob>> existing =
        Admit(request.prep_job_id(), *spec, cancelled, added.get());
    if (!existing.ok()) return done(existing.status());
    if (existing->has_value()) return done(**existing);
    const auto store = [this, added, cancelled, done] { done(Store(*added, cancelled)); };
    if (!recorder_.Submit(store)) done(RecorderRefuses());
  };
  if (planners_.Submit(std::move(work))) return;
  done(WithReason(absl::ResourceExhaustedError(absl::StrCat(
                      options_.max_waiting_plans, " plans are waiting to be made, the bound")),
                  "TOO_MANY_PLANS", {{"bound", absl::StrCat(options_.max_waiting_plans)}}));
}

absl::Status Controller::RecorderRefuses() {
  if (stopping()) return Stopping();
  return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                        kMaxRecorderQueue, " calls are waiting for the job store, the bound")),
                    "TOO_MANY_CALLS", {{"bound", absl::StrCat(kMaxRecorderQueue)}});
}

absl::StatusOr<std::optional<v1::PrepJob>> Controller::Existing(const std::string& job_id,
                                                                const v1::PrepJobSpec& spec) {
  absl::StatusOr<JobView> view = Get(job_id);
  if (!view.ok()) return std::optional<v1::PrepJob>();
  // The spec has no maps, so equal messages have equal bytes.
  if (view->job.spec().SerializeAsString() == spec.SerializeAsString()) {
    return std::optional<v1::PrepJob>(std::move(view->job));
  }
  return WithReason(
      absl::AlreadyExistsError(absl::StrCat("prep job ", job_id, " exists with another spec")),
      "JOB_ID_TAKEN", {{"prep_job_id", job_id}});
}

// Everything that can refuse a job, before anything is written. Fills in `added` unless the job
// exists.
absl::StatusOr<std::optional<v1::PrepJob>> Controller::Admit(const std::string& job_id,
                                                             const v1::PrepJobSpec& spec,
                                                             const IsCancelled& cancelled,
                                                             NewJob* added) {
  if (cancelled()) return Left();
  SP_ASSIGN_OR_RETURN(std::optional<v1::PrepJob> existing, Existing(job_id, spec));
  if (existing.has_value()) return existing;
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<PlannedJob> planned,
                      TimedPlan(spec, options_.plan_memory_budget_bytes));
  const PlanFacts& facts = planned->facts();
  added->job.set_prep_job_id(job_id);
  *added->job.mutable_spec() = spec;
  *added->job.mutable_plan() = facts.summary;
  added->places = facts.places;
  added->fingerprint = facts.fingerprint;
  for (const RegionTasks& region : facts.regions) {
    added->rank_tasks_total += static_cast<int32_t>(region.ranks.size());
    added->bytes_total += region.BytesOf(region.ranks);
  }
  if (added->job.ByteSizeLong() > kMaxJobBytes) {
    return absl::InvalidArgumentError(absl::StrCat("spec and plan take ", added->job.ByteSizeLong(),
                                                   " bytes, at most ", kMaxJobBytes));
  }
  if (cancelled()) return Left();
  SP_ASSIGN_OR_RETURN(const InspectedDestinations found, planned->Inspect());
  if (!found.complete.empty()) {
    // A controller may have died between publishing a manifest and removing the journal.
    SP_RETURN_IF_ERROR(planned->RemoveJournal());
    added->job.set_state(v1::PrepJob::STATE_SUCCEEDED);
    SetManifests(added->job, found.complete);
    return existing;
  }
  if (options_.worker_memory_budget_bytes > 0) {
    SP_RETURN_IF_ERROR(planned->RanksPerLease(options_.worker_memory_budget_bytes).status());
  }
  // Before the probe for room, which may make the destination's directory.
  absl::Status admitted;
  {
    absl::MutexLock lock(&mu_);
    admitted = queue_.CheckJob(*added);
  }
  // An equal request may have been faster.
  if (absl::IsAlreadyExists(admitted)) return Existing(job_id, spec);
  SP_RETURN_IF_ERROR(admitted);
  SP_RETURN_IF_ERROR(planned->CheckRoom(found));
  return existing;
}

// Runs on the recorder's thread, the only one that adds jobs: what CheckJob() allows stays allowed
// while the record is being written.
absl::StatusOr<v1::PrepJob> Controller::Store(NewJob added, const IsCancelled& cancelled) {
  if (cancelled()) return Left();
  SP_ASSIGN_OR_RETURN(std::optional<v1::PrepJob> existing,
                      Existing(added.job.prep_job_id(), added.job.spec()));
  if (existing.has_value()) return *existing;
  const auto now =
      google::protobuf::util::TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(clock_->Wall()));
  *added.job.mutable_create_time() = now;
  if (IsTerminal(added.job.state())) *added.job.mutable_end_time() = now;
  JobRecord record;
  record.job = added.job;
  record.fingerprint = added.fingerprint;
  if (record.job.state() == v1::PrepJob::STATE_UNSPECIFIED) {
    record.job.set_state(v1::PrepJob::STATE_PENDING);
  }
  record.job.mutable_progress()->set_rank_tasks_total(added.rank_tasks_total);
  record.job.mutable_progress()->set_bytes_total(added.bytes_total);
  bool forget_first = false;
  {
    absl::MutexLock lock(&mu_);
    SP_RETURN_IF_ERROR(queue_.CheckJob(added));
    record.sequence = queue_.next_sequence();
    // The id may be one that was dropped a moment ago.
    forget_first = evicted_.count(added.job.prep_job_id()) != 0;
  }
  if (forget_first) WriteRecords();
  SP_RETURN_IF_ERROR(store_->Insert(record));
  Calls calls;
  absl::StatusOr<JobView> view;
  {
    absl::MutexLock lock(&mu_);
    absl::Status status = queue_.AddJob(added);
    // Draining may have begun meanwhile; the record says that the job is to be done.
    if (!status.ok() && !leasing_stopped_) return status;
    if (!status.ok()) return Stopping();
    view = queue_.Get(added.job.prep_job_id());
    Settle(&calls);
  }
  RunAll(calls);
  if (!view.ok()) return view.status();
  return view->job;
}

void Controller::Cancel(const std::string& job_id, const Done<v1::PrepJob>& done) {
  if (absl::Status status = CheckJobId(job_id); !status.ok()) return done(status);
  auto work = [this, job_id, done] {
    Calls calls;
    absl::StatusOr<v1::PrepJob> job;
    {
      absl::MutexLock lock(&mu_);
      job = queue_.Cancel(job_id);
      Settle(&calls);
    }
    RunAll(calls);
    WriteRecords();
    done(std::move(job));
  };
  if (!recorder_.Submit(std::move(work))) done(RecorderRefuses());
}

absl::StatusOr<JobView> Controller::Get(const std::string& job_id) {
  SP_RETURN_IF_ERROR(CheckJobId(job_id));
  absl::MutexLock lock(&mu_);
  return queue_.Get(job_id);
}

absl::StatusOr<v1::ListPrepJobsResponse> Controller::List(const v1::ListPrepJobsRequest& request) {
  if (request.page_size() < 0 || request.page_size() > kMaxPageSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", request.page_size(), ", want 0 to ", kMaxPageSize));
  }
  std::set<v1::PrepJob::State> states;
  for (const int state : request.states()) {
    if (!v1::PrepJob::State_IsValid(state) || state == v1::PrepJob::STATE_UNSPECIFIED) {
      return absl::InvalidArgumentError(absl::StrCat("states: ", state, " is no state"));
    }
    states.insert(static_cast<v1::PrepJob::State>(state));
  }
  JobPage page;
  {
    absl::MutexLock lock(&mu_);
    SP_ASSIGN_OR_RETURN(
        page, queue_.List(request.page_size() > 0 ? request.page_size() : kDefaultPageSize,
                          request.page_token(), states));
  }
  v1::ListPrepJobsResponse response;
  for (v1::PrepJob& job : page.jobs) *response.add_prep_jobs() = std::move(job);
  response.set_next_page_token(page.next_page_token);
  return response;
}

absl::StatusOr<v1::ManifestReference> Controller::GetManifest(const std::string& job_id,
                                                              int32_t target) {
  SP_ASSIGN_OR_RETURN(const JobView view, Get(job_id));
  const int32_t targets = view.job.spec().targets_size();
  if (target < 0 || target >= targets) {
    return absl::InvalidArgumentError(
        absl::StrCat("target: ", target, ", but prep job ", job_id, " has ", targets,
                     targets == 1 ? " target" : " targets", ", counted from 0"));
  }
  if (view.job.state() == v1::PrepJob::STATE_SUCCEEDED) {
    SP_CHECK(view.job.other_manifests_size() == targets - 1);
    return target == 0 ? view.job.manifest() : view.job.other_manifests(target - 1);
  }
  const std::string state = v1::PrepJob::State_Name(view.job.state());
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat("prep job ", job_id, " has no manifest: ", state)),
      "NO_MANIFEST", {{"prep_job_id", job_id}, {"state", state}});
}

absl::Status Controller::Observe(const std::string& job_id,
                                 const std::shared_ptr<JobObserver>& observer) {
  SP_RETURN_IF_ERROR(CheckJobId(job_id));
  absl::MutexLock lock(&mu_);
  if (streams_ended_) return Stopping();
  SP_RETURN_IF_ERROR(queue_.Get(job_id).status());
  if (static_cast<int>(observers_.size()) >= options_.max_observers) {
    return WithReason(absl::ResourceExhaustedError(
                          absl::StrCat(options_.max_observers, " watches are open, the bound")),
                      "TOO_MANY_WATCHES", {{"bound", absl::StrCat(options_.max_observers)}});
  }
  observers_.emplace(job_id, observer);
  return absl::OkStatus();
}

void Controller::Unobserve(const std::string& job_id, const JobObserver* observer) {
  // Released after the lock: the last reference may be ours.
  std::vector<std::shared_ptr<JobObserver>> kept;
  absl::MutexLock lock(&mu_);
  const auto [begin, end] = observers_.equal_range(job_id);
  for (auto at = begin; at != end;) {
    std::shared_ptr<JobObserver> other = at->second.lock();
    const bool gone = other == nullptr || other.get() == observer;
    if (other != nullptr) kept.push_back(std::move(other));
    at = gone ? observers_.erase(at) : std::next(at);
  }
}

bool Controller::stopping() {
  absl::MutexLock lock(&mu_);
  return stopping_;
}

bool Controller::streams_ended() {
  absl::MutexLock lock(&mu_);
  return streams_ended_;
}

// Steps -------------------------------------------------------------------------------------------

void Controller::RunStep(const JobStep& step) {
  if (stopping()) return;  // left for the next controller
  const std::string& id = step.job_id;
  if (step.kind == JobStep::Kind::kStart) {
    const auto started = std::make_shared<absl::StatusOr<StartedJob>>(StartJob(id));
    const auto finish = [this, id, started] { FinishStart(id, std::move(*started)); };
    if (!recorder_.Submit(finish) && !stopping()) finish();
    return;
  }
  absl::StatusOr<std::vector<v1::ManifestReference>> manifests;
  absl::Status cleaned;
  absl::StatusOr<std::shared_ptr<PlannedJob>> plan = PlanOf(id);
  if (!plan.ok()) {
    manifests = plan.status();
    cleaned = plan.status();
  } else if (step.kind == JobStep::Kind::kCommit) {
    manifests = (*plan)->Commit();
  } else {
    // A job of an earlier controller has not claimed it yet.
    cleaned = (*plan)->ClaimDestination();
    if (cleaned.ok()) {
      cleaned = step.kind == JobStep::Kind::kRemove ? (*plan)->RemoveOutput()
                                                    : (*plan)->RemoveUnrecorded();
    }
  }
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    --steps_;
    if (step.kind == JobStep::Kind::kCommit) {
      queue_.CommitFinished(id, manifests);
    } else {
      queue_.CleanFinished(id, cleaned);
    }
    Settle(&calls);
  }
  RunAll(calls);
}

// On the recorder's thread: that the job runs is durable before its first lease is given, since
// after a restart only jobs whose record says that leases may be open wait for the fence.
void Controller::FinishStart(const std::string& job_id, absl::StatusOr<StartedJob> started) {
  absl::Status recorded;
  if (started.ok() && started->complete.empty()) {
    if (absl::StatusOr<JobView> view = Get(job_id); view.ok()) {
      JobRecord record = RecordOf(*std::move(view));
      record.job.set_state(v1::PrepJob::STATE_RUNNING);
      record.lease_span = std::max(record.lease_span, options_.queue.LeaseSpan());
      recorded = store_->Update(record);
    }
  }
  // No space or a passing fault of the store is no fault of the job.
  const bool postponed = absl::IsResourceExhausted(recorded) || absl::IsUnavailable(recorded);
  if (!recorded.ok()) {
    Log(LogLevel::kError, "controller", "job not recorded as running",
        {{"job", job_id}, {"status", recorded}, {"postponed", postponed}});
    started = recorded;
  }
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    --steps_;
    // Planned anew when it is tried again: the plan is large, and what it saw may change.
    if (!started.ok()) DropPlan(job_id);
    if (postponed) {
      queue_.StartPostponed(job_id);
    } else {
      queue_.StartFinished(job_id, std::move(started));
    }
    Settle(&calls);
  }
  RunAll(calls);
}

void Controller::DropPlan(const std::string& job_id) {
  const auto plan = plans_.find(job_id);
  if (plan == plans_.end()) return;
  plan->second->ReleaseDestination();
  plans_.erase(plan);
}

// The plan of an unfinished job; made again for jobs that an earlier controller started.
absl::StatusOr<std::shared_ptr<PlannedJob>> Controller::PlanOf(const std::string& job_id) {
  v1::PrepJobSpec spec;
  {
    absl::MutexLock lock(&mu_);
    const auto found = plans_.find(job_id);
    if (found != plans_.end()) return found->second;
    SP_ASSIGN_OR_RETURN(JobView view, queue_.Get(job_id));
    spec = std::move(*view.job.mutable_spec());
  }
  SP_ASSIGN_OR_RETURN(std::unique_ptr<PlannedJob> planned,
                      TimedPlan(spec, options_.plan_memory_budget_bytes));
  std::shared_ptr<PlannedJob> shared = std::move(planned);
  absl::MutexLock lock(&mu_);
  plans_[job_id] = shared;
  return shared;
}

// The opposite of FinishStart(): a drain has closed the leases and none follows, so nothing is left
// to wait for. A job that was ever leased keeps a span above zero, since cancelling it removes what
// it wrote.
void Controller::RecordQuiet() {
  absl::MutexLock lock(&mu_);
  if (!leasing_stopped_) return;
  for (const std::string& job_id : queue_.JobsWithoutLeases()) {
    absl::StatusOr<JobView> view = queue_.Get(job_id);
    if (!view.ok()) continue;
    JobRecord record = RecordOf(*std::move(view));
    record.lease_span = std::min(record.lease_span, absl::Nanoseconds(1));
    if (const absl::Status status = store_->Update(record); !status.ok()) {
      Log(LogLevel::kWarning, "controller", "job will wait for leases that are closed",
          {{"job", job_id}, {"status", status}});
    }
  }
}

// Whether a long step of the job should go on.
absl::Status Controller::CheckWanted(const std::string& job_id) {
  absl::MutexLock lock(&mu_);
  if (stopping_) return Stopping();
  SP_ASSIGN_OR_RETURN(const JobView view, queue_.Get(job_id));
  if (view.job.cancel_requested()) return absl::CancelledError("the job is cancelled");
  return absl::OkStatus();
}

absl::StatusOr<StartedJob> Controller::StartJob(const std::string& job_id) {
  SP_ASSIGN_OR_RETURN(const std::shared_ptr<PlannedJob> plan, PlanOf(job_id));
  StartedJob started;
  started.fingerprint = plan->facts().fingerprint;
  started.source_token = plan->facts().source_token;
  // Before looking: what is seen there must hold until the job writes.
  SP_RETURN_IF_ERROR(plan->ClaimDestination());
  SP_ASSIGN_OR_RETURN(const std::vector<std::string> damaged,
                      plan->ForgetDamagedParts([&] { return CheckWanted(job_id); }));
  for (const std::string& key : damaged) {
    Log(LogLevel::kWarning, "controller", "recorded part is damaged and made again",
        {{"job", job_id}, {"key", key}});
  }
  SP_ASSIGN_OR_RETURN(const InspectedDestinations found, plan->Inspect());
  started.complete = found.complete;
  started.regions = found.regions;
  started.ranks_per_lease = [plan](int64_t budget) { return plan->RanksPerLease(budget); };
  if (!started.complete.empty()) {
    // A controller may have died between publishing a manifest and removing the journal.
    if (absl::Status status = plan->RemoveJournal(); !status.ok()) {
      Log(LogLevel::kWarning, "controller", "journal of a complete artefact not removed",
          {{"job", job_id}, {"status", status}});
    }
    return started;
  }
  SP_RETURN_IF_ERROR(plan->ClearLeftovers());
  // Others may have filled the place since the job was created.
  SP_RETURN_IF_ERROR(plan->CheckRoom(found));
  return started;
}

// Workers -----------------------------------------------------------------------------------------

uint64_t Controller::Synchronize(const v1::SynchronizeRequest& request, absl::Duration max_wait,
                                 const Done<v1::SynchronizeResponse>& done) {
  Calls calls;
  uint64_t token = 0;
  {
    absl::MutexLock lock(&mu_);
    absl::StatusOr<v1::SynchronizeResponse> answer = v1::SynchronizeResponse();
    if (streams_ended_) {
      answer = Stopping();
    } else if (absl::Status status = queue_.Report(request); !status.ok()) {
      answer = status;
    } else {
      // A worker makes one call at a time, so an older one is dead.
      for (auto at = polls_.begin(); at != polls_.end();) {
        if (at->second.worker_id != request.worker_id()) {
          ++at;
          continue;
        }
        calls.push_back([older = std::move(at->second.done)] {
          older(absl::AbortedError("the worker has called again"));
        });
        at = polls_.erase(at);
      }
      *answer = queue_.Desired(request.worker_id());
      if (answer->leases().empty() && request.leases().empty() && !request.draining() &&
          !leasing_stopped_ && max_wait > absl::ZeroDuration()) {
        token = ++last_token_;
        polls_[token] = {request.worker_id(),
                         clock_->Monotonic() + std::min(max_wait, options_.poll), done};
      }
    }
    if (token == 0) calls.push_back([done, answer] { done(answer); });
    Settle(&calls);
  }
  RunAll(calls);
  return token;
}

void Controller::CancelPoll(uint64_t token) {
  Done<v1::SynchronizeResponse> done;
  {
    absl::MutexLock lock(&mu_);
    const auto found = polls_.find(token);
    if (found == polls_.end()) return;
    done = std::move(found->second.done);
    polls_.erase(found);
  }
  done(Left());
}

void Controller::AnswerPolls(Calls* calls) {
  const absl::Duration now = clock_->Monotonic();
  for (auto at = polls_.begin(); at != polls_.end();) {
    v1::SynchronizeResponse response = queue_.Desired(at->second.worker_id);
    if (response.leases().empty() && at->second.until > now && !leasing_stopped_) {
      ++at;
      continue;
    }
    calls->push_back([done = std::move(at->second.done), response] { done(response); });
    at = polls_.erase(at);
  }
}

void Controller::WorkerGone(const std::string& worker_id, const std::string& how) {
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    queue_.WorkerGone(worker_id, how);
    Settle(&calls);
  }
  RunAll(calls);
}

void Controller::SetSilentWorkerHandler(std::function<void(const std::string&)> handler) {
  absl::MutexLock lock(&mu_);
  silent_worker_handler_ = std::move(handler);
}

// What follows from changes
// ------------------------------------------------------------------------

void Controller::Notify(const std::string& job_id, Calls* calls) {
  const auto [begin, end] = observers_.equal_range(job_id);
  for (auto at = begin; at != end;) {
    std::shared_ptr<JobObserver> observer = at->second.lock();
    if (observer == nullptr) {
      at = observers_.erase(at);
      continue;
    }
    calls->push_back([observer = std::move(observer)] { observer->OnJobChanged(); });
    ++at;
  }
}

void Controller::Settle(Calls* calls) {
  while (true) {
    while (std::optional<JobStep> step = queue_.NextStep()) {
      // Refused only while stopping, when the step is left for the next controller.
      if (stepper_.Submit([this, step = *step] { RunStep(step); })) ++steps_;
    }
    QueueChanges changes = queue_.TakeChanges();
    if (changes.changed.empty() && changes.events.empty() && changes.evicted.empty() &&
        !changes.leasable) {
      return;
    }
    for (const std::string& id : changes.changed) Notify(id, calls);
    unrecorded_.insert(changes.recorded.begin(), changes.recorded.end());
    evicted_.insert(changes.evicted.begin(), changes.evicted.end());
    if (!changes.recorded.empty() || !changes.evicted.empty()) SubmitRecords();
    for (const QueueEvent& event : changes.events) {
      if (event.kind == QueueEvent::Kind::kJobFinished) DropPlan(event.job_id);
      if (event.kind == QueueEvent::Kind::kWorkerLeft && silent_worker_handler_) {
        calls->push_back([handler = silent_worker_handler_, id = event.worker_id] { handler(id); });
      }
    }
    if (!changes.events.empty()) {
      calls->push_back([this, events = std::move(changes.events)] {
        for (const QueueEvent& event : events) Report(event);
      });
    }
    if (changes.leasable) AnswerPolls(calls);
  }
}

void Controller::Report(const QueueEvent& event) const {
  metrics_->Count(event, clock_->Wall());
  const char* text = EventText(event.kind);
  const LogLevel level = event.status.ok() ? LogLevel::kInfo : LogLevel::kWarning;
  switch (event.kind) {
    case QueueEvent::Kind::kJobAdded:
      Log(level, "controller", text, {{"job", event.job_id}});
      break;
    case QueueEvent::Kind::kJobStarted:
      Log(level, "controller", text, {{"job", event.job_id}, {"waited", event.duration}});
      break;
    case QueueEvent::Kind::kJobFinished:
      Log(level, "controller", text,
          {{"job", event.job_id},
           {"state", v1::PrepJob::State_Name(event.state)},
           {"duration", event.duration},
           {"status", event.status}});
      AuditEnd(event.job_id, event.state, event.status);
      break;
    case QueueEvent::Kind::kWorkerJoined:
      Log(level, "controller", text, {{"worker", event.worker_id}});
      break;
    case QueueEvent::Kind::kWorkerLeft:
      Log(event.lost_leases > 0 ? LogLevel::kWarning : LogLevel::kInfo, "controller", text,
          {{"worker", event.worker_id},
           {"how", event.status.message()},
           {"lost_leases", event.lost_leases}});
      break;
    default:
      Log(level, "controller", text,
          {{"job", event.job_id},
           {"worker", event.worker_id},
           {"lease", event.lease_id},
           {"region", event.region},
           {"ranks", event.ranks},
           {"attempt", event.attempt},
           {"status", event.status}});
  }
}

JobRecord Controller::RecordOf(JobView view) {
  JobRecord record;
  record.fingerprint = view.fingerprint;
  record.sequence = view.sequence;
  record.lease_span = view.lease_span;
  record.job = std::move(view.job);
  return record;
}

void Controller::SubmitRecords() {
  if (records_submitted_ || (unrecorded_.empty() && evicted_.empty())) return;
  // Refused while stopping, when what is due is written once more by the destructor, and when the
  // recorder is behind: the next tick submits it then.
  records_submitted_ = recorder_.Submit([this] { WriteRecords(); });
}

// On the recorder's thread. A record that cannot be written stays due and is tried again: the job's
// own course does not depend on it.
void Controller::WriteRecords() {
  std::set<std::string> due;
  std::set<std::string> evicted;
  {
    absl::MutexLock lock(&mu_);
    due.swap(unrecorded_);
    evicted.swap(evicted_);
    records_submitted_ = false;
  }
  std::set<std::string> failed;
  for (const std::string& id : due) {
    absl::StatusOr<JobView> view = Get(id);
    if (!view.ok()) continue;  // evicted meanwhile
    const absl::Status status = store_->Update(RecordOf(*std::move(view)));
    if (status.ok()) continue;
    Log(LogLevel::kError, "controller", "job not recorded", {{"job", id}, {"status", status}});
    failed.insert(id);
  }
  std::set<std::string> kept;
  for (const std::string& id : evicted) {
    const absl::Status status = store_->Remove(id);
    if (status.ok()) continue;
    Log(LogLevel::kError, "controller", "job not forgotten", {{"job", id}, {"status", status}});
    kept.insert(id);
  }
  if (failed.empty() && kept.empty()) return;
  absl::MutexLock lock(&mu_);
  unrecorded_.merge(failed);
  evicted_.merge(kept);
  records_not_before_ = clock_->Monotonic() + options_.record_retry;
}

void Controller::Tick() {
  Calls calls;
  QueueStats stats;
  {
    absl::MutexLock lock(&mu_);
    queue_.Tick();
    Settle(&calls);
    // Tasks that waited for their next attempt, and calls that were held long enough.
    AnswerPolls(&calls);
    Settle(&calls);
    if (records_not_before_ <= clock_->Monotonic()) SubmitRecords();
    stats = queue_.Stats();
  }
  metrics_->SetStats(stats);
  RunAll(calls);
}

void Controller::RunTicks() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), options_.tick)) return;
    }
    Tick();
  }
}

// Drain -------------------------------------------------------------------------------------------

void Controller::StopLeasing() {
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    leasing_stopped_ = true;
    queue_.StopLeasing();
    Settle(&calls);
  }
  RunAll(calls);
}

void Controller::WithdrawLeases() {
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    queue_.WithdrawAll();
    Settle(&calls);
  }
  RunAll(calls);
}

bool Controller::AwaitQuiet(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto quiet = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return steps_ == 0 && queue_.Stats().leases == 0;
  };
  return mu_.AwaitWithDeadline(absl::Condition(&quiet), deadline);
}

void Controller::EndStreams() {
  Calls calls;
  {
    absl::MutexLock lock(&mu_);
    if (streams_ended_) return;
    streams_ended_ = true;
    for (auto& [token, poll] : polls_) {
      calls.push_back([done = std::move(poll.done)] { done(Stopping()); });
    }
    polls_.clear();
    std::set<std::string> watched;
    for (const auto& [job_id, observer] : observers_) watched.insert(job_id);
    for (const std::string& job_id : watched) Notify(job_id, &calls);
  }
  RunAll(calls);
}

}  // namespace shardprep
