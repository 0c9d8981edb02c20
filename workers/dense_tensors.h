// Tensors besides the routed experts: attention, shared experts, embeddings, norms. A job carries
// them as they are, or sliced and fused as a tensor-parallel engine holds them. Pure arithmetic
// over headers.
//
// The rules of the second way are a table (dense_tensors.cc): a row for each tensor of a family,
// with its source. Scales of blocks are cut with their weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "workers/checkpoint.h"
#include "workers/dtype.h"
#include "workers/family.h"

namespace shardprep {

// What a rank of T gets of each source tensor: all of it, the T-th part of its rows (whole rows,
// one after the other), or the T-th part of each row.
enum class DenseCut { kWhole, kRows, kColumns };

// One tensor of the checkpoint as rows of bytes.
struct DenseSource {
  int32_t tensor = 0;  // index into Checkpoint::tensors()
  int64_t rows = 0;
  int64_t row_bytes = 0;  // 1 where no row is cut: then only the order of the bytes matters
};

// One tensor as a rank's files hold it; every rank has one of the same shape.
struct DenseTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
  DenseCut cut = DenseCut::kWhole;
  std::vector<DenseSource> sources;  // one after the other; more than one where an engine fuses
  int64_t tail_bytes = 0;            // behind them: minus infinity in F32
  int64_t size_bytes = 0;            // tail included
};

// Each of `tensors`, indexes into Checkpoint::tensors(), under its own name, whole.
std::vector<DenseTensor> CarryDense(const Checkpoint& checkpoint,
                                    const std::vector<int32_t>& tensors);

// The same tensors under vLLM's names, cut for `ranks` tensor-parallel ranks (>= 1) and fused by
// the rules of the family. In order of name. Errors:
// UNIMPLEMENTED: the family has no rules.
// INVALID_ARGUMENT: a tensor that no rule knows; one of a dtype or shape that its rule does not
//   fit, or that a fused tensor lacks; an extent that does not divide into whole scale blocks,
//   heads or groups (names the tensor and the sizes that work); a key that config.json lacks.
absl::StatusOr<std::vector<DenseTensor>> SliceDense(const Checkpoint& checkpoint,
                                                    const MoeCheckpoint& moe,
                                                    const std::vector<int32_t>& tensors,
                                                    int64_t ranks);

}  // namespace shardprep
