// make-checkpoint: writes a checkpoint for demonstrations and measurements, DeepSeek-V4 shaped or
// small in the naming of another family.
//
//   make-checkpoint --out DIR [--preset tiny|small-v4|quickstart|v4-pro|FAMILY] [--hidden N]
//                   [--intermediate N]
//                   [--experts N] [--layers N] [--mtp-layers N] [--files N] [--vocabulary N]
//                   [--weight-dtype I8|U8|F4] [--scale-dtype F8_E8M0|U8] [--prefix P]
//                   [--noindex] [--sparse|--dense]
//
// FAMILY: v4-fp8, v3-fp8, v3-quark, qwen3-bf16, qwen3-quark, mixtral, kimi-k3, gpt-oss.
// A preset gives every number; flags change it. --sparse writes real headers over data that takes
// no disk space, and is what v4-pro (805 GiB) does unless --dense is given.
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "tests/support/test_checkpoint.h"
#include "workers/safetensors.h"

ABSL_FLAG(std::string, out, "", "directory to write into");
ABSL_FLAG(
    std::string, preset, "quickstart",
    "tiny, small-v4 (every tensor that V4-Pro has), quickstart (0.45 GB), v4-pro (805 GiB) or "
    "a family");
ABSL_FLAG(int64_t, hidden, 0, "hidden size, elements");
ABSL_FLAG(int64_t, intermediate, 0, "intermediate size of a routed expert, elements");
ABSL_FLAG(int64_t, experts, 0, "routed experts of a layer");
ABSL_FLAG(int64_t, layers, 0, "layers without MTP");
ABSL_FLAG(int64_t, mtp_layers, -1, "MTP layers");
ABSL_FLAG(int64_t, files, 0, "safetensors files");
ABSL_FLAG(int64_t, vocabulary, 0, "rows of the embedding");
ABSL_FLAG(std::string, weight_dtype, "I8", "I8, U8 or F4");
ABSL_FLAG(std::string, scale_dtype, "F8_E8M0", "F8_E8M0 or U8");
ABSL_FLAG(std::string, prefix, "", "prefix of all names, e.g. model.");
ABSL_FLAG(bool, index, true, "write model.safetensors.index.json");
ABSL_FLAG(bool, sparse, false, "headers only; the data reads as zeros");
ABSL_FLAG(bool, dense, false, "write all data, whatever the preset says");

namespace shardprep {
namespace {

absl::StatusOr<CheckpointSpec> PresetSpec(const std::string& name) {
  if (name == "tiny") return CheckpointSpec{};
  if (name == "small-v4") return SmallV4Spec();
  if (name == "quickstart") return QuickstartSpec();
  if (name == "v4-pro") return V4ProSpec();
  constexpr std::pair<const char*, TestFamily> kFamilies[] = {
      {"v4-fp8", TestFamily::kDeepSeekV4Fp8},     {"v3-fp8", TestFamily::kDeepSeekV3Fp8},
      {"v3-quark", TestFamily::kDeepSeekV3Quark}, {"qwen3-bf16", TestFamily::kQwen3Bf16},
      {"qwen3-quark", TestFamily::kQwen3Quark},   {"mixtral", TestFamily::kMixtral},
      {"kimi-k3", TestFamily::kKimiK3},           {"gpt-oss", TestFamily::kGptOss}};
  std::string known = "tiny, small-v4, quickstart, v4-pro";
  for (const auto& [family, id] : kFamilies) {
    if (name == family) return FamilySpec(id);
    absl::StrAppend(&known, ", ", family);
  }
  return absl::InvalidArgumentError(absl::StrCat("--preset: '", name, "', want ", known));
}

absl::Status CheckSpec(const CheckpointSpec& spec) {
  for (const int64_t extent : {spec.hidden, spec.intermediate}) {
    if (extent < 32 || extent % 32 != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--hidden and --intermediate: found ", extent, ", want multiples of 32"));
    }
  }
  if (spec.experts < 1 || spec.layers < 1 || spec.mtp_layers < 0 || spec.files < 1 ||
      spec.files > 99'999 || spec.vocabulary < 1) {
    return absl::InvalidArgumentError(
        "--experts, --layers, --files and --vocabulary must be at least 1, --files below 100000");
  }
  const bool packed = spec.weight_dtype == Dtype::kI8 || spec.weight_dtype == Dtype::kU8 ||
                      spec.weight_dtype == Dtype::kF4;
  if (!packed) return absl::InvalidArgumentError("--weight-dtype: want I8, U8 or F4");
  if (spec.scale_dtype != Dtype::kF8E8M0 && spec.scale_dtype != Dtype::kU8) {
    return absl::InvalidArgumentError("--scale-dtype: want F8_E8M0 or U8");
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointSpec> SpecFromFlags() {
  SP_ASSIGN_OR_RETURN(CheckpointSpec spec, PresetSpec(absl::GetFlag(FLAGS_preset)));
  const auto set = [](int64_t flag, int64_t* value) {
    if (flag != 0) *value = flag;
  };
  set(absl::GetFlag(FLAGS_hidden), &spec.hidden);
  set(absl::GetFlag(FLAGS_intermediate), &spec.intermediate);
  set(absl::GetFlag(FLAGS_experts), &spec.experts);
  set(absl::GetFlag(FLAGS_layers), &spec.layers);
  set(absl::GetFlag(FLAGS_vocabulary), &spec.vocabulary);
  if (absl::GetFlag(FLAGS_mtp_layers) != -1) spec.mtp_layers = absl::GetFlag(FLAGS_mtp_layers);
  int64_t files = spec.files;
  set(absl::GetFlag(FLAGS_files), &files);
  if (files > 99'999) return absl::InvalidArgumentError("--files: at most 99999");
  spec.files = static_cast<int>(files);
  SP_ASSIGN_OR_RETURN(spec.weight_dtype, ParseDtype(absl::GetFlag(FLAGS_weight_dtype)));
  SP_ASSIGN_OR_RETURN(spec.scale_dtype, ParseDtype(absl::GetFlag(FLAGS_scale_dtype)));
  if (!absl::GetFlag(FLAGS_prefix).empty()) spec.prefix = absl::GetFlag(FLAGS_prefix);
  spec.with_index = absl::GetFlag(FLAGS_index);
  if (absl::GetFlag(FLAGS_sparse) && absl::GetFlag(FLAGS_dense)) {
    return absl::InvalidArgumentError("--sparse and --dense exclude each other");
  }
  if (absl::GetFlag(FLAGS_sparse)) spec.sparse = true;
  if (absl::GetFlag(FLAGS_dense)) spec.sparse = false;
  SP_RETURN_IF_ERROR(CheckSpec(spec));
  return spec;
}

absl::Status Run() {
  const std::string directory = absl::GetFlag(FLAGS_out);
  if (directory.empty()) return absl::InvalidArgumentError("--out DIR is needed");
  SP_ASSIGN_OR_RETURN(const CheckpointSpec spec, SpecFromFlags());
  SP_ASSIGN_OR_RETURN(const std::vector<TestTensor> tensors, TestTensors(spec));
  int64_t routed_count = 0;
  int64_t routed_bytes = 0;
  int64_t other_bytes = 0;
  for (const TestTensor& tensor : tensors) {
    SP_ASSIGN_OR_RETURN(const int64_t size_bytes, TensorBytes(tensor.dtype, tensor.shape));
    (tensor.place ? routed_bytes : other_bytes) += size_bytes;
    routed_count += tensor.place ? 1 : 0;
  }
  SP_RETURN_IF_ERROR(WriteTestCheckpoint(directory, spec));
  std::printf("%s: %d files%s, %lld routed-expert tensors with %lld bytes, %lld others with %lld\n",
              directory.c_str(), spec.files, spec.sparse ? " (sparse)" : "",
              static_cast<long long>(routed_count), static_cast<long long>(routed_bytes),
              static_cast<long long>(static_cast<int64_t>(tensors.size()) - routed_count),
              static_cast<long long>(other_bytes));
  return absl::OkStatus();
}

// Abseil knows flags by their C++ names; people type --mtp-layers.
std::vector<std::string> WithUnderscores(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  for (size_t i = 1; i < arguments.size(); ++i) {
    std::string& argument = arguments[i];
    if (argument.compare(0, 2, "--") != 0) continue;
    for (size_t c = 2; c < argument.size() && argument[c] != '='; ++c) {
      if (argument[c] == '-') argument[c] = '_';
    }
  }
  return arguments;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("writes a DeepSeek-V4 shaped checkpoint: --out DIR --preset NAME");
  std::vector<std::string> arguments = shardprep::WithUnderscores(argc, argv);
  std::vector<char*> pointers;
  pointers.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, pointers.data());
  absl::Status status = rest.size() > 1
                            ? absl::InvalidArgumentError(absl::StrCat("not a flag: ", rest[1]))
                            : shardprep::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "make-checkpoint: %s\n", status.ToString().c_str());
  return 1;
}
