#include "workers/source_spans.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/loaded_checkpoint.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

SlicePlanInputs Inputs(int32_t ranks, ProfileId profile = ProfileId::kAiterSeparated) {
  SlicePlanInputs inputs;
  inputs.tensor_parallel_size = ranks;
  inputs.intermediate_alignment = Alignment(128);
  inputs.hidden_alignment = Alignment(128);
  inputs.profile = profile;
  return inputs;
}

std::vector<int32_t> AllRanks(int32_t count) {
  std::vector<int32_t> ranks(static_cast<size_t>(count));
  for (int32_t r = 0; r < count; ++r) ranks[static_cast<size_t>(r)] = r;
  return ranks;
}

std::vector<int64_t> Sizes(const SourceSpan& span) {
  std::vector<int64_t> sizes;
  sizes.reserve(span.ranges.size());
  for (const SourceRange& range : span.ranges) sizes.push_back(range.size_bytes);
  return sizes;
}

// Spans are within their bound, their ranges lie in memory one after the other, and no source byte
// is read twice. Answers the sum of all ranges.
int64_t CheckSpans(const SpanPlan& spans, int64_t span_bytes) {
  std::map<std::pair<int64_t, int64_t>, int64_t> reads;  // (file, offset) to size
  int64_t total = 0;
  for (const SourceSpan& span : spans.spans) {
    EXPECT_LE(span.size_bytes, span_bytes);
    int64_t at = 0;
    for (const SourceRange& range : span.ranges) {
      EXPECT_EQ(range.at, at);
      EXPECT_GT(range.size_bytes, 0);
      at += range.size_bytes;
      EXPECT_TRUE(reads.emplace(std::make_pair(range.file, range.offset), range.size_bytes).second);
    }
    EXPECT_EQ(span.size_bytes, at);
    total += at;
  }
  int64_t end = -1, file = -1;
  for (const auto& [place, size] : reads) {
    EXPECT_TRUE(place.first != file || place.second >= end);
    file = place.first;
    end = place.second + size;
  }
  return total;
}

// Each rank of the set gets every output row of every expert, once and in order, and every source
// row behind them is in the item's span.
void CheckItems(const SlicePlan& plan, const Region& region, const PartPlan& part,
                const std::vector<int32_t>& ranks, const SpanPlan& spans) {
  int64_t last_span = 0;
  std::pair<int32_t, int64_t> last{0, 0};
  for (const SpanItem& item : spans.items) {
    EXPECT_LE(last_span, item.span);
    EXPECT_LE(last, std::make_pair(item.tensor, item.expert));
    last_span = item.span;
    last = {item.tensor, item.expert};
  }
  for (int32_t position = 0; position < static_cast<int32_t>(ranks.size()); ++position) {
    for (int32_t t = 0; t < static_cast<int32_t>(part.tensors.size()); ++t) {
      const FusedTensor& fused = plan.fused_tensors()[part.tensors[t].source];
      for (int64_t expert = 0; expert < fused.experts; ++expert) {
        int64_t row = 0;
        for (const SpanItem& item : spans.items) {
          if (item.tensor != t || item.expert != expert) continue;
          if (position < item.rank_begin || position >= item.rank_end) continue;
          EXPECT_EQ(item.begin, row);
          EXPECT_TRUE(item.end % 32 == 0 || item.end == fused.job.rows);
          row = item.end;
          const std::vector<Slice> slices = plan.SlicesOf(region, fused, ranks[position], expert);
          for (const RowRange& rows : LogicalRanges(fused, item.begin, item.end)) {
            for (const SlicePiece& piece : PiecesIn(slices, rows)) {
              const Slice& slice = slices[piece.slice];
              const TensorInfo info = plan.checkpoint().tensors().at(slice.tensor);
              spans.spans[item.span].Position(
                  info.file, info.offset + piece.source_row * slice.source_row_bytes,
                  piece.rows * slice.source_row_bytes);  // aborts when it is not there
            }
          }
        }
        EXPECT_EQ(row, fused.job.rows);
      }
    }
  }
}

TEST(PlanSpans, EachRankFindsItsRowsInOrderAndNoByteIsReadTwice) {
  const LoadedCheckpoint checkpoint(
      {.hidden = 192, .intermediate = 768, .experts = 3, .layers = 1, .mtp_layers = 0});
  for (const ProfileId profile : {ProfileId::kAiterSeparated, ProfileId::kAiterInterleaved,
                                  ProfileId::kAiterGfx1250, ProfileId::kLogical}) {
    for (const int32_t ranks : {1, 3, 8}) {
      const SlicePlan plan = checkpoint.Plan(Inputs(ranks, profile));
      const Region& region = plan.regions().front();
      const PartPlan& part = region.parts.front();
      // 32 rows of w2 are the least that a span can hold.
      for (const int64_t span_bytes : {int64_t{32} * 768 / 2, int64_t{20'000}, 8 * kMiB}) {
        SCOPED_TRACE(absl::StrCat("profile ", static_cast<int>(profile), " T=", ranks, " spans of ",
                                  span_bytes));
        const std::vector<int32_t> set = AllRanks(ranks);
        const SpanPlan spans = PlanSpans(plan, region, part, set, span_bytes);
        EXPECT_EQ(CheckSpans(spans, span_bytes), region.source_bytes);
        CheckItems(plan, region, part, set, spans);
      }
    }
  }
}

TEST(PlanSpans, ASubsetOfRanksReadsItsOwnRowsOfW13) {
  const LoadedCheckpoint checkpoint(
      {.hidden = 256, .intermediate = 512, .experts = 2, .layers = 1, .mtp_layers = 0});
  const SlicePlan plan = checkpoint.Plan(Inputs(8));
  const Region& region = plan.regions().front();
  const PartPlan& part = region.parts.front();
  for (const std::vector<int32_t>& set :
       {std::vector<int32_t>{5}, {0, 1}, {0, 3, 5}, {1, 2, 3, 7}}) {
    const SpanPlan spans = PlanSpans(plan, region, part, set, 8 * kMiB);
    CheckItems(plan, region, part, set, spans);
    int64_t want = 0;
    for (const FusedTensor& tensor : plan.fused_tensors()) {
      want += tensor.native_bytes * (tensor.halves == 2 ? static_cast<int64_t>(set.size()) : 8);
    }
    EXPECT_EQ(CheckSpans(spans, 8 * kMiB), want) << set.size() << " ranks";
  }
}

// The published extents: w1, w2 and w3 of one expert are 11,010,048 bytes each.
class V4ProSpans : public ::testing::Test {
 protected:
  static constexpr int64_t kTensor = int64_t{3072} * 3584, kScale = int64_t{3072} * 224;

  SpanPlan Spans(ProfileId profile, const std::vector<int32_t>& ranks, int64_t span_bytes) {
    plan_ = std::make_unique<SlicePlan>(checkpoint_.Plan(Inputs(8, profile)));
    const Region& region = plan_->regions().front();
    return PlanSpans(*plan_, region, region.parts.front(), ranks, span_bytes);
  }

  // Sizes of the ranges of the spans that hold experts of the part's tensor, span by span.
  static std::vector<std::vector<int64_t>> RangesOf(const SpanPlan& spans, int32_t tensor) {
    std::vector<std::vector<int64_t>> ranges;
    int64_t last = -1;
    for (const SpanItem& item : spans.items) {
      if (item.tensor != tensor || item.span == last) continue;
      last = item.span;
      ranges.push_back(Sizes(spans.spans[item.span]));
    }
    return ranges;
  }

  LoadedCheckpoint checkpoint_{{.hidden = 7168,
                                .intermediate = 3072,
                                .experts = 2,
                                .layers = 1,
                                .mtp_layers = 0,
                                .files = 1,
                                .sparse = true}};
  std::unique_ptr<SlicePlan> plan_;
};

TEST_F(V4ProSpans, AnExpertsTensorIsOneReadForAllRanks) {
  const SpanPlan spans = Spans(ProfileId::kAiterSeparated, AllRanks(8), 16 * kMiB);
  // w13: gate, up of two experts; w2.
  EXPECT_EQ(RangesOf(spans, 0), (std::vector<std::vector<int64_t>>(4, {kTensor})));
  EXPECT_EQ(RangesOf(spans, 1), (std::vector<std::vector<int64_t>>(2, {kTensor})));
}

TEST_F(V4ProSpans, HalvesThatAlternateAreReadTogetherForHalfTheRanks) {
  const SpanPlan spans = Spans(ProfileId::kAiterInterleaved, AllRanks(8), 16 * kMiB);
  EXPECT_EQ(RangesOf(spans, 0), (std::vector<std::vector<int64_t>>(4, {kTensor / 2, kTensor / 2})));
  EXPECT_EQ(RangesOf(spans, 1), (std::vector<std::vector<int64_t>>(2, {kTensor})));
}

TEST_F(V4ProSpans, LittleMemoryCutsTensorsInTwo) {
  const SpanPlan spans = Spans(ProfileId::kAiterSeparated, AllRanks(8), 8 * kMiB);
  EXPECT_EQ(RangesOf(spans, 0), (std::vector<std::vector<int64_t>>(8, {kTensor / 2})));
  EXPECT_EQ(RangesOf(spans, 1), (std::vector<std::vector<int64_t>>(4, {kTensor / 2})));
}

TEST_F(V4ProSpans, SmallTensorsShareASpanAndNeighboursARead) {
  const SpanPlan spans = Spans(ProfileId::kAiterSeparated, AllRanks(8), 16 * kMiB);
  // All scales are in one span. In the file w1, w2 and w3 of expert 0 are followed by those of
  // expert 1: together they are one run.
  EXPECT_EQ(RangesOf(spans, 2), (std::vector<std::vector<int64_t>>{{6 * kScale}}));
  EXPECT_EQ(RangesOf(spans, 3), RangesOf(spans, 2));
}

TEST(PlanSpans, CopiedTensorsAreCutEvenlyAndNeighboursAreReadTogether) {
  const LoadedCheckpoint checkpoint(
      {.hidden = 256,
       .intermediate = 256,
       .experts = 1,
       .layers = 1,
       .mtp_layers = 0,
       .files = 1,
       .extra = {{.name = "a.large", .dtype = Dtype::kU8, .shape = {100'000}, .place = {}},
                 {.name = "b.small", .dtype = Dtype::kU8, .shape = {300}, .place = {}},
                 {.name = "b.tiny", .dtype = Dtype::kU8, .shape = {200}, .place = {}},
                 {.name = "c.none", .dtype = Dtype::kU8, .shape = {0}, .place = {}}}});
  const SlicePlan plan = checkpoint.Plan(Inputs(2));
  const Region& region = plan.regions().back();
  ASSERT_EQ(region.kind, Region::Kind::kReplicated);
  ASSERT_EQ(region.parts.size(), 1u);
  const PartPlan& part = region.parts.front();
  const SpanPlan spans = PlanSpans(plan, region, part, {kReplicatedRank}, 40'000);
  EXPECT_EQ(CheckSpans(spans, 40'000), region.source_bytes);

  std::map<int32_t, std::vector<int64_t>> pieces;  // by tensor
  for (const SpanItem& item : spans.items) {
    int64_t& end = pieces[item.tensor].emplace_back(0);
    end = item.end - item.begin;
    const DenseTensor& dense = plan.dense_tensors()[part.tensors[item.tensor].source];
    const TensorInfo info = plan.checkpoint().tensors().at(dense.sources.front().tensor);
    spans.spans[item.span].Position(info.file, info.offset + item.begin, end);
  }
  for (int32_t t = 0; t < static_cast<int32_t>(part.tensors.size()); ++t) {
    SCOPED_TRACE(part.tensors[t].name);
    int64_t sum = 0;
    for (const int64_t piece : pieces[t]) sum += piece;
    EXPECT_EQ(sum, part.tensors[t].size_bytes);
    if (part.tensors[t].name == "a.large") {
      EXPECT_THAT(pieces[t], ::testing::ElementsAre(33'334, 33'334, 33'332));
    }
  }
  // The small tensors lie side by side: fewer reads than tensors.
  int64_t reads = 0;
  for (const SourceSpan& span : spans.spans) reads += static_cast<int64_t>(span.ranges.size());
  EXPECT_LT(reads, static_cast<int64_t>(part.tensors.size()));
}

}  // namespace
}  // namespace shardprep
