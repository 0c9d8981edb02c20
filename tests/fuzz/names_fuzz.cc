// URIs, object keys and object names. Input: any text, taken as each of them.
#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/object_names.h"
#include "workers/open_store.h"

namespace shardprep {
namespace {

void CheckUri(const std::string& uri, const std::string& base) {
  const auto normal = NormalizeUri(uri, base);
  if (!normal.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(normal.status()), normal.status().ToString());
    return;
  }
  const auto again = NormalizeUri(*normal);
  FUZZ_REQUIRE(again.ok() && *again == *normal, *normal);
  FUZZ_REQUIRE(IsSameOrInside(*normal, *normal), *normal);
  FUZZ_REQUIRE(!IsSameOrInside(*normal, *normal + "x"), *normal);
  FUZZ_REQUIRE(normal->find('\0') == std::string::npos, *normal);
  const bool is_s3 = absl::StartsWith(*normal, "s3://");
  FUZZ_REQUIRE(is_s3 || normal->front() == '/', *normal);
  FUZZ_REQUIRE(normal->size() == 1 || normal->back() != '/', *normal);
  if (*normal == "/") return;
  const std::vector<std::string> segments =
      absl::StrSplit(is_s3 ? normal->substr(5) : normal->substr(1), '/');
  for (const std::string& segment : segments) {
    FUZZ_REQUIRE(!segment.empty() && segment != "." && segment != "..", *normal);
  }
  FUZZ_REQUIRE(IsSameOrInside(absl::StrCat(*normal, "/below"), *normal), *normal);
}

void CheckKey(const std::string& key) {
  const bool valid = ValidateObjectKey(key).ok();
  FUZZ_REQUIRE(ValidateObjectPrefix(key + "/").ok() == valid, key);
  const ObjectName name = ParseObjectName(key);
  if (!std::holds_alternative<std::monostate>(name)) {
    FUZZ_REQUIRE(valid, key);
    FUZZ_REQUIRE(ObjectKey(name) == key, key);
    FUZZ_REQUIRE(ParseObjectName(ObjectKey(name)) == name, key);
  }
  const auto copied = CopiedFileKey(key);
  if (!copied.ok()) return;
  FUZZ_REQUIRE(valid && *copied == key, key);
  FUZZ_REQUIRE(std::holds_alternative<std::monostate>(name), key);
  FUZZ_REQUIRE(!absl::StartsWith(key + "/", kWorkPrefix), key);
}

// A name made of the input's bytes, whatever they are.
ObjectName MakeName(ChoiceReader& choices) {
  const auto number = [&choices] {
    int64_t value = 0;
    for (int digits = choices.Below(10); digits > 0; --digits) {
      value = value * 10 + choices.Below(10);
    }
    return value;
  };
  const auto text = [&choices](const std::string& alphabet, int size) {
    std::string made;
    while (static_cast<int>(made.size()) < size) {
      made += alphabet[static_cast<size_t>(choices.Below(static_cast<int>(alphabet.size())))];
    }
    return made;
  };
  const std::string hex = "0123456789abcdef";
  const std::string letters = "abcdefghijklmnopqrstuvwxyz0123456789-";
  switch (choices.Below(12)) {
    case 0:
      return RankPart{number(), number()};
    case 1:
      return ReplicatedPart{number()};
    case 2:
      return RankManifest{number()};
    case 3:
      return ReplicatedManifest{};
    case 4:
      return ExpertMap{number()};
    case 5:
      return ManifestName{};
    case 6:
      return RankJournal{text(hex, 64), number(), number()};
    case 7:
      return ReplicatedJournal{text(hex, 64), number()};
    case 8:
      return CommitIntent{text(hex, 64)};
    case 9:
      return TemporaryFile{text(letters, 1 + choices.Below(128))};
    case 10:
      return ManifestSignature{};
    default:
      return Probe{text(letters, 1 + choices.Below(128))};
  }
}

}  // namespace

void FuzzOne(const std::string& input) {
  CheckUri(input, "");
  CheckUri(input, "/base/directory");
  CheckUri("file://" + input, "");
  CheckUri("s3://bucket/" + input, "");
  CheckKey(input);
  ChoiceReader choices(input);
  const ObjectName name = MakeName(choices);
  const std::string key = ObjectKey(name);
  FUZZ_REQUIRE(ParseObjectName(key) == name, key);
  FUZZ_REQUIRE(ValidateObjectKey(key).ok(), key);
}

}  // namespace shardprep
