#include "workers/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace shardprep {
namespace {

bool IsBare(const std::string& value) {
  if (value.empty()) return false;
  for (const char c : value) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                       absl::string_view("-._/:+@%,=[]").find(c) != absl::string_view::npos;
    if (!plain) return false;
  }
  return true;
}

void AppendValue(const std::string& value, std::string* line) {
  if (IsBare(value)) {
    line->append(value);
    return;
  }
  line->push_back('"');
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      line->push_back('\\');
      line->push_back(c);
    } else if (c == '\n') {
      line->append("\\n");
    } else if (c == '\t') {
      line->append("\\t");
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(line, "\\x%02x", byte);
    } else {
      line->push_back(c);
    }
  }
  line->push_back('"');
}

std::atomic<LogLevel> least_level{LogLevel::kInfo};

}  // namespace

const char* LogLevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
    case LogLevel::kAudit:
      return "audit";
  }
  return "error";
}

absl::StatusOr<LogLevel> ParseLogLevel(const std::string& name) {
  for (const LogLevel level : {LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (name == LogLevelName(level)) return level;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level \"", name, "\": want info, warning or error"));
}

void SetLeastLogLevel(LogLevel level) { least_level = level; }

LogLevel LeastLogLevel() { return least_level; }

LogField::LogField(const char* k, double v) : key(k), value(absl::StrCat(v)) {}

std::string FormatLogLine(LogLevel level, absl::Time time, const char* component,
                          const std::string& message, std::initializer_list<LogField> fields) {
  std::string line =
      absl::StrCat("level=", LogLevelName(level),
                   " ts=", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone()),
                   " component=", component, " msg=");
  AppendValue(message, &line);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    AppendValue(field.value, &line);
  }
  line.push_back('\n');
  return line;
}

std::string UriWithoutSecrets(const std::string& uri) {
  const size_t scheme = uri.find("://");
  if (scheme == std::string::npos) return uri;
  const size_t host = scheme + 3;
  const size_t end = std::min(uri.find_first_of("?#", host), uri.size());
  const size_t path = std::min(uri.find('/', host), end);
  size_t begin = host;
  // A password may hold a slash, and a host has no colon but before its port.
  const size_t colon = uri.find(':', host);
  const size_t at = uri.rfind('@', colon < path ? end - 1 : path);
  if (at != std::string::npos && at >= host) begin = at + 1;
  return absl::StrCat(uri.substr(0, host), uri.substr(begin, end - begin));
}

void Log(LogLevel level, const char* component, const std::string& message,
         std::initializer_list<LogField> fields) {
  if (level < LeastLogLevel()) return;
  const std::string line = FormatLogLine(level, absl::Now(), component, message, fields);
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace shardprep
