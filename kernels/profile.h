// Layout profiles: which row order and layout each of the four tensors of a MoE layer gets. Weights
// and scales always switch together; mixing profiles is silently wrong, so a profile is the only
// thing that can be chosen.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/layout.h"

namespace shardprep {

enum class ProfileId : uint8_t { kAiterSeparated, kAiterInterleaved, kAiterGfx1250, kLogical };

struct TensorLayout {
  RowOrder row_order;
  LayoutId layout;
};

struct LayoutProfile {
  ProfileId id;
  const char* name;       // "aiter-separated"
  const char* gate_mode;  // what the kernel is called with: SEPARATED, INTERLEAVE, NONE (logical)
  TensorLayout w13;
  TensorLayout w13_scale;
  TensorLayout w2;
  TensorLayout w2_scale;
  const char* source;
};

const LayoutProfile& GetProfile(ProfileId profile);

// All profiles, in the order of ProfileId.
absl::Span<const LayoutProfile> AllProfiles();

// INVALID_ARGUMENT for an unknown name; the message lists the known ones.
absl::StatusOr<ProfileId> ParseProfile(absl::string_view name);

}  // namespace shardprep
