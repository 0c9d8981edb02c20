// A controller for one command: it listens on a Unix socket in a directory that only this user can
// enter, runs its workers on this machine, and goes with the process. What a killed one leaves of
// the directory, the next one removes (service/socket_directory.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "workers/s3/s3_options.h"

namespace shardprep {

class S3Connection;

struct PrivateControllerOptions {
  int workers = 1;
  std::string device = "auto";                       // kernels/device_choice.h
  int64_t memory_budget_bytes = int64_t{512} << 20;  // of each worker
  int worker_threads = 0;                            // of each worker; 0: it decides
  std::string metrics_listen;                        // empty: none
  // Directories that symbolic links inside the source may lead into.
  std::vector<std::string> allow_source_root;
  // PEM file of the key that signs manifests; empty: none is signed.
  std::string sign_key;
  // For s3:// URIs, and the flags for workers to do the same (service/controller_host.h).
  std::shared_ptr<S3Connection> s3;
  S3Flags s3_flags;
  std::string worker_program;  // empty: shardprep-worker beside the own binary
};

class PrivateController {
 public:
  // Errors: FAILED_PRECONDITION (no worker binary, no place for the socket), UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<PrivateController>> Start(
      const PrivateControllerOptions& options);
  // Stop(absl::ZeroDuration()).
  virtual ~PrivateController() = default;

  // "unix:/…", for PrepClient.
  virtual const std::string& address() const = 0;
  // Empty without a metrics port.
  virtual std::string metrics_address() const = 0;

  // Unfinished jobs stay unfinished: their recorded parts and journal stay at the destination, and
  // an equal job resumes them. Leases are given back within `grace`, workers are ended, the socket
  // and its directory are removed.
  virtual void Stop(absl::Duration grace) = 0;
};

}  // namespace shardprep
