#include "workers/byte_size.h"

#include "gtest/gtest.h"

namespace shardprep {
namespace {

TEST(ByteSize, BinaryUnitsAndPlainBytes) {
  const struct {
    const char* text;
    int64_t bytes;
  } kCases[] = {{"0", 0},
                {"4096", 4096},
                {"1B", 1},
                {"64KiB", 65536},
                {"512MiB", 512 << 20},
                {"2GiB", int64_t{2} << 30},
                {"4194304TiB", int64_t{1} << 62}};
  for (const auto& c : kCases) {
    const auto parsed = ParseByteSize(c.text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, c.bytes) << c.text;
  }
}

TEST(ByteSize, AnythingElseIsRefusedWithItsText) {
  for (const char* text : {"", "MiB", "1.5GiB", "-1", "+1", " 1", "1 MiB", "1MB", "1mib", "1GiBs",
                           "0x10", "4194305TiB", "99999999999999999999"}) {
    const auto parsed = ParseByteSize(text);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(std::string(parsed.status().message()).find(text), std::string::npos);
  }
}

TEST(ByteSize, ForPeople) {
  EXPECT_EQ(FormatByteSize(0), "0 B");
  EXPECT_EQ(FormatByteSize(1023), "1023 B");
  EXPECT_EQ(FormatByteSize(1024), "1.000 KiB");
  EXPECT_EQ(FormatByteSize(103'428'390'912), "96.325 GiB");
  EXPECT_EQ(FormatThousands(103'428'390'912), "103,428,390,912");
  EXPECT_EQ(FormatThousands(999), "999");
  EXPECT_EQ(FormatThousands(-1000), "-1,000");
}

}  // namespace
}  // namespace shardprep
