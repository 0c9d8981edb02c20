#include "kernels/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/extents.h"
#include "kernels/profile.h"
#include "tests/kernels/aiter_cases.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

std::string Name(LayoutId layout) { return GetLayoutInfo(layout).name; }

std::vector<uint8_t> Apply(LayoutId layout, const MatrixShape& shape,
                           const std::vector<uint8_t>& in, uint8_t poison = 0xAA) {
  std::vector<uint8_t> out(static_cast<size_t>(OutputBytes(layout, shape).value()), poison);
  const absl::Status status = ApplyLayout(layout, shape, in, absl::MakeSpan(out));
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// Shapes that every layout of the list accepts, odd ones included where it pads itself.
std::vector<MatrixShape> ShapesOf(LayoutId layout) {
  switch (layout) {
    case LayoutId::kRowMajor:
      return {{1, 1, 1}, {2, 3, 5}};
    case LayoutId::kAiter16x16:
      return {{1, 16, 32}, {2, 48, 96}, {3, 32, 64}, {1, 16, 192}};
    case LayoutId::kAiter16x16GateUp:
      return {{1, 32, 64}, {2, 64, 128}, {3, 96, 192}};
    case LayoutId::kAiterE8m0:
      return {{1, 1, 1}, {1, 100, 5}, {2, 33, 12}, {3, 32, 8}, {1, 300, 24}, {1, 256, 7}};
    case LayoutId::kAiterE8m0Expert:
      return {{1, 32, 1}, {2, 64, 12}, {3, 96, 16}};
    case LayoutId::kAiterE8m0GateUp:
      return {{1, 32, 1}, {2, 64, 12}, {3, 96, 24}};
    case LayoutId::kAiterN32K4:
      return {{1, 32, 4}, {2, 64, 12}, {3, 96, 8}};
  }
  return {};
}

TEST(Extents, RoundUpIsTheLeastMultipleNotBelow) {
  static_assert(RoundUp(NativeExtent(384), Alignment(128)) == PaddedExtent(384));
  static_assert(RoundUp(NativeExtent(384), Alignment(256)) == PaddedExtent(512));
  static_assert(RoundUp(NativeExtent(0), Alignment(256)) == PaddedExtent(0));
  for (int64_t alignment : {1, 32, 64, 128, 256}) {
    for (int64_t native = 0; native < 600; ++native) {
      const int64_t padded = RoundUp(NativeExtent(native), Alignment(alignment)).elements();
      EXPECT_EQ(padded % alignment, 0);
      EXPECT_GE(padded, native);
      EXPECT_LT(padded, native + alignment);
    }
  }
}

TEST(ExtentsDeathTest, BrokenExtentsAbort) {
  EXPECT_DEATH(Alignment(0), "broken invariant");
  EXPECT_DEATH(NativeExtent(-1), "broken invariant");
  EXPECT_DEATH(RoundUpTo(kHuge, 256), "broken invariant");
}

TEST(LayoutId, NamesParseBack) {
  std::set<std::string> names;
  for (const LayoutInfo& info : AllLayouts()) {
    EXPECT_EQ(GetLayoutInfo(info.id).name, info.name);
    EXPECT_EQ(ParseLayoutId(info.name).value(), info.id);
    names.insert(info.name);
  }
  EXPECT_THAT(names, testing::ElementsAre("aiter-16x16", "aiter-16x16-gate-up", "aiter-e8m0",
                                          "aiter-e8m0-expert", "aiter-e8m0-gate-up", "aiter-n32k4",
                                          "row-major"));
}

TEST(LayoutId, UnknownNameListsTheKnownOnes) {
  const absl::Status status = ParseLayoutId("aiter-16x17").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'aiter-16x17'"));
  for (const LayoutInfo& info : AllLayouts()) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(info.name));
  }
}

TEST(LayoutInfo, FillsAreNeverNaN) {
  for (const LayoutInfo& info : AllLayouts()) EXPECT_NE(info.fill, 0xFF) << info.name;
  EXPECT_EQ(GetLayoutInfo(LayoutId::kAiterE8m0).fill, 0x00);
  EXPECT_EQ(GetLayoutInfo(LayoutId::kAiterE8m0Expert).fill, 0x7F);
  EXPECT_EQ(GetLayoutInfo(LayoutId::kAiterE8m0GateUp).fill, 0x7F);
}

TEST(Profile, WeightsAndScalesSwitchTogether) {
  struct Want {
    const char* name;
    const char* gate_mode;
    RowOrder w13_order;
    LayoutId w13, w13_scale, w2, w2_scale;
  };
  const Want wants[] = {
      {"aiter-separated", "SEPARATED", RowOrder::kAsIs, LayoutId::kAiter16x16, LayoutId::kAiterE8m0,
       LayoutId::kAiter16x16, LayoutId::kAiterE8m0},
      {"aiter-interleaved", "INTERLEAVE", RowOrder::kAsIs, LayoutId::kAiter16x16GateUp,
       LayoutId::kAiterE8m0GateUp, LayoutId::kAiter16x16, LayoutId::kAiterE8m0Expert},
      {"aiter-gfx1250", "INTERLEAVE", RowOrder::kGateUpRows, LayoutId::kAiter16x16,
       LayoutId::kAiterN32K4, LayoutId::kAiter16x16, LayoutId::kAiterN32K4},
      {"logical", "NONE", RowOrder::kAsIs, LayoutId::kRowMajor, LayoutId::kRowMajor,
       LayoutId::kRowMajor, LayoutId::kRowMajor},
  };
  EXPECT_EQ(AllProfiles().size(), std::size(wants));
  for (const Want& want : wants) {
    SCOPED_TRACE(want.name);
    const LayoutProfile& profile = GetProfile(ParseProfile(want.name).value());
    EXPECT_EQ(std::string(profile.name), want.name);
    EXPECT_EQ(std::string(profile.gate_mode), want.gate_mode);
    EXPECT_EQ(profile.w13.row_order, want.w13_order);
    EXPECT_EQ(profile.w13_scale.row_order, want.w13_order);
    EXPECT_EQ(profile.w2.row_order, RowOrder::kAsIs);
    EXPECT_EQ(profile.w2_scale.row_order, RowOrder::kAsIs);
    EXPECT_EQ(profile.w13.layout, want.w13);
    EXPECT_EQ(profile.w13_scale.layout, want.w13_scale);
    EXPECT_EQ(profile.w2.layout, want.w2);
    EXPECT_EQ(profile.w2_scale.layout, want.w2_scale);
  }
}

TEST(Profile, UnknownNameListsTheKnownOnes) {
  const absl::Status status = ParseProfile("aiter_separated").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("aiter-separated, aiter-interleaved, aiter-gfx1250, logical"));
}

TEST(LayoutShape, OutputPadsOnlyWhereTheLayoutDoes) {
  struct Case {
    LayoutId layout;
    MatrixShape shape;
    int64_t rows, cols;
  };
  const Case cases[] = {
      {LayoutId::kRowMajor, {2, 3, 5}, 6, 5},
      {LayoutId::kAiter16x16, {2, 48, 96}, 96, 96},
      {LayoutId::kAiterE8m0, {1, 1, 1}, 256, 8},
      {LayoutId::kAiterE8m0, {3, 100, 12}, 512, 16},
      {LayoutId::kAiterE8m0, {384, 7168, 12}, int64_t{384} * 7168, 16},
      {LayoutId::kAiterE8m0Expert, {2, 96, 12}, 192, 16},
      {LayoutId::kAiterE8m0GateUp, {2, 96, 224}, 192, 224},
      {LayoutId::kAiterN32K4, {2, 96, 12}, 192, 12},
  };
  for (const Case& one : cases) {
    const OutputMatrix output = OutputShape(one.layout, one.shape).value();
    EXPECT_EQ(output.rows, one.rows) << Name(one.layout);
    EXPECT_EQ(output.cols, one.cols) << Name(one.layout);
    EXPECT_EQ(OutputBytes(one.layout, one.shape).value(), one.rows * one.cols);
  }
}

TEST(LayoutShape, RefusalNamesLayoutMultipleAndValue) {
  struct Case {
    LayoutId layout;
    MatrixShape shape;
    int element_bytes;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {LayoutId::kAiter16x16, {1, 24, 32}, 1, {"aiter-16x16", "rows", "16", "24"}},
      {LayoutId::kAiter16x16, {1, 16, 48}, 1, {"bytes a row", "32", "48"}},
      {LayoutId::kAiter16x16, {1, 16, 96}, 2, {"bytes a row", "64", "96"}},
      {LayoutId::kAiter16x16GateUp, {1, 48, 64}, 1, {"gate half", "16", "24"}},
      {LayoutId::kAiter16x16GateUp, {1, 33, 64}, 1, {"halves", "2", "33"}},
      {LayoutId::kAiter16x16GateUp, {1, 32, 96}, 1, {"bytes a row", "64", "96"}},
      {LayoutId::kAiterE8m0Expert, {1, 48, 8}, 1, {"aiter-e8m0-expert", "rows", "32", "48"}},
      {LayoutId::kAiterE8m0GateUp, {1, 48, 8}, 1, {"gate half", "16", "24"}},
      {LayoutId::kAiterN32K4, {1, 48, 4}, 1, {"rows", "32", "48"}},
      {LayoutId::kAiterN32K4, {1, 32, 6}, 1, {"bytes a row", "4", "6"}},
      {LayoutId::kRowMajor, {0, 1, 1}, 1, {"row-major", "[0, 1, 1]"}},
      {LayoutId::kRowMajor, {1, -1, 1}, 1, {"[1, -1, 1]"}},
      {LayoutId::kRowMajor, {1, 1, 1}, 0, {"0-byte"}},
      {LayoutId::kRowMajor, {kHuge, 2, 1}, 1, {"2^63"}},
      {LayoutId::kRowMajor, {1, kHuge, 2}, 1, {"2^63"}},
      {LayoutId::kAiterE8m0, {1, kHuge, 1}, 1, {"2^63"}},
      {LayoutId::kAiterE8m0, {1, 1, kHuge}, 1, {"2^63"}},
      {LayoutId::kAiter16x16, {int64_t{1} << 31, int64_t{1} << 31, 32}, 1, {"2^63"}},
  };
  for (const Case& one : cases) {
    const absl::Status status = CheckLayoutShape(one.layout, one.shape, one.element_bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << Name(one.layout);
    for (const std::string& part : one.parts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
  EXPECT_TRUE(CheckLayoutShape(LayoutId::kAiter16x16, {1, 16, 96}).ok());
  EXPECT_TRUE(CheckLayoutShape(LayoutId::kAiter16x16, {1, 16, 128}, 2).ok());
}

TEST(LayoutShape, TailIsWhatTheWholeTensorCallAdds) {
  EXPECT_EQ(TailBytes(LayoutId::kAiterE8m0, {3, 32, 12}).value(), (256 - 96) * 16);
  EXPECT_EQ(TailBytes(LayoutId::kAiterE8m0, {8, 32, 12}).value(), 0);
  EXPECT_EQ(TailBytes(LayoutId::kAiterE8m0Expert, {3, 32, 12}).value(), 0);
  EXPECT_EQ(TailBytes(LayoutId::kAiter16x16, {3, 32, 64}).value(), 0);
  EXPECT_EQ(TailBytes(LayoutId::kAiterE8m0, {3, 33, 12}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ApplyLayout, EqualsAiterByteForByte) {
  for (const AiterCase& one : AiterCases()) {
    SCOPED_TRACE(one.name);
    MatrixShape shape = one.shape;
    const std::vector<uint8_t> input =
        AiterInput(one.seed, shape.experts * shape.rows * shape.cols);
    ASSERT_EQ(Sha256Hex(input), one.input_sha256);
    const std::vector<uint8_t> widened =
        PadMatrix(input, shape.cols, one.padded_cols, shape.experts * shape.rows, 0);
    shape.cols = one.padded_cols;
    const std::vector<uint8_t> ordered = OrderRows(one.row_order, shape, widened);
    const std::vector<uint8_t> output = Apply(one.layout, shape, ordered);
    EXPECT_EQ(Sha256Hex(output), one.output_sha256);

    std::vector<uint8_t> back(ordered.size(), 0x55);
    ASSERT_TRUE(InvertLayout(one.layout, shape, output, absl::MakeSpan(back)).ok());
    EXPECT_EQ(back, ordered);
  }
}

TEST(ApplyLayout, EqualsTheViewAndPermuteSequence) {
  for (const LayoutInfo& info : AllLayouts()) {
    for (const MatrixShape& shape : ShapesOf(info.id)) {
      SCOPED_TRACE(absl::StrCat(info.name, " ", shape.experts, "x", shape.rows, "x", shape.cols));
      const std::vector<uint8_t> input = AiterInput(7, shape.experts * shape.rows * shape.cols);
      EXPECT_EQ(Apply(info.id, shape, input), EmulateAiter(info.id, shape, input));
    }
  }
}

TEST(ApplyLayout, IsAOneToOneMapOfPositions) {
  for (const LayoutInfo& info : AllLayouts()) {
    for (const MatrixShape& shape : ShapesOf(info.id)) {
      const OutputMatrix output = OutputShape(info.id, shape).value();
      std::vector<bool> hit(static_cast<size_t>(output.rows * output.cols));
      for (int64_t e = 0; e < shape.experts; ++e) {
        for (int64_t r = 0; r < shape.rows; ++r) {
          for (int64_t c = 0; c < shape.cols; ++c) {
            const int64_t target = LayoutIndex(info.id, shape.rows, output.cols, {e, r, c});
            ASSERT_GE(target, 0);
            ASSERT_LT(target, static_cast<int64_t>(hit.size())) << info.name;
            ASSERT_FALSE(hit[static_cast<size_t>(target)]) << info.name;
            hit[static_cast<size_t>(target)] = true;
          }
        }
      }
    }
  }
}

TEST(ApplyLayout, EveryOutputByteIsWritten) {
  for (const LayoutInfo& info : AllLayouts()) {
    for (const MatrixShape& shape : ShapesOf(info.id)) {
      const std::vector<uint8_t> input = AiterInput(9, shape.experts * shape.rows * shape.cols);
      EXPECT_EQ(Apply(info.id, shape, input, 0xAA), Apply(info.id, shape, input, 0x55))
          << info.name;
    }
  }
}

TEST(ApplyLayout, WrongBufferSizesAreRefused) {
  std::vector<uint8_t> in(512);
  std::vector<uint8_t> out(512);
  const MatrixShape shape{1, 16, 32};
  const LayoutId layout = LayoutId::kAiter16x16;
  EXPECT_TRUE(ApplyLayout(layout, shape, in, absl::MakeSpan(out)).ok());
  in.resize(511);
  const absl::Status short_input = ApplyLayout(layout, shape, in, absl::MakeSpan(out));
  EXPECT_EQ(short_input.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(short_input.message()), HasSubstr("512 bytes, found 511"));
  in.resize(512);
  out.resize(513);
  EXPECT_EQ(ApplyLayout(layout, shape, in, absl::MakeSpan(out)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InvertLayout(layout, shape, out, absl::MakeSpan(in)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(InvertLayout, RestoresTheInput) {
  for (const LayoutInfo& info : AllLayouts()) {
    for (const MatrixShape& shape : ShapesOf(info.id)) {
      const std::vector<uint8_t> input = AiterInput(11, shape.experts * shape.rows * shape.cols);
      const std::vector<uint8_t> output = Apply(info.id, shape, input);
      std::vector<uint8_t> back(input.size(), 0xAA);
      ASSERT_TRUE(InvertLayout(info.id, shape, output, absl::MakeSpan(back)).ok()) << info.name;
      EXPECT_EQ(back, input) << info.name;
    }
  }
}

TEST(InvertLayout, EveryFillByteIsChecked) {
  for (const LayoutId layout :
       {LayoutId::kAiterE8m0, LayoutId::kAiterE8m0Expert, LayoutId::kAiterE8m0GateUp}) {
    const MatrixShape shape{2, 32, 12};
    const OutputMatrix output = OutputShape(layout, shape).value();
    std::vector<uint8_t> input(static_cast<size_t>(shape.experts * shape.rows * shape.cols), 1);
    std::vector<uint8_t> bytes = Apply(layout, shape, input);
    int64_t fills = 0;
    for (size_t offset = 0; offset < bytes.size(); ++offset) {
      if (bytes[offset] == 1) continue;
      ++fills;
      const uint8_t right = bytes[offset];
      bytes[offset] = 0xFF;
      const absl::Status status = InvertLayout(layout, shape, bytes, absl::MakeSpan(input));
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss);
      ASSERT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("offset ", offset, " is 0xff")));
      bytes[offset] = right;
    }
    EXPECT_EQ(fills, output.rows * output.cols - shape.experts * shape.rows * shape.cols);
    EXPECT_TRUE(InvertLayout(layout, shape, bytes, absl::MakeSpan(input)).ok());
  }
}

}  // namespace
}  // namespace shardprep
