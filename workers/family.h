// Recognises a checkpoint's model family and finds its routed experts.
//
// A family is a row of data (family.cc): how experts are named, which dtypes they have, which keys
// of config.json state the geometry. The row is chosen by config.json's `model_type`, never by a
// model's name or path; every tensor is then held against the row by dtype and shape, which decide
// over what config.json claims.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "workers/checkpoint.h"

namespace shardprep {

// The tensors of one routed expert: gate (w1), up (w3), down (w2), each with its block scales.
enum ExpertTensor {
  kGateWeight,
  kGateScale,
  kUpWeight,
  kUpScale,
  kDownWeight,
  kDownScale,
  kExpertTensorCount,
};

// The routed experts of one layer. Values are indexes into Checkpoint::tensors().
struct MoeLayer {
  int32_t layer = 0;  // prepared number: that of the checkpoint, or num_hidden_layers + j for MTP
  bool is_mtp = false;
  std::string module;  // name of the experts in the checkpoint, e.g. "layers.3.ffn.experts"
  std::vector<std::array<int32_t, kExpertTensorCount>> experts;  // [expert][ExpertTensor]
};

// A tensor that is no routed expert of `MoeCheckpoint::layers`.
struct OtherTensor {
  int32_t tensor = 0;
  bool is_mtp = false;
};

// Extents are in elements. Weights hold two elements a byte, low nibble first; one scale byte
// covers `block_size` elements of a row. Gate and up are [intermediate, hidden], down is
// [hidden, intermediate].
struct MoeCheckpoint {
  std::string family;          // id of the row, e.g. "deepseek_v4"
  std::string activation;      // as the alignment policy spells it, e.g. "SILU"
  std::string experts_module;  // what stands between layer number and expert: "ffn.experts"
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t experts = 0;
  int64_t block_size = 0;
  int64_t hidden_layers = 0;  // layers without MTP
  // OK when the MTP layers that config.json promises are all there and well formed. Else what is
  // wrong with them; then `layers` has none and their tensors are in `others`. A job that includes
  // MTP must return this status; others need not care.
  absl::Status mtp_status;
  int64_t mtp_layers = 0;           // in `layers`
  std::vector<MoeLayer> layers;     // in order of `layer`, MTP last
  std::vector<OtherTensor> others;  // every other tensor, in order of index
};

// Names may carry the prefix `model.`, `model.language_model.` or `language_model.model.`, all
// experts the same one; an MTP layer is `mtp.J` or a layer numbered from num_hidden_layers on.
// Linear in the number of tensors but for a sort of the expert tensors. Errors:
// FAILED_PRECONDITION: unknown family (says what was looked for); a missing expert tensor or layer
//   (names it, and the scale names tried); an expert's index entry that is stale (names the file).
// INVALID_ARGUMENT: a dtype or shape that does not fit (names tensor, found, wanted); shapes that
//   contradict config.json; an activation that is not known; an unknown tensor among the experts;
//   two names for one tensor.
absl::StatusOr<MoeCheckpoint> RecognizeFamily(const Checkpoint& checkpoint);

}  // namespace shardprep
