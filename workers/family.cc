#include "workers/family.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/extents.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr std::array<const char*, 4> kNamePrefixes = {"", "model.", "model.language_model.",
                                                      "language_model.model."};
constexpr int64_t kMaxNumber = 99'999'999;  // of layers and experts

// Engines keep the language model of a multimodal one under this name, whichever of the two orders
// the checkpoint has.
constexpr char kWrapperPrefix[] = "language_model.model.";

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
      layer.mtp_block = row.mtp_segment != nullptr && absl::ConsumePrefix(&rest, row.mtp_segment) &&
                        absl::ConsumePrefix(&rest, ".");
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

bool Contains(const std::vector<const char*>& words, absl::string_view word) {
  return std::any_of(words.begin(), words.end(), [&](const char* w) { return word == w; });
}

// What follows the module of the experts: `X.w1.weight`, or a stacked tensor's name. `rest` as in
// LayerName; empty when it is elsewhere.
absl::string_view InModule(const FamilyRow& row, absl::string_view rest) {
  if (!absl::ConsumePrefix(&rest, row.experts_module) || !absl::ConsumePrefix(&rest, ".")) {
    return "";
  }
  return rest;
}

// Expert, projection and suffix of a tensor of one expert.
struct ExpertParts {
  int64_t expert = 0;
  int projection = 0;  // index into FamilyRow::projections
  absl::string_view suffix;
};

std::optional<ExpertParts> SplitExpertName(const FamilyRow& row, absl::string_view in_module) {
  if (!row.stacked.empty()) return std::nullopt;
  const std::optional<int64_t> expert = ConsumeNumber(&in_module);
  if (!expert) return std::nullopt;
  for (size_t projection = 0; projection < row.projections.size(); ++projection) {
    absl::string_view suffix = in_module;
    if (!absl::ConsumePrefix(&suffix, row.projections.at(projection)) ||
        !absl::ConsumePrefix(&suffix, ".")) {
      continue;
    }
    return ExpertParts{*expert, static_cast<int>(projection), suffix};
  }
  return std::nullopt;
}

// A stacked tensor counts as one of expert 0, of the kind whose rows come first.
std::optional<ExpertName> ParseExpertName(const FamilyRow& row, absl::string_view rest) {
  const absl::string_view in_module = InModule(row, rest);
  for (const StackedTensor& stacked : row.stacked) {
    if (in_module == stacked.name) return ExpertName{0, stacked.first};
  }
  const auto parts = SplitExpertName(row, in_module);
  if (!parts) return std::nullopt;
  const int kind = 2 * parts->projection;
  for (const ExpertFormat* format : row.formats) {
    if (parts->suffix == format->weight_suffix) {
      return ExpertName{parts->expert, static_cast<ExpertTensor>(kind)};
    }
    if (Contains(format->scale_suffixes, parts->suffix)) {
      return ExpertName{parts->expert, static_cast<ExpertTensor>(kind + 1)};
    }
  }
  return std::nullopt;
}

bool IsExpertScalar(const FamilyRow& row, absl::string_view rest, const TensorInfo& tensor) {
  const auto parts = SplitExpertName(row, InModule(row, rest));
  return parts && Contains(row.scalar_suffixes, parts->suffix) &&
         std::all_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t n) { return n == 1; });
}

bool IsBias(int kind) { return kind >= kGateBias; }
bool IsScale(int kind) { return !IsBias(kind) && kind % 2 == 1; }
bool IsDown(int kind) { return kind == kDownWeight || kind == kDownScale || kind == kDownBias; }

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

// The name of a tensor of expert X of layer L, for messages.
std::string NamePattern(const FamilyRow& row) {
  if (!row.stacked.empty()) {
    return absl::StrCat("layers.L.", row.experts_module, ".", row.stacked.front().name);
  }
  return absl::StrCat("layers.L.", row.experts_module, ".X.", row.projections[0], ".",
                      row.formats.front()->weight_suffix);
}

std::string KnownFamilies() {
  return absl::StrJoin(FamilyRows(), "; ", [](std::string* out, const FamilyRow& row) {
    absl::StrAppend(out, row.id, " (model_type ", absl::StrJoin(row.model_types, " or "),
                    ", experts named ", NamePattern(row), ")");
  });
}

absl::StatusOr<const FamilyRow*> ChooseRow(const Checkpoint& checkpoint) {
  std::vector<std::string> found;
  for (const char* key : {"model_type", "text_config.model_type"}) {
    const absl::StatusOr<std::string> type = checkpoint.ConfigString(key);
    if (absl::IsNotFound(type.status())) continue;
    if (!type.ok()) return type.status();
    for (const FamilyRow& row : FamilyRows()) {
      if (Contains(row.model_types, *type)) return &row;
    }
    found.push_back(absl::StrCat("'", PrintableName(*type), "'"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "unknown model family: config.json has ",
      found.empty() ? "no model_type" : absl::StrCat("model_type ", absl::StrJoin(found, ", ")),
      "; looked for ", KnownFamilies()));
}

// A list of layer numbers in config.json, at the top or in text_config; empty when there is none.
absl::StatusOr<std::set<int64_t>> ConfigLayerList(const Checkpoint& checkpoint, const char* key) {
  std::set<int64_t> numbers;
  const auto config = nlohmann::json::parse(checkpoint.config_text(), nullptr, false);
  if (!config.is_object()) return numbers;
  const nlohmann::json* list = nullptr;
  if (const auto it = config.find(key); it != config.end() && !it->is_null()) list = &*it;
  const auto text = config.find("text_config");
  if (list == nullptr && text != config.end() && text->is_object()) {
    if (const auto it = text->find(key); it != text->end() && !it->is_null()) list = &*it;
  }
  if (list == nullptr) return numbers;
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json: ", key, ": want a list of layer numbers"));
  };
  if (!list->is_array()) return bad();
  for (const nlohmann::json& entry : *list) {
    if (!entry.is_number_unsigned() || entry.get<uint64_t>() > uint64_t{kMaxNumber}) return bad();
    numbers.insert(entry.get<int64_t>());
  }
  return numbers;
}

// One recognition; see RecognizeFamily().
class Recognition {
 public:
  Recognition(const Checkpoint& checkpoint, const FamilyRow& row)
      : checkpoint_(checkpoint), tensors_(checkpoint.tensors()), row_(row) {}

  absl::StatusOr<MoeCheckpoint> Run() {
    result_.family = row_.id;
    result_.experts_module = row_.experts_module;
    result_.stacked = !row_.stacked.empty();
    SP_RETURN_IF_ERROR(ReadConfig());
    SP_RETURN_IF_ERROR(SortOutNames());
    SP_RETURN_IF_ERROR(CheckNumbers());
    ChooseFormat();
    for (int64_t layer = 0; layer < result_.hidden_layers; ++layer) {
      SP_RETURN_IF_ERROR(IsDense(layer) ? CheckDense(layer) : TakeLayer(layer));
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

  // The value of a key that may be absent, or null.
  absl::StatusOr<int64_t> OptionalCount(const char* key, int64_t least, int64_t otherwise) const {
    if (key == nullptr) return otherwise;
    absl::StatusOr<int64_t> value = ConfigCount(key, least);
    if (absl::IsNotFound(value.status())) return otherwise;
    return value;
  }

  absl::Status ReadConfig() {
    if (row_.hidden_key != nullptr) {
      SP_ASSIGN_OR_RETURN(config_hidden_, RequiredCount(row_.hidden_key));
    }
    SP_ASSIGN_OR_RETURN(config_intermediate_, RequiredCount(row_.intermediate_key));
    for (const char* key : row_.experts_keys) {
      experts_key_ = key;
      if (!absl::IsNotFound(checkpoint_.ConfigInt(key).status())) break;
    }
    SP_ASSIGN_OR_RETURN(result_.experts, RequiredCount(experts_key_));
    SP_ASSIGN_OR_RETURN(result_.hidden_layers, RequiredCount(row_.layers_key));
    SP_ASSIGN_OR_RETURN(config_mtp_layers_, OptionalCount(row_.mtp_layers_key, 0, 0));
    SP_ASSIGN_OR_RETURN(dense_first_, OptionalCount(row_.dense.first, 0, 0));
    SP_ASSIGN_OR_RETURN(moe_frequency_, OptionalCount(row_.dense.frequency, 1, 1));
    SP_ASSIGN_OR_RETURN(moe_step_, OptionalCount(row_.dense.step, 1, 1));
    if (row_.dense.list != nullptr) {
      SP_ASSIGN_OR_RETURN(dense_list_, ConfigLayerList(checkpoint_, row_.dense.list));
    }
    return ReadActivation();
  }

  absl::Status ReadActivation() {
    absl::StatusOr<std::string> name = absl::NotFoundError("");
    if (row_.activation_key != nullptr) name = checkpoint_.ConfigString(row_.activation_key);
    if (absl::IsNotFound(name.status())) {
      if (row_.default_activation == nullptr) {
        return absl::InvalidArgumentError(name.status().message());
      }
      result_.activation = row_.default_activation;
      return absl::OkStatus();
    }
    if (!name.ok()) return name.status();
    std::vector<std::string> known;
    for (const ActivationName& activation : row_.activations) {
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

  bool IsDense(int64_t layer) const {
    return layer < dense_first_ || layer % moe_frequency_ != 0 || (layer + 1) % moe_step_ != 0 ||
           dense_list_.contains(layer);
  }

  absl::Status CheckDense(int64_t layer) const {
    if (next_record_ == records_.size() || records_[next_record_].layer != layer) {
      return absl::OkStatus();
    }
    std::vector<const char*> keys;
    for (const char* key :
         {row_.dense.first, row_.dense.frequency, row_.dense.step, row_.dense.list}) {
      if (key != nullptr) keys.push_back(key);
    }
    return absl::InvalidArgumentError(
        absl::StrCat(Name(records_[next_record_].tensor), ": routed expert in layer ", layer,
                     ", which config.json calls dense (", absl::StrJoin(keys, ", "), ")"));
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
      const bool scalar = place && IsExpertScalar(row_, place->rest, tensors_.at(i));
      if (!scalar && absl::StrContains(name, module)) {
        SP_RETURN_IF_ERROR(UnknownExpertTensor(name, is_mtp));
      }
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
    return absl::InvalidArgumentError(absl::StrCat(
        PrintableName(name), ": ", place.mtp_block ? "MTP block " : "layer ", place.number,
        ", but config.json says ", row_.layers_key, " ", result_.hidden_layers,
        row_.mtp_layers_key == nullptr
            ? ""
            : absl::StrCat(" and ", row_.mtp_layers_key, " ", config_mtp_layers_)));
  }

  absl::Status CheckPrefix(absl::string_view prefix, absl::string_view name) {
    if (records_.empty()) prefix_ = std::string(prefix);
    if (prefix == prefix_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("experts under two prefixes: ", Name(records_.front().tensor), " and ",
                     PrintableName(name)));
  }

  // The last parts that names of expert tensors may have.
  std::vector<const char*> Suffixes() const {
    std::vector<const char*> suffixes;
    const auto add = [&](const char* suffix) {
      if (!Contains(suffixes, suffix)) suffixes.push_back(suffix);
    };
    for (const ExpertFormat* format : row_.formats) {
      add(format->weight_suffix);
      for (const char* scale : format->scale_suffixes) add(scale);
    }
    for (const char* scalar : row_.scalar_suffixes) add(scalar);
    return suffixes;
  }

  absl::Status UnknownExpertTensor(absl::string_view name, bool is_mtp) {
    std::string known;
    if (result_.stacked) {
      known = absl::StrCat(
          "{", absl::StrJoin(row_.stacked, ",", [](std::string* out, const StackedTensor& tensor) {
            out->append(tensor.name);
          }));
    } else {
      known = absl::StrCat("X.{", absl::StrJoin(row_.projections, ","), "}.{",
                           absl::StrJoin(Suffixes(), ","));
    }
    absl::Status status = absl::InvalidArgumentError(absl::StrCat(
        PrintableName(name), ": not a name that routed experts of ", row_.id, " have: layers.L.",
        row_.experts_module, ".", known, "}, with or without a prefix ",
        absl::StrJoin(kNamePrefixes.begin() + 1, kNamePrefixes.end(), ", ")));
    if (!is_mtp) return status;
    result_.mtp_status.Update(status);
    return absl::OkStatus();
  }

  absl::Status CheckNumbers() {
    const Record* highest = nullptr;
    for (const Record& record : records_) {
      if (record.layer >= result_.hidden_layers) break;
      if (highest == nullptr || record.expert > highest->expert) highest = &record;
    }
    if (highest == nullptr) {
      int64_t layer = 0;
      while (layer + 1 < result_.hidden_layers && IsDense(layer)) ++layer;
      format_ = row_.formats.front();
      return absl::FailedPreconditionError(
          absl::StrCat("no routed experts: looked for ", MissingName({.layer = layer}, 0),
                       " and the like, as config.json's model_type for ", row_.id, " has them"));
    }
    if (result_.stacked || highest->expert + 1 == result_.experts) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(Name(highest->tensor), ": the highest expert is ", highest->expert,
                     ", but config.json says ", experts_key_, " ", result_.experts));
  }

  // The first weight decides, by name and dtype; when no format has such, the row's first format,
  // against which that weight is then refused.
  void ChooseFormat() {
    format_ = row_.formats.front();
    const auto weight = std::find_if(records_.begin(), records_.end(), [](const Record& record) {
      return !IsScale(record.kind) && !IsBias(record.kind);
    });
    if (weight != records_.end()) {
      const TensorInfo tensor = tensors_.at(weight->tensor);
      for (const ExpertFormat* format : row_.formats) {
        const bool named = result_.stacked ||
                           absl::EndsWith(tensor.name, absl::StrCat(".", format->weight_suffix));
        if (named && ElementsOf(*format, tensor.dtype) > 0) {
          format_ = format;
          format_found_ = true;
          break;
        }
      }
    }
    result_.format = format_;
    result_.block_size = format_->block_columns;
    const bool f32 = !format_->scale_dtypes.empty() && format_->scale_dtypes[0] == Dtype::kF32;
    result_.scale_dtype = f32 ? Dtype::kF32 : Dtype::kU8;
    const bool wrapped = prefix_ == "language_model.model." || prefix_ == "model.language_model.";
    result_.engine_prefix = wrapped ? kWrapperPrefix : "model.";
  }

  // Elements that one unit of a weight's shape counts; 0 when the format has no such dtype.
  static int64_t ElementsOf(const ExpertFormat& format, Dtype dtype) {
    for (const WeightDtype& weight : format.weight_dtypes) {
      if (weight.dtype == dtype) return weight.elements;
    }
    return 0;
  }

  // Takes the records of one layer, from records_[next_record_] on.
  absl::Status TakeLayer(int64_t layer) {
    MoeLayer taken{.layer = static_cast<int32_t>(layer),
                   .is_mtp = layer >= result_.hidden_layers,
                   .module = ModuleName(layer),
                   .experts = {}};
    SP_RETURN_IF_ERROR(result_.stacked ? TakeStacked(taken) : TakeExperts(taken));
    if (next_record_ < records_.size() && records_[next_record_].layer == layer) {
      return absl::InvalidArgumentError(absl::StrCat(Name(records_[next_record_].tensor),
                                                     ": config.json says ", experts_key_, " ",
                                                     result_.experts));
    }
    result_.layers.push_back(std::move(taken));
    return absl::OkStatus();
  }

  // The next record, which must be of the wanted place.
  absl::StatusOr<int32_t> TakeRecord(const Record& wanted) {
    if (next_record_ == records_.size() || !records_[next_record_].SamePlace(wanted)) {
      return MissingTensor(wanted);
    }
    return records_[next_record_++].tensor;
  }

  absl::Status TakeExperts(MoeLayer& taken) {
    for (int64_t expert = 0; expert < result_.experts; ++expert) {
      std::array<int32_t, kExpertTensorCount> found{};
      found.fill(kNoTensor);
      for (int kind = kGateWeight; kind <= kDownScale; ++kind) {
        const Record wanted{.layer = taken.layer, .expert = expert, .kind = kind};
        if (IsScale(kind) && format_->scale_suffixes.empty()) {
          SP_RETURN_IF_ERROR(RefuseScale(wanted));
          continue;
        }
        SP_ASSIGN_OR_RETURN(const int32_t tensor, TakeRecord(wanted));
        SP_RETURN_IF_ERROR(CheckTensor(tensor, kind));
        found.at(static_cast<size_t>(kind)) = tensor;
      }
      taken.experts.push_back(found);
    }
    return absl::OkStatus();
  }

  // Experts of a format without scales have none.
  absl::Status RefuseScale(const Record& place) const {
    if (next_record_ == records_.size() || !records_[next_record_].SamePlace(place)) {
      return absl::OkStatus();
    }
    return ShapeError(tensors_.at(records_[next_record_].tensor),
                      absl::StrCat("is a scale, but the routed experts are ", format_->title));
  }

  absl::Status TakeStacked(MoeLayer& taken) {
    std::array<int32_t, kExpertTensorCount> found{};
    found.fill(kNoTensor);
    std::vector<StackedTensor> tensors = row_.stacked;
    std::sort(tensors.begin(), tensors.end(), [](const StackedTensor& a, const StackedTensor& b) {
      return a.first < b.first;  // as records are
    });
    for (const StackedTensor& stacked : tensors) {
      const bool alternates = stacked.second != kExpertTensorCount;
      SP_ASSIGN_OR_RETURN(const int32_t tensor,
                          TakeRecord({.layer = taken.layer, .expert = 0, .kind = stacked.first}));
      SP_RETURN_IF_ERROR(CheckStacked(tensor, stacked.first, alternates));
      found.at(stacked.first) = tensor;
      if (alternates) found.at(stacked.second) = tensor;
      result_.alternating = result_.alternating || alternates;
      result_.has_bias = result_.has_bias || IsBias(stacked.first);
    }
    taken.experts.assign(static_cast<size_t>(result_.experts), found);
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
    const bool scale = IsScale(wanted.kind);
    const size_t count = scale && !result_.stacked ? format_->scale_suffixes.size() : 1;
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
    if (result_.stacked) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", wanted.layer, ": no ", names.front()));
    }
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", wanted.layer, ", expert ", wanted.expert, ": no ",
                     row_.projections.at(static_cast<size_t>(wanted.kind / 2)),
                     scale ? " scale" : " weight", "; tried ", absl::StrJoin(names, ", ")));
  }

  absl::Status CheckTensor(int32_t index, int kind) {
    const TensorInfo tensor = tensors_.at(index);
    if (tensor.shape.size() != 2) return ShapeError(tensor, "want two dimensions");
    if (IsScale(kind)) {
      return CheckScale(tensor, kind, tensor.shape[0], tensor.shape[1]);
    }
    const int64_t elements = ElementsOf(*format_, tensor.dtype);
    if (elements == 0) return ShapeError(tensor, absl::StrCat("want ", WantedDtypes()));
    // Not empty, so a row is no longer than its file and twice its length fits.
    if (tensor.size_bytes == 0) return ShapeError(tensor, "is empty");
    return CheckWeight(tensor, kind, tensor.shape[0], tensor.shape[1] * elements, elements);
  }

  // Of one expert. `elements` as in WeightDtype, for the message.
  absl::Status CheckWeight(const TensorInfo& tensor, int kind, int64_t rows, int64_t row_elements,
                           int64_t elements) {
    if (result_.hidden == 0) SP_RETURN_IF_ERROR(SetGeometry(tensor, rows, row_elements));
    const int64_t want_rows = IsDown(kind) ? result_.hidden : result_.intermediate;
    const int64_t want_columns = IsDown(kind) ? result_.intermediate : result_.hidden;
    if (rows == want_rows && row_elements == want_columns) return absl::OkStatus();
    return ShapeError(
        tensor, absl::StrCat("want [", want_rows, ",", want_columns / elements, "] for hidden ",
                             result_.hidden, " and intermediate ", result_.intermediate));
  }

  // Of one expert.
  absl::Status CheckScale(const TensorInfo& tensor, int kind, int64_t found_rows,
                          int64_t found) const {
    if (std::find(format_->scale_dtypes.begin(), format_->scale_dtypes.end(), tensor.dtype) ==
        format_->scale_dtypes.end()) {
      return ShapeError(tensor,
                        absl::StrCat("want ", format_->scale_title, ": ", ScaleDtypes(*format_)));
    }
    const int64_t row_count = IsDown(kind) ? result_.hidden : result_.intermediate;
    const int64_t row_elements = IsDown(kind) ? result_.intermediate : result_.hidden;
    const int64_t rows = CeilDiv(row_count, format_->block_rows);
    const int64_t columns = CeilDiv(row_elements, format_->block_columns);
    if (found != columns) {
      std::string error = absl::StrCat(PrintableName(tensor.name), ": ", found, " columns, want ",
                                       columns, ": one scale for ", format_->block_columns, " of ",
                                       row_elements, " elements");
      if (found > 0 && row_elements % found == 0) {
        absl::StrAppend(&error, ", not for ", row_elements / found);
      }
      return absl::InvalidArgumentError(error);
    }
    if (found_rows == rows) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(tensor.name), ": ", found_rows, " rows, want ", rows));
  }

  // A tensor of all experts: blocks [E, rows, K/32, 16], scales [E, rows, K/32], bias [E, rows];
  // rows of gate and up together where they alternate.
  absl::Status CheckStacked(int32_t index, int kind, bool alternates) {
    const TensorInfo tensor = tensors_.at(index);
    const size_t dimensions = IsBias(kind) ? 2 : IsScale(kind) ? 3 : 4;
    if (tensor.shape.size() != dimensions) {
      return ShapeError(tensor, absl::StrCat("want ", dimensions, " dimensions"));
    }
    if (tensor.size_bytes == 0) return ShapeError(tensor, "is empty");
    if (tensor.shape[0] != result_.experts) {
      return ConfigConflict(tensor, "experts", tensor.shape[0], experts_key_, result_.experts);
    }
    const int64_t all_rows = tensor.shape[1];
    if (alternates && all_rows % 2 != 0) {
      return ShapeError(tensor, absl::StrCat(all_rows, " rows, want gate and up alternating"));
    }
    const int64_t rows = alternates ? all_rows / 2 : all_rows;
    if (IsScale(kind)) return CheckScale(tensor, kind, rows, tensor.shape[2]);
    if (IsBias(kind)) return CheckBias(tensor, kind, rows);
    const int64_t elements = ElementsOf(*format_, tensor.dtype);
    if (elements == 0) return ShapeError(tensor, absl::StrCat("want ", WantedDtypes()));
    const int64_t block_bytes = format_->block_columns / elements;
    if (tensor.shape[3] != block_bytes) {
      return ShapeError(tensor, absl::StrCat("want blocks of ", block_bytes, " bytes"));
    }
    return CheckWeight(tensor, kind, rows, tensor.shape[2] * format_->block_columns, elements);
  }

  absl::Status CheckBias(const TensorInfo& tensor, int kind, int64_t rows) const {
    if (tensor.dtype != Dtype::kBF16) return ShapeError(tensor, "want BF16");
    const int64_t want = IsDown(kind) ? result_.hidden : result_.intermediate;
    if (rows == want) return absl::OkStatus();
    return ShapeError(tensor, absl::StrCat("is for ", rows, " rows, want ", want));
  }

  // From the first gate weight; everything else must agree with it.
  absl::Status SetGeometry(const TensorInfo& tensor, int64_t rows, int64_t row_elements) {
    result_.intermediate = rows;
    result_.hidden = row_elements;
    for (const auto& [extent, what] :
         {std::pair(result_.intermediate, "rows"), std::pair(result_.hidden, "elements a row")}) {
      if (!format_->whole_blocks || (extent > 0 && extent % format_->block_columns == 0)) continue;
      return ShapeError(
          tensor, absl::StrCat(extent, " ", what, ", want a multiple of ", format_->block_columns));
    }
    if (result_.intermediate != config_intermediate_) {
      return ConfigConflict(tensor, "intermediate", result_.intermediate, row_.intermediate_key,
                            config_intermediate_);
    }
    if (row_.hidden_key != nullptr && result_.hidden != config_hidden_) {
      return ConfigConflict(tensor, "hidden", result_.hidden, row_.hidden_key, config_hidden_);
    }
    return absl::OkStatus();
  }

  absl::Status CheckExpertDtypeInConfig() const {
    if (row_.expert_dtype_key == nullptr || format_->expert_dtype == nullptr) {
      return absl::OkStatus();
    }
    const absl::StatusOr<std::string> dtype = checkpoint_.ConfigString(row_.expert_dtype_key);
    if (absl::IsNotFound(dtype.status())) return absl::OkStatus();
    if (!dtype.ok()) return dtype.status();
    if (*dtype == format_->expert_dtype) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "config.json: ", row_.expert_dtype_key, ": '", PrintableName(*dtype),
        "', but the routed experts are ", format_->title, " ('", format_->expert_dtype, "')"));
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

  // The dtypes of the format; of all formats when none was found.
  std::string WantedDtypes() const {
    std::vector<const ExpertFormat*> formats = {format_};
    if (!format_found_) formats = row_.formats;
    return absl::StrJoin(formats, " or ", [](std::string* out, const ExpertFormat* format) {
      absl::StrAppend(out, format->title, ": ",
                      absl::StrJoin(format->weight_dtypes, ", ",
                                    [](std::string* names, const WeightDtype& weight) {
                                      absl::StrAppend(names, DtypeName(weight.dtype));
                                    }));
    });
  }

  static std::string ScaleDtypes(const ExpertFormat& format) {
    return absl::StrJoin(format.scale_dtypes, ", ", [](std::string* out, Dtype dtype) {
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
    const bool block = is_mtp && row_.mtp_segment != nullptr;
    return absl::StrCat(prefix_, block ? row_.mtp_segment : "layers", ".",
                        block ? layer - result_.hidden_layers : layer, ".", row_.experts_module);
  }

  // The name that a tensor would have, with the given one of the suffixes of its kind.
  std::string MissingName(const Record& wanted, size_t suffix) const {
    for (const StackedTensor& stacked : row_.stacked) {
      if (stacked.first == wanted.kind) {
        return absl::StrCat(ModuleName(wanted.layer), ".", stacked.name);
      }
    }
    return absl::StrCat(
        ModuleName(wanted.layer), ".", wanted.expert, ".",
        row_.projections.at(static_cast<size_t>(wanted.kind / 2)), ".",
        IsScale(wanted.kind) ? format_->scale_suffixes[suffix] : format_->weight_suffix);
  }

  std::string Name(int32_t tensor) const { return PrintableName(tensors_.at(tensor).name); }

  const Checkpoint& checkpoint_;
  const TensorTable& tensors_;
  const FamilyRow& row_;
  const ExpertFormat* format_ = nullptr;
  bool format_found_ = false;
  const char* experts_key_ = nullptr;
  int64_t config_hidden_ = 0;
  int64_t config_intermediate_ = 0;
  int64_t config_mtp_layers_ = 0;
  int64_t dense_first_ = 0;
  int64_t moe_frequency_ = 1;
  int64_t moe_step_ = 1;
  std::set<int64_t> dense_list_;
  std::string prefix_;  // of the experts' names
  std::vector<Record> records_;
  size_t next_record_ = 0;
  MoeCheckpoint result_;
};

}  // namespace

std::vector<int32_t> MoeLayer::Tensors() const {
  std::vector<int32_t> tensors;
  for (const auto& expert : experts) {
    for (const int32_t tensor : expert) {
      if (tensor != kNoTensor) tensors.push_back(tensor);
    }
  }
  std::sort(tensors.begin(), tensors.end());
  tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
  return tensors;
}

absl::StatusOr<MoeCheckpoint> RecognizeFamily(const Checkpoint& checkpoint) {
  SP_ASSIGN_OR_RETURN(const FamilyRow* row, ChooseRow(checkpoint));
  return Recognition(checkpoint, *row).Run();
}

}  // namespace shardprep
