// How one region is prepared.
//
// 1. Each thread owns some ranks of the set. All threads walk the same sequence: part, tensor,
//    expert, block; a block is some output rows of one expert's matrix.
// 2. Rows of w1 and w3 belong to one rank: its thread reads them into its own buffer. Columns of w2
//    are needed by every rank: the first thread that comes to a block reads its rows whole into one
//    of a few shared buffers, and the last that is done with it frees the buffer.
//    Where the source prefers large reads, nobody reads blocks: a SpanReader fetches large ranges
//    ahead of the threads, and a block is a view of some rows of a span.
//    Tensors besides the routed experts that each rank has in its own files are shared like w2: a
//    block of their source is read once, and each rank takes what it has of it.
// 3. The block is shuffled straight into the rank's write buffer; source bytes go into the native
//    CRC and output bytes into the digest while both are in cache; the writer sends the buffer off
//    when it is full. Output is made in its final order, so a part is one sequential stream.
// 4. When a part is whole: the source files are checked to be unchanged, the fence is asked, the
//    part gets its name, and its record is written to the journal. Not where a manifest lies by
//    then: at a store without claims another controller's job may have committed an artefact, which
//    a part of ours would spoil.
//
// Ranks that share no source rows and whose parts differ walk sequences of their own: they are
// batches (BatchesOf), which are prepared side by side where threads and memory allow it.
//
// The first error of any thread ends all; parts without a name vanish with their writers.
#include "workers/region_prep.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"
#include "workers/journal.h"
#include "workers/parallel.h"
#include "workers/rank_rows.h"
#include "workers/rank_stream.h"
#include "workers/source_files.h"
#include "workers/source_spans.h"
#include "workers/span_reader.h"

namespace shardprep {
namespace {

constexpr int64_t kReadAheadBytes = int64_t{8} << 20;

// A few buffers through which the threads of a batch pass the blocks that all of them need. Every
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

// State that the threads of one batch share.
struct RegionRun {
  const RegionTask& task;
  RegionProgress& progress;
  const Region& region;
  SourceFiles files;
  const std::vector<int32_t>& batch;  // ranks that walk together
  SharedBlocks shared;
  std::atomic<bool>& failed;  // of the region: any thread of any batch
  absl::Mutex mu;
  absl::Status error ABSL_GUARDED_BY(mu);
  // Where the source prefers large reads: how the part's bytes come. Set before threads start.
  SpanPlan span_plan;
  std::optional<SpanReader> spans;

  // The first error counts; the others are its consequences.
  void Fail(const absl::Status& status) {
    {
      absl::MutexLock lock(&mu);
      error.Update(status);
    }
    failed = true;
    shared.Fail(absl::CancelledError("another thread of the region failed"));
    if (spans) spans->Fail(absl::CancelledError("another thread of the region failed"));
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
    const TensorInfo info = slices().checkpoint().tensors().at(tensor);
    const int64_t at = row * row_bytes, size = rows * row_bytes;
    SP_CHECK(at + size <= info.size_bytes && size <= static_cast<int64_t>(out.size()));
    return files.Read(info.file, info.offset + at, out.subspan(0, size));
  }

  // Reads the source bytes of `part` for these ranks ahead of `consumers` threads.
  void ReadAhead(const PartPlan& part, const std::vector<int32_t>& ranks,
                 absl::Span<uint8_t> memory, int consumers) {
    // Two spans fit at least: one is used while the next is read.
    const int64_t half = static_cast<int64_t>(memory.size()) / 2 / kSpanAlignment * kSpanAlignment;
    span_plan = PlanSpans(slices(), region, part, ranks,
                          std::min(half, task.plan->memory.read_ahead_least));
    const auto read = [this](const SourceRange& range, absl::Span<uint8_t> out) {
      return files.Read(range.file, range.offset, out);
    };
    spans.emplace(span_plan.spans, memory, consumers, kSourceReaders, read, task.stop);
  }

  // Hints that the first bytes of a slice come next.
  absl::Status HintSlice(const Slice& slice) {
    const TensorInfo info = slices().checkpoint().tensors().at(slice.tensor);
    SP_ASSIGN_OR_RETURN(ObjectReader * reader, files.Get(info.file));
    reader->WillNeed(
        info.offset + slice.row_begin * slice.source_row_bytes,
        std::min(kReadAheadBytes, slice.rows * slice.row_step * slice.source_row_bytes));
    return absl::OkStatus();
  }
};

// One thread of a region and the ranks that it owns.
class RegionThread {
 public:
  // The thread with this number of `threads` owns the ranks at positions number, number + threads,
  // ... of the batch.
  RegionThread(RegionRun& run, int32_t number, int32_t threads,
               std::vector<std::unique_ptr<RankStream>> streams, absl::Span<uint8_t> block)
      : run_(run),
        number_(number),
        threads_(threads),
        streams_(std::move(streams)),
        block_(block) {}

  // `index` counts the parts of the region.
  absl::Status Run(const PartPlan& part, size_t index) {
    for (const auto& stream : streams_) {
      // Ranks of another shape number their parts otherwise.
      const auto& own = run_.slices().PartsOf(run_.region, stream->rank());
      SP_RETURN_IF_ERROR(stream->BeginPart(own.at(index)));
    }
    for (int32_t t = 0; t < static_cast<int32_t>(part.tensors.size()); ++t) {
      SP_RETURN_IF_ERROR(PrepareTensor(t, part.tensors[t]));
    }
    if (run_.spans) run_.spans->Finish(number_);
    SP_RETURN_IF_ERROR(run_.files.CheckUnchanged());
    const auto& parts = run_.slices().PartsOf(run_.region, streams_.front()->rank());
    return EndPart(/*last=*/index + 1 == parts.size());
  }

 private:
  absl::Status PrepareTensor(int32_t number, const PartTensor& tensor) {
    switch (run_.region.kind) {
      case Region::Kind::kRouted:
        return FuseTensor(number, tensor);
      case Region::Kind::kReplicated:
        return CopyTensor(number, tensor);
      case Region::Kind::kDense:
        return SliceTensor(number, tensor);
    }
    SP_CHECK(false);
  }

  // Ending a part is waiting, for requests or until files and names are durable. Those of all ranks
  // wait at once: a file system then puts its journal on the disk once for many of them.
  absl::Status EndPart(bool last) {
    StageTimer timer(run_.progress, Stage::kWrite);
    std::vector<absl::Status> ended(streams_.size());
    const auto count = static_cast<int64_t>(streams_.size());
    ForEachAtOnce(count, kRequestsAtOnce, [&](int64_t s) {
      ended[s] = run_.CheckStop();
      if (ended[s].ok()) ended[s] = streams_[s]->EndPart();
      if (!ended[s].ok()) {
        run_.Fail(ended[s]);
      } else if (last && run_.task.rank_done) {
        run_.task.rank_done(streams_[s]->rank());
      }
    });
    for (const absl::Status& status : ended) SP_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  absl::Status FuseTensor(int32_t number, const PartTensor& tensor) {
    const FusedTensor& fused =
        run_.slices().FusedTensorsOf(streams_.front()->rank())[tensor.source];
    for (int64_t expert = 0; expert < fused.experts; ++expert) {
      SP_RETURN_IF_ERROR(run_.spans ? FuseFromSpans(number, fused, expert)
                                    : FuseFromBlocks(fused, expert));
      for (const auto& stream : streams_) stream->EndExpert();
    }
    for (const auto& stream : streams_) {
      SP_RETURN_IF_ERROR(stream->AppendFill(fused.tail_bytes, fused.fill));
      stream->EndTensor();
    }
    return absl::OkStatus();
  }

  // The tensor on a stream's own rank; `fused` is that on the first.
  const FusedTensor& OnRank(const FusedTensor& fused, const RankStream& stream) const {
    const SlicePlan& slices = run_.slices();
    const auto index = &fused - slices.FusedTensorsOf(streams_.front()->rank()).data();
    return slices.FusedTensorsOf(stream.rank())[static_cast<size_t>(index)];
  }

  absl::Status FuseFromBlocks(const FusedTensor& fused, int64_t expert) {
    const BlockShape shape = BlockShapeOf(fused);
    if (expert + 1 < fused.experts) SP_RETURN_IF_ERROR(Hint(fused, expert + 1));
    for (int64_t begin = 0; begin < fused.job.rows; begin += shape.rows) {
      SP_RETURN_IF_ERROR(run_.CheckStop());
      const int64_t end = std::min(begin + shape.rows, fused.job.rows);
      SP_RETURN_IF_ERROR(shape.shared ? SharedBlock(fused, expert, begin, end)
                                      : OwnBlocks(fused, expert, begin, end));
    }
    return absl::OkStatus();
  }

  absl::Status Hint(const FusedTensor& fused, int64_t expert) {
    const bool shared = BlockShapeOf(fused).shared;
    for (const auto& stream : streams_) {
      for (const Slice& slice :
           run_.slices().SlicesOf(run_.region, OnRank(fused, *stream), stream->rank(), expert)) {
        SP_RETURN_IF_ERROR(run_.HintSlice(slice));
      }
      if (shared) break;  // the same rows for every rank
    }
    return absl::OkStatus();
  }

  // Rows of one source tensor that lie in block_ from the start, and where the next would go.
  struct RowsInBlock {
    int32_t tensor = kNoTensor;
    int64_t first = 0;
    int64_t end = 0;
    const uint8_t* data = nullptr;
    int64_t filled = 0;  // bytes of block_
  };

  // The first row of a piece, in block_. Where gate and up rows alternate in the source and the
  // block takes both, the read for gate has all but the last row of up: they are read together.
  absl::StatusOr<const uint8_t*> ReadPiece(const Slice& slice, const SlicePiece& piece,
                                           RowsInBlock& block) {
    const int64_t end = piece.source_row + piece.source_rows;
    if (slice.tensor != block.tensor || piece.source_row < block.first || end > block.end) {
      const TensorInfo info = run_.slices().checkpoint().tensors().at(slice.tensor);
      const int64_t all_rows = info.size_bytes / slice.source_row_bytes;
      const int64_t rows = std::min(end + slice.row_step - 1, all_rows) - piece.source_row;
      const absl::Span<uint8_t> bytes = block_.subspan(block.filled, rows * slice.source_row_bytes);
      SP_RETURN_IF_ERROR(
          run_.ReadRows(slice.tensor, piece.source_row, rows, slice.source_row_bytes, bytes));
      block.tensor = slice.tensor;
      block.first = piece.source_row;
      block.end = piece.source_row + rows;
      block.data = bytes.data();
      block.filled += static_cast<int64_t>(bytes.size());
    }
    return block.data + (piece.source_row - block.first) * slice.source_row_bytes;
  }

  // Rows that only one rank needs: read, shuffle, next rank.
  absl::Status OwnBlocks(const FusedTensor& fused, int64_t expert, int64_t begin, int64_t end) {
    for (const auto& owned : streams_) {
      RankStream& stream = *owned;
      const FusedTensor& own = OnRank(fused, stream);
      const std::vector<Slice> slices =
          run_.slices().SlicesOf(run_.region, own, stream.rank(), expert);
      std::vector<RowsView> views;
      RowsInBlock block;
      for (const RowRange& range : LogicalRanges(fused, begin, end)) {
        for (const SlicePiece& piece : PiecesIn(slices, range)) {
          const Slice& slice = slices[piece.slice];
          SP_ASSIGN_OR_RETURN(const uint8_t* rows, ReadPiece(slice, piece, block));
          const uint8_t* data = rows + slice.col_begin;
          const int64_t stride = slice.row_step * slice.source_row_bytes;
          stream.CountNative(piece.slice, data, stride, piece.rows, slice.col_bytes);
          views.push_back({data, stride, piece.first_row, piece.rows});
        }
      }
      SP_RETURN_IF_ERROR(
          FuseRows(own, views, begin, end, *run_.task.shuffler, run_.progress, stream));
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
      const FusedTensor& own = OnRank(fused, stream);
      const std::vector<Slice> slices =
          run_.slices().SlicesOf(run_.region, own, stream.rank(), expert);
      std::vector<RowsView> views;
      for (const SlicePiece& piece : pieces) {
        const Slice& slice = slices[piece.slice];
        const uint8_t* data = block + slice.col_begin;
        stream.CountNative(piece.slice, data, slice.source_row_bytes, piece.rows, slice.col_bytes);
        views.push_back({data, slice.source_row_bytes, piece.first_row, piece.rows});
      }
      status = FuseRows(own, views, begin, end, *run_.task.shuffler, run_.progress, stream);
      if (!status.ok()) break;
    }
    run_.shared.Release(number);
    return status;
  }

  // The next item if it belongs to this expert of this tensor (tensors count in the part).
  const SpanItem* NextItem(int32_t tensor, int64_t expert) {
    const std::vector<SpanItem>& items = run_.span_plan.items;
    if (next_item_ == items.size()) return nullptr;
    const SpanItem& item = items[next_item_];
    if (item.tensor != tensor || item.expert != expert) return nullptr;
    ++next_item_;
    return &item;
  }

  absl::Status FuseFromSpans(int32_t tensor, const FusedTensor& fused, int64_t expert) {
    const int64_t block_rows = BlockShapeOf(fused).rows;
    while (const SpanItem* item = NextItem(tensor, expert)) {
      std::vector<RankStream*> streams;
      for (int32_t s = 0; s < static_cast<int32_t>(streams_.size()); ++s) {
        const int32_t position = number_ + s * threads_;
        if (position >= item->rank_begin && position < item->rank_end) {
          streams.push_back(streams_[static_cast<size_t>(s)].get());
        }
      }
      if (streams.empty()) continue;
      SP_ASSIGN_OR_RETURN(const SpanBytes span, run_.spans->MoveTo(number_, item->span));
      for (int64_t begin = item->begin; begin < item->end; begin += block_rows) {
        SP_RETURN_IF_ERROR(run_.CheckStop());
        const int64_t end = std::min(begin + block_rows, item->end);
        for (RankStream* stream : streams) {
          SP_RETURN_IF_ERROR(FuseSpanRows(run_.region, OnRank(fused, *stream), expert, begin, end,
                                          span, *run_.task.shuffler, run_.progress, *stream));
        }
      }
    }
    return absl::OkStatus();
  }

  const DenseTensor& Dense(const PartTensor& tensor) const {
    return run_.slices().dense_tensors()[static_cast<size_t>(tensor.source)];
  }

  // A tensor that each rank has something of in its own files.
  absl::Status SliceTensor(int32_t number, const PartTensor& tensor) {
    const DenseTensor& dense = Dense(tensor);
    for (size_t s = 0; s < dense.sources.size(); ++s) {
      SP_RETURN_IF_ERROR(run_.spans ? SliceFromSpans(number, dense, s)
                                    : SliceFromBlocks(dense, dense.sources[s]));
      for (const auto& stream : streams_) stream->EndExpert();
    }
    for (const auto& stream : streams_) {
      SP_RETURN_IF_ERROR(AppendDenseTail(dense, *stream));
      stream->EndTensor();
    }
    return absl::OkStatus();
  }

  absl::Status SliceFromBlocks(const DenseTensor& dense, const DenseSource& source) {
    const int64_t block_rows = DenseBlockRows(source);
    for (int64_t begin = 0; begin < source.rows; begin += block_rows) {
      SP_RETURN_IF_ERROR(run_.CheckStop());
      const int64_t end = std::min(begin + block_rows, source.rows);
      // All threads decide alike: the ranks are those of the batch.
      if (!AnyRankNeeds(dense, source, begin, end)) continue;
      const int64_t number = next_shared_++;
      const auto read = [&](absl::Span<uint8_t> buffer) {
        return run_.ReadRows(source.tensor, begin, end - begin, source.row_bytes, buffer);
      };
      SP_ASSIGN_OR_RETURN(const uint8_t* block, run_.shared.Acquire(number, read));
      absl::Status status;
      for (const auto& stream : streams_) {
        status.Update(AppendDenseRows(dense, source, begin, end, block, *stream));
      }
      run_.shared.Release(number);
      SP_RETURN_IF_ERROR(status);
    }
    return absl::OkStatus();
  }

  bool AnyRankNeeds(const DenseTensor& dense, const DenseSource& source, int64_t begin,
                    int64_t end) const {
    return std::any_of(run_.batch.begin(), run_.batch.end(), [&](int32_t rank) {
      const Slice slice = run_.slices().DenseSliceOf(dense, source, rank);
      return std::max(begin, slice.row_begin) < std::min(end, slice.row_begin + slice.rows);
    });
  }

  absl::Status SliceFromSpans(int32_t number, const DenseTensor& dense, size_t s) {
    const DenseSource& source = dense.sources[s];
    const TensorInfo info = run_.slices().checkpoint().tensors().at(source.tensor);
    const int64_t block_rows = DenseBlockRows(source);
    while (const SpanItem* item = NextItem(number, static_cast<int64_t>(s))) {
      SP_ASSIGN_OR_RETURN(const SpanBytes span, run_.spans->MoveTo(number_, item->span));
      for (int64_t begin = item->begin; begin < item->end; begin += block_rows) {
        SP_RETURN_IF_ERROR(run_.CheckStop());
        const int64_t end = std::min(begin + block_rows, item->end);
        const uint8_t* block = span.At(info.file, info.offset + begin * source.row_bytes,
                                       (end - begin) * source.row_bytes);
        for (const auto& stream : streams_) {
          SP_RETURN_IF_ERROR(AppendDenseRows(dense, source, begin, end, block, *stream));
        }
      }
    }
    return absl::OkStatus();
  }

  // A tensor that is stored once: all of its sources, one after the other.
  absl::Status CopyTensor(int32_t number, const PartTensor& tensor) {
    const DenseTensor& dense = Dense(tensor);
    for (size_t s = 0; s < dense.sources.size(); ++s) {
      SP_RETURN_IF_ERROR(run_.spans ? CopyFromSpans(number, dense, s)
                                    : CopyFromSource(dense.sources[s]));
      streams_.front()->EndExpert();
    }
    streams_.front()->EndTensor();
    return absl::OkStatus();
  }

  absl::Status CopyFromSpans(int32_t number, const DenseTensor& dense, size_t s) {
    RankStream& stream = *streams_.front();
    const TensorInfo info = run_.slices().checkpoint().tensors().at(dense.sources[s].tensor);
    while (const SpanItem* item = NextItem(number, static_cast<int64_t>(s))) {
      SP_ASSIGN_OR_RETURN(const SpanBytes span, run_.spans->MoveTo(number_, item->span));
      for (int64_t at = item->begin; at < item->end;) {
        SP_RETURN_IF_ERROR(run_.CheckStop());
        const int64_t piece = std::min(kBlockBytes, item->end - at);
        SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(piece));
        std::copy_n(span.At(info.file, info.offset + at, piece), piece, out.data());
        stream.CountNative(0, out.data(), piece, 1, piece);
        SP_RETURN_IF_ERROR(stream.Advance(out.subspan(0, piece)));
        at += piece;
      }
    }
    return absl::OkStatus();
  }

  // Read straight into the write buffer.
  absl::Status CopyFromSource(const DenseSource& source) {
    RankStream& stream = *streams_.front();
    for (int64_t at = 0; at < source.rows;) {
      SP_RETURN_IF_ERROR(run_.CheckStop());
      const int64_t piece = std::min(kBlockBytes, source.rows - at);
      SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, stream.Reserve(piece));
      const absl::Span<uint8_t> bytes = out.subspan(0, piece);
      SP_RETURN_IF_ERROR(run_.ReadRows(source.tensor, at, piece, 1, bytes));
      stream.CountNative(0, bytes.data(), piece, 1, piece);
      SP_RETURN_IF_ERROR(stream.Advance(bytes));
      at += piece;
    }
    return absl::OkStatus();
  }

  RegionRun& run_;
  const int32_t number_;
  const int32_t threads_;
  std::vector<std::unique_ptr<RankStream>> streams_;
  absl::Span<uint8_t> block_;
  int64_t next_shared_ = 0;
  size_t next_item_ = 0;
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

// One part, by its index in the region, of every rank in `ranks`, which are a batch as of
// BatchesOf(). `failed` is that of RegionRun.
absl::Status PreparePart(const RegionTask& task, size_t index, const std::vector<int32_t>& ranks,
                         RegionProgress& progress, std::atomic<bool>& failed) {
  const SlicePlan& slices = task.plan->slices;
  const PartPlan& part = slices.PartsOf(slices.regions()[task.region], ranks.front()).at(index);
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
                .files = SourceFiles(slices.checkpoint(), *task.source, progress),
                .batch = ranks,
                .shared = SharedBlocks(carver.Take(need.shared_block * slots), need.shared_block,
                                       slots, fit.threads),
                .failed = failed};
  if (need.preferred_read > 0) run.ReadAhead(part, ranks, carver.Take(fit.read_ahead), fit.threads);
  std::vector<std::unique_ptr<RegionThread>> workers;
  for (int32_t t = 0; t < fit.threads; ++t) {
    std::vector<std::unique_ptr<RankStream>> streams;
    for (int32_t r = t; r < rank_count; r += fit.threads) {
      streams.push_back(std::make_unique<RankStream>(
          StreamPlace{task.plan, task.region, ranks[r], task.destination, &task.gate}, progress,
          carver.Take(need.WriteBuffer(fit.writes)), fit.writes));
    }
    workers.push_back(std::make_unique<RegionThread>(run, t, fit.threads, std::move(streams),
                                                     carver.Take(need.per_thread)));
  }
  const auto work = [&](int32_t t) {
    const absl::Status status = workers[t]->Run(part, index);
    if (!status.ok()) run.Fail(status);
  };
  std::vector<std::thread> pool;
  for (int32_t t = 1; t < fit.threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (std::thread& thread : pool) thread.join();
  return run.first_error();
}

// The ranks of a set in batches that walk one sequence of parts, tensors, slots and blocks: those
// of one expert-parallel group, which share source rows and whose parts have equal sizes; where a
// rank is a group, those of one shape, which share nothing. Of other regions all ranks walk one
// sequence.
std::vector<std::vector<int32_t>> BatchesOf(const SlicePlan& slices, const Region& region,
                                            const std::vector<int32_t>& ranks) {
  if (region.kind != Region::Kind::kRouted) return {ranks};
  const bool by_group = slices.moe_tensor_parallel_size() > 1;
  std::map<int32_t, std::vector<int32_t>> batches;
  for (const int32_t rank : ranks) {
    batches[by_group ? slices.GroupOf(rank) : slices.ShapeOf(rank)].push_back(rank);
  }
  std::vector<std::vector<int32_t>> list;
  list.reserve(batches.size());
  for (auto& [key, batch] : batches) list.push_back(std::move(batch));
  return list;
}

absl::Status PrepareBatch(const RegionTask& task, const std::vector<int32_t>& batch,
                          RegionProgress& progress, std::atomic<bool>& failed) {
  const Region& region = task.plan->slices.regions()[task.region];
  const std::vector<PartPlan>& parts = task.plan->slices.PartsOf(region, batch.front());
  const int64_t last = static_cast<int64_t>(parts.size()) - 1;
  const int at_once = task.destination->PreferredReadBytes() > 0 ? kRequestsAtOnce : 1;
  for (int64_t p = 0; p <= last; ++p) {
    std::vector<absl::StatusOr<bool>> recorded(batch.size());
    ForEachAtOnce(static_cast<int64_t>(batch.size()), at_once, [&](int64_t r) {
      const PartPlan& part = task.plan->slices.PartsOf(region, batch[r]).at(static_cast<size_t>(p));
      recorded[r] = IsRecorded(*task.plan, {task.region, batch[r], &part}, *task.destination);
    });
    std::vector<int32_t> ranks;
    for (size_t r = 0; r < batch.size(); ++r) {
      SP_ASSIGN_OR_RETURN(const bool is_recorded, recorded[r]);
      if (!is_recorded) {
        ranks.push_back(batch[r]);
      } else if (p == last && task.rank_done) {
        task.rank_done(batch[r]);
      }
    }
    if (ranks.empty()) continue;
    SP_RETURN_IF_ERROR(PreparePart(task, static_cast<size_t>(p), ranks, progress, failed));
  }
  return absl::OkStatus();
}

// The task with equal shares of its threads and memory, one for each batch at a time.
std::vector<RegionTask> SharesOf(const RegionTask& task, int32_t count) {
  std::vector<RegionTask> shares(static_cast<size_t>(count), task);
  const size_t bytes = task.memory.size() / shares.size();
  for (size_t s = 0; s < shares.size(); ++s) {
    shares[s].threads = task.threads / count;
    shares[s].memory = task.memory.subspan(s * bytes, bytes);
  }
  return shares;
}

}  // namespace

absl::Status PrepareRegion(const RegionTask& task, RegionProgress& progress) {
  const SlicePlan& slices = task.plan->slices;
  const auto batches = BatchesOf(slices, slices.regions()[task.region], task.ranks);
  size_t largest = 0;
  for (const auto& batch : batches) largest = std::max(largest, batch.size());
  const std::vector<RegionTask> shares =
      SharesOf(task, BatchesAtOnce(task.plan->memory, static_cast<int64_t>(task.memory.size()),
                                   static_cast<int32_t>(batches.size()),
                                   static_cast<int32_t>(largest), task.threads));
  const auto at_once = static_cast<int64_t>(shares.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<absl::Status> ended(batches.size());
  ForEachAtOnce(at_once, static_cast<int>(at_once), [&](int64_t s) {
    const RegionTask& share = shares[static_cast<size_t>(s)];
    for (size_t b = next++; b < batches.size() && !failed; b = next++) {
      ended[b] = PrepareBatch(share, batches[b], progress, failed);
      if (!ended[b].ok()) failed = true;
    }
  });
  // What ended a batch because of another says so less well.
  absl::Status first;
  for (const absl::Status& status : ended) {
    if (!status.ok() && !absl::IsCancelled(status)) return status;
    first.Update(status);
  }
  return first;
}

}  // namespace shardprep
