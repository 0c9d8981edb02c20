// Whose directory it is
//
// 1. `lock` in the directory is held with flock(2) for as long as its process lives, and the kernel
//    lets it go however that ends. So a directory whose lock can be taken is nobody's.
// 2. Whoever makes a directory sweeps first: takes the lock of each other one, removes what is in
// it
//    and then the directory.
// 3. Between making a directory and locking it a sweeper may take it: then the maker finds its lock
//    held or gone, and makes another one.
// 4. A directory without a lock is either so new or was left in that very moment. It is removed
// when
//    it is old.
#include "service/socket_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace shardprep {
namespace {

constexpr char kPrefix[] = "shardprep-run-";
constexpr char kLockName[] = "lock";
constexpr char kSocketName[] = "socket";
constexpr int kAttempts = 16;
constexpr absl::Duration kOld = absl::Hours(1);

void RemoveContent(int directory) {
  ::unlinkat(directory, kSocketName, 0);
  ::unlinkat(directory, kLockName, 0);
}

// Removes parent/name when it is ours and nobody's any more.
void SweepOne(int parent, const std::string& name) {
  const int directory =
      ::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return;
  struct stat found;
  bool abandoned = false;
  int lock = -1;
  if (::fstat(directory, &found) == 0 && found.st_uid == ::geteuid()) {
    lock = ::openat(directory, kLockName, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    abandoned = lock >= 0
                    ? ::flock(lock, LOCK_EX | LOCK_NB) == 0
                    : errno == ENOENT && absl::Now() - absl::TimeFromTimespec(found.st_mtim) > kOld;
  }
  if (abandoned) {
    RemoveContent(directory);
    ::unlinkat(parent, name.c_str(), AT_REMOVEDIR);
  }
  if (lock >= 0) ::close(lock);
  ::close(directory);
}

// What cannot be removed stays; that keeps nobody from making another one.
void Sweep(const std::string& parent) {
  DIR* const listing = ::opendir(parent.c_str());
  if (listing == nullptr) return;
  std::vector<std::string> names;
  while (const dirent* const entry = ::readdir(listing)) {
    if (absl::StartsWith(entry->d_name, kPrefix)) names.emplace_back(entry->d_name);
  }
  for (const std::string& name : names) SweepOne(::dirfd(listing), name);
  ::closedir(listing);
}

class LockedDirectory : public SocketDirectory {
 public:
  LockedDirectory(std::string path, int lock)
      : path_(std::move(path)), socket_path_(absl::StrCat(path_, "/", kSocketName)), lock_(lock) {}

  ~LockedDirectory() override {
    ::unlink(socket_path_.c_str());
    ::unlink(absl::StrCat(path_, "/", kLockName).c_str());
    ::rmdir(path_.c_str());
    ::close(lock_);
  }

  const std::string& socket_path() const override { return socket_path_; }

 private:
  const std::string path_;
  const std::string socket_path_;
  const int lock_;
};

// -1 when a sweeper has or had the directory.
int TakeLock(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kLockName);
  const int lock = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (lock < 0) return -1;
  struct stat found;
  if (::flock(lock, LOCK_EX | LOCK_NB) == 0 && ::fstat(lock, &found) == 0 && found.st_nlink > 0) {
    return lock;
  }
  ::close(lock);
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketDirectory>> SocketDirectory::Make(const std::string& parent) {
  Sweep(parent);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::string path = absl::StrCat(parent, "/", kPrefix, "XXXXXX");
    if (::mkdtemp(path.data()) == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("no directory for a socket: ", path, ": ",
                                                        std::generic_category().message(errno)));
    }
    const int lock = TakeLock(path);
    if (lock >= 0) return {std::make_unique<LockedDirectory>(std::move(path), lock)};
    ::rmdir(path.c_str());
  }
  return absl::FailedPreconditionError(
      absl::StrCat("no directory for a socket: those made in ", parent, " are removed by others"));
}

}  // namespace shardprep
