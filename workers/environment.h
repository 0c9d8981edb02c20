// The environment of the process, for mains only: everything below is told what it needs.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace shardprep {

// Nothing when the variable is not set.
inline std::optional<std::string> ReadEnvironmentVariable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace shardprep
