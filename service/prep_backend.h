// The real JobBackend: plans over checkpoints, artefacts at destinations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/job_backend.h"
#include "workers/signature.h"

namespace shardprep {

class S3Connection;

struct PrepBackendOptions {
  // Directories and s3:// prefixes that sources and destinations must lie in; empty: anywhere. A
  // URI outside is PERMISSION_DENIED: no other state of the files would make the request right,
  // only the operator can. Directories are compared after symbolic links, too.
  std::vector<std::string> allow_source;
  std::vector<std::string> allow_destination;
  // Directories that symbolic links inside a source may lead into.
  std::vector<std::string> allow_source_root;
  std::shared_ptr<S3Connection> s3;          // for s3:// URIs (workers/open_store.h)
  std::shared_ptr<const SigningKey> signer;  // null: manifests are not signed
  int planning_threads = 4;
};

// INVALID_ARGUMENT when an entry of the options is no URI.
absl::StatusOr<std::unique_ptr<JobBackend>> MakePrepBackend(const PrepBackendOptions& options);

}  // namespace shardprep
