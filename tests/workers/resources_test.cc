#include "workers/resources.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace shardprep {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

class CgroupTest : public ::testing::Test {
 protected:
  void Plant(const std::string& group, const std::string& file, const std::string& text) {
    std::filesystem::create_directories(root() + "/" + group);
    std::ofstream(root() + "/" + group + "/" + file) << text;
  }
  std::string root() const { return directory_ / "cgroup"; }
  CgroupLimits Read(const std::string& membership) const {
    return ReadCgroupLimits(membership, root());
  }

  TempDir directory_;
};

TEST_F(CgroupTest, TheTightestOfAllLevelsHolds) {
  Plant("", "cpu.max", "max 100000\n");
  Plant("a", "cpu.max", "400000 100000\n");
  Plant("a", "memory.max", "1073741824\n");
  Plant("a/b", "cpu.max", "max 100000\n");
  Plant("a/b", "memory.max", "2147483648\n");
  Plant("a/b/c", "cpu.max", "650000 100000\n");
  const CgroupLimits limits = Read("12:cpu:/other\n0::/a/b/c\n");
  EXPECT_EQ(limits.cpus, 4.0);
  EXPECT_EQ(limits.memory_bytes, kGiB);
  // As a container sees it, whose own group is the root of what it sees.
  Plant("", "cpu.max", "150000 100000\n");
  EXPECT_EQ(Read("0::/\n").cpus, 1.5);
}

TEST_F(CgroupTest, WhatIsMissingOrMalformedLimitsNothing) {
  EXPECT_FALSE(Read("0::/absent\n").cpus.has_value());
  EXPECT_FALSE(Read("").memory_bytes.has_value());
  EXPECT_FALSE(Read("4:memory:/a\n").memory_bytes.has_value());  // version 1
  for (const char* text : {"", "max", "0 100000", "-1 100000", "100000 0", "x y", "1 2 3"}) {
    Plant("a", "cpu.max", text);
    EXPECT_FALSE(Read("0::/a\n").cpus.has_value()) << text;
  }
  for (const char* text : {"", "max\n", "0", "-5", "1GiB", "99999999999999999999"}) {
    Plant("a", "memory.max", text);
    EXPECT_FALSE(Read("0::/a\n").memory_bytes.has_value()) << text;
  }
}

TEST(Resources, ThreadsAreWholeProcessorsOfTheQuota) {
  EXPECT_EQ(DefaultThreads({}, 16), 16);
  EXPECT_EQ(DefaultThreads({.cpus = 4.0}, 16), 4);
  EXPECT_EQ(DefaultThreads({.cpus = 4.9}, 16), 4);
  EXPECT_EQ(DefaultThreads({.cpus = 0.5}, 16), 1);
  EXPECT_EQ(DefaultThreads({.cpus = 64.0}, 16), 16);
  EXPECT_EQ(DefaultThreads({}, 0), 1);
}

TEST(Resources, BudgetIsAtMostHalfOfTheLimit) {
  EXPECT_EQ(DefaultMemoryBudget({}), kGiB / 2);
  EXPECT_EQ(DefaultMemoryBudget({.memory_bytes = 64 * kGiB}), kGiB / 2);
  EXPECT_EQ(DefaultMemoryBudget({.memory_bytes = kGiB / 4}), kGiB / 8);
}

}  // namespace
}  // namespace shardprep
