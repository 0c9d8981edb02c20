// Every family from its own names to committed shards, against a model of the whole path that is
// written here: which source byte each rank owns, pads, and the layouts as the reshapes and
// permutations that AITER's Python performs.
#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/artifact.h"
#include "workers/coverage.h"
#include "workers/open_store.h"
#include "workers/proto_json.h"
#include "workers/region_prep.h"
#include "workers/verify.h"
#include "workers/version.h"

namespace shardprep {
namespace {

using Bytes = std::vector<uint8_t>;

// `in` seen as an array of these extents, with its axes in another order (torch view + permute).
Bytes Permute(const Bytes& in, const std::vector<int64_t>& extents,
              const std::vector<size_t>& order) {
  std::vector<int64_t> strides(extents.size(), 1);
  for (size_t d = extents.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * extents[d];
  Bytes out(in.size());
  std::vector<int64_t> at(order.size(), 0);
  for (uint8_t& byte : out) {
    int64_t from = 0;
    for (size_t d = 0; d < order.size(); ++d) from += at[d] * strides[order[d]];
    byte = in[static_cast<size_t>(from)];
    for (size_t d = order.size(); d-- > 0;) {
      if (++at[d] < extents[order[d]]) break;
      at[d] = 0;
    }
  }
  return out;
}

// Matrices of all experts, rows of `cols` bytes each.
struct Matrices {
  int64_t experts = 0, rows = 0, cols = 0;
  Bytes bytes;
};

// Widens rows to a multiple of 8 bytes.
Matrices PadColumns(const Matrices& in, uint8_t fill) {
  Matrices out{in.experts, in.rows, (in.cols + 7) / 8 * 8, {}};
  for (int64_t row = 0; row < in.experts * in.rows; ++row) {
    const auto begin = in.bytes.begin() + row * in.cols;
    out.bytes.insert(out.bytes.end(), begin, begin + in.cols);
    out.bytes.insert(out.bytes.end(), static_cast<size_t>(out.cols - in.cols), fill);
  }
  return out;
}

Bytes ShuffleWeight(const Matrices& m) {
  return Permute(m.bytes, {m.experts, m.rows / 16, 16, m.cols / 32, 2, 16}, {0, 1, 3, 4, 2, 5});
}
Bytes ShuffleWeightGateUp(const Matrices& m) {
  return Permute(m.bytes, {m.experts, 2, m.rows / 32, 16, m.cols / 32, 2, 16},
                 {0, 2, 1, 4, 5, 3, 6});
}
Bytes ShuffleScale(const Matrices& in) {
  Matrices m = PadColumns(in, 0);
  const int64_t rows = (m.experts * m.rows + 255) / 256 * 256;
  m.bytes.resize(static_cast<size_t>(rows * m.cols), 0);
  return Permute(m.bytes, {rows / 32, 2, 16, m.cols / 8, 2, 4}, {0, 3, 5, 2, 4, 1});
}
Bytes ShuffleScaleGateUp(const Matrices& in) {
  const Matrices m = PadColumns(in, 0x7F);
  return Permute(m.bytes, {m.experts, 2, m.rows / 32, 16, m.cols / 8, 2, 4}, {0, 2, 4, 6, 3, 5, 1});
}
Bytes ShuffleScaleExpert(const Matrices& in) {
  const Matrices m = PadColumns(in, 0x7F);
  return Permute(m.bytes, {m.experts, m.rows / 32, 2, 16, m.cols / 8, 2, 4}, {0, 1, 4, 6, 3, 5, 2});
}
Bytes AsIs(const Matrices& m) { return m.bytes; }
// Rows g0..., u0... as g0, u0, g1, u1...
Matrices Alternated(const Matrices& m) {
  return {m.experts, m.rows, m.cols,
          Permute(m.bytes, {m.experts, 2, m.rows / 2, m.cols}, {0, 2, 1, 3})};
}
Bytes ShuffleN32K4(const Matrices& m) {
  return Permute(m.bytes, {m.experts, m.rows / 32, 32, m.cols / 4, 4}, {0, 1, 3, 2, 4});
}
Bytes ShuffleWeightAlternated(const Matrices& m) { return ShuffleWeight(Alternated(m)); }
Bytes ShuffleN32K4Alternated(const Matrices& m) { return ShuffleN32K4(Alternated(m)); }

using Layout = Bytes (*)(const Matrices&);

// What a family's tensors are, as the published checkpoints and engines have it.
struct Family {
  const char* name;
  TestFamily family;
  const char* profile;
  const char* backend;    // that AUTO must choose
  const char* experts;    // name of a layer's experts in the engine, {} for the layer
  const char* weight;     // w13_<weight>
  const char* scale;      // null without
  const char* dtypes[2];  // of weights and scales
  int64_t intermediate;
  int64_t weight_bits;
  int64_t block_rows, block_columns, scale_bytes;  // of a scale
  int64_t alignment;
  Layout w13, w13_scale, w2, w2_scale;
  bool bias;
  const char* architecture = "gfx950";
};

const Family kFamilies[] = {
    {"DeepSeekV4",
     TestFamily::kDeepSeekV4,
     "aiter-separated",
     "AITER_MXFP4_BF16",
     "model.layers.{}.ffn.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     512,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeight,
     ShuffleScale,
     ShuffleWeight,
     ShuffleScale,
     false},
    {"DeepSeekV4Interleaved",
     TestFamily::kDeepSeekV4,
     "aiter-interleaved",
     "AITER_MXFP4_BF16",
     "model.layers.{}.ffn.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     512,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeightGateUp,
     ShuffleScaleGateUp,
     ShuffleWeight,
     ShuffleScaleExpert,
     false},
    {"DeepSeekV4Gfx1250",
     TestFamily::kDeepSeekV4,
     "aiter-gfx1250",
     "AITER_MXFP4_BF16",
     "model.layers.{}.ffn.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     512,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeightAlternated,
     ShuffleN32K4Alternated,
     ShuffleWeight,
     ShuffleN32K4,
     false,
     "gfx1250"},
    // Sizes like V4.1's: the native width is no multiple of the alignment at any number of ranks.
    {"DeepSeekV41Sizes",
     TestFamily::kDeepSeekV4,
     "aiter-separated",
     "AITER_MXFP4_BF16",
     "model.layers.{}.ffn.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     576,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeight,
     ShuffleScale,
     ShuffleWeight,
     ShuffleScale,
     false},
    {"KimiK3Gfx1250",
     TestFamily::kKimiK3,
     "aiter-gfx1250",
     "AITER_MXFP4_BF16",
     "language_model.model.layers.{}.block_sparse_moe.experts",
     "weight_packed",
     "weight_scale",
     {"U8", "U8"},
     384,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeightAlternated,
     ShuffleN32K4Alternated,
     ShuffleWeight,
     ShuffleN32K4,
     false,
     "gfx1250"},
    {"DeepSeekV4Fp8",
     TestFamily::kDeepSeekV4Fp8,
     "aiter-separated",
     "AITER_FP8_BLOCK",
     "model.layers.{}.ffn.experts",
     "weight",
     "weight_scale_inv",
     {"F8_E4M3", "U8"},
     512,
     8,
     128,
     128,
     1,
     128,
     ShuffleWeight,
     AsIs,
     ShuffleWeight,
     AsIs,
     false},
    {"DeepSeekV3Fp8",
     TestFamily::kDeepSeekV3Fp8,
     "aiter-separated",
     "AITER_FP8_BLOCK",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale_inv",
     {"F8_E4M3", "F32"},
     512,
     8,
     128,
     128,
     4,
     128,
     ShuffleWeight,
     AsIs,
     ShuffleWeight,
     AsIs,
     false},
    {"DeepSeekV3Fp8Logical",
     TestFamily::kDeepSeekV3Fp8,
     "logical",
     "AITER_FP8_BLOCK",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale_inv",
     {"F8_E4M3", "F32"},
     512,
     8,
     128,
     128,
     4,
     128,
     AsIs,
     AsIs,
     AsIs,
     AsIs,
     false},
    {"DeepSeekV3Quark",
     TestFamily::kDeepSeekV3Quark,
     "aiter-separated",
     "AITER_MXFP4_BF16",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     384,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeight,
     ShuffleScale,
     ShuffleWeight,
     ShuffleScale,
     false},
    {"Qwen3Quark",
     TestFamily::kQwen3Quark,
     "aiter-interleaved",
     "AITER_MXFP4_BF16",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     384,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeightGateUp,
     ShuffleScaleGateUp,
     ShuffleWeight,
     ShuffleScaleExpert,
     false},
    {"Qwen3Bf16",
     TestFamily::kQwen3Bf16,
     "aiter-separated",
     "AITER_BF16",
     "model.layers.{}.mlp.experts",
     "weight",
     nullptr,
     {"BF16", ""},
     384,
     16,
     0,
     0,
     0,
     1,
     ShuffleWeight,
     AsIs,
     ShuffleWeight,
     AsIs,
     false},
    {"Mixtral",
     TestFamily::kMixtral,
     "aiter-separated",
     "AITER_BF16",
     "model.layers.{}.block_sparse_moe.experts",
     "weight",
     nullptr,
     {"BF16", ""},
     384,
     16,
     0,
     0,
     0,
     1,
     ShuffleWeight,
     AsIs,
     ShuffleWeight,
     AsIs,
     false},
    {"KimiK3",
     TestFamily::kKimiK3,
     "aiter-separated",
     "AITER_MXFP4_BF16",
     "language_model.model.layers.{}.block_sparse_moe.experts",
     "weight_packed",
     "weight_scale",
     {"U8", "U8"},
     384,
     4,
     1,
     32,
     1,
     128,
     ShuffleWeight,
     ShuffleScale,
     ShuffleWeight,
     ShuffleScale,
     false},
    {"GptOss",
     TestFamily::kGptOss,
     "aiter-interleaved",
     "AITER_MXFP4_BF16",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     224,
     4,
     1,
     32,
     1,
     256,
     ShuffleWeightGateUp,
     ShuffleScaleGateUp,
     ShuffleWeight,
     ShuffleScaleExpert,
     true},
    {"GptOssLogical",
     TestFamily::kGptOss,
     "logical",
     "AITER_MXFP4_BF16",
     "model.layers.{}.mlp.experts",
     "weight",
     "weight_scale",
     {"U8", "U8"},
     224,
     4,
     1,
     32,
     1,
     256,
     AsIs,
     AsIs,
     AsIs,
     AsIs,
     true},
};

constexpr int64_t kHidden = 256, kExperts = 5;

struct Sizes {
  int32_t tp, dp, ep;
};
// World sizes 1 to 8 over both ways of parallelism; groups of 1, 2, 3, 4 and 6 ranks.
const Sizes kSizes[] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 3}, {1, 4, 1}, {4, 1, 2},
                        {2, 2, 4}, {6, 1, 1}, {3, 2, 2}, {8, 1, 4}};

int64_t CeilOf(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Whether groups of this many ranks can cut the experts: into whole blocks, with something for
// each rank; gpt-oss gives the last what is left.
bool IsLegal(const Family& family, int64_t group_size) {
  const int64_t block = std::max<int64_t>(family.block_columns, 1);
  if (family.family == TestFamily::kGptOss) {
    const int64_t blocks = family.intermediate / 32;
    return (group_size - 1) * CeilOf(blocks, group_size) < blocks;
  }
  if (family.intermediate % group_size != 0) return false;
  const int64_t width = family.intermediate / group_size;
  // The 16 x 16 layout takes rows of 2-byte elements by 64 bytes.
  if (family.weight_bits == 16 && family.w2 == ShuffleWeight && width * 2 % 64 != 0) return false;
  return width % block == 0;
}

// The model of one rank.
class RankModel {
 public:
  RankModel(const Family& family, const Sizes& sizes, int32_t rank) : family_(family) {
    const int64_t group_size = int64_t{sizes.tp} * sizes.dp / sizes.ep;
    const int64_t group = rank / group_size;
    place_ = rank % group_size;
    // Experts are dealt one after the other, the first groups one more.
    int64_t next = 0;
    for (int64_t g = 0; g < sizes.ep; ++g) {
      for (int64_t k = 0; k < kExperts / sizes.ep + (g < kExperts % sizes.ep ? 1 : 0); ++k) {
        if (g == group) experts_.push_back(next);
        ++next;
      }
    }
    // Equal slices, or whole blocks of 32 and the rest for the last.
    const int64_t step = family.family == TestFamily::kGptOss
                             ? CeilOf(family.intermediate / 32, group_size) * 32
                             : family.intermediate / group_size;
    begin_ = place_ * step;
    width_ = std::min(step, family.intermediate - begin_);
    padded_ = CeilOf(step, family.alignment) * family.alignment;
  }

  // What each tensor of a layer must hold, by the last part of its name.
  std::map<std::string, Bytes> Layer(int64_t layer) const {
    std::map<std::string, Bytes> tensors;
    const std::string weight = family_.weight;
    tensors["w13_" + weight] = family_.w13(W13(layer, kGateWeight, kUpWeight, 1, 0));
    tensors["w2_" + weight] = family_.w2(W2(layer, kDownWeight, 1));
    if (family_.scale != nullptr) {
      const std::string scale = family_.scale;
      tensors["w13_" + scale] =
          family_.w13_scale(W13(layer, kGateScale, kUpScale, family_.block_rows, 1));
      tensors["w2_" + scale] = family_.w2_scale(W2(layer, kDownScale, family_.block_rows));
    }
    if (family_.bias) {
      tensors["w13_bias"] = W13(layer, kGateBias, kUpBias, 1, 2).bytes;
      tensors["w2_bias"] = DownBias(layer);
    }
    return tensors;
  }

  const std::vector<int64_t>& experts() const { return experts_; }

 private:
  // Bytes that hold `elements` of a row: of a weight, of a scale.
  int64_t RowBytes(bool scale, int64_t elements) const {
    return scale ? CeilOf(elements, family_.block_columns) * family_.scale_bytes
                 : elements * family_.weight_bits / 8;
  }

  // [gate | pad | up | pad]; `kind` 0 weight, 1 scale, 2 bias.
  Matrices W13(int64_t layer, ExpertTensor gate, ExpertTensor up, int64_t block_rows,
               int kind) const {
    const int64_t cols = kind == 2 ? 2 : RowBytes(kind == 1, kHidden);
    Matrices m{static_cast<int64_t>(experts_.size()), 2 * padded_ / block_rows, cols, {}};
    for (const int64_t expert : experts_) {
      for (const ExpertTensor half : {gate, up}) {
        for (int64_t row = 0; row < padded_ / block_rows; ++row) {
          for (int64_t c = 0; c < cols; ++c) {
            const bool pad = row >= width_ / block_rows;
            m.bytes.push_back(
                pad ? 0 : ExpectedByte(layer, expert, half, begin_ / block_rows + row, c));
          }
        }
      }
    }
    return m;
  }

  Matrices W2(int64_t layer, ExpertTensor kind, int64_t block_rows) const {
    const bool scale = kind == kDownScale;
    const int64_t cols = RowBytes(scale, padded_);
    const int64_t rows = CeilOf(kHidden, block_rows);
    Matrices m{static_cast<int64_t>(experts_.size()), rows, cols, {}};
    for (const int64_t expert : experts_) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = 0; c < cols; ++c) {
          const bool pad = c >= RowBytes(scale, width_);
          m.bytes.push_back(
              pad ? 0 : ExpectedByte(layer, expert, kind, row, RowBytes(scale, begin_) + c));
        }
      }
    }
    return m;
  }

  // Added once in a group: by its first rank.
  Bytes DownBias(int64_t layer) const {
    Bytes bytes;
    for (const int64_t expert : experts_) {
      for (int64_t row = 0; row < kHidden; ++row) {
        for (int64_t c = 0; c < 2; ++c) {
          bytes.push_back(place_ == 0 ? ExpectedByte(layer, expert, kDownBias, row, c) : 0);
        }
      }
    }
    return bytes;
  }

  const Family& family_;
  int64_t place_ = 0;
  std::vector<int64_t> experts_;
  int64_t begin_ = 0, width_ = 0, padded_ = 0;
};

Bytes ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A job from source to commit.
class FamiliesTest : public ::testing::TestWithParam<Family> {
 protected:
  static CheckpointSpec Checkpoint(const Family& family) {
    CheckpointSpec spec = FamilySpec(family.family);
    spec.hidden = kHidden;
    spec.intermediate = family.intermediate;
    spec.experts = kExperts;
    return spec;
  }

  v1::PrepJobSpec Spec(const Family& family, const Sizes& sizes, const std::string& destination) {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source_.path());
    spec.set_include_mtp(true);
    spec.set_part_size_bytes(256 << 10);
    v1::Target& target = *spec.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(sizes.tp);
    target.mutable_parallel_layout()->set_data_parallel_size(sizes.dp);
    target.mutable_parallel_layout()->set_expert_parallel_size(sizes.ep);
    target.mutable_kernel_target()->set_profile(family.profile);
    target.mutable_kernel_target()->set_architecture(family.architecture);
    target.mutable_kernel_target()->set_backend(family.backend);
    target.set_destination_uri(destination);
    return spec;
  }

  void Run(const v1::PrepJobSpec& spec) {
    auto plan = PlanJob(spec, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *plan;
    auto source = OpenStore(plan_->spec.source_uri(), {});
    auto destination = OpenStore(plan_->target().destination_uri(), {.create = true});
    ASSERT_TRUE(source.ok() && destination.ok());
    const std::unique_ptr<Shuffler> shuffler = MakeHostShuffler();
    const int64_t ranks = plan_->slices.rank_count();
    Bytes memory(static_cast<size_t>(plan_->memory.Total(ranks, 2)), 0xEE);
    for (int32_t region = 0; region < static_cast<int32_t>(plan_->slices.regions().size());
         ++region) {
      RegionTask task;
      task.plan = plan_.get();
      task.region = region;
      task.ranks = plan_->slices.RanksOf(plan_->slices.regions()[region]);
      task.source = source->get();
      task.destination = destination->get();
      task.shuffler = shuffler.get();
      task.threads = 2;
      task.memory = absl::MakeSpan(memory);
      ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
    }
    const auto committed = CommitArtifact(*plan_, **source, **destination);
    ASSERT_TRUE(committed.ok()) << committed.status();
    VerifyOptions options;
    options.source = source->get();
    const auto report = VerifyArtifact(**destination, options);
    ASSERT_TRUE(report.ok()) << report.status();
  }

  // The tensors of a rank's files: name -> bytes; and their dtypes.
  std::map<std::string, Bytes> TensorsOf(int32_t rank, Region::Kind kind = Region::Kind::kRouted) {
    std::map<std::string, Bytes> tensors;
    for (const Region& region : plan_->slices.regions()) {
      if (region.kind != kind) continue;
      for (const PartPlan& part : plan_->slices.PartsOf(region, rank)) {
        const Bytes file =
            ReadBytes(plan_->target().destination_uri() + "/" + PartKeyOf(part, rank));
        const auto data = static_cast<int64_t>(PartHeader(*plan_, part, rank).value().size());
        for (const PartTensor& tensor : part.tensors) {
          const auto begin = file.begin() + data + tensor.data_offset;
          tensors[tensor.name] = Bytes(begin, begin + tensor.size_bytes);
          dtypes_[tensor.name] = std::string(DtypeName(tensor.dtype));
        }
      }
    }
    return tensors;
  }

  TempDir source_;
  TempDir destination_;
  std::shared_ptr<const JobPlan> plan_;
  RegionProgress progress_;
  std::map<std::string, std::string> dtypes_;
};

std::string LayerName(const std::string& pattern, int64_t layer) {
  const size_t at = pattern.find("{}");
  return absl::StrCat(pattern.substr(0, at), layer, pattern.substr(at + 2));
}

TEST_P(FamiliesTest, ShardsEqualTheModelForEveryParallelLayout) {
  const Family& family = GetParam();
  const CheckpointSpec checkpoint = Checkpoint(family);
  ASSERT_TRUE(WriteTestCheckpoint(source_.path(), checkpoint).ok());
  int job = 0, legal = 0;
  for (const Sizes& sizes : kSizes) {
    SCOPED_TRACE(absl::StrCat("tp ", sizes.tp, " dp ", sizes.dp, " ep ", sizes.ep));
    const v1::PrepJobSpec spec = Spec(family, sizes, destination_ / absl::StrCat(job++));
    const int64_t group_size = int64_t{sizes.tp} * sizes.dp / sizes.ep;
    if (!IsLegal(family, group_size)) {
      const absl::Status status = PlanJob(spec, {}).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      if (family.weight_bits != 16) {
        EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("sizes that work"));
      }
      continue;
    }
    ++legal;
    Run(spec);
    if (HasFatalFailure()) return;
    EXPECT_THAT(plan_->summary.moe_tensor_parallel_sizes(), ::testing::Contains(group_size));
    const auto totals = ProveCoverage(plan_->slices);
    ASSERT_TRUE(totals.ok()) << totals.status();
    EXPECT_EQ(totals->routed_bytes + totals->replicated_bytes, plan_->slices.NeededSourceBytes());
    for (int32_t rank = 0; rank < sizes.tp * sizes.dp; ++rank) {
      SCOPED_TRACE(absl::StrCat("rank ", rank));
      const std::map<std::string, Bytes> found = TensorsOf(rank);
      const RankModel model(family, sizes, rank);
      size_t wanted = 0;
      for (int64_t layer = checkpoint.dense_layers;
           layer < checkpoint.layers + checkpoint.mtp_layers; ++layer) {
        for (const auto& [leaf, bytes] : model.Layer(layer)) {
          const std::string name = absl::StrCat(LayerName(family.experts, layer), ".", leaf);
          ASSERT_EQ(found.count(name), 1u) << name;
          EXPECT_TRUE(found.at(name) == bytes) << name;
          const bool bias = leaf.find("bias") != std::string::npos;
          const bool scale = leaf.find("scale") != std::string::npos;
          EXPECT_EQ(dtypes_[name], bias ? "BF16" : family.dtypes[scale ? 1 : 0]) << name;
          ++wanted;
        }
      }
      EXPECT_EQ(found.size(), wanted);
    }
  }
  EXPECT_GE(legal, 7);
}

// Other tensors: in each rank's files as in the source, in each family's own names.
TEST_P(FamiliesTest, SelfContainedRanksHoldEveryOtherTensor) {
  const Family& family = GetParam();
  const CheckpointSpec checkpoint = Checkpoint(family);
  ASSERT_TRUE(WriteTestCheckpoint(source_.path(), checkpoint).ok());
  v1::PrepJobSpec spec = Spec(family, {2, 1, 2}, destination_ / "out");
  spec.set_self_contained(true);
  Run(spec);
  if (HasFatalFailure()) return;
  for (const int32_t rank : {0, 1}) {
    const std::map<std::string, Bytes> found = TensorsOf(rank, Region::Kind::kDense);
    size_t others = 0;
    const auto tensors = TestTensors(checkpoint);
    for (const TestTensor& tensor : tensors.value()) {
      if (tensor.place) continue;
      ++others;
      ASSERT_EQ(found.count(tensor.name), 1u) << tensor.name;
      const Bytes& bytes = found.at(tensor.name);
      for (size_t at = 0; at < bytes.size(); ++at) {
        ASSERT_EQ(bytes[at], ExpectedOtherByte(tensor.name, static_cast<int64_t>(at)))
            << tensor.name << " byte " << at;
      }
    }
    EXPECT_EQ(found.size(), others);
  }
}

// What AUTO chooses for the weights of a family.
TEST_P(FamiliesTest, AutoChoosesTheBackendThatReadsTheWeights) {
  const Family& family = GetParam();
  if (std::string(family.architecture) != "gfx950") GTEST_SKIP() << "AUTO is for gfx950";
  ASSERT_TRUE(WriteTestCheckpoint(source_.path(), Checkpoint(family)).ok());
  v1::PrepJobSpec spec = Spec(family, {1, 1, 1}, destination_ / "out");
  spec.mutable_targets(0)->mutable_kernel_target()->clear_backend();
  const auto plan = PlanJob(spec, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->summary.kernel_target().backend(), family.backend);
}

// Content is checked by expert id: slots hold the experts that the map says, and copies are whole.
class ExpertParallelTest : public FamiliesTest {
 protected:
  void Check(const v1::PrepJobSpec& spec, const std::vector<std::vector<int64_t>>& held) {
    Run(spec);
    if (HasFatalFailure()) return;
    for (int32_t rank = 0; rank < static_cast<int32_t>(held.size()); ++rank) {
      const Bytes found = TensorsOf(rank).at("model.layers.0.ffn.experts.w13_weight");
      Bytes want;
      for (const int64_t expert : held[static_cast<size_t>(rank)]) {
        for (const ExpertTensor kind : {kGateWeight, kUpWeight}) {
          for (int64_t row = 0; row < 512; ++row) {
            for (int64_t c = 0; c < kHidden / 2; ++c) {
              want.push_back(ExpectedByte(0, expert, kind, row, c));
            }
          }
        }
      }
      EXPECT_TRUE(found == want) << "rank " << rank;
      const std::string key = absl::StrCat("expert-map-rank-", rank, ".json");
      const Bytes text = ReadBytes(plan_->target().destination_uri() + "/" + key);
      v1::ExpertMap map;
      ASSERT_TRUE(
          ParseStoredJson(std::string(text.begin(), text.end()), key, kFormatVersion, map).ok());
      EXPECT_EQ(map.rank(), rank);
      EXPECT_EQ(map.expert_parallel_rank(), rank);
      EXPECT_THAT(map.logical_experts(),
                  ::testing::ElementsAreArray(held[static_cast<size_t>(rank)]));
    }
  }
};

TEST_P(ExpertParallelTest, PlacementAndRedundancyDecideWhatEachRankHolds) {
  ASSERT_TRUE(WriteTestCheckpoint(source_.path(), Checkpoint(GetParam())).ok());
  v1::PrepJobSpec spec = Spec(GetParam(), {2, 1, 2}, destination_ / "robin");
  spec.mutable_targets(0)->mutable_kernel_target()->set_profile("logical");
  v1::ParallelLayout& parallel = *spec.mutable_targets(0)->mutable_parallel_layout();
  parallel.set_expert_placement("round-robin");
  Check(spec, {{0, 2, 4}, {1, 3}});

  parallel.set_expert_placement("linear");
  parallel.set_redundant_experts(1);
  spec.mutable_targets(0)->set_destination_uri(destination_ / "redundant");
  Check(spec, {{0, 1, 2}, {3, 4, 0}});

  parallel.set_redundant_experts(0);
  for (const int32_t expert : {4, 4, 0, 1, 2, 3}) parallel.add_physical_to_logical(expert);
  spec.mutable_targets(0)->set_destination_uri(destination_ / "map");
  Check(spec, {{4, 4, 0}, {1, 2, 3}});
}

INSTANTIATE_TEST_SUITE_P(DeepSeekV4, ExpertParallelTest, ::testing::Values(kFamilies[0]),
                         [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(All, FamiliesTest, ::testing::ValuesIn(kFamilies),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace shardprep
