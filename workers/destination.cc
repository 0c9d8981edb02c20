#include "workers/destination.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/job_plan.h"
#include "workers/object_names.h"
#include "workers/proto_json.h"
#include "workers/safetensors.h"
#include "workers/version.h"

namespace shardprep {
namespace {

// Bound on a header that is read only to learn whose file it is.
constexpr int64_t kMaxForeignHeaderBytes = int64_t{64} << 20;

absl::Status ReadInto(ObjectReader& reader, int64_t offset, std::string& bytes) {
  return reader.ReadAt(offset,
                       absl::MakeSpan(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
}

}  // namespace

absl::StatusOr<Destination> Destination::Scan(ObjectStore& store) {
  Destination destination(store);
  SP_ASSIGN_OR_RETURN(std::vector<ObjectEntry> entries, store.List(""));
  for (ObjectEntry& entry : entries) {
    destination.objects_.emplace(std::move(entry.key), std::move(entry.info));
  }
  for (const auto& [key, info] : destination.objects_) {
    if (absl::StartsWith(key, kWorkPrefix)) SP_RETURN_IF_ERROR(destination.ReadWork(key));
  }
  for (const JournalEntry& entry : destination.journal_) {
    destination.journal_fingerprints_.insert(entry.fingerprint);
    if (entry.record.has_value() && destination.IsThere(*entry.record)) {
      destination.recorded_.insert(entry.part_key);
    }
  }
  for (const auto& [fingerprint, commit] : destination.commits_) {
    destination.journal_fingerprints_.insert(fingerprint);
  }
  return destination;
}

// Reads one object below `_shardprep/` if it is a record or a commit.
absl::Status Destination::ReadWork(const std::string& key) {
  JournalEntry entry{.key = key, .fingerprint = "", .part_key = "", .record = std::nullopt};
  int32_t rank = kReplicatedRank;
  int32_t part = 0;
  const ObjectName name = ParseObjectName(key);
  if (const auto* ranked = std::get_if<RankJournal>(&name)) {
    entry.fingerprint = ranked->fingerprint;
    rank = static_cast<int32_t>(ranked->rank);
    part = static_cast<int32_t>(ranked->part);
    entry.part_key = ObjectKey(RankPart{.rank = ranked->rank, .part = ranked->part});
  } else if (const auto* replicated = std::get_if<ReplicatedJournal>(&name)) {
    entry.fingerprint = replicated->fingerprint;
    part = static_cast<int32_t>(replicated->part);
    entry.part_key = ObjectKey(ReplicatedPart{.part = replicated->part});
  } else {
    const auto* commit = std::get_if<CommitIntent>(&name);
    return commit == nullptr ? absl::OkStatus() : ReadCommit(key, commit->fingerprint);
  }
  const auto text = store_.Get(key, kMaxDocumentBytes);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  SP_RETURN_IF_ERROR(text.status());
  v1::PartRecord record;
  const bool readable = ParseStoredJson(*text, key, kFormatVersion, record).ok() &&
                        record.layout_fingerprint() == entry.fingerprint && record.has_rank() &&
                        record.rank() == rank && record.has_part() && record.part() == part &&
                        record.file().key() == entry.part_key;
  if (readable) entry.record = std::move(record);
  journal_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::Status Destination::ReadCommit(const std::string& key, const std::string& fingerprint) {
  const auto text = store_.Get(key, kMaxDocumentBytes);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  SP_RETURN_IF_ERROR(text.status());
  v1::Manifest commit;
  if (ParseStoredJson(*text, key, kFormatVersion, commit).ok()) commits_[fingerprint] = commit;
  return absl::OkStatus();
}

const ObjectInfo* Destination::Find(const std::string& key) const {
  const auto it = objects_.find(key);
  return it == objects_.end() ? nullptr : &it->second;
}

const v1::PartRecord* Destination::RecordOf(const std::string& part_key) const {
  for (const JournalEntry& entry : journal_) {
    if (entry.record.has_value() && entry.part_key == part_key) return &*entry.record;
  }
  return nullptr;
}

bool Destination::IsThere(const v1::PartRecord& record) const {
  const ObjectInfo* info = Find(record.file().key());
  return info != nullptr && info->size_bytes == record.file().size_bytes() &&
         info->etag == record.etag();
}

absl::StatusOr<bool> Destination::HasContent(const v1::SmallFile& file) const {
  const ObjectInfo* info = Find(file.key());
  if (info == nullptr || info->size_bytes != file.size_bytes()) return false;
  const auto bytes = store_.Get(file.key(), kMaxSmallFileBytes);
  if (absl::IsNotFound(bytes.status())) return false;  // deleted since the listing
  SP_RETURN_IF_ERROR(bytes.status());
  return Sha256Hex(*bytes) == file.sha256();
}

// Of a document with that message.
template <typename Message>
absl::StatusOr<std::string> Destination::FingerprintInDocument(const std::string& key) const {
  const auto text = store_.Get(key, kMaxDocumentBytes);
  if (absl::IsResourceExhausted(text.status())) return std::string();
  SP_RETURN_IF_ERROR(text.status());
  Message message;
  if (!ParseStoredJson(*text, key, kFormatVersion, message).ok()) return std::string();
  return message.layout_fingerprint();
}

absl::StatusOr<std::string> Destination::FingerprintInHeader(const std::string& key) const {
  SP_ASSIGN_OR_RETURN(const auto reader, store_.Open(key));
  const int64_t file_size = reader->info().size_bytes;
  std::string bytes(std::min(kHeaderLengthBytes, file_size), '\0');
  SP_RETURN_IF_ERROR(ReadInto(*reader, 0, bytes));
  const auto length = ParseHeaderLength(bytes, file_size, key);
  if (!length.ok() || *length > kMaxForeignHeaderBytes) return std::string();
  bytes.resize(*length);
  SP_RETURN_IF_ERROR(ReadInto(*reader, kHeaderLengthBytes, bytes));
  const auto header = ParseHeader(bytes, file_size, key);
  if (!header.ok()) return std::string();
  const auto it = header->metadata.find(kFingerprintMetadataKey);
  return it == header->metadata.end() ? std::string() : it->second;
}

absl::StatusOr<std::string> Destination::FingerprintIn(const std::string& key) const {
  const ObjectName name = ParseObjectName(key);
  if (std::holds_alternative<RankPart>(name) || std::holds_alternative<ReplicatedPart>(name)) {
    return FingerprintInHeader(key);
  }
  if (std::holds_alternative<ExpertMap>(name)) return FingerprintInDocument<v1::ExpertMap>(key);
  if (std::holds_alternative<RankManifest>(name) ||
      std::holds_alternative<ReplicatedManifest>(name)) {
    return FingerprintInDocument<v1::RankManifest>(key);
  }
  return std::string();
}

}  // namespace shardprep
