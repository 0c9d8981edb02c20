// Every name of every stored object is made and parsed here.
//
// At a destination lie, beside copied files (config.json, tokenizer files) under their own names:
//
//   model-rank-{r}-part-{p}.safetensors    RankPart            prepared tensors of one rank
//   model-replicated-part-{p}.safetensors  ReplicatedPart      unchanged tensors, stored once
//   rank-{r}.json, replicated.json         RankManifest, ReplicatedManifest
//   expert-map-rank-{r}.json               ExpertMap
//   manifest.json.sig                      ManifestSignature   where the job signs (signature.h)
//   manifest.json                          ManifestName        written last: its presence commits
//
// and while a job runs, below `_shardprep/`:
//
//   {fingerprint}/{r}-{p}.json             RankJournal         record of a finished part
//   {fingerprint}/replicated-{p}.json      ReplicatedJournal
//   {fingerprint}/commit.json              CommitIntent        what a commit is about to create
//   tmp/{id}                               TemporaryFile       bytes that have no name yet
//   probe-{id}                             Probe               written to see whether that works
//
// Numbers are decimal without leading zeros, 0 to kMaxNameNumber; a fingerprint is 64 lower-case
// hex digits; an id is 1 to 128 of a-z, 0-9 and `-`.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardprep {

// The rank number that stands for "the same for all ranks" in tasks, parts and records.
inline constexpr int32_t kReplicatedRank = -1;

inline constexpr int64_t kMaxNameNumber = 999'999'999;
inline constexpr int64_t kMaxKeyBytes = 1024;

// All that belongs to running jobs; free of objects when none runs or waits for its resumption.
inline constexpr char kWorkPrefix[] = "_shardprep/";
inline constexpr char kTemporaryPrefix[] = "_shardprep/tmp/";

struct RankPart {
  int64_t rank = 0;
  int64_t part = 0;
  bool operator==(const RankPart&) const = default;
};
struct ReplicatedPart {
  int64_t part = 0;
  bool operator==(const ReplicatedPart&) const = default;
};
struct RankManifest {
  int64_t rank = 0;
  bool operator==(const RankManifest&) const = default;
};
struct ReplicatedManifest {
  bool operator==(const ReplicatedManifest&) const = default;
};
struct ExpertMap {
  int64_t rank = 0;
  bool operator==(const ExpertMap&) const = default;
};
struct ManifestName {
  bool operator==(const ManifestName&) const = default;
};
struct ManifestSignature {
  bool operator==(const ManifestSignature&) const = default;
};
struct RankJournal {
  std::string fingerprint;
  int64_t rank = 0;
  int64_t part = 0;
  bool operator==(const RankJournal&) const = default;
};
struct ReplicatedJournal {
  std::string fingerprint;
  int64_t part = 0;
  bool operator==(const ReplicatedJournal&) const = default;
};
struct CommitIntent {
  std::string fingerprint;
  bool operator==(const CommitIntent&) const = default;
};
struct TemporaryFile {
  std::string id;
  bool operator==(const TemporaryFile&) const = default;
};
struct Probe {
  std::string id;
  bool operator==(const Probe&) const = default;
};

// std::monostate is any name that is not one of ours.
using ObjectName = std::variant<std::monostate, RankPart, ReplicatedPart, RankManifest,
                                ReplicatedManifest, ExpertMap, ManifestName, ManifestSignature,
                                RankJournal, ReplicatedJournal, CommitIntent, TemporaryFile, Probe>;

// The key of a name: ObjectKey(RankPart{.rank = 3, .part = 0}). A number, fingerprint or id outside
// the bounds above, or std::monostate, is a broken invariant.
std::string ObjectKey(const ObjectName& name);

// The inverse of ObjectKey(): ParseObjectName(ObjectKey(n)) == n, and any key that ObjectKey()
// would not have made gives std::monostate.
ObjectName ParseObjectName(const std::string& key);

// `_shardprep/{fingerprint}/`, below which the journal of one layout lies.
std::string JournalPrefix(const std::string& fingerprint);

// Whether text is a fingerprint as described above.
bool IsFingerprint(const std::string& text);

// The key under which a source file is copied: its own name. INVALID_ARGUMENT when the name is not
// a valid key, is one of ours or lies below `_shardprep/`.
absl::StatusOr<std::string> CopiedFileKey(const std::string& source_name);

// The one check of keys, whoever made them (an index, a manifest, a request). INVALID_ARGUMENT,
// naming the key, when it is empty, longer than kMaxKeyBytes, starts or ends with `/`, holds an
// empty, `.` or `..` segment, a backslash or a NUL.
absl::Status ValidateObjectKey(const std::string& key);

// A prefix is empty or a valid key followed by `/`. INVALID_ARGUMENT otherwise.
absl::Status ValidateObjectPrefix(const std::string& prefix);

}  // namespace shardprep
