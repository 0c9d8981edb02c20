// The safetensors byte format: reading and writing file headers, and reading an index.
//
//   file   = [u64 little-endian N][N bytes of UTF-8 JSON][data]
//   JSON   = {"__metadata__": {string: string}, NAME: {"dtype", "shape", "data_offsets": [b, e]}}
//   index  = {"metadata": {...}, "weight_map": {NAME: FILE}}
//
// Offsets count from the start of the data. The tensors of a file, sorted by offset, cover its data
// without hole or overlap. Error names are those of the safetensors Rust crate.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "workers/dtype.h"

namespace shardprep {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;  // of N; the format's own limit
inline constexpr int64_t kHeaderLengthBytes = 8;
inline constexpr int64_t kDataAlignment = 4096;  // of the data start in the files that we write

// One tensor: a view that is valid as long as the table (or a table moved from it) lives.
struct TensorInfo {
  absl::string_view name;
  Dtype dtype = Dtype::kU8;
  absl::Span<const int64_t> shape;  // elements
  int64_t file = 0;                 // index into the list of files it was read from
  int64_t offset = 0;               // of the first byte, from the start of the file
  int64_t size_bytes = 0;
};

// Many tensors in little memory: 40 bytes each, plus the name and eight bytes a dimension.
// Names and shapes of one table together stay below 4 GiB: callers bound what they read.
class TensorTable {
 public:
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  // 0 <= index < size().
  TensorInfo at(int64_t index) const;
  void Add(const TensorInfo& tensor);
  // Orders by (name, file), names as unsigned bytes.
  void SortByName();
  void SortByOffset();
  // Drops the entries whose flag is false; keep.size() == size(). Frees spare memory.
  void Keep(const std::vector<bool>& keep);
  // Replaces each file number f by numbers[f].
  void RenumberFiles(absl::Span<const int64_t> numbers);

 private:
  struct Entry {
    int64_t offset;
    int64_t size_bytes;
    uint32_t name_begin;
    uint32_t name_size;
    uint32_t shape_begin;
    int32_t file;
    uint8_t rank;
    Dtype dtype;
  };
  absl::string_view NameOf(const Entry& entry) const;

  std::vector<Entry> entries_;
  std::vector<char> names_;
  std::vector<int64_t> shapes_;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;  // of `__metadata__`
  TensorTable tensors;                          // in offset order; `file` is 0
  int64_t data_start = 0;                       // 8 + N
};

// N, from the first bytes of a file (at least 8, or all of a shorter file).
// INVALID_ARGUMENT: HeaderTooSmall, HeaderTooLarge, InvalidHeaderLength.
// FAILED_PRECONDITION: the bytes are a Git LFS pointer; the message states the size it stands for.
absl::StatusOr<int64_t> ParseHeaderLength(absl::string_view first_bytes, int64_t file_size,
                                          const std::string& file_name);

// The N bytes of JSON of a file of `file_size` bytes. White space around the object, any order of
// keys, scalars and zero-size tensors are accepted; unknown keys of a tensor are ignored, as the
// Rust reader does. INVALID_ARGUMENT, naming file, error and tensor, on everything else that the
// format forbids, and also on duplicate keys, NUL in a name, or more than 64 dimensions.
absl::StatusOr<SafetensorsHeader> ParseHeader(absl::string_view json, int64_t file_size,
                                              const std::string& file_name);

// Bytes of a tensor. INVALID_ARGUMENT: ValidationOverflow, or MisalignedSlice where the bits do not
// fill whole bytes.
absl::StatusOr<int64_t> TensorBytes(Dtype dtype, absl::Span<const int64_t> shape);

// "I8 [3072,3584]", for messages.
std::string DescribeTensor(Dtype dtype, absl::Span<const int64_t> shape);

// A name as messages show it: control bytes escaped, at most 200 bytes.
std::string PrintableName(absl::string_view name);

// A tensor of a file to be written.
struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // from the data start
  int64_t size_bytes = 0;
};

// The first 8 + N bytes of a file with these tensors, which are listed in file order without hole.
// `__metadata__` comes first (left out when empty), JSON is compact, and trailing spaces make 8 + N
// a multiple of kDataAlignment. Equal arguments give equal bytes. INVALID_ARGUMENT on a tensor
// named
// `__metadata__`, duplicate or unprintable-as-JSON names, a `begin` that leaves a hole, a size that
// contradicts the shape, and HeaderTooLarge.
absl::StatusOr<std::string> SerializeHeader(const std::vector<TensorEntry>& tensors,
                                            const std::map<std::string, std::string>& metadata);

// The weight_map of a checkpoint index.
struct SafetensorsIndex {
  std::vector<std::string> files;  // each once, sorted
  TensorTable tensors;             // sorted by name; `file` counts in files, all else is unset
};

// INVALID_ARGUMENT: not JSON, no weight_map, a value that is no string, duplicate keys (of a
// tensor: with both files), NUL in a name. File names are not judged here.
absl::StatusOr<SafetensorsIndex> ParseIndex(absl::string_view json, const std::string& file_name);

}  // namespace shardprep
