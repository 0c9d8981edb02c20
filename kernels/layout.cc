#include "kernels/layout.h"

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "kernels/extents.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

static_assert(AiterE8m0Index(256, 16, {0, 0, 0}) == 0);
static_assert(AiterE8m0Index(256, 16, {0, 16, 0}) == 1);
static_assert(AiterE8m0Index(256, 16, {0, 0, 4}) == 2);
static_assert(AiterE8m0Index(256, 16, {0, 1, 0}) == 4);
static_assert(AiterE8m0Index(256, 16, {0, 0, 1}) == 64);
static_assert(AiterE8m0Index(256, 16, {0, 0, 8}) == 256);
static_assert(AiterE8m0Index(256, 16, {0, 32, 0}) == 512);
static_assert(AiterE8m0Index(32, 16, {1, 0, 0}) == AiterE8m0ExpertIndex(32, 16, {1, 0, 0}));
static_assert(AiterE8m0GateUpIndex(64, 16, {0, 32, 0}) == 1);
static_assert(AiterE8m0GateUpIndex(64, 16, {0, 16, 0}) == 512);
static_assert(Aiter16x16Index(32, 64, {0, 1, 0}) == 16);
static_assert(Aiter16x16Index(32, 64, {0, 0, 16}) == 256);
static_assert(Aiter16x16Index(32, 64, {0, 0, 32}) == 512);
static_assert(Aiter16x16Index(32, 64, {0, 16, 0}) == 1024);
static_assert(Aiter16x16Index(32, 64, {1, 0, 0}) == 2048);
static_assert(Aiter16x16GateUpIndex(64, 64, {0, 32, 0}) == 1024);
static_assert(Aiter16x16GateUpIndex(64, 64, {0, 16, 0}) == 2048);
static_assert(AiterN32K4Index(64, 8, {0, 1, 0}) == 4);
static_assert(AiterN32K4Index(64, 8, {0, 0, 4}) == 128);
static_assert(AiterN32K4Index(64, 8, {0, 32, 0}) == 256);

// The tile view and the index function say the same for every byte of a small expert.
constexpr bool TilesAgree(LayoutId layout, int64_t rows, int64_t cols) {
  const TileKind tile = TileOf(layout);
  const int64_t tile_rows = TileRows(tile);
  const int64_t tile_bytes = tile_rows * TileCols(tile);
  for (int64_t offset = 0; offset < rows * cols; ++offset) {
    const int64_t in_block = offset % (tile_rows * cols);
    const TileAt at = TileSource(tile, static_cast<uint32_t>(in_block % tile_bytes));
    const int64_t out_row = offset / (tile_rows * cols) * tile_rows + at.row;
    const int64_t col = in_block / tile_bytes * TileCols(tile) + at.col;
    const int64_t row = LogicalRowOf(layout, RowOrder::kAsIs, rows, out_row);
    if (LayoutIndex(layout, rows, cols, {0, row, col}) != offset) return false;
  }
  return true;
}
static_assert(TilesAgree(LayoutId::kRowMajor, 3, 5));
static_assert(TilesAgree(LayoutId::kAiter16x16, 32, 64));
static_assert(TilesAgree(LayoutId::kAiter16x16GateUp, 64, 64));
static_assert(TilesAgree(LayoutId::kAiterE8m0, 64, 16));
static_assert(TilesAgree(LayoutId::kAiterE8m0Expert, 64, 16));
static_assert(TilesAgree(LayoutId::kAiterE8m0GateUp, 64, 16));
static_assert(TilesAgree(LayoutId::kAiterN32K4, 64, 8));

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

constexpr std::array<LayoutInfo, 7> kLayouts = {{
    {LayoutId::kRowMajor, "row-major", "-", 0x00, "bytes unchanged"},
    {LayoutId::kAiter16x16, "aiter-16x16", "shuffle_weight(w,(16,16))", 0x00,
     "ROCm/aiter aiter/ops/shuffle.py shuffle_weight, unchanged since v0.1.1"},
    {LayoutId::kAiter16x16GateUp, "aiter-16x16-gate-up", "shuffle_weight_a16w4(w,16,True)", 0x00,
     "ROCm/aiter aiter/ops/shuffle.py shuffle_weight_a16w4, unchanged since v0.1.6.post2"},
    // AITER leaves its padding uninitialised; 0x00 is what engines padded to 512 hold there.
    {LayoutId::kAiterE8m0, "aiter-e8m0", "e8m0_shuffle", 0x00,
     "ROCm/aiter aiter/ops/shuffle.py e8m0_shuffle, unchanged since v0.1.4; fill is ours"},
    {LayoutId::kAiterE8m0Expert, "aiter-e8m0-expert", "shuffle_scale_a16w4(s,E,False)", 0x7F,
     "ROCm/aiter aiter/ops/shuffle.py shuffle_scale_a16w4; fill since v0.1.18 (#4130)"},
    {LayoutId::kAiterE8m0GateUp, "aiter-e8m0-gate-up", "shuffle_scale_a16w4(s,E,True)", 0x7F,
     "ROCm/aiter aiter/ops/shuffle.py shuffle_scale_a16w4; fill since v0.1.18 (#4130)"},
    {LayoutId::kAiterN32K4, "aiter-n32k4", "shuffle_scale_n32k4", 0x00,
     "ROCm/aiter aiter/ops/shuffle.py shuffle_scale_n32k4 (gfx1250), since v0.1.17"},
}};

std::string ShapeText(const MatrixShape& shape) {
  return absl::StrCat("[", shape.experts, ", ", shape.rows, ", ", shape.cols, "]");
}

absl::Status NeedMultiple(LayoutId layout, const MatrixShape& shape, const char* what,
                          int64_t found, int64_t multiple) {
  if (found % multiple == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("layout ", GetLayoutInfo(layout).name, ": ", what,
                                                 " must be a multiple of ", multiple, ", found ",
                                                 found, " in shape ", ShapeText(shape)));
}

absl::Status CheckGateUpHalves(LayoutId layout, const MatrixShape& shape) {
  SP_RETURN_IF_ERROR(NeedMultiple(layout, shape, "rows (gate and up halves)", shape.rows, 2));
  return NeedMultiple(layout, shape, "rows of the gate half", shape.rows / 2, 16);
}

absl::Status CheckDivisibility(LayoutId layout, const MatrixShape& shape, int element_bytes) {
  switch (layout) {
    case LayoutId::kRowMajor:
    case LayoutId::kAiterE8m0:
      return absl::OkStatus();
    case LayoutId::kAiter16x16:
      SP_RETURN_IF_ERROR(NeedMultiple(layout, shape, "rows", shape.rows, 16));
      return NeedMultiple(layout, shape, "bytes a row", shape.cols, int64_t{32} * element_bytes);
    case LayoutId::kAiter16x16GateUp:
      SP_RETURN_IF_ERROR(CheckGateUpHalves(layout, shape));
      return NeedMultiple(layout, shape, "bytes a row", shape.cols, 64);
    case LayoutId::kAiterE8m0Expert:
      return NeedMultiple(layout, shape, "rows", shape.rows, 32);
    case LayoutId::kAiterE8m0GateUp:
      return CheckGateUpHalves(layout, shape);
    case LayoutId::kAiterN32K4:
      SP_RETURN_IF_ERROR(NeedMultiple(layout, shape, "rows", shape.rows, 32));
      return NeedMultiple(layout, shape, "bytes a row", shape.cols, 4);
  }
  return absl::InvalidArgumentError("layout: value outside the enumeration");
}

// Rounds up to a multiple, false when the result does not fit.
bool RoundUpFits(int64_t value, int64_t multiple, int64_t* result) {
  if (value > kMaxInt64 - (multiple - 1)) return false;
  *result = RoundUpTo(value, multiple);
  return true;
}

absl::StatusOr<OutputMatrix> ComputeOutput(LayoutId layout, const MatrixShape& shape) {
  OutputMatrix output{0, shape.cols};
  int64_t unused_bytes = 0;
  bool fits = !__builtin_mul_overflow(shape.experts, shape.rows, &output.rows);
  if (fits && layout == LayoutId::kAiterE8m0) fits = RoundUpFits(output.rows, 256, &output.rows);
  if (fits && TileOf(layout) == TileKind::kE8m0) fits = RoundUpFits(shape.cols, 8, &output.cols);
  if (!fits || __builtin_mul_overflow(output.rows, output.cols, &unused_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("layout ", GetLayoutInfo(layout).name,
                                                   ": shape ", ShapeText(shape),
                                                   " has 2^63 bytes or more"));
  }
  return output;
}

absl::Status CheckSizes(LayoutId layout, const MatrixShape& shape, size_t unpadded_size,
                        size_t padded_size) {
  SP_ASSIGN_OR_RETURN(const int64_t padded_bytes, OutputBytes(layout, shape));
  const int64_t bytes = shape.experts * shape.rows * shape.cols;
  if (unpadded_size != static_cast<uint64_t>(bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("layout ", GetLayoutInfo(layout).name,
                                                   ": shape ", ShapeText(shape), " has ", bytes,
                                                   " bytes, found ", unpadded_size));
  }
  if (padded_size != static_cast<uint64_t>(padded_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layout ", GetLayoutInfo(layout).name, ": shape ", ShapeText(shape),
                     " has an output of ", padded_bytes, " bytes, found ", padded_size));
  }
  return absl::OkStatus();
}

// Calls visit(row-major offset, output offset) for every source byte. The index function is a
// template argument so that the compiler can hoist what does not change inside a row.
template <int64_t (*Index)(int64_t, int64_t, ByteAt), typename Visit>
void VisitBytes(const MatrixShape& shape, int64_t out_cols, Visit visit) {
  int64_t source = 0;
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t col = 0; col < shape.cols; ++col) {
        visit(source++, Index(shape.rows, out_cols, {expert, row, col}));
      }
    }
  }
}

template <typename Visit>
void VisitLayout(LayoutId layout, const MatrixShape& shape, int64_t out_cols, Visit visit) {
  switch (layout) {
    case LayoutId::kRowMajor:
      return VisitBytes<RowMajorIndex>(shape, out_cols, visit);
    case LayoutId::kAiter16x16:
      return VisitBytes<Aiter16x16Index>(shape, out_cols, visit);
    case LayoutId::kAiter16x16GateUp:
      return VisitBytes<Aiter16x16GateUpIndex>(shape, out_cols, visit);
    case LayoutId::kAiterE8m0:
      return VisitBytes<AiterE8m0Index>(shape, out_cols, visit);
    case LayoutId::kAiterE8m0Expert:
      return VisitBytes<AiterE8m0ExpertIndex>(shape, out_cols, visit);
    case LayoutId::kAiterE8m0GateUp:
      return VisitBytes<AiterE8m0GateUpIndex>(shape, out_cols, visit);
    case LayoutId::kAiterN32K4:
      return VisitBytes<AiterN32K4Index>(shape, out_cols, visit);
  }
}

// Calls visit(output offset) for every output byte that no source byte lands on, until it returns
// false. Only the E8M0 layouts have such bytes: columns beyond the input's, and for `aiter-e8m0`
// rows beyond the last expert's.
template <typename Visit>
void VisitFill(LayoutId layout, const MatrixShape& shape, const OutputMatrix& output, Visit visit) {
  const int64_t source_rows = shape.experts * shape.rows;
  for (int64_t flat = 0; flat < output.rows; ++flat) {
    const int64_t first_fill_col = flat < source_rows ? shape.cols : 0;
    const ByteAt in_expert{flat / shape.rows, flat % shape.rows, 0};
    for (int64_t col = first_fill_col; col < output.cols; ++col) {
      const ByteAt at{in_expert.expert, in_expert.row, col};
      if (!visit(LayoutIndex(layout, shape.rows, output.cols, at))) return;
    }
  }
}

}  // namespace

const LayoutInfo& GetLayoutInfo(LayoutId layout) {
  const size_t index = static_cast<size_t>(layout);
  SP_CHECK(index < kLayouts.size());
  return kLayouts[index];
}

absl::Span<const LayoutInfo> AllLayouts() { return kLayouts; }

absl::StatusOr<LayoutId> ParseLayoutId(absl::string_view name) {
  std::vector<absl::string_view> known;
  for (const LayoutInfo& info : kLayouts) {
    if (name == info.name) return info.id;
    known.push_back(info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown layout '", name, "', known: ", absl::StrJoin(known, ", ")));
}

absl::Status CheckLayoutShape(LayoutId layout, const MatrixShape& shape, int element_bytes) {
  if (shape.experts < 1 || shape.rows < 1 || shape.cols < 1 || element_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("layout ", GetLayoutInfo(layout).name, ": every extent must be at least 1, ",
                     "found shape ", ShapeText(shape), " of ", element_bytes, "-byte elements"));
  }
  SP_RETURN_IF_ERROR(CheckDivisibility(layout, shape, element_bytes));
  return ComputeOutput(layout, shape).status();
}

absl::StatusOr<OutputMatrix> OutputShape(LayoutId layout, const MatrixShape& shape) {
  SP_RETURN_IF_ERROR(CheckLayoutShape(layout, shape));
  return ComputeOutput(layout, shape);
}

absl::StatusOr<int64_t> OutputBytes(LayoutId layout, const MatrixShape& shape) {
  SP_ASSIGN_OR_RETURN(const OutputMatrix output, OutputShape(layout, shape));
  return output.rows * output.cols;
}

absl::StatusOr<int64_t> TailBytes(LayoutId layout, const MatrixShape& shape) {
  SP_ASSIGN_OR_RETURN(const OutputMatrix output, OutputShape(layout, shape));
  if (layout != LayoutId::kAiterE8m0) return 0;
  SP_RETURN_IF_ERROR(
      NeedMultiple(layout, shape, "rows of an expert that is streamed by itself", shape.rows, 32));
  return (output.rows - shape.experts * shape.rows) * output.cols;
}

absl::Status ApplyLayout(LayoutId layout, const MatrixShape& shape, absl::Span<const uint8_t> in,
                         absl::Span<uint8_t> out) {
  SP_ASSIGN_OR_RETURN(const OutputMatrix output, OutputShape(layout, shape));
  SP_RETURN_IF_ERROR(CheckSizes(layout, shape, in.size(), out.size()));
  const uint8_t* from = in.data();
  uint8_t* to = out.data();
  VisitLayout(layout, shape, output.cols,
              [from, to](int64_t source, int64_t target) { to[target] = from[source]; });
  const uint8_t fill = GetLayoutInfo(layout).fill;
  VisitFill(layout, shape, output, [to, fill](int64_t target) {
    to[target] = fill;
    return true;
  });
  return absl::OkStatus();
}

absl::Status InvertLayout(LayoutId layout, const MatrixShape& shape, absl::Span<const uint8_t> in,
                          absl::Span<uint8_t> out) {
  SP_ASSIGN_OR_RETURN(const OutputMatrix output, OutputShape(layout, shape));
  SP_RETURN_IF_ERROR(CheckSizes(layout, shape, out.size(), in.size()));
  const uint8_t* from = in.data();
  uint8_t* to = out.data();
  const uint8_t fill = GetLayoutInfo(layout).fill;
  int64_t wrong = -1;
  VisitFill(layout, shape, output, [from, fill, &wrong](int64_t target) {
    if (from[target] == fill) return true;
    wrong = target;
    return false;
  });
  if (wrong >= 0) {
    return absl::DataLossError(absl::StrCat("layout ", GetLayoutInfo(layout).name,
                                            ": byte at offset ", wrong, " is 0x",
                                            absl::Hex(from[wrong], absl::kZeroPad2),
                                            ", want fill 0x", absl::Hex(fill, absl::kZeroPad2)));
  }
  VisitLayout(layout, shape, output.cols,
              [from, to](int64_t source, int64_t target) { to[source] = from[target]; });
  return absl::OkStatus();
}

}  // namespace shardprep
