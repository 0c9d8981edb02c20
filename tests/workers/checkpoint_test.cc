// Source policies that are the store's own (which links are followed, what a vanished object
// answers) are tested with the store; here is only that their answers reach the user.
#include "workers/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status_macros.h"
#include "tests/support/request_store.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/digest.h"
#include "workers/open_store.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kConfig[] = R"({"model_type":"m"})";

// Passes everything on and notes which objects were opened and how much of them was read.
class WatchedStore : public ForwardingStore {
 public:
  explicit WatchedStore(std::unique_ptr<ObjectStore> store)
      : ForwardingStore(store.get()), store_(std::move(store)) {}

  std::set<std::string> opened;
  std::map<std::string, int64_t> end_of_reads;

  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    opened.insert(key);
    auto reader = store_->Open(key);
    if (!reader.ok()) return reader.status();
    return std::make_unique<Reader>(*std::move(reader), &end_of_reads[key]);
  }
  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    opened.insert(key);
    return store_->Get(key, max_bytes);
  }
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string&,
                                                       const WriteOptions&) override {
    return Written();
  }
  absl::StatusOr<ObjectInfo> Put(const std::string&, const std::string&,
                                 const CommitGate&) override {
    return Written();
  }
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string&, const std::string&,
                                         const CommitGate&) override {
    return Written();
  }
  absl::Status Delete(const std::string&) override { return Written(); }
  absl::Status CheckWritable() override { return Written(); }

 private:
  class Reader : public ObjectReader {
   public:
    Reader(std::unique_ptr<ObjectReader> reader, int64_t* end)
        : reader_(std::move(reader)), end_(end) {}
    absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
      *end_ = std::max(*end_, offset + static_cast<int64_t>(out.size()));
      return reader_->ReadAt(offset, out);
    }
    absl::Status CheckUnchanged() override { return reader_->CheckUnchanged(); }
    const ObjectInfo& info() const override { return reader_->info(); }

   private:
    std::unique_ptr<ObjectReader> reader_;
    int64_t* end_;
  };

  static absl::Status Written() {
    ADD_FAILURE() << "reading a checkpoint writes nothing";
    return absl::InternalError("written");
  }

  std::unique_ptr<ObjectStore> store_;
};

std::unique_ptr<ObjectStore> Store(const std::string& directory) {
  auto store = OpenStore(directory, {});
  SP_CHECK(store.ok());
  return *std::move(store);
}

absl::StatusOr<Checkpoint> ReadDirectory(const TempDir& directory,
                                         const CheckpointOptions& options = {}) {
  return ReadCheckpoint(*Store(directory.path()), options);
}

void WriteText(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream out(path, std::ios::binary);
  out << text;
  ASSERT_TRUE(out.flush());
}

// A file with U8 tensors of one byte each.
std::string FileOf(const std::vector<std::string>& names,
                   const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorEntry> entries;
  entries.reserve(names.size());
  for (const std::string& name : names) {
    entries.push_back({.name = name,
                       .dtype = Dtype::kU8,
                       .shape = {1},
                       .begin = static_cast<int64_t>(entries.size()),
                       .size_bytes = 1});
  }
  return *SerializeHeader(entries, metadata) + std::string(names.size(), 'd');
}

// `{"a":"f1", ...}` as an index.
std::string IndexOf(const std::map<std::string, std::string>& files) {
  std::string json;
  for (const auto& [tensor, file] : files) {
    absl::StrAppend(&json, json.empty() ? "" : ",", "\"", tensor, "\":\"", file, "\"");
  }
  return absl::StrCat(R"({"metadata":{},"weight_map":{)", json, "}}");
}

std::vector<std::string> Names(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  names.reserve(static_cast<size_t>(checkpoint.tensors().size()));
  for (int64_t i = 0; i < checkpoint.tensors().size(); ++i) {
    names.emplace_back(checkpoint.tensors().at(i).name);
  }
  return names;
}

std::vector<std::string> FileNames(const std::vector<SmallFile>& files) {
  std::vector<std::string> names;
  names.reserve(files.size());
  for (const SmallFile& file : files) names.push_back(file.name);
  return names;
}

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(ReadCheckpoint, FindsEveryTensorAndItsBytes) {
  TempDir directory;
  const CheckpointSpec spec;
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  const auto store = Store(directory.path());
  const auto checkpoint = ReadCheckpoint(*store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto expected = TestTensors(spec);
  ASSERT_EQ(checkpoint->tensors().size(), static_cast<int64_t>(expected->size()));
  for (const TestTensor& tensor : *expected) {
    SCOPED_TRACE(tensor.name);
    const auto index = checkpoint->FindTensor(tensor.name);
    ASSERT_TRUE(index.has_value());
    const TensorInfo info = checkpoint->tensors().at(*index);
    EXPECT_EQ(std::string(info.name), tensor.name);
    EXPECT_EQ(info.dtype, tensor.dtype);
    EXPECT_EQ(std::vector<int64_t>(info.shape.begin(), info.shape.end()), tensor.shape);
    EXPECT_EQ(info.size_bytes, *TensorBytes(tensor.dtype, tensor.shape));
    const CheckpointFile& file = checkpoint->files()[static_cast<size_t>(info.file)];
    EXPECT_EQ(file.name, TestFileName(spec, tensor.file));
    std::vector<uint8_t> bytes(static_cast<size_t>(info.size_bytes));
    ASSERT_TRUE((*store->Open(file.name))->ReadAt(info.offset, absl::MakeSpan(bytes)).ok());
    const int64_t row_bytes = tensor.place ? info.size_bytes / tensor.shape[0] : 1;
    int64_t different = 0;
    for (int64_t i = 0; i < info.size_bytes; ++i) {
      const uint8_t want = tensor.place
                               ? ExpectedByte(tensor.place->layer, tensor.place->expert,
                                              tensor.place->kind, i / row_bytes, i % row_bytes)
                               : ExpectedOtherByte(tensor.name, i);
      different += bytes[static_cast<size_t>(i)] != want ? 1 : 0;
    }
    EXPECT_EQ(different, 0);
  }
}

TEST(ReadCheckpoint, DescribesFilesByTheirHeaders) {
  TempDir directory;
  const CheckpointSpec spec;
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  const auto store = Store(directory.path());
  const auto checkpoint = ReadCheckpoint(*store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->files().size(), static_cast<size_t>(spec.files));
  for (int i = 0; i < spec.files; ++i) {
    const CheckpointFile& file = checkpoint->files()[static_cast<size_t>(i)];
    EXPECT_EQ(file.name, TestFileName(spec, i));
    const auto content = store->Get(file.name, int64_t{1} << 30);
    ASSERT_TRUE(content.ok());
    EXPECT_EQ(file.size_bytes, static_cast<int64_t>(content->size()));
    EXPECT_EQ(file.etag, store->Head(file.name)->etag);
    EXPECT_EQ(file.header_sha256,
              Sha256Hex(content->substr(0, static_cast<size_t>(file.data_start))));
    EXPECT_EQ(content->substr(8, 1), "{");
    EXPECT_EQ((*content)[static_cast<size_t>(file.data_start) - 1] == '}' ||
                  (*content)[static_cast<size_t>(file.data_start) - 1] == ' ',
              true);
  }
}

TEST(ReadCheckpoint, OpensWhatTheIndexNamesAndNothingElse) {
  TempDir directory;
  const CheckpointSpec spec;
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  // Another complete split, a whole copy in sub-folders, and a stray file.
  for (const char* name :
       {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors",
        "original/model-00001-of-00003.safetensors", "metal/model.bin"}) {
    WriteText(directory / name, "not to be opened");
  }
  WatchedStore store(Store(directory.path()));
  const auto checkpoint = ReadCheckpoint(store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(store.opened, UnorderedElementsAre(kIndexName, "config.json", TestFileName(spec, 0),
                                                 TestFileName(spec, 1), TestFileName(spec, 2)));
  EXPECT_THAT(FileNames(checkpoint->left_files()),
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors"));
}

TEST(ReadCheckpoint, WithoutAnIndexTakesTheRootOnly) {
  TempDir directory;
  CheckpointSpec spec;
  spec.with_index = false;
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  WriteText(directory / "original/model.safetensors", FileOf({"copy"}));
  const auto checkpoint = ReadDirectory(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->files().size(), static_cast<size_t>(spec.files));
  EXPECT_EQ(checkpoint->tensors().size(), static_cast<int64_t>(TestTensors(spec)->size()));
  EXPECT_FALSE(checkpoint->FindTensor("copy").has_value());
  EXPECT_THAT(checkpoint->stale(), IsEmpty());
  EXPECT_THAT(checkpoint->unindexed(), IsEmpty());
}

TEST(ReadCheckpoint, FindTensorKnowsItsEdges) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "model.safetensors", FileOf({"b", "d", "d.x"}));
  const auto checkpoint = ReadDirectory(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->FindTensor("b"), 0);
  EXPECT_EQ(checkpoint->FindTensor("d"), 1);
  EXPECT_EQ(checkpoint->FindTensor("d.x"), 2);
  for (const char* absent : {"", "a", "c", "d.", "d.y", "e"}) {
    EXPECT_EQ(checkpoint->FindTensor(absent), std::nullopt) << absent;
  }
}

TEST(ReadCheckpoint, ReadsHeadersLongerThanTheFirstRead) {
  TempDir directory;
  std::vector<std::string> names;
  names.reserve(16'001);
  for (int i = 0; i < 16'000; ++i) {
    names.push_back(absl::StrCat("layers.0.a_name_of_some_length.", 10'000 + i));
  }
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "model.safetensors", FileOf(names));
  WriteText(directory / "second.safetensors", FileOf({"z"}));
  WatchedStore store(Store(directory.path()));
  const auto checkpoint = ReadCheckpoint(store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_GT(checkpoint->files()[0].data_start, int64_t{1} << 20);
  EXPECT_EQ(store.end_of_reads["model.safetensors"], checkpoint->files()[0].data_start);
  names.emplace_back("z");
  EXPECT_EQ(Names(*checkpoint), names);
}

TEST(ReadCheckpoint, ReadsNoDataOfLargeFiles) {
  TempDir directory;
  const int64_t large = (int64_t{5} << 30) + 3;
  const auto header = SerializeHeader(
      {{.name = "a", .dtype = Dtype::kU8, .shape = {large}, .begin = 0, .size_bytes = large},
       {.name = "b", .dtype = Dtype::kBF16, .shape = {2}, .begin = large, .size_bytes = 4}},
      {});
  ASSERT_TRUE(header.ok()) << header.status();
  const std::string path = directory / "model.safetensors";
  WriteText(directory / "config.json", kConfig);
  WriteText(path, *header);
  // Sparse: only the last tensor has bytes on disk, behind 2^32.
  std::filesystem::resize_file(path, header->size() + static_cast<uintmax_t>(large));
  std::ofstream(path, std::ios::binary | std::ios::app) << "WXYZ";
  WatchedStore store(Store(directory.path()));
  const auto checkpoint = ReadCheckpoint(store);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_LE(store.end_of_reads["model.safetensors"], int64_t{1} << 20);
  const TensorInfo tensor = checkpoint->tensors().at(1);
  std::vector<uint8_t> bytes(4);
  ASSERT_TRUE(
      (*store.Open("model.safetensors"))->ReadAt(tensor.offset, absl::MakeSpan(bytes)).ok());
  EXPECT_THAT(bytes, ElementsAre('W', 'X', 'Y', 'Z'));
}

// 64 files cost as many round trips as 4 files in a row, and no more than their beginnings.
TEST(ReadCheckpoint, HeadersOfSixteenFilesAreRequestedAtOnce) {
  constexpr int kFiles = 40, kAtOnce = 16;
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  std::map<std::string, std::string> index;
  constexpr int kLongNames = 8'000;
  std::vector<std::string> long_names;
  long_names.reserve(kLongNames);
  for (int i = 0; i < kLongNames; ++i) {
    long_names.push_back(absl::StrCat("a.name.of.some.length.", i));
  }
  for (int f = 0; f < kFiles; ++f) {
    const std::string name = absl::StrCat("m", 100 + f, ".safetensors");
    const std::string tensor = absl::StrCat("t", 100 + f);
    index[tensor] = name;
    std::vector<std::string> names = f == 20 ? long_names : std::vector<std::string>();
    names.push_back(tensor);
    WriteText(directory / name, FileOf(names));
  }
  WriteText(directory / kIndexName, IndexOf(index));

  const auto store = Store(directory.path());
  const auto want = ReadCheckpoint(*store);
  ASSERT_TRUE(want.ok()) << want.status();
  ASSERT_GT(want->files()[20].data_start, int64_t{512} << 10);

  RequestStore requests(store.get(), 1);
  std::atomic<int> asked{0};
  absl::Notification together;
  requests.before_head = [](const RequestStore::Request& request) {
    ADD_FAILURE() << request.key << ": the listing has it";
    return absl::OkStatus();
  };
  requests.before_read = [&](const RequestStore::Request&) {
    if (++asked == kAtOnce) together.Notify();
    together.WaitForNotification();  // would never come if they waited for each other
    return absl::OkStatus();
  };
  const auto found = ReadCheckpoint(requests);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(Names(*found), Names(*want));
  int64_t bytes = 0, needed = 0;
  for (const RequestStore::Request& request : requests.Reads()) bytes += request.size_bytes;
  for (size_t f = 0; f < want->files().size(); ++f) {
    const CheckpointFile& file = want->files()[f];
    EXPECT_EQ(found->files()[f].header_sha256, file.header_sha256);
    needed += std::max(file.data_start, std::min(file.size_bytes, int64_t{512} << 10));
  }
  EXPECT_EQ(bytes, needed);
  EXPECT_EQ(requests.Reads().size(), kFiles + 1u);  // one file has a long header
}

TEST(ReadCheckpoint, WhichErrorIsReportedDoesNotDependOnTheOrderOfAnswers) {
  struct Case {
    std::string unreadable;  // file whose header cannot be requested
    std::string want;
  };
  for (const Case& c : {Case{"d.safetensors", "c.safetensors: "}, Case{"b.safetensors", "b.safe"},
                        Case{"a.safetensors", "a.safe"}, Case{"", "c.safetensors: "}}) {
    SCOPED_TRACE(c.unreadable);
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    for (const char* name : {"a", "b", "d", "f"}) {
      WriteText(directory / absl::StrCat(name, ".safetensors"), FileOf({name}));
    }
    WriteText(directory / "c.safetensors", "no header");
    WriteText(directory / "e.safetensors", "");
    const auto store = Store(directory.path());
    const auto answer = [&](const RequestStore::Request& request) -> absl::Status {
      if (request.key == c.unreadable) return absl::UnavailableError(request.key + ": 503");
      return absl::OkStatus();
    };
    RequestStore in_turn(store.get(), 0);
    in_turn.before_read = answer;
    const absl::Status want = ReadCheckpoint(in_turn).status();
    EXPECT_EQ(std::string(want.message()).rfind(c.want, 0), 0u) << want;

    RequestStore at_once(store.get(), 1);
    std::atomic<int> others{0};
    absl::Notification rest;
    at_once.before_read = [&](const RequestStore::Request& request) {
      // The first files answer last. The empty file e is not read.
      if (request.key >= "d") {
        if (++others == 2) rest.Notify();
      } else {
        rest.WaitForNotification();
      }
      return answer(request);
    };
    EXPECT_EQ(ReadCheckpoint(at_once).status(), want);
  }
}

TEST(ReadCheckpoint, IndexDecidesBetweenTwoFilesWithOneName) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "base.safetensors", FileOf({"kept", "shared"}));
  WriteText(directory / "sub/overlay.safetensors", FileOf({"new", "shared", "spare"}));
  WriteText(directory / kIndexName, IndexOf({{"kept", "base.safetensors"},
                                             {"shared", "sub/overlay.safetensors"},
                                             {"new", "sub/overlay.safetensors"}}));
  const auto checkpoint = ReadDirectory(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Names(*checkpoint), ElementsAre("kept", "new", "shared"));
  const TensorInfo shared = checkpoint->tensors().at(2);
  EXPECT_EQ(checkpoint->files()[static_cast<size_t>(shared.file)].name, "sub/overlay.safetensors");
  ASSERT_EQ(checkpoint->unindexed().size(), 2u);
  EXPECT_EQ(checkpoint->unindexed()[0].tensor, "shared");
  EXPECT_EQ(checkpoint->unindexed()[0].file, "base.safetensors");
  EXPECT_EQ(checkpoint->unindexed()[0].size_bytes, 1);
  EXPECT_EQ(checkpoint->unindexed()[1].tensor, "spare");
}

TEST(ReadCheckpoint, WithoutAnIndexOneNameInTwoFilesIsRefused) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "model-39.safetensors", FileOf({"kept", "shared"}));
  WriteText(directory / "model-40.safetensors", FileOf({"shared"}));
  ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kInvalidArgument,
              {"tensor shared", "model-39.safetensors", "model-40.safetensors"});
}

TEST(ReadCheckpoint, KeepsStaleIndexEntries) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "a.safetensors", FileOf({"a1"}));
  WriteText(directory / "b.safetensors", FileOf({"b1", "moved"}));
  WriteText(directory / kIndexName, IndexOf({{"a1", "a.safetensors"},
                                             {"a2", "a.safetensors"},
                                             {"b1", "b.safetensors"},
                                             {"moved", "a.safetensors"}}));
  const auto checkpoint = ReadDirectory(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Names(*checkpoint), ElementsAre("a1", "b1"));
  ASSERT_EQ(checkpoint->stale().size(), 2u);
  EXPECT_EQ(checkpoint->stale()[0].tensor, "a2");
  EXPECT_EQ(checkpoint->stale()[0].file, "a.safetensors");
  EXPECT_EQ(checkpoint->stale()[1].tensor, "moved");
  ASSERT_EQ(checkpoint->unindexed().size(), 1u);
  EXPECT_EQ(checkpoint->unindexed()[0].tensor, "moved");
}

TEST(ReadCheckpoint, RefusesAFileWithNoneOfItsTensors) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "a.safetensors", FileOf({"a1"}));
  WriteText(directory / "b.safetensors", FileOf({}));
  WriteText(directory / kIndexName, IndexOf({{"a1", "a.safetensors"}, {"b1", "b.safetensors"}}));
  ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kFailedPrecondition,
              {"b.safetensors: holds none of the 1 tensors", "do not belong together"});
}

TEST(ReadCheckpoint, ListsTheFilesThatAreMissing) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "m2.safetensors", FileOf({"b"}));
  WriteText(directory / kIndexName,
            IndexOf({{"a", "m1.safetensors"}, {"b", "m2.safetensors"}, {"c", "m3.safetensors"}}));
  WatchedStore store(Store(directory.path()));
  const auto checkpoint = ReadCheckpoint(store);
  ExpectError(checkpoint.status(), absl::StatusCode::kFailedPrecondition,
              {"names 3 files, 2 of them missing: m1.safetensors, m3.safetensors"});
  EXPECT_THAT(store.opened, ElementsAre(kIndexName));
}

TEST(ReadCheckpoint, SaysThatIndexAndFolderDisagree) {
  TempDir directory;
  CheckpointSpec spec;
  ASSERT_TRUE(WriteTestCheckpoint(directory.path(), spec).ok());
  WriteText(directory / kIndexName,
            IndexOf({{"a", "old-1.safetensors"}, {"b", "old-2.safetensors"}}));
  ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kFailedPrecondition,
              {"old-1.safetensors, old-2.safetensors", "the index does not belong to these files",
               TestFileName(spec, 0)});
}

TEST(ReadCheckpoint, LongListsOfMissingFilesAreCut) {
  TempDir directory;
  std::map<std::string, std::string> files;
  for (int i = 100; i < 200; ++i) files[absl::StrCat("t", i)] = absl::StrCat(i, ".safetensors");
  WriteText(directory / kIndexName, IndexOf(files));
  ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kFailedPrecondition,
              {"100 of them missing: 100.safetensors, ", "119.safetensors and 80 more"});
}

TEST(ReadCheckpoint, CompletesNumberedSetsWithoutAnIndex) {
  const struct {
    std::vector<std::string> files;
    const char* missing;  // null: complete
  } kCases[] = {
      {{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}, nullptr},
      {{"model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"},
       "missing: model-00002-of-00003.safetensors"},
      {{"x-1-of-3.safetensors", "y.safetensors"}, "missing: x-2-of-3.safetensors, x-3-of-3"},
      {{"two-of-hearts.safetensors", "-of-2.safetensors", "1-of-2.safetensors"}, nullptr},
      {{"x-1-of-999999999.safetensors"}, "and 1 more"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.files[0]);
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    for (const std::string& file : c.files) WriteText(directory / file, FileOf({file}));
    const absl::Status status = ReadDirectory(directory).status();
    if (c.missing == nullptr) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      ExpectError(status, absl::StatusCode::kFailedPrecondition, {c.missing});
    }
  }
}

TEST(ReadCheckpoint, RefusesIndexNamesThatLeaveTheSource) {
  const std::string kNames[] = {"../../etc/passwd",
                                "/etc/passwd",
                                "a/../../b",
                                "..",
                                "../x.safetensors",
                                "/x.safetensors",
                                "a//x.safetensors",
                                "./x.safetensors",
                                "a/./x.safetensors",
                                "a\\\\x.safetensors",
                                "a\\u0000.safetensors",
                                "",
                                "x.safetensors/",
                                "model.bin",
                                "a/../x.safetensors",
                                std::string(2000, 'n') + ".safetensors"};
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name.substr(0, 40));
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    WriteText(directory / "ok.safetensors", FileOf({"a"}));
    WriteText(directory / kIndexName, IndexOf({{"a", "ok.safetensors"}, {"b", name}}));
    WatchedStore store(Store(directory.path()));
    ExpectError(ReadCheckpoint(store).status(), absl::StatusCode::kInvalidArgument,
                {"model.safetensors.index.json: weight_map: "});
    EXPECT_THAT(store.opened, ElementsAre(kIndexName));
  }
}

TEST(ReadCheckpoint, RefusesFoldersWithoutACheckpoint) {
  TempDir empty;
  ExpectError(ReadDirectory(empty).status(), absl::StatusCode::kFailedPrecondition,
              {empty.path(), "no checkpoint"});
  TempDir only_pickles;
  WriteText(only_pickles / "config.json", kConfig);
  WriteText(only_pickles / "pytorch_model.bin", "x");
  ExpectError(ReadDirectory(only_pickles).status(), absl::StatusCode::kFailedPrecondition,
              {"no checkpoint"});
  TempDir no_config;
  WriteText(no_config / "model.safetensors", FileOf({"a"}));
  ExpectError(ReadDirectory(no_config).status(), absl::StatusCode::kFailedPrecondition,
              {"config.json is missing"});
  TempDir empty_index;
  WriteText(empty_index / kIndexName, R"({"weight_map":{}})");
  ExpectError(ReadDirectory(empty_index).status(), absl::StatusCode::kInvalidArgument,
              {"weight_map names no file"});
  TempDir other_index;
  WriteText(other_index / "model.safetensors", FileOf({"a"}));
  WriteText(other_index / "consolidated.safetensors.index.json", "{}");
  ExpectError(ReadDirectory(other_index).status(), absl::StatusCode::kFailedPrecondition,
              {"consolidated.safetensors.index.json", "only one named"});
}

TEST(ReadCheckpoint, NamesTheFileInEveryError) {
  const struct {
    std::string content;
    absl::StatusCode code;
    const char* error;
  } kCases[] = {
      {"", absl::StatusCode::kInvalidArgument, "HeaderTooSmall"},
      {FileOf({"a"}) + "1234", absl::StatusCode::kInvalidArgument, "4 trailing bytes"},
      {FileOf({"a"}).substr(0, 4096), absl::StatusCode::kInvalidArgument, "truncated"},
      {FileOf({"a"}).substr(0, 4000), absl::StatusCode::kInvalidArgument, "InvalidHeaderLength"},
      {std::string(100, '\xFF'), absl::StatusCode::kInvalidArgument, "HeaderTooLarge"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4999\n",
       absl::StatusCode::kFailedPrecondition, "Git LFS pointer, expected size 4999"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.error);
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    WriteText(directory / "model-7.safetensors", c.content);
    ExpectError(ReadDirectory(directory).status(), c.code, {"model-7.safetensors: ", c.error});
  }
}

TEST(ReadCheckpoint, FollowsTheLinksOfAHubCache) {
  TempDir cache;
  WriteText(cache / "m/blobs/aaaa", FileOf({"a"}));
  WriteText(cache / "m/blobs/bbbb", kConfig);
  const std::string snapshot = cache / "m/snapshots/abc";
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_symlink("../../blobs/aaaa", snapshot + "/model.safetensors");
  std::filesystem::create_symlink("../../blobs/bbbb", snapshot + "/config.json");
  const auto checkpoint = ReadCheckpoint(*Store(snapshot));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Names(*checkpoint), ElementsAre("a"));
  EXPECT_THAT(FileNames(checkpoint->small_files()), ElementsAre("config.json"));
}

TEST(ReadCheckpoint, NamesDanglingLinks) {
  const std::string target = "../../blobs/gone";
  for (const char* name :
       {"model.safetensors", "model-00001-of-00002.safetensors", "config.json", kIndexName}) {
    SCOPED_TRACE(name);
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    if (std::string(name) != "model.safetensors") {
      WriteText(directory / "model-00002-of-00002.safetensors", FileOf({"b"}));
    }
    if (std::string(name) == "config.json") {
      WriteText(directory / "model-00001-of-00002.safetensors", FileOf({"a"}));
    }
    std::filesystem::remove(directory / name);
    std::filesystem::create_symlink(target, directory / name);
    ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kFailedPrecondition,
                {absl::StrCat(name, ": "), "dangling", target});
  }
}

TEST(ReadCheckpoint, RefusesItsOwnOutputAsASource) {
  TempDir by_metadata;
  WriteText(by_metadata / "config.json", kConfig);
  WriteText(by_metadata / "model-rank-0-part-0.safetensors",
            FileOf({"a"}, {{kFingerprintMetadataKey, "00"}}));
  ExpectError(ReadDirectory(by_metadata).status(), absl::StatusCode::kFailedPrecondition,
              {"model-rank-0-part-0.safetensors", "cannot be a source"});
  for (const char* key : {"layoutFingerprint", "layout_fingerprint"}) {
    TempDir by_manifest;
    WriteText(by_manifest / "config.json", kConfig);
    WriteText(by_manifest / "model.safetensors", FileOf({"a"}));
    WriteText(by_manifest / "manifest.json",
              absl::StrCat(R"({"stage":"prepared",")", key, R"(":"00"})"));
    ExpectError(ReadDirectory(by_manifest).status(), absl::StatusCode::kFailedPrecondition,
                {by_manifest.path(), "manifest.json", "cannot be a source"});
  }
}

TEST(ReadCheckpoint, ForeignManifestsDoNoHarm) {
  for (const char* text : {"{}", "not JSON", "[]", R"({"stage":"prepared"})",
                           R"({"stage":1,"layoutFingerprint":"x"})"}) {
    TempDir directory;
    WriteText(directory / "config.json", kConfig);
    WriteText(directory / "model.safetensors", FileOf({"a"}));
    WriteText(directory / "manifest.json", text);
    const auto checkpoint = ReadDirectory(directory);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_THAT(FileNames(checkpoint->left_files()), ElementsAre("manifest.json"));
  }
}

TEST(ReadCheckpoint, ListsSmallFilesOfTheRoot) {
  TempDir directory;
  WriteText(directory / "model-a.safetensors", FileOf({"a"}));
  const char* const kCopied[] = {"added_tokens.json",    "chat_template.jinja", "config.json",
                                 "encoding.tiktoken",    "merges.txt",          "modeling.py",
                                 "tokenizer.json",       "tokenizer.model",     "tokenizer.vocab",
                                 "tokenizer_config.json"};
  for (const char* name : kCopied) WriteText(directory / name, kConfig);
  // Not copied: names of prepared output, documents, sub-folders, too large.
  for (const char* name : {"README.md", "manifest.json", "rank-0.json", "replicated.json",
                           "expert-map-rank-12.json", "inference/model.py"}) {
    WriteText(directory / name, kConfig);
  }
  WriteText(directory / "large.json", std::string(1000, ' '));
  CheckpointOptions options;
  options.max_small_file_bytes = 999;
  const auto checkpoint = ReadDirectory(directory, options);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(FileNames(checkpoint->small_files()),
            std::vector<std::string>(std::begin(kCopied), std::end(kCopied)));
  EXPECT_EQ(checkpoint->small_files()[0].info.size_bytes,
            static_cast<int64_t>(std::string(kConfig).size()));
  EXPECT_THAT(FileNames(checkpoint->left_files()),
              ElementsAre("README.md", "expert-map-rank-12.json", "large.json", "manifest.json",
                          "rank-0.json", "replicated.json"));
}

TEST(ReadCheckpoint, BoundsWhatItReads) {
  TempDir directory;
  WriteText(directory / "config.json", kConfig);
  WriteText(directory / "a.safetensors", FileOf({"a"}));
  WriteText(directory / "b.safetensors", FileOf({"b"}));
  WriteText(directory / kIndexName, IndexOf({{"a", "a.safetensors"}, {"b", "b.safetensors"}}));
  const auto limited = [&](int64_t CheckpointOptions::* limit, int64_t value) {
    CheckpointOptions options;
    options.*limit = value;
    return ReadDirectory(directory, options).status();
  };
  const auto code = absl::StatusCode::kResourceExhausted;
  ExpectError(limited(&CheckpointOptions::max_index_bytes, 10), code, {kIndexName, "10"});
  ExpectError(limited(&CheckpointOptions::max_config_bytes, 10), code, {"config.json", "10"});
  ExpectError(limited(&CheckpointOptions::max_files, 1), code, {"2 checkpoint files, at most 1"});
  ExpectError(limited(&CheckpointOptions::max_header_bytes_total, 8191), code,
              {"b.safetensors", "8192 bytes, at most 8191"});
  EXPECT_TRUE(limited(&CheckpointOptions::max_files, 2).ok());
  EXPECT_TRUE(limited(&CheckpointOptions::max_header_bytes_total, 8192).ok());
}

TEST(CheckpointConfig, LooksAtTheTopThenInTextConfig) {
  TempDir directory;
  WriteText(directory / "model.safetensors", FileOf({"a"}));
  WriteText(directory / "config.json",
            R"({"hidden_size":7168,"model_type":"top","empty":null,"float":1.0,"neg":-3,
                "huge":18446744073709551615,"max":9223372036854775807,"list":[1],
                "text_config":{"hidden_size":1,"model_type":"nested","n_routed_experts":384,
                               "empty":5}})");
  const auto checkpoint = ReadDirectory(directory);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->config_text(), HasSubstr("7168"));
  EXPECT_EQ(*checkpoint->ConfigInt("hidden_size"), 7168);
  EXPECT_EQ(*checkpoint->ConfigInt("text_config.hidden_size"), 1);
  EXPECT_EQ(*checkpoint->ConfigInt("n_routed_experts"), 384);
  EXPECT_EQ(*checkpoint->ConfigInt("empty"), 5);
  EXPECT_EQ(*checkpoint->ConfigInt("neg"), -3);
  EXPECT_EQ(*checkpoint->ConfigInt("max"), 9223372036854775807);
  EXPECT_EQ(*checkpoint->ConfigString("model_type"), "top");
  EXPECT_EQ(*checkpoint->ConfigString("text_config.model_type"), "nested");
  ExpectError(checkpoint->ConfigInt("absent").status(), absl::StatusCode::kNotFound,
              {"config.json: no absent"});
  ExpectError(checkpoint->ConfigString("text_config.list").status(), absl::StatusCode::kNotFound,
              {"text_config.list"});
  for (const char* key : {"float", "huge", "model_type", "list"}) {
    ExpectError(checkpoint->ConfigInt(key).status(), absl::StatusCode::kInvalidArgument,
                {absl::StrCat("config.json: ", key, ": want an integer, found ")});
  }
  ExpectError(checkpoint->ConfigString("hidden_size").status(), absl::StatusCode::kInvalidArgument,
              {"hidden_size: want a string, found 7168"});
}

TEST(CheckpointConfig, RefusesWhatIsNoObject) {
  for (const std::string& text :
       {std::string(""), std::string("[]"), std::string("{"), std::string("{}\0", 3),
        std::string("1"), std::string("{\"a\":\"\xFF\"}"), std::string(100'000, '[')}) {
    TempDir directory;
    WriteText(directory / "model.safetensors", FileOf({"a"}));
    WriteText(directory / "config.json", text);
    ExpectError(ReadDirectory(directory).status(), absl::StatusCode::kInvalidArgument,
                {"config.json: "});
  }
}

// The published sizes: 62 layers of routed experts, and 27.171 GiB of everything else.
TEST(TestCheckpoint, V4ProHasThePublishedBytes) {
  const auto tensors = TestTensors(V4ProSpec());
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  int64_t routed_count = 0;
  int64_t routed_bytes = 0;
  int64_t other_bytes = 0;
  for (const TestTensor& tensor : *tensors) {
    const int64_t size_bytes = *TensorBytes(tensor.dtype, tensor.shape);
    (tensor.place ? routed_bytes : other_bytes) += size_bytes;
    routed_count += tensor.place ? 1 : 0;
  }
  EXPECT_EQ(routed_count, 142'848);
  EXPECT_EQ(routed_bytes, 835'530'522'624);
  EXPECT_EQ(routed_bytes + other_bytes, 864'704'792'696);
}

TEST(TestCheckpoint, BytesTellPlacesApart) {
  // Sequences of 16 bytes at neighbouring places all differ.
  std::set<std::string> seen;
  int64_t count = 0;
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (int64_t expert = 0; expert < 3; ++expert) {
      for (int kind = kGateWeight; kind <= kDownScale; ++kind) {
        for (int64_t row = 0; row < 40; ++row) {
          for (int64_t column = 0; column < 64; column += 16) {
            std::string bytes;
            for (int64_t i = 0; i < 16; ++i) {
              bytes.push_back(static_cast<char>(
                  ExpectedByte(layer, expert, static_cast<ExpertTensor>(kind), row, column + i)));
            }
            seen.insert(bytes);
            ++count;
          }
        }
      }
    }
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), count);
}

TEST(TestCheckpoint, SparseFilesHaveTheSameHeaders) {
  TempDir dense;
  TempDir sparse;
  CheckpointSpec spec;
  ASSERT_TRUE(WriteTestCheckpoint(dense.path(), spec).ok());
  spec.sparse = true;
  ASSERT_TRUE(WriteTestCheckpoint(sparse.path(), spec).ok());
  const auto a = ReadDirectory(dense);
  const auto b = ReadDirectory(sparse);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  for (size_t i = 0; i < a->files().size(); ++i) {
    EXPECT_EQ(a->files()[i].header_sha256, b->files()[i].header_sha256);
    EXPECT_EQ(a->files()[i].size_bytes, b->files()[i].size_bytes);
  }
}

}  // namespace
}  // namespace shardprep
