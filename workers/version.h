// What this build is, and what it stores.
#pragma once

namespace shardprep {

// As it appears in manifests, metrics and the worker protocol.
inline constexpr char kToolVersion[] = "0.1.0";

// Of everything that is stored. Part of the fingerprint and of a worker's build.
inline constexpr char kFormatVersion[] = "1";

}  // namespace shardprep
