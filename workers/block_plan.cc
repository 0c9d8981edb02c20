#include "workers/block_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace shardprep {
namespace {

constexpr int64_t kRowMultiple = 32;  // whole blocks of every layout

}  // namespace

bool AlternatesHalves(const FusedTensor& tensor) {
  return tensor.job.row_order == RowOrder::kGateUpRows ||
         tensor.job.layout == LayoutId::kAiter16x16GateUp ||
         tensor.job.layout == LayoutId::kAiterE8m0GateUp;
}

BlockShape BlockShapeOf(const SlicePlan& plan, const FusedTensor& tensor) {
  BlockShape block;
  block.shared = tensor.halves == 1 && plan.rank_count() > 1;
  const int64_t source_row =
      block.shared ? tensor.job.native_cols * plan.rank_count() : tensor.job.native_cols;
  const int64_t widest = std::max(source_row, OutputCols(tensor.job));
  const int64_t rows = std::max(kRowMultiple, kBlockBytes / widest / kRowMultiple * kRowMultiple);
  block.rows = std::min(rows, tensor.job.rows);
  block.source_bytes = block.rows * source_row;
  block.output_bytes = block.rows * OutputCols(tensor.job);
  return block;
}

MemoryNeed MemoryNeedOf(const SlicePlan& plan, const ObjectStore& destination) {
  MemoryNeed need;
  int64_t largest_output = kBlockBytes;
  for (const FusedTensor& tensor : plan.fused_tensors()) {
    const BlockShape block = BlockShapeOf(plan, tensor);
    largest_output = std::max(largest_output, block.output_bytes);
    if (block.shared) {
      need.shared_block = std::max(need.shared_block, block.source_bytes);
    } else {
      need.per_thread = std::max(need.per_thread, block.source_bytes);
    }
  }
  need.per_rank = destination.WriteBufferBytes(largest_output);
  return need;
}

absl::StatusOr<LeaseShape> FitLease(const MemoryNeed& need, int64_t budget_bytes,
                                    int32_t rank_count, int32_t threads) {
  for (int32_t t = std::min(threads, rank_count); t >= 1; --t) {
    const int64_t left = budget_bytes - need.Total(0, t);
    const int64_t ranks = left < 0 ? 0 : left / need.per_rank;
    // Giving up a thread is cheaper than reading the source twice.
    if (ranks >= rank_count) return LeaseShape{rank_count, t};
    if (t == 1 && ranks >= 1) return LeaseShape{static_cast<int32_t>(ranks), 1};
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "memory budget of ", budget_bytes, " bytes is too small, want at least ", need.Total(1, 1)));
}

}  // namespace shardprep
