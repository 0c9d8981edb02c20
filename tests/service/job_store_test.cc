// What every job store promises, and what the one on disk promises beyond that.
#include "service/job_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "service/sqlite_job_store.h"
#include "tests/support/temp_dir.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

JobRecord Record(const std::string& id, int64_t sequence) {
  JobRecord record;
  record.sequence = sequence;
  record.fingerprint = "print-" + id;
  record.job.set_prep_job_id(id);
  record.job.mutable_spec()->set_source_uri("/models/" + id);
  record.job.mutable_spec()->add_targets()->set_destination_uri("/out/" + id);
  record.job.set_state(v1::PrepJob::STATE_PENDING);
  record.job.mutable_progress()->set_bytes_total(1000 + sequence);
  return record;
}

std::vector<std::string> Ids(JobStore& store) {
  const absl::StatusOr<std::vector<JobRecord>> records = store.LoadAll();
  EXPECT_TRUE(records.ok()) << records.status();
  std::vector<std::string> ids;
  if (!records.ok()) return ids;
  for (const JobRecord& record : *records) ids.push_back(record.job.prep_job_id());
  return ids;
}

std::unique_ptr<JobStore> OpenIn(const std::string& directory) {
  absl::StatusOr<std::unique_ptr<JobStore>> store =
      OpenSqliteJobStore({.directory = directory, .file_system_type = nullptr});
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// Every store -------------------------------------------------------------------------------------

using MakeStore = std::function<std::unique_ptr<JobStore>(const std::string& directory)>;

class JobStoreTest : public testing::TestWithParam<std::pair<const char*, MakeStore>> {
 protected:
  TempDir dir_;
  std::unique_ptr<JobStore> store_ = GetParam().second(dir_ / "state");
};

INSTANTIATE_TEST_SUITE_P(
    Stores, JobStoreTest,
    testing::Values(std::pair<const char*, MakeStore>("Memory",
                                                      [](const std::string&) {
                                                        return std::make_unique<MemoryJobStore>();
                                                      }),
                    std::pair<const char*, MakeStore>("Sqlite", OpenIn)),
    [](const auto& param_info) { return param_info.param.first; });

TEST_P(JobStoreTest, RecordsComeBackWholeAndInTheOrderOfTheirSequence) {
  EXPECT_THAT(Ids(*store_), IsEmpty());
  ASSERT_EQ(store_->Insert(Record("late", 9)), absl::OkStatus());
  JobRecord early = Record("early", 2);
  early.lease_span = absl::Seconds(70) + absl::Nanoseconds(1);
  // Bytes that are no text are kept as they are.
  early.job.mutable_spec()->set_alignment_policy_json(std::string("a\0b\n", 4));
  ASSERT_EQ(store_->Insert(early), absl::OkStatus());
  const absl::StatusOr<std::vector<JobRecord>> records = store_->LoadAll();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 2U);
  EXPECT_EQ((*records)[1].job.prep_job_id(), "late");
  const JobRecord& found = (*records)[0];
  EXPECT_EQ(found.job.SerializeAsString(), early.job.SerializeAsString());
  EXPECT_EQ(found.sequence, 2);
  EXPECT_EQ(found.fingerprint, "print-early");
  EXPECT_EQ(found.lease_span, early.lease_span);
}

TEST_P(JobStoreTest, TakenIdsAndSequencesAreRefusedAndChangeNothing) {
  ASSERT_EQ(store_->Insert(Record("a", 1)), absl::OkStatus());
  JobRecord again = Record("a", 2);
  again.fingerprint = "another";
  EXPECT_EQ(store_->Insert(again).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store_->Insert(Record("b", 1)).code(), absl::StatusCode::kAlreadyExists);
  ASSERT_THAT(Ids(*store_), ElementsAre("a"));
  EXPECT_EQ(store_->LoadAll()->front().fingerprint, "print-a");
}

TEST_P(JobStoreTest, UpdateReplacesAllButTheSequence) {
  ASSERT_EQ(store_->Insert(Record("a", 1)), absl::OkStatus());
  ASSERT_EQ(store_->Insert(Record("b", 2)), absl::OkStatus());
  JobRecord changed = Record("a", 77);
  changed.job.set_state(v1::PrepJob::STATE_RUNNING);
  changed.lease_span = absl::Seconds(70);
  ASSERT_EQ(store_->Update(changed), absl::OkStatus());
  EXPECT_THAT(Ids(*store_), ElementsAre("a", "b"));
  const JobRecord found = store_->LoadAll()->front();
  EXPECT_EQ(found.sequence, 1);
  EXPECT_EQ(found.job.state(), v1::PrepJob::STATE_RUNNING);
  EXPECT_EQ(found.lease_span, absl::Seconds(70));
  EXPECT_EQ(store_->Update(Record("c", 3)).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Ids(*store_), ElementsAre("a", "b"));
}

TEST_P(JobStoreTest, RemovedJobsAreGoneAndUnknownOnesNoError) {
  ASSERT_EQ(store_->Insert(Record("a", 1)), absl::OkStatus());
  ASSERT_EQ(store_->Insert(Record("b", 2)), absl::OkStatus());
  EXPECT_EQ(store_->Remove("a"), absl::OkStatus());
  EXPECT_EQ(store_->Remove("a"), absl::OkStatus());
  EXPECT_THAT(Ids(*store_), ElementsAre("b"));
  EXPECT_EQ(store_->Insert(Record("a", 3)), absl::OkStatus());
  EXPECT_THAT(Ids(*store_), ElementsAre("b", "a"));
}

// On disk -----------------------------------------------------------------------------------------

class SqliteJobStoreTest : public testing::Test {
 protected:
  absl::Status Refusal() {
    return OpenSqliteJobStore({.directory = state_, .file_system_type = nullptr}).status();
  }

  // Runs statements on the closed database, as another program would.
  void Execute(const std::string& sql) {
    sqlite3* database = nullptr;
    ASSERT_EQ(::sqlite3_open(database_.c_str(), &database), SQLITE_OK);
    char* message = nullptr;
    EXPECT_EQ(::sqlite3_exec(database, sql.c_str(), nullptr, nullptr, &message), SQLITE_OK)
        << message;
    ::sqlite3_free(message);
    ::sqlite3_close(database);
  }

  static std::string BytesOf(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  static void Overwrite(const std::string& path, int64_t offset, const std::string& bytes) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset);
    file << bytes;
    ASSERT_TRUE(file.flush().good());
  }

  // A copy of the state directory as it lies on the disk while the store is open: what a kill
  // leaves.
  std::string CopyOfOpenState() {
    std::filesystem::copy(state_, dir_ / "copy", std::filesystem::copy_options::recursive);
    return dir_ / "copy";
  }

  TempDir dir_;
  const std::string state_ = dir_ / "state";
  const std::string database_ = state_ + "/jobs.sqlite3";
};

TEST_F(SqliteJobStoreTest, WhatWasInsertedIsThereAfterAKill) {
  const std::unique_ptr<JobStore> store = OpenIn(state_);
  ASSERT_EQ(store->Insert(Record("a", 1)), absl::OkStatus());
  ASSERT_EQ(store->Insert(Record("b", 2)), absl::OkStatus());
  EXPECT_THAT(Ids(*OpenIn(CopyOfOpenState())), ElementsAre("a", "b"));
}

TEST_F(SqliteJobStoreTest, TornTailOfTheLogIsATransactionThatNeverReturned) {
  const std::unique_ptr<JobStore> store = OpenIn(state_);
  ASSERT_EQ(store->Insert(Record("a", 1)), absl::OkStatus());
  const auto whole = std::filesystem::file_size(database_ + "-wal");
  ASSERT_EQ(store->Insert(Record("torn", 2)), absl::OkStatus());
  const auto torn = std::filesystem::file_size(database_ + "-wal");
  ASSERT_GT(torn, whole);
  const std::string copy = CopyOfOpenState();
  std::filesystem::resize_file(copy + "/jobs.sqlite3-wal", torn - 100);
  EXPECT_THAT(Ids(*OpenIn(copy)), ElementsAre("a"));
}

TEST_F(SqliteJobStoreTest, SecondControllerIsRefusedUntilTheFirstHasGone) {
  std::unique_ptr<JobStore> store = OpenIn(state_);
  const absl::Status refused = Refusal();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr(state_));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another controller"));
  // The refused one has not disturbed the first.
  EXPECT_EQ(store->Insert(Record("a", 1)), absl::OkStatus());
  store.reset();
  EXPECT_THAT(Ids(*OpenIn(state_)), ElementsAre("a"));
}

TEST_F(SqliteJobStoreTest, FilesAreTheOwnersAlone) {
  const std::unique_ptr<JobStore> store = OpenIn(state_);
  ASSERT_EQ(store->Insert(Record("a", 1)), absl::OkStatus());
  struct stat found;
  ASSERT_EQ(::stat(state_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0700U);
  for (const auto& entry : std::filesystem::directory_iterator(state_)) {
    ASSERT_EQ(::stat(entry.path().c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 0777, 0600U) << entry.path();
  }
}

// Its columns as they were when jobs had one target.
TEST_F(SqliteJobStoreTest, StoreOfTheFirstSchemaIsReadAndGoesOn) {
  OpenIn(state_);
  const std::string job = Record("old", 1).job.SerializeAsString();
  const uint32_t crc = Crc32c(0, {reinterpret_cast<const uint8_t*>(job.data()), job.size()});
  Execute("DROP TABLE jobs");
  Execute(
      "CREATE TABLE jobs (prep_job_id TEXT NOT NULL PRIMARY KEY, sequence INTEGER NOT NULL UNIQUE,"
      " state INTEGER NOT NULL, fingerprint TEXT NOT NULL, destination TEXT NOT NULL,"
      " lease_span_ns INTEGER NOT NULL, job BLOB NOT NULL, job_crc32c INTEGER NOT NULL,"
      " updated_ms INTEGER NOT NULL) STRICT");
  Execute("PRAGMA user_version = 1");
  Execute(absl::StrCat("INSERT INTO jobs VALUES ('old', 1, 1, 'print-old', '/out/old', 5, x'",
                       absl::BytesToHexString(job), "', ", crc, ", 0)"));
  const std::unique_ptr<JobStore> store = OpenIn(state_);
  const absl::StatusOr<std::vector<JobRecord>> records = store->LoadAll();
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 1U);
  EXPECT_EQ(records->front().fingerprint, "print-old");
  EXPECT_EQ(records->front().lease_span, absl::Nanoseconds(5));
  EXPECT_EQ(records->front().job.SerializeAsString(), job);
  EXPECT_EQ(store->Insert(Record("new", 2)), absl::OkStatus());
  EXPECT_THAT(Ids(*store), ElementsAre("old", "new"));
}

TEST_F(SqliteJobStoreTest, NetworkFileSystemsAreRefusedBeforeAnythingIsWritten) {
  const std::pair<int64_t, const char*> types[] = {
      {0x6969, "NFS"},        {0x517B, "SMB"},      {0xFF534D42, "CIFS"},
      {0xFE534D42, "SMB2"},   {0x01021997, "9P"},   {0x65735546, "FUSE"},
      {0x0BD00BD0, "Lustre"}, {0x00C36400, "Ceph"}, {0x47504653, "GPFS"},
  };
  for (const auto& [type, name] : types) {
    SqliteJobStoreOptions options;
    options.directory = state_;
    std::string asked;
    options.file_system_type = [&asked, magic = type](const std::string& directory) {
      asked = directory;
      return absl::StatusOr<int64_t>(magic);
    };
    const absl::Status refused = OpenSqliteJobStore(options).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat(" lies on ", name, ":")));
    EXPECT_EQ(asked, dir_.path()) << "the parent, since the directory is not there";
    EXPECT_FALSE(std::filesystem::exists(state_));
  }
  // ext4, XFS, Btrfs, tmpfs, overlayfs, ZFS.
  for (const int64_t type : {0xEF53, 0x58465342, 0x01021994, 0x794C7630, 0x2FC12FC1}) {
    EXPECT_EQ(NetworkFileSystemName(type), "") << type;
  }
  EXPECT_EQ(NetworkFileSystemName(0x9123683E), "");
}

TEST_F(SqliteJobStoreTest, DamagedFilesAreRefusedAndLeftAsTheyAre) {
  {
    const std::unique_ptr<JobStore> store = OpenIn(state_);
    for (int i = 1; i <= 200; ++i) {
      ASSERT_EQ(store->Insert(Record(absl::StrCat("job-", i), i)), absl::OkStatus());
    }
  }
  const std::string good = BytesOf(database_);
  struct Damage {
    const char* what;
    int64_t offset;
  };
  // The page size is 4096: the second page is the root of the table.
  for (const Damage& damage : {Damage{"the header", 0}, Damage{"a page of the table", 4096}}) {
    Overwrite(database_, damage.offset, std::string(200, '\xA5'));
    const std::string before = BytesOf(database_);
    const absl::Status refused = Refusal();
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << damage.what << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("move it away")) << damage.what;
    EXPECT_TRUE(BytesOf(database_) == before) << damage.what;
    Overwrite(database_, 0, good);
  }
  EXPECT_EQ(Ids(*OpenIn(state_)).size(), 200U);
}

TEST_F(SqliteJobStoreTest, FlippedByteOfAJobIsDataLossNamingIt) {
  ASSERT_EQ(OpenIn(state_)->Insert(Record("a", 1)), absl::OkStatus());
  const std::string bytes = BytesOf(database_);
  const size_t at = bytes.find("/models/a");
  ASSERT_NE(at, std::string::npos);
  Overwrite(database_, static_cast<int64_t>(at), "/Models/a");
  const absl::Status damaged = OpenIn(state_)->LoadAll().status();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.message()), HasSubstr("job \"a\""));
}

TEST_F(SqliteJobStoreTest, EmptyDatabaseIsDamageAndNoListWithoutJobs) {
  OpenIn(state_);
  const auto expect_damage = [&](const std::string& how) {
    const absl::Status refused = Refusal();
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(how));
  };
  std::ofstream(database_, std::ios::trunc).close();
  expect_damage("it is empty");
  EXPECT_EQ(std::filesystem::file_size(database_), 0U);
  std::filesystem::remove(database_);
  std::ofstream(database_ + "-wal") << "log";
  expect_damage("missing, while its log");
  EXPECT_FALSE(std::filesystem::exists(database_));
}

TEST_F(SqliteJobStoreTest, StoreThatWasNeverFinishedIsMadeAgain) {
  std::filesystem::create_directory(state_);
  std::ofstream(database_ + ".new") << "SQLite format";
  std::ofstream(database_ + ".new-journal") << "half";
  EXPECT_THAT(Ids(*OpenIn(state_)), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(database_ + ".new"));
  EXPECT_FALSE(std::filesystem::exists(database_ + ".new-journal"));
}

TEST_F(SqliteJobStoreTest, NewerSchemasAndOtherProgramsDatabasesAreRefusedUnchanged) {
  OpenIn(state_);
  Execute("PRAGMA user_version = 1000");
  std::string before = BytesOf(database_);
  absl::Status refused = Refusal();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("schema version 1000"));
  EXPECT_TRUE(BytesOf(database_) == before);

  std::filesystem::remove(database_);
  Execute("CREATE TABLE recipes (name TEXT)");
  before = BytesOf(database_);
  refused = Refusal();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another program"));
  EXPECT_TRUE(BytesOf(database_) == before);
}

TEST_F(SqliteJobStoreTest, FullStoreRefusesAndKeepsWhatItHas) {
  absl::StatusOr<std::unique_ptr<JobStore>> store =
      OpenSqliteJobStore({.directory = state_, .max_bytes = 64 << 10, .file_system_type = nullptr});
  ASSERT_TRUE(store.ok()) << store.status();
  JobRecord large = Record("large", 1);
  large.job.mutable_spec()->set_alignment_policy_json(std::string(20'000, ' '));
  std::vector<std::string> kept;
  absl::Status status;
  for (int i = 1; i < 10 && status.ok(); ++i) {
    large.sequence = i;
    large.job.set_prep_job_id(absl::StrCat("job-", i));
    status = (*store)->Insert(large);
    if (status.ok()) kept.push_back(large.job.prep_job_id());
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(database_));
  ASSERT_FALSE(kept.empty());
  EXPECT_EQ(Ids(**store), kept);
  // An update that needs more room fails alike and leaves the record.
  large.job.set_prep_job_id(kept[0]);
  large.job.mutable_spec()->set_alignment_policy_json(std::string(100'000, ' '));
  EXPECT_EQ((*store)->Update(large).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*store)->LoadAll()->front().job.spec().alignment_policy_json().size(), 20'000U);
  // Removing makes room.
  EXPECT_EQ((*store)->Remove(kept[0]), absl::OkStatus());
  EXPECT_EQ((*store)->Insert(Record("small", 50)), absl::OkStatus());
}

TEST_F(SqliteJobStoreTest, PlacesThatCannotBeMadeAreNamed) {
  const absl::Status refused =
      OpenSqliteJobStore({.directory = dir_ / "none/state", .file_system_type = nullptr}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("none"));
  EXPECT_EQ(OpenSqliteJobStore({.directory = "", .file_system_type = nullptr}).status().code(),
            absl::StatusCode::kInvalidArgument);
  // A trailing slash names the same directory.
  EXPECT_EQ(OpenIn(state_ + "/")->Insert(Record("a", 1)), absl::OkStatus());
  EXPECT_THAT(Ids(*OpenIn(state_)), ElementsAre("a"));
}

}  // namespace
}  // namespace shardprep
