// What a fetching node states: expectations, ranks, versions. Input: any text; for versions three
// of them, separated by commas.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/fetch.h"

namespace shardprep {
namespace {

void CheckExpectations(const std::string& text) {
  const auto expectations = ParseExpectations(text);
  if (!expectations.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(expectations.status()), expectations.status().ToString());
    return;
  }
  const auto print = [](std::string* out, const Expectation& expectation) {
    absl::StrAppend(out, expectation.key, "=", expectation.value);
  };
  const std::string printed = absl::StrJoin(*expectations, ",", print);
  const auto again = ParseExpectations(printed);
  FUZZ_REQUIRE(again.ok() && again->size() == expectations->size(), printed);
  for (size_t i = 0; i < again->size(); ++i) {
    FUZZ_REQUIRE((*again)[i].key == (*expectations)[i].key, printed);
    FUZZ_REQUIRE((*again)[i].value == (*expectations)[i].value, printed);
    FUZZ_REQUIRE(!(*again)[i].value.empty(), printed);
    for (size_t j = 0; j < i; ++j) FUZZ_REQUIRE((*again)[i].key != (*again)[j].key, printed);
  }
}

void CheckRanks(const std::string& text) {
  const auto ranks = ParseRankList(text);
  if (!ranks.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(ranks.status()), ranks.status().ToString());
    return;
  }
  FUZZ_REQUIRE(!ranks->empty() && ranks->size() <= 65'536, text);
  FUZZ_REQUIRE(ranks->front() >= 0, text);
  for (size_t i = 1; i < ranks->size(); ++i) FUZZ_REQUIRE((*ranks)[i - 1] < (*ranks)[i], text);
  const auto again = ParseRankList(absl::StrJoin(*ranks, ","));
  FUZZ_REQUIRE(again.ok() && *again == *ranks, text);
}

int Sign(int value) { return (value > 0) - (value < 0); }

void CheckVersions(const std::string& text) {
  const std::vector<std::string> all = absl::StrSplit(text, ',');
  std::vector<std::string> versions;
  for (const std::string& one : all) {
    const auto itself = CompareVersions(one, one);
    if (itself.ok() && versions.size() < 8) versions.push_back(one);
    FUZZ_REQUIRE(!itself.ok() || *itself == 0, one);
    FUZZ_REQUIRE(CompareVersions(one, "0.1").ok() == itself.ok(), one);
  }
  const auto compare = [](const std::string& a, const std::string& b) {
    const auto result = CompareVersions(a, b);
    FUZZ_REQUIRE(result.ok(), absl::StrCat(a, " and ", b));
    return Sign(*result);
  };
  for (const std::string& a : versions) {
    for (const std::string& b : versions) {
      FUZZ_REQUIRE(compare(a, b) == -compare(b, a), absl::StrCat(a, " and ", b));
      for (const std::string& c : versions) {
        if (compare(a, b) > 0 || compare(b, c) > 0) continue;
        FUZZ_REQUIRE(compare(a, c) <= 0, absl::StrCat(a, ", ", b, ", ", c));
      }
    }
  }
}

}  // namespace

void FuzzOne(const std::string& input) {
  CheckExpectations(input);
  CheckRanks(input);
  CheckVersions(input);
}

}  // namespace shardprep
