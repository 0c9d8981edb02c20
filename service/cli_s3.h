// Flags that say how s3:// is reached; for every command that takes URIs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/cli.h"
#include "workers/s3/s3_options.h"

namespace shardprep {

class S3Connection;

class S3CliFlags {
 public:
  void AddTo(FlagSet& flags);

  // A connection as flags and environment say, for OpenStoreOptions::s3; none when no URI is s3://.
  // INVALID_ARGUMENT naming the flag or variable.
  absl::StatusOr<std::shared_ptr<S3Connection>> Connect(const CliContext& context,
                                                        const std::vector<std::string>& uris) const;

  // What was given, for workers that are started to do the same.
  const S3Flags& given() const { return given_; }

 private:
  S3Flags given_;
};

}  // namespace shardprep
