#include "kernels/profile.h"

#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr std::array<LayoutProfile, 4> kProfiles = {{
    {ProfileId::kAiterSeparated,
     "aiter-separated",
     "SEPARATED",
     {RowOrder::kAsIs, LayoutId::kAiter16x16},
     {RowOrder::kAsIs, LayoutId::kAiterE8m0},
     {RowOrder::kAsIs, LayoutId::kAiter16x16},
     {RowOrder::kAsIs, LayoutId::kAiterE8m0},
     "vLLM #42595"},
    {ProfileId::kAiterInterleaved,
     "aiter-interleaved",
     "INTERLEAVE",
     {RowOrder::kAsIs, LayoutId::kAiter16x16GateUp},
     {RowOrder::kAsIs, LayoutId::kAiterE8m0GateUp},
     {RowOrder::kAsIs, LayoutId::kAiter16x16},
     {RowOrder::kAsIs, LayoutId::kAiterE8m0Expert},
     "vLLM #46122"},
    {ProfileId::kAiterGfx1250,
     "aiter-gfx1250",
     "INTERLEAVE",
     {RowOrder::kGateUpRows, LayoutId::kAiter16x16},
     {RowOrder::kGateUpRows, LayoutId::kAiterN32K4},
     {RowOrder::kAsIs, LayoutId::kAiter16x16},
     {RowOrder::kAsIs, LayoutId::kAiterN32K4},
     "ROCm/aiter aiter/ops/shuffle.py moe_shuffle_weight and moe_shuffle_scale on gfx1250"},
    {ProfileId::kLogical,
     "logical",
     "NONE",
     {RowOrder::kAsIs, LayoutId::kRowMajor},
     {RowOrder::kAsIs, LayoutId::kRowMajor},
     {RowOrder::kAsIs, LayoutId::kRowMajor},
     {RowOrder::kAsIs, LayoutId::kRowMajor},
     "engines that shuffle after loading"},
}};

}  // namespace

const LayoutProfile& GetProfile(ProfileId profile) {
  const size_t index = static_cast<size_t>(profile);
  SP_CHECK(index < kProfiles.size());
  return kProfiles[index];
}

absl::Span<const LayoutProfile> AllProfiles() { return kProfiles; }

absl::StatusOr<ProfileId> ParseProfile(absl::string_view name) {
  std::vector<absl::string_view> known;
  for (const LayoutProfile& profile : kProfiles) {
    if (name == profile.name) return profile.id;
    known.push_back(profile.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown layout profile '", name, "', known: ", absl::StrJoin(known, ", ")));
}

}  // namespace shardprep
