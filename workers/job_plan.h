// A job's plan: the spec with every default decided, the slice plan, and the three values that name
// things. Made by the controller before a job is accepted, and made again by each worker from the
// spec and the headers, so that a worker can refuse to write what the controller did not plan.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/target.pb.h"
#include "workers/block_plan.h"
#include "workers/policy_file.h"
#include "workers/slice_plan.h"

namespace shardprep {

class S3Connection;

struct JobPlan {
  v1::PrepJobSpec spec;  // defaults filled in, URIs normalised
  v1::PlanSummary summary;
  std::string fingerprint;         // layout fingerprint, 64 hexadecimal digits
  std::string fingerprint_inputs;  // RFC 8785 JSON whose SHA-256 it is
  // Canonical JSON of file name -> version, of data files and files to copy: changes when one does.
  std::string source_token;
  SlicePlan slices;
  MemoryNeed memory;  // of one lease

  const v1::Target& target() const { return spec.targets(0); }
};

struct PlanOptions {
  int64_t memory_budget_bytes = int64_t{512} << 20;
  int thread_count = 1;
  // Directories that symbolic links of the source may lead into, besides its own root.
  std::vector<std::string> allowed_source_roots;
  std::shared_ptr<S3Connection> s3;  // for s3:// URIs (workers/open_store.h)
};

// Reads the checkpoint's headers and plans a spec with one target. Writes nothing. For several see
// PlanTargets() (workers/target_set.h).
// Errors: INVALID_ARGUMENT (spec or checkpoint wrong in any state, or several targets),
// FAILED_PRECONDITION (a file is missing, a profile does not go with a backend, a source that is
// itself prepared), NOT_FOUND (no such source), UNIMPLEMENTED (fused shared experts).
absl::StatusOr<std::shared_ptr<const JobPlan>> PlanJob(const v1::PrepJobSpec& spec,
                                                       const PlanOptions& options);

// The same in two steps, of which the first is done once for all targets of a job: what is read of
// the source, and the plan of a normalised spec with one target.
struct PlanSource {
  PolicyFile policy;
  std::unique_ptr<ObjectStore> store;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const MoeCheckpoint> moe;
};
absl::StatusOr<PlanSource> ReadPlanSource(const v1::PrepJobSpec& spec, const PlanOptions& options);
absl::StatusOr<std::shared_ptr<const JobPlan>> PlanTarget(const v1::PrepJobSpec& spec,
                                                          const PlanSource& source,
                                                          const PlanOptions& options);

// The spec with URIs normalised and defaults that need no checkpoint filled in. Two specs mean the
// same job exactly when these are equal. Errors: INVALID_ARGUMENT naming the field, of several
// targets with which one it is in ("targets[1]: ...").
absl::StatusOr<v1::PrepJobSpec> NormalizeSpec(const v1::PrepJobSpec& spec);

// Of several targets, which one an error is about; OK stays OK.
absl::Status InTarget(const absl::Status& status, int32_t target, int32_t target_count);

// What a data file says of itself in its `__metadata__`. `rank` may be kReplicatedRank.
std::map<std::string, std::string> PartMetadata(const std::string& fingerprint, int32_t rank,
                                                const std::string& profile);

// Bytes of a data file's header: safetensors header of the part with its PartMetadata. The part's
// file size is this string's size plus PartPlan::data_bytes.
absl::StatusOr<std::string> PartHeader(const JobPlan& plan, const PartPlan& part, int32_t rank);

// Key of a part's file.
std::string PartKeyOf(const PartPlan& part, int32_t rank);

// Ranks of a routed region that one lease can cover under a budget, at least 1. INVALID_ARGUMENT
// stating the minimum when not even one fits.
absl::StatusOr<int32_t> RanksPerLease(const JobPlan& plan, int64_t memory_budget_bytes);

}  // namespace shardprep
