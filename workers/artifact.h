// The destination of a job: in what state it is, how the artefact is committed, and how the job's
// traces are removed. Design of the protocol in artifact.cc.
//
// Everything here assumes that no other job writes to the destination at the same time; the
// controller sees to that. All functions block on the stores and hold no state of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardprep/v1/manifest.pb.h"
#include "shardprep/v1/prep.pb.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/signature.h"

namespace shardprep {

// A rank's share of a region, or (rank kReplicatedRank) a region of replicated tensors.
struct RankTaskId {
  int32_t region = 0;
  int32_t rank = 0;
  friend bool operator==(const RankTaskId&, const RankTaskId&) = default;
  friend auto operator<=>(const RankTaskId&, const RankTaskId&) = default;
};

struct DestinationState {
  enum class Kind {
    kFresh,      // nothing of ours, or only what ClearLeftovers removes or this plan overwrites
    kResumable,  // recorded parts of this very plan
    kComplete,   // a committed artefact of this very plan
  };
  Kind kind = Kind::kFresh;
  std::vector<RankTaskId> done;    // sorted: rank tasks whose parts are all recorded and there
  v1::ManifestReference manifest;  // set when kComplete
  std::string damage;              // why a committed artefact of this plan is not kComplete
};

// Looks at the destination and writes nothing. A recorded part counts when the object has the
// recorded size and ETag. A complete artefact counts when the manifest parses, fingerprint and
// source token are equal, every data file that it lists has its size and every rank manifest and
// copied file its SHA-256. A committed artefact of this plan of which files are missing or have
// another size is kFresh: ClearLeftovers withdraws its manifest and the job makes it again.
// With a signer, what is complete must have that key's signature.
// Errors: FAILED_PRECONDITION when a committed artefact of another fingerprint or source lies there
// (the message names the source files that changed, or the inputs that differ); when an object, or
// something that is none, has a name that the job needs and no record of ours accounts for it; when
// a file under the name of one that is to be copied has other bytes than the source's; when a
// copied file was changed after it was copied; or when a complete artefact lacks the signature of
// `signer`: what others may have written is not signed unseen (SignArtifact).
absl::StatusOr<DestinationState> InspectDestination(const JobPlan& plan, ObjectStore& source,
                                                    ObjectStore& destination,
                                                    const SigningKey* signer = nullptr);

// Reads every part that the journal records for this plan, and deletes the records of those whose
// bytes are not what was recorded, so that they are made again: their keys. For jobs that ask for
// it (verify_after_write), at a destination that is claimed. Asks `go_on` before each part, from
// several threads, and returns its status when it refuses.
absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
    const JobPlan& plan, ObjectStore& destination, const std::function<absl::Status()>& go_on);

// Deletes temporary objects, and what the journals of other fingerprints or source tokens recorded
// at a destination without a manifest. Called once before a job's first write, at a destination
// that InspectDestination has accepted as kFresh or kResumable.
absl::Status ClearLeftovers(const JobPlan& plan, ObjectStore& destination);

// Copies the small files, writes rank manifests, proves coverage on the records, and publishes
// manifest.json last and if-absent; just before it, with a signer, its signature. Idempotent: a
// manifest with equal bytes is a success.
// Errors: DATA_LOSS when an object's size or ETag is not as recorded, or coverage is incomplete;
// FAILED_PRECONDITION when another manifest got there first, another job writes here, a source file
// changed, a copied file's name is taken by another file, or a committed artefact lacks the
// signature of `signer`.
absl::StatusOr<v1::ManifestReference> CommitArtifact(const JobPlan& plan, ObjectStore& source,
                                                     ObjectStore& destination,
                                                     const SigningKey* signer = nullptr);

// Signs a committed artefact, in place of any signature that it has. The caller has verified it
// and says which manifest that was: FAILED_PRECONDITION when another one is there now. NOT_FOUND
// when there is none.
absl::Status SignArtifact(ObjectStore& store, const std::string& manifest_sha256,
                          const SigningKey& signer);

// Removes the journal and temporaries after a commit.
absl::Status RemoveJournal(ObjectStore& destination);

// Deletes all that the job wrote: recorded parts, unrecorded parts of its plan, journal, rank
// manifests, copied files that it created. Never unrelated objects, and never the files of a
// committed artefact. For cancelled jobs that have written here.
absl::Status RemoveJobOutput(const JobPlan& plan, ObjectStore& destination);

// The same, but keeps the recorded parts and their records, so that the next run of the plan
// resumes them. For failed jobs.
absl::Status RemoveUnrecorded(const JobPlan& plan, ObjectStore& destination);

}  // namespace shardprep
