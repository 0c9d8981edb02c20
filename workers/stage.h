// The stages of the data path, for times in progress reports and metrics.
#pragma once

namespace shardprep {

enum class Stage { kRead, kShuffle, kDigest, kWrite };
inline constexpr Stage kStages[] = {Stage::kRead, Stage::kShuffle, Stage::kDigest, Stage::kWrite};
inline constexpr int kStageCount = 4;

// "read", "shuffle", "digest", "write": also the keys of LeaseReport.stage_seconds.
constexpr const char* StageName(Stage stage) {
  switch (stage) {
    case Stage::kRead:
      return "read";
    case Stage::kShuffle:
      return "shuffle";
    case Stage::kDigest:
      return "digest";
    case Stage::kWrite:
      return "write";
  }
  return "";
}

}  // namespace shardprep
