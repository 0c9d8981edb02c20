#include "workers/roofline.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"
#include "workers/digest.h"
#include "workers/object_store.h"
#include "workers/open_store.h"
#include "workers/work_memory.h"

namespace shardprep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kCopyBytes = kRooflineBufferBytes / 2;
// Of one repetition of what stays in cache: some milliseconds of the fastest.
constexpr int64_t kCachedBytes = int64_t{128} << 20;
// A rank of 8 of a model with hidden size 7168 and intermediate size 3072.
constexpr int64_t kExpertRows = 768;
constexpr int64_t kWeightCols = 3584;
constexpr int64_t kScaleCols = 224;

// Of bytes that differ, since a file system may treat those that do not in its own way.
WorkMemory FilledMemory(int64_t size_bytes) {
  WorkMemory memory(size_bytes);
  const absl::Span<uint8_t> bytes = memory.bytes();
  for (size_t k = 0; k < bytes.size(); ++k) bytes[k] = static_cast<uint8_t>(k * 31 + (k >> 8));
  return memory;
}

// Keeps the compiler from dropping what nobody reads.
void Keep(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// The work of one thread, whose number is given; it moves the same bytes each time.
using Work = std::function<absl::Status(int thread)>;

// Seconds until `threads` threads have done their work at the same time.
absl::StatusOr<double> TimeThreads(int threads, const Work& work) {
  std::vector<absl::Status> done(static_cast<size_t>(threads));
  const Clock::time_point start = Clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back([&, t] { done[t] = work(t); });
  done[0] = work(0);
  for (std::thread& thread : others) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  for (const absl::Status& status : done) SP_RETURN_IF_ERROR(status);
  return std::max(seconds, 1e-9);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Bench {
 public:
  explicit Bench(const RooflineOptions& options) : options_(options) {}

  absl::StatusOr<std::vector<Roofline>> Run() {
    memory_ = FilledMemory(options_.threads * kRooflineBufferBytes);
    // As a worker does, which goes on without where it is refused.
    options_.shuffler->UseMemory(memory_.bytes()).IgnoreError();
    const absl::Cleanup stop_using = [this] { options_.shuffler->UseMemory({}).IgnoreError(); };
    SP_ASSIGN_OR_RETURN(store_, OpenStore(options_.directory, {}));
    const absl::Cleanup remove = [this] {
      for (int t = 0; t < options_.threads; ++t) store_->Delete(FileName(t)).IgnoreError();
    };
    SP_RETURN_IF_ERROR(Measure("memcpy", kCopyBytes, [this](int t) { return Copy(t); }));
    SP_RETURN_IF_ERROR(Measure("file_write", FileBytes(), [this](int t) { return Write(t); }));
    SP_RETURN_IF_ERROR(Measure("file_read", FileBytes(), [this](int t) { return Read(t); }));
    SP_RETURN_IF_ERROR(Measure("sha256", kCachedBytes, [this](int t) { return Sha256(t); }));
    SP_RETURN_IF_ERROR(Measure("crc32c", kCachedBytes, [this](int t) { return Crc(t); }));
    SP_RETURN_IF_ERROR(Measure("weight_shuffle", kCachedBytes, [this](int t) {
      return Shuffle(t, LayoutId::kAiter16x16, kWeightCols);
    }));
    SP_RETURN_IF_ERROR(Measure("scale_shuffle", kCachedBytes, [this](int t) {
      return Shuffle(t, LayoutId::kAiterE8m0, kScaleCols);
    }));
    return std::move(results_);
  }

 private:
  absl::Status Measure(const char* name, int64_t bytes, const Work& work) {
    Roofline roofline{.name = name};
    // All threads last: the files that they write are read next.
    SP_ASSIGN_OR_RETURN(roofline.one_thread, MedianRate(1, bytes, work));
    SP_ASSIGN_OR_RETURN(roofline.all_threads, MedianRate(options_.threads, bytes, work));
    results_.push_back(std::move(roofline));
    return absl::OkStatus();
  }

  absl::StatusOr<double> MedianRate(int threads, int64_t bytes, const Work& work) {
    std::vector<double> rates;
    for (int r = 0; r <= options_.repetitions; ++r) {
      if (options_.stop != nullptr && *options_.stop) return absl::CancelledError("stopped");
      SP_ASSIGN_OR_RETURN(const double seconds, TimeThreads(threads, work));
      if (r > 0) rates.push_back(static_cast<double>(bytes) * threads / seconds);
    }
    return Median(std::move(rates));
  }

  int64_t FileBytes() const { return options_.file_bytes / options_.threads; }
  static std::string FileName(int thread) { return absl::StrCat("roofline-", thread); }
  uint8_t* Memory(int thread) const {
    return memory_.bytes().data() + thread * kRooflineBufferBytes;
  }
  absl::Span<const uint8_t> Block(int thread) const { return {Memory(thread), kBlockBytes}; }

  absl::Status Copy(int thread) {
    std::memcpy(Memory(thread) + kCopyBytes, Memory(thread), kCopyBytes);
    Keep(Memory(thread));
    return absl::OkStatus();
  }

  absl::Status Write(int thread) {
    WriteOptions options;
    options.size_bytes = FileBytes();
    options.writes_at_once = kWritesAtOnce;
    const int64_t buffer_bytes = store_->BufferBytes(FileBytes(), kBlockBytes, kWritesAtOnce);
    options.buffer = {Memory(thread), static_cast<size_t>(buffer_bytes)};
    SP_ASSIGN_OR_RETURN(const auto writer, store_->Create(FileName(thread), options));
    for (int64_t at = 0; at < FileBytes(); at += kBlockBytes) {
      SP_RETURN_IF_ERROR(writer->Reserve(kBlockBytes).status());
      SP_RETURN_IF_ERROR(writer->Advance(std::min(kBlockBytes, FileBytes() - at)));
    }
    return writer->Commit(CommitGate()).status();
  }

  absl::Status Read(int thread) {
    SP_ASSIGN_OR_RETURN(const auto reader, store_->Open(FileName(thread)));
    for (int64_t at = 0; at < FileBytes(); at += kBlockBytes) {
      const auto size = static_cast<size_t>(std::min(kBlockBytes, FileBytes() - at));
      SP_RETURN_IF_ERROR(reader->ReadAt(at, {Memory(thread), size}));
    }
    return absl::OkStatus();
  }

  absl::Status Sha256(int thread) {
    ChunkedDigest digest;
    for (int64_t at = 0; at < kCachedBytes; at += kBlockBytes) digest.Update(Block(thread));
    Keep(&digest);
    return absl::OkStatus();
  }

  absl::Status Crc(int thread) {
    uint32_t crc = 0;
    for (int64_t at = 0; at < kCachedBytes; at += kBlockBytes) crc = Crc32c(crc, Block(thread));
    Keep(&crc);
    return absl::OkStatus();
  }

  absl::Status Shuffle(int thread, LayoutId layout, int64_t cols) {
    const ShuffleJob job{layout, RowOrder::kAsIs, kExpertRows, cols, cols};
    const int64_t step = 2 * BlockRows(job);
    const int64_t rows = std::min(kExpertRows, kBlockBytes / cols / step * step);
    const RowsView view{Memory(thread), cols, 0, rows};
    for (int64_t at = 0; at < kCachedBytes; at += rows * cols) {
      SP_RETURN_IF_ERROR(options_.shuffler->Shuffle(job, absl::MakeConstSpan(&view, 1), 0, rows,
                                                    Memory(thread) + kCopyBytes));
    }
    return absl::OkStatus();
  }

  const RooflineOptions& options_;
  std::unique_ptr<ObjectStore> store_;
  WorkMemory memory_;
  std::vector<Roofline> results_;
};

absl::Status FileError(const std::filesystem::path& path, const char* what, int error) {
  const std::string message =
      absl::StrCat(path.string(), ": ", what, ": ", std::generic_category().message(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::FailedPreconditionError(message);
}

// Lets the kernel move the bytes, as cp does.
absl::Status CopyFile(const std::filesystem::path& from, const std::filesystem::path& to) {
  const int in = ::open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (in < 0) return FileError(from, "open", errno);
  const absl::Cleanup close_in = [in] { ::close(in); };
  const int out = ::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (out < 0) return FileError(to, "open", errno);
  const absl::Cleanup close_out = [out] { ::close(out); };
  for (;;) {
    const ssize_t moved = ::copy_file_range(in, nullptr, out, nullptr, size_t{1} << 30, 0);
    if (moved < 0 && errno != EINTR) return FileError(to, "copy_file_range", errno);
    if (moved == 0) break;
  }
  if (::fsync(out) != 0) return FileError(to, "fsync", errno);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Roofline>> MeasureRooflines(const RooflineOptions& options) {
  return Bench(options).Run();
}

absl::StatusOr<absl::Duration> TimeDurableCopy(const std::string& from, const std::string& to) {
  const Clock::time_point start = Clock::now();
  std::error_code error;
  std::filesystem::create_directory(to, error);
  if (error) return FileError(to, "mkdir", error.value());
  std::filesystem::directory_iterator entry(from, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (!entry->is_regular_file(error)) continue;
    SP_RETURN_IF_ERROR(
        CopyFile(entry->path(), std::filesystem::path(to) / entry->path().filename()));
  }
  if (error) return FileError(from, "list", error.value());
  const int directory = ::open(to.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return FileError(to, "open", errno);
  const absl::Cleanup close_directory = [directory] { ::close(directory); };
  if (::fsync(directory) != 0) return FileError(to, "fsync", errno);
  return absl::FromChrono(Clock::now() - start);
}

}  // namespace shardprep
