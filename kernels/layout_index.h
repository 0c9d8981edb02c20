// Where each byte goes: one index function per layout, used unchanged by host and device code.
//
// A layout permutes the bytes of a stack of experts' matrices. Source offset of a byte is
// row-major, expert * rows * cols + row * cols + col. `rows` is the row count of one expert,
// `out_cols` the bytes of one output row: for the E8M0 layouts that is the column count rounded up
// to 8, for all others the column count. All results are byte offsets from the start of the whole
// output.
//
// Source of the maps: ROCm/aiter aiter/ops/shuffle.py at e404860. Each equals AITER's
// view/permute sequence byte for byte (tests/kernels/layout_test.cc, tests/golden); known points
// are asserted at compile time in layout.cc.
#pragma once

#include <cstdint>

#if defined(__HIPCC__) || defined(__CUDACC__)
#define SP_HOST_DEVICE __host__ __device__
#else
#define SP_HOST_DEVICE
#endif

namespace shardprep {

enum class LayoutId : uint8_t {
  kRowMajor,          // "row-major"
  kAiter16x16,        // "aiter-16x16"
  kAiter16x16GateUp,  // "aiter-16x16-gate-up"
  kAiterE8m0,         // "aiter-e8m0"
  kAiterE8m0Expert,   // "aiter-e8m0-expert"
  kAiterE8m0GateUp,   // "aiter-e8m0-gate-up"
  kAiterN32K4,        // "aiter-n32k4"
};

// Order of rows that is applied before a layout: as they are (gate half, then up half), or
// g0,u0,g1,u1... (AITER interleave_gate_up_rows, gfx1250).
enum class RowOrder : uint8_t { kAsIs, kGateUpRows };

struct ByteAt {
  int64_t expert;
  int64_t row;
  int64_t col;
};

SP_HOST_DEVICE constexpr int64_t RowMajorIndex(int64_t rows, int64_t out_cols, ByteAt at) {
  return (at.expert * rows + at.row) * out_cols + at.col;
}

// shuffle_weight(w, (16, 16)): tiles of 16 rows by 16 bytes, tile columns first.
SP_HOST_DEVICE constexpr int64_t Aiter16x16Index(int64_t rows, int64_t out_cols, ByteAt at) {
  return at.expert * rows * out_cols + at.row / 16 * 16 * out_cols + at.col / 16 * 256 +
         at.row % 16 * 16 + at.col % 16;
}

// shuffle_weight_a16w4(w, 16, gate_up=True): as above, but blocks of 16 gate rows and 16 up rows
// alternate. rows == 2 * half.
SP_HOST_DEVICE constexpr int64_t Aiter16x16GateUpIndex(int64_t rows, int64_t out_cols, ByteAt at) {
  const int64_t half = rows / 2;
  const int64_t up = at.row / half;
  const int64_t row = at.row % half;
  return at.expert * rows * out_cols + row / 16 * 32 * out_cols + up * 16 * out_cols +
         at.col / 16 * 256 + row % 16 * 16 + at.col % 16;
}

// e8m0_shuffle: tiles of 32 rows by 8 bytes over the rows of all experts as one matrix; a dword of
// the output holds rows r, r+16 of columns c and c+4.
SP_HOST_DEVICE constexpr int64_t AiterE8m0Index(int64_t rows, int64_t out_cols, ByteAt at) {
  const int64_t row = at.expert * rows + at.row;
  return row / 32 * 32 * out_cols + at.col / 8 * 256 + at.col % 4 * 64 + row % 16 * 4 +
         at.col % 8 / 4 * 2 + row % 32 / 16;
}

// shuffle_scale_a16w4(s, E, gate_up=False): e8m0_shuffle inside each expert.
SP_HOST_DEVICE constexpr int64_t AiterE8m0ExpertIndex(int64_t rows, int64_t out_cols, ByteAt at) {
  return at.expert * rows * out_cols + AiterE8m0Index(rows, out_cols, {0, at.row, at.col});
}

// shuffle_scale_a16w4(s, E, gate_up=True): tiles of 16 gate rows and 16 up rows; byte 0 of each
// pair is gate, byte 1 up. rows == 2 * half.
SP_HOST_DEVICE constexpr int64_t AiterE8m0GateUpIndex(int64_t rows, int64_t out_cols, ByteAt at) {
  const int64_t half = rows / 2;
  const int64_t up = at.row / half;
  const int64_t row = at.row % half;
  return at.expert * rows * out_cols + row / 16 * 32 * out_cols + at.col / 8 * 256 +
         at.col % 4 * 64 + row % 16 * 4 + at.col % 8 / 4 * 2 + up;
}

// shuffle_scale_n32k4: tiles of 32 rows by 4 bytes, tile columns first.
SP_HOST_DEVICE constexpr int64_t AiterN32K4Index(int64_t rows, int64_t out_cols, ByteAt at) {
  return at.expert * rows * out_cols + at.row / 32 * 32 * out_cols + at.col / 4 * 128 +
         at.row % 32 * 4 + at.col % 4;
}

// The index function of `layout`.
SP_HOST_DEVICE constexpr int64_t LayoutIndex(LayoutId layout, int64_t rows, int64_t out_cols,
                                             ByteAt at) {
  switch (layout) {
    case LayoutId::kRowMajor:
      break;
    case LayoutId::kAiter16x16:
      return Aiter16x16Index(rows, out_cols, at);
    case LayoutId::kAiter16x16GateUp:
      return Aiter16x16GateUpIndex(rows, out_cols, at);
    case LayoutId::kAiterE8m0:
      return AiterE8m0Index(rows, out_cols, at);
    case LayoutId::kAiterE8m0Expert:
      return AiterE8m0ExpertIndex(rows, out_cols, at);
    case LayoutId::kAiterE8m0GateUp:
      return AiterE8m0GateUpIndex(rows, out_cols, at);
    case LayoutId::kAiterN32K4:
      return AiterN32K4Index(rows, out_cols, at);
  }
  return RowMajorIndex(rows, out_cols, at);
}

// The same maps seen from the output, which is how they are streamed: an output is a sequence of
// row blocks, a block a sequence of tiles, and a tile one of four fixed shapes.
enum class TileKind : uint8_t { kRow, k16x16, kE8m0, kN32K4 };

SP_HOST_DEVICE constexpr TileKind TileOf(LayoutId layout) {
  switch (layout) {
    case LayoutId::kRowMajor:
      break;
    case LayoutId::kAiter16x16:
    case LayoutId::kAiter16x16GateUp:
      return TileKind::k16x16;
    case LayoutId::kAiterE8m0:
    case LayoutId::kAiterE8m0Expert:
    case LayoutId::kAiterE8m0GateUp:
      return TileKind::kE8m0;
    case LayoutId::kAiterN32K4:
      return TileKind::kN32K4;
  }
  return TileKind::kRow;
}

// Rows and byte columns of a tile. A kRow tile is one byte of one row.
SP_HOST_DEVICE constexpr int32_t TileRows(TileKind tile) {
  return tile == TileKind::kRow ? 1 : tile == TileKind::k16x16 ? 16 : 32;
}
SP_HOST_DEVICE constexpr int32_t TileCols(TileKind tile) {
  return tile == TileKind::kRow     ? 1
         : tile == TileKind::k16x16 ? 16
         : tile == TileKind::kE8m0  ? 8
                                    : 4;
}

// Row and column inside the tile of the byte that lands at `offset` of it.
struct TileAt {
  uint32_t row;
  uint32_t col;
};
SP_HOST_DEVICE constexpr TileAt TileSource(TileKind tile, uint32_t offset) {
  switch (tile) {
    case TileKind::kRow:
      break;
    case TileKind::k16x16:
      return {offset / 16, offset % 16};
    case TileKind::kE8m0:
      return {offset % 2 * 16 + offset % 64 / 4, offset % 4 / 2 * 4 + offset / 64};
    case TileKind::kN32K4:
      return {offset / 4, offset % 4};
  }
  return {0, offset};
}

// Which row of one expert's logical matrix (gate half, then up half) becomes row `out_row` of the
// matrix that the tiles are cut from.
SP_HOST_DEVICE constexpr int64_t LogicalRowOf(LayoutId layout, RowOrder order, int64_t rows,
                                              int64_t out_row) {
  const int64_t half = rows / 2;
  int64_t row = out_row;
  if (layout == LayoutId::kAiter16x16GateUp || layout == LayoutId::kAiterE8m0GateUp) {
    row = out_row / 16 % 2 * half + out_row / 32 * 16 + out_row % 16;
  }
  return order == RowOrder::kGateUpRows ? row % 2 * half + row / 2 : row;
}

}  // namespace shardprep
