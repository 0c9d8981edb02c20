// The configuration file of the two server programs: one flag a line, `name = value`.
//
//   # Comment lines and empty lines are skipped; a value is taken to the end of its line.
//   listen = 0.0.0.0:7070
//   memory-budget = 2GiB
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardprep {

struct ConfigEntry {
  std::string name;  // with `_` for `-`
  std::string value;
  int line = 0;  // from 1
};

// Pure. INVALID_ARGUMENT, naming file and line, for a line that is no pair, a name that is not made
// of letters, digits, `_` and `-`, a name that stands twice, and for a NUL. `path` is for messages.
absl::StatusOr<std::vector<ConfigEntry>> ParseConfig(const std::string& text,
                                                     const std::string& path);

// The same of a file. FAILED_PRECONDITION when it cannot be read or has more than 64 KiB.
absl::StatusOr<std::vector<ConfigEntry>> ReadConfig(const std::string& path);

}  // namespace shardprep
