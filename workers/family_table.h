// What is known of each model family, as data: how its routed experts are named and stored, and
// which keys of config.json state the geometry. A new family is a new row here; recognition
// (family.h) and everything behind it is shared by all.
//
// A row is chosen by config.json's `model_type`, never by a model's name or path. Which of the
// row's formats a checkpoint has is decided by its tensors.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "workers/dtype.h"

namespace shardprep {

// The tensors of one routed expert: gate (w1), up (w3), down (w2), each with its block scales and,
// in some families, a bias.
enum ExpertTensor {
  kGateWeight,
  kGateScale,
  kUpWeight,
  kUpScale,
  kDownWeight,
  kDownScale,
  kGateBias,
  kUpBias,
  kDownBias,
  kExpertTensorCount,
};

struct WeightDtype {
  Dtype dtype;
  int64_t elements;  // that one unit of the shape's last extent counts
};

// How one family member stores an expert's matrices. Extents are in elements.
struct ExpertFormat {
  const char* id;       // part of the fingerprint, e.g. "mxfp4"
  const char* weights;  // as the alignment policy spells it: "mxfp4", "fp8-block", "bf16"
  const char* title;    // in messages: "MXFP4"
  const char* weight_suffix;
  std::vector<const char*> scale_suffixes;  // the published one first; empty without scales
  std::vector<WeightDtype> weight_dtypes;
  const char* scale_title;  // in messages: "E8M0 scales"
  std::vector<Dtype> scale_dtypes;
  Dtype prepared_dtype;   // that prepared weights declare: bits of FP4 as U8, others as they are
  int64_t weight_bits;    // of one element
  int64_t block_rows;     // elements that one scale covers, 0 without scales
  int64_t block_columns;  // likewise
  // Whether the extents must be whole blocks; else the last scale of a row covers what is left.
  bool whole_blocks;
  // Ranks take whole blocks of the intermediate extent, the last what is left; other formats refuse
  // sizes that do not divide.
  bool unequal_ranks;
  const char* expert_dtype;  // what config.json calls it under FamilyRow::expert_dtype_key, or null
  const char* fused_weight;  // what engines call the fused tensors: w13_<fused_weight>
  const char* fused_scale;   // null without scales
};

struct ActivationName {
  const char* config;  // as config.json has it
  const char* policy;  // as the alignment policy has it
};

// Which layers have no routed experts. Keys that config.json may have; null where a family has no
// such rule.
struct DenseLayerKeys {
  const char* first;      // the first so many layers are dense
  const char* frequency;  // of the others, layers whose number it divides have experts
  const char* step;       // layer L has experts when step divides L + 1
  const char* list;       // numbers of dense layers
};

// One tensor of a family that stacks all experts of a layer. `second` is kExpertTensorCount, or
// the tensor whose rows alternate with those of `first`: g0, u0, g1, u1...
struct StackedTensor {
  const char* name;
  ExpertTensor first;
  ExpertTensor second;
};

// [prefix] layers.L. experts_module .X. projection . suffix, or, stacked,
// [prefix] layers.L. experts_module . name
struct FamilyRow {
  const char* id;
  std::vector<const char*> model_types;  // those that choose the row
  const char* experts_module;
  std::array<const char*, 3> projections;  // gate, up, down; null when stacked
  std::vector<StackedTensor> stacked;      // empty: every expert has tensors of its own
  std::vector<const ExpertFormat*> formats;
  const char* mtp_segment;  // `mtp` of mtp.J; null when MTP layers are numbered only
  // Null where the experts work in a latent space whose size config.json does not state under a
  // known key: then tensors alone decide, and must agree.
  const char* hidden_key;
  const char* intermediate_key;
  std::vector<const char*> experts_keys;  // the first that is there counts
  const char* layers_key;
  const char* mtp_layers_key;  // null without MTP
  DenseLayerKeys dense;
  const char* activation_key;      // null when the family has one activation, whatever is written
  const char* default_activation;  // when config.json has no activation_key; null: refused
  std::vector<ActivationName> activations;
  const char* expert_dtype_key;  // optional in config.json; null: none
  // Scalars of an expert that a quantiser adds; carried unchanged, for all experts on all ranks.
  std::vector<const char*> scalar_suffixes;
};

const std::vector<FamilyRow>& FamilyRows();

}  // namespace shardprep
