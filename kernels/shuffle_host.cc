// The host path. A call walks the output block by block. A block is, from left to right, tiles that
// lie wholly in the source (the instruction set's loop), tiles that need bytes from elsewhere (put
// together in a small buffer, then the same loop), and tiles that are all pad (memset).
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "kernels/row_gather.h"
#include "kernels/shuffle.h"
#include "kernels/status_macros.h"
#include "kernels/tile_kernels.h"

namespace shardprep {
namespace {

// Calls that write at least this much bypass the cache, since the output would evict the source
// and itself before anyone reads it; the data path's blocks of some 256 KiB stay below, where
// ordinary stores are faster. tests/bench/shuffle_bench.cc measures both sides.
constexpr int64_t kStreamingBytes = int64_t{16} << 20;
constexpr uintptr_t kStreamingAlignment = 64;

constexpr int kMaxTileCols = 16;

const char* IsaName(HostIsa isa) {
  switch (isa) {
    case HostIsa::kScalar:
      return "scalar";
    case HostIsa::kSse2:
      return "sse2";
    case HostIsa::kAvx2:
      return "avx2";
    case HostIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

class BlockWriter {
 public:
  BlockWriter(const ShuffleJob& job, const TileKernels& kernels, bool streaming)
      : job_(job),
        tile_(TileOf(job.layout)),
        tile_rows_(TileRows(tile_)),
        tile_cols_(TileCols(tile_)),
        out_cols_(OutputCols(job)),
        fill_(GetLayoutInfo(job.layout).fill),
        kernels_(kernels),
        loop_(LoopOf(kernels, tile_)),
        streaming_loop_(streaming ? StreamingLoopOf(job, kernels, tile_) : nullptr),
        bulk_loop_(streaming_loop_ != nullptr ? streaming_loop_ : loop_) {
    if (streaming && streaming_loop_ == nullptr) {
      staged_.resize(static_cast<size_t>(block_bytes()));
    }
    std::memcpy(&edge_word_, EdgePattern(job.native_cols / 8 * 8).data(), sizeof(edge_word_));
  }

  int64_t block_bytes() const { return tile_rows_ * out_cols_; }

  // `present` of the block's row pointers are not null.
  void Write(const uint8_t** rows, int present, uint8_t* out) {
    if (staged_.empty()) {
      WriteBlock(rows, present, out);
    } else {
      WriteBlock(rows, present, staged_.data());
      kernels_.copy_streaming(staged_.data(), block_bytes(), out);
    }
  }

 private:
  void WriteBlock(const uint8_t** rows, int present, uint8_t* out) {
    const int64_t native_cols = present == 0 ? 0 : job_.native_cols;
    if (present != 0 && present != tile_rows_) PointPadsAtZeros(rows);
    int64_t col = WriteSourceTiles(rows, native_cols, out);
    const int64_t pad_tiles = col < job_.padded_cols ? (job_.padded_cols - col) / tile_cols_ : 0;
    if (pad_tiles > 0) {
      std::memset(out + col * tile_rows_, 0,
                  static_cast<size_t>(pad_tiles * tile_cols_ * tile_rows_));
      col += pad_tiles * tile_cols_;
    }
    if (col < out_cols_) WriteEdgeTile(rows, col, 0, out + col * tile_rows_);
  }

  // Null where the job's blocks must be staged to bypass the cache.
  static TileLoop StreamingLoopOf(const ShuffleJob& job, const TileKernels& kernels,
                                  TileKind tile) {
    if (tile == TileKind::k16x16) return kernels.k16x16_streaming;
    const bool pairs_of_tiles = job.native_cols % (int64_t{2} * TileCols(TileKind::kE8m0)) == 0;
    return tile == TileKind::kE8m0 && pairs_of_tiles ? kernels.e8m0_streaming : nullptr;
  }

  static TileLoop LoopOf(const TileKernels& kernels, TileKind tile) {
    switch (tile) {
      case TileKind::kRow:
        break;
      case TileKind::k16x16:
        return kernels.k16x16;
      case TileKind::kE8m0:
        return kernels.e8m0;
      case TileKind::kN32K4:
        return kernels.n32k4;
    }
    return nullptr;
  }

  void PointPadsAtZeros(const uint8_t** rows) {
    zeros_.resize(static_cast<size_t>(job_.native_cols));
    for (int64_t row = 0; row < tile_rows_; ++row) {
      if (rows[row] == nullptr) rows[row] = zeros_.data();
    }
  }

  // Writes the tiles that hold source bytes and returns the column after them.
  int64_t WriteSourceTiles(const uint8_t* const* rows, int64_t native_cols, uint8_t* out) {
    const int64_t full_tiles = native_cols / tile_cols_;
    const int64_t full_cols = full_tiles * tile_cols_;
    const int64_t rest = native_cols - full_cols;
    if (rest > 0 && tile_ == TileKind::kE8m0 && full_tiles > 0) {
      kernels_.e8m0_edge(rows, native_cols, edge_word_, out);
      return full_cols + tile_cols_;
    }
    if (full_tiles > 0) bulk_loop_(rows, full_tiles, out);
    if (rest == 0) return full_cols;
    WriteEdgeTile(rows, full_cols, rest, out + full_cols * tile_rows_);
    return full_cols + tile_cols_;
  }

  // What a tile at `col` holds where no source byte is.
  std::array<uint8_t, kMaxTileCols> EdgePattern(int64_t col) const {
    std::array<uint8_t, kMaxTileCols> pattern = {};
    const int64_t zero_end = std::clamp<int64_t>(job_.padded_cols - col, 0, tile_cols_);
    std::fill(pattern.begin() + zero_end, pattern.end(), fill_);
    return pattern;
  }

  // A tile of which the first `available` columns are source bytes, fewer than a tile has.
  void WriteEdgeTile(const uint8_t* const* rows, int64_t col, int64_t available, uint8_t* out) {
    const std::array<uint8_t, kMaxTileCols> pattern = EdgePattern(col);
    uint8_t scratch[kMaxBlockRows * kMaxTileCols];
    const uint8_t* scratch_rows[kMaxBlockRows];
    for (int64_t row = 0; row < tile_rows_; ++row) {
      uint8_t* to = scratch + row * tile_cols_;
      scratch_rows[row] = to;
      std::memcpy(to, pattern.data(), static_cast<size_t>(tile_cols_));
      if (available > 0) std::memcpy(to, rows[row] + col, static_cast<size_t>(available));
    }
    loop_(scratch_rows, 1, out);
  }

  const ShuffleJob& job_;
  TileKind tile_;
  int64_t tile_rows_;
  int64_t tile_cols_;
  int64_t out_cols_;
  uint8_t fill_;
  const TileKernels& kernels_;
  TileLoop loop_;
  TileLoop streaming_loop_;
  TileLoop bulk_loop_;
  uint64_t edge_word_ = 0;  // pattern of the E8M0 tile that native_cols ends in
  std::vector<uint8_t> zeros_;
  // A block in cache on its way past it, where there is no streaming loop.
  std::vector<uint8_t> staged_;
};

// Row-major has no tiles: rows are copied and padded.
void CopyRows(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
              int64_t out_end, uint8_t* out) {
  const size_t native = static_cast<size_t>(job.native_cols);
  const size_t padded = static_cast<size_t>(job.padded_cols);
  for (int64_t row = out_begin; row < out_end; ++row, out += padded) {
    const uint8_t* source = nullptr;
    if (GatherRows(job, views, row, 1, &source) == 0) {
      std::memset(out, 0, padded);
      continue;
    }
    std::memcpy(out, source, native);
    std::memset(out + native, 0, padded - native);
  }
}

class HostShuffler final : public Shuffler {
 public:
  explicit HostShuffler(HostIsa isa) : isa_(isa), kernels_(GetTileKernels(isa)) {}

  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                       int64_t out_end, uint8_t* out) override {
    SP_RETURN_IF_ERROR(CheckShuffleCall(job, views, out_begin, out_end));
    if (TileOf(job.layout) == TileKind::kRow) {
      CopyRows(job, views, out_begin, out_end, out);
      return absl::OkStatus();
    }
    const int block_rows = static_cast<int>(BlockRows(job));
    const bool streaming = (out_end - out_begin) * OutputCols(job) >= kStreamingBytes &&
                           reinterpret_cast<uintptr_t>(out) % kStreamingAlignment == 0;
    BlockWriter writer(job, kernels_, streaming);
    for (int64_t row = out_begin; row < out_end; row += block_rows, out += writer.block_bytes()) {
      const uint8_t* rows[kMaxBlockRows];
      const int present = GatherRows(job, views, row, block_rows, rows);
      writer.Write(rows, present, out);
    }
    if (streaming) kernels_.end_streaming();
    return absl::OkStatus();
  }

  std::string name() const override { return absl::StrCat("cpu/", IsaName(isa_)); }

 private:
  HostIsa isa_;
  const TileKernels& kernels_;
};

absl::Status WrongByte(const ShuffleJob& job, int64_t out_row, int64_t col, uint8_t found,
                       uint8_t want) {
  return absl::DataLossError(absl::StrCat(
      "layout ", GetLayoutInfo(job.layout).name, ": pad byte of row ", LogicalRow(job, out_row),
      ", column ", col, " is 0x", absl::Hex(found, absl::kZeroPad2), ", want 0x",
      absl::Hex(want, absl::kZeroPad2)));
}

absl::Status UnshuffleRowMajor(const ShuffleJob& job, int64_t out_begin, int64_t out_end,
                               const uint8_t* in, uint8_t* rows) {
  for (int64_t row = out_begin; row < out_end; ++row) {
    for (int64_t col = job.native_cols; col < job.padded_cols; ++col) {
      if (in[col] != 0) return WrongByte(job, row, col, in[col], 0);
    }
    std::memcpy(rows, in, static_cast<size_t>(job.padded_cols));
    in += job.padded_cols;
    rows += job.padded_cols;
  }
  return absl::OkStatus();
}

// One tile back to rows. `rows` points at column 0 of the block's first row.
template <TileKind kTile>
absl::Status UnshuffleTile(const ShuffleJob& job, int64_t block_row, int64_t col, const uint8_t* in,
                           uint8_t* rows) {
  constexpr uint32_t kTileBytes = TileRows(kTile) * TileCols(kTile);
  const bool all_source = col + TileCols(kTile) <= job.native_cols;
  const uint8_t fill = GetLayoutInfo(job.layout).fill;
  for (uint32_t offset = 0; offset < kTileBytes; ++offset) {
    const TileAt at = TileSource(kTile, offset);
    const int64_t at_col = col + at.col;
    if (!all_source && at_col >= job.native_cols) {
      const uint8_t want = at_col < job.padded_cols ? 0x00 : fill;
      if (in[offset] != want) {
        return WrongByte(job, block_row + at.row, at_col, in[offset], want);
      }
      if (at_col >= job.padded_cols) continue;
    }
    rows[at.row * job.padded_cols + at_col] = in[offset];
  }
  return absl::OkStatus();
}

template <TileKind kTile>
absl::Status UnshuffleRows(const ShuffleJob& job, int64_t out_begin, int64_t out_end,
                           const uint8_t* in, uint8_t* rows) {
  constexpr int64_t kTileBytes = int64_t{TileRows(kTile)} * TileCols(kTile);
  const int64_t out_cols = OutputCols(job);
  for (int64_t row = out_begin; row < out_end; row += TileRows(kTile)) {
    for (int64_t col = 0; col < out_cols; col += TileCols(kTile), in += kTileBytes) {
      SP_RETURN_IF_ERROR(UnshuffleTile<kTile>(job, row, col, in, rows));
    }
    rows += TileRows(kTile) * job.padded_cols;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Unshuffle(const ShuffleJob& job, int64_t out_begin, int64_t out_end, const uint8_t* in,
                       uint8_t* rows) {
  SP_RETURN_IF_ERROR(CheckOutputRange(job, out_begin, out_end));
  switch (TileOf(job.layout)) {
    case TileKind::kRow:
      return UnshuffleRowMajor(job, out_begin, out_end, in, rows);
    case TileKind::k16x16:
      return UnshuffleRows<TileKind::k16x16>(job, out_begin, out_end, in, rows);
    case TileKind::kE8m0:
      return UnshuffleRows<TileKind::kE8m0>(job, out_begin, out_end, in, rows);
    case TileKind::kN32K4:
      return UnshuffleRows<TileKind::kN32K4>(job, out_begin, out_end, in, rows);
  }
  return absl::InvalidArgumentError("layout: value outside the enumeration");
}

std::vector<HostIsa> SupportedHostIsas() {
  std::vector<HostIsa> isas = {HostIsa::kScalar};
#if defined(__x86_64__)
  isas.push_back(HostIsa::kSse2);
  if (__builtin_cpu_supports("avx2")) isas.push_back(HostIsa::kAvx2);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f")) {
    isas.push_back(HostIsa::kAvx512);
  }
#endif
  return isas;
}

HostIsa BestHostIsa() { return SupportedHostIsas().back(); }

std::unique_ptr<Shuffler> MakeHostShuffler(HostIsa isa) {
  const std::vector<HostIsa> supported = SupportedHostIsas();
  SP_CHECK(std::find(supported.begin(), supported.end(), isa) != supported.end());
  return std::make_unique<HostShuffler>(isa);
}

}  // namespace shardprep
