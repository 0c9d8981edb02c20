#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/alignment_policy.h"
#include "workers/default_alignment_policy.h"
#include "workers/policy_file.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

const AlignmentPolicy& Policy() {
  static const AlignmentPolicy& policy = *new AlignmentPolicy(DefaultAlignmentPolicy().policy);
  return policy;
}

// The compiled-in table with one piece of text replaced, which must be there.
std::string Edited(const std::string& from, const std::string& to) {
  const std::string text = kDefaultAlignmentPolicy;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return std::string(text).replace(at, from.size(), to);
}

TEST(AlignmentPolicy, EveryRowAnswersForItsBackends) {
  struct Case {
    const char* backend;
    const char* activation;
    const char* architecture;
    const char* rule;
    int64_t intermediate, hidden;
  };
  const Case cases[] = {
      {"AITER_MXFP4_BF16", "SILU", "gfx950", "aiter-mxfp4-bf16/silu/128", 128, 128},
      {"AITER_MXFP4_BF16", "SILU", "gfx1250", "aiter-mxfp4-bf16/silu/128", 128, 128},
      {"AITER_MXFP4_BF16", "SITU", "gfx950", "aiter-mxfp4-bf16/situ/128", 128, 128},
      {"AITER_MXFP4_BF16", "SWIGLUOAI", "gfx950", "aiter/256", 256, 256},
      {"AITER_MXFP4_BF16", "GELU", "gfx950", "aiter/256", 256, 256},
      {"AITER_MXFP4_FP8", "SILU", "gfx950", "aiter/256", 256, 256},
      {"AITER_MXFP4_MXFP4", "SILU", "gfx950", "aiter/256", 256, 256},
      {"AITER_TRITON_MXFP4_BF16", "SILU", "gfx942", "aiter/256", 256, 256},
      {"TRITON", "SILU", "gfx942", "rocm/generic/256", 256, 256},
      {"TRITON_UNFUSED", "SILU", "gfx950", "rocm/generic/256", 256, 256},
      {"TRITON", "SILU", "sm_90", "generic/64-1", 64, 1},
      {"TRITON_UNFUSED", "SILU", "sm_100", "generic/64-1", 64, 1},
      {"HUMMING", "SILU", "sm_90", "generic/64-1", 64, 1},
      {"XPU", "SILU", "xe2", "generic/64-1", 64, 1},
      {"EMULATION", "GELU", "gfx950", "emulation/32", 32, 32},
      {"CPU", "SILU", "x86_64", "cpu/32", 32, 32},
      {"DEEPGEMM_MXFP4", "SILU", "sm_100", "deepgemm-mxfp4/128", 128, 128},
      {"FLASHINFER_CUTLASS_MXFP4_BF16", "SILU", "sm_90", "flashinfer-cutlass/128", 128, 128},
      {"FLASHINFER_CUTLASS_MXFP4_MXFP8", "SILU", "sm_90", "flashinfer-cutlass/128", 128, 128},
      {"FLASHINFER_TRTLLM_MXFP4_BF16", "SILU", "sm_100", "flashinfer-trtllm/128-256", 128, 256},
      {"FLASHINFER_TRTLLM_MXFP4_MXFP8", "SILU", "sm_100", "flashinfer-trtllm/128-256", 128, 256},
      {"MARLIN", "SILU", "sm_90", "marlin/128-256", 128, 256},
      {"MARLIN", "SILU", "gfx950", "marlin/128-256", 128, 256},
      {"BATCHED_MARLIN", "SILU", "sm_90", "marlin/128-256", 128, 256},
      {"B12X_MXFP4_BF16", "SILU", "sm_120", "b12x/1", 1, 1},
      {"B12X_MXFP4_MXFP8", "SWIGLUOAI", "sm_120", "b12x/1", 1, 1},
      {"AITER_FP8_BLOCK", "SILU", "gfx950", "fp8-block/128", 128, 1},
      {"TRITON_FP8_BLOCK", "SILU", "sm_90", "fp8-block/128", 128, 1},
      {"AITER_BF16", "SILU", "gfx942", "bf16/1", 1, 1},
      {"TRITON_BF16", "SILU", "gfx950", "bf16/1", 1, 1},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(absl::StrCat(one.backend, " ", one.activation, " ", one.architecture));
    const AlignmentDecision decision =
        Policy().Decide(one.backend, one.activation, one.architecture).value();
    EXPECT_EQ(decision.rule_id, one.rule);
    EXPECT_EQ(decision.intermediate, Alignment(one.intermediate));
    EXPECT_EQ(decision.hidden, Alignment(one.hidden));
    EXPECT_EQ(decision.backend, one.backend);
    EXPECT_EQ(decision.activation, one.activation);
    EXPECT_FALSE(decision.source.empty());
  }
}

TEST(AlignmentPolicy, NativeWidthSurvivesUnderTheBackendsOwnRule) {
  struct Case {
    const char* backend;
    int64_t ranks, padded;
  };
  constexpr int64_t kIntermediate = 3072;
  const Case cases[] = {
      {"AITER_MXFP4_BF16", 8, 384},  {"AITER_MXFP4_MXFP4", 8, 512}, {"AITER_MXFP4_FP8", 8, 512},
      {"AITER_MXFP4_BF16", 16, 256}, {"AITER_MXFP4_BF16", 32, 128}, {"AITER_MXFP4_MXFP4", 32, 256},
  };
  for (const Case& one : cases) {
    const AlignmentDecision decision = Policy().Decide(one.backend, "SILU", "gfx950").value();
    const NativeExtent native(kIntermediate / one.ranks);
    const PaddedExtent padded = RoundUp(native, decision.intermediate);
    EXPECT_EQ(padded, PaddedExtent(one.padded)) << one.backend << " T=" << one.ranks;
    EXPECT_EQ(RoundUp(NativeExtent(7168), decision.hidden), PaddedExtent(7168));
    EXPECT_TRUE(CheckWidth(decision, native, padded).ok());
  }
}

TEST(AlignmentPolicy, GenericRuleIsThePlatforms) {
  const AlignmentDecision rocm = Policy().GenericRule("gfx950").value();
  EXPECT_EQ(rocm.rule_id, "rocm/generic/256");
  EXPECT_EQ(rocm.intermediate, Alignment(256));
  EXPECT_EQ(rocm.hidden, Alignment(256));
  const AlignmentDecision elsewhere = Policy().GenericRule("sm_90").value();
  EXPECT_EQ(elsewhere.rule_id, "generic/64-1");
  EXPECT_EQ(elsewhere.intermediate, Alignment(64));
  EXPECT_EQ(elsewhere.hidden, Alignment(1));
  EXPECT_EQ(Policy().GenericRule("h100").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(AlignmentPolicy, MisspeltNamesDoNotFallThrough) {
  struct Case {
    const char* backend;
    const char* activation;
    const char* architecture;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"AITER_MXFP4_BF61", "SILU", "gfx950", {"backend 'AITER_MXFP4_BF61'", "AITER_MXFP4_BF16"}},
      {"aiter_mxfp4_bf16", "SILU", "gfx950", {"backend"}},
      {"AUTO", "SILU", "gfx950", {"backend 'AUTO'"}},
      {"*", "SILU", "gfx950", {"backend '*'"}},
      {"", "SILU", "gfx950", {"backend ''"}},
      {"TRITON", "SWISH", "gfx950", {"activation 'SWISH'", "SILU", "SITU", "SWIGLUOAI", "GELU"}},
      {"TRITON", "SILU", "gxf950", {"architecture 'gxf950'", "gfx*", "sm*"}},
      {"TRITON", "SILU", "", {"architecture ''"}},
  };
  for (const Case& one : cases) {
    const absl::Status status =
        Policy().Decide(one.backend, one.activation, one.architecture).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& part : one.parts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

TEST(AlignmentPolicy, AReplacedTableCannotGiveAWidthThatComputesWrongNumbers) {
  const std::string text = absl::StrReplaceAll(
      kDefaultAlignmentPolicy, {{"\"intermediate\": 256", "\"intermediate\": 128"}});
  const AlignmentPolicy policy = ParseAlignmentPolicy(text).value().policy;
  struct Case {
    const char* backend;
    const char* activation;
    bool refused;
  };
  const Case cases[] = {
      {"AITER_MXFP4_MXFP4", "SILU", true},     {"AITER_MXFP4_MXFP4", "SWIGLUOAI", true},
      {"AITER_MXFP4_BF16", "SWIGLUOAI", true}, {"AITER_MXFP4_BF16", "SILU", false},
      {"AITER_MXFP4_BF16", "SITU", false},     {"AITER_MXFP4_FP8", "SILU", false},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(absl::StrCat(one.backend, " ", one.activation));
    const AlignmentDecision decision = policy.Decide(one.backend, one.activation, "gfx950").value();
    ASSERT_EQ(decision.intermediate, Alignment(128));
    for (const int64_t native : {384, 512}) {
      const absl::Status status = CheckWidth(decision, NativeExtent(native), PaddedExtent(native));
      EXPECT_EQ(status.ok(), !one.refused);
      if (!one.refused) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr("ROCm/aiter #5233"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("alignment 128"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("256"));
    }
  }
}

TEST(AlignmentPolicy, APaddedWidthThatIsNotTheRulesIsRefused) {
  const AlignmentDecision decision = Policy().Decide("AITER_MXFP4_BF16", "SILU", "gfx950").value();
  const absl::Status status = CheckWidth(decision, NativeExtent(384), PaddedExtent(512));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("padded width 512 of native width 384"));
}

TEST(AlignmentPolicy, ProfilesAreThoseThatTheBackendReads) {
  constexpr ProfileId kSep = ProfileId::kAiterSeparated;
  constexpr ProfileId kInt = ProfileId::kAiterInterleaved;
  constexpr ProfileId kGfx1250 = ProfileId::kAiterGfx1250;
  struct Case {
    const char* backend;
    const char* activation;
    const char* architecture;
    std::vector<ProfileId> kernel_ready;
  };
  const Case cases[] = {
      {"AITER_MXFP4_BF16", "SILU", "gfx950", {kSep, kInt}},
      {"AITER_MXFP4_BF16", "SITU", "gfx950", {kSep}},
      {"AITER_MXFP4_BF16", "SWIGLUOAI", "gfx950", {kInt}},
      {"AITER_MXFP4_BF16", "GELU", "gfx950", {}},
      {"AITER_MXFP4_BF16", "SILU", "gfx1250", {kGfx1250}},
      {"AITER_MXFP4_BF16", "SWIGLUOAI", "gfx1250", {kGfx1250}},
      {"AITER_MXFP4_BF16", "SILU", "gfx942", {}},
      {"AITER_MXFP4_MXFP4", "SILU", "gfx950", {kSep}},
      {"AITER_MXFP4_MXFP4", "SWIGLUOAI", "gfx950", {}},
      {"AITER_MXFP4_MXFP4", "SILU", "gfx1250", {}},
      {"AITER_MXFP4_FP8", "SILU", "gfx950", {}},
      {"TRITON_UNFUSED", "SILU", "gfx950", {}},
      {"MARLIN", "SILU", "sm_90", {}},
      {"AITER_FP8_BLOCK", "SILU", "gfx950", {kSep}},
      {"AITER_FP8_BLOCK", "SILU", "gfx942", {}},
      {"AITER_BF16", "SILU", "gfx942", {kSep}},
      {"TRITON_BF16", "SILU", "gfx950", {}},
  };
  for (const Case& one : cases) {
    for (const LayoutProfile& profile : AllProfiles()) {
      SCOPED_TRACE(
          absl::StrCat(one.backend, " ", one.activation, " ", one.architecture, " ", profile.name));
      bool want = profile.id == ProfileId::kLogical;
      for (const ProfileId id : one.kernel_ready) want = want || id == profile.id;
      const absl::Status status =
          Policy().CheckProfile(one.backend, one.activation, one.architecture, profile.id);
      EXPECT_EQ(status.ok(), want) << status;
      if (want) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr("logical"));
      for (const ProfileId id : one.kernel_ready) {
        EXPECT_THAT(std::string(status.message()), HasSubstr(GetProfile(id).name));
      }
    }
  }
  EXPECT_EQ(Policy().CheckProfile("NOPE", "SILU", "gfx950", kSep).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(AlignmentPolicy, MinimumAiterReleaseFollowsProfileAndWidth) {
  struct Case {
    ProfileId profile;
    int64_t native, padded;
    const char* version;
  };
  const Case cases[] = {
      {ProfileId::kAiterSeparated, 384, 384, "0.1.16"},
      {ProfileId::kAiterSeparated, 512, 512, ""},
      {ProfileId::kAiterSeparated, 192, 256, "0.1.16"},
      {ProfileId::kAiterInterleaved, 384, 384, "0.1.18"},
      {ProfileId::kAiterInterleaved, 192, 256, ""},
      {ProfileId::kAiterInterleaved, 96, 128, "0.1.18"},
      {ProfileId::kAiterGfx1250, 512, 512, "0.1.17"},
      {ProfileId::kAiterGfx1250, 384, 384, "0.1.17"},
      {ProfileId::kLogical, 384, 384, ""},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(Policy().MinimumAiterVersion(one.profile, NativeExtent(one.native),
                                           PaddedExtent(one.padded)),
              one.version)
        << GetProfile(one.profile).name << " " << one.native;
  }
}

TEST(AlignmentPolicy, TheLargestOfSeveralMinimumsCounts) {
  AlignmentPolicy policy;
  for (const char* version : {"0.1.9", "0.1.16", "0.1.16.0", "0.1"}) {
    policy.aiter_minimums.push_back(
        {ProfileId::kLogical, {"*"}, WidthKind::kPadded, 1, version, "test"});
  }
  EXPECT_EQ(policy.MinimumAiterVersion(ProfileId::kLogical, NativeExtent(1), PaddedExtent(1)),
            "0.1.16");
}

TEST(AlignmentPolicy, MinimumsOfFp4KernelsDoNotBindOthers) {
  for (const char* weights : {"fp8-block", "bf16"}) {
    EXPECT_EQ(Policy().MinimumAiterVersion(ProfileId::kAiterSeparated, NativeExtent(384),
                                           PaddedExtent(384), weights),
              "");
  }
}

TEST(AlignmentPolicy, ABackendReadsOneFormatOfWeights) {
  for (const std::string& backend : Policy().backends) {
    int formats = 0;
    for (const char* weights : {"mxfp4", "fp8-block", "bf16"}) {
      const absl::Status status = Policy().CheckWeights(backend, weights);
      formats += status.ok() ? 1 : 0;
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(formats, 1) << backend;
  }
  const absl::Status status = Policy().CheckWeights("AITER_MXFP4_BF16", "bf16");
  EXPECT_THAT(std::string(status.message()), HasSubstr("AITER_MXFP4_BF16"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("AITER_BF16, TRITON_BF16"));
  EXPECT_FALSE(Policy().CheckWeights("AITER_MXFP4_BF16", "nvfp4").ok());
}

TEST(AlignmentPolicy, AutoChoosesAmongBackendsThatReadTheWeights) {
  const struct {
    const char* architecture;
    const char* weights;
    const char* backend;
  } kCases[] = {
      {"gfx950", "mxfp4", "AITER_MXFP4_BF16"},    {"gfx942", "mxfp4", "TRITON_UNFUSED"},
      {"gfx950", "fp8-block", "AITER_FP8_BLOCK"}, {"gfx942", "bf16", "AITER_BF16"},
      {"gfx1250", "bf16", "TRITON_BF16"},         {"sm_90", "fp8-block", "TRITON_FP8_BLOCK"}};
  for (const auto& c : kCases) {
    const BackendChoice choice = Policy().ResolveBackend("AUTO", c.architecture, c.weights).value();
    EXPECT_EQ(choice.backend, c.backend) << c.architecture << " " << c.weights;
    EXPECT_TRUE(Policy().CheckWeights(choice.backend, c.weights).ok());
  }
}

TEST(AlignmentPolicy, AutoNamesABackendAndWhy) {
  const BackendChoice gfx950 = Policy().ResolveBackend("AUTO", "gfx950").value();
  EXPECT_EQ(gfx950.backend, "AITER_MXFP4_BF16");
  EXPECT_THAT(gfx950.reason, HasSubstr("#42595"));
  for (const char* architecture : {"gfx942", "gfx1250", "sm_90", "x86_64"}) {
    const BackendChoice choice = Policy().ResolveBackend("AUTO", architecture).value();
    EXPECT_EQ(choice.backend, "TRITON_UNFUSED") << architecture;
    EXPECT_FALSE(choice.reason.empty());
  }
  EXPECT_EQ(Policy().ResolveBackend("MARLIN", "gfx950").value().backend, "MARLIN");
  for (const char* backend : {"auto", "AITER", ""}) {
    EXPECT_EQ(Policy().ResolveBackend(backend, "gfx950").status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Policy().ResolveBackend("AUTO", "mi355").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PolicyFile, DigestIsOfWhatTheTableSays) {
  const PolicyFile plain = DefaultAlignmentPolicy();
  EXPECT_EQ(plain.sha256_hex.size(), 64U);
  const PolicyFile spaced =
      ParseAlignmentPolicy(absl::StrReplaceAll(kDefaultAlignmentPolicy, {{"\n", "\n  "}})).value();
  EXPECT_EQ(spaced.sha256_hex, plain.sha256_hex);
  const PolicyFile changed =
      ParseAlignmentPolicy(Edited("\"version\": 2", "\"version\": 3")).value();
  EXPECT_NE(changed.sha256_hex, plain.sha256_hex);
  EXPECT_EQ(changed.policy.version, 3);
}

TEST(PolicyFile, NoRowNamesAModel) {
  const std::string text = kDefaultAlignmentPolicy;
  for (const char* model : {"DeepSeek", "deepseek", "Kimi", "gpt-oss", "Qwen", "Mixtral"}) {
    EXPECT_EQ(text.find(model), std::string::npos) << model;
  }
}

TEST(PolicyFile, EveryMistakeIsRefusedByRowAndKey) {
  struct Case {
    std::string from, to;
    std::vector<std::string> parts;
  };
  const std::string row = "\"id\": \"cpu/32\"";
  const Case cases[] = {
      {"{\n  \"format\": 1,", "[{\n  \"format\": 1,", {"text"}},
      {"\"format\": 1", "\"format\": 2", {"root.format", "found 2, want 1"}},
      {"\"format\": 1,", "", {"root.format", "missing"}},
      {"\"format\": 1", "\"format\": 1, \"extra\": 1", {"root.extra", "unknown key"}},
      {"\"version\": 2", "\"version\": \"2\"", {"root.version", "integer"}},
      {"\"version\": 2", "\"version\": 2, \"version\": 2", {"version", "twice"}},
      {"\"version\": 2", "\"version\": 18446744073709551615", {"root.version", "integer"}},
      {"\"activations\": [\"SILU\"",
       "\"activations\": [\"SILU\", \"SILU\"",
       {"root.activations", "'SILU' appears twice"}},
      {"\"activations\": [\"SILU\"", "\"activations\": [7", {"root.activations", "string"}},
      {row, row + ", \"comment\": \"x\"", {"rows[cpu/32].comment", "unknown key"}},
      {row, row + ", \"hidden\": 32", {"hidden", "twice"}},
      {row, "\"id\": \"emulation/32\"", {"rows[emulation/32]", "twice"}},
      {row, "\"id\": \"\"", {"rows[].id"}},
      {row + ",", "", {"rows[3].id", "missing"}},
      {"\"intermediate\": 128",
       "\"intermediate\": 0",
       {"rows[aiter-mxfp4-bf16/silu/128].intermediate", "at least 1, found 0"}},
      {"\"intermediate\": 128", "\"intermediate\": -128", {"at least 1, found -128"}},
      {"\"intermediate\": 128", "\"intermediate\": 128.0", {".intermediate", "integer"}},
      {"\"intermediate\": 128,", "", {".intermediate", "missing"}},
      {"\"hidden\": 128", "\"hidden\": true", {".hidden", "integer"}},
      {"\"backends\": [\"EMULATION\"]",
       "\"backends\": [\"EMULATOR\"]",
       {"rows[emulation/32].backends", "'EMULATOR'"}},
      {"\"backends\": [\"EMULATION\"]", "\"backends\": []", {"rows[emulation/32].backends"}},
      {"\"backends\": [\"EMULATION\"]", "\"backends\": [\"*\", \"CPU\"]", {"beside other names"}},
      {"\"activations\": [\"SITU\"]", "\"activations\": [\"SITUATION\"]", {"'SITUATION'"}},
      {"\"platforms\": [\"rocm\"]", "\"platforms\": [\"rocky\"]", {"'rocky'"}},
      {"\"platforms\": [\"rocm\"]",
       "\"platforms\": \"rocm\"",
       {"rows[rocm/generic/256].platforms"}},
      {"\"prefix\": \"sm\"", "\"prefix\": \"gfx\"", {"platforms[1].prefix", "twice"}},
      {"\"padded_multiple_of\": 256",
       "\"padded_multiple_of\": 0",
       {"constraints[ck-tile-stage-2/256].padded_multiple_of"}},
      {"\"profile\": \"logical\"", "\"profile\": \"plain\"", {"profiles[6].profile", "'plain'"}},
      {"\"width\": \"native\"", "\"width\": \"wide\"", {"aiter_minimums[0].width", "'wide'"}},
      {"\"version\": \"0.1.16\"",
       "\"version\": \"0.1.16rc1\"",
       {"aiter_minimums[0].version", "0.1.16rc1"}},
      {"\"version\": \"0.1.16\"", "\"version\": \"0..16\"", {"aiter_minimums[0].version"}},
      {"\"backend\": \"TRITON_UNFUSED\"",
       "\"backend\": \"TRITON_FUSED\"",
       {"auto_backends[5].backend", "'TRITON_FUSED'"}},
      {"\"auto_backends\"", "\"auto_backend\"", {"auto_backend", "unknown key"}},
      {"\"rows\": [", "\"rows\": [7, ", {"rows[0]", "want an object"}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.to);
    const absl::Status status = ParseAlignmentPolicy(Edited(one.from, one.to)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& part : one.parts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

TEST(PolicyFile, TheLastRowMustMatchEverything) {
  const std::string text = kDefaultAlignmentPolicy;
  const size_t last = text.find("\"id\": \"generic/64-1\"");
  const size_t platforms = text.find("\"platforms\": [\"*\"]", last);
  const std::string narrowed =
      std::string(text).replace(platforms, 18, "\"platforms\": [\"cuda\"]");
  const absl::Status rows = ParseAlignmentPolicy(narrowed).status();
  EXPECT_EQ(rows.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(rows.message()), HasSubstr("rows[generic/64-1]"));

  const size_t last_auto = text.rfind("\"architectures\": [\"*\"]");
  const std::string no_auto =
      std::string(text).replace(last_auto, 22, "\"architectures\": [\"gfx942\"]");
  const absl::Status choice = ParseAlignmentPolicy(no_auto).status();
  EXPECT_EQ(choice.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(choice.message()), HasSubstr("auto_backends"));
}

TEST(PolicyFile, TextThatIsNoTableIsRefused) {
  for (const char* text : {"", "null", "7", "[]", "{", "{}", "{\"format\": 1}", "\xFF",
                           "{\"format\": \"\xC3\x28\"}"}) {
    EXPECT_EQ(ParseAlignmentPolicy(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
  EXPECT_EQ(ParseAlignmentPolicy(std::string(100000, '[')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PolicyFile, AFileReplacesTheTable) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / absl::StrCat("policy_test.", getpid());
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "policy.json").string();
  std::ofstream(path) << Edited("\"version\": 2", "\"version\": 7");
  EXPECT_EQ(ReadAlignmentPolicy(path).value().policy.version, 7);

  std::ofstream(path) << Edited("\"format\": 1", "\"format\": 9");
  const absl::Status wrong = ReadAlignmentPolicy(path).status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(wrong.message()), HasSubstr(path));

  std::ofstream(path) << std::string((1 << 20) + 1, ' ');
  EXPECT_EQ(ReadAlignmentPolicy(path).status().code(), absl::StatusCode::kResourceExhausted);

  EXPECT_EQ(ReadAlignmentPolicy(path + ".no").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadAlignmentPolicy(folder.string()).status().code(), absl::StatusCode::kUnavailable);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace shardprep
