#include "service/progress_line.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "service/cli_console.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kMiB = int64_t{1} << 20;

ProgressState At(int64_t done_mib, int64_t total_mib, const std::string& note = "") {
  return {.done_bytes = done_mib * kMiB, .total_bytes = total_mib * kMiB, .note = note};
}

absl::Duration Ms(int64_t milliseconds) { return absl::Milliseconds(milliseconds); }

TEST(ExactSize, SaysBytesAndGibibytes) {
  EXPECT_EQ(ExactSize(103'428'390'912), "103,428,390,912 B  96.325 GiB");
  EXPECT_EQ(ExactSize(0), "0 B  0.000 GiB");
}

TEST(ClockText, DropsPartsOfSecondsAndKnowsHours) {
  EXPECT_EQ(ClockText(absl::Milliseconds(7900)), "0:07");
  EXPECT_EQ(ClockText(absl::Seconds(723)), "12:03");
  EXPECT_EQ(ClockText(absl::Seconds(3723)), "1:02:03");
  EXPECT_EQ(ClockText(absl::Seconds(-5)), "0:00");
}

TEST(FormatProgress, HoldsEverythingWhereThereIsRoom) {
  EXPECT_EQ(FormatProgress("prepare", At(256, 1024, "rank tasks 3/8"), 128.0 * kMiB, false, 200),
            "prepare   25.0%  256.000 MiB of 1.000 GiB  128.0 MiB/s  ETA 0:06  rank tasks 3/8");
  const std::string bar = FormatProgress("prepare", At(256, 1024), 0, true, 200);
  EXPECT_THAT(bar, StartsWith("prepare [##########------------------------------]"));
}

TEST(FormatProgress, NeverExceedsTheWidthAndKeepsThePercentage) {
  for (int columns = 1; columns <= 140; ++columns) {
    const std::string line =
        FormatProgress("prepare", At(700, 1024, "rank tasks 31/64"), 4e9, true, columns);
    EXPECT_LE(static_cast<int>(line.size()), columns);
    if (columns >= 20) {
      EXPECT_THAT(line, HasSubstr("68.3%"));
    }
    if (columns >= 30) {
      EXPECT_THAT(line, HasSubstr("[######"));
    }
    if (columns >= 100) {
      EXPECT_THAT(line, HasSubstr("rank tasks 31/64"));
    }
  }
}

TEST(FormatProgress, OneHundredPercentMeansAllOfIt) {
  const ProgressState almost{.done_bytes = 999'999, .total_bytes = 1'000'000, .note = ""};
  EXPECT_THAT(FormatProgress("p", almost, 0, false, 80), HasSubstr(" 99.9%"));
  EXPECT_THAT(FormatProgress("p", At(8, 8), 0, false, 80), HasSubstr("100.0%"));
}

TEST(FormatProgress, AnUnknownTotalHasNoBarAndNoShare) {
  const std::string line = FormatProgress("p", At(3, 0, "starting"), 0, true, 80);
  EXPECT_EQ(line, "p  3.000 MiB  starting");
}

TEST(ProgressMeter, OnATerminalTheLineIsDrawnOverItselfTenTimesASecond) {
  ProgressMeter meter("p", true);
  const std::string first = meter.Update(At(0, 100), Ms(0), 80);
  EXPECT_THAT(first, MatchesRegex("\rp .*\x1b\\[K"));
  EXPECT_EQ(meter.Update(At(10, 100), Ms(50), 80), "");
  EXPECT_THAT(meter.Update(At(20, 100), Ms(100), 80), HasSubstr("20.0%"));
  EXPECT_EQ(meter.Update(At(20, 100), Ms(250), 80), "") << "nothing new, nothing drawn";
  EXPECT_THAT(meter.Finish(At(100, 100), Ms(260), 80), MatchesRegex("\r.*100.0%.*\x1b\\[K\n"));
}

TEST(ProgressMeter, LinesAboveTheBarLeaveItWhole) {
  ProgressMeter meter("p", true);
  EXPECT_EQ(meter.Above("x\n"), "x\n") << "no bar yet";
  const std::string bar = meter.Update(At(5, 10), Ms(0), 80);
  EXPECT_EQ(meter.Above("x\n"), absl::StrCat("\r\x1b[Kx\n", bar.substr(1)));
  meter.Finish(At(10, 10), Ms(500), 80);
  EXPECT_EQ(meter.Above("x\n"), "x\n") << "the bar has ended";
}

TEST(ProgressMeter, ElsewhereALineComesEveryFivePercentOrTwoSeconds) {
  ProgressMeter meter("p", false);
  EXPECT_NE(meter.Update(At(0, 100), Ms(0), 80), "");
  EXPECT_EQ(meter.Update(At(4, 100), Ms(300), 80), "") << "neither";
  EXPECT_NE(meter.Update(At(5, 100), Ms(400), 80), "") << "5 %";
  EXPECT_EQ(meter.Update(At(10, 100), Ms(500), 80), "") << "5 %, but within 200 ms";
  EXPECT_NE(meter.Update(At(10, 100), Ms(600), 80), "");
  EXPECT_EQ(meter.Update(At(11, 100), Ms(2500), 80), "");
  EXPECT_NE(meter.Update(At(11, 100), Ms(2600), 80), "") << "2 s";
}

TEST(ProgressMeter, LongRunsPrintLessOften) {
  ProgressMeter meter("p", false);
  meter.Update(At(0, 1'000'000), Ms(0), 80);
  int lines = 0;
  for (int second = 1; second <= 3600; ++second) {
    if (!meter.Update(At(second, 1'000'000), absl::Seconds(second), 80).empty()) ++lines;
  }
  EXPECT_GT(lines, 60);
  EXPECT_LT(lines, 120);
}

TEST(ProgressMeter, TheRateIsThatOfTheLastSeconds) {
  ProgressMeter meter("p", true);
  // 1 MiB/s for a minute, then 100 MiB/s for twenty seconds.
  int64_t done = 0;
  std::string line;
  for (int second = 0; second < 80; ++second) {
    done += second < 60 ? 1 : 100;
    line = meter.Update(At(done, 100'000), absl::Seconds(second), 200);
  }
  EXPECT_THAT(line, HasSubstr("100.0 MiB/s"));
}

TEST(ProgressMeter, BytesThatWereThereAtTheStartAreNoRate) {
  ProgressMeter meter("p", true);
  meter.Update(At(50'000, 100'000), Ms(0), 200);
  EXPECT_THAT(meter.Update(At(50'010, 100'000), absl::Seconds(1), 200), HasSubstr("10.0 MiB/s"));
}

TEST(ProgressMeter, BytesGivenBackNeverMakeANegativeRate) {
  ProgressMeter meter("p", true);
  meter.Update(At(500, 1000), Ms(0), 200);
  meter.Update(At(600, 1000), Ms(1000), 200);
  const std::string back = meter.Update(At(300, 1000), Ms(2000), 200);
  EXPECT_THAT(back, HasSubstr("30.0%"));
  EXPECT_THAT(back, Not(HasSubstr("MiB/s")));
  EXPECT_THAT(meter.Update(At(350, 1000), Ms(3000), 200), HasSubstr("50.0 MiB/s"));
}

TEST(ProgressMeter, TheEndIsNotPrintedTwice) {
  ProgressMeter meter("p", false);
  meter.Update(At(0, 10), Ms(0), 80);
  EXPECT_NE(meter.Update(At(10, 10), Ms(600), 80), "");
  EXPECT_EQ(meter.Finish(At(10, 10), Ms(1400), 80), "");
  ProgressMeter other("p", false);
  other.Update(At(0, 10), Ms(0), 80);
  EXPECT_THAT(other.Finish(At(10, 10), Ms(100), 80), HasSubstr("100.0%"));
}

TEST(ProgressMeter, TheEndShowsTheRateOfTheWholeTime) {
  ProgressMeter meter("p", false);
  meter.Update(At(50, 250), Ms(0), 200);
  for (int64_t second = 1; second <= 20; ++second)
    meter.Update(At(50, 250), Ms(second * 1000), 200);
  EXPECT_THAT(meter.Finish(At(250, 250), Ms(20'000), 200), HasSubstr("10.0 MiB/s"));
}

TEST(LinesForPeople, LeavesOutInfoAndKeepsEverythingElse) {
  EXPECT_EQ(LinesForPeople("level=info ts=1 msg=a\nlevel=warning ts=2 msg=b\nbroken invariant\n"
                           "level=error ts=3\n"),
            "level=warning ts=2 msg=b\nbroken invariant\nlevel=error ts=3\n");
  EXPECT_EQ(LinesForPeople(""), "");
  EXPECT_EQ(LinesForPeople("level=info ts=1 component=worker msg=\"device chosen\" "
                           "device=cpu/avx2 reason=\"no GPU is used\"\n"),
            "worker: device=cpu/avx2 reason=\"no GPU is used\"\n");
}

}  // namespace
}  // namespace shardprep
