// The slice plan: which source bytes make up which bytes of which rank's files. Pure arithmetic
// over a checkpoint's headers; reads and writes nothing.
//
// Rank r of a routed layer owns source rows [r*i, (r+1)*i) of w1 and w3 and the same columns of w2,
// i = I/T being the native extent. The start is r*i and never r*ip: stepping with the padded extent
// leaves the last ranks without data (vLLM #42595). Pads stand at the tail of each half.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/alignment_policy.h"
#include "kernels/extents.h"
#include "kernels/profile.h"
#include "kernels/shuffle.h"
#include "workers/checkpoint.h"
#include "workers/dtype.h"
#include "workers/family.h"

namespace shardprep {

// The rank number that stands for "the same for all ranks" in tasks, parts and records.
inline constexpr int32_t kReplicatedRank = -1;

enum class Role { kW13Weight = 0, kW13Scale = 1, kW2Weight = 2, kW2Scale = 3 };
inline constexpr int kRoleCount = 4;
// "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale".
absl::string_view RoleName(Role role);

// Rows [row_begin, row_begin + rows) and byte columns [col_begin, col_begin + col_bytes) of a
// source tensor whose rows are source_row_bytes long. Row row_begin lands in row first_row of the
// padded matrix, the others follow it.
struct Slice {
  int32_t tensor = 0;  // index into Checkpoint::tensors()
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t source_row_bytes = 0;
  int64_t col_begin = 0;
  int64_t col_bytes = 0;
  int64_t first_row = 0;

  // True when the slice takes whole rows, so that its bytes are contiguous in the source.
  bool whole_rows() const { return col_begin == 0 && col_bytes == source_row_bytes; }
};

// One fused tensor of a routed layer; every layer and rank has one of the same shape.
struct FusedTensor {
  Role role = Role::kW13Weight;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;  // as declared in the file; what AITER's function returns
  ShuffleJob job;              // one expert's matrix
  uint8_t fill = 0;            // byte where the layout has no input byte
  int64_t experts = 0;
  int halves = 1;                   // 2 for w13: gate, then up, each padded on its own
  int64_t native_rows = 0;          // of one expert, both halves together
  int64_t native_row_elements = 0;  // columns in logical elements, for the record
  int64_t expert_bytes = 0;         // stored bytes of one expert
  int64_t tail_bytes = 0;           // fill after the last expert (rows padded to 256)
  int64_t size_bytes = 0;           // experts * expert_bytes + tail_bytes
  int64_t native_bytes = 0;         // of size_bytes, those that come from the source
};

// One tensor of a part. `source` is a FusedTensor's index in a routed region, and an index into
// Checkpoint::tensors() in a replicated one.
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

// The unit of work: the routed experts of one layer, or a run of other tensors.
struct Region {
  enum class Kind { kRouted, kReplicated };
  Kind kind = Kind::kRouted;
  int32_t layer = 0;      // prepared layer number of a routed region
  int32_t moe_layer = 0;  // index into MoeCheckpoint::layers of a routed region
  std::vector<PartPlan> parts;
  int64_t bytes_per_rank = 0;  // data bytes of one rank's parts
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
  Alignment intermediate_alignment{1};
  Alignment hidden_alignment{1};
  ProfileId profile = ProfileId::kAiterSeparated;
  std::string naming = "vllm";
  bool include_mtp = false;
  bool experts_only = false;
  int64_t part_size_bytes = int64_t{2} << 30;
};

class SlicePlan {
 public:
  // Errors: INVALID_ARGUMENT when the intermediate size does not divide into whole block scales
  // (the message names the sizes that do), or a shape does not fit its layout; UNIMPLEMENTED for
  // expert parallelism; NOT_FOUND for an unknown naming scheme.
  static absl::StatusOr<SlicePlan> Make(std::shared_ptr<const Checkpoint> checkpoint,
                                        std::shared_ptr<const MoeCheckpoint> moe,
                                        const SlicePlanInputs& inputs);

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  const MoeCheckpoint& moe() const { return *moe_; }
  const SlicePlanInputs& inputs() const { return inputs_; }
  int32_t rank_count() const;  // world size
  NativeExtent intermediate() const { return intermediate_; }
  PaddedExtent padded_intermediate() const { return padded_intermediate_; }
  NativeExtent hidden() const { return hidden_; }
  PaddedExtent padded_hidden() const { return padded_hidden_; }

  const std::vector<FusedTensor>& fused_tensors() const { return fused_; }
  const std::vector<Region>& regions() const { return regions_; }
  const std::vector<OmittedTensor>& omitted() const { return omitted_; }

  // Ranks that have tasks in the region: all of them, or only kReplicatedRank.
  std::vector<int32_t> RanksOf(const Region& region) const;

  // The slices of one expert's matrix on one rank, in the order in which the native CRC counts
  // them (gate, up).
  std::vector<Slice> SlicesOf(const Region& region, const FusedTensor& tensor, int32_t rank,
                              int64_t expert) const;

  // Sums over the plan, in bytes.
  int64_t RoutedBytesPerRank(bool with_mtp) const;
  int64_t PaddingBytesPerRank() const;
  int64_t ReplicatedBytes() const;
  int64_t NeededSourceBytes() const;

 private:
  SlicePlan() = default;
  absl::Status PlanExtents();
  absl::Status PlanFusedTensors();
  absl::Status PlanRoutedRegions();
  void PlanReplicatedRegions();

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::shared_ptr<const MoeCheckpoint> moe_;
  SlicePlanInputs inputs_;
  NativeExtent intermediate_{0};
  PaddedExtent padded_intermediate_{0};
  NativeExtent hidden_{0};
  PaddedExtent padded_hidden_{0};
  std::vector<FusedTensor> fused_;
  std::vector<Region> regions_;
  std::vector<OmittedTensor> omitted_;
};

}  // namespace shardprep
