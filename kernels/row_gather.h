// Which rows in memory make up a block of output rows, and the checks of a Shuffle() call: shared
// by the host and the device shuffler. Internal to kernels/.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/shuffle.h"

namespace shardprep {

inline constexpr int kMaxBlockRows = 32;

// INVALID_ARGUMENT unless job, output range and views obey the contract of Shuffler::Shuffle().
absl::Status CheckShuffleCall(const ShuffleJob& job, absl::Span<const RowsView> views,
                              int64_t out_begin, int64_t out_end);

// The same for a range alone.
absl::Status CheckOutputRange(const ShuffleJob& job, int64_t out_begin, int64_t out_end);

// Sets rows[k] to the source of output row out_row + k, nullptr for a pad row, and returns how many
// are not null. `count` is 1, 16 or 32; out_row is a multiple of it. A checked call only.
int GatherRows(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_row, int count,
               const uint8_t** rows);

}  // namespace shardprep
