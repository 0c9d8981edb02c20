// The alignment policy as text: the compiled-in table, and a table that an operator puts in its
// place. The format is that of kernels/alignment_policy.json. Pure and thread safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kernels/alignment_policy.h"

namespace shardprep {

struct PolicyFile {
  AlignmentPolicy policy;
  // SHA-256 of the table's canonical text (keys sorted, no white space), 64 hex digits: equal for
  // tables that say the same. Controller and workers must agree on it.
  std::string sha256_hex;
};

// Strict: INVALID_ARGUMENT naming the row and key for text that is no JSON object of format 1, a
// missing, unknown or doubled key, a wrong type, an empty name or list (but constraints and
// aiter_minimums may have no rows), "*" beside other names, an
// alignment or multiple below 1, a doubled id, a name that the lists of backends, activations,
// platforms, weights or profiles do not hold, a version that is not dotted numbers, or a missing
// fallthrough (a last row that matches everything; the same for auto_backends).
absl::StatusOr<PolicyFile> ParseAlignmentPolicy(const std::string& text);

// The compiled-in table.
PolicyFile DefaultAlignmentPolicy();

// The table in the file `path`. NOT_FOUND, PERMISSION_DENIED or UNAVAILABLE when it cannot be read,
// RESOURCE_EXHAUSTED above 1 MiB, else as ParseAlignmentPolicy; messages begin with the path.
absl::StatusOr<PolicyFile> ReadAlignmentPolicy(const std::string& path);

}  // namespace shardprep
