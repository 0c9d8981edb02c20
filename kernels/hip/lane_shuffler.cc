// How a call is shuffled.
//
// 1. It is cut into pieces of whole row blocks, each as large as a slot allows.
// 2. A piece takes a slot. The host copies the source rows, in output order, into the slot's pinned
//    buffer (that copy is needed anyway and does the row order for free), and queues on the slot's
//    stream: copy in, kernel, copy out, straight to where the output belongs if that memory is
//    pinned (UseMemory). The streams of different slots run side by side.
// 3. When no slot is free the call empties the one that it filled first: waits for its stream and,
//    if the output does not lie where it belongs, copies it there. Only a call that holds no slot
//    waits for another call's, so calls never wait for each other in a circle.
// 4. After an error the call waits for its streams before it gives its slots back: nothing copies
//    into a buffer that somebody else fills. A device that was lost is not used again.
#include "kernels/hip/lane_shuffler.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/extents.h"
#include "kernels/layout.h"
#include "kernels/row_gather.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"

namespace shardprep {
namespace {

constexpr int64_t kGrainBytes = int64_t{64} << 10;

// One buffer, on the host or the device.
struct Buffer {
  uint8_t* data = nullptr;
  int64_t bytes = 0;
};

struct Slot {
  GpuStream stream = nullptr;
  Buffer pinned_in, pinned_out, device_in, device_out;
};

// Rows [out_row, out_row + rows) of the output order, one after the other, args.src_pitch apart.
void CopyRows(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_row,
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

class LaneShuffler final : public Shuffler {
 public:
  LaneShuffler(std::shared_ptr<GpuRuntime> runtime, int device, std::string name,
               LaneShufflerOptions options)
      : runtime_(std::move(runtime)), device_(device), name_(std::move(name)), options_(options) {}

  ~LaneShuffler() override {
    runtime_->Select(device_).IgnoreError();
    Unpin();
    for (const std::unique_ptr<Slot>& slot : slots_) {
      FreePinned(slot->pinned_in);
      FreePinned(slot->pinned_out);
      FreeOnDevice(slot->device_in);
      FreeOnDevice(slot->device_out);
      if (slot->stream != nullptr) runtime_->DestroyStream(slot->stream);
    }
  }

  absl::Status Allocate() {
    SP_RETURN_IF_ERROR(Named(runtime_->Select(device_)));
    for (int k = 0; k < options_.slots; ++k) {
      // In the list first, so that what a failure leaves is freed.
      slots_.push_back(std::make_unique<Slot>());
      Slot& slot = *slots_.back();
      const absl::StatusOr<GpuStream> stream = runtime_->MakeStream();
      if (!stream.ok()) return Named(stream.status());
      slot.stream = *stream;
      SP_RETURN_IF_ERROR(Named(Grow(slot, options_.slot_bytes, options_.slot_bytes)));
      absl::MutexLock lock(&mu_);
      free_.push_back(&slot);
    }
    return absl::OkStatus();
  }

  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                       int64_t out_end, uint8_t* out) override {
    SP_RETURN_IF_ERROR(CheckShuffleCall(job, views, out_begin, out_end));
    if (TileOf(job.layout) == TileKind::kRow) {
      return row_major_->Shuffle(job, views, out_begin, out_end, out);
    }
    SP_RETURN_IF_ERROR(Health());
    std::deque<Piece> pieces;
    absl::Status status = Named(RunPieces(job, views, out_begin, out_end, out, pieces));
    for (const Piece& piece : pieces) {
      runtime_->Wait(piece.slot->stream).IgnoreError();
      GiveBack(piece.slot);
    }
    if (absl::IsUnavailable(status)) {
      absl::MutexLock lock(&mu_);
      if (health_.ok()) health_ = status;
    }
    return status;
  }

  absl::Status UseMemory(absl::Span<uint8_t> memory) override {
    const absl::Status selected = Named(runtime_->Select(device_));
    Unpin();  // in any case: the caller may free it now
    if (memory.empty()) return absl::OkStatus();
    SP_RETURN_IF_ERROR(selected);
    SP_RETURN_IF_ERROR(Named(runtime_->Pin(memory.data(), static_cast<int64_t>(memory.size()))));
    pinned_ = memory;
    return absl::OkStatus();
  }

  std::string name() const override { return name_; }

  std::string pci_address() const override {
    return runtime_->PciAddress(device_).value_or(std::string());
  }

  absl::Status Health() const override {
    absl::MutexLock lock(&mu_);
    return health_;
  }

 private:
  // A filled slot, where its output is copied from the device, and where it belongs.
  struct Piece {
    Slot* slot;
    uint8_t* copied_to;
    uint8_t* out;
    int64_t bytes;
  };

  // Leaves in `pieces` those that are still under way when it fails.
  absl::Status RunPieces(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                         int64_t out_end, uint8_t* out, std::deque<Piece>& pieces) {
    SP_RETURN_IF_ERROR(runtime_->Select(device_));
    const LaneArgs args = LaneArgsOf(job);
    const int64_t piece_rows = PieceRows(args);
    for (int64_t row = out_begin; row < out_end; row += piece_rows) {
      const LaneArgs piece_args = WithRows(args, std::min(piece_rows, out_end - row));
      Slot* slot = nullptr;
      while ((slot = TakeFree()) == nullptr && !pieces.empty()) {
        SP_RETURN_IF_ERROR(Finish(pieces));
      }
      if (slot == nullptr) slot = AwaitFree();
      Piece& piece =
          pieces.emplace_back(Piece{slot, out, out, piece_args.rows * piece_args.out_cols});
      SP_RETURN_IF_ERROR(Grow(*slot, piece_args.rows * piece_args.src_pitch, piece.bytes));
      if (!IsPinned(out, piece.bytes)) piece.copied_to = slot->pinned_out.data;
      CopyRows(job, views, row, piece_args, slot->pinned_in.data);
      SP_RETURN_IF_ERROR(Start(*slot, piece_args, piece.copied_to));
      out += piece.bytes;
    }
    while (!pieces.empty()) SP_RETURN_IF_ERROR(Finish(pieces));
    return absl::OkStatus();
  }

  int64_t PieceRows(const LaneArgs& args) const {
    const int64_t block_rows = TileRows(args.tile);
    const int64_t block_bytes = block_rows * std::max(args.src_pitch, args.out_cols);
    const int64_t most = std::min(options_.slot_bytes, kMaxLanes * kLaneBytes);
    return std::max<int64_t>(most / block_bytes, 1) * block_rows;
  }

  absl::Status Start(const Slot& slot, const LaneArgs& host_args, uint8_t* copied_to) {
    LaneArgs args = host_args;
    args.src = slot.device_in.data;
    args.dst = slot.device_out.data;
    SP_RETURN_IF_ERROR(runtime_->CopyIn(slot.device_in.data, slot.pinned_in.data,
                                        args.rows * args.src_pitch, slot.stream));
    SP_RETURN_IF_ERROR(runtime_->Launch(args, slot.stream));
    return runtime_->CopyOut(copied_to, slot.device_out.data, args.rows * args.out_cols,
                             slot.stream);
  }

  // Empties the slot that was filled first and gives it back.
  absl::Status Finish(std::deque<Piece>& pieces) {
    const Piece piece = pieces.front();
    SP_RETURN_IF_ERROR(runtime_->Wait(piece.slot->stream));
    if (piece.copied_to != piece.out) {
      std::memcpy(piece.out, piece.copied_to, static_cast<size_t>(piece.bytes));
    }
    pieces.pop_front();
    GiveBack(piece.slot);
    return absl::OkStatus();
  }

  bool IsPinned(const uint8_t* out, int64_t bytes) const {
    return out >= pinned_.data() && out + bytes <= pinned_.data() + pinned_.size();
  }

  void Unpin() {
    if (!pinned_.empty()) runtime_->Unpin(pinned_.data());
    pinned_ = {};
  }

  Slot* TakeFree() {
    absl::MutexLock lock(&mu_);
    return PopFree();
  }

  Slot* AwaitFree() {
    absl::MutexLock lock(&mu_);
    const auto some = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !free_.empty(); };
    mu_.Await(absl::Condition(&some));
    return PopFree();
  }

  // The one that was given back first; nullptr when there is none.
  Slot* PopFree() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (free_.empty()) return nullptr;
    Slot* slot = free_.front();
    free_.pop_front();
    return slot;
  }

  void GiveBack(Slot* slot) {
    absl::MutexLock lock(&mu_);
    free_.push_back(slot);
  }

  // The slot is idle and the caller's.
  absl::Status Grow(Slot& slot, int64_t in_bytes, int64_t out_bytes) {
    SP_RETURN_IF_ERROR(GrowPinned(slot.pinned_in, in_bytes));
    SP_RETURN_IF_ERROR(GrowPinned(slot.pinned_out, out_bytes));
    SP_RETURN_IF_ERROR(GrowOnDevice(slot.device_in, in_bytes));
    return GrowOnDevice(slot.device_out, out_bytes);
  }

  absl::Status GrowPinned(Buffer& buffer, int64_t bytes) {
    if (bytes <= buffer.bytes) return absl::OkStatus();
    FreePinned(buffer);
    const int64_t size = RoundUpTo(bytes, kGrainBytes);
    SP_ASSIGN_OR_RETURN(buffer.data, runtime_->AllocatePinned(size));
    buffer.bytes = size;
    return absl::OkStatus();
  }

  absl::Status GrowOnDevice(Buffer& buffer, int64_t bytes) {
    if (bytes <= buffer.bytes) return absl::OkStatus();
    FreeOnDevice(buffer);
    const int64_t size = RoundUpTo(bytes, kGrainBytes);
    SP_ASSIGN_OR_RETURN(buffer.data, runtime_->AllocateOnDevice(size));
    buffer.bytes = size;
    return absl::OkStatus();
  }

  void FreePinned(Buffer& buffer) {
    if (buffer.data != nullptr) runtime_->FreePinned(buffer.data);
    buffer = {};
  }

  void FreeOnDevice(Buffer& buffer) {
    if (buffer.data != nullptr) runtime_->FreeOnDevice(buffer.data);
    buffer = {};
  }

  absl::Status Named(const absl::Status& status) const { return Prefixed(name_, status); }

  const std::shared_ptr<GpuRuntime> runtime_;
  const int device_;
  const std::string name_;
  const LaneShufflerOptions options_;
  // A copy has nothing for a device to do.
  const std::unique_ptr<Shuffler> row_major_ = MakeHostShuffler();
  std::vector<std::unique_ptr<Slot>> slots_;
  absl::Span<uint8_t> pinned_;  // the caller's; changes while no call runs
  mutable absl::Mutex mu_;
  std::deque<Slot*> free_ ABSL_GUARDED_BY(mu_);
  absl::Status health_ ABSL_GUARDED_BY(mu_);
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

// "gfx942" of "gfx942:sramecc+:xnack-".
std::string ProcessorOf(const std::string& architecture) {
  return architecture.substr(0, architecture.find(':'));
}

// Asked before anything is launched, because some runtimes end the process when they find no code
// for a device. Generic targets ("gfx9-4-generic") and CUDA's can run on architectures of other
// names; there the self-check decides.
absl::Status CheckArchitecture(const GpuRuntime& runtime, const std::string& name,
                               const std::string& architecture) {
  const std::vector<std::string> compiled = runtime.CompiledArchitectures();
  for (const std::string& target : compiled) {
    if (ProcessorOf(target) == ProcessorOf(architecture) || absl::EndsWith(target, "-generic") ||
        absl::StartsWith(target, "sm_")) {
      return absl::OkStatus();
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat(name, ": architecture ", architecture, ", but kernels were compiled for ",
                   absl::StrJoin(compiled, ", "), " (CMake's SHARDPREP_HIP_ARCHITECTURES)"));
}

}  // namespace

LaneArgs LaneArgsOf(const ShuffleJob& job) {
  LaneArgs args = {};
  args.src_pitch = RoundUpTo(std::max<int64_t>(job.native_cols, 1), kLaneBytes);
  args.native_cols = job.native_cols;
  args.padded_cols = job.padded_cols;
  args.out_cols = OutputCols(job);
  args.tile = TileOf(job.layout);
  args.fill = GetLayoutInfo(job.layout).fill;
  return args;
}

absl::StatusOr<std::unique_ptr<Shuffler>> MakeLaneShuffler(std::shared_ptr<GpuRuntime> runtime,
                                                           int device,
                                                           LaneShufflerOptions options) {
  const std::string id = absl::StrCat(runtime->kind(), ":", device);
  SP_ASSIGN_OR_RETURN(const int count, runtime->DeviceCount());
  if (device < 0 || device >= count) {
    return absl::FailedPreconditionError(absl::StrCat("no device ", id, ", this process sees ",
                                                      count, " ", runtime->kind(), " devices"));
  }
  SP_ASSIGN_OR_RETURN(const std::string architecture, runtime->Architecture(device));
  SP_RETURN_IF_ERROR(CheckArchitecture(*runtime, id, architecture));
  const std::string name = absl::StrCat(id, "/", ProcessorOf(architecture));
  auto shuffler = std::make_unique<LaneShuffler>(std::move(runtime), device, name, options);
  SP_RETURN_IF_ERROR(shuffler->Allocate());
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiter16x16, 48, 64));
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiterE8m0Expert, 9, 12));
  SP_RETURN_IF_ERROR(SelfCheck(*shuffler, LayoutId::kAiterN32K4, 6, 12));
  return std::unique_ptr<Shuffler>(std::move(shuffler));
}

}  // namespace shardprep
