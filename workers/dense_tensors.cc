#include "workers/dense_tensors.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "kernels/extents.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int64_t kMostRanks = 4096;
constexpr char kWeight[] = ".weight";
constexpr char kScale[] = ".scale";
constexpr char kEngineScale[] = ".weight_scale_inv";

// Where a name stands.
enum class Place { kTop, kLayer };

// What a rule names: one tensor, or a linear layer with its weight and, when that is FP8, a scale
// for each block.
enum class Kind { kTensor, kLinear };

struct DenseRule {
  Place place;
  Kind kind;
  const char* name;    // in the checkpoint; in a layer what follows `layers.L.`
  const char* engine;  // in the engine, at the same place
  DenseCut cut;
  int order;  // place among the tensors that `engine` is fused from
  int count;  // their number
  // config.json key of what no rank may have a part of: heads, groups. Null: none.
  const char* units_key;
  int64_t multiple;    // that rows must be, before they are cut
  int64_t least_rows;  // of a rank; minus infinity behind those that it has
  const char* source;
};

constexpr char kColumnParallel[] =
    "vLLM vllm/models/deepseek_v4/amd/model.py: ColumnParallelLinear, rows of the weight";
constexpr char kRowParallel[] =
    "vLLM vllm/models/deepseek_v4/amd/model.py: RowParallelLinear, columns of the weight";
constexpr char kReplicated[] = "vLLM vllm/models/deepseek_v4/amd/model.py: replicated";
constexpr char kMerged[] =
    "vLLM vllm/models/deepseek_v4/amd/model.py: stacked parameters, replicated";
constexpr char kMergedColumn[] =
    "vLLM vllm/models/deepseek_v4/amd/model.py: stacked parameters, MergedColumnParallelLinear";
constexpr char kVocabulary[] =
    "vLLM model_executor/layers/vocab_parallel_embedding.py: rows, padded to multiples of 64";
constexpr char kSink[] =
    "vLLM vllm/models/deepseek_v4/amd/model.py: heads, in a buffer of max(heads/T, 64) filled "
    "with -inf";
constexpr char kMtp[] = "vLLM vllm/models/deepseek_v4/amd/mtp.py: replicated";

constexpr Place kTop = Place::kTop;
constexpr Place kLayer = Place::kLayer;
constexpr Kind kTensor = Kind::kTensor;
constexpr Kind kLinear = Kind::kLinear;
constexpr DenseCut kWhole = DenseCut::kWhole;
constexpr DenseCut kRows = DenseCut::kRows;
constexpr DenseCut kColumns = DenseCut::kColumns;

constexpr DenseRule Whole(Place place, const char* name, const char* engine = nullptr,
                          const char* source = kReplicated) {
  return {place, kTensor, name,  engine == nullptr ? name : engine, kWhole, 0, 1, nullptr,
          1,     0,       source};
}

constexpr DenseRule Fused(Kind kind, const char* name, const char* engine, int order,
                          DenseCut cut = kWhole, const char* source = kMerged) {
  return {kLayer, kind, name, engine, cut, order, 2, nullptr, 1, 0, source};
}

constexpr DenseRule Linear(const char* name, const char* engine, DenseCut cut, const char* units,
                           const char* source) {
  return {kLayer, kLinear, name, engine, cut, 0, 1, units, 1, 0, source};
}

constexpr DenseRule Vocabulary(const char* name, const char* engine) {
  return {kTop, kTensor, name, engine, kRows, 0, 1, nullptr, 64, 0, kVocabulary};
}

// DeepSeek-V4; the extents and names of the published checkpoint.
const std::vector<DenseRule>& DeepSeekV4Rules() {
  static const auto* const rules = new std::vector<DenseRule>{
      Vocabulary("embed.weight", "embed_tokens.weight"),
      Vocabulary("head.weight", "lm_head.weight"),
      Whole(kTop, "norm.weight"),
      Whole(kTop, "hc_head_fn"),
      Whole(kTop, "hc_head_base"),
      Whole(kTop, "hc_head_scale"),
      Whole(kLayer, "attn_norm.weight"),
      Whole(kLayer, "ffn_norm.weight"),
      Whole(kLayer, "hc_attn_fn"),
      Whole(kLayer, "hc_attn_base"),
      Whole(kLayer, "hc_attn_scale"),
      Whole(kLayer, "hc_ffn_fn"),
      Whole(kLayer, "hc_ffn_base"),
      Whole(kLayer, "hc_ffn_scale"),
      Fused(kLinear, "attn.wq_a", "attn.fused_wqa_wkv", 0),
      Fused(kLinear, "attn.wkv", "attn.fused_wqa_wkv", 1),
      Whole(kLayer, "attn.q_norm.weight"),
      Whole(kLayer, "attn.kv_norm.weight"),
      Linear("attn.wq_b", "attn.wq_b", kRows, "num_attention_heads", kColumnParallel),
      Linear("attn.wo_a", "attn.wo_a", kRows, "o_groups", kColumnParallel),
      Linear("attn.wo_b", "attn.wo_b", kColumns, "o_groups", kRowParallel),
      {kLayer, kTensor, "attn.attn_sink", "attn.attn_sink", kRows, 0, 1, "num_attention_heads", 1,
       64, kSink},
      Whole(kLayer, "attn.compressor.ape"),
      Fused(kTensor, "attn.compressor.wkv.weight", "attn.compressor.fused_wkv_wgate.weight", 0),
      Fused(kTensor, "attn.compressor.wgate.weight", "attn.compressor.fused_wkv_wgate.weight", 1),
      Whole(kLayer, "attn.compressor.norm.weight"),
      Linear("attn.indexer.wq_b", "attn.indexer.wq_b", kWhole, nullptr, kReplicated),
      Whole(kLayer, "attn.indexer.weights_proj.weight"),
      Whole(kLayer, "attn.indexer.compressor.ape"),
      Fused(kTensor, "attn.indexer.compressor.wkv.weight",
            "attn.indexer.compressor.fused_wkv_wgate.weight", 0),
      Fused(kTensor, "attn.indexer.compressor.wgate.weight",
            "attn.indexer.compressor.fused_wkv_wgate.weight", 1),
      Whole(kLayer, "attn.indexer.compressor.norm.weight"),
      Whole(kLayer, "ffn.gate.weight"),
      Whole(kLayer, "ffn.gate.bias", "ffn.gate.e_score_correction_bias"),
      Whole(kLayer, "ffn.gate.tid2eid"),
      Fused(kLinear, "ffn.shared_experts.w1", "ffn.shared_experts.gate_up_proj", 0, kRows,
            kMergedColumn),
      Fused(kLinear, "ffn.shared_experts.w3", "ffn.shared_experts.gate_up_proj", 1, kRows,
            kMergedColumn),
      Linear("ffn.shared_experts.w2", "ffn.shared_experts.down_proj", kColumns, nullptr,
             kRowParallel),
      Linear("e_proj", "e_proj", kWhole, nullptr, kMtp),
      Linear("h_proj", "h_proj", kWhole, nullptr, kMtp),
      Whole(kLayer, "enorm.weight", nullptr, kMtp),
      Whole(kLayer, "hnorm.weight", nullptr, kMtp),
      Whole(kLayer, "norm.weight", nullptr, kMtp),
      Whole(kLayer, "hc_head_fn", nullptr, kMtp),
      Whole(kLayer, "hc_head_base", nullptr, kMtp),
      Whole(kLayer, "hc_head_scale", nullptr, kMtp),
  };
  return *rules;
}

const std::vector<DenseRule>* RulesOf(const std::string& family) {
  return family == "deepseek_v4" ? &DeepSeekV4Rules() : nullptr;
}

// One tensor of the checkpoint and the rule that it falls under.
struct Match {
  const DenseRule* rule = nullptr;
  int32_t tensor = 0;
  bool is_weight = false;  // of a linear layer
  bool is_scale = false;
};

// Elements that one scale covers.
struct ScaleBlock {
  int64_t rows = 0;
  int64_t columns = 0;
};

class DenseSlicer {
 public:
  DenseSlicer(const Checkpoint& checkpoint, const MoeCheckpoint& moe,
              const std::vector<DenseRule>& rules, int64_t ranks)
      : checkpoint_(checkpoint),
        tensors_(checkpoint.tensors()),
        moe_(moe),
        rules_(rules),
        ranks_(ranks) {
    if (moe.layers.empty()) return;
    const std::string& module = moe.layers.front().module;
    const size_t at = module.find("layers.");
    if (at != std::string::npos) prefix_ = module.substr(0, at);
  }

  absl::StatusOr<std::vector<DenseTensor>> Run(const std::vector<int32_t>& tensors) {
    std::map<std::string, std::vector<Match>> groups;  // by the engine's name
    for (const int32_t tensor : tensors) SP_RETURN_IF_ERROR(Assign(tensor, groups));
    std::vector<DenseTensor> result;
    for (auto& [name, matches] : groups) {
      std::sort(matches.begin(), matches.end(),
                [](const Match& a, const Match& b) { return a.rule->order < b.rule->order; });
      SP_RETURN_IF_ERROR(CheckComplete(name, matches));
      SP_ASSIGN_OR_RETURN(DenseTensor tensor, Build(name, matches));
      result.push_back(std::move(tensor));
    }
    return result;
  }

 private:
  absl::Status Refuse(int32_t tensor, const std::string& why) const {
    const TensorInfo info = tensors_.at(tensor);
    return absl::InvalidArgumentError(absl::StrCat(
        PrintableName(info.name), ": ", DescribeTensor(info.dtype, info.shape), ": ", why));
  }

  // Takes `layers.L.` or `mtp.J.` off the front; the number of the prepared layer.
  std::optional<int64_t> ConsumeLayer(absl::string_view* name) const {
    absl::string_view rest = *name;
    const bool mtp = absl::ConsumePrefix(&rest, "mtp.");
    if (!mtp && !absl::ConsumePrefix(&rest, "layers.")) return std::nullopt;
    const size_t dot = rest.find('.');
    int64_t number = 0;
    if (dot == absl::string_view::npos || !absl::SimpleAtoi(rest.substr(0, dot), &number)) {
      return std::nullopt;
    }
    *name = rest.substr(dot + 1);
    return mtp ? moe_.hidden_layers + number : number;
  }

  std::string EngineName(std::optional<int64_t> layer, const std::string& leaf) const {
    if (layer) return absl::StrCat(moe_.engine_prefix, "layers.", *layer, ".", leaf);
    absl::string_view prefix = moe_.engine_prefix;
    // The output layer stands beside the model, not in it.
    if (absl::StartsWith(leaf, "lm_head.")) absl::ConsumeSuffix(&prefix, "model.");
    return absl::StrCat(prefix, leaf);
  }

  absl::Status Assign(int32_t tensor, std::map<std::string, std::vector<Match>>& groups) const {
    absl::string_view name = tensors_.at(tensor).name;
    absl::ConsumePrefix(&name, prefix_);
    const std::optional<int64_t> layer = ConsumeLayer(&name);
    for (const DenseRule& rule : rules_) {
      if ((rule.place == Place::kLayer) != layer.has_value()) continue;
      absl::string_view rest = name;
      if (!absl::ConsumePrefix(&rest, rule.name)) continue;
      Match match{.rule = &rule, .tensor = tensor};
      match.is_weight = rule.kind == Kind::kLinear && rest == kWeight;
      match.is_scale = rule.kind == Kind::kLinear && rest == kScale;
      if (rule.kind == Kind::kTensor ? !rest.empty() : !match.is_weight && !match.is_scale)
        continue;
      const char* suffix = match.is_scale ? kEngineScale : match.is_weight ? kWeight : "";
      groups[EngineName(layer, absl::StrCat(rule.engine, suffix))].push_back(match);
      return absl::OkStatus();
    }
    return Refuse(tensor, absl::StrCat("no tensor-parallel rule of ", moe_.family,
                                       " knows it; it can be carried only without slice_dense"));
  }

  absl::Status CheckComplete(const std::string& name, const std::vector<Match>& matches) const {
    const int count = matches.front().rule->count;
    bool complete = static_cast<int>(matches.size()) == count;
    std::vector<std::string> names;
    for (int i = 0; i < static_cast<int>(matches.size()); ++i) {
      const Match& match = matches[static_cast<size_t>(i)];
      complete = complete && match.rule->order == i;
      names.push_back(PrintableName(tensors_.at(match.tensor).name));
    }
    if (complete) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(PrintableName(name), ": is made from ", count,
                                                   " tensors, found ", absl::StrJoin(names, ", ")));
  }

  // quantization_config.weight_block_size of config.json.
  absl::StatusOr<ScaleBlock> Block() const {
    const auto config = nlohmann::json::parse(checkpoint_.config_text(), nullptr, false);
    const auto bad = [] {
      return absl::InvalidArgumentError(
          "config.json: quantization_config.weight_block_size: want [rows, columns], by which FP8 "
          "tensors and their scales are sliced");
    };
    if (!config.is_object()) return bad();
    const auto quantization = config.find("quantization_config");
    if (quantization == config.end() || !quantization->is_object()) return bad();
    const auto size = quantization->find("weight_block_size");
    if (size == quantization->end() || !size->is_array() || size->size() != 2) return bad();
    for (const nlohmann::json& extent : *size) {
      if (!extent.is_number_unsigned() || extent.get<uint64_t>() < 1 ||
          extent.get<uint64_t>() > (uint64_t{1} << 20)) {
        return bad();
      }
    }
    return ScaleBlock{(*size)[0].get<int64_t>(), (*size)[1].get<int64_t>()};
  }

  // The other tensor of a linear layer.
  std::optional<TensorInfo> Sibling(const Match& match) const {
    absl::string_view name = tensors_.at(match.tensor).name;
    absl::ConsumeSuffix(&name, match.is_scale ? kScale : kWeight);
    const auto index =
        checkpoint_.FindTensor(absl::StrCat(name, match.is_scale ? kWeight : kScale));
    if (!index) return std::nullopt;
    return tensors_.at(*index);
  }

  // Weight and scale fit each other; answers the block, or {1, 1} where there is no scale.
  absl::StatusOr<ScaleBlock> CheckLinear(const Match& match) const {
    const std::optional<TensorInfo> sibling = Sibling(match);
    if (match.is_scale && !sibling) return Refuse(match.tensor, "is the scale of no weight");
    const TensorInfo own = tensors_.at(match.tensor);
    const TensorInfo weight = match.is_scale ? *sibling : own;
    if (weight.shape.size() != 2 || own.shape.size() != 2) {
      return Refuse(match.tensor, "want two dimensions");
    }
    if (own.size_bytes == 0) return Refuse(match.tensor, "is empty");
    const bool has_scale = match.is_scale || sibling.has_value();
    if (weight.dtype == Dtype::kBF16 && !has_scale) return ScaleBlock{1, 1};
    if (weight.dtype != Dtype::kF8E4M3 || !has_scale) {
      return Refuse(match.tensor, "want F8_E4M3 with a scale, or BF16 without");
    }
    const TensorInfo scale = match.is_scale ? own : *sibling;
    SP_ASSIGN_OR_RETURN(const ScaleBlock block, Block());
    const int64_t rows = CeilDiv(weight.shape[0], block.rows);
    const int64_t columns = CeilDiv(weight.shape[1], block.columns);
    if (scale.shape.size() != 2 || scale.shape[0] != rows || scale.shape[1] != columns) {
      return Refuse(match.tensor,
                    absl::StrCat("weight and scale do not fit: want scales [", rows, ",", columns,
                                 "], one for ", block.rows, " x ", block.columns, " elements"));
    }
    return block;
  }

  struct Extent {
    int64_t elements = 0;
    int64_t block = 1;  // that no rank may have a part of
    int64_t units = 0;  // heads or groups; 0: none
    const DenseRule* rule = nullptr;
  };

  static bool Divides(const Extent& extent, int64_t ranks) {
    return extent.elements % ranks == 0 && extent.elements % extent.rule->multiple == 0 &&
           (ranks == 1 || (extent.elements / ranks) % extent.block == 0) &&
           extent.units % ranks == 0;
  }

  // Whether `ranks_` ranks can share the extent that the rule cuts.
  absl::Status CheckExtent(int32_t tensor, Extent extent) const {
    const DenseRule& rule = *extent.rule;
    if (rule.cut == DenseCut::kWhole) return absl::OkStatus();
    if (rule.units_key != nullptr) {
      const auto units = checkpoint_.ConfigInt(rule.units_key);
      if (absl::IsNotFound(units.status())) {
        return absl::InvalidArgumentError(std::string(units.status().message()));
      }
      SP_RETURN_IF_ERROR(units.status());
      extent.units = *units;
      if (extent.units < 1 || extent.elements % extent.units != 0) {
        return Refuse(tensor, absl::StrCat(extent.elements, " elements do not divide among ",
                                           rule.units_key, " ", extent.units));
      }
    }
    if (Divides(extent, ranks_)) return absl::OkStatus();
    std::vector<int64_t> legal;
    for (int64_t ranks = 1; ranks <= std::min(extent.elements, kMostRanks); ++ranks) {
      if (Divides(extent, ranks)) legal.push_back(ranks);
    }
    std::string why = absl::StrCat(extent.elements, rule.cut == kRows ? " rows" : " columns",
                                   " do not divide among ", ranks_, " tensor-parallel ranks");
    if (extent.block > 1) absl::StrAppend(&why, " into whole scale blocks of ", extent.block);
    if (extent.units > 0) absl::StrAppend(&why, ", ", rule.units_key, " ", extent.units);
    if (rule.multiple > 1)
      absl::StrAppend(&why, ", a multiple of ", rule.multiple, " being wanted");
    return Refuse(tensor, absl::StrCat(why, "; sizes that work: ",
                                       legal.empty() ? "none" : absl::StrJoin(legal, ", "), " (",
                                       rule.source, ")"));
  }

  // Extents of the weight that a tensor is, or whose scale it is.
  absl::Status CheckCut(const Match& match, const ScaleBlock& block) const {
    const TensorInfo info = match.is_scale ? *Sibling(match) : tensors_.at(match.tensor);
    const DenseRule& rule = *match.rule;
    if (rule.cut == DenseCut::kRows && info.shape.empty()) {
      return Refuse(match.tensor, "has no rows to cut");
    }
    if (rule.cut == DenseCut::kRows) {
      SP_RETURN_IF_ERROR(
          CheckExtent(match.tensor,
                      {.elements = info.shape[0], .block = block.rows, .units = 0, .rule = &rule}));
    } else if (rule.cut == DenseCut::kColumns) {
      SP_RETURN_IF_ERROR(CheckExtent(
          match.tensor,
          {.elements = info.shape[1], .block = block.columns, .units = 0, .rule = &rule}));
    }
    // The blocks of what is fused behind it begin where a block begins.
    const int64_t rows = info.shape.empty() ? 1 : info.shape[0];
    const int64_t own_rows = rule.cut == DenseCut::kRows ? rows / ranks_ : rows;
    if (rule.order + 1 < rule.count && own_rows % block.rows != 0) {
      return Refuse(match.tensor,
                    absl::StrCat(own_rows, " rows end inside a scale block of ", block.rows,
                                 ", and ", rule.engine, " goes on behind them"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<DenseTensor> Build(const std::string& name, const std::vector<Match>& matches) {
    const DenseRule& rule = *matches.front().rule;
    const TensorInfo first = tensors_.at(matches.front().tensor);
    DenseTensor out{.name = name,
                    .dtype = first.dtype,
                    .shape = {first.shape.begin(), first.shape.end()},
                    .cut = rule.cut,
                    .sources = {},
                    .tail_bytes = 0,
                    .size_bytes = 0};
    if (!out.shape.empty()) out.shape[0] = 0;
    for (const Match& match : matches) {
      const TensorInfo info = tensors_.at(match.tensor);
      ScaleBlock block{1, 1};
      if (rule.kind == Kind::kLinear) {
        SP_ASSIGN_OR_RETURN(block, CheckLinear(match));
      }
      SP_RETURN_IF_ERROR(CheckCut(match, block));
      if (info.dtype != first.dtype || info.shape.size() != first.shape.size() ||
          RowShape(info) != RowShape(first)) {
        return Refuse(match.tensor,
                      absl::StrCat("is fused with ", PrintableName(first.name), ", which is ",
                                   DescribeTensor(first.dtype, first.shape)));
      }
      const bool columns = rule.cut == DenseCut::kColumns;
      const int64_t rows = columns ? info.shape[0] : info.size_bytes;
      out.sources.push_back({.tensor = match.tensor,
                             .rows = rows,
                             .row_bytes = columns && rows > 0 ? info.size_bytes / rows : 1});
      if (!out.shape.empty()) {
        out.shape[0] += rule.cut == DenseCut::kRows ? info.shape[0] / ranks_ : info.shape[0];
      }
      out.size_bytes += rule.cut == DenseCut::kWhole ? info.size_bytes : info.size_bytes / ranks_;
    }
    if (rule.cut == DenseCut::kColumns) out.shape[1] /= ranks_;
    if (rule.least_rows > 0) SP_RETURN_IF_ERROR(AddTail(matches.front(), out));
    return out;
  }

  // Extents behind the first.
  static absl::Span<const int64_t> RowShape(const TensorInfo& info) {
    return info.shape.empty() ? info.shape : info.shape.subspan(1);
  }

  absl::Status AddTail(const Match& match, DenseTensor& out) const {
    if (out.dtype != Dtype::kF32 || out.shape.size() != 1) {
      return Refuse(match.tensor, "want F32 in one dimension");
    }
    const int64_t more = std::max<int64_t>(0, match.rule->least_rows - out.shape[0]);
    out.shape[0] += more;
    out.tail_bytes = more * DtypeBits(Dtype::kF32) / 8;
    out.size_bytes += out.tail_bytes;
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const TensorTable& tensors_;
  const MoeCheckpoint& moe_;
  const std::vector<DenseRule>& rules_;
  const int64_t ranks_;
  std::string prefix_;  // of the checkpoint's names
};

}  // namespace

std::vector<DenseTensor> CarryDense(const Checkpoint& checkpoint,
                                    const std::vector<int32_t>& tensors) {
  std::vector<DenseTensor> result;
  result.reserve(tensors.size());
  for (const int32_t tensor : tensors) {
    const TensorInfo info = checkpoint.tensors().at(tensor);
    result.push_back({.name = std::string(info.name),
                      .dtype = info.dtype,
                      .shape = {info.shape.begin(), info.shape.end()},
                      .cut = DenseCut::kWhole,
                      .sources = {{.tensor = tensor, .rows = info.size_bytes, .row_bytes = 1}},
                      .tail_bytes = 0,
                      .size_bytes = info.size_bytes});
  }
  return result;
}

absl::StatusOr<std::vector<DenseTensor>> SliceDense(const Checkpoint& checkpoint,
                                                    const MoeCheckpoint& moe,
                                                    const std::vector<int32_t>& tensors,
                                                    int64_t ranks) {
  SP_CHECK(ranks >= 1);
  const std::vector<DenseRule>* rules = RulesOf(moe.family);
  if (rules == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("slice_dense: there are no tensor-parallel rules for dense tensors of ",
                     moe.family, ", only for those of deepseek_v4"));
  }
  return DenseSlicer(checkpoint, moe, *rules, ranks).Run(tensors);
}

}  // namespace shardprep
