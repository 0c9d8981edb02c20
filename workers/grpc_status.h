// The one place where absl::Status meets the wire. Codes are numerically the same on both sides;
// details travel as google.rpc.ErrorInfo with domain "shardprep".
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"

namespace grpc {
class Status;
}  // namespace grpc
namespace google::rpc {
class Status;
}  // namespace google::rpc

namespace shardprep {

// Why, for programs: the reason is UPPER_SNAKE and stable, the metadata holds every dynamic value
// of the message that a caller may want to act on.
struct ErrorReason {
  std::string reason;
  std::map<std::string, std::string> metadata;
};

// `status` with a reason attached in place of an older one. OK stays OK.
absl::Status WithReason(absl::Status status, const std::string& reason,
                        const std::map<std::string, std::string>& metadata = {});

// The reason attached to `status`; without one, the name of its code ("DATA_LOSS").
ErrorReason ReasonOf(const absl::Status& status);

// For answers of an RPC. A non-OK result always carries an ErrorInfo. Message and metadata are cut
// to what fits the 8 KiB of HTTP/2 trailers that clients take by default: about 1900 characters of
// ASCII, and 1 KiB.
grpc::Status ToGrpcStatus(const absl::Status& status);
// For results of a call.
absl::Status FromGrpcStatus(const grpc::Status& status);

// For statuses inside messages (PrepJob.error, LeaseReport.error). Messages are cut to 4 KiB.
google::rpc::Status ToRpcStatus(const absl::Status& status);
// A code that is not canonical becomes UNKNOWN.
absl::Status FromRpcStatus(const google::rpc::Status& status);

}  // namespace shardprep
