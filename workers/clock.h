// Time, injected. Leases are measured on the monotonic reading; the wall reading is only ever shown
// or recorded, so a clock that is set must never end a lease.
#pragma once

#include <time.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardprep {

// Thread safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Since an arbitrary origin; never goes back, and goes on while the machine sleeps.
  virtual absl::Duration Monotonic() const = 0;
  virtual absl::Time Wall() const = 0;
};

class SystemClock : public Clock {
 public:
  absl::Duration Monotonic() const override {
    // CLOCK_MONOTONIC stands still in a suspended machine: a worker that wakes up would believe in
    // a lease that the controller has long given to another.
    timespec now;
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return absl::DurationFromTimespec(now);
  }
  absl::Time Wall() const override { return absl::Now(); }
};

// Stands still until a test moves it.
class FakeClock : public Clock {
 public:
  absl::Duration Monotonic() const override {
    absl::MutexLock lock(&mu_);
    return elapsed_;
  }
  absl::Time Wall() const override { return absl::FromUnixSeconds(1'700'000'000) + Monotonic(); }

  void Advance(absl::Duration by) {
    absl::MutexLock lock(&mu_);
    elapsed_ += by;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Duration elapsed_ ABSL_GUARDED_BY(mu_) = absl::Seconds(1000);
};

}  // namespace shardprep
