// Fetching: how an inference node gets the shards of its ranks, and nothing that does not fit it.
//
// A shuffle changes neither shape nor dtype, so an engine that loads the wrong artefact computes
// fluent garbage. Therefore a caller says what it expects, at least profile and padded width, and
// gets files only when the manifest agrees.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "workers/object_store.h"
#include "workers/open_store.h"
#include "workers/signature.h"

namespace shardprep {

// One `key=value` of an expectation. Keys: backend, activation, arch, tp, ep, profile, width,
// hidden (both padded, per rank, in elements), gate_mode, aiter (version at hand), fingerprint,
// content.
struct Expectation {
  std::string key;
  std::string value;
};

// Parses `key=value,...`; empty text is no expectation. INVALID_ARGUMENT for an unknown key (lists
// the known ones), a key given twice, an empty value, a number or version that is none.
absl::StatusOr<std::vector<Expectation>> ParseExpectations(const std::string& text);

// Parses `3`, `0,1` or `0-7,9` into ascending ranks. INVALID_ARGUMENT for anything else, for a rank
// given twice, a range that runs backwards, or more than 65,536 ranks.
absl::StatusOr<std::vector<int32_t>> ParseRankList(const std::string& text);

// Compares two AITER versions: negative, zero or positive as `a` is older, equal or newer. Order of
// PEP 440 for release numbers with aN, bN, rcN, .postN, .devN and a +local part, which does not
// count: 0.1.6.dev1 < 0.1.6rc1 < 0.1.6 == 0.1.6.0 < 0.1.6.post2 < 0.1.16. INVALID_ARGUMENT for text
// that is no version.
absl::StatusOr<int> CompareVersions(const std::string& a, const std::string& b);

struct FetchOptions {
  std::vector<int32_t> ranks;  // at least one, none twice
  // Directory to create; its parent is created as needed. An empty directory is filled.
  std::string into;
  std::vector<Expectation> expect;
  // Accepts an artefact without being told its profile and width. What `expect` states is still
  // checked.
  bool no_expect = false;
  // With keys, only an artefact whose manifest one of them signed. The signature is read at the
  // artefact and not fetched: what lies in `into` has been checked.
  TrustedKeys trusted;
  // Chunks of 16 MiB in flight, and so 16 MiB of memory each.
  int parallel = 4;
  // Data bytes at hand, and their total. From any of the threads, one at a time.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

struct FetchReport {
  std::string layout_fingerprint;
  std::string content_id;
  int64_t files = 0;
  int64_t bytes = 0;             // of the directory
  int64_t bytes_downloaded = 0;  // of data files; the rest was there and passed its digests
  bool was_complete = false;     // the directory was whole before; every digest was checked again
};

// Downloads the data files of the ranks, the replicated ones, their rank manifests, the copied
// files and manifest.json into `into`, which appears by one rename when it is whole and durable. An
// interrupted fetch is resumed: what is there is digested again and only chunks that fail are read
// from the store. A directory that already holds this fetch is checked, every byte of it, and left.
// Errors: NOT_FOUND when there is no manifest;
// FAILED_PRECONDITION: an expectation is not met (names field, expected and found); the artefact is
//   not signed and keys are given; the directory
//   holds something else, or is a mount point; another process is fetching into it;
// INVALID_ARGUMENT: no ranks, a rank outside the world (names its size), profile or width not
//   stated; a malformed manifest;
// PERMISSION_DENIED: a key that is not trusted signed the artefact;
// DATA_LOSS: a chunk is wrong twice in a row, or a file of a whole directory is (names file,
// chunk); the signature is not the manifest's; RESOURCE_EXHAUSTED: no space; else what the store
// answers.
absl::StatusOr<FetchReport> FetchRanks(ObjectStore& artifact, const FetchOptions& options);

// The same from a URI that OpenStore() takes.
absl::StatusOr<FetchReport> FetchRanks(const std::string& uri, const OpenStoreOptions& store,
                                       const FetchOptions& options);

}  // namespace shardprep
