#include "workers/work_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardprep {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(WorkMemory, StartsAtAHugePageAndExists) {
  for (const int64_t size : {int64_t{1}, int64_t{4096}, 3 * kMiB + 5}) {
    const WorkMemory memory(size);
    const absl::Span<uint8_t> bytes = memory.bytes();
    ASSERT_EQ(bytes.size(), static_cast<size_t>(size));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % (2 * kMiB), 0u);
    const auto pages = static_cast<size_t>((size + 4095) / 4096);
    std::vector<unsigned char> resident(pages);
    ASSERT_EQ(::mincore(bytes.data(), bytes.size(), resident.data()), 0);
    EXPECT_EQ(std::count(resident.begin(), resident.end(), 1), static_cast<long>(pages)) << size;
  }
}

TEST(WorkMemory, NothingIsNoMemory) {
  EXPECT_TRUE(WorkMemory().bytes().empty());
  EXPECT_TRUE(WorkMemory(0).bytes().empty());
}

TEST(WorkMemory, MovesWithItsBytes) {
  WorkMemory first(kMiB);
  first.bytes()[kMiB - 1] = 77;
  const uint8_t* const at = first.bytes().data();
  WorkMemory second = std::move(first);
  EXPECT_EQ(second.bytes().data(), at);
  EXPECT_EQ(second.bytes()[kMiB - 1], 77);
  // NOLINTNEXTLINE(bugprone-use-after-move): that nothing is left is what is asked.
  EXPECT_TRUE(first.bytes().empty());
}

}  // namespace
}  // namespace shardprep
