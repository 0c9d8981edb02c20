#include "tests/support/test_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

constexpr int64_t kWriteBytes = int64_t{4} << 20;

// The finaliser of splitmix64: a bijection of 64-bit words without visible pattern.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t ExpertSeed(const ExpertPlace& place) {
  return Mix(0x5368617264507265u + (static_cast<uint64_t>(place.layer) << 40) +
             (static_cast<uint64_t>(place.expert) << 8) + static_cast<uint64_t>(place.kind));
}

// Eight bytes of a row, lowest first.
uint64_t ExpertWord(uint64_t seed, int64_t row, int64_t word) {
  return Mix(seed ^ ((static_cast<uint64_t>(row) << 32) + static_cast<uint64_t>(word)));
}

bool IsScaleKind(ExpertTensor kind) {
  return kind == kGateScale || kind == kUpScale || kind == kDownScale;
}

bool IsDeepSeekV4(TestFamily family) {
  return family == TestFamily::kDeepSeekV4 || family == TestFamily::kDeepSeekV4Fp8;
}

// How an expert's matrices are named and stored.
struct ExpertStyle {
  const char* module;
  std::array<const char*, 3> projections;
  const char* weight;
  const char* scale;  // null without scales
  Dtype weight_dtype;
  int64_t elements;  // that one unit of the shape counts
  Dtype scale_dtype;
  int64_t block_rows;
  int64_t block_columns;
};

ExpertStyle StyleOf(const CheckpointSpec& spec) {
  constexpr std::array<const char*, 3> kNumbered = {"w1", "w3", "w2"};
  constexpr std::array<const char*, 3> kNamed = {"gate_proj", "up_proj", "down_proj"};
  switch (spec.family) {
    case TestFamily::kDeepSeekV4:
      return {"ffn.experts",
              kNumbered,
              "weight",
              "scale",
              spec.weight_dtype,
              spec.weight_dtype == Dtype::kF4 ? 1 : 2,
              spec.scale_dtype,
              1,
              32};
    case TestFamily::kDeepSeekV4Fp8:
      return {"ffn.experts",  kNumbered, "weight", "scale", Dtype::kF8E4M3, 1,
              Dtype::kF8E8M0, 128,       128};
    case TestFamily::kDeepSeekV3Fp8:
      return {"mlp.experts", kNamed, "weight", "weight_scale_inv", Dtype::kF8E4M3, 1,
              Dtype::kF32,   128,    128};
    case TestFamily::kDeepSeekV3Quark:
    case TestFamily::kQwen3Quark:
      return {"mlp.experts", kNamed, "weight", "weight_scale", Dtype::kU8, 2, Dtype::kU8, 1, 32};
    case TestFamily::kQwen3Bf16:
      return {"mlp.experts", kNamed, "weight", nullptr, Dtype::kBF16, 1, Dtype::kU8, 1, 1};
    case TestFamily::kMixtral:
      return {"block_sparse_moe.experts",
              kNumbered,
              "weight",
              nullptr,
              Dtype::kBF16,
              1,
              Dtype::kU8,
              1,
              1};
    case TestFamily::kKimiK3:
      return {"block_sparse_moe.experts",
              kNumbered,
              "weight_packed",
              "weight_scale",
              Dtype::kU8,
              2,
              Dtype::kU8,
              1,
              32};
    case TestFamily::kGptOss:
      return {"mlp.experts", {}, "blocks", "scales", Dtype::kU8, 2, Dtype::kU8, 1, 32};
  }
  return {};
}

uint8_t ScaleByte(uint8_t byte) { return std::clamp<uint8_t>(byte, 1, 254); }

uint64_t NameSeed(absl::string_view name) {
  uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash;
}

uint64_t OtherWord(uint64_t seed, int64_t word) { return Mix(seed + static_cast<uint64_t>(word)); }

template <typename WordAt>
void FillBytes(uint8_t* out, int64_t begin, int64_t end, const WordAt& word_at) {
  for (int64_t i = begin; i < end;) {
    uint64_t word = word_at(i / 8) >> (8 * (i % 8));
    for (const int64_t stop = std::min(end, (i / 8 + 1) * 8); i < stop; ++i) {
      *out++ = static_cast<uint8_t>(word);
      word >>= 8;
    }
  }
}

class TensorList {
 public:
  explicit TensorList(const CheckpointSpec& spec) : spec_(spec) {}

  std::vector<TestTensor> Build() {
    if (!IsDeepSeekV4(spec_.family)) return BuildOther();
    Add("embed.weight", Dtype::kBF16, {spec_.vocabulary, spec_.hidden});
    for (int64_t layer = 0; layer < spec_.layers + spec_.mtp_layers; ++layer) AddBlock(layer);
    Add("norm.weight", Dtype::kBF16, {spec_.hidden});
    Add("head.weight", Dtype::kBF16, {spec_.vocabulary, spec_.hidden});
    AddHyperHead("");
    if (!spec_.published) {
      Add("scalar", Dtype::kF32, {});
      Add("nothing", Dtype::kF8E4M3, {4, 0, 8});
    }
    return std::move(tensors_);
  }

 private:
  void Add(const std::string& name, Dtype dtype, std::vector<int64_t> shape,
           std::optional<ExpertPlace> place = std::nullopt) {
    TestTensor tensor{.name = absl::StrCat(spec_.prefix, name),
                      .dtype = dtype,
                      .shape = std::move(shape),
                      .place = place};
    if (!spec_.edit || spec_.edit(tensor)) tensors_.push_back(std::move(tensor));
  }

  // Models whose names follow the modules of the Transformers library.
  std::vector<TestTensor> BuildOther() {
    Add("embed_tokens.weight", Dtype::kBF16, {spec_.vocabulary, spec_.hidden});
    const ExpertStyle style = StyleOf(spec_);
    const std::string mlp =
        std::string(style.module).substr(0, std::string(style.module).find('.'));
    for (int64_t layer = 0; layer < spec_.layers + spec_.mtp_layers; ++layer) {
      const std::string block = absl::StrCat("layers.", layer, ".");
      Add(block + "input_layernorm.weight", Dtype::kBF16, {spec_.hidden});
      Add(block + "self_attn.o_proj.weight", Dtype::kBF16, {spec_.hidden, 48});
      if (layer < spec_.dense_layers) {
        Add(block + "mlp.gate_proj.weight", Dtype::kBF16, {96, spec_.hidden});
        Add(block + "mlp.down_proj.weight", Dtype::kBF16, {spec_.hidden, 96});
        continue;
      }
      Add(absl::StrCat(block, mlp, ".gate.weight"), Dtype::kBF16, {spec_.experts, spec_.hidden});
      Add(absl::StrCat(block, mlp, ".shared_experts.down_proj.weight"), Dtype::kBF16,
          {spec_.hidden, 32});
      if (spec_.family == TestFamily::kGptOss) {
        AddStackedExperts(block, layer);
      } else {
        AddExperts(block, layer);
      }
    }
    Add("norm.weight", Dtype::kBF16, {spec_.hidden});
    return std::move(tensors_);
  }

  void AddStacked(const std::string& name, Dtype dtype, std::vector<int64_t> shape, int64_t layer,
                  ExpertTensor kind, bool alternating) {
    const size_t before = tensors_.size();
    Add(name, dtype, std::move(shape), ExpertPlace{layer, 0, kind});
    if (tensors_.size() == before) return;
    tensors_.back().stacked = true;
    tensors_.back().alternating = alternating;
  }

  void AddStackedExperts(const std::string& block, int64_t layer) {
    const int64_t e = spec_.experts, i = spec_.intermediate, h = spec_.hidden;
    const std::string up = block + "mlp.experts.gate_up_proj_";
    AddStacked(up + "blocks", Dtype::kU8, {e, 2 * i, h / 32, 16}, layer, kGateWeight, true);
    AddStacked(up + "scales", Dtype::kU8, {e, 2 * i, h / 32}, layer, kGateScale, true);
    AddStacked(up + "bias", Dtype::kBF16, {e, 2 * i}, layer, kGateBias, true);
    const std::string down = block + "mlp.experts.down_proj_";
    AddStacked(down + "blocks", Dtype::kU8, {e, h, i / 32, 16}, layer, kDownWeight, false);
    AddStacked(down + "scales", Dtype::kU8, {e, h, i / 32}, layer, kDownScale, false);
    AddStacked(down + "bias", Dtype::kBF16, {e, h}, layer, kDownBias, false);
  }

  // FP8 in blocks of 128 x 128.
  void AddLinear(const std::string& name, int64_t out, int64_t in) {
    Add(absl::StrCat(name, ".weight"), Dtype::kF8E4M3, {out, in});
    Add(absl::StrCat(name, ".scale"), Dtype::kF8E8M0, {(out + 127) / 128, (in + 127) / 128});
  }

  void AddHyperHead(const std::string& block) {
    if (!spec_.published) return;
    Add(block + "hc_head_fn", Dtype::kF32, {4, 4 * spec_.hidden});
    Add(block + "hc_head_base", Dtype::kF32, {4});
    Add(block + "hc_head_scale", Dtype::kF32, {1});
  }

  void AddBlock(int64_t layer) {
    const bool is_mtp = layer >= spec_.layers;
    const std::string block = is_mtp && !spec_.mtp_as_layers
                                  ? absl::StrCat("mtp.", layer - spec_.layers, ".")
                                  : absl::StrCat("layers.", layer, ".");
    Add(block + "attn_norm.weight", Dtype::kBF16, {spec_.hidden});
    Add(block + "ffn_norm.weight", Dtype::kBF16, {spec_.hidden});
    if (spec_.published) {
      AddPublishedAttention(block, layer);
    } else {
      AddLinear(block + "attn.wq_a", 160, spec_.hidden);
      Add(block + "attn.attn_sink", Dtype::kF32, {8});
    }
    AddGate(block, layer);
    const int64_t shared = spec_.published ? spec_.intermediate : 32;
    AddLinear(block + "ffn.shared_experts.w1", shared, spec_.hidden);
    AddLinear(block + "ffn.shared_experts.w3", shared, spec_.hidden);
    AddLinear(block + "ffn.shared_experts.w2", spec_.hidden, shared);
    AddExperts(block, layer);
    if (is_mtp) AddMtpOnly(block);
  }

  void AddGate(const std::string& block, int64_t layer) {
    Add(block + "ffn.gate.weight", Dtype::kBF16, {spec_.experts, spec_.hidden});
    if (layer < spec_.hash_layers) {
      Add(block + "ffn.gate.tid2eid", Dtype::kI64, {spec_.vocabulary, 6});
    } else {
      Add(block + "ffn.gate.bias", Dtype::kF32, {spec_.experts});
    }
  }

  void AddExperts(const std::string& block, int64_t layer) {
    const ExpertStyle style = StyleOf(spec_);
    for (int64_t expert = 0; expert < spec_.experts; ++expert) {
      for (int p = 0; p < 3; ++p) {
        const int64_t rows = p == 2 ? spec_.hidden : spec_.intermediate;
        const int64_t columns = p == 2 ? spec_.intermediate : spec_.hidden;
        const std::string name =
            absl::StrCat(block, style.module, ".", expert, ".", style.projections.at(p), ".");
        Add(name + style.weight, style.weight_dtype, {rows, columns / style.elements},
            ExpertPlace{layer, expert, static_cast<ExpertTensor>(2 * p)});
        if (style.scale == nullptr) continue;
        Add(name + style.scale, style.scale_dtype,
            {(rows + style.block_rows - 1) / style.block_rows,
             (columns + style.block_columns - 1) / style.block_columns},
            ExpertPlace{layer, expert, static_cast<ExpertTensor>(2 * p + 1)});
      }
    }
  }

  void AddMtpOnly(const std::string& block) {
    const std::string e_proj = block + "e_proj";
    if (spec_.published) {
      AddLinear(e_proj, spec_.hidden, spec_.hidden);
      AddLinear(block + "h_proj", spec_.hidden, spec_.hidden);
    }
    for (const char* norm : {"enorm", "hnorm", "norm"}) {
      Add(absl::StrCat(block, norm, ".weight"), Dtype::kBF16, {spec_.hidden});
    }
    AddHyperHead(block);
  }

  void AddCompressor(const std::string& name, int64_t ratio, int64_t width) {
    const int64_t columns = ratio == 4 ? 2 * width : width;
    Add(name + ".ape", Dtype::kF32, {ratio, columns});
    Add(name + ".wkv.weight", Dtype::kBF16, {columns, spec_.hidden});
    Add(name + ".wgate.weight", Dtype::kBF16, {columns, spec_.hidden});
    Add(name + ".norm.weight", Dtype::kBF16, {width});
  }

  // Layers alternate between compression ratios 128 and 4, the MTP block has none.
  void AddPublishedAttention(const std::string& block, int64_t layer) {
    const AttentionExtents& extents = spec_.attention;
    const int64_t output = extents.output_groups * extents.output_rank;
    const int64_t heads_size = extents.heads * extents.head_size;
    const int64_t hidden = spec_.hidden;
    for (const char* part : {"hc_attn", "hc_ffn"}) {
      Add(absl::StrCat(block, part, "_fn"), Dtype::kF32, {24, 4 * hidden});
      Add(absl::StrCat(block, part, "_base"), Dtype::kF32, {24});
      Add(absl::StrCat(block, part, "_scale"), Dtype::kF32, {3});
    }
    const std::string attention = block + "attn.";
    AddLinear(attention + "wq_a", extents.query_rank, hidden);
    AddLinear(attention + "wkv", extents.head_size, hidden);
    Add(attention + "q_norm.weight", Dtype::kBF16, {extents.query_rank});
    Add(attention + "kv_norm.weight", Dtype::kBF16, {extents.head_size});
    AddLinear(attention + "wq_b", heads_size, extents.query_rank);
    AddLinear(attention + "wo_a", output, heads_size / extents.output_groups);
    AddLinear(attention + "wo_b", hidden, output);
    Add(attention + "attn_sink", Dtype::kF32, {extents.heads});
    if (layer >= spec_.layers) return;
    const int64_t ratio = layer > 0 && layer % 2 == 0 ? 4 : 128;
    AddCompressor(attention + "compressor", ratio, extents.head_size);
    if (ratio != 4) return;
    AddLinear(attention + "indexer.wq_b", extents.index_heads * extents.index_head_size,
              extents.query_rank);
    Add(attention + "indexer.weights_proj.weight", Dtype::kBF16, {extents.index_heads, hidden});
    AddCompressor(attention + "indexer.compressor", 4, extents.index_head_size);
  }

  const CheckpointSpec& spec_;
  std::vector<TestTensor> tensors_;
};

// A tensor with its bytes counted.
struct PlacedTensor {
  const TestTensor* tensor = nullptr;
  int64_t size_bytes = 0;
};

// Header as the published writer makes it: padded to 8 bytes, so that data starts anywhere.
std::string HeaderBytes(const std::vector<PlacedTensor>& tensors) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  int64_t end = 0;
  for (const PlacedTensor& placed : tensors) {
    const TestTensor& tensor = *placed.tensor;
    absl::StrAppend(&json, ",", nlohmann::json(tensor.name).dump(), R"(:{"dtype":")",
                    DtypeName(tensor.dtype), R"(","shape":[)", absl::StrJoin(tensor.shape, ","),
                    R"(],"data_offsets":[)", end, ",", end + placed.size_bytes, "]}");
    end += placed.size_bytes;
  }
  json.push_back('}');
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(uint64_t{json.size()} >> (8 * i)));
  }
  return bytes + json;
}

// Rows of a tensor of an expert, or of all experts together.
int64_t RowsOf(const TestTensor& tensor) {
  if (!tensor.place || tensor.shape.empty()) return 1;
  return tensor.stacked ? tensor.shape[0] * tensor.shape[1] : tensor.shape[0];
}

// Where a row of a stacked tensor belongs.
std::pair<ExpertPlace, int64_t> RowPlace(const TestTensor& tensor, int64_t row) {
  ExpertPlace place = *tensor.place;
  if (!tensor.stacked) return {place, row};
  place.expert = row / tensor.shape[1];
  row %= tensor.shape[1];
  if (!tensor.alternating) return {place, row};
  constexpr std::array<std::pair<ExpertTensor, ExpertTensor>, 3> kUp = {
      {{kGateWeight, kUpWeight}, {kGateScale, kUpScale}, {kGateBias, kUpBias}}};
  for (const auto& [gate, up] : kUp) {
    if (row % 2 == 1 && place.kind == gate) {
      place.kind = up;
      break;
    }
  }
  return {place, row / 2};
}

// Streams a tensor's bytes in pieces of whole rows, or of kWriteBytes where there are no rows.
void WriteTensor(const PlacedTensor& placed, std::ofstream& out) {
  const TestTensor& tensor = *placed.tensor;
  const int64_t rows = RowsOf(tensor);
  const int64_t row_bytes = rows == 0 ? 0 : placed.size_bytes / rows;
  if (row_bytes == 0) return;
  std::vector<uint8_t> buffer;
  const auto flush = [&] {
    out.write(reinterpret_cast<const char*>(buffer.data()),
              static_cast<std::streamsize>(buffer.size()));
    buffer.clear();
  };
  const uint64_t name_seed = NameSeed(tensor.name);
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t seed = 0;
    int64_t place_row = 0;
    if (tensor.place) {
      const auto [place, at] = RowPlace(tensor, row);
      seed = ExpertSeed(place);
      place_row = at;
    }
    for (int64_t begin = 0; begin < row_bytes; begin += kWriteBytes) {
      const int64_t end = std::min(row_bytes, begin + kWriteBytes);
      const auto used = buffer.size();
      buffer.resize(used + static_cast<size_t>(end - begin));
      FillBytes(buffer.data() + used, begin, end, [&](int64_t word) {
        return tensor.place ? ExpertWord(seed, place_row, word) : OtherWord(name_seed, word);
      });
      if (tensor.place && IsScaleKind(tensor.place->kind)) {
        std::transform(buffer.begin() + static_cast<std::ptrdiff_t>(used), buffer.end(),
                       buffer.begin() + static_cast<std::ptrdiff_t>(used), ScaleByte);
      }
      if (static_cast<int64_t>(buffer.size()) >= kWriteBytes) flush();
    }
  }
  flush();
}

absl::Status WriteText(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::InternalError(absl::StrCat(path.string(), ": not written"));
}

absl::Status WriteDataFile(const std::filesystem::path& path,
                           const std::vector<PlacedTensor>& tensors, bool sparse) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  const std::string header = HeaderBytes(tensors);
  out << header;
  auto size_bytes = static_cast<int64_t>(header.size());
  for (const PlacedTensor& tensor : tensors) {
    size_bytes += tensor.size_bytes;
    if (!sparse) WriteTensor(tensor, out);
  }
  out.close();
  if (!out) return absl::InternalError(absl::StrCat(path.string(), ": not written"));
  std::error_code error;
  std::filesystem::resize_file(path, static_cast<uintmax_t>(size_bytes), error);
  if (!error) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(path.string(), ": ", error.message()));
}

nlohmann::json DeepSeekV4Config(const CheckpointSpec& spec) {
  nlohmann::json config = {
      {"architectures", {"DeepseekV4ForCausalLM"}},
      {"model_type", "deepseek_v4"},
      {"hidden_size", spec.hidden},
      {"moe_intermediate_size", spec.intermediate},
      {"n_routed_experts", spec.experts},
      {"n_shared_experts", 1},
      {"num_experts_per_tok", 6},
      {"num_hidden_layers", spec.layers},
      {"num_nextn_predict_layers", spec.mtp_layers},
      {"num_hash_layers", spec.hash_layers},
      {"vocab_size", spec.vocabulary},
      {"hidden_act", "silu"},
      {"swiglu_limit", 10.0},
      {"expert_dtype", spec.family == TestFamily::kDeepSeekV4Fp8 ? "fp8" : "fp4"},
      {"torch_dtype", "bfloat16"},
      {"quantization_config",
       {{"quant_method", "fp8"},
        {"fmt", "e4m3"},
        {"scale_fmt", "ue8m0"},
        {"weight_block_size", {128, 128}},
        {"activation_scheme", "dynamic"}}},
  };
  if (!spec.published) return config;
  config["num_attention_heads"] = spec.attention.heads;
  config["head_dim"] = spec.attention.head_size;
  config["q_lora_rank"] = spec.attention.query_rank;
  config["o_lora_rank"] = spec.attention.output_rank;
  config["o_groups"] = spec.attention.output_groups;
  config["index_n_heads"] = spec.attention.index_heads;
  config["index_head_dim"] = spec.attention.index_head_size;
  return config;
}

// The keys of the family that a loader needs.
nlohmann::json OtherConfig(const CheckpointSpec& spec) {
  nlohmann::json config = {{"hidden_size", spec.hidden},
                           {"num_hidden_layers", spec.layers},
                           {"vocab_size", spec.vocabulary},
                           {"hidden_act", "silu"}};
  switch (spec.family) {
    case TestFamily::kDeepSeekV3Fp8:
    case TestFamily::kDeepSeekV3Quark:
      config["model_type"] = "deepseek_v3";
      config["moe_intermediate_size"] = spec.intermediate;
      config["n_routed_experts"] = spec.experts;
      config["num_nextn_predict_layers"] = spec.mtp_layers;
      config["first_k_dense_replace"] = spec.dense_layers;
      config["moe_layer_freq"] = 1;
      return config;
    case TestFamily::kQwen3Bf16:
    case TestFamily::kQwen3Quark:
      config["model_type"] = "qwen3_moe";
      config["moe_intermediate_size"] = spec.intermediate;
      config["num_experts"] = spec.experts;
      config["decoder_sparse_step"] = 1;
      config["mlp_only_layers"] = nlohmann::json::array();
      for (int64_t layer = 0; layer < spec.dense_layers; ++layer) {
        config["mlp_only_layers"].push_back(layer);
      }
      return config;
    case TestFamily::kKimiK3:
      config["moe_intermediate_size"] = spec.intermediate;
      config["num_experts"] = spec.experts;
      config["hidden_size"] = 2 * spec.hidden;  // experts work in a latent space
      config["first_k_dense_replace"] = spec.dense_layers;
      config["num_nextn_predict_layers"] = spec.mtp_layers;
      config["hidden_act"] = "situ";
      return {{"model_type", "kimi_k3"}, {"text_config", config}};
    default:
      config["model_type"] = spec.family == TestFamily::kMixtral ? "mixtral" : "gpt_oss";
      config["intermediate_size"] = spec.intermediate;
      config["num_local_experts"] = spec.experts;
      return config;
  }
}

nlohmann::json ConfigJson(const CheckpointSpec& spec) {
  nlohmann::json config = IsDeepSeekV4(spec.family) ? DeepSeekV4Config(spec) : OtherConfig(spec);
  for (const auto& [key, text] : spec.config) {
    if (text.empty()) {
      config.erase(key);
    } else {
      config[key] = nlohmann::json::parse(text);
    }
  }
  return config;
}

absl::Status WriteSmallFiles(const std::filesystem::path& directory, const CheckpointSpec& spec,
                             const std::vector<TestTensor>& tensors, int64_t total_bytes) {
  SP_RETURN_IF_ERROR(WriteText(directory / "config.json", ConfigJson(spec).dump(2)));
  SP_RETURN_IF_ERROR(WriteText(directory / "generation_config.json", R"({"do_sample":true})"));
  SP_RETURN_IF_ERROR(WriteText(directory / "tokenizer.json",
                               R"({"version":"1.0","model":{"type":"BPE","vocab":{"a":0}}})"));
  SP_RETURN_IF_ERROR(
      WriteText(directory / "tokenizer_config.json", R"({"tokenizer_class":"TokenizersBackend"})"));
  if (!spec.with_index) return absl::OkStatus();
  nlohmann::json weight_map = nlohmann::json::object();
  for (const TestTensor& tensor : tensors) {
    weight_map[tensor.name] = TestFileName(spec, tensor.file);
  }
  return WriteText(directory / "model.safetensors.index.json",
                   nlohmann::json{{"metadata", {{"total_size", total_bytes}}},
                                  {"weight_map", std::move(weight_map)}}
                       .dump(2));
}

absl::Status WriteAll(const std::string& directory, const CheckpointSpec& spec) {
  SP_ASSIGN_OR_RETURN(const std::vector<TestTensor> tensors, TestTensors(spec));
  std::filesystem::create_directories(directory);
  std::vector<std::vector<PlacedTensor>> files(static_cast<size_t>(spec.files));
  int64_t total_bytes = 0;
  for (const TestTensor& tensor : tensors) {
    SP_ASSIGN_OR_RETURN(const int64_t size_bytes, TensorBytes(tensor.dtype, tensor.shape));
    files.at(static_cast<size_t>(tensor.file)).push_back({&tensor, size_bytes});
    total_bytes += size_bytes;
  }
  for (int file = 0; file < spec.files; ++file) {
    const std::filesystem::path path = std::filesystem::path(directory) / TestFileName(spec, file);
    SP_RETURN_IF_ERROR(WriteDataFile(path, files[static_cast<size_t>(file)], spec.sparse));
  }
  return WriteSmallFiles(directory, spec, tensors, total_bytes);
}

}  // namespace

CheckpointSpec FamilySpec(TestFamily family) {
  CheckpointSpec spec;
  spec.family = family;
  spec.files = 2;
  spec.layers = 2;
  spec.mtp_layers = 0;
  if (IsDeepSeekV4(family)) return spec;
  spec.prefix = family == TestFamily::kKimiK3 ? "language_model.model." : "model.";
  if (family == TestFamily::kMixtral || family == TestFamily::kGptOss) return spec;
  spec.dense_layers = 1;
  const bool mtp = family == TestFamily::kDeepSeekV3Fp8 || family == TestFamily::kDeepSeekV3Quark;
  spec.mtp_layers = mtp ? 1 : 0;
  return spec;
}

CheckpointSpec QuickstartSpec() {
  CheckpointSpec spec;
  spec.hidden = 7168;
  spec.intermediate = 3072;
  spec.vocabulary = 1024;
  spec.files = 4;
  return spec;
}

CheckpointSpec SmallV4Spec() {
  CheckpointSpec spec;
  spec.intermediate = 512;
  spec.experts = 4;
  spec.layers = 3;  // one of each compression ratio among those that route by score
  spec.vocabulary = 256;
  spec.files = 2;
  spec.published = true;
  spec.attention = {.heads = 8,
                    .head_size = 128,
                    .query_rank = 256,
                    .output_rank = 128,
                    .output_groups = 8,
                    .index_heads = 4,
                    .index_head_size = 64};
  return spec;
}

CheckpointSpec V4ProSpec() {
  CheckpointSpec spec;
  spec.hidden = 7168;
  spec.intermediate = 3072;
  spec.experts = 384;
  spec.layers = 61;
  spec.hash_layers = 3;
  spec.vocabulary = 129280;
  spec.files = 64;
  spec.published = true;
  spec.sparse = true;
  return spec;
}

absl::StatusOr<std::vector<TestTensor>> TestTensors(const CheckpointSpec& spec) {
  std::vector<TestTensor> tensors = TensorList(spec).Build();
  int64_t total_bytes = 0;
  std::vector<int64_t> sizes;
  for (const TestTensor& tensor : tensors) {
    SP_ASSIGN_OR_RETURN(const int64_t size_bytes, TensorBytes(tensor.dtype, tensor.shape));
    sizes.push_back(size_bytes);
    total_bytes += size_bytes;
  }
  int64_t begin = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].file = static_cast<int>(static_cast<double>(begin) /
                                       static_cast<double>(total_bytes) * spec.files);
    tensors[i].file = std::min(tensors[i].file, spec.files - 1);
    begin += sizes[i];
  }
  tensors.insert(tensors.end(), spec.extra.begin(), spec.extra.end());
  std::sort(tensors.begin(), tensors.end(), [](const TestTensor& a, const TestTensor& b) {
    if (a.file != b.file) return a.file < b.file;
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  for (int file = 0; file < spec.files; ++file) {
    const auto in_file = [&](const TestTensor& tensor) { return tensor.file == file; };
    if (std::any_of(tensors.begin(), tensors.end(), in_file)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("file ", file, " of ", spec.files, " would hold no tensor"));
  }
  return tensors;
}

std::string TestFileName(const CheckpointSpec& spec, int file) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", file + 1, spec.files);
}

absl::Status WriteTestCheckpoint(const std::string& directory, const CheckpointSpec& spec) {
  try {
    return WriteAll(directory, spec);
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat(directory, ": ", e.what()));
  }
}

uint8_t ExpectedByte(int64_t layer, int64_t expert, ExpertTensor kind, int64_t row,
                     int64_t byte_column) {
  const uint64_t word = ExpertWord(ExpertSeed({layer, expert, kind}), row, byte_column / 8);
  const auto byte = static_cast<uint8_t>(word >> (8 * (byte_column % 8)));
  return IsScaleKind(kind) ? ScaleByte(byte) : byte;
}

uint8_t ExpectedOtherByte(absl::string_view name, int64_t offset) {
  return static_cast<uint8_t>(OtherWord(NameSeed(name), offset / 8) >> (8 * (offset % 8)));
}

}  // namespace shardprep
