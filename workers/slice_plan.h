// The slice plan: which source bytes make up which bytes of which rank's files. Pure arithmetic
// over a checkpoint's headers; reads and writes nothing.
//
// Rank r of a routed layer owns source rows [r*i, (r+1)*i) of w1 and w3 and the same columns of w2,
// i = I/T being the native extent. The start is r*i and never r*ip: stepping with the padded extent
// leaves the last ranks without data (vLLM #42595). Pads stand at the tail of each half. T is the
// MoE tensor-parallel size: the world without expert parallelism, a group of it with. Families
// whose ranks take whole blocks (gpt-oss) step by the widest rank's extent, and the last has what
// is left.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/alignment_policy.h"
#include "kernels/extents.h"
#include "kernels/profile.h"
#include "kernels/shuffle.h"
#include "workers/checkpoint.h"
#include "workers/dense_tensors.h"
#include "workers/dtype.h"
#include "workers/expert_slots.h"
#include "workers/family.h"
#include "workers/object_names.h"
#include "workers/tensor_naming.h"

namespace shardprep {

// Rows row_begin, row_begin + row_step, ... (`rows` of them) and byte columns [col_begin, col_begin
// + col_bytes) of a source tensor whose rows are source_row_bytes long. The first lands in row
// first_row of the padded matrix, the others follow it. A tensor that stacks experts counts the
// rows of all of them; where gate and up rows alternate, row_step is 2.
struct Slice {
  int32_t tensor = 0;  // index into Checkpoint::tensors()
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t source_row_bytes = 0;
  int64_t col_begin = 0;
  int64_t col_bytes = 0;
  int64_t first_row = 0;
  int64_t row_step = 1;

  // True when the slice takes whole rows, so that with row_step 1 its bytes are contiguous in the
  // source.
  bool whole_rows() const { return col_begin == 0 && col_bytes == source_row_bytes; }
};

// One fused tensor of a routed layer on one rank; every layer has one of the same shape.
struct FusedTensor {
  Role role = Role::kW13Weight;
  std::string name;  // last part of its name, e.g. "w13_weight_scale"
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;       // as declared in the file; what AITER's function returns
  ShuffleJob job;                   // one expert's matrix
  uint8_t fill = 0;                 // byte where the layout has no input byte
  int64_t experts = 0;              // slots on the rank
  int halves = 1;                   // 2 for w13: gate, then up, each padded on its own
  int64_t native_rows = 0;          // of one expert, both halves together
  int64_t native_row_elements = 0;  // columns in logical elements, for the record
  int64_t source_row_bytes = 0;     // of the source tensor's rows, of which the rank takes
  bool splits_rows = false;         // some columns: other ranks of its group take the others
  int64_t row_step = 1;             // of its slices
  int64_t expert_bytes = 0;         // stored bytes of one expert
  int64_t tail_bytes = 0;           // fill after the last expert (rows padded to 256)
  int64_t size_bytes = 0;           // experts * expert_bytes + tail_bytes
  int64_t native_bytes = 0;         // of size_bytes, those that come from the source
};

// One tensor of a part. `source` is a FusedTensor's index in a routed region, and an index into
// SlicePlan::dense_tensors() in others.
struct PartTensor {
  std::string name;
  int32_t source = 0;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
  int64_t data_offset = 0;  // from the start of the part's data
  int64_t size_bytes = 0;
};

// One file of one rank (or of the replicated stream). Numbered from 0 in region order.
struct PartPlan {
  int32_t part = 0;
  std::vector<PartTensor> tensors;  // in file order
  int64_t data_bytes = 0;
};

// The unit of work: the routed experts of one layer, a run of other tensors that is stored once for
// all ranks, or a run that each rank has in its own files (kDense).
struct Region {
  enum class Kind { kRouted, kReplicated, kDense };
  Kind kind = Kind::kRouted;
  int32_t layer = 0;            // prepared layer number of a routed region
  int32_t moe_layer = 0;        // index into MoeCheckpoint::layers of a routed region
  std::vector<PartPlan> parts;  // of rank 0; SlicePlan::PartsOf has those of any rank
  // Of ranks with another shape than rank 0, see SlicePlan.
  std::vector<std::vector<PartPlan>> other_parts;
  int64_t bytes_per_rank = 0;  // data bytes of the parts of rank 0, which has the most
  int64_t source_bytes = 0;    // source bytes of the region, each counted once
  std::string name;            // "layers.3 routed experts", for messages
};

// A tensor that the plan leaves behind.
struct OmittedTensor {
  std::string name;
  int64_t size_bytes = 0;
  std::string reason;
};

struct SlicePlanInputs {
  // Parallel layout, each >= 1 and valid together (ParallelLayout in target.proto).
  int32_t tensor_parallel_size = 1;
  int32_t data_parallel_size = 1;
  int32_t expert_parallel_size = 1;
  ExpertPlacement expert_placement = ExpertPlacement::kLinear;
  int64_t redundant_experts = 0;
  std::vector<int32_t> physical_to_logical;  // see ExpertSlotInputs
  Alignment intermediate_alignment{1};
  Alignment hidden_alignment{1};
  ProfileId profile = ProfileId::kAiterSeparated;
  std::string naming = "vllm";
  bool include_mtp = false;
  bool experts_only = false;
  bool self_contained = false;  // as in PrepJobSpec
  bool slice_dense = false;     // likewise
  int64_t part_size_bytes = int64_t{2} << 30;
};

// Ranks differ in *shape* where they hold different numbers of experts, widths or biases; rank 0
// has the most of each. Ranks of one expert-parallel group hold the same experts, and their parts
// have equal sizes: they differ in native extents only.
class SlicePlan {
 public:
  // Errors: INVALID_ARGUMENT when the intermediate size does not divide into whole block scales
  // (the message names the sizes that do), a shape does not fit its layout, the expert map is wrong
  // (expert_slots.h) or the naming scheme is unknown; those of SliceDense() when dense tensors are
  // sliced, and UNIMPLEMENTED for a naming scheme that has no names for them.
  static absl::StatusOr<SlicePlan> Make(std::shared_ptr<const Checkpoint> checkpoint,
                                        std::shared_ptr<const MoeCheckpoint> moe,
                                        const SlicePlanInputs& inputs);

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  const MoeCheckpoint& moe() const { return *moe_; }
  const std::shared_ptr<const Checkpoint>& shared_checkpoint() const { return checkpoint_; }
  const std::shared_ptr<const MoeCheckpoint>& shared_moe() const { return moe_; }
  const SlicePlanInputs& inputs() const { return inputs_; }
  const ExpertSlots& expert_slots() const { return *expert_slots_; }
  int32_t rank_count() const;  // world size
  int32_t moe_tensor_parallel_size() const { return rank_count() / inputs_.expert_parallel_size; }
  // Expert-parallel group of a rank, and its place in the group.
  int32_t GroupOf(int32_t rank) const { return rank / moe_tensor_parallel_size(); }
  int32_t PlaceInGroup(int32_t rank) const { return rank % moe_tensor_parallel_size(); }

  // MoE tensor-parallel sizes by which the intermediate extent divides, rising, up to 4096.
  std::vector<int64_t> LegalMoeSizes() const;

  NativeExtent intermediate() const { return intermediate_; }  // of the widest rank
  NativeExtent IntermediateOf(int32_t rank) const;
  PaddedExtent padded_intermediate() const { return padded_intermediate_; }
  NativeExtent hidden() const { return hidden_; }
  PaddedExtent padded_hidden() const { return padded_hidden_; }

  // Shapes are numbered from 0, which is that of rank 0.
  int shape_count() const { return static_cast<int>(shapes_.size()); }
  int ShapeOf(int32_t rank) const;
  const std::vector<FusedTensor>& fused_tensors() const { return shapes_[0]; }
  const std::vector<FusedTensor>& FusedTensorsOf(int32_t rank) const {
    return shapes_[ShapeOf(rank)];
  }
  // Every carried tensor besides the routed experts.
  const std::vector<DenseTensor>& dense_tensors() const { return dense_tensors_; }
  const std::vector<Region>& regions() const { return regions_; }
  const std::vector<OmittedTensor>& omitted() const { return omitted_; }

  // Ranks that have tasks in the region: all of them, or, of a replicated one, only
  // kReplicatedRank.
  std::vector<int32_t> RanksOf(const Region& region) const;

  // The parts of one rank, which may be kReplicatedRank.
  const std::vector<PartPlan>& PartsOf(const Region& region, int32_t rank) const;

  // The slices of the matrix in one slot of a rank, in the order in which the native CRC counts
  // them (gate, up). `tensor` is one of FusedTensorsOf(rank).
  std::vector<Slice> SlicesOf(const Region& region, const FusedTensor& tensor, int32_t rank,
                              int64_t slot) const;

  // What a rank, which may be kReplicatedRank, has of one source of a dense tensor. `first_row` is
  // 0: sources lie one after the other.
  Slice DenseSliceOf(const DenseTensor& tensor, const DenseSource& source, int32_t rank) const;

  // Sums over the plan, in bytes; per rank those of rank 0.
  int64_t RoutedBytesPerRank(bool with_mtp) const;
  int64_t PaddingBytesPerRank() const;
  int64_t ReplicatedBytes() const;
  int64_t DenseBytesPerRank() const;
  int64_t NeededSourceBytes() const;

 private:
  SlicePlan() = default;
  absl::Status PlanExtents();
  absl::Status PlanShapes();
  absl::StatusOr<std::vector<FusedTensor>> PlanFusedTensors(int32_t rank) const;
  void PlanRoutedRegions();
  std::vector<PartPlan> PlanRoutedParts(const MoeLayer& layer,
                                        const std::vector<FusedTensor>& tensors,
                                        int32_t& next_part) const;
  std::vector<int32_t> SortOutOthers();
  absl::Status PlanDenseTensors();
  void PlanDenseRegions(Region::Kind kind, std::vector<int32_t> tensors);

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::shared_ptr<const MoeCheckpoint> moe_;
  SlicePlanInputs inputs_;
  NativeExtent intermediate_{0};
  PaddedExtent padded_intermediate_{0};
  NativeExtent hidden_{0};
  PaddedExtent padded_hidden_{0};
  std::optional<ExpertSlots> expert_slots_;
  const NamingScheme* naming_ = nullptr;
  std::vector<std::vector<FusedTensor>> shapes_;
  std::vector<int> shape_of_rank_;
  std::vector<int32_t> next_part_;  // by shape, while regions are planned
  std::vector<DenseTensor> dense_tensors_;
  std::vector<Region> regions_;
  std::vector<OmittedTensor> omitted_;
};

}  // namespace shardprep
