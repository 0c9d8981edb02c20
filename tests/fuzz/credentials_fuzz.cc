// A shared credentials file. Input: a profile, a line feed, the file's text.
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/s3/credentials.h"

namespace shardprep {
namespace {

bool IsPlain(const std::string& value) {
  for (const char c : value) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '/' && c != '+') return false;
  }
  return true;
}

// The text with another value behind each `=` whose value cannot be taken for anything else.
std::string WithOtherSecrets(const std::string& text) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (std::string& line : lines) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos || !IsPlain(line.substr(equals + 1))) continue;
    std::fill(line.begin() + static_cast<std::ptrdiff_t>(equals) + 1, line.end(), 'x');
  }
  return absl::StrJoin(lines, "\n");
}

}  // namespace

void FuzzOne(const std::string& input) {
  const size_t line = input.find('\n');
  if (line == std::string::npos) return;
  const std::string profile = input.substr(0, line);
  const std::string text = input.substr(line + 1);
  const auto credentials = ParseCredentialsFile(text, profile);
  if (!credentials.ok()) {
    FUZZ_REQUIRE(
        absl::IsInvalidArgument(credentials.status()) || absl::IsNotFound(credentials.status()),
        credentials.status().ToString());
    // No error depends on a secret, so none shows one.
    const absl::Status other = ParseCredentialsFile(WithOtherSecrets(text), profile).status();
    FUZZ_REQUIRE(other == credentials.status(), credentials.status().ToString());
    return;
  }
  FUZZ_REQUIRE(!credentials->access_key_id.empty() && !credentials->secret_access_key.empty(),
               text);
  if (!IsPlain(profile) || !IsPlain(credentials->access_key_id) ||
      !IsPlain(credentials->secret_access_key) || !IsPlain(credentials->session_token)) {
    return;
  }
  std::string printed =
      absl::StrCat("[", profile, "]\naws_access_key_id = ", credentials->access_key_id,
                   "\naws_secret_access_key=", credentials->secret_access_key, "\n");
  if (!credentials->session_token.empty()) {
    absl::StrAppend(&printed, "aws_session_token = ", credentials->session_token, "\n");
  }
  const auto again = ParseCredentialsFile(printed, profile);
  FUZZ_REQUIRE(again.ok(), again.status().ToString());
  FUZZ_REQUIRE(again->access_key_id == credentials->access_key_id, printed);
  FUZZ_REQUIRE(again->secret_access_key == credentials->secret_access_key, printed);
  FUZZ_REQUIRE(again->session_token == credentials->session_token, printed);
}

}  // namespace shardprep
