#include "workers/byte_size.h"

#include <cctype>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardprep {
namespace {

struct Unit {
  const char* name;
  int shift;
};
constexpr Unit kUnits[] = {{"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};

}  // namespace

absl::StatusOr<int64_t> ParseByteSize(const std::string& text) {
  absl::Status malformed = absl::InvalidArgumentError(absl::StrCat(
      "'", text,
      "' is not a size; want a whole number of bytes, or one with KiB, MiB, GiB or TiB"));
  size_t digits = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits]))) ++digits;
  int64_t value = 0;
  if (digits == 0 || !absl::SimpleAtoi(text.substr(0, digits), &value)) return malformed;
  const std::string suffix = text.substr(digits);
  int shift = suffix.empty() ? 0 : -1;
  for (const Unit& unit : kUnits) {
    if (suffix == unit.name) shift = unit.shift;
  }
  if (shift < 0 || value > (int64_t{1} << 62) >> shift) return malformed;
  return value << shift;
}

std::string FormatByteSize(int64_t bytes) {
  const Unit* unit = &kUnits[0];
  for (const Unit& candidate : kUnits) {
    if (bytes >= int64_t{1} << candidate.shift) unit = &candidate;
  }
  if (unit->shift == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat(
      "%.3f %s", static_cast<double>(bytes) / static_cast<double>(int64_t{1} << unit->shift),
      unit->name);
}

std::string FormatThousands(int64_t value) {
  std::string digits = absl::StrCat(value < 0 ? -value : value);
  for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return value < 0 ? absl::StrCat("-", digits) : digits;
}

}  // namespace shardprep
