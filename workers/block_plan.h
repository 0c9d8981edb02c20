// How a region is streamed: rows per block, and the memory that takes. Pure.
//
// A block is a multiple of 32 output rows whose source bytes come to about kBlockBytes, so that
// reading, shuffling and digesting it stay within a core's second-level cache. Sources where each
// read is a request are read ahead in larger spans (source_spans.h), and blocks are cut from those.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "workers/object_store.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Measured: 256 KiB reads and writes are fastest on ext4 and tmpfs; larger ones leave the cache.
inline constexpr int64_t kBlockBytes = int64_t{256} << 10;

// How one fused tensor is cut into blocks; equal for all experts and ranks.
struct BlockShape {
  int64_t rows = 0;          // output rows of a block (the last of an expert may have fewer)
  int64_t source_bytes = 0;  // most source bytes of one block
  int64_t output_bytes = 0;  // most output bytes of one block
  // Slices take some columns of each row, so one read serves every rank of the set.
  bool shared = false;
};

BlockShape BlockShapeOf(const FusedTensor& tensor);

// Rows of a dense source that are read at a time.
int64_t DenseBlockRows(const DenseSource& source);

// True when gate and up rows alternate in the output, so that a block needs rows of both halves.
bool AlternatesHalves(const FusedTensor& tensor);

// Rows [begin, end) of the padded logical matrix.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// In order, those that overlap or touch joined.
std::vector<RowRange> JoinRows(std::vector<RowRange> ranges);

// The logical rows that output rows [begin, end), both multiples of 32, are made of: one range, or
// one of each half.
std::vector<RowRange> LogicalRanges(const FusedTensor& tensor, int64_t begin, int64_t end);

// The part of a slice that lies in a range of logical rows, and where in its source tensor it is.
struct SlicePiece {
  int slice = 0;            // index into the slices
  int64_t source_row = 0;   // first row, of the source tensor
  int64_t source_rows = 0;  // from the first to the last, those between that it steps over included
  int64_t first_row = 0;    // first row, of the padded logical matrix
  int64_t rows = 0;
};

// In the order of `slices`; pad rows belong to none.
std::vector<SlicePiece> PiecesIn(const std::vector<Slice>& slices, const RowRange& range);

// Ranges of a source that prefers large reads which are fetched at a time, for each batch of ranks.
inline constexpr int kSourceReaders = 16;

// Writes that are on their way at a time where memory allows: shared among the ranks of a batch,
// rounded up. Measured on a local disk: fewer leave it idle, more gain nothing. Of a directory no
// more are carried out at a time either (kDirectWriters in directory_store.cc).
inline constexpr int32_t kWritesAtOnce = 8;

// Spans start at multiples of it in the buffer that they share.
inline constexpr int64_t kSpanAlignment = 64;

// Buffers of one lease, in bytes. Either the threads read blocks, or, where the source prefers
// large reads, spans are read ahead into one buffer that all threads share.
struct MemoryNeed {
  int64_t per_rank = 0;      // write buffer of a rank's stream, for one write at once
  int64_t per_write = 0;     // what a further write at once adds to it; 0: it is of no use
  int64_t per_thread = 0;    // block that only one thread reads
  int64_t shared_block = 0;  // a block that all threads share; threads + 1 of them are in flight
  int64_t batches = 1;       // of ranks that are prepared side by side where threads allow it

  int64_t preferred_read = 0;    // ObjectStore::PreferredReadBytes() of the source; 0: blocks
  int64_t read_ahead_least = 0;  // two spans of the least size
  int64_t read_ahead_most = 0;   // as much as kSourceReaders can keep busy; more is no use

  // With the least to read ahead in and one write at once: what a lease cannot do without.
  int64_t Total(int64_t ranks, int64_t threads) const {
    return ranks * per_rank + threads * per_thread + (threads + 1) * shared_block +
           read_ahead_least;
  }
  // With the most to read ahead in and most writes, and a block more for each further batch: what a
  // lease can make use of.
  int64_t Most(int64_t ranks, int64_t threads) const {
    return Total(ranks, threads) + read_ahead_most - read_ahead_least +
           ranks * (MostWrites(ranks) - 1) * per_write +
           (std::min(batches, threads) - 1) * shared_block;
  }

  // Of one rank's stream that are of use.
  int64_t MostWrites(int64_t ranks) const {
    return per_write == 0 ? 1 : (kWritesAtOnce + ranks - 1) / ranks;
  }
  int64_t WriteBuffer(int64_t writes) const { return per_rank + (writes - 1) * per_write; }
};

MemoryNeed MemoryNeedOf(const SlicePlan& plan, const ObjectStore& source,
                        const ObjectStore& destination);

// Ranges of a source that does not prefer large reads which are read at a time for several targets.
inline constexpr int kJointFileReaders = 4;

// What is read at a time for several targets (joint_spans.h), unless a piece cannot be cut so
// small. `need` says what the source prefers.
int64_t JointSpanBytes(const MemoryNeed& need);

// Of ranks of several targets, whose own needs are given; `largest_span` is that of any region.
MemoryNeed JointMemoryNeed(const std::vector<MemoryNeed>& needs, int64_t largest_span);

// How a lease uses a budget.
struct LeaseShape {
  int32_t ranks = 0;
  int32_t threads = 0;
  int64_t read_ahead = 0;  // bytes, of MemoryNeed::read_ahead_least to _most
  int32_t writes = 1;      // WriteOptions::writes_at_once of each rank's stream
};

// As many of `rank_count` ranks as fit, with at most `threads` threads (never more than ranks). A
// budget that does not suffice for all cuts first writes at once, then what is read ahead, then
// threads, then ranks. INVALID_ARGUMENT stating the minimum budget when not even one rank on one
// thread fits.
absl::StatusOr<LeaseShape> FitLease(const MemoryNeed& need, int64_t budget_bytes,
                                    int32_t rank_count, int32_t threads);

// How many of `batches`, of at most `ranks` ranks each, to prepare at a time, each with an equal
// share of budget and threads, so that threads have least to do one after the other. At least 1.
int32_t BatchesAtOnce(const MemoryNeed& need, int64_t budget_bytes, int32_t batches, int32_t ranks,
                      int32_t threads);

}  // namespace shardprep
