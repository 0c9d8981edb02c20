// Atomic write (Commit, Put):
//   1. Make `<root>/_shardprep/tmp/<id>` with O_CREAT|O_EXCL. The same file system as the final
//      name, so that step 6 is a rename; `<id>` holds 64 random bits of this store and a counter,
//      so that no other process or attempt uses it.
//   2. Take the announced size with fallocate: a full disk or quota is found before any write.
//   3. Write: large objects past the page cache (below), others through it. Then the kernel is told
//      every 4 MiB to start writing back, so that step 4 has little left.
//   4. fsync the file, compare its size with what was written, close it. All three report errors
//      of earlier writes, and a name must never lead to bytes that are not on the disk.
//   5. Ask the gate.
//   6. rename() to the final name: readers see the old object or the new one, whole.
//   7. fsync the directory: the name is on the disk. A failure here means that the object is
//      visible but may not survive a power loss: UNAVAILABLE, and the caller repeats the write.
//   A crash before 6 leaves a file under `_shardprep/tmp/`; List() shows it, so that whoever cleans
//   `_shardprep/` removes it. If somebody else removes it while this process is alive, step 6 finds
//   nothing to rename and answers ABORTED: the clean-up of a successor fences its predecessor.
//
// Write if absent (PutIfAbsent): as above with, in place of 6,
//   6a. link() the temporary file to the final name: EEXIST means that somebody was first. A server
//       may carry a link out and lose the answer, so that the client's repetition sees EEXIST; two
//       links on our own temporary file prove that the name is ours.
//   6b. Where the file system has no hard links (EPERM, EOPNOTSUPP, ENOSYS):
//       renameat2(RENAME_NOREPLACE).
//   6c. Remove the temporary name.
//
// Past the page cache (O_DIRECT). On the block file systems where it was measured, a large object
// costs a tenth of the processor time so: nothing is copied into pages that must be found first.
// The caller fills one piece of its buffer while threads of the store write the others. Memory,
// offsets and sizes are multiples of 4 KiB; what is left of a piece that is written goes to the
// start of the next, and the end of the object through the page cache. Where a write of this kind
// is refused after all, it is repeated, and the rest written, through the page cache.
//
// Faults. EINTR and short counts are no faults: the call goes on where it stopped. A read that
// fails for what may pass (EIO and ESTALE of a network file system among it) is tried again as a
// request to an object store is: the file is opened anew by its name, must be the pinned version,
// and is read again, kReadAttempts times in all within about a second. Writes are never tried again
// here: after a failed write-back Linux forgets what it could not write, so a second fsync of the
// same file would succeed over lost bytes. The writer fails with UNAVAILABLE, its file goes, and
// the caller's next attempt writes every byte again.
//
// Symbolic links. Reading follows them while the resolved file lies below the resolved root, below
// an allowed root or, when the root lies in a `snapshots/<revision>` directory, below the `blobs`
// directory beside `snapshots`: that is how the Hugging Face cache stores a model. Anything else is
// refused. The resolved path is then opened one segment at a time without following links, so that
// a link put there between check and open is refused as well. Writing, listing and deleting follow
// no link below the root: a link in place of a directory is refused, a link in place of an object
// is replaced or removed itself.
//
// Empty directories below `_shardprep/` are removed by Delete() of any name there and when a write
// is given up. Another writer may just have made such a directory; it notices (ENOENT) and makes it
// again.
#include "workers/directory_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "workers/object_names.h"
#include "workers/open_store.h"

namespace shardprep {

ssize_t FileOps::Pread(int fd, void* buffer, size_t size, off_t offset) {
  return ::pread(fd, buffer, size, offset);
}
ssize_t FileOps::Pwrite(int fd, const void* buffer, size_t size, off_t offset) {
  return ::pwrite(fd, buffer, size, offset);
}
int FileOps::Fallocate(int fd, off_t size) { return ::fallocate(fd, 0, 0, size); }
int FileOps::StartWriteback(int fd, off_t offset, off_t size) {
  return ::sync_file_range(fd, offset, size, SYNC_FILE_RANGE_WRITE);
}
bool FileOps::SuitsDirect(int fd) {
  struct statfs fs;
  return ::fstatfs(fd, &fs) == 0 && (fs.f_type == EXT4_SUPER_MAGIC || fs.f_type == XFS_SUPER_MAGIC);
}
int FileOps::SetDirect(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -1;
  return ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
}
int FileOps::Fsync(int fd) { return ::fsync(fd); }
int FileOps::Close(int fd) { return ::close(fd); }
int FileOps::Rename(int from_dir, const char* from, int to_dir, const char* to) {
  return ::renameat(from_dir, from, to_dir, to);
}
int FileOps::RenameIfAbsent(int from_dir, const char* from, int to_dir, const char* to) {
  return ::renameat2(from_dir, from, to_dir, to, RENAME_NOREPLACE);
}
int FileOps::Link(int from_dir, const char* from, int to_dir, const char* to) {
  return ::linkat(from_dir, from, to_dir, to, 0);
}
int FileOps::Unlink(int dir, const char* name) { return ::unlinkat(dir, name, 0); }
void FileOps::Sleep(absl::Duration duration) { absl::SleepFor(duration); }

namespace {

// One pread or pwrite moves at most this much on Linux, whatever is asked.
constexpr size_t kMaxTransferBytes = 0x7ffff000;
// Measured best for streams into preallocated files: larger pieces leave the caches.
constexpr int64_t kWritePieceBytes = int64_t{256} << 10;
constexpr int64_t kWritebackBytes = int64_t{4} << 20;
// Past the page cache: least size of an object and of a piece, and what everything is a multiple
// of. Measured: 512 KiB and 1 MiB are as fast, less is slower.
constexpr int64_t kDirectObjectBytes = int64_t{8} << 20;
constexpr int64_t kDirectPieceBytes = int64_t{512} << 10;
constexpr int64_t kDirectAlignment = 4096;
// They wait for the disk nearly all the time. The ranks of a batch have no more writes at once
// (kWritesAtOnce in block_plan.h), so raise both.
constexpr int kDirectWriters = 8;
// Bounds the repetitions after another process removed a directory that was about to be used.
constexpr int kMaxAttempts = 16;
// Of one read, with pauses of 40, 160 and 640 ms between them.
constexpr int kReadAttempts = 4;
constexpr absl::Duration kFirstReadPause = absl::Milliseconds(40);
constexpr int kReadPauseFactor = 4;

// What the caller should do about an errno. EIO and ESTALE are UNAVAILABLE, not DATA_LOSS: network
// file systems give both for a passing fault, a new attempt opens its files anew and compares their
// versions, and a disk that is really broken fails all attempts.
absl::StatusCode CodeOfErrno(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case ENAMETOOLONG:
    case EILSEQ:
      return absl::StatusCode::kInvalidArgument;
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOTDIR:
    case EISDIR:
    case ENOTEMPTY:
    case ELOOP:
    case EXDEV:
    case ETXTBSY:
    case EBUSY:
    case EMLINK:
    case EOPNOTSUPP:
    case EINVAL:
      return absl::StatusCode::kFailedPrecondition;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EIO:
    case ESTALE:
    case ETIMEDOUT:
    case EAGAIN:
    case EINTR:
    case ENOTCONN:
    case ECONNRESET:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kUnknown;
  }
}

absl::Status ErrnoStatus(int error, const std::string& path, absl::string_view call) {
  absl::Status status(CodeOfErrno(error),
                      absl::StrCat(path, ": ", call, ": ", std::generic_category().message(error),
                                   " (errno ", error, ")"));
  if (error == ENOSPC || error == EDQUOT) status.SetPayload(kNoSpacePayload, absl::Cord());
  return status;
}

// Repeats `call` while a signal interrupts it.
template <typename Call>
auto RetryInterrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// Owns a file descriptor whose close() result does not matter: read-only files and directories.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }

  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Holds a lock for as long as its descriptor is open.
class LockedDirectory final : public StoreClaim {
 public:
  explicit LockedDirectory(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  UniqueFd fd_;
};

struct CloseDirectory {
  void operator()(DIR* stream) const { ::closedir(stream); }
};

struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};

std::string JoinPath(const std::string& directory, absl::string_view name) {
  return directory == "/" ? absl::StrCat("/", name) : absl::StrCat(directory, "/", name);
}

// The directory part of an absolute path.
std::string ParentPath(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string LeafOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::vector<std::string> SegmentsOf(const std::string& path) {
  return absl::StrSplit(path, '/', absl::SkipEmpty());
}

// The path with every link resolved, or empty with errno set.
std::optional<std::string> RealPath(const std::string& path) {
  const std::unique_ptr<char, FreeMemory> real(::realpath(path.c_str(), nullptr));
  if (real == nullptr) return std::nullopt;
  return std::string(real.get());
}

std::string ReadLink(const std::string& path) {
  char target[4096];
  const ssize_t size = ::readlink(path.c_str(), target, sizeof(target));
  return size < 0 ? "?" : std::string(target, static_cast<size_t>(size));
}

ObjectInfo InfoOf(const struct stat& st) {
  ObjectInfo info;
  info.size_bytes = st.st_size;
  const int64_t mtime_ns = int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  info.etag = absl::StrCat(st.st_size, "-", mtime_ns, "-", st.st_ino);
  return info;
}

// Opens an absolute path that holds no link, refusing any that appears in it. O_NONBLOCK keeps a
// FIFO from blocking; regular files ignore it.
absl::StatusOr<UniqueFd> OpenWithoutLinks(const std::string& path) {
  const std::vector<std::string> segments = SegmentsOf(path);
  UniqueFd at(::open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
  for (size_t i = 0; at.ok() && i < segments.size(); ++i) {
    const bool is_leaf = i + 1 == segments.size();
    const int flags = is_leaf ? O_RDONLY | O_NONBLOCK | O_NOCTTY : O_PATH | O_DIRECTORY;
    at = UniqueFd(::openat(at.get(), segments[i].c_str(), flags | O_NOFOLLOW | O_CLOEXEC));
  }
  if (!at.ok()) return ErrnoStatus(errno, path, "open");
  return at;
}

// An open regular file and what it was when it was opened.
struct OpenedFile {
  UniqueFd fd;
  ObjectInfo info;
};

enum class Missing { kFail, kMake };
enum class IfPresent { kReplace, kFail };

// A file under `_shardprep/tmp/` that has no name of its own yet. Removed unless published.
struct TemporaryObject {
  UniqueFd directory;
  std::string name;
  std::string path;
  int fd = -1;  // closed through FileOps, which may report a late write error
};

// The directory tree: what the store, its readers and its writers do with paths.
class Tree {
 public:
  explicit Tree(DirectoryStoreOptions options)
      : root_(std::move(options.root)),
        create_(options.create),
        allowed_roots_(std::move(options.allowed_roots)),
        ops_(options.file_ops != nullptr ? options.file_ops : &own_ops_) {
    std::random_device random;
    unique_ =
        absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
  }

  const std::string& root() const { return root_; }
  bool create() const { return create_; }
  FileOps& ops() const { return *ops_; }
  std::string PathOf(const std::string& key) const { return JoinPath(root_, key); }

  // An id that no other store, process or earlier call uses.
  std::string NewId() { return absl::StrCat(unique_, "-", next_id_.fetch_add(1)); }

  // Reading: follows links as the top of this file allows.
  absl::StatusOr<std::string> ResolveForRead(const std::string& key) const;
  absl::StatusOr<OpenedFile> OpenForRead(const std::string& key) const;

  // Writing, listing, deleting: no links below the root. `directory` is "" for the root itself.
  absl::StatusOr<UniqueFd> EnterDirectory(const std::string& directory, Missing missing) const;
  absl::StatusOr<UniqueFd> EnterChild(int directory, const std::string& name,
                                      const std::string& path, Missing missing) const;

  // Whether the root, or the directory in which it would be made, is on a file system that suits
  // writing past the page cache.
  bool SuitsDirect() const;

  absl::StatusOr<TemporaryObject> CreateTemporary();
  void Discard(TemporaryObject* temporary) const;

  // In pieces of at most `piece` bytes.
  absl::Status Write(const TemporaryObject& temporary, absl::Span<const uint8_t> bytes,
                     int64_t offset, int64_t piece = kWritePieceBytes) const;

  // Steps 4 to 7.
  absl::StatusOr<ObjectInfo> Publish(TemporaryObject* temporary, const std::string& key,
                                     int64_t size_bytes, IfPresent if_present,
                                     const CommitGate& gate) const;

  absl::Status SyncDirectory(int directory, const std::string& path) const;

  absl::StatusOr<std::unique_ptr<StoreClaim>> Claim() const;

  // Removes the empty directories from `directory`, which is or lies below `_shardprep`, upwards.
  void PruneWorkDirectories(std::string directory) const;

 private:
  bool MayRead(const std::string& real_path) const;
  absl::Status WhyMissing(const std::string& key) const;
  absl::StatusOr<UniqueFd> MakeRoot(const std::string& path) const;
  absl::StatusOr<ObjectInfo> Finish(TemporaryObject* temporary, int64_t size_bytes) const;
  void KeepMode(const TemporaryObject& temporary, int directory, const std::string& leaf) const;
  int MoveIntoPlace(const TemporaryObject& temporary, int directory, const std::string& leaf,
                    IfPresent if_present) const;
  absl::Status WhyNotMoved(int error, const TemporaryObject& temporary, int directory,
                           const std::string& path, IfPresent if_present) const;

  const std::string root_;
  const bool create_;
  const std::vector<std::string> allowed_roots_;
  FileOps own_ops_;
  FileOps* const ops_;
  std::string unique_;
  std::atomic<int64_t> next_id_{0};
};

// The part of a key before its last slash, "" when there is none.
std::string DirectoryOf(const std::string& key) {
  const size_t slash = key.rfind('/');
  return slash == std::string::npos ? "" : key.substr(0, slash);
}

bool Tree::MayRead(const std::string& real_path) const {
  const std::optional<std::string> real_root = RealPath(root_);
  if (!real_root) return false;
  if (IsSameOrInside(real_path, *real_root)) return true;
  for (const std::string& allowed : allowed_roots_) {
    if (IsSameOrInside(real_path, RealPath(allowed).value_or(allowed))) return true;
  }
  const size_t snapshots = real_root->rfind("/snapshots/");
  if (snapshots == std::string::npos) return false;
  return IsSameOrInside(real_path, absl::StrCat(real_root->substr(0, snapshots), "/blobs"));
}

// Tells a dangling link, which somebody must repair, from an object that is not there.
absl::Status Tree::WhyMissing(const std::string& key) const {
  std::string path = root_;
  for (const std::string& segment : SegmentsOf(key)) {
    path = JoinPath(path, segment);
    struct stat st;
    if (::lstat(path.c_str(), &st) != 0) break;
    if (S_ISLNK(st.st_mode) && ::stat(path.c_str(), &st) != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": dangling symbolic link to \"", ReadLink(path), "\""));
    }
  }
  return absl::NotFoundError(absl::StrCat(PathOf(key), ": no such object"));
}

absl::StatusOr<std::string> Tree::ResolveForRead(const std::string& key) const {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  const std::string path = PathOf(key);
  std::optional<std::string> real = RealPath(path);
  if (!real) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) return WhyMissing(key);
    return ErrnoStatus(error, path, "realpath");
  }
  if (!MayRead(*real)) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": a symbolic link leads to ", *real, ", outside ", root_, " and its allowed roots"));
  }
  return *std::move(real);
}

absl::StatusOr<OpenedFile> Tree::OpenForRead(const std::string& key) const {
  SP_ASSIGN_OR_RETURN(const std::string real, ResolveForRead(key));
  OpenedFile file;
  SP_ASSIGN_OR_RETURN(file.fd, OpenWithoutLinks(real));
  struct stat st;
  if (::fstat(file.fd.get(), &st) != 0) return ErrnoStatus(errno, PathOf(key), "fstat");
  if (S_ISDIR(st.st_mode)) {
    return absl::NotFoundError(absl::StrCat(PathOf(key), ": a directory, want an object"));
  }
  if (!S_ISREG(st.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(PathOf(key), ": not a regular file"));
  }
  file.info = InfoOf(st);
  return file;
}

// A lock on the root directory itself: there is no file to leave behind, and a directory reached
// through a link is the same directory.
absl::StatusOr<std::unique_ptr<StoreClaim>> Tree::Claim() const {
  SP_ASSIGN_OR_RETURN(UniqueFd root, MakeRoot(root_));
  if (::flock(root.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, root_, "lock");
    return absl::FailedPreconditionError(
        absl::StrCat(root_, ": another job is being written there; want a place of one's own"));
  }
  return std::make_unique<LockedDirectory>(std::move(root));
}

// Like `mkdir -p`. The root's own path may lead through links: whoever named it wanted that.
absl::StatusOr<UniqueFd> Tree::MakeRoot(const std::string& path) const {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.ok()) return fd;
  if (errno != ENOENT || path == "/") return ErrnoStatus(errno, path, "open directory");
  SP_ASSIGN_OR_RETURN(const UniqueFd parent, MakeRoot(ParentPath(path)));
  return EnterChild(parent.get(), LeafOf(path), path, Missing::kMake);
}

absl::StatusOr<UniqueFd> Tree::EnterChild(int directory, const std::string& name,
                                          const std::string& path, Missing missing) const {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    UniqueFd fd(::openat(directory, name.c_str(), kFlags));
    if (fd.ok()) return fd;
    const int error = errno;
    if (error == ENOTDIR || error == ELOOP) {
      struct stat st;
      const bool is_link =
          ::fstatat(directory, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(st.st_mode);
      const std::string message = absl::StrCat(
          path, is_link ? ": a symbolic link, which is not followed here, want a directory"
                        : ": not a directory");
      if (is_link || missing == Missing::kMake) return absl::FailedPreconditionError(message);
      return absl::NotFoundError(message);
    }
    if (error != ENOENT || missing == Missing::kFail) {
      return ErrnoStatus(error, path, "open directory");
    }
    if (::mkdirat(directory, name.c_str(), 0777) == 0) {
      SP_RETURN_IF_ERROR(SyncDirectory(directory, path));
    } else if (errno != EEXIST) {
      return ErrnoStatus(errno, path, "mkdir");
    }
  }
  return absl::UnavailableError(absl::StrCat(path, ": another process keeps removing it"));
}

absl::StatusOr<UniqueFd> Tree::EnterDirectory(const std::string& directory, Missing missing) const {
  UniqueFd at;
  if (missing == Missing::kMake && create_) {
    SP_ASSIGN_OR_RETURN(at, MakeRoot(root_));
  } else {
    at = UniqueFd(::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!at.ok()) return ErrnoStatus(errno, root_, "open directory");
  }
  std::string path = root_;
  for (const std::string& segment : SegmentsOf(directory)) {
    path = JoinPath(path, segment);
    SP_ASSIGN_OR_RETURN(at, EnterChild(at.get(), segment, path, missing));
  }
  return at;
}

absl::Status Tree::SyncDirectory(int directory, const std::string& path) const {
  if (RetryInterrupted([&] { return ops_->Fsync(directory); }) == 0) return absl::OkStatus();
  // Some network file systems have no fsync of directories: their servers order names themselves.
  if (errno == EINVAL || errno == EOPNOTSUPP) return absl::OkStatus();
  return ErrnoStatus(errno, path, "fsync directory");
}

bool Tree::SuitsDirect() const {
  for (std::string path = root_;; path = ParentPath(path)) {
    const UniqueFd directory(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (directory.ok()) return ops_->SuitsDirect(directory.get());
    if (path == "/") return false;
  }
}

absl::StatusOr<TemporaryObject> Tree::CreateTemporary() {
  const std::string directory = DirectoryOf(kTemporaryPrefix);
  absl::Status last;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    absl::StatusOr<UniqueFd> entered = EnterDirectory(directory, Missing::kMake);
    last = entered.status();
    if (absl::IsNotFound(last)) continue;  // perhaps pruned on the way
    SP_RETURN_IF_ERROR(last);
    TemporaryObject temporary;
    temporary.directory = *std::move(entered);
    temporary.path = PathOf(ObjectKey(TemporaryFile{NewId()}));
    temporary.name = LeafOf(temporary.path);
    temporary.fd = ::openat(temporary.directory.get(), temporary.name.c_str(),
                            O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (temporary.fd >= 0) return temporary;
    // ENOENT: the empty directory was pruned after it was entered.
    last = ErrnoStatus(errno, temporary.path, "create");
    if (errno != ENOENT && errno != EEXIST) return last;
  }
  return last;
}

void Tree::Discard(TemporaryObject* temporary) const {
  if (temporary->fd >= 0) ops_->Close(std::exchange(temporary->fd, -1));
  if (temporary->name.empty()) return;
  ops_->Unlink(temporary->directory.get(), std::exchange(temporary->name, "").c_str());
  PruneWorkDirectories(DirectoryOf(kTemporaryPrefix));
}

absl::Status Tree::Write(const TemporaryObject& temporary, absl::Span<const uint8_t> bytes,
                         int64_t offset, int64_t piece) const {
  while (!bytes.empty()) {
    const size_t want = std::min(bytes.size(), static_cast<size_t>(piece));
    const ssize_t got =
        RetryInterrupted([&] { return ops_->Pwrite(temporary.fd, bytes.data(), want, offset); });
    if (got < 0) return ErrnoStatus(errno, temporary.path, "pwrite");
    if (got == 0) {
      return absl::UnavailableError(
          absl::StrCat(temporary.path, ": pwrite took 0 of ", want, " bytes"));
    }
    bytes.remove_prefix(static_cast<size_t>(got));
    offset += got;
  }
  return absl::OkStatus();
}

// A replaced object keeps its permissions: a reader that could read it still can.
void Tree::KeepMode(const TemporaryObject& temporary, int directory,
                    const std::string& leaf) const {
  struct stat st;
  if (::fstatat(directory, leaf.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) return;
  if (!S_ISREG(st.st_mode)) return;
  // Failing is no reason to lose the write: the file then has the mode of any new file.
  if (::fchmod(temporary.fd, st.st_mode & 0777) != 0) return;
}

// Step 4. The version is taken while the file is still open and private: it cannot be another's.
absl::StatusOr<ObjectInfo> Tree::Finish(TemporaryObject* temporary, int64_t size_bytes) const {
  if (RetryInterrupted([&] { return ops_->Fsync(temporary->fd); }) != 0) {
    return ErrnoStatus(errno, temporary->path, "fsync");
  }
  struct stat st;
  if (::fstat(temporary->fd, &st) != 0) return ErrnoStatus(errno, temporary->path, "fstat");
  if (st.st_size != size_bytes) {
    return absl::DataLossError(
        absl::StrCat(temporary->path, ": ", st.st_size, " bytes after writing, want ", size_bytes));
  }
  // Linux has closed the descriptor even when it reports EINTR.
  if (ops_->Close(std::exchange(temporary->fd, -1)) != 0 && errno != EINTR) {
    return ErrnoStatus(errno, temporary->path, "close");
  }
  return InfoOf(st);
}

// Step 6. 0, or an errno.
int Tree::MoveIntoPlace(const TemporaryObject& temporary, int directory, const std::string& leaf,
                        IfPresent if_present) const {
  const int from = temporary.directory.get();
  const char* const name = temporary.name.c_str();
  if (if_present == IfPresent::kReplace) {
    return ops_->Rename(from, name, directory, leaf.c_str()) == 0 ? 0 : errno;
  }
  if (ops_->Link(from, name, directory, leaf.c_str()) != 0) {
    const int error = errno;
    if (error == EEXIST) {
      struct stat st;
      const bool ours = ::fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_nlink == 2;
      if (!ours) return EEXIST;
    } else if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS) {
      return ops_->RenameIfAbsent(from, name, directory, leaf.c_str()) == 0 ? 0 : errno;
    } else {
      return error;
    }
  }
  ops_->Unlink(from, name);
  return 0;
}

absl::Status Tree::WhyNotMoved(int error, const TemporaryObject& temporary, int directory,
                               const std::string& path, IfPresent if_present) const {
  struct stat st;
  const bool is_directory =
      ::fstatat(directory, LeafOf(path).c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISDIR(st.st_mode);
  if (is_directory && (error == EEXIST || error == EISDIR)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": a directory, want an object"));
  }
  if (error == EEXIST) {
    return absl::AlreadyExistsError(absl::StrCat(path, ": an object of that name exists"));
  }
  if (error == ENOENT) {
    return absl::AbortedError(
        absl::StrCat(path, ": its temporary file ", temporary.path, " was removed by another"));
  }
  return ErrnoStatus(error, path, if_present == IfPresent::kReplace ? "rename" : "link");
}

absl::StatusOr<ObjectInfo> Tree::Publish(TemporaryObject* temporary, const std::string& key,
                                         int64_t size_bytes, IfPresent if_present,
                                         const CommitGate& gate) const {
  const std::string path = PathOf(key);
  const std::string leaf = LeafOf(path);
  SP_ASSIGN_OR_RETURN(UniqueFd parent, EnterDirectory(DirectoryOf(key), Missing::kMake));
  if (if_present == IfPresent::kReplace) KeepMode(*temporary, parent.get(), leaf);
  SP_ASSIGN_OR_RETURN(ObjectInfo info, Finish(temporary, size_bytes));

  for (int attempt = 0;; ++attempt) {
    if (gate) SP_RETURN_IF_ERROR(gate());
    const int error = MoveIntoPlace(*temporary, parent.get(), leaf, if_present);
    if (error == 0) break;
    // ENOENT is either name's: an empty parent may have been pruned, and can be made again.
    struct stat st;
    const bool has_temporary = ::fstatat(temporary->directory.get(), temporary->name.c_str(), &st,
                                         AT_SYMLINK_NOFOLLOW) == 0;
    if (error != ENOENT || !has_temporary || attempt >= kMaxAttempts) {
      return WhyNotMoved(error, *temporary, parent.get(), path, if_present);
    }
    SP_ASSIGN_OR_RETURN(parent, EnterDirectory(DirectoryOf(key), Missing::kMake));
  }
  temporary->name.clear();

  const absl::Status synced = SyncDirectory(parent.get(), ParentPath(path));
  if (synced.ok()) return info;
  return absl::UnavailableError(
      absl::StrCat(path, ": visible, but perhaps not durable: ", synced.message()));
}

void Tree::PruneWorkDirectories(std::string directory) const {
  const UniqueFd root(::open(root_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!root.ok()) return;
  const auto remove = [&](const std::string& name) {
    // Refused (ENOTEMPTY) while it is in use; missing is as good as removed.
    return ::unlinkat(root.get(), name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT;
  };
  for (; !DirectoryOf(directory).empty(); directory = DirectoryOf(directory)) {
    if (!remove(directory)) return;
  }
  if (remove(DirectoryOf(kTemporaryPrefix))) remove(DirectoryOf(kWorkPrefix));
}

class DirectoryReader final : public ObjectReader {
 public:
  DirectoryReader(const Tree* tree, std::string key, OpenedFile file)
      : tree_(tree),
        key_(std::move(key)),
        info_(std::move(file.info)),
        fd_(std::make_shared<const UniqueFd>(std::move(file.fd))) {
    ::posix_fadvise(fd_->get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }

  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
    const auto size = static_cast<int64_t>(out.size());
    if (offset < 0 || offset > info_.size_bytes || size > info_.size_bytes - offset) {
      return absl::OutOfRangeError(absl::StrCat(Path(), ": ", size, " bytes from offset ", offset,
                                                " on, want a range in [0, ", info_.size_bytes,
                                                ")"));
    }
    absl::Status status = ReadFrom(*File(), offset, out);
    absl::Duration pause = kFirstReadPause;
    for (int attempt = 1; absl::IsUnavailable(status) && attempt < kReadAttempts; ++attempt) {
      tree_->ops().Sleep(pause);
      pause *= kReadPauseFactor;
      status = Reopen();
      if (status.ok()) status = ReadFrom(*File(), offset, out);
    }
    return status;
  }

  void WillNeed(int64_t offset, int64_t size) override {
    if (offset < 0 || size <= 0) return;  // to posix_fadvise a size of 0 means "to the end"
    ::posix_fadvise(File()->get(), offset, size, POSIX_FADV_WILLNEED);
  }

  absl::Status CheckUnchanged() override {
    SP_RETURN_IF_ERROR(CheckInPlace());
    return OpenPinned().status();
  }

  // Whether the file that was opened is as it was, whatever has its name now.
  absl::Status CheckInPlace() const {
    struct stat st;
    if (::fstat(File()->get(), &st) == 0) return Compare(InfoOf(st));
    // A stale handle says only that the name must be asked again.
    return errno == ESTALE ? absl::OkStatus() : ErrnoStatus(errno, Path(), "fstat");
  }

  const ObjectInfo& info() const override { return info_; }

 private:
  std::string Path() const { return tree_->PathOf(key_); }

  std::shared_ptr<const UniqueFd> File() const {
    absl::MutexLock lock(&mu_);
    return fd_;
  }

  absl::Status ReadFrom(const UniqueFd& fd, int64_t offset, absl::Span<uint8_t> out) const {
    while (!out.empty()) {
      const size_t want = std::min(out.size(), kMaxTransferBytes);
      const ssize_t got =
          RetryInterrupted([&] { return tree_->ops().Pread(fd.get(), out.data(), want, offset); });
      if (got < 0) return ErrnoStatus(errno, Path(), "pread");
      if (got == 0) {
        return absl::DataLossError(absl::StrCat(Path(), ": truncated while reading: ", offset,
                                                " bytes, want ", info_.size_bytes));
      }
      out.remove_prefix(static_cast<size_t>(got));
      offset += got;
    }
    return absl::OkStatus();
  }

  // The file that has the name now, which must be the pinned version.
  absl::StatusOr<OpenedFile> OpenPinned() const {
    absl::StatusOr<OpenedFile> now = tree_->OpenForRead(key_);
    if (absl::IsNotFound(now.status()) || absl::IsFailedPrecondition(now.status())) {
      return absl::DataLossError(
          absl::StrCat("replaced or removed while reading: ", now.status().message()));
    }
    SP_RETURN_IF_ERROR(now.status());
    SP_RETURN_IF_ERROR(Compare(now->info));
    return now;
  }

  absl::Status Reopen() {
    SP_ASSIGN_OR_RETURN(OpenedFile now, OpenPinned());
    auto fd = std::make_shared<const UniqueFd>(std::move(now.fd));
    absl::MutexLock lock(&mu_);
    fd_ = std::move(fd);
    return absl::OkStatus();
  }

  absl::Status Compare(const ObjectInfo& found) const {
    if (found.etag == info_.etag) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(Path(), ": changed while reading: size-mtime-inode ",
                                            found.etag, ", want ", info_.etag));
  }

  const Tree* const tree_;
  const std::string key_;
  const ObjectInfo info_;
  mutable absl::Mutex mu_;
  std::shared_ptr<const UniqueFd> fd_ ABSL_GUARDED_BY(mu_);
};

int64_t RoundDown(int64_t size) { return size / kDirectAlignment * kDirectAlignment; }
int64_t RoundUp(int64_t size) { return RoundDown(size + kDirectAlignment - 1); }

// A few threads that carry out what is handed to them. Thread safe.
class WriteQueue {
 public:
  // Everything that was added is done.
  ~WriteQueue() {
    {
      absl::MutexLock lock(&mu_);
      ending_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  void Add(std::function<void()> write) {
    absl::MutexLock lock(&mu_);
    if (threads_.empty()) {
      for (int t = 0; t < kDirectWriters; ++t) threads_.emplace_back([this] { Run(); });
    }
    writes_.push_back(std::move(write));
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> write;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
          return ending_ || !writes_.empty();
        };
        mu_.Await(absl::Condition(&ready));
        if (writes_.empty()) return;
        write = std::move(writes_.front());
        writes_.pop_front();
      }
      write();
    }
  }

  absl::Mutex mu_;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::function<void()>> writes_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

// Writes one file past the page cache, the pieces of a buffer in turn. Not thread safe.
class DirectWriter {
 public:
  // `buffer` has at least BufferBytes(1, writes_at_once); all must outlive it.
  DirectWriter(const Tree* tree, WriteQueue* queue, const TemporaryObject* file,
               absl::Span<uint8_t> buffer, int writes_at_once)
      : tree_(tree), queue_(queue), file_(file), pieces_(static_cast<size_t>(writes_at_once) + 1) {
    const auto address = reinterpret_cast<uintptr_t>(buffer.data());
    const auto skip = static_cast<size_t>(-address % kDirectAlignment);
    const auto size = static_cast<size_t>(
        RoundDown(static_cast<int64_t>((buffer.size() - skip) / pieces_.size())));
    for (size_t p = 0; p < pieces_.size(); ++p) {
      pieces_[p].memory = buffer.subspan(skip + p * size, size);
    }
  }

  ~DirectWriter() { AwaitAll().IgnoreError(); }

  // A piece for reservations of at most `reserve` bytes, behind what another left over.
  static int64_t PieceBytes(int64_t reserve) {
    return std::max(kDirectPieceBytes, RoundUp(reserve) + kDirectAlignment);
  }

  static int64_t BufferBytes(int64_t reserve, int writes_at_once) {
    return (writes_at_once + 1) * PieceBytes(reserve) + kDirectAlignment;
  }

  // The piece to be filled from its start on.
  absl::Span<uint8_t> piece() const { return pieces_[current_].memory; }

  // Has the first `filled` bytes of the piece written at `offset`, and turns to the next piece when
  // that has been written. Returns how many bytes were too few to be written: they now stand at the
  // start of that piece. Errors are those of any write so far.
  absl::StatusOr<int64_t> Turn(int64_t filled, int64_t offset) {
    const int64_t size = RoundDown(filled);
    Piece& full = pieces_[current_];
    if (size > 0) Start(full, size, offset);
    current_ = (current_ + 1) % pieces_.size();
    Piece& next = pieces_[current_];
    SP_RETURN_IF_ERROR(Await(next));
    std::copy_n(full.memory.data() + size, filled - size, next.memory.data());
    return filled - size;
  }

  absl::Status AwaitAll() {
    absl::Status status;
    for (const Piece& piece : pieces_) status = Await(piece);
    return status;
  }

 private:
  struct Piece {
    absl::Span<uint8_t> memory;
    bool being_written = false;
  };

  void Start(Piece& piece, int64_t size, int64_t offset) {
    {
      absl::MutexLock lock(&mu_);
      piece.being_written = true;
    }
    queue_->Add([this, &piece, size, offset] {
      const absl::Status status = Write(piece.memory.first(static_cast<size_t>(size)), offset);
      absl::MutexLock lock(&mu_);
      error_.Update(status);
      piece.being_written = false;
    });
  }

  absl::Status Write(absl::Span<const uint8_t> bytes, int64_t offset) const {
    absl::Status status =
        tree_->Write(*file_, bytes, offset, static_cast<int64_t>(kMaxTransferBytes));
    // EINVAL: the device wants coarser multiples, or a write ended in the middle of one.
    if (absl::IsFailedPrecondition(status) && tree_->ops().SetDirect(file_->fd, false) == 0) {
      status = tree_->Write(*file_, bytes, offset);
    }
    return status;
  }

  // The first error of any write so far.
  absl::Status Await(const Piece& piece) {
    absl::MutexLock lock(&mu_);
    const auto written = [&piece] { return !piece.being_written; };
    mu_.Await(absl::Condition(&written));
    return error_;
  }

  const Tree* const tree_;
  WriteQueue* const queue_;
  const TemporaryObject* const file_;
  absl::Mutex mu_;
  std::vector<Piece> pieces_;  // being_written is guarded by mu_
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  size_t current_ = 0;
};

// The memory in hand holds [0, filled_) finished bytes, not yet written, and behind them the
// reservation. It is written whenever a piece is full, or when a reservation does not fit behind
// the finished bytes.
class DirectoryWriter final : public ObjectWriter {
 public:
  DirectoryWriter(const Tree* tree, WriteQueue* queue, std::string key, const WriteOptions& options,
                  TemporaryObject temporary)
      : tree_(tree),
        queue_(queue),
        key_(std::move(key)),
        options_(options),
        memory_(options.buffer),
        largest_reserve_(static_cast<int64_t>(options.buffer.size())),
        temporary_(std::move(temporary)) {}

  ~DirectoryWriter() override {
    direct_.reset();  // before the file that it writes
    tree_->Discard(&temporary_);
  }

  // Step 2. File systems without fallocate find out about space while writing.
  absl::Status Preallocate() {
    if (options_.size_bytes == 0) return absl::OkStatus();
    const int result = RetryInterrupted(
        [&] { return tree_->ops().Fallocate(temporary_.fd, options_.size_bytes); });
    if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return absl::OkStatus();
    return ErrnoStatus(errno, temporary_.path,
                       absl::StrCat("fallocate of ", options_.size_bytes, " bytes"));
  }

  // Past the page cache from now on, if that suits object, buffer and file system.
  void TryDirect() {
    FileOps& ops = tree_->ops();
    if (options_.size_bytes < kDirectObjectBytes ||
        static_cast<int64_t>(options_.buffer.size()) <
            DirectWriter::BufferBytes(1, options_.writes_at_once) ||
        !ops.SuitsDirect(temporary_.fd) || ops.SetDirect(temporary_.fd, true) != 0) {
      return;
    }
    direct_.emplace(tree_, queue_, &temporary_, options_.buffer, options_.writes_at_once);
    memory_ = direct_->piece();
    largest_reserve_ = static_cast<int64_t>(memory_.size()) - kDirectAlignment;
  }

  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) override {
    SP_RETURN_IF_ERROR(status_);
    if (size < 0 || size > largest_reserve_) {
      return Fail(absl::InvalidArgumentError(absl::StrCat(Name(), ": reservation of ", size,
                                                          " bytes, want 0 to ", largest_reserve_,
                                                          " (the write buffer)")));
    }
    if (size > MemoryBytes() - filled_) SP_RETURN_IF_ERROR(Flush());
    reserved_ = MemoryBytes() - filled_;
    return memory_.subspan(static_cast<size_t>(filled_));
  }

  absl::Status Advance(int64_t size) override {
    SP_RETURN_IF_ERROR(status_);
    const int64_t room = options_.size_bytes - written_ - filled_;
    if (size < 0 || size > reserved_ || size > room) {
      return Fail(absl::InvalidArgumentError(absl::StrCat(
          Name(), ": advance by ", size, " bytes, want at most ", std::min(reserved_, room), " (",
          reserved_, " reserved, ", room, " left of the announced ", options_.size_bytes, ")")));
    }
    filled_ += size;
    reserved_ = 0;
    const int64_t piece = direct_ ? MemoryBytes() : kWritePieceBytes;
    return filled_ >= piece ? Flush() : absl::OkStatus();
  }

  absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate) override {
    SP_RETURN_IF_ERROR(status_);
    SP_RETURN_IF_ERROR(direct_ ? FinishDirect() : Flush());
    if (written_ != options_.size_bytes) {
      return Fail(absl::FailedPreconditionError(absl::StrCat(Name(), ": commit after ", written_,
                                                             " bytes, want the announced ",
                                                             options_.size_bytes)));
    }
    status_ = absl::FailedPreconditionError(absl::StrCat(Name(), ": already committed"));
    return tree_->Publish(&temporary_, key_, written_, IfPresent::kReplace, gate);
  }

 private:
  std::string Name() const { return tree_->PathOf(key_); }
  int64_t MemoryBytes() const { return static_cast<int64_t>(memory_.size()); }

  absl::Status Fail(absl::Status status) {
    status_ = status;
    return status;
  }

  absl::Status Flush() { return direct_ ? TurnDirect() : WriteOut(); }

  absl::Status WriteOut() {
    const auto bytes = memory_.first(static_cast<size_t>(filled_));
    const absl::Status written = tree_->Write(temporary_, bytes, written_);
    if (!written.ok()) return Fail(written);
    written_ += filled_;
    filled_ = 0;
    if (written_ - started_ >= kWritebackBytes) {
      // Only a hint: an error of the device comes back from fsync.
      tree_->ops().StartWriteback(temporary_.fd, started_, written_ - started_);
      started_ = written_;
    }
    return absl::OkStatus();
  }

  absl::Status TurnDirect() {
    const auto left = direct_->Turn(filled_, written_);
    if (!left.ok()) return Fail(left.status());
    written_ += filled_ - *left;
    filled_ = *left;
    memory_ = direct_->piece();
    return absl::OkStatus();
  }

  // The end of the object need not be a whole multiple, so it goes through the page cache.
  absl::Status FinishDirect() {
    SP_RETURN_IF_ERROR(TurnDirect());
    if (absl::Status status = direct_->AwaitAll(); !status.ok()) return Fail(std::move(status));
    if (filled_ == 0) return absl::OkStatus();
    if (tree_->ops().SetDirect(temporary_.fd, false) != 0) {
      return Fail(ErrnoStatus(errno, temporary_.path, "fcntl"));
    }
    started_ = written_;
    return WriteOut();
  }

  const Tree* const tree_;
  WriteQueue* const queue_;
  const std::string key_;
  const WriteOptions options_;
  absl::Span<uint8_t> memory_;  // the buffer, or the piece of it that is filled
  int64_t largest_reserve_;
  TemporaryObject temporary_;
  std::optional<DirectWriter> direct_;
  absl::Status status_;
  int64_t written_ = 0;   // bytes in the file, or handed over to be written
  int64_t started_ = 0;   // bytes whose write-back was started
  int64_t filled_ = 0;    // finished bytes in memory_
  int64_t reserved_ = 0;  // bytes of memory_ that the caller may fill
};

class DirectoryStore final : public ObjectStore {
 public:
  explicit DirectoryStore(DirectoryStoreOptions options)
      : max_listed_entries_(options.max_listed_entries), tree_(std::move(options)) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(const OpenedFile file, tree_.OpenForRead(key));
    return file.info;
  }

  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(OpenedFile file, tree_.OpenForRead(key));
    return std::make_unique<DirectoryReader>(&tree_, key, std::move(file));
  }

  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    SP_ASSIGN_OR_RETURN(OpenedFile file, tree_.OpenForRead(key));
    DirectoryReader reader(&tree_, key, std::move(file));
    const int64_t size = reader.info().size_bytes;
    if (size > max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(tree_.PathOf(key), ": ", size, " bytes, want at most ", max_bytes));
    }
    std::string bytes(static_cast<size_t>(size), '\0');
    SP_RETURN_IF_ERROR(reader.ReadAt(0, {reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()}));
    // Replaced by now is fine: the bytes are one version's. Rewritten in place they are none's.
    SP_RETURN_IF_ERROR(reader.CheckInPlace());
    return bytes;
  }

  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override;

  absl::StatusOr<std::unique_ptr<StoreClaim>> Claim() override { return tree_.Claim(); }

  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override;

  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override {
    return PutSmall(key, bytes, IfPresent::kReplace, gate);
  }

  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    return PutSmall(key, bytes, IfPresent::kFail, gate);
  }

  absl::Status Delete(const std::string& key) override;

  int64_t WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const override {
    return largest_object < kDirectObjectBytes ? std::max(largest_reserve, kWritePieceBytes)
                                               : DirectWriter::BufferBytes(largest_reserve, 1);
  }
  int64_t FurtherWriteBytes(int64_t largest_object, int64_t largest_reserve) const override {
    if (largest_object < kDirectObjectBytes || !tree_.SuitsDirect()) return 0;
    return DirectWriter::PieceBytes(largest_reserve);
  }

  absl::StatusOr<int64_t> FreeBytes() override;
  absl::Status CheckWritable() override;
  absl::Status CheckNotObstructed(const std::string& key) override;
  const std::string& uri() const override { return tree_.root(); }

 private:
  absl::StatusOr<ObjectInfo> PutSmall(const std::string& key, const std::string& bytes,
                                      IfPresent if_present, const CommitGate& gate);
  // `left` counts down the entries that the listing may still go through.
  absl::Status ListBelow(const UniqueFd& directory, const std::string& prefix, int64_t* left,
                         std::vector<ObjectEntry>* entries);
  absl::Status AddEntry(const UniqueFd& directory, const std::string& name,
                        const std::string& prefix, int64_t* left,
                        std::vector<ObjectEntry>* entries);

  const int64_t max_listed_entries_;
  Tree tree_;
  WriteQueue writes_;  // ends before the tree, whose files it writes
};

absl::StatusOr<std::unique_ptr<ObjectWriter>> DirectoryStore::Create(const std::string& key,
                                                                     const WriteOptions& options) {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  SP_RETURN_IF_ERROR(CheckWriteOptions(tree_.PathOf(key), options));
  SP_ASSIGN_OR_RETURN(TemporaryObject temporary, tree_.CreateTemporary());
  auto writer =
      std::make_unique<DirectoryWriter>(&tree_, &writes_, key, options, std::move(temporary));
  SP_RETURN_IF_ERROR(writer->Preallocate());
  writer->TryDirect();
  return writer;
}

absl::StatusOr<ObjectInfo> DirectoryStore::PutSmall(const std::string& key,
                                                    const std::string& bytes, IfPresent if_present,
                                                    const CommitGate& gate) {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  SP_ASSIGN_OR_RETURN(TemporaryObject temporary, tree_.CreateTemporary());
  const absl::Cleanup discard = [&] { tree_.Discard(&temporary); };
  const absl::Span<const uint8_t> view(reinterpret_cast<const uint8_t*>(bytes.data()),
                                       bytes.size());
  SP_RETURN_IF_ERROR(tree_.Write(temporary, view, 0));
  return tree_.Publish(&temporary, key, static_cast<int64_t>(bytes.size()), if_present, gate);
}

absl::StatusOr<std::vector<ObjectEntry>> DirectoryStore::List(const std::string& prefix) {
  SP_RETURN_IF_ERROR(ValidateObjectPrefix(prefix));
  std::vector<ObjectEntry> entries;
  const absl::StatusOr<UniqueFd> directory =
      tree_.EnterDirectory(DirectoryOf(prefix), Missing::kFail);
  if (absl::IsNotFound(directory.status()) && (tree_.create() || !prefix.empty())) return entries;
  SP_RETURN_IF_ERROR(directory.status());
  int64_t left = max_listed_entries_;
  SP_RETURN_IF_ERROR(ListBelow(*directory, prefix, &left, &entries));
  std::sort(entries.begin(), entries.end(),
            [](const ObjectEntry& a, const ObjectEntry& b) { return a.key < b.key; });
  return entries;
}

absl::Status DirectoryStore::ListBelow(const UniqueFd& directory, const std::string& prefix,
                                       int64_t* left, std::vector<ObjectEntry>* entries) {
  // A descriptor of its own, since closedir() closes it and reading moves its position.
  UniqueFd fd(::openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return ErrnoStatus(errno, tree_.PathOf(prefix), "open directory");
  const std::unique_ptr<DIR, CloseDirectory> stream(::fdopendir(fd.get()));
  if (stream == nullptr) return ErrnoStatus(errno, tree_.PathOf(prefix), "fdopendir");
  fd.release();
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(stream.get());
    if (entry == nullptr) break;
    SP_RETURN_IF_ERROR(AddEntry(directory, entry->d_name, prefix, left, entries));
  }
  if (errno != 0) return ErrnoStatus(errno, tree_.PathOf(prefix), "readdir");
  return absl::OkStatus();
}

// Lists what Open() would serve: a name that is no valid key, a link that may not be followed or
// leads nowhere, a directory that this process may not read, and special files are left out.
absl::Status DirectoryStore::AddEntry(const UniqueFd& directory, const std::string& name,
                                      const std::string& prefix, int64_t* left,
                                      std::vector<ObjectEntry>* entries) {
  const std::string key = prefix + name;
  if (!ValidateObjectKey(key).ok()) return absl::OkStatus();  // "." and ".." among them
  if (--*left < 0) return TooManyEntries(tree_.root(), max_listed_entries_);
  struct stat st;
  if (::fstatat(directory.get(), name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return absl::OkStatus();  // gone since readdir()
    return ErrnoStatus(errno, tree_.PathOf(key), "stat");
  }
  if (S_ISREG(st.st_mode)) {
    entries->push_back({key, InfoOf(st)});
  } else if (S_ISLNK(st.st_mode)) {
    absl::StatusOr<ObjectInfo> info = Head(key);
    if (info.ok()) entries->push_back({key, *std::move(info)});
  } else if (S_ISDIR(st.st_mode)) {
    const absl::StatusOr<UniqueFd> child =
        tree_.EnterChild(directory.get(), name, tree_.PathOf(key), Missing::kFail);
    if (absl::IsNotFound(child.status()) || absl::IsFailedPrecondition(child.status())) {
      return absl::OkStatus();
    }
    SP_RETURN_IF_ERROR(child.status());
    return ListBelow(*child, key + "/", left, entries);
  }
  return absl::OkStatus();
}

absl::Status DirectoryStore::Delete(const std::string& key) {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  const std::string directory = DirectoryOf(key);
  const absl::Cleanup prune = [&] {
    if (absl::StartsWith(key, kWorkPrefix)) tree_.PruneWorkDirectories(directory);
  };
  const absl::StatusOr<UniqueFd> parent = tree_.EnterDirectory(directory, Missing::kFail);
  if (absl::IsNotFound(parent.status())) return absl::OkStatus();
  SP_RETURN_IF_ERROR(parent.status());
  const std::string path = tree_.PathOf(key);
  if (tree_.ops().Unlink(parent->get(), LeafOf(path).c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, path, "unlink");
  }
  // Also when it was missing: an earlier Delete may have failed here.
  return tree_.SyncDirectory(parent->get(), ParentPath(path));
}

absl::StatusOr<int64_t> DirectoryStore::FreeBytes() {
  std::string path = tree_.root();
  struct statvfs fs;
  while (::statvfs(path.c_str(), &fs) != 0) {
    if (errno != ENOENT || path == "/") return ErrnoStatus(errno, path, "statvfs");
    path = ParentPath(path);  // where the root will be made
  }
  const auto block = static_cast<int64_t>(fs.f_frsize);
  const auto blocks = static_cast<int64_t>(fs.f_bavail);
  return blocks > kUnlimitedBytes / std::max<int64_t>(block, 1) ? kUnlimitedBytes : blocks * block;
}

absl::Status DirectoryStore::CheckWritable() {
  const std::string key = ObjectKey(Probe{tree_.NewId()});
  SP_RETURN_IF_ERROR(Put(key, "probe", CommitGate()).status());
  return Delete(key);
}

// Links and files are replaced by a write; what is reached through them is Head()'s to judge.
absl::Status DirectoryStore::CheckNotObstructed(const std::string& key) {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  const std::string path = tree_.PathOf(key);
  struct stat st;
  if (::lstat(path.c_str(), &st) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    if (errno != ENOTDIR) return ErrnoStatus(errno, path, "stat");
    return absl::FailedPreconditionError(absl::StrCat(path, ": below a file, want a directory"));
  }
  if (S_ISREG(st.st_mode) || S_ISLNK(st.st_mode)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      path, S_ISDIR(st.st_mode) ? ": a directory, want an object" : ": not a regular file"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenDirectoryStore(DirectoryStoreOptions options) {
  SP_ASSIGN_OR_RETURN(options.root, NormalizeUri(options.root));
  for (std::string& allowed : options.allowed_roots) {
    SP_ASSIGN_OR_RETURN(allowed, NormalizeUri(allowed));
  }
  struct stat st;
  if (::stat(options.root.c_str(), &st) == 0) {
    if (!S_ISDIR(st.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat(options.root, ": not a directory, want a store root"));
    }
  } else if (errno != ENOENT || !options.create) {
    return ErrnoStatus(errno, options.root, "stat");
  }
  return std::make_unique<DirectoryStore>(std::move(options));
}

}  // namespace shardprep
