// Following a job from a command line: its states, the progress line, the log, and Ctrl-C.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "service/cli_console.h"
#include "service/client.h"
#include "shardprep/v1/prep.pb.h"

namespace shardprep {

// Shows the job's progress until it is terminal, and returns it then. `on_state`, which may be
// empty, is told of each state first, from another thread. Errors of PrepClient::Watch(); CANCELLED
// after StopWatching() of the client.
absl::StatusOr<v1::PrepJob> FollowJob(PrepClient& client, const std::string& job_id,
                                      Console& console,
                                      const std::function<void(const v1::PrepJob&)>& on_state);

// The exit code for a command that followed a job to `job`'s terminal state, after its result has
// been printed: the error of a failed job on standard error.
int FinishFollowed(const std::string& command, const v1::PrepJob& job,
                   const std::string& next_step);

}  // namespace shardprep
