#include "workers/fetch.h"

#include <sys/file.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/request_store.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_artifact.h"
#include "workers/digest.h"
#include "workers/manifest.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAreArray;

constexpr char kEnough[] = "profile=aiter-separated,width=128";
constexpr char kBigFile[] = "model-replicated-part-0.safetensors";
constexpr char kPart0[] = "model-rank-0-part-0.safetensors";

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

// -- A store that counts and fails --

struct ReadFaults {
  std::atomic<int64_t> reads{0};  // of data chunks
  std::atomic<int64_t> read_bytes{0};
  std::atomic<int64_t> fail_from{-1};  // reads from this one on are UNAVAILABLE
  // May change what was read of a key at an offset. Called for one read at a time.
  std::function<void(const std::string& key, int64_t offset, absl::Span<uint8_t> bytes)> corrupt;
  // Half of each read arrives twice, wrong in a byte at first.
  bool half_comes_twice = false;
};

class FaultyReader : public ObjectReader {
 public:
  FaultyReader(std::unique_ptr<ObjectReader> reader, std::string key, ReadFaults& faults)
      : reader_(std::move(reader)), key_(std::move(key)), faults_(faults) {}

  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
    const int64_t read = faults_.reads++;
    if (faults_.fail_from >= 0 && read >= faults_.fail_from) {
      return absl::UnavailableError("the store is away");
    }
    faults_.read_bytes += static_cast<int64_t>(out.size());
    const absl::Status status = reader_->ReadAt(offset, out);
    if (faults_.corrupt) faults_.corrupt(key_, offset, out);
    return status;
  }
  absl::Status ReadAsItArrives(int64_t offset, absl::Span<uint8_t> out,
                               const Arrived& arrived) override {
    const absl::Status status = ReadAt(offset, out);
    if (!status.ok()) return status;
    if (faults_.half_comes_twice) {
      out[3] ^= 0x40;
      arrived(static_cast<int64_t>(out.size() / 2));
      arrived(0);
      out[3] ^= 0x40;
    }
    arrived(static_cast<int64_t>(out.size()));
    return status;
  }
  absl::Status CheckUnchanged() override { return reader_->CheckUnchanged(); }
  const ObjectInfo& info() const override { return reader_->info(); }

 private:
  std::unique_ptr<ObjectReader> reader_;
  std::string key_;
  ReadFaults& faults_;
};

class FaultyStore : public ObjectStore {
 public:
  FaultyStore(ObjectStore& store, ReadFaults& faults) : store_(store), faults_(faults) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override { return store_.Head(key); }
  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    auto reader = store_.Open(key);
    if (!reader.ok()) return reader.status();
    return std::make_unique<FaultyReader>(*std::move(reader), key, faults_);
  }
  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    return store_.Get(key, max_bytes);
  }
  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override {
    return store_.List(prefix);
  }
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override {
    return store_.Create(key, options);
  }
  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override {
    return store_.Put(key, bytes, gate);
  }
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    return store_.PutIfAbsent(key, bytes, gate);
  }
  absl::Status Delete(const std::string& key) override { return store_.Delete(key); }
  int64_t WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const override {
    return store_.WriteBufferBytes(largest_object, largest_reserve);
  }
  int64_t FurtherWriteBytes(int64_t largest_object, int64_t largest_reserve) const override {
    return store_.FurtherWriteBytes(largest_object, largest_reserve);
  }
  absl::StatusOr<int64_t> FreeBytes() override { return store_.FreeBytes(); }
  absl::Status CheckWritable() override { return store_.CheckWritable(); }
  const std::string& uri() const override { return store_.uri(); }

 private:
  ObjectStore& store_;
  ReadFaults& faults_;
};

// -- Artefacts that tests share, since none changes them --

CheckpointSpec OneLayer() {
  return {
      .hidden = 160, .intermediate = 192, .experts = 3, .layers = 1, .mtp_layers = 0, .files = 1};
}

TestArtifact& SmallArtifact() {
  static TestArtifact artifact({.checkpoint = OneLayer()});
  static const bool made = (artifact.Make(), true);
  SP_CHECK(made);
  return artifact;
}

// With a replicated file of three chunks.
TestArtifact& BigArtifact() {
  static TestArtifact artifact([] {
    TestTensor big;
    big.name = "big.weight";
    big.shape = {33, 1 << 20};
    TestArtifactOptions options{.checkpoint = OneLayer()};
    options.checkpoint.extra.push_back(big);
    return options;
  }());
  static const bool made = (artifact.Make(), true);
  SP_CHECK(made);
  return artifact;
}

class FetchTest : public ::testing::Test {
 protected:
  explicit FetchTest(TestArtifact& artifact = SmallArtifact()) : artifact_(artifact) {}

  FetchOptions Options(const std::string& ranks = "0", const std::string& expect = kEnough) {
    FetchOptions options;
    options.ranks = ParseRankList(ranks).value();
    options.expect = ParseExpectations(expect).value();
    options.into = into_;
    return options;
  }
  absl::StatusOr<FetchReport> Fetch(const FetchOptions& options) {
    return FetchRanks(store_, options);
  }
  std::set<std::string> Names(const std::string& directory) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  // Every fetched file is the artefact's.
  void ExpectEqualFiles() {
    for (const std::string& name : Names(into_)) {
      EXPECT_EQ(ReadFileBytes(into_ + "/" + name), ReadFileBytes(artifact_.Path(name))) << name;
    }
  }

  TestArtifact& artifact_;
  TempDir directory_;
  std::string into_ = directory_ / "model";
  std::string partial_ = into_ + ".shardprep-partial";
  ReadFaults faults_;
  FaultyStore store_{artifact_.destination(), faults_};
};

class FetchChunksTest : public FetchTest {
 protected:
  FetchChunksTest() : FetchTest(BigArtifact()) {}
};

TEST_F(FetchTest, BringsTheFilesOfTheRanksAndNoOther) {
  const auto report = Fetch(Options("1"));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(Names(into_), UnorderedElementsAreArray(
                                {"config.json", "generation_config.json", "manifest.json",
                                 "model-rank-1-part-0.safetensors", kBigFile, "rank-1.json",
                                 "replicated.json", "tokenizer.json", "tokenizer_config.json"}));
  ExpectEqualFiles();
  EXPECT_FALSE(report->was_complete);
  EXPECT_EQ(report->files, 9);
  EXPECT_EQ(report->bytes_downloaded, faults_.read_bytes);
  EXPECT_EQ(report->layout_fingerprint, artifact_.plan().fingerprint);
  EXPECT_FALSE(std::filesystem::exists(partial_));
}

TEST_F(FetchChunksTest, SeveralRanksAndStreams) {
  for (const int parallel : {1, 2, 16}) {
    into_ = directory_ / absl::StrCat("model-", parallel);
    FetchOptions options = Options("0-1");
    options.parallel = parallel;
    int64_t last = 0;
    options.progress = [&](int64_t done, int64_t total) {
      EXPECT_GT(done, last);
      EXPECT_LE(done, total);
      last = done;
    };
    const auto report = Fetch(options);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(last, report->bytes_downloaded);
    ExpectEqualFiles();
  }
}

TEST_F(FetchTest, FromAUri) {
  const auto report = FetchRanks(artifact_.destination().uri(), {}, Options());
  ASSERT_TRUE(report.ok()) << report.status();
  ExpectEqualFiles();
}

TEST_F(FetchTest, AnEmptyDirectoryIsFilled) {
  std::filesystem::create_directories(into_);
  ASSERT_TRUE(Fetch(Options()).ok());
  ExpectEqualFiles();
}

TEST_F(FetchTest, MissingParentsAreMade) {
  into_ = directory_ / "a/b/model";
  FetchOptions options = Options();
  options.into += "/";
  ASSERT_TRUE(Fetch(options).ok());
  ExpectEqualFiles();
}

TEST_F(FetchTest, AWholeDirectoryIsCheckedAndLeft) {
  ASSERT_TRUE(Fetch(Options()).ok());
  faults_.reads = 0;
  const auto report = Fetch(Options());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->was_complete);
  EXPECT_EQ(report->bytes_downloaded, 0);
  EXPECT_EQ(faults_.reads, 0);
}

// What was fetched before is not trusted because it is there.
TEST_F(FetchChunksTest, AFlippedBitInAWholeDirectoryIsFound) {
  ASSERT_TRUE(Fetch(Options()).ok());
  FlipBits(into_ + "/" + kBigFile, 20 << 20);
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kDataLoss,
               absl::StrCat(kBigFile, ": chunk 1 has SHA-256"));
  FlipBits(into_ + "/" + kBigFile, 20 << 20);
  FlipBits(into_ + "/config.json", 0);
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kDataLoss, "config.json");
}

TEST_F(FetchTest, OtherContentIsRefusedAndLeft) {
  std::filesystem::create_directories(into_);
  WriteFileBytes(into_ + "/notes.txt", "mine");
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kFailedPrecondition,
               "holds something else (notes.txt)");
  EXPECT_THAT(Names(into_), ElementsAre("notes.txt"));
  std::filesystem::remove_all(into_);
  WriteFileBytes(into_, "a file");
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kFailedPrecondition,
               "is not a directory");
}

TEST_F(FetchTest, TheSameArtefactWithOtherRanksIsRefused) {
  ASSERT_TRUE(Fetch(Options("0")).ok());
  ExpectStatus(Fetch(Options("0-1")).status(), absl::StatusCode::kFailedPrecondition,
               "another directory");
  ExpectStatus(Fetch(Options("1")).status(), absl::StatusCode::kFailedPrecondition, kPart0);
}

// -- Interruption --

// The store goes away in the middle. Fetched again, only what was not finished is read.
TEST_F(FetchChunksTest, ResumesChunkByChunk) {
  FetchOptions options = Options();
  options.parallel = 1;
  faults_.fail_from = 3;  // rank 0's part and two of the three big chunks
  ExpectStatus(Fetch(options).status(), absl::StatusCode::kUnavailable, "the store is away");
  EXPECT_FALSE(std::filesystem::exists(into_));
  const int64_t first = faults_.read_bytes;
  faults_.fail_from = -1;
  const auto report = Fetch(options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->bytes_downloaded, faults_.read_bytes - first);
  int64_t data = 0;
  for (const char* name : {kPart0, kBigFile}) {
    data += static_cast<int64_t>(std::filesystem::file_size(into_ + "/" + name));
  }
  EXPECT_EQ(faults_.read_bytes, data);
  ExpectEqualFiles();
}

TEST_F(FetchChunksTest, AChunkThatWasHalfWrittenIsReadAgain) {
  FetchOptions options = Options();
  options.parallel = 1;
  faults_.fail_from = 3;
  ASSERT_FALSE(Fetch(options).ok());
  FlipBits(partial_ + "/" + kBigFile, 17 << 20);
  faults_.fail_from = -1;
  faults_.read_bytes = 0;
  ASSERT_TRUE(Fetch(options).ok());
  const auto size = static_cast<int64_t>(std::filesystem::file_size(into_ + "/" + kBigFile));
  EXPECT_EQ(faults_.read_bytes, size - kDigestChunkBytes);
  ExpectEqualFiles();
}

TEST_F(FetchTest, APartialDirectoryOfAnotherArtefactIsEmptied) {
  std::filesystem::create_directories(partial_);
  WriteFileBytes(partial_ + "/manifest.json", "of another artefact");
  WriteFileBytes(partial_ + "/" + kPart0, "of another artefact");
  WriteFileBytes(partial_ + "/model-rank-9-part-0.safetensors", "of another artefact");
  ASSERT_TRUE(Fetch(Options()).ok());
  ExpectEqualFiles();
}

TEST_F(FetchTest, AnInterruptedFetchOfOtherRanksLeavesNothingBehind) {
  faults_.fail_from = 1;
  FetchOptions options = Options("1");
  options.parallel = 1;
  ASSERT_FALSE(Fetch(options).ok());
  EXPECT_THAT(Names(partial_), testing::Contains("model-rank-1-part-0.safetensors"));
  faults_.fail_from = -1;
  ASSERT_TRUE(Fetch(Options("0")).ok());
  EXPECT_THAT(Names(into_), Not(testing::Contains("model-rank-1-part-0.safetensors")));
  ExpectEqualFiles();
}

TEST_F(FetchTest, TwoProcessesDoNotShareADirectory) {
  std::filesystem::create_directories(partial_);
  const int fd = ::open((partial_ + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kFailedPrecondition,
               "another process is fetching into");
  ::close(fd);
  EXPECT_TRUE(Fetch(Options()).ok());
}

// -- Wrong bytes --

TEST_F(FetchChunksTest, AWrongChunkIsReadOnceMore) {
  int wrong = 1;
  faults_.corrupt = [&](const std::string& key, int64_t offset, absl::Span<uint8_t> bytes) {
    if (key == kBigFile && offset == kDigestChunkBytes && wrong-- > 0) bytes[7] ^= 1;
  };
  FetchOptions options = Options();
  options.parallel = 1;
  ASSERT_TRUE(Fetch(options).ok());
  EXPECT_EQ(faults_.reads, 1 + 3 + 1);
  ExpectEqualFiles();
}

TEST_F(FetchChunksTest, BytesThatComeAnewAreDigestedAnew) {
  faults_.half_comes_twice = true;
  ASSERT_TRUE(Fetch(Options()).ok());
  EXPECT_EQ(faults_.reads, 1 + 3);
  ExpectEqualFiles();
}

TEST_F(FetchChunksTest, WhereEachIsARequestAllObjectsAreOpenedBeforeTheFirstIsRead) {
  RequestStore requests(&store_, int64_t{8} << 20);
  absl::Mutex mu;
  std::multiset<std::string> opened;
  requests.before_open = [&](const RequestStore::Request& request) {
    absl::MutexLock lock(&mu);
    opened.insert(request.key);
    return absl::OkStatus();
  };
  requests.before_read = [&](const RequestStore::Request&) {
    absl::MutexLock lock(&mu);
    EXPECT_EQ(opened, (std::multiset<std::string>{kPart0, kBigFile}));
    return absl::OkStatus();
  };
  ASSERT_TRUE(FetchRanks(requests, Options()).ok());
  ExpectEqualFiles();

  requests.Forget();
  requests.before_open = [](const RequestStore::Request& request) {
    return request.key == kBigFile ? absl::NotFoundError("gone") : absl::OkStatus();
  };
  FetchOptions options = Options();
  options.into = directory_ / "other";
  ExpectStatus(FetchRanks(requests, options).status(), absl::StatusCode::kDataLoss,
               absl::StrCat(kBigFile, ": missing"));
  EXPECT_TRUE(requests.Reads().empty());
}

TEST_F(FetchChunksTest, AChunkThatStaysWrongIsDataLoss) {
  faults_.corrupt = [&](const std::string& key, int64_t offset, absl::Span<uint8_t> bytes) {
    if (key == kBigFile && offset == 2 * kDigestChunkBytes) bytes.back() ^= 0x80;
  };
  ExpectStatus(Fetch(Options()).status(), absl::StatusCode::kDataLoss,
               absl::StrCat(kBigFile, " at ", store_.uri(), ": chunk 2 has SHA-256"));
  EXPECT_FALSE(std::filesystem::exists(into_));
}

struct Damage {
  std::string name;
  std::function<void(TestArtifact&)> damage;
  std::string text;
};

void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class FetchDamage : public ::testing::TestWithParam<Damage> {};

TEST_P(FetchDamage, NothingAppears) {
  TestArtifactOptions artifact_options;
  artifact_options.checkpoint.layers = 1;
  TestArtifact artifact(artifact_options);
  artifact.Make();
  GetParam().damage(artifact);
  TempDir directory;
  FetchOptions options;
  options.ranks = {0};
  options.into = directory / "model";
  options.no_expect = true;
  ExpectStatus(FetchRanks(artifact.destination(), options).status(), absl::StatusCode::kDataLoss,
               GetParam().text);
  EXPECT_FALSE(std::filesystem::exists(options.into));
}

INSTANTIATE_TEST_SUITE_P(
    All, FetchDamage,
    ::testing::Values(
        Damage{"FlippedBit", [](TestArtifact& a) { FlipBits(a.Path(kPart0), -1); },
               "model-rank-0-part-0.safetensors"},
        Damage{"Truncated",
               [](TestArtifact& a) { std::filesystem::resize_file(a.Path(kPart0), 9); },
               "9 bytes, want"},
        Damage{"MissingPart", [](TestArtifact& a) { std::filesystem::remove(a.Path(kPart0)); },
               "model-rank-0-part-0.safetensors: missing"},
        Damage{"RanksExchanged",
               [](TestArtifact& a) {
                 std::filesystem::remove(a.Path(kPart0));
                 std::filesystem::copy_file(a.Path("model-rank-1-part-0.safetensors"),
                                            a.Path(kPart0));
               },
               "chunk 0 has SHA-256"},
        Damage{"RankManifest", [](TestArtifact& a) { FlipBits(a.Path("rank-0.json"), 40); },
               "rank-0.json"},
        Damage{"MissingRankManifest",
               [](TestArtifact& a) { std::filesystem::remove(a.Path("rank-0.json")); },
               "rank-0.json: missing"},
        Damage{"Config", [](TestArtifact& a) { FlipBits(a.Path("config.json"), 1); },
               "config.json"},
        Damage{
            "RankManifestOfAnotherRank",
            [](TestArtifact& a) { a.Reseal(0, [](v1::RankManifest& rank) { rank.set_rank(1); }); },
            "is of rank 1"},
        Damage{"NameThatLeavesTheDirectory",
               [](TestArtifact& a) {
                 a.Reseal(0, [](v1::RankManifest& rank) {
                   rank.mutable_files(0)->set_key("../model-rank-0-part-0.safetensors");
                 });
               },
               "file 0 is ../model-rank-0"}),
    [](const auto& test) { return test.param.name; });

// -- Expectations --

TEST_F(FetchTest, WhatAgreesPasses) {
  const v1::Manifest manifest = ReadManifest(artifact_.destination()).value();
  const std::string all = absl::StrCat(
      "backend=AITER_MXFP4_BF16,activation=SILU,arch=gfx950,tp=2,ep=1,profile=aiter-separated,"
      "width=128,hidden=256,gate_mode=SEPARATED,aiter=",
      manifest.minimum_aiter_version(), ",fingerprint=", manifest.layout_fingerprint(),
      ",content=", manifest.content_id());
  const auto report = Fetch(Options("0", all));
  EXPECT_TRUE(report.ok()) << report.status();
}

// Nothing to hold a stated version against is no agreement.
TEST(FetchAiter, AVersionIsRefusedWhereTheArtefactNeedsNone) {
  TestArtifactOptions options;
  options.profile = "logical";
  TestArtifact artifact(options);
  artifact.Make();
  ASSERT_EQ(ReadManifest(artifact.destination())->minimum_aiter_version(), "");
  const TempDir directory;
  FetchOptions fetch;
  fetch.ranks = {0};
  fetch.into = directory / "model";
  fetch.expect = ParseExpectations("profile=logical,width=128,aiter=9.9").value();
  ExpectStatus(FetchRanks(artifact.destination(), fetch).status(),
               absl::StatusCode::kFailedPrecondition, "aiter: expected 9.9, found that");
  fetch.expect = ParseExpectations("profile=logical,width=128").value();
  EXPECT_TRUE(FetchRanks(artifact.destination(), fetch).ok());
}

struct Mismatch {
  std::string expect;
  std::string text;
};

TEST_F(FetchTest, AMismatchNamesFieldExpectedAndFound) {
  const v1::Manifest manifest = ReadManifest(artifact_.destination()).value();
  ASSERT_EQ(manifest.minimum_aiter_version(), "0.1.16");  // 96 is no multiple of 256
  const std::string zeros(64, '0');
  const Mismatch table[] = {
      {"backend=AITER_MXFP4_FP8", "backend: expected AITER_MXFP4_FP8, found AITER_MXFP4_BF16"},
      {"activation=SITU", "activation: expected SITU, found SILU"},
      {"arch=gfx942", "arch: expected gfx942, found gfx950"},
      {"tp=8", "tp: expected 8, found 2"},
      {"ep=2", "ep: expected 2, found 1"},
      {"profile=aiter-interleaved", "profile: expected aiter-interleaved, found aiter-separated"},
      {"width=96", "width: expected 96, found 128"},  // native is not what is asked
      {"hidden=160", "hidden: expected 160, found 256"},
      {"gate_mode=INTERLEAVE", "gate_mode: expected INTERLEAVE, found SEPARATED"},
      {"aiter=0.1.15.post2", "aiter: expected 0.1.15.post2, found that"},
      {"fingerprint=" + zeros, "fingerprint: expected 0000"},
      {"content=" + zeros, "content: expected 0000"}};
  for (const Mismatch& row : table) {
    // Stated keys come first: not even profile and width are missed before.
    ExpectStatus(Fetch(Options("0", row.expect)).status(), absl::StatusCode::kFailedPrecondition,
                 row.text);
    FetchOptions waived = Options("0", row.expect);
    waived.no_expect = true;
    ExpectStatus(Fetch(waived).status(), absl::StatusCode::kFailedPrecondition, row.text);
  }
  EXPECT_FALSE(std::filesystem::exists(partial_));
}

// The case that the check exists for: an artefact that was padded to 512 under a generic rule, and
// an engine that is built for 384.
TEST(Fetch, AStale512WideArtefactIsRefusedByA384WideEngine) {
  TestArtifactOptions wide;
  wide.checkpoint = {
      .hidden = 256, .intermediate = 768, .experts = 2, .layers = 1, .mtp_layers = 0, .files = 1};
  wide.profile = "logical";
  TestArtifact artifact(wide);
  artifact.Replan([](v1::PrepJobSpec& spec) {
    spec.mutable_targets(0)->mutable_kernel_target()->set_backend("AITER_MXFP4_FP8");
  });
  artifact.Make();
  ASSERT_EQ(artifact.plan().summary.extents().intermediate(), 384);
  TempDir directory;
  FetchOptions options;
  options.ranks = {0};
  options.into = directory / "model";
  options.expect = ParseExpectations("profile=logical,width=384").value();
  ExpectStatus(FetchRanks(artifact.destination(), options).status(),
               absl::StatusCode::kFailedPrecondition, "width: expected 384, found 512");
  options.expect = ParseExpectations("profile=logical,width=512").value();
  EXPECT_TRUE(FetchRanks(artifact.destination(), options).ok());
}

// Prepared for one gate mode, asked for by a kernel of the other: shapes and dtypes are the same.
TEST(Fetch, AnotherGateModeIsRefused) {
  TestArtifactOptions interleaved;
  interleaved.checkpoint.layers = 1;
  interleaved.profile = "aiter-interleaved";
  TestArtifact artifact(interleaved);
  artifact.Make();
  EXPECT_TRUE(ReadManifest(artifact.destination())->is_shuffled());
  TempDir directory;
  FetchOptions options;
  options.ranks = {0};
  options.into = directory / "model";
  options.expect =
      ParseExpectations("gate_mode=SEPARATED,profile=aiter-interleaved,width=128").value();
  ExpectStatus(FetchRanks(artifact.destination(), options).status(),
               absl::StatusCode::kFailedPrecondition,
               "gate_mode: expected SEPARATED, found INTERLEAVE");
}

TEST_F(FetchTest, ProfileAndWidthMustBeStated) {
  for (const std::string expect : {"", "tp=2", "profile=aiter-separated", "width=128"}) {
    ExpectStatus(Fetch(Options("0", expect)).status(), absl::StatusCode::kInvalidArgument,
                 "at least profile and width");
  }
  FetchOptions options = Options("0", "");
  options.no_expect = true;
  EXPECT_TRUE(Fetch(options).ok());
}

TEST_F(FetchTest, RanksAreThoseOfTheWorld) {
  ExpectStatus(Fetch(Options("2")).status(), absl::StatusCode::kInvalidArgument,
               "rank 2: the artefact has 2 ranks, 0 to 1");
  FetchOptions options = Options();
  options.ranks = {};
  ExpectStatus(Fetch(options).status(), absl::StatusCode::kInvalidArgument, "no ranks");
  options.ranks = {0, 0};
  ExpectStatus(Fetch(options).status(), absl::StatusCode::kInvalidArgument, "twice");
  options.ranks = {-1};
  ExpectStatus(Fetch(options).status(), absl::StatusCode::kInvalidArgument, "rank -1");
}

TEST_F(FetchTest, BadOptionsAreRefused) {
  for (const char* into : {"", ".", "..", "/", "a/.."}) {
    FetchOptions options = Options();
    options.into = into;
    ExpectStatus(Fetch(options).status(), absl::StatusCode::kInvalidArgument,
                 "names no directory to create");
  }
  for (const int parallel : {0, -1, 257}) {
    FetchOptions options = Options();
    options.parallel = parallel;
    ExpectStatus(Fetch(options).status(), absl::StatusCode::kInvalidArgument, "parallel is");
  }
}

TEST_F(FetchTest, WithoutAManifestThereIsNothing) {
  TempDir empty;
  ExpectStatus(FetchRanks(empty.path(), {}, Options()).status(), absl::StatusCode::kNotFound,
               "no artefact at");
}

TEST(ParseExpectations, KnownKeysOnceEach) {
  const auto two = ParseExpectations("tp=8,profile=aiter-separated").value();
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].key, "tp");
  EXPECT_EQ(two[1].value, "aiter-separated");
  EXPECT_THAT(ParseExpectations("").value(), IsEmpty());
  const std::pair<const char*, const char*> table[] = {
      {"widht=384",
       "unknown expectation 'widht'; known: backend, activation, arch, tp, ep, "
       "profile, width, hidden, gate_mode, aiter, fingerprint, content"},
      {"Width=384", "unknown"},
      {"width", "key=value"},
      {"width=", "number"},
      {"width=384,", "key=value"},
      {"width=0", "number"},
      {"width=0384", "number"},
      {"width=-384", "number"},
      {"width=384x", "number"},
      {"width= 384", "number"},
      {"width=99999999999999999999", "number"},
      {"tp=8,tp=8", "given twice"},
      {"profile=", "a value"},
      {"aiter=new", "version"},
      {"fingerprint=abc", "64"},
      {"=3", "unknown"},
      {",", "key=value"}};
  for (const auto& [text, what] : table) {
    ExpectStatus(ParseExpectations(text).status(), absl::StatusCode::kInvalidArgument, what);
  }
  EXPECT_FALSE(ParseExpectations("backend=" + std::string(5000, 'x')).ok());
}

TEST(ParseRankList, NumbersAndRanges) {
  EXPECT_THAT(ParseRankList("3").value(), ElementsAre(3));
  EXPECT_THAT(ParseRankList("1,0").value(), ElementsAre(0, 1));
  EXPECT_THAT(ParseRankList("0-2,5,7-7").value(), ElementsAre(0, 1, 2, 5, 7));
  for (const char* text : {"", ",", "1,", "a", "-1", "1-", "-", "3-1", "0,0", "0-3,2", "01", "1 ",
                           "+1", "0-70000", "99999999999999999999", "1-2-3", "0x1"}) {
    EXPECT_EQ(ParseRankList(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

// Ascending, by PEP 440.
TEST(CompareVersions, OrdersReleases) {
  const std::vector<std::string> ascending = {
      "0.1.5", "0.1.6.dev1",  "0.1.6a1",      "0.1.6a2", "0.1.6b1", "0.1.6rc1.dev2", "0.1.6rc1",
      "0.1.6", "0.1.6.post2", "0.1.6.post10", "0.1.16",  "0.1.18",  "0.2",           "1"};
  for (size_t a = 0; a < ascending.size(); ++a) {
    for (size_t b = 0; b < ascending.size(); ++b) {
      const int want = a < b ? -1 : (a == b ? 0 : 1);
      EXPECT_EQ(CompareVersions(ascending[a], ascending[b]).value(), want)
          << ascending[a] << " " << ascending[b];
    }
  }
  EXPECT_EQ(CompareVersions("0.1.6", "0.1.6.0").value(), 0);
  EXPECT_EQ(CompareVersions("0.1.6+rocm7.g1234abc", "0.1.6").value(), 0);
  for (const char* text : {"", "v1", "1.", ".1", "1..2", "1.2x", "1.2.post", "1.2+", "1.2rc",
                           "1.2+a b", "9999999999", "1.2-3"}) {
    EXPECT_EQ(CompareVersions(text, "1").status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

}  // namespace
}  // namespace shardprep
