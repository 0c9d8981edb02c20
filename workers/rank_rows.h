// How rows of the source become rows of a rank's stream: counted, shuffled or cut, digested.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/shuffle.h"
#include "workers/rank_stream.h"
#include "workers/region_progress.h"
#include "workers/slice_plan.h"
#include "workers/span_reader.h"

namespace shardprep {

// Appends output rows [begin, end) of one expert's matrix, multiples of 32 but for the last;
// `views` are the source bytes of its logical rows (Shuffler::Shuffle). `fused` is that of the
// stream's rank.
absl::Status FuseRows(const FusedTensor& fused, absl::Span<const RowsView> views, int64_t begin,
                      int64_t end, Shuffler& shuffler, RegionProgress& progress,
                      RankStream& stream);

// The same for the expert in a slot, from a span that holds the source rows. `region` is of the
// stream's plan.
absl::Status FuseSpanRows(const Region& region, const FusedTensor& fused, int64_t slot,
                          int64_t begin, int64_t end, const SpanBytes& span, Shuffler& shuffler,
                          RegionProgress& progress, RankStream& stream);

// Appends what the stream's rank has of rows [begin, end) of a source of a dense tensor, which lie
// at `rows`, whole. At most DenseBlockRows() rows.
absl::Status AppendDenseRows(const DenseTensor& dense, const DenseSource& source, int64_t begin,
                             int64_t end, const uint8_t* rows, RankStream& stream);

// Appends what stands behind the last source of a dense tensor.
absl::Status AppendDenseTail(const DenseTensor& dense, RankStream& stream);

}  // namespace shardprep
