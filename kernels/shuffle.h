// Streaming one expert's matrix through a layout, on the host or on a GPU.
//
// Every layout is a row order followed by a fixed permutation inside blocks of BlockRows() rows, so
// output is produced in final order, block by block, from rows that happen to be in memory. The
// host path defines what is correct.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/layout_index.h"

namespace shardprep {

// Rows [first_row, first_row + rows) of one expert's padded logical matrix (gate half, then up
// half), in memory; row k starts at data + (k - first_row) * stride_bytes and has native_cols
// bytes.
struct RowsView {
  const uint8_t* data;
  int64_t stride_bytes;
  int64_t first_row;
  int64_t rows;
};

// One expert's matrix of one fused tensor.
struct ShuffleJob {
  LayoutId layout;
  RowOrder row_order;
  int64_t rows;         // of one expert, pads included
  int64_t native_cols;  // bytes of a row that come from the source
  int64_t padded_cols;  // bytes of a row; [native_cols, padded_cols) become 0x00
};

// INVALID_ARGUMENT unless the job can be streamed: the shape suits the layout (CheckLayoutShape),
// 0 <= native_cols <= padded_cols, and rows fall into whole blocks (`aiter-e8m0` of rows % 32 != 0
// is one permutation of all experts together and cannot be streamed an expert at a time).
absl::Status CheckShuffleJob(const ShuffleJob& job);

// Bytes of an output row: padded_cols, rounded up to 8 for the E8M0 layouts, whose additional
// columns hold the layout's fill in every row, pad rows included.
int64_t OutputCols(const ShuffleJob& job);

// Granularity of output: 16 or 32 rows, 1 for row-major.
int64_t BlockRows(const ShuffleJob& job);

// The padded logical row that lands in output row position `out_row`, 0 <= out_row < job.rows.
// Output rows [16k, 16k + 16) hold one run of 16 logical rows, or with RowOrder::kGateUpRows a run
// of 8 from each half; so rows for output [a, b) are two ranges at most.
int64_t LogicalRow(const ShuffleJob& job, int64_t out_row);

class Shuffler {
 public:
  virtual ~Shuffler() = default;

  // Writes output rows [out_begin, out_end) of the expert, contiguous, (out_end - out_begin) *
  // OutputCols bytes, every one of them. out_begin and out_end are multiples of BlockRows. `views`
  // are ordered by first_row and disjoint; logical rows that no view covers are pad rows, 0x00.
  // `out` overlaps no view. Thread safe.
  // INVALID_ARGUMENT for a job, range or view that breaks these rules; on a GPU also
  // RESOURCE_EXHAUSTED (memory) and UNAVAILABLE (device lost), after which `out` is undefined.
  virtual absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views,
                               int64_t out_begin, int64_t out_end, uint8_t* out) = 0;

  // Outputs of later calls may lie in `memory`, which then must stay until another is named, none,
  // or the shuffler ends; no call runs meanwhile. A GPU copies straight into it: one copy less. Not
  // OK where it cannot be used, FAILED_PRECONDITION or as of Shuffle(): calls then do as if none
  // had been named. To name none always succeeds.
  virtual absl::Status UseMemory(absl::Span<uint8_t> /*memory*/) { return absl::OkStatus(); }

  // For logs and metrics: "cpu/avx2", "hip:0/gfx942".
  virtual std::string name() const = 0;

  // The PCI address of the device, "0000:c1:00.0"; empty for the host and where it is not known.
  virtual std::string pci_address() const { return ""; }

  // Not OK, for good, once the device was lost: the UNAVAILABLE that a call returned. Thread safe.
  virtual absl::Status Health() const { return absl::OkStatus(); }
};

// The way back, for verification, on the host: reads output rows [out_begin, out_end) from `in` and
// writes them to `rows`, padded_cols bytes each, in output order: row k of it is logical row
// LogicalRow(job, out_begin + k). Checks the layout's fill, and that [native_cols, padded_cols) is
// 0x00: DATA_LOSS names the row, column, expected and found. INVALID_ARGUMENT as Shuffle.
absl::Status Unshuffle(const ShuffleJob& job, int64_t out_begin, int64_t out_end, const uint8_t* in,
                       uint8_t* rows);

// Instruction sets of the host path, in rising order of preference.
enum class HostIsa : uint8_t { kScalar, kSse2, kAvx2, kAvx512 };

// Those that this CPU has, best last; never empty.
std::vector<HostIsa> SupportedHostIsas();
HostIsa BestHostIsa();

// `isa` must be supported.
std::unique_ptr<Shuffler> MakeHostShuffler(HostIsa isa = BestHostIsa());

}  // namespace shardprep
