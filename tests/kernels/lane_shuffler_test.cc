#include "kernels/hip/lane_shuffler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/hip/lane_kernel.h"
#include "kernels/layout.h"
#include "tests/kernels/emulated_gpu.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kLineBytes = 128;
constexpr uint32_t kWave = 64;

LaneArgs ArgsFor(TileKind tile, int64_t rows, int64_t cols) {
  LaneArgs args = {};
  args.tile = tile;
  args.src_pitch = (cols + kLaneBytes - 1) / kLaneBytes * kLaneBytes;
  args.native_cols = args.padded_cols = args.out_cols = cols;
  return WithRows(args, rows);
}

LanePlace PlaceOf(const LaneArgs& args, uint32_t lane) {
  switch (args.tile) {
    case TileKind::kRow:
      break;
    case TileKind::k16x16:
      return LanePlaceOf<TileKind::k16x16>(args, lane);
    case TileKind::kE8m0:
      return LanePlaceOf<TileKind::kE8m0>(args, lane);
    case TileKind::kN32K4:
      return LanePlaceOf<TileKind::kN32K4>(args, lane);
  }
  ADD_FAILURE() << "rows are not launched";
  return {};
}

int64_t OutputOffset(const LaneArgs& args, const LanePlace& place) {
  const int64_t tile_bytes = int64_t{TileRows(args.tile)} * TileCols(args.tile);
  return int64_t{place.block} * args.block_lanes * kLaneBytes + place.tile * tile_bytes +
         place.in_tile;
}

TEST(LaneKernel, LanesWriteEachPieceOnce) {
  for (const TileKind tile : {TileKind::k16x16, TileKind::kE8m0, TileKind::kN32K4}) {
    for (const int64_t cols : {8, 32, 96, 128, 160, 192, 256, 416, 3584}) {
      if (cols % TileCols(tile) != 0) continue;
      const LaneArgs args = ArgsFor(tile, 96, cols);
      std::vector<int> written(args.lanes, 0);
      for (uint32_t lane = 0; lane < args.lanes; ++lane) {
        const int64_t offset = OutputOffset(args, PlaceOf(args, lane));
        ASSERT_EQ(offset % kLaneBytes, 0);
        ASSERT_LT(offset, args.rows * args.out_cols);
        ++written[static_cast<size_t>(offset / kLaneBytes)];
      }
      EXPECT_EQ(std::count(written.begin(), written.end(), 1), int64_t{args.lanes})
          << cols << " columns";
    }
  }
}

// What a group of neighbouring lanes touches on either side, in lines and the bytes of each.
void ExpectWholeLines(const LaneArgs& args, uint32_t first_lane, uint32_t lanes) {
  std::map<int64_t, int64_t> read, written;
  for (uint32_t lane = first_lane; lane < first_lane + lanes; ++lane) {
    const LanePlace place = PlaceOf(args, lane);
    const TileAt at = TileSource(args.tile, place.in_tile);
    const int64_t from = (int64_t{place.block} * TileRows(args.tile) + at.row) * args.src_pitch +
                         int64_t{place.tile} * TileCols(args.tile) + at.col;
    read[from / kLineBytes] += kLaneBytes;
    written[OutputOffset(args, place) / kLineBytes] += kLaneBytes;
  }
  for (const auto& lines : {read, written}) {
    EXPECT_EQ(static_cast<int64_t>(lines.size()), lanes * kLaneBytes / kLineBytes);
    for (const auto& [line, bytes] : lines) EXPECT_EQ(bytes, kLineBytes) << "line " << line;
  }
}

TEST(LaneKernel, AWaveOfWeightsReadsAndWritesWholeLines) {
  for (const int64_t cols : {128, 256, 3584}) {
    const LaneArgs args = ArgsFor(TileKind::k16x16, 64, cols);
    for (uint32_t lane = 0; lane < args.lanes; lane += kWave) ExpectWholeLines(args, lane, kWave);
  }
}

// A job of many pieces, its source, and what the host makes of it.
class LaneShufflerTest : public ::testing::Test {
 protected:
  LaneShufflerTest() {
    source_.resize(static_cast<size_t>(job_.rows * job_.native_cols));
    for (int64_t row = 0; row < job_.rows; ++row) {
      for (int64_t col = 0; col < job_.native_cols; ++col) {
        source_[static_cast<size_t>(row * job_.native_cols + col)] =
            static_cast<uint8_t>(row * 31 + col * 7 + row * col / 97);
      }
    }
    want_ = Run(*MakeHostShuffler()).value();
  }

  absl::StatusOr<std::vector<uint8_t>> Run(Shuffler& shuffler) const {
    std::vector<uint8_t> out(static_cast<size_t>(job_.rows * OutputCols(job_)));
    absl::Status status = RunInto(shuffler, out);
    if (!status.ok()) return status;
    return out;
  }

  absl::Status RunInto(Shuffler& shuffler, std::vector<uint8_t>& out) const {
    std::fill(out.begin(), out.end(), 0xAA);
    const RowsView view{source_.data(), job_.native_cols, 0, job_.rows};
    return shuffler.Shuffle(job_, absl::MakeConstSpan(&view, 1), 0, job_.rows, out.data());
  }

  // 16 pieces in slots of one block of 32 rows.
  const ShuffleJob job_{LayoutId::kAiter16x16, RowOrder::kAsIs, 512, 496, 512};
  const LaneShufflerOptions small_{.slots = 3, .slot_bytes = int64_t{32} * 512};
  std::vector<uint8_t> source_;
  std::vector<uint8_t> want_;
};

TEST_F(LaneShufflerTest, EverySlotIsUnderWayBeforeOneIsWaitedFor) {
  for (const bool eager : {false, true}) {
    const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.eager = eager});
    const auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
    const size_t before = gpu->Log().size();
    EXPECT_EQ(Run(*shuffler).value(), want_);
    EXPECT_EQ(gpu->MostBusyStreams(), small_.slots);
    std::vector<std::string> log = gpu->Log();
    log.erase(log.begin(), log.begin() + static_cast<int64_t>(before));
    const auto first_wait = std::find_if(log.begin(), log.end(), [](const std::string& call) {
      return absl::StartsWith(call, "wait");
    });
    EXPECT_EQ(
        std::count_if(log.begin(), first_wait,
                      [](const std::string& call) { return absl::StartsWith(call, "copy-out"); }),
        small_.slots);
    EXPECT_THAT(gpu->Problems(), IsEmpty());
  }
}

TEST_F(LaneShufflerTest, APieceIsCopiedInLaunchedCopiedOutOnOneStreamAndThenWaitedFor) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  const auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  const size_t before = gpu->Log().size();
  ASSERT_TRUE(Run(*shuffler).ok());
  const std::vector<std::string> log = gpu->Log();
  int64_t pieces = 0;
  for (int stream = 0; stream < small_.slots; ++stream) {
    std::vector<std::string> calls;
    for (size_t k = before; k < log.size(); ++k) {
      if (absl::EndsWith(log[k], absl::StrCat(" ", stream))) calls.push_back(log[k]);
    }
    for (size_t k = 0; k + 3 < calls.size(); k += 4, ++pieces) {
      EXPECT_THAT(std::vector<std::string>(calls.begin() + static_cast<int64_t>(k),
                                           calls.begin() + static_cast<int64_t>(k) + 4),
                  ElementsAre(absl::StrCat("copy-in ", stream), absl::StrCat("launch ", stream),
                              absl::StrCat("copy-out ", stream), absl::StrCat("wait ", stream)));
    }
    EXPECT_EQ(calls.size() % 4, 0U);
  }
  EXPECT_EQ(pieces, 16);
}

TEST_F(LaneShufflerTest, MemoryIsAllocatedOnceAndBounded) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  auto shuffler = MakeLaneShuffler(gpu, 0, {.slots = 3, .slot_bytes = int64_t{64} << 10}).value();
  const int64_t bound = int64_t{3} * 2 * (int64_t{64} << 10);
  EXPECT_EQ(gpu->AllocatedBytes(), 2 * bound);
  for (int k = 0; k < 3; ++k) EXPECT_EQ(Run(*shuffler).value(), want_);
  EXPECT_EQ(gpu->MostPinnedBytes(), bound);
  EXPECT_EQ(gpu->MostDeviceBytes(), bound);
  const std::vector<std::string> log = gpu->Log();
  EXPECT_EQ(std::count(log.begin(), log.end(), "allocate-pinned"), 6);
  EXPECT_EQ(std::count(log.begin(), log.end(), "allocate-device"), 6);
  shuffler.reset();
  EXPECT_EQ(gpu->AllocatedBytes(), 0);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, OutputInUsedMemoryIsCopiedStraightToItsPlace) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  const int64_t slots_only = gpu->AllocatedBytes();
  std::vector<uint8_t> out(want_.size());
  const auto run = [&] {
    const int64_t before = gpu->BytesToCallers();
    EXPECT_TRUE(RunInto(*shuffler, out).ok());
    EXPECT_TRUE(out == want_);
    return gpu->BytesToCallers() - before;
  };
  EXPECT_EQ(run(), 0);
  ASSERT_TRUE(shuffler->UseMemory(absl::MakeSpan(out)).ok());
  EXPECT_EQ(run(), static_cast<int64_t>(out.size()));
  // A piece of 32 rows of 512 bytes that is not wholly inside is none that is.
  ASSERT_TRUE(shuffler->UseMemory(absl::MakeSpan(out).subspan(1, size_t{3} * 32 * 512)).ok());
  EXPECT_EQ(run(), int64_t{2} * 32 * 512);
  ASSERT_TRUE(shuffler->UseMemory({}).ok());
  EXPECT_EQ(run(), 0);
  EXPECT_EQ(gpu->AllocatedBytes(), slots_only);
  ASSERT_TRUE(shuffler->UseMemory(absl::MakeSpan(out)).ok());
  shuffler.reset();
  EXPECT_EQ(gpu->AllocatedBytes(), 0);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, MemoryThatCannotBePinnedIsNotUsed) {
  const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.pinned_bytes = 1 << 20});
  const auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  std::vector<uint8_t> large(size_t{2} << 20);
  const absl::Status status = shuffler->UseMemory(absl::MakeSpan(large));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("hip:0/gfx942: "));
  EXPECT_EQ(Run(*shuffler).value(), want_);
  EXPECT_EQ(gpu->BytesToCallers(), 0);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, MemoryThatIsPinnedAlreadyIsNotUsedAndStaysPinned) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  const auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  std::vector<uint8_t> memory(4096);
  ASSERT_TRUE(gpu->Pin(memory.data(), 4096).ok());
  const absl::Status status = shuffler->UseMemory(absl::MakeSpan(memory));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(shuffler->Health().ok());
  EXPECT_EQ(Run(*shuffler).value(), want_);
  gpu->Unpin(memory.data());
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, ARowBlockLargerThanASlotGrowsThatSlot) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  const auto shuffler = MakeLaneShuffler(gpu, 0, {.slots = 2, .slot_bytes = 4096}).value();
  const ShuffleJob wide{LayoutId::kAiterN32K4, RowOrder::kAsIs, 32, 8192, 8192};
  std::vector<uint8_t> source(size_t{32} * 8192);
  for (size_t k = 0; k < source.size(); ++k) source[k] = static_cast<uint8_t>(k * 7 + k / 8192);
  const RowsView view{source.data(), 8192, 0, 32};
  std::vector<uint8_t> want(source.size()), found(source.size());
  ASSERT_TRUE(
      MakeHostShuffler()->Shuffle(wide, absl::MakeConstSpan(&view, 1), 0, 32, want.data()).ok());
  ASSERT_TRUE(shuffler->Shuffle(wide, absl::MakeConstSpan(&view, 1), 0, 32, found.data()).ok());
  EXPECT_EQ(found, want);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, CallsOfTwoThreadsAreUnderWayTogether) {
  // Each thread's wait returns only when the other waits too.
  std::barrier both(2);
  bool meet = false;
  const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.on_wait = [&] {
    if (meet) both.arrive_and_wait();
  }});
  const auto shuffler = MakeLaneShuffler(gpu, 0, {.slots = 2, .slot_bytes = 1 << 20}).value();
  meet = true;
  std::thread other([&] { EXPECT_EQ(Run(*shuffler).value(), want_); });
  EXPECT_EQ(Run(*shuffler).value(), want_);
  other.join();
  EXPECT_EQ(gpu->MostBusyStreams(), 2);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, MoreThreadsThanSlotsAllFinish) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  const auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  const auto run = [&] {
    for (int call = 0; call < 4; ++call) EXPECT_EQ(Run(*shuffler).value(), want_);
  };
  std::vector<std::thread> threads(8);
  for (std::thread& thread : threads) thread = std::thread(run);
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST_F(LaneShufflerTest, EveryFailingCallIsReportedAndLeavesNothingInUse) {
  std::vector<uint8_t> out(want_.size());
  for (const bool straight : {false, true}) {
    const auto attempt = [&](Shuffler& shuffler) {
      const absl::Status used =
          straight ? shuffler.UseMemory(absl::MakeSpan(out)) : absl::OkStatus();
      return used.ok() ? RunInto(shuffler, out) : used;
    };
    const auto whole = std::make_shared<EmulatedGpu>();
    const int64_t opening = [&] {
      const auto shuffler = MakeLaneShuffler(whole, 0, small_).value();
      const int64_t calls = whole->calls();
      EXPECT_TRUE(attempt(*shuffler).ok());
      return calls;
    }();
    EXPECT_EQ(whole->BytesToCallers(), straight ? static_cast<int64_t>(out.size()) : 0);
    const int64_t all = whole->calls() - 1;  // the last selects the device for freeing
    ASSERT_GT(all, opening + int64_t{16} * 4);
    for (int64_t call = 0; call < all; ++call) {
      SCOPED_TRACE(absl::StrCat("call ", call, straight ? ", straight" : ""));
      const auto gpu = std::make_shared<EmulatedGpu>();
      gpu->FailCall(call, absl::ResourceExhaustedError("made to fail"));
      auto shuffler = MakeLaneShuffler(gpu, 0, small_);
      const absl::Status status = shuffler.ok() ? attempt(**shuffler) : shuffler.status();
      EXPECT_EQ(shuffler.ok(), call >= opening);
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(status.message()), HasSubstr("made to fail"));
      if (shuffler.ok()) {
        EXPECT_TRUE((*shuffler)->Health().ok());
        // Memory in use that is unpinned is a problem.
        EXPECT_TRUE((*shuffler)->UseMemory({}).ok());
        EXPECT_EQ(Run(**shuffler).value(), want_) << "the next call works";
        shuffler->reset();
      }
      EXPECT_EQ(gpu->AllocatedBytes(), 0);
      EXPECT_THAT(gpu->Problems(), IsEmpty());
    }
  }
}

TEST_F(LaneShufflerTest, ALostDeviceIsUnavailableAndNotUsedAgain) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  auto shuffler = MakeLaneShuffler(gpu, 0, small_).value();
  gpu->FailCall(gpu->calls() + 20, absl::UnavailableError("fell off the bus"), /*lost=*/true);
  const absl::Status lost = Run(*shuffler).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(lost.message(), "hip:0/gfx942: fell off the bus");
  EXPECT_EQ(shuffler->Health(), lost);
  const int64_t calls = gpu->calls();
  EXPECT_EQ(Run(*shuffler).status(), lost);
  EXPECT_EQ(gpu->calls(), calls);
  shuffler.reset();
  EXPECT_EQ(gpu->AllocatedBytes(), 0);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST(LaneShuffler, TooLittleMemoryOfEitherKindIsResourceExhausted) {
  for (const bool pinned : {true, false}) {
    EmulatedGpuOptions options;
    (pinned ? options.pinned_bytes : options.device_bytes) = int64_t{20} << 20;
    const auto gpu = std::make_shared<EmulatedGpu>(options);
    const absl::Status status = MakeLaneShuffler(gpu, 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr(pinned ? "pinned" : "device"));
    EXPECT_EQ(gpu->AllocatedBytes(), 0);
    EXPECT_THAT(gpu->Problems(), IsEmpty());
  }
}

TEST(LaneShuffler, AnArchitectureThatWasNotCompiledForIsRefusedBeforeItIsUsed) {
  const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.architecture = "gfx1100"});
  const absl::Status status = MakeLaneShuffler(gpu, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("hip:0: architecture gfx1100, but kernels were compiled for gfx90a, gfx942"));
  EXPECT_THAT(gpu->Log(), ElementsAre("device-count", "architecture"));
  EXPECT_TRUE(MakeLaneShuffler(std::make_shared<EmulatedGpu>(EmulatedGpuOptions{
                                   .architecture = "gfx950", .compiled = {"gfx9-4-generic"}}),
                               0)
                  .ok())
      << "a generic target may run on it";
}

TEST(LaneShuffler, EachDeviceOfAMachineCanBeOpenedAndNoOther) {
  const auto gpu = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.devices = 2});
  const auto second = MakeLaneShuffler(gpu, 1).value();
  EXPECT_EQ(second->name(), "hip:1/gfx942");
  EXPECT_EQ(second->pci_address(), "0000:01:00.0");
  gpu->FailCall(gpu->calls(), absl::UnavailableError("not told"));
  EXPECT_EQ(second->pci_address(), "");
  for (const int device : {-1, 2}) {
    const absl::Status status = MakeLaneShuffler(gpu, device).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("this process sees 2"));
  }
  const auto none = std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.devices = 0});
  EXPECT_EQ(MakeLaneShuffler(none, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(gpu->Problems(), IsEmpty());
}

TEST(LaneShuffler, ADeviceThatDiffersFromTheHostIsRefused) {
  const absl::Status status =
      MakeLaneShuffler(std::make_shared<EmulatedGpu>(EmulatedGpuOptions{.corrupt = true}), 0)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("differs from the host"));
}

TEST(GpuStatus, ErrorsOfTheHipRuntimeSayWhatToDo) {
  const absl::StatusOr<std::unique_ptr<GpuRuntime>> runtime = MakeGpuRuntime();
  // The codes are the HIP runtime's own, so a build without HIP has none to translate.
  if (!runtime.ok()) GTEST_SKIP() << runtime.status();
  const struct {
    int code;  // hipError_t
    absl::StatusCode want;
  } cases[] = {
      {1, absl::StatusCode::kInternal},              // InvalidValue
      {2, absl::StatusCode::kResourceExhausted},     // OutOfMemory
      {98, absl::StatusCode::kFailedPrecondition},   // InvalidDeviceFunction
      {100, absl::StatusCode::kFailedPrecondition},  // NoDevice
      {101, absl::StatusCode::kFailedPrecondition},  // InvalidDevice
      {209, absl::StatusCode::kFailedPrecondition},  // NoBinaryForGpu
      {214, absl::StatusCode::kUnavailable},         // ECCNotCorrectable
      {700, absl::StatusCode::kUnavailable},         // IllegalAddress
      {719, absl::StatusCode::kUnavailable},         // LaunchFailure
      {999, absl::StatusCode::kUnavailable},         // Unknown
  };
  for (const auto& one : cases) {
    const absl::Status status = GpuStatus(one.code, "copy to device");
    EXPECT_EQ(status.code(), one.want) << one.code;
    EXPECT_THAT(std::string(status.message()), HasSubstr("copy to device: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("error ", one.code, ")")));
  }
  EXPECT_THAT(std::string(GpuStatus(209, "launch").message()), HasSubstr("gfx942"));
}

}  // namespace
}  // namespace shardprep
