// One rank's output of a region: the part being written, its digest and its record.
//
// Output comes in its final order: Reserve() room in the write buffer, fill it, Advance(). Source
// bytes are told with CountNative(), while they are in cache.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardprep/v1/manifest.pb.h"
#include "workers/digest.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/region_progress.h"

namespace shardprep {

// Whose parts a stream writes, and where; what is pointed to must outlive it.
struct StreamPlace {
  const JobPlan* plan = nullptr;
  int32_t region = 0;
  int32_t rank = 0;  // may be kReplicatedRank
  ObjectStore* destination = nullptr;
  const CommitGate* gate = nullptr;  // the fence: asked before each publish step; may be empty
};

// For one thread at a time.
class RankStream {
 public:
  // `buffer` is the write buffer: MemoryNeed::WriteBuffer(writes_at_once) bytes.
  RankStream(const StreamPlace& place, RegionProgress& progress, absl::Span<uint8_t> buffer,
             int32_t writes_at_once)
      : place_(place), progress_(progress), buffer_(buffer), writes_at_once_(writes_at_once) {}

  int32_t rank() const { return place_.rank; }
  const SlicePlan& slices() const { return place_.plan->slices; }

  absl::Status BeginPart(const PartPlan& part);

  // At least `size` writable bytes for the next output.
  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size);
  // The first bytes of the last reservation are output.
  absl::Status Advance(absl::Span<const uint8_t> bytes);
  absl::Status AppendFill(int64_t size, uint8_t fill);

  // Source bytes of the tensor in progress, in the order of one slice of one expert.
  void CountNative(int slice, const uint8_t* data, int64_t stride, int64_t rows, int64_t row_bytes);
  // The native CRC runs over expert, gate/up, row, column, whatever the order of output.
  void EndExpert();
  void EndTensor();

  // Gives the part its name and records it. FAILED_PRECONDITION, and the part is not published,
  // once the destination has a manifest; ABORTED when the fence refuses; DATA_LOSS when it does not
  // read back. A part whose record cannot be written is removed.
  absl::Status EndPart();

 private:
  absl::Status MayPublish();
  absl::Status VerifyAndRecord();
  void Withdraw();
  absl::Status Append(const std::string& bytes);
  absl::Status ReadBack(const v1::FileRecord& file);
  absl::Status AskGate() const { return *place_.gate ? (*place_.gate)() : absl::OkStatus(); }

  const StreamPlace place_;
  RegionProgress& progress_;
  const absl::Span<uint8_t> buffer_;
  const int32_t writes_at_once_;
  std::unique_ptr<ObjectWriter> writer_;
  ChunkedDigest digest_;
  v1::PartRecord record_;
  int next_tensor_ = 0;
  std::array<uint32_t, 2> slice_crc_{};
  std::array<int64_t, 2> slice_bytes_{};
  uint32_t native_crc_ = 0;
  int64_t native_bytes_ = 0;
};

}  // namespace shardprep
