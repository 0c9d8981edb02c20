#include "workers/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace shardprep {

void ForEachAtOnce(int64_t count, int at_once, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min<int64_t>(at_once, count); ++t) others.emplace_back(run);
  run();
  for (std::thread& thread : others) thread.join();
}

absl::Status TryForEachAtOnce(int64_t count, int at_once,
                              const std::function<absl::Status(int64_t)>& work) {
  absl::Mutex mu;
  absl::Status error;
  std::atomic<bool> failed{false};
  ForEachAtOnce(count, at_once, [&](int64_t i) {
    if (failed) return;
    const absl::Status status = work(i);
    if (status.ok()) return;
    absl::MutexLock lock(&mu);
    error.Update(status);
    failed = true;
  });
  return error;
}

}  // namespace shardprep
