// Dense tensors from checkpoint to committed shards, against the table of DeepSeek-V4's rules
// written out here a second time, rank by rank and byte by byte.
#include "workers/dense_tensors.h"

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_artifact.h"
#include "tests/support/test_checkpoint.h"
#include "workers/coverage.h"
#include "workers/fetch.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using Tensors = std::map<std::string, std::string>;  // bytes by name

// Bytes of a tensor as rows; rows and columns [begin, end) of it.
std::string Cut(const std::string& name, int64_t row_bytes, int64_t row_begin, int64_t row_end,
                int64_t begin, int64_t end) {
  std::string bytes;
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t c = begin; c < end; ++c) {
      bytes.push_back(static_cast<char>(ExpectedOtherByte(name, row * row_bytes + c)));
    }
  }
  return bytes;
}
std::string All(const std::string& name, int64_t size) { return Cut(name, size, 0, 1, 0, size); }

// What tensor-parallel rank t of T must hold, by vLLM's names. `whole` is the same for all ranks.
class Model {
 public:
  Model(const CheckpointSpec& spec, int64_t ranks, int64_t rank)
      : spec_(spec), a_(spec.attention), ranks_(ranks), rank_(rank) {
    Rows("embed.weight", "model.embed_tokens.weight", spec.vocabulary, 2 * spec.hidden);
    Rows("head.weight", "lm_head.weight", spec.vocabulary, 2 * spec.hidden);
    Whole("norm.weight", "model.norm.weight", 2 * spec.hidden);
    HyperHead("", "model.");
    for (int64_t layer = 0; layer < spec.layers; ++layer) Layer(layer, false);
    for (int64_t j = 0; j < spec.mtp_layers; ++j) Layer(spec.layers + j, true);
  }

  Tensors own, whole;

 private:
  void Whole(const std::string& from, const std::string& to, int64_t size) {
    whole[to] += All(from, size);
  }
  void Rows(const std::string& from, const std::string& to, int64_t rows, int64_t row_bytes) {
    own[to] +=
        Cut(from, row_bytes, rows / ranks_ * rank_, rows / ranks_ * (rank_ + 1), 0, row_bytes);
  }
  void Columns(const std::string& from, const std::string& to, int64_t rows, int64_t row_bytes) {
    own[to] +=
        Cut(from, row_bytes, 0, rows, row_bytes / ranks_ * rank_, row_bytes / ranks_ * (rank_ + 1));
  }
  // FP8 with scales of 128 x 128.
  void LinearWhole(const std::string& from, const std::string& to, int64_t out, int64_t in) {
    Whole(from + ".weight", to + ".weight", out * in);
    Whole(from + ".scale", to + ".weight_scale_inv", (out + 127) / 128 * ((in + 127) / 128));
  }
  void LinearRows(const std::string& from, const std::string& to, int64_t out, int64_t in) {
    Rows(from + ".weight", to + ".weight", out, in);
    Rows(from + ".scale", to + ".weight_scale_inv", out / 128, (in + 127) / 128);
  }
  void LinearColumns(const std::string& from, const std::string& to, int64_t out, int64_t in) {
    Columns(from + ".weight", to + ".weight", out, in);
    Columns(from + ".scale", to + ".weight_scale_inv", (out + 127) / 128, in / 128);
  }
  void HyperHead(const std::string& from, const std::string& to) {
    Whole(from + "hc_head_fn", to + "hc_head_fn", 16 * spec_.hidden * 4);
    Whole(from + "hc_head_base", to + "hc_head_base", 16);
    Whole(from + "hc_head_scale", to + "hc_head_scale", 4);
  }
  void Compressor(const std::string& from, const std::string& to, int64_t ratio, int64_t width) {
    const int64_t wide = ratio == 4 ? 2 * width : width;
    Whole(from + "ape", to + "ape", ratio * wide * 4);
    Whole(from + "wkv.weight", to + "fused_wkv_wgate.weight", wide * spec_.hidden * 2);
    Whole(from + "wgate.weight", to + "fused_wkv_wgate.weight", wide * spec_.hidden * 2);
    Whole(from + "norm.weight", to + "norm.weight", width * 2);
  }

  void Layer(int64_t layer, bool mtp) {
    const int64_t h = spec_.hidden;
    const std::string from =
        mtp ? absl::StrCat("mtp.", layer - spec_.layers, ".") : absl::StrCat("layers.", layer, ".");
    const std::string to = absl::StrCat("model.layers.", layer, ".");
    for (const char* norm : {"attn_norm.weight", "ffn_norm.weight"}) {
      Whole(from + norm, to + norm, 2 * h);
    }
    for (const char* part : {"hc_attn_", "hc_ffn_"}) {
      Whole(from + part + "fn", to + part + "fn", 96 * h * 4);
      Whole(from + part + "base", to + part + "base", 96);
      Whole(from + part + "scale", to + part + "scale", 12);
    }
    Attention(from + "attn.", to + "attn.", layer, mtp);
    Whole(from + "ffn.gate.weight", to + "ffn.gate.weight", spec_.experts * h * 2);
    if (layer < spec_.hash_layers) {
      Whole(from + "ffn.gate.tid2eid", to + "ffn.gate.tid2eid", spec_.vocabulary * 6 * 8);
    } else {
      Whole(from + "ffn.gate.bias", to + "ffn.gate.e_score_correction_bias", spec_.experts * 4);
    }
    const std::string shared = "ffn.shared_experts.";
    LinearRows(from + shared + "w1", to + shared + "gate_up_proj", spec_.intermediate, h);
    LinearRows(from + shared + "w3", to + shared + "gate_up_proj", spec_.intermediate, h);
    LinearColumns(from + shared + "w2", to + shared + "down_proj", h, spec_.intermediate);
    if (!mtp) return;
    LinearWhole(from + "e_proj", to + "e_proj", h, h);
    LinearWhole(from + "h_proj", to + "h_proj", h, h);
    for (const char* norm : {"enorm.weight", "hnorm.weight", "norm.weight"}) {
      Whole(from + norm, to + norm, 2 * h);
    }
    HyperHead(from, to);
  }

  void Attention(const std::string& from, const std::string& to, int64_t layer, bool mtp) {
    const int64_t h = spec_.hidden, output = a_.output_groups * a_.output_rank;
    LinearWhole(from + "wq_a", to + "fused_wqa_wkv", a_.query_rank, h);
    LinearWhole(from + "wkv", to + "fused_wqa_wkv", a_.head_size, h);
    Whole(from + "q_norm.weight", to + "q_norm.weight", 2 * a_.query_rank);
    Whole(from + "kv_norm.weight", to + "kv_norm.weight", 2 * a_.head_size);
    LinearRows(from + "wq_b", to + "wq_b", a_.heads * a_.head_size, a_.query_rank);
    LinearRows(from + "wo_a", to + "wo_a", output, a_.heads * a_.head_size / a_.output_groups);
    LinearColumns(from + "wo_b", to + "wo_b", h, output);
    Rows(from + "attn_sink", to + "attn_sink", a_.heads, 4);
    for (int64_t head = a_.heads / ranks_; head < 64; ++head) {
      own[to + "attn_sink"] += std::string("\x00\x00\x80\xFF", 4);  // -inf
    }
    if (mtp) return;
    const int64_t ratio = layer > 0 && layer % 2 == 0 ? 4 : 128;
    Compressor(from + "compressor.", to + "compressor.", ratio, a_.head_size);
    if (ratio != 4) return;
    LinearWhole(from + "indexer.wq_b", to + "indexer.wq_b", a_.index_heads * a_.index_head_size,
                a_.query_rank);
    Whole(from + "indexer.weights_proj.weight", to + "indexer.weights_proj.weight",
          a_.index_heads * h * 2);
    Compressor(from + "indexer.compressor.", to + "indexer.compressor.", 4, a_.index_head_size);
  }

  const CheckpointSpec& spec_;
  const AttentionExtents& a_;
  const int64_t ranks_, rank_;
};

// The tensors of one rank's files, or of the replicated ones, that belong to no routed expert.
Tensors DenseOf(TestArtifact& artifact, int32_t rank) {
  Tensors found;
  const JobPlan& plan = artifact.plan();
  for (const PlannedPart& planned : PlannedParts(plan)) {
    const Region& region = plan.slices.regions()[planned.region];
    if (planned.rank != rank || region.kind == Region::Kind::kRouted) continue;
    const std::string bytes = ReadFileBytes(artifact.Path(PartKeyOf(*planned.part, rank)));
    const auto data = PartHeader(plan, *planned.part, rank).value().size();
    for (const PartTensor& tensor : planned.part->tensors) {
      found[tensor.name] = bytes.substr(data + tensor.data_offset, tensor.size_bytes);
    }
  }
  return found;
}

void ExpectEqual(const Tensors& found, const Tensors& want) {
  for (const auto& [name, bytes] : want) {
    ASSERT_EQ(found.count(name), 1u) << name;
    EXPECT_TRUE(found.at(name) == bytes) << name << ": " << found.at(name).size() << " bytes";
  }
  for (const auto& [name, bytes] : found) EXPECT_EQ(want.count(name), 1u) << name;
}

void ExpectVerified(TestArtifact& artifact) {
  VerifyOptions options;
  options.source = &artifact.source();
  const auto report = VerifyArtifact(artifact.destination(), options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->source_bytes_compared, report->native_bytes);
}

TestArtifactOptions SmallV4() { return {.checkpoint = SmallV4Spec()}; }

struct Ways {
  int32_t tp, dp, ep;
  bool self_contained;
};

TEST(SliceDense, EveryRuleEqualsTheModelOnEveryRank) {
  TestArtifact artifact(SmallV4());
  const CheckpointSpec checkpoint = SmallV4Spec();
  int job = 0;
  for (const Ways& way : {Ways{1, 1, 1, false}, Ways{2, 1, 1, true}, Ways{4, 1, 1, false},
                          Ways{2, 2, 4, true}, Ways{4, 1, 2, true}}) {
    SCOPED_TRACE(absl::StrCat("tp ", way.tp, " dp ", way.dp, " ep ", way.ep));
    artifact.UseDestination(absl::StrCat(job++));
    artifact.Replan([&](v1::PrepJobSpec& spec) {
      v1::ParallelLayout& parallel = *spec.mutable_targets(0)->mutable_parallel_layout();
      parallel.set_tensor_parallel_size(way.tp);
      parallel.set_data_parallel_size(way.dp);
      parallel.set_expert_parallel_size(way.ep);
      spec.set_include_mtp(true);
      spec.set_slice_dense(true);
      spec.set_self_contained(way.self_contained);
      spec.set_part_size_bytes(200'000);
    });
    artifact.Make();
    for (int32_t rank = 0; rank < way.tp * way.dp; ++rank) {
      SCOPED_TRACE(rank);
      const Model model(checkpoint, way.tp, rank % way.tp);
      Tensors want = model.own;
      if (way.self_contained) want.insert(model.whole.begin(), model.whole.end());
      ExpectEqual(DenseOf(artifact, rank), want);
    }
    const Model model(checkpoint, way.tp, 0);
    ExpectEqual(DenseOf(artifact, kReplicatedRank), way.self_contained ? Tensors{} : model.whole);
    ExpectVerified(artifact);
  }
}

// Experts that do not divide make ranks of two shapes, which number their parts differently.
TEST(SliceDense, RanksOfUnequalShapeHoldTheSameDenseTensors) {
  CheckpointSpec checkpoint = SmallV4Spec();
  checkpoint.experts = 5;
  TestArtifact artifact({.checkpoint = checkpoint});
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.mutable_targets(0)->mutable_parallel_layout()->set_expert_parallel_size(2);
    spec.set_self_contained(true);
    spec.set_slice_dense(true);
    spec.set_part_size_bytes(300'000);
  });
  ASSERT_EQ(artifact.plan().slices.shape_count(), 2);
  artifact.Make();
  checkpoint.mtp_layers = 0;
  for (const int32_t rank : {0, 1}) {
    const Model model(checkpoint, 2, rank);
    Tensors want = model.own;
    want.insert(model.whole.begin(), model.whole.end());
    ExpectEqual(DenseOf(artifact, rank), want);
  }
  ExpectVerified(artifact);
}

TEST(SliceDense, ShapesAreThoseOfTheEnginesParameters) {
  TestArtifact artifact(SmallV4());
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_slice_dense(true); });
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const DenseTensor& tensor : artifact.plan().slices.dense_tensors()) {
    shapes[tensor.name] = tensor.shape;
  }
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shapes["model.embed_tokens.weight"], (Shape{128, 256}));
  EXPECT_EQ(shapes["model.layers.0.attn.fused_wqa_wkv.weight"], (Shape{256 + 128, 256}));
  EXPECT_EQ(shapes["model.layers.0.attn.fused_wqa_wkv.weight_scale_inv"], (Shape{3, 2}));
  EXPECT_EQ(shapes["model.layers.0.attn.wq_b.weight"], (Shape{512, 256}));
  EXPECT_EQ(shapes["model.layers.0.attn.wo_b.weight"], (Shape{256, 512}));
  EXPECT_EQ(shapes["model.layers.0.attn.wo_b.weight_scale_inv"], (Shape{2, 4}));
  EXPECT_EQ(shapes["model.layers.0.attn.attn_sink"], (Shape{64}));
  EXPECT_EQ(shapes["model.layers.0.ffn.shared_experts.gate_up_proj.weight"], (Shape{512, 256}));
  EXPECT_EQ(shapes["model.hc_head_scale"], (Shape{1}));
}

// The sizes that the published checkpoint can be cut by.
TEST(SliceDense, TheWholeOfV4ProIsCutForEightRanks) {
  CheckpointSpec checkpoint = V4ProSpec();
  checkpoint.experts = 8;
  checkpoint.layers = 4;
  checkpoint.files = 4;
  TestArtifact artifact({.checkpoint = checkpoint, .ranks = 8});
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_slice_dense(true); });
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const DenseTensor& tensor : artifact.plan().slices.dense_tensors()) {
    shapes[tensor.name] = tensor.shape;
  }
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shapes["model.layers.3.attn.wq_b.weight"], (Shape{8192, 1536}));
  EXPECT_EQ(shapes["model.layers.3.attn.wo_a.weight"], (Shape{2048, 4096}));
  EXPECT_EQ(shapes["model.layers.3.attn.wo_b.weight"], (Shape{7168, 2048}));
  EXPECT_EQ(shapes["model.layers.3.ffn.shared_experts.down_proj.weight"], (Shape{7168, 384}));
  EXPECT_EQ(shapes["lm_head.weight"], (Shape{16160, 7168}));
  EXPECT_EQ(shapes["model.layers.3.attn.attn_sink"], (Shape{64}));
}

class SliceDenseRefuses : public ::testing::Test {
 protected:
  static absl::Status Plan(const CheckpointSpec& checkpoint, int32_t ranks,
                           const std::function<void(v1::PrepJobSpec&)>& change = nullptr) {
    const TempDir source, destination;
    EXPECT_TRUE(WriteTestCheckpoint(source.path(), checkpoint).ok());
    v1::PrepJobSpec spec;
    spec.set_source_uri(source.path());
    spec.set_slice_dense(true);
    v1::Target& target = *spec.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(ranks);
    target.set_destination_uri(destination.path());
    if (change) change(spec);
    return PlanJob(spec, {}).status();
  }

  static void Expect(const absl::Status& status, absl::StatusCode code,
                     const std::vector<std::string>& texts) {
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& text : texts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    }
  }

  static CheckpointSpec Edited(const std::function<bool(TestTensor&)>& edit) {
    CheckpointSpec checkpoint = SmallV4Spec();
    checkpoint.edit = edit;
    return checkpoint;
  }
};

TEST_F(SliceDenseRefuses, ExtentsThatDoNotDivideNamingTheSizesThatDo) {
  CheckpointSpec shared = SmallV4Spec();
  Expect(Plan(shared, 8), absl::StatusCode::kInvalidArgument,
         {"ffn.shared_experts.", "512", "8 tensor-parallel ranks", "whole scale blocks of 128",
          "sizes that work: 1, 2, 4 ("});
  // Heads: 6 of them among 4 ranks, although the rows would divide.
  CheckpointSpec heads = SmallV4Spec();
  heads.attention.heads = 6;
  heads.attention.head_size = 256;
  heads.attention.output_groups = 4;
  heads.attention.output_rank = 256;
  Expect(Plan(heads, 4), absl::StatusCode::kInvalidArgument,
         {"layers.0.attn.attn_sink", "num_attention_heads 6", "sizes that work: 1, 2, 3, 6 ("});
  CheckpointSpec groups = SmallV4Spec();
  groups.attention.output_groups = 2;
  groups.attention.output_rank = 512;
  Expect(Plan(groups, 4), absl::StatusCode::kInvalidArgument,
         {"attn.wo_", "o_groups 2", "sizes that work: 1, 2 ("});
  CheckpointSpec vocabulary = SmallV4Spec();
  vocabulary.vocabulary = 200;
  Expect(Plan(vocabulary, 2), absl::StatusCode::kInvalidArgument,
         {"200 rows", "multiple of 64", "sizes that work: none"});
}

TEST_F(SliceDenseRefuses, TensorsThatNoRuleKnowsOrFits) {
  CheckpointSpec extra = SmallV4Spec();
  extra.extra = {{.name = "layers.1.attn.engram.table", .dtype = Dtype::kBF16, .shape = {4, 4}}};
  Expect(Plan(extra, 2), absl::StatusCode::kInvalidArgument,
         {"layers.1.attn.engram.table", "no tensor-parallel rule"});
  const auto drop = [](const std::string& name) {
    return Edited([name](TestTensor& tensor) { return tensor.name != name; });
  };
  Expect(Plan(drop("layers.1.attn.wkv.weight"), 2), absl::StatusCode::kInvalidArgument,
         {"attn.fused_wqa_wkv.weight", "made from 2 tensors", "layers.1.attn.wq_a.weight"});
  Expect(Plan(drop("layers.0.ffn.shared_experts.w2.scale"), 2), absl::StatusCode::kInvalidArgument,
         {"layers.0.ffn.shared_experts.w2.weight", "F8_E4M3 with a scale"});
  Expect(Plan(drop("layers.0.attn.wo_a.weight"), 2), absl::StatusCode::kInvalidArgument,
         {"layers.0.attn.wo_a.scale", "scale of no weight"});
  const auto reshape = [](const std::string& name, const std::vector<int64_t>& shape) {
    return Edited([=](TestTensor& tensor) {
      if (tensor.name == name) tensor.shape = shape;
      return true;
    });
  };
  Expect(Plan(reshape("layers.2.attn.wq_b.scale", {8, 3}), 2), absl::StatusCode::kInvalidArgument,
         {"layers.2.attn.wq_b.", "want scales [8,2]"});
  Expect(Plan(reshape("layers.2.attn.compressor.wgate.weight", {256, 128}), 2),
         absl::StatusCode::kInvalidArgument, {"wgate.weight", "fused with"});
  Expect(Plan(Edited([](TestTensor& tensor) {
                if (absl::EndsWith(tensor.name, "attn_sink")) tensor.dtype = Dtype::kBF16;
                return true;
              }),
              2),
         absl::StatusCode::kInvalidArgument, {"attn_sink", "want F32"});
}

TEST_F(SliceDenseRefuses, KeysOfConfigThatAreMissing) {
  CheckpointSpec heads = SmallV4Spec();
  heads.config = {{"num_attention_heads", ""}};
  Expect(Plan(heads, 2), absl::StatusCode::kInvalidArgument, {"num_attention_heads"});
  CheckpointSpec block = SmallV4Spec();
  block.config = {{"quantization_config", R"({"weight_block_size": [128]})"}};
  Expect(Plan(block, 2), absl::StatusCode::kInvalidArgument, {"weight_block_size"});
}

TEST_F(SliceDenseRefuses, FamiliesNamingsAndCarriesWithoutRules) {
  Expect(Plan(FamilySpec(TestFamily::kMixtral), 2), absl::StatusCode::kUnimplemented,
         {"mixtral", "deepseek_v4"});
  Expect(Plan(SmallV4Spec(), 2, [](auto& s) { s.mutable_targets(0)->set_naming("sglang"); }),
         absl::StatusCode::kUnimplemented, {"sglang"});
  Expect(Plan(SmallV4Spec(), 2, [](auto& s) { s.set_carry(v1::CARRY_EXPERTS_ONLY); }),
         absl::StatusCode::kInvalidArgument, {"slice_dense", "CARRY_EXPERTS_ONLY"});
  Expect(Plan(SmallV4Spec(), 2,
              [](auto& s) {
                s.set_carry(v1::CARRY_EXPERTS_ONLY);
                s.set_slice_dense(false);
                s.set_self_contained(true);
              }),
         absl::StatusCode::kInvalidArgument, {"self_contained", "CARRY_EXPERTS_ONLY"});
}

// Some published files have wo_a in BF16 without a scale.
TEST_F(SliceDenseRefuses, NothingOfABf16WeightWithoutScale) {
  EXPECT_EQ(Plan(Edited([](TestTensor& tensor) {
                   if (absl::EndsWith(tensor.name, "wo_a.weight")) tensor.dtype = Dtype::kBF16;
                   return !absl::EndsWith(tensor.name, "wo_a.scale");
                 }),
                 4),
            absl::OkStatus());
}

std::map<std::string, DenseTensor> PlannedDense(TestArtifact& artifact) {
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_slice_dense(true); });
  std::map<std::string, DenseTensor> tensors;
  for (const DenseTensor& tensor : artifact.plan().slices.dense_tensors()) {
    tensors[tensor.name] = tensor;
  }
  return tensors;
}

// Each layer is what its own tensors are: one may have BF16 where the others have FP8.
TEST(SliceDense, LayersMayDifferInTheirDtypes) {
  TestArtifactOptions options = SmallV4();
  options.checkpoint.edit = [](TestTensor& tensor) {
    if (!absl::StartsWith(tensor.name, "layers.1.ffn.shared_experts.")) return true;
    if (absl::EndsWith(tensor.name, ".weight")) tensor.dtype = Dtype::kBF16;
    return !absl::EndsWith(tensor.name, ".scale");
  };
  TestArtifact artifact(options);
  const std::map<std::string, DenseTensor> tensors = PlannedDense(artifact);
  const std::string shared = ".ffn.shared_experts.down_proj.weight";
  EXPECT_EQ(tensors.at("model.layers.0" + shared).dtype, Dtype::kF8E4M3);
  EXPECT_EQ(tensors.at("model.layers.1" + shared).dtype, Dtype::kBF16);
  EXPECT_EQ(tensors.count("model.layers.0" + shared + "_scale_inv"), 1u);
  EXPECT_EQ(tensors.count("model.layers.1" + shared + "_scale_inv"), 0u);
}

// Whatever config.json says of tied embeddings: what is there is carried, what is not is not made.
TEST(SliceDense, AHeadIsCarriedWhereItIsThereAndNeverInvented) {
  for (const bool has_head : {false, true}) {
    TestArtifactOptions options = SmallV4();
    options.checkpoint.config = {{"tie_word_embeddings", "true"}};
    options.checkpoint.edit = [has_head](TestTensor& tensor) {
      return has_head || tensor.name != "head.weight";
    };
    TestArtifact artifact(options);
    const std::map<std::string, DenseTensor> tensors = PlannedDense(artifact);
    EXPECT_EQ(tensors.count("lm_head.weight"), has_head ? 1u : 0u);
    EXPECT_EQ(tensors.count("model.embed_tokens.weight"), 1u);
  }
}

// Each wish changes the bytes, so it changes the fingerprint; the same wish twice does not.
TEST(SliceDense, EachWishAndEachRuleIsInTheFingerprint) {
  TestArtifact artifact(SmallV4());
  std::set<std::string> fingerprints;
  for (int round = 0; round < 2; ++round) {
    for (const bool slice : {false, true}) {
      for (const bool contained : {false, true}) {
        artifact.Replan([&](v1::PrepJobSpec& spec) {
          spec.set_slice_dense(slice);
          spec.set_self_contained(contained);
        });
        fingerprints.insert(artifact.plan().fingerprint);
      }
    }
    EXPECT_EQ(fingerprints.size(), 4u);
  }
}

TEST(SelfContained, EachRankHasEveryTensorUnderItsOwnName) {
  const TestArtifactOptions options{
      .checkpoint = {.hidden = 256, .intermediate = 256, .experts = 3, .layers = 2, .files = 2},
      .ranks = 2,
      .part_size_bytes = 60'000};
  TestArtifact artifact(options);
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.set_self_contained(true);
    spec.set_include_mtp(true);
  });
  artifact.Make();
  for (const int32_t rank : {0, 1}) {
    const Tensors found = DenseOf(artifact, rank);
    size_t others = 0;
    const auto tensors = TestTensors(options.checkpoint);
    for (const TestTensor& tensor : tensors.value()) {
      if (tensor.place) continue;
      ++others;
      ASSERT_EQ(found.count(tensor.name), 1u) << tensor.name;
      EXPECT_EQ(found.at(tensor.name), All(tensor.name, found.at(tensor.name).size()));
    }
    EXPECT_EQ(found.size(), others);
  }
  EXPECT_THAT(DenseOf(artifact, kReplicatedRank), ::testing::IsEmpty());
  ExpectVerified(artifact);
  EXPECT_EQ(artifact.plan().summary.replicated_bytes(), 0);
  EXPECT_EQ(ReadManifest(artifact.destination())->dense_bytes_per_rank(),
            artifact.plan().slices.DenseBytesPerRank());
}

TEST(SelfContained, FetchingOneRankBringsNothingButItsOwnFiles) {
  TestArtifact artifact;
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_self_contained(true); });
  artifact.Make();
  const TempDir directory;
  FetchOptions options;
  options.ranks = {1};
  options.expect = ParseExpectations("profile=aiter-separated,width=128").value();
  options.into = directory / "model";
  const auto report = FetchRanks(artifact.destination(), options);
  ASSERT_TRUE(report.ok()) << report.status();
  int64_t parts = 0;
  for (const auto& entry : std::filesystem::directory_iterator(options.into)) {
    const std::string name = entry.path().filename().string();
    EXPECT_THAT(name, ::testing::Not(HasSubstr("replicated")));
    parts += std::holds_alternative<RankPart>(ParseObjectName(name)) ? 1 : 0;
  }
  EXPECT_EQ(parts, static_cast<int64_t>(PlannedParts(artifact.plan()).size()) / 2);
}

// With memory for all ranks, each source byte is read once although every rank stores it.
TEST(SelfContained, TheSourceIsReadOnceForAllRanks) {
  TestArtifact artifact(SmallV4());
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.set_self_contained(true);
    spec.set_slice_dense(true);
  });
  const v1::PlanSummary& summary = artifact.plan().summary;
  EXPECT_EQ(summary.read_bytes(), summary.needed_bytes());
  const auto totals = ProveCoverage(artifact.plan().slices);
  ASSERT_TRUE(totals.ok()) << totals.status();
  EXPECT_EQ(totals->replicated_bytes, 0);
  EXPECT_GT(totals->dense_bytes, summary.needed_bytes() - totals->routed_bytes);
}

TEST(SelfContained, DamageToADenseTensorOfARankIsFound) {
  TestArtifact artifact(SmallV4());
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_slice_dense(true); });
  artifact.Make();
  for (const std::string name : {"layers.0.attn.wo_b.weight", "layers.0.attn.attn_sink"}) {
    for (const PlannedPart& planned : PlannedParts(artifact.plan())) {
      if (planned.rank != 1) continue;
      for (const PartTensor& tensor : planned.part->tensors) {
        if (tensor.name != "model." + name) continue;
        const std::string key = PartKeyOf(*planned.part, 1);
        const auto header = PartHeader(artifact.plan(), *planned.part, 1).value().size();
        const auto last = static_cast<int64_t>(header) + tensor.data_offset + tensor.size_bytes - 1;
        FlipBits(artifact.Path(key), last);
        const absl::Status status = VerifyArtifact(artifact.destination(), {}).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr(name));
        FlipBits(artifact.Path(key), last);
      }
    }
  }
  EXPECT_TRUE(VerifyArtifact(artifact.destination(), {}).ok());
}

}  // namespace
}  // namespace shardprep
