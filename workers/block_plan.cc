#include "workers/block_plan.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

constexpr int64_t kRowMultiple = 32;  // whole blocks of every layout

}  // namespace

bool AlternatesHalves(const FusedTensor& tensor) {
  return tensor.job.row_order == RowOrder::kGateUpRows ||
         tensor.job.layout == LayoutId::kAiter16x16GateUp ||
         tensor.job.layout == LayoutId::kAiterE8m0GateUp;
}

BlockShape BlockShapeOf(const FusedTensor& tensor) {
  BlockShape block;
  block.shared = tensor.splits_rows;
  const int64_t source_row = tensor.source_row_bytes * tensor.row_step;
  const int64_t widest = std::max(source_row, OutputCols(tensor.job));
  const int64_t rows = std::max(kRowMultiple, kBlockBytes / widest / kRowMultiple * kRowMultiple);
  block.rows = std::min(rows, tensor.job.rows);
  block.source_bytes = block.rows * source_row;
  block.output_bytes = block.rows * OutputCols(tensor.job);
  return block;
}

std::vector<RowRange> JoinRows(std::vector<RowRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const RowRange& a, const RowRange& b) { return a.begin < b.begin; });
  std::vector<RowRange> joined;
  for (const RowRange& range : ranges) {
    if (joined.empty() || range.begin > joined.back().end) {
      joined.push_back(range);
    } else {
      joined.back().end = std::max(joined.back().end, range.end);
    }
  }
  return joined;
}

std::vector<RowRange> LogicalRanges(const FusedTensor& tensor, int64_t begin, int64_t end) {
  if (!AlternatesHalves(tensor)) return {{begin, end}};
  const int64_t half = tensor.job.rows / 2;
  return {{begin / 2, end / 2}, {half + begin / 2, half + end / 2}};
}

std::vector<SlicePiece> PiecesIn(const std::vector<Slice>& slices, const RowRange& range) {
  std::vector<SlicePiece> pieces;
  for (int s = 0; s < static_cast<int>(slices.size()); ++s) {
    const Slice& slice = slices[s];
    const int64_t begin = std::max(range.begin, slice.first_row);
    const int64_t end = std::min(range.end, slice.first_row + slice.rows);
    if (begin >= end) continue;
    pieces.push_back({.slice = s,
                      .source_row = slice.row_begin + (begin - slice.first_row) * slice.row_step,
                      .source_rows = (end - begin - 1) * slice.row_step + 1,
                      .first_row = begin,
                      .rows = end - begin});
  }
  return pieces;
}

int64_t DenseBlockRows(const DenseSource& source) {
  return std::max<int64_t>(1, kBlockBytes / source.row_bytes);
}

namespace {

// All ranks share the blocks of dense tensors.
void AddDense(const SlicePlan& plan, MemoryNeed& need, int64_t& largest_output,
              int64_t& least_span) {
  if (plan.DenseBytesPerRank() == 0) return;
  for (const DenseTensor& tensor : plan.dense_tensors()) {
    for (const DenseSource& source : tensor.sources) {
      const int64_t block = DenseBlockRows(source) * source.row_bytes;
      largest_output = std::max(largest_output, block);
      least_span = std::max(least_span, source.row_bytes);
      if (need.preferred_read == 0) need.shared_block = std::max(need.shared_block, block);
    }
  }
}

}  // namespace

MemoryNeed MemoryNeedOf(const SlicePlan& plan, const ObjectStore& source,
                        const ObjectStore& destination) {
  MemoryNeed need;
  need.preferred_read = source.PreferredReadBytes();
  int64_t largest_output = kBlockBytes, least_span = need.preferred_read;
  for (const FusedTensor& tensor : plan.fused_tensors()) {
    const BlockShape block = BlockShapeOf(tensor);
    largest_output = std::max(largest_output, block.output_bytes);
    least_span =
        std::max(least_span, block.source_bytes / block.rows * std::min(block.rows, kRowMultiple));
    if (need.preferred_read > 0) continue;
    if (block.shared) {
      need.shared_block = std::max(need.shared_block, block.source_bytes);
    } else {
      need.per_thread = std::max(need.per_thread, block.source_bytes);
    }
  }
  AddDense(plan, need, largest_output, least_span);
  int64_t largest_part = 0, largest_source = 0;
  for (const Region& region : plan.regions()) {
    largest_source = std::max(largest_source, region.source_bytes);
    for (const PartPlan& part : region.parts) {
      largest_part = std::max(largest_part, part.data_bytes);
    }
  }
  if (plan.moe_tensor_parallel_size() > 1) need.batches = plan.expert_slots().groups();
  const int64_t largest_object = largest_part + kMaxHeaderBytes;
  need.per_rank = destination.WriteBufferBytes(largest_object, largest_output);
  need.per_write = destination.FurtherWriteBytes(largest_object, largest_output);
  if (need.preferred_read > 0) {
    least_span = (least_span + kSpanAlignment - 1) / kSpanAlignment * kSpanAlignment;
    need.read_ahead_least = 2 * least_span;
    // Two spans in use beside those that are fetched, each of at most two preferred reads.
    need.read_ahead_most =
        std::max(need.read_ahead_least,
                 std::min(int64_t{2} * (kSourceReaders + 2) * least_span, 2 * largest_source));
  }
  return need;
}

int64_t JointSpanBytes(const MemoryNeed& need) {
  // What all threads work on at a time should stay in the cache that they share.
  constexpr int64_t kFileSpanBytes = int64_t{1} << 20;
  return std::max(kFileSpanBytes, need.preferred_read);
}

MemoryNeed JointMemoryNeed(const std::vector<MemoryNeed>& needs, int64_t largest_span) {
  MemoryNeed joint;
  for (const MemoryNeed& need : needs) {
    joint.per_rank = std::max(joint.per_rank, need.per_rank);
    joint.per_write = std::max(joint.per_write, need.per_write);
    joint.preferred_read = std::max(joint.preferred_read, need.preferred_read);
  }
  const int64_t span = (std::max(largest_span, JointSpanBytes(joint)) + kSpanAlignment - 1) /
                       kSpanAlignment * kSpanAlignment;
  joint.read_ahead_least = 2 * span;
  // Two spans in use beside those that are read.
  joint.read_ahead_most =
      (2 + (joint.preferred_read > 0 ? kSourceReaders : kJointFileReaders)) * span;
  return joint;
}

absl::StatusOr<LeaseShape> FitLease(const MemoryNeed& need, int64_t budget_bytes,
                                    int32_t rank_count, int32_t threads) {
  if (budget_bytes < need.Total(1, 1)) {
    return absl::InvalidArgumentError(absl::StrCat("memory budget of ", budget_bytes,
                                                   " bytes is too small, want at least ",
                                                   need.Total(1, 1)));
  }
  // Giving up threads is cheaper than giving up ranks, which reads the source twice.
  const int64_t fit = (budget_bytes - need.Total(0, 1)) / need.per_rank;
  LeaseShape shape;
  shape.ranks = static_cast<int32_t>(std::min<int64_t>(fit, rank_count));
  shape.threads = 1;
  while (shape.threads < std::min(threads, shape.ranks) &&
         need.Total(shape.ranks, shape.threads + 1) <= budget_bytes) {
    ++shape.threads;
  }
  int64_t spare = budget_bytes - need.Total(shape.ranks, shape.threads);
  shape.read_ahead = std::min(need.read_ahead_most, need.read_ahead_least + spare);
  spare -= shape.read_ahead - need.read_ahead_least;
  while (shape.writes < need.MostWrites(shape.ranks) && shape.ranks * need.per_write <= spare) {
    ++shape.writes;
    spare -= shape.ranks * need.per_write;
  }
  return shape;
}

int32_t BatchesAtOnce(const MemoryNeed& need, int64_t budget_bytes, int32_t batches, int32_t ranks,
                      int32_t threads) {
  if (batches < 2) return 1;
  // Ranks that a thread prepares one after the other, by how many batches there are at a time.
  const auto ranks_in_turn = [&](int32_t count) {
    const auto fit = FitLease(need, budget_bytes / count, ranks, threads / count);
    if (!fit.ok() || fit->ranks < ranks) return std::numeric_limits<int32_t>::max();
    return ((batches + count - 1) / count) * ((ranks + fit->threads - 1) / fit->threads);
  };
  int32_t best = 1;
  for (int32_t count = 1, least = std::numeric_limits<int32_t>::max();
       count <= std::min(batches, threads); ++count) {
    const int32_t in_turn = ranks_in_turn(count);
    if (in_turn >= least) continue;
    least = in_turn;
    best = count;
  }
  return best;
}

}  // namespace shardprep
