// The stored documents of proto/shardprep/v1/manifest.proto as protobuf JSON.
//
// Equal messages give equal bytes: fields by number under their proto names, every field without
// presence written (also zeros and empty lists), 64-bit integers as strings, one space of
// indentation, a newline at the end. The messages hold no maps, whose order would be open.
//
// Documents that nothing else vouches for (part records, the manifest) have a field
// `document_sha256`: SHA-256 of the document with that field empty. StoredJson() sets it in the
// text, ParseStoredJson() checks it and leaves it empty in the message.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace shardprep {

// Bounds on documents that are read: a manifest lists every tensor left behind, a rank manifest 64
// digits for each 16 MiB.
inline constexpr int64_t kMaxDocumentBytes = int64_t{256} << 20;

// The document's bytes. INVALID_ARGUMENT when a string field is not UTF-8.
absl::StatusOr<std::string> StoredJson(const google::protobuf::Message& message);

// Reads what StoredJson() wrote into `message`, which must have a string field `format_version`.
// `name` is the object's key, for messages. Errors:
// INVALID_ARGUMENT: not JSON, a field of the wrong type, an unknown field, more than
//   kMaxDocumentBytes.
// DATA_LOSS: `document_sha256` is not that of the document.
// FAILED_PRECONDITION: a document of another format version than `format_version`, which may have
//   fields that this build does not know; the message names both versions.
absl::Status ParseStoredJson(const std::string& text, const std::string& name,
                             const std::string& format_version, google::protobuf::Message& message);

}  // namespace shardprep
