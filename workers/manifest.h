// What a committed artefact says of itself: manifest.json, the rank manifests that it refers to,
// and the records of files in those. Reading and checking, for whoever has an artefact and needs no
// plan; who writes it is artifact.cc.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shardprep/v1/manifest.pb.h"
#include "workers/object_store.h"

namespace shardprep {

// Manifest.stage of every artefact here.
inline constexpr char kPreparedStage[] = "prepared";

// Reads and parses manifest.json. NOT_FOUND when there is none, INVALID_ARGUMENT when it is
// malformed or not one of ours, FAILED_PRECONDITION for another format version.
absl::StatusOr<v1::Manifest> ReadManifest(ObjectStore& store);

// The bytes of manifest.json. NOT_FOUND.
absl::StatusOr<std::string> ReadManifestText(ObjectStore& store);

// The manifest from its bytes.
absl::StatusOr<v1::Manifest> ParseManifest(const std::string& text);

// Reads the rank manifest that `file` refers to. DATA_LOSS when it is missing or its size or
// SHA-256 is not as referred to.
absl::StatusOr<v1::RankManifest> ReadRankManifest(ObjectStore& store, const v1::SmallFile& file);

// The same from the bytes of the rank manifest.
absl::StatusOr<v1::RankManifest> ParseRankManifest(const std::string& text,
                                                   const v1::SmallFile& file);

// Whether a file's digests agree with its size and with each other, and its tensors lie in it
// without overlap: then chunk digests can be relied on for every byte. DATA_LOSS naming the file.
absl::Status CheckFileRecord(const v1::FileRecord& file);

// Reads the object that the record describes through `buffer`, of at least one byte, and compares
// its digest. DATA_LOSS naming the object, what was recorded and what was found.
absl::Status CheckFileBytes(const v1::FileRecord& file, ObjectStore& store,
                            absl::Span<uint8_t> buffer);

// Content id: SHA-256, in hexadecimal, over one line for each file of the artefact except
// manifest.json, sorted bytewise: the key, a NUL, the digest, a line feed. The digest of a data
// file is its "sha256-16m:<hex>", that of a small file "sha256:<hex>".
// `manifest` lists the small files.
std::string ContentId(const std::vector<v1::RankManifest>& ranks, const v1::Manifest& manifest);

}  // namespace shardprep
