// Rules of the queue
//
// 1. A job is PENDING until its start step has planned it again; then it is RUNNING and its rank
//    tasks can be leased; when all are done and no lease is open, its commit step publishes it.
//    Jobs start in order of creation, except those that must wait: a job never starts while
//    another unfinished job that was started or created before it has one of its destinations, nor
//    before the fences of an earlier controller there have passed. So of two jobs with one
//    fingerprint at a destination the second finds the work of the first. A job of several targets
//    takes all of its destinations at once when it starts and gives them back at once at its end;
//    until then it holds none but keeps each from jobs that were created later. Since jobs wait
//    only for started ones, which need nothing more, and for older ones, none wait for each other.
// 2. A lease names one region and as many of its open ranks as fit the worker. A worker holds one
//    lease. It may write until (sending of its call) + duration - margin on its own clock; here the
//    lease is open until (answer to that call) + duration + margin, or until its end is reported,
//    or until its worker's process is known to have ended. A withdrawn lease is no longer named to
//    its worker, so no longer renewed, but it stays open by the same rule. Not being mentioned in
//    a report never closes a lease: the answer that granted it may still be under way.
// 3. While any lease of a job is open its destinations are taken: nothing else may write there.
// 4. A failed attempt counts against each rank task that the lease leaves undone. UNAVAILABLE,
//    ABORTED, RESOURCE_EXHAUSTED and the death or silence of the worker allow another attempt, up
//    to the limit; then, or at once for any other code, the job fails with the first cause of that
//    task. RESOURCE_EXHAUSTED with reason NO_SPACE is final too: a full disk is the operator's to
//    empty, and what was finished is resumed then. Leases that a draining or stopped worker gives
//    back do not count.
// 5. A job that fails, is cancelled or runs out of time stops: its leases are withdrawn, and it
//    reaches its final state when the last of them is closed, those of an earlier controller
//    included. `error` and `cancel_requested` show why before that. If it ever held a lease, or
//    tried to commit, its clean step comes first: a cancelled job's output is removed, of a failed
//    one's all but the parts that it recorded, which the next run resumes. A job that is cancelled
//    during its clean step gets another. A cancel or a deadline that comes during the commit loses
//    when the commit succeeds: others may have seen the manifest. A target that was published stays
//    for the same reason, whatever becomes of the job's others.
// 6. Reports of leases that are not open, or not the reporting worker's, are ignored: they are
//    late, and what they say has been decided already. A worker that says that it holds one is
//    told to stop it, and gets no other before it has: so do those that an earlier controller
//    leased to.
// 7. Leases are given to running jobs in order of creation. A job with a failed attempt goes behind
//    all that run at that time, so that a job that fails or loses its workers holds up no other,
//    and jobs that come later do not hold up it.
#include "service/job_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/util/time_util.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using google::protobuf::util::TimeUtil;

constexpr int64_t kMaxPageBytes = 1 << 20;
constexpr size_t kMaxWorkerIdSize = 128;
constexpr int kMaxReports = 16;
constexpr int kMaxReportedRanks = 4096;
constexpr size_t kMaxReportedStages = 16;
constexpr size_t kMaxStageNameSize = 32;
constexpr size_t kMaxDeviceSize = 64;
constexpr size_t kMaxReportedErrorBytes = 64 << 10;

bool AllowsAnotherAttempt(const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return ReasonOf(status).reason != "NO_SPACE";
  return absl::IsUnavailable(status) || absl::IsAborted(status);
}

constexpr size_t kMaxTokenSize = 64;

// "before-<sequence>-<states>": the page before that job of the list of those states.
int64_t StatesMask(const std::set<v1::PrepJob::State>& states) {
  int64_t mask = 0;
  for (const v1::PrepJob::State state : states) mask |= int64_t{1} << state;
  return mask;
}

std::string PageToken(int64_t before, int64_t mask) {
  return absl::StrCat("before-", before, "-", mask);
}

absl::StatusOr<int64_t> ParsePageToken(const std::string& token, int64_t mask) {
  const std::vector<std::string> words = absl::StrSplit(token.substr(0, kMaxTokenSize), '-');
  int64_t before = 0;
  int64_t made_for = 0;
  if (words.size() != 3 || !absl::SimpleAtoi(words[1], &before) ||
      !absl::SimpleAtoi(words[2], &made_for) || before < 1 ||
      PageToken(before, made_for) != token) {
    return WithReason(absl::InvalidArgumentError("page_token: not from an earlier answer"),
                      "BAD_PAGE_TOKEN");
  }
  if (made_for != mask) {
    return WithReason(absl::InvalidArgumentError("page_token: from an answer for other states"),
                      "BAD_PAGE_TOKEN");
  }
  return before;
}

google::protobuf::Timestamp ToTimestamp(absl::Time time) {
  return TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(time));
}

google::protobuf::Duration ToDuration(absl::Duration duration) {
  return TimeUtil::NanosecondsToDuration(absl::ToInt64Nanoseconds(duration));
}

absl::Time FromTimestamp(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

absl::Duration FromDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

// `status` with `suffix` behind its message.
absl::Status Followed(const absl::Status& status, const std::string& suffix) {
  return WithMessage(status, absl::StrCat(status.message(), suffix));
}

// By their numbers (v1::RankTask), for people: "ranks 0,1", "replicated tensors of targets 0,1". Of
// -1 alone the target is not named: most jobs have one.
std::string RankText(const std::vector<int32_t>& numbers) {
  std::vector<int32_t> ranks;
  std::vector<int32_t> targets;  // of replicated tensors
  for (const int32_t number : numbers) {
    if (number >= 0) {
      ranks.push_back(number);
    } else {
      targets.push_back(-1 - number);
    }
  }
  std::vector<std::string> texts;
  if (!ranks.empty()) {
    texts.push_back(
        absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ",")));
  }
  if (targets.size() == 1 && targets[0] == 0) {
    texts.push_back("replicated tensors");
  } else if (!targets.empty()) {
    texts.push_back(absl::StrCat("replicated tensors of ",
                                 targets.size() == 1 ? "target " : "targets ",
                                 absl::StrJoin(targets, ",")));
  }
  return absl::StrJoin(texts, " and ");
}

// `destinations` is a set of them, or a map by them.
template <typename Destinations>
bool IsAnyIn(const std::vector<JobPlace>& places, const Destinations& destinations) {
  return std::any_of(places.begin(), places.end(), [&](const JobPlace& place) {
    return destinations.count(place.destination) != 0;
  });
}

void AddTo(std::set<std::string>& destinations, const std::vector<JobPlace>& places) {
  for (const JobPlace& place : places) destinations.insert(place.destination);
}

bool IsWorkerId(const std::string& id) {
  if (id.empty() || id.size() > kMaxWorkerIdSize) return false;
  return std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_';
  });
}

bool IsStageName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxStageNameSize &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
}

absl::Status CheckBuild(const v1::WorkerBuild& want, const v1::WorkerBuild& found) {
  const auto mismatch = [](const char* what, const std::string& w, const std::string& f) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat("worker build: ", what, " is \"",
                                                                 f, "\", want \"", w, "\"")),
                      "BUILD_MISMATCH", {{"field", what}, {"expected", w}, {"found", f}});
  };
  if (want.format_version() != found.format_version()) {
    return mismatch("format_version", want.format_version(), found.format_version());
  }
  if (want.policy_digest() != found.policy_digest()) {
    return mismatch("policy_digest", want.policy_digest(), found.policy_digest());
  }
  if (want.tool_version() != found.tool_version()) {
    return mismatch("tool_version", want.tool_version(), found.tool_version());
  }
  return absl::OkStatus();
}

}  // namespace

enum class JobQueue::Phase : int {
  kPending,
  kStarting,
  kLeasing,
  kStopping,  // failed or cancelled, leases still open
  kCommitDue,
  kCommitting,
  kCleanDue,
  kCleaning,
  kFinished,
};

struct JobQueue::Task {
  enum class State { kOpen, kLeased, kDone };
  int32_t rank = 0;
  State state = State::kOpen;
  int failed_attempts = 0;
  absl::Duration not_before = -absl::InfiniteDuration();
  absl::Status first_cause;
};

struct JobQueue::Region {
  std::vector<Task> tasks;
  RegionTasks sizes;  // bytes of each rank
  int32_t done = 0;
};

struct JobQueue::Job {
  int64_t sequence = 0;
  int64_t version = 1;
  Phase phase = Phase::kPending;
  // Without progress, which is counted below, and without what lists leave out: that is kept apart.
  v1::PrepJob proto;
  std::unique_ptr<v1::PlanSummary> plan;
  std::string policy_json;
  std::map<int, std::string> state_dicts;  // by target
  int64_t bytes = 0;                       // serialised, as added
  std::vector<JobPlace> places;            // by target
  std::string fingerprint;
  std::string source_token;
  absl::Duration created;  // these three monotonic
  absl::Duration deadline = absl::InfiniteDuration();
  absl::Duration fenced_until = -absl::InfiniteDuration();  // leases of an earlier controller
  absl::Duration lease_span;
  int64_t turn = 0;
  std::function<absl::StatusOr<int32_t>(int64_t)> ranks_per_lease;
  std::vector<Region> regions;
  size_t first_open_region = 0;  // those before it are done
  std::set<std::string> leases;
  bool wrote = false;     // perhaps: a lease was given, or a commit tried, by whichever controller
  bool removing = false;  // in kCleaning: all that it wrote, not only what it has not recorded
  absl::Status error;
  int step_attempts = 0;
  absl::Duration step_not_before = -absl::InfiniteDuration();

  // Progress. Bytes of open leases come on top.
  int64_t tasks_total = 0;
  int64_t tasks_done = 0;
  int64_t tasks_resumed = 0;
  int64_t bytes_total = 0;
  int64_t bytes_recorded = 0;
  int64_t bytes_read = 0;
  int64_t attempts_failed = 0;
  std::map<std::string, double> stage_seconds;
  std::string device;

  bool started() const { return phase != Phase::kPending && phase != Phase::kFinished; }

  // Puts back what is kept apart from `proto`.
  void RestoreTexts(v1::PrepJobSpec& spec) const {
    if (!policy_json.empty()) spec.set_alignment_policy_json(policy_json);
    for (const auto& [target, text] : state_dicts) {
      spec.mutable_targets(target)->set_state_dict_json(text);
    }
  }

  v1::PrepJobSpec Spec() const {
    v1::PrepJobSpec spec = proto.spec();
    RestoreTexts(spec);
    return spec;
  }
};

struct JobQueue::Lease {
  std::string id;
  std::string worker_id;
  Job* job = nullptr;
  int32_t region = 0;
  std::vector<int32_t> ranks;
  std::set<int32_t> completed;
  int32_t attempt = 0;
  bool withdrawn = false;
  absl::Duration renewed;  // when the last answer that names it was made
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  std::map<std::string, double> stage_seconds;
};

struct JobQueue::Worker {
  std::string id;
  int64_t memory_budget_bytes = 0;
  std::string device;
  bool draining = false;
  bool holds_unknown = false;  // it said that it holds a lease that is not open here
  absl::Duration last_seen;
  std::set<std::string> leases;
};

JobQueue::JobQueue(JobQueueOptions options, const Clock* clock,
                   std::function<std::string()> new_lease_id)
    : options_(std::move(options)), clock_(clock), new_lease_id_(std::move(new_lease_id)) {
  SP_CHECK(options_.max_finished_jobs > 0 && options_.max_attempts > 0);
}

JobQueue::~JobQueue() = default;

// Jobs --------------------------------------------------------------------------------------------

JobQueue::Job* JobQueue::FindJob(const std::string& job_id) const {
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? nullptr : found->second.get();
}

absl::Status JobQueue::CheckJob(const NewJob& job) const {
  const std::string& id = job.job.prep_job_id();
  if (FindJob(id) != nullptr) {
    return WithReason(absl::AlreadyExistsError(absl::StrCat("prep job ", id, " exists")),
                      "JOB_ID_TAKEN", {{"prep_job_id", id}});
  }
  if (IsTerminal(job.job.state())) return absl::OkStatus();
  if (draining_) {
    return WithReason(absl::UnavailableError("the controller is draining"), "DRAINING");
  }
  if (static_cast<int>(unfinished_.size()) >= options_.max_unfinished_jobs) {
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          "the queue holds ", unfinished_.size(), " unfinished jobs, its bound")),
                      "QUEUE_FULL", {{"bound", absl::StrCat(options_.max_unfinished_jobs)}});
  }
  const auto bytes = static_cast<int64_t>(job.job.ByteSizeLong());
  if (unfinished_bytes_ + bytes > options_.max_job_bytes) {
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          "unfinished jobs and this one take ", unfinished_bytes_ + bytes,
                          " bytes, the bound is ", options_.max_job_bytes)),
                      "QUEUE_FULL", {{"bound", absl::StrCat(options_.max_job_bytes)}});
  }
  for (const auto& [sequence, other] : unfinished_) {
    SP_RETURN_IF_ERROR(CheckPlaces(*other, job.places));
  }
  return absl::OkStatus();
}

absl::Status JobQueue::CheckPlaces(const Job& other, const std::vector<JobPlace>& wanted) {
  for (const JobPlace& place : wanted) {
    for (const JobPlace& theirs : other.places) {
      if (theirs.destination != place.destination || theirs.fingerprint == place.fingerprint) {
        continue;
      }
      const std::string& other_id = other.proto.prep_job_id();
      return WithReason(absl::FailedPreconditionError(absl::StrCat(
                            "destination ", place.destination, " is taken by unfinished prep job ",
                            other_id, ": its layout fingerprint is ", theirs.fingerprint,
                            ", this one's ", place.fingerprint)),
                        "DESTINATION_BUSY",
                        {{"destination", place.destination}, {"prep_job_id", other_id}});
    }
  }
  return absl::OkStatus();
}

// Sets what every job has, whatever its state.
JobQueue::Job& JobQueue::Enter(NewJob added, int64_t sequence) {
  auto owned = std::make_unique<Job>();
  Job& job = *owned;
  job.sequence = sequence;
  next_sequence_ = sequence + 1;
  job.bytes = static_cast<int64_t>(added.job.ByteSizeLong());
  job.proto = std::move(added.job);
  job.plan.reset(job.proto.release_plan());
  job.policy_json = job.proto.spec().alignment_policy_json();
  if (job.proto.has_spec()) job.proto.mutable_spec()->clear_alignment_policy_json();
  for (int t = 0; t < job.proto.spec().targets_size(); ++t) {
    if (job.proto.spec().targets(t).state_dict_json().empty()) continue;
    v1::Target& target = *job.proto.mutable_spec()->mutable_targets(t);
    job.state_dicts[t] = std::move(*target.mutable_state_dict_json());
    target.clear_state_dict_json();
  }
  job.places = std::move(added.places);
  job.fingerprint = std::move(added.fingerprint);
  job.tasks_total = added.rank_tasks_total;
  job.bytes_total = added.bytes_total;
  job.lease_span = added.lease_span;
  if (!job.proto.has_create_time()) *job.proto.mutable_create_time() = ToTimestamp(clock_->Wall());
  const absl::Duration age = clock_->Wall() - FromTimestamp(job.proto.create_time());
  job.created = clock_->Monotonic() - std::max(age, absl::ZeroDuration());
  jobs_[job.proto.prep_job_id()] = std::move(owned);
  by_sequence_[job.sequence] = &job;
  if (IsTerminal(job.proto.state())) {
    EnterFinished(job);
    return job;
  }
  SP_CHECK(!job.places.empty());
  job.proto.set_state(v1::PrepJob::STATE_PENDING);
  unfinished_[job.sequence] = &job;
  unfinished_bytes_ += job.bytes;
  SetTimeout(job);
  return job;
}

// Among the finished ones, in the order of their end.
void JobQueue::EnterFinished(Job& job) {
  SetPhase(job, Phase::kFinished);
  if (job.proto.state() == v1::PrepJob::STATE_SUCCEEDED) {
    job.tasks_done = job.tasks_resumed = job.tasks_total;
    job.bytes_recorded = job.bytes_total;
  }
  if (!job.proto.has_end_time()) *job.proto.mutable_end_time() = ToTimestamp(clock_->Wall());
  const absl::Time end = FromTimestamp(job.proto.end_time());
  auto at = finished_.end();
  while (at != finished_.begin() && FromTimestamp((*std::prev(at))->proto.end_time()) > end) --at;
  finished_.insert(at, &job);
  finished_bytes_ += job.bytes;
}

// Within a process only the monotonic clock counts; what passed between two is known from the wall
// clock alone, which may have been set, so no more than the whole timeout is believed to be left.
void JobQueue::SetTimeout(Job& job) {
  if (!job.proto.has_timeout()) return;
  const absl::Duration timeout = FromDuration(job.proto.timeout());
  const absl::Time deadline = FromTimestamp(job.proto.create_time()) + timeout;
  *job.proto.mutable_deadline_time() = ToTimestamp(deadline);
  job.deadline = clock_->Monotonic() + std::min(timeout, deadline - clock_->Wall());
}

absl::Status JobQueue::AddJob(NewJob added) {
  SP_RETURN_IF_ERROR(CheckJob(added));
  added.lease_span = absl::ZeroDuration();
  Job& job = Enter(std::move(added), next_sequence_);
  const std::string id = job.proto.prep_job_id();
  changes_.events.push_back({.kind = QueueEvent::Kind::kJobAdded, .job_id = id});
  if (job.phase == Phase::kFinished) {
    changes_.events.push_back({.kind = QueueEvent::Kind::kJobFinished,
                               .job_id = id,
                               .status = FromRpcStatus(job.proto.error()),
                               .state = job.proto.state()});
    EvictFinished();
    return absl::OkStatus();
  }
  Touch(job, false);
  return absl::OkStatus();
}

absl::Status JobQueue::Restore(NewJob restored) {
  const std::string id = restored.job.prep_job_id();
  if (FindJob(id) != nullptr || restored.sequence < next_sequence_) {
    return absl::AlreadyExistsError(
        absl::StrCat("prep job ", id, " or a job after sequence ", restored.sequence, " exists"));
  }
  const int64_t sequence = restored.sequence;
  Job& job = Enter(std::move(restored), sequence);
  if (job.phase == Phase::kFinished) {
    EvictFinished();
    return absl::OkStatus();
  }
  changes_.events.push_back({.kind = QueueEvent::Kind::kJobAdded, .job_id = id});
  Touch(job, false);
  if (job.lease_span > absl::ZeroDuration()) {
    // The last renewal was before this moment.
    job.wrote = true;
    job.fenced_until = clock_->Monotonic() + job.lease_span;
    for (const JobPlace& place : job.places) {
      absl::Duration& fence = fenced_until_[place.destination];
      fence = std::max(fence, job.fenced_until);
    }
  }
  if (job.proto.has_error()) job.error = FromRpcStatus(job.proto.error());
  if (job.proto.cancel_requested() || !job.error.ok()) {
    SetPhase(job, Phase::kStopping);
    Advance(job);
  }
  return absl::OkStatus();
}

void JobQueue::SetPhase(Job& job, Phase phase) {
  if (job.phase == Phase::kLeasing) leasing_.erase({job.turn, job.sequence});
  job.phase = phase;
  if (phase != Phase::kLeasing) return;
  job.turn = last_turn_;
  leasing_[{job.turn, job.sequence}] = &job;
}

// Lets every other job that can be leased now go first.
void JobQueue::Yield(Job& job) {
  if (job.phase != Phase::kLeasing) return;
  ++last_turn_;
  SetPhase(job, Phase::kLeasing);
}

void JobQueue::Touch(Job& job, bool record) {
  ++job.version;
  changed_.insert(job.proto.prep_job_id());
  if (record) recorded_.insert(job.proto.prep_job_id());
}

absl::StatusOr<v1::PrepJob> JobQueue::Cancel(const std::string& job_id) {
  Job* job = FindJob(job_id);
  if (job == nullptr) {
    return WithReason(absl::NotFoundError(absl::StrCat("no prep job ", job_id)), "JOB_NOT_FOUND",
                      {{"prep_job_id", job_id}});
  }
  if (job->phase == Phase::kFinished) {
    if (job->proto.state() == v1::PrepJob::STATE_CANCELLED) return Snapshot(*job, true);
    const std::string state = v1::PrepJob::State_Name(job->proto.state());
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat("prep job ", job_id, " is finished: ", state)),
        "JOB_FINISHED", {{"prep_job_id", job_id}, {"state", state}});
  }
  if (!job->proto.cancel_requested()) {
    job->proto.set_cancel_requested(true);
    Touch(*job, true);
    if (job->phase == Phase::kPending || job->phase == Phase::kLeasing ||
        job->phase == Phase::kCommitDue) {
      SetPhase(*job, Phase::kStopping);
      StopLeasesOf(*job);
      Advance(*job);
    }
  }
  return Snapshot(*job, true);
}

// Records the first cause and stops the job. Later causes and failures of cancelled jobs change
// nothing.
void JobQueue::Fail(Job& job, const absl::Status& cause) {
  if (job.error.ok() && !job.proto.cancel_requested()) {
    job.error = cause;
    *job.proto.mutable_error() = ToRpcStatus(cause);
    Touch(job, true);
  }
  SetPhase(job, Phase::kStopping);
  StopLeasesOf(job);
}

void JobQueue::StopLeasesOf(Job& job) {
  for (const std::string& id : job.leases) leases_.at(id)->withdrawn = true;
  if (!job.leases.empty()) changes_.leasable = true;  // their workers must hear of it
}

// Fails a job whose time is over; a step in hand is awaited first.
void JobQueue::Expire(Job& job) {
  if (job.proto.cancel_requested() || !job.error.ok()) return;
  if (job.phase == Phase::kCleanDue || job.phase == Phase::kCleaning) return;
  const std::string timeout = absl::FormatDuration(FromDuration(job.proto.timeout()));
  const absl::Status cause = WithReason(
      absl::DeadlineExceededError(absl::StrCat("not done within ", timeout, ", its timeout")),
      "JOB_TIMEOUT", {{"timeout", timeout}});
  if (job.phase == Phase::kStarting || job.phase == Phase::kCommitting) {
    job.error = cause;
    *job.proto.mutable_error() = ToRpcStatus(cause);
    Touch(job, true);
    return;
  }
  Fail(job, cause);
  Advance(job);
}

// Moves a job on where nothing holds it: to its commit, its removal, or its end.
void JobQueue::Advance(Job& job) {
  if (!job.leases.empty()) return;
  if (job.phase == Phase::kLeasing && job.tasks_done == job.tasks_total) {
    SetPhase(job, Phase::kCommitDue);
    job.step_attempts = 0;
    Touch(job, false);
  }
  if (job.phase != Phase::kStopping || job.fenced_until > clock_->Monotonic()) return;
  if (job.wrote) return CleanNext(job);
  const bool cancelled = job.proto.cancel_requested();
  Finish(job, cancelled ? v1::PrepJob::STATE_CANCELLED : v1::PrepJob::STATE_FAILED, job.error);
}

void JobQueue::CleanNext(Job& job) {
  SetPhase(job, Phase::kCleanDue);
  job.step_attempts = 0;
  job.step_not_before = -absl::InfiniteDuration();
  Touch(job, false);
}

void JobQueue::Finish(Job& job, v1::PrepJob::State state, const absl::Status& error) {
  SetPhase(job, Phase::kFinished);
  job.proto.set_state(state);
  if (error.ok()) {
    job.proto.clear_error();
  } else {
    *job.proto.mutable_error() = ToRpcStatus(error);
  }
  *job.proto.mutable_end_time() = ToTimestamp(clock_->Wall());
  job.regions.clear();
  job.ranks_per_lease = nullptr;
  unfinished_.erase(job.sequence);
  unfinished_bytes_ -= job.bytes;
  finished_.push_back(&job);
  finished_bytes_ += job.bytes;
  Touch(job, true);
  changes_.leasable = true;
  changes_.events.push_back({.kind = QueueEvent::Kind::kJobFinished,
                             .job_id = job.proto.prep_job_id(),
                             .status = error,
                             .state = state,
                             .duration = clock_->Monotonic() - job.created});
  EvictFinished();
}

void JobQueue::EvictFinished() {
  while (static_cast<int>(finished_.size()) > options_.max_finished_jobs ||
         (finished_bytes_ > options_.max_job_bytes && finished_.size() > 1)) {
    Job* job = finished_.front();
    finished_.pop_front();
    finished_bytes_ -= job->bytes;
    const std::string id = job->proto.prep_job_id();
    changes_.evicted.push_back(id);
    recorded_.erase(id);
    changed_.insert(id);
    by_sequence_.erase(job->sequence);
    jobs_.erase(id);
  }
}

absl::StatusOr<JobView> JobQueue::Get(const std::string& job_id) const {
  const Job* job = FindJob(job_id);
  if (job == nullptr) {
    return WithReason(absl::NotFoundError(absl::StrCat("no prep job ", job_id)), "JOB_NOT_FOUND",
                      {{"prep_job_id", job_id}});
  }
  return JobView{Snapshot(*job, true), job->version, job->sequence, job->fingerprint,
                 job->lease_span};
}

std::vector<std::string> JobQueue::JobsWithoutLeases() const {
  std::vector<std::string> ids;
  for (const auto& [id, job] : jobs_) {
    if (!job->started() && !job->wrote) continue;
    if (job->phase == Phase::kFinished || !job->leases.empty()) continue;
    if (job->fenced_until <= clock_->Monotonic()) ids.push_back(id);
  }
  return ids;
}

absl::StatusOr<JobPage> JobQueue::List(int page_size, const std::string& page_token,
                                       const std::set<v1::PrepJob::State>& states) const {
  const int64_t mask = StatesMask(states);
  int64_t before = next_sequence_;
  if (!page_token.empty()) {
    SP_ASSIGN_OR_RETURN(before, ParsePageToken(page_token, mask));
  }
  JobPage page;
  int64_t bytes = 0;
  for (auto at = std::make_reverse_iterator(by_sequence_.lower_bound(before));
       at != by_sequence_.rend(); ++at) {
    const Job& job = *at->second;
    if (!states.empty() && states.count(job.proto.state()) == 0) continue;
    if (static_cast<int>(page.jobs.size()) >= page_size || bytes >= kMaxPageBytes) {
      page.next_page_token = PageToken(at->first + 1, mask);
      break;
    }
    page.jobs.push_back(Snapshot(job, false));
    bytes += static_cast<int64_t>(page.jobs.back().ByteSizeLong());
  }
  return page;
}

v1::PrepJob JobQueue::Snapshot(const Job& job, bool with_plan) const {
  v1::PrepJob proto = job.proto;
  if (with_plan && job.plan != nullptr) *proto.mutable_plan() = *job.plan;
  if (with_plan && proto.has_spec()) job.RestoreTexts(*proto.mutable_spec());
  v1::Progress& progress = *proto.mutable_progress();
  progress.set_rank_tasks_total(static_cast<int32_t>(job.tasks_total));
  progress.set_rank_tasks_done(static_cast<int32_t>(job.tasks_done));
  progress.set_rank_tasks_resumed(static_cast<int32_t>(job.tasks_resumed));
  progress.set_attempts_failed(static_cast<int32_t>(job.attempts_failed));
  progress.set_device(job.device);
  int64_t read = job.bytes_read;
  int64_t written = job.bytes_recorded;
  std::map<std::string, double> seconds = job.stage_seconds;
  for (const std::string& id : job.leases) {
    const Lease& lease = *leases_.at(id);
    // Completed ranks are counted as recorded already, and headers are not counted at all.
    const RegionTasks& sizes = job.regions[static_cast<size_t>(lease.region)].sizes;
    const int64_t recorded = sizes.BytesOf({lease.completed.begin(), lease.completed.end()});
    const int64_t open = sizes.BytesOf(lease.ranks) - recorded;
    written += std::clamp(lease.bytes_written - recorded, int64_t{0}, open);
    read += lease.bytes_read;
    for (const auto& [stage, value] : lease.stage_seconds) seconds[stage] += value;
  }
  progress.set_bytes_total(job.bytes_total);
  progress.set_bytes_written(written);
  progress.set_bytes_read(read);
  for (const auto& [stage, value] : seconds) (*progress.mutable_stage_seconds())[stage] = value;
  return proto;
}

// Steps -------------------------------------------------------------------------------------------

std::optional<JobStep> JobQueue::NextStep() {
  const absl::Duration now = clock_->Monotonic();
  const bool may_start = !draining_ && starts_not_before_ <= now;
  int active = 0;
  std::set<std::string> taken;  // destinations
  std::set<std::string> busy;   // of them, those where more goes on than waiting to be cleaned
  for (const auto& [sequence, job] : unfinished_) {
    if (!job->started()) continue;
    AddTo(taken, job->places);
    // Two at one destination: jobs that an earlier controller had started, and that have ended.
    if (job->phase != Phase::kCleanDue) AddTo(busy, job->places);
    // Stopping jobs only wait for their fence; they must not keep others from starting.
    if (job->phase != Phase::kStopping) ++active;
  }
  for (const auto& [sequence, job] : unfinished_) {
    const std::string& id = job->proto.prep_job_id();
    const bool due = job->step_not_before <= now;
    const bool free = !IsAnyIn(job->places, fenced_until_);
    if (job->phase == Phase::kCommitDue && due) {
      SetPhase(*job, Phase::kCommitting);
      job->wrote = true;
      return JobStep{JobStep::Kind::kCommit, id};
    }
    if (job->phase == Phase::kCleanDue && due && free && !IsAnyIn(job->places, busy)) {
      SetPhase(*job, Phase::kCleaning);
      job->removing = job->proto.cancel_requested();
      return JobStep{job->removing ? JobStep::Kind::kRemove : JobStep::Kind::kTidy, id};
    }
    if (job->phase != Phase::kPending) continue;
    if (due && free && may_start && active < options_.max_active_jobs &&
        !IsAnyIn(job->places, taken)) {
      SetPhase(*job, Phase::kStarting);
      return JobStep{JobStep::Kind::kStart, id};
    }
    AddTo(taken, job->places);  // kept from jobs that were created later
  }
  return std::nullopt;
}

// True when the step is to be tried again, later.
bool JobQueue::RetryStep(Job& job, const absl::Status& status) {
  ++job.step_attempts;
  if (!AllowsAnotherAttempt(status) || job.step_attempts >= options_.max_attempts) {
    return false;
  }
  ++job.attempts_failed;
  const int factor = job.step_attempts == 1 ? 1 : 4;
  job.step_not_before = clock_->Monotonic() + options_.retry_delay * factor;
  Touch(job, false);
  return true;
}

// True when the job was cancelled or ran out of time while it was being started.
bool JobQueue::StartOverruled(Job& job) {
  if (!job.proto.cancel_requested() && job.error.ok()) return false;
  SetPhase(job, Phase::kStopping);
  Advance(job);
  return true;
}

void JobQueue::StartPostponed(const std::string& job_id) {
  Job* job = FindJob(job_id);
  SP_CHECK(job != nullptr && job->phase == Phase::kStarting);
  if (StartOverruled(*job)) return;
  SetPhase(*job, Phase::kPending);
  starts_not_before_ = clock_->Monotonic() + 4 * options_.retry_delay;
  Touch(*job, false);
}

void JobQueue::StartFinished(const std::string& job_id, absl::StatusOr<StartedJob> started) {
  Job* job = FindJob(job_id);
  SP_CHECK(job != nullptr && job->phase == Phase::kStarting);
  if (StartOverruled(*job)) return;
  if (started.ok() && started->fingerprint != job->fingerprint) {
    started = WithReason(absl::FailedPreconditionError(absl::StrCat(
                             "the source changed since the job was created: its layout fingerprint "
                             "is ",
                             started->fingerprint, ", was ", job->fingerprint)),
                         "SOURCE_CHANGED");
  }
  if (!started.ok()) {
    if (RetryStep(*job, started.status())) {
      SetPhase(*job, Phase::kPending);
      return;
    }
    Fail(*job, started.status());
    Advance(*job);
    return;
  }
  TakePlan(*job, *std::move(started));
}

void JobQueue::TakePlan(Job& job, StartedJob started) {
  job.source_token = std::move(started.source_token);
  job.ranks_per_lease = std::move(started.ranks_per_lease);
  *job.proto.mutable_start_time() = ToTimestamp(clock_->Wall());
  job.proto.set_state(v1::PrepJob::STATE_RUNNING);
  job.step_attempts = 0;
  changes_.events.push_back({.kind = QueueEvent::Kind::kJobStarted,
                             .job_id = job.proto.prep_job_id(),
                             .duration = clock_->Monotonic() - job.created});
  if (!started.complete.empty()) {
    SP_CHECK(started.complete.size() == job.places.size());
    SetManifests(job.proto, started.complete);
    job.tasks_done = job.tasks_resumed = job.tasks_total;
    job.bytes_recorded = job.bytes_total;
    Finish(job, v1::PrepJob::STATE_SUCCEEDED, absl::OkStatus());
    return;
  }
  job.tasks_total = job.bytes_total = 0;
  for (const RegionTasks& tasks : started.regions) {
    Region region;
    region.sizes.bytes_per_rank = tasks.bytes_per_rank;
    region.sizes.other_bytes = tasks.other_bytes;
    for (const int32_t rank : tasks.ranks) {
      Task task;
      task.rank = rank;
      region.tasks.push_back(std::move(task));
    }
    job.tasks_total += static_cast<int64_t>(tasks.ranks.size());
    job.bytes_total += tasks.BytesOf(tasks.ranks);
    job.regions.push_back(std::move(region));
    for (const int32_t rank : tasks.done) {
      MarkDone(job, static_cast<int32_t>(job.regions.size()) - 1, rank);
    }
  }
  job.tasks_resumed = job.tasks_done;
  job.lease_span = std::max(job.lease_span, options_.LeaseSpan());
  SetPhase(job, Phase::kLeasing);
  changes_.leasable = true;
  Touch(job, true);
  Advance(job);
}

void JobQueue::MarkDone(Job& job, int32_t region_index, int32_t rank) {
  Region& region = job.regions[static_cast<size_t>(region_index)];
  for (Task& task : region.tasks) {
    if (task.rank != rank || task.state == Task::State::kDone) continue;
    task.state = Task::State::kDone;
    ++region.done;
    ++job.tasks_done;
    job.bytes_recorded += region.sizes.BytesOf(rank);
  }
  while (job.first_open_region < job.regions.size() &&
         job.regions[job.first_open_region].done ==
             static_cast<int32_t>(job.regions[job.first_open_region].tasks.size())) {
    ++job.first_open_region;
  }
}

void JobQueue::CommitFinished(const std::string& job_id,
                              const absl::StatusOr<std::vector<v1::ManifestReference>>& manifests) {
  Job* job = FindJob(job_id);
  SP_CHECK(job != nullptr && job->phase == Phase::kCommitting);
  if (manifests.ok()) {
    SP_CHECK(manifests->size() == job->places.size());
    SetManifests(job->proto, *manifests);
    Finish(*job, v1::PrepJob::STATE_SUCCEEDED, absl::OkStatus());
    return;
  }
  if (!job->proto.cancel_requested() && job->error.ok() && RetryStep(*job, manifests.status())) {
    SetPhase(*job, Phase::kCommitDue);
    return;
  }
  Fail(*job, Prefixed("commit", manifests.status()));
  Advance(*job);
}

void JobQueue::CleanFinished(const std::string& job_id, const absl::Status& status) {
  Job* job = FindJob(job_id);
  SP_CHECK(job != nullptr && job->phase == Phase::kCleaning);
  const bool cancelled = job->proto.cancel_requested();
  if (cancelled && !job->removing) return CleanNext(*job);
  if (!status.ok() && RetryStep(*job, status)) {
    SetPhase(*job, Phase::kCleanDue);
    return;
  }
  if (!cancelled) {
    Finish(*job, v1::PrepJob::STATE_FAILED,
           status.ok() ? job->error
                       : Followed(job->error, absl::StrCat("; what it had not recorded could not "
                                                           "be removed: ",
                                                           status.message())));
    return;
  }
  Finish(*job, v1::PrepJob::STATE_CANCELLED,
         status.ok() ? job->error
                     : Prefixed("cancelled, but its output could not be removed", status));
}

// Workers -----------------------------------------------------------------------------------------

absl::Status JobQueue::CheckReport(const v1::SynchronizeRequest& request) const {
  if (!IsWorkerId(request.worker_id())) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker_id: want 1 to ", kMaxWorkerIdSize, " characters of [A-Za-z0-9._-]"));
  }
  SP_RETURN_IF_ERROR(CheckBuild(options_.build, request.build()));
  if (request.memory_budget_bytes() <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory_budget_bytes: ", request.memory_budget_bytes(), ", want > 0"));
  }
  if (request.thread_count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("thread_count: ", request.thread_count(), ", want >= 0"));
  }
  if (request.device().size() > kMaxDeviceSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: ", request.device().size(), " bytes, at most ", kMaxDeviceSize));
  }
  if (request.leases_size() > kMaxReports) {
    return absl::InvalidArgumentError(
        absl::StrCat("leases: ", request.leases_size(), " reports, at most ", kMaxReports));
  }
  for (const v1::LeaseReport& report : request.leases()) {
    if (report.lease_id().empty()) return absl::InvalidArgumentError("leases.lease_id: not set");
    const std::string what = absl::StrCat("lease ", report.lease_id().substr(0, 64), ": ");
    if (report.state() <= v1::LeaseReport::STATE_UNSPECIFIED ||
        report.state() > v1::LeaseReport::STATE_RETURNED) {
      return absl::InvalidArgumentError(absl::StrCat(what, "state is not set"));
    }
    if (report.state() == v1::LeaseReport::STATE_FAILED && report.error().code() == 0) {
      return absl::InvalidArgumentError(absl::StrCat(what, "failed without an error"));
    }
    if (report.bytes_read() < 0 || report.bytes_written() < 0 || report.bytes_padded() < 0) {
      return absl::InvalidArgumentError(absl::StrCat(what, "negative bytes"));
    }
    if (report.error().ByteSizeLong() > kMaxReportedErrorBytes) {
      return absl::InvalidArgumentError(absl::StrCat(what, "error of ",
                                                     report.error().ByteSizeLong(),
                                                     " bytes, at most ", kMaxReportedErrorBytes));
    }
    if (report.completed_ranks_size() > kMaxReportedRanks) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, report.completed_ranks_size(), " completed ranks, at most ", kMaxReportedRanks));
    }
    const auto found = leases_.find(report.lease_id());
    const bool ours = found != leases_.end() && found->second->worker_id == request.worker_id();
    std::set<std::string> stages;
    if (ours) {
      for (const auto& [stage, seconds] : found->second->job->stage_seconds) stages.insert(stage);
    }
    for (const auto& [stage, seconds] : report.stage_seconds()) {
      if (!IsStageName(stage)) {
        return absl::InvalidArgumentError(absl::StrCat(what, "stage_seconds: want names of 1 to ",
                                                       kMaxStageNameSize, " of [a-z_]"));
      }
      stages.insert(stage);
    }
    if (stages.size() > kMaxReportedStages) {
      return absl::InvalidArgumentError(absl::StrCat(what, "stage_seconds: ", stages.size(),
                                                     " stages, at most ", kMaxReportedStages));
    }
    if (!ours) continue;
    const std::vector<int32_t>& ranks = found->second->ranks;
    for (const int32_t rank : report.completed_ranks()) {
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, "completed rank ", rank, " is not of its ", RankText(ranks)));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status JobQueue::Report(const v1::SynchronizeRequest& request) {
  SP_RETURN_IF_ERROR(CheckReport(request));
  std::unique_ptr<Worker>& slot = workers_[request.worker_id()];
  if (slot == nullptr) {
    if (static_cast<int>(workers_.size()) > options_.max_workers) {
      workers_.erase(request.worker_id());
      return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                            options_.max_workers, " workers are connected, the bound")),
                        "TOO_MANY_WORKERS");
    }
    slot = std::make_unique<Worker>();
    slot->id = request.worker_id();
    changes_.events.push_back(
        {.kind = QueueEvent::Kind::kWorkerJoined, .worker_id = request.worker_id()});
  }
  Worker& worker = *slot;
  worker.memory_budget_bytes = request.memory_budget_bytes();
  worker.device = request.device();
  worker.draining = request.draining();
  worker.last_seen = clock_->Monotonic();
  worker.holds_unknown = false;
  for (const v1::LeaseReport& report : request.leases()) ApplyReport(worker, report);
  return absl::OkStatus();
}

void JobQueue::ApplyReport(Worker& worker, const v1::LeaseReport& report) {
  const auto found = leases_.find(report.lease_id());
  if (found == leases_.end() || found->second->worker_id != worker.id) {
    if (report.state() == v1::LeaseReport::STATE_RUNNING) worker.holds_unknown = true;
    return;
  }
  Lease& lease = *found->second;
  Job& job = *lease.job;
  lease.bytes_read = std::max(lease.bytes_read, report.bytes_read());
  lease.bytes_written = std::max(lease.bytes_written, report.bytes_written());
  // Each report has the sums so far.
  lease.stage_seconds = {report.stage_seconds().begin(), report.stage_seconds().end()};
  std::vector<int32_t> completed(report.completed_ranks().begin(), report.completed_ranks().end());
  if (report.state() == v1::LeaseReport::STATE_DONE) completed = lease.ranks;
  for (const int32_t rank : completed) {
    if (lease.completed.insert(rank).second) MarkDone(job, lease.region, rank);
  }
  job.device = worker.device;
  Touch(job, false);
  switch (report.state()) {
    case v1::LeaseReport::STATE_DONE:
      CloseLease(lease.id, QueueEvent::Kind::kLeaseDone, absl::OkStatus());
      break;
    case v1::LeaseReport::STATE_FAILED:
      CloseLease(lease.id, QueueEvent::Kind::kLeaseFailed, FromRpcStatus(report.error()));
      break;
    case v1::LeaseReport::STATE_RETURNED:
      if (lease.withdrawn || worker.draining) {
        CloseLease(lease.id, QueueEvent::Kind::kLeaseReturned, absl::OkStatus());
      } else {
        CloseLease(lease.id, QueueEvent::Kind::kLeaseFailed,
                   absl::AbortedError("the worker gave the lease back without being asked to"));
      }
      break;
    default:
      break;
  }
}

// Closes an open lease: its undone tasks are open again, and the job moves on.
void JobQueue::CloseLease(const std::string& lease_id, QueueEvent::Kind outcome,
                          const absl::Status& cause) {
  const auto found = leases_.find(lease_id);
  const std::unique_ptr<Lease> lease = std::move(found->second);
  leases_.erase(found);
  Job& job = *lease->job;
  job.leases.erase(lease->id);
  if (const auto worker = workers_.find(lease->worker_id); worker != workers_.end()) {
    worker->second->leases.erase(lease->id);
  }
  job.bytes_read += lease->bytes_read;
  for (const auto& [stage, seconds] : lease->stage_seconds) job.stage_seconds[stage] += seconds;
  for (Task& task : job.regions[static_cast<size_t>(lease->region)].tasks) {
    const bool ours =
        std::find(lease->ranks.begin(), lease->ranks.end(), task.rank) != lease->ranks.end();
    if (ours && task.state == Task::State::kLeased) task.state = Task::State::kOpen;
  }
  changes_.events.push_back({.kind = outcome,
                             .job_id = job.proto.prep_job_id(),
                             .worker_id = lease->worker_id,
                             .lease_id = lease->id,
                             .region = lease->region,
                             .ranks = RankText(lease->ranks),
                             .rank_count = static_cast<int32_t>(
                                 lease->ranks.size() - (cause.ok() ? 0 : lease->completed.size())),
                             .attempt = lease->attempt,
                             .status = cause});
  Touch(job, false);
  changes_.leasable = true;
  if (!cause.ok() && job.phase == Phase::kLeasing) CountFailures(job, *lease, cause);
  Advance(job);
}

void JobQueue::CountFailures(Job& job, const Lease& lease, const absl::Status& cause) {
  ++job.attempts_failed;
  Yield(job);
  const std::string where = absl::StrCat("region ", lease.region, ", ");
  if (!AllowsAnotherAttempt(cause)) {
    Fail(job, Prefixed(absl::StrCat(where, RankText(lease.ranks)), cause));
    return;
  }
  // A lost worker says nothing about the store, so waiting would not help.
  const bool reported = workers_.count(lease.worker_id) != 0;
  for (Task& task : job.regions[static_cast<size_t>(lease.region)].tasks) {
    if (task.state != Task::State::kOpen ||
        std::find(lease.ranks.begin(), lease.ranks.end(), task.rank) == lease.ranks.end()) {
      continue;
    }
    ++task.failed_attempts;
    if (task.first_cause.ok()) task.first_cause = cause;
    if (task.failed_attempts < options_.max_attempts) {
      const int factor = task.failed_attempts == 1 ? 1 : 4;
      if (reported) task.not_before = clock_->Monotonic() + options_.retry_delay * factor;
      continue;
    }
    Fail(job, Prefixed(absl::StrCat(where, RankText({task.rank}), ": ", task.failed_attempts,
                                    " attempts failed, the first with"),
                       task.first_cause));
    return;
  }
}

v1::SynchronizeResponse JobQueue::Desired(const std::string& worker_id) {
  v1::SynchronizeResponse response;
  const auto found = workers_.find(worker_id);
  if (found == workers_.end()) return response;
  Worker& worker = *found->second;
  if (worker.leases.empty() && !worker.holds_unknown && !worker.draining && !draining_) {
    Grant(worker);
  }
  for (const std::string& id : worker.leases) {
    Lease& lease = *leases_.at(id);
    if (lease.withdrawn) continue;
    lease.renewed = clock_->Monotonic();
    *response.add_leases() = ToProto(lease);
  }
  if (!worker.leases.empty() || worker.holds_unknown) {
    *response.mutable_next_synchronization_delay() = ToDuration(options_.busy_delay);
  } else if (worker.draining || draining_) {
    *response.mutable_next_synchronization_delay() = ToDuration(absl::Seconds(1));
  } else {
    *response.mutable_next_synchronization_delay() = ToDuration(absl::ZeroDuration());
  }
  return response;
}

bool JobQueue::Grant(Worker& worker) {
  // By id and looked up again, since granting may finish a job.
  std::vector<std::string> ids;
  ids.reserve(leasing_.size());
  for (const auto& [turn, job] : leasing_) ids.push_back(job->proto.prep_job_id());
  for (const std::string& id : ids) {
    Job* job = FindJob(id);
    if (job != nullptr && job->phase == Phase::kLeasing && GrantFrom(*job, worker)) {
      return true;
    }
  }
  return false;
}

bool JobQueue::FitsSomeWorker(const Job& job) const {
  return std::any_of(workers_.begin(), workers_.end(), [&job](const auto& entry) {
    return !entry.second->draining && job.ranks_per_lease(entry.second->memory_budget_bytes).ok();
  });
}

bool JobQueue::GrantFrom(Job& job, Worker& worker) {
  const absl::Duration now = clock_->Monotonic();
  for (size_t r = job.first_open_region; r < job.regions.size(); ++r) {
    Region& region = job.regions[r];
    const auto ready = [now](const Task& task) {
      return task.state == Task::State::kOpen && task.not_before <= now;
    };
    if (std::none_of(region.tasks.begin(), region.tasks.end(), ready)) continue;
    const absl::StatusOr<int32_t> fit = job.ranks_per_lease(worker.memory_budget_bytes);
    if (!fit.ok()) {
      // Others may be large enough; when none is, waiting would be for ever.
      if (!FitsSomeWorker(job)) {
        Fail(job, fit.status());
        Advance(job);
      }
      return false;
    }
    auto lease = std::make_unique<Lease>();
    lease->id = new_lease_id_();
    lease->worker_id = worker.id;
    lease->job = &job;
    lease->region = static_cast<int32_t>(r);
    for (Task& task : region.tasks) {
      if (!ready(task) || static_cast<int32_t>(lease->ranks.size()) >= *fit) continue;
      task.state = Task::State::kLeased;
      lease->ranks.push_back(task.rank);
      lease->attempt = std::max(lease->attempt, task.failed_attempts + 1);
    }
    changes_.events.push_back({.kind = QueueEvent::Kind::kLeaseGranted,
                               .job_id = job.proto.prep_job_id(),
                               .worker_id = worker.id,
                               .lease_id = lease->id,
                               .region = lease->region,
                               .ranks = RankText(lease->ranks),
                               .rank_count = static_cast<int32_t>(lease->ranks.size()),
                               .attempt = lease->attempt});
    job.wrote = true;
    job.device = worker.device;
    job.leases.insert(lease->id);
    worker.leases.insert(lease->id);
    leases_[lease->id] = std::move(lease);
    return true;
  }
  return false;
}

v1::Lease JobQueue::ToProto(const Lease& lease) const {
  v1::Lease proto;
  proto.set_lease_id(lease.id);
  proto.set_prep_job_id(lease.job->proto.prep_job_id());
  *proto.mutable_spec() = lease.job->Spec();
  proto.set_layout_fingerprint(lease.job->fingerprint);
  proto.set_source_token(lease.job->source_token);
  proto.set_region(lease.region);
  for (const int32_t rank : lease.ranks) proto.add_rank_tasks()->set_rank(rank);
  *proto.mutable_duration() = ToDuration(options_.lease_duration);
  proto.set_attempt(lease.attempt);
  return proto;
}

void JobQueue::RemoveWorker(const std::string& worker_id, const std::string& how) {
  const auto found = workers_.find(worker_id);
  if (found == workers_.end()) return;
  const std::unique_ptr<Worker> worker = std::move(found->second);
  workers_.erase(found);
  changes_.events.push_back({.kind = QueueEvent::Kind::kWorkerLeft,
                             .worker_id = worker_id,
                             .lost_leases = static_cast<int32_t>(worker->leases.size()),
                             .status = absl::UnavailableError(how)});
  for (const std::string& id : worker->leases) {
    CloseLease(id, QueueEvent::Kind::kLeaseFailed,
               WithReason(absl::UnavailableError(absl::StrCat("worker ", worker_id, ": ", how)),
                          "WORKER_LOST", {{"worker_id", worker_id}}));
  }
}

void JobQueue::WorkerGone(const std::string& worker_id, const std::string& how) {
  RemoveWorker(worker_id, how);
}

void JobQueue::Tick() {
  const absl::Duration now = clock_->Monotonic();
  const absl::Duration open = options_.LeaseSpan();
  for (auto at = fenced_until_.begin(); at != fenced_until_.end();) {
    at = at->second <= now ? fenced_until_.erase(at) : std::next(at);
  }
  std::vector<std::string> silent;
  for (const auto& [id, worker] : workers_) {
    bool holds = false;
    for (const std::string& lease : worker->leases) {
      holds = holds || leases_.at(lease)->renewed + open > now;
    }
    if (!holds && worker->last_seen + open <= now) silent.push_back(id);
  }
  for (const std::string& id : silent) {
    RemoveWorker(id, absl::StrCat("silent for ", absl::FormatDuration(open)));
  }
  // Withdrawn leases of workers that do call, but never said that they stopped.
  std::vector<std::string> expired;
  for (const auto& [id, lease] : leases_) {
    if (lease->renewed + open <= now) expired.push_back(id);
  }
  for (const std::string& id : expired) {
    CloseLease(id, QueueEvent::Kind::kLeaseFailed,
               absl::UnavailableError("the lease ended without a word of its worker"));
  }
  std::vector<Job*> overdue;
  std::vector<Job*> stopping;
  for (const auto& [sequence, job] : unfinished_) {
    if (job->deadline <= now) overdue.push_back(job);
    if (job->phase == Phase::kStopping) stopping.push_back(job);
  }
  for (Job* job : overdue) Expire(*job);
  // Those whose fence has passed; the others stay.
  for (Job* job : stopping) {
    if (job->phase == Phase::kStopping) Advance(*job);
  }
}

void JobQueue::StopLeasing() {
  draining_ = true;
  changes_.leasable = true;
}

void JobQueue::WithdrawAll() {
  for (const auto& [id, lease] : leases_) lease->withdrawn = true;
  changes_.leasable = true;
}

QueueChanges JobQueue::TakeChanges() {
  QueueChanges taken = std::move(changes_);
  taken.changed.assign(changed_.begin(), changed_.end());
  taken.recorded.assign(recorded_.begin(), recorded_.end());
  changes_ = QueueChanges();
  changed_.clear();
  recorded_.clear();
  return taken;
}

QueueStats JobQueue::Stats() const {
  QueueStats stats;
  for (const auto& [sequence, job] : unfinished_) {
    if (job->proto.state() == v1::PrepJob::STATE_PENDING) {
      ++stats.pending;
      continue;
    }
    ++stats.running;
    if (job->phase != Phase::kLeasing) continue;
    stats.rank_tasks_waiting += job->tasks_total - job->tasks_done;
  }
  for (const auto& [id, lease] : leases_) {
    const auto undone = static_cast<int64_t>(lease->ranks.size() - lease->completed.size());
    stats.rank_tasks_leased += undone;
    if (lease->job->phase == Phase::kLeasing) stats.rank_tasks_waiting -= undone;
  }
  stats.leases = static_cast<int>(leases_.size());
  for (const auto& [id, worker] : workers_) {
    if (worker->draining) {
      ++stats.workers_draining;
    } else if (worker->leases.empty()) {
      ++stats.workers_idle;
    } else {
      ++stats.workers_busy;
    }
  }
  return stats;
}

}  // namespace shardprep
