#include "workers/dtype.h"

#include <cstdint>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

// The format's own table, written out: a name or width that drifts shows here.
TEST(Dtype, NamesAndBitsAreThoseOfTheFormat) {
  const struct {
    Dtype dtype;
    const char* name;
    int64_t bits;
  } kCases[] = {
      {Dtype::kBool, "BOOL", 8},
      {Dtype::kF4, "F4", 4},
      {Dtype::kF6E2M3, "F6_E2M3", 6},
      {Dtype::kF6E3M2, "F6_E3M2", 6},
      {Dtype::kU8, "U8", 8},
      {Dtype::kI8, "I8", 8},
      {Dtype::kF8E5M2, "F8_E5M2", 8},
      {Dtype::kF8E4M3, "F8_E4M3", 8},
      {Dtype::kF8E8M0, "F8_E8M0", 8},
      {Dtype::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8},
      {Dtype::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8},
      {Dtype::kI16, "I16", 16},
      {Dtype::kU16, "U16", 16},
      {Dtype::kF16, "F16", 16},
      {Dtype::kBF16, "BF16", 16},
      {Dtype::kI32, "I32", 32},
      {Dtype::kU32, "U32", 32},
      {Dtype::kF32, "F32", 32},
      {Dtype::kC64, "C64", 64},
      {Dtype::kF64, "F64", 64},
      {Dtype::kI64, "I64", 64},
      {Dtype::kU64, "U64", 64},
  };
  std::set<std::string> names;
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(std::string(DtypeName(c.dtype)), c.name);
    EXPECT_EQ(DtypeBits(c.dtype), c.bits);
    const auto parsed = ParseDtype(c.name);
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, c.dtype);
    names.insert(c.name);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kDtypeCount));
}

TEST(Dtype, UnknownNamesAreQuoted) {
  for (const char* name : {"XYZ", "", "f8_e4m3", "F8_E4M3 ", "F6", "BF16\n"}) {
    const auto parsed = ParseDtype(name);
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_THAT(std::string(ParseDtype("XYZ").status().message()), HasSubstr("'XYZ'"));
  EXPECT_THAT(std::string(ParseDtype("BF16\n").status().message()), HasSubstr("'BF16\\n'"));
}

}  // namespace
}  // namespace shardprep
