#include "workers/canonical_json.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace shardprep {
namespace {

using nlohmann::json;

std::string Canonical(const json& value) {
  const auto text = CanonicalJson(value);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

TEST(CanonicalJson, SortsNamesByUtf16CodeUnits) {
  // RFC 8785, 3.2.3. By code points, U+FB33 would come before the emoji.
  const json value = json::parse(R"({
    "\u20ac": "Euro Sign",
    "\r": "Carriage Return",
    "\ufb33": "Hebrew Letter Dalet With Dagesh",
    "1": "One",
    "\ud83d\ude00": "Emoji: Grinning Face",
    "\u0080": "Control",
    "\u00f6": "Latin Small Letter O With Diaeresis"
  })");
  EXPECT_EQ(Canonical(value),
            "{\"\\r\":\"Carriage Return\","
            "\"1\":\"One\","
            "\"\xc2\x80\":\"Control\","
            "\"\xc3\xb6\":\"Latin Small Letter O With Diaeresis\","
            "\"\xe2\x82\xac\":\"Euro Sign\","
            "\"\xf0\x9f\x98\x80\":\"Emoji: Grinning Face\","
            "\"\xef\xac\xb3\":\"Hebrew Letter Dalet With Dagesh\"}");
}

TEST(CanonicalJson, EscapesOnlyWhatMustBe) {
  // The string and the literals of RFC 8785, 3.2.2 (its numbers are not for us).
  const json value = json::parse(
      R"({"string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]})");
  EXPECT_EQ(Canonical(value),
            "{\"literals\":[null,true,false],"
            "\"string\":\"\xe2\x82\xac$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\"}");
}

TEST(CanonicalJson, EscapesEveryControlCharacter) {
  const std::string short_forms = "\b\t\n\f\r";
  const std::string letters = "btnfr";
  for (int c = 0; c < 0x20; ++c) {
    const auto character = static_cast<char>(c);
    std::string want;
    if (const size_t at = short_forms.find(character); at != std::string::npos) {
      want = std::string("\"\\") + letters[at] + "\"";
    } else {
      const std::string digits = "0123456789abcdef";
      want = std::string("\"\\u00") + digits[static_cast<size_t>(c) >> 4] +
             digits[static_cast<size_t>(c) & 15] + "\"";
    }
    EXPECT_EQ(Canonical(json(std::string(1, character))), want) << c;
  }
  EXPECT_EQ(Canonical(json("\x7f")), "\"\x7f\"");
}

TEST(CanonicalJson, DoesNotDependOnTheOrderOfInsertion) {
  json a, b;
  a["width"] = "384";
  a["arch"] = "gfx950";
  a["list"] = json::array({"1", json::object()});
  b["list"] = json::array({"1", json::object()});
  b["arch"] = "gfx950";
  b["width"] = "384";
  EXPECT_EQ(Canonical(a), R"({"arch":"gfx950","list":["1",{}],"width":"384"})");
  EXPECT_EQ(Canonical(a), Canonical(b));
  EXPECT_EQ(Canonical(json::parse(Canonical(a))), Canonical(a));
}

TEST(CanonicalJson, ShortNamesComeBeforeLongerOnes) {
  EXPECT_EQ(Canonical(json{{"ab", "2"}, {"a", "1"}, {"", "0"}}), R"({"":"0","a":"1","ab":"2"})");
}

TEST(CanonicalJson, RefusesNumbersByPlace) {
  for (const json& number : {json(1), json(1u), json(1.5)}) {
    const json value = {{"a", {{"b/c", json::array({"x", number})}}}};
    const auto status = CanonicalJson(value).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("/a/b~1c/1"));
  }
}

TEST(CanonicalJson, RefusesTextThatIsNotUtf8) {
  const std::string kBad[] = {
      "\x80",              // stray continuation
      "\xc3",              // cut off
      "\xe2\x82",          // cut off
      "\xc0\x80",          // overlong NUL
      "\xc1\xbf",          // overlong
      "\xe0\x80\x80",      // overlong
      "\xf0\x80\x80\x80",  // overlong
      "\xed\xa0\x80",      // surrogate U+D800
      "\xed\xbf\xbf",      // surrogate U+DFFF
      "\xf4\x90\x80\x80",  // above U+10FFFF
      "\xf5\x80\x80\x80",
      "\xff",
      "a\xc3(",  // continuation missing
  };
  for (const std::string& bad : kBad) {
    EXPECT_EQ(CanonicalJson(json(bad)).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(CanonicalJson(json{{bad, "x"}}).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(CanonicalJson, TakesTheEdgesOfUtf8) {
  for (const std::string good :
       {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(Canonical(json(good)), "\"" + good + "\"");
  }
}

TEST(CanonicalJson, BoundsTheNesting) {
  json value = "x";
  for (int i = 0; i < 64; ++i) value = json::array({value});
  EXPECT_EQ(Canonical(value), std::string(64, '[') + "\"x\"" + std::string(64, ']'));
  EXPECT_EQ(CanonicalJson(json::array({value})).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace shardprep
