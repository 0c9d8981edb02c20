#include "kernels/row_gather.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

absl::Status BadJob(const ShuffleJob& job, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("shuffle, layout ", GetLayoutInfo(job.layout).name, ": ", what));
}

// Rows logical_row + k go to slots[k * kStep], k = 0 .. kCount - 1. The common run lies in one view
// or in none; others go row by row.
template <int64_t kCount, int64_t kStep>
int GatherRun(absl::Span<const RowsView> views, int64_t logical_row, const uint8_t** slots) {
  const RowsView* view = views.begin();
  while (view != views.end() && logical_row >= view->first_row + view->rows) ++view;
  if (view == views.end() || logical_row + kCount <= view->first_row) {
    for (int64_t k = 0; k < kCount; ++k) slots[k * kStep] = nullptr;
    return 0;
  }
  const int64_t into_view = logical_row - view->first_row;
  if (into_view >= 0 && into_view + kCount <= view->rows) {
    const uint8_t* data = view->data + into_view * view->stride_bytes;
    for (int64_t k = 0; k < kCount; ++k, data += view->stride_bytes) slots[k * kStep] = data;
    return static_cast<int>(kCount);
  }
  int found = 0;
  if constexpr (kCount > 1) {
    for (int64_t k = 0; k < kCount; ++k) {
      found += GatherRun<1, 1>(views, logical_row + k, slots + k * kStep);
    }
  }
  return found;
}

}  // namespace

int64_t OutputCols(const ShuffleJob& job) {
  return TileOf(job.layout) == TileKind::kE8m0 ? (job.padded_cols + 7) / 8 * 8 : job.padded_cols;
}

int64_t BlockRows(const ShuffleJob& job) { return TileRows(TileOf(job.layout)); }

int64_t LogicalRow(const ShuffleJob& job, int64_t out_row) {
  return LogicalRowOf(job.layout, job.row_order, job.rows, out_row);
}

absl::Status CheckShuffleJob(const ShuffleJob& job) {
  SP_RETURN_IF_ERROR(CheckLayoutShape(job.layout, {1, job.rows, job.padded_cols}));
  if (job.native_cols < 0 || job.native_cols > job.padded_cols) {
    return BadJob(job, absl::StrCat("native columns must be in [0, ", job.padded_cols, "], found ",
                                    job.native_cols));
  }
  if (job.rows % BlockRows(job) != 0) {
    return BadJob(job, absl::StrCat("an expert that is streamed by itself needs rows in multiples "
                                    "of ",
                                    BlockRows(job), ", found ", job.rows));
  }
  if (job.row_order == RowOrder::kGateUpRows && job.rows % 2 != 0) {
    return BadJob(job,
                  absl::StrCat("gate and up halves need an even number of rows, found ", job.rows));
  }
  return absl::OkStatus();
}

absl::Status CheckOutputRange(const ShuffleJob& job, int64_t out_begin, int64_t out_end) {
  SP_RETURN_IF_ERROR(CheckShuffleJob(job));
  const int64_t block = BlockRows(job);
  if (out_begin < 0 || out_begin > out_end || out_end > job.rows || out_begin % block != 0 ||
      out_end % block != 0) {
    return BadJob(
        job, absl::StrCat("output rows must be a range of multiples of ", block, " inside [0, ",
                          job.rows, "), found [", out_begin, ", ", out_end, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckShuffleCall(const ShuffleJob& job, absl::Span<const RowsView> views,
                              int64_t out_begin, int64_t out_end) {
  SP_RETURN_IF_ERROR(CheckOutputRange(job, out_begin, out_end));
  int64_t previous_end = 0;
  for (const RowsView& view : views) {
    if (view.first_row < previous_end || view.rows < 0 || view.first_row > job.rows ||
        view.rows > job.rows - view.first_row) {
      return BadJob(job, absl::StrCat("views must be ordered, disjoint and inside [0, ", job.rows,
                                      "), found ", view.rows, " rows from ", view.first_row,
                                      " after row ", previous_end));
    }
    if (view.rows > 0 && (view.data == nullptr || view.stride_bytes < job.native_cols)) {
      return BadJob(job, absl::StrCat("a view needs data and a stride of at least ",
                                      job.native_cols, " bytes, found ", view.stride_bytes));
    }
    previous_end = view.first_row + view.rows;
  }
  return absl::OkStatus();
}

int GatherRows(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_row, int count,
               const uint8_t** rows) {
  if (count == 1) return GatherRun<1, 1>(views, LogicalRow(job, out_row), rows);
  int found = 0;
  for (int base = 0; base < count; base += 16) {
    if (job.row_order == RowOrder::kAsIs) {
      found += GatherRun<16, 1>(views, LogicalRow(job, out_row + base), rows + base);
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      found += GatherRun<8, 2>(views, LogicalRow(job, out_row + base + half), rows + base + half);
    }
  }
  return found;
}

}  // namespace shardprep
