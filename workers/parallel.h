// Waiting for several requests at once.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace shardprep {

// Requests in flight at a time where each has a latency of its own and little else to it.
inline constexpr int kRequestsAtOnce = 16;

// Calls work(0) to work(count - 1) and waits for all. At most `at_once` run at a time, begun in
// order; with at_once <= 1 all run on the calling thread. What they touch must be theirs alone or
// guarded; all of it is visible to the caller afterwards.
void ForEachAtOnce(int64_t count, int at_once, const std::function<void(int64_t)>& work);

// The same for work that may fail: once some has, no other begins. Returns one of the errors.
absl::Status TryForEachAtOnce(int64_t count, int at_once,
                              const std::function<absl::Status(int64_t)>& work);

}  // namespace shardprep
