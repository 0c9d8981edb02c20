#include "workers/tensor_naming.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/status_macros.h"

namespace shardprep {

// What a scheme calls the scales of one format otherwise than the format's own name for them.
struct ScaleName {
  const char* format;
  const char* scale;
};

struct NamingScheme {
  const char* name;
  const char* pattern;  // {prefix}, {layer}, {module}, {leaf}
  std::vector<ScaleName> scales;
  bool dense_names;  // those of vLLM
};

namespace {

const std::vector<NamingScheme>& Schemes() {
  static const auto* const schemes = new std::vector<NamingScheme>{
      {"vllm", "{prefix}layers.{layer}.{module}.{leaf}", {}, true},
      // vLLM model_executor/layers/fused_moe/routed_experts.py
      {"vllm-routed-experts", "{prefix}layers.{layer}.{module}.routed_experts.{leaf}", {}, true},
      // SGLang loads the FP4 experts of DeepSeek-V4 by its block-quantised FP8 method
      // (srt/layers/quantization/fp8.py), which names every scale so. UNVERIFIED for the other FP4
      // formats: their scales keep the checkpoint's name, as Quark's and compressed-tensors' do in
      // vLLM.
      {"sglang", "{prefix}layers.{layer}.{module}.{leaf}", {{"mxfp4", "weight_scale_inv"}}, false},
  };
  return *schemes;
}

}  // namespace

absl::StatusOr<const NamingScheme*> FindNaming(absl::string_view scheme) {
  for (const NamingScheme& naming : Schemes()) {
    if (scheme == naming.name) return &naming;
  }
  return absl::InvalidArgumentError(absl::StrCat("naming scheme '", scheme, "' is unknown; known: ",
                                                 absl::StrJoin(NamingSchemeNames(), ", ")));
}

std::vector<std::string> NamingSchemeNames() {
  std::vector<std::string> names;
  for (const NamingScheme& naming : Schemes()) names.emplace_back(naming.name);
  return names;
}

std::string LeafName(const NamingScheme& naming, const ExpertFormat& format, Role role) {
  const bool w13 = role == Role::kW13Weight || role == Role::kW13Scale || role == Role::kW13Bias;
  const char* suffix = nullptr;
  if (role == Role::kW13Bias || role == Role::kW2Bias) {
    suffix = "bias";
  } else if (role == Role::kW13Weight || role == Role::kW2Weight) {
    suffix = format.fused_weight;
  } else {
    suffix = format.fused_scale;
    for (const ScaleName& scale : naming.scales) {
      if (absl::string_view(scale.format) == format.id) suffix = scale.scale;
    }
  }
  SP_CHECK(suffix != nullptr);
  return absl::StrCat(w13 ? "w13_" : "w2_", suffix);
}

bool HasDenseNames(const NamingScheme& naming) { return naming.dense_names; }

std::string FusedTensorName(const NamingScheme& naming, const MoeCheckpoint& moe, int32_t layer,
                            absl::string_view leaf) {
  return absl::StrReplaceAll(naming.pattern, {{"{prefix}", moe.engine_prefix},
                                              {"{layer}", absl::StrCat(layer)},
                                              {"{module}", moe.experts_module},
                                              {"{leaf}", leaf}});
}

}  // namespace shardprep
