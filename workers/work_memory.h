// Memory that the bytes of shards pass through: made once, used for many leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/types/span.h"

namespace shardprep {

// Starts at a multiple of the size of a huge page and lies in huge pages where the kernel has some
// to give: what lies together in memory goes to a disk in few pieces, which was measured to make
// writing past the page cache a sixth faster. Every page exists from the start, because the first
// touch of fresh memory costs more than copying it.
class WorkMemory {
 public:
  WorkMemory() = default;
  WorkMemory(WorkMemory&& other) noexcept { *this = std::move(other); }
  WorkMemory& operator=(WorkMemory&& other) noexcept {
    memory_ = std::move(other.memory_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  // `size_bytes` is not negative. Crashes where there is no memory.
  explicit WorkMemory(int64_t size_bytes);

  absl::Span<uint8_t> bytes() const { return {memory_.get(), size_}; }

 private:
  struct Freed {
    void operator()(uint8_t* memory) const;
  };
  std::unique_ptr<uint8_t, Freed> memory_;
  size_t size_ = 0;
};

}  // namespace shardprep
