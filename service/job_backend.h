// The seam between the control plane and what a job does to the world: planning, looking at the
// destination, committing and removing. The real one is service/prep_backend.h; tests have their
// own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/job_queue_types.h"
#include "shardprep/v1/plan.pb.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

struct PlanFacts {
  v1::PlanSummary summary;  // of the first target, with those of the others in it
  std::string fingerprint;  // of the job: Lease.layout_fingerprint
  std::string source_token;
  std::vector<JobPlace> places;      // by target
  std::vector<RegionTasks> regions;  // with nothing done; ranks numbered as in v1::RankTask
};

struct InspectedDestinations {
  std::vector<RegionTasks> regions;  // with what is recorded there marked done
  // By target, when every destination holds its artefact; else empty.
  std::vector<v1::ManifestReference> complete;
};

// A job that has been planned, with one or several targets. Holds the plan in memory: tens of MB
// for large checkpoints. Methods block on I/O unless they say otherwise; at most one of them runs
// at a time, except for the const ones, which are thread safe. What is said of the destination
// holds for each; the first error counts. A target whose destination holds its artefact already is
// left as it is.
class PlannedJob {
 public:
  virtual ~PlannedJob() = default;

  virtual const PlanFacts& facts() const = 0;

  // Ranks that one lease covers under a worker's budget; INVALID_ARGUMENT stating the minimum when
  // not even one fits. Does no I/O.
  virtual absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const = 0;

  // Claims the destination against every other job, of this process or another, until the claim is
  // released; held already, it does nothing. FAILED_PRECONDITION when another job has it, or has
  // one of several, and then none is claimed.
  virtual absl::Status ClaimDestination() = 0;
  // Does no I/O that could wait.
  virtual void ReleaseDestination() = 0;

  // Where the spec asks for it: reads the recorded parts again and forgets those that are not what
  // was recorded. Their keys; of several targets, behind the destination's URI. Asks `go_on` in
  // between, from any thread, and returns its status when it refuses.
  virtual absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
      const std::function<absl::Status()>& go_on) = 0;

  // What lies at the destination. Writes nothing. FAILED_PRECONDITION when it is something else.
  virtual absl::StatusOr<InspectedDestinations> Inspect() = 0;

  // Whether what is left to write fits and may be written. RESOURCE_EXHAUSTED naming free and
  // needed bytes; FAILED_PRECONDITION.
  virtual absl::Status CheckRoom(const InspectedDestinations& found) = 0;

  // Before the first write: removes what unfinished jobs of other fingerprints left.
  virtual absl::Status ClearLeftovers() = 0;

  // Publishes the artefacts, in the order of the targets, and removes the journals. Idempotent:
  // called again after an error it goes on with what is not published yet.
  virtual absl::StatusOr<std::vector<v1::ManifestReference>> Commit() = 0;

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
