// A checkpoint to measure with: routed experts with the extents of the published DeepSeek-V4-Pro,
// filled with noise.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "workers/object_store.h"

namespace shardprep {

// Bytes of one routed expert: the least that a source has.
int64_t BenchExpertBytes();

// Writes a checkpoint of about `size_bytes` (a few experts more or less, at least one), one file a
// layer, and its config.json. Equal sizes give equal bytes. CANCELLED once `stop`, which may be
// null, is set; else what the store answers.
absl::Status WriteBenchSource(ObjectStore& store, int64_t size_bytes,
                              const std::atomic<bool>* stop);

}  // namespace shardprep
