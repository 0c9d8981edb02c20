// What one GPU thread does, as a function that the host can call too: the kernels launch it, and
// the tests loop over it, so what a launch computes is tested without a GPU.
//
// A lane writes 16 bytes of one tile. Weights move as one 16-byte vector: eight neighbouring lanes
// take the same row of eight neighbouring tiles, so that they read 128 bytes in a row, a line of
// the device's caches, and the lanes of eight rows fill 128 bytes of each tile. Scales are gathered
// bytewise; their lanes are numbered in output order.
#pragma once

#include <cstdint>

#include "kernels/layout_index.h"

namespace shardprep {

inline constexpr int64_t kLaneBytes = 16;
inline constexpr int64_t kMaxLanes = int64_t{1} << 31;

// Row blocks of one expert whose source rows lie in output order in one buffer. WithRows() sets
// rows, lanes and block_lanes.
struct LaneArgs {
  const uint8_t* src;    // 16-byte aligned; row k of the output at src + k * src_pitch
  uint8_t* dst;          // 16-byte aligned; rows * out_cols bytes
  int64_t src_pitch;     // multiple of 16, >= native_cols
  int64_t rows;          // whole blocks of the tile kind
  int64_t native_cols;   // columns from here to padded_cols become 0x00
  int64_t padded_cols;   // columns from here to out_cols become fill
  int64_t out_cols;      // bytes of an output row
  uint32_t lanes;        // rows * out_cols / kLaneBytes, at most kMaxLanes
  uint32_t block_lanes;  // lanes of one row block; 32 bits, as devices divide those much faster
  TileKind tile;         // not kRow
  uint8_t fill;
};

// `args` for as many rows; rows * args.out_cols / kLaneBytes must not exceed kMaxLanes.
SP_HOST_DEVICE constexpr LaneArgs WithRows(LaneArgs args, int64_t rows) {
  args.rows = rows;
  args.lanes = static_cast<uint32_t>(rows * args.out_cols / kLaneBytes);
  args.block_lanes = static_cast<uint32_t>(TileRows(args.tile) * args.out_cols / kLaneBytes);
  return args;
}

// The 16 bytes that a lane writes.
struct LanePlace {
  uint32_t block;    // row block
  uint32_t tile;     // of the block
  uint32_t in_tile;  // byte of the tile
};

template <TileKind kTile>
SP_HOST_DEVICE constexpr LanePlace LanePlaceOf(const LaneArgs& args, uint32_t lane) {
  constexpr uint32_t kTileLanes =
      static_cast<uint32_t>(int64_t{TileRows(kTile)} * TileCols(kTile) / kLaneBytes);
  const uint32_t block = lane / args.block_lanes;
  const uint32_t in_block = lane - block * args.block_lanes;
  if (kTile == TileKind::k16x16) {
    constexpr uint32_t kTiles = 8;
    constexpr uint32_t kGroup = kTiles * kTileLanes;
    const uint32_t group = in_block / kGroup;
    const uint32_t in_group = in_block % kGroup;
    // The last tiles of a block, fewer than a group, are taken in output order.
    if ((group + 1) * kGroup <= args.block_lanes) {
      return {block, group * kTiles + in_group % kTiles,
              in_group / kTiles * static_cast<uint32_t>(kLaneBytes)};
    }
  }
  return {block, in_block / kTileLanes, in_block % kTileLanes * static_cast<uint32_t>(kLaneBytes)};
}

// In four words, because an array of bytes that is indexed would be kept in memory.
struct alignas(kLaneBytes) LaneWords {
  uint32_t words[4];
};

// The piece at `in_tile` of a tile whose source begins at `src`, column `col` of its rows. Where
// all columns are native (kWhole) no byte is compared, so that the loads do not wait for each
// other.
template <TileKind kTile, bool kWhole>
SP_HOST_DEVICE constexpr LaneWords GatherPiece(const LaneArgs& args, const uint8_t* src,
                                               int64_t col, uint32_t in_tile) {
  LaneWords piece = {};
#if defined(__clang__) || defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (uint32_t k = 0; k < kLaneBytes; ++k) {
    const TileAt at = TileSource(kTile, in_tile + k);
    uint32_t byte = col + at.col < args.padded_cols ? 0 : args.fill;
    if (kWhole || col + at.col < args.native_cols) byte = src[at.row * args.src_pitch + at.col];
    piece.words[k / 4] |= byte << k % 4 * 8;
  }
  return piece;
}

template <TileKind kTile>
SP_HOST_DEVICE inline void ShuffleLane(const LaneArgs& args, uint32_t lane) {
  constexpr int64_t kTileBytes = int64_t{TileRows(kTile)} * TileCols(kTile);
  const LanePlace place = LanePlaceOf<kTile>(args, lane);
  const int64_t col = int64_t{place.tile} * TileCols(kTile);
  const uint8_t* src = args.src + int64_t{place.block} * TileRows(kTile) * args.src_pitch + col;
  uint8_t* dst = args.dst + int64_t{place.block} * args.block_lanes * kLaneBytes +
                 place.tile * kTileBytes + place.in_tile;
  const bool whole = col + TileCols(kTile) <= args.native_cols;
  LaneWords piece;
  if (!whole) {
    piece = GatherPiece<kTile, false>(args, src, col, place.in_tile);
  } else if (kTile == TileKind::k16x16) {
    const uint8_t* from = src + TileSource(kTile, place.in_tile).row * args.src_pitch;
    __builtin_memcpy(&piece, __builtin_assume_aligned(from, kLaneBytes), sizeof piece);
  } else {
    piece = GatherPiece<kTile, true>(args, src, col, place.in_tile);
  }
  __builtin_memcpy(__builtin_assume_aligned(dst, kLaneBytes), &piece, sizeof piece);
}

// Lane `lane` of `args`, whatever its tile is, which is not kRow.
inline void ShuffleLaneOf(const LaneArgs& args, uint32_t lane) {
  switch (args.tile) {
    case TileKind::kRow:
      break;
    case TileKind::k16x16:
      return ShuffleLane<TileKind::k16x16>(args, lane);
    case TileKind::kE8m0:
      return ShuffleLane<TileKind::kE8m0>(args, lane);
    case TileKind::kN32K4:
      return ShuffleLane<TileKind::kN32K4>(args, lane);
  }
}

}  // namespace shardprep
