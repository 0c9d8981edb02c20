// A shared credentials file. Input: a profile, a line feed, the file's text.
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/s3/credentials.h"

namespace shardprep {
namespace {

constexpr size_t kSecretBytes = 12;  // shorter values are words that any message may hold

// No error shows what stands behind a `=`.
void RequireNoSecret(const absl::Status& status, const std::string& profile,
                     const std::string& text) {
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos || absl::StartsWith(absl::StripAsciiWhitespace(line), "[")) {
      continue;
    }
    const std::string value(absl::StripAsciiWhitespace(line.substr(equals + 1)));
    if (value.size() < kSecretBytes || absl::StrContains(profile, value)) continue;
    FUZZ_REQUIRE(!absl::StrContains(status.message(), value), status.ToString());
  }
}

bool IsPlain(const std::string& value) {
  for (const char c : value) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '/' && c != '+') return false;
  }
  return true;
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
    RequireNoSecret(credentials.status(), profile, text);
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
