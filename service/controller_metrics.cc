#include "service/controller_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include "workers/worker_metrics.h"

namespace shardprep {
namespace {

prometheus::Histogram* AddHistogram(prometheus::Registry& registry, const char* name,
                                    const char* help,
                                    const prometheus::Histogram::BucketBoundaries& bounds) {
  return &prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, bounds);
}

prometheus::Gauge* AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

prometheus::Counter* AddCounter(prometheus::Registry& registry, const char* name,
                                const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

std::map<std::string, prometheus::Counter*> AddFailures(prometheus::Registry& registry,
                                                        const char* name, const char* help) {
  auto& family = prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  std::map<std::string, prometheus::Counter*> counters;
  for (int code = 1; code <= 16; ++code) {
    const char* label = CodeLabel(static_cast<absl::StatusCode>(code));
    if (counters.count(label) == 0) counters[label] = &family.Add({{"code", label}});
  }
  return counters;
}

std::map<std::string, prometheus::Gauge*> AddStates(prometheus::Registry& registry,
                                                    const char* name, const char* help,
                                                    std::initializer_list<const char*> states) {
  auto& family = prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  std::map<std::string, prometheus::Gauge*> gauges;
  for (const char* state : states) gauges[state] = &family.Add({{"state", state}});
  return gauges;
}

}  // namespace

ControllerMetrics::ControllerMetrics(prometheus::Registry& registry, const std::string& version) {
  const prometheus::Histogram::BucketBoundaries long_times = {1,   3,    10,   30,   60,   180,
                                                              600, 1800, 3600, 7200, 14400};
  jobs_ =
      AddStates(registry, "shardprep_jobs", "Unfinished jobs, by state.", {"pending", "running"});
  auto& completed = prometheus::BuildCounter()
                        .Name("shardprep_jobs_completed_total")
                        .Help("Finished jobs, by result.")
                        .Register(registry);
  jobs_completed_[v1::PrepJob::STATE_SUCCEEDED] = &completed.Add({{"result", "succeeded"}});
  jobs_completed_[v1::PrepJob::STATE_FAILED] = &completed.Add({{"result", "failed"}});
  jobs_completed_[v1::PrepJob::STATE_CANCELLED] = &completed.Add({{"result", "cancelled"}});
  job_seconds_ = AddHistogram(registry, "shardprep_job_duration_seconds",
                              "Time from creating a job to its end.", long_times);
  job_wait_seconds_ = AddHistogram(registry, "shardprep_job_wait_seconds",
                                   "Time from creating a job to its start.", long_times);
  last_job_completed_ = AddGauge(registry, "shardprep_last_job_completed_timestamp_seconds",
                                 "When a job last succeeded.");
  rank_queue_length_ = AddGauge(registry, "shardprep_rank_queue_length",
                                "Rank tasks of running jobs that wait for a worker.");
  ranks_leased_ = AddGauge(registry, "shardprep_ranks_leased", "Rank tasks leased to workers.");
  leases_open_ = AddGauge(registry, "shardprep_leases_open",
                          "Leases that are not closed, withdrawn ones included.");
  leases_granted_ = AddCounter(registry, "shardprep_leases_granted_total", "Leases granted.");
  lease_failures_ = AddFailures(registry, "shardprep_lease_failures_total",
                                "Leases that failed or whose worker was lost, by status code.");
  workers_ = AddStates(registry, "shardprep_workers", "Workers that call, by state.",
                       {"idle", "busy", "draining"});
  workers_left_ = AddCounter(registry, "shardprep_workers_left_total",
                             "Workers whose process ended or that went silent.");
  plan_seconds_ = AddHistogram(registry, "shardprep_plan_duration_seconds",
                               "Time to read a checkpoint's headers and plan.",
                               {0.01, 0.03, 0.1, 0.3, 1, 2, 5, 10, 30, 60});
  plan_failures_ = AddFailures(registry, "shardprep_plan_failures_total",
                               "Plans that were refused or failed, by status code.");
  prometheus::BuildGauge()
      .Name("shardprep_build_info")
      .Help("1, labelled with the version that runs.")
      .Register(registry)
      .Add({{"version", version}})
      .Set(1);
}

void ControllerMetrics::Count(const QueueEvent& event, absl::Time now) {
  switch (event.kind) {
    case QueueEvent::Kind::kJobStarted:
      job_wait_seconds_->Observe(absl::ToDoubleSeconds(event.duration));
      break;
    case QueueEvent::Kind::kJobFinished:
      jobs_completed_.at(event.state)->Increment();
      job_seconds_->Observe(absl::ToDoubleSeconds(event.duration));
      if (event.state == v1::PrepJob::STATE_SUCCEEDED) {
        last_job_completed_->Set(absl::ToDoubleSeconds(now - absl::UnixEpoch()));
      }
      break;
    case QueueEvent::Kind::kLeaseGranted:
      leases_granted_->Increment();
      break;
    case QueueEvent::Kind::kLeaseFailed:
      lease_failures_.at(CodeLabel(event.status.code()))->Increment();
      break;
    case QueueEvent::Kind::kWorkerLeft:
      workers_left_->Increment();
      break;
    default:
      break;
  }
}

void ControllerMetrics::SetStats(const QueueStats& stats) {
  jobs_.at("pending")->Set(stats.pending);
  jobs_.at("running")->Set(stats.running);
  rank_queue_length_->Set(static_cast<double>(stats.rank_tasks_waiting));
  ranks_leased_->Set(static_cast<double>(stats.rank_tasks_leased));
  leases_open_->Set(stats.leases);
  workers_.at("idle")->Set(stats.workers_idle);
  workers_.at("busy")->Set(stats.workers_busy);
  workers_.at("draining")->Set(stats.workers_draining);
}

void ControllerMetrics::Planned(absl::Duration duration, absl::StatusCode code) {
  plan_seconds_->Observe(absl::ToDoubleSeconds(duration));
  if (code != absl::StatusCode::kOk) plan_failures_.at(CodeLabel(code))->Increment();
}

}  // namespace shardprep
