// What lies at a job's destination, as one listing and the documents below `_shardprep/` tell it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardprep/v1/manifest.pb.h"
#include "workers/object_store.h"

namespace shardprep {

// Bound on copied files and signatures.
inline constexpr int64_t kMaxSmallFileBytes = int64_t{256} << 20;

struct JournalEntry {
  std::string key;
  std::string fingerprint;               // by its key
  std::string part_key;                  // by its key
  std::optional<v1::PartRecord> record;  // unset when it cannot be read as a record of that part
};

// A picture of the moment of Scan(): what is written or removed later does not show. Must not
// outlive its store. Errors are those of the store.
class Destination {
 public:
  // Writes nothing. Documents that vanish meanwhile count as absent.
  static absl::StatusOr<Destination> Scan(ObjectStore& store);

  const std::map<std::string, ObjectInfo>& objects() const { return objects_; }
  const std::vector<JournalEntry>& journal() const { return journal_; }
  // What commits that did not finish were about to create, by fingerprint.
  const std::map<std::string, v1::Manifest>& commits() const { return commits_; }
  ObjectStore& store() const { return store_; }

  // Null when there is no such object.
  const ObjectInfo* Find(const std::string& key) const;

  // What the journal says of a part, whether or not it is there as recorded; null when nothing.
  const v1::PartRecord* RecordOf(const std::string& part_key) const;

  // Whether the object that the record describes is there, in the recorded version.
  bool IsThere(const v1::PartRecord& record) const;

  // Whether a record describes the object in its present version.
  bool IsRecorded(const std::string& key) const { return recorded_.contains(key); }

  // Whether a record or a commit of that fingerprint is there.
  bool HasJournal(const std::string& fingerprint) const {
    return journal_fingerprints_.contains(fingerprint);
  }

  // The fingerprint that an object says it belongs to; empty when it says none.
  absl::StatusOr<std::string> FingerprintIn(const std::string& key) const;

  // Whether an object with exactly these bytes is there.
  absl::StatusOr<bool> HasContent(const v1::SmallFile& file) const;

 private:
  explicit Destination(ObjectStore& store) : store_(store) {}

  absl::Status ReadWork(const std::string& key);
  absl::Status ReadCommit(const std::string& key, const std::string& fingerprint);
  absl::StatusOr<std::string> FingerprintInHeader(const std::string& key) const;
  template <typename Message>
  absl::StatusOr<std::string> FingerprintInDocument(const std::string& key) const;

  ObjectStore& store_;
  std::map<std::string, ObjectInfo> objects_;
  std::vector<JournalEntry> journal_;
  std::map<std::string, v1::Manifest> commits_;
  std::set<std::string> journal_fingerprints_;
  std::set<std::string> recorded_;  // keys of parts
};

}  // namespace shardprep
