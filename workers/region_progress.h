// How far a region is, and where its time goes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "workers/stage.h"

namespace shardprep {

// Counters of a running region; read from any thread while it runs.
struct RegionProgress {
  std::atomic<int64_t> bytes_read{0};
  std::atomic<int64_t> bytes_written{0};
  std::atomic<int64_t> bytes_padded{0};
  std::array<std::atomic<int64_t>, kStageCount> stage_nanos{};  // over all threads
};

// Adds the time until destruction to a stage.
class StageTimer {
 public:
  StageTimer(RegionProgress& progress, Stage stage)
      : nanos_(progress.stage_nanos[static_cast<int>(stage)]),
        start_(std::chrono::steady_clock::now()) {}
  ~StageTimer() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    nanos_ += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  std::atomic<int64_t>& nanos_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace shardprep
