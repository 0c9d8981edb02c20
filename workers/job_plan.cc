#include "workers/job_plan.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/canonical_json.h"
#include "workers/digest.h"
#include "workers/expert_slots.h"
#include "workers/object_names.h"
#include "workers/open_store.h"
#include "workers/policy_file.h"
#include "workers/state_dict.h"
#include "workers/version.h"

namespace shardprep {
namespace {

constexpr int64_t kDefaultPartBytes = int64_t{2} << 30;
constexpr int64_t kMinPartBytes = 4096;
constexpr int64_t kMaxPartBytes = int64_t{1} << 42;
constexpr int32_t kMaxWorldSize = 4096;
constexpr int kListedNotCarried = 100;
constexpr char kRankNumbering[] = "dp_rank*tensor_parallel_size+tp_rank";

absl::Status NormalizePlacement(const v1::ParallelLayout& layout) {
  SP_ASSIGN_OR_RETURN([[maybe_unused]] const ExpertPlacement placement,
                      ParsePlacement(layout.expert_placement()));
  if (layout.redundant_experts() < 0) {
    return absl::InvalidArgumentError(absl::StrCat("parallel_layout.redundant_experts is ",
                                                   layout.redundant_experts(), ", want 0 or more"));
  }
  if (layout.expert_parallel_size() != 1) return absl::OkStatus();
  if (placement != ExpertPlacement::kLinear || layout.redundant_experts() != 0 ||
      layout.physical_to_logical_size() != 0) {
    return absl::InvalidArgumentError(
        "parallel_layout places experts, but expert_parallel_size is 1: every rank holds a slice "
        "of "
        "every expert");
  }
  return absl::OkStatus();
}

absl::Status NormalizeParallelLayout(v1::ParallelLayout& layout) {
  if (!layout.has_tensor_parallel_size()) {
    return absl::InvalidArgumentError("parallel_layout.tensor_parallel_size is not set");
  }
  if (!layout.has_data_parallel_size()) layout.set_data_parallel_size(1);
  if (!layout.has_expert_parallel_size()) layout.set_expert_parallel_size(1);
  const std::pair<const char*, int32_t> sizes[] = {
      {"tensor_parallel_size", layout.tensor_parallel_size()},
      {"data_parallel_size", layout.data_parallel_size()},
      {"expert_parallel_size", layout.expert_parallel_size()}};
  for (const auto& [name, size] : sizes) {
    if (size < 1 || size > kMaxWorldSize) {
      return absl::InvalidArgumentError(
          absl::StrCat("parallel_layout.", name, " is ", size, ", want 1 to ", kMaxWorldSize));
    }
  }
  const int64_t world =
      int64_t{layout.tensor_parallel_size()} * int64_t{layout.data_parallel_size()};
  if (world > kMaxWorldSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("parallel_layout has ", world, " ranks, want at most ", kMaxWorldSize));
  }
  if (world % layout.expert_parallel_size() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("parallel_layout.expert_parallel_size ",
                                                   layout.expert_parallel_size(),
                                                   " does not divide the world size ", world));
  }
  if (layout.expert_placement().empty()) {
    layout.set_expert_placement(std::string(PlacementName(ExpertPlacement::kLinear)));
  }
  return NormalizePlacement(layout);
}

absl::Status NormalizeKernelTarget(v1::KernelTarget& kernel) {
  if (kernel.backend().empty()) kernel.set_backend("AUTO");
  if (kernel.architecture().empty()) kernel.set_architecture("gfx950");
  if (kernel.profile().empty()) kernel.set_profile("aiter-separated");
  SP_ASSIGN_OR_RETURN([[maybe_unused]] const ProfileId profile, ParseProfile(kernel.profile()));
  if (kernel.num_fused_shared_experts() == 1) {
    return absl::UnimplementedError(
        "kernel_target.num_fused_shared_experts 1 is not supported: the fused shared expert needs "
        "another width; want 0");
  }
  if (kernel.num_fused_shared_experts() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("kernel_target.num_fused_shared_experts is ",
                                                   kernel.num_fused_shared_experts(), ", want 0"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> NormalizeUriField(const std::string& uri, const char* field) {
  if (uri.empty()) return absl::InvalidArgumentError(absl::StrCat(field, " is not set"));
  auto normalized = NormalizeUri(uri);
  if (!normalized.ok()) return Prefixed(field, normalized.status());
  return normalized;
}

absl::StatusOr<PolicyFile> PolicyOf(const v1::PrepJobSpec& spec) {
  if (spec.alignment_policy_json().empty()) return DefaultAlignmentPolicy();
  return ParseAlignmentPolicy(spec.alignment_policy_json());
}

// The kernel target with nothing left open.
struct ResolvedKernel {
  v1::KernelTarget target;
  std::string backend_reason;
  ProfileId profile = ProfileId::kLogical;
  AlignmentDecision decision;
};

absl::StatusOr<ResolvedKernel> ResolveKernel(const v1::KernelTarget& wish, const MoeCheckpoint& moe,
                                             const AlignmentPolicy& policy) {
  ResolvedKernel kernel;
  kernel.target = wish;
  SP_ASSIGN_OR_RETURN(
      const BackendChoice backend,
      policy.ResolveBackend(wish.backend(), wish.architecture(), moe.format->weights));
  SP_RETURN_IF_ERROR(policy.CheckWeights(backend.backend, moe.format->weights));
  kernel.target.set_backend(backend.backend);
  kernel.backend_reason = backend.reason;
  if (wish.activation().empty()) {
    kernel.target.set_activation(moe.activation);
  } else if (wish.activation() != moe.activation && !wish.force_activation()) {
    return absl::InvalidArgumentError(
        absl::StrCat("activation ", wish.activation(), " contradicts the checkpoint's ",
                     moe.activation, " (family ", moe.family, ", config.json); force it if meant"));
  }
  SP_ASSIGN_OR_RETURN(kernel.profile, ParseProfile(wish.profile()));
  SP_ASSIGN_OR_RETURN(kernel.decision,
                      policy.Decide(kernel.target.backend(), kernel.target.activation(),
                                    kernel.target.architecture()));
  SP_RETURN_IF_ERROR(policy.CheckProfile(kernel.target.backend(), kernel.target.activation(),
                                         kernel.target.architecture(), kernel.profile));
  return kernel;
}

std::string Decimal(int64_t value) { return absl::StrCat(value); }

template <typename Numbers>
nlohmann::json DecimalList(const Numbers& numbers) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto number : numbers) list.push_back(Decimal(number));
  return list;
}

// Of rank 0: those of the others follow from the parallel layout and the expert map.
nlohmann::json FusedTensorInputs(const SlicePlan& slices) {
  nlohmann::json tensors = nlohmann::json::object();
  for (const FusedTensor& tensor : slices.fused_tensors()) {
    tensors[tensor.name] = {
        {"layout", GetLayoutInfo(tensor.job.layout).name},
        {"row_order", tensor.job.row_order == RowOrder::kGateUpRows ? "gate-up-rows" : "as-is"},
        {"fill", Decimal(tensor.fill)},
        {"dtype", std::string(DtypeName(tensor.dtype))},
        {"shape", DecimalList(tensor.shape)}};
  }
  return tensors;
}

// What the rules made of dense tensors, as one digest: they are many.
std::string DenseTensorInputs(const SlicePlan& slices) {
  std::string lines;
  for (const DenseTensor& tensor : slices.dense_tensors()) {
    const char* cut = tensor.cut == DenseCut::kWhole  ? "whole"
                      : tensor.cut == DenseCut::kRows ? "rows"
                                                      : "columns";
    absl::StrAppend(&lines, tensor.name, " ", DtypeName(tensor.dtype), " [",
                    absl::StrJoin(tensor.shape, ","), "] ", cut, " ", tensor.tail_bytes);
    for (const DenseSource& source : tensor.sources) {
      absl::StrAppend(&lines, " ", slices.checkpoint().tensors().at(source.tensor).name);
    }
    absl::StrAppend(&lines, "\n");
  }
  return Sha256Hex(lines);
}

// The inputs of the layout fingerprint: what decides the bytes of the data files, given the source.
absl::StatusOr<std::string> FingerprintInputs(const JobPlan& plan, const ResolvedKernel& kernel) {
  const SlicePlan& slices = plan.slices;
  const MoeCheckpoint& moe = slices.moe();
  const v1::ParallelLayout& parallel = plan.target().parallel_layout();
  nlohmann::json sources = nlohmann::json::array();
  for (const CheckpointFile& file : slices.checkpoint().files()) {
    sources.push_back({{"name", file.name},
                       {"size_bytes", Decimal(file.size_bytes)},
                       {"header_sha256", file.header_sha256}});
  }
  nlohmann::json inputs = {
      {"format_version", kFormatVersion},
      {"family", moe.family},
      {"expert_format", moe.format->id},
      {"geometry",
       {{"hidden", Decimal(moe.hidden)},
        {"intermediate", Decimal(moe.intermediate)},
        {"experts", Decimal(moe.experts)},
        {"block_size", Decimal(moe.block_size)},
        {"hidden_layers", Decimal(moe.hidden_layers)},
        {"mtp_layers", Decimal(moe.mtp_layers)}}},
      {"parallel_layout",
       {{"tensor_parallel_size", Decimal(parallel.tensor_parallel_size())},
        {"data_parallel_size", Decimal(parallel.data_parallel_size())},
        {"expert_parallel_size", Decimal(parallel.expert_parallel_size())},
        {"expert_placement", parallel.expert_placement()},
        {"physical_to_logical", DecimalList(slices.expert_slots().physical_to_logical())},
        {"rank_numbering", kRankNumbering}}},
      {"backend", kernel.target.backend()},
      {"activation", kernel.target.activation()},
      {"architecture", kernel.target.architecture()},
      {"alignment",
       {{"rule_id", kernel.decision.rule_id},
        {"intermediate", Decimal(kernel.decision.intermediate.elements())},
        {"hidden", Decimal(kernel.decision.hidden.elements())}}},
      {"profile", kernel.target.profile()},
      {"gate_mode", GetProfile(kernel.profile).gate_mode},
      {"tensors", FusedTensorInputs(slices)},
      {"extents",
       {{"hidden", Decimal(slices.hidden().elements())},
        {"padded_hidden", Decimal(slices.padded_hidden().elements())},
        {"intermediate", Decimal(slices.intermediate().elements())},
        {"padded_intermediate", Decimal(slices.padded_intermediate().elements())}}},
      {"naming", plan.target().naming()},
      {"carry", v1::Carry_Name(plan.spec.carry())},
      {"include_mtp", plan.spec.include_mtp()},
      {"part_size_bytes", Decimal(plan.spec.part_size_bytes())},
      {"source_files", sources}};
  // Only where asked for, so that artefacts made before there was a choice keep their fingerprint.
  if (plan.spec.self_contained()) inputs["self_contained"] = true;
  if (plan.spec.slice_dense()) inputs["slice_dense"] = DenseTensorInputs(slices);
  return CanonicalJson(inputs);
}

absl::StatusOr<std::string> SourceToken(const Checkpoint& checkpoint) {
  nlohmann::json token = nlohmann::json::object();
  for (const CheckpointFile& file : checkpoint.files()) token[file.name] = file.etag;
  for (const SmallFile& file : checkpoint.small_files()) token[file.name] = file.info.etag;
  return CanonicalJson(token);
}

// The generic rule of the platform is one for FP4 kernels; others have no yardstick but their own.
absl::Status SummarizeSaving(const JobPlan& plan, const ResolvedKernel& kernel,
                             const AlignmentPolicy& policy, v1::PlanSummary& summary) {
  const SlicePlan& slices = plan.slices;
  AlignmentDecision generic = kernel.decision;
  if (absl::string_view(slices.moe().format->weights) == "mxfp4") {
    SP_ASSIGN_OR_RETURN(generic, policy.GenericRule(kernel.target.architecture()));
  }
  SlicePlanInputs inputs = slices.inputs();
  inputs.intermediate_alignment = generic.intermediate;
  inputs.hidden_alignment = generic.hidden;
  SP_ASSIGN_OR_RETURN(const SlicePlan other,
                      SlicePlan::Make(slices.shared_checkpoint(), slices.shared_moe(), inputs));
  summary.set_generic_rule_id(generic.rule_id);
  summary.set_generic_rule_bytes_per_rank(other.RoutedBytesPerRank(/*with_mtp=*/true));
  summary.set_saved_bytes_per_rank(summary.generic_rule_bytes_per_rank() -
                                   summary.routed_bytes_per_rank());
  return absl::OkStatus();
}

v1::FusedTensorSummary Summary(const FusedTensor& tensor) {
  v1::FusedTensorSummary fused;
  fused.set_role(tensor.name);
  fused.set_dtype(std::string(DtypeName(tensor.dtype)));
  for (const int64_t extent : tensor.shape) fused.add_shape(extent);
  fused.set_layout(GetLayoutInfo(tensor.job.layout).name);
  fused.set_size_bytes(tensor.size_bytes);
  fused.set_native_bytes(tensor.native_bytes);
  return fused;
}

void SummarizeShapes(const SlicePlan& slices, v1::PlanSummary& summary) {
  for (const FusedTensor& tensor : slices.fused_tensors()) {
    *summary.add_fused_tensors() = Summary(tensor);
  }
  if (slices.shape_count() == 1) return;
  for (int shape = 0; shape < slices.shape_count(); ++shape) summary.add_rank_shapes();
  for (int32_t rank = 0; rank < slices.rank_count(); ++rank) {
    v1::RankShape& shape = *summary.mutable_rank_shapes(slices.ShapeOf(rank));
    shape.add_ranks(rank);
    if (shape.ranks_size() > 1) continue;
    shape.set_intermediate(slices.IntermediateOf(rank).elements());
    for (const FusedTensor& tensor : slices.FusedTensorsOf(rank)) {
      *shape.add_fused_tensors() = Summary(tensor);
      shape.set_expert_count(tensor.experts);
      shape.set_routed_bytes(shape.routed_bytes() +
                             tensor.size_bytes * summary.routed_layer_count());
    }
  }
}

void SummarizeGeometry(const SlicePlan& slices, v1::PlanSummary& summary) {
  const MoeCheckpoint& moe = slices.moe();
  summary.set_family(moe.family);
  summary.set_expert_format(moe.format->id);
  summary.set_physical_expert_count(slices.expert_slots().physical_count());
  summary.set_hidden_size(moe.hidden);
  summary.set_intermediate_size(moe.intermediate);
  summary.set_expert_count(moe.experts);
  for (const Region& region : slices.regions()) {
    for (const int32_t rank : slices.RanksOf(region)) {
      summary.set_part_count(summary.part_count() +
                             static_cast<int32_t>(slices.PartsOf(region, rank).size()));
    }
    if (region.kind != Region::Kind::kRouted) continue;
    summary.set_routed_layer_count(summary.routed_layer_count() + 1);
    if (moe.layers[region.moe_layer].is_mtp) {
      summary.set_mtp_layer_count(summary.mtp_layer_count() + 1);
    }
  }
  summary.set_region_count(static_cast<int32_t>(slices.regions().size()));
  summary.mutable_extents()->set_hidden(slices.hidden().elements());
  summary.mutable_extents()->set_padded_hidden(slices.padded_hidden().elements());
  summary.mutable_extents()->set_intermediate(slices.intermediate().elements());
  summary.mutable_extents()->set_padded_intermediate(slices.padded_intermediate().elements());
  SummarizeShapes(slices, summary);
}

absl::Status SummarizeBytes(const JobPlan& plan, v1::PlanSummary& summary) {
  const SlicePlan& slices = plan.slices;
  const MoeCheckpoint& moe = slices.moe();
  const TensorTable& tensors = slices.checkpoint().tensors();
  summary.set_rank_count(slices.rank_count());
  summary.set_routed_bytes_per_rank(slices.RoutedBytesPerRank(true));
  summary.set_routed_bytes_per_rank_without_mtp(slices.RoutedBytesPerRank(false));
  summary.set_padding_bytes_per_rank(slices.PaddingBytesPerRank());
  summary.set_replicated_bytes(slices.ReplicatedBytes());
  summary.set_dense_bytes_per_rank(slices.DenseBytesPerRank());
  int64_t routed = 0, all = 0;
  for (const MoeLayer& layer : moe.layers) {
    for (const int32_t t : layer.Tensors()) routed += tensors.at(t).size_bytes;
  }
  for (int64_t t = 0; t < tensors.size(); ++t) all += tensors.at(t).size_bytes;
  summary.set_source_routed_bytes(routed);
  summary.set_source_bytes(all);
  summary.set_needed_bytes(slices.NeededSourceBytes());
  int64_t output = 0;
  for (const Region& region : slices.regions()) {
    for (const int32_t rank : slices.RanksOf(region)) {
      for (const PartPlan& part : slices.PartsOf(region, rank)) {
        SP_ASSIGN_OR_RETURN(const std::string header, PartHeader(plan, part, rank));
        output += static_cast<int64_t>(header.size()) + part.data_bytes;
      }
    }
  }
  summary.set_output_bytes(output);
  for (const OmittedTensor& omitted : slices.omitted()) {
    summary.set_not_carried_bytes(summary.not_carried_bytes() + omitted.size_bytes);
    if (summary.not_carried_size() >= kListedNotCarried) continue;
    v1::NotCarried& entry = *summary.add_not_carried();
    entry.set_name(omitted.name);
    entry.set_size_bytes(omitted.size_bytes);
    entry.set_reason(omitted.reason);
  }
  summary.set_not_carried_count(static_cast<int64_t>(slices.omitted().size()));
  for (const StaleIndexEntry& stale : slices.checkpoint().stale()) {
    summary.add_stale_index_entries(absl::StrCat(stale.tensor, " in ", stale.file));
  }
  return absl::OkStatus();
}

// Each rank set reads what any of its ranks has of a tensor; whole rows where columns are cut.
int64_t DenseReadBytes(const SlicePlan& slices, int32_t ranks_per_set) {
  const int32_t parallel = slices.inputs().tensor_parallel_size;
  int64_t read = 0;
  for (const Region& region : slices.regions()) {
    if (region.kind != Region::Kind::kDense) continue;
    for (const PartTensor& tensor : region.parts.front().tensors) {
      const DenseTensor& dense = slices.dense_tensors()[static_cast<size_t>(tensor.source)];
      int64_t bytes = 0;
      for (const DenseSource& source : dense.sources) bytes += source.rows * source.row_bytes;
      for (int32_t first = 0; first < slices.rank_count(); first += ranks_per_set) {
        const int32_t ranks = std::min(ranks_per_set, slices.rank_count() - first);
        read += dense.cut == DenseCut::kRows ? bytes / parallel * std::min(ranks, parallel) : bytes;
      }
    }
  }
  return read;
}

// What a memory budget means for reading: rows that ranks of a group share are read once for each
// rank set that has ranks of the group, an expert with several slots once for each.
int64_t ReadBytes(const SlicePlan& slices, int32_t ranks_per_set, int64_t routed_layers) {
  int64_t read = slices.ReplicatedBytes() + DenseReadBytes(slices, ranks_per_set);
  const int32_t group_size = slices.moe_tensor_parallel_size();
  for (int32_t group = 0; group < slices.expert_slots().groups(); ++group) {
    const int32_t first = group * group_size, last = first + group_size - 1;
    const int64_t sets = last / ranks_per_set - first / ranks_per_set + 1;
    for (int32_t rank = first; rank <= last; ++rank) {
      for (const FusedTensor& tensor : slices.FusedTensorsOf(rank)) {
        read += (tensor.splits_rows ? sets : 1) * tensor.native_bytes * routed_layers;
      }
    }
  }
  return read;
}

absl::Status SummarizeMemory(const JobPlan& plan, const PlanOptions& options,
                             v1::PlanSummary& summary) {
  const SlicePlan& slices = plan.slices;
  SP_ASSIGN_OR_RETURN(const int32_t ranks, RanksPerLease(plan, options.memory_budget_bytes));
  const int64_t read = ReadBytes(slices, ranks, summary.routed_layer_count());
  summary.set_read_bytes(read);
  summary.set_read_amplification(summary.needed_bytes() == 0
                                     ? 1.0
                                     : static_cast<double>(read) /
                                           static_cast<double>(summary.needed_bytes()));
  summary.set_minimum_memory_budget_bytes(plan.memory.Total(1, 1));
  summary.set_read_once_memory_budget_bytes(plan.memory.Total(slices.rank_count(), 1));
  summary.set_ranks_per_lease(ranks);
  return absl::OkStatus();
}

void AddNote(const char* kind, const std::string& text, const std::string& source,
             v1::PlanSummary& summary) {
  v1::PolicyNote& note = *summary.add_policy_notes();
  note.set_kind(kind);
  note.set_text(text);
  note.set_source(source);
}

// The rows of the policy that hold for the plan, for people who ask why.
void SummarizePolicy(const JobPlan& plan, const ResolvedKernel& kernel,
                     const AlignmentPolicy& policy, v1::PlanSummary& summary) {
  const SlicePlan& slices = plan.slices;
  const std::string weights = slices.moe().format->weights;
  for (const int64_t size : slices.LegalMoeSizes()) {
    summary.add_moe_tensor_parallel_sizes(static_cast<int32_t>(size));
  }
  for (const WidthConstraint& constraint : kernel.decision.constraints) {
    AddNote(
        "constraint",
        absl::StrCat(constraint.id, ": padded width a multiple of ", constraint.padded_multiple_of),
        constraint.source, summary);
  }
  for (const AiterMinimum& minimum : policy.AiterMinimumsFor(
           kernel.profile, slices.intermediate(), slices.padded_intermediate(), weights)) {
    const std::string when =
        minimum.unless_multiple_of > 1
            ? absl::StrCat(", the ", minimum.width == WidthKind::kNative ? "native" : "padded",
                           " width being no multiple of ", minimum.unless_multiple_of)
            : "";
    AddNote("minimum AITER", absl::StrCat(minimum.version, when), minimum.source, summary);
  }
}

absl::Status Summarize(JobPlan& plan, const ResolvedKernel& kernel, const PolicyFile& table,
                       const PlanOptions& options) {
  const AlignmentPolicy& policy = table.policy;
  v1::PlanSummary& summary = plan.summary;
  summary.set_layout_fingerprint(plan.fingerprint);
  *summary.mutable_kernel_target() = kernel.target;
  summary.set_backend_reason(kernel.backend_reason);
  summary.set_gate_mode(GetProfile(kernel.profile).gate_mode);
  v1::AlignmentSummary& alignment = *summary.mutable_alignment();
  alignment.set_rule_id(kernel.decision.rule_id);
  alignment.set_rule_source(kernel.decision.source);
  alignment.set_intermediate_alignment(kernel.decision.intermediate.elements());
  alignment.set_hidden_alignment(kernel.decision.hidden.elements());
  alignment.set_policy_version(absl::StrCat(policy.version));
  alignment.set_policy_digest(table.sha256_hex);
  summary.set_minimum_aiter_version(policy.MinimumAiterVersion(
      kernel.profile, plan.slices.intermediate(), plan.slices.padded_intermediate(),
      plan.slices.moe().format->weights));
  SummarizePolicy(plan, kernel, policy, summary);
  SummarizeGeometry(plan.slices, summary);
  SP_RETURN_IF_ERROR(SummarizeBytes(plan, summary));
  return SummarizeMemory(plan, options, summary);
}

absl::Status CheckDenseWishes(const v1::PrepJobSpec& spec) {
  for (const v1::Target& target : spec.targets()) {
    if (target.state_dict_json().empty() || spec.self_contained()) continue;
    return absl::InvalidArgumentError(
        "state_dict_json says what a rank's files hold, and without self_contained a rank needs "
        "others as well");
  }
  if (spec.carry() != v1::CARRY_EXPERTS_ONLY) return absl::OkStatus();
  for (const auto& [name, wish] : {std::pair("self_contained", spec.self_contained()),
                                   std::pair("slice_dense", spec.slice_dense())}) {
    if (!wish) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        name, " is about tensors besides the routed experts, but carry is CARRY_EXPERTS_ONLY"));
  }
  return absl::OkStatus();
}

absl::Status NormalizeTarget(const std::string& source_uri, v1::Target& target) {
  SP_ASSIGN_OR_RETURN(*target.mutable_destination_uri(),
                      NormalizeUriField(target.destination_uri(), "destination_uri"));
  if (target.destination_uri() == source_uri) {
    return absl::InvalidArgumentError(
        absl::StrCat("destination_uri is the source itself: ", source_uri));
  }
  if (target.destination_uri() == "/") {
    return absl::InvalidArgumentError(
        "destination_uri is the root of the file system, want a directory of its own");
  }
  if (absl::StrContains(target.destination_uri() + "/", absl::StrCat("/", kWorkPrefix))) {
    return absl::InvalidArgumentError(
        absl::StrCat("destination_uri is ", target.destination_uri(), ": what lies below ",
                     kWorkPrefix, " is removed by the job that the folder belongs to"));
  }
  SP_RETURN_IF_ERROR(NormalizeParallelLayout(*target.mutable_parallel_layout()));
  SP_RETURN_IF_ERROR(NormalizeKernelTarget(*target.mutable_kernel_target()));
  if (target.naming().empty()) target.set_naming("vllm");
  return absl::OkStatus();
}

absl::Status NormalizeTargets(v1::PrepJobSpec& spec) {
  const int32_t count = spec.targets_size();
  if (count == 0) return absl::InvalidArgumentError("targets is empty, want at least one");
  std::map<std::string, int32_t> destinations;
  int64_t ranks = 0;
  for (int32_t t = 0; t < count; ++t) {
    v1::Target& target = *spec.mutable_targets(t);
    SP_RETURN_IF_ERROR(InTarget(NormalizeTarget(spec.source_uri(), target), t, count));
    const auto [other, added] = destinations.emplace(target.destination_uri(), t);
    if (!added) {
      return absl::InvalidArgumentError(absl::StrCat("targets[", other->second, "] and targets[", t,
                                                     "] have one destination_uri, ",
                                                     target.destination_uri()));
    }
    ranks += int64_t{target.parallel_layout().tensor_parallel_size()} *
             target.parallel_layout().data_parallel_size();
  }
  if (ranks <= kMaxWorldSize) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("targets have ", ranks, " ranks together, want at most ", kMaxWorldSize));
}

}  // namespace

absl::Status InTarget(const absl::Status& status, int32_t target, int32_t target_count) {
  return target_count == 1 ? status : Prefixed(absl::StrCat("targets[", target, "]"), status);
}

absl::StatusOr<v1::PrepJobSpec> NormalizeSpec(const v1::PrepJobSpec& spec) {
  v1::PrepJobSpec normal = spec;
  SP_ASSIGN_OR_RETURN(*normal.mutable_source_uri(),
                      NormalizeUriField(spec.source_uri(), "source_uri"));
  SP_RETURN_IF_ERROR(NormalizeTargets(normal));
  if (normal.carry() == v1::CARRY_UNSPECIFIED) normal.set_carry(v1::CARRY_REPLICATED);
  if (!v1::Carry_IsValid(normal.carry())) {
    return absl::InvalidArgumentError(
        absl::StrCat("carry is ", static_cast<int>(normal.carry()), ", which is unknown"));
  }
  SP_RETURN_IF_ERROR(CheckDenseWishes(normal));
  if (normal.part_size_bytes() == 0) normal.set_part_size_bytes(kDefaultPartBytes);
  if (normal.part_size_bytes() < kMinPartBytes || normal.part_size_bytes() > kMaxPartBytes) {
    return absl::InvalidArgumentError(absl::StrCat("part_size_bytes is ", normal.part_size_bytes(),
                                                   ", want ", kMinPartBytes, " to ",
                                                   kMaxPartBytes));
  }
  return normal;
}

absl::StatusOr<PlanSource> ReadPlanSource(const v1::PrepJobSpec& spec, const PlanOptions& options) {
  PlanSource source;
  // A policy that cannot be used is said before the source is read.
  SP_ASSIGN_OR_RETURN(source.policy, PolicyOf(spec));
  SP_ASSIGN_OR_RETURN(source.store,
                      OpenStore(spec.source_uri(), {.create = false,
                                                    .allowed_roots = options.allowed_source_roots,
                                                    .s3 = options.s3}));
  SP_ASSIGN_OR_RETURN(Checkpoint read, ReadCheckpoint(*source.store));
  source.checkpoint = std::make_shared<const Checkpoint>(std::move(read));
  SP_ASSIGN_OR_RETURN(MoeCheckpoint recognized, RecognizeFamily(*source.checkpoint));
  source.moe = std::make_shared<const MoeCheckpoint>(std::move(recognized));
  return source;
}

absl::StatusOr<std::shared_ptr<const JobPlan>> PlanJob(const v1::PrepJobSpec& spec,
                                                       const PlanOptions& options) {
  SP_ASSIGN_OR_RETURN(const v1::PrepJobSpec normal, NormalizeSpec(spec));
  if (normal.targets_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job has ", normal.targets_size(), " targets, want one"));
  }
  SP_ASSIGN_OR_RETURN(const PlanSource source, ReadPlanSource(normal, options));
  return PlanTarget(normal, source, options);
}

absl::StatusOr<std::shared_ptr<const JobPlan>> PlanTarget(const v1::PrepJobSpec& spec,
                                                          const PlanSource& source,
                                                          const PlanOptions& options) {
  const PolicyFile& table = source.policy;
  const AlignmentPolicy& policy = table.policy;
  const v1::Target& target = spec.targets(0);
  SP_ASSIGN_OR_RETURN(const ResolvedKernel kernel,
                      ResolveKernel(target.kernel_target(), *source.moe, policy));
  const v1::ParallelLayout& parallel = target.parallel_layout();
  SP_ASSIGN_OR_RETURN(const ExpertPlacement placement, ParsePlacement(parallel.expert_placement()));
  SP_ASSIGN_OR_RETURN(
      SlicePlan slices,
      SlicePlan::Make(source.checkpoint, source.moe,
                      {.tensor_parallel_size = parallel.tensor_parallel_size(),
                       .data_parallel_size = parallel.data_parallel_size(),
                       .expert_parallel_size = parallel.expert_parallel_size(),
                       .expert_placement = placement,
                       .redundant_experts = parallel.redundant_experts(),
                       .physical_to_logical = {parallel.physical_to_logical().begin(),
                                               parallel.physical_to_logical().end()},
                       .intermediate_alignment = kernel.decision.intermediate,
                       .hidden_alignment = kernel.decision.hidden,
                       .profile = kernel.profile,
                       .naming = target.naming(),
                       .include_mtp = spec.include_mtp(),
                       .experts_only = spec.carry() == v1::CARRY_EXPERTS_ONLY,
                       .self_contained = spec.self_contained(),
                       .slice_dense = spec.slice_dense(),
                       .part_size_bytes = spec.part_size_bytes()}));
  SP_RETURN_IF_ERROR(
      CheckWidth(kernel.decision, slices.intermediate(), slices.padded_intermediate()));
  if (!target.state_dict_json().empty()) {
    SP_RETURN_IF_ERROR(CheckStateDict(target.state_dict_json(), slices));
  }
  SP_ASSIGN_OR_RETURN(
      const auto destination,
      OpenStore(target.destination_uri(), {.create = true, .allowed_roots = {}, .s3 = options.s3}));
  const MemoryNeed memory = MemoryNeedOf(slices, *source.store, *destination);
  auto plan = std::make_shared<JobPlan>(JobPlan{.spec = spec,
                                                .summary = {},
                                                .fingerprint = "",
                                                .fingerprint_inputs = "",
                                                .source_token = "",
                                                .slices = std::move(slices),
                                                .memory = memory});
  SP_ASSIGN_OR_RETURN(plan->fingerprint_inputs, FingerprintInputs(*plan, kernel));
  plan->fingerprint = Sha256Hex(plan->fingerprint_inputs);
  SP_ASSIGN_OR_RETURN(plan->source_token, SourceToken(*source.checkpoint));
  SP_RETURN_IF_ERROR(Summarize(*plan, kernel, table, options));
  SP_RETURN_IF_ERROR(SummarizeSaving(*plan, kernel, policy, plan->summary));
  const auto free_bytes = destination->FreeBytes();
  plan->summary.set_destination_free_bytes(
      free_bytes.ok() && *free_bytes != kUnlimitedBytes ? *free_bytes : -1);
  return plan;
}

std::map<std::string, std::string> PartMetadata(const std::string& fingerprint, int32_t rank,
                                                const std::string& profile) {
  return {{"format", "pt"},  // loaders of this field ask for the framework
          {kFingerprintMetadataKey, fingerprint},
          {"shardprep.rank", rank == kReplicatedRank ? "replicated" : absl::StrCat(rank)},
          {"shardprep.profile", profile}};
}

absl::StatusOr<std::string> PartHeader(const JobPlan& plan, const PartPlan& part, int32_t rank) {
  std::vector<TensorEntry> entries;
  entries.reserve(part.tensors.size());
  for (const PartTensor& tensor : part.tensors) {
    entries.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .begin = tensor.data_offset,
                       .size_bytes = tensor.size_bytes});
  }
  return SerializeHeader(
      entries, PartMetadata(plan.fingerprint, rank, plan.target().kernel_target().profile()));
}

std::string PartKeyOf(const PartPlan& part, int32_t rank) {
  if (rank == kReplicatedRank) return ObjectKey(ReplicatedPart{.part = part.part});
  return ObjectKey(RankPart{.rank = rank, .part = part.part});
}

absl::StatusOr<int32_t> RanksPerLease(const JobPlan& plan, int64_t memory_budget_bytes) {
  SP_ASSIGN_OR_RETURN(const LeaseShape shape,
                      FitLease(plan.memory, memory_budget_bytes, plan.slices.rank_count(), 1));
  return shape.ranks;
}

}  // namespace shardprep
