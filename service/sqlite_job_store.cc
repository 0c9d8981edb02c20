// What keeps the records
//
// 1. One controller at a time: `lock` in the directory is held with flock(2) for the life of the
//    store, and the database in SQLite's exclusive mode, which also keeps out other programs. Both
//    end with the process, however it ends.
// 2. Before anything is written the database is looked at: another program's, a newer version's or
//    a damaged one is refused and left as it is, the write-ahead log included.
// 3. A record is one row, written by one statement in a transaction of its own, with
//    synchronous=FULL: when it returns, the write-ahead log is on the medium. A torn tail of the
//    log is a transaction that never returned, and SQLite drops it.
// 4. Each row carries the CRC-32C of its job, since SQLite's own check covers its structure and
//    not the bytes of a value.
// 5. The schema has a version (user_version). An older one is brought up in one transaction.
// 6. A new database is made whole under another name and renamed. So an empty file, or a log
// without
//    its database, is damage and never a list without jobs.
#include "service/sqlite_job_store.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

constexpr char kDatabaseName[] = "jobs.sqlite3";
constexpr char kLockName[] = "lock";
// "SPJB": says that a database is ours.
constexpr int64_t kApplicationId = 0x53504A42;

// Statements that lead from each version of the schema to the next. Never changed, only added to.
constexpr const char* kMigrations[] = {
    "CREATE TABLE jobs ("
    " prep_job_id TEXT NOT NULL PRIMARY KEY,"
    " sequence INTEGER NOT NULL UNIQUE,"
    " state INTEGER NOT NULL,"          // v1::PrepJob::State, for whoever looks with sqlite3
    " fingerprint TEXT NOT NULL,"       // JobRecord::fingerprint
    " destination TEXT NOT NULL,"       // of the first target, for whoever looks
    " lease_span_ns INTEGER NOT NULL,"  // JobRecord::lease_span
    " job BLOB NOT NULL,"               // v1::PrepJob
    " job_crc32c INTEGER NOT NULL,"
    " updated_ms INTEGER NOT NULL"  // since 1970, for whoever looks
    ") STRICT",
};
constexpr int64_t kSchemaVersion = static_cast<int64_t>(std::size(kMigrations));

std::string ErrnoText(int error) { return std::generic_category().message(error); }

absl::Status ErrnoStatus(const std::string& what, int error) {
  const std::string message = absl::StrCat(what, ": ", ErrnoText(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::FailedPreconditionError(message);
}

absl::Status Damaged(const std::string& path, const std::string& how) {
  return absl::DataLossError(
      absl::StrCat(path, ": ", how,
                   ". It was left as it is. Restore the state directory from a copy, or move "
                   "it away and start with an empty one: resubmitted jobs resume from the journals "
                   "at their destinations"));
}

absl::StatusOr<int64_t> StatfsType(const std::string& directory) {
  struct statfs found;
  if (::statfs(directory.c_str(), &found) != 0) return ErrnoStatus(directory, errno);
  return static_cast<int64_t>(static_cast<uint32_t>(found.f_type));
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

absl::Status SyncDirectory(const std::string& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0 || ::fsync(fd.get()) != 0) return ErrnoStatus(directory, errno);
  return absl::OkStatus();
}

// One prepared statement, used from one thread at a time. Everything bound must outlive Step().
class Statement {
 public:
  Statement(sqlite3* database, const char* sql) {
    prepared_ =
        ::sqlite3_prepare_v3(database, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement_, nullptr);
  }
  ~Statement() { ::sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Bind(int64_t value) {
    ::sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& BindText(const std::string& value) {
    ::sqlite3_bind_text64(statement_, ++bound_, value.data(), value.size(), SQLITE_STATIC,
                          SQLITE_UTF8);
    return *this;
  }
  Statement& BindBytes(const std::string& value) {
    ::sqlite3_bind_blob64(statement_, ++bound_, value.data(), value.size(), SQLITE_STATIC);
    return *this;
  }

  // SQLITE_ROW, SQLITE_DONE, or an extended error code.
  int Step() { return prepared_ == SQLITE_OK ? ::sqlite3_step(statement_) : prepared_; }

  int64_t Int(int column) const { return ::sqlite3_column_int64(statement_, column); }
  std::string Bytes(int column) const {
    const void* bytes = ::sqlite3_column_blob(statement_, column);
    const int size = ::sqlite3_column_bytes(statement_, column);
    return bytes == nullptr ? "" : std::string(static_cast<const char*>(bytes), size);
  }

 private:
  sqlite3_stmt* statement_ = nullptr;
  int prepared_ = SQLITE_OK;
  int bound_ = 0;
};

uint32_t CrcOf(const std::string& bytes) {
  return Crc32c(0, {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

SqliteJobStoreOptions Trimmed(SqliteJobStoreOptions options) {
  std::string& path = options.directory;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return options;
}

class SqliteJobStore : public JobStore {
 public:
  explicit SqliteJobStore(SqliteJobStoreOptions options)
      : options_(Trimmed(std::move(options))),
        path_(absl::StrCat(options_.directory, "/", kDatabaseName)) {}

  ~SqliteJobStore() override {
    absl::MutexLock lock(&mu_);
    ::sqlite3_close_v2(database_);
  }

  absl::Status Open() {
    absl::MutexLock lock(&mu_);
    SP_RETURN_IF_ERROR(MakeDirectory());
    SP_RETURN_IF_ERROR(TakeLock());
    SP_RETURN_IF_ERROR(MakeDatabase());
    SP_RETURN_IF_ERROR(OpenDatabase(path_));
    SP_ASSIGN_OR_RETURN(const int64_t version, Inspect());
    SP_RETURN_IF_ERROR(Run("PRAGMA journal_mode = WAL"));
    SP_RETURN_IF_ERROR(Migrate(version));
    // From here on the log may be folded into the database when the store is closed.
    ::sqlite3_db_config(database_, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, nullptr);
    return SyncDirectory(options_.directory);
  }

  absl::Status Insert(const JobRecord& record) override {
    absl::MutexLock lock(&mu_);
    const std::string job = record.job.SerializeAsString();
    Statement insert(database_,
                     "INSERT INTO jobs (state, fingerprint, destination, lease_span_ns, job,"
                     " job_crc32c, updated_ms, prep_job_id, sequence)"
                     " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)");
    Bind(record, job, insert).Bind(record.sequence);
    const int code = insert.Step();
    if (code == SQLITE_DONE) return absl::OkStatus();
    if ((code & 0xFF) == SQLITE_CONSTRAINT) {
      return absl::AlreadyExistsError(absl::StrCat("job store: ", record.job.prep_job_id(),
                                                   " or sequence ", record.sequence, " exists"));
    }
    return Error(code, "insert");
  }

  absl::Status Update(const JobRecord& record) override {
    absl::MutexLock lock(&mu_);
    const std::string job = record.job.SerializeAsString();
    Statement update(database_,
                     "UPDATE jobs SET state = ?, fingerprint = ?, destination = ?,"
                     " lease_span_ns = ?, job = ?, job_crc32c = ?, updated_ms = ?"
                     " WHERE prep_job_id = ?");
    Bind(record, job, update);
    const int code = update.Step();
    if (code != SQLITE_DONE) return Error(code, "update");
    if (::sqlite3_changes(database_) > 0) return absl::OkStatus();
    return absl::NotFoundError(absl::StrCat("job store: no ", record.job.prep_job_id()));
  }

  absl::Status Remove(const std::string& job_id) override {
    absl::MutexLock lock(&mu_);
    Statement remove(database_, "DELETE FROM jobs WHERE prep_job_id = ?");
    const int code = remove.BindText(job_id).Step();
    return code == SQLITE_DONE ? absl::OkStatus() : Error(code, "delete");
  }

  absl::StatusOr<std::vector<JobRecord>> LoadAll() override {
    absl::MutexLock lock(&mu_);
    Statement select(database_,
                     "SELECT prep_job_id, sequence, fingerprint, lease_span_ns, job, job_crc32c"
                     " FROM jobs ORDER BY sequence");
    std::vector<JobRecord> records;
    int code = select.Step();
    for (; code == SQLITE_ROW; code = select.Step()) {
      const std::string id = select.Bytes(0);
      const std::string job = select.Bytes(4);
      JobRecord record;
      if (static_cast<int64_t>(CrcOf(job)) != select.Int(5) || !record.job.ParseFromString(job) ||
          record.job.prep_job_id() != id) {
        return Damaged(path_, absl::StrCat("the record of job \"", id, "\" is damaged"));
      }
      record.sequence = select.Int(1);
      record.fingerprint = select.Bytes(2);
      record.lease_span = absl::Nanoseconds(select.Int(3));
      records.push_back(std::move(record));
    }
    if (code != SQLITE_DONE) return Error(code, "select");
    return records;
  }

 private:
  absl::Status MakeDirectory() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::string& directory = options_.directory;
    struct stat found;
    const bool missing = ::stat(directory.c_str(), &found) != 0 && errno == ENOENT;
    const std::string existing = missing ? ParentOf(directory) : directory;
    SP_ASSIGN_OR_RETURN(const int64_t type, options_.file_system_type
                                                ? options_.file_system_type(existing)
                                                : StatfsType(existing));
    if (const std::string name = NetworkFileSystemName(type); !name.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          directory, " lies on ", name,
          ": neither locks nor durable writes are to be relied on there; the state directory wants "
          "a local file system or a block device of its own"));
    }
    if (!missing) return absl::OkStatus();
    if (::mkdir(directory.c_str(), 0700) != 0) return ErrnoStatus(directory, errno);
    return SyncDirectory(existing);
  }

  absl::Status TakeLock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::string path = absl::StrCat(options_.directory, "/", kLockName);
    lock_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (lock_.get() < 0) return ErrnoStatus(path, errno);
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
    if (errno == EWOULDBLOCK) return HeldByAnother();
    return ErrnoStatus(path, errno);
  }

  absl::Status HeldByAnother() const {
    return absl::FailedPreconditionError(
        absl::StrCat("state directory ", options_.directory, " is in use by another controller"));
  }

  // Unless there is one.
  absl::Status MakeDatabase() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    struct stat found;
    if (::lstat(path_.c_str(), &found) == 0) return absl::OkStatus();
    if (errno != ENOENT) return ErrnoStatus(path_, errno);
    const std::string log = absl::StrCat(path_, "-wal");
    if (::lstat(log.c_str(), &found) == 0) {
      return Damaged(path_, absl::StrCat("missing, while its log ", log, " is there"));
    }
    const std::string unfinished = absl::StrCat(path_, ".new");
    for (const char* suffix : {"", "-journal"}) {  // of a controller that was killed here
      const std::string left = absl::StrCat(unfinished, suffix);
      if (::unlink(left.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(left, errno);
    }
    {
      // Made here for its mode, which SQLite gives to its log too.
      const UniqueFd made(
          ::open(unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
      if (made.get() < 0) return ErrnoStatus(path_, errno);
    }
    SP_RETURN_IF_ERROR(OpenDatabase(unfinished));
    SP_RETURN_IF_ERROR(Migrate(0));
    ::sqlite3_close_v2(std::exchange(database_, nullptr));
    if (::rename(unfinished.c_str(), path_.c_str()) != 0) return ErrnoStatus(path_, errno);
    return SyncDirectory(options_.directory);
  }

  absl::Status OpenDatabase(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int opened = ::sqlite3_open_v2(
        path.c_str(), &database_,
        SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW, nullptr);
    if (opened != SQLITE_OK) return Error(opened, "open");
    ::sqlite3_extended_result_codes(database_, 1);
    ::sqlite3_db_config(database_, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, nullptr);
    ::sqlite3_db_config(database_, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
    return Run("PRAGMA locking_mode = EXCLUSIVE");
  }

  // Reads only. The version of the schema.
  absl::StatusOr<int64_t> Inspect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    SP_ASSIGN_OR_RETURN(const int64_t objects, Number("SELECT count(*) FROM sqlite_master"));
    SP_ASSIGN_OR_RETURN(const int64_t application, Number("PRAGMA application_id"));
    SP_ASSIGN_OR_RETURN(const int64_t version, Number("PRAGMA user_version"));
    if (objects == 0) return Damaged(path_, "it is empty");
    if (application != kApplicationId) {
      return absl::FailedPreconditionError(
          absl::StrCat(path_, " is the database of another program"));
    }
    if (version < 1 || version > kSchemaVersion) {
      return absl::FailedPreconditionError(
          absl::StrCat(path_, ": schema version ", version, ", this version knows up to ",
                       kSchemaVersion, ": start the newer controller again"));
    }
    Statement check(database_, "PRAGMA quick_check(1)");
    const int code = check.Step();
    if (code != SQLITE_ROW) return Error(code, "quick_check");
    if (const std::string result = check.Bytes(0); result != "ok") {
      return Damaged(path_, absl::StrCat("the check found: ", result));
    }
    return version;
  }

  absl::Status Migrate(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    SP_RETURN_IF_ERROR(Run("PRAGMA synchronous = FULL"));
    SP_ASSIGN_OR_RETURN(const int64_t page_bytes, Number("PRAGMA page_size"));
    SP_RETURN_IF_ERROR(Run(absl::StrCat("PRAGMA max_page_count = ",
                                        std::max<int64_t>(1, options_.max_bytes / page_bytes))));
    // Takes the lock for good, also when there is nothing to change.
    SP_RETURN_IF_ERROR(Run("BEGIN EXCLUSIVE"));
    for (; version < kSchemaVersion; ++version) {
      SP_RETURN_IF_ERROR(Run(kMigrations[version]));
    }
    SP_RETURN_IF_ERROR(Run(absl::StrCat("PRAGMA application_id = ", kApplicationId)));
    SP_RETURN_IF_ERROR(Run(absl::StrCat("PRAGMA user_version = ", kSchemaVersion)));
    return Run("COMMIT");
  }

  // Runs a statement and ignores its rows.
  absl::Status Run(const std::string& sql) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Statement statement(database_, sql.c_str());
    int code = statement.Step();
    while (code == SQLITE_ROW) code = statement.Step();
    return code == SQLITE_DONE ? absl::OkStatus() : Error(code, sql);
  }

  absl::StatusOr<int64_t> Number(const std::string& sql) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Statement statement(database_, sql.c_str());
    const int code = statement.Step();
    if (code != SQLITE_ROW) return Error(code, sql);
    return statement.Int(0);
  }

  // All columns but the sequence, which comes last.
  static Statement& Bind(const JobRecord& record, const std::string& job, Statement& statement) {
    const v1::PrepJobSpec& spec = record.job.spec();
    const v1::Target& first =
        spec.targets_size() > 0 ? spec.targets(0) : v1::Target::default_instance();
    return statement.Bind(record.job.state())
        .BindText(record.fingerprint)
        .BindText(first.destination_uri())
        .Bind(absl::ToInt64Nanoseconds(record.lease_span))
        .BindBytes(job)
        .Bind(CrcOf(job))
        .Bind(absl::ToUnixMillis(absl::Now()))
        .BindText(record.job.prep_job_id());
  }

  // By the code, for what the caller should do.
  absl::Status Error(int code, const std::string& what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int error = ::sqlite3_system_errno(database_);
    const std::string system = error == 0 ? "" : absl::StrCat(" (", ErrnoText(error), ")");
    const std::string message = absl::StrCat(path_, ": ", what, ": ", ::sqlite3_errstr(code),
                                             system, ", SQLite code ", code);
    switch (code & 0xFF) {
      case SQLITE_FULL:
      case SQLITE_NOMEM:
      case SQLITE_TOOBIG:
        return absl::ResourceExhaustedError(message);
      case SQLITE_IOERR:
        if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
        return absl::UnavailableError(message);
      case SQLITE_BUSY:
      case SQLITE_LOCKED:
        return HeldByAnother();
      case SQLITE_CORRUPT:
      case SQLITE_NOTADB:
        return Damaged(path_, ::sqlite3_errstr(code));
      case SQLITE_READONLY:
      case SQLITE_PERM:
      case SQLITE_CANTOPEN:
      case SQLITE_AUTH:
        return absl::FailedPreconditionError(message);
      default:
        return absl::InternalError(message);
    }
  }

  const SqliteJobStoreOptions options_;
  const std::string path_;
  mutable absl::Mutex mu_;
  UniqueFd lock_ ABSL_GUARDED_BY(mu_);  // released last
  sqlite3* database_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace

std::string NetworkFileSystemName(int64_t type) {
  // linux/magic.h, and the sources of those file systems that are not in it.
  switch (static_cast<uint32_t>(type)) {
    case 0x6969:
      return "NFS";
    case 0x517B:
      return "SMB";
    case 0xFF534D42:
      return "CIFS";
    case 0xFE534D42:
      return "SMB2";
    case 0x01021997:
      return "9P";
    case 0x65735546:
      return "FUSE";
    case 0x0BD00BD0:
      return "Lustre";
    case 0x00C36400:
      return "Ceph";
    case 0x5346414F:
    case 0x6B414653:
      return "AFS";
    case 0x73757245:
      return "Coda";
    case 0x47504653:
      return "GPFS";
    case 0x19830326:
      return "BeeGFS";
    case 0xAAD7AAEA:
      return "PanFS";
    case 0x786F4256:
      return "vboxsf";
    case 0x7461636F:
      return "OCFS2";
    case 0x01161970:
      return "GFS2";
    default:
      return "";
  }
}

absl::StatusOr<std::unique_ptr<JobStore>> OpenSqliteJobStore(const SqliteJobStoreOptions& options) {
  if (options.directory.empty()) return absl::InvalidArgumentError("no state directory is named");
  auto store = std::make_unique<SqliteJobStore>(options);
  SP_RETURN_IF_ERROR(store->Open());
  return {std::move(store)};
}

}  // namespace shardprep
