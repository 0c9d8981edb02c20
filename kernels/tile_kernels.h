// The inner loops of the host shuffle, one set per instruction set. Internal to kernels/; everyone
// else goes through kernels/shuffle.h.
#pragma once

#include <cstdint>

#include "kernels/shuffle.h"

namespace shardprep {

// Writes tiles [0, tiles) of one row block, contiguous, to `out`. rows[k] points at the first byte
// of row k of the block (TileRows of the tile's kind) and has tiles * TileCols readable bytes.
using TileLoop = void (*)(const uint8_t* const* rows, int64_t tiles, uint8_t* out);

// Writes the E8M0 tiles of one row block whose rows end inside a tile: native_cols % 8 != 0 and
// native_cols > 8. Reads native_cols bytes of each row; the columns of the last tile beyond them
// take the bytes of `pattern`, whose first native_cols % 8 bytes are 0.
using E8m0EdgeLoop = void (*)(const uint8_t* const* rows, int64_t native_cols, uint64_t pattern,
                              uint8_t* out);

struct TileKernels {
  TileLoop k16x16;
  // With non-temporal stores; `out` must be 64-byte aligned. Call end_streaming() after the last
  // such store, before another thread may read the output.
  TileLoop k16x16_streaming;
  // memcpy of a multiple of 64 bytes to a 64-byte aligned `to`, with non-temporal stores as well.
  // For tiles whose loops have no non-temporal stores of whole lines.
  void (*copy_streaming)(const uint8_t* from, int64_t size_bytes, uint8_t* to);
  void (*end_streaming)();
  TileLoop e8m0;
  // As k16x16_streaming, for even numbers of tiles; null where staging and copy_streaming is all
  // there is.
  TileLoop e8m0_streaming;
  E8m0EdgeLoop e8m0_edge;
  TileLoop n32k4;
};

// `isa` must be supported by this CPU.
const TileKernels& GetTileKernels(HostIsa isa);

}  // namespace shardprep
