#include "workers/family.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

struct WeightDtype {
  Dtype dtype;
  int64_t elements;  // that one unit of the shape counts
};

struct ActivationName {
  const char* config;  // as config.json has it
  const char* policy;  // as the alignment policy has it
};

// How a family names and stores its routed experts:
// [prefix] layers.L. experts_module .X. projection . weight_suffix or one of scale_suffixes
struct FamilyRow {
  const char* id;  // the model_type that chooses the row
  const char* experts_module;
  std::array<const char*, 3> projections;  // gate, up, down
  const char* weight_suffix;
  std::vector<const char*> scale_suffixes;  // the published one first
  std::vector<WeightDtype> weight_dtypes;
  std::vector<Dtype> scale_dtypes;
  int64_t block_size;
  const char* mtp_segment;  // `mtp` of mtp.J
  const char* hidden_key;
  const char* intermediate_key;
  const char* experts_key;
  const char* layers_key;
  const char* mtp_layers_key;
  const char* activation_key;
  const char* default_activation;  // when config.json has no activation_key
  const char* expert_dtype_key;    // optional in config.json
  const char* expert_dtype;        // what it must say if it is there
};

const std::vector<FamilyRow>& Families() {
  // The published DeepSeek-V4 files store packed E2M1 as I8 and name scales `.scale`; converted
  // copies use U8 or F4 and the names that vLLM gives the same tensors. config.json has no
  // hidden_act: the modelling code always applies SiLU.
  static const auto* const rows = new std::vector<FamilyRow>{{
      .id = "deepseek_v4",
      .experts_module = "ffn.experts",
      .projections = {"w1", "w3", "w2"},
      .weight_suffix = "weight",
      .scale_suffixes = {"scale", "weight_scale", "weight_scale_inv"},
      .weight_dtypes = {{Dtype::kI8, 2}, {Dtype::kU8, 2}, {Dtype::kF4, 1}},
      .scale_dtypes = {Dtype::kF8E8M0, Dtype::kU8},
      .block_size = 32,
      .mtp_segment = "mtp",
      .hidden_key = "hidden_size",
      .intermediate_key = "moe_intermediate_size",
      .experts_key = "n_routed_experts",
      .layers_key = "num_hidden_layers",
      .mtp_layers_key = "num_nextn_predict_layers",
      .activation_key = "hidden_act",
      .default_activation = "SILU",
      .expert_dtype_key = "expert_dtype",
      .expert_dtype = "fp4",
  }};
  return *rows;
}

constexpr std::array<ActivationName, 2> kActivations = {{{"silu", "SILU"}, {"swish", "SILU"}}};
constexpr std::array<const char*, 4> kNamePrefixes = {"", "model.", "model.language_model.",
                                                      "language_model.model."};
constexpr int64_t kMaxNumber = 99'999'999;  // of layers and experts

// Takes a decimal number and the dot behind it off the front. Leading zeros are refused: one layer
// would have two names.
std::optional<int64_t> ConsumeNumber(absl::string_view* text) {
  int64_t value = 0;
  size_t i = 0;
  for (; i < text->size() && (*text)[i] >= '0' && (*text)[i] <= '9'; ++i) {
    value = value * 10 + ((*text)[i] - '0');
    if (value > kMaxNumber || (i > 0 && (*text)[0] == '0')) return std::nullopt;
  }
  if (i == 0 || i == text->size() || (*text)[i] != '.') return std::nullopt;
  text->remove_prefix(i + 1);
  return value;
}

// Where a name stands: in layer `number`, or in MTP block `number`.
struct LayerName {
  absl::string_view prefix;
  bool mtp_block = false;
  int64_t number = 0;
  absl::string_view rest;  // behind the number
};

std::optional<LayerName> ParseLayerName(const FamilyRow& row, absl::string_view name) {
  for (const char* prefix : kNamePrefixes) {
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, prefix)) continue;
    LayerName layer;
    layer.prefix = name.substr(0, name.size() - rest.size());
    if (!absl::ConsumePrefix(&rest, "layers.")) {
      layer.mtp_block =
          absl::ConsumePrefix(&rest, row.mtp_segment) && absl::ConsumePrefix(&rest, ".");
      if (!layer.mtp_block) continue;
    }
    const std::optional<int64_t> number = ConsumeNumber(&rest);
    if (!number) continue;
    layer.number = *number;
    layer.rest = rest;
    return layer;
  }
  return std::nullopt;
}

struct ExpertName {
  int64_t expert = 0;
  ExpertTensor kind = kGateWeight;
};

// `rest` as in LayerName.
std::optional<ExpertName> ParseExpertName(const FamilyRow& row, absl::string_view rest) {
  if (!absl::ConsumePrefix(&rest, row.experts_module) || !absl::ConsumePrefix(&rest, ".")) {
    return std::nullopt;
  }
  const std::optional<int64_t> expert = ConsumeNumber(&rest);
  if (!expert) return std::nullopt;
  for (size_t projection = 0; projection < row.projections.size(); ++projection) {
    absl::string_view suffix = rest;
    if (!absl::ConsumePrefix(&suffix, row.projections[projection]) ||
        !absl::ConsumePrefix(&suffix, ".")) {
      continue;
    }
    const auto kind = static_cast<int>(2 * projection);
    if (suffix == row.weight_suffix) return ExpertName{*expert, static_cast<ExpertTensor>(kind)};
    for (const char* scale : row.scale_suffixes) {
      if (suffix == scale) return ExpertName{*expert, static_cast<ExpertTensor>(kind + 1)};
    }
  }
  return std::nullopt;
}

bool IsScale(int kind) { return kind % 2 == 1; }

// One routed-expert tensor. Records sort by layer, expert, kind.
struct Record {
  int64_t layer = 0;
  int64_t expert = 0;
  int kind = 0;
  int32_t tensor = 0;

  bool SamePlace(const Record& other) const {
    return layer == other.layer && expert == other.expert && kind == other.kind;
  }
  friend bool operator<(const Record& a, const Record& b) {
    if (a.layer != b.layer) return a.layer < b.layer;
    if (a.expert != b.expert) return a.expert < b.expert;
    return a.kind != b.kind ? a.kind < b.kind : a.tensor < b.tensor;
  }
};

std::string KnownFamilies() {
  return absl::StrJoin(Families(), "; ", [](std::string* out, const FamilyRow& row) {
    absl::StrAppend(out, row.id, " (model_type ", row.id, ", experts named layers.L.",
                    row.experts_module, ".X.", row.projections[0], ".", row.weight_suffix, ")");
  });
}

absl::StatusOr<const FamilyRow*> ChooseRow(const Checkpoint& checkpoint) {
  std::vector<std::string> found;
  for (const char* key : {"model_type", "text_config.model_type"}) {
    const absl::StatusOr<std::string> type = checkpoint.ConfigString(key);
    if (absl::IsNotFound(type.status())) continue;
    if (!type.ok()) return type.status();
    for (const FamilyRow& row : Families()) {
      if (*type == row.id) return &row;
    }
    found.push_back(absl::StrCat("'", PrintableName(*type), "'"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "unknown model family: config.json has ",
      found.empty() ? "no model_type" : absl::StrCat("model_type ", absl::StrJoin(found, ", ")),
      "; looked for ", KnownFamilies()));
}

// One recognition; see RecognizeFamily().
class Recognition {
 public:
  Recognition(const Checkpoint& checkpoint, const FamilyRow& row)
      : checkpoint_(checkpoint), tensors_(checkpoint.tensors()), row_(row) {}

  absl::StatusOr<MoeCheckpoint> Run() {
    result_.family = row_.id;
    result_.experts_module = row_.experts_module;
    result_.block_size = row_.block_size;
    SP_RETURN_IF_ERROR(ReadConfig());
    SP_RETURN_IF_ERROR(SortOutNames());
    SP_RETURN_IF_ERROR(CheckExpertCount());
    for (int64_t layer = 0; layer < result_.hidden_layers; ++layer) {
      SP_RETURN_IF_ERROR(TakeLayer(layer));
    }
    SP_RETURN_IF_ERROR(CheckExpertDtypeInConfig());
    TakeMtpLayers();
    return std::move(result_);
  }

 private:
  absl::StatusOr<int64_t> ConfigCount(const char* key, int64_t least) const {
    SP_ASSIGN_OR_RETURN(const int64_t value, checkpoint_.ConfigInt(key));
    if (value >= least && value <= kMaxNumber) return value;
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", key, ": found ", value,
                                                   ", want ", least, " to ", kMaxNumber));
  }

  // A key that the family cannot do without.
  absl::StatusOr<int64_t> RequiredCount(const char* key) const {
    absl::StatusOr<int64_t> value = ConfigCount(key, 1);
    if (!absl::IsNotFound(value.status())) return value;
    return absl::InvalidArgumentError(value.status().message());
  }

  absl::Status ReadConfig() {
    SP_ASSIGN_OR_RETURN(config_hidden_, RequiredCount(row_.hidden_key));
    SP_ASSIGN_OR_RETURN(config_intermediate_, RequiredCount(row_.intermediate_key));
    SP_ASSIGN_OR_RETURN(result_.experts, RequiredCount(row_.experts_key));
    SP_ASSIGN_OR_RETURN(result_.hidden_layers, RequiredCount(row_.layers_key));
    absl::StatusOr<int64_t> mtp_layers = ConfigCount(row_.mtp_layers_key, 0);
    if (absl::IsNotFound(mtp_layers.status())) mtp_layers = 0;
    if (!mtp_layers.ok()) return mtp_layers.status();
    config_mtp_layers_ = *mtp_layers;
    return ReadActivation();
  }

  absl::Status ReadActivation() {
    const absl::StatusOr<std::string> name = checkpoint_.ConfigString(row_.activation_key);
    if (absl::IsNotFound(name.status())) {
      result_.activation = row_.default_activation;
      return absl::OkStatus();
    }
    if (!name.ok()) return name.status();
    std::vector<std::string> known;
    for (const ActivationName& activation : kActivations) {
      if (*name == activation.config) {
        result_.activation = activation.policy;
        return absl::OkStatus();
      }
      known.emplace_back(activation.config);
    }
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", row_.activation_key, ": '",
                                                   PrintableName(*name), "' is not known for ",
                                                   row_.id, ": ", absl::StrJoin(known, ", ")));
  }

  // The one pass over all names: fills records_ (sorted) and result_.others.
  absl::Status SortOutNames() {
    const std::string module = absl::StrCat(".", row_.experts_module, ".");
    for (int64_t i = 0; i < tensors_.size(); ++i) {
      const absl::string_view name = tensors_.at(i).name;
      const std::optional<LayerName> place = ParseLayerName(row_, name);
      int64_t layer = 0;
      if (place) {
        layer = place->number + (place->mtp_block ? result_.hidden_layers : 0);
        SP_RETURN_IF_ERROR(CheckLayerNumber(*place, layer, name));
      }
      const bool is_mtp = place.has_value() && layer >= result_.hidden_layers;
      const auto expert = place ? ParseExpertName(row_, place->rest) : std::nullopt;
      if (expert) {
        SP_RETURN_IF_ERROR(CheckPrefix(place->prefix, name));
        records_.push_back({layer, expert->expert, expert->kind, static_cast<int32_t>(i)});
        continue;
      }
      if (absl::StrContains(name, module)) SP_RETURN_IF_ERROR(UnknownExpertTensor(name, is_mtp));
      result_.others.push_back({static_cast<int32_t>(i), is_mtp});
    }
    std::sort(records_.begin(), records_.end());
    for (size_t i = 1; i < records_.size(); ++i) {
      if (records_[i].SamePlace(records_[i - 1])) {
        return absl::InvalidArgumentError(
            absl::StrCat("two tensors for one place: ", Name(records_[i - 1].tensor), " and ",
                         Name(records_[i].tensor)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckLayerNumber(const LayerName& place, int64_t layer,
                                absl::string_view name) const {
    if (layer < result_.hidden_layers + config_mtp_layers_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(name), ": ", place.mtp_block ? "MTP block " : "layer ",
                     place.number, ", but config.json says ", row_.layers_key, " ",
                     result_.hidden_layers, " and ", row_.mtp_layers_key, " ", config_mtp_layers_));
  }

  absl::Status CheckPrefix(absl::string_view prefix, absl::string_view name) {
    if (records_.empty()) prefix_ = std::string(prefix);
    if (prefix == prefix_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("experts under two prefixes: ", Name(records_.front().tensor), " and ",
                     PrintableName(name)));
  }

  absl::Status UnknownExpertTensor(absl::string_view name, bool is_mtp) {
    absl::Status status = absl::InvalidArgumentError(
        absl::StrCat(PrintableName(name), ": not a name that routed experts of ", row_.id,
                     " have: layers.L.", row_.experts_module, ".X.{",
                     absl::StrJoin(row_.projections, ","), "}.{", row_.weight_suffix, ",",
                     absl::StrJoin(row_.scale_suffixes, ","), "}, with or without a prefix ",
                     absl::StrJoin(kNamePrefixes.begin() + 1, kNamePrefixes.end(), ", ")));
    if (!is_mtp) return status;
    result_.mtp_status.Update(status);
    return absl::OkStatus();
  }

  absl::Status CheckExpertCount() const {
    const Record* highest = nullptr;
    for (const Record& record : records_) {
      if (record.layer >= result_.hidden_layers) break;
      if (highest == nullptr || record.expert > highest->expert) highest = &record;
    }
    if (highest == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("no routed experts: looked for ", MissingName({.layer = 0, .expert = 0}, 0),
                       " and the like, as config.json's model_type ", row_.id, " has them"));
    }
    if (highest->expert + 1 == result_.experts) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(Name(highest->tensor), ": the highest expert is ", highest->expert,
                     ", but config.json says ", row_.experts_key, " ", result_.experts));
  }

  // Takes the records of one layer, from records_[next_record_] on.
  absl::Status TakeLayer(int64_t layer) {
    MoeLayer taken{.layer = static_cast<int32_t>(layer),
                   .is_mtp = layer >= result_.hidden_layers,
                   .module = ModuleName(layer),
                   .experts = {}};
    for (int64_t expert = 0; expert < result_.experts; ++expert) {
      std::array<int32_t, kExpertTensorCount> found{};
      for (int kind = 0; kind < kExpertTensorCount; ++kind) {
        const Record wanted{.layer = layer, .expert = expert, .kind = kind};
        if (next_record_ == records_.size() || !records_[next_record_].SamePlace(wanted)) {
          return MissingTensor(wanted);
        }
        const int32_t tensor = records_[next_record_++].tensor;
        SP_RETURN_IF_ERROR(CheckTensor(tensor, kind));
        found.at(static_cast<size_t>(kind)) = tensor;
      }
      taken.experts.push_back(found);
    }
    if (next_record_ < records_.size() && records_[next_record_].layer == layer) {
      return absl::InvalidArgumentError(absl::StrCat(Name(records_[next_record_].tensor),
                                                     ": config.json says ", row_.experts_key, " ",
                                                     result_.experts));
    }
    result_.layers.push_back(std::move(taken));
    return absl::OkStatus();
  }

  // All MTP layers, or a status and none.
  void TakeMtpLayers() {
    const auto layers = static_cast<std::ptrdiff_t>(result_.layers.size());
    const size_t first_record = next_record_;
    for (int64_t j = 0; j < config_mtp_layers_ && result_.mtp_status.ok(); ++j) {
      result_.mtp_status = TakeLayer(result_.hidden_layers + j);
    }
    if (result_.mtp_status.ok()) {
      result_.mtp_layers = config_mtp_layers_;
      return;
    }
    result_.layers.resize(static_cast<size_t>(layers));
    for (size_t i = first_record; i < records_.size(); ++i) {
      result_.others.push_back({records_[i].tensor, true});
    }
    std::sort(result_.others.begin(), result_.others.end(),
              [](const OtherTensor& a, const OtherTensor& b) { return a.tensor < b.tensor; });
  }

  absl::Status MissingTensor(const Record& wanted) const {
    std::vector<std::string> names;
    const size_t count = IsScale(wanted.kind) ? row_.scale_suffixes.size() : 1;
    for (size_t i = 0; i < count; ++i) {
      names.push_back(MissingName(wanted, i));
      const auto& stale = checkpoint_.stale();
      const auto it = std::lower_bound(
          stale.begin(), stale.end(), names.back(),
          [](const StaleIndexEntry& a, const std::string& b) { return a.tensor < b; });
      if (it != stale.end() && it->tensor == names.back()) {
        return absl::FailedPreconditionError(absl::StrCat(names.back(), ": the index places it in ",
                                                          PrintableName(it->file),
                                                          ", which does not hold it"));
      }
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", wanted.layer, ", expert ", wanted.expert, ": no ",
        row_.projections.at(static_cast<size_t>(wanted.kind / 2)),
        IsScale(wanted.kind) ? " scale" : " weight", "; tried ", absl::StrJoin(names, ", ")));
  }

  absl::Status CheckTensor(int32_t index, int kind) {
    const TensorInfo tensor = tensors_.at(index);
    if (tensor.shape.size() != 2) return ShapeError(tensor, "want two dimensions");
    if (IsScale(kind)) return CheckScale(tensor, kind);
    int64_t elements = 0;
    for (const WeightDtype& weight : row_.weight_dtypes) {
      if (tensor.dtype == weight.dtype) elements = weight.elements;
    }
    if (elements == 0) return ShapeError(tensor, absl::StrCat("want MXFP4: ", WeightDtypes()));
    // Not empty, so a row is no longer than its file and twice its length fits.
    if (tensor.size_bytes == 0) return ShapeError(tensor, "is empty");
    const int64_t row_elements = tensor.shape[1] * elements;
    if (result_.hidden == 0) SP_RETURN_IF_ERROR(SetGeometry(tensor, row_elements));
    const int64_t want_rows = kind == kDownWeight ? result_.hidden : result_.intermediate;
    const int64_t want_columns = kind == kDownWeight ? result_.intermediate : result_.hidden;
    if (tensor.shape[0] == want_rows && row_elements == want_columns) return absl::OkStatus();
    return ShapeError(
        tensor, absl::StrCat("want [", want_rows, ",", want_columns / elements, "] for hidden ",
                             result_.hidden, " and intermediate ", result_.intermediate));
  }

  absl::Status CheckScale(const TensorInfo& tensor, int kind) const {
    if (std::find(row_.scale_dtypes.begin(), row_.scale_dtypes.end(), tensor.dtype) ==
        row_.scale_dtypes.end()) {
      return ShapeError(tensor, absl::StrCat("want E8M0 scales: ", ScaleDtypes()));
    }
    const int64_t rows = kind == kDownScale ? result_.hidden : result_.intermediate;
    const int64_t row_elements = kind == kDownScale ? result_.intermediate : result_.hidden;
    const int64_t columns = row_elements / row_.block_size;
    const int64_t found = tensor.shape[1];
    if (found != columns) {
      std::string error =
          absl::StrCat(PrintableName(tensor.name), ": ", found, " columns, want ", columns,
                       ": one scale for ", row_.block_size, " of ", row_elements, " elements");
      if (found > 0 && row_elements % found == 0) {
        absl::StrAppend(&error, ", not for ", row_elements / found);
      }
      return absl::InvalidArgumentError(error);
    }
    if (tensor.shape[0] == rows) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(tensor.name), ": ", tensor.shape[0], " rows, want ", rows));
  }

  // From the first gate weight; everything else must agree with it.
  absl::Status SetGeometry(const TensorInfo& tensor, int64_t row_elements) {
    result_.intermediate = tensor.shape[0];
    result_.hidden = row_elements;
    for (const auto& [extent, what] :
         {std::pair(result_.intermediate, "rows"), std::pair(result_.hidden, "elements a row")}) {
      if (extent > 0 && extent % row_.block_size == 0) continue;
      return ShapeError(tensor,
                        absl::StrCat(extent, " ", what, ", want a multiple of ", row_.block_size));
    }
    if (result_.intermediate != config_intermediate_) {
      return ConfigConflict(tensor, "intermediate", result_.intermediate, row_.intermediate_key,
                            config_intermediate_);
    }
    if (result_.hidden != config_hidden_) {
      return ConfigConflict(tensor, "hidden", result_.hidden, row_.hidden_key, config_hidden_);
    }
    return absl::OkStatus();
  }

  absl::Status CheckExpertDtypeInConfig() const {
    const absl::StatusOr<std::string> dtype = checkpoint_.ConfigString(row_.expert_dtype_key);
    if (absl::IsNotFound(dtype.status())) return absl::OkStatus();
    if (!dtype.ok()) return dtype.status();
    if (*dtype == row_.expert_dtype) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: ", row_.expert_dtype_key, ": '", PrintableName(*dtype),
                     "', but the routed experts are MXFP4 ('", row_.expert_dtype, "')"));
  }

  static absl::Status ConfigConflict(const TensorInfo& tensor, const char* what, int64_t found,
                                     const char* key, int64_t wanted) {
    return ShapeError(
        tensor, absl::StrCat("is ", what, " ", found, ", but config.json says ", key, " ", wanted));
  }

  static absl::Status ShapeError(const TensorInfo& tensor, const std::string& detail) {
    return absl::InvalidArgumentError(absl::StrCat(PrintableName(tensor.name), ": ",
                                                   DescribeTensor(tensor.dtype, tensor.shape), ": ",
                                                   detail));
  }

  std::string WeightDtypes() const {
    return absl::StrJoin(row_.weight_dtypes, ", ", [](std::string* out, const WeightDtype& weight) {
      absl::StrAppend(out, DtypeName(weight.dtype));
    });
  }

  std::string ScaleDtypes() const {
    return absl::StrJoin(row_.scale_dtypes, ", ", [](std::string* out, Dtype dtype) {
      absl::StrAppend(out, DtypeName(dtype));
    });
  }

  // Of a layer that has records at next_record_; otherwise by its usual name.
  std::string ModuleName(int64_t layer) const {
    if (next_record_ < records_.size() && records_[next_record_].layer == layer) {
      const absl::string_view name = tensors_.at(records_[next_record_].tensor).name;
      const std::string module = absl::StrCat(".", row_.experts_module, ".");
      return std::string(name.substr(0, name.find(module) + module.size() - 1));
    }
    const bool is_mtp = layer >= result_.hidden_layers;
    return absl::StrCat(prefix_, is_mtp ? row_.mtp_segment : "layers", ".",
                        is_mtp ? layer - result_.hidden_layers : layer, ".", row_.experts_module);
  }

  // The name that a tensor would have, with the given one of the suffixes of its kind.
  std::string MissingName(const Record& wanted, size_t suffix) const {
    return absl::StrCat(ModuleName(wanted.layer), ".", wanted.expert, ".",
                        row_.projections.at(static_cast<size_t>(wanted.kind / 2)), ".",
                        IsScale(wanted.kind) ? row_.scale_suffixes[suffix] : row_.weight_suffix);
  }

  std::string Name(int32_t tensor) const { return PrintableName(tensors_.at(tensor).name); }

  const Checkpoint& checkpoint_;
  const TensorTable& tensors_;
  const FamilyRow& row_;
  int64_t config_hidden_ = 0;
  int64_t config_intermediate_ = 0;
  int64_t config_mtp_layers_ = 0;
  std::string prefix_;  // of the experts' names
  std::vector<Record> records_;
  size_t next_record_ = 0;
  MoeCheckpoint result_;
};

}  // namespace

absl::StatusOr<MoeCheckpoint> RecognizeFamily(const Checkpoint& checkpoint) {
  SP_ASSIGN_OR_RETURN(const FamilyRow* row, ChooseRow(checkpoint));
  return Recognition(checkpoint, *row).Run();
}

}  // namespace shardprep
