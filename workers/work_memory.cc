#include "workers/work_memory.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>

#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// Of x86-64, and of arm64 with pages of 4 KiB.
constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kPageBytes = 4096;

}  // namespace

WorkMemory::WorkMemory(int64_t size_bytes) : size_(static_cast<size_t>(size_bytes)) {
  SP_CHECK(size_bytes >= 0);
  if (size_ == 0) return;
  void* memory = nullptr;
  SP_CHECK(::posix_memalign(&memory, kHugePageBytes, size_) == 0);
  memory_.reset(static_cast<uint8_t*>(memory));
  // A wish: kernels without huge pages do not know it.
  ::madvise(memory, size_ / kPageBytes * kPageBytes, MADV_HUGEPAGE);
  for (size_t at = 0; at < size_; at += kPageBytes) memory_.get()[at] = 0;
}

void WorkMemory::Freed::operator()(uint8_t* memory) const { std::free(memory); }

}  // namespace shardprep
