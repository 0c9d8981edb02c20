#include "workers/config_file.h"

#include <fstream>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

TEST(ConfigFile, LinesArePairsInOneSpelling) {
  const auto entries = ParseConfig(
      "# comment\n\n  listen = 0.0.0.0:7070,unix:/run/s\nmemory-budget=2GiB\r\n"
      "  # indented comment\nsign_key =\nworker-names = a # b\nlast = x",
      "c");
  ASSERT_TRUE(entries.ok()) << entries.status();
  const std::tuple<std::string, std::string, int> want[] = {
      {"listen", "0.0.0.0:7070,unix:/run/s", 3},
      {"memory_budget", "2GiB", 4},
      {"sign_key", "", 6},
      {"worker_names", "a # b", 7},
      {"last", "x", 8}};
  ASSERT_EQ(entries->size(), std::size(want));
  for (size_t i = 0; i < std::size(want); ++i) {
    const ConfigEntry& entry = (*entries)[i];
    EXPECT_EQ(std::make_tuple(entry.name, entry.value, entry.line), want[i]);
  }
}

TEST(ConfigFile, FaultsNameFileAndLine) {
  const std::pair<std::string, std::string> faults[] = {
      {"\nlisten", "c:2: want name = value"},
      {"--listen=x", "c:1: want name = value, the name without dashes"},
      {"= x", "c:1: want name = value"},
      {"li sten = x", "c:1: want name = value"},
      {"a_b = 1\n#\na-b = 2", "c:3: a_b stands in line 1 too"},
      {std::string("a = 1\0", 6) + "2", "c:1: holds a NUL"}};
  for (const auto& [text, want] : faults) {
    const absl::Status status = ParseConfig(text, "c").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(want));
  }
}

TEST(ConfigFile, UnreadableAndLargeFilesAreRefused) {
  const TempDir directory;
  EXPECT_EQ(ReadConfig(directory / "absent").status().code(),
            absl::StatusCode::kFailedPrecondition);
  std::ofstream(directory / "large") << std::string((64 << 10) + 1, '#');
  EXPECT_THAT(std::string(ReadConfig(directory / "large").status().message()),
              HasSubstr("more than 65536 bytes"));
  std::ofstream(directory / "good") << "a = 1\n";
  EXPECT_EQ(ReadConfig(directory / "good")->size(), 1U);
}

}  // namespace
}  // namespace shardprep
