#include "workers/manifest.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/object_names.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

std::string ManifestKey() { return ObjectKey(ManifestName{}); }

}  // namespace

absl::StatusOr<v1::Manifest> ReadManifest(ObjectStore& store) {
  SP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(store));
  return ParseManifest(text);
}

absl::StatusOr<std::string> ReadManifestText(ObjectStore& store) {
  auto text = store.Get(ManifestKey(), kMaxDocumentBytes);
  if (!absl::IsNotFound(text.status())) return text;
  // What is missing may be more than the manifest: the bucket, say.
  return absl::NotFoundError(
      absl::StrCat("no artefact at ", store.uri(), ": ", text.status().message()));
}

absl::StatusOr<v1::Manifest> ParseManifest(const std::string& text) {
  v1::Manifest manifest;
  SP_RETURN_IF_ERROR(ParseStoredJson(text, ManifestKey(), kFormatVersion, manifest));
  if (manifest.stage() != kPreparedStage) {
    return absl::InvalidArgumentError(absl::StrCat(ManifestKey(), ": stage '", manifest.stage(),
                                                   "', want '", kPreparedStage, "'"));
  }
  if (!IsFingerprint(manifest.layout_fingerprint()) ||
      Sha256Hex(manifest.fingerprint_inputs()) != manifest.layout_fingerprint()) {
    return absl::InvalidArgumentError(absl::StrCat(ManifestKey(), ": layout_fingerprint '",
                                                   manifest.layout_fingerprint(),
                                                   "' is not the SHA-256 of fingerprint_inputs"));
  }
  return manifest;
}

absl::StatusOr<v1::RankManifest> ReadRankManifest(ObjectStore& store, const v1::SmallFile& file) {
  const auto text = store.Get(file.key(), kMaxDocumentBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::DataLossError(absl::StrCat(file.key(), ": missing"));
  }
  SP_RETURN_IF_ERROR(text.status());
  return ParseRankManifest(*text, file);
}

absl::StatusOr<v1::RankManifest> ParseRankManifest(const std::string& text,
                                                   const v1::SmallFile& file) {
  if (static_cast<int64_t>(text.size()) != file.size_bytes() || Sha256Hex(text) != file.sha256()) {
    return absl::DataLossError(absl::StrCat(file.key(), ": ", text.size(), " bytes with SHA-256 ",
                                            Sha256Hex(text), ", want ", file.size_bytes(), " with ",
                                            file.sha256()));
  }
  v1::RankManifest manifest;
  SP_RETURN_IF_ERROR(ParseStoredJson(text, file.key(), kFormatVersion, manifest));
  return manifest;
}

absl::Status CheckFileRecord(const v1::FileRecord& file) {
  const auto fail = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat(file.key(), ": ", what));
  };
  if (file.size_bytes() < 0) return fail(absl::StrCat("size ", file.size_bytes()));
  const int64_t chunks =
      file.size_bytes() / kDigestChunkBytes + (file.size_bytes() % kDigestChunkBytes != 0 ? 1 : 0);
  if (file.chunk_sha256_size() != chunks) {
    return fail(absl::StrCat(file.chunk_sha256_size(), " chunk digests for ", file.size_bytes(),
                             " bytes, want ", chunks));
  }
  std::vector<Sha256Bytes> digests;
  for (const std::string& hex : file.chunk_sha256()) {
    const auto bytes = HexDecode(hex);
    if (!bytes.ok() || bytes->size() != sizeof(Sha256Bytes)) {
      return fail(absl::StrCat("chunk digest '", hex, "' is no SHA-256"));
    }
    std::copy(bytes->begin(), bytes->end(), digests.emplace_back().begin());
  }
  if (DigestOfChunks(digests) != file.digest()) {
    return fail(absl::StrCat("digest ", file.digest(), ", but its chunk digests give ",
                             DigestOfChunks(digests)));
  }
  int64_t end = 0;
  for (const v1::TensorRecord& tensor : file.tensors()) {
    if (tensor.offset() < end || tensor.size_bytes() < 0 ||
        tensor.size_bytes() > file.size_bytes() - tensor.offset()) {
      return fail(absl::StrCat("tensor ", tensor.name(), ": ", tensor.size_bytes(), " bytes at ",
                               tensor.offset(), " do not lie in [", end, ", ", file.size_bytes(),
                               ")"));
    }
    end = tensor.offset() + tensor.size_bytes();
  }
  return absl::OkStatus();
}

absl::Status CheckFileBytes(const v1::FileRecord& file, ObjectStore& store,
                            absl::Span<uint8_t> buffer) {
  SP_CHECK(!buffer.empty());
  SP_ASSIGN_OR_RETURN(const auto reader, store.Open(file.key()));
  if (reader->info().size_bytes != file.size_bytes()) {
    return absl::DataLossError(absl::StrCat(file.key(), ": ", reader->info().size_bytes,
                                            " bytes, want ", file.size_bytes()));
  }
  ChunkedDigest digest;
  const auto largest = static_cast<int64_t>(buffer.size());
  for (int64_t at = 0; at < file.size_bytes();) {
    const int64_t piece = std::min(largest, file.size_bytes() - at);
    const absl::Span<uint8_t> bytes = buffer.subspan(0, static_cast<size_t>(piece));
    SP_RETURN_IF_ERROR(reader->ReadAt(at, bytes));
    digest.Update(bytes);
    at += piece;
  }
  const std::string found = digest.Finish().digest;
  if (found == file.digest()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(file.key(), ": reads back as ", found, ", but ", file.digest(), " was written"));
}

std::string ContentId(const std::vector<v1::RankManifest>& ranks, const v1::Manifest& manifest) {
  std::map<std::string, std::string> digests;
  for (const v1::RankManifest& rank : ranks) {
    for (const v1::FileRecord& file : rank.files()) digests[file.key()] = file.digest();
  }
  for (const auto* files :
       {&manifest.rank_manifests(), &manifest.expert_maps(), &manifest.copied_files()}) {
    for (const v1::SmallFile& file : *files) {
      digests[file.key()] = absl::StrCat("sha256:", file.sha256());
    }
  }
  std::string text;
  for (const auto& [key, digest] : digests) {
    text.append(key);
    text.push_back('\0');
    text.append(digest);
    text.push_back('\n');
  }
  return Sha256Hex(text);
}

}  // namespace shardprep
