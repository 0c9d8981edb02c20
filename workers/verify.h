// Reads a committed artefact back, every byte of it, and proves that it is what its manifest says:
// the declared permutation of source bytes, and declared fill everywhere else.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "workers/object_store.h"
#include "workers/signature.h"

namespace shardprep {

class S3Connection;

struct VerifyOptions {
  // The checkpoint that the artefact was made from. When set, the plan is made again from it, and
  // every byte of the artefact, those of copied files included, is compared with the source byte
  // that belongs there.
  ObjectStore* source = nullptr;
  // Used with `source` only: where its symbolic links may lead, as for a job, and the replaced
  // alignment policy that the job was given, if it was given one.
  std::vector<std::string> allowed_source_roots;
  std::shared_ptr<S3Connection> s3;  // for s3:// URIs (workers/open_store.h)
  std::string alignment_policy_json;

  // With keys, the manifest must have the signature of one of them.
  TrustedKeys trusted;

  int threads = 1;
  // Bound on all buffers together. Threads are reduced to fit; each needs about 3 MiB for the
  // geometries that exist.
  int64_t memory_budget_bytes = int64_t{256} << 20;
  // Called after each piece with the data bytes checked so far and their total. From any of the
  // threads, one at a time.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

struct VerifyReport {
  std::string layout_fingerprint;
  std::string content_id;
  std::string manifest_sha256;
  int64_t files = 0;  // data files, rank manifests and copied files
  int64_t bytes = 0;  // of them
  int64_t tensors = 0;
  int64_t native_bytes = 0;           // stored bytes that come from the source
  int64_t pad_bytes = 0;              // stored tensor bytes that were checked against their fill
  int64_t source_bytes_compared = 0;  // native bytes that were compared with the source itself
};

// Checks the manifest and everything it leads to: SHA-256 and size of small files, no missing and
// no additional file of ours, content id, totals; of each data file size, header, metadata and the
// digest of every chunk; of each tensor the fill of every pad byte (pad rows, pad columns, layout
// fill, tail) and, un-shuffled, the CRC of its source bytes.
// Errors: NOT_FOUND when there is no manifest; DATA_LOSS, naming file, tensor, expected and found,
// for the first difference; INVALID_ARGUMENT for a malformed manifest; FAILED_PRECONDITION for
// another format version, a source that is not the one that the artefact was made from, or a
// missing signature; PERMISSION_DENIED when a key that is not trusted signed it;
// RESOURCE_EXHAUSTED when one thread's buffers exceed the budget; else what the stores answer.
absl::StatusOr<VerifyReport> VerifyArtifact(ObjectStore& artifact, const VerifyOptions& options);

}  // namespace shardprep
