// Worker processes on this machine, started, watched and ended by the controller.
//
// Each worker has a slot with a thread that starts the process, waits for its end by its pid, tells
// the controller at once (its leases are closed then, since a dead process writes nothing), and
// starts the next one after a pause that grows while processes end quickly. Processes are started
// with posix_spawn, because fork in a process with gRPC threads may hang the child; every
// descriptor of ours is close-on-exec. A worker's standard input is a pipe whose other end only we
// hold: when the controller dies, whatever the reason, the worker reads its end and exits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardprep {

struct LocalWorkersOptions {
  int count = 1;
  std::string program;  // path of the worker's binary
  // Arguments after the program's name. "{id}" stands for the worker id, which is unique for each
  // process.
  std::vector<std::string> arguments;
  // More arguments for the process of each slot. Empty: none; else one list for each of `count`.
  std::vector<std::vector<std::string>> slot_arguments;
  std::string id_prefix = "local";  // [A-Za-z0-9._-]+, unique on the controller
  absl::Duration restart_pause = absl::Milliseconds(200);
  absl::Duration max_restart_pause = absl::Seconds(30);
  // A process that lives this long resets the pause.
  absl::Duration settled = absl::Seconds(30);
};

// Thread safe.
class LocalWorkers {
 public:
  // `gone` is told of each process that ended: its worker id, and how ("killed by signal 9
  // (Killed)", "exited with code 1"). Called from the slots' threads; must not block for long.
  // FAILED_PRECONDITION when the program cannot be executed.
  static absl::StatusOr<std::unique_ptr<LocalWorkers>> Start(
      const LocalWorkersOptions& options,
      std::function<void(const std::string& worker_id, const std::string& how)> gone);

  virtual ~LocalWorkers() = default;  // Stop(absl::ZeroDuration())

  // Kills the process of that id if it runs: for workers that went silent. Unknown ids are fine.
  virtual void Kill(const std::string& worker_id) = 0;

  // SIGTERM to all, SIGKILL after `grace`, every process reaped. Nothing is started any more.
  virtual void Stop(absl::Duration grace) = 0;

  // Ids of the processes that run now.
  virtual std::vector<std::string> Running() = 0;
};

// The binary `name` in the folder of this process's own binary. FAILED_PRECONDITION when it is not
// there.
absl::StatusOr<std::string> BinaryBesideOwn(const std::string& name);

}  // namespace shardprep
