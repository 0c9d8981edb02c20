// The version of this build, as it appears in manifests, metrics and the worker protocol.
#pragma once

namespace shardprep {

inline constexpr char kToolVersion[] = "0.1.0";

}  // namespace shardprep
