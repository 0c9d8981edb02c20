// Recognises a checkpoint's model family and finds its routed experts.
//
// A family is a row of data (family_table.h). The row is chosen by config.json's `model_type`,
// never by a model's name or path; every tensor is then held against the row by dtype and shape,
// which decide over what config.json claims.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "workers/checkpoint.h"
#include "workers/family_table.h"

namespace shardprep {

// Stands for a tensor that experts of the format do not have.
inline constexpr int32_t kNoTensor = -1;

// The routed experts of one layer. Values are indexes into Checkpoint::tensors(), or kNoTensor.
// Where a family stacks experts, all have the same indexes.
struct MoeLayer {
  int32_t layer = 0;  // prepared number: that of the checkpoint, or num_hidden_layers + j for MTP
  bool is_mtp = false;
  std::string module;  // name of the experts in the checkpoint, e.g. "layers.3.ffn.experts"
  std::vector<std::array<int32_t, kExpertTensorCount>> experts;  // [expert][ExpertTensor]

  // Each tensor of the layer's experts once, in rising order.
  std::vector<int32_t> Tensors() const;
};

// A tensor that is no routed expert of `MoeCheckpoint::layers`.
struct OtherTensor {
  int32_t tensor = 0;
  bool is_mtp = false;
};

// Extents are in elements. Gate and up are [intermediate, hidden], down is [hidden, intermediate];
// biases have an element for each row. Packed FP4 holds two elements a byte, low nibble first.
struct MoeCheckpoint {
  std::string family;                    // id of the row, e.g. "deepseek_v4"
  const ExpertFormat* format = nullptr;  // that all experts have; outlives everything
  std::string activation;                // as the alignment policy spells it, e.g. "SILU"
  std::string experts_module;      // what stands between layer number and expert: "ffn.experts"
  std::string engine_prefix;       // of the same module in an engine: "model." or that of a wrapper
  Dtype scale_dtype = Dtype::kU8;  // that prepared scales declare: bits of E8M0 as U8, F32 as it is
  bool stacked = false;      // one tensor holds all experts of a layer, an expert's rows together
  bool alternating = false;  // its gate and up rows alternate: g0, u0, g1, u1...
  bool has_bias = false;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t experts = 0;
  int64_t block_size = 0;     // elements of a row that one scale covers, 0 without scales
  int64_t hidden_layers = 0;  // layers without MTP, dense ones included
  // OK when the MTP layers that config.json promises are all there and well formed. Else what is
  // wrong with them; then `layers` has none and their tensors are in `others`. A job that includes
  // MTP must return this status; others need not care.
  absl::Status mtp_status;
  int64_t mtp_layers = 0;           // in `layers`
  std::vector<MoeLayer> layers;     // in order of `layer`, MTP last; dense layers are not there
  std::vector<OtherTensor> others;  // every other tensor, in order of index
};

// Names may carry the prefix `model.`, `model.language_model.` or `language_model.model.`, all
// experts the same one; an MTP layer is `mtp.J` where the family has that, or a layer numbered from
// num_hidden_layers on. Linear in the number of tensors but for a sort of the expert tensors.
// Errors:
// FAILED_PRECONDITION: unknown family (says what was looked for); a missing expert tensor or layer
//   (names it, and the scale names tried); an expert's index entry that is stale (names the file).
// INVALID_ARGUMENT: a dtype or shape that does not fit the format of the first expert (names
//   tensor, found, wanted); shapes that contradict config.json; an activation that is not known;
//   experts in a layer that config.json calls dense; an unknown tensor among the experts; two names
//   for one tensor.
absl::StatusOr<MoeCheckpoint> RecognizeFamily(const Checkpoint& checkpoint);

}  // namespace shardprep
