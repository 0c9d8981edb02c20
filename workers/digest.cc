#include "workers/digest.h"

#include <isa-l/crc.h>
#include <openssl/evp.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
using ContextPtr = std::unique_ptr<EVP_MD_CTX, FreeContext>;

// Fetched once: looking an algorithm up by name takes a lock in OpenSSL's provider store. Never
// freed, so that it outlives every static user.
const EVP_MD* Sha256Algorithm() {
  static const EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  SP_CHECK(algorithm != nullptr);
  return algorithm;
}

ContextPtr NewContext() {
  ContextPtr context(EVP_MD_CTX_new());
  SP_CHECK(context != nullptr);
  return context;
}

void Restart(EVP_MD_CTX* context) {
  SP_CHECK(EVP_DigestInit_ex2(context, Sha256Algorithm(), nullptr) == 1);
}

void Add(EVP_MD_CTX* context, absl::Span<const uint8_t> bytes) {
  SP_CHECK(EVP_DigestUpdate(context, bytes.data(), bytes.size()) == 1);
}

Sha256Bytes TakeResult(EVP_MD_CTX* context) {
  Sha256Bytes result;
  unsigned int size = 0;
  SP_CHECK(EVP_DigestFinal_ex(context, result.data(), &size) == 1 && size == result.size());
  return result;
}

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// CRCs are polynomials over GF(2), reduced modulo P, with the coefficient of x^0 in the most
// significant bit (the reflected form that CRC-32C is defined in).
constexpr uint32_t kCrcPolynomial = 0x82f63b78;
constexpr uint32_t kCrcOne = 0x80000000;

constexpr uint32_t TimesX(uint32_t a) { return (a & 1) != 0 ? (a >> 1) ^ kCrcPolynomial : a >> 1; }

constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t coefficient = kCrcOne; coefficient != 0; coefficient >>= 1) {
    if ((a & coefficient) != 0) product ^= b;
    b = TimesX(b);
  }
  return product;
}

// [k] is x^(8 * 2^k) mod P: what appending 2^k zero bytes multiplies a CRC by.
constexpr std::array<uint32_t, 63> MakeShiftTable() {
  std::array<uint32_t, 63> table{};
  uint32_t power = kCrcOne;
  for (int bit = 0; bit < 8; ++bit) power = TimesX(power);
  for (uint32_t& entry : table) {
    entry = power;
    power = Multiply(power, power);
  }
  return table;
}
constexpr std::array<uint32_t, 63> kShiftByBytes = MakeShiftTable();

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

Sha256Bytes Sha256(absl::Span<const uint8_t> bytes) {
  const ContextPtr context = NewContext();
  Restart(context.get());
  Add(context.get(), bytes);
  return TakeResult(context.get());
}

std::string Sha256Hex(absl::Span<const uint8_t> bytes) { return HexEncode(Sha256(bytes)); }

std::string Sha256Hex(const std::string& bytes) { return Sha256Hex(AsBytes(bytes)); }

std::string DigestOfChunks(absl::Span<const Sha256Bytes> chunk_sha256) {
  const ContextPtr context = NewContext();
  Restart(context.get());
  for (const Sha256Bytes& chunk : chunk_sha256) Add(context.get(), chunk);
  return absl::StrCat("sha256-16m:", HexEncode(TakeResult(context.get())));
}

struct ChunkedDigest::Context {
  ContextPtr chunk = NewContext();
};

ChunkedDigest::ChunkedDigest() : context_(std::make_unique<Context>()) {
  Restart(context_->chunk.get());
}

ChunkedDigest::~ChunkedDigest() = default;
ChunkedDigest::ChunkedDigest(ChunkedDigest&&) noexcept = default;
ChunkedDigest& ChunkedDigest::operator=(ChunkedDigest&&) noexcept = default;

void ChunkedDigest::Update(absl::Span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto room = static_cast<size_t>(kDigestChunkBytes - chunk_filled_bytes_);
    const absl::Span<const uint8_t> piece = bytes.first(std::min(bytes.size(), room));
    Add(context_->chunk.get(), piece);
    bytes.remove_prefix(piece.size());
    size_bytes_ += static_cast<int64_t>(piece.size());
    chunk_filled_bytes_ += static_cast<int64_t>(piece.size());
    if (chunk_filled_bytes_ == kDigestChunkBytes) FinishChunk();
  }
}

void ChunkedDigest::FinishChunk() {
  chunk_sha256_.push_back(TakeResult(context_->chunk.get()));
  Restart(context_->chunk.get());
  chunk_filled_bytes_ = 0;
}

std::string ChunkedDigest::ChunkHex(int64_t begin, int64_t end) const {
  if (begin % kDigestChunkBytes != 0 || end - begin != kDigestChunkBytes) return "";
  const auto chunk = static_cast<size_t>(begin / kDigestChunkBytes);
  return chunk < chunk_sha256_.size() ? HexEncode(chunk_sha256_[chunk]) : "";
}

FileDigest ChunkedDigest::Finish() {
  if (chunk_filled_bytes_ > 0) FinishChunk();
  FileDigest result;
  result.size_bytes = std::exchange(size_bytes_, 0);
  result.chunk_sha256 = std::exchange(chunk_sha256_, {});
  result.digest = DigestOfChunks(result.chunk_sha256);
  return result;
}

uint32_t Crc32c(uint32_t crc, absl::Span<const uint8_t> bytes) {
  // ISA-L works on the bare remainder: the inversions before and after that the standard asks for
  // are ours to make. Its length is an int.
  constexpr size_t kPieceBytes = size_t{1} << 30;
  uint32_t remainder = ~crc;
  while (!bytes.empty()) {
    const absl::Span<const uint8_t> piece = bytes.first(std::min(bytes.size(), kPieceBytes));
    // The parameter lacks a const; the function only reads.
    remainder =
        crc32_iscsi(const_cast<uint8_t*>(piece.data()), static_cast<int>(piece.size()), remainder);
    bytes.remove_prefix(piece.size());
  }
  return ~remainder;
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, int64_t size_b_bytes) {
  // Appending B multiplies A's polynomial by x^(8 * size of B) and adds B's; the inversions of the
  // two checksums cancel in the sum.
  SP_CHECK(size_b_bytes >= 0);
  const auto size = static_cast<uint64_t>(size_b_bytes);
  uint32_t shifted = crc_a;
  for (size_t bit = 0; bit < kShiftByBytes.size(); ++bit) {
    if ((size >> bit & 1) != 0) shifted = Multiply(kShiftByBytes[bit], shifted);
  }
  return shifted ^ crc_b;
}

std::string HexEncode(absl::Span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

absl::StatusOr<std::vector<uint8_t>> HexDecode(const std::string& hex) {
  if (hex.size() % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("hex string: ", hex.size(), " digits, want an even number"));
  }
  std::vector<uint8_t> bytes;
  bytes.reserve(hex.size() / 2);
  for (size_t i = 0; i < hex.size(); i += 2) {
    const int high = HexValue(hex[i]);
    const int low = HexValue(hex[i + 1]);
    if (high < 0 || low < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("hex string: not a digit 0-9, a-f near position ", i));
    }
    bytes.push_back(static_cast<uint8_t>(high << 4 | low));
  }
  return bytes;
}

}  // namespace shardprep
