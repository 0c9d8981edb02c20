// The journal of a job: which parts the plan wants, what a part's record says, and whether a part
// counts. A record, `_shardprep/<fingerprint>/<rank>-<part>.json`, is written when its part is
// whole at the destination; the protocol is in artifact.cc.
//
// Functions block on the stores and hold no state of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardprep/v1/manifest.pb.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"

namespace shardprep {

// One part of one rank; `part` points into the plan.
struct PlannedPart {
  int32_t region = 0;
  int32_t rank = 0;
  const PartPlan* part = nullptr;
};

// Every part of every rank, in region order.
std::vector<PlannedPart> PlannedParts(const JobPlan& plan);

// Everything that the plan says about a part, so all of its record except digests, native CRCs and
// the ETag. INVALID_ARGUMENT when the part's header is too large for its format.
absl::StatusOr<v1::PartRecord> PlannedRecord(const JobPlan& plan, const PlannedPart& planned);

// Whether a record has all that a record has, and says what the plan says. DATA_LOSS naming the
// file and the first field that differs.
absl::Status CheckRecord(const v1::PartRecord& record, const v1::PartRecord& planned);

// Makes a finished part part of the journal: the resume record.
absl::Status RecordPart(const v1::PartRecord& record, ObjectStore& destination,
                        const CommitGate& gate);

// Whether a part has a record in the journal that says what the plan says (CheckRecord), and its
// object still has the recorded size and ETag. For a worker that must not do it again.
absl::StatusOr<bool> IsRecorded(const JobPlan& plan, const PlannedPart& part,
                                ObjectStore& destination);

}  // namespace shardprep
