// The seam between the control plane and what a job does to the world: planning, looking at the
// destination, committing and removing. The real one is service/prep_backend.h; tests have their
// own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/job_queue_types.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

struct PlanFacts {
  v1::PlanSummary summary;
  std::string fingerprint;
  std::string source_token;
  std::string destination;           // normalised URI
  std::vector<RegionTasks> regions;  // with nothing done
};

struct InspectedDestination {
  std::vector<RegionTasks> regions;  // with what is recorded there marked done
  std::optional<v1::ManifestReference> complete;
};

// A job that has been planned. Holds the plan in memory: tens of MB for large checkpoints. Methods
// block on I/O unless they say otherwise; at most one of them runs at a time, except for the const
// ones, which are thread safe.
class PlannedJob {
 public:
  virtual ~PlannedJob() = default;

  virtual const PlanFacts& facts() const = 0;

  // Ranks that one lease covers under a worker's budget; INVALID_ARGUMENT stating the minimum when
  // not even one fits. Does no I/O.
  virtual absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const = 0;

  // Claims the destination against every other job, of this process or another, until the claim is
  // released; held already, it does nothing. FAILED_PRECONDITION when another job has it.
  virtual absl::Status ClaimDestination() = 0;
  // Does no I/O that could wait.
  virtual void ReleaseDestination() = 0;

  // Where the spec asks for it: reads the recorded parts again and forgets those that are not what
  // was recorded. Their keys. Asks `go_on` in between, from any thread, and returns its status when
  // it refuses.
  virtual absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
      const std::function<absl::Status()>& go_on) = 0;

  // What lies at the destination. Writes nothing. FAILED_PRECONDITION when it is something else.
  virtual absl::StatusOr<InspectedDestination> Inspect() = 0;

  // Whether what is left to write fits and may be written. RESOURCE_EXHAUSTED naming free and
  // needed bytes; FAILED_PRECONDITION.
  virtual absl::Status CheckRoom(const InspectedDestination& found) = 0;

  // Before the first write: removes what unfinished jobs of other fingerprints left.
  virtual absl::Status ClearLeftovers() = 0;

  // Publishes the artefact and removes the journal. Idempotent.
  virtual absl::StatusOr<v1::ManifestReference> Commit() = 0;

  // Removes only the journal of a complete artefact.
  virtual absl::Status RemoveJournal() = 0;

  // Deletes all that the job wrote.
  virtual absl::Status RemoveOutput() = 0;

  // Deletes all that the job wrote except for recorded parts, and their records.
  virtual absl::Status RemoveUnrecorded() = 0;
};

// Thread safe.
class JobBackend {
 public:
  virtual ~JobBackend() = default;

  // The spec in its one spelling; specs mean the same job exactly when these are equal. Quick, does
  // no I/O. INVALID_ARGUMENT naming the field.
  virtual absl::StatusOr<v1::PrepJobSpec> Normalize(const v1::PrepJobSpec& spec) = 0;

  // Reads headers and plans a normalised spec; writes nothing. The summary's memory figures are for
  // the given budget. PERMISSION_DENIED for URIs outside the allow-lists; else errors of
  // PlanPrepJob (prep.proto).
  virtual absl::StatusOr<std::unique_ptr<PlannedJob>> Plan(const v1::PrepJobSpec& spec,
                                                           int64_t memory_budget_bytes) = 0;
};

}  // namespace shardprep
