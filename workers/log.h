// One line to stderr for each event, as key=value pairs:
//
//   level=info ts=2026-01-02T03:04:05.678Z component=worker msg="lease started" job=v4 rank=3
//
// A value stands bare when it is made of letters, digits and -._/:+@%,=[] only; else it is quoted,
// with \" \\ \n \t and \xNN escapes, so a line is always one line. What the caller passes is what
// is printed: never pass credentials, and URIs that people gave only by UriWithoutSecrets().
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardprep {

// kAudit is for who asked for what: such lines are written whatever the least level is.
enum class LogLevel { kInfo, kWarning, kError, kAudit };

// "info", "warning", "error", "audit". Parsing takes the first three: INVALID_ARGUMENT for anything
// else.
const char* LogLevelName(LogLevel level);
absl::StatusOr<LogLevel> ParseLogLevel(const std::string& name);

// Lines below this level are dropped; info at the start. For main, which decides for its process.
void SetLeastLogLevel(LogLevel level);
LogLevel LeastLogLevel();

// One pair. Keys are [a-z0-9_]+ and chosen by the code, never by input.
struct LogField {
  LogField(const char* k, const std::string& v) : key(k), value(v) {}
  LogField(const char* k, const char* v) : key(k), value(v) {}
  LogField(const char* k, absl::string_view v) : key(k), value(v) {}
  LogField(const char* k, bool v) : key(k), value(v ? "true" : "false") {}
  LogField(const char* k, int v) : key(k), value(std::to_string(v)) {}
  LogField(const char* k, int64_t v) : key(k), value(std::to_string(v)) {}
  LogField(const char* k, double v);
  LogField(const char* k, absl::Duration v) : key(k), value(absl::FormatDuration(v)) {}
  LogField(const char* k, const absl::Status& v) : key(k), value(v.ToString()) {}

  const char* key;
  std::string value;
};

// The line for an event, with its newline. Pure, for tests.
std::string FormatLogLine(LogLevel level, absl::Time time, const char* component,
                          const std::string& message, std::initializer_list<LogField> fields);

// A URI without user information, query and fragment, in which some tools put credentials:
// "s3://key:sec/ret@bucket/p?sig=1" is "s3://bucket/p". Paths, and `@` in a path, stay as they are.
std::string UriWithoutSecrets(const std::string& uri);

// Writes the line with one write(2), so lines of threads and of processes that share stderr do not
// mix. Thread safe. A failing write is ignored: there is nowhere left to say so.
void Log(LogLevel level, const char* component, const std::string& message,
         std::initializer_list<LogField> fields = {});

}  // namespace shardprep
