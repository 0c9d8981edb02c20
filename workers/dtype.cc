#include "workers/dtype.h"

#include <array>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardprep {
namespace {

struct DtypeRow {
  const char* name;
  int64_t bits;
};

constexpr std::array<DtypeRow, kDtypeCount> kDtypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};
static_assert(static_cast<int>(Dtype::kU64) == kDtypeCount - 1);

}  // namespace

int64_t DtypeBits(Dtype dtype) { return kDtypes.at(static_cast<size_t>(dtype)).bits; }

absl::string_view DtypeName(Dtype dtype) { return kDtypes.at(static_cast<size_t>(dtype)).name; }

absl::StatusOr<Dtype> ParseDtype(absl::string_view name) {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (name == kDtypes[i].name) return static_cast<Dtype>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown dtype '", absl::Utf8SafeCEscape(name.substr(0, 64)), "'"));
}

}  // namespace shardprep
