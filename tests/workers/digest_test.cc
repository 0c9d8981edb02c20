#include "workers/digest.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using Bytes = std::vector<uint8_t>;

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Bytes whose value depends on their position with a period that divides no chunk or buffer size.
Bytes Pattern(int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  return bytes;
}

TEST(ChunkedDigest, TellsWholeChunksAsTheyEnd) {
  ChunkedDigest digest;
  std::vector<uint8_t> bytes(kDigestChunkBytes + 5);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 131 >> 7);
  const auto all = absl::MakeConstSpan(bytes);
  digest.Update(all.first(kDigestChunkBytes - 1));
  EXPECT_EQ(digest.ChunkHex(0, kDigestChunkBytes), "");
  digest.Update(all.subspan(kDigestChunkBytes - 1));
  EXPECT_EQ(digest.ChunkHex(0, kDigestChunkBytes), Sha256Hex(all.first(kDigestChunkBytes)));
  EXPECT_EQ(digest.ChunkHex(0, kDigestChunkBytes - 1), "");
  EXPECT_EQ(digest.ChunkHex(1, kDigestChunkBytes + 1), "");
  EXPECT_EQ(digest.ChunkHex(kDigestChunkBytes, 2 * kDigestChunkBytes), "");
}

TEST(Sha256, PublishedVectors) {
  // FIPS 180-2, appendix B, and the empty message.
  const struct {
    std::string message;
    std::string hex;
  } kCases[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1'000'000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& c : kCases) EXPECT_EQ(Sha256Hex(c.message), c.hex);
}

TEST(ChunkedDigest, PublishedRecipeGivesTheSameDigest) {
  // Made with the three lines of Python in digest.h over bytes i % 251.
  const struct {
    int64_t size;
    int64_t chunks;
    std::string digest;
  } kCases[] = {
      {0, 0, "sha256-16m:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {1, 1, "sha256-16m:1406e05881e299367766d313e26c05564ec91bf721d31726bd6e46e60689539a"},
      {16777215, 1, "sha256-16m:de54825a1831f40325bdffb3421ed0bd7a6e1b599d89a9cb6ffc91e2bb295777"},
      {16777216, 1, "sha256-16m:2d07b4c3a82a4dfdd1e793129c2f0b5b91c9537e9cf7cb6d19d799050affbb90"},
      {16777217, 2, "sha256-16m:3a3ef10ac1fce663b2092d786412333be3afed87ee5185b296c1bba28433d96c"},
      {33566777, 3, "sha256-16m:1e1f1779dd12471ddbc5134a7fdd784c617bb4604133a68d062db2088041f7b8"},
  };
  for (const auto& c : kCases) {
    const Bytes bytes = Pattern(c.size);
    ChunkedDigest digest;
    digest.Update(bytes);
    const FileDigest result = digest.Finish();
    EXPECT_EQ(result.size_bytes, c.size);
    EXPECT_EQ(static_cast<int64_t>(result.chunk_sha256.size()), c.chunks);
    EXPECT_EQ(result.digest, c.digest) << c.size;
  }
}

TEST(ChunkedDigest, DoesNotDependOnHowTheBytesArrive) {
  const Bytes bytes = Pattern(2 * kDigestChunkBytes + 12345);
  const absl::Span<const uint8_t> all(bytes);
  ChunkedDigest whole;
  whole.Update(all);
  const FileDigest want = whole.Finish();

  std::mt19937 random(1);
  ChunkedDigest pieces;
  for (const size_t largest : {size_t{300'000}, size_t{9'000'000}, size_t{40'000'000}}) {
    for (size_t at = 0; at < all.size();) {
      const size_t size = std::min(all.size() - at, random() % largest);
      pieces.Update(all.subspan(at, size));
      at += size;
    }
    const FileDigest got = pieces.Finish();
    EXPECT_EQ(got.size_bytes, want.size_bytes);
    EXPECT_EQ(got.chunk_sha256, want.chunk_sha256);
    EXPECT_EQ(got.digest, want.digest);
  }
}

TEST(ChunkedDigest, ChunksCanBeDigestedApartAndInAnyOrder) {
  const Bytes bytes = Pattern(2 * kDigestChunkBytes + 1);
  ChunkedDigest whole;
  whole.Update(bytes);

  std::vector<Sha256Bytes> chunks(3);
  for (const size_t i : {2, 0, 1}) {
    const size_t start = i * static_cast<size_t>(kDigestChunkBytes);
    chunks[i] = Sha256(
        absl::Span<const uint8_t>(bytes).subspan(start, static_cast<size_t>(kDigestChunkBytes)));
  }
  EXPECT_EQ(DigestOfChunks(chunks), whole.Finish().digest);
}

TEST(ChunkedDigest, IsAsNewAfterFinish) {
  ChunkedDigest digest;
  digest.Update(Pattern(100));
  const FileDigest first = digest.Finish();
  EXPECT_EQ(digest.Finish().digest, ChunkedDigest().Finish().digest);
  digest.Update(Pattern(100));
  EXPECT_EQ(digest.Finish().digest, first.digest);
}

TEST(ChunkedDigest, AMovedDigestGoesOnWhereItWas) {
  const Bytes bytes = Pattern(1000);
  ChunkedDigest first;
  first.Update(absl::Span<const uint8_t>(bytes).first(400));
  ChunkedDigest second = std::move(first);
  second.Update(absl::Span<const uint8_t>(bytes).subspan(400));
  ChunkedDigest whole;
  whole.Update(bytes);
  EXPECT_EQ(second.Finish().digest, whole.Finish().digest);
}

TEST(Crc32c, PublishedVectors) {
  Bytes ascending(32);
  std::iota(ascending.begin(), ascending.end(), uint8_t{0});
  const Bytes descending(ascending.rbegin(), ascending.rend());
  // RFC 3720, B.4: a SCSI Read (10) command PDU.
  const Bytes read_command = {0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                              0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00,
                              0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00,
                              0x00, 0x18, 0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                              0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
  EXPECT_EQ(Crc32c(0, AsBytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c(0, Bytes(32, 0x00)), 0x8a9136aau);
  EXPECT_EQ(Crc32c(0, Bytes(32, 0xff)), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(0, ascending), 0x46dd794eu);
  EXPECT_EQ(Crc32c(0, descending), 0x113fdb5cu);
  EXPECT_EQ(Crc32c(0, read_command), 0xd9963a56u);
  EXPECT_EQ(Crc32c(0, Bytes()), 0u);
}

TEST(Crc32c, ContinuesAndCombinesAtAnySplit) {
  const Bytes bytes = Pattern(100'003);
  const absl::Span<const uint8_t> all(bytes);
  const uint32_t want = Crc32c(0, all);
  std::mt19937 random(2);
  std::vector<size_t> splits = {0, 1, 2, 7, 8, 63, 64, 65, all.size() - 1, all.size()};
  for (int i = 0; i < 200; ++i) splits.push_back(random() % all.size());
  for (const size_t split : splits) {
    const auto a = all.first(split);
    const auto b = all.subspan(split);
    EXPECT_EQ(Crc32c(Crc32c(0, a), b), want) << split;
    EXPECT_EQ(Crc32cCombine(Crc32c(0, a), Crc32c(0, b), static_cast<int64_t>(b.size())), want)
        << split;
  }
}

TEST(Crc32c, CombinesPiecesOfManySizes) {
  const Bytes bytes = Pattern(50'000);
  const absl::Span<const uint8_t> all(bytes);
  std::mt19937 random(3);
  uint32_t combined = 0;
  for (size_t at = 0; at < all.size();) {
    const auto piece = all.subspan(at, random() % 700);
    combined = Crc32cCombine(combined, Crc32c(0, piece), static_cast<int64_t>(piece.size()));
    at += piece.size();
  }
  EXPECT_EQ(combined, Crc32c(0, all));
}

TEST(Crc32c, CombinesLengthsThatNoTestCanHash) {
  // Doubling a run of zeros agrees with hashing it while that is possible, and the grouping of
  // three pieces does not matter at any length.
  uint32_t doubled = Crc32c(0, Bytes(1, 0x00));
  for (int64_t size = 1; size < (int64_t{1} << 24); size *= 2) {
    doubled = Crc32cCombine(doubled, doubled, size);
  }
  EXPECT_EQ(doubled, Crc32c(0, Bytes(size_t{1} << 24, 0x00)));

  std::mt19937_64 random(4);
  for (int i = 0; i < 100; ++i) {
    const auto a = static_cast<uint32_t>(random());
    const auto b = static_cast<uint32_t>(random());
    const auto c = static_cast<uint32_t>(random());
    const auto size_b = static_cast<int64_t>(random() >> 23);  // below 2^41
    const auto size_c = static_cast<int64_t>(random() >> 23);
    EXPECT_EQ(Crc32cCombine(Crc32cCombine(a, b, size_b), c, size_c),
              Crc32cCombine(a, Crc32cCombine(b, c, size_c), size_b + size_c));
  }
}

TEST(Hex, RoundTripsEveryByte) {
  Bytes bytes(256);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  const auto decoded = HexDecode(HexEncode(bytes));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, bytes);
  EXPECT_EQ(HexEncode({0x00, 0x0f, 0xa0, 0xff}), "000fa0ff");
}

TEST(Hex, HasOneSpelling) {
  for (const std::string bad : {"0", "000", "0g", "AB", "0x", " 0", "-1"}) {
    EXPECT_EQ(HexDecode(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace shardprep
