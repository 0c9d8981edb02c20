// Proof that a slice plan moves every byte exactly as often as it says. Pure.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Source bytes that the plan carries; those of an expert with several slots once for each.
struct CoverageTotals {
  int64_t routed_bytes = 0;
  int64_t replicated_bytes = 0;
  int64_t dense_bytes = 0;  // those of tensors that ranks have in their own files, of all ranks
};

// Looks at extents only and trusts nothing that the planner computed them from:
//  - the slices of all ranks tile each routed expert's tensor, without gap or overlap, as often as
//    the expert has slots, and each expert has one;
//  - inside one rank's matrix they lie apart, at the head of their half, and fill it up to the
//    native rows, so that pads stand at the tails;
//  - every other tensor of the checkpoint is stored once, or tiled as often by the slices in the
//    ranks' own files, or on the list of what is left behind;
//  - no tensor is carried twice.
// DATA_LOSS names the tensor and the bytes that are missing or doubled.
absl::StatusOr<CoverageTotals> ProveCoverage(const SlicePlan& plan);

}  // namespace shardprep
