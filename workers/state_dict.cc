#include "workers/state_dict.h"

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"
#include "workers/dtype.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

constexpr size_t kDifferencesShown = 10;

struct TorchDtype {
  const char* name;
  Dtype dtype;
};

constexpr TorchDtype kTorchDtypes[] = {
    {"bool", Dtype::kBool},
    {"uint8", Dtype::kU8},
    {"int8", Dtype::kI8},
    {"float8_e5m2", Dtype::kF8E5M2},
    {"float8_e4m3fn", Dtype::kF8E4M3},
    {"float8_e8m0fnu", Dtype::kF8E8M0},
    {"float8_e4m3fnuz", Dtype::kF8E4M3Fnuz},
    {"float8_e5m2fnuz", Dtype::kF8E5M2Fnuz},
    {"int16", Dtype::kI16},
    {"uint16", Dtype::kU16},
    {"float16", Dtype::kF16},
    {"bfloat16", Dtype::kBF16},
    {"int32", Dtype::kI32},
    {"uint32", Dtype::kU32},
    {"float32", Dtype::kF32},
    {"complex64", Dtype::kC64},
    {"float64", Dtype::kF64},
    {"int64", Dtype::kI64},
    {"uint64", Dtype::kU64},
};
// Two elements a unit of the shape, as U8 counts packed FP4.
constexpr char kPackedFp4[] = "float4_e2m1fn_x2";

struct Parameter {
  Dtype dtype = Dtype::kU8;
  bool packed_fp4 = false;
  std::vector<int64_t> shape;

  friend bool operator==(const Parameter&, const Parameter&) = default;
};

using Parameters = std::map<std::string, Parameter>;

absl::Status Bad(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("state dict: ", what));
}

std::string Describe(const Parameter& parameter) {
  if (!parameter.packed_fp4) return DescribeTensor(parameter.dtype, parameter.shape);
  return absl::StrCat(kPackedFp4, " [", absl::StrJoin(parameter.shape, ","), "]");
}

absl::StatusOr<Parameter> ParseParameter(const std::string& name, const nlohmann::json& entry) {
  const auto bad = [&](const std::string& what) {
    return Bad(absl::StrCat(PrintableName(name), ": ", what));
  };
  if (!entry.is_object() || entry.size() != 2 || !entry.contains("dtype") ||
      !entry.contains("shape") || !entry["dtype"].is_string() || !entry["shape"].is_array()) {
    return bad("want {\"dtype\": a name, \"shape\": a list}");
  }
  Parameter parameter;
  for (const nlohmann::json& extent : entry["shape"]) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > (uint64_t{1} << 62)) {
      return bad(absl::StrCat("'", extent.dump(), "' is no extent"));
    }
    parameter.shape.push_back(extent.get<int64_t>());
  }
  const auto text = entry["dtype"].get<std::string>();
  absl::string_view dtype = text;
  absl::ConsumePrefix(&dtype, "torch.");
  parameter.packed_fp4 = dtype == kPackedFp4;
  if (parameter.packed_fp4) return parameter;
  for (const TorchDtype& torch : kTorchDtypes) {
    if (dtype != torch.name) continue;
    parameter.dtype = torch.dtype;
    return parameter;
  }
  const auto known = ParseDtype(text);
  if (!known.ok()) return bad(absl::StrCat("dtype '", PrintableName(text), "' is unknown"));
  parameter.dtype = *known;
  return parameter;
}

absl::StatusOr<Parameters> ParseParameters(const std::string& text) {
  std::set<std::string> names;
  std::string twice;
  const auto note = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1) {
      const auto name = value.get<std::string>();
      if (!names.insert(name).second && twice.empty()) twice = name;
    }
    return depth < 8;
  };
  const auto root = nlohmann::json::parse(text, note, /*allow_exceptions=*/false);
  if (!root.is_object()) return Bad("want a JSON object: name -> {\"dtype\", \"shape\"}");
  if (!twice.empty()) return Bad(absl::StrCat(PrintableName(twice), " is there twice"));
  Parameters parameters;
  for (const auto& [name, entry] : root.items()) {
    SP_ASSIGN_OR_RETURN(parameters[name], ParseParameter(name, entry));
  }
  return parameters;
}

// What a rank's own files hold; `packed` gets the names of FP4 that is stored as U8.
Parameters ParametersOf(const SlicePlan& plan, int32_t rank, std::set<std::string>& packed) {
  Parameters parameters;
  for (const Region& region : plan.regions()) {
    if (region.kind == Region::Kind::kReplicated) continue;
    for (const PartPlan& part : plan.PartsOf(region, rank)) {
      for (const PartTensor& tensor : part.tensors) {
        parameters[tensor.name] = {
            .dtype = tensor.dtype, .packed_fp4 = false, .shape = tensor.shape};
        if (region.kind != Region::Kind::kRouted) continue;
        const Role role = plan.FusedTensorsOf(rank)[static_cast<size_t>(tensor.source)].role;
        const bool weight = role == Role::kW13Weight || role == Role::kW2Weight;
        if (weight && plan.moe().format->weight_bits == 4) packed.insert(tensor.name);
      }
    }
  }
  return parameters;
}

// By name; in the files, in the engine.
std::vector<std::string> Differences(const Parameters& found, const std::set<std::string>& packed,
                                     const Parameters& want) {
  std::map<std::string, std::string> differences;
  for (const auto& [name, parameter] : want) {
    const auto it = found.find(name);
    Parameter wanted = parameter;
    if (packed.contains(name)) wanted.packed_fp4 = false;
    if (it == found.end()) {
      differences[name] = absl::StrCat("missing, want ", Describe(parameter));
    } else if (it->second != wanted) {
      differences[name] = absl::StrCat(Describe(it->second), ", want ", Describe(parameter));
    }
  }
  for (const auto& [name, parameter] : found) {
    if (!want.contains(name)) {
      differences[name] = absl::StrCat(Describe(parameter), ", is none of the engine's");
    }
  }
  std::vector<std::string> lines;
  lines.reserve(differences.size());
  for (const auto& [name, text] : differences) {
    lines.push_back(absl::StrCat(PrintableName(name), ": ", text));
  }
  return lines;
}

}  // namespace

absl::Status CheckStateDict(const std::string& text, const SlicePlan& plan) {
  SP_ASSIGN_OR_RETURN(const Parameters want, ParseParameters(text));
  std::set<int> seen;
  for (int32_t rank = 0; rank < plan.rank_count(); ++rank) {
    if (!seen.insert(plan.ShapeOf(rank)).second) continue;  // ranks of one shape hold the same
    std::set<std::string> packed;
    const Parameters found = ParametersOf(plan, rank, packed);
    std::vector<std::string> lines = Differences(found, packed, want);
    if (lines.empty()) continue;
    const size_t count = lines.size();
    if (lines.size() > kDifferencesShown) lines.resize(kDifferencesShown);
    return absl::InvalidArgumentError(
        absl::StrCat("the files of rank ", rank, " would differ from the state dict in ", count,
                     " of ", want.size(), " parameters: ", absl::StrJoin(lines, "; "),
                     count > lines.size() ? "; ..." : ""));
  }
  return absl::OkStatus();
}

}  // namespace shardprep
