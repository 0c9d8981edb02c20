// The file of `--targets`: what several targets of one job are, as a JSON list of
// shardprep.v1.Target in protobuf JSON.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "shardprep/v1/target.pb.h"

namespace shardprep {

// The targets as written: destinations may be relative, fields that are not set have no default
// yet. INVALID_ARGUMENT, naming the entry ("targets[1]: "), unless it is a list of 1 to kMaxTargets
// objects, each with a destination, without unknown fields and without a field given twice.
absl::StatusOr<std::vector<v1::Target>> ParseTargets(const std::string& text);

}  // namespace shardprep
