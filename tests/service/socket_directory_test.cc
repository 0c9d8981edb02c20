#include "service/socket_directory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temp_dir.h"

namespace shardprep {
namespace {

std::string OnlyEntryOf(const std::string& directory) {
  std::string only;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    EXPECT_EQ(only, "");
    only = entry.path();
  }
  return only;
}

TEST(SocketDirectory, IsTheOwnersAloneAndGoesWithItsSocket) {
  const TempDir dir;
  auto made = SocketDirectory::Make(dir.path());
  ASSERT_TRUE(made.ok()) << made.status();
  const std::filesystem::path socket = (*made)->socket_path();
  EXPECT_EQ(std::filesystem::status(socket.parent_path()).permissions(),
            std::filesystem::perms::owner_all);
  std::ofstream(socket) << "as if";
  made->reset();
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(SocketDirectory, WhatAKilledProcessLeftIsRemovedByTheNextAndWhatALiveOneHasStays) {
  const TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto left = SocketDirectory::Make(dir.path());
    std::ofstream((*left)->socket_path()) << "as if";
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const std::string left = OnlyEntryOf(dir.path());
  EXPECT_TRUE(std::filesystem::exists(left + "/socket"));

  const auto live = SocketDirectory::Make(dir.path());
  ASSERT_TRUE(live.ok());
  EXPECT_FALSE(std::filesystem::exists(left));
  const auto another = SocketDirectory::Make(dir.path());
  EXPECT_TRUE(std::filesystem::exists(std::filesystem::path((*live)->socket_path()).parent_path() /
                                      "lock"));
}

TEST(SocketDirectory, DirectoriesWithoutALockAreRemovedWhenOldAndForeignOnesNever) {
  const TempDir dir;
  for (const char* name : {"shardprep-run-newone", "shardprep-run-oldone", "shardprep-other"}) {
    std::filesystem::create_directory(dir / name);
  }
  std::filesystem::create_directory_symlink("/", dir / "shardprep-run-link00");
  std::filesystem::last_write_time(
      dir / "shardprep-run-oldone",
      std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  ASSERT_TRUE(SocketDirectory::Make(dir.path()).ok());
  EXPECT_TRUE(std::filesystem::exists(dir / "shardprep-run-newone"));
  EXPECT_FALSE(std::filesystem::exists(dir / "shardprep-run-oldone"));
  EXPECT_TRUE(std::filesystem::exists(dir / "shardprep-other"));
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "shardprep-run-link00"));
}

TEST(SocketDirectory, ManyMakersAtOnceEachGetTheirOwn) {
  const TempDir dir;
  std::vector<std::thread> makers;
  makers.reserve(4);
  std::atomic<int> kept{0};
  for (int i = 0; i < 4; ++i) {
    makers.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) {
        const auto mine = SocketDirectory::Make(dir.path());
        if (!mine.ok()) continue;
        std::ofstream((*mine)->socket_path()) << turn;
        if (std::filesystem::exists((*mine)->socket_path())) ++kept;
      }
    });
  }
  for (std::thread& maker : makers) maker.join();
  EXPECT_EQ(kept, 200);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace
}  // namespace shardprep
