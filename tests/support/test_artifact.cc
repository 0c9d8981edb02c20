#include "tests/support/test_artifact.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "kernels/shuffle.h"
#include "kernels/status_macros.h"
#include "workers/artifact.h"
#include "workers/digest.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/open_store.h"
#include "workers/proto_json.h"
#include "workers/region_prep.h"

namespace shardprep {
namespace {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "test artefact: %s\n", status.ToString().c_str());
  std::abort();
}

template <typename T>
T Require(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

}  // namespace

std::string ReadFileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  SP_CHECK(file.good());
  std::string bytes(static_cast<size_t>(file.tellg()), '\0');
  file.seekg(0);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  SP_CHECK(file.good());
  return bytes;
}

void WriteFileBytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.flush();
  SP_CHECK(file.good());
}

void FlipBits(const std::string& path, int64_t offset, uint8_t mask) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(offset, offset < 0 ? std::ios::end : std::ios::beg);
  const int found = file.get();
  SP_CHECK(file.good());
  file.seekp(offset, offset < 0 ? std::ios::end : std::ios::beg);
  file.put(static_cast<char>(found ^ mask));
  file.flush();
  SP_CHECK(file.good());
}

TestArtifact::TestArtifact(TestArtifactOptions options) : options_(std::move(options)) {
  Require(WriteTestCheckpoint(source_dir_.path(), options_.checkpoint));
  source_ = Require(OpenStore(source_dir_.path(), {}));
  UseDestination("out");
}

void TestArtifact::UseDestination(const std::string& name) {
  destination_path_ = destination_dir_ / name;
  destination_ = Require(OpenStore(destination_path_, {.create = true, .allowed_roots = {}}));
  Replan();
}

void TestArtifact::Replan(const std::function<void(v1::PrepJobSpec&)>& change) {
  v1::PrepJobSpec spec;
  spec.set_source_uri(source_dir_.path());
  spec.set_part_size_bytes(options_.part_size_bytes);
  v1::Target& target = *spec.add_targets();
  target.mutable_parallel_layout()->set_tensor_parallel_size(options_.ranks);
  target.mutable_kernel_target()->set_profile(options_.profile);
  target.mutable_kernel_target()->set_architecture(options_.architecture);
  target.mutable_kernel_target()->set_backend("AITER_MXFP4_BF16");
  target.set_destination_uri(destination_path_);
  if (change) change(spec);
  plan_ = Require(PlanJob(spec, {}));
}

absl::Status TestArtifact::PrepareRegionOf(int32_t region) {
  const std::unique_ptr<Shuffler> shuffler = MakeHostShuffler();
  RegionTask task;
  task.plan = plan_.get();
  task.region = region;
  task.ranks = plan_->slices.RanksOf(plan_->slices.regions()[region]);
  task.source = source_.get();
  task.destination = destination_.get();
  task.shuffler = shuffler.get();
  std::vector<uint8_t> memory(plan_->memory.Total(static_cast<int64_t>(task.ranks.size()), 1));
  task.memory = absl::MakeSpan(memory);
  RegionProgress progress;
  return PrepareRegion(task, progress);
}

absl::Status TestArtifact::Prepare() {
  for (size_t region = 0; region < plan_->slices.regions().size(); ++region) {
    SP_RETURN_IF_ERROR(PrepareRegionOf(static_cast<int32_t>(region)));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::ManifestReference> TestArtifact::Commit() {
  return CommitArtifact(*plan_, *source_, *destination_);
}

void TestArtifact::Make() {
  Require(Prepare());
  Require(Commit());
  Require(RemoveJournal(*destination_));
}

std::vector<std::string> TestArtifact::Keys() {
  std::vector<std::string> keys;
  for (const ObjectEntry& entry : Require(destination_->List(""))) keys.push_back(entry.key);
  return keys;
}

void TestArtifact::Reseal(int rank_index, const std::function<void(v1::RankManifest&)>& change) {
  v1::Manifest manifest = Require(ReadManifest(*destination_));
  std::vector<v1::RankManifest> ranks;
  for (const v1::SmallFile& file : manifest.rank_manifests()) {
    ranks.push_back(Require(ReadRankManifest(*destination_, file)));
  }
  change(ranks[rank_index]);
  const std::string text = Require(StoredJson(ranks[rank_index]));
  v1::SmallFile& file = *manifest.mutable_rank_manifests(rank_index);
  file.set_size_bytes(static_cast<int64_t>(text.size()));
  file.set_sha256(Sha256Hex(text));
  WriteFileBytes(Path(file.key()), text);
  manifest.set_content_id(ContentId(ranks, manifest));
  WriteFileBytes(Path(ObjectKey(ManifestName{})), Require(StoredJson(manifest)));
}

void TestArtifact::ResealFile(const std::string& key,
                              const std::function<void(v1::FileRecord&)>& change) {
  const v1::Manifest manifest = Require(ReadManifest(*destination_));
  for (int r = 0; r < manifest.rank_manifests_size(); ++r) {
    const v1::RankManifest rank =
        Require(ReadRankManifest(*destination_, manifest.rank_manifests(r)));
    for (int f = 0; f < rank.files_size(); ++f) {
      if (rank.files(f).key() != key) continue;
      const std::string bytes = ReadFileBytes(Path(key));
      ChunkedDigest digest;
      digest.Update({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
      const FileDigest found = digest.Finish();
      Reseal(r, [&](v1::RankManifest& document) {
        v1::FileRecord& file = *document.mutable_files(f);
        file.clear_chunk_sha256();
        for (const Sha256Bytes& chunk : found.chunk_sha256) {
          file.add_chunk_sha256(HexEncode(chunk));
        }
        file.set_digest(found.digest);
        if (change) change(file);
      });
      return;
    }
  }
  SP_CHECK(false);
}

}  // namespace shardprep
