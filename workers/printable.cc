#include "workers/printable.h"

#include <cstdint>

#include "absl/strings/str_format.h"

namespace shardprep {
namespace {

bool IsContinuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

// Bytes of the UTF-8 character at the start of `text`, or 0 when there is none: neither overlong
// forms nor surrogates nor values beyond U+10FFFF are characters.
size_t CharacterBytes(absl::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return 1;
  const size_t size = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (size == 0 || text.size() < size) return 0;
  for (size_t i = 1; i < size; ++i) {
    if (!IsContinuation(static_cast<unsigned char>(text[i]))) return 0;
  }
  const auto second = static_cast<unsigned char>(text[1]);
  if (lead == 0xE0 && second < 0xA0) return 0;
  if (lead == 0xED && second >= 0xA0) return 0;
  if (lead == 0xF0 && second < 0x90) return 0;
  if (lead == 0xF4 && second >= 0x90) return 0;
  return size;
}

bool IsControl(absl::string_view character) {
  const auto lead = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return (lead < 0x20 && lead != '\n') || lead == 0x7F;
  return lead == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;  // C1
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const size_t size = CharacterBytes(text);
    const absl::string_view piece = text.substr(0, size == 0 ? 1 : size);
    if (size == 0 || IsControl(piece)) {
      for (const char byte : piece) {
        absl::StrAppendFormat(&shown, "\\x%02x", static_cast<unsigned char>(byte));
      }
    } else {
      shown.append(piece.data(), piece.size());
    }
    text.remove_prefix(piece.size());
  }
  return shown;
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t size = CharacterBytes(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

}  // namespace shardprep
