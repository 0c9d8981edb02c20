// A checkpoint as its headers describe it: files, tensors, configuration. No tensor data is read.
//
// Which files: those that `model.safetensors.index.json` names, and nothing else is opened; without
// an index, every `*.safetensors` directly at the root. Which tensors: those that the index places
// in a file that has them; without an index, all, and no name twice.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "workers/object_store.h"
#include "workers/safetensors.h"

namespace shardprep {

struct CheckpointFile {
  std::string name;  // key below the source
  int64_t size_bytes = 0;
  int64_t data_start = 0;     // bytes of the header, its length prefix included
  std::string header_sha256;  // of those bytes, 64 hexadecimal digits
  std::string etag;
};

// An index entry whose file does not hold the tensor. Harmless unless the tensor is needed.
struct StaleIndexEntry {
  std::string tensor;
  std::string file;
};

// A tensor of an opened file that the index does not place there. Never carried.
struct UnindexedTensor {
  std::string tensor;
  std::string file;
  int64_t size_bytes = 0;
};

// A file of the root that is no checkpoint data.
struct SmallFile {
  std::string name;
  ObjectInfo info;
};

// Bounds on outside input. Exceeding one is RESOURCE_EXHAUSTED, naming file, size and bound.
struct CheckpointOptions {
  int64_t max_index_bytes = int64_t{256} << 20;
  int64_t max_config_bytes = int64_t{16} << 20;
  int64_t max_small_file_bytes = int64_t{64} << 20;
  int64_t max_files = 10'000;
  int64_t max_header_bytes_total = int64_t{1} << 30;
};

// Immutable once read; safe to use from many threads. Movable, not copyable.
class Checkpoint {
 public:
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::vector<CheckpointFile>& files() const { return files_; }  // sorted by name
  // Sorted by name, each name once; `file` counts in files(). Their number fits an int32_t.
  const TensorTable& tensors() const { return tensors_; }
  // Index into tensors().
  std::optional<int64_t> FindTensor(absl::string_view name) const;

  const std::vector<StaleIndexEntry>& stale() const { return stale_; }          // by tensor
  const std::vector<UnindexedTensor>& unindexed() const { return unindexed_; }  // by tensor

  // Files to copy beside prepared shards: those of the root named tokenizer* or with extension
  // .json, .txt, .model, .jinja, .tiktoken or .py, except indexes of safetensors files and
  // `manifest.json`, whose name belongs to prepared output. Each is at most max_small_file_bytes.
  const std::vector<SmallFile>& small_files() const { return small_files_; }
  // Other files of the root, neither opened nor copied: documents, pickles, files over that bound,
  // safetensors that the index does not name.
  const std::vector<SmallFile>& left_files() const { return left_files_; }

  const std::string& config_text() const { return config_text_; }  // config.json as it was read

  // A value of config.json; when the top level has no such key (or null), that of `text_config`,
  // where multimodal models keep it. `text_config.KEY` looks only there. NOT_FOUND naming the key;
  // INVALID_ARGUMENT naming key, type wanted and value found (an integer must be written as one and
  // fit int64_t).
  absl::StatusOr<int64_t> ConfigInt(const std::string& key) const;
  absl::StatusOr<std::string> ConfigString(const std::string& key) const;

 private:
  friend class CheckpointReader;
  Checkpoint();
  const nlohmann::json* FindConfig(const std::string& key) const;

  std::vector<CheckpointFile> files_;
  TensorTable tensors_;
  std::vector<StaleIndexEntry> stale_;
  std::vector<UnindexedTensor> unindexed_;
  std::vector<SmallFile> small_files_;
  std::vector<SmallFile> left_files_;
  std::string config_text_;
  std::unique_ptr<nlohmann::json> config_;
};

// Reads headers, index and config.json of `source`: of each data file its header, or the first
// 512 KiB when the header is shorter. Where reads are requests (PreferredReadBytes() > 0), 16 files
// are read at once, on threads of its own. Errors, of the first file in order that has one:
// INVALID_ARGUMENT: malformed header, index or config; an index file name that leaves the source; a
//   tensor in two files without an index (both are named).
// FAILED_PRECONDITION: nothing to read here; files that the index (or a name like
//   model-00001-of-00004) asks for are missing, all listed; index and files disagree altogether; a
//   Git LFS pointer; the source is prepared output itself.
// RESOURCE_EXHAUSTED: a bound of `options`. Else whatever the store answers, with the file's name.
absl::StatusOr<Checkpoint> ReadCheckpoint(ObjectStore& source,
                                          const CheckpointOptions& options = {});

// Key in the `__metadata__` of every file that shardprep writes; one that has it is no source.
inline constexpr char kFingerprintMetadataKey[] = "shardprep.fingerprint";

}  // namespace shardprep
