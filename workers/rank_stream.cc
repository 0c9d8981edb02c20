#include "workers/rank_stream.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/object_names.h"

namespace shardprep {

absl::Status RankStream::BeginPart(const PartPlan& part) {
  SP_ASSIGN_OR_RETURN(const std::string header, PartHeader(*place_.plan, part, place_.rank));
  SP_ASSIGN_OR_RETURN(record_, PlannedRecord(*place_.plan, {place_.region, place_.rank, &part}));
  const v1::FileRecord& file = record_.file();
  WriteOptions options;
  options.size_bytes = file.size_bytes();
  options.sha256_of = [this](int64_t begin, int64_t end) { return digest_.ChunkHex(begin, end); };
  options.writes_at_once = writes_at_once_;
  options.buffer = buffer_;
  SP_ASSIGN_OR_RETURN(writer_, place_.destination->Create(file.key(), options));
  next_tensor_ = 0;
  return Append(header);
}

absl::StatusOr<absl::Span<uint8_t>> RankStream::Reserve(int64_t size) {
  StageTimer timer(progress_, Stage::kWrite);
  return writer_->Reserve(size);
}

absl::Status RankStream::Advance(absl::Span<const uint8_t> bytes) {
  {
    StageTimer timer(progress_, Stage::kDigest);
    digest_.Update(bytes);
  }
  progress_.bytes_written += static_cast<int64_t>(bytes.size());
  StageTimer timer(progress_, Stage::kWrite);
  return writer_->Advance(static_cast<int64_t>(bytes.size()));
}

absl::Status RankStream::AppendFill(int64_t size, uint8_t fill) {
  while (size > 0) {
    const int64_t piece = std::min(size, kBlockBytes);
    SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, Reserve(piece));
    std::fill_n(out.data(), piece, fill);
    SP_RETURN_IF_ERROR(Advance(out.subspan(0, piece)));
    size -= piece;
  }
  return absl::OkStatus();
}

void RankStream::CountNative(int slice, const uint8_t* data, int64_t stride, int64_t rows,
                             int64_t row_bytes) {
  StageTimer timer(progress_, Stage::kDigest);
  uint32_t& crc = slice_crc_[slice];
  if (stride == row_bytes) {
    crc = Crc32c(crc, absl::MakeConstSpan(data, rows * row_bytes));
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      crc = Crc32c(crc, absl::MakeConstSpan(data + r * stride, row_bytes));
    }
  }
  slice_bytes_[slice] += rows * row_bytes;
}

void RankStream::EndExpert() {
  for (size_t s = 0; s < slice_crc_.size(); ++s) {
    native_crc_ = Crc32cCombine(native_crc_, slice_crc_[s], slice_bytes_[s]);
    native_bytes_ += slice_bytes_[s];
    slice_crc_[s] = 0;
    slice_bytes_[s] = 0;
  }
}

void RankStream::EndTensor() {
  v1::TensorRecord& record = *record_.mutable_file()->mutable_tensors(next_tensor_++);
  record.set_native_crc32c(absl::StrFormat("%08x", native_crc_));
  progress_.bytes_padded += record.size_bytes() - native_bytes_;
  native_crc_ = 0;
  native_bytes_ = 0;
}

absl::Status RankStream::EndPart() {
  SP_ASSIGN_OR_RETURN(const ObjectInfo info, writer_->Commit([this] { return MayPublish(); }));
  record_.set_etag(info.etag);
  writer_.reset();
  const FileDigest digest = digest_.Finish();
  v1::FileRecord& file = *record_.mutable_file();
  for (const Sha256Bytes& chunk : digest.chunk_sha256) file.add_chunk_sha256(HexEncode(chunk));
  file.set_digest(digest.digest);
  const absl::Status recorded = VerifyAndRecord();
  if (!recorded.ok()) Withdraw();
  return recorded;
}

// The fence last, since the store may take its time to answer; and a lost lease explains a manifest
// of another job.
absl::Status RankStream::MayPublish() {
  absl::Status manifest = place_.destination->Head(ObjectKey(ManifestName{})).status();
  if (!manifest.ok() && !absl::IsNotFound(manifest)) return manifest;
  SP_RETURN_IF_ERROR(AskGate());
  if (manifest.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(place_.destination->uri(), ": another job has committed an artefact here, ",
                     record_.file().key(), " of this one is not written over it"));
  }
  return absl::OkStatus();
}

absl::Status RankStream::VerifyAndRecord() {
  if (place_.plan->spec.verify_after_write()) SP_RETURN_IF_ERROR(ReadBack(record_.file()));
  return RecordPart(record_, *place_.destination, *place_.gate);
}

// Takes a part away that has no record, as when the disk is full at that moment: of a job that
// fails only what the journal names may stay. Once the lease is over the part is another's to
// overwrite. Should the record have come about in spite of its error, it counts for nothing
// without the part.
void RankStream::Withdraw() {
  if (!AskGate().ok()) return;
  place_.destination->Delete(record_.file().key()).IgnoreError();
}

absl::Status RankStream::Append(const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const int64_t piece = std::min<int64_t>(bytes.size() - done, kBlockBytes);
    SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> out, Reserve(piece));
    std::copy_n(bytes.data() + done, piece, out.data());
    SP_RETURN_IF_ERROR(Advance(out.subspan(0, piece)));
    done += piece;
  }
  return absl::OkStatus();
}

absl::Status RankStream::ReadBack(const v1::FileRecord& file) {
  const int64_t piece = std::min(static_cast<int64_t>(buffer_.size()),
                                 std::max(kBlockBytes, place_.destination->PreferredReadBytes()));
  return CheckFileBytes(file, *place_.destination, buffer_.subspan(0, piece));
}

}  // namespace shardprep
