// The speeds that a machine reaches at each single thing that preparing a checkpoint does, with
// nothing else to do: what a job can be compared with.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/shuffle.h"

namespace shardprep {

// Bytes a second, medians.
struct Roofline {
  std::string name;  // one of kRooflineNames
  double one_thread = 0;
  double all_threads = 0;  // of all threads together
};

// memcpy          between buffers larger than the caches, touched before
// file_write      blocks of 256 KiB into files, one a thread, as a job writes, until durable
// file_read       blocks of 256 KiB of files that were read before, into a buffer in cache
// sha256, crc32c  over a buffer in cache
// weight_shuffle  `aiter-16x16` of a block of a w13 weight, cache to cache
// scale_shuffle   `aiter-e8m0` of a block of a w13 scale, cache to cache
inline constexpr const char* kRooflineNames[] = {
    "memcpy", "file_write", "file_read", "sha256", "crc32c", "weight_shuffle", "scale_shuffle"};

// All buffers of one thread together.
inline constexpr int64_t kRooflineBufferBytes = int64_t{64} << 20;

struct RooflineOptions {
  std::string directory;   // where files are written and removed; must exist
  int threads = 1;         // that "all" means
  int64_t file_bytes = 0;  // in the directory at a time, over all threads
  int repetitions = 5;     // that count, after one that does not
  Shuffler* shuffler = nullptr;
  const std::atomic<bool>* stop = nullptr;  // polled between repetitions; may be null
};

// In the order of kRooflineNames. CANCELLED when stopped; else what files and shuffler answer.
absl::StatusOr<std::vector<Roofline>> MeasureRooflines(const RooflineOptions& options);

// The time of copying the regular files of directory `from` into the new directory `to`, one after
// the other as `cp -r` does, until all are durable. Errors name the file.
absl::StatusOr<absl::Duration> TimeDurableCopy(const std::string& from, const std::string& to);

}  // namespace shardprep
