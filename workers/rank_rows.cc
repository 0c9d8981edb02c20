#include "workers/rank_rows.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/status_macros.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

constexpr std::array<uint8_t, 4> kMinusInfinity = {0x00, 0x00, 0x80, 0xFF};  // F32, little-endian

}  // namespace

absl::Status FuseRows(const FusedTensor& fused, absl::Span<const RowsView> views, int64_t begin,
                      int64_t end, Shuffler& shuffler, RegionProgress& progress,
                      RankStream& stream) {
  const int64_t size = (end - begin) * OutputCols(fused.job);
  SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(size));
  {
    StageTimer timer(progress, Stage::kShuffle);
    SP_RETURN_IF_ERROR(shuffler.Shuffle(fused.job, views, begin, end, out.data()));
  }
  return stream.Advance(out.subspan(0, size));
}

absl::Status FuseSpanRows(const Region& region, const FusedTensor& fused, int64_t slot,
                          int64_t begin, int64_t end, const SpanBytes& span, Shuffler& shuffler,
                          RegionProgress& progress, RankStream& stream) {
  const SlicePlan& plan = stream.slices();
  const std::vector<Slice> slices = plan.SlicesOf(region, fused, stream.rank(), slot);
  std::vector<RowsView> views;
  for (const RowRange& range : LogicalRanges(fused, begin, end)) {
    for (const SlicePiece& piece : PiecesIn(slices, range)) {
      const Slice& slice = slices[piece.slice];
      const TensorInfo info = plan.checkpoint().tensors().at(slice.tensor);
      const uint8_t* rows =
          span.At(info.file, info.offset + piece.source_row * slice.source_row_bytes,
                  piece.source_rows * slice.source_row_bytes);
      const uint8_t* data = rows + slice.col_begin;
      const int64_t stride = slice.row_step * slice.source_row_bytes;
      stream.CountNative(piece.slice, data, stride, piece.rows, slice.col_bytes);
      views.push_back({data, stride, piece.first_row, piece.rows});
    }
  }
  return FuseRows(fused, views, begin, end, shuffler, progress, stream);
}

absl::Status AppendDenseRows(const DenseTensor& dense, const DenseSource& source, int64_t begin,
                             int64_t end, const uint8_t* rows, RankStream& stream) {
  const Slice slice = stream.slices().DenseSliceOf(dense, source, stream.rank());
  const int64_t first = std::max(begin, slice.row_begin);
  const int64_t count = std::min(end, slice.row_begin + slice.rows) - first;
  if (count <= 0) return absl::OkStatus();
  const uint8_t* data = rows + (first - begin) * source.row_bytes + slice.col_begin;
  const int64_t size = count * slice.col_bytes;
  stream.CountNative(0, data, source.row_bytes, count, slice.col_bytes);
  SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(size));
  if (slice.whole_rows()) {
    std::copy_n(data, size, out.data());
  } else {
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(data + r * source.row_bytes, slice.col_bytes, out.data() + r * slice.col_bytes);
    }
  }
  return stream.Advance(out.subspan(0, size));
}

absl::Status AppendDenseTail(const DenseTensor& dense, RankStream& stream) {
  if (dense.tail_bytes == 0) return absl::OkStatus();
  SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(dense.tail_bytes));
  for (int64_t at = 0; at < dense.tail_bytes; ++at) out[at] = kMinusInfinity[at % 4];
  return stream.Advance(out.subspan(0, dense.tail_bytes));
}

}  // namespace shardprep
