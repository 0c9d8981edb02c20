// Layouts by name: what a layout needs of a matrix, what it returns, and its bytes for a whole
// matrix. Streaming a matrix through a layout is in kernels/shuffle.h; the index functions are in
// kernels/layout_index.h. All functions here are pure and thread safe.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/layout_index.h"

namespace shardprep {

// Matrices of one fused tensor: `rows` of one expert, `cols` bytes a row, before any rounding that
// the layout does itself. 2-D tensors are one expert.
struct MatrixShape {
  int64_t experts;
  int64_t rows;
  int64_t cols;
};

// What a layout returns: rows of all experts together, and bytes a row.
struct OutputMatrix {
  int64_t rows;
  int64_t cols;
};

struct LayoutInfo {
  LayoutId id;
  const char* name;            // the id in metadata and on the command line, "aiter-16x16"
  const char* aiter_function;  // what AITER calls it, "-" for row-major
  uint8_t fill;                // value of the output bytes that no input byte lands on
  const char* source;          // where the map and the fill come from
};

const LayoutInfo& GetLayoutInfo(LayoutId layout);

// All layouts, in the order of LayoutId.
absl::Span<const LayoutInfo> AllLayouts();

// INVALID_ARGUMENT for an unknown name; the message lists the known ones.
absl::StatusOr<LayoutId> ParseLayoutId(absl::string_view name);

// INVALID_ARGUMENT unless the layout takes matrices of this shape: every extent >= 1, the
// divisibility that AITER asserts or its view() needs, and an output below 2^63 bytes. The message
// names the layout, what must divide what, and what was found. `element_bytes` is the size of the
// tensor's dtype (AITER counts columns of shuffle_weight in elements).
absl::Status CheckLayoutShape(LayoutId layout, const MatrixShape& shape, int element_bytes = 1);

// Output of the whole-tensor call: `aiter-e8m0` pads the rows of all experts together to 256 and
// columns to 8, the other E8M0 layouts columns only. Errors as CheckLayoutShape.
absl::StatusOr<OutputMatrix> OutputShape(LayoutId layout, const MatrixShape& shape);
absl::StatusOr<int64_t> OutputBytes(LayoutId layout, const MatrixShape& shape);

// Bytes after the last whole row block of the last expert: what `aiter-e8m0` adds at the end of the
// whole tensor to reach 256 rows, all of value GetLayoutInfo(layout).fill; 0 for other layouts.
// Experts streamed one at a time (kernels/shuffle.h), followed by these bytes, are the whole-tensor
// output; that needs rows % 32 == 0 for `aiter-e8m0`, INVALID_ARGUMENT otherwise.
absl::StatusOr<int64_t> TailBytes(LayoutId layout, const MatrixShape& shape);

// Writes the whole output, fills included. `in` has experts * rows * cols bytes, `out` OutputBytes;
// they must not overlap. INVALID_ARGUMENT for a shape as in CheckLayoutShape or for sizes that do
// not fit it.
absl::Status ApplyLayout(LayoutId layout, const MatrixShape& shape, absl::Span<const uint8_t> in,
                         absl::Span<uint8_t> out);

// The way back: `shape` is the input of ApplyLayout, `in` its output, `out` gets the original
// bytes. DATA_LOSS when a byte that no source byte landed on is not the fill; the message names
// offset, expected and found. INVALID_ARGUMENT as ApplyLayout.
absl::Status InvertLayout(LayoutId layout, const MatrixShape& shape, absl::Span<const uint8_t> in,
                          absl::Span<uint8_t> out);

}  // namespace shardprep
