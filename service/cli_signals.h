// SIGINT and SIGTERM for a command line: taken by a thread of their own, so that commands can stop
// in order, and so that nothing but ordinary code runs when they come.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace shardprep {

class Interrupts {
 public:
  // Blocks both signals in the calling thread and so in every thread made later: make it first in
  // main. Without a handler the first signal ends the process with 128 + its number.
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // From now on the first signal calls `stop(signal)`, which must not block, on the signal thread
  // instead of ending the process; a second one ends it still. When a signal has been taken
  // already, `stop` is called here and now. An empty function restores the default. Waits for a
  // `stop` that is running.
  void Handle(std::function<void(int signal)> stop);

  // The first signal that was taken, or 0. From any thread.
  int taken() const { return taken_; }

 private:
  void Wait();
  void Take(int signal);

  absl::Mutex mu_;
  std::function<void(int)> stop_ ABSL_GUARDED_BY(mu_);
  std::atomic<int> taken_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

}  // namespace shardprep
