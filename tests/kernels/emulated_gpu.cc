#include "tests/kernels/emulated_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

EmulatedGpu::~EmulatedGpu() {
  absl::MutexLock lock(&mu_);
  for (Pool* pool : {&pinned_, &device_}) {
    for (const auto& [memory, bytes] : pool->blocks) {
      if (!callers_.contains(memory)) std::free(const_cast<uint8_t*>(memory));
    }
  }
}

void EmulatedGpu::FailCall(int64_t number, absl::Status status, bool lost) {
  absl::MutexLock lock(&mu_);
  failing_call_ = number;
  failure_ = std::move(status);
  lost_ = lost;
}

int64_t EmulatedGpu::calls() const {
  absl::MutexLock lock(&mu_);
  return calls_;
}

std::vector<std::string> EmulatedGpu::Log() const {
  absl::MutexLock lock(&mu_);
  return log_;
}

int EmulatedGpu::MostBusyStreams() const {
  absl::MutexLock lock(&mu_);
  return most_busy_;
}

int64_t EmulatedGpu::MostPinnedBytes() const {
  absl::MutexLock lock(&mu_);
  return pinned_.most;
}

int64_t EmulatedGpu::MostDeviceBytes() const {
  absl::MutexLock lock(&mu_);
  return device_.most;
}

int64_t EmulatedGpu::AllocatedBytes() const {
  absl::MutexLock lock(&mu_);
  return pinned_.bytes + device_.bytes;
}

int64_t EmulatedGpu::BytesToCallers() const {
  absl::MutexLock lock(&mu_);
  return bytes_to_callers_;
}

std::vector<std::string> EmulatedGpu::Problems() const {
  absl::MutexLock lock(&mu_);
  return problems_;
}

absl::Status EmulatedGpu::Count(const std::string& name) {
  const int64_t number = calls_++;
  log_.push_back(name);
  if (number == failing_call_ || (lost_ && failing_call_ >= 0 && number > failing_call_)) {
    return failure_;
  }
  return absl::OkStatus();
}

void EmulatedGpu::CheckSelected(const char* call) {
  if (selected_.count(std::this_thread::get_id()) != 0) return;
  problems_.push_back(absl::StrCat(call, ": this thread has selected no device"));
}

const uint8_t* EmulatedGpu::CheckInside(const Pool& pool, const uint8_t* begin, int64_t bytes) {
  auto block = pool.blocks.upper_bound(begin);
  if (block != pool.blocks.begin()) {
    --block;
    if (begin + bytes <= block->first + block->second) return block->first;
  }
  problems_.push_back(absl::StrCat(bytes, " bytes that are not ", pool.name, " memory"));
  return nullptr;
}

absl::StatusOr<int> EmulatedGpu::DeviceCount() {
  absl::MutexLock lock(&mu_);
  SP_RETURN_IF_ERROR(Count("device-count"));
  if (options_.devices == 0) return absl::FailedPreconditionError("emulated: no device");
  return options_.devices;
}

absl::StatusOr<std::string> EmulatedGpu::Architecture(int device) {
  absl::MutexLock lock(&mu_);
  SP_RETURN_IF_ERROR(Count("architecture"));
  if (device < 0 || device >= options_.devices) problems_.emplace_back("no such device");
  return options_.architecture;
}

absl::StatusOr<std::string> EmulatedGpu::PciAddress(int device) {
  absl::MutexLock lock(&mu_);
  SP_RETURN_IF_ERROR(Count("pci-address"));
  return absl::StrCat("0000:0", device, ":00.0");
}

absl::Status EmulatedGpu::Select(int device) {
  absl::MutexLock lock(&mu_);
  SP_RETURN_IF_ERROR(Count("select"));
  selected_[std::this_thread::get_id()] = device;
  return absl::OkStatus();
}

absl::StatusOr<GpuStream> EmulatedGpu::MakeStream() {
  absl::MutexLock lock(&mu_);
  CheckSelected("make-stream");
  SP_RETURN_IF_ERROR(Count("make-stream"));
  auto made = std::make_unique<Stream>();
  made->number = streams_made_++;
  GpuStream stream = made.get();
  streams_[stream] = std::move(made);
  return stream;
}

void EmulatedGpu::DestroyStream(GpuStream stream) {
  absl::MutexLock lock(&mu_);
  CheckSelected("destroy-stream");
  const auto found = streams_.find(stream);
  if (found == streams_.end() || !found->second->queue.empty()) {
    problems_.emplace_back("destroyed a stream that does not exist or is busy");
  }
  streams_.erase(stream);
}

absl::StatusOr<uint8_t*> EmulatedGpu::Allocate(Pool& pool, int64_t limit, int64_t bytes) {
  CheckSelected("allocate");
  SP_RETURN_IF_ERROR(Count(absl::StrCat("allocate-", pool.name)));
  if (pool.bytes + bytes > limit) {
    return absl::ResourceExhaustedError(absl::StrCat("emulated: no ", pool.name, " memory"));
  }
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, size));
  std::memset(memory, 0xEE, size);
  pool.blocks[memory] = bytes;
  pool.bytes += bytes;
  pool.most = std::max(pool.most, pool.bytes);
  return memory;
}

void EmulatedGpu::Free(Pool& pool, uint8_t* memory) {
  if (Forget(pool, memory)) std::free(memory);
}

bool EmulatedGpu::Forget(Pool& pool, uint8_t* memory) {
  CheckSelected("free");
  const auto block = pool.blocks.find(memory);
  if (block == pool.blocks.end()) {
    problems_.push_back(absl::StrCat("freed what is not ", pool.name, " memory"));
    return false;
  }
  for (const auto& [id, stream] : streams_) {
    for (const Work& work : stream->queue) {
      for (const uint8_t* used : work.memory) {
        if (used < memory || used >= memory + block->second) continue;
        problems_.push_back(absl::StrCat("freed ", pool.name, " memory that is in use"));
      }
    }
  }
  pool.bytes -= block->second;
  pool.blocks.erase(block);
  return true;
}

absl::StatusOr<uint8_t*> EmulatedGpu::AllocatePinned(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  return Allocate(pinned_, options_.pinned_bytes, bytes);
}

void EmulatedGpu::FreePinned(uint8_t* memory) {
  absl::MutexLock lock(&mu_);
  Free(pinned_, memory);
}

absl::Status EmulatedGpu::Pin(uint8_t* memory, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  CheckSelected("pin");
  SP_RETURN_IF_ERROR(Count("pin"));
  if (callers_.contains(memory)) return absl::FailedPreconditionError("emulated: pinned already");
  if (pinned_.bytes + bytes > options_.pinned_bytes) {
    return absl::ResourceExhaustedError("emulated: no pinned memory");
  }
  pinned_.blocks[memory] = bytes;
  pinned_.bytes += bytes;
  pinned_.most = std::max(pinned_.most, pinned_.bytes);
  callers_.insert(memory);
  return absl::OkStatus();
}

void EmulatedGpu::Unpin(uint8_t* memory) {
  absl::MutexLock lock(&mu_);
  if (callers_.erase(memory) == 0) problems_.emplace_back("unpinned what was not pinned");
  Forget(pinned_, memory);
}

absl::StatusOr<uint8_t*> EmulatedGpu::AllocateOnDevice(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  return Allocate(device_, options_.device_bytes, bytes);
}

void EmulatedGpu::FreeOnDevice(uint8_t* memory) {
  absl::MutexLock lock(&mu_);
  Free(device_, memory);
}

absl::Status EmulatedGpu::Queue(const char* name, GpuStream stream, Work work) {
  CheckSelected(name);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    problems_.push_back(absl::StrCat(name, ": no such stream"));
    return absl::InternalError("no such stream");
  }
  SP_RETURN_IF_ERROR(Count(absl::StrCat(name, " ", found->second->number)));
  if (options_.eager) {
    work.run();
    work.run = [] {};
  }
  found->second->queue.push_back(std::move(work));
  int busy = 0;
  for (const auto& [id, other] : streams_) busy += other->queue.empty() ? 0 : 1;
  most_busy_ = std::max(most_busy_, busy);
  return absl::OkStatus();
}

absl::Status EmulatedGpu::CopyIn(uint8_t* device, const uint8_t* pinned, int64_t bytes,
                                 GpuStream stream) {
  absl::MutexLock lock(&mu_);
  CheckInside(device_, device, bytes);
  CheckInside(pinned_, pinned, bytes);
  return Queue(
      "copy-in", stream,
      {[=] { std::memcpy(device, pinned, static_cast<size_t>(bytes)); }, {device, pinned}});
}

absl::Status EmulatedGpu::CopyOut(uint8_t* pinned, const uint8_t* device, int64_t bytes,
                                  GpuStream stream) {
  absl::MutexLock lock(&mu_);
  CheckInside(device_, device, bytes);
  if (callers_.contains(CheckInside(pinned_, pinned, bytes))) bytes_to_callers_ += bytes;
  return Queue(
      "copy-out", stream,
      {[=] { std::memcpy(pinned, device, static_cast<size_t>(bytes)); }, {device, pinned}});
}

absl::Status EmulatedGpu::CopyOnDevice(uint8_t* to, const uint8_t* from, int64_t bytes,
                                       GpuStream stream) {
  absl::MutexLock lock(&mu_);
  CheckInside(device_, to, bytes);
  CheckInside(device_, from, bytes);
  return Queue("copy-on-device", stream,
               {[=] { std::memcpy(to, from, static_cast<size_t>(bytes)); }, {to, from}});
}

absl::Status EmulatedGpu::Launch(const LaneArgs& args, GpuStream stream) {
  absl::MutexLock lock(&mu_);
  CheckInside(device_, args.src, args.rows * args.src_pitch);
  CheckInside(device_, args.dst, args.rows * args.out_cols);
  const auto run = [args, corrupt = options_.corrupt] {
    // Backwards: lanes run in any order.
    for (uint32_t lane = args.lanes; lane-- > 0;) ShuffleLaneOf(args, lane);
    if (corrupt) args.dst[args.lanes * kLaneBytes - 1] ^= 1;
  };
  return Queue("launch", stream, {run, {args.src, args.dst}});
}

absl::Status EmulatedGpu::Wait(GpuStream stream) {
  if (options_.on_wait) options_.on_wait();
  std::vector<Work> queue;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    CheckSelected("wait");
    const auto found = streams_.find(stream);
    if (found == streams_.end()) {
      problems_.emplace_back("wait: no such stream");
      return absl::InternalError("no such stream");
    }
    status = Count(absl::StrCat("wait ", found->second->number));
    queue.swap(found->second->queue);
  }
  // A wait that fails waits all the same, but the results are not there.
  if (status.ok()) {
    for (const Work& work : queue) work.run();
  }
  return status;
}

}  // namespace shardprep
