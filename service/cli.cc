#include "service/cli.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <google/protobuf/message.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/time_util.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/profile.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "service/targets_file.h"
#include "workers/expert_slots.h"
#include "workers/open_store.h"
#include "workers/policy_file.h"
#include "workers/printable.h"
#include "workers/resources.h"
#include "workers/tensor_naming.h"

namespace shardprep {
namespace {

constexpr int64_t kMostRanks = 4096;
constexpr int64_t kMaxTextBytes = int64_t{1} << 20;  // of a policy, an expert map, targets
constexpr int64_t kMostRedundantExperts = 1'000'000;

std::vector<std::string> ProfileNames() {
  std::vector<std::string> names;
  for (const LayoutProfile& profile : AllProfiles()) names.emplace_back(profile.name);
  return names;
}

// `given_as` says where the URI stands.
absl::StatusOr<std::string> AbsoluteUri(const std::string& uri, const std::string& given_as,
                                        const std::string& working_directory) {
  auto normal = NormalizeUri(uri, working_directory);
  if (!normal.ok()) return Prefixed(given_as, normal.status());
  if (!IsUtf8(*normal)) {
    return absl::InvalidArgumentError(
        absl::StrCat(given_as, ": ", Printable(*normal), " is not UTF-8, as the API wants it"));
  }
  return normal;
}

absl::StatusOr<std::string> ReadText(const std::string& path, const std::string& what) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is a directory, want a file with ", what));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  std::string text;
  std::string piece(65536, '\0');
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    text.append(piece.data(), static_cast<size_t>(file.gcount()));
    if (static_cast<int64_t>(text.size()) > kMaxTextBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": more than ", kMaxTextBytes, " bytes for ", what));
    }
  }
  if (file.bad()) return absl::UnavailableError(absl::StrCat(path, ": cannot be read"));
  return text;
}

}  // namespace

std::optional<int> ParseOrExit(FlagSet& flags, const std::string& command,
                               const CliArguments& arguments) {
  const absl::Status status = flags.Parse(arguments);
  if (flags.help_wanted()) {
    std::fputs(flags.Help().c_str(), stdout);
    return kExitOk;
  }
  if (status.ok()) return std::nullopt;
  std::fprintf(stderr, "shardprep %s: %s\nSee: shardprep %s --help\n", command.c_str(),
               std::string(status.message()).c_str(), command.c_str());
  return kExitUsage;
}

int Fail(const std::string& command, const absl::Status& status, const std::string& next_step) {
  std::fprintf(stderr, "shardprep %s: %s: %s\n", command.c_str(),
               absl::StatusCodeToString(status.code()).c_str(),
               Printable(status.message()).c_str());
  if (!next_step.empty()) std::fprintf(stderr, "%s\n", next_step.c_str());
  return kExitFailure;
}

absl::Status PrintJson(const google::protobuf::Message& message, bool one_line) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = !one_line;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) {
    return absl::InternalError(
        absl::StrCat(message.GetTypeName(), " as JSON: ", std::string(status.message())));
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

std::vector<std::string> UrisOf(const v1::PrepJobSpec& spec) {
  std::vector<std::string> uris = {spec.source_uri()};
  for (const v1::Target& target : spec.targets()) uris.push_back(target.destination_uri());
  return uris;
}

std::string DestinationsText(const v1::PrepJobSpec& spec) {
  std::vector<std::string> uris = UrisOf(spec);
  uris.erase(uris.begin());
  return absl::StrJoin(uris, ", ");
}

SpecFlags::SpecFlags() = default;

void SpecFlags::AddTo(FlagSet& flags) {
  flags.String("source", "URI",
               "Checkpoint with safetensors files and config.json: a directory, file:// or s3:// "
               "URI.",
               &source_, FlagSet::Presence::kRequired);
  flags.String("targets", "FILE",
               "Several targets in one job, instead of one by flags: a JSON list of "
               "shardprep.v1.Target. Each has a destination of its own and gets what a job of its "
               "own would make; the source is read once for all of them.",
               &targets_);
  AddTargetTo(flags);
  AddKernelTo(flags);
  flags.Instead("targets", {"destination", "tensor-parallel-size", "data-parallel-size",
                            "expert-parallel-size", "expert-placement", "redundant-experts",
                            "expert-map", "state-dict", "naming", "backend", "activation",
                            "force-activation", "architecture", "profile"});
  flags.Size("part-size", "Largest part file, unless one tensor alone is larger.",
             &part_size_bytes_);
  flags.Bool("include-mtp", "Prepares the multi-token-prediction layers too.", &include_mtp_);
  flags.Bool("self-contained",
             "Repeats what all ranks have alike in each rank's files instead of storing it once.",
             &self_contained_);
  flags.Bool("slice-dense",
             "Cuts and fuses attention, shared-expert and embedding tensors for each rank too, "
             "under the names of the engine.",
             &slice_dense_);
  flags.Bool("experts-only", "Leaves out every tensor that is no routed expert.", &experts_only_);
  flags.String("alignment-policy", "FILE", "Replaces the compiled-in table of alignment rules.",
               &alignment_policy_);
  flags.Bool("verify-after-write",
             "Reads each part back and checks it before it counts, those of an earlier run too.",
             &verify_after_write_);
}

void SpecFlags::AddTargetTo(FlagSet& flags) {
  flags.String("destination", "URI",
               "Place for the prepared files: a directory, file:// or s3:// URI. A directory is "
               "made when missing; finished parts that an earlier, interrupted run of the same job "
               "left there are used.",
               &destination_, FlagSet::Presence::kRequired);
  flags.Int("tensor-parallel-size", "N", "Tensor parallel size of the engine.", 1, kMostRanks,
            &tensor_parallel_size_, FlagSet::Presence::kRequired);
  flags.Int("data-parallel-size", "N",
            "Data parallel size. Ranks are numbered over both; experts are cut over both.", 1,
            kMostRanks, &data_parallel_size_);
  flags.Int("expert-parallel-size", "N",
            "Groups of ranks that the experts are dealt to. 1: every rank has a slice of every "
            "expert.",
            1, kMostRanks, &expert_parallel_size_);
  flags.Choice("expert-placement", {"linear", "round-robin"},
               "How experts are dealt: neighbours to one group, or one after the other to each.",
               &expert_placement_);
  flags.Int("redundant-experts", "N", "Further slots, which hold copies of experts 0, 1, ...", 0,
            kMostRedundantExperts, &redundant_experts_);
  flags.String(
      "expert-map", "FILE",
      "Which expert each slot holds, instead of a number of redundant ones: a JSON list, or "
      "one list for each group. Slots are placed linear.",
      &expert_map_);
  flags.String("state-dict", "FILE",
               "Refuses the job unless each rank's files hold exactly these parameters: JSON of "
               "name to dtype and shape, dumped from the engine that is to load them.",
               &state_dict_);
  flags.Choice("naming", NamingSchemeNames(), "Names of the prepared tensors, by engine.",
               &naming_);
}

void SpecFlags::AddKernelTo(FlagSet& flags) {
  flags.String(
      "backend", "NAME",
      "Kernel backend that reads the bytes, for example AITER_MXFP4_BF16. AUTO chooses one "
      "for the architecture.",
      &backend_);
  flags.String("activation", "NAME",
               "Activation of the experts, for example SILU. Default: what the checkpoint's "
               "config.json says.",
               &activation_);
  flags.Bool("force-activation", "Accepts an activation that contradicts config.json.",
             &force_activation_);
  flags.String("architecture", "NAME", "GPU architecture.", &architecture_);
  flags.Choice("profile", ProfileNames(),
               "Layout of the routed experts. `logical` leaves the shuffle to the engine.",
               &profile_);
}

absl::StatusOr<v1::PrepJobSpec> SpecFlags::Spec(const std::string& working_directory) const {
  v1::PrepJobSpec spec;
  SP_ASSIGN_OR_RETURN(*spec.mutable_source_uri(),
                      AbsoluteUri(source_, "--source", working_directory));
  if (targets_.empty()) {
    SP_RETURN_IF_ERROR(SetTarget(working_directory, *spec.add_targets()));
  } else {
    SP_RETURN_IF_ERROR(AddTargetsOfFile(working_directory, spec));
  }
  spec.set_carry(experts_only_ ? v1::CARRY_EXPERTS_ONLY : v1::CARRY_REPLICATED);
  spec.set_include_mtp(include_mtp_);
  spec.set_self_contained(self_contained_);
  spec.set_slice_dense(slice_dense_);
  spec.set_part_size_bytes(part_size_bytes_);
  spec.set_verify_after_write(verify_after_write_);
  if (!alignment_policy_.empty()) {
    SP_ASSIGN_OR_RETURN(*spec.mutable_alignment_policy_json(), ReadPolicyText(alignment_policy_));
  }
  return spec;
}

absl::Status SpecFlags::SetTarget(const std::string& working_directory, v1::Target& target) const {
  SP_ASSIGN_OR_RETURN(*target.mutable_destination_uri(),
                      AbsoluteUri(destination_, "--destination", working_directory));
  v1::ParallelLayout& parallel = *target.mutable_parallel_layout();
  parallel.set_tensor_parallel_size(static_cast<int32_t>(tensor_parallel_size_));
  parallel.set_data_parallel_size(static_cast<int32_t>(data_parallel_size_));
  parallel.set_expert_parallel_size(static_cast<int32_t>(expert_parallel_size_));
  parallel.set_expert_placement(expert_placement_);
  parallel.set_redundant_experts(static_cast<int32_t>(redundant_experts_));
  if (!expert_map_.empty()) {
    SP_ASSIGN_OR_RETURN(const std::string text, ReadText(expert_map_, "an expert map"));
    const auto map = ParseExpertMap(text, parallel.expert_parallel_size());
    if (!map.ok()) return Prefixed(expert_map_, map.status());
    parallel.mutable_physical_to_logical()->Assign(map->begin(), map->end());
  }
  target.set_naming(naming_);
  if (!state_dict_.empty()) {
    SP_ASSIGN_OR_RETURN(*target.mutable_state_dict_json(), ReadText(state_dict_, "parameters"));
    if (target.state_dict_json().empty()) {
      return absl::InvalidArgumentError(absl::StrCat(state_dict_, ": is empty"));
    }
  }
  v1::KernelTarget& kernel = *target.mutable_kernel_target();
  kernel.set_backend(backend_);
  kernel.set_activation(activation_);
  kernel.set_force_activation(force_activation_);
  kernel.set_architecture(architecture_);
  kernel.set_profile(profile_);
  return absl::OkStatus();
}

absl::Status SpecFlags::AddTargetsOfFile(const std::string& working_directory,
                                         v1::PrepJobSpec& spec) const {
  SP_ASSIGN_OR_RETURN(const std::string text, ReadText(targets_, "targets"));
  absl::StatusOr<std::vector<v1::Target>> targets = ParseTargets(text);
  if (!targets.ok()) return Prefixed(targets_, targets.status());
  for (v1::Target& target : *targets) {
    const std::string entry = absl::StrCat(targets_, ": targets[", spec.targets_size(), "]");
    SP_ASSIGN_OR_RETURN(*target.mutable_destination_uri(),
                        AbsoluteUri(target.destination_uri(), entry, working_directory));
    *spec.add_targets() = std::move(target);
  }
  return absl::OkStatus();
}

void RunFlags::AddTo(FlagSet& flags) {
  flags.Int("workers", "N",
            "Worker processes. One is enough for one machine: it has a thread for each processor.",
            1, 64, &workers);
  flags.Int("threads", "N", absl::StrCat("Threads of one worker. ", kDefaultThreadsHelp), 0, 4096,
            &threads);
  flags.String(
      "device", "DEVICE",
      "Where shuffles run: cpu, hip:N (GPU N), hip (GPU 0; several workers take one each), "
      "or auto: what is faster, measured at start.",
      &device);
  flags.Size("memory-budget", "Memory for the buffers of one worker.", &memory_budget_bytes);
  flags.String("metrics-listen", "ADDR",
               "Serves Prometheus metrics while the job runs, for example 127.0.0.1:9464.",
               &metrics_listen);
  flags.String("allow-source-root", "DIR,...",
               "Directories that symbolic links of the source may lead into, besides itself.",
               &allow_source_root);
  flags.String("sign-key", "FILE",
               "PEM file of an Ed25519 private key that signs the manifest (fetch --trust).",
               &sign_key);
}

void TimeoutFlag::AddTo(FlagSet& flags) {
  flags.Value("timeout", "TIME",
              "The job fails when it has not ended after this time, for example 90m or 1h30m; what "
              "it finished stays. Default: no limit.",
              [this](const std::string& text) {
                absl::Duration value;
                if (!absl::ParseDuration(text, &value) || value < absl::Milliseconds(1) ||
                    value > absl::Hours(24 * 366)) {
                  return absl::InvalidArgumentError(
                      absl::StrCat("'", text, "': want 1ms to 8784h, for example 90m"));
                }
                timeout_ = value;
                return absl::OkStatus();
              });
}

void TimeoutFlag::Apply(v1::CreatePrepJobRequest& request) const {
  if (!timeout_.has_value()) return;
  *request.mutable_timeout() =
      google::protobuf::util::TimeUtil::NanosecondsToDuration(absl::ToInt64Nanoseconds(*timeout_));
}

absl::StatusOr<std::vector<std::string>> DirectoryList(const std::string& text,
                                                       const std::string& flag,
                                                       const std::string& working_directory) {
  std::vector<std::string> directories;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    SP_ASSIGN_OR_RETURN(std::string directory,
                        AbsoluteUri(std::string(part), "--" + flag, working_directory));
    directories.push_back(std::move(directory));
  }
  return directories;
}

absl::StatusOr<std::string> ReadPolicyText(const std::string& path) {
  SP_ASSIGN_OR_RETURN(std::string text, ReadText(path, "an alignment policy"));
  const absl::Status valid = ParseAlignmentPolicy(text).status();
  if (!valid.ok()) return Prefixed(path, valid);
  return text;
}

}  // namespace shardprep
