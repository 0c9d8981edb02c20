// Which source bytes a part needs, in the order in which they are used, cut into spans for sources
// where each read is a request with a latency of its own. Pure.
//
// A span is what is read ahead, held and given up together: the source bytes of one or several
// items. An item is a run of output rows of one expert for some ranks of the set, or a run of bytes
// of a tensor that is stored unchanged. Ranks whose rows lie side by side in the source share a
// range: one expert's tensor is one read however many ranks cut it up. Other tensors are items for
// all ranks of the set.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Bytes of a source file that one read fetches.
struct SourceRange {
  int64_t file = 0;        // index into Checkpoint::files()
  int64_t offset = 0;      // of the first byte, from the start of the file
  int64_t size_bytes = 0;  // > 0
  int64_t at = 0;          // where in the span's memory it goes

  friend bool operator==(const SourceRange&, const SourceRange&) = default;
};

struct SpanItem {
  int32_t tensor = 0;  // index into PartPlan::tensors
  int64_t expert = 0;  // of another tensor the source, see DenseTensor
  // Output rows of the expert's matrix, multiples of 32 but for the last; of another tensor rows of
  // the source.
  int64_t begin = 0;
  int64_t end = 0;
  // Which ranks, as positions in the rank set.
  int32_t rank_begin = 0;
  int32_t rank_end = 0;
  int64_t span = 0;  // index into SpanPlan::spans
};

struct SourceSpan {
  std::vector<SourceRange> ranges;  // by (file, offset); apart from each other
  int64_t size_bytes = 0;           // of all ranges

  // Where in the span's memory bytes [offset, offset + size_bytes) of a file are; the span must
  // hold all of them.
  int64_t Position(int64_t file, int64_t offset, int64_t size_bytes) const;
};

// Sorted, those that overlap or touch joined, each with its place in memory.
std::vector<SourceRange> JoinRanges(std::vector<SourceRange> ranges);

int64_t TotalBytes(const std::vector<SourceRange>& ranges);

// Puts the ranges of items, in the order in which they are used, into spans.
class SpanFiller {
 public:
  // Small items share a span of at most half of `span_bytes`; larger ones have one of their own,
  // whatever their size.
  explicit SpanFiller(int64_t span_bytes) : span_bytes_(span_bytes) {}

  // The index of the item's span. An item without ranges has one, too.
  int64_t Add(const std::vector<SourceRange>& ranges);

  std::vector<SourceSpan> Take();

 private:
  void Close();

  const int64_t span_bytes_;
  std::vector<SourceSpan> spans_;
  bool open_ = false;  // an item has been added to the span that is not in spans_ yet
  std::vector<SourceRange> open_ranges_;
  int64_t open_bytes_ = 0;
};

struct SpanPlan {
  // By tensor and expert; each rank meets its rows or bytes in output order. Spans rise.
  std::vector<SpanItem> items;
  std::vector<SourceSpan> spans;
};

// The spans of one part for the given ranks of a region, or for {kReplicatedRank}. No span
// is larger than `span_bytes`, which must hold 32 rows of the widest tensor; small items share a
// span up to half of it. No source byte is in two spans, unless gate and up rows alternate in the
// source but not in the output, and one rank's do not fit a span.
SpanPlan PlanSpans(const SlicePlan& plan, const Region& region, const PartPlan& part,
                   const std::vector<int32_t>& ranks, int64_t span_bytes);

}  // namespace shardprep
