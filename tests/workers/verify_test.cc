#include "workers/verify.h"

#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/layout.h"
#include "tests/support/test_artifact.h"
#include "workers/digest.h"
#include "workers/manifest.h"
#include "workers/proto_json.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

constexpr char kPart0[] = "model-rank-0-part-0.safetensors";
constexpr char kPart1[] = "model-rank-1-part-0.safetensors";
constexpr char kReplicated[] = "model-replicated-part-0.safetensors";

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// Verifies without the source, and with it: first what anybody can check.
absl::Status Verify(TestArtifact& artifact) {
  return VerifyArtifact(artifact.destination(), {}).status();
}
absl::Status VerifyWithSource(TestArtifact& artifact) {
  VerifyOptions options;
  options.source = &artifact.source();
  return VerifyArtifact(artifact.destination(), options).status();
}

void ExpectDataLoss(const absl::Status& status, const std::string& file, const std::string& what) {
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr(file));
  EXPECT_THAT(MessageOf(status), HasSubstr(what));
}

// The record of a rank's tensor whose name ends in `role`, in its first part, and where a byte of
// it lies in the file.
class StoredTensor {
 public:
  StoredTensor(TestArtifact& artifact, int rank, const std::string& role) {
    const v1::Manifest manifest = ReadManifest(artifact.destination()).value();
    const v1::RankManifest document =
        ReadRankManifest(artifact.destination(), manifest.rank_manifests(rank)).value();
    for (const v1::TensorRecord& tensor : document.files(0).tensors()) {
      if (absl::EndsWith(tensor.name(), absl::StrCat(".", role))) record_ = tensor;
    }
    SP_CHECK(!record_.name().empty());
    layout_ = ParseLayoutId(record_.layout()).value();
    out_cols_ = record_.padded_row_bytes();
    if (TileOf(layout_) == TileKind::kE8m0) out_cols_ = (out_cols_ + 7) / 8 * 8;
  }

  const v1::TensorRecord& record() const { return record_; }
  int64_t end() const { return record_.offset() + record_.size_bytes(); }
  // Of a row of one expert's padded logical matrix; for row order as-is.
  int64_t OffsetOf(int64_t expert, int64_t row, int64_t col) const {
    return record_.offset() +
           LayoutIndex(layout_, record_.padded_rows(), out_cols_, {expert, row, col});
  }

 private:
  v1::TensorRecord record_;
  LayoutId layout_ = LayoutId::kRowMajor;
  int64_t out_cols_ = 0;
};

// -- What is right passes --

struct Shape {
  std::string name;
  TestArtifactOptions options;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

class VerifyEveryProfile : public ::testing::TestWithParam<Shape> {};

TEST_P(VerifyEveryProfile, EveryByteIsAccountedFor) {
  TestArtifact artifact(GetParam().options);
  artifact.Make();
  int64_t stored = 0, native = 0, last_done = 0;
  for (const FusedTensor& tensor : artifact.plan().slices.fused_tensors()) {
    const int64_t copies =
        artifact.plan().summary.routed_layer_count() * int64_t{GetParam().options.ranks};
    stored += copies * tensor.size_bytes;
    native += copies * tensor.native_bytes;
  }
  const int64_t replicated = artifact.plan().slices.ReplicatedBytes();
  for (const int threads : {1, 3}) {
    VerifyOptions options;
    options.source = &artifact.source();
    options.threads = threads;
    last_done = 0;
    options.progress = [&](int64_t done, int64_t total) {
      EXPECT_GE(done, last_done);
      EXPECT_EQ(total, artifact.plan().summary.output_bytes());
      last_done = done;
    };
    const auto report = VerifyArtifact(artifact.destination(), options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->native_bytes, native + replicated);
    EXPECT_EQ(report->pad_bytes, stored - native);
    EXPECT_EQ(report->source_bytes_compared, native + replicated);
    EXPECT_EQ(last_done, artifact.plan().summary.output_bytes());
    EXPECT_EQ(report->layout_fingerprint, artifact.plan().fingerprint);
    int64_t bytes = 0, files = 0;
    for (const std::string& key : artifact.Keys()) {
      if (key == "manifest.json") continue;
      bytes += static_cast<int64_t>(std::filesystem::file_size(artifact.Path(key)));
      ++files;
    }
    EXPECT_EQ(report->bytes, bytes);
    EXPECT_EQ(report->files, files);
  }
}

// 160 and 96 need pads in rows, columns and layout columns; 128 x 3 experts leave a 128-row tail.
const CheckpointSpec kTail = {
    .hidden = 128, .intermediate = 192, .experts = 3, .layers = 1, .mtp_layers = 1, .files = 1};
// No pads but those of scale columns.
const CheckpointSpec kNative = {
    .hidden = 256, .intermediate = 512, .experts = 2, .layers = 1, .mtp_layers = 0, .files = 1};

INSTANTIATE_TEST_SUITE_P(
    All, VerifyEveryProfile,
    ::testing::Values(
        Shape{"Separated", {}}, Shape{"Interleaved", {.profile = "aiter-interleaved"}},
        Shape{"Gfx1250", {.profile = "aiter-gfx1250", .architecture = "gfx1250"}},
        Shape{"Logical", {.profile = "logical"}}, Shape{"RowTail", {.checkpoint = kTail}},
        Shape{"RowTailInterleaved", {.checkpoint = kTail, .profile = "aiter-interleaved"}},
        Shape{"OneRank", {.checkpoint = kNative, .ranks = 1}},
        Shape{"FourRanks", {.checkpoint = kNative, .ranks = 4}},
        Shape{"SmallParts", {.part_size_bytes = 4096}}),
    [](const auto& test) { return test.param.name; });

// -- Every kind of pad byte --

struct PadByte {
  std::string name;
  TestArtifactOptions options;
  std::string role;
  int64_t expert, row, col;  // col -1: the last byte of the tensor
  std::string text;
};

void PrintTo(const PadByte& pad, std::ostream* out) { *out << pad.name; }

class VerifyPads : public ::testing::TestWithParam<PadByte> {};

TEST_P(VerifyPads, OneFlippedBitIsFoundEvenWhenTheDigestsAgree) {
  TestArtifact artifact(GetParam().options);
  artifact.Make();
  const StoredTensor tensor(artifact, 1, GetParam().role);
  const int64_t offset = GetParam().col < 0
                             ? tensor.end() - 1
                             : tensor.OffsetOf(GetParam().expert, GetParam().row, GetParam().col);
  FlipBits(artifact.Path(kPart1), offset, 0x10);
  ExpectDataLoss(Verify(artifact), kPart1, GetParam().role);
  artifact.ResealFile(kPart1);
  ExpectDataLoss(Verify(artifact), absl::StrCat(kPart1, ": tensor ", tensor.record().name()),
                 GetParam().text);
}

// Native: 96 of 128 rows a half and 80 of 128 byte columns in w13, 160 of 256 rows and 48 of 64
// byte columns in w2; its scale has 3 of 4 columns, which the layout makes 8.
INSTANTIATE_TEST_SUITE_P(
    All, VerifyPads,
    ::testing::Values(
        PadByte{"GateRow", {}, "w13_weight", 2, 100, 5, "pad row 100, byte 5 is 16, want 0"},
        PadByte{"UpRow", {}, "w13_weight", 0, 255, 0, "pad row 255, byte 0 is 16, want 0"},
        PadByte{"ColumnOfW13", {}, "w13_weight", 1, 0, 127, "row 0, column 127 is 0x10, want 0x00"},
        PadByte{"RowOfW2", {}, "w2_weight", 1, 160, 3, "pad row 160, byte 3 is 16, want 0"},
        PadByte{"ColumnOfW2", {}, "w2_weight", 0, 17, 48, "row 17, column 48 is 0x10, want 0x00"},
        PadByte{"RowOfScale", {}, "w13_weight_scale", 2, 230, 4, "pad row 230, byte 4"},
        PadByte{"ColumnOfScale",
                {},
                "w2_weight_scale",
                2,
                31,
                3,
                "row 31, column 3 is 0x10, want 0x00"},
        PadByte{
            "LayoutFill", {}, "w2_weight_scale", 2, 255, 7, "row 255, column 7 is 0x10, want 0x00"},
        PadByte{"LayoutFillOfNaN",
                {.profile = "aiter-interleaved"},
                "w2_weight_scale",
                0,
                31,
                5,
                "row 31, column 5 is 0x6f, want 0x7f"},
        PadByte{"Tail", {.checkpoint = kTail}, "w2_weight_scale", 0, 0, -1, "of the tail is 16"},
        PadByte{"GateUpRow",
                {.profile = "aiter-interleaved"},
                "w13_weight",
                1,
                230,
                7,
                "pad row 230, byte 7"}),
    [](const auto& test) { return test.param.name; });

// -- Native bytes --

// Digests made to agree: only the CRC over the un-shuffled bytes knows.
TEST(VerifyArtifact, AFlippedNativeBitIsFoundEvenWhenTheDigestsAgree) {
  for (const std::string role :
       {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}) {
    TestArtifact artifact;
    artifact.Make();
    const StoredTensor tensor(artifact, 0, role);
    FlipBits(artifact.Path(kPart0), tensor.OffsetOf(1, 95, 2));
    ExpectDataLoss(Verify(artifact), kPart0, "native CRC-32C");
    artifact.ResealFile(kPart0);
    ExpectDataLoss(Verify(artifact), tensor.record().name(), "native CRC-32C");
  }
}

// Two rows exchanged before the shuffle: the right bytes in the wrong place, digests and native CRC
// made to agree with it. Only the source knows.
TEST(VerifyArtifact, RowsInTheWrongPlaceAreFoundByTheSource) {
  TestArtifact artifact;
  artifact.Make();
  const StoredTensor tensor(artifact, 0, "w13_weight");
  std::string bytes = ReadFileBytes(artifact.Path(kPart0));
  for (int64_t c = 0; c < tensor.record().native_row_bytes(); ++c) {
    std::swap(bytes[tensor.OffsetOf(0, 3, c)], bytes[tensor.OffsetOf(0, 4, c)]);
  }
  WriteFileBytes(artifact.Path(kPart0), bytes);
  // What the CRC over the exchanged rows is, byte by byte from the definition of its order.
  uint32_t crc = 0;
  for (int64_t e = 0; e < 3; ++e) {
    for (const int64_t half : {0, 128}) {
      for (int64_t q = 0; q < 96; ++q) {
        for (int64_t c = 0; c < 80; ++c) {
          const auto byte = static_cast<uint8_t>(bytes[tensor.OffsetOf(e, half + q, c)]);
          crc = Crc32c(crc, absl::MakeConstSpan(&byte, 1));
        }
      }
    }
  }
  artifact.ResealFile(kPart0, [&](v1::FileRecord& file) {
    for (v1::TensorRecord& record : *file.mutable_tensors()) {
      if (record.name() == tensor.record().name()) {
        record.set_native_crc32c(absl::StrFormat("%08x", crc));
      }
    }
  });
  EXPECT_TRUE(Verify(artifact).ok()) << Verify(artifact);
  ExpectDataLoss(VerifyWithSource(artifact), tensor.record().name(), "expert 0: row 3, byte 0");
}

TEST(VerifyArtifact, ReplicatedTensorsAreComparedByteForByte) {
  TestArtifact artifact;
  artifact.Make();
  const v1::Manifest manifest = ReadManifest(artifact.destination()).value();
  const v1::FileRecord file =
      ReadRankManifest(artifact.destination(), manifest.rank_manifests(2)).value().files(0);
  const int64_t at = file.tensors(1).offset() + 1;
  FlipBits(artifact.Path(kReplicated), at, 0x80);
  ExpectDataLoss(Verify(artifact), kReplicated, file.tensors(1).name());
  const std::string bytes = ReadFileBytes(artifact.Path(kReplicated));
  artifact.ResealFile(kReplicated, [&](v1::FileRecord& record) {
    v1::TensorRecord& tensor = *record.mutable_tensors(1);
    const absl::Span<const uint8_t> data(
        reinterpret_cast<const uint8_t*>(bytes.data()) + tensor.offset(), tensor.size_bytes());
    tensor.set_native_crc32c(absl::StrFormat("%08x", Crc32c(0, data)));
  });
  EXPECT_TRUE(Verify(artifact).ok()) << Verify(artifact);
  ExpectDataLoss(VerifyWithSource(artifact), file.tensors(1).name(), "byte 1 is");
}

// Bytes of the tensors of an artefact's source, by name.
class SourceBytes {
 public:
  explicit SourceBytes(TestArtifact& artifact) : artifact_(artifact) {}

  std::string Get(const std::string& name) const {
    const TensorInfo tensor = Find(name);
    return ReadFileBytes(Path(tensor))
        .substr(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.size_bytes));
  }
  void Put(const std::string& name, const std::string& bytes) {
    const TensorInfo tensor = Find(name);
    std::string file = ReadFileBytes(Path(tensor));
    WriteFileBytes(Path(tensor),
                   file.replace(static_cast<size_t>(tensor.offset), bytes.size(), bytes));
  }

 private:
  const Checkpoint& checkpoint() const { return artifact_.plan().slices.checkpoint(); }
  TensorInfo Find(const std::string& name) const {
    return checkpoint().tensors().at(checkpoint().FindTensor(name).value());
  }
  std::string Path(const TensorInfo& tensor) const {
    return artifact_.SourcePath(checkpoint().files()[static_cast<size_t>(tensor.file)].name);
  }

  TestArtifact& artifact_;
};

// Scalars are carried, and tensors that hold the same or that config.json calls one, whether they
// are or not: each name of the source once, with its bytes, and no other.
TEST(VerifyArtifact, TensorsThatAreEqualOrSaidToBeTiedAreEachCarried) {
  TestArtifactOptions options;
  options.checkpoint.config["tie_word_embeddings"] = "true";
  for (const char* name : {"q_scale", "k_scale"}) {
    options.checkpoint.extra.push_back({.name = name, .dtype = Dtype::kF32});
  }
  for (const char* name : {"embed_a.weight", "head_a.weight", "embed_b.weight", "head_b.weight"}) {
    options.checkpoint.extra.push_back({.name = name, .shape = {64, 16}});
  }
  TestArtifact artifact(options);
  SourceBytes source(artifact);
  source.Put("k_scale", source.Get("q_scale"));
  source.Put("head_a.weight", source.Get("embed_a.weight"));
  ASSERT_NE(source.Get("head_b.weight"), source.Get("embed_b.weight"));
  artifact.Replan();
  artifact.Make();

  const v1::Manifest manifest = ReadManifest(artifact.destination()).value();
  const v1::FileRecord file =
      ReadRankManifest(artifact.destination(), manifest.rank_manifests(2)).value().files(0);
  const std::string bytes = ReadFileBytes(artifact.Path(kReplicated));
  std::map<std::string, std::string> stored;
  for (const v1::TensorRecord& tensor : file.tensors()) {
    const auto place = static_cast<size_t>(tensor.offset());
    EXPECT_TRUE(
        stored.emplace(tensor.name(), bytes.substr(place, static_cast<size_t>(tensor.size_bytes())))
            .second);
    EXPECT_EQ(stored[tensor.name()], source.Get(tensor.name())) << tensor.name();
    EXPECT_TRUE(tensor.name() != "q_scale" || tensor.shape_size() == 0);
  }
  for (const TestTensor& tensor : options.checkpoint.extra) {
    EXPECT_TRUE(stored.contains(tensor.name)) << tensor.name;
  }
  EXPECT_TRUE(VerifyWithSource(artifact).ok()) << VerifyWithSource(artifact);
}

TEST(VerifyArtifact, AChangedSourceByteIsFound) {
  TestArtifact artifact;
  artifact.Make();
  // The last byte of the file belongs to some tensor; which one, the message says.
  FlipBits(artifact.SourcePath("model-00001-of-00002.safetensors"), -1);
  EXPECT_TRUE(Verify(artifact).ok());
  ExpectDataLoss(VerifyWithSource(artifact), "tensor ", "the source has");
}

TEST(VerifyArtifact, CopiedFilesAreComparedWithTheSource) {
  TestArtifact artifact;
  artifact.Make();
  ASSERT_TRUE(VerifyWithSource(artifact).ok());
  FlipBits(artifact.SourcePath("tokenizer.json"), 0);
  EXPECT_TRUE(Verify(artifact).ok());
  ExpectDataLoss(VerifyWithSource(artifact), "tokenizer.json: SHA-256 ", "the source's file has");
  FlipBits(artifact.SourcePath("tokenizer.json"), 0);
  WriteFileBytes(artifact.SourcePath("added_tokens.json"), "{}");
  ExpectDataLoss(VerifyWithSource(artifact), "added_tokens.json", "not in the artefact");
  std::filesystem::remove(artifact.SourcePath("added_tokens.json"));
  std::filesystem::remove(artifact.SourcePath("tokenizer.json"));
  ExpectDataLoss(VerifyWithSource(artifact), "tokenizer.json", "not in the source");
}

TEST(VerifyArtifact, AnotherSourceIsRefused) {
  TestArtifact artifact;
  artifact.Make();
  TestArtifact other({.checkpoint = kNative});
  VerifyOptions options;
  options.source = &other.source();
  const absl::Status status = VerifyArtifact(artifact.destination(), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr("is not what the artefact was made from"));
}

// -- Files --

struct Damage {
  std::string name;
  std::function<void(TestArtifact&)> damage;
  std::string file;
  std::string text;
};

void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class VerifyDamage : public ::testing::TestWithParam<Damage> {};

TEST_P(VerifyDamage, IsFound) {
  TestArtifact artifact;
  artifact.Make();
  ASSERT_TRUE(Verify(artifact).ok()) << Verify(artifact);
  GetParam().damage(artifact);
  ExpectDataLoss(Verify(artifact), GetParam().file, GetParam().text);
}

void Exchange(TestArtifact& artifact, const std::string& a, const std::string& b) {
  const std::string bytes = ReadFileBytes(artifact.Path(a));
  WriteFileBytes(artifact.Path(a), ReadFileBytes(artifact.Path(b)));
  WriteFileBytes(artifact.Path(b), bytes);
}

// Replaces text in a file by text of equal size.
void Replace(const std::string& path, const std::string& from, const std::string& to) {
  std::string bytes = ReadFileBytes(path);
  const size_t at = bytes.find(from);
  SP_CHECK(at != std::string::npos && from.size() == to.size());
  WriteFileBytes(path, bytes.replace(at, from.size(), to));
}

// Changes a field of manifest.json, which nothing protects but the content it must agree with.
void ChangeManifest(TestArtifact& artifact, const std::function<void(v1::Manifest&)>& change) {
  v1::Manifest manifest = ReadManifest(artifact.destination()).value();
  change(manifest);
  WriteFileBytes(artifact.Path("manifest.json"), StoredJson(manifest).value());
}

INSTANTIATE_TEST_SUITE_P(
    All, VerifyDamage,
    ::testing::Values(
        Damage{"HeaderLength", [](TestArtifact& a) { FlipBits(a.Path(kPart0), 1); }, kPart0,
               "header"},
        Damage{"HeaderShape",
               [](TestArtifact& a) { Replace(a.Path(kPart0), "[3,256,128]", "[3,128,256]"); },
               kPart0, "w13_weight"},
        Damage{"HeaderName",
               [](TestArtifact& a) { Replace(a.Path(kPart0), "w13_weight\"", "w31_weight\""); },
               kPart0, "w13_weight"},
        Damage{"HeaderFingerprint",
               [](TestArtifact& a) {
                 Replace(a.Path(kPart0), a.plan().fingerprint, std::string(64, '0'));
               },
               kPart0, "shardprep.fingerprint"},
        Damage{"HeaderProfile",
               [](TestArtifact& a) {
                 Replace(a.Path(kPart0), "aiter-separated", "aiter-interleav");
                 a.ResealFile(kPart0);
               },
               kPart0, "shardprep.profile is aiter-interleav, want aiter-separated"},
        // White space in the header changes nothing that it says: only the digest knows.
        Damage{"HeaderPadding", [](TestArtifact& a) { Replace(a.Path(kPart0), "}  ", "} \n"); },
               kPart0, "chunk 0 has SHA-256"},
        Damage{
            "DigestInRankManifest",
            [](TestArtifact& a) { Replace(a.Path("rank-1.json"), "sha256-16m:", "sha256-17m:"); },
            "rank-1.json", "SHA-256"},
        Damage{"ChunkDigestSealed",
               [](TestArtifact& a) {
                 a.Reseal(1, [](v1::RankManifest& rank) {
                   rank.mutable_files(0)->set_chunk_sha256(0, std::string(64, '0'));
                 });
               },
               kPart1, "its chunk digests give"},
        Damage{"DigestsOfOtherBytesSealed",
               [](TestArtifact& a) {
                 a.Reseal(1, [](v1::RankManifest& rank) {
                   v1::FileRecord& file = *rank.mutable_files(0);
                   const std::vector<Sha256Bytes> chunks(1);
                   file.set_chunk_sha256(0, HexEncode(chunks[0]));
                   file.set_digest(DigestOfChunks(chunks));
                 });
               },
               kPart1, "chunk 0 has SHA-256"},
        Damage{"MissingPart", [](TestArtifact& a) { std::filesystem::remove(a.Path(kPart1)); },
               kPart1, "missing"},
        Damage{"TruncatedPart",
               [](TestArtifact& a) {
                 std::filesystem::resize_file(a.Path(kPart1),
                                              std::filesystem::file_size(a.Path(kPart1)) - 1);
               },
               kPart1, "bytes, want"},
        Damage{"LongerPart",
               [](TestArtifact& a) {
                 WriteFileBytes(a.Path(kPart1), ReadFileBytes(a.Path(kPart1)) + "x");
               },
               kPart1, "bytes, want"},
        Damage{"PartsOfTwoRanksExchanged", [](TestArtifact& a) { Exchange(a, kPart0, kPart1); },
               kPart0, "shardprep.rank is 1, want 0"},
        Damage{"PartsOfTwoRanksExchangedAndSealed",
               [](TestArtifact& a) {
                 Exchange(a, kPart0, kPart1);
                 a.ResealFile(kPart0);
                 a.ResealFile(kPart1);
               },
               kPart0, "shardprep.rank is 1, want 0"},
        Damage{"PartsOfTwoLayersExchanged",
               [](TestArtifact& a) {
                 Exchange(a, kPart0, "model-rank-0-part-1.safetensors");
                 a.ResealFile(kPart0);
               },
               kPart0, "model.layers.1"},
        Damage{"RankManifestsExchanged",
               [](TestArtifact& a) { Exchange(a, "rank-0.json", "rank-1.json"); }, "rank-0.json",
               "SHA-256"},
        Damage{"MissingRankManifest",
               [](TestArtifact& a) { std::filesystem::remove(a.Path("rank-1.json")); },
               "rank-1.json", "missing"},
        Damage{"ExtraPart",
               [](TestArtifact& a) {
                 std::filesystem::copy_file(a.Path(kPart0),
                                            a.Path("model-rank-0-part-2.safetensors"));
               },
               "model-rank-0-part-2.safetensors", "is no part of the artefact"},
        Damage{"ExtraRank",
               [](TestArtifact& a) {
                 std::filesystem::copy_file(a.Path(kPart0),
                                            a.Path("model-rank-2-part-0.safetensors"));
               },
               "model-rank-2-part-0.safetensors", "is no part of the artefact"},
        Damage{"ConfigChanged", [](TestArtifact& a) { FlipBits(a.Path("config.json"), 3); },
               "config.json", "SHA-256"},
        Damage{"ConfigLonger",
               [](TestArtifact& a) {
                 WriteFileBytes(a.Path("config.json"), ReadFileBytes(a.Path("config.json")) + " ");
               },
               "config.json", "larger than"},
        Damage{"TokenizerMissing",
               [](TestArtifact& a) { std::filesystem::remove(a.Path("tokenizer.json")); },
               "tokenizer.json", "missing"},
        Damage{"ContentId",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) { m.set_content_id(std::string(64, 'a')); });
               },
               "manifest.json", "content_id"},
        Damage{"LayerCount",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) { m.set_routed_layer_count(3); });
               },
               "rank 0", "want 12 for 3 routed layers"},
        Damage{"TotalBytes",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) { m.set_total_bytes(m.total_bytes() + 1); });
               },
               "manifest.json", "total_bytes"},
        Damage{"PaddingBytes",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) { m.set_padding_bytes_per_rank(0); });
               },
               "manifest.json", "padding_bytes_per_rank"},
        Damage{"LayoutOfManifest",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) {
                   m.mutable_fused_tensors(0)->set_layout("aiter-16x16-gate-up");
                 });
               },
               kPart0, "aiter-16x16-gate-up"},
        Damage{"LayoutSealedEverywhere",
               [](TestArtifact& a) {
                 ChangeManifest(a, [](v1::Manifest& m) {
                   m.mutable_fused_tensors(0)->set_layout("aiter-16x16-gate-up");
                 });
                 for (const int rank : {0, 1}) {
                   a.Reseal(rank, [](v1::RankManifest& document) {
                     for (v1::FileRecord& file : *document.mutable_files()) {
                       for (v1::TensorRecord& tensor : *file.mutable_tensors()) {
                         if (absl::EndsWith(tensor.name(), "w13_weight")) {
                           tensor.set_layout("aiter-16x16-gate-up");
                         }
                       }
                     }
                   });
                 }
               },
               kPart0, "w13_weight"},
        Damage{"FillOfRecord",
               [](TestArtifact& a) {
                 a.Reseal(0, [](v1::RankManifest& rank) {
                   rank.mutable_files(0)->mutable_tensors(3)->set_fill(127);
                 });
               },
               kPart0, "fill 127, layout aiter-e8m0 has 0"},
        Damage{"FileWithoutTensors",
               [](TestArtifact& a) {
                 a.Reseal(1,
                          [](v1::RankManifest& rank) { rank.mutable_files(0)->clear_tensors(); });
               },
               kPart1, "no tensors"},
        Damage{"ExtentsThatOverflow",
               [](TestArtifact& a) {
                 a.Reseal(0, [](v1::RankManifest& rank) {
                   v1::TensorRecord& tensor = *rank.mutable_files(0)->mutable_tensors(0);
                   tensor.set_expert_count(int64_t{1} << 40);
                   tensor.set_padded_row_bytes(int64_t{1} << 40);
                 });
               },
               kPart0, "has 2^63 bytes or more"},
        Damage{"TensorOfRankLeftOut",
               [](TestArtifact& a) {
                 a.Reseal(1, [](v1::RankManifest& rank) {
                   rank.mutable_files(1)->mutable_tensors()->RemoveLast();
                 });
                 ChangeManifest(a, [](v1::Manifest&) {});
               },
               "rank 1", "other tensors than rank 0"}),
    [](const auto& test) { return test.param.name; });

// -- Bounds --

TEST(VerifyArtifact, WithoutAManifestThereIsNothing) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  EXPECT_EQ(Verify(artifact).code(), absl::StatusCode::kNotFound);
}

TEST(VerifyArtifact, TooSmallABudgetIsRefusedWithTheNeed) {
  TestArtifact artifact;
  artifact.Make();
  VerifyOptions options;
  options.memory_budget_bytes = 1 << 20;
  const absl::Status status = VerifyArtifact(artifact.destination(), options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr("bytes a thread, the budget is 1048576"));
  options.memory_budget_bytes = 4 << 20;
  options.threads = 8;
  EXPECT_TRUE(VerifyArtifact(artifact.destination(), options).ok());
}

}  // namespace
}  // namespace shardprep
