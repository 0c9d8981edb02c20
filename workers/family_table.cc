#include "workers/family_table.h"

namespace shardprep {
namespace {

// The published DeepSeek-V4 files store packed E2M1 as I8 and name scales `.scale`; converted
// copies use U8 or F4 and the names that vLLM gives the same tensors.
const ExpertFormat& DeepSeekV4Mxfp4() {
  static const auto* const format =
      new ExpertFormat{.id = "mxfp4",
                       .weights = "mxfp4",
                       .title = "MXFP4",
                       .weight_suffix = "weight",
                       .scale_suffixes = {"scale", "weight_scale", "weight_scale_inv"},
                       .weight_dtypes = {{Dtype::kI8, 2}, {Dtype::kU8, 2}, {Dtype::kF4, 1}},
                       .scale_title = "E8M0 scales",
                       .scale_dtypes = {Dtype::kF8E8M0, Dtype::kU8},
                       .prepared_dtype = Dtype::kU8,
                       .weight_bits = 4,
                       .block_rows = 1,
                       .block_columns = 32,
                       .whole_blocks = true,
                       .unequal_ranks = false,
                       .expert_dtype = "fp4",
                       .fused_weight = "weight",
                       .fused_scale = "weight_scale"};
  return *format;
}

// DeepSeek-V4-Flash-Base: experts like the dense layers, FP8 with E8M0 scales of 128 x 128.
const ExpertFormat& DeepSeekV4Fp8() {
  static const auto* const format =
      new ExpertFormat{.id = "fp8-block-e8m0",
                       .weights = "fp8-block",
                       .title = "FP8 in blocks",
                       .weight_suffix = "weight",
                       .scale_suffixes = {"scale", "weight_scale_inv"},
                       .weight_dtypes = {{Dtype::kF8E4M3, 1}},
                       .scale_title = "E8M0 scales",
                       .scale_dtypes = {Dtype::kF8E8M0},
                       .prepared_dtype = Dtype::kF8E4M3,
                       .weight_bits = 8,
                       .block_rows = 128,
                       .block_columns = 128,
                       .whole_blocks = false,
                       .unequal_ranks = false,
                       .expert_dtype = "fp8",
                       .fused_weight = "weight",
                       .fused_scale = "weight_scale_inv"};
  return *format;
}

// DeepSeek-V3/R1 and Qwen3-MoE FP8: vLLM model_executor/layers/quantization/fp8.py, block_quant.
const ExpertFormat& Fp8Block() {
  static const auto* const format = new ExpertFormat{.id = "fp8-block-f32",
                                                     .weights = "fp8-block",
                                                     .title = "FP8 in blocks",
                                                     .weight_suffix = "weight",
                                                     .scale_suffixes = {"weight_scale_inv"},
                                                     .weight_dtypes = {{Dtype::kF8E4M3, 1}},
                                                     .scale_title = "F32 scales",
                                                     .scale_dtypes = {Dtype::kF32},
                                                     .prepared_dtype = Dtype::kF8E4M3,
                                                     .weight_bits = 8,
                                                     .block_rows = 128,
                                                     .block_columns = 128,
                                                     .whole_blocks = false,
                                                     .unequal_ranks = false,
                                                     .expert_dtype = nullptr,
                                                     .fused_weight = "weight",
                                                     .fused_scale = "weight_scale_inv"};
  return *format;
}

// AMD Quark: vLLM model_executor/layers/quantization/quark/quark_moe.py.
const ExpertFormat& QuarkMxfp4() {
  static const auto* const format =
      new ExpertFormat{.id = "mxfp4-quark",
                       .weights = "mxfp4",
                       .title = "MXFP4",
                       .weight_suffix = "weight",
                       .scale_suffixes = {"weight_scale"},
                       .weight_dtypes = {{Dtype::kU8, 2}, {Dtype::kI8, 2}, {Dtype::kF4, 1}},
                       .scale_title = "E8M0 scales",
                       .scale_dtypes = {Dtype::kU8, Dtype::kF8E8M0},
                       .prepared_dtype = Dtype::kU8,
                       .weight_bits = 4,
                       .block_rows = 1,
                       .block_columns = 32,
                       .whole_blocks = true,
                       .unequal_ranks = false,
                       .expert_dtype = nullptr,
                       .fused_weight = "weight",
                       .fused_scale = "weight_scale"};
  return *format;
}

// compressed-tensors `mxfp4-pack-quantized`, groups of 32.
const ExpertFormat& CompressedTensorsMxfp4() {
  static const auto* const format = new ExpertFormat{.id = "mxfp4-compressed-tensors",
                                                     .weights = "mxfp4",
                                                     .title = "MXFP4",
                                                     .weight_suffix = "weight_packed",
                                                     .scale_suffixes = {"weight_scale"},
                                                     .weight_dtypes = {{Dtype::kU8, 2}},
                                                     .scale_title = "E8M0 scales",
                                                     .scale_dtypes = {Dtype::kU8, Dtype::kF8E8M0},
                                                     .prepared_dtype = Dtype::kU8,
                                                     .weight_bits = 4,
                                                     .block_rows = 1,
                                                     .block_columns = 32,
                                                     .whole_blocks = true,
                                                     .unequal_ranks = false,
                                                     .expert_dtype = nullptr,
                                                     .fused_weight = "weight_packed",
                                                     .fused_scale = "weight_scale"};
  return *format;
}

const ExpertFormat& Bf16() {
  static const auto* const format = new ExpertFormat{.id = "bf16",
                                                     .weights = "bf16",
                                                     .title = "BF16",
                                                     .weight_suffix = "weight",
                                                     .scale_suffixes = {},
                                                     .weight_dtypes = {{Dtype::kBF16, 1}},
                                                     .scale_title = "",
                                                     .scale_dtypes = {},
                                                     .prepared_dtype = Dtype::kBF16,
                                                     .weight_bits = 16,
                                                     .block_rows = 0,
                                                     .block_columns = 0,
                                                     .whole_blocks = false,
                                                     .unequal_ranks = false,
                                                     .expert_dtype = nullptr,
                                                     .fused_weight = "weight",
                                                     .fused_scale = nullptr};
  return *format;
}

// gpt-oss: all experts of a layer in one tensor; the row of a block is [K/32, 16] bytes. Ranks take
// whole blocks, ceil(I/32/T) of them: vLLM model_executor/models/gpt_oss.py.
const ExpertFormat& GptOssMxfp4() {
  static const auto* const format = new ExpertFormat{.id = "mxfp4-gpt-oss",
                                                     .weights = "mxfp4",
                                                     .title = "MXFP4",
                                                     .weight_suffix = "blocks",
                                                     .scale_suffixes = {"scales"},
                                                     .weight_dtypes = {{Dtype::kU8, 2}},
                                                     .scale_title = "E8M0 scales",
                                                     .scale_dtypes = {Dtype::kU8},
                                                     .prepared_dtype = Dtype::kU8,
                                                     .weight_bits = 4,
                                                     .block_rows = 1,
                                                     .block_columns = 32,
                                                     .whole_blocks = true,
                                                     .unequal_ranks = true,
                                                     .expert_dtype = nullptr,
                                                     .fused_weight = "weight",
                                                     .fused_scale = "weight_scale"};
  return *format;
}

// config.json of the published model has no hidden_act: the modelling code always applies SiLU.
FamilyRow DeepSeekV4() {
  return {.id = "deepseek_v4",
          .model_types = {"deepseek_v4", "deepseek_v41"},
          .experts_module = "ffn.experts",
          .projections = {"w1", "w3", "w2"},
          .stacked = {},
          .formats = {&DeepSeekV4Mxfp4(), &DeepSeekV4Fp8()},
          .mtp_segment = "mtp",
          .hidden_key = "hidden_size",
          .intermediate_key = "moe_intermediate_size",
          .experts_keys = {"n_routed_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = "num_nextn_predict_layers",
          .dense = {},
          .activation_key = "hidden_act",
          .default_activation = "SILU",
          .activations = {{"silu", "SILU"}, {"swish", "SILU"}},
          .expert_dtype_key = "expert_dtype",
          .scalar_suffixes = {}};
}

// DeepSeek-V3, R1 and V3.2, and Kimi-K2, which has the same architecture: FP8 as published, MXFP4
// by AMD Quark, BF16 converted.
FamilyRow DeepSeekV3() {
  return {.id = "deepseek_v3",
          .model_types = {"deepseek_v3", "deepseek_v32", "kimi_k2"},
          .experts_module = "mlp.experts",
          .projections = {"gate_proj", "up_proj", "down_proj"},
          .stacked = {},
          .formats = {&Fp8Block(), &QuarkMxfp4(), &Bf16()},
          .mtp_segment = nullptr,
          .hidden_key = "hidden_size",
          .intermediate_key = "moe_intermediate_size",
          .experts_keys = {"n_routed_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = "num_nextn_predict_layers",
          .dense = {.first = "first_k_dense_replace",
                    .frequency = "moe_layer_freq",
                    .step = nullptr,
                    .list = nullptr},
          .activation_key = "hidden_act",
          .default_activation = nullptr,
          .activations = {{"silu", "SILU"}},
          .expert_dtype_key = nullptr,
          .scalar_suffixes = {"input_scale"}};
}

FamilyRow Qwen3Moe() {
  return {.id = "qwen3_moe",
          .model_types = {"qwen3_moe"},
          .experts_module = "mlp.experts",
          .projections = {"gate_proj", "up_proj", "down_proj"},
          .stacked = {},
          .formats = {&Bf16(), &QuarkMxfp4(), &Fp8Block()},
          .mtp_segment = nullptr,
          .hidden_key = "hidden_size",
          .intermediate_key = "moe_intermediate_size",
          .experts_keys = {"num_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = nullptr,
          .dense = {.first = nullptr,
                    .frequency = nullptr,
                    .step = "decoder_sparse_step",
                    .list = "mlp_only_layers"},
          .activation_key = "hidden_act",
          .default_activation = nullptr,
          .activations = {{"silu", "SILU"}},
          .expert_dtype_key = nullptr,
          .scalar_suffixes = {"input_scale"}};
}

FamilyRow Mixtral() {
  return {.id = "mixtral",
          .model_types = {"mixtral"},
          .experts_module = "block_sparse_moe.experts",
          .projections = {"w1", "w3", "w2"},
          .stacked = {},
          .formats = {&Bf16(), &QuarkMxfp4()},
          .mtp_segment = nullptr,
          .hidden_key = "hidden_size",
          .intermediate_key = "intermediate_size",
          .experts_keys = {"num_local_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = nullptr,
          .dense = {},
          .activation_key = "hidden_act",
          .default_activation = nullptr,
          .activations = {{"silu", "SILU"}},
          .expert_dtype_key = nullptr,
          .scalar_suffixes = {"input_scale"}};
}

// The experts of Kimi-K3 work in a latent space of half the hidden size, with the SITU activation
// (vLLM #50597), which is the only one that the model has. Names, dtypes and extents of the experts
// are those that vLLM loads. The keys of config.json are UNVERIFIED: no published file was at hand,
// they are those of Kimi-K2 and Qwen3-MoE. A file with others is refused naming the key that is
// missing, and what the keys claim is held against the tensors.
FamilyRow KimiK3() {
  return {.id = "kimi_k3",
          .model_types = {"kimi_k3"},
          .experts_module = "block_sparse_moe.experts",
          .projections = {"w1", "w3", "w2"},
          .stacked = {},
          .formats = {&CompressedTensorsMxfp4(), &QuarkMxfp4()},
          .mtp_segment = nullptr,
          .hidden_key = nullptr,
          .intermediate_key = "moe_intermediate_size",
          .experts_keys = {"n_routed_experts", "num_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = "num_nextn_predict_layers",
          .dense = {.first = "first_k_dense_replace",
                    .frequency = "moe_layer_freq",
                    .step = nullptr,
                    .list = nullptr},
          .activation_key = nullptr,
          .default_activation = "SITU",
          .activations = {},
          .expert_dtype_key = nullptr,
          .scalar_suffixes = {"input_scale"}};
}

// config.json says hidden_act `silu`, but the experts clamp and shift: SWIGLUOAI.
FamilyRow GptOss() {
  return {.id = "gpt_oss",
          .model_types = {"gpt_oss"},
          .experts_module = "mlp.experts",
          .projections = {},
          .stacked = {{"gate_up_proj_blocks", kGateWeight, kUpWeight},
                      {"gate_up_proj_scales", kGateScale, kUpScale},
                      {"gate_up_proj_bias", kGateBias, kUpBias},
                      {"down_proj_blocks", kDownWeight, kExpertTensorCount},
                      {"down_proj_scales", kDownScale, kExpertTensorCount},
                      {"down_proj_bias", kDownBias, kExpertTensorCount}},
          .formats = {&GptOssMxfp4()},
          .mtp_segment = nullptr,
          .hidden_key = "hidden_size",
          .intermediate_key = "intermediate_size",
          .experts_keys = {"num_local_experts", "num_experts"},
          .layers_key = "num_hidden_layers",
          .mtp_layers_key = nullptr,
          .dense = {},
          .activation_key = nullptr,
          .default_activation = "SWIGLUOAI",
          .activations = {},
          .expert_dtype_key = nullptr,
          .scalar_suffixes = {}};
}

}  // namespace

const std::vector<FamilyRow>& FamilyRows() {
  static const auto* const rows = new std::vector<FamilyRow>{DeepSeekV4(), DeepSeekV3(), Qwen3Moe(),
                                                             Mixtral(),    KimiK3(),     GptOss()};
  return *rows;
}

}  // namespace shardprep
