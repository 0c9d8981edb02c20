// Everything that one controller process runs, put together: backend, job store, controller, gRPC
// server, local workers, metrics. Used by the controller's binary and by `prepare`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/peer.h"
#include "workers/grpc_channel.h"
#include "workers/s3/s3_options.h"

namespace shardprep {

class S3Connection;

struct ControllerHostOptions {
  // Addresses to listen on; a port 0 is chosen by the system.
  std::vector<std::string> listen;
  ConnectionSecurity security;
  RoleNames roles;  // service/peer.h
  bool reflection = true;
  std::string health_listen;   // plaintext, health only (service/server.h); empty: none
  std::string metrics_listen;  // empty: no metrics port

  // Directories and prefixes that jobs may name. Empty means any, which is for loopback and Unix
  // sockets only: with another address FAILED_PRECONDITION.
  std::vector<std::string> allow_source;
  std::vector<std::string> allow_destination;
  // Directories that symbolic links inside a source may lead into.
  std::vector<std::string> allow_source_root;

  // PEM file of the Ed25519 key that signs manifests (workers/signature.h); empty: none is signed.
  std::string sign_key;

  // For s3:// URIs (workers/open_store.h), and the flags that make local workers reach S3 the same
  // way; they inherit the environment.
  std::shared_ptr<S3Connection> s3;
  S3Flags s3_flags;

  int local_workers = 0;
  std::string worker_program;  // empty: shardprep-worker beside the own binary
  // kernels/device_choice.h; of several workers each gets a GPU of its own, as far as there are.
  std::string device = "auto";
  int worker_threads = 0;  // 0: the worker decides
  // Budget of each local worker, and for the figures of plans.
  int64_t memory_budget_bytes = int64_t{512} << 20;

  // Where jobs are kept (service/sqlite_job_store.h), so that they outlive the process. Empty: in
  // memory.
  std::string state_directory;
  absl::Duration lease_duration = absl::Seconds(60);
  int max_queued_jobs = 1000;
  int max_finished_jobs = 1000;
};

class ControllerHost {
 public:
  // Errors of OpenSqliteJobStore(), MakePrepBackend(), SigningKey::Read() and Server::Start();
  // INVALID_ARGUMENT naming the number that is out of its range.
  static absl::StatusOr<std::unique_ptr<ControllerHost>> Start(
      const ControllerHostOptions& options);
  // What Start() would refuse of the options by looking at them and at the files that they name.
  // Listens on nothing, and does not touch the state directory.
  static absl::Status Check(const ControllerHostOptions& options);

  // Drain(absl::ZeroDuration()).
  virtual ~ControllerHost() = default;

  // Addresses that it listens on, with the ports chosen, in the order of the options.
  virtual const std::vector<std::string>& addresses() const = 0;
  // Empty without a metrics port.
  virtual std::string metrics_address() const = 0;
  // Empty without health_listen.
  virtual std::string health_address() const = 0;

  // Stops within `grace`, as numbered in controller_host.cc. Idempotent.
  virtual void Drain(absl::Duration grace) = 0;
};

}  // namespace shardprep
