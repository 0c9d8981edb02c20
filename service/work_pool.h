// A few named threads over a bounded queue.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace shardprep {

// Thread safe.
class WorkPool {
 public:
  // `name` is at most 15 bytes, what the kernel shows.
  WorkPool(const std::string& name, int threads, int max_waiting);
  ~WorkPool() { Stop(); }

  // False when `max_waiting` pieces wait already, or after Stop().
  bool Submit(std::function<void()> work);

  // Takes no more, carries out what waits, joins the threads. Idempotent.
  void Stop();

 private:
  void Run();

  const size_t max_waiting_;
  absl::Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace shardprep
