// How one region is prepared.
//
// 1. Each thread owns some ranks of the set. All threads walk the same sequence: part, tensor,
//    expert, block; a block is some output rows of one expert's matrix.
// 2. Rows of w1 and w3 belong to one rank: its thread reads them into its own buffer. Columns of w2
//    are needed by every rank: the first thread that comes to a block reads its rows whole into one
//    of a few shared buffers, and the last that is done with it frees the buffer.
// 3. The block is shuffled straight into the rank's write buffer; source bytes go into the native
//    CRC and output bytes into the digest while both are in cache; the writer sends the buffer off
//    when it is full. Output is made in its final order, so a part is one sequential stream.
// 4. When a part is whole: the source files are checked to be unchanged, the fence is asked, the
//    part gets its name, and its record is written to the journal.
//
// The first error of any thread ends all; parts without a name vanish with their writers.
#include "workers/region_prep.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "workers/artifact.h"
#include "workers/block_plan.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

constexpr int64_t kReadAheadBytes = int64_t{8} << 20;

// Adds the time until destruction to a stage.
class StageTimer {
 public:
  StageTimer(RegionProgress& progress, Stage stage)
      : nanos_(progress.stage_nanos[static_cast<int>(stage)]),
        start_(std::chrono::steady_clock::now()) {}
  ~StageTimer() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    nanos_ += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  std::atomic<int64_t>& nanos_;
  std::chrono::steady_clock::time_point start_;
};

// Open source files of one region, each pinned to the version that the plan saw. Thread safe.
class SourceFiles {
 public:
  SourceFiles(const Checkpoint& checkpoint, ObjectStore& store)
      : checkpoint_(checkpoint), store_(store) {}

  absl::StatusOr<ObjectReader*> Get(int64_t file) {
    absl::MutexLock lock(&mu_);
    std::unique_ptr<ObjectReader>& reader = readers_[file];
    if (reader == nullptr) {
      const CheckpointFile& known = checkpoint_.files()[file];
      SP_ASSIGN_OR_RETURN(auto opened, store_.Open(known.name));
      if (opened->info().etag != known.etag) {
        return absl::DataLossError(absl::StrCat(known.name,
                                                ": changed since it was planned: version ",
                                                opened->info().etag, ", want ", known.etag));
      }
      reader = std::move(opened);
    }
    return reader.get();
  }

  absl::Status CheckUnchanged() {
    absl::MutexLock lock(&mu_);
    for (const auto& [file, reader] : readers_) SP_RETURN_IF_ERROR(reader->CheckUnchanged());
    return absl::OkStatus();
  }

 private:
  const Checkpoint& checkpoint_;
  ObjectStore& store_;
  absl::Mutex mu_;
  std::map<int64_t, std::unique_ptr<ObjectReader>> readers_ ABSL_GUARDED_BY(mu_);
};

// A few buffers through which the threads of a region pass the blocks that all of them need. Every
// thread asks for every block, in the same order, and gives it back.
class SharedBlocks {
 public:
  SharedBlocks(absl::Span<uint8_t> memory, int64_t block_bytes, int slots, int readers)
      : block_bytes_(block_bytes), readers_(readers), slots_(slots) {
    SP_CHECK(static_cast<int64_t>(memory.size()) >= block_bytes * slots);
    for (int s = 0; s < slots; ++s) slots_[s].data = memory.data() + s * block_bytes;
  }

  // The block with this number, read by `read` into the given buffer if no thread has done so.
  template <typename Read>
  absl::StatusOr<const uint8_t*> Acquire(int64_t number, Read read) {
    Slot& slot = slots_[number % slots_.size()];
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return !failure_.ok() || (slot.number == number && slot.filled) ||
               (slot.number < number && slot.users == 0);
      };
      mu_.Await(absl::Condition(&ready));
      if (!failure_.ok()) return failure_;
      if (slot.number == number) return slot.data;
      slot.number = number;
      slot.filled = false;
      slot.users = readers_;
    }
    absl::Status status = read(absl::MakeSpan(slot.data, block_bytes_));
    absl::MutexLock lock(&mu_);
    if (!status.ok()) {
      failure_.Update(status);
      return status;
    }
    slot.filled = true;
    return slot.data;
  }

  void Release(int64_t number) {
    absl::MutexLock lock(&mu_);
    --slots_[number % slots_.size()].users;
  }

  // Wakes every waiting thread with this status.
  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    failure_.Update(status);
  }

 private:
  struct Slot {
    uint8_t* data = nullptr;
    int64_t number = -1;
    int users = 0;
    bool filled = false;
  };
  const int64_t block_bytes_;
  const int readers_;
  absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::vector<Slot> slots_;  // contents guarded by mu_, bytes by the Acquire/Release protocol
};

// Rows [begin, end) of the padded logical matrix.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The logical rows that output rows [begin, end) are made of: one range, or one of each half.
std::vector<RowRange> LogicalRanges(const FusedTensor& tensor, int64_t begin, int64_t end) {
  if (!AlternatesHalves(tensor)) return {{begin, end}};
  const int64_t half = tensor.job.rows / 2;
  return {{begin / 2, end / 2}, {half + begin / 2, half + end / 2}};
}

// The part of a slice that lies in a range of logical rows, and where in the tensor it is.
struct SlicePiece {
  int slice = 0;
  int64_t source_row = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

std::vector<SlicePiece> PiecesIn(const std::vector<Slice>& slices, const RowRange& range) {
  std::vector<SlicePiece> pieces;
  for (int s = 0; s < static_cast<int>(slices.size()); ++s) {
    const Slice& slice = slices[s];
    const int64_t begin = std::max(range.begin, slice.first_row);
    const int64_t end = std::min(range.end, slice.first_row + slice.rows);
    if (begin >= end) continue;
    pieces.push_back({s, slice.row_begin + (begin - slice.first_row), begin, end - begin});
  }
  return pieces;
}

// One rank's stream: the part being written, its digest and its record.
class RankStream {
 public:
  RankStream(const RegionTask& task, RegionProgress& progress, int32_t rank,
             absl::Span<uint8_t> buffer)
      : task_(task), progress_(progress), rank_(rank), buffer_(buffer) {}

  int32_t rank() const { return rank_; }

  absl::Status BeginPart(const PartPlan& part) {
    SP_ASSIGN_OR_RETURN(const std::string header, PartHeader(*task_.plan, part, rank_));
    SP_ASSIGN_OR_RETURN(record_, PlannedRecord(*task_.plan, {task_.region, rank_, &part}));
    const v1::FileRecord& file = record_.file();
    SP_ASSIGN_OR_RETURN(
        writer_, task_.destination->Create(file.key(),
                                           {.size_bytes = file.size_bytes(), .buffer = buffer_}));
    next_tensor_ = 0;
    return Append(header);
  }

  // At least `size` writable bytes for the next output.
  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) {
    StageTimer timer(progress_, Stage::kWrite);
    return writer_->Reserve(size);
  }

  // The first bytes of the last reservation are output.
  absl::Status Advance(absl::Span<const uint8_t> bytes) {
    {
      StageTimer timer(progress_, Stage::kDigest);
      digest_.Update(bytes);
    }
    progress_.bytes_written += static_cast<int64_t>(bytes.size());
    StageTimer timer(progress_, Stage::kWrite);
    return writer_->Advance(static_cast<int64_t>(bytes.size()));
  }

  absl::Status AppendFill(int64_t size, uint8_t fill) {
    while (size > 0) {
      const int64_t piece = std::min(size, kBlockBytes);
      SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, Reserve(piece));
      std::fill_n(out.data(), piece, fill);
      SP_RETURN_IF_ERROR(Advance(out.subspan(0, piece)));
      size -= piece;
    }
    return absl::OkStatus();
  }

  // Source bytes of the tensor in progress, in the order of one slice of one expert.
  void CountNative(int slice, const uint8_t* data, int64_t stride, int64_t rows,
                   int64_t row_bytes) {
    StageTimer timer(progress_, Stage::kDigest);
    uint32_t& crc = slice_crc_[slice];
    if (stride == row_bytes) {
      crc = Crc32c(crc, absl::MakeConstSpan(data, rows * row_bytes));
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        crc = Crc32c(crc, absl::MakeConstSpan(data + r * stride, row_bytes));
      }
    }
    slice_bytes_[slice] += rows * row_bytes;
  }

  // The native CRC runs over expert, gate/up, row, column, whatever the order of output.
  void EndExpert() {
    for (size_t s = 0; s < slice_crc_.size(); ++s) {
      native_crc_ = Crc32cCombine(native_crc_, slice_crc_[s], slice_bytes_[s]);
      native_bytes_ += slice_bytes_[s];
      slice_crc_[s] = 0;
      slice_bytes_[s] = 0;
    }
  }

  void EndTensor() {
    v1::TensorRecord& record = *record_.mutable_file()->mutable_tensors(next_tensor_++);
    record.set_native_crc32c(absl::StrFormat("%08x", native_crc_));
    progress_.bytes_padded += record.size_bytes() - native_bytes_;
    native_crc_ = 0;
    native_bytes_ = 0;
  }

  absl::Status EndPart() {
    {
      StageTimer timer(progress_, Stage::kWrite);
      SP_ASSIGN_OR_RETURN(const ObjectInfo info, writer_->Commit(task_.gate));
      record_.set_etag(info.etag);
      writer_.reset();
    }
    const FileDigest digest = digest_.Finish();
    v1::FileRecord& file = *record_.mutable_file();
    for (const Sha256Bytes& chunk : digest.chunk_sha256) file.add_chunk_sha256(HexEncode(chunk));
    file.set_digest(digest.digest);
    if (task_.plan->spec.verify_after_write()) SP_RETURN_IF_ERROR(ReadBack(file));
    return RecordPart(record_, *task_.destination, task_.gate);
  }

 private:
  absl::Status Append(const std::string& bytes) {
    for (size_t done = 0; done < bytes.size();) {
      const int64_t piece = std::min<int64_t>(bytes.size() - done, kBlockBytes);
      SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, Reserve(piece));
      std::copy_n(bytes.data() + done, piece, out.data());
      SP_RETURN_IF_ERROR(Advance(out.subspan(0, piece)));
      done += piece;
    }
    return absl::OkStatus();
  }

  absl::Status ReadBack(const v1::FileRecord& file) {
    SP_ASSIGN_OR_RETURN(const auto reader, task_.destination->Open(file.key()));
    if (reader->info().size_bytes != file.size_bytes()) {
      return absl::DataLossError(absl::StrCat(file.key(), ": ", reader->info().size_bytes,
                                              " bytes after writing, want ", file.size_bytes()));
    }
    for (int64_t at = 0; at < file.size_bytes();) {
      const int64_t piece =
          std::min({kBlockBytes, file.size_bytes() - at, static_cast<int64_t>(buffer_.size())});
      const absl::Span<uint8_t> bytes = buffer_.subspan(0, piece);
      SP_RETURN_IF_ERROR(reader->ReadAt(at, bytes));
      digest_.Update(bytes);
      at += piece;
    }
    const std::string found = digest_.Finish().digest;
    if (found != file.digest()) {
      return absl::DataLossError(absl::StrCat(file.key(), ": reads back as ", found, ", but ",
                                              file.digest(), " was written"));
    }
    return absl::OkStatus();
  }

  const RegionTask& task_;
  RegionProgress& progress_;
  const int32_t rank_;
  const absl::Span<uint8_t> buffer_;
  std::unique_ptr<ObjectWriter> writer_;
  ChunkedDigest digest_;
  v1::PartRecord record_;
  int next_tensor_ = 0;
  std::array<uint32_t, 2> slice_crc_{};
  std::array<int64_t, 2> slice_bytes_{};
  uint32_t native_crc_ = 0;
  int64_t native_bytes_ = 0;
};

// State that the threads of one region share.
struct RegionRun {
  const RegionTask& task;
  RegionProgress& progress;
  const Region& region;
  SourceFiles files;
  SharedBlocks shared;
  std::atomic<bool> failed{false};
  absl::Mutex mu;
  absl::Status error ABSL_GUARDED_BY(mu);

  // The first error counts; the others are its consequences.
  void Fail(const absl::Status& status) {
    {
      absl::MutexLock lock(&mu);
      error.Update(status);
    }
    failed = true;
    shared.Fail(absl::CancelledError("another thread of the region failed"));
  }

  absl::Status first_error() {
    absl::MutexLock lock(&mu);
    return error;
  }

  absl::Status CheckStop() const {
    if (failed) return absl::CancelledError("another thread of the region failed");
    if (task.stop != nullptr && *task.stop) return absl::CancelledError("stopped");
    return absl::OkStatus();
  }

  const SlicePlan& slices() const { return task.plan->slices; }

  // Reads rows [row, row + rows) of a source tensor, `row_bytes` each, whole.
  absl::Status ReadRows(int32_t tensor, int64_t row, int64_t rows, int64_t row_bytes,
                        absl::Span<uint8_t> out) {
    StageTimer timer(progress, Stage::kRead);
    const TensorInfo info = slices().checkpoint().tensors().at(tensor);
    const int64_t at = row * row_bytes, size = rows * row_bytes;
    SP_CHECK(at + size <= info.size_bytes && size <= static_cast<int64_t>(out.size()));
    SP_ASSIGN_OR_RETURN(ObjectReader * reader, files.Get(info.file));
    SP_RETURN_IF_ERROR(reader->ReadAt(info.offset + at, out.subspan(0, size)));
    progress.bytes_read += size;
    return absl::OkStatus();
  }

  // Hints that the first bytes of a slice come next.
  absl::Status HintSlice(const Slice& slice) {
    const TensorInfo info = slices().checkpoint().tensors().at(slice.tensor);
    SP_ASSIGN_OR_RETURN(ObjectReader * reader, files.Get(info.file));
    reader->WillNeed(info.offset + slice.row_begin * slice.source_row_bytes,
                     std::min(kReadAheadBytes, slice.rows * slice.source_row_bytes));
    return absl::OkStatus();
  }
};

// One thread of a region and the ranks that it owns.
class RegionThread {
 public:
  RegionThread(RegionRun& run, std::vector<std::unique_ptr<RankStream>> streams,
               absl::Span<uint8_t> block)
      : run_(run), streams_(std::move(streams)), block_(block) {}

  absl::Status Run(const PartPlan& part) {
    for (const auto& stream : streams_) SP_RETURN_IF_ERROR(stream->BeginPart(part));
    for (const PartTensor& tensor : part.tensors) {
      SP_RETURN_IF_ERROR(run_.region.kind == Region::Kind::kRouted ? FuseTensor(tensor)
                                                                   : CopyTensor(tensor));
    }
    SP_RETURN_IF_ERROR(run_.files.CheckUnchanged());
    const bool last = &part == &run_.region.parts.back();
    for (const auto& stream : streams_) {
      SP_RETURN_IF_ERROR(stream->EndPart());
      if (last && run_.task.rank_done) run_.task.rank_done(stream->rank());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status FuseTensor(const PartTensor& tensor) {
    const FusedTensor& fused = run_.slices().fused_tensors()[tensor.source];
    const BlockShape shape = BlockShapeOf(run_.slices(), fused);
    for (int64_t expert = 0; expert < fused.experts; ++expert) {
      if (expert + 1 < fused.experts) SP_RETURN_IF_ERROR(Hint(fused, expert + 1));
      for (int64_t begin = 0; begin < fused.job.rows; begin += shape.rows) {
        SP_RETURN_IF_ERROR(run_.CheckStop());
        const int64_t end = std::min(begin + shape.rows, fused.job.rows);
        SP_RETURN_IF_ERROR(shape.shared ? SharedBlock(fused, expert, begin, end)
                                        : OwnBlocks(fused, expert, begin, end));
      }
      for (const auto& stream : streams_) stream->EndExpert();
    }
    for (const auto& stream : streams_) {
      SP_RETURN_IF_ERROR(stream->AppendFill(fused.tail_bytes, fused.fill));
      stream->EndTensor();
    }
    return absl::OkStatus();
  }

  absl::Status Hint(const FusedTensor& fused, int64_t expert) {
    const bool shared = BlockShapeOf(run_.slices(), fused).shared;
    for (const auto& stream : streams_) {
      for (const Slice& slice :
           run_.slices().SlicesOf(run_.region, fused, stream->rank(), expert)) {
        SP_RETURN_IF_ERROR(run_.HintSlice(slice));
      }
      if (shared) break;  // the same rows for every rank
    }
    return absl::OkStatus();
  }

  // Rows that only one rank needs: read, shuffle, next rank.
  absl::Status OwnBlocks(const FusedTensor& fused, int64_t expert, int64_t begin, int64_t end) {
    for (const auto& owned : streams_) {
      RankStream& stream = *owned;
      const std::vector<Slice> slices =
          run_.slices().SlicesOf(run_.region, fused, stream.rank(), expert);
      std::vector<RowsView> views;
      int64_t filled = 0;
      for (const RowRange& range : LogicalRanges(fused, begin, end)) {
        for (const SlicePiece& piece : PiecesIn(slices, range)) {
          const Slice& slice = slices[piece.slice];
          const absl::Span<uint8_t> bytes =
              block_.subspan(filled, piece.rows * slice.source_row_bytes);
          SP_RETURN_IF_ERROR(run_.ReadRows(slice.tensor, piece.source_row, piece.rows,
                                           slice.source_row_bytes, bytes));
          const uint8_t* data = bytes.data() + slice.col_begin;
          stream.CountNative(piece.slice, data, slice.source_row_bytes, piece.rows,
                             slice.col_bytes);
          views.push_back({data, slice.source_row_bytes, piece.first_row, piece.rows});
          filled += static_cast<int64_t>(bytes.size());
        }
      }
      SP_RETURN_IF_ERROR(Emit(fused, views, begin, end, stream));
    }
    return absl::OkStatus();
  }

  // Rows of which every rank needs some columns: one read for all threads.
  absl::Status SharedBlock(const FusedTensor& fused, int64_t expert, int64_t begin, int64_t end) {
    const int64_t number = next_shared_++;
    const std::vector<Slice> first =
        run_.slices().SlicesOf(run_.region, fused, streams_.front()->rank(), expert);
    const std::vector<SlicePiece> pieces = PiecesIn(first, {begin, end});
    SP_CHECK(first.size() == 1 && pieces.size() <= 1);
    const auto read = [&](absl::Span<uint8_t> buffer) -> absl::Status {
      if (pieces.empty()) return absl::OkStatus();  // pad rows only
      return run_.ReadRows(first[0].tensor, pieces[0].source_row, pieces[0].rows,
                           first[0].source_row_bytes, buffer);
    };
    SP_ASSIGN_OR_RETURN(const uint8_t* block, run_.shared.Acquire(number, read));
    absl::Status status;
    for (const auto& owned : streams_) {
      RankStream& stream = *owned;
      const std::vector<Slice> slices =
          run_.slices().SlicesOf(run_.region, fused, stream.rank(), expert);
      std::vector<RowsView> views;
      for (const SlicePiece& piece : pieces) {
        const Slice& slice = slices[piece.slice];
        const uint8_t* data = block + slice.col_begin;
        stream.CountNative(piece.slice, data, slice.source_row_bytes, piece.rows, slice.col_bytes);
        views.push_back({data, slice.source_row_bytes, piece.first_row, piece.rows});
      }
      status = Emit(fused, views, begin, end, stream);
      if (!status.ok()) break;
    }
    run_.shared.Release(number);
    return status;
  }

  absl::Status Emit(const FusedTensor& fused, absl::Span<const RowsView> views, int64_t begin,
                    int64_t end, RankStream& stream) {
    const int64_t size = (end - begin) * OutputCols(fused.job);
    SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(size));
    {
      StageTimer timer(run_.progress, Stage::kShuffle);
      SP_RETURN_IF_ERROR(run_.task.shuffler->Shuffle(fused.job, views, begin, end, out.data()));
    }
    return stream.Advance(out.subspan(0, size));
  }

  // A tensor that is stored unchanged: read straight into the write buffer.
  absl::Status CopyTensor(const PartTensor& tensor) {
    RankStream& stream = *streams_.front();
    for (int64_t at = 0; at < tensor.size_bytes;) {
      SP_RETURN_IF_ERROR(run_.CheckStop());
      const int64_t piece = std::min(kBlockBytes, tensor.size_bytes - at);
      SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(piece));
      const absl::Span<uint8_t> bytes = out.subspan(0, piece);
      SP_RETURN_IF_ERROR(run_.ReadRows(tensor.source, at, piece, 1, bytes));
      stream.CountNative(0, bytes.data(), piece, 1, piece);
      SP_RETURN_IF_ERROR(stream.Advance(bytes));
      at += piece;
    }
    stream.EndExpert();
    stream.EndTensor();
    return absl::OkStatus();
  }

  RegionRun& run_;
  std::vector<std::unique_ptr<RankStream>> streams_;
  absl::Span<uint8_t> block_;
  int64_t next_shared_ = 0;
};

// Hands out pieces of the lease's memory.
class Carver {
 public:
  explicit Carver(absl::Span<uint8_t> memory) : left_(memory) {}
  absl::Span<uint8_t> Take(int64_t size) {
    SP_CHECK(size <= static_cast<int64_t>(left_.size()));
    const absl::Span<uint8_t> piece = left_.subspan(0, size);
    left_ = left_.subspan(size);
    return piece;
  }

 private:
  absl::Span<uint8_t> left_;
};

// One part of every rank in `ranks`.
absl::Status PreparePart(const RegionTask& task, const PartPlan& part,
                         const std::vector<int32_t>& ranks, RegionProgress& progress) {
  const SlicePlan& slices = task.plan->slices;
  const MemoryNeed& need = task.plan->memory;
  const int32_t rank_count = static_cast<int32_t>(ranks.size());
  SP_ASSIGN_OR_RETURN(const LeaseShape fit, FitLease(need, static_cast<int64_t>(task.memory.size()),
                                                     rank_count, task.threads));
  if (fit.ranks < rank_count) {
    return absl::InvalidArgumentError(absl::StrCat("memory of ", task.memory.size(),
                                                   " bytes is too small for ", rank_count,
                                                   " ranks, want ", need.Total(rank_count, 1)));
  }
  Carver carver(task.memory);
  const int32_t slots = fit.threads + 1;
  RegionRun run{.task = task,
                .progress = progress,
                .region = slices.regions()[task.region],
                .files = SourceFiles(slices.checkpoint(), *task.source),
                .shared = SharedBlocks(carver.Take(need.shared_block * slots), need.shared_block,
                                       slots, fit.threads)};
  std::vector<std::unique_ptr<RegionThread>> workers;
  for (int32_t t = 0; t < fit.threads; ++t) {
    std::vector<std::unique_ptr<RankStream>> streams;
    for (int32_t r = t; r < rank_count; r += fit.threads) {
      streams.push_back(
          std::make_unique<RankStream>(task, progress, ranks[r], carver.Take(need.per_rank)));
    }
    workers.push_back(
        std::make_unique<RegionThread>(run, std::move(streams), carver.Take(need.per_thread)));
  }
  const auto work = [&](int32_t t) {
    const absl::Status status = workers[t]->Run(part);
    if (!status.ok()) run.Fail(status);
  };
  std::vector<std::thread> pool;
  for (int32_t t = 1; t < fit.threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (std::thread& thread : pool) thread.join();
  return run.first_error();
}

}  // namespace

absl::Status PrepareRegion(const RegionTask& task, RegionProgress& progress) {
  const Region& region = task.plan->slices.regions()[task.region];
  const int64_t last = static_cast<int64_t>(region.parts.size()) - 1;
  for (int64_t p = 0; p <= last; ++p) {
    std::vector<int32_t> ranks;
    for (const int32_t rank : task.ranks) {
      SP_ASSIGN_OR_RETURN(
          const bool recorded,
          IsRecorded(*task.plan, {task.region, rank, &region.parts[p]}, *task.destination));
      if (!recorded) {
        ranks.push_back(rank);
      } else if (p == last && task.rank_done) {
        task.rank_done(rank);
      }
    }
    if (!ranks.empty()) SP_RETURN_IF_ERROR(PreparePart(task, region.parts[p], ranks, progress));
  }
  return absl::OkStatus();
}

}  // namespace shardprep
