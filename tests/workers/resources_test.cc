#include "workers/resources.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
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

// A machine of two memory nodes with a device at each, and one at none.
class NodesTest : public ::testing::Test {
 protected:
  NodesTest() {
    Plant("bus/pci/devices/0000:05:00.0/numa_node", "0\n");
    Plant("bus/pci/devices/0000:c1:00.0/numa_node", "1\n");
    Plant("bus/pci/devices/0000:d1:00.0/numa_node", "-1\n");
    Plant("devices/system/node/node0/cpulist", "0-3,8-11\n");
    Plant("devices/system/node/node1/cpulist", "4-7,12\n");
  }

  void Plant(const std::string& file, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(root()) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  std::string root() const { return directory_ / "sys"; }

  const Processors all_ = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  TempDir directory_;
};

TEST_F(NodesTest, ProcessorsNearADeviceAreThoseOfItsNodeThatMayBeUsed) {
  EXPECT_EQ(ProcessorsNear("0000:05:00.0", all_, root()), (Processors{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(ProcessorsNear("0000:C1:00.0", all_, root()), (Processors{4, 5, 6, 7, 12}));
  EXPECT_EQ(ProcessorsNear("0000:c1:00.0", {3, 5, 12, 40}, root()), (Processors{5, 12}));
  EXPECT_EQ(ProcessorsNear("0000:c1:00.0", {0, 1}, root()), Processors{}) << "bound elsewhere";
}

TEST_F(NodesTest, WhatIsNotKnownBindsNothing) {
  EXPECT_EQ(ProcessorsNear("0000:d1:00.0", all_, root()), Processors{});
  EXPECT_EQ(ProcessorsNear("0000:e1:00.0", all_, root()), Processors{});
  EXPECT_EQ(ProcessorsNear("", all_, root()), Processors{});
  for (const char* text : {"", "x", "4-", "-7", "4-7-9", "7,,8", "0-99999999999"}) {
    Plant("devices/system/node/node1/cpulist", text);
    EXPECT_EQ(ProcessorsNear("0000:c1:00.0", all_, root()), Processors{}) << text;
  }
  std::filesystem::remove_all(root() + "/devices");
  EXPECT_EQ(ProcessorsNear("0000:05:00.0", all_, root()), Processors{});
}

TEST(Resources, AThreadRunsWhereItIsBound) {
  std::thread([] {
    const Processors own = OwnProcessors();
    ASSERT_FALSE(own.empty());
    EXPECT_FALSE(RunOnlyOn({}));
    EXPECT_EQ(OwnProcessors(), own);
    ASSERT_TRUE(RunOnlyOn({own.back()}));
    EXPECT_EQ(OwnProcessors(), Processors{own.back()});
    EXPECT_EQ(DefaultThreads(), 1) << "threads beyond would share the processor";
    std::thread([&] { EXPECT_EQ(OwnProcessors(), Processors{own.back()}); }).join();
  }).join();
}

// What a program that started over finds; run by the next test in a process of its own.
TEST(Resources, DISABLED_AfterStartingOver) {
  const char* const before = std::getenv("SHARDPREP_TEST_PROCESS");
  const char* const processor = std::getenv("SHARDPREP_TEST_PROCESSOR");
  ASSERT_TRUE(before != nullptr && processor != nullptr);
  EXPECT_EQ(std::to_string(::getpid()), before);
  EXPECT_EQ(OwnProcessors(), Processors{std::stoi(processor)});
  EXPECT_EQ(DefaultThreads(), 1);
  std::vector<char> byte(1);
  EXPECT_EQ(::read(STDIN_FILENO, byte.data(), 1), 1) << "open files stay open";
  EXPECT_EQ(byte[0], 'x');
}

TEST(Resources, AProgramStartsOverAsTheSameProcessOnItsProcessors) {
  const int processor = OwnProcessors().back();
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ASSERT_EQ(::write(pipe[1], "x", 1), 1);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::dup2(pipe[0], STDIN_FILENO);
    ::setenv("SHARDPREP_TEST_PROCESS", std::to_string(::getpid()).c_str(), 1);
    ::setenv("SHARDPREP_TEST_PROCESSOR", std::to_string(processor).c_str(), 1);
    std::string name = "started over", filter = "--gtest_filter=*DISABLED_AfterStartingOver",
                disabled = "--gtest_also_run_disabled_tests";
    char* const arguments[] = {name.data(), filter.data(), disabled.data(), nullptr};
    StartOverOn({processor}, arguments).IgnoreError();
    ::_exit(99);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(Resources, WhatCannotBeBoundToDoesNotStartOver) {
  const Processors own = OwnProcessors();
  char* const arguments[] = {nullptr};
  const absl::Status status = StartOverOn({}, arguments);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("sched_setaffinity"));
  EXPECT_EQ(OwnProcessors(), own);
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
