// An MTP layer of another dtype than the experts of the other layers is not prepared by a rule of
// its own: it is refused when a job includes it.
#include "workers/family.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status_macros.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/open_store.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

using Edit = std::function<bool(TestTensor&)>;

// A checkpoint of headers only, recognised.
struct Recognized {
  explicit Recognized(CheckpointSpec spec) {
    TempDir directory;
    spec.sparse = true;
    const absl::Status written = WriteTestCheckpoint(directory.path(), spec);
    SP_CHECK(written.ok());
    const auto store = OpenStore(directory.path(), {});
    SP_CHECK(store.ok());
    auto read = ReadCheckpoint(**store);
    EXPECT_TRUE(read.ok()) << read.status();
    SP_CHECK(read.ok());
    checkpoint = std::make_unique<Checkpoint>(*std::move(read));
    moe = RecognizeFamily(*checkpoint);
  }

  std::string Name(int32_t tensor) const {
    return std::string(checkpoint->tensors().at(tensor).name);
  }

  std::unique_ptr<Checkpoint> checkpoint;
  absl::StatusOr<MoeCheckpoint> moe;
};

// Small, with extents that differ from each other and from their halves.
CheckpointSpec SmallSpec() {
  CheckpointSpec spec;
  spec.hidden = 256;
  spec.intermediate = 192;
  spec.experts = 3;
  return spec;
}

Edit Dropping(const std::string& name) {
  return [name](TestTensor& tensor) { return tensor.name != name; };
}

Edit Renaming(const std::string& from, const std::string& to) {
  return [from, to](TestTensor& tensor) {
    tensor.name = absl::StrReplaceAll(tensor.name, {{from, to}});
    return true;
  };
}

Edit Reshaping(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape) {
  return [=](TestTensor& tensor) {
    if (tensor.name == name) {
      tensor.dtype = dtype;
      tensor.shape = shape;
    }
    return true;
  };
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

// Every tensor of the checkpoint is in exactly one place, and each expert tensor in its own.
void ExpectComplete(const Recognized& recognized, const CheckpointSpec& spec) {
  ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
  const MoeCheckpoint& moe = *recognized.moe;
  std::map<std::string, TestTensor> by_name;
  const auto tensors = TestTensors(spec);
  for (const TestTensor& tensor : *tensors) by_name[tensor.name] = tensor;
  std::multiset<int32_t> seen;
  for (const MoeLayer& layer : moe.layers) {
    ASSERT_EQ(static_cast<int64_t>(layer.experts.size()), spec.experts);
    for (int64_t expert = 0; expert < spec.experts; ++expert) {
      for (int kind = kGateWeight; kind <= kDownScale; ++kind) {
        const int32_t index =
            layer.experts[static_cast<size_t>(expert)].at(static_cast<size_t>(kind));
        const TestTensor& tensor = by_name[recognized.Name(index)];
        SCOPED_TRACE(tensor.name);
        ASSERT_TRUE(tensor.place.has_value());
        EXPECT_EQ(tensor.place->layer, layer.layer);
        EXPECT_EQ(tensor.place->expert, expert);
        EXPECT_EQ(tensor.place->kind, static_cast<ExpertTensor>(kind));
        EXPECT_TRUE(absl::StartsWith(tensor.name, absl::StrCat(layer.module, ".", expert, ".")));
        seen.insert(index);
      }
    }
  }
  int32_t previous = -1;
  for (const OtherTensor& other : moe.others) {
    EXPECT_LT(previous, other.tensor);
    previous = other.tensor;
    seen.insert(other.tensor);
  }
  EXPECT_EQ(seen.size(), tensors->size());
  for (int32_t i = 0; i < static_cast<int32_t>(tensors->size()); ++i) EXPECT_EQ(seen.count(i), 1u);
}

TEST(RecognizeFamily, FindsEveryExpertOfDeepSeekV4) {
  const CheckpointSpec spec = SmallSpec();
  const Recognized recognized(spec);
  ExpectComplete(recognized, spec);
  ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
  const MoeCheckpoint& moe = *recognized.moe;
  EXPECT_EQ(moe.family, "deepseek_v4");
  EXPECT_EQ(moe.experts_module, "ffn.experts");
  EXPECT_EQ(moe.activation, "SILU");
  EXPECT_EQ(moe.hidden, 256);
  EXPECT_EQ(moe.intermediate, 192);
  EXPECT_EQ(moe.experts, 3);
  EXPECT_EQ(moe.block_size, 32);
  EXPECT_EQ(moe.hidden_layers, 2);
  EXPECT_EQ(moe.mtp_layers, 1);
  EXPECT_TRUE(moe.mtp_status.ok()) << moe.mtp_status;
  ASSERT_EQ(moe.layers.size(), 3u);
  EXPECT_EQ(moe.layers[1].module, "layers.1.ffn.experts");
  EXPECT_FALSE(moe.layers[1].is_mtp);
  EXPECT_EQ(moe.layers[2].module, "mtp.0.ffn.experts");
  EXPECT_EQ(moe.layers[2].layer, 2);
  EXPECT_TRUE(moe.layers[2].is_mtp);
}

TEST(RecognizeFamily, OtherTensorsKnowWhetherTheyAreMtp) {
  for (const bool mtp_as_layers : {false, true}) {
    CheckpointSpec spec = SmallSpec();
    spec.mtp_as_layers = mtp_as_layers;
    const Recognized recognized(spec);
    ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
    std::map<std::string, bool> is_mtp;
    for (const OtherTensor& other : recognized.moe->others) {
      is_mtp[recognized.Name(other.tensor)] = other.is_mtp;
    }
    const std::string block = mtp_as_layers ? "layers.2." : "mtp.0.";
    for (const char* name :
         {"enorm.weight", "attn.wq_a.scale", "ffn.shared_experts.w2.weight", "ffn.gate.bias"}) {
      ASSERT_EQ(is_mtp.count(block + name), 1u) << name;
      EXPECT_TRUE(is_mtp[block + name]) << name;
    }
    // Shared experts are FP8 of another geometry and stay what they are; the hash table is I64.
    for (const char* name :
         {"embed.weight", "layers.1.attn.wq_a.scale", "scalar", "nothing",
          "layers.0.ffn.gate.tid2eid", "layers.0.ffn.shared_experts.w1.weight"}) {
      ASSERT_EQ(is_mtp.count(name), 1u) << name;
      EXPECT_FALSE(is_mtp[name]) << name;
    }
  }
}

TEST(RecognizeFamily, DtypesOfTheSameBytesAreEqual) {
  for (const Dtype weight : {Dtype::kI8, Dtype::kU8, Dtype::kF4}) {
    for (const Dtype scale : {Dtype::kF8E8M0, Dtype::kU8}) {
      SCOPED_TRACE(absl::StrCat(DtypeName(weight), " ", DtypeName(scale)));
      CheckpointSpec spec = SmallSpec();
      spec.weight_dtype = weight;
      spec.scale_dtype = scale;
      const Recognized recognized(spec);
      ExpectComplete(recognized, spec);
      EXPECT_EQ(recognized.moe->hidden, 256);
      EXPECT_EQ(recognized.moe->intermediate, 192);
    }
  }
}

TEST(RecognizeFamily, LayerNumbersDoNotDependOnThePrefix) {
  for (const char* prefix : {"", "model.", "model.language_model.", "language_model.model."}) {
    for (const bool mtp_as_layers : {false, true}) {
      SCOPED_TRACE(absl::StrCat("'", prefix, "' ", mtp_as_layers));
      CheckpointSpec spec = SmallSpec();
      spec.prefix = prefix;
      spec.mtp_as_layers = mtp_as_layers;
      const Recognized recognized(spec);
      ExpectComplete(recognized, spec);
      EXPECT_TRUE(recognized.moe->mtp_status.ok()) << recognized.moe->mtp_status;
      EXPECT_EQ(recognized.moe->layers[2].module,
                absl::StrCat(prefix, mtp_as_layers ? "layers.2" : "mtp.0", ".ffn.experts"));
    }
  }
}

// Layer numbers of any width: text order is not number order.
TEST(RecognizeFamily, MtpFollowsTheLastLayerWhateverItsNumber) {
  CheckpointSpec spec = SmallSpec();
  spec.hidden = 64;
  spec.intermediate = 64;
  spec.experts = 11;
  spec.layers = 78;
  spec.mtp_layers = 2;
  spec.mtp_as_layers = true;
  const Recognized recognized(spec);
  ExpectComplete(recognized, spec);
  ASSERT_EQ(recognized.moe->layers.size(), 80u);
  for (int32_t i = 0; i < 80; ++i) {
    EXPECT_EQ(recognized.moe->layers[static_cast<size_t>(i)].layer, i);
    EXPECT_EQ(recognized.moe->layers[static_cast<size_t>(i)].is_mtp, i >= 78);
  }
}

TEST(RecognizeFamily, ScalesMayHaveTheNamesOfConvertedCopies) {
  for (const char* suffix : {".weight_scale", ".weight_scale_inv"}) {
    CheckpointSpec spec = SmallSpec();
    spec.edit = [suffix](TestTensor& tensor) {
      absl::string_view name = tensor.name;
      if (tensor.place && absl::ConsumeSuffix(&name, ".scale")) {
        tensor.name = absl::StrCat(name, suffix);
      }
      return true;
    };
    ExpectComplete(Recognized(spec), spec);
  }
}

TEST(RecognizeFamily, ActivationComesFromConfig) {
  const struct {
    const char* hidden_act;
    const char* activation;
  } kCases[] = {{R"("silu")", "SILU"}, {R"("swish")", "SILU"}, {"", "SILU"}, {"null", "SILU"}};
  for (const auto& c : kCases) {
    CheckpointSpec spec = SmallSpec();
    spec.config["hidden_act"] = c.hidden_act;
    const Recognized recognized(spec);
    ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
    EXPECT_EQ(recognized.moe->activation, c.activation);
  }
}

TEST(RecognizeFamily, ModelTypeMayBeThatOfTheTextModel) {
  CheckpointSpec spec = SmallSpec();
  spec.config["model_type"] = R"("some_vision_model")";
  spec.config["text_config"] = R"({"model_type":"deepseek_v4"})";
  const Recognized recognized(spec);
  EXPECT_TRUE(recognized.moe.ok()) << recognized.moe.status();
}

TEST(RecognizeFamily, ConfigMustAgreeWithTheTensors) {
  const struct {
    const char* key;
    const char* value;
    absl::StatusCode code;
    std::vector<std::string> parts;
  } kCases[] = {
      {"model_type",
       R"("deepseek_v2")",
       absl::StatusCode::kFailedPrecondition,
       {"unknown model family", "'deepseek_v2'", "looked for deepseek_v4",
        "layers.L.ffn.experts.X.w1.weight"}},
      {"model_type", "", absl::StatusCode::kFailedPrecondition, {"no model_type", "deepseek_v4"}},
      {"model_type", "4", absl::StatusCode::kInvalidArgument, {"model_type: want a string"}},
      {"hidden_size",
       "512",
       absl::StatusCode::kInvalidArgument,
       {"layers.0.ffn.experts.0.w1.weight: I8 [192,128]", "hidden 256", "hidden_size 512"}},
      {"hidden_size", "", absl::StatusCode::kInvalidArgument, {"no hidden_size"}},
      {"hidden_size",
       "256.0",
       absl::StatusCode::kInvalidArgument,
       {"hidden_size: want an integer"}},
      {"moe_intermediate_size",
       "96",
       absl::StatusCode::kInvalidArgument,
       {"layers.0.ffn.experts.0.w1.weight: I8 [192,128]", "intermediate 192",
        "moe_intermediate_size 96"}},
      {"n_routed_experts",
       "4",
       absl::StatusCode::kInvalidArgument,
       {"the highest expert is 2", "n_routed_experts 4"}},
      {"n_routed_experts",
       "2",
       absl::StatusCode::kInvalidArgument,
       {"the highest expert is 2", "n_routed_experts 2"}},
      {"n_routed_experts", "0", absl::StatusCode::kInvalidArgument, {"n_routed_experts: found 0"}},
      {"n_routed_experts",
       "9000000000000000000",
       absl::StatusCode::kInvalidArgument,
       {"n_routed_experts: found 9000000000000000000"}},
      {"num_hidden_layers",
       "3",
       absl::StatusCode::kFailedPrecondition,
       {"layer 2, expert 0: no w1 weight", "tried layers.2.ffn.experts.0.w1.weight"}},
      {"num_hidden_layers",
       "99999999",
       absl::StatusCode::kFailedPrecondition,
       {"layer 2, expert 0"}},
      // Layer 1 becomes the MTP layer, of which there are two then.
      {"num_hidden_layers",
       "1",
       absl::StatusCode::kInvalidArgument,
       {"two tensors for one place: layers.1.", " and mtp.0."}},
      {"num_nextn_predict_layers",
       "0",
       absl::StatusCode::kInvalidArgument,
       {"mtp.0.", "MTP block 0", "num_nextn_predict_layers 0"}},
      {"num_nextn_predict_layers", "", absl::StatusCode::kInvalidArgument, {"MTP block 0"}},
      {"num_nextn_predict_layers", "-1", absl::StatusCode::kInvalidArgument, {"found -1"}},
      {"hidden_act",
       R"("gelu")",
       absl::StatusCode::kInvalidArgument,
       {"hidden_act: 'gelu' is not known", "silu"}},
      {"hidden_act", "1", absl::StatusCode::kInvalidArgument, {"hidden_act: want a string"}},
      {"expert_dtype",
       R"("fp8")",
       absl::StatusCode::kInvalidArgument,
       {"expert_dtype: 'fp8'", "MXFP4"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(absl::StrCat(c.key, " ", c.value));
    CheckpointSpec spec = SmallSpec();
    spec.config[c.key] = c.value;
    ExpectError(Recognized(spec).moe.status(), c.code, c.parts);
  }
}

TEST(RecognizeFamily, RefusesWrongTensors) {
  const std::string expert = "layers.1.ffn.experts.1.";
  const struct {
    const char* name;
    Edit edit;
    absl::StatusCode code;
    std::vector<std::string> parts;
  } kCases[] = {
      // Something is missing.
      {"no experts at all",
       [](TestTensor& t) { return !t.place.has_value(); },
       absl::StatusCode::kFailedPrecondition,
       {"no routed experts", "layers.0.ffn.experts.0.w1.weight"}},
      {"a weight",
       Dropping(expert + "w3.weight"),
       absl::StatusCode::kFailedPrecondition,
       {"layer 1, expert 1: no w3 weight", "tried " + expert + "w3.weight"}},
      {"a scale",
       Dropping(expert + "w2.scale"),
       absl::StatusCode::kFailedPrecondition,
       {"layer 1, expert 1: no w2 scale",
        expert + "w2.scale, " + expert + "w2.weight_scale, " + expert + "w2.weight_scale_inv"}},
      {"an expert in the middle",
       [](TestTensor& t) { return !t.place || t.place->layer != 0 || t.place->expert != 1; },
       absl::StatusCode::kFailedPrecondition,
       {"layer 0, expert 1: no w1 weight"}},
      {"the last expert of one layer",
       [](TestTensor& t) { return !t.place || t.place->layer != 0 || t.place->expert != 2; },
       absl::StatusCode::kFailedPrecondition,
       {"layer 0, expert 2: no w1 weight"}},
      {"the experts of a layer",
       [](TestTensor& t) { return !t.place || t.place->layer != 0; },
       absl::StatusCode::kFailedPrecondition,
       {"layer 0, expert 0: no w1 weight", "layers.0.ffn.experts.0.w1.weight"}},
      // Names.
      {"experts under two prefixes",
       Renaming("layers.1.", "model.layers.1."),
       absl::StatusCode::kInvalidArgument,
       {"experts under two prefixes", "layers.0.", "model.layers.1."}},
      {"a prefix that is not known",
       Renaming("layers.1.", "transformer.layers.1."),
       absl::StatusCode::kInvalidArgument,
       {"transformer.layers.1.ffn.experts", "language_model."}},
      {"a tensor that experts do not have",
       Renaming(expert + "w1.scale", expert + "w1.input_scale"),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.input_scale: not a name", "{weight,scale,weight_scale,weight_scale_inv}"}},
      {"a projection that is not known",
       Renaming(expert + "w1.", expert + "w4."),
       absl::StatusCode::kInvalidArgument,
       {expert + "w4."}},
      {"an expert with a leading zero",
       Renaming("experts.1.", "experts.01."),
       absl::StatusCode::kInvalidArgument,
       {"experts.01."}},
      {"an expert number without end",
       Renaming("experts.1.", "experts.99999999999999999999."),
       absl::StatusCode::kInvalidArgument,
       {"experts.99999999999999999999."}},
      {"a layer with a leading zero",
       Renaming("layers.1.", "layers.01."),
       absl::StatusCode::kInvalidArgument,
       {"layers.01."}},
      {"a layer beyond all",
       Renaming("layers.1.", "layers.7."),
       absl::StatusCode::kInvalidArgument,
       {"layers.7.", "num_hidden_layers 2"}},
      // Dtypes, each tensor by itself.
      {"BF16 weight",
       Reshaping(expert + "w1.weight", Dtype::kBF16, {192, 256}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.weight: BF16 [192,256]: want MXFP4: I8, U8, F4"}},
      {"FP8 weight",
       Reshaping(expert + "w2.weight", Dtype::kF8E4M3, {256, 192}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w2.weight: F8_E4M3 [256,192]"}},
      {"BF16 everywhere",
       [](TestTensor& t) {
         if (t.place) t.dtype = Dtype::kBF16;
         return !t.place || static_cast<int>(t.place->kind) % 2 == 0;
       },
       absl::StatusCode::kInvalidArgument,
       {"layers.0.ffn.experts.0.w1.weight: BF16 [192,128]: want MXFP4"}},
      {"F32 scale",
       Reshaping(expert + "w1.scale", Dtype::kF32, {192, 8}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.scale: F32 [192,8]: want E8M0 scales: F8_E8M0, U8"}},
      // Shapes.
      {"3-D weight",
       Reshaping(expert + "w1.weight", Dtype::kI8, {1, 192, 128}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.weight: I8 [1,192,128]: want two"}},
      {"scalar scale",
       Reshaping(expert + "w1.scale", Dtype::kF8E8M0, {}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.scale: F8_E8M0 []: want two"}},
      {"half the rows",
       Reshaping(expert + "w3.weight", Dtype::kI8, {96, 128}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w3.weight: I8 [96,128]: want [192,128] for hidden 256 and intermediate 192"}},
      {"F4 that counts bytes",
       Reshaping(expert + "w1.weight", Dtype::kF4, {192, 128}),
       absl::StatusCode::kInvalidArgument,
       {"F4 [192,128]: want [192,256]"}},
      {"down with half the intermediate size",
       Reshaping("layers.0.ffn.experts.0.w2.weight", Dtype::kI8, {256, 48}),
       absl::StatusCode::kInvalidArgument,
       {"layers.0.ffn.experts.0.w2.weight: I8 [256,48]: want [256,96]"}},
      {"scales for groups of 128",
       Reshaping(expert + "w1.scale", Dtype::kF8E8M0, {192, 2}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.scale: 2 columns, want 8: one scale for 32 of 256 elements, not for 128"}},
      {"scales of up unlike those of gate",
       Reshaping(expert + "w3.scale", Dtype::kF8E8M0, {192, 4}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w3.scale: 4 columns, want 8", "not for 64"}},
      {"no scale columns",
       Reshaping(expert + "w1.scale", Dtype::kU8, {192, 0}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w1.scale: 0 columns, want 8"}},
      {"padded scale columns",
       Reshaping(expert + "w2.scale", Dtype::kF8E8M0, {256, 8}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w2.scale: 8 columns, want 6"}},
      {"scale rows",
       Reshaping(expert + "w2.scale", Dtype::kF8E8M0, {192, 6}),
       absl::StatusCode::kInvalidArgument,
       {expert + "w2.scale: 192 rows, want 256"}},
      {"an empty first weight",
       Reshaping("layers.0.ffn.experts.0.w1.weight", Dtype::kI8, {0, 9223372036854775807}),
       absl::StatusCode::kInvalidArgument,
       {"is empty"}},
      {"rows that are no whole block",
       Reshaping("layers.0.ffn.experts.0.w1.weight", Dtype::kI8, {200, 128}),
       absl::StatusCode::kInvalidArgument,
       {"200 rows, want a multiple of 32"}},
      {"columns that are no whole block",
       Reshaping("layers.0.ffn.experts.0.w1.weight", Dtype::kI8, {192, 120}),
       absl::StatusCode::kInvalidArgument,
       {"240 elements a row, want a multiple of 32"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    CheckpointSpec spec = SmallSpec();
    spec.edit = c.edit;
    ExpectError(Recognized(spec).moe.status(), c.code, c.parts);
  }
}

// The numbers of the report: scales for groups of 128 would have 56 columns, those for 32 have 224.
TEST(RecognizeFamily, GroupSizeComesFromShapes) {
  CheckpointSpec spec = SmallSpec();
  spec.hidden = 7168;
  spec.edit = Reshaping("layers.0.ffn.experts.0.w1.scale", Dtype::kF8E8M0, {192, 56});
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"layers.0.ffn.experts.0.w1.scale: 56 columns, want 224"});
}

TEST(RecognizeFamily, TwoNamesForOneScaleAreRefused) {
  CheckpointSpec spec = SmallSpec();
  spec.extra = {{.name = "layers.0.ffn.experts.0.w1.weight_scale",
                 .dtype = Dtype::kF8E8M0,
                 .shape = {192, 8},
                 .place = std::nullopt,
                 .file = 1}};
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"two tensors for one place: layers.0.ffn.experts.0.w1.scale and "
               "layers.0.ffn.experts.0.w1.weight_scale"});
}

TEST(RecognizeFamily, SurplusExpertsOfOneLayerAreRefused) {
  CheckpointSpec spec = SmallSpec();
  spec.extra = {{.name = "layers.1.ffn.experts.3.w1.weight",
                 .dtype = Dtype::kI8,
                 .shape = {192, 128},
                 .place = std::nullopt,
                 .file = 1}};
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"layers.1.ffn.experts.3.w1.weight", "n_routed_experts 3"});
}

TEST(RecognizeFamily, StaleIndexEntryOfAnExpertNamesTheFile) {
  TempDir directory;
  CheckpointSpec spec = SmallSpec();
  spec.sparse = true;
  const std::string stale = "layers.0.ffn.experts.2.w3.scale";
  // The index of the whole checkpoint, over files without one of its tensors.
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  const auto store = OpenStore(directory.path(), {});
  ASSERT_TRUE(store.ok());
  const auto index = (*store)->Get("model.safetensors.index.json", 1 << 20);
  ASSERT_TRUE(index.ok());
  spec.edit = Dropping(stale);
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  ASSERT_TRUE((*store)->Put("model.safetensors.index.json", *index, {}).ok());
  const auto checkpoint = ReadCheckpoint(**store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->stale().size(), 1u);
  ExpectError(RecognizeFamily(*checkpoint).status(), absl::StatusCode::kFailedPrecondition,
              {stale + ": the index places it in " + checkpoint->stale()[0].file});
}

TEST(RecognizeFamily, BadMtpLayersAreNoneAndSayWhy) {
  const struct {
    const char* name;
    Edit edit;
    absl::StatusCode code;
    std::vector<std::string> parts;
  } kCases[] = {
      {"all absent",
       [](TestTensor& t) { return !absl::StartsWith(t.name, "mtp."); },
       absl::StatusCode::kFailedPrecondition,
       {"layer 2, expert 0: no w1 weight; tried mtp.0.ffn.experts.0.w1.weight"}},
      {"one scale absent",
       Dropping("mtp.0.ffn.experts.1.w2.scale"),
       absl::StatusCode::kFailedPrecondition,
       {"layer 2, expert 1: no w2 scale"}},
      {"BF16",
       [](TestTensor& t) {
         if (!t.place || t.place->layer < 2) return true;
         t.dtype = Dtype::kBF16;
         return static_cast<int>(t.place->kind) % 2 == 0;
       },
       absl::StatusCode::kInvalidArgument,
       {"mtp.0.ffn.experts.0.w1.weight: BF16 [192,128]: want MXFP4"}},
      {"other names",
       Renaming("mtp.0.ffn.experts.1.w1.scale", "mtp.0.ffn.experts.1.w1.bias"),
       absl::StatusCode::kInvalidArgument,
       {"mtp.0.ffn.experts.1.w1.bias: not a name"}},
      {"another intermediate size",
       Reshaping("mtp.0.ffn.experts.0.w1.weight", Dtype::kI8, {96, 128}),
       absl::StatusCode::kInvalidArgument,
       {"mtp.0.ffn.experts.0.w1.weight: I8 [96,128]"}},
      {"too many experts",
       Renaming("mtp.0.ffn.experts.2.", "mtp.0.ffn.experts.3."),
       absl::StatusCode::kFailedPrecondition,
       {"layer 2, expert 2: no w1 weight"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    CheckpointSpec spec = SmallSpec();
    spec.edit = c.edit;
    const Recognized recognized(spec);
    ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
    ExpectError(recognized.moe->mtp_status, c.code, c.parts);
    EXPECT_EQ(recognized.moe->mtp_layers, 0);
    EXPECT_EQ(recognized.moe->layers.size(), 2u);
    ExpectComplete(recognized, spec);
    const bool mtp_experts_are_mtp = std::all_of(
        recognized.moe->others.begin(), recognized.moe->others.end(), [&](const OtherTensor& o) {
          return o.is_mtp == absl::StartsWith(recognized.Name(o.tensor), "mtp.");
        });
    EXPECT_TRUE(mtp_experts_are_mtp);
  }
}

TEST(RecognizeFamily, CheckpointsWithoutMtpNeedNone) {
  CheckpointSpec spec = SmallSpec();
  spec.mtp_layers = 0;
  for (const char* value : {"0", ""}) {
    spec.config["num_nextn_predict_layers"] = value;
    const Recognized recognized(spec);
    ExpectComplete(recognized, spec);
    EXPECT_TRUE(recognized.moe->mtp_status.ok()) << recognized.moe->mtp_status;
    EXPECT_EQ(recognized.moe->mtp_layers, 0);
  }
}

struct FamilyCase {
  TestFamily family;
  const char* id;
  const char* format;
  const char* activation;
  const char* engine_prefix;
  int64_t block_size;
};

constexpr FamilyCase kFamilies[] = {
    {TestFamily::kDeepSeekV4, "deepseek_v4", "mxfp4", "SILU", "model.", 32},
    {TestFamily::kDeepSeekV4Fp8, "deepseek_v4", "fp8-block-e8m0", "SILU", "model.", 128},
    {TestFamily::kDeepSeekV3Fp8, "deepseek_v3", "fp8-block-f32", "SILU", "model.", 128},
    {TestFamily::kDeepSeekV3Quark, "deepseek_v3", "mxfp4-quark", "SILU", "model.", 32},
    {TestFamily::kQwen3Bf16, "qwen3_moe", "bf16", "SILU", "model.", 0},
    {TestFamily::kQwen3Quark, "qwen3_moe", "mxfp4-quark", "SILU", "model.", 32},
    {TestFamily::kMixtral, "mixtral", "bf16", "SILU", "model.", 0},
    {TestFamily::kKimiK3, "kimi_k3", "mxfp4-compressed-tensors", "SITU", "language_model.model.",
     32},
    {TestFamily::kGptOss, "gpt_oss", "mxfp4-gpt-oss", "SWIGLUOAI", "model.", 32},
};

TEST(RecognizeFamily, EveryFamilyIsKnownByItsModelTypeAndItsTensors) {
  for (const FamilyCase& c : kFamilies) {
    SCOPED_TRACE(c.format);
    const CheckpointSpec spec = FamilySpec(c.family);
    const Recognized recognized(spec);
    ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
    const MoeCheckpoint& moe = *recognized.moe;
    EXPECT_EQ(moe.family, c.id);
    EXPECT_EQ(std::string(moe.format->id), c.format);
    EXPECT_EQ(moe.activation, c.activation);
    EXPECT_EQ(moe.engine_prefix, c.engine_prefix);
    EXPECT_EQ(moe.block_size, c.block_size);
    EXPECT_EQ(moe.hidden, spec.hidden);
    EXPECT_EQ(moe.intermediate, spec.intermediate);
    EXPECT_EQ(moe.experts, spec.experts);
    EXPECT_EQ(moe.mtp_layers, spec.mtp_layers);
    EXPECT_TRUE(moe.mtp_status.ok()) << moe.mtp_status;
    // Dense layers have no experts, and every tensor is in one place.
    ASSERT_EQ(static_cast<int64_t>(moe.layers.size()),
              spec.layers - spec.dense_layers + spec.mtp_layers);
    EXPECT_EQ(moe.layers.front().layer, spec.dense_layers);
    size_t seen = moe.others.size();
    for (const MoeLayer& layer : moe.layers) seen += layer.Tensors().size();
    EXPECT_EQ(static_cast<int64_t>(seen), recognized.checkpoint->tensors().size());
  }
}

// Each tensor is held against the format of the first expert.
TEST(RecognizeFamily, MixedFormatsAreRefusedByTensor) {
  const std::string expert = "model.layers.1.mlp.experts.1.";
  const struct {
    TestFamily family;
    Edit edit;
    std::vector<std::string> parts;
  } kCases[] = {
      {TestFamily::kDeepSeekV3Fp8,
       Reshaping(expert + "up_proj.weight", Dtype::kBF16, {256, 256}),
       {expert + "up_proj.weight: BF16 [256,256]: want FP8 in blocks: F8_E4M3"}},
      {TestFamily::kQwen3Bf16,
       Reshaping(expert + "up_proj.weight", Dtype::kF8E4M3, {256, 256}),
       {expert + "up_proj.weight: F8_E4M3 [256,256]: want BF16: BF16"}},
      {TestFamily::kDeepSeekV3Fp8,
       Reshaping(expert + "up_proj.weight_scale_inv", Dtype::kF32, {256, 1}),
       {"1 columns, want 2: one scale for 128 of 256 elements"}},
      {TestFamily::kDeepSeekV3Fp8,
       Reshaping(expert + "down_proj.weight_scale_inv", Dtype::kBF16, {2, 2}),
       {"want F32 scales: F32"}},
      {TestFamily::kDeepSeekV3Fp8,
       [](TestTensor& t) {
         if (t.place) t.dtype = Dtype::kI32;
         return true;
       },
       {"gate_proj.weight: I32", "want FP8 in blocks: F8_E4M3 or MXFP4: U8, I8, F4 or BF16: BF16"}},
      {TestFamily::kKimiK3,
       [](TestTensor& t) {
         if (t.place && t.place->kind == kUpWeight) t.dtype = Dtype::kI32;
         return true;
       },
       {"w3.weight_packed: I32", "want MXFP4: U8"}},
      {TestFamily::kGptOss,
       Reshaping("model.layers.1.mlp.experts.gate_up_proj_blocks", Dtype::kU8, {4, 512, 4, 32}),
       {"gate_up_proj_blocks: U8 [4,512,4,32]: want blocks of 16 bytes"}},
      {TestFamily::kGptOss,
       Reshaping("model.layers.1.mlp.experts.down_proj_blocks", Dtype::kU8, {4, 256, 4, 16}),
       {"down_proj_blocks: U8 [4,256,4,16]: want [256,128]", "intermediate 256"}},
      {TestFamily::kGptOss,
       Reshaping("model.layers.1.mlp.experts.down_proj_bias", Dtype::kF32, {4, 256}),
       {"down_proj_bias: F32 [4,256]: want BF16"}},
      {TestFamily::kGptOss,
       Reshaping("model.layers.1.mlp.experts.gate_up_proj_scales", Dtype::kU8, {3, 512, 8}),
       {"gate_up_proj_scales", "num_local_experts 4"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.parts.front());
    CheckpointSpec spec = FamilySpec(c.family);
    spec.dense_layers = 0;
    spec.edit = c.edit;
    ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument, c.parts);
  }
}

TEST(RecognizeFamily, AFormatWithoutScalesRefusesThem) {
  CheckpointSpec spec = FamilySpec(TestFamily::kQwen3Bf16);
  spec.extra = {{.name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale",
                 .dtype = Dtype::kF32,
                 .shape = {1},
                 .place = std::nullopt,
                 .file = 1}};
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"gate_proj.weight_scale: F32 [1]: is a scale, but the routed experts are BF16"});
}

TEST(RecognizeFamily, ExpertsOfALayerThatConfigCallsDenseAreRefused) {
  for (const TestFamily family : {TestFamily::kDeepSeekV3Fp8, TestFamily::kQwen3Bf16}) {
    CheckpointSpec spec = FamilySpec(family);
    spec.config["first_k_dense_replace"] = "2";
    spec.config["mlp_only_layers"] = "[0,1]";
    ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
                {"model.layers.1.mlp.experts.0.gate_proj.weight", "layer 1", "dense"});
  }
  CheckpointSpec spec = FamilySpec(TestFamily::kQwen3Bf16);
  spec.config["mlp_only_layers"] = R"(["0"])";
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"mlp_only_layers: want a list of layer numbers"});
}

TEST(RecognizeFamily, ALayerThatIsNotDenseMustHaveExperts) {
  CheckpointSpec spec = FamilySpec(TestFamily::kDeepSeekV3Quark);
  spec.config["first_k_dense_replace"] = "0";
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kFailedPrecondition,
              {"layer 0, expert 0: no gate_proj weight"});
}

// Scalars of all experts stay where they are, for all ranks.
TEST(RecognizeFamily, ScalarsOfExpertsAreCarried) {
  CheckpointSpec spec = FamilySpec(TestFamily::kDeepSeekV3Quark);
  const std::string name = "model.layers.1.mlp.experts.3.down_proj.input_scale";
  spec.extra = {
      {.name = name, .dtype = Dtype::kF32, .shape = {}, .place = std::nullopt, .file = 1}};
  const Recognized recognized(spec);
  ASSERT_TRUE(recognized.moe.ok()) << recognized.moe.status();
  EXPECT_TRUE(std::any_of(recognized.moe->others.begin(), recognized.moe->others.end(),
                          [&](const OtherTensor& o) { return recognized.Name(o.tensor) == name; }));
  spec.extra[0].shape = {2};
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {name + ": not a name"});
}

TEST(RecognizeFamily, ExpertDtypeOfConfigMustBeThatOfTheTensors) {
  CheckpointSpec spec = FamilySpec(TestFamily::kDeepSeekV4Fp8);
  spec.config["expert_dtype"] = R"("fp4")";
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kInvalidArgument,
              {"expert_dtype: 'fp4'", "FP8 in blocks ('fp8')"});
}

TEST(RecognizeFamily, AMissingStackedTensorIsNamed) {
  CheckpointSpec spec = FamilySpec(TestFamily::kGptOss);
  spec.edit = Dropping("model.layers.1.mlp.experts.gate_up_proj_bias");
  ExpectError(Recognized(spec).moe.status(), absl::StatusCode::kFailedPrecondition,
              {"layer 1: no model.layers.1.mlp.experts.gate_up_proj_bias"});
}

}  // namespace
}  // namespace shardprep
