// A client of PrepService for the command line and for tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shardprep/v1/prep.pb.h"
#include "workers/grpc_channel.h"

namespace shardprep {

// Thread safe. Every call has a deadline and is tried again on UNAVAILABLE, with pauses, as long as
// the deadline allows; every call of PrepService may be repeated. Other errors are returned as the
// service states them, with their reason (workers/grpc_status.h).
class PrepClient {
 public:
  // Errors of CheckAddress() (workers/grpc_channel.h). Does not connect yet.
  static absl::StatusOr<std::unique_ptr<PrepClient>> Make(const std::string& address,
                                                          const ConnectionSecurity& security = {});
  virtual ~PrepClient() = default;

  // Planning reads headers, so it gets minutes where the others get seconds.
  virtual absl::StatusOr<v1::PlanSummary> Plan(const v1::PlanPrepJobRequest& request) = 0;
  virtual absl::StatusOr<v1::PrepJob> Create(const v1::CreatePrepJobRequest& request) = 0;
  virtual absl::StatusOr<v1::PrepJob> Get(const std::string& job_id) = 0;
  virtual absl::StatusOr<v1::ListPrepJobsResponse> List(const v1::ListPrepJobsRequest& request) = 0;
  virtual absl::StatusOr<v1::PrepJob> Cancel(const std::string& job_id) = 0;
  virtual absl::StatusOr<v1::ManifestReference> GetManifest(const std::string& job_id,
                                                            int32_t target) = 0;

  // Calls `on_state` with each state of the job, the present one first, until it is terminal: OK,
  // whatever the result was. Broken streams are opened again, for at most `patience` without a
  // word of the controller. `on_state` returns false to stop watching: CANCELLED. Another thread
  // ends the watch early with StopWatching().
  virtual absl::Status Watch(const std::string& job_id,
                             const std::function<bool(const v1::PrepJob&)>& on_state,
                             absl::Duration patience = absl::Seconds(30)) = 0;
  // Ends present and future Watch() calls of this client with CANCELLED.
  virtual void StopWatching() = 0;
};

}  // namespace shardprep
