#include "kernels/tile_kernels.h"

#include <cstring>

#include "kernels/status_macros.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardprep {
namespace {

// What every other loop must equal: the tile map of layout_index.h, byte by byte.
template <TileKind kTile>
void ScalarTiles(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  constexpr uint32_t kTileBytes = TileRows(kTile) * TileCols(kTile);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (uint32_t offset = 0; offset < kTileBytes; ++offset) {
      const TileAt at = TileSource(kTile, offset);
      *out++ = rows[at.row][tile * TileCols(kTile) + at.col];
    }
  }
}

void ScalarE8m0Edge(const uint8_t* const* rows, int64_t native_cols, uint64_t pattern,
                    uint8_t* out) {
  const int64_t full_tiles = native_cols / 8;
  ScalarTiles<TileKind::kE8m0>(rows, full_tiles, out);
  uint64_t words[32];
  const uint8_t* word_rows[32];
  for (int row = 0; row < 32; ++row) {
    words[row] = pattern;
    std::memcpy(&words[row], rows[row] + full_tiles * 8, static_cast<size_t>(native_cols % 8));
    word_rows[row] = reinterpret_cast<const uint8_t*>(&words[row]);
  }
  ScalarTiles<TileKind::kE8m0>(word_rows, 1, out + full_tiles * 256);
}

void ScalarCopy(const uint8_t* from, int64_t size_bytes, uint8_t* to) {
  std::memcpy(to, from, static_cast<size_t>(size_bytes));
}

constexpr TileKernels kScalar = {ScalarTiles<TileKind::k16x16>,
                                 ScalarTiles<TileKind::k16x16>,
                                 ScalarCopy,
                                 [] {},
                                 ScalarTiles<TileKind::kE8m0>,
                                 nullptr,
                                 ScalarE8m0Edge,
                                 ScalarTiles<TileKind::kN32K4>};

#if defined(__x86_64__)

inline __m128i Load16(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline __m128i Load8(const uint8_t* from) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
}
void StoreFence() { _mm_sfence(); }
inline void Store16(uint8_t* to, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

template <bool kStreaming>
inline void StoreTile16(uint8_t* to, __m128i value) {
  if constexpr (kStreaming) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
  } else {
    Store16(to, value);
  }
}

// Four neighbouring rows of one tile are 64 contiguous bytes of output, a line. All tiles of four
// rows come before those of the next four: so few row pointers stay in registers, which matters
// where rows are narrow.
template <bool kStreaming>
void Sse2Tiles16x16(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  for (int64_t row = 0; row < 16; row += 4, out += 64) {
    const uint8_t *const a = rows[row], *const b = rows[row + 1];
    const uint8_t *const c = rows[row + 2], *const d = rows[row + 3];
    uint8_t* to = out;
    for (int64_t col = 0; col < tiles * 16; col += 16, to += 256) {
      StoreTile16<kStreaming>(to, Load16(a + col));
      StoreTile16<kStreaming>(to + 16, Load16(b + col));
      StoreTile16<kStreaming>(to + 32, Load16(c + col));
      StoreTile16<kStreaming>(to + 48, Load16(d + col));
    }
  }
}

// 4 x 4 dwords: in[k] holds row k, out[k] column k.
inline void TransposeDwords(const __m128i in[4], __m128i out[4]) {
  const __m128i low01 = _mm_unpacklo_epi32(in[0], in[1]);
  const __m128i low23 = _mm_unpacklo_epi32(in[2], in[3]);
  const __m128i high01 = _mm_unpackhi_epi32(in[0], in[1]);
  const __m128i high23 = _mm_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm_unpacklo_epi64(low01, low23);
  out[1] = _mm_unpackhi_epi64(low01, low23);
  out[2] = _mm_unpacklo_epi64(high01, high23);
  out[3] = _mm_unpackhi_epi64(high01, high23);
}

// Row r and row r + 16, columns 0..7, as bytes r0 R0 r1 R1 ... r7 R7, become the four dwords
// (rc Rc rc+4 Rc+4), c = 0..3.
inline __m128i E8m0Dwords(__m128i byte_pairs) {
  return _mm_unpacklo_epi16(byte_pairs, _mm_srli_si128(byte_pairs, 8));
}

// load(row pointer) gives the tile's 8 bytes of a row.
template <typename Load>
inline void Sse2E8m0Tile(const uint8_t* const* rows, Load load, uint8_t* out) {
  for (int64_t row = 0; row < 16; row += 4) {
    __m128i by_row[4];
    for (int k = 0; k < 4; ++k) {
      by_row[k] = E8m0Dwords(_mm_unpacklo_epi8(load(rows[row + k]), load(rows[row + k + 16])));
    }
    __m128i by_col[4];
    TransposeDwords(by_row, by_col);
    for (int64_t c = 0; c < 4; ++c) Store16(out + c * 64 + row * 4, by_col[c]);
  }
}

void Sse2E8m0(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  for (int64_t col = 0; col < tiles * 8; col += 8, out += 256) {
    Sse2E8m0Tile(rows, [col](const uint8_t* row) { return Load8(row + col); }, out);
  }
}

// The last tile of rows that end inside it: the row's last 8 bytes, moved down to the tile's first
// columns, and the pattern in the others.
struct EdgeLoad {
  int64_t last8;
  __m128i shift_bits;
  __m128i pattern;

  EdgeLoad(int64_t native_cols, uint64_t pattern_bytes)
      : last8(native_cols - 8),
        shift_bits(_mm_cvtsi32_si128(static_cast<int>(8 * (8 - native_cols % 8)))),
        pattern(_mm_cvtsi64_si128(static_cast<int64_t>(pattern_bytes))) {}

  __m128i operator()(const uint8_t* row) const {
    return _mm_or_si128(_mm_srl_epi64(Load8(row + last8), shift_bits), pattern);
  }
};

void Sse2E8m0Edge(const uint8_t* const* rows, int64_t native_cols, uint64_t pattern, uint8_t* out) {
  const int64_t full_tiles = native_cols / 8;
  Sse2E8m0(rows, full_tiles, out);
  Sse2E8m0Tile(rows, EdgeLoad(native_cols, pattern), out + full_tiles * 256);
}

inline __m128i Load4(const uint8_t* from) {
  int32_t word = 0;
  std::memcpy(&word, from, 4);
  return _mm_cvtsi32_si128(word);
}

// Four tiles at a time, then two, then one: narrow scales have three.
void Sse2N32K4(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  int64_t tile = 0;
  for (; tile + 4 <= tiles; tile += 4, out += 512) {
    for (int64_t row = 0; row < 32; row += 4) {
      __m128i by_row[4];
      for (int k = 0; k < 4; ++k) by_row[k] = Load16(rows[row + k] + tile * 4);
      __m128i by_tile[4];
      TransposeDwords(by_row, by_tile);
      for (int64_t k = 0; k < 4; ++k) Store16(out + k * 128 + row * 4, by_tile[k]);
    }
  }
  if (tile + 2 <= tiles) {
    for (int64_t row = 0; row < 32; row += 4) {
      const uint8_t* const* at = rows + row;
      const __m128i low = _mm_unpacklo_epi32(Load8(at[0] + tile * 4), Load8(at[1] + tile * 4));
      const __m128i high = _mm_unpacklo_epi32(Load8(at[2] + tile * 4), Load8(at[3] + tile * 4));
      Store16(out + row * 4, _mm_unpacklo_epi64(low, high));
      Store16(out + 128 + row * 4, _mm_unpackhi_epi64(low, high));
    }
    tile += 2;
    out += 256;
  }
  if (tile == tiles) return;
  for (int64_t row = 0; row < 32; row += 4) {
    const uint8_t* const* at = rows + row;
    const __m128i low = _mm_unpacklo_epi32(Load4(at[0] + tile * 4), Load4(at[1] + tile * 4));
    const __m128i high = _mm_unpacklo_epi32(Load4(at[2] + tile * 4), Load4(at[3] + tile * 4));
    Store16(out + row * 4, _mm_unpacklo_epi64(low, high));
  }
}

void Sse2CopyStreaming(const uint8_t* from, int64_t size_bytes, uint8_t* to) {
  for (int64_t at = 0; at < size_bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), Load16(from + at));
  }
}

constexpr TileKernels kSse2 = {Sse2Tiles16x16<false>,
                               Sse2Tiles16x16<true>,
                               Sse2CopyStreaming,
                               StoreFence,
                               Sse2E8m0,
                               nullptr,
                               Sse2E8m0Edge,
                               Sse2N32K4};

// Function attributes instead of compiler flags keep the rest of the program runnable on any
// x86-64.
#define SP_TARGET_AVX2 __attribute__((target("avx2")))
#define SP_TARGET_AVX512 __attribute__((target("avx512f")))

SP_TARGET_AVX2 inline __m256i Lanes(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

template <bool kStreaming>
SP_TARGET_AVX2 inline void Store32(uint8_t* to, __m256i value) {
  if constexpr (kStreaming) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
}

// In the order of Sse2Tiles16x16().
template <bool kStreaming>
SP_TARGET_AVX2 void Avx2Tiles16x16(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  for (int64_t row = 0; row < 16; row += 4, out += 64) {
    const uint8_t *const a = rows[row], *const b = rows[row + 1];
    const uint8_t *const c = rows[row + 2], *const d = rows[row + 3];
    uint8_t* to = out;
    for (int64_t col = 0; col < tiles * 16; col += 16, to += 256) {
      Store32<kStreaming>(to, Lanes(Load16(a + col), Load16(b + col)));
      Store32<kStreaming>(to + 32, Lanes(Load16(c + col), Load16(d + col)));
    }
  }
}

// In each lane: columns 0..7 of row r, then those of row r + 16, become the four dwords
// (rc Rc rc+4 Rc+4), c = 0..3.
SP_TARGET_AVX2 inline __m256i E8m0DwordPairs(__m256i rows) {
  const __m256i order = _mm256_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15,  //
                                         0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  return _mm256_shuffle_epi8(rows, order);
}

// Transposes the 4 x 4 dwords of each 128-bit lane.
SP_TARGET_AVX2 inline void TransposeDwords(const __m256i by_row[4], __m256i by_col[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(by_row[0], by_row[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(by_row[2], by_row[3]);
  const __m256i high01 = _mm256_unpackhi_epi32(by_row[0], by_row[1]);
  const __m256i high23 = _mm256_unpackhi_epi32(by_row[2], by_row[3]);
  by_col[0] = _mm256_unpacklo_epi64(low01, low23);
  by_col[1] = _mm256_unpackhi_epi64(low01, low23);
  by_col[2] = _mm256_unpacklo_epi64(high01, high23);
  by_col[3] = _mm256_unpackhi_epi64(high01, high23);
}

// Stores column c at out + c * 64.
SP_TARGET_AVX2 inline void StoreE8m0Columns(const __m256i by_row[4], uint8_t* out) {
  __m256i by_col[4];
  TransposeDwords(by_row, by_col);
  for (int64_t c = 0; c < 4; ++c) Store32<false>(out + c * 64, by_col[c]);
}

// Two tiles; load(row pointer) gives their 16 bytes of a row. Lanes hold rows r and r + 4, so that
// a store is 8 rows of one column.
template <typename Load>
SP_TARGET_AVX2 inline void Avx2E8m0Pair(const uint8_t* const* rows, Load load, uint8_t* out) {
  for (int64_t row = 0; row < 16; row += 8) {
    __m256i first[4];
    __m256i second[4];
    for (int k = 0; k < 4; ++k) {
      const uint8_t* const* at = rows + row + k;
      const __m256i low = Lanes(load(at[0]), load(at[4]));
      const __m256i high = Lanes(load(at[16]), load(at[20]));
      first[k] = E8m0DwordPairs(_mm256_unpacklo_epi64(low, high));
      second[k] = E8m0DwordPairs(_mm256_unpackhi_epi64(low, high));
    }
    StoreE8m0Columns(first, out + row * 4);
    StoreE8m0Columns(second, out + 256 + row * 4);
  }
}

SP_TARGET_AVX2 void Avx2E8m0(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  int64_t tile = 0;
  for (; tile + 2 <= tiles; tile += 2, out += 512) {
    Avx2E8m0Pair(rows, [tile](const uint8_t* row) { return Load16(row + tile * 8); }, out);
  }
  if (tile == tiles) return;
  Sse2E8m0Tile(rows, [tile](const uint8_t* row) { return Load8(row + tile * 8); }, out);
}

// The columns of 8 rows, and of the 8 that are 16 behind, of the first or the second of two tiles.
template <bool kSecond>
SP_TARGET_AVX2 inline void Avx2E8m0Columns(const uint8_t* const* rows, int64_t col,
                                           __m256i by_col[4]) {
  __m256i by_row[4];
  for (int k = 0; k < 4; ++k) {
    const __m256i low = Lanes(Load16(rows[k] + col), Load16(rows[k + 4] + col));
    const __m256i high = Lanes(Load16(rows[k + 16] + col), Load16(rows[k + 20] + col));
    by_row[k] = E8m0DwordPairs(kSecond ? _mm256_unpackhi_epi64(low, high)
                                       : _mm256_unpacklo_epi64(low, high));
  }
  TransposeDwords(by_row, by_col);
}

// Past the cache only whole lines at a time are fast, and a line is a column of all rows.
template <bool kSecond>
SP_TARGET_AVX2 inline void Avx2E8m0TileStreaming(const uint8_t* const* rows, int64_t col,
                                                 uint8_t* out) {
  __m256i upper[4], lower[4];
  Avx2E8m0Columns<kSecond>(rows, col, upper);
  Avx2E8m0Columns<kSecond>(rows + 8, col, lower);
  for (int64_t c = 0; c < 4; ++c) {
    Store32<true>(out + c * 64, upper[c]);
    Store32<true>(out + c * 64 + 32, lower[c]);
  }
}

SP_TARGET_AVX2 void Avx2E8m0Streaming(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  for (int64_t col = 0; col < tiles * 8; col += 16, out += 512) {
    Avx2E8m0TileStreaming<false>(rows, col, out);
    Avx2E8m0TileStreaming<true>(rows, col, out + 256);
  }
}

SP_TARGET_AVX2 void Avx2E8m0Edge(const uint8_t* const* rows, int64_t native_cols, uint64_t pattern,
                                 uint8_t* out) {
  const EdgeLoad edge(native_cols, pattern);
  const int64_t full_tiles = native_cols / 8;
  const int64_t paired = full_tiles / 2 * 2;
  Avx2E8m0(rows, paired, out);
  out += paired * 256;
  if (paired == full_tiles) return Sse2E8m0Tile(rows, edge, out);
  Avx2E8m0Pair(
      rows,
      [paired, edge](const uint8_t* row) {
        return _mm_unpacklo_epi64(Load8(row + paired * 8), edge(row));
      },
      out);
}

SP_TARGET_AVX2 void Avx2CopyStreaming(const uint8_t* from, int64_t size_bytes, uint8_t* to) {
  for (int64_t at = 0; at < size_bytes; at += 32) {
    Store32<true>(to + at, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
  }
}

constexpr TileKernels kAvx2 = {
    Avx2Tiles16x16<false>, Avx2Tiles16x16<true>, Avx2CopyStreaming, StoreFence, Avx2E8m0,
    Avx2E8m0Streaming,     Avx2E8m0Edge,         Sse2N32K4};

// In the order of Sse2Tiles16x16().
template <bool kStreaming>
SP_TARGET_AVX512 void Avx512Tiles16x16(const uint8_t* const* rows, int64_t tiles, uint8_t* out) {
  for (int64_t row = 0; row < 16; row += 4, out += 64) {
    const uint8_t *const a = rows[row], *const b = rows[row + 1];
    const uint8_t *const c = rows[row + 2], *const d = rows[row + 3];
    uint8_t* to = out;
    for (int64_t col = 0; col < tiles * 16; col += 16, to += 256) {
      __m512i value = _mm512_castsi128_si512(Load16(a + col));
      value = _mm512_inserti32x4(value, Load16(b + col), 1);
      value = _mm512_inserti32x4(value, Load16(c + col), 2);
      value = _mm512_inserti32x4(value, Load16(d + col), 3);
      if constexpr (kStreaming) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
      } else {
        _mm512_storeu_si512(to, value);
      }
    }
  }
}

constexpr TileKernels kAvx512 = {
    Avx512Tiles16x16<false>, Avx512Tiles16x16<true>, Avx2CopyStreaming, StoreFence, Avx2E8m0,
    Avx2E8m0Streaming,       Avx2E8m0Edge,           Sse2N32K4};

#endif  // defined(__x86_64__)

}  // namespace

const TileKernels& GetTileKernels(HostIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case HostIsa::kScalar:
      return kScalar;
    case HostIsa::kSse2:
      return kSse2;
    case HostIsa::kAvx2:
      return kAvx2;
    case HostIsa::kAvx512:
      return kAvx512;
  }
#endif
  SP_CHECK(isa == HostIsa::kScalar);
  return kScalar;
}

}  // namespace shardprep
