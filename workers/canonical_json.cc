#include "workers/canonical_json.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int kMaxDepth = 64;

// Reads one code point of `text` at `*position` and moves past it. Empty on anything that is not
// well-formed UTF-8: a stray or missing continuation byte, an overlong form, a surrogate, a value
// above U+10FFFF.
std::optional<char32_t> NextCodePoint(const std::string& text, size_t* position) {
  const auto lead = static_cast<uint8_t>(text[*position]);
  int continuations = 0;
  char32_t smallest = 0;
  char32_t value = lead;
  if (lead >= 0xf0 && lead <= 0xf4) {
    continuations = 3, smallest = 0x10000, value = lead & 0x07u;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    continuations = 2, smallest = 0x800, value = lead & 0x0fu;
  } else if (lead >= 0xc2 && lead <= 0xdf) {
    continuations = 1, smallest = 0x80, value = lead & 0x1fu;
  } else if (lead >= 0x80) {
    return std::nullopt;
  }
  if (text.size() - *position <= static_cast<size_t>(continuations)) return std::nullopt;
  for (int i = 1; i <= continuations; ++i) {
    const auto byte = static_cast<uint8_t>(text[*position + static_cast<size_t>(i)]);
    if ((byte & 0xc0) != 0x80) return std::nullopt;
    value = value << 6 | (byte & 0x3fu);
  }
  const bool surrogate = value >= 0xd800 && value <= 0xdfff;
  if (value < smallest || surrogate || value > 0x10ffff) return std::nullopt;
  *position += static_cast<size_t>(continuations) + 1;
  return value;
}

// The UTF-16 code units of UTF-8 text, which RFC 8785 sorts by. Empty when `text` is not UTF-8.
std::optional<std::u16string> Utf16(const std::string& text) {
  std::u16string units;
  for (size_t position = 0; position < text.size();) {
    const std::optional<char32_t> code = NextCodePoint(text, &position);
    if (!code) return std::nullopt;
    if (*code < 0x10000) {
      units.push_back(static_cast<char16_t>(*code));
    } else {
      const char32_t offset = *code - 0x10000;
      units.push_back(static_cast<char16_t>(0xd800 + (offset >> 10)));
      units.push_back(static_cast<char16_t>(0xdc00 + (offset & 0x3ff)));
    }
  }
  return units;
}

void AppendEscaped(char c, std::string* out) {
  switch (c) {
    case '"':
      out->append("\\\"");
      return;
    case '\\':
      out->append("\\\\");
      return;
    case '\b':
      out->append("\\b");
      return;
    case '\t':
      out->append("\\t");
      return;
    case '\n':
      out->append("\\n");
      return;
    case '\f':
      out->append("\\f");
      return;
    case '\r':
      out->append("\\r");
      return;
    default:
      break;
  }
  if (static_cast<uint8_t>(c) < 0x20) {
    absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
  } else {
    out->push_back(c);
  }
}

absl::Status Refuse(const std::string& pointer, const std::string& reason) {
  return absl::InvalidArgumentError(
      absl::StrCat("JSON at \"", absl::CHexEscape(pointer), "\": ", reason));
}

class Writer {
 public:
  absl::Status Append(const nlohmann::json& value, const std::string& pointer, int depth) {
    if (depth > kMaxDepth) {
      return Refuse(pointer, absl::StrCat("nested deeper than ", kMaxDepth));
    }
    switch (value.type()) {
      case nlohmann::json::value_t::null:
        text_.append("null");
        return absl::OkStatus();
      case nlohmann::json::value_t::boolean:
        text_.append(value.get<bool>() ? "true" : "false");
        return absl::OkStatus();
      case nlohmann::json::value_t::string:
        return AppendString(value.get_ref<const std::string&>(), pointer);
      case nlohmann::json::value_t::array:
        return AppendArray(value, pointer, depth);
      case nlohmann::json::value_t::object:
        return AppendObject(value, pointer, depth);
      default:
        return Refuse(pointer, absl::StrCat(value.type_name(), ", want a decimal string"));
    }
  }

  std::string TakeText() && { return std::move(text_); }

 private:
  absl::Status AppendString(const std::string& text, const std::string& pointer) {
    if (!Utf16(text)) return Refuse(pointer, "not valid UTF-8");
    AppendQuoted(text);
    return absl::OkStatus();
  }

  void AppendQuoted(const std::string& text) {
    text_.push_back('"');
    for (const char c : text) AppendEscaped(c, &text_);
    text_.push_back('"');
  }

  absl::Status AppendArray(const nlohmann::json& array, const std::string& pointer, int depth) {
    text_.push_back('[');
    for (size_t i = 0; i < array.size(); ++i) {
      if (i > 0) text_.push_back(',');
      SP_RETURN_IF_ERROR(Append(array[i], absl::StrCat(pointer, "/", i), depth + 1));
    }
    text_.push_back(']');
    return absl::OkStatus();
  }

  absl::Status AppendObject(const nlohmann::json& object, const std::string& pointer, int depth) {
    struct Member {
      std::u16string sort_key;
      const std::string* name;
      const nlohmann::json* value;
    };
    std::vector<Member> members;
    for (const auto& [name, value] : object.get_ref<const nlohmann::json::object_t&>()) {
      std::optional<std::u16string> sort_key = Utf16(name);
      if (!sort_key) return Refuse(pointer, "a member name is not valid UTF-8");
      members.push_back({*std::move(sort_key), &name, &value});
    }
    std::sort(members.begin(), members.end(),
              [](const Member& a, const Member& b) { return a.sort_key < b.sort_key; });
    text_.push_back('{');
    for (size_t i = 0; i < members.size(); ++i) {
      if (i > 0) text_.push_back(',');
      AppendQuoted(*members[i].name);
      text_.push_back(':');
      const std::string segment = absl::StrReplaceAll(*members[i].name, {{"~", "~0"}, {"/", "~1"}});
      SP_RETURN_IF_ERROR(Append(*members[i].value, absl::StrCat(pointer, "/", segment), depth + 1));
    }
    text_.push_back('}');
    return absl::OkStatus();
  }

  std::string text_;
};

}  // namespace

absl::StatusOr<std::string> CanonicalJson(const nlohmann::json& value) {
  Writer writer;
  SP_RETURN_IF_ERROR(writer.Append(value, "", 0));
  return std::move(writer).TakeText();
}

}  // namespace shardprep
