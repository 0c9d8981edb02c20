// What the controller counts, on an injected registry. Every series exists from the start with
// value 0; no label comes from input.
#pragma once

#include <map>
#include <string>

#include "service/job_queue_types.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace shardprep {

// Thread safe. The registry must outlive it.
class ControllerMetrics {
 public:
  ControllerMetrics(prometheus::Registry& registry, const std::string& version);

  void Count(const QueueEvent& event, absl::Time now);
  void SetStats(const QueueStats& stats);
  // Planning of one request or start, whatever its outcome.
  void Planned(absl::Duration duration, absl::StatusCode code);

 private:
  std::map<std::string, prometheus::Gauge*> jobs_;
  std::map<v1::PrepJob::State, prometheus::Counter*> jobs_completed_;
  prometheus::Histogram* job_seconds_;
  prometheus::Histogram* job_wait_seconds_;
  prometheus::Gauge* last_job_completed_;
  prometheus::Gauge* rank_queue_length_;
  prometheus::Gauge* ranks_leased_;
  prometheus::Gauge* leases_open_;
  prometheus::Counter* leases_granted_;
  std::map<std::string, prometheus::Counter*> lease_failures_;
  std::map<std::string, prometheus::Gauge*> workers_;
  prometheus::Counter* workers_left_;
  prometheus::Histogram* plan_seconds_;
  std::map<std::string, prometheus::Counter*> plan_failures_;
};

}  // namespace shardprep
