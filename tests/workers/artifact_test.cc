#include "workers/artifact.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/test_artifact.h"
#include "workers/coverage.h"
#include "workers/digest.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAreArray;
using Kind = DestinationState::Kind;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(MessageOf(status), HasSubstr(text));
}

DestinationState Inspect(TestArtifact& artifact) {
  auto state = InspectDestination(artifact.plan(), artifact.source(), artifact.destination());
  EXPECT_TRUE(state.ok()) << state.status();
  return state.ok() ? *state : DestinationState();
}

std::vector<RankTaskId> AllTasks(const JobPlan& plan) {
  std::set<RankTaskId> tasks;
  for (const PlannedPart& part : PlannedParts(plan)) tasks.insert({part.region, part.rank});
  return {tasks.begin(), tasks.end()};
}

std::string JournalOf(const JobPlan& plan, int64_t rank, int64_t part) {
  return ObjectKey(RankJournal{.fingerprint = plan.fingerprint, .rank = rank, .part = part});
}

// Changes one record in the journal.
void ChangeRecord(TestArtifact& artifact, const std::string& key,
                  const std::function<void(v1::PartRecord&)>& change) {
  v1::PartRecord record;
  ASSERT_TRUE(ParseStoredJson(ReadFileBytes(artifact.Path(key)), key, kFormatVersion, record).ok());
  change(record);
  WriteFileBytes(artifact.Path(key), StoredJson(record).value());
}

// -- Stored JSON --

TEST(StoredJson, IsReadBackAndHasOneSpelling) {
  v1::PartRecord record;
  record.set_format_version("1");
  record.set_rank(0);
  record.mutable_file()->set_size_bytes(int64_t{1} << 53);
  const std::string text = StoredJson(record).value();
  EXPECT_EQ(text, StoredJson(record).value());
  EXPECT_THAT(text, HasSubstr("\"size_bytes\": \"9007199254740992\""));
  EXPECT_THAT(text, HasSubstr("\"rank\": 0"));
  EXPECT_THAT(text, Not(HasSubstr("\"part\"")));  // presence: not set is not zero
  v1::PartRecord again;
  ASSERT_TRUE(ParseStoredJson(text, "x", "1", again).ok());
  EXPECT_EQ(again.SerializeAsString(), record.SerializeAsString());
}

TEST(StoredJson, UnknownFieldsAndVersionsAreRefused) {
  v1::PartRecord record;
  ExpectStatus(
      ParseStoredJson(R"({"format_version": "1", "colour": 1})", "rank-0.json", "1", record),
      absl::StatusCode::kInvalidArgument, "rank-0.json");
  ExpectStatus(
      ParseStoredJson(R"({"format_version": "2", "colour": 1})", "rank-0.json", "1", record),
      absl::StatusCode::kFailedPrecondition, "format version '2', this build reads '1'");
  ExpectStatus(ParseStoredJson("{", "rank-0.json", "1", record), absl::StatusCode::kInvalidArgument,
               "rank-0.json");
  ExpectStatus(ParseStoredJson("", "rank-0.json", "1", record), absl::StatusCode::kInvalidArgument,
               "rank-0.json");
}

// -- Coverage --

TEST(Coverage, EveryCarriedByteLandsOnce) {
  TestArtifact artifact;
  const auto totals = ProveCoverage(artifact.plan().slices);
  ASSERT_TRUE(totals.ok()) << totals.status();
  // Three matrices of 160 x 192, half a byte an element and a scale byte for 32.
  EXPECT_EQ(totals->routed_bytes, 2 * 3 * 3 * (160 * 192 / 2 + 160 * 192 / 32));
  EXPECT_EQ(totals->replicated_bytes, artifact.plan().slices.ReplicatedBytes());
}

// A plan that was damaged after it was made: the parts of it that the proof must not trust.
struct BrokenPlan {
  std::string name;
  std::function<void(SlicePlan&)> damage;
  std::string text;
};

void PrintTo(const BrokenPlan& plan, std::ostream* out) { *out << plan.name; }

template <typename T>
T& Mutable(const T& part_of_a_copy) {
  return const_cast<T&>(part_of_a_copy);
}

class CoverageRefusal : public ::testing::TestWithParam<BrokenPlan> {};

TEST_P(CoverageRefusal, NamesWhatIsWrong) {
  TestArtifact artifact;
  SlicePlan slices = artifact.plan().slices;
  GetParam().damage(slices);
  ExpectStatus(ProveCoverage(slices).status(), absl::StatusCode::kDataLoss, GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    All, CoverageRefusal,
    ::testing::Values(
        BrokenPlan{"LastRankLeftOut",
                   [](SlicePlan& plan) { Mutable(plan.inputs()).tensor_parallel_size = 1; },
                   "slices cover 96 rows, want 192"},
        BrokenPlan{"RankTooMany",
                   [](SlicePlan& plan) { Mutable(plan.inputs()).tensor_parallel_size = 3; },
                   "slices cover 288 rows, want 192"},
        BrokenPlan{
            "LayerTwice",
            [](SlicePlan& plan) { Mutable(plan.regions()).push_back(plan.regions().front()); },
            "is carried twice"},
        BrokenPlan{"LayerLeftOut",
                   [](SlicePlan& plan) { Mutable(plan.regions()).erase(plan.regions().begin()); },
                   "layers.0.ffn.experts.0.w1.scale: is neither carried nor listed"},
        BrokenPlan{"TensorOfLayerLeftOut",
                   [](SlicePlan& plan) {
                     Mutable(plan.regions()).front().parts.front().tensors.pop_back();
                   },
                   "layers.0.ffn.experts.0.w2.scale: is neither carried nor listed"},
        BrokenPlan{"ReplicatedTensorLeftOut",
                   [](SlicePlan& plan) {
                     Mutable(plan.regions()).back().parts.front().tensors.pop_back();
                   },
                   "is neither carried nor listed"},
        BrokenPlan{"ReplicatedTensorCut",
                   [](SlicePlan& plan) {
                     --Mutable(plan.regions()).back().parts.front().tensors.front().size_bytes;
                   },
                   "bytes stored, want"},
        // Starting with the padded extent, as loaders have done: the up half begins elsewhere.
        BrokenPlan{"HalvesElsewhere",
                   [](SlicePlan& plan) { Mutable(plan.fused_tensors()).front().job.rows = 192; },
                   "rows from 128, want 96"},
        BrokenPlan{"RowsTooShort",
                   [](SlicePlan& plan) { Mutable(plan.fused_tensors()).front().native_rows = 190; },
                   "96 rows in a half of 128, want 95"}),
    [](const auto& test) { return test.param.name; });

// -- Commit --

TEST(CommitArtifact, LeavesExactlyTheFilesOfTheDesign) {
  TestArtifact artifact;
  artifact.Make();
  EXPECT_THAT(artifact.Keys(),
              UnorderedElementsAreArray(
                  {"config.json", "generation_config.json", "manifest.json",
                   "model-rank-0-part-0.safetensors", "model-rank-0-part-1.safetensors",
                   "model-rank-1-part-0.safetensors", "model-rank-1-part-1.safetensors",
                   "model-replicated-part-0.safetensors", "rank-0.json", "rank-1.json",
                   "replicated.json", "tokenizer.json", "tokenizer_config.json"}));
  EXPECT_FALSE(std::filesystem::exists(artifact.Path("_shardprep")));
}

TEST(CommitArtifact, ManifestSaysWhatWasPlanned) {
  TestArtifact artifact;
  artifact.Make();
  const v1::Manifest manifest = ReadManifest(artifact.destination()).value();
  EXPECT_EQ(manifest.stage(), "prepared");
  EXPECT_EQ(manifest.layout_fingerprint(), artifact.plan().fingerprint);
  EXPECT_EQ(Sha256Hex(manifest.fingerprint_inputs()), artifact.plan().fingerprint);
  EXPECT_EQ(manifest.source_token(), artifact.plan().source_token);
  EXPECT_EQ(manifest.extents().intermediate(), 96);
  EXPECT_EQ(manifest.extents().padded_intermediate(), 128);
  EXPECT_EQ(manifest.intermediate_pad(), 32);
  EXPECT_EQ(manifest.hidden_pad(), 96);
  EXPECT_EQ(manifest.gate_mode(), "SEPARATED");
  EXPECT_TRUE(manifest.is_shuffled());
  EXPECT_EQ(manifest.kernel_target().backend(), "AITER_MXFP4_BF16");
  EXPECT_EQ(manifest.parallel_layout().expert_parallel_size(), 1);
  EXPECT_EQ(manifest.rank_count(), 2);
  EXPECT_EQ(manifest.file_count(), 5);
  EXPECT_EQ(manifest.total_bytes(), artifact.plan().summary.output_bytes());
  EXPECT_EQ(manifest.routed_layer_count(), 2);
  ASSERT_EQ(manifest.copied_files_size(), 4);
  EXPECT_EQ(manifest.copied_files(0).sha256(),
            Sha256Hex(ReadFileBytes(artifact.SourcePath(manifest.copied_files(0).key()))));
}

// The definition of the content id, spelled out once more.
TEST(CommitArtifact, ContentIdIsTheDigestOfAllDigests) {
  TestArtifact artifact;
  artifact.Make();
  const v1::Manifest manifest = ReadManifest(artifact.destination()).value();
  std::map<std::string, std::string> lines;
  for (const std::string& key : artifact.Keys()) {
    if (key == "manifest.json") continue;
    const std::string bytes = ReadFileBytes(artifact.Path(key));
    // Each data file of this test is one chunk.
    const bool data = absl::EndsWith(key, ".safetensors");
    const Sha256Bytes chunk =
        Sha256({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    lines[key] = data ? "sha256-16m:" + Sha256Hex(chunk) : "sha256:" + HexEncode(chunk);
  }
  std::string text;
  for (const auto& [key, digest] : lines) {
    absl::StrAppend(&text, key, std::string(1, '\0'), digest, "\n");
  }
  EXPECT_EQ(manifest.content_id(), Sha256Hex(text));
}

TEST(CommitArtifact, EqualInputGivesEqualBytesOfEveryFile) {
  TestArtifact artifact;
  artifact.Make();
  std::map<std::string, std::string> first;
  for (const std::string& key : artifact.Keys()) first[key] = ReadFileBytes(artifact.Path(key));
  artifact.UseDestination("again");
  artifact.Make();
  EXPECT_EQ(artifact.Keys().size(), first.size());
  for (const std::string& key : artifact.Keys()) {
    EXPECT_EQ(ReadFileBytes(artifact.Path(key)), first[key]) << key;
  }
}

TEST(CommitArtifact, ASecondCommitIsTheFirst) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const auto first = artifact.Commit();
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = artifact.Commit();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(first->SerializeAsString(), second->SerializeAsString());
  ASSERT_TRUE(RemoveJournal(artifact.destination()).ok());
  const auto third = artifact.Commit();
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(first->sha256(), third->sha256());
}

struct Refusal {
  std::string name;
  std::function<void(TestArtifact&)> damage;  // after all parts are recorded
  absl::StatusCode code;
  std::string text;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class CommitRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(CommitRefusal, NothingBecomesVisible) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  GetParam().damage(artifact);
  ExpectStatus(artifact.Commit().status(), GetParam().code, GetParam().text);
  EXPECT_THAT(artifact.Keys(), Not(Contains("manifest.json")));
}

const char kPart[] = "model-rank-1-part-0.safetensors";

INSTANTIATE_TEST_SUITE_P(
    All, CommitRefusal,
    ::testing::Values(
        Refusal{"MissingRecord",
                [](TestArtifact& a) { std::filesystem::remove(a.Path(JournalOf(a.plan(), 1, 0))); },
                absl::StatusCode::kDataLoss, "model-rank-1-part-0.safetensors: not recorded"},
        Refusal{"MissingPart", [](TestArtifact& a) { std::filesystem::remove(a.Path(kPart)); },
                absl::StatusCode::kDataLoss, "model-rank-1-part-0.safetensors: recorded, but gone"},
        Refusal{"PartWrittenByAnother", [](TestArtifact& a) { FlipBits(a.Path(kPart), -1); },
                absl::StatusCode::kDataLoss, "model-rank-1-part-0.safetensors: "},
        Refusal{"RecordOfOtherExtents",
                [](TestArtifact& a) {
                  ChangeRecord(a, JournalOf(a.plan(), 1, 0), [](v1::PartRecord& record) {
                    record.mutable_file()->mutable_tensors(0)->set_native_rows(94);
                  });
                },
                absl::StatusCode::kDataLoss, "native_rows"},
        Refusal{"RecordWithoutATensor",
                [](TestArtifact& a) {
                  ChangeRecord(a, JournalOf(a.plan(), 1, 0), [](v1::PartRecord& record) {
                    record.mutable_file()->mutable_tensors()->RemoveLast();
                  });
                },
                absl::StatusCode::kDataLoss, "differs from the plan"},
        Refusal{"RecordWithoutNativeCrc",
                [](TestArtifact& a) {
                  ChangeRecord(a, JournalOf(a.plan(), 1, 0), [](v1::PartRecord& record) {
                    record.mutable_file()->mutable_tensors(1)->clear_native_crc32c();
                  });
                },
                absl::StatusCode::kDataLoss, "native CRC"},
        Refusal{"RecordWithAnotherDigest",
                [](TestArtifact& a) {
                  ChangeRecord(a, JournalOf(a.plan(), 1, 0), [](v1::PartRecord& record) {
                    record.mutable_file()->set_digest("sha256-16m:" + std::string(64, '0'));
                  });
                },
                absl::StatusCode::kDataLoss, "chunk digests"},
        Refusal{
            "SourceDataChanged",
            [](TestArtifact& a) { FlipBits(a.SourcePath("model-00001-of-00002.safetensors"), -1); },
            absl::StatusCode::kFailedPrecondition,
            "source file model-00001-of-00002.safetensors changed"},
        Refusal{"SourceConfigChanged",
                [](TestArtifact& a) { FlipBits(a.SourcePath("tokenizer.json"), 0); },
                absl::StatusCode::kFailedPrecondition, "source file tokenizer.json changed"},
        Refusal{"SourceFileGone",
                [](TestArtifact& a) {
                  std::filesystem::remove(a.SourcePath("model-00002-of-00002.safetensors"));
                },
                absl::StatusCode::kFailedPrecondition,
                "source file model-00002-of-00002.safetensors is gone"},
        Refusal{"AnotherConfigAtTheDestination",
                [](TestArtifact& a) {
                  std::string text = ReadFileBytes(a.SourcePath("config.json"));
                  text[0] = ' ';
                  WriteFileBytes(a.Path("config.json"), text);
                },
                absl::StatusCode::kFailedPrecondition, "config.json at"}),
    [](const auto& test) { return test.param.name; });

TEST(CommitArtifact, AnEqualConfigAtTheDestinationIsLeftAlone) {
  TestArtifact artifact;
  std::filesystem::create_directories(artifact.destination_path());
  std::filesystem::copy_file(artifact.SourcePath("config.json"), artifact.Path("config.json"));
  const auto before = artifact.destination().Head("config.json").value();
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_TRUE(artifact.Commit().ok());
  EXPECT_EQ(artifact.destination().Head("config.json").value().etag, before.etag);
}

TEST(CommitArtifact, AnotherManifestThatCameFirstWins) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  WriteFileBytes(artifact.Path("manifest.json"), "{}");
  ExpectStatus(artifact.Commit().status(), absl::StatusCode::kFailedPrecondition, "manifest.json");
  EXPECT_EQ(ReadFileBytes(artifact.Path("manifest.json")), "{}");
}

// -- Inspect --

TEST(InspectDestination, AnEmptyPlaceIsFreshAndStaysEmpty) {
  TestArtifact artifact;
  const DestinationState state = Inspect(artifact);
  EXPECT_EQ(state.kind, Kind::kFresh);
  EXPECT_THAT(state.done, IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(artifact.destination_path()));
}

TEST(InspectDestination, ACommittedArtefactOfThePlanIsComplete) {
  TestArtifact artifact;
  artifact.Make();
  const DestinationState state = Inspect(artifact);
  EXPECT_EQ(state.kind, Kind::kComplete);
  EXPECT_EQ(state.manifest.sha256(), Sha256Hex(ReadFileBytes(artifact.Path("manifest.json"))));
  EXPECT_EQ(state.manifest.uri(), artifact.Path("manifest.json"));
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_EQ(Inspect(artifact).kind, Kind::kComplete);
}

TEST(InspectDestination, RecordedPartsAreResumed) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.PrepareRegionOf(1).ok());
  const DestinationState state = Inspect(artifact);
  EXPECT_EQ(state.kind, Kind::kResumable);
  EXPECT_THAT(state.done, ElementsAre(RankTaskId{1, 0}, RankTaskId{1, 1}));
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  ASSERT_TRUE(artifact.PrepareRegionOf(0).ok());
  ASSERT_TRUE(artifact.PrepareRegionOf(2).ok());
  EXPECT_EQ(Inspect(artifact).done, AllTasks(artifact.plan()));
  EXPECT_TRUE(artifact.Commit().ok());
}

// A part whose bytes are not those that were recorded is done again; the others are kept.
TEST(InspectDestination, AChangedETagUndoesOnePart) {
  for (const bool removed : {false, true}) {
    TestArtifact artifact;
    ASSERT_TRUE(artifact.Prepare().ok());
    const std::string path = artifact.Path("model-rank-0-part-1.safetensors");
    if (removed) {
      std::filesystem::remove(path);
    } else {
      WriteFileBytes(path, ReadFileBytes(path));  // equal bytes, another version
    }
    const DestinationState state = Inspect(artifact);
    EXPECT_EQ(state.kind, Kind::kResumable);
    std::vector<RankTaskId> want = AllTasks(artifact.plan());
    std::erase(want, RankTaskId{1, 0});
    EXPECT_EQ(state.done, want);
    ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
    ASSERT_TRUE(artifact.PrepareRegionOf(1).ok());
    EXPECT_TRUE(artifact.Commit().ok());
  }
}

// Small parts put the tensors of one task into several files: all of them must be there.
TEST(InspectDestination, ATaskIsDoneWhenAllItsPartsAre) {
  TestArtifact artifact({.part_size_bytes = 4096});
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_GT(artifact.plan().slices.regions()[0].parts.size(), 1u);
  std::filesystem::remove(artifact.Path("model-rank-1-part-2.safetensors"));
  EXPECT_THAT(Inspect(artifact).done, Not(Contains(RankTaskId{0, 1})));
  EXPECT_THAT(Inspect(artifact).done, Contains(RankTaskId{0, 0}));
}

TEST(InspectDestination, RecordsOfAnotherSourceVersionDoNotCount) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const std::string source = artifact.SourcePath("model-00001-of-00002.safetensors");
  FlipBits(source, -1);
  artifact.Replan();
  EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(), IsEmpty());
}

TEST(InspectDestination, RecordsOfAnotherFingerprintAreCleared) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  WriteFileBytes(artifact.Path("notes.txt"), "mine");
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.mutable_targets(0)->mutable_kernel_target()->set_profile("logical");
  });
  EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(), ElementsAre("notes.txt"));
}

// Killed between the rename of a part and its record: the part is known by its header.
TEST(InspectDestination, AnUnrecordedPartOfThePlanIsOverwritten) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  std::filesystem::remove_all(artifact.Path("_shardprep"));
  EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  artifact.Make();
  EXPECT_EQ(Inspect(artifact).kind, Kind::kComplete);
}

// The same by another job: ours as long as that job's journal is there.
TEST(InspectDestination, AnUnrecordedPartOfAnotherJobGoesWithItsJournal) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  std::filesystem::remove(artifact.Path(JournalOf(artifact.plan(), 0, 0)));
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_part_size_bytes(8192); });
  EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(), IsEmpty());
}

TEST(InspectDestination, TemporariesOfKilledWorkersAreCleared) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.PrepareRegionOf(0).ok());
  std::filesystem::create_directories(artifact.Path("_shardprep/tmp"));
  WriteFileBytes(artifact.Path("_shardprep/tmp/abc-1"), "half a part");
  EXPECT_EQ(Inspect(artifact).kind, Kind::kResumable);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_FALSE(std::filesystem::exists(artifact.Path("_shardprep/tmp/abc-1")));
  EXPECT_EQ(Inspect(artifact).kind, Kind::kResumable);
}

TEST(InspectDestination, NamesThatNobodyAccountsForAreRefused) {
  for (const char* name :
       {"model-rank-0-part-0.safetensors", "model-rank-7-part-9.safetensors", "rank-0.json",
        "replicated.json", "manifest.json", "model-replicated-part-0.safetensors"}) {
    TestArtifact artifact;
    std::filesystem::create_directories(artifact.destination_path());
    WriteFileBytes(artifact.Path(name), "{\"written\": \"by somebody else\"}");
    ExpectStatus(
        InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
        absl::StatusCode::kFailedPrecondition, name);
    EXPECT_THAT(artifact.Keys(), ElementsAre(name));
  }
}

TEST(InspectDestination, AnotherArtefactIsRefusedWithWhatDiffers) {
  TestArtifact artifact;
  artifact.Make();
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.mutable_targets(0)->mutable_kernel_target()->set_profile("aiter-interleaved");
  });
  const absl::Status status =
      InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status();
  ExpectStatus(status, absl::StatusCode::kFailedPrecondition,
               "gate_mode is SEPARATED, want INTERLEAVE");
}

TEST(InspectDestination, AnArtefactOfAChangedSourceIsRefusedWithTheFile) {
  TestArtifact artifact;
  artifact.Make();
  FlipBits(artifact.SourcePath("model-00002-of-00002.safetensors"), -1);
  artifact.Replan();
  ExpectStatus(
      InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
      absl::StatusCode::kFailedPrecondition, "model-00002-of-00002.safetensors is ");
}

// A shard that somebody deleted: the result is looked at again, and made again.
TEST(InspectDestination, ADamagedArtefactIsMadeAgain) {
  const std::vector<std::function<void(TestArtifact&)>> damages = {
      [](TestArtifact& a) { std::filesystem::remove(a.Path(kPart)); },
      [](TestArtifact& a) { std::filesystem::resize_file(a.Path(kPart), 5000); },
      [](TestArtifact& a) { std::filesystem::remove(a.Path("rank-1.json")); },
      [](TestArtifact& a) { std::filesystem::remove(a.Path("config.json")); }};
  for (const auto& damage : damages) {
    TestArtifact artifact;
    artifact.Make();
    const std::string before = ReadFileBytes(artifact.Path("manifest.json"));
    damage(artifact);
    const DestinationState state = Inspect(artifact);
    EXPECT_EQ(state.kind, Kind::kFresh);
    EXPECT_THAT(state.damage, Not(IsEmpty()));
    ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
    EXPECT_THAT(artifact.Keys(), Not(Contains("manifest.json")));
    artifact.Make();
    EXPECT_EQ(ReadFileBytes(artifact.Path("manifest.json")), before);
  }
}

TEST(InspectDestination, ACopiedFileThatSomebodyChangedIsNotOverwritten) {
  TestArtifact artifact;
  artifact.Make();
  FlipBits(artifact.Path("config.json"), 0);
  ExpectStatus(
      InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
      absl::StatusCode::kFailedPrecondition, "config.json");
}

// As when a disk gives back other bytes than it took: size and version are those that were
// recorded.
TEST(ForgetDamagedParts, APartOfOtherBytesThanRecordedIsMadeAgain) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const auto go_on = [] { return absl::OkStatus(); };
  const auto forget = [&] {
    return ForgetDamagedParts(artifact.plan(), artifact.destination(), go_on);
  };
  EXPECT_THAT(forget().value(), IsEmpty());
  const std::string bytes = ReadFileBytes(artifact.Path(kPart));
  FlipBits(artifact.Path(kPart), -1);
  const std::string etag = artifact.destination().Head(kPart)->etag;
  ChangeRecord(artifact, JournalOf(artifact.plan(), 1, 0),
               [&](v1::PartRecord& record) { record.set_etag(etag); });
  ASSERT_EQ(Inspect(artifact).done, AllTasks(artifact.plan())) << "nothing else shows it";
  EXPECT_THAT(forget().value(), ElementsAre(kPart));
  EXPECT_EQ(Inspect(artifact).done.size(), AllTasks(artifact.plan()).size() - 1);
  ASSERT_TRUE(artifact.Prepare().ok());
  EXPECT_EQ(ReadFileBytes(artifact.Path(kPart)), bytes);
  EXPECT_EQ(Inspect(artifact).done, AllTasks(artifact.plan()));
}

TEST(ForgetDamagedParts, EndsWhenItIsToldTo) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const auto stopped = ForgetDamagedParts(artifact.plan(), artifact.destination(),
                                          [] { return absl::CancelledError("enough"); });
  ExpectStatus(stopped.status(), absl::StatusCode::kCancelled, "enough");
  EXPECT_EQ(Inspect(artifact).done, AllTasks(artifact.plan()));
}

TEST(IsRecorded, NeedsRecordTokenAndTheVeryObject) {
  TestArtifact artifact;
  const auto recorded = [&](int32_t part, int32_t rank) {
    for (const PlannedPart& planned : PlannedParts(artifact.plan())) {
      if (planned.part->part == part && planned.rank == rank) {
        return IsRecorded(artifact.plan(), planned, artifact.destination()).value();
      }
    }
    return false;  // not in the plan, so never in its journal
  };
  EXPECT_FALSE(recorded(0, 1));
  ASSERT_TRUE(artifact.Prepare().ok());
  EXPECT_TRUE(recorded(0, 1));
  EXPECT_TRUE(recorded(0, kReplicatedRank));
  EXPECT_FALSE(recorded(2, 1));
  FlipBits(artifact.Path(kPart), -1);
  EXPECT_FALSE(recorded(0, 1));
  EXPECT_TRUE(recorded(0, 0));
  FlipBits(artifact.SourcePath("model-00001-of-00002.safetensors"), -1);
  artifact.Replan();
  EXPECT_FALSE(recorded(0, 0));
}

// A record that was damaged counts as nothing, for the worker as for the controller, or a part
// would be wanted again and skipped for ever.
TEST(IsRecorded, ADamagedRecordIsNone) {
  for (const char* field : {"chunk_sha256", "native_crc32c", "region"}) {
    SCOPED_TRACE(field);
    TestArtifact artifact;
    ASSERT_TRUE(artifact.Prepare().ok());
    const std::string path = artifact.Path(JournalOf(artifact.plan(), 1, 0));
    std::string text = ReadFileBytes(path);
    const size_t digit =
        text.find_first_of("0123456789", text.find(field) + std::string(field).size());
    ASSERT_NE(digit, std::string::npos);
    text[digit] = text[digit] == '1' ? '2' : '1';
    WriteFileBytes(path, text);
    const PlannedPart part{0, 1, &artifact.plan().slices.regions()[0].parts[0]};
    EXPECT_FALSE(IsRecorded(artifact.plan(), part, artifact.destination()).value());
    ASSERT_TRUE(artifact.Prepare().ok());  // done again
    EXPECT_TRUE(IsRecorded(artifact.plan(), part, artifact.destination()).value());
    EXPECT_TRUE(artifact.Commit().ok());
  }
}

TEST(ReadManifest, AnEditedManifestIsRefused) {
  TestArtifact artifact;
  artifact.Make();
  const std::string text = ReadFileBytes(artifact.Path("manifest.json"));
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"SEPARATED\"", "\"INTERLEAVE\""},
           {"\"is_shuffled\": true", "\"is_shuffled\": false"},
           {"\"0.1.16\"", "\"0.0.1\""}}) {
    SCOPED_TRACE(from);
    std::string edited = text;
    const size_t at = edited.rfind(from);
    ASSERT_NE(at, std::string::npos);
    edited.replace(at, from.size(), to);
    WriteFileBytes(artifact.Path("manifest.json"), edited);
    ExpectStatus(ReadManifest(artifact.destination()).status(), absl::StatusCode::kDataLoss,
                 "was changed after it was written");
  }
}

// A listing shows objects only; names can be taken by other things, which a rename would replace.
TEST(InspectDestination, NamesTakenByOtherThingsThanObjectsClash) {
  for (const char* name : {"model-rank-0-part-0.safetensors", "config.json", "manifest.json"}) {
    for (const char* kind : {"link", "pipe", "directory"}) {
      SCOPED_TRACE(std::string(name) + " " + kind);
      TestArtifact artifact;
      const std::string path = artifact.Path(name);
      std::filesystem::create_directories(artifact.Path(""));
      if (kind[0] == 'l') std::filesystem::create_symlink("/dev/null", path);
      if (kind[0] == 'd') std::filesystem::create_directory(path);
      if (kind[0] == 'p') {
        ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
      }
      ExpectStatus(
          InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
          absl::StatusCode::kFailedPrecondition, name);
    }
  }
}

// Before the first write, not at the commit after hours of work.
TEST(InspectDestination, AnotherFileInPlaceOfACopiedOneIsRefused) {
  for (const bool equal_size : {false, true}) {
    TestArtifact artifact;
    std::string text = ReadFileBytes(artifact.SourcePath("config.json"));
    if (equal_size) text[0] = ' ';
    if (!equal_size) text += ' ';
    std::filesystem::create_directories(artifact.Path(""));
    WriteFileBytes(artifact.Path("config.json"), text);
    ExpectStatus(
        InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
        absl::StatusCode::kFailedPrecondition, "is not the source's file");
    WriteFileBytes(artifact.Path("config.json"), ReadFileBytes(artifact.SourcePath("config.json")));
    EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  }
}

TEST(InspectDestination, ARecordedPartThatIsDamagedIsCalledSo) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.PrepareRegionOf(0).ok());
  const std::string key = ObjectKey(RankPart{.rank = 0, .part = 0});
  const int64_t size = artifact.destination().Head(key)->size_bytes;
  std::filesystem::resize_file(artifact.Path(key), 4096);
  ExpectStatus(
      InspectDestination(artifact.plan(), artifact.source(), artifact.destination()).status(),
      absl::StatusCode::kFailedPrecondition, "not the part that was recorded: 4096 bytes");
  std::filesystem::remove(artifact.Path(key));
  EXPECT_GT(size, 4096);
  EXPECT_EQ(Inspect(artifact).kind, Kind::kResumable);  // the other rank's
}

// -- Cancel --

TEST(RemoveJobOutput, RemovesOnlyWhatTheJobWrote) {
  TestArtifact artifact;
  std::filesystem::create_directories(artifact.Path("logs"));
  WriteFileBytes(artifact.Path("notes.txt"), "mine");
  WriteFileBytes(artifact.Path("logs/model-rank-0-part-0.safetensors"), "mine too");
  std::filesystem::copy_file(artifact.SourcePath("config.json"), artifact.Path("config.json"));
  ASSERT_TRUE(artifact.Prepare().ok());
  std::filesystem::remove(artifact.Path(JournalOf(artifact.plan(), 0, 1)));  // not yet recorded
  ASSERT_TRUE(RemoveJobOutput(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(),
              ElementsAre("config.json", "logs/model-rank-0-part-0.safetensors", "notes.txt"));
}

// Killed during the commit, after the small files were written.
TEST(RemoveJobOutput, RemovesWhatAnUnfinishedCommitCreated) {
  TestArtifact artifact;
  std::filesystem::create_directories(artifact.destination_path());
  std::filesystem::copy_file(artifact.SourcePath("config.json"), artifact.Path("config.json"));
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_TRUE(artifact.Commit().ok());
  std::filesystem::remove(artifact.Path("manifest.json"));
  EXPECT_EQ(Inspect(artifact).done, AllTasks(artifact.plan()));
  ASSERT_TRUE(RemoveJobOutput(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(), ElementsAre("config.json"));
}

TEST(RemoveUnrecorded, KeepsRecordedPartsForTheNextRun) {
  TestArtifact artifact;
  std::filesystem::create_directories(artifact.destination_path());
  WriteFileBytes(artifact.Path("notes.txt"), "mine");
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_TRUE(artifact.Commit().ok());
  std::filesystem::remove(artifact.Path("manifest.json"));  // killed before it
  const std::string journal = JournalOf(artifact.plan(), 0, 1);
  std::filesystem::remove(artifact.Path(journal));  // killed before that part was recorded
  const DestinationState before = Inspect(artifact);
  ASSERT_TRUE(RemoveUnrecorded(artifact.plan(), artifact.destination()).ok());
  EXPECT_EQ(Inspect(artifact).done, before.done);
  std::vector<std::string> visible;
  for (const std::string& key : artifact.Keys()) {
    if (!absl::StartsWith(key, kWorkPrefix)) visible.push_back(key);
  }
  std::vector<std::string> want = {"notes.txt"};
  for (const PlannedPart& part : PlannedParts(artifact.plan())) {
    const std::string key = PlannedRecord(artifact.plan(), part)->file().key();
    if (!absl::EndsWith(key, "rank-0-part-1.safetensors")) want.push_back(key);
  }
  std::sort(want.begin(), want.end());
  EXPECT_EQ(visible, want);
}

TEST(RemoveUnrecorded, ACommittedArtefactStays) {
  TestArtifact artifact;
  artifact.Make();
  const std::vector<std::string> keys = artifact.Keys();
  ASSERT_TRUE(RemoveUnrecorded(artifact.plan(), artifact.destination()).ok());
  EXPECT_EQ(artifact.Keys(), keys);
}

TEST(CommitArtifact, RefusesBesideTheJournalOfAnotherJob) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const std::string rival =
      ObjectKey(RankJournal{.fingerprint = std::string(64, 'a'), .rank = 0, .part = 0});
  ASSERT_TRUE(artifact.destination().Put(rival, "{}", CommitGate()).ok());
  const absl::Status refused = artifact.Commit().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another job writes here"));
  EXPECT_THAT(artifact.Keys(), Not(Contains("manifest.json")));
  ASSERT_TRUE(artifact.destination().Delete(rival).ok());
  EXPECT_TRUE(artifact.Commit().ok());
}

TEST(ClearLeftovers, RemovesWhatAnUnfinishedCommitOfAnotherJobCreated) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_TRUE(artifact.Commit().ok());
  std::filesystem::remove(artifact.Path("manifest.json"));
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_part_size_bytes(8192); });
  EXPECT_EQ(Inspect(artifact).kind, Kind::kFresh);
  ASSERT_TRUE(ClearLeftovers(artifact.plan(), artifact.destination()).ok());
  EXPECT_THAT(artifact.Keys(), IsEmpty());
}

TEST(CommitArtifact, IsFinishedAfterACrashBeforeTheManifest) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  ASSERT_TRUE(artifact.Commit().ok());
  const std::string manifest = ReadFileBytes(artifact.Path("manifest.json"));
  std::filesystem::remove(artifact.Path("manifest.json"));
  std::filesystem::remove(artifact.Path("rank-1.json"));
  ASSERT_TRUE(artifact.Commit().ok());
  EXPECT_EQ(ReadFileBytes(artifact.Path("manifest.json")), manifest);
}

TEST(RemoveJobOutput, ACommittedArtefactStays) {
  TestArtifact artifact;
  artifact.Make();
  const std::vector<std::string> keys = artifact.Keys();
  ASSERT_TRUE(RemoveJobOutput(artifact.plan(), artifact.destination()).ok());
  EXPECT_EQ(artifact.Keys(), keys);
}

// A job of another fingerprint must not take the parts of this one for its own.
TEST(RemoveJobOutput, PartsOfAnotherFingerprintStay) {
  TestArtifact artifact;
  ASSERT_TRUE(artifact.Prepare().ok());
  const std::vector<std::string> keys = artifact.Keys();
  artifact.Replan([](v1::PrepJobSpec& spec) { spec.set_part_size_bytes(8192); });
  ASSERT_TRUE(RemoveJobOutput(artifact.plan(), artifact.destination()).ok());
  EXPECT_EQ(artifact.Keys(), keys);
}

TEST(ReadManifest, ErrorsSayWhatIsWrong) {
  TestArtifact artifact;
  ExpectStatus(ReadManifest(artifact.destination()).status(), absl::StatusCode::kNotFound,
               "no artefact at");
  artifact.Make();
  const std::string path = artifact.Path("manifest.json");
  const std::string text = ReadFileBytes(path);
  WriteFileBytes(path, text.substr(0, text.size() / 2));
  ExpectStatus(ReadManifest(artifact.destination()).status(), absl::StatusCode::kInvalidArgument,
               "manifest.json");
  v1::Manifest manifest = ParseManifest(text).value();
  manifest.set_fingerprint_inputs(manifest.fingerprint_inputs() + " ");
  WriteFileBytes(path, StoredJson(manifest).value());
  ExpectStatus(ReadManifest(artifact.destination()).status(), absl::StatusCode::kInvalidArgument,
               "layout_fingerprint");
}

}  // namespace
}  // namespace shardprep
