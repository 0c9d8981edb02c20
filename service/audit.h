// Who asked for what, and what came of it: one log line each, at the level `audit`, which is always
// written. `who` is Peer::text (service/peer.h). Places are shown without user information and
// query, in which some tools put credentials.
//
//   level=audit ts=... component=audit msg=CreatePrepJob who=ci.example job=v4-tp8
//     source=s3://models/v4 destinations=s3://prepared/v4-tp8 targets="AITER_MXFP4_BF16 ..." ...
//     outcome=OK
#pragma once

#include <string>

#include "absl/status/status.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

// `answer` is that of the call. Its message is not written: it goes to the caller.
void AuditCreate(const std::string& who, const v1::CreatePrepJobRequest& request,
                 const absl::Status& answer);
void AuditCancel(const std::string& who, const std::string& job_id, const absl::Status& answer);
// A call that its peer may not make.
void AuditRefusal(const std::string& who, const std::string& method, const absl::Status& answer);
// How a job ended; it has the id of the line that says who asked for it.
void AuditEnd(const std::string& job_id, v1::PrepJob::State state, const absl::Status& error);

}  // namespace shardprep
