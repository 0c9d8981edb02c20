#include "workers/directory_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "tests/workers/object_store_conformance.h"
#include "workers/object_names.h"

namespace shardprep {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = testing::TempDir() + "/directory_store_XXXXXX";
    path_ = fs::canonical(::mkdtemp(name.data())).string();
  }
  ~TemporaryDirectory() { fs::remove_all(path_); }
  std::string path(const std::string& below = "") const {
    return below.empty() ? path_ : path_ + "/" + below;
  }

 private:
  std::string path_;
};

void WriteFile(const std::string& path, const std::string& bytes) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::unique_ptr<ObjectStore> MustOpen(DirectoryStoreOptions options) {
  auto store = OpenDirectoryStore(std::move(options));
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// Every path below `root`, relative, sorted: what really lies on the disk.
std::vector<std::string> Tree(const std::string& root) {
  std::vector<std::string> paths;
  if (!fs::exists(root)) return {"(missing)"};
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    paths.push_back(fs::relative(entry.path(), root).string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

absl::StatusOr<ObjectInfo> Stream(ObjectStore& store, const std::string& key,
                                  const std::string& bytes, int64_t reserve,
                                  const CommitGate& gate = CommitGate(), int writes_at_once = 1) {
  std::vector<uint8_t> buffer(
      static_cast<size_t>(store.BufferBytes(1 << 30, reserve, writes_at_once)));
  auto writer = store.Create(key, {.size_bytes = static_cast<int64_t>(bytes.size()),
                                   .buffer = absl::MakeSpan(buffer),
                                   .writes_at_once = writes_at_once});
  if (!writer.ok()) return writer.status();
  for (size_t at = 0; at < bytes.size();) {
    const auto room = (*writer)->Reserve(reserve);
    if (!room.ok()) return room.status();
    const size_t size = std::min(static_cast<size_t>(reserve), bytes.size() - at);
    std::copy_n(bytes.data() + at, size, room->data());
    absl::Status advanced = (*writer)->Advance(static_cast<int64_t>(size));
    if (!advanced.ok()) return advanced;
    at += size;
  }
  return (*writer)->Commit(gate);
}

// ---------------------------------------------------------------------------------------------
// The suite that every store passes, on a root that exists and on one that the first write makes.

class DirectoryUnderTest final : public StoreUnderTest {
 public:
  explicit DirectoryUnderTest(const std::string& below) {
    DirectoryStoreOptions options;
    options.root = directory_.path(below);
    options.create = !below.empty();
    store_ = MustOpen(std::move(options));
  }
  ObjectStore& store() override { return *store_; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<ObjectStore> store_;
};

INSTANTIATE_TEST_SUITE_P(
    Directory, ObjectStoreConformance,
    testing::Values(
        StoreParam{"Existing", [] { return std::make_unique<DirectoryUnderTest>(""); }, 20},
        StoreParam{"ToBeMade", [] { return std::make_unique<DirectoryUnderTest>("a/b c/root"); },
                   20}),
    StoreParamName);

// ---------------------------------------------------------------------------------------------
// Faults and the order of system calls.

// The real calls, with a log of those that matter for durability and errors on demand.
class FaultyOps : public FileOps {
 public:
  // Fails with this errno when non-zero; the call is not made.
  int fallocate_errno = 0;
  int pwrite_errno = 0;
  int64_t pwrite_fails_after_bytes = 0;
  int file_fsync_errno = 0;
  int fsync_failures = std::numeric_limits<int>::max();
  int directory_fsync_errno = 0;
  int close_errno = 0;
  int link_errno = 0;
  bool link_carried_out_all_the_same = false;
  int pread_errno = 0;
  int pread_failures = std::numeric_limits<int>::max();  // of as many calls
  std::function<void()> during_sleep;
  // Short counts and interruptions.
  bool stutter = false;
  bool drop_writes = false;

  std::vector<std::string> log;
  int64_t pwrite_calls = 0;
  std::vector<absl::Duration> sleeps;

  void Sleep(absl::Duration duration) override {
    sleeps.push_back(duration);
    if (during_sleep) during_sleep();
  }
  ssize_t Pread(int fd, void* buffer, size_t size, off_t offset) override {
    if (pread_errno != 0 && pread_failures > 0) {
      --pread_failures;
      return Fail(pread_errno);
    }
    if (!Stutter(&size)) return Fail(EINTR);
    return FileOps::Pread(fd, buffer, size, offset);
  }
  ssize_t Pwrite(int fd, const void* buffer, size_t size, off_t offset) override {
    ++pwrite_calls;
    Log("write");
    if (pwrite_errno != 0 && offset >= pwrite_fails_after_bytes) return Fail(pwrite_errno);
    if (!Stutter(&size)) return Fail(EINTR);
    if (drop_writes) return static_cast<ssize_t>(size);
    return FileOps::Pwrite(fd, buffer, size, offset);
  }
  int Fallocate(int fd, off_t size) override {
    Log("fallocate");
    return fallocate_errno != 0 ? Fail(fallocate_errno) : FileOps::Fallocate(fd, size);
  }
  int StartWriteback(int fd, off_t offset, off_t size) override {
    Log("writeback");
    return FileOps::StartWriteback(fd, offset, size);
  }
  bool SuitsDirect(int /*fd*/) override { return false; }
  int Fsync(int fd) override {
    if (stutter && (random_() & 1) != 0) return Fail(EINTR);
    struct stat st;
    const bool is_directory = ::fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
    const bool is_work = absl::StrContains(PathOf(fd), "_shardprep");
    const bool is_parent = is_directory && !is_work;
    if (is_parent) Log("fsync directory");
    if (!is_directory) Log("fsync file");
    if (is_parent && directory_fsync_errno != 0 && armed) return Fail(directory_fsync_errno);
    if (!is_directory && file_fsync_errno != 0 && fsync_failures > 0) {
      --fsync_failures;
      return Fail(file_fsync_errno);
    }
    return FileOps::Fsync(fd);
  }
  int Close(int fd) override {
    Log("close");
    const int result = FileOps::Close(fd);
    return close_errno != 0 ? Fail(close_errno) : result;
  }
  int Rename(int from_dir, const char* from, int to_dir, const char* to) override {
    Log("rename");
    armed = true;
    return FileOps::Rename(from_dir, from, to_dir, to);
  }
  int RenameIfAbsent(int from_dir, const char* from, int to_dir, const char* to) override {
    Log("rename if absent");
    return FileOps::RenameIfAbsent(from_dir, from, to_dir, to);
  }
  int Link(int from_dir, const char* from, int to_dir, const char* to) override {
    Log("link");
    if (link_errno == 0) return FileOps::Link(from_dir, from, to_dir, to);
    if (link_carried_out_all_the_same) FileOps::Link(from_dir, from, to_dir, to);
    return Fail(link_errno);
  }
  int Unlink(int dir, const char* name) override {
    Log("unlink");
    return FileOps::Unlink(dir, name);
  }

  // Consecutive equal calls are logged once: how many pieces a write takes is not the point.
  void Log(const std::string& call) {
    if (log.empty() || log.back() != call) log.push_back(call);
  }

 private:
  static int Fail(int error) {
    errno = error;
    return -1;
  }
  static std::string PathOf(int fd) {
    return fs::read_symlink(absl::StrCat("/proc/self/fd/", fd)).string();
  }
  // Shortens the transfer, or says that it was interrupted.
  bool Stutter(size_t* size) {
    if (!stutter) return true;
    if (random_() % 3 == 0) return false;
    if (*size > 1) *size = 1 + random_() % *size;
    return true;
  }

  bool armed = false;  // the rename has happened: directory errors come from its fsync
  std::mt19937 random_{5};
};

class DirectoryFaults : public testing::Test {
 protected:
  DirectoryFaults() {
    DirectoryStoreOptions options;
    options.root = directory_.path();
    options.file_ops = &ops_;
    store_ = MustOpen(std::move(options));
    WriteFile(directory_.path("old"), "old bytes");
  }

  // Streaming and Put over "old" both fail so, and leave everything as it was.
  void ExpectFailure(absl::StatusCode code, const std::string& text) {
    EXPECT_THAT(Stream(*store_, "old", PositionBytes(1'000'000), 100'000),
                HasCodeAndText(code, text));
    ExpectOnlyOld();
  }
  void ExpectPutFailure(absl::StatusCode code, const std::string& text) {
    EXPECT_THAT(store_->Put("old", "new bytes", CommitGate()), HasCodeAndText(code, text));
    EXPECT_THAT(store_->PutIfAbsent("new", "new bytes", CommitGate()), HasCodeAndText(code, text));
    ExpectOnlyOld();
  }
  void ExpectOnlyOld() {
    EXPECT_THAT(Tree(directory_.path()), ElementsAre("old"));
    EXPECT_EQ(ReadFile(directory_.path("old")), "old bytes");
  }

  TemporaryDirectory directory_;
  FaultyOps ops_;
  std::unique_ptr<ObjectStore> store_;
};

TEST_F(DirectoryFaults, BytesAreDurableBeforeTheNameAndTheNameBeforeSuccess) {
  const auto gate = [&] {
    ops_.Log("gate");
    return absl::OkStatus();
  };
  ASSERT_THAT(Stream(*store_, "new", PositionBytes(1'000'000), 100'000, gate), IsOk());
  // The first write makes the work directories and so the root is synchronised first as well.
  EXPECT_THAT(ops_.log, ElementsAre("fsync directory", "fallocate", "write", "fsync file", "close",
                                    "gate", "rename", "fsync directory"));
  ops_.log.clear();
  ASSERT_THAT(store_->Put("new", "x", gate), IsOk());
  EXPECT_THAT(ops_.log,
              ElementsAre("write", "fsync file", "close", "gate", "rename", "fsync directory"));
  ops_.log.clear();
  ASSERT_THAT(store_->PutIfAbsent("newer", "x", gate), IsOk());
  EXPECT_THAT(ops_.log, ElementsAre("write", "fsync file", "close", "gate", "link", "unlink",
                                    "fsync directory"));
  ops_.log.clear();
  ASSERT_THAT(store_->Delete("newer"), IsOk());
  EXPECT_THAT(ops_.log, ElementsAre("unlink", "fsync directory"));
}

TEST_F(DirectoryFaults, WriteBackStartsEarly) {
  ASSERT_THAT(Stream(*store_, "new", PositionBytes(100), 100), IsOk());
  ops_.log.clear();
  ASSERT_THAT(Stream(*store_, "new", PositionBytes(9 << 20), 1 << 20), IsOk());
  EXPECT_THAT(ops_.log, ElementsAre("fallocate", "write", "writeback", "write", "writeback",
                                    "write", "fsync file", "close", "rename", "fsync directory"));
}

TEST_F(DirectoryFaults, ShortCountsAndInterruptionsLoseNothing) {
  ops_.stutter = true;
  const std::string bytes = PositionBytes(3'000'000);
  ASSERT_THAT(Stream(*store_, "new", bytes, 300'000), IsOk());
  EXPECT_TRUE(ReadFile(directory_.path("new")) == bytes);
  EXPECT_TRUE(store_->Get("new", 1 << 30).value_or("") == bytes);
  ASSERT_THAT(store_->Put("small", bytes, CommitGate()), IsOk());
  EXPECT_TRUE(ReadFile(directory_.path("small")) == bytes);
}

TEST_F(DirectoryFaults, AFullDiskIsFoundBeforeAnyWrite) {
  for (const int error : {ENOSPC, EDQUOT}) {
    ops_.fallocate_errno = error;
    ExpectFailure(absl::StatusCode::kResourceExhausted, absl::StrCat("(errno ", error, ")"));
    ExpectFailure(absl::StatusCode::kResourceExhausted, directory_.path());
    EXPECT_EQ(ops_.pwrite_calls, 0);
  }
}

TEST_F(DirectoryFaults, AFullDiskInTheMiddleLeavesTheOldObject) {
  for (const int error : {ENOSPC, EDQUOT}) {
    ops_.pwrite_errno = error;
    ops_.pwrite_fails_after_bytes = 500'000;
    ExpectFailure(absl::StatusCode::kResourceExhausted, absl::StrCat("(errno ", error, ")"));
    ops_.pwrite_fails_after_bytes = 0;
    ExpectPutFailure(absl::StatusCode::kResourceExhausted, "pwrite");
  }
}

TEST_F(DirectoryFaults, AWriterThatFailedStaysFailed) {
  ops_.pwrite_errno = ENOSPC;
  std::vector<uint8_t> buffer(static_cast<size_t>(store_->WriteBufferBytes(1 << 30, 1 << 20)));
  auto writer =
      store_->Create("new", {.size_bytes = int64_t{2} << 20, .buffer = absl::MakeSpan(buffer)});
  ASSERT_TRUE(writer.ok());
  ASSERT_THAT((*writer)->Reserve(1 << 20), IsOk());
  EXPECT_THAT((*writer)->Advance(1 << 20), HasCode(absl::StatusCode::kResourceExhausted));
  ops_.pwrite_errno = 0;
  EXPECT_THAT((*writer)->Reserve(1), HasCode(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT((*writer)->Advance(0), HasCode(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT((*writer)->Commit(CommitGate()), HasCode(absl::StatusCode::kResourceExhausted));
}

TEST_F(DirectoryFaults, AFileSystemWithoutFallocateIsNoError) {
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    ops_.fallocate_errno = error;
    const std::string bytes = PositionBytes(1'000'000, static_cast<uint32_t>(error));
    ASSERT_THAT(Stream(*store_, "new", bytes, 100'000), IsOk());
    EXPECT_TRUE(ReadFile(directory_.path("new")) == bytes);
  }
}

TEST_F(DirectoryFaults, WritesThatWereDroppedAreDataLoss) {
  ops_.fallocate_errno = EOPNOTSUPP;  // else the size is right whatever was written
  ops_.drop_writes = true;
  ExpectFailure(absl::StatusCode::kDataLoss, "0 bytes after writing, want 1000000");
  ExpectPutFailure(absl::StatusCode::kDataLoss, "0 bytes after writing, want 9");
}

TEST_F(DirectoryFaults, LateWriteErrorsKeepTheNameAway) {
  ops_.file_fsync_errno = EIO;
  ExpectFailure(absl::StatusCode::kUnavailable, "fsync");
  ExpectPutFailure(absl::StatusCode::kUnavailable, "fsync");
  ops_.file_fsync_errno = 0;
  ops_.close_errno = EDQUOT;
  ExpectFailure(absl::StatusCode::kResourceExhausted, "close");
  ExpectPutFailure(absl::StatusCode::kResourceExhausted, "close");
}

TEST_F(DirectoryFaults, ANameThatMayNotBeDurableIsNoSuccess) {
  ops_.directory_fsync_errno = EIO;
  EXPECT_THAT(store_->Put("new", "bytes", CommitGate()),
              HasCodeAndText(absl::StatusCode::kUnavailable, "perhaps not durable"));
  EXPECT_EQ(ReadFile(directory_.path("new")), "bytes");
  // Some network file systems do not know fsync of a directory.
  ops_.directory_fsync_errno = EINVAL;
  EXPECT_THAT(store_->Put("newer", "bytes", CommitGate()), IsOk());
}

TEST_F(DirectoryFaults, WithoutHardLinksAnExclusiveRenameDecides) {
  for (const int error : {EPERM, EOPNOTSUPP, ENOSYS}) {
    ops_.link_errno = error;
    const std::string key = absl::StrCat("new-", error);
    ASSERT_THAT(store_->PutIfAbsent(key, "first", CommitGate()), IsOk());
    EXPECT_THAT(store_->PutIfAbsent(key, "second", CommitGate()),
                HasCode(absl::StatusCode::kAlreadyExists));
    EXPECT_EQ(ReadFile(directory_.path(key)), "first");
  }
  EXPECT_THAT(ops_.log, testing::Contains("rename if absent"));
}

TEST_F(DirectoryFaults, ALinkWhoseAnswerWasLostIsOurs) {
  ops_.link_errno = EEXIST;
  ops_.link_carried_out_all_the_same = true;
  ASSERT_THAT(store_->PutIfAbsent("new", "ours", CommitGate()), IsOk());
  EXPECT_EQ(ReadFile(directory_.path("new")), "ours");
  EXPECT_THAT(store_->PutIfAbsent("new", "second", CommitGate()),
              HasCode(absl::StatusCode::kAlreadyExists));
  EXPECT_EQ(ReadFile(directory_.path("new")), "ours");
}

TEST_F(DirectoryFaults, ReadErrorsThatStayAreRetryableAndNameTheObject) {
  const auto reader = store_->Open("old");
  ASSERT_TRUE(reader.ok());
  uint8_t byte = 0xa5;
  for (const int error : {EIO, ESTALE, ETIMEDOUT, EAGAIN}) {
    ops_.pread_errno = error;
    ops_.sleeps.clear();
    EXPECT_THAT((*reader)->ReadAt(0, {&byte, 1}),
                HasCodeAndText(absl::StatusCode::kUnavailable, directory_.path("old")));
    EXPECT_THAT(ops_.sleeps, ElementsAre(absl::Milliseconds(40), absl::Milliseconds(160),
                                         absl::Milliseconds(640)));
  }
  EXPECT_EQ(byte, 0xa5);
}

TEST_F(DirectoryFaults, ReadErrorsThatWillNotPassAreNotTriedAgain) {
  const auto reader = store_->Open("old");
  ASSERT_TRUE(reader.ok());
  uint8_t byte = 0xa5;
  for (const auto& [error, code] :
       std::map<int, absl::StatusCode>{{EACCES, absl::StatusCode::kFailedPrecondition},
                                       {EINVAL, absl::StatusCode::kFailedPrecondition},
                                       {ENOMEM, absl::StatusCode::kResourceExhausted}}) {
    ops_.pread_errno = error;
    EXPECT_THAT((*reader)->ReadAt(0, {&byte, 1}), HasCodeAndText(code, directory_.path("old")));
  }
  EXPECT_THAT(ops_.sleeps, IsEmpty());
}

TEST_F(DirectoryFaults, AStaleHandleIsOpenedAnewByItsName) {
  const auto reader = store_->Open("old");
  ASSERT_TRUE(reader.ok());
  for (const int error : {ESTALE, EIO}) {
    ops_.pread_errno = error;
    ops_.pread_failures = 2;
    std::string out(9, '?');
    ASSERT_THAT((*reader)->ReadAt(0, {reinterpret_cast<uint8_t*>(out.data()), 9}), IsOk());
    EXPECT_EQ(out, "old bytes");
  }
  // From then on without a pause, and the version is still the one that was opened.
  ops_.sleeps.clear();
  uint8_t byte = 0;
  EXPECT_THAT((*reader)->ReadAt(4, {&byte, 1}), IsOk());
  EXPECT_THAT(ops_.sleeps, IsEmpty());
  EXPECT_THAT((*reader)->CheckUnchanged(), IsOk());
}

TEST_F(DirectoryFaults, AFileReplacedBehindAReadErrorIsDataLoss) {
  const auto reader = store_->Open("old");
  ASSERT_TRUE(reader.ok());
  ops_.pread_errno = ESTALE;
  ops_.pread_failures = 1;
  ops_.during_sleep = [this] {
    WriteFile(directory_.path("new"), "new bytes");
    fs::rename(directory_.path("new"), directory_.path("old"));
  };
  std::string out(9, '?');
  EXPECT_THAT((*reader)->ReadAt(0, {reinterpret_cast<uint8_t*>(out.data()), 9}),
              HasCodeAndText(absl::StatusCode::kDataLoss, "changed while reading"));
  EXPECT_EQ(out, "?????????");
}

TEST_F(DirectoryFaults, AFileRemovedBehindAReadErrorIsDataLoss) {
  const auto reader = store_->Open("old");
  ASSERT_TRUE(reader.ok());
  ops_.pread_errno = ESTALE;
  ops_.during_sleep = [this] { fs::remove(directory_.path("old")); };
  uint8_t byte = 0xa5;
  EXPECT_THAT((*reader)->ReadAt(0, {&byte, 1}),
              HasCodeAndText(absl::StatusCode::kDataLoss, "removed while reading"));
}

// Rewritten in place while it is read, as an editor without rename does it.
TEST_F(DirectoryFaults, ASmallObjectIsOneVersionOrDataLoss) {
  ops_.pread_errno = EIO;
  ops_.pread_failures = 1;
  ops_.during_sleep = [this] {
    const int fd = ::open(directory_.path("old").c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_EQ(::pwrite(fd, "OLD", 3, 0), 3);
    const timespec times[2] = {{0, UTIME_OMIT}, {1'000'000'000, 5}};
    ASSERT_EQ(::futimens(fd, times), 0);
    ::close(fd);
  };
  EXPECT_THAT(store_->Get("old", 100).status(),
              HasCodeAndText(absl::StatusCode::kDataLoss, "changed while reading"));
  ops_.during_sleep = nullptr;
  EXPECT_EQ(store_->Get("old", 100).value(), "OLD bytes");
}

// After a failed write-back the kernel takes the pages for clean: only new bytes in a new file are
// an attempt.
TEST_F(DirectoryFaults, AFailedFsyncIsNotAskedAgain) {
  ops_.file_fsync_errno = EIO;
  ops_.fsync_failures = 1;
  std::vector<uint8_t> buffer(static_cast<size_t>(store_->WriteBufferBytes(100, 100)));
  auto writer = store_->Create("old", {.size_bytes = 100, .buffer = absl::MakeSpan(buffer)});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Reserve(100).ok());
  ASSERT_THAT((*writer)->Advance(100), IsOk());
  EXPECT_THAT((*writer)->Commit(CommitGate()), HasCode(absl::StatusCode::kUnavailable));
  EXPECT_THAT((*writer)->Commit(CommitGate()), HasCode(absl::StatusCode::kFailedPrecondition));
  writer->reset();
  ExpectOnlyOld();
  EXPECT_THAT(Stream(*store_, "old", PositionBytes(100), 100), IsOk());
  EXPECT_EQ(ReadFile(directory_.path("old")), PositionBytes(100));
}

TEST_F(DirectoryFaults, SpaceThatRunsOutLateKeepsTheNameAway) {
  for (const int error : {ENOSPC, EDQUOT}) {
    ops_.file_fsync_errno = error;
    ExpectFailure(absl::StatusCode::kResourceExhausted, "fsync");
    ExpectPutFailure(absl::StatusCode::kResourceExhausted, "fsync");
    ops_.file_fsync_errno = 0;
    ops_.close_errno = error;
    ExpectFailure(absl::StatusCode::kResourceExhausted, "close");
    ExpectPutFailure(absl::StatusCode::kResourceExhausted, "close");
    ops_.close_errno = 0;
  }
}

// Claims to transfer without touching memory, and checks how much is asked for at once.
class LargeTransferOps : public FileOps {
 public:
  ssize_t Pread(int, void*, size_t size, off_t offset) override {
    EXPECT_LE(size, size_t{2'147'479'552});
    EXPECT_EQ(offset, total);
    const size_t moved = std::min(size, size_t{2'147'479'552});
    total += static_cast<int64_t>(moved);
    return static_cast<ssize_t>(moved);
  }
  int64_t total = 0;
};

TEST(DirectoryStore, ReadsBeyondTheLimitOfOneCall) {
  const TemporaryDirectory directory;
  WriteFile(directory.path("large"), "");
  constexpr int64_t kSize = int64_t{5} << 30;
  ASSERT_EQ(::truncate(directory.path("large").c_str(), kSize), 0);
  LargeTransferOps ops;
  DirectoryStoreOptions options;
  options.root = directory.path();
  options.file_ops = &ops;
  const auto store = MustOpen(std::move(options));
  const auto reader = store->Open("large");
  ASSERT_TRUE(reader.ok());
  void* const memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  EXPECT_THAT((*reader)->ReadAt(0, {static_cast<uint8_t*>(memory), kSize}), IsOk());
  EXPECT_EQ(ops.total, kSize);
  ::munmap(memory, kSize);
}

TEST(DirectoryStore, ReadsAtOffsetsBeyond32Bits) {
  const TemporaryDirectory directory;
  WriteFile(directory.path("sparse"), "");
  const std::vector<int64_t> offsets = {(int64_t{1} << 31) - 2, (int64_t{1} << 32) - 2,
                                        (int64_t{5} << 30) - 4};
  const int fd = ::open(directory.path("sparse").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  for (const int64_t offset : offsets) {
    const std::string mark = PositionBytes(4, static_cast<uint32_t>(offset >> 8));
    ASSERT_EQ(::pwrite(fd, mark.data(), 4, offset), 4);
  }
  ::close(fd);
  const auto store = MustOpen({directory.path(), false, {}, nullptr});
  const auto reader = store->Open("sparse");
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ((*reader)->info().size_bytes, int64_t{5} << 30);
  for (const int64_t offset : offsets) {
    std::string out(4, '\0');
    ASSERT_THAT((*reader)->ReadAt(offset, {reinterpret_cast<uint8_t*>(out.data()), 4}), IsOk());
    EXPECT_EQ(out, PositionBytes(4, static_cast<uint32_t>(offset >> 8)));
  }
}

// ---------------------------------------------------------------------------------------------
// Writing past the page cache.

// A file system that suits it and is as strict as a disk: memory, offset and size of a write must
// be multiples of 4096.
class DirectOps : public FileOps {
 public:
  bool suits = true;
  int fails_with = 0;  // each direct write from this offset on
  off_t fails_from = 0;
  bool refuses = false;           // direct writes, as a device with larger sectors does
  bool writes_half = false;       // of the first direct write, cut at any byte
  absl::Barrier* meet = nullptr;  // where the first direct writes wait for each other
  int left_to_meet = 0;

  bool SuitsDirect(int /*fd*/) override { return suits; }

  int SetDirect(int fd, bool direct) override {
    const absl::MutexLock lock(&mu_);
    direct_.erase(fd);
    if (direct) direct_.insert(fd);
    return 0;
  }

  ssize_t Pwrite(int fd, const void* buffer, size_t size, off_t offset) override {
    if (::fcntl(fd, F_GETFD) < 0) ADD_FAILURE() << "written after it was closed";
    if (MustMeet(fd) && meet->Block()) delete meet;
    {
      const absl::MutexLock lock(&mu_);
      if (direct_.count(fd) == 0) {
        plain_bytes_ += static_cast<int64_t>(size);
      } else {
        const auto address = reinterpret_cast<uintptr_t>(buffer);
        const bool aligned = address % 4096 == 0 && size % 4096 == 0 && offset % 4096 == 0;
        if (refuses || !aligned) return Fail(EINVAL);
        if (fails_with != 0 && offset >= fails_from) return Fail(fails_with);
        if (std::exchange(writes_half, false)) size = size / 2 + 1;
        direct_bytes_ += static_cast<int64_t>(size);
      }
    }
    return FileOps::Pwrite(fd, buffer, size, offset);
  }

  int Fsync(int fd) override {
    struct stat st;
    if (::fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
      bytes_at_fsync = direct_bytes() + plain_bytes();
    return FileOps::Fsync(fd);
  }

  int Close(int fd) override {
    SetDirect(fd, false);
    return FileOps::Close(fd);
  }

  int64_t direct_bytes() {
    const absl::MutexLock lock(&mu_);
    return direct_bytes_;
  }
  int64_t plain_bytes() {
    const absl::MutexLock lock(&mu_);
    return plain_bytes_;
  }
  int64_t bytes_at_fsync = 0;

 private:
  static int Fail(int error) {
    errno = error;
    return -1;
  }

  bool MustMeet(int fd) {
    const absl::MutexLock lock(&mu_);
    if (direct_.count(fd) == 0 || left_to_meet == 0) return false;
    --left_to_meet;
    return true;
  }

  absl::Mutex mu_;
  std::set<int> direct_ ABSL_GUARDED_BY(mu_);
  int64_t direct_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t plain_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

class DirectWrites : public testing::Test {
 protected:
  DirectWrites() {
    DirectoryStoreOptions options;
    options.root = directory_.path();
    options.file_ops = &ops_;
    store_ = MustOpen(std::move(options));
  }

  TemporaryDirectory directory_;
  DirectOps ops_;
  std::unique_ptr<ObjectStore> store_;
};

constexpr int64_t kLarge = int64_t{8} << 20;

TEST_F(DirectWrites, LargeObjectsGoInAlignedPiecesAndTheirEndThroughThePageCache) {
  int64_t direct = 0, plain = 0;
  for (const int64_t size :
       {kLarge, kLarge + 1, kLarge + 4095, kLarge + 4096, int64_t{10'000'001}}) {
    for (const int64_t reserve : {997, 4096, 100'000, 300'000, 1 << 20}) {
      SCOPED_TRACE(absl::StrCat(size, " bytes, ", reserve, " at a time"));
      const std::string bytes = PositionBytes(size);
      ASSERT_THAT(Stream(*store_, "new", bytes, reserve), IsOk());
      EXPECT_TRUE(ReadFile(directory_.path("new")) == bytes);
      direct += size / 4096 * 4096;
      plain += size % 4096;
      EXPECT_EQ(ops_.direct_bytes(), direct);
      EXPECT_EQ(ops_.plain_bytes(), plain);
      EXPECT_EQ(ops_.bytes_at_fsync, direct + plain) << "made durable before all was written";
    }
  }
}

TEST_F(DirectWrites, AsManyAreUnderWayAsTheCallerAllows) {
  EXPECT_EQ(store_->FurtherWriteBytes(kLarge - 1, 100'000), 0);
  EXPECT_GE(store_->FurtherWriteBytes(kLarge, 100'000), 512 << 10);
  EXPECT_GE(store_->FurtherWriteBytes(kLarge, 1 << 20), 1 << 20);
  const std::string bytes = PositionBytes(2 * kLarge + 5);
  for (const int writes_at_once : {1, 2, 5}) {
    // All pieces of the buffer are under way while the producer waits for the first.
    ops_.left_to_meet = writes_at_once + 1;
    ops_.meet = new absl::Barrier(ops_.left_to_meet);
    ASSERT_THAT(Stream(*store_, "new", bytes, 300'000, CommitGate(), writes_at_once), IsOk());
    EXPECT_TRUE(ReadFile(directory_.path("new")) == bytes) << writes_at_once;
    EXPECT_EQ(ops_.left_to_meet, 0);
  }
}

TEST_F(DirectWrites, AnyAddressOfTheBufferWillDo) {
  const std::string bytes = PositionBytes(kLarge + 5);
  const int64_t need = store_->WriteBufferBytes(kLarge + 5, 100'000);
  std::vector<uint8_t> memory(static_cast<size_t>(need) + 4096);
  for (const size_t shift : {0, 1, 2048, 4095}) {
    auto writer = store_->Create(
        "new", {.size_bytes = kLarge + 5, .buffer = absl::MakeSpan(memory).subspan(shift, need)});
    ASSERT_TRUE(writer.ok());
    for (size_t at = 0; at < bytes.size();) {
      const auto room = (*writer)->Reserve(100'000);
      ASSERT_TRUE(room.ok()) << room.status();
      const size_t size = std::min<size_t>(100'000, bytes.size() - at);
      std::copy_n(bytes.data() + at, size, room->data());
      ASSERT_THAT((*writer)->Advance(static_cast<int64_t>(size)), IsOk());
      at += size;
    }
    ASSERT_THAT((*writer)->Commit(CommitGate()), IsOk());
    EXPECT_TRUE(ReadFile(directory_.path("new")) == bytes) << shift;
  }
}

TEST_F(DirectWrites, SmallObjectsAndOtherFileSystemsUseThePageCache) {
  ASSERT_THAT(Stream(*store_, "small", PositionBytes(kLarge - 1), 300'000), IsOk());
  ASSERT_THAT(store_->Put("put", "bytes", CommitGate()), IsOk());
  ops_.suits = false;
  EXPECT_EQ(store_->FurtherWriteBytes(kLarge, 100'000), 0) << "of no use there";
  ASSERT_THAT(Stream(*store_, "large", PositionBytes(kLarge), 300'000), IsOk());
  EXPECT_EQ(ops_.direct_bytes(), 0);
  EXPECT_EQ(ops_.plain_bytes(), kLarge - 1 + 5 + kLarge);
}

TEST_F(DirectWrites, WhatIsRefusedOrCutShortIsWrittenThroughThePageCache) {
  const std::string bytes = PositionBytes(kLarge + 5000);
  ops_.refuses = true;
  ASSERT_THAT(Stream(*store_, "refused", bytes, 300'000), IsOk());
  EXPECT_TRUE(ReadFile(directory_.path("refused")) == bytes);
  EXPECT_EQ(ops_.direct_bytes(), 0);
  ops_.refuses = false;
  ops_.writes_half = true;
  ASSERT_THAT(Stream(*store_, "cut", bytes, 300'000), IsOk());
  EXPECT_TRUE(ReadFile(directory_.path("cut")) == bytes);
}

TEST_F(DirectWrites, AFailureFailsTheWriterAndLeavesNothing) {
  for (const auto& [error, code] : {std::pair(ENOSPC, absl::StatusCode::kResourceExhausted),
                                    std::pair(EIO, absl::StatusCode::kUnavailable)}) {
    for (const off_t from : {off_t{0}, off_t{3} << 20, off_t{kLarge - (600 << 10)}}) {
      ops_.fails_with = error;
      ops_.fails_from = from;
      EXPECT_THAT(Stream(*store_, "new", PositionBytes(kLarge), 300'000),
                  HasCodeAndText(code, "pwrite"));
      EXPECT_THAT(Tree(directory_.path()), ElementsAre());
    }
  }
}

TEST_F(DirectWrites, AnAbandonedWriterWaitsForWhatIsUnderWay) {
  for (int round = 0; round < 20; ++round) {
    std::vector<uint8_t> buffer(static_cast<size_t>(store_->WriteBufferBytes(kLarge, 500'000)));
    auto writer = store_->Create("new", {.size_bytes = kLarge, .buffer = absl::MakeSpan(buffer)});
    ASSERT_TRUE(writer.ok());
    for (int k = 0; k < 1 + round % 4; ++k) {
      ASSERT_TRUE((*writer)->Reserve(500'000).ok());
      ASSERT_THAT((*writer)->Advance(500'000), IsOk());
    }
    writer->reset();
    EXPECT_THAT(Tree(directory_.path()), ElementsAre());
  }
}

// ---------------------------------------------------------------------------------------------
// Sources that change.

class DirectorySource : public testing::Test {
 protected:
  std::unique_ptr<ObjectStore> OpenSource(const std::string& below = "",
                                          std::vector<std::string> allowed = {}) {
    return MustOpen({directory_.path(below), false, std::move(allowed), nullptr});
  }
  TemporaryDirectory directory_;
};

TEST_F(DirectorySource, TruncationIsDataLossAndNeverZeros) {
  WriteFile(directory_.path("m.safetensors"), PositionBytes(10'000));
  const auto store = OpenSource();
  const auto reader = store->Open("m.safetensors");
  ASSERT_TRUE(reader.ok());
  ASSERT_EQ(::truncate(directory_.path("m.safetensors").c_str(), 6000), 0);
  std::vector<uint8_t> out(10'000, 0xa5);
  EXPECT_THAT((*reader)->ReadAt(0, absl::MakeSpan(out)),
              HasCodeAndText(absl::StatusCode::kDataLoss,
                             "m.safetensors: truncated while reading: 6000 bytes, want 10000"));
  EXPECT_THAT((*reader)->CheckUnchanged(),
              HasCodeAndText(absl::StatusCode::kDataLoss, "m.safetensors"));
}

TEST_F(DirectorySource, AChangeInPlaceIsNoticed) {
  WriteFile(directory_.path("m"), "first");
  const auto store = OpenSource();
  const auto reader = store->Open("m");
  ASSERT_TRUE(reader.ok());
  ASSERT_THAT((*reader)->CheckUnchanged(), IsOk());
  const int fd = ::open(directory_.path("m").c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(::pwrite(fd, "F", 1, 0), 1);
  // The clock of file times may not have moved on since the file was made.
  const timespec times[2] = {{0, UTIME_OMIT}, {1'000'000'000, 5}};
  ASSERT_EQ(::futimens(fd, times), 0);
  ::close(fd);
  EXPECT_THAT((*reader)->CheckUnchanged(), HasCodeAndText(absl::StatusCode::kDataLoss, "m: "));
}

TEST_F(DirectorySource, TheVersionIsSizeTimeAndInode) {
  WriteFile(directory_.path("m"), "12345");
  const timespec times[2] = {{0, UTIME_OMIT}, {1'700'000'000, 42}};
  ASSERT_EQ(::utimensat(AT_FDCWD, directory_.path("m").c_str(), times, 0), 0);
  struct stat st;
  ASSERT_EQ(::stat(directory_.path("m").c_str(), &st), 0);
  const auto head = OpenSource()->Head("m");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->etag, absl::StrCat("5-1700000000000000042-", st.st_ino));
}

TEST_F(DirectorySource, AMissingRootIsNotFound) {
  EXPECT_THAT(OpenDirectoryStore({directory_.path("missing"), false, {}, nullptr}),
              HasCodeAndText(absl::StatusCode::kNotFound, "missing"));
  WriteFile(directory_.path("file"), "x");
  for (const bool create : {false, true}) {
    EXPECT_THAT(OpenDirectoryStore({directory_.path("file"), create, {}, nullptr}),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, "not a directory"));
  }
  EXPECT_THAT(OpenDirectoryStore({"relative", true, {}, nullptr}),
              HasCode(absl::StatusCode::kInvalidArgument));
}

TEST_F(DirectorySource, SpecialFilesAreNotObjects) {
  ASSERT_EQ(::mkfifo(directory_.path("fifo").c_str(), 0600), 0);
  fs::create_directory(directory_.path("folder"));
  const auto store = OpenSource();
  EXPECT_THAT(store->Open("fifo"),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition, "not a regular file"));
  EXPECT_THAT(store->Open("folder"), HasCodeAndText(absl::StatusCode::kNotFound, "a directory"));
  const auto entries = store->List("");
  ASSERT_TRUE(entries.ok());
  EXPECT_THAT(*entries, IsEmpty());
}

TEST_F(DirectorySource, HuggingFaceCacheLinksWork) {
  WriteFile(directory_.path("models--x/blobs/0123abc"), "weights");
  fs::create_directories(directory_.path("models--x/snapshots/abc"));
  fs::create_symlink("../../blobs/0123abc",
                     directory_.path("models--x/snapshots/abc/model.safetensors"));
  const auto store = OpenSource("models--x/snapshots/abc");
  EXPECT_EQ(store->Get("model.safetensors", 100).value_or("?"), "weights");
  const auto head = store->Head("model.safetensors");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->size_bytes, 7);
  const auto entries = store->List("");
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 1u);
  EXPECT_EQ((*entries)[0].info.etag, head->etag);

  // The root itself may be named through a link.
  fs::create_directory_symlink("models--x/snapshots/abc", directory_.path("current"));
  EXPECT_EQ(OpenSource("current")->Get("model.safetensors", 100).value_or("?"), "weights");
  // The blobs of another model are not beside this snapshot.
  WriteFile(directory_.path("models--y/blobs/0123abc"), "other");
  fs::create_symlink("../../../models--y/blobs/0123abc",
                     directory_.path("models--x/snapshots/abc/other"));
  EXPECT_THAT(store->Open("other"), HasCode(absl::StatusCode::kFailedPrecondition));
}

TEST_F(DirectorySource, ADanglingLinkSaysSoAndItsTarget) {
  fs::create_directory(directory_.path("root"));
  fs::create_symlink("../../blobs/gone", directory_.path("root/model.safetensors"));
  fs::create_directory_symlink("nowhere", directory_.path("root/folder"));
  fs::create_symlink("loop", directory_.path("root/loop"));
  WriteFile(directory_.path("root/good"), "x");
  const auto store = OpenSource("root");
  EXPECT_THAT(store->Open("model.safetensors"),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition,
                             "dangling symbolic link to \"../../blobs/gone\""));
  EXPECT_THAT(store->Head("folder/model.safetensors"),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition,
                             "root/folder: dangling symbolic link to \"nowhere\""));
  EXPECT_THAT(store->Head("loop"), HasCode(absl::StatusCode::kFailedPrecondition));
  const auto entries = store->List("");
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 1u);
  EXPECT_EQ((*entries)[0].key, "good");
}

TEST_F(DirectorySource, LinksOutOfTheRootNeedAnAllowedRoot) {
  WriteFile(directory_.path("secret/file"), "secret");
  WriteFile(directory_.path("secret-not/file"), "secret");
  WriteFile(directory_.path("root/inside"), "inside");
  fs::create_symlink("../secret/file", directory_.path("root/relative"));
  fs::create_symlink(directory_.path("secret/file"), directory_.path("root/absolute"));
  fs::create_directory_symlink("../secret", directory_.path("root/folder"));
  fs::create_directory_symlink("../secret-not", directory_.path("root/sibling"));
  fs::create_symlink("inside", directory_.path("root/harmless"));
  fs::create_symlink("../root/inside", directory_.path("root/around"));

  const auto strict = OpenSource("root");
  for (const std::string key : {"relative", "absolute", "folder/file", "sibling/file"}) {
    EXPECT_THAT(strict->Open(key),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, "symbolic link leads to"));
    EXPECT_THAT(strict->Head(key), HasCode(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(strict->Get(key, 100), HasCode(absl::StatusCode::kFailedPrecondition));
  }
  EXPECT_EQ(strict->Get("harmless", 100).value_or("?"), "inside");
  EXPECT_EQ(strict->Get("around", 100).value_or("?"), "inside");

  fs::create_directory_symlink("secret", directory_.path("alias"));
  for (const std::string allowed_root : {"secret", "alias", "secret/"}) {
    const auto allowed = OpenSource("root", {directory_.path(allowed_root)});
    for (const std::string key : {"relative", "absolute", "folder/file"}) {
      EXPECT_EQ(allowed->Get(key, 100).value_or("?"), "secret") << allowed_root << " " << key;
    }
    EXPECT_THAT(allowed->Open("sibling/file"), HasCode(absl::StatusCode::kFailedPrecondition));
  }
}

TEST_F(DirectorySource, AReplacedLinkIsAChange) {
  WriteFile(directory_.path("a"), "a");
  WriteFile(directory_.path("b"), "b");
  fs::create_symlink("a", directory_.path("link"));
  const auto store = OpenSource();
  const auto reader = store->Open("link");
  ASSERT_TRUE(reader.ok());
  ASSERT_THAT((*reader)->CheckUnchanged(), IsOk());
  fs::remove(directory_.path("link"));
  fs::create_symlink("b", directory_.path("link"));
  EXPECT_THAT((*reader)->CheckUnchanged(), HasCode(absl::StatusCode::kDataLoss));
  fs::remove(directory_.path("link"));
  fs::create_symlink("gone", directory_.path("link"));
  EXPECT_THAT((*reader)->CheckUnchanged(), HasCode(absl::StatusCode::kDataLoss));
}

// ---------------------------------------------------------------------------------------------
// Destinations.

class DirectoryDestination : public testing::Test {
 protected:
  DirectoryDestination() : root_(directory_.path("root")) {
    store_ = MustOpen({root_, true, {}, nullptr});
  }
  TemporaryDirectory directory_;
  std::string root_;
  std::unique_ptr<ObjectStore> store_;
};

TEST_F(DirectoryDestination, LookingWritesNothing) {
  EXPECT_THAT(store_->Head("x"), HasCode(absl::StatusCode::kNotFound));
  EXPECT_THAT(store_->Open("x"), HasCode(absl::StatusCode::kNotFound));
  EXPECT_THAT(store_->List(""), IsOk());
  EXPECT_THAT(store_->FreeBytes(), IsOk());
  EXPECT_THAT(store_->Delete("x"), IsOk());
  EXPECT_THAT(store_->Delete("_shardprep/x"), IsOk());
  EXPECT_THAT(Tree(root_), ElementsAre("(missing)"));
  EXPECT_THAT(store_->CheckWritable(), IsOk());
  EXPECT_THAT(Tree(root_), IsEmpty());
}

TEST_F(DirectoryDestination, TheLastDeleteOfAJobLeavesNoWorkDirectories) {
  const std::string fingerprint(64, 'f');
  const std::string kJournal[] = {ObjectKey(RankJournal{fingerprint, 0, 0}),
                                  ObjectKey(RankJournal{fingerprint, 1, 0}),
                                  ObjectKey(ReplicatedJournal{fingerprint, 0})};
  ASSERT_THAT(store_->Put("manifest.json", "{}", CommitGate()), IsOk());
  for (const std::string& key : kJournal) {
    ASSERT_THAT(store_->Put(key, "{}", CommitGate()), IsOk());
  }
  const auto entries = store_->List(kWorkPrefix);
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 3u);
  for (const ObjectEntry& entry : *entries) ASSERT_THAT(store_->Delete(entry.key), IsOk());
  EXPECT_THAT(Tree(root_), ElementsAre("manifest.json"));
}

TEST_F(DirectoryDestination, WhatAKilledWriterLeftIsListedAndDeletable) {
  WriteFile(root_ + "/_shardprep/tmp/0123-7", "half a part");
  const auto entries = store_->List(kWorkPrefix);
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 1u);
  EXPECT_TRUE(ParseObjectName((*entries)[0].key) == ObjectName(TemporaryFile{"0123-7"}));
  ASSERT_THAT(store_->Delete((*entries)[0].key), IsOk());
  EXPECT_THAT(Tree(root_), IsEmpty());
}

TEST_F(DirectoryDestination, CleaningUpFencesAWriterThatIsStillAlive) {
  std::vector<uint8_t> buffer(static_cast<size_t>(store_->WriteBufferBytes(1 << 30, 10)));
  auto writer = store_->Create("part", {.size_bytes = 10, .buffer = absl::MakeSpan(buffer)});
  ASSERT_TRUE(writer.ok());
  ASSERT_THAT((*writer)->Reserve(10), IsOk());
  ASSERT_THAT((*writer)->Advance(10), IsOk());
  const auto entries = store_->List(kWorkPrefix);
  ASSERT_TRUE(entries.ok());
  for (const ObjectEntry& entry : *entries) ASSERT_THAT(store_->Delete(entry.key), IsOk());
  EXPECT_THAT((*writer)->Commit(CommitGate()),
              HasCodeAndText(absl::StatusCode::kAborted, "removed by another"));
  writer->reset();
  EXPECT_THAT(Tree(root_), IsEmpty());
}

TEST_F(DirectoryDestination, PruningAndWritingDoNotDisturbEachOther) {
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string fingerprint(64, static_cast<char>('a' + t));
      for (int i = 0; i < 50; ++i) {
        const std::string key = ObjectKey(RankJournal{fingerprint, 0, i});
        if (!store_->Put(key, "{}", CommitGate()).ok()) ++failed;
        if (store_->Get(key, 10).value_or("") != "{}") ++failed;
        if (!store_->Delete(key).ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_THAT(store_->Delete(std::string(kWorkPrefix) + "x"), IsOk());
  EXPECT_THAT(Tree(root_), IsEmpty());
}

TEST_F(DirectoryDestination, ADirectoryPrunedBeforeTheRenameIsMadeAgain) {
  const std::string fingerprint(64, 'f');
  int asked = 0;
  const auto gate = [&] {
    // The parent is empty and open; the deletion of a neighbour takes it away.
    if (++asked == 1) {
      EXPECT_THAT(store_->Delete(ObjectKey(RankJournal{fingerprint, 1, 0})), IsOk());
    }
    return absl::OkStatus();
  };
  const std::string key = ObjectKey(RankJournal{fingerprint, 0, 0});
  ASSERT_THAT(store_->Put(key, "{}", gate), IsOk());
  EXPECT_EQ(asked, 2);  // each attempt to publish asks
  EXPECT_EQ(store_->Get(key, 10).value_or("?"), "{}");
}

TEST_F(DirectoryDestination, AnAbandonedFirstWriteLeavesOnlyTheRoot) {
  std::vector<uint8_t> buffer(static_cast<size_t>(store_->WriteBufferBytes(1 << 30, 10)));
  {
    ASSERT_THAT(store_->Create("sub/part", {.size_bytes = 1000, .buffer = absl::MakeSpan(buffer)}),
                IsOk());
  }
  EXPECT_THAT(Tree(root_), IsEmpty());
}

TEST_F(DirectoryDestination, WritesFollowNoLinkBelowTheRoot) {
  WriteFile(directory_.path("outside/file"), "precious");
  fs::create_directories(root_);
  fs::create_directory_symlink("../outside", root_ + "/folder");
  fs::create_symlink("../outside/file", root_ + "/leaf");
  const auto refused = HasCodeAndText(absl::StatusCode::kFailedPrecondition, "symbolic link");
  EXPECT_THAT(store_->Put("folder/file", "x", CommitGate()), refused);
  EXPECT_THAT(store_->PutIfAbsent("folder/new", "x", CommitGate()), refused);
  EXPECT_THAT(Stream(*store_, "folder/new", "x", 10), refused);
  EXPECT_THAT(store_->Delete("folder/file"), refused);
  EXPECT_THAT(store_->List("folder/"), refused);

  // A link in the object's own place is replaced, not followed.
  ASSERT_THAT(store_->Put("leaf", "ours", CommitGate()), IsOk());
  EXPECT_FALSE(fs::is_symlink(root_ + "/leaf"));
  EXPECT_EQ(ReadFile(root_ + "/leaf"), "ours");
  EXPECT_THAT(store_->Delete("folder"), IsOk());
  EXPECT_EQ(ReadFile(directory_.path("outside/file")), "precious");
  EXPECT_THAT(Tree(directory_.path("outside")), ElementsAre("file"));

  fs::create_directory_symlink("../outside", root_ + "/_shardprep_link");
  fs::remove_all(root_ + "/_shardprep");
  fs::rename(root_ + "/_shardprep_link", root_ + "/_shardprep");
  EXPECT_THAT(store_->Put("new", "x", CommitGate()), refused);
  EXPECT_THAT(Tree(directory_.path("outside")), ElementsAre("file"));
}

TEST_F(DirectoryDestination, ADirectoryInTheWayIsAPrecondition) {
  fs::create_directories(root_ + "/taken/below");
  WriteFile(root_ + "/object", "x");
  const auto refused = HasCode(absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(store_->Put("taken", "x", CommitGate()), refused);
  EXPECT_THAT(store_->PutIfAbsent("taken", "x", CommitGate()), refused);
  EXPECT_THAT(Stream(*store_, "taken", "x", 10), refused);
  EXPECT_THAT(store_->Delete("taken"), refused);
  EXPECT_THAT(store_->Put("object/below", "x", CommitGate()),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition, "not a directory"));
  EXPECT_THAT(store_->Put(std::string(300, 'n'), "x", CommitGate()),
              HasCode(absl::StatusCode::kInvalidArgument));
}

// A key's place may be free, an object's, or taken by what no write replaces.
TEST_F(DirectoryDestination, WhatStandsInTheWayIsNamed) {
  WriteFile(directory_.path("object"), "x");
  fs::create_directory(directory_.path("folder"));
  fs::create_symlink("nowhere", directory_.path("link"));
  ASSERT_EQ(::mkfifo(directory_.path("pipe").c_str(), 0600), 0);
  const auto store = MustOpen({directory_.path(), true, {}, nullptr});
  for (const char* key : {"object", "link", "free", "free/below"}) {
    EXPECT_THAT(store->CheckNotObstructed(key), IsOk()) << key;
  }
  for (const auto& [key, text] : std::map<std::string, std::string>{{"folder", "a directory"},
                                                                    {"pipe", "not a regular file"},
                                                                    {"object/x", "below a file"}}) {
    EXPECT_THAT(store->CheckNotObstructed(key),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, text));
  }
}

TEST_F(DirectoryDestination, AReplacedObjectKeepsItsPermissions) {
  WriteFile(root_ + "/object", "x");
  ASSERT_EQ(::chmod((root_ + "/object").c_str(), 0640), 0);
  ASSERT_THAT(store_->Put("object", "y", CommitGate()), IsOk());
  struct stat st;
  ASSERT_EQ(::stat((root_ + "/object").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0640u);
}

TEST_F(DirectoryDestination, UnrelatedFilesAreLeftAlone) {
  WriteFile(root_ + "/_shardprep/notes.txt", "mine");
  WriteFile(root_ + "/sub/other", "mine too");
  ASSERT_THAT(store_->Put("sub/object", "x", CommitGate()), IsOk());
  ASSERT_THAT(store_->Delete("sub/object"), IsOk());
  ASSERT_THAT(store_->CheckWritable(), IsOk());
  EXPECT_EQ(ReadFile(root_ + "/_shardprep/notes.txt"), "mine");
  EXPECT_EQ(ReadFile(root_ + "/sub/other"), "mine too");
}

TEST_F(DirectoryDestination, AClaimExcludesOthersByWhateverPathTheyCome) {
  const TempDir place;
  const std::string real = place / "real", link = place / "link";
  std::filesystem::create_directory_symlink(real, link);
  auto first = OpenDirectoryStore({real, true, {}, nullptr});
  ASSERT_TRUE(first.ok());
  auto claim = (*first)->Claim();
  ASSERT_TRUE(claim.ok()) << claim.status();
  for (const std::string& path : {real, link}) {
    auto other = OpenDirectoryStore({path, true, {}, nullptr});
    ASSERT_TRUE(other.ok());
    EXPECT_EQ((*other)->Claim().status().code(), absl::StatusCode::kFailedPrecondition) << path;
  }
  claim->reset();
  auto other = OpenDirectoryStore({link, true, {}, nullptr});
  EXPECT_TRUE((*other)->Claim().ok());
}

TEST_F(DirectoryDestination, ListingEndsAtItsBound) {
  WriteFile(root_ + "/a/b/one", "x");
  WriteFile(root_ + "/two", "x");
  for (const int64_t bound : {4, 3}) {  // two files, two directories
    const auto store = OpenDirectoryStore({.root = root_, .max_listed_entries = bound});
    ASSERT_THAT(store, IsOk());
    const auto entries = (*store)->List("");
    if (bound == 4) {
      ASSERT_THAT(entries, IsOk());
      EXPECT_EQ(entries->size(), 2u);
      continue;
    }
    EXPECT_EQ(entries.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(entries.status().message()),
                testing::HasSubstr(root_ + ": more than 3 files and directories"));
  }
}

TEST_F(DirectoryDestination, NamesThatAreNoKeysAreNotListed) {
  WriteFile(root_ + "/back\\slash", "x");
  WriteFile(root_ + "/good", "x");
  const auto entries = store_->List("");
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 1u);
  EXPECT_EQ((*entries)[0].key, "good");
}

}  // namespace
}  // namespace shardprep
