// Writes checkpoints of any size in the naming of each family, for tests and demonstrations.
//
// Every byte is a function of what it belongs to, so a test can say what any byte of any output
// must be without reading the source: see ExpectedByte().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "workers/dtype.h"
#include "workers/family.h"

namespace shardprep {

// A routed-expert tensor's place; `layer` counts MTP layers behind the others.
struct ExpertPlace {
  int64_t layer = 0;
  int64_t expert = 0;
  ExpertTensor kind = kGateWeight;
};

struct TestTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
  std::optional<ExpertPlace> place;  // of a routed expert, whatever it is called
  int file = 0;                      // index of its file
  // Of all experts of a layer: `place` is that of expert 0. With `alternating`, rows of the tensors
  // of gate and up take turns.
  bool stacked = false;
  bool alternating = false;
};

// How experts are named and stored.
enum class TestFamily {
  kDeepSeekV4,       // layers.L.ffn.experts.X.w1.{weight,scale}
  kDeepSeekV4Fp8,    // the same, FP8 with E8M0 scales of 128 x 128
  kDeepSeekV3Fp8,    // model.layers.L.mlp.experts.X.gate_proj.{weight,weight_scale_inv}
  kDeepSeekV3Quark,  // the same, MXFP4 with .weight_scale
  kQwen3Bf16,        // model.layers.L.mlp.experts.X.gate_proj.weight
  kQwen3Quark,
  kMixtral,  // model.layers.L.block_sparse_moe.experts.X.w1.weight
  kKimiK3,   // language_model.model.layers.L.block_sparse_moe.experts.X.w1.weight_packed
  kGptOss,   // model.layers.L.mlp.experts.gate_up_proj_blocks
};

// Of DeepSeek-V4; those of V4-Pro. All are parts of config.json.
struct AttentionExtents {
  int64_t heads = 128;
  int64_t head_size = 512;
  int64_t query_rank = 1536;
  int64_t output_rank = 1024;
  int64_t output_groups = 16;
  int64_t index_heads = 64;
  int64_t index_head_size = 128;
};

struct CheckpointSpec {
  TestFamily family = TestFamily::kDeepSeekV4;
  int64_t hidden = 256;
  int64_t intermediate = 256;
  int64_t experts = 4;
  int64_t layers = 2;
  int64_t mtp_layers = 1;
  int64_t hash_layers = 1;   // the first layers, which route by token id (DeepSeek-V4)
  int64_t dense_layers = 0;  // the first layers, without experts (DeepSeek-V3, Kimi-K3)
  int64_t vocabulary = 64;
  int files = 3;
  Dtype weight_dtype = Dtype::kI8;  // I8, U8 or F4, of DeepSeek-V4
  Dtype scale_dtype = Dtype::kF8E8M0;
  std::string prefix;          // of all names, e.g. "model."
  bool mtp_as_layers = false;  // layers.L instead of mtp.0
  bool with_index = true;
  bool sparse = false;  // real headers, data that reads as zeros and takes no space
  // All tensors of the published V4-Pro beside the routed experts. Else a few small ones, a scalar
  // and a tensor of no bytes among them.
  bool published = false;
  AttentionExtents attention;  // of a published one
  // Tensors besides; `file` counts.
  std::vector<TestTensor> extra;
  // Changes to config.json: key to JSON text; an empty text removes the key.
  std::map<std::string, std::string> config;
  // Called for each tensor but `extra`; may change it, and drops it by answering false.
  std::function<bool(TestTensor&)> edit;
};

// A small checkpoint of the family, with the prefix that its names have and, where the family knows
// them, a dense and an MTP layer.
CheckpointSpec FamilySpec(TestFamily family);

// 0.45 GB with the real extents of one V4-Pro expert: 4 experts, 2 layers + 1 MTP layer.
CheckpointSpec QuickstartSpec();
// Every tensor that V4-Pro has, with small extents that up to four ranks can share.
CheckpointSpec SmallV4Spec();
// The whole of V4-Pro, 64 files and 805 GiB: sparse.
CheckpointSpec V4ProSpec();

// The tensors of a specification with their files, layer by layer; in each file they lie ordered
// by dtype, widest first, then name, as the published writer does. INVALID_ARGUMENT when some file
// would hold none.
absl::StatusOr<std::vector<TestTensor>> TestTensors(const CheckpointSpec& spec);

// Writes `model-0000x-of-0000y.safetensors`, the index, config.json, tokenizer.json,
// tokenizer_config.json and generation_config.json into the directory, which is made if needed.
// INTERNAL when the file system refuses.
absl::Status WriteTestCheckpoint(const std::string& directory, const CheckpointSpec& spec);

std::string TestFileName(const CheckpointSpec& spec, int file);

// The byte in the given row and byte column of a routed-expert tensor. Distinguishes layers,
// experts, tensors, rows and columns. Scale bytes are 1 to 254: neither a pad nor NaN.
uint8_t ExpectedByte(int64_t layer, int64_t expert, ExpertTensor kind, int64_t row,
                     int64_t byte_column);

// The byte at an offset of any other tensor.
uint8_t ExpectedOtherByte(absl::string_view name, int64_t offset);

}  // namespace shardprep
