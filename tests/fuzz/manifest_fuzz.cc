// The stored documents. Input: a byte that chooses the kind, then the JSON.
//
// The seal of a document refuses nearly every mutation, which is its purpose; so the message is
// also sealed anew here, as by somebody who wants the digests to be right, and read again.
#include <string>

#include <google/protobuf/util/json_util.h>

#include "shardprep/v1/manifest.pb.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/digest.h"
#include "workers/journal.h"
#include "workers/manifest.h"
#include "workers/plan_differences.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

// Without the bits that only tell how a float was spelt: bytes of equal messages are equal.
std::string BytesOf(const google::protobuf::Message& message) {
  return message.SerializePartialAsString();
}

// Reads the JSON, seals it, and demands the same message and the same text again.
template <typename Message>
bool ReadSealed(const std::string& json, Message& message) {
  Message direct;
  ParseStoredJson(json, "direct", kFormatVersion, direct).IgnoreError();
  if (!google::protobuf::util::JsonStringToMessage(json, &message).ok()) return false;
  message.set_format_version(kFormatVersion);
  const auto text = StoredJson(message);
  if (!text.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(text.status()), text.status().ToString());
    return false;
  }
  Message again;
  const absl::Status parsed = ParseStoredJson(*text, "again", kFormatVersion, again);
  FUZZ_REQUIRE(parsed.ok(), parsed.ToString());
  const auto second = StoredJson(again);
  FUZZ_REQUIRE(second.ok() && *second == *text, *text);
  message = std::move(again);
  return true;
}

void CheckFile(const v1::FileRecord& file) {
  if (!CheckFileRecord(file).ok()) return;
  int64_t end = 0;
  for (const v1::TensorRecord& tensor : file.tensors()) {
    FUZZ_REQUIRE(tensor.offset() >= end && tensor.size_bytes() >= 0, file.key());
    end = tensor.offset() + tensor.size_bytes();
    FUZZ_REQUIRE(end >= tensor.offset() && end <= file.size_bytes(), file.key());
  }
}

void FuzzManifest(const std::string& json) {
  v1::Manifest manifest;
  ParseManifest(json).status().IgnoreError();
  if (!ReadSealed(json, manifest)) return;
  manifest.set_stage("prepared");
  manifest.set_layout_fingerprint(Sha256Hex(manifest.fingerprint_inputs()));
  const auto text = StoredJson(manifest);
  if (!text.ok()) return;
  const auto read = ParseManifest(*text);
  FUZZ_REQUIRE(read.ok(), read.status().ToString());
  FUZZ_REQUIRE(BytesOf(*read) == BytesOf(manifest), *text);
  FUZZ_REQUIRE(DescribeInputs(manifest.fingerprint_inputs(), manifest.fingerprint_inputs()).empty(),
               manifest.fingerprint_inputs());
  DescribeInputs(manifest.fingerprint_inputs(), manifest.source_token());
  FUZZ_REQUIRE(ContentId({}, manifest).size() == 64, "");
}

void FuzzRankManifest(const std::string& json) {
  v1::RankManifest rank;
  if (!ReadSealed(json, rank)) return;
  const auto text = StoredJson(rank);
  if (!text.ok()) return;
  v1::SmallFile file;
  file.set_key("rank-0.json");
  file.set_size_bytes(static_cast<int64_t>(text->size()));
  file.set_sha256(Sha256Hex(*text));
  const auto read = ParseRankManifest(*text, file);
  FUZZ_REQUIRE(read.ok(), read.status().ToString());
  for (const v1::FileRecord& data : read->files()) CheckFile(data);
  FUZZ_REQUIRE(ContentId({*read}, v1::Manifest()).size() == 64, "");
  file.set_size_bytes(file.size_bytes() + 1);
  FUZZ_REQUIRE(absl::IsDataLoss(ParseRankManifest(*text, file).status()), *text);
}

void FuzzRecord(const std::string& json) {
  v1::PartRecord record;
  if (!ReadSealed(json, record)) return;
  CheckFile(record.file());
  CheckRecord(record, record).IgnoreError();
}

}  // namespace

void FuzzOne(const std::string& input) {
  if (input.empty()) return;
  const std::string json = input.substr(1);
  switch (input.front()) {
    case 'm':
      return FuzzManifest(json);
    case 'r':
      return FuzzRankManifest(json);
    default:
      return FuzzRecord(json);
  }
}

}  // namespace shardprep
