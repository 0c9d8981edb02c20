// Object store: one interface over directories and S3-like stores, and what "committed" means.
//
// An object is a name (key) with bytes that appear whole or not at all. Writers stream into memory
// that the caller owns and become visible in one step, after the caller's gate has agreed. Readers
// are pinned to the version they opened. Every store must pass
// tests/workers/object_store_conformance.h.
//
// Keys are relative, `/`-separated and checked by ValidateObjectKey() (workers/object_names.h); a
// bad key is INVALID_ARGUMENT from every method. Prefixes are empty (everything) or end in `/`, so
// that `m/1/` can never mean `m/10/`.
//
// Codes, from every method: UNAVAILABLE is worth another attempt, RESOURCE_EXHAUSTED means no space
// or quota (IsNoSpace()) or that this process has no memory or descriptors left,
// FAILED_PRECONDITION that the store must be repaired first (no permission, read-only, a directory
// where an object should be), DATA_LOSS that bytes are not what they were.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace shardprep {

// Asked immediately before each step that makes bytes visible (rename, link, PUT, Complete). A
// non-OK answer, such as ABORTED for a lost lease, is returned to the caller and nothing becomes
// visible. An empty function agrees.
using CommitGate = std::function<absl::Status()>;

// Marks an error of a store: it has no space or quota left, which only its operator can change.
inline constexpr char kNoSpacePayload[] = "shardprep/no-space";
inline bool IsNoSpace(const absl::Status& status) {
  return status.GetPayload(kNoSpacePayload).has_value();
}

// RESOURCE_EXHAUSTED with that mark.
inline absl::Status NoSpaceError(const std::string& message) {
  absl::Status status = absl::ResourceExhaustedError(message);
  status.SetPayload(kNoSpacePayload, absl::Cord());
  return status;
}

// FreeBytes() of a store without a limit that it knows.
inline constexpr int64_t kUnlimitedBytes = std::numeric_limits<int64_t>::max();

struct ObjectInfo {
  int64_t size_bytes = 0;
  std::string etag;  // opaque version; a directory uses "<size>-<mtime_ns>-<inode>"
};

struct ObjectEntry {
  std::string key;
  ObjectInfo info;
};

// Told how much of a read has arrived: the first `bytes` of it are there and stay as they are.
// Fewer than told before: what follows them comes anew.
using Arrived = std::function<void(int64_t bytes)>;

// Ranged reads of one object, pinned to the version seen by Open(). Thread safe. Must not outlive
// its store.
class ObjectReader {
 public:
  virtual ~ObjectReader() = default;

  // Fills `out` with the bytes from `offset` on: all of it or an error, never zeros for missing
  // bytes. OUT_OF_RANGE when the range is not inside [0, info().size_bytes); DATA_LOSS, naming the
  // object, expected and found, when the object was truncated or replaced since Open().
  virtual absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) = 0;

  // The same for a caller that can work on the first bytes while the rest is on its way, such as
  // one that digests them: calls `arrived` on this thread, at least once unless `out` is empty.
  // After the last call all bytes told of are those that an OK vouches for.
  virtual absl::Status ReadAsItArrives(int64_t offset, absl::Span<uint8_t> out,
                                       const Arrived& arrived) {
    absl::Status status = ReadAt(offset, out);
    if (status.ok() && !out.empty()) arrived(static_cast<int64_t>(out.size()));
    return status;
  }

  // Says that [offset, offset + size) will be read soon. Only a hint; the range may exceed the
  // object.
  virtual void WillNeed(int64_t /*offset*/, int64_t /*size*/) {}

  // Compares the object's present version with the pinned one: DATA_LOSS, naming both, when it
  // differs or is gone. Ask once after the last ReadAt().
  virtual absl::Status CheckUnchanged() = 0;

  virtual const ObjectInfo& info() const = 0;
};

struct WriteOptions {
  // The object's exact size, announced. Space for it is taken up front where the store can.
  int64_t size_bytes = 0;
  // Memory from the caller's budget, at least ObjectStore::BufferBytes(size_bytes, largest Reserve,
  // writes_at_once). It belongs to the writer until Commit() succeeds or the writer is destroyed.
  absl::Span<uint8_t> buffer;
  // Pieces that may be on their way while the caller fills another, at least 1. A store without
  // such pieces ignores it.
  int writes_at_once = 1;
  // What the caller knows of the SHA-256 of what it writes: 64 hexadecimal digits for bytes [begin,
  // end) of the object, or empty. Asked from Advance() and Commit(), about bytes advanced over. A
  // store that needs them anyway does not hash these bytes again. May be empty.
  std::function<std::string(int64_t begin, int64_t end)> sha256_of;
};

// INVALID_ARGUMENT, naming the object, when there can be no such write.
inline absl::Status CheckWriteOptions(const std::string& name, const WriteOptions& options) {
  if (options.size_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": size ", options.size_bytes, ", want 0 or more"));
  }
  if (options.writes_at_once < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", options.writes_at_once, " writes at once, want 1 or more"));
  }
  return absl::OkStatus();
}

// One object streamed in order. Not thread safe; different writers are independent. After an error
// only destruction is useful. Must not outlive its store.
class ObjectWriter {
 public:
  // Without a successful Commit(): nothing becomes visible and temporary data is removed.
  virtual ~ObjectWriter() = default;

  // At least `size` contiguous writable bytes, uninitialised, for the next bytes of the object; the
  // producer writes its final bytes straight into them. Valid until the next call. May carry out
  // I/O. INVALID_ARGUMENT when the buffer of WriteOptions is too small for `size`.
  virtual absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) = 0;

  // The first `size` of the reserved bytes are final. What is not advanced over is given back.
  // INVALID_ARGUMENT beyond the reserved bytes or the announced size.
  virtual absl::Status Advance(int64_t size) = 0;

  // Makes the object durable and then visible under its key, atomically, in place of an older
  // object of that key. FAILED_PRECONDITION when bytes of the announced size are missing, or when
  // called twice; the gate's status when it refuses; DATA_LOSS when the store holds another size
  // than was written. On any error the older object, if any, is untouched, except that with
  // UNAVAILABLE the store may have published the new one whole without having said so.
  virtual absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate) = 0;
};

// The exclusive right to write somewhere, among those who ask for it; given back by destruction or
// by the end of the process.
class StoreClaim {
 public:
  virtual ~StoreClaim() = default;
};

// Thread safe. Calls block; they hold no lock while they do I/O.
class ObjectStore {
 public:
  virtual ~ObjectStore() = default;

  // Size and version. NOT_FOUND.
  virtual absl::StatusOr<ObjectInfo> Head(const std::string& key) = 0;

  // NOT_FOUND.
  virtual absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) = 0;

  // The whole of a small object. NOT_FOUND; RESOURCE_EXHAUSTED, naming the bound, when it is larger
  // than `max_bytes`.
  virtual absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) = 0;

  // Every object below `prefix` that Open() would serve, recursively, sorted by key (bytewise).
  // Nothing there: empty. Unfinished writes may appear below `_shardprep/tmp/`, for whoever cleans
  // up after a killed process. RESOURCE_EXHAUSTED beyond the bound of workers/listing.h.
  virtual absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) = 0;

  // Starts an object. RESOURCE_EXHAUSTED when the announced size does not fit. The object that
  // `key` names now, if any, stays readable until Commit().
  virtual absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                               const WriteOptions& options) = 0;

  // A small object, atomic and durable, in place of an older one of that key.
  virtual absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) = 0;

  // The same unless the key names an object already: ALREADY_EXISTS, and that object is untouched.
  // Of several callers at once exactly one succeeds.
  virtual absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                                 const CommitGate& gate) = 0;

  // Removes an object, durably. A missing one is OK.
  virtual absl::Status Delete(const std::string& key) = 0;

  // Claims the whole store for a job. FAILED_PRECONDITION when another process, or another job of
  // this one, has it, by whatever path it came here. The claim of a store that cannot lock excludes
  // nobody; there, leases, the if-absent manifest and a look for it before each part are what keeps
  // writers apart.
  virtual absl::StatusOr<std::unique_ptr<StoreClaim>> Claim() {
    return std::make_unique<StoreClaim>();
  }

  // Memory that WriteOptions::buffer must have for an object of at most `largest_object` bytes and
  // reservations of at most `largest_reserve`.
  int64_t BufferBytes(int64_t largest_object, int64_t largest_reserve, int writes_at_once) const {
    return WriteBufferBytes(largest_object, largest_reserve) +
           (writes_at_once - 1) * FurtherWriteBytes(largest_object, largest_reserve);
  }

  // The same with one write at once.
  virtual int64_t WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const = 0;

  // What each further write at once adds to that; 0 where it would be of no use.
  virtual int64_t FurtherWriteBytes(int64_t /*largest_object*/, int64_t /*largest_reserve*/) const {
    return 0;
  }

  // Bytes that one ReadAt() should ask for where the choice is free: 0 when small reads are as good
  // as large ones, more where each read is a request with a latency of its own.
  virtual int64_t PreferredReadBytes() const { return 0; }

  // Space left for this process, or kUnlimitedBytes.
  virtual absl::StatusOr<int64_t> FreeBytes() = 0;

  // Writes and deletes a small probe under `_shardprep/`: OK means that objects can be written now.
  virtual absl::Status CheckWritable() = 0;

  // FAILED_PRECONDITION, naming it, when something that is no object, and that no write replaces,
  // stands where an object of that key would be made: a directory, for instance. Says nothing about
  // objects. A store that knows only objects has nothing of the kind.
  virtual absl::Status CheckNotObstructed(const std::string& /*key*/) { return absl::OkStatus(); }

  // The normalised URI (NormalizeUri() in workers/open_store.h) of the store's root.
  virtual const std::string& uri() const = 0;
};

}  // namespace shardprep
