// What one GPU thread does, as a function that the host can call too: the kernels launch it, and
// the tests loop over it, so what a launch computes is tested without a GPU.
//
// A lane writes 16 consecutive output bytes. Lanes are numbered in output order, so neighbouring
// threads write neighbouring bytes; a 16-byte piece never spans two tiles. Weights move as one
// 16-byte vector, scales as four dwords gathered bytewise.
#pragma once

#include <cstdint>

#include "kernels/layout_index.h"

namespace shardprep {

inline constexpr int64_t kLaneBytes = 16;

// Row blocks of one expert whose source rows lie in output order in one buffer.
struct LaneArgs {
  const uint8_t* src;   // 16-byte aligned; row k of the output at src + k * src_pitch
  uint8_t* dst;         // 16-byte aligned; rows * out_cols bytes
  int64_t src_pitch;    // multiple of 16, >= native_cols
  int64_t rows;         // whole blocks of the tile kind
  int64_t native_cols;  // columns from here to padded_cols become 0x00
  int64_t padded_cols;  // columns from here to out_cols become fill
  int64_t out_cols;
  TileKind tile;  // not kRow
  uint8_t fill;
};

SP_HOST_DEVICE constexpr int64_t LaneCount(const LaneArgs& args) {
  return args.rows * args.out_cols / kLaneBytes;
}

template <TileKind kTile>
SP_HOST_DEVICE inline void ShuffleLane(const LaneArgs& args, int64_t lane) {
  constexpr int64_t kTileBytes = int64_t{TileRows(kTile)} * TileCols(kTile);
  const int64_t block_bytes = TileRows(kTile) * args.out_cols;
  const int64_t offset = lane * kLaneBytes;
  const int64_t block = offset / block_bytes;
  const int64_t in_block = offset - block * block_bytes;
  const uint32_t in_tile = static_cast<uint32_t>(in_block % kTileBytes);
  const int64_t col = in_block / kTileBytes * TileCols(kTile);
  const uint8_t* src = args.src + block * TileRows(kTile) * args.src_pitch + col;
  alignas(kLaneBytes) uint8_t bytes[kLaneBytes];
  if (kTile == TileKind::k16x16 && col + TileCols(kTile) <= args.native_cols) {
    const uint8_t* from = src + TileSource(kTile, in_tile).row * args.src_pitch;
    __builtin_memcpy(bytes, __builtin_assume_aligned(from, kLaneBytes), kLaneBytes);
  } else {
    for (uint32_t k = 0; k < kLaneBytes; ++k) {
      const TileAt at = TileSource(kTile, in_tile + k);
      bytes[k] = col + at.col < args.native_cols   ? src[at.row * args.src_pitch + at.col]
                 : col + at.col < args.padded_cols ? uint8_t{0}
                                                   : args.fill;
    }
  }
  __builtin_memcpy(__builtin_assume_aligned(args.dst + offset, kLaneBytes), bytes, kLaneBytes);
}

}  // namespace shardprep
