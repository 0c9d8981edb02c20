// Host shuffle against memcpy of as many bytes, alternately in one run, with buffers allocated and
// touched before, in huge pages as those of a worker. Counter `ratio` is the shuffle's speed over
// memcpy's (medians).
//
// Geometry: rank shards of 8 of a model with hidden size 7168 and intermediate size 3072, 4-bit
// weights, a scale byte for 32 elements. Two ways to call:
//   block  what a worker does: a block of source rows that is in cache, shuffled into output blocks
//          of all ranks that need it, which stay in cache; against memcpy of as many bytes, also in
//          cache.
//   whole  one call from a source to an output that are both larger than the cache, against one
//          memcpy. Wanted: ratio >= 1 for weights, >= 0.5 for scales.
//   all    the same on every processor at once, each with buffers of its own, with the best
//          instruction set. Wanted: ratio >= 0.9 for weights.
// tests/bench/targets.py reads the counters and compares with torch as well.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/shuffle.h"
#include "workers/resources.h"
#include "workers/work_memory.h"

namespace shardprep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBlockBytes = int64_t{256} << 10;
constexpr int64_t kWholeBytes = int64_t{96} << 20;

struct Geometry {
  const char* name;
  LayoutId layout;
  int64_t rows;         // of an expert
  int64_t native_cols;  // of one rank
  int64_t ranks;        // that share a source row
};

constexpr Geometry kGeometries[] = {
    {"w13/aiter-16x16", LayoutId::kAiter16x16, 768, 3584, 1},
    {"w13/aiter-16x16-gate-up", LayoutId::kAiter16x16GateUp, 768, 3584, 1},
    {"w2/aiter-16x16", LayoutId::kAiter16x16, 7168, 192, 8},
    {"w13_scale/aiter-e8m0", LayoutId::kAiterE8m0, 768, 224, 1},
    {"w13_scale/aiter-e8m0-gate-up", LayoutId::kAiterE8m0GateUp, 768, 224, 1},
    {"w2_scale/aiter-e8m0", LayoutId::kAiterE8m0, 7168, 12, 8},
    {"w2_scale/aiter-e8m0-expert", LayoutId::kAiterE8m0Expert, 7168, 12, 8},
    {"w13_scale/aiter-n32k4", LayoutId::kAiterN32K4, 768, 224, 1},
    {"w2_scale/aiter-n32k4", LayoutId::kAiterN32K4, 7168, 12, 8},
};

double Median(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<int64_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// As a worker has it.
WorkMemory FilledMemory(int64_t size_bytes) {
  WorkMemory memory(size_bytes);
  const absl::Span<uint8_t> bytes = memory.bytes();
  for (size_t k = 0; k < bytes.size(); ++k) bytes[k] = static_cast<uint8_t>(k * 31);
  return memory;
}

ShuffleJob JobOf(const Geometry& geometry) {
  return {geometry.layout, RowOrder::kAsIs, geometry.rows, geometry.native_cols,
          geometry.native_cols};
}

// Whole pairs of row blocks with about `bytes` bytes.
int64_t RowsFor(const ShuffleJob& job, int64_t row_bytes, int64_t bytes) {
  const int64_t step = 2 * BlockRows(job);
  return std::max<int64_t>(bytes / row_bytes / step, 1) * step;
}

// Times shuffle() and copy(), which both write `bytes`, in turn. shuffle() returns whether it
// worked.
template <typename Shuffle, typename Copy>
void Compare(benchmark::State& state, int64_t bytes, Shuffle shuffle, Copy copy) {
  std::vector<double> shuffle_seconds;
  std::vector<double> memcpy_seconds;
  for (auto _ : state) {
    const Clock::time_point shuffle_start = Clock::now();
    if (!shuffle()) {
      state.SkipWithError("shuffle failed");
      return;
    }
    benchmark::ClobberMemory();
    shuffle_seconds.push_back(SecondsSince(shuffle_start));
    const Clock::time_point memcpy_start = Clock::now();
    copy();
    benchmark::ClobberMemory();
    memcpy_seconds.push_back(SecondsSince(memcpy_start));
    state.SetIterationTime(shuffle_seconds.back());
  }
  const double shuffled = Median(shuffle_seconds);
  const double copied = Median(memcpy_seconds);
  state.counters["shuffle_GBps"] = static_cast<double>(bytes) / shuffled / 1e9;
  state.counters["memcpy_GBps"] = static_cast<double>(bytes) / copied / 1e9;
  state.counters["ratio"] = copied / shuffled;
}

// work(t) on `threads` threads at once, t from 0 on.
template <typename Work>
void OnThreads(int threads, Work work) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& thread : others) thread.join();
}

void Whole(benchmark::State& state, const Geometry& geometry, HostIsa isa, int threads) {
  ShuffleJob job = JobOf(geometry);
  job.rows = RowsFor(job, OutputCols(job), kWholeBytes);
  const int64_t out_bytes = job.rows * OutputCols(job);
  std::vector<WorkMemory> source, plain, out;
  for (int t = 0; t < threads; ++t) {
    source.push_back(FilledMemory(job.rows * job.native_cols));
    plain.push_back(FilledMemory(out_bytes));
    out.push_back(FilledMemory(out_bytes));
  }
  const std::unique_ptr<Shuffler> shuffler = MakeHostShuffler(isa);
  Compare(
      state, out_bytes * threads,
      [&] {
        std::atomic<bool> all{true};
        OnThreads(threads, [&](int t) {
          const RowsView view{source[t].bytes().data(), job.native_cols, 0, job.rows};
          if (!shuffler
                   ->Shuffle(job, absl::MakeConstSpan(&view, 1), 0, job.rows, out[t].bytes().data())
                   .ok()) {
            all = false;
          }
        });
        return all.load();
      },
      [&] {
        OnThreads(threads, [&](int t) {
          std::memcpy(out[t].bytes().data(), plain[t].bytes().data(),
                      static_cast<size_t>(out_bytes));
        });
      });
}

void Block(benchmark::State& state, const Geometry& geometry, HostIsa isa) {
  const ShuffleJob job = JobOf(geometry);
  const int64_t source_cols = geometry.native_cols * geometry.ranks;
  const int64_t rows = std::min(RowsFor(job, source_cols, kBlockBytes), job.rows);
  const int64_t rank_bytes = rows * OutputCols(job);
  const int64_t out_bytes = rank_bytes * geometry.ranks;
  const WorkMemory source = FilledMemory(rows * source_cols);
  const WorkMemory plain = FilledMemory(out_bytes);
  const WorkMemory out = FilledMemory(out_bytes);
  const std::unique_ptr<Shuffler> shuffler = MakeHostShuffler(isa);
  Compare(
      state, out_bytes,
      [&] {
        bool all = true;
        for (int64_t rank = 0; rank < geometry.ranks; ++rank) {
          const RowsView view{source.bytes().data() + rank * job.native_cols, source_cols, 0, rows};
          uint8_t* to = out.bytes().data() + rank * rank_bytes;
          all = shuffler->Shuffle(job, absl::MakeConstSpan(&view, 1), 0, rows, to).ok() && all;
        }
        return all;
      },
      [&] {
        std::memcpy(out.bytes().data(), plain.bytes().data(), static_cast<size_t>(out_bytes));
      });
}

void Register(const std::string& name, std::function<void(benchmark::State&)> run) {
  benchmark::RegisterBenchmark(name.c_str(), std::move(run))->UseManualTime()->MinTime(0.2);
}

bool RegisterAll() {
  for (const HostIsa isa : SupportedHostIsas()) {
    for (const Geometry& geometry : kGeometries) {
      const std::string name = MakeHostShuffler(isa)->name() + "/" + geometry.name;
      Register(name + "/block", [=](benchmark::State& state) { Block(state, geometry, isa); });
      Register(name + "/whole", [=](benchmark::State& state) { Whole(state, geometry, isa, 1); });
    }
  }
  const int threads = DefaultThreads();
  for (const Geometry& geometry : kGeometries) {
    const std::string name = MakeHostShuffler()->name() + "/" + geometry.name;
    Register(name + "/all",
             [=](benchmark::State& state) { Whole(state, geometry, BestHostIsa(), threads); });
  }
  return true;
}

[[maybe_unused]] const bool registered = RegisterAll();

}  // namespace
}  // namespace shardprep
