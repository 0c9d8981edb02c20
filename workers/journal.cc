#include "workers/journal.h"

#include <cstddef>

#include <google/protobuf/util/message_differencer.h>

#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

std::string JournalKey(const std::string& fingerprint, int32_t rank, int32_t part) {
  if (rank == kReplicatedRank) {
    return ObjectKey(ReplicatedJournal{.fingerprint = fingerprint, .part = part});
  }
  return ObjectKey(RankJournal{.fingerprint = fingerprint, .rank = rank, .part = part});
}

}  // namespace

std::vector<PlannedPart> PlannedParts(const JobPlan& plan) {
  std::vector<PlannedPart> parts;
  const std::vector<Region>& regions = plan.slices.regions();
  for (int32_t region = 0; region < static_cast<int32_t>(regions.size()); ++region) {
    for (const int32_t rank : plan.slices.RanksOf(regions[region])) {
      for (const PartPlan& part : plan.slices.PartsOf(regions[region], rank)) {
        parts.push_back({region, rank, &part});
      }
    }
  }
  return parts;
}

absl::StatusOr<v1::PartRecord> PlannedRecord(const JobPlan& plan, const PlannedPart& planned) {
  const PartPlan& part = *planned.part;
  const int32_t rank = planned.rank;
  SP_ASSIGN_OR_RETURN(const std::string header, PartHeader(plan, part, rank));
  const auto data_start = static_cast<int64_t>(header.size());
  v1::PartRecord record;
  record.set_format_version(kFormatVersion);
  record.set_layout_fingerprint(plan.fingerprint);
  record.set_source_token(plan.source_token);
  record.set_rank(rank);
  record.set_part(part.part);
  record.set_region(planned.region);
  v1::FileRecord& file = *record.mutable_file();
  file.set_key(PartKeyOf(part, rank));
  file.set_size_bytes(data_start + part.data_bytes);
  const bool routed = plan.slices.regions()[planned.region].kind == Region::Kind::kRouted;
  for (const PartTensor& tensor : part.tensors) {
    v1::TensorRecord& out = *file.add_tensors();
    out.set_name(tensor.name);
    out.set_dtype(std::string(DtypeName(tensor.dtype)));
    for (const int64_t extent : tensor.shape) out.add_shape(extent);
    out.set_offset(data_start + tensor.data_offset);
    out.set_size_bytes(tensor.size_bytes);
    out.set_layout(GetLayoutInfo(LayoutId::kRowMajor).name);
    out.set_row_order("as-is");
    out.set_half_count(1);
    if (!routed) {
      const int64_t tail =
          plan.slices.dense_tensors()[static_cast<size_t>(tensor.source)].tail_bytes;
      if (tail > 0) out.set_tail_bytes(tail);
      continue;
    }
    const FusedTensor& fused = plan.slices.FusedTensorsOf(rank)[tensor.source];
    out.set_layout(GetLayoutInfo(fused.job.layout).name);
    out.set_row_order(fused.job.row_order == RowOrder::kGateUpRows ? "gate-up-rows" : "as-is");
    out.set_fill(fused.fill);
    out.set_expert_count(fused.experts);
    out.set_native_rows(fused.native_rows);
    out.set_padded_rows(fused.job.rows);
    out.set_native_row_bytes(fused.job.native_cols);
    out.set_padded_row_bytes(fused.job.padded_cols);
    out.set_half_count(fused.halves);
    out.add_native_extent(fused.native_rows);
    out.add_native_extent(fused.native_row_elements);
    const bool bias = fused.role == Role::kW13Bias || fused.role == Role::kW2Bias;
    out.set_block_size(bias ? 0 : static_cast<int32_t>(plan.slices.moe().block_size));
  }
  return record;
}

absl::Status CheckRecord(const v1::PartRecord& record, const v1::PartRecord& planned) {
  SP_RETURN_IF_ERROR(CheckFileRecord(record.file()));
  v1::PartRecord described = record;
  described.clear_etag();
  described.mutable_file()->clear_chunk_sha256();
  described.mutable_file()->clear_digest();
  for (v1::TensorRecord& tensor : *described.mutable_file()->mutable_tensors()) {
    const auto crc = HexDecode(tensor.native_crc32c());
    if (!crc.ok() || crc->size() != sizeof(uint32_t)) {
      return absl::DataLossError(absl::StrCat(record.file().key(), ": tensor ", tensor.name(),
                                              ": native CRC '", tensor.native_crc32c(),
                                              "' is no CRC-32C"));
    }
    tensor.clear_native_crc32c();
  }
  google::protobuf::util::MessageDifferencer differencer;
  std::string differences;
  differencer.ReportDifferencesToString(&differences);
  if (differencer.Compare(planned, described)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(record.file().key(), ": record differs from the plan: ",
                                          differences.substr(0, differences.find('\n'))));
}

absl::Status RecordPart(const v1::PartRecord& record, ObjectStore& destination,
                        const CommitGate& gate) {
  SP_CHECK(record.has_rank() && record.has_part() && record.has_region());
  SP_ASSIGN_OR_RETURN(const std::string text, StoredJson(record));
  const std::string key = JournalKey(record.layout_fingerprint(), record.rank(), record.part());
  return destination.Put(key, text, gate).status();
}

absl::StatusOr<bool> IsRecorded(const JobPlan& plan, const PlannedPart& part,
                                ObjectStore& destination) {
  const std::string key = JournalKey(plan.fingerprint, part.rank, part.part->part);
  const auto text = destination.Get(key, kMaxDocumentBytes);
  if (absl::IsNotFound(text.status())) return false;
  SP_RETURN_IF_ERROR(text.status());
  v1::PartRecord record;
  if (!ParseStoredJson(*text, key, kFormatVersion, record).ok()) return false;
  SP_ASSIGN_OR_RETURN(const v1::PartRecord planned, PlannedRecord(plan, part));
  if (!CheckRecord(record, planned).ok()) return false;
  const auto info = destination.Head(record.file().key());
  if (absl::IsNotFound(info.status())) return false;
  SP_RETURN_IF_ERROR(info.status());
  return info->size_bytes == record.file().size_bytes() && info->etag == record.etag();
}

}  // namespace shardprep
