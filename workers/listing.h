// The bound of a listing: what keeps a wrong root, `/` for instance, from being walked for hours
// and held in memory. Checkpoints and artefacts have thousands of objects at most.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardprep {

// Entries that one ObjectStore::List() goes through: objects and, where there are any, directories.
inline constexpr int64_t kMaxListedEntries = 250'000;

// RESOURCE_EXHAUSTED for a root of more entries than that.
inline absl::Status TooManyEntries(const std::string& root, int64_t bound) {
  return absl::ResourceExhaustedError(absl::StrCat(
      root, ": more than ", bound,
      " files and directories, the bound of a listing; want the directory or prefix of "
      "one checkpoint or artefact"));
}

}  // namespace shardprep
