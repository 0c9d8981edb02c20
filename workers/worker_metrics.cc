#include "workers/worker_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

namespace shardprep {
namespace {

constexpr StoreOperation kOperations[] = {
    StoreOperation::kHead,  StoreOperation::kRead, StoreOperation::kGet,    StoreOperation::kList,
    StoreOperation::kWrite, StoreOperation::kPut,  StoreOperation::kDelete, StoreOperation::kProbe};

constexpr absl::StatusCode kLabelledCodes[] = {
    absl::StatusCode::kCancelled,         absl::StatusCode::kInvalidArgument,
    absl::StatusCode::kNotFound,          absl::StatusCode::kAlreadyExists,
    absl::StatusCode::kResourceExhausted, absl::StatusCode::kFailedPrecondition,
    absl::StatusCode::kAborted,           absl::StatusCode::kUnavailable,
    absl::StatusCode::kDataLoss,          absl::StatusCode::kInternal};

prometheus::Counter* AddCounter(prometheus::Registry& registry, const char* name,
                                const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

prometheus::Gauge* AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

}  // namespace

const char* StoreOperationName(StoreOperation operation) {
  switch (operation) {
    case StoreOperation::kHead:
      return "head";
    case StoreOperation::kRead:
      return "read";
    case StoreOperation::kGet:
      return "get";
    case StoreOperation::kList:
      return "list";
    case StoreOperation::kWrite:
      return "write";
    case StoreOperation::kPut:
      return "put";
    case StoreOperation::kDelete:
      return "delete";
    case StoreOperation::kProbe:
      return "probe";
  }
  return "";
}

const char* CodeLabel(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return "OK";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    case absl::StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case absl::StatusCode::kNotFound:
      return "NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case absl::StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case absl::StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case absl::StatusCode::kAborted:
      return "ABORTED";
    case absl::StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case absl::StatusCode::kDataLoss:
      return "DATA_LOSS";
    case absl::StatusCode::kInternal:
      return "INTERNAL";
    default:
      return "OTHER";
  }
}

WorkerMetrics::WorkerMetrics(prometheus::Registry& registry, const std::string& version)
    : read_bytes_(AddCounter(registry, "shardprep_read_bytes_total", "Source bytes read.")),
      written_bytes_(AddCounter(registry, "shardprep_written_bytes_total", "Bytes written.")),
      padding_bytes_(AddCounter(registry, "shardprep_padding_bytes_total",
                                "Of the bytes written, those that no source byte lands on.")),
      needed_bytes_(AddCounter(registry, "shardprep_needed_bytes_total",
                               "Source bytes that the leased rank tasks need, each once.")),
      rank_attempts_(AddCounter(registry, "shardprep_rank_attempts_total", "Rank tasks begun.")),
      ranks_completed_(
          AddCounter(registry, "shardprep_ranks_completed_total", "Rank tasks recorded.")),
      last_rank_completed_(AddGauge(registry, "shardprep_last_rank_completed_timestamp_seconds",
                                    "When a rank task was last recorded.")),
      leases_(AddGauge(registry, "shardprep_leases", "Leases held now.")),
      memory_budget_(AddGauge(registry, "shardprep_memory_budget_bytes",
                              "Memory that the worker's buffers may take.")) {
  auto& stages = prometheus::BuildCounter()
                     .Name("shardprep_stage_seconds_total")
                     .Help("Seconds that threads spent in each stage.")
                     .Register(registry);
  for (const Stage stage : kStages) {
    stage_seconds_[stage] = &stages.Add({{"stage", StageName(stage)}});
  }
  auto& failures = prometheus::BuildCounter()
                       .Name("shardprep_rank_failures_total")
                       .Help("Rank tasks that failed, by status code.")
                       .Register(registry);
  auto& requests = prometheus::BuildCounter()
                       .Name("shardprep_store_requests_total")
                       .Help("Calls of the object store, by operation and status code.")
                       .Register(registry);
  auto& seconds = prometheus::BuildHistogram()
                      .Name("shardprep_store_request_duration_seconds")
                      .Help("Latency of object store calls.")
                      .Register(registry);
  const prometheus::Histogram::BucketBoundaries bounds = {0.0001, 0.001, 0.01, 0.03, 0.1,
                                                          0.3,    1,     3,    10,   30};
  rank_failures_["OTHER"] = &failures.Add({{"code", "OTHER"}});
  for (const absl::StatusCode code : kLabelledCodes) {
    rank_failures_[CodeLabel(code)] = &failures.Add({{"code", CodeLabel(code)}});
  }
  for (const StoreOperation operation : kOperations) {
    const char* name = StoreOperationName(operation);
    store_seconds_[operation] = &seconds.Add({{"operation", name}}, bounds);
    for (const auto& [label, unused] : rank_failures_) {
      store_requests_[{operation, label}] = &requests.Add({{"operation", name}, {"code", label}});
    }
    store_requests_[{operation, "OK"}] = &requests.Add({{"operation", name}, {"code", "OK"}});
  }
  prometheus::BuildGauge()
      .Name("shardprep_build_info")
      .Help("1, labelled with the version that runs.")
      .Register(registry)
      .Add({{"version", version}})
      .Set(1);
}

void WorkerMetrics::AddReadBytes(int64_t bytes) { read_bytes_->Increment(double(bytes)); }
void WorkerMetrics::AddWrittenBytes(int64_t bytes) { written_bytes_->Increment(double(bytes)); }
void WorkerMetrics::AddPaddingBytes(int64_t bytes) { padding_bytes_->Increment(double(bytes)); }
void WorkerMetrics::AddNeededBytes(int64_t bytes) { needed_bytes_->Increment(double(bytes)); }

void WorkerMetrics::AddStageTime(Stage stage, absl::Duration time) {
  stage_seconds_.at(stage)->Increment(absl::ToDoubleSeconds(time));
}

void WorkerMetrics::RankAttempted(int64_t ranks) { rank_attempts_->Increment(double(ranks)); }

void WorkerMetrics::RankCompleted(absl::Time when, int64_t ranks) {
  ranks_completed_->Increment(double(ranks));
  last_rank_completed_->Set(absl::ToDoubleSeconds(when - absl::UnixEpoch()));
}

void WorkerMetrics::RankFailed(absl::StatusCode code, int64_t ranks) {
  rank_failures_.at(code == absl::StatusCode::kOk ? "OTHER" : CodeLabel(code))
      ->Increment(double(ranks));
}

void WorkerMetrics::SetMemoryBudget(int64_t bytes) {
  memory_budget_->Set(static_cast<double>(bytes));
}

void WorkerMetrics::SetLeases(int64_t held) { leases_->Set(double(held)); }

void WorkerMetrics::StoreRequest(StoreOperation operation, absl::StatusCode code,
                                 absl::Duration latency) {
  store_requests_.at({operation, CodeLabel(code)})->Increment();
  store_seconds_.at(operation)->Observe(absl::ToDoubleSeconds(latency));
}

}  // namespace shardprep
