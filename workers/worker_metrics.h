// What a worker counts, on an injected registry. Every series exists from the start with value 0,
// and no label value comes from input, so the number of series is constant.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "workers/stage.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace shardprep {

enum class StoreOperation { kHead, kRead, kGet, kList, kWrite, kPut, kDelete, kProbe };
const char* StoreOperationName(StoreOperation operation);

// Thread safe. The registry must outlive it.
class WorkerMetrics {
 public:
  WorkerMetrics(prometheus::Registry& registry, const std::string& version);

  // Bytes as they happen; needed bytes are the plan's share of what was leased, so that
  // read / needed is the read amplification.
  void AddReadBytes(int64_t bytes);
  void AddWrittenBytes(int64_t bytes);
  void AddPaddingBytes(int64_t bytes);
  void AddNeededBytes(int64_t bytes);
  // Time of one thread in a stage.
  void AddStageTime(Stage stage, absl::Duration time);

  // A rank task was begun; it was recorded; it failed.
  void RankAttempted(int64_t ranks = 1);
  void RankCompleted(absl::Time when, int64_t ranks = 1);
  void RankFailed(absl::StatusCode code, int64_t ranks = 1);

  void SetLeases(int64_t held);
  // What the buffers may take (--memory_budget).
  void SetMemoryBudget(int64_t bytes);
  // One call of the object store, whatever its outcome.
  void StoreRequest(StoreOperation operation, absl::StatusCode code, absl::Duration latency);

 private:
  prometheus::Counter* read_bytes_;
  prometheus::Counter* written_bytes_;
  prometheus::Counter* padding_bytes_;
  prometheus::Counter* needed_bytes_;
  std::map<Stage, prometheus::Counter*> stage_seconds_;
  prometheus::Counter* rank_attempts_;
  prometheus::Counter* ranks_completed_;
  std::map<std::string, prometheus::Counter*> rank_failures_;
  prometheus::Gauge* last_rank_completed_;
  prometheus::Gauge* leases_;
  prometheus::Gauge* memory_budget_;
  std::map<std::pair<StoreOperation, std::string>, prometheus::Counter*> store_requests_;
  std::map<StoreOperation, prometheus::Histogram*> store_seconds_;
};

// The label value for a code: its name for the codes that the design uses, else "OTHER".
const char* CodeLabel(absl::StatusCode code);

}  // namespace shardprep
