#include "kernels/shuffle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/device_choice.h"
#include "kernels/hip/lane_shuffler.h"
#include "kernels/layout.h"
#include "tests/kernels/aiter_cases.h"
#include "tests/kernels/emulated_gpu.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

// Every implementation that runs here: each instruction set of this CPU, the lanes of a GPU launch
// in host memory, and a GPU where there is one.
std::vector<std::unique_ptr<Shuffler>> AllShufflers() {
  std::vector<std::unique_ptr<Shuffler>> all;
  for (const HostIsa isa : SupportedHostIsas()) all.push_back(MakeHostShuffler(isa));
  all.push_back(MakeLaneShuffler(std::make_shared<EmulatedGpu>(), 0).value());
  absl::StatusOr<ChosenDevice> gpu = OpenDevice("hip", 1);
  if (gpu.ok()) all.push_back(std::move(gpu->shuffler));
  return all;
}

// Source rows [0, native_half) and [half, half + native_half) of a job, each half in a buffer of
// its own that ends with the last native byte, so that reading past a row is seen by a sanitizer.
struct Source {
  std::vector<uint8_t> halves[2];
  std::vector<RowsView> views;
};

Source MakeSource(const ShuffleJob& job, int64_t native_half, int64_t stride) {
  Source source;
  for (int half = 0; half < 2; ++half) {
    const int64_t bytes =
        native_half == 0 ? 0 : (native_half - 1) * stride + std::max<int64_t>(job.native_cols, 1);
    source.halves[half] = AiterInput(static_cast<uint64_t>(half) + 21, bytes);
    source.views.push_back(
        {source.halves[half].data(), stride, half * (job.rows / 2), native_half});
  }
  return source;
}

// The expert's padded logical matrix, from the views alone.
std::vector<uint8_t> LogicalMatrix(const ShuffleJob& job, const std::vector<RowsView>& views) {
  std::vector<uint8_t> matrix(static_cast<size_t>(job.rows * job.padded_cols), 0);
  for (const RowsView& view : views) {
    for (int64_t row = 0; row < view.rows; ++row) {
      std::copy_n(view.data + row * view.stride_bytes, job.native_cols,
                  matrix.begin() + (view.first_row + row) * job.padded_cols);
    }
  }
  return matrix;
}

// What the whole-matrix call, itself tested against AITER, gives for one expert.
std::vector<uint8_t> WantOutput(const ShuffleJob& job, const std::vector<RowsView>& views) {
  const MatrixShape shape{1, job.rows, job.padded_cols};
  const std::vector<uint8_t> ordered = OrderRows(job.row_order, shape, LogicalMatrix(job, views));
  std::vector<uint8_t> out(static_cast<size_t>(OutputBytes(job.layout, shape).value()));
  EXPECT_TRUE(ApplyLayout(job.layout, shape, ordered, absl::MakeSpan(out)).ok());
  out.resize(static_cast<size_t>(job.rows * OutputCols(job)));
  return out;
}

// Streams the expert in pieces of `blocks` row blocks into a poisoned buffer.
std::vector<uint8_t> Stream(Shuffler& shuffler, const ShuffleJob& job,
                            const std::vector<RowsView>& views, int64_t blocks, uint8_t poison) {
  const int64_t out_cols = OutputCols(job);
  std::vector<uint8_t> out(static_cast<size_t>(job.rows * out_cols), poison);
  const int64_t step = blocks * BlockRows(job);
  for (int64_t row = 0; row < job.rows; row += step) {
    const absl::Status status = shuffler.Shuffle(job, views, row, std::min(row + step, job.rows),
                                                 out.data() + row * out_cols);
    EXPECT_TRUE(status.ok()) << status;
  }
  return out;
}

std::string Describe(const ShuffleJob& job) {
  return absl::StrCat(GetLayoutInfo(job.layout).name,
                      job.row_order == RowOrder::kAsIs ? "" : " of g0,u0 rows", ", ", job.rows,
                      " rows, ", job.native_cols, " of ", job.padded_cols, " columns");
}

// Jobs around the edges of tiles: no native column, less than a tile, whole tiles, one more.
std::vector<ShuffleJob> Jobs() {
  std::vector<ShuffleJob> jobs;
  const auto add = [&jobs](LayoutId layout, RowOrder order, const std::vector<int64_t>& padded) {
    for (const int64_t rows : {64, 128}) {
      for (const int64_t padded_cols : padded) {
        for (const int64_t native :
             {0, 1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 48, 64, 65, 80, 96, 127, 128, 192}) {
          if (native <= padded_cols) jobs.push_back({layout, order, rows, native, padded_cols});
        }
      }
    }
  };
  for (const RowOrder order : {RowOrder::kAsIs, RowOrder::kGateUpRows}) {
    add(LayoutId::kRowMajor, order, {1, 12, 64});
    add(LayoutId::kAiter16x16, order, {32, 96, 192});
    add(LayoutId::kAiterN32K4, order, {4, 12, 20, 128});
  }
  add(LayoutId::kAiter16x16GateUp, RowOrder::kAsIs, {64, 192});
  add(LayoutId::kAiter16x16GateUp, RowOrder::kGateUpRows, {64});
  for (const LayoutId layout :
       {LayoutId::kAiterE8m0, LayoutId::kAiterE8m0Expert, LayoutId::kAiterE8m0GateUp}) {
    add(layout, RowOrder::kAsIs, {1, 4, 8, 12, 16, 17, 24, 96});
  }
  return jobs;
}

TEST(Shuffle, EveryImplementationEqualsTheIndexFunctions) {
  const std::vector<std::unique_ptr<Shuffler>> shufflers = AllShufflers();
  for (const ShuffleJob& job : Jobs()) {
    for (const int64_t native_half : {job.rows / 2, int64_t{16}, int64_t{5}, int64_t{0}}) {
      const Source source = MakeSource(job, native_half, job.native_cols + 3);
      const std::vector<uint8_t> want = WantOutput(job, source.views);
      for (const std::unique_ptr<Shuffler>& shuffler : shufflers) {
        SCOPED_TRACE(absl::StrCat(shuffler->name(), ", ", Describe(job)));
        ASSERT_EQ(Stream(*shuffler, job, source.views, 1, 0xAA), want);
        ASSERT_EQ(Stream(*shuffler, job, source.views, 3, 0x55), want);
      }
    }
  }
}

// Calls that write so much bypass the cache where the output is aligned.
TEST(Shuffle, LargeCallsWriteTheSameBytes) {
  constexpr int64_t kLargeBytes = int64_t{16} << 20;
  for (const auto& [layout, native_cols, padded_cols] :
       {std::tuple(LayoutId::kAiter16x16, 3584, 3584), std::tuple(LayoutId::kAiter16x16, 180, 192),
        std::tuple(LayoutId::kAiterE8m0, 224, 224), std::tuple(LayoutId::kAiterE8m0, 12, 12),
        std::tuple(LayoutId::kAiterE8m0GateUp, 21, 24),
        std::tuple(LayoutId::kAiterN32K4, 224, 224)}) {
    ShuffleJob job{layout, RowOrder::kAsIs, 64, native_cols, padded_cols};
    job.rows = (kLargeBytes / OutputCols(job) / 64 + 1) * 64;
    const Source source = MakeSource(job, job.rows / 2, job.native_cols);
    const std::vector<uint8_t> want = WantOutput(job, source.views);
    std::vector<uint8_t> memory(want.size() + 128);
    uint8_t* const aligned =
        memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
      for (const int shift : {0, 1}) {
        SCOPED_TRACE(absl::StrCat(shuffler->name(), ", ", Describe(job), ", shift ", shift));
        std::fill(memory.begin(), memory.end(), 0xAA);
        ASSERT_TRUE(shuffler->Shuffle(job, source.views, 0, job.rows, aligned + shift).ok());
        ASSERT_TRUE(std::equal(want.begin(), want.end(), aligned + shift));
        ASSERT_EQ(aligned[shift + want.size()], 0xAA);
      }
    }
  }
}

TEST(Shuffle, StreamedExpertsAndTailAreAitersWholeTensor) {
  for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
    for (const AiterCase& one : AiterCases()) {
      const ShuffleJob job{one.layout, one.row_order, one.shape.rows, one.shape.cols,
                           one.padded_cols};
      // One permutation of all experts together, which BadCallsAreRefusedAlike sees refused.
      if (one.shape.rows % BlockRows(job) != 0) continue;
      SCOPED_TRACE(absl::StrCat(shuffler->name(), " ", one.name));
      const int64_t expert_bytes = one.shape.rows * one.shape.cols;
      const std::vector<uint8_t> input = AiterInput(one.seed, one.shape.experts * expert_bytes);
      std::vector<uint8_t> output;
      for (int64_t expert = 0; expert < one.shape.experts; ++expert) {
        const std::vector<RowsView> views = {
            {input.data() + expert * expert_bytes, one.shape.cols, 0, one.shape.rows}};
        const std::vector<uint8_t> streamed = Stream(*shuffler, job, views, 7, 0xAA);
        output.insert(output.end(), streamed.begin(), streamed.end());
      }
      const MatrixShape padded{one.shape.experts, one.shape.rows, one.padded_cols};
      output.resize(output.size() + static_cast<size_t>(TailBytes(one.layout, padded).value()),
                    GetLayoutInfo(one.layout).fill);
      EXPECT_EQ(Sha256Hex(output), one.output_sha256);
    }
  }
}

TEST(Shuffle, LargeCallsEqualSmallOnes) {
  // Above the size from which the host bypasses the cache and the device cuts chunks.
  const ShuffleJob job{LayoutId::kAiter16x16GateUp, RowOrder::kAsIs, 6400, 3584, 3648};
  const Source source = MakeSource(job, 3072, 3584);
  const std::vector<uint8_t> want =
      Stream(*MakeHostShuffler(HostIsa::kScalar), job, source.views, 1, 0xAA);
  for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
    for (const size_t misaligned : {0, 1}) {
      SCOPED_TRACE(absl::StrCat(shuffler->name(), " at ", misaligned));
      std::vector<uint8_t> buffer(want.size() + 128, 0x55);
      const size_t to_line = 64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64;
      uint8_t* out = buffer.data() + to_line + misaligned;
      ASSERT_TRUE(shuffler->Shuffle(job, source.views, 0, job.rows, out).ok());
      EXPECT_TRUE(std::equal(want.begin(), want.end(), out));
    }
  }
}

TEST(Shuffle, ThreadsShareAShuffler) {
  const ShuffleJob job{LayoutId::kAiterE8m0, RowOrder::kAsIs, 768, 12, 12};
  const Source source = MakeSource(job, 384, 12);
  const std::vector<uint8_t> want = WantOutput(job, source.views);
  for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
    std::vector<uint8_t> results[4];
    std::vector<std::thread> threads;
    for (std::vector<uint8_t>& result : results) {
      threads.emplace_back([&] { result = Stream(*shuffler, job, source.views, 2, 0xAA); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::vector<uint8_t>& result : results) EXPECT_EQ(result, want);
  }
}

TEST(Shuffle, RowsMayComeInAnyNumberOfViews) {
  const ShuffleJob job{LayoutId::kAiterE8m0GateUp, RowOrder::kAsIs, 64, 10, 12};
  const std::vector<uint8_t> rows = AiterInput(31, job.rows * 10);
  std::vector<RowsView> views;
  for (int64_t row = 0; row < job.rows; ++row) {
    if (row % 7 != 3) views.push_back({rows.data() + row * 10, 10, row, 1});
  }
  const std::vector<uint8_t> want = WantOutput(job, views);
  for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
    EXPECT_EQ(Stream(*shuffler, job, views, 1, 0xAA), want) << shuffler->name();
  }
}

TEST(Shuffle, BadCallsAreRefusedAlike) {
  const ShuffleJob good{LayoutId::kAiterE8m0, RowOrder::kAsIs, 64, 8, 8};
  const std::vector<uint8_t> data(size_t{64} * 8);
  const std::vector<RowsView> all = {{data.data(), 8, 0, 64}};
  struct Case {
    const char* part;
    ShuffleJob job;
    std::vector<RowsView> views;
    int64_t begin, end;
  };
  const auto job_with = [&good](auto change) {
    ShuffleJob job = good;
    change(job);
    return job;
  };
  const Case cases[] = {
      {"multiples of 32, found 48", job_with([](ShuffleJob& j) { j.rows = 48; }), all, 0, 32},
      {"native columns", job_with([](ShuffleJob& j) { j.native_cols = 9; }), all, 0, 64},
      {"native columns", job_with([](ShuffleJob& j) { j.native_cols = -1; }), all, 0, 64},
      {"at least 1", job_with([](ShuffleJob& j) { j.rows = 0; }), all, 0, 0},
      {"multiple of 32", job_with([](ShuffleJob& j) { j.layout = LayoutId::kAiter16x16; }), all, 0,
       64},
      {"even number",
       {LayoutId::kRowMajor, RowOrder::kGateUpRows, 63, 8, 8},
       {{data.data(), 8, 0, 63}},
       0,
       63},
      {"multiples of 32 inside [0, 64)", good, all, 16, 64},
      {"found [32, 96)", good, all, 32, 96},
      {"found [64, 32)", good, all, 64, 32},
      {"found [-32, 32)", good, all, -32, 32},
      {"ordered, disjoint", good, {{data.data(), 8, 8, 8}, {data.data(), 8, 0, 8}}, 0, 64},
      {"ordered, disjoint", good, {{data.data(), 8, 0, 9}, {data.data(), 8, 8, 8}}, 0, 64},
      {"ordered, disjoint", good, {{data.data(), 8, 60, 5}}, 0, 64},
      {"ordered, disjoint", good, {{data.data(), 8, -1, 5}}, 0, 64},
      {"ordered, disjoint", good, {{data.data(), 8, 1, -1}}, 0, 64},
      {"stride", good, {{data.data(), 7, 0, 64}}, 0, 64},
      {"data", good, {{nullptr, 8, 0, 64}}, 0, 64},
  };
  for (const std::unique_ptr<Shuffler>& shuffler : AllShufflers()) {
    for (const Case& one : cases) {
      std::vector<uint8_t> out(size_t{64} * 8);
      const absl::Status status =
          shuffler->Shuffle(one.job, one.views, one.begin, one.end, out.data());
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.part;
      EXPECT_THAT(std::string(status.message()), HasSubstr(one.part)) << shuffler->name();
    }
    EXPECT_TRUE(shuffler->Shuffle(good, all, 32, 32, nullptr).ok()) << "an empty range is nothing";
  }
}

TEST(LogicalRow, SixteenOutputRowsAreTwoRunsAtMost) {
  const ShuffleJob interleaved{LayoutId::kAiter16x16GateUp, RowOrder::kAsIs, 64, 64, 64};
  EXPECT_EQ(LogicalRow(interleaved, 15), 15);
  EXPECT_EQ(LogicalRow(interleaved, 16), 32);
  EXPECT_EQ(LogicalRow(interleaved, 32), 16);
  EXPECT_EQ(LogicalRow(interleaved, 63), 63);
  const ShuffleJob alternating{LayoutId::kAiterN32K4, RowOrder::kGateUpRows, 64, 4, 4};
  EXPECT_EQ(LogicalRow(alternating, 0), 0);
  EXPECT_EQ(LogicalRow(alternating, 1), 32);
  EXPECT_EQ(LogicalRow(alternating, 2), 1);
  EXPECT_EQ(LogicalRow(alternating, 63), 63);
}

TEST(Unshuffle, GivesBackTheLogicalRows) {
  const std::unique_ptr<Shuffler> shuffler = MakeHostShuffler();
  for (const ShuffleJob& job : Jobs()) {
    SCOPED_TRACE(Describe(job));
    const Source source = MakeSource(job, job.rows / 2 - 3, job.native_cols + 1);
    const std::vector<uint8_t> output = Stream(*shuffler, job, source.views, 1, 0xAA);
    const std::vector<uint8_t> logical = LogicalMatrix(job, source.views);
    std::vector<uint8_t> rows(logical.size(), 0x55);
    const int64_t step = 2 * BlockRows(job);
    for (int64_t row = 0; row < job.rows; row += step) {
      ASSERT_TRUE(Unshuffle(job, row, std::min(row + step, job.rows),
                            output.data() + row * OutputCols(job),
                            rows.data() + row * job.padded_cols)
                      .ok());
    }
    for (int64_t row = 0; row < job.rows; ++row) {
      ASSERT_TRUE(std::equal(rows.begin() + row * job.padded_cols,
                             rows.begin() + (row + 1) * job.padded_cols,
                             logical.begin() + LogicalRow(job, row) * job.padded_cols));
    }
  }
}

TEST(Unshuffle, EveryPadColumnIsChecked) {
  for (const LayoutId layout :
       {LayoutId::kRowMajor, LayoutId::kAiter16x16, LayoutId::kAiter16x16GateUp,
        LayoutId::kAiterE8m0, LayoutId::kAiterE8m0Expert, LayoutId::kAiterE8m0GateUp,
        LayoutId::kAiterN32K4}) {
    const bool scales = TileOf(layout) == TileKind::kE8m0;
    const ShuffleJob job{layout, RowOrder::kAsIs, 32, scales ? 9 : 60, scales ? 12 : 64};
    SCOPED_TRACE(Describe(job));
    std::vector<uint8_t> native(static_cast<size_t>(job.rows * job.native_cols), 1);
    const std::vector<RowsView> views = {{native.data(), job.native_cols, 0, job.rows}};
    std::vector<uint8_t> output = Stream(*MakeHostShuffler(), job, views, 1, 0xAA);
    std::vector<uint8_t> rows(static_cast<size_t>(job.rows * job.padded_cols));
    int64_t pads = 0;
    for (uint8_t& byte : output) {
      if (byte == 1) continue;
      ++pads;
      const uint8_t right = byte;
      byte = 0xFE;
      const absl::Status status = Unshuffle(job, 0, job.rows, output.data(), rows.data());
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss);
      ASSERT_THAT(std::string(status.message()), HasSubstr("is 0xfe, want 0x"));
      byte = right;
    }
    EXPECT_EQ(pads, job.rows * (OutputCols(job) - job.native_cols));
    EXPECT_TRUE(Unshuffle(job, 0, job.rows, output.data(), rows.data()).ok());
  }
}

TEST(HostIsa, ScalarIsAlwaysThereAndTheBestIsLast) {
  const std::vector<HostIsa> isas = SupportedHostIsas();
  EXPECT_EQ(isas.front(), HostIsa::kScalar);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  EXPECT_EQ(BestHostIsa(), isas.back());
  EXPECT_THAT(MakeHostShuffler()->name(), HasSubstr("cpu/"));
}

}  // namespace
}  // namespace shardprep
