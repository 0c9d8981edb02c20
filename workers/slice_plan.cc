#include "workers/slice_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// A naming scheme: the name of a fused tensor, by the module that holds the experts. The engine
// that reads the files decides it, so it is data.
struct Naming {
  const char* scheme;
  const char* pattern;  // {layer}, {module}, {role}
};

constexpr Naming kNamings[] = {
    {"vllm", "model.layers.{layer}.{module}.{role}"},
};

constexpr int64_t kFp4PerByte = 2;

absl::StatusOr<const Naming*> FindNaming(const std::string& scheme) {
  std::vector<std::string> known;
  for (const Naming& naming : kNamings) {
    if (scheme == naming.scheme) return &naming;
    known.push_back(naming.scheme);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("naming scheme '", scheme, "' is unknown; known: ", absl::StrJoin(known, ", ")));
}

// Shape as AITER's function returns it: E8M0 layouts are matrices over all experts.
std::vector<int64_t> DeclaredShape(LayoutId layout, int64_t experts, int64_t rows, int64_t cols,
                                   const OutputMatrix& out) {
  switch (layout) {
    case LayoutId::kAiterE8m0:
    case LayoutId::kAiterE8m0Expert:
    case LayoutId::kAiterE8m0GateUp:
      return {out.rows, out.cols};
    case LayoutId::kAiterN32K4:
      return {experts, rows / 32, 32 * cols};
    default:
      return {experts, rows, cols};
  }
}

bool IsScale(Role role) { return role == Role::kW13Scale || role == Role::kW2Scale; }
bool IsW13(Role role) { return role == Role::kW13Weight || role == Role::kW13Scale; }

const TensorLayout& LayoutOf(const LayoutProfile& profile, Role role) {
  switch (role) {
    case Role::kW13Weight:
      return profile.w13;
    case Role::kW13Scale:
      return profile.w13_scale;
    case Role::kW2Weight:
      return profile.w2;
    case Role::kW2Scale:
      return profile.w2_scale;
  }
  SP_CHECK(false);
}

// Fills parts in the given order; a tensor that does not fit opens the next part, and one that is
// larger than a part has a part of its own.
class PartFiller {
 public:
  PartFiller(int64_t part_size_bytes, int32_t first_part)
      : limit_(part_size_bytes), next_(first_part) {}

  void Add(PartTensor tensor) {
    if (parts_.empty() || parts_.back().data_bytes + tensor.size_bytes > limit_) {
      parts_.push_back({.part = next_++, .tensors = {}, .data_bytes = 0});
    }
    PartPlan& part = parts_.back();
    tensor.data_offset = part.data_bytes;
    part.data_bytes += tensor.size_bytes;
    part.tensors.push_back(std::move(tensor));
  }

  std::vector<PartPlan> Take() { return std::move(parts_); }

 private:
  int64_t limit_;
  int32_t next_;
  std::vector<PartPlan> parts_;
};

}  // namespace

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kW13Weight:
      return "w13_weight";
    case Role::kW13Scale:
      return "w13_weight_scale";
    case Role::kW2Weight:
      return "w2_weight";
    case Role::kW2Scale:
      return "w2_weight_scale";
  }
  SP_CHECK(false);
}

absl::StatusOr<SlicePlan> SlicePlan::Make(std::shared_ptr<const Checkpoint> checkpoint,
                                          std::shared_ptr<const MoeCheckpoint> moe,
                                          const SlicePlanInputs& inputs) {
  if (inputs.expert_parallel_size != 1) {
    return absl::UnimplementedError(absl::StrCat(
        "expert_parallel_size ", inputs.expert_parallel_size, " is not supported yet, want 1"));
  }
  if (inputs.include_mtp) SP_RETURN_IF_ERROR(moe->mtp_status);
  SlicePlan plan;
  plan.checkpoint_ = std::move(checkpoint);
  plan.moe_ = std::move(moe);
  plan.inputs_ = inputs;
  SP_RETURN_IF_ERROR(plan.PlanExtents());
  SP_RETURN_IF_ERROR(plan.PlanFusedTensors());
  SP_RETURN_IF_ERROR(plan.PlanRoutedRegions());
  plan.PlanReplicatedRegions();
  return plan;
}

int32_t SlicePlan::rank_count() const {
  return inputs_.tensor_parallel_size * inputs_.data_parallel_size;
}

// Without expert parallelism every rank of the world holds a slice of every expert, so the
// intermediate extent is cut by the world size (engines flatten TP x DP for the MoE).
absl::Status SlicePlan::PlanExtents() {
  const int64_t full = moe_->intermediate;
  const int64_t ranks = rank_count();
  const int64_t block = moe_->block_size;
  if (full % ranks != 0 || (full / ranks) % block != 0) {
    std::vector<int64_t> legal;
    for (int64_t size = 1; size <= full / block; ++size) {
      if (full % size == 0 && (full / size) % block == 0) legal.push_back(size);
    }
    return absl::InvalidArgumentError(
        absl::StrCat("intermediate size ", full, " does not divide among ", ranks,
                     " MoE tensor-parallel ranks into whole block scales of ", block,
                     " elements; sizes that work: ", absl::StrJoin(legal, ", ")));
  }
  intermediate_ = NativeExtent(full / ranks);
  hidden_ = NativeExtent(moe_->hidden);
  padded_intermediate_ = RoundUp(intermediate_, inputs_.intermediate_alignment);
  padded_hidden_ = RoundUp(hidden_, inputs_.hidden_alignment);
  for (const PaddedExtent extent : {padded_intermediate_, padded_hidden_}) {
    if (extent.elements() % block != 0) {
      return absl::InvalidArgumentError(absl::StrCat("padded extent ", extent.elements(),
                                                     " is not a multiple of the block of ", block,
                                                     " elements that one scale covers"));
    }
  }
  return absl::OkStatus();
}

absl::Status SlicePlan::PlanFusedTensors() {
  const LayoutProfile& profile = GetProfile(inputs_.profile);
  const int64_t i = intermediate_.elements(), ip = padded_intermediate_.elements();
  const int64_t h = hidden_.elements(), hp = padded_hidden_.elements();
  // Large tensors first, so that each starts page-aligned in its file.
  for (const Role role : {Role::kW13Weight, Role::kW2Weight, Role::kW13Scale, Role::kW2Scale}) {
    const TensorLayout& layout = LayoutOf(profile, role);
    const int64_t per_byte = IsScale(role) ? moe_->block_size : kFp4PerByte;
    FusedTensor tensor;
    tensor.role = role;
    tensor.experts = moe_->experts;
    tensor.halves = IsW13(role) ? 2 : 1;
    tensor.native_rows = IsW13(role) ? 2 * i : h;
    tensor.native_row_elements = IsW13(role) ? h : i;
    tensor.job = {.layout = layout.layout,
                  .row_order = layout.row_order,
                  .rows = IsW13(role) ? 2 * ip : hp,
                  .native_cols = (IsW13(role) ? h : i) / per_byte,
                  .padded_cols = (IsW13(role) ? hp : ip) / per_byte};
    SP_RETURN_IF_ERROR(CheckShuffleJob(tensor.job));
    const MatrixShape shape{tensor.experts, tensor.job.rows, tensor.job.padded_cols};
    SP_ASSIGN_OR_RETURN(const OutputMatrix out, OutputShape(layout.layout, shape));
    SP_ASSIGN_OR_RETURN(tensor.size_bytes, OutputBytes(layout.layout, shape));
    SP_ASSIGN_OR_RETURN(tensor.tail_bytes, TailBytes(layout.layout, shape));
    tensor.fill = GetLayoutInfo(layout.layout).fill;
    tensor.shape =
        DeclaredShape(layout.layout, tensor.experts, tensor.job.rows, tensor.job.padded_cols, out);
    tensor.expert_bytes = tensor.job.rows * OutputCols(tensor.job);
    tensor.native_bytes = tensor.experts * tensor.native_rows * tensor.job.native_cols;
    SP_CHECK(tensor.expert_bytes * tensor.experts + tensor.tail_bytes == tensor.size_bytes);
    fused_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status SlicePlan::PlanRoutedRegions() {
  SP_ASSIGN_OR_RETURN(const Naming* naming, FindNaming(inputs_.naming));
  int32_t next_part = 0;
  for (int32_t m = 0; m < static_cast<int32_t>(moe_->layers.size()); ++m) {
    const MoeLayer& layer = moe_->layers[m];
    if (layer.is_mtp && !inputs_.include_mtp) continue;
    Region region;
    region.kind = Region::Kind::kRouted;
    region.layer = layer.layer;
    region.moe_layer = m;
    region.name = layer.module;
    PartFiller filler(inputs_.part_size_bytes, next_part);
    for (int32_t f = 0; f < static_cast<int32_t>(fused_.size()); ++f) {
      const FusedTensor& tensor = fused_[f];
      region.bytes_per_rank += tensor.size_bytes;
      region.source_bytes += tensor.native_bytes * rank_count();
      filler.Add(
          {.name = absl::StrReplaceAll(naming->pattern, {{"{layer}", absl::StrCat(layer.layer)},
                                                         {"{module}", moe_->experts_module},
                                                         {"{role}", RoleName(tensor.role)}}),
           .source = f,
           .dtype = tensor.dtype,
           .shape = tensor.shape,
           .data_offset = 0,
           .size_bytes = tensor.size_bytes});
    }
    region.parts = filler.Take();
    next_part += static_cast<int32_t>(region.parts.size());
    regions_.push_back(std::move(region));
  }
  return absl::OkStatus();
}

// Runs of other tensors, in the order in which they lie in the source files, so that reads are
// sequential; within one part large tensors come first.
void SlicePlan::PlanReplicatedRegions() {
  const TensorTable& tensors = checkpoint_->tensors();
  std::vector<std::pair<std::pair<int64_t, int64_t>, int32_t>> carried;  // (file, offset), index
  for (const OtherTensor& other : moe_->others) {
    const TensorInfo info = tensors.at(other.tensor);
    const char* reason = nullptr;
    if (other.is_mtp && !inputs_.include_mtp) {
      reason = "MTP layer without include_mtp";
    } else if (inputs_.experts_only) {
      reason = "not a routed expert, and only experts are carried";
    }
    if (reason != nullptr) {
      omitted_.push_back({std::string(info.name), info.size_bytes, reason});
    } else {
      carried.push_back({{info.file, info.offset}, other.tensor});
    }
  }
  for (const MoeLayer& layer : moe_->layers) {
    if (!layer.is_mtp || inputs_.include_mtp) continue;
    for (const auto& expert : layer.experts) {
      for (const int32_t t : expert) {
        const TensorInfo info = tensors.at(t);
        omitted_.push_back(
            {std::string(info.name), info.size_bytes, "MTP layer without include_mtp"});
      }
    }
  }
  for (const UnindexedTensor& tensor : checkpoint_->unindexed()) {
    omitted_.push_back({tensor.tensor, tensor.size_bytes,
                        absl::StrCat("in ", tensor.file, ", where the index does not place it")});
  }
  std::sort(omitted_.begin(), omitted_.end(),
            [](const OmittedTensor& a, const OmittedTensor& b) { return a.name < b.name; });
  std::sort(carried.begin(), carried.end());

  int32_t part = 0;
  for (size_t begin = 0; begin < carried.size();) {
    int64_t bytes = 0;
    size_t end = begin;
    for (; end < carried.size(); ++end) {
      const int64_t size = tensors.at(carried[end].second).size_bytes;
      if (end > begin && bytes + size > inputs_.part_size_bytes) break;
      bytes += size;
    }
    std::vector<int32_t> run;
    for (size_t t = begin; t < end; ++t) run.push_back(carried[t].second);
    std::sort(run.begin(), run.end(), [&](int32_t x, int32_t y) {
      const TensorInfo tx = tensors.at(x), ty = tensors.at(y);
      return std::make_tuple(-tx.size_bytes, tx.file, tx.offset, x) <
             std::make_tuple(-ty.size_bytes, ty.file, ty.offset, y);
    });
    Region region;
    region.kind = Region::Kind::kReplicated;
    region.layer = -1;
    region.name = absl::StrCat("replicated tensors, part ", part);
    PartPlan plan{.part = part++, .tensors = {}, .data_bytes = 0};
    for (const int32_t t : run) {
      const TensorInfo info = tensors.at(t);
      plan.tensors.push_back({.name = std::string(info.name),
                              .source = t,
                              .dtype = info.dtype,
                              .shape = {info.shape.begin(), info.shape.end()},
                              .data_offset = plan.data_bytes,
                              .size_bytes = info.size_bytes});
      plan.data_bytes += info.size_bytes;
    }
    region.bytes_per_rank = plan.data_bytes;
    region.source_bytes = plan.data_bytes;
    region.parts.push_back(std::move(plan));
    regions_.push_back(std::move(region));
    begin = end;
  }
}

std::vector<int32_t> SlicePlan::RanksOf(const Region& region) const {
  if (region.kind == Region::Kind::kReplicated) return {kReplicatedRank};
  std::vector<int32_t> ranks(rank_count());
  for (int32_t r = 0; r < rank_count(); ++r) ranks[r] = r;
  return ranks;
}

std::vector<Slice> SlicePlan::SlicesOf(const Region& region, const FusedTensor& tensor,
                                       int32_t rank, int64_t expert) const {
  SP_CHECK(region.kind == Region::Kind::kRouted && rank >= 0 && rank < rank_count());
  const auto& sources = moe_->layers[region.moe_layer].experts[expert];
  const int64_t i = intermediate_.elements();
  const int64_t row_bytes = tensor.job.native_cols;
  if (IsW13(tensor.role)) {
    const bool scale = tensor.role == Role::kW13Scale;
    const auto half = [&](ExpertTensor source, int64_t first_row) {
      return Slice{.tensor = sources[source],
                   .row_begin = rank * i,
                   .rows = i,
                   .source_row_bytes = row_bytes,
                   .col_begin = 0,
                   .col_bytes = row_bytes,
                   .first_row = first_row};
    };
    return {half(scale ? kGateScale : kGateWeight, 0),
            half(scale ? kUpScale : kUpWeight, padded_intermediate_.elements())};
  }
  return {Slice{.tensor = sources[tensor.role == Role::kW2Scale ? kDownScale : kDownWeight],
                .row_begin = 0,
                .rows = hidden_.elements(),
                .source_row_bytes = row_bytes * rank_count(),
                .col_begin = row_bytes * rank,
                .col_bytes = row_bytes,
                .first_row = 0}};
}

int64_t SlicePlan::RoutedBytesPerRank(bool with_mtp) const {
  int64_t bytes = 0;
  for (const Region& region : regions_) {
    if (region.kind != Region::Kind::kRouted) continue;
    if (!with_mtp && moe_->layers[region.moe_layer].is_mtp) continue;
    bytes += region.bytes_per_rank;
  }
  return bytes;
}

int64_t SlicePlan::PaddingBytesPerRank() const {
  int64_t native = 0, layers = 0;
  for (const FusedTensor& tensor : fused_) native += tensor.native_bytes;
  for (const Region& region : regions_) layers += region.kind == Region::Kind::kRouted ? 1 : 0;
  return RoutedBytesPerRank(/*with_mtp=*/true) - layers * native;
}

int64_t SlicePlan::ReplicatedBytes() const {
  int64_t bytes = 0;
  for (const Region& region : regions_) {
    if (region.kind == Region::Kind::kReplicated) bytes += region.bytes_per_rank;
  }
  return bytes;
}

int64_t SlicePlan::NeededSourceBytes() const {
  int64_t bytes = 0;
  for (const Region& region : regions_) bytes += region.source_bytes;
  return bytes;
}

}  // namespace shardprep
