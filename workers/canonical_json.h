// Canonical JSON (RFC 8785, JCS), so that equal values have equal bytes and can be hashed.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace shardprep {

// `value` without white space, object members sorted by the UTF-16 code units of their names, and
// strings in UTF-8 with the fewest escapes (RFC 8785, 3.2.2 and 3.2.3).
//
// Objects, arrays, strings, booleans and null only: integers are written by the caller as decimal
// strings, since JSON numbers beyond 2^53 do not survive every reader. INVALID_ARGUMENT, naming the
// member by its JSON pointer, on a number, on a string or name that is not valid UTF-8 and on
// nesting deeper than 64.
absl::StatusOr<std::string> CanonicalJson(const nlohmann::json& value);

}  // namespace shardprep
