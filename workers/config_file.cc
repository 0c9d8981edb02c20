#include "workers/config_file.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr size_t kMaxConfigBytes = 64 << 10;

bool IsName(const std::string& text) {
  return !text.empty() && text.front() != '-' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '_' || c == '-';
         });
}

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ParseConfig(const std::string& text,
                                                     const std::string& path) {
  std::vector<ConfigEntry> entries;
  std::map<std::string, int> seen;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const auto fail = [&](const std::string& why) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", number, ": ", why));
    };
    const absl::string_view stripped = absl::StripAsciiWhitespace(line);
    if (stripped.empty() || stripped.front() == '#') continue;
    if (stripped.find('\0') != absl::string_view::npos) return fail("holds a NUL");
    const size_t equals = stripped.find('=');
    if (equals == absl::string_view::npos) return fail("want name = value");
    ConfigEntry entry;
    entry.name = std::string(absl::StripAsciiWhitespace(stripped.substr(0, equals)));
    entry.value = std::string(absl::StripAsciiWhitespace(stripped.substr(equals + 1)));
    entry.line = number;
    if (!IsName(entry.name)) return fail("want name = value, the name without dashes before it");
    std::replace(entry.name.begin(), entry.name.end(), '-', '_');
    const auto [first, is_new] = seen.emplace(entry.name, number);
    if (!is_new) return fail(absl::StrCat(entry.name, " stands in line ", first->second, " too"));
    entries.push_back(std::move(entry));
  }
  return entries;
}

absl::StatusOr<std::vector<ConfigEntry>> ReadConfig(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": cannot be opened: ", std::generic_category().message(errno)));
  }
  std::string text(kMaxConfigBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::FailedPreconditionError(absl::StrCat(path, ": cannot be read"));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxConfigBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": more than ", kMaxConfigBytes, " bytes"));
  }
  return ParseConfig(text, path);
}

}  // namespace shardprep
