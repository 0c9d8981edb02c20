#include "workers/block_plan.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/loaded_checkpoint.h"
#include "tests/support/request_store.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// A store of requests that uploads in parts of 16 MiB, one filling while one is under way.
class UploadStore : public RequestStore {
 public:
  using RequestStore::RequestStore;
  int64_t WriteBufferBytes(int64_t /*object*/, int64_t reserve) const override {
    return 2 * (16 * kMiB + reserve);
  }
  int64_t FurtherWriteBytes(int64_t /*object*/, int64_t reserve) const override {
    return 16 * kMiB + reserve;
  }
};

class MemoryNeedTest : public ::testing::Test {
 protected:
  LoadedCheckpoint v4_pro_{{.hidden = 7168,
                            .intermediate = 3072,
                            .experts = 16,
                            .layers = 1,
                            .mtp_layers = 0,
                            .files = 1,
                            .sparse = true}};
  SlicePlan plan_ = v4_pro_.Plan({.tensor_parallel_size = 8,
                                  .intermediate_alignment = Alignment(128),
                                  .hidden_alignment = Alignment(128)});
};

TEST_F(MemoryNeedTest, DirectoriesAreReadInBlocks) {
  const MemoryNeed need = MemoryNeedOf(plan_, v4_pro_.store(), v4_pro_.store());
  EXPECT_EQ(need.preferred_read, 0);
  EXPECT_EQ(need.read_ahead_most, 0);
  EXPECT_GT(need.per_thread, 0);
  EXPECT_GT(need.shared_block, 0);
  EXPECT_LE(need.Total(8, 2), 12 * kMiB);
  EXPECT_EQ(need.Most(8, 2), need.Total(8, 2));
  EXPECT_EQ(need.per_write, v4_pro_.store().FurtherWriteBytes(int64_t{1} << 30, kBlockBytes));
  EXPECT_EQ(need.Most(2, 2), need.Total(2, 2) + int64_t{2} * 3 * need.per_write);
}

TEST_F(MemoryNeedTest, RequestsAreReadAheadAndNeedNoBlocks) {
  RequestStore source(&v4_pro_.store(), 8 * kMiB);
  const MemoryNeed need = MemoryNeedOf(plan_, source, v4_pro_.store());
  EXPECT_EQ(need.preferred_read, 8 * kMiB);
  EXPECT_EQ(need.per_thread, 0);
  EXPECT_EQ(need.shared_block, 0);
  EXPECT_EQ(need.read_ahead_least, 16 * kMiB);
  EXPECT_EQ(need.read_ahead_most, int64_t{kSourceReaders + 2} * 16 * kMiB);
  // A tiny preference still leaves room for 32 of the longest rows.
  RequestStore tiny(&v4_pro_.store(), 1);
  EXPECT_EQ(MemoryNeedOf(plan_, tiny, v4_pro_.store()).read_ahead_least, 2 * 32 * 3584);
}

TEST_F(MemoryNeedTest, TheDefaultBudgetHoldsEightUploadsAndReadsAhead) {
  UploadStore store(&v4_pro_.store(), 8 * kMiB);
  const MemoryNeed need = MemoryNeedOf(plan_, store, store);
  const auto fit = FitLease(need, 512 * kMiB, 8, 4);
  ASSERT_TRUE(fit.ok()) << fit.status();
  EXPECT_EQ(fit->ranks, 8);
  EXPECT_EQ(fit->threads, 4);
  EXPECT_EQ(fit->writes, 1);
  EXPECT_GE(fit->read_ahead, 192 * kMiB);
  EXPECT_LE(8 * need.per_rank + fit->read_ahead, 512 * kMiB);
}

TEST(MemoryNeed, EightWritesAtOnceAreSharedAmongTheRanks) {
  const MemoryNeed need{.per_rank = 100, .per_write = 50};
  const std::pair<int64_t, int64_t> kWrites[] = {{1, 8}, {2, 4}, {3, 3}, {4, 2},
                                                 {7, 2}, {8, 1}, {9, 1}, {1000, 1}};
  for (const auto& [ranks, writes] : kWrites) {
    EXPECT_EQ(need.MostWrites(ranks), writes) << ranks;
    EXPECT_EQ(need.Most(ranks, 1), ranks * need.WriteBuffer(writes)) << ranks;
  }
  EXPECT_EQ(need.WriteBuffer(4), 250);
  EXPECT_EQ(MemoryNeed{.per_rank = 100}.MostWrites(1), 1);
}

TEST(FitLease, CutsWritesThenReadAheadThenThreadsThenRanks) {
  const MemoryNeed blocks{.per_rank = 100, .per_thread = 10, .shared_block = 5};
  const MemoryNeed spans{
      .per_rank = 100, .preferred_read = 20, .read_ahead_least = 40, .read_ahead_most = 400};
  struct Case {
    const MemoryNeed* need;
    int64_t budget;
    int32_t ranks, threads;
    LeaseShape want;  // ranks, threads, read_ahead, writes
  };
  const MemoryNeed writes{.per_rank = 100,
                          .per_write = 50,
                          .preferred_read = 20,
                          .read_ahead_least = 40,
                          .read_ahead_most = 400};
  const Case cases[] = {
      {&blocks, 1000, 4, 8, {4, 4, 0}},  // never more threads than ranks
      {&blocks, 465, 4, 4, {4, 4, 0}},   // 4*100 + 4*10 + 5*5
      {&blocks, 464, 4, 4, {4, 3, 0}},
      {&blocks, 420, 4, 4, {4, 1, 0}},
      {&blocks, 419, 4, 4, {3, 3, 0}},
      {&blocks, 120, 4, 4, {1, 1, 0}},
      {&spans, 10'000, 4, 2, {4, 2, 400}},
      {&spans, 800, 4, 2, {4, 2, 400}},
      {&spans, 799, 4, 2, {4, 2, 399}},
      {&spans, 440, 4, 2, {4, 2, 40}},
      {&spans, 439, 4, 2, {3, 2, 139}},
      {&spans, 140, 4, 2, {1, 1, 40}},
      {&writes, 10'000, 2, 2, {2, 2, 400, 4}},
      {&writes, 900, 2, 2, {2, 2, 400, 4}},  // 2*(100 + 3*50) + 400
      {&writes, 899, 2, 2, {2, 2, 400, 3}},
      {&writes, 699, 2, 2, {2, 2, 400, 1}},
      {&writes, 599, 2, 2, {2, 2, 399, 1}},
      {&writes, 10'000, 1, 2, {1, 1, 400, 8}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat("budget ", c.budget));
    const auto fit = FitLease(*c.need, c.budget, c.ranks, c.threads);
    ASSERT_TRUE(fit.ok()) << fit.status();
    EXPECT_EQ(fit->ranks, c.want.ranks);
    EXPECT_EQ(fit->threads, c.want.threads);
    EXPECT_EQ(fit->read_ahead, c.want.read_ahead);
    EXPECT_EQ(fit->writes, c.want.writes);
  }
  for (const MemoryNeed* need : {&blocks, &spans}) {
    const int64_t least = need->Total(1, 1);
    const absl::Status status = FitLease(*need, least - 1, 4, 4).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("at least ", least)));
  }
}

TEST(BatchesAtOnce, LeavesThreadsLeastToDoOneAfterTheOther) {
  const MemoryNeed small{.per_rank = 1};
  const MemoryNeed blocks{.per_rank = 100, .shared_block = 10, .batches = 2};
  struct Case {
    const MemoryNeed* need;
    int64_t budget;
    int32_t batches, ranks, threads, want;
  };
  const Case cases[] = {
      {&small, 1000, 1, 8, 64, 1}, {&small, 1000, 2, 2, 1, 1},
      {&small, 1000, 2, 2, 2, 1},   // 2 batches of one round, or 1 of two
      {&small, 1000, 2, 2, 4, 2},   // a rank for each thread
      {&small, 1000, 2, 1, 2, 2},   // as before
      {&small, 1000, 3, 8, 12, 3},  // 4 threads each, 2 ranks in turn; 2 would leave 4, 1 would 3
      {&small, 1000, 3, 4, 6, 3},   // 2 in turn, instead of 3
      {&small, 1000, 4, 8, 9, 1},   // 4 in turn either way
      {&small, 1000, 8, 2, 16, 8}, {&small, 1000, 8, 2, 100, 8},  // threads that no rank needs
      {&small, 15, 8, 2, 16, 4},   // 16 ranks do not fit; 7 batches would take two rounds as well
      {&blocks, 460, 2, 2, 4, 2},  // twice 2*100 + 3*10
      {&blocks, 459, 2, 2, 4, 1},  // one thread each would not be better
      {&blocks, 50, 2, 2, 4, 1},   // too little for any
  };
  for (const Case& c : cases) {
    EXPECT_EQ(BatchesAtOnce(*c.need, c.budget, c.batches, c.ranks, c.threads), c.want)
        << c.budget << " bytes, " << c.batches << " batches of " << c.ranks << " on " << c.threads;
  }
  // What a worker provides is enough for all.
  EXPECT_EQ(blocks.Most(4, 4), 460);
  EXPECT_EQ(BatchesAtOnce(blocks, blocks.Most(4, 4), 2, 2, 4), 2);
  EXPECT_EQ(blocks.Most(4, 1), blocks.Total(4, 1)) << "no thread for a second batch";
}

}  // namespace
}  // namespace shardprep
