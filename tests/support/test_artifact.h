// A prepared artefact in temporary directories: checkpoint, plan, parts, commit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardprep/v1/manifest.pb.h"
#include "shardprep/v1/prep.pb.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"

namespace shardprep {

std::string ReadFileBytes(const std::string& path);
void WriteFileBytes(const std::string& path, const std::string& bytes);
// Inverts the bits of `mask` in the byte at `offset`, which counts from the end when negative.
void FlipBits(const std::string& path, int64_t offset, uint8_t mask = 0x01);

struct TestArtifactOptions {
  // Every kind of pad: rows (96 of 128 per half, 160 of 256), columns, layout columns.
  CheckpointSpec checkpoint = {
      .hidden = 160, .intermediate = 192, .experts = 3, .layers = 2, .mtp_layers = 0, .files = 2};
  int32_t ranks = 2;
  std::string profile = "aiter-separated";
  std::string architecture = "gfx950";
  int64_t part_size_bytes = 0;
};

// Aborts the test binary when the checkpoint cannot be made or planned.
class TestArtifact {
 public:
  explicit TestArtifact(TestArtifactOptions options = {});

  const JobPlan& plan() const { return *plan_; }
  ObjectStore& source() { return *source_; }
  ObjectStore& destination() { return *destination_; }
  std::string SourcePath(const std::string& key) const { return source_dir_ / key; }
  std::string Path(const std::string& key) const { return destination_path_ + "/" + key; }
  const std::string& destination_path() const { return destination_path_; }

  // Plans the same spec again, as after a change of the source, or another one.
  void Replan(const std::function<void(v1::PrepJobSpec&)>& change = nullptr);
  // Moves on to another, empty destination, and plans for it.
  void UseDestination(const std::string& name);

  // All parts of a region, or of all regions.
  absl::Status PrepareRegionOf(int32_t region);
  absl::Status Prepare();
  absl::StatusOr<v1::ManifestReference> Commit();
  // Prepares, commits and removes the journal, or aborts.
  void Make();

  // Every key at the destination, `_shardprep/` included.
  std::vector<std::string> Keys();

  // Changes a rank manifest (by its index in the manifest) and makes manifest.json agree with it
  // again: what somebody would do who wants the digests to be right.
  void Reseal(int rank_index, const std::function<void(v1::RankManifest&)>& change);
  // Makes the record of a file agree with the file's present bytes, and all else with that.
  void ResealFile(const std::string& key,
                  const std::function<void(v1::FileRecord&)>& change = nullptr);

 private:
  TestArtifactOptions options_;
  TempDir source_dir_;
  TempDir destination_dir_;
  std::string destination_path_;
  std::shared_ptr<const JobPlan> plan_;
  std::unique_ptr<ObjectStore> source_;
  std::unique_ptr<ObjectStore> destination_;
};

}  // namespace shardprep
