// What commands share that check a prepared artefact: which one, against what, and with how much.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/cli.h"
#include "service/cli_s3.h"
#include "workers/object_store.h"
#include "workers/resources.h"
#include "workers/verify.h"

namespace shardprep {

struct ArtifactFlags {
  std::string artifact;
  std::string source;  // empty: not compared with one
  std::string alignment_policy;
  std::string allow_source_root;
  int64_t threads = DefaultThreads();
  int64_t memory_budget_bytes = int64_t{256} << 20;
  S3CliFlags s3;

  void AddTo(FlagSet& flags);
};

struct VerifiedArtifact {
  std::unique_ptr<ObjectStore> store;
  VerifyReport report;
};

// Verifies with a progress line. `options` may ask for more than the flags do. Errors: those of
// VerifyArtifact(), and of the flags.
absl::StatusOr<VerifiedArtifact> VerifyWithProgress(const CliContext& context, const char* command,
                                                    const ArtifactFlags& flags,
                                                    VerifyOptions options);

}  // namespace shardprep
