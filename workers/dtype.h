// The element types of the safetensors format: their exact names and widths.
// Source: `enum Dtype` of the safetensors Rust crate.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardprep {

// In the order of the format's own enumeration, by which its writer sorts tensors.
enum class Dtype : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

inline constexpr int kDtypeCount = 22;

// Bits of one element. A shape of F4 or F6 counts elements, not bytes.
int64_t DtypeBits(Dtype dtype);

// The name as it stands in a header, e.g. "F8_E8M0".
absl::string_view DtypeName(Dtype dtype);

// The inverse of DtypeName; case matters. INVALID_ARGUMENT quotes an unknown name.
absl::StatusOr<Dtype> ParseDtype(absl::string_view name);

}  // namespace shardprep
