// A directory as an object store. How objects become durable and visible, and which symbolic links
// are followed, is explained at the top of directory_store.cc.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "workers/listing.h"
#include "workers/object_store.h"

namespace shardprep {

// The system calls by which bytes move and become visible: a seam for tests, which inject faults
// and watch the order. Each returns what the call of that name returns and sets errno. The methods
// here make the call. Thread safe.
class FileOps {
 public:
  virtual ~FileOps() = default;

  virtual ssize_t Pread(int fd, void* buffer, size_t size, off_t offset);
  virtual ssize_t Pwrite(int fd, const void* buffer, size_t size, off_t offset);
  virtual int Fallocate(int fd, off_t size);                     // takes [0, size)
  virtual int StartWriteback(int fd, off_t offset, off_t size);  // sync_file_range(WRITE)
  // Whether files like this are written faster past the page cache.
  virtual bool SuitsDirect(int fd);
  virtual int SetDirect(int fd, bool direct);  // O_DIRECT
  virtual int Fsync(int fd);
  virtual int Close(int fd);
  virtual int Rename(int from_dir, const char* from, int to_dir, const char* to);
  virtual int RenameIfAbsent(int from_dir, const char* from, int to_dir, const char* to);
  virtual int Link(int from_dir, const char* from, int to_dir, const char* to);
  virtual int Unlink(int dir, const char* name);
  virtual void Sleep(absl::Duration duration);  // between attempts at reading
};

struct DirectoryStoreOptions {
  std::string root;     // as NormalizeUri() gives it
  bool create = false;  // as in OpenStoreOptions, and so allowed_roots
  std::vector<std::string> allowed_roots;
  FileOps* file_ops = nullptr;  // outlives the store; null means the real calls
  int64_t max_listed_entries = kMaxListedEntries;
};

// Opens the directory without writing anything. NOT_FOUND when the root is missing and not to be
// created; FAILED_PRECONDITION when it is no directory or may not be searched.
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenDirectoryStore(DirectoryStoreOptions options);

}  // namespace shardprep
