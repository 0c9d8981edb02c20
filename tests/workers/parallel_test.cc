#include "workers/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardprep {
namespace {

TEST(Parallel, EveryWorkIsDoneOnceHoweverManyAtOnce) {
  for (const int at_once : {0, 1, 3, 64}) {
    std::vector<int> done(17);
    ForEachAtOnce(17, at_once, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
    EXPECT_EQ(std::count(done.begin(), done.end(), 1), 17) << at_once;
    const absl::Status tried = TryForEachAtOnce(17, at_once, [&](int64_t i) {
      ++done[static_cast<size_t>(i)];
      return absl::OkStatus();
    });
    EXPECT_TRUE(tried.ok()) << tried;
    EXPECT_EQ(std::count(done.begin(), done.end(), 2), 17) << at_once;
  }
}

TEST(Parallel, NothingBeginsAfterAFailure) {
  std::vector<int64_t> begun;
  const absl::Status one = TryForEachAtOnce(9, 1, [&](int64_t i) {
    begun.push_back(i);
    return i == 2 ? absl::DataLossError("work 2") : absl::OkStatus();
  });
  EXPECT_EQ(one, absl::DataLossError("work 2"));
  EXPECT_EQ(begun, (std::vector<int64_t>{0, 1, 2}));

  // Each thread fails with its first.
  std::atomic<int> tried{0};
  const absl::Status many = TryForEachAtOnce(1000, 4, [&](int64_t i) {
    ++tried;
    return absl::UnavailableError(absl::StrCat("work ", i));
  });
  EXPECT_TRUE(absl::IsUnavailable(many)) << many;
  EXPECT_LE(tried, 4);
}

}  // namespace
}  // namespace shardprep
