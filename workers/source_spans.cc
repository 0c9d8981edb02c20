#include "workers/source_spans.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/status_macros.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

constexpr int64_t kRowMultiple = 32;  // whole blocks of every layout

}  // namespace

std::vector<SourceRange> JoinRanges(std::vector<SourceRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const SourceRange& a, const SourceRange& b) {
    return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
  });
  std::vector<SourceRange> joined;
  int64_t at = 0;
  for (const SourceRange& range : ranges) {
    if (!joined.empty() && joined.back().file == range.file) {
      SourceRange& last = joined.back();
      const int64_t end = last.offset + last.size_bytes;
      if (range.offset <= end) {
        const int64_t more = std::max<int64_t>(0, range.offset + range.size_bytes - end);
        last.size_bytes += more;
        at += more;
        continue;
      }
    }
    joined.push_back({range.file, range.offset, range.size_bytes, at});
    at += range.size_bytes;
  }
  return joined;
}

int64_t TotalBytes(const std::vector<SourceRange>& ranges) {
  int64_t bytes = 0;
  for (const SourceRange& range : ranges) bytes += range.size_bytes;
  return bytes;
}

int64_t SpanFiller::Add(const std::vector<SourceRange>& ranges) {
  const int64_t bytes = TotalBytes(ranges);
  if (bytes > 0 && open_bytes_ > 0 && open_bytes_ + bytes > span_bytes_ / 2) Close();
  open_ = true;
  open_ranges_.insert(open_ranges_.end(), ranges.begin(), ranges.end());
  open_bytes_ += bytes;
  return static_cast<int64_t>(spans_.size());
}

std::vector<SourceSpan> SpanFiller::Take() {
  Close();
  return std::move(spans_);
}

void SpanFiller::Close() {
  if (!open_) return;
  SourceSpan span{.ranges = JoinRanges(std::move(open_ranges_)), .size_bytes = 0};
  span.size_bytes = TotalBytes(span.ranges);
  spans_.push_back(std::move(span));
  open_ = false;
  open_ranges_.clear();
  open_bytes_ = 0;
}

namespace {

class SpanPlanner {
 public:
  SpanPlanner(const SlicePlan& plan, const Region& region, const PartPlan& part,
              const std::vector<int32_t>& ranks, int64_t span_bytes)
      : plan_(plan),
        region_(region),
        part_(part),
        ranks_(ranks),
        span_bytes_(span_bytes),
        filler_(span_bytes) {}

  SpanPlan Plan() {
    for (int32_t t = 0; t < static_cast<int32_t>(part_.tensors.size()); ++t) {
      if (region_.kind == Region::Kind::kRouted) {
        PlanFused(t);
      } else {
        PlanDense(t);
      }
    }
    result_.spans = filler_.Take();
    return std::move(result_);
  }

 private:
  void PlanFused(int32_t tensor) {
    const FusedTensor& fused = plan_.FusedTensorsOf(ranks_.front())[part_.tensors[tensor].source];
    const int64_t rows = fused.job.rows;
    const auto rank_count = static_cast<int32_t>(ranks_.size());
    // Gate and up rows are needed, and lie in the source, one after the other; or both at a time.
    const bool halves_apart = fused.halves == 2 && fused.row_step == 1 && !AlternatesHalves(fused);
    for (int64_t expert = 0; expert < fused.experts; ++expert) {
      SpanItem item{.tensor = tensor,
                    .expert = expert,
                    .begin = 0,
                    .end = halves_apart ? rows / 2 : rows,
                    .rank_begin = 0,
                    .rank_end = rank_count};
      Cut(fused, item);
      if (!halves_apart) continue;
      item.begin = rows / 2;
      item.end = rows;
      Cut(fused, item);
    }
  }

  // Adds the item, in halves of halves when it is too large. Fewer ranks are tried before fewer
  // rows, because the rows of one rank lie together in the source; unless all ranks need the same
  // rows.
  void Cut(const FusedTensor& fused, const SpanItem& item) {
    const std::vector<SourceRange> ranges = RangesOf(fused, item);
    SpanItem first = item, second = item;
    if (TotalBytes(ranges) <= span_bytes_) {
      Add(item, ranges);
      return;
    }
    if (item.rank_end - item.rank_begin > 1 && !BlockShapeOf(fused).shared) {
      first.rank_end = second.rank_begin = (item.rank_begin + item.rank_end) / 2;
    } else {
      SP_CHECK(item.end - item.begin > kRowMultiple);
      const int64_t half = (item.end - item.begin) / 2;
      first.end = second.begin =
          item.begin + (half + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
    }
    Cut(fused, first);
    Cut(fused, second);
  }

  std::vector<SourceRange> RangesOf(const FusedTensor& fused, const SpanItem& item) const {
    std::vector<SourceRange> ranges;
    for (int32_t r = item.rank_begin; r < item.rank_end; ++r) {
      const auto index = &fused - plan_.FusedTensorsOf(ranks_.front()).data();
      const FusedTensor& own = plan_.FusedTensorsOf(ranks_[r])[static_cast<size_t>(index)];
      const std::vector<Slice> slices = plan_.SlicesOf(region_, own, ranks_[r], item.expert);
      for (const RowRange& rows : LogicalRanges(fused, item.begin, item.end)) {
        for (const SlicePiece& piece : PiecesIn(slices, rows)) {
          const Slice& slice = slices[piece.slice];
          const TensorInfo info = plan_.checkpoint().tensors().at(slice.tensor);
          ranges.push_back({info.file, info.offset + piece.source_row * slice.source_row_bytes,
                            piece.source_rows * slice.source_row_bytes, 0});
        }
      }
    }
    return JoinRanges(std::move(ranges));
  }

  void PlanDense(int32_t tensor) {
    const DenseTensor& dense =
        plan_.dense_tensors()[static_cast<size_t>(part_.tensors[tensor].source)];
    for (int64_t s = 0; s < static_cast<int64_t>(dense.sources.size()); ++s) {
      PlanSource(tensor, dense, s);
    }
  }

  // The rows that some rank of the set needs, cut evenly.
  void PlanSource(int32_t tensor, const DenseTensor& dense, int64_t number) {
    const DenseSource& source = dense.sources[static_cast<size_t>(number)];
    const TensorInfo info = plan_.checkpoint().tensors().at(source.tensor);
    const int64_t most = std::max<int64_t>(1, span_bytes_ / source.row_bytes);
    for (const RowRange& needed : NeededRows(dense, source)) {
      const int64_t rows = needed.end - needed.begin;
      const int64_t pieces = std::max<int64_t>(1, (rows + most - 1) / most);
      const int64_t piece = (rows + pieces - 1) / pieces;
      for (int64_t begin = needed.begin; begin < needed.end; begin += piece) {
        const int64_t end = std::min(begin + piece, needed.end);
        Add({.tensor = tensor,
             .expert = number,
             .begin = begin,
             .end = end,
             .rank_begin = 0,
             .rank_end = static_cast<int32_t>(ranks_.size())},
            {{info.file, info.offset + begin * source.row_bytes, (end - begin) * source.row_bytes,
              0}});
      }
    }
  }

  // In order, apart from each other.
  std::vector<RowRange> NeededRows(const DenseTensor& dense, const DenseSource& source) const {
    std::vector<RowRange> ranges;
    for (const int32_t rank : ranks_) {
      const Slice slice = plan_.DenseSliceOf(dense, source, rank);
      if (slice.rows > 0) ranges.push_back({slice.row_begin, slice.row_begin + slice.rows});
    }
    return JoinRows(std::move(ranges));
  }

  void Add(SpanItem item, const std::vector<SourceRange>& ranges) {
    item.span = filler_.Add(ranges);
    result_.items.push_back(item);
  }

  const SlicePlan& plan_;
  const Region& region_;
  const PartPlan& part_;
  const std::vector<int32_t>& ranks_;
  const int64_t span_bytes_;
  SpanFiller filler_;
  SpanPlan result_;
};

}  // namespace

int64_t SourceSpan::Position(int64_t file, int64_t offset, int64_t bytes) const {
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), std::make_pair(file, offset),
                                      [](const auto& at, const SourceRange& range) {
                                        return at < std::make_pair(range.file, range.offset);
                                      });
  SP_CHECK(after != ranges.begin());
  const SourceRange& range = *(after - 1);
  SP_CHECK(range.file == file && offset + bytes <= range.offset + range.size_bytes);
  return range.at + (offset - range.offset);
}

SpanPlan PlanSpans(const SlicePlan& plan, const Region& region, const PartPlan& part,
                   const std::vector<int32_t>& ranks, int64_t span_bytes) {
  return SpanPlanner(plan, region, part, ranks, span_bytes).Plan();
}

}  // namespace shardprep
