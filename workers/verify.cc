// How an artefact is verified.
//
// 1. Small files: the manifest, then what it refers to by SHA-256. What the rank manifests say must
//    agree with the manifest, with each other and with the listing of the store.
// 2. Data files, one thread each, read once from start to end in pieces. Everything that is read
//    goes into the digests; what follows happens to the same bytes while they are in cache.
// 3. The header must say what the record says. Then each tensor is taken apart block by block: a
//    block of some output rows of one expert is un-shuffled, pads are held against their fills, and
//    native rows go into the CRC of their half. The CRC counts gate rows before up rows, wherever
//    the layout puts them, so each half has its own and they are combined at the end of an expert.
// 4. With a source, native rows are also compared with the source rows that the plan, made anew,
//    puts there. Rows of a half come in ascending order, so a window of source rows slides along.
#include "workers/verify.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "kernels/layout.h"
#include "kernels/shuffle.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/block_plan.h"
#include "workers/digest.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/plan_differences.h"
#include "workers/proto_json.h"
#include "workers/safetensors.h"
#include "workers/version.h"

namespace shardprep {
namespace {

constexpr int64_t kReadBytes = int64_t{1} << 20;
constexpr int64_t kSourceWindowBytes = int64_t{256} << 10;
constexpr int64_t kProgressBytes = int64_t{16} << 20;
constexpr int64_t kWordBytes = 4;
constexpr std::array<uint8_t, kWordBytes> kMinusInfinity = {0x00, 0x00, 0x80, 0xFF};  // F32

// The first byte of `bytes` that is not `value`, or their number.
int64_t FirstOther(absl::Span<const uint8_t> bytes, uint8_t value) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size == 0) return 0;
  // A run of equal bytes equals itself shifted by one.
  if (bytes[0] == value &&
      std::memcmp(bytes.data(), bytes.data() + 1, static_cast<size_t>(size - 1)) == 0) {
    return size;
  }
  return std::find_if(bytes.begin(), bytes.end(), [value](uint8_t b) { return b != value; }) -
         bytes.begin();
}

// -- What the documents say --

// One data file and the rank that it belongs to.
struct DataFile {
  int32_t rank = 0;
  const v1::FileRecord* record = nullptr;
};

// A fused tensor as its record describes it.
struct TensorGeometry {
  ShuffleJob job{};
  int64_t experts = 0;
  int halves = 1;
  int64_t native_rows = 0;
  int64_t tail_bytes = 0;
  uint8_t fill = 0;
  int64_t batch_rows = 0;  // output rows that are checked at a time

  int64_t native_bytes() const { return experts * native_rows * job.native_cols; }
};

// INVALID_ARGUMENT of a layout, or DATA_LOSS, for a record that describes no tensor.
absl::StatusOr<TensorGeometry> ParseGeometry(const v1::TensorRecord& record) {
  TensorGeometry geometry;
  SP_ASSIGN_OR_RETURN(geometry.job.layout, ParseLayoutId(record.layout()));
  if (record.row_order() != "as-is" && record.row_order() != "gate-up-rows") {
    return absl::DataLossError(absl::StrCat("row order '", record.row_order(), "' is unknown"));
  }
  geometry.job.row_order = record.row_order() == "as-is" ? RowOrder::kAsIs : RowOrder::kGateUpRows;
  geometry.job.rows = record.padded_rows();
  geometry.job.native_cols = record.native_row_bytes();
  geometry.job.padded_cols = record.padded_row_bytes();
  geometry.experts = record.expert_count();
  geometry.halves = record.half_count();
  geometry.native_rows = record.native_rows();
  SP_RETURN_IF_ERROR(CheckShuffleJob(geometry.job));
  const MatrixShape shape{geometry.experts, geometry.job.rows, geometry.job.padded_cols};
  SP_ASSIGN_OR_RETURN(const int64_t size, OutputBytes(geometry.job.layout, shape));
  SP_ASSIGN_OR_RETURN(geometry.tail_bytes, TailBytes(geometry.job.layout, shape));
  if (size != record.size_bytes()) {
    return absl::DataLossError(
        absl::StrCat(record.size_bytes(), " bytes, its extents give ", size));
  }
  if ((geometry.halves != 1 && geometry.halves != 2) || geometry.job.rows % geometry.halves != 0 ||
      geometry.native_rows < 0 || geometry.native_rows % geometry.halves != 0 ||
      geometry.native_rows > geometry.job.rows) {
    return absl::DataLossError(absl::StrCat(geometry.native_rows, " native rows of ",
                                            geometry.job.rows, " in ", geometry.halves, " halves"));
  }
  geometry.fill = GetLayoutInfo(geometry.job.layout).fill;
  if (record.fill() != geometry.fill) {
    return absl::DataLossError(
        absl::StrCat("fill ", record.fill(), ", layout ", record.layout(), " has ", geometry.fill));
  }
  const int64_t unit = BlockRows(geometry.job);
  const int64_t units = std::max<int64_t>(1, kBlockBytes / (unit * OutputCols(geometry.job)));
  geometry.batch_rows = std::min(units * unit, geometry.job.rows);
  return geometry;
}

// Any tensor but a fused one of routed experts.
bool IsDense(const v1::TensorRecord& record) { return record.expert_count() == 0; }

// DATA_LOSS for a record that describes no tensor: whoever wrote it did not write ours.
absl::StatusOr<TensorGeometry> ReadGeometry(const v1::TensorRecord& record) {
  auto geometry = ParseGeometry(record);
  if (absl::IsInvalidArgument(geometry.status())) {
    return absl::DataLossError(std::string(geometry.status().message()));
  }
  return geometry;
}

std::string SizesOf(const v1::TensorRecord& tensor) {
  std::string text = absl::StrCat(tensor.dtype(), " [");
  for (int i = 0; i < tensor.shape_size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", tensor.shape(i));
  }
  return absl::StrCat(text, "], ", tensor.layout(), ", ", tensor.size_bytes(), " bytes");
}

// The artefact's documents, checked against each other.
class Documents {
 public:
  Documents(Documents&&) = default;
  Documents& operator=(Documents&&) = default;

  static absl::StatusOr<Documents> Read(ObjectStore& store, const TrustedKeys& trusted) {
    Documents documents;
    SP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(store));
    if (!trusted.empty()) SP_RETURN_IF_ERROR(trusted.CheckStored(store, text));
    documents.manifest_sha256_ = Sha256Hex(text);
    SP_ASSIGN_OR_RETURN(documents.manifest_, ParseManifest(text));
    for (const v1::SmallFile& file : documents.manifest_.rank_manifests()) {
      SP_ASSIGN_OR_RETURN(v1::RankManifest rank, ReadRankManifest(store, file));
      documents.ranks_.push_back(std::move(rank));
    }
    SP_RETURN_IF_ERROR(documents.CheckRanks());
    for (const v1::RankManifest& rank : documents.ranks_) {
      for (const v1::FileRecord& file : rank.files()) {
        documents.files_.push_back({rank.rank(), &file});
      }
    }
    SP_RETURN_IF_ERROR(documents.CheckTensors());
    SP_RETURN_IF_ERROR(documents.CheckTotals());
    SP_RETURN_IF_ERROR(documents.CheckExpertMaps(store));
    SP_RETURN_IF_ERROR(documents.CheckCopiedFiles(store));
    SP_RETURN_IF_ERROR(documents.CheckNoOtherFiles(store));
    return documents;
  }

  const v1::Manifest& manifest() const { return manifest_; }
  const std::vector<DataFile>& files() const { return files_; }

  VerifyReport Report() const {
    VerifyReport report;
    report.layout_fingerprint = manifest_.layout_fingerprint();
    report.content_id = manifest_.content_id();
    report.manifest_sha256 = manifest_sha256_;
    report.files = static_cast<int64_t>(files_.size());
    for (const DataFile& file : files_) {
      report.bytes += file.record->size_bytes();
      report.tensors += file.record->tensors_size();
    }
    for (const auto* small :
         {&manifest_.rank_manifests(), &manifest_.expert_maps(), &manifest_.copied_files()}) {
      report.files += small->size();
      for (const v1::SmallFile& file : *small) report.bytes += file.size_bytes();
    }
    return report;
  }

 private:
  // rank-0.json to rank-(n-1).json, then replicated.json if any, each with its own parts 0, 1, ...
  absl::Status CheckRanks() const {
    const int world = manifest_.rank_count();
    const int count = static_cast<int>(ranks_.size());
    if (world < 1 || (count != world && count != world + 1)) {
      return absl::DataLossError(
          absl::StrCat("manifest.json: ", count, " rank manifests for ", world, " ranks"));
    }
    for (int i = 0; i < count; ++i) {
      const int32_t rank = i < world ? i : kReplicatedRank;
      const std::string key = rank == kReplicatedRank ? ObjectKey(ReplicatedManifest{})
                                                      : ObjectKey(RankManifest{.rank = rank});
      if (manifest_.rank_manifests(i).key() != key) {
        return absl::DataLossError(absl::StrCat("manifest.json: rank manifest ", i, " is ",
                                                manifest_.rank_manifests(i).key(), ", want ", key));
      }
      const v1::RankManifest& document = ranks_[i];
      if (!document.has_rank() || document.rank() != rank ||
          document.layout_fingerprint() != manifest_.layout_fingerprint()) {
        return absl::DataLossError(absl::StrCat(key, ": is of rank ", document.rank(),
                                                " and fingerprint ", document.layout_fingerprint(),
                                                ", want rank ", rank, " and ",
                                                manifest_.layout_fingerprint()));
      }
      for (int part = 0; part < document.files_size(); ++part) {
        const std::string want = rank == kReplicatedRank
                                     ? ObjectKey(ReplicatedPart{.part = part})
                                     : ObjectKey(RankPart{.rank = rank, .part = part});
        if (document.files(part).key() != want) {
          return absl::DataLossError(absl::StrCat(key, ": file ", part, " is ",
                                                  document.files(part).key(), ", want ", want));
        }
        SP_RETURN_IF_ERROR(CheckFileRecord(document.files(part)));
        if (document.files(part).tensors_size() == 0) {
          return absl::DataLossError(absl::StrCat(want, ": no tensors are recorded"));
        }
      }
    }
    return absl::OkStatus();
  }

  // All ranks hold the same tensors: each routed layer's fused tensors, as the manifest describes
  // them for the rank, and dense ones where the manifest says so. No name occurs twice.
  absl::Status CheckTensors() const {
    std::map<std::string, std::string> first;  // of rank 0: name -> sizes, if all ranks are alike
    SP_ASSIGN_OR_RETURN(const auto fused_of_rank, FusedOfRanks());
    int64_t fused_count = 0;  // of rank 0
    for (const v1::RankManifest& rank : ranks_) {
      std::map<std::string, std::string> found;
      for (const v1::FileRecord& file : rank.files()) {
        for (const v1::TensorRecord& tensor : file.tensors()) {
          const bool alike = manifest_.rank_shapes().empty();
          if (!found.emplace(tensor.name(), alike ? SizesOf(tensor) : "").second) {
            return absl::DataLossError(
                absl::StrCat(file.key(), ": tensor ", tensor.name(), " occurs twice"));
          }
          SP_RETURN_IF_ERROR(CheckDense(file, tensor, rank.rank()));
          if (IsDense(tensor)) continue;
          fused_count += rank.rank() == 0 ? 1 : 0;
          const absl::Status status =
              CheckFused(*fused_of_rank[static_cast<size_t>(rank.rank())], tensor);
          if (!status.ok()) {
            return Prefixed(absl::StrCat(file.key(), ": tensor ", tensor.name()), status);
          }
        }
      }
      if (rank.rank() == 0) first = found;
      if (rank.rank() == kReplicatedRank) {
        for (const auto& [name, sizes] : found) {
          if (first.contains(name)) {
            return absl::DataLossError(
                absl::StrCat("tensor ", name, " is replicated and of ranks"));
          }
        }
      } else if (found != first) {
        return absl::DataLossError(
            absl::StrCat("rank ", rank.rank(), " has other tensors than rank 0"));
      }
    }
    const int64_t want = int64_t{manifest_.routed_layer_count()} * manifest_.fused_tensors_size();
    if (fused_count != want) {
      return absl::DataLossError(absl::StrCat("rank 0 has ", fused_count, " tensors, want ", want,
                                              " for ", manifest_.routed_layer_count(),
                                              " routed layers"));
    }
    return absl::OkStatus();
  }

  // That a tensor is dense or not where the manifest says so, and its tail lies in it.
  absl::Status CheckDense(const v1::FileRecord& file, const v1::TensorRecord& tensor,
                          int32_t rank) const {
    const auto fail = [&](const std::string& what) {
      return absl::DataLossError(absl::StrCat(file.key(), ": tensor ", tensor.name(), ": ", what));
    };
    if (!IsDense(tensor)) {
      if (rank != kReplicatedRank) return absl::OkStatus();
      return fail("is one of routed experts among those of all ranks");
    }
    if (rank != kReplicatedRank && !manifest_.self_contained() && !manifest_.slice_dense()) {
      return fail("is no fused tensor that manifest.json describes");
    }
    const int64_t tail = tensor.tail_bytes();
    const bool has_tail = tensor.dtype() == DtypeName(Dtype::kF32) && tail % kWordBytes == 0;
    if (tail < 0 || tail > tensor.size_bytes() || (tail > 0 && !has_tail)) {
      return fail(absl::StrCat(tail, " bytes of minus infinity in ", SizesOf(tensor)));
    }
    return absl::OkStatus();
  }

  using FusedTensors = google::protobuf::RepeatedPtrField<v1::FusedTensorSummary>;

  // What the manifest says of each rank's fused tensors.
  absl::StatusOr<std::vector<const FusedTensors*>> FusedOfRanks() const {
    const auto world = static_cast<size_t>(manifest_.rank_count());
    if (manifest_.rank_shapes().empty()) {
      return std::vector<const FusedTensors*>(world, &manifest_.fused_tensors());
    }
    std::vector<const FusedTensors*> fused(world, nullptr);
    for (const v1::RankShape& shape : manifest_.rank_shapes()) {
      for (const int32_t rank : shape.ranks()) {
        if (rank < 0 || rank >= manifest_.rank_count() ||
            fused[static_cast<size_t>(rank)] != nullptr ||
            shape.fused_tensors_size() != manifest_.fused_tensors_size()) {
          return absl::DataLossError(
              absl::StrCat("manifest.json: rank_shapes has rank ", rank, " twice or amiss"));
        }
        fused[static_cast<size_t>(rank)] = &shape.fused_tensors();
      }
    }
    for (size_t rank = 0; rank < world; ++rank) {
      if (fused[rank] != nullptr) continue;
      return absl::DataLossError(absl::StrCat("manifest.json: rank_shapes has no rank ", rank));
    }
    return fused;
  }

  absl::Status CheckFused(const FusedTensors& fused_tensors, const v1::TensorRecord& tensor) const {
    for (const v1::FusedTensorSummary& fused : fused_tensors) {
      if (!absl::EndsWith(tensor.name(), absl::StrCat(".", fused.role()))) continue;
      v1::TensorRecord want;
      want.set_dtype(fused.dtype());
      *want.mutable_shape() = fused.shape();
      want.set_layout(fused.layout());
      want.set_size_bytes(fused.size_bytes());
      if (SizesOf(tensor) != SizesOf(want)) {
        return absl::DataLossError(absl::StrCat(SizesOf(tensor), ", want ", SizesOf(want)));
      }
      SP_ASSIGN_OR_RETURN(const TensorGeometry geometry, ReadGeometry(tensor));
      if (geometry.native_bytes() != fused.native_bytes()) {
        return absl::DataLossError(
            absl::StrCat(geometry.native_bytes(), " native bytes, want ", fused.native_bytes()));
      }
      return absl::OkStatus();
    }
    return absl::DataLossError("is no fused tensor that manifest.json describes");
  }

  absl::Status CheckTotals() const {
    int64_t bytes = 0, replicated = 0, dense = 0, routed = 0, padding = 0;
    for (const DataFile& file : files_) {
      bytes += file.record->size_bytes();
      for (const v1::TensorRecord& tensor : file.record->tensors()) {
        if (file.rank == kReplicatedRank) replicated += tensor.size_bytes();
        if (file.rank != 0) continue;
        if (IsDense(tensor)) {
          dense += tensor.size_bytes();
          continue;
        }
        routed += tensor.size_bytes();
        padding += tensor.size_bytes() -
                   tensor.expert_count() * tensor.native_rows() * tensor.native_row_bytes();
      }
    }
    const std::pair<const char*, std::pair<int64_t, int64_t>> totals[] = {
        {"file_count", {static_cast<int64_t>(files_.size()), manifest_.file_count()}},
        {"total_bytes", {bytes, manifest_.total_bytes()}},
        {"replicated_bytes", {replicated, manifest_.replicated_bytes()}},
        {"dense_bytes_per_rank", {dense, manifest_.dense_bytes_per_rank()}},
        {"routed_bytes_per_rank", {routed, manifest_.routed_bytes_per_rank()}},
        {"padding_bytes_per_rank", {padding, manifest_.padding_bytes_per_rank()}}};
    for (const auto& [name, values] : totals) {
      if (values.first == values.second) continue;
      return absl::DataLossError(absl::StrCat("manifest.json: ", name, " is ", values.second,
                                              ", the rank manifests come to ", values.first));
    }
    const std::string content_id = ContentId(ranks_, manifest_);
    if (content_id != manifest_.content_id()) {
      return absl::DataLossError(absl::StrCat("manifest.json: content_id is ",
                                              manifest_.content_id(), ", want ", content_id));
    }
    return absl::OkStatus();
  }

  // One for each rank under expert parallelism, each saying what the others say of all slots.
  absl::Status CheckExpertMaps(ObjectStore& store) const {
    if (manifest_.expert_maps().empty()) return absl::OkStatus();
    if (manifest_.expert_maps_size() != manifest_.rank_count()) {
      return absl::DataLossError(absl::StrCat("manifest.json: ", manifest_.expert_maps_size(),
                                              " expert maps for ", manifest_.rank_count(),
                                              " ranks"));
    }
    for (int32_t rank = 0; rank < manifest_.rank_count(); ++rank) {
      const v1::SmallFile& file = manifest_.expert_maps(rank);
      const std::string want = ObjectKey(ExpertMap{.rank = rank});
      if (file.key() != want) {
        return absl::DataLossError(
            absl::StrCat("manifest.json: expert map ", rank, " is ", file.key(), ", want ", want));
      }
      const auto bytes = store.Get(file.key(), std::max<int64_t>(file.size_bytes(), 1));
      if (absl::IsNotFound(bytes.status())) {
        return absl::DataLossError(absl::StrCat(file.key(), ": missing"));
      }
      if (!bytes.ok() && !absl::IsResourceExhausted(bytes.status())) return bytes.status();
      if (!bytes.ok() || Sha256Hex(*bytes) != file.sha256()) {
        return absl::DataLossError(
            absl::StrCat(file.key(), ": is not as manifest.json describes it"));
      }
      v1::ExpertMap map;
      SP_RETURN_IF_ERROR(ParseStoredJson(*bytes, file.key(), kFormatVersion, map));
      if (!map.has_rank() || map.rank() != rank ||
          map.layout_fingerprint() != manifest_.layout_fingerprint()) {
        return absl::DataLossError(absl::StrCat(file.key(), ": is of rank ", map.rank(),
                                                " and fingerprint ", map.layout_fingerprint()));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckCopiedFiles(ObjectStore& store) const {
    for (const v1::SmallFile& file : manifest_.copied_files()) {
      if (!CopiedFileKey(file.key()).ok()) {
        return absl::DataLossError(
            absl::StrCat("manifest.json: copied file '", file.key(), "' has no name to copy to"));
      }
      const auto bytes = store.Get(file.key(), std::max<int64_t>(file.size_bytes(), 1));
      if (absl::IsNotFound(bytes.status())) {
        return absl::DataLossError(absl::StrCat(file.key(), ": missing"));
      }
      if (absl::IsResourceExhausted(bytes.status())) {
        return absl::DataLossError(
            absl::StrCat(file.key(), ": larger than ", file.size_bytes(), " bytes"));
      }
      SP_RETURN_IF_ERROR(bytes.status());
      if (static_cast<int64_t>(bytes->size()) != file.size_bytes() ||
          Sha256Hex(*bytes) != file.sha256()) {
        return absl::DataLossError(
            absl::StrCat(file.key(), ": ", bytes->size(), " bytes with SHA-256 ", Sha256Hex(*bytes),
                         ", want ", file.size_bytes(), " with ", file.sha256()));
      }
    }
    return absl::OkStatus();
  }

  // A loader that takes every file with a name of ours must find nothing else.
  absl::Status CheckNoOtherFiles(ObjectStore& store) const {
    std::set<std::string> known = {ObjectKey(ManifestName{}), ObjectKey(ManifestSignature{})};
    for (const v1::SmallFile& file : manifest_.rank_manifests()) known.insert(file.key());
    for (const v1::SmallFile& file : manifest_.expert_maps()) known.insert(file.key());
    for (const DataFile& file : files_) known.insert(file.record->key());
    SP_ASSIGN_OR_RETURN(const std::vector<ObjectEntry> entries, store.List(""));
    for (const ObjectEntry& entry : entries) {
      if (absl::StartsWith(entry.key, kWorkPrefix) || known.contains(entry.key) ||
          std::holds_alternative<std::monostate>(ParseObjectName(entry.key))) {
        continue;
      }
      return absl::DataLossError(
          absl::StrCat(entry.key, ": is no part of the artefact that manifest.json describes"));
    }
    return absl::OkStatus();
  }

  Documents() = default;

  std::string manifest_sha256_;
  v1::Manifest manifest_;
  std::vector<v1::RankManifest> ranks_;
  std::vector<DataFile> files_;  // point into ranks_
};

// -- The source, for comparison --

// The plan made anew, and the source files that it reads. Thread safe once made.
class SourceSide {
 public:
  static absl::StatusOr<std::unique_ptr<SourceSide>> Make(const VerifyOptions& options,
                                                          const Documents& documents,
                                                          const std::string& artifact_uri) {
    const v1::Manifest& manifest = documents.manifest();
    v1::PrepJobSpec spec;
    spec.set_source_uri(options.source->uri());
    v1::Target& target = *spec.add_targets();
    *target.mutable_parallel_layout() = manifest.parallel_layout();
    *target.mutable_kernel_target() = manifest.kernel_target();
    target.set_naming(manifest.naming());
    target.set_destination_uri(artifact_uri);
    spec.set_carry(manifest.carry());
    spec.set_include_mtp(manifest.include_mtp());
    spec.set_part_size_bytes(manifest.part_size_bytes());
    spec.set_self_contained(manifest.self_contained());
    spec.set_slice_dense(manifest.slice_dense());
    spec.set_alignment_policy_json(options.alignment_policy_json);
    PlanOptions plan_options;
    plan_options.allowed_source_roots = options.allowed_source_roots;
    plan_options.s3 = options.s3;
    auto side = std::make_unique<SourceSide>();
    side->store_ = options.source;
    SP_ASSIGN_OR_RETURN(side->plan_, PlanJob(spec, plan_options));
    if (side->plan_->fingerprint != manifest.layout_fingerprint()) {
      return absl::FailedPreconditionError(absl::StrCat(
          options.source->uri(), " is not what the artefact was made from: ",
          DescribeInputs(side->plan_->fingerprint_inputs, manifest.fingerprint_inputs())));
    }
    SP_RETURN_IF_ERROR(side->CheckFiles(documents));
    SP_RETURN_IF_ERROR(side->CheckCopies(documents.manifest()));
    return side;
  }

  SourceSide() = default;

  const SlicePlan& slices() const { return plan_->slices; }
  const PlannedPart& PartOf(const std::string& key) const { return parts_.at(key); }

  // Bytes [at, at + out.size()) of a source tensor.
  absl::Status Read(int32_t tensor, int64_t at, absl::Span<uint8_t> out) {
    const TensorInfo info = slices().checkpoint().tensors().at(tensor);
    SP_CHECK(at >= 0 && at + static_cast<int64_t>(out.size()) <= info.size_bytes);
    ObjectReader* reader = nullptr;
    {
      absl::MutexLock lock(&mu_);
      std::unique_ptr<ObjectReader>& slot = readers_[info.file];
      if (slot == nullptr) {
        const CheckpointFile& file = slices().checkpoint().files()[info.file];
        SP_ASSIGN_OR_RETURN(slot, store_->Open(file.name));
        if (slot->info().etag != file.etag) {
          return absl::FailedPreconditionError(
              absl::StrCat("source file ", file.name, " changed while it was compared"));
        }
      }
      reader = slot.get();
    }
    return reader->ReadAt(info.offset + at, out);
  }

  absl::Status CheckUnchanged() {
    absl::MutexLock lock(&mu_);
    for (const auto& [file, reader] : readers_) SP_RETURN_IF_ERROR(reader->CheckUnchanged());
    return absl::OkStatus();
  }

 private:
  // The artefact has the planned files and no other, each as planned.
  absl::Status CheckFiles(const Documents& documents) {
    for (const PlannedPart& planned : PlannedParts(*plan_)) {
      parts_[PartKeyOf(*planned.part, planned.rank)] = planned;
    }
    std::set<std::string> found;
    for (const DataFile& file : documents.files()) {
      const std::string& key = file.record->key();
      const auto planned = parts_.find(key);
      if (planned == parts_.end()) {
        return absl::DataLossError(absl::StrCat(key, ": is not in the plan"));
      }
      SP_ASSIGN_OR_RETURN(const v1::PartRecord want, PlannedRecord(*plan_, planned->second));
      v1::PartRecord record = want;
      *record.mutable_file() = *file.record;
      SP_RETURN_IF_ERROR(CheckRecord(record, want));
      found.insert(key);
    }
    for (const auto& [key, planned] : parts_) {
      if (!found.contains(key)) {
        return absl::DataLossError(absl::StrCat(key, ": is planned, but not in the artefact"));
      }
    }
    return absl::OkStatus();
  }

  // The copied files, whose bytes are as the manifest says, are the source's and all of them.
  absl::Status CheckCopies(const v1::Manifest& manifest) const {
    std::map<std::string, std::string> copies;  // name -> SHA-256
    for (const v1::SmallFile& file : manifest.copied_files()) copies[file.key()] = file.sha256();
    for (const SmallFile& file : slices().checkpoint().small_files()) {
      const auto copy = copies.find(file.name);
      if (copy == copies.end()) {
        return absl::DataLossError(
            absl::StrCat(file.name, ": is in the source, but not in the artefact"));
      }
      SP_ASSIGN_OR_RETURN(const std::string bytes,
                          store_->Get(file.name, std::max<int64_t>(file.info.size_bytes, 1)));
      if (Sha256Hex(bytes) != copy->second) {
        return absl::DataLossError(absl::StrCat(file.name, ": SHA-256 ", copy->second,
                                                ", the source's file has ", Sha256Hex(bytes)));
      }
      copies.erase(copy);
    }
    if (copies.empty()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(copies.begin()->first, ": is in the artefact, but not in the source"));
  }

  ObjectStore* store_ = nullptr;
  std::shared_ptr<const JobPlan> plan_;
  std::map<std::string, PlannedPart> parts_;  // by key
  absl::Mutex mu_;
  std::map<int64_t, std::unique_ptr<ObjectReader>> readers_ ABSL_GUARDED_BY(mu_);
};

// A window of rows of one slice that slides forward.
class SliceRows {
 public:
  void Start(const Slice& slice) {
    slice_ = slice;
    begin_ = 0;
    end_ = 0;
  }
  const Slice& slice() const { return slice_; }

  // The native bytes of the slice's row `row`, valid until the next call.
  absl::StatusOr<const uint8_t*> Row(SourceSide& source, int64_t row) {
    if (row < begin_ || row >= end_) {
      const int64_t rows = std::max<int64_t>(1, kSourceWindowBytes / stride());
      begin_ = row;
      end_ = std::min(row + rows, slice_.rows);
      buffer_.resize((end_ - begin_ - 1) * stride() + slice_.col_bytes);
      const int64_t at =
          slice_.row_begin * slice_.source_row_bytes + begin_ * stride() + slice_.col_begin;
      absl::Status status = source.Read(slice_.tensor, at, absl::MakeSpan(buffer_));
      if (!status.ok()) {
        end_ = begin_;
        return status;
      }
    }
    return buffer_.data() + (row - begin_) * stride();
  }

 private:
  int64_t stride() const { return slice_.row_step * slice_.source_row_bytes; }

  Slice slice_;
  int64_t begin_ = 0;  // rows in the buffer
  int64_t end_ = 0;
  std::vector<uint8_t> buffer_;
};

// -- Data files --

// What one thread's buffers must hold.
struct BufferNeed {
  int64_t window_bytes = kReadBytes;  // of the file
  int64_t rows_bytes = 0;             // un-shuffled
  int64_t source_bytes = 0;

  int64_t Total() const { return window_bytes + rows_bytes + source_bytes; }
};

absl::StatusOr<BufferNeed> NeedOf(const std::vector<DataFile>& files, const SourceSide* source) {
  int64_t largest = kReadBytes;
  BufferNeed need;
  for (const DataFile& file : files) {
    largest = std::max(largest, file.record->tensors(0).offset());  // the header
    for (const v1::TensorRecord& tensor : file.record->tensors()) {
      if (IsDense(tensor)) continue;
      SP_ASSIGN_OR_RETURN(const TensorGeometry geometry, ReadGeometry(tensor));
      largest = std::max(largest, geometry.batch_rows * OutputCols(geometry.job));
      need.rows_bytes = std::max(need.rows_bytes, geometry.batch_rows * geometry.job.padded_cols);
    }
  }
  if (source != nullptr) {
    for (const DenseTensor& dense : source->slices().dense_tensors()) {
      for (const DenseSource& rows : dense.sources) largest = std::max(largest, rows.row_bytes);
    }
  }
  need.window_bytes = kReadBytes + largest;
  if (source != nullptr) {
    need.source_bytes = kReadBytes;
    for (const FusedTensor& fused : source->slices().fused_tensors()) {
      const int64_t row = fused.source_row_bytes * fused.row_step;
      need.source_bytes =
          std::max(need.source_bytes, fused.halves * std::max(kSourceWindowBytes, row));
    }
  }
  return need;
}

// A file that is read once, from start to end, into a buffer of the caller's.
class FileStream {
 public:
  explicit FileStream(int64_t capacity) : buffer_(capacity) {}

  absl::Status Open(ObjectStore& store, const v1::FileRecord& record) {
    record_ = &record;
    position_ = begin_ = end_ = 0;
    digest_ = ChunkedDigest();
    auto reader = store.Open(record.key());
    if (absl::IsNotFound(reader.status())) {
      return absl::DataLossError(absl::StrCat(record.key(), ": missing"));
    }
    SP_RETURN_IF_ERROR(reader.status());
    reader_ = *std::move(reader);
    if (reader_->info().size_bytes != record.size_bytes()) {
      return absl::DataLossError(absl::StrCat(record.key(), ": ", reader_->info().size_bytes,
                                              " bytes, want ", record.size_bytes()));
    }
    return absl::OkStatus();
  }

  // The next `size` bytes, valid until the next call. `size` is at most the capacity less
  // kReadBytes.
  absl::StatusOr<absl::Span<const uint8_t>> Next(int64_t size) {
    if (end_ - begin_ < size) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
      const int64_t want =
          std::min(std::max(size - end_, kReadBytes), record_->size_bytes() - position_);
      SP_CHECK(end_ + want <= static_cast<int64_t>(buffer_.size()));
      if (end_ + want < size) {
        return absl::DataLossError(
            absl::StrCat(record_->key(), ": ends after ", record_->size_bytes(), " bytes"));
      }
      const absl::Span<uint8_t> piece = absl::MakeSpan(buffer_).subspan(end_, want);
      SP_RETURN_IF_ERROR(reader_->ReadAt(position_, piece));
      position_ += want;
      reader_->WillNeed(position_, 2 * kReadBytes);
      digest_.Update(piece);
      end_ += want;
    }
    begin_ += size;
    return absl::MakeConstSpan(buffer_).subspan(begin_ - size, size);
  }

  // The whole file was read, and its digests are the recorded ones.
  absl::Status Finish() {
    if (position_ != record_->size_bytes() || begin_ != end_) {
      return absl::DataLossError(absl::StrCat(record_->key(), ": bytes after its last tensor"));
    }
    SP_RETURN_IF_ERROR(reader_->CheckUnchanged());
    reader_.reset();
    const FileDigest found = digest_.Finish();
    for (int i = 0; i < record_->chunk_sha256_size(); ++i) {
      const std::string hex = HexEncode(found.chunk_sha256[i]);
      if (hex == record_->chunk_sha256(i)) continue;
      return absl::DataLossError(absl::StrCat(record_->key(), ": chunk ", i, " has SHA-256 ", hex,
                                              ", want ", record_->chunk_sha256(i)));
    }
    if (found.digest != record_->digest()) {
      return absl::DataLossError(
          absl::StrCat(record_->key(), ": digest ", found.digest, ", want ", record_->digest()));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<uint8_t> buffer_;
  const v1::FileRecord* record_ = nullptr;
  std::unique_ptr<ObjectReader> reader_;
  ChunkedDigest digest_;
  int64_t position_ = 0;  // in the file: end of what was read
  int64_t begin_ = 0;     // in the buffer: read and not yet given out
  int64_t end_ = 0;
};

// What the threads share.
struct Run {
  ObjectStore& artifact;
  const Documents& documents;
  SourceSide* source = nullptr;
  const VerifyOptions& options;
  int64_t total_bytes = 0;
  std::atomic<size_t> next_file{0};
  std::atomic<bool> failed{false};
  absl::Mutex mu;
  absl::Status error ABSL_GUARDED_BY(mu);
  int64_t done_bytes ABSL_GUARDED_BY(mu) = 0;
  VerifyReport report ABSL_GUARDED_BY(mu);

  void AddDone(int64_t bytes) {
    absl::MutexLock lock(&mu);
    done_bytes += bytes;
    if (options.progress) options.progress(done_bytes, total_bytes);
  }
};

// One thread.
class FileChecker {
 public:
  FileChecker(Run& run, const BufferNeed& need)
      : run_(run), stream_(need.window_bytes), rows_(need.rows_bytes) {}

  absl::Status CheckAll() {
    const std::vector<DataFile>& files = run_.documents.files();
    for (size_t f = run_.next_file++; f < files.size(); f = run_.next_file++) {
      SP_RETURN_IF_ERROR(CheckFile(files[f]));
    }
    absl::MutexLock lock(&run_.mu);
    run_.report.native_bytes += native_bytes_;
    run_.report.pad_bytes += pad_bytes_;
    run_.report.source_bytes_compared += compared_bytes_;
    return absl::OkStatus();
  }

 private:
  absl::Status CheckFile(const DataFile& file) {
    file_ = &file;
    const v1::FileRecord& record = *file.record;
    SP_RETURN_IF_ERROR(stream_.Open(run_.artifact, record));
    SP_RETURN_IF_ERROR(CheckHeader());
    for (int t = 0; t < record.tensors_size(); ++t) {
      const absl::Status status = CheckTensor(t);
      if (!status.ok()) {
        return Prefixed(absl::StrCat(record.key(), ": tensor ", record.tensors(t).name()), status);
      }
    }
    SP_RETURN_IF_ERROR(stream_.Finish());
    run_.AddDone(unreported_bytes_);
    unreported_bytes_ = 0;
    return absl::OkStatus();
  }

  // Keys of `__metadata__` are those of PartHeader() in workers/job_plan.cc.
  absl::Status CheckHeader() {
    const v1::FileRecord& record = *file_->record;
    const auto fail = [&](const std::string& what) {
      return absl::DataLossError(absl::StrCat(record.key(), ": header: ", what));
    };
    SP_ASSIGN_OR_RETURN(const auto prefix, Take(kHeaderLengthBytes));
    const absl::string_view first(reinterpret_cast<const char*>(prefix.data()), prefix.size());
    const auto length = ParseHeaderLength(first, record.size_bytes(), record.key());
    if (!length.ok()) return fail(std::string(length.status().message()));
    const int64_t data_start = record.tensors(0).offset();
    if (kHeaderLengthBytes + *length != data_start || data_start % kDataAlignment != 0) {
      return fail(absl::StrCat("data starts at ", kHeaderLengthBytes + *length, ", want ",
                               data_start, " and a multiple of ", kDataAlignment));
    }
    SP_ASSIGN_OR_RETURN(const auto json, Take(*length));
    const auto header =
        ParseHeader(absl::string_view(reinterpret_cast<const char*>(json.data()), json.size()),
                    record.size_bytes(), record.key());
    if (!header.ok()) return fail(std::string(header.status().message()));
    const v1::Manifest& manifest = run_.documents.manifest();
    const std::map<std::string, std::string> metadata = PartMetadata(
        manifest.layout_fingerprint(), file_->rank, manifest.kernel_target().profile());
    for (const auto& [key, want] : metadata) {
      const auto it = header->metadata.find(key);
      const std::string found = it == header->metadata.end() ? "absent" : it->second;
      if (found != want) return fail(absl::StrCat(key, " is ", found, ", want ", want));
    }
    return CheckHeaderTensors(header->tensors);
  }

  absl::Status CheckHeaderTensors(const TensorTable& tensors) const {
    const v1::FileRecord& record = *file_->record;
    if (tensors.size() != record.tensors_size()) {
      return absl::DataLossError(absl::StrCat(record.key(), ": header: ", tensors.size(),
                                              " tensors, want ", record.tensors_size()));
    }
    const auto describe = [](const std::string& name, const std::string& dtype, const auto& shape,
                             int64_t offset, int64_t size) {
      std::string text = absl::StrCat(name, " ", dtype, " [");
      for (const int64_t extent : shape) absl::StrAppend(&text, extent, ",");
      return absl::StrCat(text, "] ", size, " bytes at ", offset);
    };
    for (int t = 0; t < record.tensors_size(); ++t) {
      const TensorInfo info = tensors.at(t);
      const v1::TensorRecord& want = record.tensors(t);
      const std::string found = describe(std::string(info.name), std::string(DtypeName(info.dtype)),
                                         info.shape, info.offset, info.size_bytes);
      const std::string wanted =
          describe(want.name(), want.dtype(), want.shape(), want.offset(), want.size_bytes());
      if (found != wanted) {
        return absl::DataLossError(
            absl::StrCat(record.key(), ": header: tensor ", found, ", want ", wanted));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckTensor(int index) {
    const v1::TensorRecord& tensor = file_->record->tensors(index);
    uint32_t crc = 0;
    if (IsDense(tensor)) {
      SP_ASSIGN_OR_RETURN(crc, CheckDense(index));
    } else {
      SP_ASSIGN_OR_RETURN(crc, CheckFused(index));
    }
    const std::string found = absl::StrFormat("%08x", crc);
    if (found != tensor.native_crc32c()) {
      return absl::DataLossError(
          absl::StrCat("native CRC-32C is ", found, ", want ", tensor.native_crc32c()));
    }
    return absl::OkStatus();
  }

  // Bytes as they were in the source, and behind them the tail.
  absl::StatusOr<uint32_t> CheckDense(int index) {
    const v1::TensorRecord& tensor = file_->record->tensors(index);
    const int64_t native = tensor.size_bytes() - tensor.tail_bytes();
    uint32_t crc = 0;
    if (run_.source != nullptr) {
      SP_ASSIGN_OR_RETURN(crc, CompareDense(index, native));
    } else {
      SP_ASSIGN_OR_RETURN(crc, CrcOf(native));
    }
    for (int64_t at = 0; at < tensor.tail_bytes(); at += kWordBytes) {
      SP_ASSIGN_OR_RETURN(const auto word, Take(kWordBytes));
      if (std::memcmp(word.data(), kMinusInfinity.data(), kWordBytes) == 0) continue;
      return absl::DataLossError(
          absl::StrCat("byte ", native + at, " onwards is not minus infinity"));
    }
    native_bytes_ += native;
    pad_bytes_ += tensor.tail_bytes();
    return crc;
  }

  absl::StatusOr<uint32_t> CrcOf(int64_t size) {
    uint32_t crc = 0;
    for (int64_t at = 0; at < size;) {
      const int64_t piece = std::min(kReadBytes, size - at);
      SP_ASSIGN_OR_RETURN(const auto bytes, Take(piece));
      crc = Crc32c(crc, bytes);
      at += piece;
    }
    return crc;
  }

  // As CrcOf(), with each byte held against the source's.
  absl::StatusOr<uint32_t> CompareDense(int index, int64_t size) {
    const SlicePlan& plan = run_.source->slices();
    const DenseTensor& dense = plan.dense_tensors()[static_cast<size_t>(Planned(index).source)];
    uint32_t crc = 0;
    int64_t at = 0;
    for (const DenseSource& source : dense.sources) {
      const Slice slice = plan.DenseSliceOf(dense, source, file_->rank);
      slices_.resize(1);
      slices_[0].Start(slice);
      const int64_t piece_rows = slice.source_row_bytes == 1 ? kReadBytes : 1;
      for (int64_t row = 0; row < slice.rows; row += piece_rows) {
        const int64_t rows = std::min(piece_rows, slice.rows - row);
        SP_ASSIGN_OR_RETURN(const auto bytes, Take(rows * slice.col_bytes));
        crc = Crc32c(crc, bytes);
        SP_ASSIGN_OR_RETURN(const uint8_t* want, SourceRows(slice, row, rows));
        SP_RETURN_IF_ERROR(Compare(bytes, want, absl::StrCat("byte ", at, " onwards")));
        at += rows * slice.col_bytes;
      }
    }
    if (at == size) return crc;
    return absl::DataLossError(absl::StrCat(size, " source bytes, the plan has ", at));
  }

  // Rows of a slice: one that is cut out of a longer one, or several bytes.
  absl::StatusOr<const uint8_t*> SourceRows(const Slice& slice, int64_t row, int64_t rows) {
    if (slice.source_row_bytes > 1) return slices_[0].Row(*run_.source, row);
    copied_.resize(rows);
    SP_RETURN_IF_ERROR(
        run_.source->Read(slice.tensor, slice.row_begin + row, absl::MakeSpan(copied_)));
    return copied_.data();
  }

  absl::StatusOr<uint32_t> CheckFused(int index) {
    SP_ASSIGN_OR_RETURN(const TensorGeometry geometry, ReadGeometry(file_->record->tensors(index)));
    const int64_t cols = OutputCols(geometry.job);
    const int64_t half_bytes = geometry.native_rows / geometry.halves * geometry.job.native_cols;
    uint32_t crc = 0;
    for (int64_t expert = 0; expert < geometry.experts; ++expert) {
      half_crc_ = {0, 0};
      if (run_.source != nullptr) StartExpert(index, expert);
      for (int64_t begin = 0; begin < geometry.job.rows; begin += geometry.batch_rows) {
        const int64_t end = std::min(begin + geometry.batch_rows, geometry.job.rows);
        SP_ASSIGN_OR_RETURN(const auto block, Take((end - begin) * cols));
        absl::Status status = Unshuffle(geometry.job, begin, end, block.data(), rows_.data());
        if (status.ok()) status = CheckRows(geometry, begin, end);
        if (!status.ok()) return Prefixed(absl::StrCat("expert ", expert), status);
      }
      for (int half = 0; half < geometry.halves; ++half) {
        crc = Crc32cCombine(crc, half_crc_[half], half_bytes);
      }
    }
    SP_RETURN_IF_ERROR(CheckTail(geometry));
    native_bytes_ += geometry.native_bytes();
    pad_bytes_ += file_->record->tensors(index).size_bytes() - geometry.native_bytes();
    return crc;
  }

  // Un-shuffled rows: native ones go into the CRC of their half, pad rows are zero. Pad columns
  // were checked when they were un-shuffled.
  absl::Status CheckRows(const TensorGeometry& geometry, int64_t begin, int64_t end) {
    const int64_t half_rows = geometry.job.rows / geometry.halves;
    const int64_t native_rows = geometry.native_rows / geometry.halves;
    const uint8_t* row = rows_.data();
    for (int64_t out = begin; out < end; ++out, row += geometry.job.padded_cols) {
      const int64_t logical = LogicalRow(geometry.job, out);
      const int64_t half = logical / half_rows;
      if (logical % half_rows < native_rows) {
        const auto native = absl::MakeConstSpan(row, geometry.job.native_cols);
        half_crc_[half] = Crc32c(half_crc_[half], native);
        if (run_.source != nullptr) SP_RETURN_IF_ERROR(CompareRow(logical, native));
        continue;
      }
      const auto pad = absl::MakeConstSpan(row, geometry.job.padded_cols);
      const int64_t other = FirstOther(pad, 0);
      if (other < geometry.job.padded_cols) {
        return absl::DataLossError(
            absl::StrCat("pad row ", logical, ", byte ", other, " is ", pad[other], ", want 0"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckTail(const TensorGeometry& geometry) {
    for (int64_t at = 0; at < geometry.tail_bytes;) {
      const int64_t size = std::min(kReadBytes, geometry.tail_bytes - at);
      SP_ASSIGN_OR_RETURN(const auto bytes, Take(size));
      const int64_t other = FirstOther(bytes, geometry.fill);
      if (other < size) {
        return absl::DataLossError(absl::StrCat("byte ", at + other, " of the tail is ",
                                                bytes[other], ", want ", geometry.fill));
      }
      at += size;
    }
    return absl::OkStatus();
  }

  // -- Comparison with the source --

  const PartTensor& Planned(int index) const {
    return run_.source->PartOf(file_->record->key()).part->tensors[index];
  }

  void StartExpert(int index, int64_t expert) {
    const PlannedPart& planned = run_.source->PartOf(file_->record->key());
    const SlicePlan& plan = run_.source->slices();
    const std::vector<Slice> slices =
        plan.SlicesOf(plan.regions()[planned.region],
                      plan.FusedTensorsOf(planned.rank)[planned.part->tensors[index].source],
                      planned.rank, expert);
    slices_.resize(slices.size());
    for (size_t s = 0; s < slices.size(); ++s) slices_[s].Start(slices[s]);
  }

  absl::Status CompareRow(int64_t logical, absl::Span<const uint8_t> native) {
    for (SliceRows& rows : slices_) {
      const int64_t row = logical - rows.slice().first_row;
      if (row < 0 || row >= rows.slice().rows) continue;
      SP_CHECK(rows.slice().col_bytes == static_cast<int64_t>(native.size()));
      SP_ASSIGN_OR_RETURN(const uint8_t* bytes, rows.Row(*run_.source, row));
      return Compare(native, bytes, absl::StrCat("row ", logical));
    }
    return absl::DataLossError(absl::StrCat("row ", logical, " comes from no source tensor"));
  }

  absl::Status Compare(absl::Span<const uint8_t> found, const uint8_t* want,
                       const std::string& where) {
    compared_bytes_ += static_cast<int64_t>(found.size());
    if (std::memcmp(found.data(), want, found.size()) == 0) return absl::OkStatus();
    size_t at = 0;
    while (found[at] == want[at]) ++at;
    return absl::DataLossError(
        absl::StrCat(where, ", byte ", at, " is ", found[at], ", the source has ", want[at]));
  }

  absl::StatusOr<absl::Span<const uint8_t>> Take(int64_t size) {
    if (run_.failed) return absl::CancelledError("another thread failed");
    unreported_bytes_ += size;
    if (unreported_bytes_ >= kProgressBytes) {
      run_.AddDone(unreported_bytes_);
      unreported_bytes_ = 0;
    }
    return stream_.Next(size);
  }

  Run& run_;
  FileStream stream_;
  std::vector<uint8_t> rows_;
  std::vector<uint8_t> copied_;
  std::vector<SliceRows> slices_;
  const DataFile* file_ = nullptr;
  std::array<uint32_t, 2> half_crc_{};
  int64_t native_bytes_ = 0;
  int64_t pad_bytes_ = 0;
  int64_t compared_bytes_ = 0;
  int64_t unreported_bytes_ = 0;
};

absl::StatusOr<int> ThreadsFor(const BufferNeed& need, const VerifyOptions& options, size_t files) {
  const int64_t fit = options.memory_budget_bytes / need.Total();
  if (fit < 1) {
    return absl::ResourceExhaustedError(absl::StrCat("verification needs ", need.Total(),
                                                     " bytes a thread, the budget is ",
                                                     options.memory_budget_bytes));
  }
  return static_cast<int>(std::min({fit, int64_t{std::max(options.threads, 1)},
                                    static_cast<int64_t>(std::max<size_t>(files, 1))}));
}

}  // namespace

absl::StatusOr<VerifyReport> VerifyArtifact(ObjectStore& artifact, const VerifyOptions& options) {
  SP_ASSIGN_OR_RETURN(const Documents documents, Documents::Read(artifact, options.trusted));
  std::unique_ptr<SourceSide> source;
  if (options.source != nullptr) {
    SP_ASSIGN_OR_RETURN(source, SourceSide::Make(options, documents, artifact.uri()));
  }
  SP_ASSIGN_OR_RETURN(const BufferNeed need, NeedOf(documents.files(), source.get()));
  SP_ASSIGN_OR_RETURN(const int threads, ThreadsFor(need, options, documents.files().size()));
  Run run{.artifact = artifact,
          .documents = documents,
          .source = source.get(),
          .options = options,
          .total_bytes = documents.manifest().total_bytes(),
          .report = documents.Report()};
  const auto work = [&run, &need] {
    const absl::Status status = FileChecker(run, need).CheckAll();
    if (status.ok()) return;
    absl::MutexLock lock(&run.mu);
    if (!run.failed.exchange(true)) run.error = status;
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  absl::MutexLock lock(&run.mu);
  SP_RETURN_IF_ERROR(run.error);
  if (source != nullptr) SP_RETURN_IF_ERROR(source->CheckUnchanged());
  return run.report;
}

}  // namespace shardprep
