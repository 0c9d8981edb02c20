#include "workers/worker.h"

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/rpc/status.pb.h"
#include "kernels/shuffle.h"
#include "kernels/status_macros.h"
#include "workers/grpc_status.h"
#include "workers/joint_prep.h"
#include "workers/log.h"
#include "workers/metered_store.h"
#include "workers/object_store.h"
#include "workers/open_store.h"
#include "workers/policy_file.h"
#include "workers/region_prep.h"
#include "workers/target_set.h"
#include "workers/version.h"
#include "workers/worker_metrics.h"

namespace shardprep {
namespace {

constexpr absl::Duration kFirstRetry = absl::Milliseconds(100);
constexpr absl::Duration kLastRetry = absl::Seconds(2);

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

absl::Status CheckLease(const v1::Lease& lease) {
  const auto missing = [&](const char* field) {
    return absl::InvalidArgumentError(
        absl::StrCat("lease '", lease.lease_id(), "': ", field, " is not set"));
  };
  if (lease.lease_id().empty()) return missing("lease_id");
  if (!lease.has_spec()) return missing("spec");
  if (!lease.has_region()) return missing("region");
  if (lease.rank_tasks().empty()) return missing("rank_tasks");
  for (const v1::RankTask& task : lease.rank_tasks()) {
    if (!task.has_rank()) return missing("rank_tasks.rank");
  }
  return absl::OkStatus();
}

}  // namespace

// One lease: what was granted, and what became of it. Counters and flags are shared with the
// thread that works on it; `report` is guarded by the worker's mutex.
struct Worker::HeldLease {
  v1::Lease lease;
  std::atomic<int64_t> fence_nanos{0};  // on the monotonic clock: publish nothing after this
  std::atomic<bool> stop{false};
  RegionProgress progress;
  v1::LeaseReport::State state = v1::LeaseReport::STATE_RUNNING;
  absl::Status error;
  std::vector<int32_t> completed;
  std::thread thread;

  // What the metrics have seen already.
  int64_t counted_read = 0, counted_written = 0, counted_padded = 0;
  std::array<int64_t, kStageCount> counted_nanos{};
};

// The ranks of a lease by target, in the order of the targets.
struct Worker::LeasedRanks {
  int32_t target = 0;
  std::vector<int32_t> ranks;
};

absl::StatusOr<std::vector<Worker::LeasedRanks>> Worker::RanksOfLease(const v1::Lease& lease,
                                                                      const TargetSet& targets) {
  if (lease.region() < 0 || lease.region() >= targets.region_count()) {
    return absl::InvalidArgumentError(absl::StrCat("lease ", lease.lease_id(), ": region ",
                                                   lease.region(), ", want less than ",
                                                   targets.region_count()));
  }
  const std::vector<int32_t> known = targets.RanksOf(lease.region());
  std::map<int32_t, std::vector<int32_t>> by_target;
  for (const v1::RankTask& task : lease.rank_tasks()) {
    if (std::find(known.begin(), known.end(), task.rank()) == known.end()) {
      const Region& region = targets.plan(0).slices.regions()[static_cast<size_t>(lease.region())];
      return absl::InvalidArgumentError(absl::StrCat("lease ", lease.lease_id(), ": rank ",
                                                     task.rank(), " has no part of ", region.name));
    }
    SP_ASSIGN_OR_RETURN(const TargetRank rank, targets.RankOf(task.rank()));
    by_target[rank.target].push_back(rank.rank);
  }
  std::vector<LeasedRanks> leased;
  leased.reserve(by_target.size());
  for (auto& [target, ranks] : by_target) leased.push_back({target, std::move(ranks)});
  return leased;
}

v1::WorkerBuild ThisBuild() {
  v1::WorkerBuild build;
  build.set_format_version(kFormatVersion);
  build.set_policy_digest(DefaultAlignmentPolicy().sha256_hex);
  build.set_tool_version(kToolVersion);
  return build;
}

Worker::Worker(WorkerOptions options, ControllerLink* link, Shuffler* shuffler, const Clock* clock,
               WorkerMetrics* metrics)
    : options_(std::move(options)),
      link_(link),
      shuffler_(shuffler),
      clock_(clock),
      metrics_(metrics),
      last_turn_(clock->Monotonic()) {}

Worker::~Worker() {
  std::list<std::unique_ptr<HeldLease>> held;
  {
    absl::MutexLock lock(&mu_);
    held.swap(held_);
  }
  for (const auto& lease : held) lease->stop = true;
  for (const auto& lease : held) lease->thread.join();
  absl::MutexLock lock(&work_mu_);
  Use(WorkMemory());
}

void Worker::Drain() {
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
    wake_ = true;
    for (const auto& held : held_) held->stop = true;
  }
  link_->Interrupt();
}

absl::Duration Worker::LastTurn() const {
  absl::MutexLock lock(&mu_);
  return last_turn_;
}

v1::SynchronizeRequest Worker::BuildRequest() {
  v1::SynchronizeRequest request;
  request.set_worker_id(options_.worker_id);
  *request.mutable_build() = ThisBuild();
  request.set_memory_budget_bytes(options_.memory_budget_bytes);
  request.set_thread_count(options_.threads);
  request.set_device(shuffler_->name());
  absl::MutexLock lock(&mu_);
  wake_ = false;
  last_turn_ = clock_->Monotonic();
  request.set_draining(draining_);
  for (const auto& held : held_) {
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(held->lease.lease_id());
    report.set_state(held->state);
    if (!held->error.ok()) *report.mutable_error() = ToRpcStatus(held->error);
    for (const int32_t rank : held->completed) report.add_completed_ranks(rank);
    report.set_bytes_read(held->progress.bytes_read);
    report.set_bytes_written(held->progress.bytes_written);
    report.set_bytes_padded(held->progress.bytes_padded);
    for (const Stage stage : kStages) {
      const int64_t nanos = held->progress.stage_nanos[static_cast<int>(stage)];
      (*report.mutable_stage_seconds())[StageName(stage)] = static_cast<double>(nanos) * 1e-9;
    }
    CountMetrics(*held);
  }
  return request;
}

void Worker::CountMetrics(HeldLease& held) {
  if (metrics_ == nullptr) return;
  const RegionProgress& now = held.progress;
  const auto step = [](const std::atomic<int64_t>& value, int64_t& counted) {
    const int64_t seen = value;
    return seen - std::exchange(counted, seen);
  };
  metrics_->AddReadBytes(step(now.bytes_read, held.counted_read));
  metrics_->AddWrittenBytes(step(now.bytes_written, held.counted_written));
  metrics_->AddPaddingBytes(step(now.bytes_padded, held.counted_padded));
  for (const Stage stage : kStages) {
    const int s = static_cast<int>(stage);
    metrics_->AddStageTime(stage,
                           absl::Nanoseconds(step(now.stage_nanos[s], held.counted_nanos[s])));
  }
}

absl::Status Worker::RunOnce() {
  const v1::SynchronizeRequest request = BuildRequest();
  const absl::Duration sent = clock_->Monotonic();
  const auto response = link_->Synchronize(request);
  if (!response.ok()) return response.status();
  Apply(request, *response, sent);
  return absl::OkStatus();
}

void Worker::Apply(const v1::SynchronizeRequest& request, const v1::SynchronizeResponse& response,
                   absl::Duration sent) {
  std::list<std::unique_ptr<HeldLease>> reported;
  {
    absl::MutexLock lock(&mu_);
    next_delay_ = FromProto(response.next_synchronization_delay());
    const auto desired = [&](const std::string& id) {
      return std::find_if(response.leases().begin(), response.leases().end(),
                          [&](const v1::Lease& lease) { return lease.lease_id() == id; });
    };
    for (auto it = held_.begin(); it != held_.end();) {
      HeldLease& held = **it;
      const auto wish = desired(held.lease.lease_id());
      if (wish != response.leases().end()) {
        held.fence_nanos =
            absl::ToInt64Nanoseconds(sent + FromProto(wish->duration()) - kFenceMargin);
      } else {
        held.stop = true;
      }
      const bool told = std::any_of(request.leases().begin(), request.leases().end(),
                                    [&](const v1::LeaseReport& report) {
                                      return report.lease_id() == held.lease.lease_id() &&
                                             report.state() != v1::LeaseReport::STATE_RUNNING;
                                    });
      const auto next = std::next(it);
      if (told) reported.splice(reported.end(), held_, it);
      it = next;
    }
  }
  for (const auto& held : reported) held->thread.join();
  for (const v1::Lease& lease : response.leases()) {
    {
      absl::MutexLock lock(&mu_);
      if (draining_) return;
      const auto is_this = [&](const auto& held) {
        return held->lease.lease_id() == lease.lease_id();
      };
      if (std::any_of(held_.begin(), held_.end(), is_this) ||
          std::any_of(reported.begin(), reported.end(), is_this)) {
        continue;
      }
    }
    Start(lease, sent);
  }
}

namespace {

// "3", "0,1,2", for logs; replicated tensors are rank -1.
std::string RanksOf(const v1::Lease& lease) {
  return absl::StrJoin(lease.rank_tasks(), ",", [](std::string* out, const v1::RankTask& task) {
    absl::StrAppend(out, task.rank());
  });
}

}  // namespace

void Worker::Start(const v1::Lease& lease, absl::Duration sent) {
  auto held = std::make_unique<HeldLease>();
  held->lease = lease;
  held->fence_nanos = absl::ToInt64Nanoseconds(sent + FromProto(lease.duration()) - kFenceMargin);
  Log(LogLevel::kInfo, "worker", "lease started",
      {{"job", lease.prep_job_id()},
       {"lease", lease.lease_id()},
       {"region", lease.region()},
       {"ranks", RanksOf(lease)},
       {"attempt", lease.attempt()}});
  HeldLease& started = *held;
  absl::MutexLock lock(&mu_);
  held_.push_back(std::move(held));
  started.thread = std::thread([this, &started] { WorkOn(started); });
}

void Worker::WorkOn(HeldLease& held) {
  if (metrics_ != nullptr) metrics_->RankAttempted(held.lease.rank_tasks_size());
  absl::Status status = Prepare(held);
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kWarning, "worker", "lease ended",
      {{"job", held.lease.prep_job_id()},
       {"lease", held.lease.lease_id()},
       {"region", held.lease.region()},
       {"ranks", RanksOf(held.lease)},
       {"attempt", held.lease.attempt()},
       {"status", status}});
  // Before the failure is told, so that the task is not leased to this worker again.
  if (!shuffler_->Health().ok()) Drain();
  {
    absl::MutexLock lock(&mu_);
    if (status.ok()) {
      held.state = v1::LeaseReport::STATE_DONE;
    } else if (absl::IsCancelled(status) && held.stop) {
      held.state = v1::LeaseReport::STATE_RETURNED;
    } else {
      held.state = v1::LeaseReport::STATE_FAILED;
      // Said apart from other lacks, because trying again does not help against it.
      held.error = IsNoSpace(status) ? WithReason(status, "NO_SPACE") : status;
      if (metrics_ != nullptr) metrics_->RankFailed(status.code(), held.lease.rank_tasks_size());
    }
    wake_ = true;
  }
  link_->Interrupt();
}

absl::Status Worker::Prepare(HeldLease& held) {
  const v1::Lease& lease = held.lease;
  SP_RETURN_IF_ERROR(CheckLease(lease));
  absl::MutexLock lock(&work_mu_);
  if (held.stop) return absl::CancelledError("stopped");
  SP_ASSIGN_OR_RETURN(const std::shared_ptr<const TargetSet> targets, TargetsFor(lease));
  SP_ASSIGN_OR_RETURN(const std::vector<LeasedRanks> leased, RanksOfLease(lease, *targets));
  SP_ASSIGN_OR_RETURN(const auto source, OpenStore(targets->spec().source_uri(),
                                                   {.create = false,
                                                    .allowed_roots = options_.allowed_source_roots,
                                                    .s3 = options_.s3,
                                                    .stop = &held.stop}));
  MeteredStore metered_source(source.get(), metrics_);
  CountNeeded(lease, *targets);
  const auto ranks = static_cast<int32_t>(lease.rank_tasks_size());
  const bool together = targets->is_joint() && ranks > 1 &&
                        targets->joint_memory().Total(ranks, 1) <= options_.memory_budget_bytes;
  if (together) return PrepareTogether(held, *targets, leased, metered_source);
  // A budget that does not suffice for several targets at a time: one after the other.
  for (const LeasedRanks& own : leased) {
    SP_RETURN_IF_ERROR(PrepareOne(held, *targets, own, metered_source));
  }
  return absl::OkStatus();
}

// Counts each source byte of the region once for all ranks that have a part of it.
void Worker::CountNeeded(const v1::Lease& lease, const TargetSet& targets) {
  if (metrics_ == nullptr) return;
  const Region& region = targets.plan(0).slices.regions()[static_cast<size_t>(lease.region())];
  const auto known = static_cast<int64_t>(targets.RanksOf(lease.region()).size());
  metrics_->AddNeededBytes(region.source_bytes * lease.rank_tasks_size() / known);
}

CommitGate Worker::GateOf(const HeldLease& held) {
  return [this, &held]() -> absl::Status {
    if (held.stop) return absl::CancelledError("stopped");
    if (absl::ToInt64Nanoseconds(clock_->Monotonic()) >= held.fence_nanos) {
      return absl::AbortedError(absl::StrCat("lease ", held.lease.lease_id(),
                                             " is over; nothing more is published under it"));
    }
    return absl::OkStatus();
  };
}

void Worker::RankDone(HeldLease& held, int32_t number) {
  absl::MutexLock guard(&mu_);
  held.completed.push_back(number);
  if (metrics_ != nullptr) metrics_->RankCompleted(clock_->Wall());
}

absl::Status Worker::PrepareOne(HeldLease& held, const TargetSet& targets, const LeasedRanks& own,
                                ObjectStore& source) {
  const JobPlan& plan = targets.plan(own.target);
  SP_ASSIGN_OR_RETURN(const auto destination, OpenDestination(held, plan));
  MeteredStore metered_destination(destination.get(), metrics_);
  RegionTask task;
  task.plan = &plan;
  task.region = held.lease.region();
  task.ranks = own.ranks;
  task.source = &source;
  task.destination = &metered_destination;
  task.shuffler = shuffler_;
  task.threads = options_.threads;
  task.memory = MemoryFor(plan.memory, static_cast<int32_t>(task.ranks.size()));
  task.gate = GateOf(held);
  task.stop = &held.stop;
  task.rank_done = [this, &held, &targets, &own](int32_t rank) {
    RankDone(held, targets.NumberOf({own.target, rank}));
  };
  return PrepareRegion(task, held.progress);
}

absl::Status Worker::PrepareTogether(HeldLease& held, const TargetSet& targets,
                                     const std::vector<LeasedRanks>& leased, ObjectStore& source) {
  JointTask task;
  std::vector<std::unique_ptr<ObjectStore>> destinations;
  std::list<MeteredStore> metered;
  int32_t ranks = 0;
  for (const LeasedRanks& own : leased) {
    const JobPlan& plan = targets.plan(own.target);
    SP_ASSIGN_OR_RETURN(auto destination, OpenDestination(held, plan));
    destinations.push_back(std::move(destination));
    metered.emplace_back(destinations.back().get(), metrics_);
    task.targets.push_back({&plan, &metered.back(), own.ranks,
                            [this, &held, &targets, target = own.target](int32_t rank) {
                              RankDone(held, targets.NumberOf({target, rank}));
                            }});
    ranks += static_cast<int32_t>(own.ranks.size());
  }
  task.region = held.lease.region();
  task.source = &source;
  task.shuffler = shuffler_;
  task.threads = options_.threads;
  task.need = &targets.joint_memory();
  task.memory = MemoryFor(targets.joint_memory(), ranks);
  task.gate = GateOf(held);
  task.stop = &held.stop;
  return PrepareJointly(task, held.progress);
}

absl::StatusOr<std::unique_ptr<ObjectStore>> Worker::OpenDestination(const HeldLease& held,
                                                                     const JobPlan& plan) const {
  return OpenStore(plan.target().destination_uri(),
                   {.create = true, .allowed_roots = {}, .s3 = options_.s3, .stop = &held.stop});
}

// The targets are planned once for all leases of a job whose source has not changed meanwhile.
absl::StatusOr<std::shared_ptr<const TargetSet>> Worker::TargetsFor(const v1::Lease& lease) {
  if (targets_ != nullptr && targets_->fingerprint() == lease.layout_fingerprint() &&
      targets_->source_token() == lease.source_token() &&
      targets_->spec().SerializeAsString() == lease.spec().SerializeAsString()) {
    return targets_;
  }
  targets_.reset();
  SP_ASSIGN_OR_RETURN(
      targets_, PlanTargets(lease.spec(), {.memory_budget_bytes = options_.memory_budget_bytes,
                                           .thread_count = options_.threads,
                                           .allowed_source_roots = options_.allowed_source_roots,
                                           .s3 = options_.s3}));
  if (targets_->source_token() != lease.source_token()) {
    return absl::FailedPreconditionError(absl::StrCat(
        targets_->spec().source_uri(), ": changed since the job was planned: its files are ",
        targets_->source_token(), ", want ", lease.source_token()));
  }
  if (targets_->fingerprint() != lease.layout_fingerprint()) {
    return absl::FailedPreconditionError(
        absl::StrCat("this worker plans layout ", targets_->fingerprint(),
                     " from the job's spec, but ", lease.layout_fingerprint(), " was leased"));
  }
  return targets_;
}

// Grows to what the largest lease needed and is kept.
absl::Span<uint8_t> Worker::MemoryFor(const MemoryNeed& need, int32_t ranks) {
  const int64_t want =
      std::min(options_.memory_budget_bytes, need.Most(ranks, std::min(ranks, options_.threads)));
  if (static_cast<int64_t>(memory_.bytes().size()) < want) {
    Use(WorkMemory());  // not both at a time
    Use(WorkMemory(want));
  }
  return memory_.bytes();
}

void Worker::Use(WorkMemory memory) {
  const absl::Status status = shuffler_->UseMemory(memory.bytes());
  if (!status.ok()) {
    Log(LogLevel::kWarning, "worker", "outputs are copied once more",
        {{"device", shuffler_->name()}, {"status", status}});
  }
  memory_ = std::move(memory);
}

void Worker::WaitForNextTurn(absl::Duration at_most) {
  absl::MutexLock lock(&mu_);
  mu_.AwaitWithTimeout(absl::Condition(&wake_), at_most);
}

absl::Status Worker::Run() {
  absl::Duration retry = kFirstRetry;
  for (;;) {
    absl::Status status = RunOnce();
    if (absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status)) return status;
    absl::Duration delay;
    {
      absl::MutexLock lock(&mu_);
      // Said or not: a controller that cannot be reached finds the leases closed by time.
      if (draining_ && held_.empty()) return shuffler_->Health();
      delay = next_delay_;
    }
    if (status.ok()) {
      retry = kFirstRetry;
    } else if (absl::IsCancelled(status)) {
      delay = absl::ZeroDuration();  // interrupted on purpose
    } else {
      Log(LogLevel::kWarning, "worker", "cannot reach the controller",
          {{"status", status}, {"retry_in", retry}});
      delay = retry;
      retry = std::min(retry * 2, kLastRetry);
    }
    WaitForNextTurn(delay);
  }
}

}  // namespace shardprep
