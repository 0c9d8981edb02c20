// A call is cut into chunks of whole row blocks. Per chunk the host copies the source rows, in
// output order, into a staging buffer (the copy to pinned memory is needed anyway and does the row
// order for free), and the device does the tiles. Two slots alternate: while one transfers and
// runs, the host gathers the next chunk or copies the previous result out.
#include "kernels/hip/lane_shuffler.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/extents.h"
#include "kernels/layout.h"
#include "kernels/row_gather.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// Large enough to hide launch latency, small beside the pinned memory of a host.
constexpr int64_t kChunkBytes = int64_t{8} << 20;

class LaneShuffler final : public Shuffler {
 public:
  explicit LaneShuffler(std::unique_ptr<LaneDevice> device) : device_(std::move(device)) {}

  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                       int64_t out_end, uint8_t* out) override {
    SP_RETURN_IF_ERROR(CheckShuffleCall(job, views, out_begin, out_end));
    if (TileOf(job.layout) == TileKind::kRow) {
      return row_major_->Shuffle(job, views, out_begin, out_end, out);
    }
    absl::MutexLock lock(&mutex_);
    const absl::Status status = RunChunks(job, views, out_begin, out_end, out);
    // After an error a slot may still be busy; its buffers must not be reused or freed under it.
    for (int slot = 0; slot < LaneDevice::kSlots; ++slot) device_->Wait(slot).IgnoreError();
    return status;
  }

  std::string name() const override {
    absl::MutexLock lock(&mutex_);
    return device_->name();
  }

 private:
  absl::Status RunChunks(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                         int64_t out_end, uint8_t* out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    LaneArgs args = ArgsOf(job);
    const int64_t row_bytes = std::max(args.src_pitch, args.out_cols);
    const int64_t block_rows = BlockRows(job);
    const int64_t chunk_rows =
        std::max<int64_t>(kChunkBytes / (row_bytes * block_rows), 1) * block_rows;
    const int64_t largest = std::min(chunk_rows, out_end - out_begin);
    SP_RETURN_IF_ERROR(device_->Prepare(largest * args.src_pitch, largest * args.out_cols));
    int64_t pending_bytes[LaneDevice::kSlots] = {};
    uint8_t* pending_out[LaneDevice::kSlots] = {};
    int slot = 0;
    for (int64_t row = out_begin; row < out_end; row += chunk_rows, slot ^= 1) {
      SP_RETURN_IF_ERROR(Collect(slot, pending_out[slot], pending_bytes[slot]));
      args.rows = std::min(chunk_rows, out_end - row);
      Stage(job, views, row, args, device_->StagingIn(slot));
      SP_RETURN_IF_ERROR(device_->Start(slot, args));
      pending_bytes[slot] = args.rows * args.out_cols;
      pending_out[slot] = out;
      out += pending_bytes[slot];
    }
    for (int k = 0; k < LaneDevice::kSlots; ++k, slot ^= 1) {
      SP_RETURN_IF_ERROR(Collect(slot, pending_out[slot], pending_bytes[slot]));
    }
    return absl::OkStatus();
  }

  static LaneArgs ArgsOf(const ShuffleJob& job) {
    LaneArgs args = {};
    args.src_pitch = RoundUpTo(std::max<int64_t>(job.native_cols, 1), kLaneBytes);
    args.native_cols = job.native_cols;
    args.padded_cols = job.padded_cols;
    args.out_cols = OutputCols(job);
    args.tile = TileOf(job.layout);
    args.fill = GetLayoutInfo(job.layout).fill;
    return args;
  }

  static void Stage(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_row,
                    const LaneArgs& args, uint8_t* to) {
    const int block_rows = static_cast<int>(BlockRows(job));
    const size_t bytes = static_cast<size_t>(job.native_cols);
    for (int64_t base = 0; base < args.rows; base += block_rows) {
      const uint8_t* rows[kMaxBlockRows];
      GatherRows(job, views, out_row + base, block_rows, rows);
      for (int row = 0; row < block_rows; ++row, to += args.src_pitch) {
        if (rows[row] == nullptr) {
          std::memset(to, 0, bytes);
        } else {
          std::memcpy(to, rows[row], bytes);
        }
      }
    }
  }

  absl::Status Collect(int slot, uint8_t* out, int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (out == nullptr) return absl::OkStatus();
    SP_RETURN_IF_ERROR(device_->Wait(slot));
    std::memcpy(out, device_->StagingOut(slot), static_cast<size_t>(bytes));
    return absl::OkStatus();
  }

  // A copy has nothing for a device to do.
  const std::unique_ptr<Shuffler> row_major_ = MakeHostShuffler();
  mutable absl::Mutex mutex_;
  const std::unique_ptr<LaneDevice> device_ ABSL_PT_GUARDED_BY(mutex_);
};

// Two blocks of rows, a native, a zero and (where the layout has one) a fill column, and pad rows.
absl::Status SelfCheck(Shuffler& device, LayoutId layout, int64_t native_cols,
                       int64_t padded_cols) {
  const ShuffleJob job{layout, RowOrder::kAsIs, 64, native_cols, padded_cols};
  std::vector<uint8_t> source(static_cast<size_t>(job.rows * native_cols));
  for (size_t k = 0; k < source.size(); ++k) source[k] = static_cast<uint8_t>(k * 167 + k / 256);
  const RowsView view{source.data(), native_cols, 0, job.rows - 16};
  const size_t out_bytes = static_cast<size_t>(job.rows * OutputCols(job));
  std::vector<uint8_t> want(out_bytes, 0xAA);
  std::vector<uint8_t> found(out_bytes, 0x55);
  SP_RETURN_IF_ERROR(MakeHostShuffler(HostIsa::kScalar)
                         ->Shuffle(job, absl::MakeConstSpan(&view, 1), 0, job.rows, want.data()));
  SP_RETURN_IF_ERROR(device.Shuffle(job, absl::MakeConstSpan(&view, 1), 0, job.rows, found.data()));
  const auto differ = std::mismatch(want.begin(), want.end(), found.begin());
  if (differ.first == want.end()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      device.name(), ": layout ", GetLayoutInfo(layout).name, " differs from the host at byte ",
      differ.first - want.begin(), ": 0x", absl::Hex(*differ.second, absl::kZeroPad2), ", want 0x",
      absl::Hex(*differ.first, absl::kZeroPad2)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Shuffler>> MakeLaneShuffler(std::unique_ptr<LaneDevice> device) {
  auto shuffler = std::make_unique<LaneShuffler>(std::move(device));
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiter16x16, 48, 64));
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiterE8m0Expert, 9, 12));
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiterN32K4, 6, 12));
  return std::unique_ptr<Shuffler>(std::move(shuffler));
}

}  // namespace shardprep
