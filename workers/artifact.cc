// How an artefact comes to be at its destination.
//
// Record
//  1. A worker publishes a part under its final name, whole (ObjectWriter::Commit).
//  2. Then it writes the part's record to the journal, `_shardprep/<fingerprint>/<r>-<p>.json`:
//     size, digests, and the ETag that step 1 answered. From here on the part counts. A crash
//     between 1 and 2 leaves a part without a record; its header names the fingerprint that it
//     belongs to, so it is known as ours and the next attempt overwrites it.
//
// Resume
//  3. A record counts when its fingerprint and source token are the plan's, its description of the
//     part is the plan's, and the object has the recorded size and ETag. All else is done again.
//  4. Records of other fingerprints or tokens, and the parts that they describe, are deleted before
//     the first write, unless a manifest makes them part of an artefact. A part goes before its
//     record does, so a crash leaves nothing unaccounted for.
//
// Commit
//  5. The source is as planned: HEAD of every file against its ETag in the plan.
//  6. Coverage of the plan is proved (workers/coverage.h). Then each part of each rank must have a
//     record that says what the plan says; HEAD of each object must give the recorded size and
//     ETag.
//  7. What the commit is about to create besides is written down in
//     `_shardprep/<fingerprint>/commit.json` (a Manifest with these lists only), so that whoever
//     cleans up knows it as ours. Then small files are copied and rank manifests written, and
//     manifest.json.sig where the job signs; an older attempt's signature that differs goes before.
//  8. Step 5 again, as the gate of the last write: manifest.json, if absent. An equal one that is
//     there already means that this commit happened before. Nothing else makes an artefact visible.
//  9. The journal is deleted. A crash before that leaves it beside a whole artefact, harmless.
//
// Whose is an object? Ours if a record describes it with its present ETag, or if it says so itself
// (`__metadata__` of a part, fingerprint of a rank manifest) and the fingerprint is the plan's or
// has a journal here. Nothing else is ever replaced or deleted.
#include "workers/artifact.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "workers/coverage.h"
#include "workers/destination.h"
#include "workers/digest.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/parallel.h"
#include "workers/plan_differences.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

constexpr char kRankNumbering[] = "dp_rank*tensor_parallel_size+tp_rank";
// Of each part that is read again, in each of so many threads.
constexpr int64_t kReadBytes = int64_t{1} << 20;
constexpr int kPartsReadAtOnce = 4;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// -- Documents --

std::string CommitKey(const std::string& fingerprint) {
  return ObjectKey(CommitIntent{.fingerprint = fingerprint});
}

std::string RankManifestKey(int32_t rank) {
  if (rank == kReplicatedRank) return ObjectKey(ReplicatedManifest{});
  return ObjectKey(RankManifest{.rank = rank});
}

std::string ExpertMapKey(int32_t rank) { return ObjectKey(ExpertMap{.rank = rank}); }

std::string ManifestKey() { return ObjectKey(ManifestName{}); }

std::string SignatureKey() { return ObjectKey(ManifestSignature{}); }

v1::SmallFile DescribeSmallFile(const std::string& key, const std::string& bytes) {
  v1::SmallFile file;
  file.set_key(key);
  file.set_size_bytes(static_cast<int64_t>(bytes.size()));
  file.set_sha256(Sha256Hex(bytes));
  return file;
}

v1::ManifestReference ReferenceTo(const v1::Manifest& manifest, const std::string& text,
                                  const ObjectStore& store) {
  v1::ManifestReference reference;
  reference.set_uri(absl::StrCat(store.uri(), "/", ManifestKey()));
  reference.set_sha256(Sha256Hex(text));
  reference.set_layout_fingerprint(manifest.layout_fingerprint());
  reference.set_content_id(manifest.content_id());
  reference.set_rank_count(manifest.rank_count());
  reference.set_file_count(manifest.file_count());
  reference.set_total_bytes(manifest.total_bytes());
  return reference;
}

// -- The plan's side --

// Ranks that have a rank manifest: all of them, also those without parts, and the replicated
// stream when it has any.
std::vector<int32_t> ManifestRanks(const JobPlan& plan) {
  std::vector<int32_t> ranks(plan.slices.rank_count());
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::vector<Region>& regions = plan.slices.regions();
  if (std::any_of(regions.begin(), regions.end(),
                  [](const Region& r) { return r.kind == Region::Kind::kReplicated; })) {
    ranks.push_back(kReplicatedRank);
  }
  return ranks;
}

// Ranks that have an expert map: all under expert parallelism.
std::vector<int32_t> ExpertMapRanks(const JobPlan& plan) {
  if (plan.slices.expert_slots().groups() == 1) return {};
  std::vector<int32_t> ranks(plan.slices.rank_count());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Every name of ours that the plan's artefact has.
std::set<std::string> NeededNames(const JobPlan& plan) {
  std::set<std::string> names = {ManifestKey(), SignatureKey()};
  for (const PlannedPart& planned : PlannedParts(plan)) {
    names.insert(PartKeyOf(*planned.part, planned.rank));
  }
  for (const int32_t rank : ManifestRanks(plan)) names.insert(RankManifestKey(rank));
  for (const int32_t rank : ExpertMapRanks(plan)) names.insert(ExpertMapKey(rank));
  return names;
}

// The keys under which source files are copied, by source name.
absl::StatusOr<std::map<std::string, std::string>> CopiedKeys(const JobPlan& plan) {
  std::map<std::string, std::string> keys;
  for (const SmallFile& file : plan.slices.checkpoint().small_files()) {
    const auto key = CopiedFileKey(file.name);
    if (!key.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("source file cannot be copied: ", MessageOf(key.status())));
    }
    keys[file.name] = *key;
  }
  return keys;
}

// Records of this plan by (rank, part).
using Records = std::map<std::pair<int32_t, int32_t>, v1::PartRecord>;

Records RecordsOf(const JobPlan& plan, const Destination& destination) {
  Records records;
  for (const JournalEntry& entry : destination.journal()) {
    if (!entry.record.has_value() || entry.fingerprint != plan.fingerprint) continue;
    if (entry.record->source_token() != plan.source_token) continue;
    records[{entry.record->rank(), entry.record->part()}] = *entry.record;
  }
  return records;
}

// -- A committed artefact --

// DATA_LOSS when a file that the manifest leads to is missing or not what it was, by what a listing
// and the small files say. FAILED_PRECONDITION for a copied file that somebody changed.
absl::Status CheckFiles(const v1::Manifest& manifest, const Destination& destination) {
  for (const v1::SmallFile& file : manifest.rank_manifests()) {
    SP_ASSIGN_OR_RETURN(const v1::RankManifest rank, ReadRankManifest(destination.store(), file));
    for (const v1::FileRecord& data : rank.files()) {
      const ObjectInfo* info = destination.Find(data.key());
      if (info == nullptr) return absl::DataLossError(absl::StrCat(data.key(), ": missing"));
      if (info->size_bytes != data.size_bytes()) {
        return absl::DataLossError(
            absl::StrCat(data.key(), ": ", info->size_bytes, " bytes, want ", data.size_bytes()));
      }
    }
  }
  for (const v1::SmallFile& file : manifest.expert_maps()) {
    SP_ASSIGN_OR_RETURN(const bool same, destination.HasContent(file));
    if (!same) return absl::DataLossError(absl::StrCat(file.key(), ": missing or changed"));
  }
  for (const v1::SmallFile& file : manifest.copied_files()) {
    if (destination.Find(file.key()) == nullptr) {
      return absl::DataLossError(absl::StrCat(file.key(), ": missing"));
    }
    SP_ASSIGN_OR_RETURN(const bool same, destination.HasContent(file));
    if (!same) {
      return absl::FailedPreconditionError(
          absl::StrCat(file.key(), " at ", destination.store().uri(),
                       " was changed after it was copied, want SHA-256 ", file.sha256()));
    }
  }
  return absl::OkStatus();
}

// The manifest at a destination, if there is one: the very artefact of the plan, or an error.
struct Committed {
  std::optional<v1::ManifestReference> whole;  // set when the artefact is complete
  std::string damage;                          // else, when there is one, what is wrong with it
};

absl::StatusOr<Committed> FindCommitted(const JobPlan& plan, const Destination& destination) {
  if (destination.Find(ManifestKey()) == nullptr) return Committed{};
  ObjectStore& store = destination.store();
  SP_ASSIGN_OR_RETURN(const std::string text, store.Get(ManifestKey(), kMaxDocumentBytes));
  const auto manifest = ParseManifest(text);
  if (absl::IsInvalidArgument(manifest.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(store.uri(),
                     " holds a manifest.json that is not ours, and the job needs the "
                     "name: ",
                     MessageOf(manifest.status())));
  }
  SP_RETURN_IF_ERROR(manifest.status());
  if (manifest->layout_fingerprint() != plan.fingerprint) {
    return absl::FailedPreconditionError(
        absl::StrCat(store.uri(), " holds another artefact: ",
                     DescribeInputs(manifest->fingerprint_inputs(), plan.fingerprint_inputs)));
  }
  if (manifest->source_token() != plan.source_token) {
    return absl::FailedPreconditionError(absl::StrCat(
        store.uri(), " holds this artefact of a source that has changed since (file versions): ",
        DescribeTokens(manifest->source_token(), plan.source_token)));
  }
  const absl::Status files = CheckFiles(*manifest, destination);
  if (absl::IsDataLoss(files)) {
    return Committed{.whole = std::nullopt, .damage = MessageOf(files)};
  }
  SP_RETURN_IF_ERROR(files);
  return Committed{.whole = ReferenceTo(*manifest, text, store), .damage = ""};
}

// FAILED_PRECONDITION when the signer has not signed the committed artefact.
absl::Status CheckSigned(const SigningKey* signer, ObjectStore& store) {
  if (signer == nullptr) return absl::OkStatus();
  SP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(store));
  SP_ASSIGN_OR_RETURN(const std::string want, signer->Sign(text));
  const auto found = store.Get(SignatureKey(), kMaxSmallFileBytes);
  if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
  if (found.ok() && *found == want) return absl::OkStatus();
  std::string why = "there is none";
  if (found.ok()) {
    const auto id = SignatureKeyId(*found);
    why = !id.ok() ? MessageOf(id.status())
                   : absl::StrCat(*id == signer->key_id() ? "it is of other bytes, by key "
                                                          : "it is by key ",
                                  *id);
  }
  return absl::FailedPreconditionError(
      absl::StrCat(store.uri(), " holds this artefact, but ", SignatureKey(), " is not what key ",
                   signer->key_id(), " makes: ", why,
                   "; \"shardprep sign\" verifies and signs an artefact that is there"));
}

absl::Status NameClash(const std::string& key, const ObjectStore& store, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat(key, " at ", store.uri(), " has a name that the job needs, ", why,
                   "; move it away or choose another destination"));
}

// Whether a commit that did not finish created the copied file or signature `key` as it is now.
absl::StatusOr<bool> IsCreated(const std::string& key, const Destination& destination) {
  for (const auto& [fingerprint, commit] : destination.commits()) {
    for (const v1::SmallFile& created : commit.copied_files()) {
      if (created.key() != key) continue;
      SP_ASSIGN_OR_RETURN(const bool same, destination.HasContent(created));
      if (same) return true;
    }
  }
  return false;
}

// FAILED_PRECONDITION for an object under a name of ours that nothing accounts for, needed or not:
// a loader that takes every part file of a directory would read it. A manifest of this very plan
// (`has_manifest`) accounts for all names of the plan, whatever became of the objects.
absl::Status CheckOwnNames(const JobPlan& plan, const std::set<std::string>& needed,
                           const Destination& destination, bool has_manifest) {
  for (const auto& [key, info] : destination.objects()) {
    const ObjectName name = ParseObjectName(key);
    if (std::holds_alternative<std::monostate>(name) || key == ManifestKey() ||
        absl::StartsWith(key, kWorkPrefix)) {
      continue;
    }
    if (destination.IsRecorded(key) || (has_manifest && needed.contains(key))) continue;
    SP_ASSIGN_OR_RETURN(const bool created, IsCreated(key, destination));
    if (created) continue;
    SP_ASSIGN_OR_RETURN(const std::string fingerprint, destination.FingerprintIn(key));
    const bool ours = fingerprint == plan.fingerprint
                          ? needed.contains(key)
                          : !fingerprint.empty() && destination.HasJournal(fingerprint);
    if (ours) continue;
    const v1::PartRecord* record = destination.RecordOf(key);
    if (record == nullptr) {
      return NameClash(key, destination.store(), "and no record of ours accounts for it");
    }
    return NameClash(key, destination.store(),
                     absl::StrCat("and is not the part that was recorded: ", info.size_bytes,
                                  " bytes in version ", info.etag, ", want ",
                                  record->file().size_bytes(), " in version ", record->etag(),
                                  "; delete it if it is only that part, damaged"));
  }
  return absl::OkStatus();
}

// FAILED_PRECONDITION for a name that something else than an object has: a listing has objects
// only, but a link out of the store, a pipe or a directory takes a name too.
absl::Status CheckNoObstacles(const std::set<std::string>& names, const Destination& destination) {
  for (const std::string& key : names) {
    if (destination.Find(key) != nullptr) continue;
    absl::Status status = destination.store().Head(key).status();
    if (absl::IsNotFound(status)) {
      status = destination.store().CheckNotObstructed(key);
      if (status.ok()) continue;
    }
    return NameClash(key, destination.store(),
                     status.ok() ? "and is no object of its own" : MessageOf(status));
  }
  return absl::OkStatus();
}

// FAILED_PRECONDITION for a file in the place of a copied one that is neither ours nor equal.
absl::Status CheckCopies(const JobPlan& plan, const std::map<std::string, std::string>& keys,
                         ObjectStore& source, const Destination& destination) {
  for (const SmallFile& file : plan.slices.checkpoint().small_files()) {
    const std::string& key = keys.at(file.name);
    if (destination.Find(key) == nullptr) continue;
    SP_ASSIGN_OR_RETURN(const bool ours, IsCreated(key, destination));
    if (ours) continue;
    SP_ASSIGN_OR_RETURN(const std::string bytes, source.Get(file.name, kMaxSmallFileBytes));
    SP_ASSIGN_OR_RETURN(const bool equal, destination.HasContent(DescribeSmallFile(key, bytes)));
    if (!equal) return NameClash(key, destination.store(), "and is not the source's file");
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const JobPlan& plan, ObjectStore& source, const Destination& destination,
                        bool has_manifest) {
  std::set<std::string> names = NeededNames(plan);
  SP_RETURN_IF_ERROR(CheckOwnNames(plan, names, destination, has_manifest));
  SP_ASSIGN_OR_RETURN(const auto copied, CopiedKeys(plan));
  for (const auto& [name, key] : copied) names.insert(key);
  SP_RETURN_IF_ERROR(CheckNoObstacles(names, destination));
  return CheckCopies(plan, copied, source, destination);
}

// -- Removing --

// Many at once: where each is a request, and where a file system puts names on the disk for all
// that wait for it.
absl::Status DeleteAll(ObjectStore& store, const std::vector<std::string>& keys) {
  return TryForEachAtOnce(static_cast<int64_t>(keys.size()), kRequestsAtOnce,
                          [&](int64_t k) { return store.Delete(keys[static_cast<size_t>(k)]); });
}

absl::Status DeleteBelow(ObjectStore& store, const std::string& prefix) {
  SP_ASSIGN_OR_RETURN(const std::vector<ObjectEntry> entries, store.List(prefix));
  std::vector<std::string> keys;
  keys.reserve(entries.size());
  for (const ObjectEntry& entry : entries) keys.push_back(entry.key);
  return DeleteAll(store, keys);
}

absl::Status DeleteTemporaries(const Destination& destination) {
  for (const auto& [key, info] : destination.objects()) {
    const ObjectName name = ParseObjectName(key);
    if (std::holds_alternative<TemporaryFile>(name) || std::holds_alternative<Probe>(name)) {
      SP_RETURN_IF_ERROR(destination.store().Delete(key));
    }
  }
  return absl::OkStatus();
}

// Deletes what a commit that did not finish created.
absl::Status DeleteCreated(const v1::Manifest& commit, const Destination& destination) {
  for (const auto* files :
       {&commit.rank_manifests(), &commit.expert_maps(), &commit.copied_files()}) {
    for (const v1::SmallFile& file : *files) {
      SP_ASSIGN_OR_RETURN(const bool ours, destination.HasContent(file));
      if (ours) SP_RETURN_IF_ERROR(destination.store().Delete(file.key()));
    }
  }
  return absl::OkStatus();
}

// Deletes all parts and rank manifests that are of one of these fingerprints, and are not kept.
absl::Status DeleteOutput(const std::set<std::string>& fingerprints,
                          const std::set<std::string>& keep, const Destination& destination) {
  if (fingerprints.empty()) return absl::OkStatus();
  std::set<std::string> doomed;
  for (const JournalEntry& entry : destination.journal()) {
    if (!fingerprints.contains(entry.fingerprint) || !entry.record.has_value()) continue;
    if (destination.IsThere(*entry.record)) doomed.insert(entry.part_key);
  }
  for (const auto& [key, info] : destination.objects()) {
    if (doomed.contains(key) || absl::StartsWith(key, kWorkPrefix)) continue;
    if (std::holds_alternative<std::monostate>(ParseObjectName(key))) continue;
    SP_ASSIGN_OR_RETURN(const std::string found, destination.FingerprintIn(key));
    if (fingerprints.contains(found)) doomed.insert(key);
  }
  std::vector<std::string> keys;
  std::set_difference(doomed.begin(), doomed.end(), keep.begin(), keep.end(),
                      std::back_inserter(keys));
  return DeleteAll(destination.store(), keys);
}

// Deletes temporary objects and, unless the artefact is committed, what the plan's job wrote here
// except for `keep`.
absl::Status DeleteUncommitted(const JobPlan& plan, const std::set<std::string>& keep,
                               const Destination& found) {
  bool is_committed = false;
  if (found.Find(ManifestKey()) != nullptr) {
    SP_ASSIGN_OR_RETURN(const std::string text,
                        found.store().Get(ManifestKey(), kMaxDocumentBytes));
    const auto manifest = ParseManifest(text);
    is_committed = manifest.ok() && manifest->layout_fingerprint() == plan.fingerprint;
  }
  if (!is_committed) {
    SP_RETURN_IF_ERROR(DeleteOutput({plan.fingerprint}, keep, found));
    const auto commit = found.commits().find(plan.fingerprint);
    if (commit != found.commits().end()) SP_RETURN_IF_ERROR(DeleteCreated(commit->second, found));
  }
  return DeleteTemporaries(found);
}

// Deletes the manifest of a damaged artefact of the plan, so that nobody takes it for a whole one.
// Files of it that no longer say whose they are go first, while the manifest accounts for them.
absl::Status Withdraw(const JobPlan& plan, const Destination& destination) {
  for (const std::string& key : NeededNames(plan)) {
    if (key == ManifestKey() || destination.Find(key) == nullptr) continue;
    SP_ASSIGN_OR_RETURN(const std::string fingerprint, destination.FingerprintIn(key));
    if (fingerprint == plan.fingerprint) continue;
    SP_RETURN_IF_ERROR(destination.store().Delete(key));
  }
  return destination.store().Delete(ManifestKey());
}

// -- Commit --

// Head() of each key, many at once where each is a request.
std::vector<absl::StatusOr<ObjectInfo>> HeadAll(ObjectStore& store,
                                                const std::vector<std::string>& keys) {
  std::vector<absl::StatusOr<ObjectInfo>> infos(keys.size());
  const int at_once = store.PreferredReadBytes() > 0 ? kRequestsAtOnce : 1;
  ForEachAtOnce(static_cast<int64_t>(keys.size()), at_once, [&](int64_t k) {
    infos[static_cast<size_t>(k)] = store.Head(keys[static_cast<size_t>(k)]);
  });
  return infos;
}

absl::Status CheckVersion(const std::string& name, const absl::StatusOr<ObjectInfo>& info,
                          const std::string& etag) {
  if (absl::IsNotFound(info.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("source file ", name, " is gone since the job was planned"));
  }
  SP_RETURN_IF_ERROR(info.status());
  if (info->etag == etag) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("source file ", name,
                                                    " changed since the job was planned: version ",
                                                    info->etag, ", want ", etag));
}

absl::Status CheckSourceUnchanged(const JobPlan& plan, ObjectStore& source) {
  const Checkpoint& checkpoint = plan.slices.checkpoint();
  std::vector<std::string> names;
  std::vector<std::string> etags;
  for (const CheckpointFile& file : checkpoint.files()) {
    names.push_back(file.name);
    etags.push_back(file.etag);
  }
  for (const SmallFile& file : checkpoint.small_files()) {
    names.push_back(file.name);
    etags.push_back(file.info.etag);
  }
  const std::vector<absl::StatusOr<ObjectInfo>> infos = HeadAll(source, names);
  for (size_t f = 0; f < names.size(); ++f) {
    SP_RETURN_IF_ERROR(CheckVersion(names[f], infos[f], etags[f]));
  }
  return absl::OkStatus();
}

int64_t NativeBytesOf(const v1::TensorRecord& tensor) {
  if (tensor.expert_count() == 0) return tensor.size_bytes() - tensor.tail_bytes();
  return tensor.expert_count() * tensor.native_rows() * tensor.native_row_bytes();
}

// Step 6: every planned part once, as planned and as stored.
absl::Status ProveRecords(const JobPlan& plan, const Records& records, ObjectStore& store) {
  SP_ASSIGN_OR_RETURN(const CoverageTotals totals, ProveCoverage(plan.slices));
  int64_t native = 0;
  const std::vector<PlannedPart> parts = PlannedParts(plan);
  std::vector<std::string> keys;
  keys.reserve(parts.size());
  for (const PlannedPart& planned : parts) {
    keys.push_back(PartKeyOf(*planned.part, planned.rank));
  }
  const std::vector<absl::StatusOr<ObjectInfo>> infos = HeadAll(store, keys);
  for (size_t p = 0; p < parts.size(); ++p) {
    const PlannedPart& planned = parts[p];
    const std::string& key = keys[p];
    const auto found = records.find({planned.rank, planned.part->part});
    if (found == records.end()) {
      return absl::DataLossError(
          absl::StrCat(key, ": not recorded (", plan.slices.regions()[planned.region].name, ")"));
    }
    const v1::PartRecord& record = found->second;
    SP_ASSIGN_OR_RETURN(const v1::PartRecord want, PlannedRecord(plan, planned));
    SP_RETURN_IF_ERROR(CheckRecord(record, want));
    const auto& info = infos[p];
    if (absl::IsNotFound(info.status())) {
      return absl::DataLossError(absl::StrCat(key, ": recorded, but gone"));
    }
    SP_RETURN_IF_ERROR(info.status());
    if (info->size_bytes != record.file().size_bytes() || info->etag != record.etag()) {
      return absl::DataLossError(absl::StrCat(key, ": ", info->size_bytes, " bytes in version ",
                                              info->etag, ", want ", record.file().size_bytes(),
                                              " in version ", record.etag()));
    }
    for (const v1::TensorRecord& tensor : record.file().tensors()) native += NativeBytesOf(tensor);
  }
  if (records.size() != parts.size()) {
    return absl::DataLossError(
        absl::StrCat(records.size(), " parts are recorded, ", parts.size(), " planned"));
  }
  const int64_t want = totals.routed_bytes + totals.replicated_bytes + totals.dense_bytes;
  if (native != want) {
    return absl::DataLossError(
        absl::StrCat("the records hold ", native, " source bytes, the plan carries ", want));
  }
  return absl::OkStatus();
}

// A job removes the journals of others before its first write (ClearLeftovers), so one that is
// there at its end belongs to a job that writes now, which a store without claims does not keep
// out. Then neither may publish: parts of both have the same names.
absl::Status CheckAlone(const JobPlan& plan, ObjectStore& destination) {
  SP_ASSIGN_OR_RETURN(const std::vector<ObjectEntry> entries, destination.List(kWorkPrefix));
  for (const ObjectEntry& entry : entries) {
    const ObjectName name = ParseObjectName(entry.key);
    std::string fingerprint;
    if (const auto* rank = std::get_if<RankJournal>(&name)) fingerprint = rank->fingerprint;
    if (const auto* all = std::get_if<ReplicatedJournal>(&name)) fingerprint = all->fingerprint;
    if (const auto* commit = std::get_if<CommitIntent>(&name)) fingerprint = commit->fingerprint;
    if (fingerprint.empty() || fingerprint == plan.fingerprint) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        destination.uri(), ": another job writes here, of fingerprint ", fingerprint, " (",
        entry.key, "), want ", plan.fingerprint, "; run one of them again when both have ended"));
  }
  return absl::OkStatus();
}

// The small files of an artefact, in memory.
struct Documents {
  std::map<std::string, std::string> bytes;  // by key
  std::vector<v1::RankManifest> ranks;
  v1::Manifest manifest;
};

absl::Status AddRankManifests(const JobPlan& plan, const Records& records, Documents& documents) {
  for (const int32_t rank : ManifestRanks(plan)) {
    v1::RankManifest document;
    document.set_format_version(kFormatVersion);
    document.set_layout_fingerprint(plan.fingerprint);
    document.set_rank(rank);
    const auto begin = records.lower_bound({rank, 0});
    for (auto it = begin; it != records.end() && it->first.first == rank; ++it) {
      *document.add_files() = it->second.file();
    }
    SP_ASSIGN_OR_RETURN(const std::string text, StoredJson(document));
    *documents.manifest.add_rank_manifests() = DescribeSmallFile(RankManifestKey(rank), text);
    documents.bytes[RankManifestKey(rank)] = text;
    documents.ranks.push_back(std::move(document));
  }
  return absl::OkStatus();
}

absl::Status AddExpertMaps(const JobPlan& plan, Documents& documents) {
  const SlicePlan& slices = plan.slices;
  const ExpertSlots& slots = slices.expert_slots();
  for (const int32_t rank : ExpertMapRanks(plan)) {
    const int32_t group = slices.GroupOf(rank);
    v1::ExpertMap map;
    map.set_format_version(kFormatVersion);
    map.set_layout_fingerprint(plan.fingerprint);
    map.set_rank(rank);
    map.set_expert_parallel_rank(group);
    map.set_moe_tensor_parallel_rank(slices.PlaceInGroup(rank));
    map.set_expert_parallel_size(slots.groups());
    map.set_expert_placement(std::string(PlacementName(slots.placement())));
    map.set_logical_expert_count(slots.logical_count());
    map.set_physical_expert_count(slots.physical_count());
    for (const int32_t slot : slots.PhysicalOf(group)) map.add_physical_experts(slot);
    for (const int32_t expert : slots.LogicalOf(group)) map.add_logical_experts(expert);
    for (const int32_t expert : slots.physical_to_logical()) map.add_physical_to_logical(expert);
    SP_ASSIGN_OR_RETURN(const std::string text, StoredJson(map));
    *documents.manifest.add_expert_maps() = DescribeSmallFile(ExpertMapKey(rank), text);
    documents.bytes[ExpertMapKey(rank)] = text;
  }
  return absl::OkStatus();
}

absl::Status AddCopiedFiles(const JobPlan& plan, ObjectStore& source, Documents& documents) {
  SP_ASSIGN_OR_RETURN(const auto keys, CopiedKeys(plan));
  for (const SmallFile& file : plan.slices.checkpoint().small_files()) {
    SP_ASSIGN_OR_RETURN(std::string bytes, source.Get(file.name, kMaxSmallFileBytes));
    if (static_cast<int64_t>(bytes.size()) != file.info.size_bytes) {
      return absl::FailedPreconditionError(absl::StrCat("source file ", file.name, " has ",
                                                        bytes.size(), " bytes, was planned with ",
                                                        file.info.size_bytes));
    }
    const std::string& key = keys.at(file.name);
    *documents.manifest.add_copied_files() = DescribeSmallFile(key, bytes);
    documents.bytes[key] = std::move(bytes);
  }
  return absl::OkStatus();
}

bool IsShuffled(const SlicePlan& slices) {
  return std::any_of(
      slices.fused_tensors().begin(), slices.fused_tensors().end(), [](const FusedTensor& tensor) {
        return tensor.job.layout != LayoutId::kRowMajor || tensor.job.row_order != RowOrder::kAsIs;
      });
}

void DescribePlan(const JobPlan& plan, v1::Manifest& manifest) {
  const v1::PlanSummary& summary = plan.summary;
  manifest.set_format_version(kFormatVersion);
  manifest.set_tool_version(kToolVersion);
  manifest.set_stage(kPreparedStage);
  manifest.set_layout_fingerprint(plan.fingerprint);
  manifest.set_fingerprint_inputs(plan.fingerprint_inputs);
  manifest.set_source_token(plan.source_token);
  manifest.set_family(summary.family());
  *manifest.mutable_parallel_layout() = plan.target().parallel_layout();
  manifest.set_rank_numbering(kRankNumbering);
  *manifest.mutable_kernel_target() = summary.kernel_target();
  manifest.set_backend_reason(summary.backend_reason());
  manifest.set_gate_mode(summary.gate_mode());
  *manifest.mutable_alignment() = summary.alignment();
  *manifest.mutable_extents() = summary.extents();
  const v1::Extents& extents = summary.extents();
  manifest.set_hidden_pad(extents.padded_hidden() - extents.hidden());
  manifest.set_intermediate_pad(extents.padded_intermediate() - extents.intermediate());
  manifest.set_minimum_aiter_version(summary.minimum_aiter_version());
  *manifest.mutable_fused_tensors() = summary.fused_tensors();
  manifest.set_naming(plan.target().naming());
  manifest.set_carry(plan.spec.carry());
  manifest.set_include_mtp(plan.spec.include_mtp());
  manifest.set_part_size_bytes(plan.spec.part_size_bytes());
  manifest.set_is_shuffled(IsShuffled(plan.slices));
  const ExpertFormat& format = *plan.slices.moe().format;
  if (format.weight_bits == 4) manifest.set_fp4_nibble_order("low-nibble-first");
  if (format.fused_scale != nullptr) {
    const bool f32 = plan.slices.moe().scale_dtype == Dtype::kF32;
    manifest.set_scale_format(f32 ? "f32" : "e8m0");
  }
  manifest.set_expert_format(summary.expert_format());
  manifest.set_physical_expert_count(summary.physical_expert_count());
  *manifest.mutable_rank_shapes() = summary.rank_shapes();
  manifest.set_expert_count(summary.expert_count());
  manifest.set_hidden_size(summary.hidden_size());
  manifest.set_intermediate_size(summary.intermediate_size());
  manifest.set_routed_layer_count(summary.routed_layer_count());
  manifest.set_mtp_layer_count(summary.mtp_layer_count());
  manifest.set_rank_count(summary.rank_count());
  manifest.set_routed_bytes_per_rank(summary.routed_bytes_per_rank());
  manifest.set_padding_bytes_per_rank(summary.padding_bytes_per_rank());
  manifest.set_replicated_bytes(summary.replicated_bytes());
  // Fields that older readers do not know are there only when they say something.
  if (plan.spec.self_contained()) manifest.set_self_contained(true);
  if (plan.spec.slice_dense()) manifest.set_slice_dense(true);
  if (summary.dense_bytes_per_rank() > 0) {
    manifest.set_dense_bytes_per_rank(summary.dense_bytes_per_rank());
  }
  for (const OmittedTensor& tensor : plan.slices.omitted()) {
    v1::NotCarried& entry = *manifest.add_not_carried();
    entry.set_name(tensor.name);
    entry.set_size_bytes(tensor.size_bytes);
    entry.set_reason(tensor.reason);
  }
  *manifest.mutable_stale_index_entries() = summary.stale_index_entries();
}

absl::StatusOr<Documents> MakeDocuments(const JobPlan& plan, const Records& records,
                                        ObjectStore& source) {
  Documents documents;
  DescribePlan(plan, documents.manifest);
  SP_RETURN_IF_ERROR(AddRankManifests(plan, records, documents));
  SP_RETURN_IF_ERROR(AddExpertMaps(plan, documents));
  SP_RETURN_IF_ERROR(AddCopiedFiles(plan, source, documents));
  v1::Manifest& manifest = documents.manifest;
  for (const v1::RankManifest& rank : documents.ranks) {
    manifest.set_file_count(manifest.file_count() + rank.files_size());
    for (const v1::FileRecord& file : rank.files()) {
      manifest.set_total_bytes(manifest.total_bytes() + file.size_bytes());
    }
  }
  manifest.set_content_id(ContentId(documents.ranks, manifest));
  return documents;
}

// Copied files that this commit, or an earlier attempt at it, creates. One that is there already
// belongs to somebody else and must be equal.
absl::StatusOr<std::vector<v1::SmallFile>> CreatedCopies(const JobPlan& plan,
                                                         const Documents& documents,
                                                         const Destination& destination) {
  std::map<std::string, std::string> earlier;  // key -> SHA-256
  if (const auto it = destination.commits().find(plan.fingerprint);
      it != destination.commits().end()) {
    for (const v1::SmallFile& file : it->second.copied_files()) {
      SP_ASSIGN_OR_RETURN(const bool ours, destination.HasContent(file));
      if (ours) earlier[file.key()] = file.sha256();
    }
  }
  std::vector<v1::SmallFile> created;
  for (const v1::SmallFile& file : documents.manifest.copied_files()) {
    if (destination.Find(file.key()) == nullptr || earlier.contains(file.key())) {
      created.push_back(file);
      continue;
    }
    SP_ASSIGN_OR_RETURN(const bool equal, destination.HasContent(file));
    if (!equal) return NameClash(file.key(), destination.store(), "and is not the source's file");
  }
  return created;
}

// A signature that an earlier attempt left and that this one does not write.
absl::Status RemoveOtherSignature(const v1::SmallFile* own, const Destination& destination) {
  if (destination.Find(SignatureKey()) == nullptr) return absl::OkStatus();
  if (own != nullptr) {
    SP_ASSIGN_OR_RETURN(const bool same, destination.HasContent(*own));
    if (same) return absl::OkStatus();
  }
  return destination.store().Delete(SignatureKey());
}

// Step 7. `signature` is empty where the job does not sign.
absl::Status WriteSmallFiles(const JobPlan& plan, Documents& documents,
                             const std::string& signature, const Destination& destination) {
  SP_ASSIGN_OR_RETURN(const std::vector<v1::SmallFile> copies,
                      CreatedCopies(plan, documents, destination));
  v1::Manifest commit;
  commit.set_format_version(kFormatVersion);
  commit.set_layout_fingerprint(plan.fingerprint);
  commit.set_source_token(plan.source_token);
  *commit.mutable_rank_manifests() = documents.manifest.rank_manifests();
  *commit.mutable_expert_maps() = documents.manifest.expert_maps();
  for (const v1::SmallFile& file : copies) *commit.add_copied_files() = file;
  const v1::SmallFile* own_signature = nullptr;
  if (!signature.empty()) {
    *commit.add_copied_files() = DescribeSmallFile(SignatureKey(), signature);
    own_signature = &commit.copied_files(commit.copied_files_size() - 1);
    documents.bytes[SignatureKey()] = signature;
  }
  SP_RETURN_IF_ERROR(RemoveOtherSignature(own_signature, destination));
  SP_ASSIGN_OR_RETURN(const std::string text, StoredJson(commit));
  ObjectStore& store = destination.store();
  SP_RETURN_IF_ERROR(store.Put(CommitKey(plan.fingerprint), text, CommitGate()).status());
  std::vector<std::string> keys;
  for (const auto* files :
       {&commit.copied_files(), &commit.rank_manifests(), &commit.expert_maps()}) {
    for (const v1::SmallFile& file : *files) keys.push_back(file.key());
  }
  return TryForEachAtOnce(static_cast<int64_t>(keys.size()), kRequestsAtOnce, [&](int64_t k) {
    const std::string& key = keys[static_cast<size_t>(k)];
    return store.Put(key, documents.bytes.at(key), CommitGate()).status();
  });
}

// Step 8.
absl::Status PublishManifest(const std::string& text, const CommitGate& gate, ObjectStore& store) {
  absl::Status put = store.PutIfAbsent(ManifestKey(), text, gate).status();
  if (!absl::IsAlreadyExists(put)) return put;
  SP_ASSIGN_OR_RETURN(const std::string there, store.Get(ManifestKey(), kMaxDocumentBytes));
  if (there == text) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("another manifest.json was committed at ",
                                                    store.uri(), " first: SHA-256 ",
                                                    Sha256Hex(there), ", want ", Sha256Hex(text)));
}

}  // namespace

absl::StatusOr<DestinationState> InspectDestination(const JobPlan& plan, ObjectStore& source,
                                                    ObjectStore& destination,
                                                    const SigningKey* signer) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  SP_ASSIGN_OR_RETURN(const Committed committed, FindCommitted(plan, found));
  DestinationState state;
  if (committed.whole.has_value()) {
    SP_RETURN_IF_ERROR(CheckSigned(signer, destination));
    state.kind = DestinationState::Kind::kComplete;
    state.manifest = *committed.whole;
    return state;
  }
  state.damage = committed.damage;
  SP_RETURN_IF_ERROR(CheckNames(plan, source, found, !committed.damage.empty()));
  const Records records = RecordsOf(plan, found);
  std::map<RankTaskId, bool> tasks;
  bool any = false;
  for (const PlannedPart& planned : PlannedParts(plan)) {
    bool& done = tasks.try_emplace({planned.region, planned.rank}, true).first->second;
    const auto it = records.find({planned.rank, planned.part->part});
    if (it == records.end() || !found.IsThere(it->second)) {
      done = false;
      continue;
    }
    SP_ASSIGN_OR_RETURN(const v1::PartRecord want, PlannedRecord(plan, planned));
    const bool counts = CheckRecord(it->second, want).ok();
    done = done && counts;
    any = any || counts;
  }
  for (const auto& [task, done] : tasks) {
    if (done) state.done.push_back(task);
  }
  if (any) state.kind = DestinationState::Kind::kResumable;
  return state;
}

absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
    const JobPlan& plan, ObjectStore& destination, const std::function<absl::Status()>& go_on) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  std::vector<v1::PartRecord> records;
  for (const auto& [task, record] : RecordsOf(plan, found)) {
    if (found.IsThere(record)) records.push_back(record);
  }
  std::vector<absl::Status> outcomes(records.size());
  ForEachAtOnce(static_cast<int64_t>(records.size()), kPartsReadAtOnce, [&](int64_t r) {
    absl::Status& outcome = outcomes[static_cast<size_t>(r)];
    outcome = go_on();
    if (!outcome.ok()) return;
    std::vector<uint8_t> buffer(
        static_cast<size_t>(std::max(kReadBytes, destination.PreferredReadBytes())));
    outcome =
        CheckFileBytes(records[static_cast<size_t>(r)].file(), destination, absl::MakeSpan(buffer));
  });
  std::vector<std::string> damaged;
  for (size_t r = 0; r < records.size(); ++r) {
    if (outcomes[r].ok()) continue;
    if (!absl::IsDataLoss(outcomes[r]) && !absl::IsNotFound(outcomes[r])) return outcomes[r];
    const std::string& key = records[r].file().key();
    for (const JournalEntry& entry : found.journal()) {
      if (entry.fingerprint != plan.fingerprint || entry.part_key != key) continue;
      SP_RETURN_IF_ERROR(destination.Delete(entry.key));
    }
    damaged.push_back(key);
  }
  return damaged;
}

absl::Status ClearLeftovers(const JobPlan& plan, ObjectStore& destination) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  SP_ASSIGN_OR_RETURN(const Committed committed, FindCommitted(plan, found));
  if (committed.whole.has_value()) return absl::OkStatus();
  if (!committed.damage.empty()) SP_RETURN_IF_ERROR(Withdraw(plan, found));
  SP_RETURN_IF_ERROR(DeleteTemporaries(found));

  std::set<std::string> others;
  std::set<std::string> kept;  // parts with a record that counts
  for (const JournalEntry& entry : found.journal()) {
    if (entry.fingerprint != plan.fingerprint) others.insert(entry.fingerprint);
  }
  for (const auto& [fingerprint, commit] : found.commits()) {
    if (fingerprint != plan.fingerprint) others.insert(fingerprint);
  }
  for (const auto& [id, record] : RecordsOf(plan, found)) {
    if (found.IsThere(record)) kept.insert(record.file().key());
  }
  SP_RETURN_IF_ERROR(DeleteOutput(others, kept, found));
  for (const std::string& fingerprint : others) {
    const auto commit = found.commits().find(fingerprint);
    if (commit != found.commits().end()) SP_RETURN_IF_ERROR(DeleteCreated(commit->second, found));
    SP_RETURN_IF_ERROR(DeleteBelow(destination, JournalPrefix(fingerprint)));
  }
  // Of this fingerprint: what was made of another version of the source.
  for (const JournalEntry& entry : found.journal()) {
    if (entry.fingerprint != plan.fingerprint) continue;
    if (entry.record.has_value() && entry.record->source_token() == plan.source_token) continue;
    if (entry.record.has_value() && found.IsThere(*entry.record)) {
      SP_RETURN_IF_ERROR(destination.Delete(entry.part_key));
    }
    SP_RETURN_IF_ERROR(destination.Delete(entry.key));
  }
  const auto own = found.commits().find(plan.fingerprint);
  if (own != found.commits().end() && own->second.source_token() != plan.source_token) {
    SP_RETURN_IF_ERROR(DeleteCreated(own->second, found));
    SP_RETURN_IF_ERROR(destination.Delete(CommitKey(plan.fingerprint)));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ManifestReference> CommitArtifact(const JobPlan& plan, ObjectStore& source,
                                                     ObjectStore& destination,
                                                     const SigningKey* signer) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  SP_ASSIGN_OR_RETURN(const Committed committed, FindCommitted(plan, found));
  if (committed.whole.has_value()) {
    SP_RETURN_IF_ERROR(CheckSigned(signer, destination));
    return *committed.whole;
  }
  SP_RETURN_IF_ERROR(CheckSourceUnchanged(plan, source));
  SP_RETURN_IF_ERROR(CheckAlone(plan, destination));
  if (!committed.damage.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        destination.uri(), " holds a damaged artefact of this plan: ", committed.damage));
  }
  SP_RETURN_IF_ERROR(CheckNames(plan, source, found, /*has_manifest=*/false));
  const Records records = RecordsOf(plan, found);
  SP_RETURN_IF_ERROR(ProveRecords(plan, records, destination));
  SP_ASSIGN_OR_RETURN(Documents documents, MakeDocuments(plan, records, source));
  SP_ASSIGN_OR_RETURN(const std::string text, StoredJson(documents.manifest));
  std::string signature;
  if (signer != nullptr) {
    SP_ASSIGN_OR_RETURN(signature, signer->Sign(text));
  }
  SP_RETURN_IF_ERROR(WriteSmallFiles(plan, documents, signature, found));
  const auto gate = [&] {
    SP_RETURN_IF_ERROR(CheckSourceUnchanged(plan, source));
    return CheckAlone(plan, destination);
  };
  SP_RETURN_IF_ERROR(PublishManifest(text, gate, destination));
  return ReferenceTo(documents.manifest, text, destination);
}

absl::Status RemoveJournal(ObjectStore& destination) {
  return DeleteBelow(destination, kWorkPrefix);
}

absl::Status RemoveJobOutput(const JobPlan& plan, ObjectStore& destination) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  SP_RETURN_IF_ERROR(DeleteUncommitted(plan, /*keep=*/{}, found));
  return DeleteBelow(destination, JournalPrefix(plan.fingerprint));
}

absl::Status RemoveUnrecorded(const JobPlan& plan, ObjectStore& destination) {
  SP_ASSIGN_OR_RETURN(const Destination found, Destination::Scan(destination));
  std::set<std::string> recorded;
  for (const JournalEntry& entry : found.journal()) {
    if (entry.fingerprint != plan.fingerprint || !entry.record.has_value()) continue;
    if (found.IsThere(*entry.record)) recorded.insert(entry.part_key);
  }
  return DeleteUncommitted(plan, recorded, found);
}

absl::Status SignArtifact(ObjectStore& store, const std::string& manifest_sha256,
                          const SigningKey& signer) {
  SP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(store));
  if (Sha256Hex(text) != manifest_sha256) {
    return absl::FailedPreconditionError(
        absl::StrCat(ManifestKey(), " at ", store.uri(), ": SHA-256 ", Sha256Hex(text), ", want ",
                     manifest_sha256, ", that of the manifest that was verified"));
  }
  SP_ASSIGN_OR_RETURN(const std::string signature, signer.Sign(text));
  return store.Put(SignatureKey(), signature, CommitGate()).status();
}

}  // namespace shardprep
