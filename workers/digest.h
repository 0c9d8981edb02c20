// Digests and checksums of stored bytes.
//
// The digest of a data file is chunked so that its pieces can be hashed while they move, in
// parallel and in any order: SHA-256 of each 16 MiB chunk counted from the start of the file, then
// SHA-256 over those 32-byte results in order, written `sha256-16m:<64 hex digits>`. In Python:
//
//   chunks = iter(lambda: f.read(16 << 20), b"")
//   joined = b"".join(hashlib.sha256(c).digest() for c in chunks)
//   digest = "sha256-16m:" + hashlib.sha256(joined).hexdigest()
//
// An empty file has no chunk, so its digest is SHA-256 of nothing. Small files (manifests) use the
// plain SHA-256.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardprep {

inline constexpr int64_t kDigestChunkBytes = int64_t{16} << 20;

using Sha256Bytes = std::array<uint8_t, 32>;

// SHA-256 of `bytes`, and the same as 64 lower-case hex digits.
Sha256Bytes Sha256(absl::Span<const uint8_t> bytes);
std::string Sha256Hex(absl::Span<const uint8_t> bytes);
std::string Sha256Hex(const std::string& bytes);

struct FileDigest {
  int64_t size_bytes = 0;
  std::vector<Sha256Bytes> chunk_sha256;
  std::string digest;  // "sha256-16m:<hex>"
};

// The file digest over the digests of its chunks, in file order.
std::string DigestOfChunks(absl::Span<const Sha256Bytes> chunk_sha256);

// Digests a file whose bytes arrive in order, in pieces of any size. Not thread safe. Reusable:
// Finish() leaves it as new, and its contexts are kept, so that one object serves many files.
class ChunkedDigest {
 public:
  ChunkedDigest();
  ~ChunkedDigest();
  ChunkedDigest(ChunkedDigest&&) noexcept;
  ChunkedDigest& operator=(ChunkedDigest&&) noexcept;

  void Update(absl::Span<const uint8_t> bytes);
  FileDigest Finish();

  // SHA-256 of bytes [begin, end) of the file as 64 hexadecimal digits when they are a whole chunk
  // that has been seen; empty otherwise.
  std::string ChunkHex(int64_t begin, int64_t end) const;

 private:
  struct Context;
  void FinishChunk();

  std::unique_ptr<Context> context_;
  int64_t size_bytes_ = 0;
  int64_t chunk_filled_bytes_ = 0;
  std::vector<Sha256Bytes> chunk_sha256_;
};

// CRC-32C (Castagnoli, RFC 3720 appendix B.4): the checksum of what `crc` covers followed by
// `bytes`. Start with 0.
uint32_t Crc32c(uint32_t crc, absl::Span<const uint8_t> bytes);

// The checksum of A followed by B from their separate checksums and B's length in bytes (>= 0, any
// int64_t). Costs microseconds whatever the length, so pieces can be checksummed in any order.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, int64_t size_b_bytes);

// Two lower-case hex digits a byte.
std::string HexEncode(absl::Span<const uint8_t> bytes);

// The inverse of HexEncode(). INVALID_ARGUMENT on an odd length or a character other than 0-9, a-f:
// our own writers never use upper case, and one value has one spelling.
absl::StatusOr<std::vector<uint8_t>> HexDecode(const std::string& hex);

}  // namespace shardprep
