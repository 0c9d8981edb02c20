#include "service/cli_console.h"

#include <stdlib.h>
#include <unistd.h>

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/status_macros.h"

namespace shardprep {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Standard error goes to a file while it lives.
class StderrToFile {
 public:
  StderrToFile() : path_(testing::TempDir() + "/cli-console-XXXXXX"), saved_(dup(STDERR_FILENO)) {
    fd_ = mkstemp(path_.data());
    SP_CHECK(fd_ >= 0 && saved_ >= 0 && dup2(fd_, STDERR_FILENO) >= 0);
    unlink(path_.c_str());
  }
  ~StderrToFile() {
    dup2(saved_, STDERR_FILENO);
    close(saved_);
    close(fd_);
  }

  std::string Text() const {
    std::string text(65536, '\0');
    const ssize_t got = pread(fd_, text.data(), text.size(), 0);
    SP_CHECK(got >= 0);
    text.resize(static_cast<size_t>(got));
    return text;
  }

 private:
  std::string path_;
  int saved_;
  int fd_ = -1;
};

void WriteToStderr(const std::string& text) {
  SP_CHECK(write(STDERR_FILENO, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

TEST(Console, WithoutCapturingLogsGoTheirWay) {
  const StderrToFile file;
  Console console("p", /*capture_logs=*/false);
  WriteToStderr("level=info msg=a\n");
  console.Line("line");
  EXPECT_EQ(file.Text(), "level=info msg=a\nline\n");
}

TEST(Console, CapturedLogsArePassedOnInWholeLinesWithoutInfo) {
  const StderrToFile file;
  {
    Console console("p", /*capture_logs=*/true);
    WriteToStderr("level=info msg=a\nlevel=warning msg=b\nlevel=er");
    EXPECT_EQ(file.Text(), "");
    console.PollLogs();
    EXPECT_EQ(file.Text(), "level=warning msg=b\n");
    WriteToStderr("ror msg=c\n");
    console.Line("line");
    EXPECT_EQ(file.Text(), "level=warning msg=b\nlevel=error msg=c\nline\n");
    WriteToStderr("the last, without an end");
  }
  EXPECT_THAT(file.Text(), EndsWith("the last, without an end\n"));
  WriteToStderr("direct again\n");
  EXPECT_THAT(file.Text(), EndsWith("direct again\n"));
}

TEST(Console, DroppedLogsAreThoseFromThenOn) {
  const StderrToFile file;
  {
    Console console("p", /*capture_logs=*/true);
    WriteToStderr("level=warning msg=before\n");
    console.DropLogs();
    WriteToStderr("level=warning msg=after\n");
    console.Line("line");
  }
  EXPECT_EQ(file.Text(), "level=warning msg=before\nline\n");
}

TEST(Console, ProgressIsShownBetweenLinesAndAtTheEnd) {
  const StderrToFile file;
  Console console("p", /*capture_logs=*/true);
  console.EndProgress();
  EXPECT_EQ(file.Text(), "") << "nothing was shown, so nothing ends";
  console.Progress({.done_bytes = 0, .total_bytes = 1000, .note = ""});
  console.Line("between");
  console.Progress({.done_bytes = 1000, .total_bytes = 1000, .note = ""});
  console.EndProgress();
  console.EndProgress();
  const std::string text = file.Text();
  EXPECT_THAT(text, HasSubstr("0.0%  0 B of 1000 B\nbetween\n"));
  EXPECT_THAT(text, HasSubstr("100.0%"));
  EXPECT_EQ(text.find("100.0%"), text.rfind("100.0%")) << "the end stands there once";
  EXPECT_THAT(text, Not(HasSubstr("\x1b"))) << "a file is no terminal";
}

TEST(ConsoleDeathTest, AnAbortPrintsWhatWasCaptured) {
  EXPECT_DEATH(
      {
        const Console console("p", /*capture_logs=*/true);
        WriteToStderr("level=info msg=context\n");
        SP_CHECK(2 + 2 == 5);
      },
      "level=info msg=context\n.*broken invariant: 2 \\+ 2 == 5");
}

}  // namespace
}  // namespace shardprep
