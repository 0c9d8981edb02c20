#include "workers/slice_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

bool IsW13(Role role) {
  return role == Role::kW13Weight || role == Role::kW13Scale || role == Role::kW13Bias;
}
bool IsScale(Role role) { return role == Role::kW13Scale || role == Role::kW2Scale; }
bool IsBias(Role role) { return role == Role::kW13Bias || role == Role::kW2Bias; }

constexpr int64_t kBiasBytes = 2;  // BF16

// The source tensors of a role: of gate and up, or of down alone.
struct RoleSources {
  ExpertTensor first;
  ExpertTensor second;
};

RoleSources SourcesOf(Role role) {
  switch (role) {
    case Role::kW13Weight:
      return {kGateWeight, kUpWeight};
    case Role::kW13Scale:
      return {kGateScale, kUpScale};
    case Role::kW13Bias:
      return {kGateBias, kUpBias};
    case Role::kW2Weight:
      return {kDownWeight, kDownWeight};
    case Role::kW2Scale:
      return {kDownScale, kDownScale};
    case Role::kW2Bias:
      return {kDownBias, kDownBias};
  }
  SP_CHECK(false);
}

// Rows and bytes of a row of `role` that stand for an extent of rows and an extent of columns, in
// elements. Scales of whole blocks cover more than one row.
int64_t RowsFor(const ExpertFormat& format, Role role, int64_t elements) {
  return IsScale(role) ? CeilDiv(elements, format.block_rows) : elements;
}

int64_t RowBytesFor(const MoeCheckpoint& moe, Role role, int64_t elements) {
  if (IsBias(role)) return kBiasBytes;
  if (!IsScale(role)) return elements * moe.format->weight_bits / 8;
  return CeilDiv(elements, moe.format->block_columns) * (DtypeBits(moe.scale_dtype) / 8);
}

Dtype DtypeOf(const MoeCheckpoint& moe, Role role) {
  if (IsBias(role)) return Dtype::kBF16;
  return IsScale(role) ? moe.scale_dtype : moe.format->prepared_dtype;
}

// Shape as AITER's function returns it: E8M0 layouts are matrices over all experts. A bias is a
// vector for each expert.
std::vector<int64_t> DeclaredShape(const FusedTensor& tensor, const OutputMatrix& out) {
  const int64_t cols = tensor.job.padded_cols / (DtypeBits(tensor.dtype) / 8);
  if (IsBias(tensor.role)) return {tensor.experts, tensor.job.rows};
  switch (tensor.job.layout) {
    case LayoutId::kAiterE8m0:
    case LayoutId::kAiterE8m0Expert:
    case LayoutId::kAiterE8m0GateUp:
      return {out.rows, out.cols};
    case LayoutId::kAiterN32K4:
      return {tensor.experts, tensor.job.rows / 32, 32 * cols};
    default:
      return {tensor.experts, tensor.job.rows, cols};
  }
}

// A profile lays out weights, and scales of MX blocks. Scales of square blocks and biases are read
// as they are.
TensorLayout LayoutOf(const LayoutProfile& profile, const ExpertFormat& format, Role role) {
  const bool mx_scale = format.block_rows == 1;
  switch (role) {
    case Role::kW13Weight:
      return profile.w13;
    case Role::kW2Weight:
      return profile.w2;
    case Role::kW13Scale:
      if (mx_scale) return profile.w13_scale;
      break;
    case Role::kW2Scale:
      if (mx_scale) return profile.w2_scale;
      break;
    case Role::kW13Bias:
    case Role::kW2Bias:
      break;
  }
  return {RowOrder::kAsIs, LayoutId::kRowMajor};
}

std::vector<Role> RolesOf(const MoeCheckpoint& moe) {
  // Large tensors first, so that each starts page-aligned in its file.
  std::vector<Role> roles = {Role::kW13Weight, Role::kW2Weight};
  if (moe.format->fused_scale != nullptr) {
    roles.push_back(Role::kW13Scale);
    roles.push_back(Role::kW2Scale);
  }
  if (moe.has_bias) {
    roles.push_back(Role::kW13Bias);
    roles.push_back(Role::kW2Bias);
  }
  return roles;
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

absl::StatusOr<SlicePlan> SlicePlan::Make(std::shared_ptr<const Checkpoint> checkpoint,
                                          std::shared_ptr<const MoeCheckpoint> moe,
                                          const SlicePlanInputs& inputs) {
  if (inputs.include_mtp) SP_RETURN_IF_ERROR(moe->mtp_status);
  SlicePlan plan;
  plan.checkpoint_ = std::move(checkpoint);
  plan.moe_ = std::move(moe);
  plan.inputs_ = inputs;
  SP_ASSIGN_OR_RETURN(plan.naming_, FindNaming(inputs.naming));
  SP_ASSIGN_OR_RETURN(plan.expert_slots_,
                      ExpertSlots::Make({.experts = plan.moe_->experts,
                                         .groups = inputs.expert_parallel_size,
                                         .placement = inputs.expert_placement,
                                         .redundant = inputs.redundant_experts,
                                         .physical_to_logical = inputs.physical_to_logical}));
  SP_RETURN_IF_ERROR(plan.PlanExtents());
  SP_RETURN_IF_ERROR(plan.PlanShapes());
  plan.PlanRoutedRegions();
  SP_RETURN_IF_ERROR(plan.PlanDenseTensors());
  return plan;
}

int32_t SlicePlan::rank_count() const {
  return inputs_.tensor_parallel_size * inputs_.data_parallel_size;
}

namespace {

// The extent of every rank but perhaps the last; 0 when the size does not work.
int64_t WidestExtent(const ExpertFormat& format, int64_t full, int64_t ranks) {
  const int64_t block = std::max<int64_t>(format.block_columns, 1);
  if (!format.unequal_ranks) {
    return full % ranks == 0 && (full / ranks) % block == 0 ? full / ranks : 0;
  }
  const int64_t widest = CeilDiv(full / block, ranks) * block;
  return full % block == 0 && (ranks - 1) * widest < full ? widest : 0;
}

std::vector<int64_t> LegalSizes(const ExpertFormat& format, int64_t full) {
  constexpr int64_t kMostRanks = 4096;
  const int64_t block = std::max<int64_t>(format.block_columns, 1);
  std::vector<int64_t> legal;
  for (int64_t size = 1; size <= std::min(full / block, kMostRanks); ++size) {
    if (WidestExtent(format, full, size) > 0) legal.push_back(size);
  }
  return legal;
}

absl::Status IndivisibleError(const ExpertFormat& format, int64_t full, int64_t ranks) {
  const int64_t block = std::max<int64_t>(format.block_columns, 1);
  const std::vector<int64_t> legal = LegalSizes(format, full);
  return absl::InvalidArgumentError(absl::StrCat(
      "intermediate size ", full, " does not divide among ", ranks, " MoE tensor-parallel ranks",
      block > 1 ? absl::StrCat(" into whole block scales of ", block, " elements") : "",
      "; sizes that work: ", legal.empty() ? "none" : absl::StrJoin(legal, ", ")));
}

}  // namespace

// Without expert parallelism every rank of the world holds a slice of every expert, so the
// intermediate extent is cut by the world size (engines flatten TP x DP for the MoE); with it, by
// the size of a group.
absl::Status SlicePlan::PlanExtents() {
  const ExpertFormat& format = *moe_->format;
  const int64_t ranks = moe_tensor_parallel_size();
  const int64_t widest = WidestExtent(format, moe_->intermediate, ranks);
  if (widest == 0) return IndivisibleError(format, moe_->intermediate, ranks);
  intermediate_ = NativeExtent(widest);
  hidden_ = NativeExtent(moe_->hidden);
  padded_intermediate_ = RoundUp(intermediate_, inputs_.intermediate_alignment);
  padded_hidden_ = RoundUp(hidden_, inputs_.hidden_alignment);
  for (const PaddedExtent extent : {padded_intermediate_, padded_hidden_}) {
    // The last scale of a row may cover less than a block, but halves of rows begin at a block.
    if (extent == padded_hidden_ && !format.whole_blocks) continue;
    const int64_t block = std::max<int64_t>(format.block_columns, 1);
    if (extent.elements() % block != 0) {
      return absl::InvalidArgumentError(absl::StrCat("padded extent ", extent.elements(),
                                                     " is not a multiple of the block of ", block,
                                                     " elements that one scale covers"));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> SlicePlan::LegalMoeSizes() const {
  return LegalSizes(*moe_->format, moe_->intermediate);
}

NativeExtent SlicePlan::IntermediateOf(int32_t rank) const {
  if (!moe_->format->unequal_ranks) return intermediate_;
  const int64_t begin = PlaceInGroup(rank) * intermediate_.elements();
  return NativeExtent(std::min(intermediate_.elements(), moe_->intermediate - begin));
}

int SlicePlan::ShapeOf(int32_t rank) const {
  return shapes_.size() == 1 || rank == kReplicatedRank ? 0
                                                        : shape_of_rank_[static_cast<size_t>(rank)];
}

absl::Status SlicePlan::PlanShapes() {
  // Experts, width, whether the rank adds the down bias.
  std::map<std::tuple<int64_t, int64_t, bool>, int> known;
  for (int32_t rank = 0; rank < rank_count(); ++rank) {
    const auto experts = static_cast<int64_t>(expert_slots_->LogicalOf(GroupOf(rank)).size());
    const bool adds_bias = moe_->has_bias && PlaceInGroup(rank) == 0;
    const auto [it, added] = known.emplace(
        std::make_tuple(experts, IntermediateOf(rank).elements(), adds_bias), shape_count());
    if (added) {
      SP_ASSIGN_OR_RETURN(std::vector<FusedTensor> tensors, PlanFusedTensors(rank));
      shapes_.push_back(std::move(tensors));
    }
    shape_of_rank_.push_back(it->second);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FusedTensor>> SlicePlan::PlanFusedTensors(int32_t rank) const {
  const ExpertFormat& format = *moe_->format;
  const LayoutProfile& profile = GetProfile(inputs_.profile);
  const int64_t i = IntermediateOf(rank).elements(), ip = padded_intermediate_.elements();
  const int64_t h = hidden_.elements(), hp = padded_hidden_.elements();
  std::vector<FusedTensor> tensors;
  for (const Role role : RolesOf(*moe_)) {
    const bool w13 = IsW13(role);
    const TensorLayout layout = LayoutOf(profile, format, role);
    FusedTensor tensor;
    tensor.role = role;
    tensor.name = LeafName(*naming_, format, role);
    tensor.dtype = DtypeOf(*moe_, role);
    tensor.experts = static_cast<int64_t>(expert_slots_->LogicalOf(GroupOf(rank)).size());
    tensor.halves = w13 ? 2 : 1;
    tensor.native_rows = w13 ? 2 * RowsFor(format, role, i) : RowsFor(format, role, h);
    // Every rank of a group adds its part of the sum, so only one may add the bias.
    if (role == Role::kW2Bias && PlaceInGroup(rank) != 0) tensor.native_rows = 0;
    tensor.native_row_elements = IsBias(role) ? 1 : w13 ? h : i;
    tensor.job = {.layout = layout.layout,
                  .row_order = layout.row_order,
                  .rows = w13 ? 2 * RowsFor(format, role, ip) : RowsFor(format, role, hp),
                  .native_cols = RowBytesFor(*moe_, role, w13 ? h : i),
                  .padded_cols = RowBytesFor(*moe_, role, w13 ? hp : ip)};
    tensor.source_row_bytes = RowBytesFor(*moe_, role, w13 ? h : moe_->intermediate);
    tensor.row_step = w13 && moe_->alternating ? 2 : 1;
    tensor.splits_rows = tensor.source_row_bytes != tensor.job.native_cols;
    SP_RETURN_IF_ERROR(CheckShuffleJob(tensor.job));
    const MatrixShape shape{tensor.experts, tensor.job.rows, tensor.job.padded_cols};
    SP_RETURN_IF_ERROR(
        CheckLayoutShape(layout.layout, shape, static_cast<int>(DtypeBits(tensor.dtype) / 8)));
    SP_ASSIGN_OR_RETURN(const OutputMatrix out, OutputShape(layout.layout, shape));
    SP_ASSIGN_OR_RETURN(tensor.size_bytes, OutputBytes(layout.layout, shape));
    SP_ASSIGN_OR_RETURN(tensor.tail_bytes, TailBytes(layout.layout, shape));
    tensor.fill = GetLayoutInfo(layout.layout).fill;
    tensor.shape = DeclaredShape(tensor, out);
    tensor.expert_bytes = tensor.job.rows * OutputCols(tensor.job);
    tensor.native_bytes = tensor.experts * tensor.native_rows * tensor.job.native_cols;
    SP_CHECK(tensor.expert_bytes * tensor.experts + tensor.tail_bytes == tensor.size_bytes);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<PartPlan> SlicePlan::PlanRoutedParts(const MoeLayer& layer,
                                                 const std::vector<FusedTensor>& tensors,
                                                 int32_t& next_part) const {
  PartFiller filler(inputs_.part_size_bytes, next_part);
  for (int32_t f = 0; f < static_cast<int32_t>(tensors.size()); ++f) {
    const FusedTensor& tensor = tensors[f];
    filler.Add({.name = FusedTensorName(*naming_, *moe_, layer.layer, tensor.name),
                .source = f,
                .dtype = tensor.dtype,
                .shape = tensor.shape,
                .data_offset = 0,
                .size_bytes = tensor.size_bytes});
  }
  std::vector<PartPlan> parts = filler.Take();
  next_part += static_cast<int32_t>(parts.size());
  return parts;
}

void SlicePlan::PlanRoutedRegions() {
  next_part_.assign(shapes_.size(), 0);
  for (int32_t m = 0; m < static_cast<int32_t>(moe_->layers.size()); ++m) {
    const MoeLayer& layer = moe_->layers[m];
    if (layer.is_mtp && !inputs_.include_mtp) continue;
    Region region;
    region.kind = Region::Kind::kRouted;
    region.layer = layer.layer;
    region.moe_layer = m;
    region.name = layer.module;
    for (size_t shape = 0; shape < shapes_.size(); ++shape) {
      std::vector<PartPlan> parts = PlanRoutedParts(layer, shapes_[shape], next_part_[shape]);
      if (shape == 0) {
        region.parts = std::move(parts);
      } else {
        region.other_parts.push_back(std::move(parts));
      }
    }
    for (const FusedTensor& tensor : shapes_[0]) region.bytes_per_rank += tensor.size_bytes;
    for (const int32_t t : layer.Tensors()) {
      region.source_bytes += checkpoint_->tensors().at(t).size_bytes;
    }
    regions_.push_back(std::move(region));
  }
}

// Fills omitted_; what is carried besides the routed experts.
std::vector<int32_t> SlicePlan::SortOutOthers() {
  const TensorTable& tensors = checkpoint_->tensors();
  std::vector<int32_t> carried;
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
      carried.push_back(other.tensor);
    }
  }
  for (const MoeLayer& layer : moe_->layers) {
    if (!layer.is_mtp || inputs_.include_mtp) continue;
    for (const int32_t t : layer.Tensors()) {
      const TensorInfo info = tensors.at(t);
      omitted_.push_back(
          {std::string(info.name), info.size_bytes, "MTP layer without include_mtp"});
    }
  }
  for (const UnindexedTensor& tensor : checkpoint_->unindexed()) {
    omitted_.push_back({tensor.tensor, tensor.size_bytes,
                        absl::StrCat("in ", tensor.file, ", where the index does not place it")});
  }
  std::sort(omitted_.begin(), omitted_.end(),
            [](const OmittedTensor& a, const OmittedTensor& b) { return a.name < b.name; });
  return carried;
}

absl::Status SlicePlan::PlanDenseTensors() {
  const std::vector<int32_t> carried = SortOutOthers();
  if (inputs_.slice_dense) {
    if (!HasDenseNames(*naming_)) {
      return absl::UnimplementedError(
          absl::StrCat("slice_dense: naming ", inputs_.naming, " has no names for dense tensors"));
    }
    SP_ASSIGN_OR_RETURN(dense_tensors_,
                        SliceDense(*checkpoint_, *moe_, carried, inputs_.tensor_parallel_size));
  } else {
    dense_tensors_ = CarryDense(*checkpoint_, carried);
  }
  std::vector<int32_t> replicated, own;
  for (int32_t t = 0; t < static_cast<int32_t>(dense_tensors_.size()); ++t) {
    const bool whole = dense_tensors_[static_cast<size_t>(t)].cut == DenseCut::kWhole;
    (whole && !inputs_.self_contained ? replicated : own).push_back(t);
  }
  PlanDenseRegions(Region::Kind::kDense, std::move(own));
  PlanDenseRegions(Region::Kind::kReplicated, std::move(replicated));
  return absl::OkStatus();
}

// Runs of tensors, in the order in which they lie in the source files, so that reads are
// sequential; within one part large tensors come first. Runs and order follow from the source
// alone, not from what ranks have of it, so that they are those of every target of a job
// (target_set.h).
void SlicePlan::PlanDenseRegions(Region::Kind kind, std::vector<int32_t> carried) {
  const auto tensor = [&](int32_t t) -> const DenseTensor& {
    return dense_tensors_[static_cast<size_t>(t)];
  };
  // Of the source, or in the part where that is more.
  const auto bytes_of = [&](int32_t t) {
    int64_t source_bytes = 0;
    for (const DenseSource& source : tensor(t).sources) {
      source_bytes += source.rows * source.row_bytes;
    }
    return std::max(source_bytes, tensor(t).size_bytes);
  };
  const auto place = [&](int32_t t) {
    const TensorInfo info = checkpoint_->tensors().at(tensor(t).sources.front().tensor);
    return std::make_tuple(info.file, info.offset, tensor(t).sources.front().tensor);
  };
  std::sort(carried.begin(), carried.end(),
            [&](int32_t x, int32_t y) { return place(x) < place(y); });
  int32_t number = 0;
  for (size_t begin = 0; begin < carried.size();) {
    int64_t bytes = 0;
    size_t end = begin;
    for (; end < carried.size(); ++end) {
      const int64_t size = bytes_of(carried[end]);
      if (end > begin && bytes + size > inputs_.part_size_bytes) break;
      bytes += size;
    }
    std::vector<int32_t> run(carried.begin() + static_cast<std::ptrdiff_t>(begin),
                             carried.begin() + static_cast<std::ptrdiff_t>(end));
    std::sort(run.begin(), run.end(), [&](int32_t x, int32_t y) {
      return std::make_pair(-bytes_of(x), place(x)) < std::make_pair(-bytes_of(y), place(y));
    });
    Region region;
    region.kind = kind;
    region.layer = -1;
    region.name = absl::StrCat(
        kind == Region::Kind::kDense ? "tensors of each rank, part " : "replicated tensors, part ",
        number);
    PartPlan plan{.part = number++, .tensors = {}, .data_bytes = 0};
    for (const int32_t t : run) {
      plan.tensors.push_back({.name = tensor(t).name,
                              .source = t,
                              .dtype = tensor(t).dtype,
                              .shape = tensor(t).shape,
                              .data_offset = plan.data_bytes,
                              .size_bytes = tensor(t).size_bytes});
      plan.data_bytes += tensor(t).size_bytes;
      for (const DenseSource& source : tensor(t).sources) {
        region.source_bytes += source.rows * source.row_bytes;
      }
    }
    region.bytes_per_rank = plan.data_bytes;
    if (kind == Region::Kind::kDense) {
      // The same behind the parts that ranks of each shape have already.
      for (size_t shape = 0; shape < shapes_.size(); ++shape) {
        plan.part = next_part_[shape]++;
        (shape == 0 ? region.parts : region.other_parts.emplace_back()).push_back(plan);
      }
    } else {
      region.parts.push_back(std::move(plan));
    }
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

const std::vector<PartPlan>& SlicePlan::PartsOf(const Region& region, int32_t rank) const {
  const int shape = ShapeOf(rank);
  return shape == 0 ? region.parts : region.other_parts[static_cast<size_t>(shape) - 1];
}

std::vector<Slice> SlicePlan::SlicesOf(const Region& region, const FusedTensor& tensor,
                                       int32_t rank, int64_t slot) const {
  SP_CHECK(region.kind == Region::Kind::kRouted && rank >= 0 && rank < rank_count());
  if (tensor.native_rows == 0) return {};
  const ExpertFormat& format = *moe_->format;
  const int64_t expert = expert_slots_->LogicalOf(GroupOf(rank))[static_cast<size_t>(slot)];
  const auto& sources = moe_->layers[region.moe_layer].experts[static_cast<size_t>(expert)];
  const RoleSources kinds = SourcesOf(tensor.role);
  const int64_t place = PlaceInGroup(rank);
  if (!IsW13(tensor.role)) {
    const int64_t rows = RowsFor(format, tensor.role, hidden_.elements());
    const int64_t begin = place * intermediate_.elements();
    return {Slice{.tensor = sources.at(kinds.first),
                  .row_begin = moe_->stacked ? expert * rows : 0,
                  .rows = rows,
                  .source_row_bytes = tensor.source_row_bytes,
                  .col_begin = IsBias(tensor.role) ? 0 : RowBytesFor(*moe_, tensor.role, begin),
                  .col_bytes = tensor.job.native_cols,
                  .first_row = 0,
                  .row_step = 1}};
  }
  const int64_t begin = RowsFor(format, tensor.role, place * intermediate_.elements());
  const int64_t all_rows = RowsFor(format, tensor.role, moe_->intermediate);
  const int64_t step = tensor.row_step;
  const int64_t expert_begin = moe_->stacked ? expert * all_rows * step : 0;
  const auto half = [&](ExpertTensor source, int64_t up, int64_t first_row) {
    return Slice{.tensor = sources.at(source),
                 .row_begin = expert_begin + begin * step + (moe_->alternating ? up : 0),
                 .rows = RowsFor(format, tensor.role, IntermediateOf(rank).elements()),
                 .source_row_bytes = tensor.source_row_bytes,
                 .col_begin = 0,
                 .col_bytes = tensor.job.native_cols,
                 .first_row = first_row,
                 .row_step = step};
  };
  return {half(kinds.first, 0, 0),
          half(kinds.second, 1, RowsFor(format, tensor.role, padded_intermediate_.elements()))};
}

Slice SlicePlan::DenseSliceOf(const DenseTensor& tensor, const DenseSource& source,
                              int32_t rank) const {
  Slice slice{.tensor = source.tensor,
              .row_begin = 0,
              .rows = source.rows,
              .source_row_bytes = source.row_bytes,
              .col_begin = 0,
              .col_bytes = source.row_bytes,
              .first_row = 0,
              .row_step = 1};
  if (tensor.cut == DenseCut::kWhole) return slice;
  SP_CHECK(rank >= 0 && rank < rank_count());
  // Data-parallel replicas have the same dense tensors.
  const int64_t ranks = inputs_.tensor_parallel_size;
  const int64_t place = rank % ranks;
  if (tensor.cut == DenseCut::kRows) {
    slice.rows = source.rows / ranks;
    slice.row_begin = place * slice.rows;
  } else {
    slice.col_bytes = source.row_bytes / ranks;
    slice.col_begin = place * slice.col_bytes;
  }
  return slice;
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
  for (const FusedTensor& tensor : shapes_[0]) native += tensor.native_bytes;
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

int64_t SlicePlan::DenseBytesPerRank() const {
  int64_t bytes = 0;
  for (const Region& region : regions_) {
    if (region.kind == Region::Kind::kDense) bytes += region.bytes_per_rank;
  }
  return bytes;
}

int64_t SlicePlan::NeededSourceBytes() const {
  int64_t bytes = 0;
  for (const Region& region : regions_) bytes += region.source_bytes;
  return bytes;
}

}  // namespace shardprep
