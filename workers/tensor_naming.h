// Naming schemes: what an engine calls the fused tensors of a routed layer. A scheme is a row of
// data (tensor_naming.cc), because the engine that loads the files decides it.
//
//   vllm                 {prefix}layers.{layer}.{module}.w13_weight, .w13_weight_scale, ...
//   vllm-routed-experts  the same with the path segment that newer vLLM has:
//   {module}.routed_experts sglang               as vllm, but FP4 scales of DeepSeek-V4 are
//   .w13_weight_scale_inv
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "workers/family.h"

namespace shardprep {

enum class Role {
  kW13Weight = 0,
  kW13Scale = 1,
  kW2Weight = 2,
  kW2Scale = 3,
  kW13Bias = 4,
  kW2Bias = 5
};
inline constexpr int kRoleCount = 6;

struct NamingScheme;

// INVALID_ARGUMENT for an unknown scheme; the message lists the known ones. The result lives for
// good.
absl::StatusOr<const NamingScheme*> FindNaming(absl::string_view scheme);

// The names of all schemes, the default first.
std::vector<std::string> NamingSchemeNames();

// The last part of a fused tensor's name, e.g. "w13_weight_scale". Scales need a format with
// scales.
std::string LeafName(const NamingScheme& naming, const ExpertFormat& format, Role role);

// Whether the scheme's engine has the names that SliceDense() gives.
bool HasDenseNames(const NamingScheme& naming);

// The name of the fused tensor `leaf` of a prepared layer.
std::string FusedTensorName(const NamingScheme& naming, const MoeCheckpoint& moe, int32_t layer,
                            absl::string_view leaf);

}  // namespace shardprep
