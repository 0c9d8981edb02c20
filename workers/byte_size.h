// Byte counts as people write them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace shardprep {

// "512MiB", "2GiB", "4096", "64KiB", "1TiB": a whole decimal number and an optional binary unit,
// nothing else. INVALID_ARGUMENT quoting the text when malformed, negative or above 2^62.
absl::StatusOr<int64_t> ParseByteSize(const std::string& text);

// For people: "1.579 GiB", "384 B". Three decimals from KiB on.
std::string FormatByteSize(int64_t bytes);

// 103428390912 -> "103,428,390,912".
std::string FormatThousands(int64_t value);

}  // namespace shardprep
