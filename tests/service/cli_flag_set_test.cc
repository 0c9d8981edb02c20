#include "service/flag_set.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/status/status.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// One flag of each type, all with defaults that a test can tell from what it sets.
struct Example {
  Example() : flags({.command = "tool run", .summary = "Runs.", .example = "  tool run x --n 1"}) {
    flags.String("source", "DIR", "Where from.", &source, FlagSet::Presence::kRequired);
    flags.Int("threads", "N", "How many.", 1, 64, &threads);
    flags.Size("part-size", "How large.", &part_size);
    flags.Bool("include-mtp", "Also these.", &include_mtp);
    flags.Choice("profile", {"separated", "logical"}, "Which.", &profile);
    flags.Argument("URI", "What.", &uri);
  }

  FlagSet flags;
  std::string source;
  int64_t threads = 7;
  int64_t part_size = int64_t{2} << 30;
  bool include_mtp = false;
  std::string profile = "separated";
  std::string uri;
};

TEST(FlagSet, BothSpellingsSetTheSame) {
  const std::vector<std::vector<std::string>> lines = {
      {"u", "--source", "s", "--threads", "3", "--part-size", "64KiB", "--profile", "logical",
       "--include-mtp"},
      {"--include-mtp=true", "--profile=logical", "--part-size=65536", "--threads=3", "--source=s",
       "u"}};
  for (const std::vector<std::string>& line : lines) {
    Example example;
    const absl::Status status = example.flags.Parse(line);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(example.uri, "u");
    EXPECT_EQ(example.source, "s");
    EXPECT_EQ(example.threads, 3);
    EXPECT_EQ(example.part_size, 65536);
    EXPECT_EQ(example.profile, "logical");
    EXPECT_TRUE(example.include_mtp);
    EXPECT_TRUE(example.flags.IsSet("threads"));
  }
}

TEST(FlagSet, FlagsThatRepeatKeepEveryValue) {
  FlagSet flags({.command = "tool", .summary = "Runs.", .example = ""});
  std::vector<std::string> keys;
  flags.Strings("trust", "KEY", "Which.", &keys);
  ASSERT_TRUE(flags.Parse({"--trust", "a", "--trust=b"}).ok());
  EXPECT_THAT(keys, ElementsAre("a", "b"));
  EXPECT_THAT(std::string(flags.Parse({"--trust="}).message()), HasSubstr("--trust"));
  EXPECT_THAT(flags.Help(), HasSubstr("more than once"));
}

TEST(FlagSet, WhatIsNotGivenKeepsItsDefault) {
  Example example;
  ASSERT_TRUE(example.flags.Parse({"u", "--source=s"}).ok());
  EXPECT_EQ(example.threads, 7);
  EXPECT_EQ(example.part_size, int64_t{2} << 30);
  EXPECT_EQ(example.profile, "separated");
  EXPECT_FALSE(example.include_mtp);
  EXPECT_FALSE(example.flags.IsSet("threads"));
}

TEST(FlagSet, EverythingElseIsRefusedByName) {
  struct Case {
    std::vector<std::string> line;
    const char* message;
  };
  const std::vector<Case> cases = {
      {{"--source=s"}, "URI is missing"},
      {{"u"}, "--source DIR is missing"},
      {{"u", "--source=s", "v"}, "unexpected argument 'v'"},
      {{"u", "--source"}, "--source needs a value: --source DIR"},
      {{"u", "--source", "--threads", "3"}, "--source needs a value"},
      {{"u", "--source="}, "--source: ''"},
      {{"u", "--source=s", "--source=t"}, "--source is given twice"},
      {{"u", "--source=s", "--include-mtp", "--include-mtp=false"}, "--include-mtp is given twice"},
      {{"u", "--source=s", "--include-mtp=yes"}, "--include-mtp: 'yes', want true or false"},
      {{"u", "--source=s", "--include-mtp", "true"}, "unexpected argument 'true'"},
      {{"u", "--source=s", "--threads=0"}, "--threads: '0', want a number from 1 to 64"},
      {{"u", "--source=s", "--threads", "65"}, "--threads: '65'"},
      {{"u", "--source=s", "--threads", "-1"}, "--threads: '-1'"},
      {{"u", "--source=s", "--threads=3x"}, "--threads: '3x'"},
      {{"u", "--source=s", "--threads=99999999999999999999"}, "want a number from 1 to 64"},
      {{"u", "--source=s", "--part-size=0"}, "--part-size: '0'"},
      {{"u", "--source=s", "--part-size=2GB"}, "--part-size: '2GB', want bytes"},
      {{"u", "--source=s", "--profile=logica"}, "want one of separated, logical"},
      {{"u", "--source=s", "--thread=3"}, "unknown flag --thread; did you mean --threads?"},
      {{"u", "--source=s", "--part_size=3"}, "did you mean --part-size?"},
      {{"u", "--source=s", "--zzzzzz"}, "unknown flag --zzzzzz"},
      {{"u", "--source=s", "-x"}, "unknown flag -x; flags begin with two dashes"},
      {{"u", "--source=s", "---threads=3"}, "unknown flag ---threads"},
      {{"u", "--=3"}, "unknown flag --"},
      {{""}, "URI is empty"},
  };
  for (const Case& c : cases) {
    Example example;
    const absl::Status status = example.flags.Parse(c.line);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
}

TEST(FlagSet, AValueOfDashesNeedsTheEqualsSign) {
  Example example;
  ASSERT_TRUE(example.flags.Parse({"u", "--source=--threads"}).ok());
  EXPECT_EQ(example.source, "--threads");
}

TEST(FlagSet, TwoDashesEndTheFlags) {
  Example example;
  ASSERT_TRUE(example.flags.Parse({"--source=s", "--", "--threads=3"}).ok());
  EXPECT_EQ(example.uri, "--threads=3");
  EXPECT_EQ(example.threads, 7);
}

TEST(FlagSet, ASingleDashIsAnArgument) {
  Example example;
  ASSERT_TRUE(example.flags.Parse({"--source=s", "-"}).ok());
  EXPECT_EQ(example.uri, "-");
}

// A flag that stands for two others, one of them required.
struct Alternatives {
  Alternatives() : flags({.command = "tool", .summary = "Runs.", .example = ""}) {
    flags.String("file", "FILE", "All at once.", &file);
    flags.String("place", "DIR", "Where.", &place, FlagSet::Presence::kRequired);
    flags.Bool("deep", "How.", &deep);
    flags.Bool("other", "Else.", &other);
    flags.Instead("file", {"place", "deep"});
  }

  FlagSet flags;
  std::string file;
  std::string place;
  bool deep = false;
  bool other = false;
};

TEST(FlagSet, AFlagStandsForOthersAndNotBesideThem) {
  EXPECT_TRUE(Alternatives().flags.Parse({"--file=f", "--other"}).ok());
  EXPECT_TRUE(Alternatives().flags.Parse({"--place=p", "--deep", "--other"}).ok());
  const absl::Status missing = Alternatives().flags.Parse({"--deep"});
  EXPECT_EQ(std::string(missing.message()), "--place DIR is missing");
  const absl::Status beside =
      Alternatives().flags.Parse({"--deep=false", "--file=f", "--other", "--place=p"});
  EXPECT_EQ(beside.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(beside.message()),
            "--file is given, and beside it --place, --deep, which it stands for");
  EXPECT_THAT(Alternatives().flags.Help(), HasSubstr("Where. Required without --file."));
}

TEST(FlagSet, HelpWinsOverWhatIsMissing) {
  for (const char* word : {"--help", "-h"}) {
    Example example;
    ASSERT_TRUE(example.flags.Parse({word}).ok());
    EXPECT_TRUE(example.flags.help_wanted());
  }
  Example example;
  ASSERT_TRUE(example.flags.Parse({"u", "--source=s"}).ok());
  EXPECT_FALSE(example.flags.help_wanted());
}

TEST(FlagSet, HelpShowsEveryFlagWithItsDefault) {
  const Example example;
  const std::string help = example.flags.Help();
  EXPECT_THAT(help, HasSubstr("usage: tool run URI --source DIR [flags]\n"));
  EXPECT_THAT(help, HasSubstr("--source DIR"));
  EXPECT_THAT(help, HasSubstr("Where from. Required."));
  EXPECT_THAT(help, HasSubstr("How many. Default: 7."));
  EXPECT_THAT(help, HasSubstr("Default: 2GiB."));
  EXPECT_THAT(help, HasSubstr("One of separated, logical. Default: separated."));
  EXPECT_THAT(help, HasSubstr("Example:\n  tool run x --n 1\n"));
  EXPECT_THAT(help, Not(HasSubstr("--include-mtp NAME")));
}

TEST(FlagSet, AValueWithItsOwnGrammarIsRefusedUnderTheFlagsName) {
  std::string taken;
  FlagSet flags({.command = "tool", .summary = "", .example = ""});
  flags.Value("rank", "RANKS", "Which.", [&taken](const std::string& text) {
    if (text == "x") return absl::OutOfRangeError("'x' is no rank");
    taken = text;
    return absl::OkStatus();
  });
  const absl::Status status = flags.Parse({"--rank", "x"});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), "--rank: 'x' is no rank");
  ASSERT_TRUE(flags.Parse({"--rank=0-7"}).ok());
  EXPECT_EQ(taken, "0-7");
}

TEST(FlagSet, AFlagSetParsesAgain) {
  Example example;
  ASSERT_TRUE(example.flags.Parse({"u", "--source=s"}).ok());
  ASSERT_TRUE(example.flags.Parse({"v", "--source=t"}).ok());
  EXPECT_EQ(example.source, "t");
}

TEST(NearestWord, FindsMisspellingsAndLeavesStrangers) {
  const std::vector<std::string> words = {"prepare", "plan", "list", "watch", "verify", "fetch"};
  struct Case {
    const char* word;
    const char* nearest;
  };
  for (const Case& c :
       {Case{"prepair", "prepare"}, Case{"pln", "plan"}, Case{"lst", "list"},
        Case{"fetsch", "fetch"}, Case{"ver", "verify"}, Case{"zebra", ""}, Case{"", ""}}) {
    EXPECT_EQ(NearestWord(c.word, words), c.nearest) << c.word;
  }
}

TEST(WrapText, BreaksAtSpacesAndKeepsLineFeeds) {
  EXPECT_EQ(WrapText("aaaa bbbb cccc dddd eeee", 4, 24), "aaaa bbbb cccc dddd\n    eeee");
  EXPECT_EQ(WrapText("one\ntwo", 2, 80), "one\n  two");
  const std::string longer(50, 'x');
  EXPECT_EQ(WrapText(longer + " y", 0, 30), longer + "\ny");
}

}  // namespace
}  // namespace shardprep
