// What `shardprep doctor` looks at, one finding for each thing that a job will need. Nothing here
// relies on a store's documentation: what it must do is tried, with objects of our own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/alignment_policy.h"
#include "workers/grpc_channel.h"
#include "workers/object_store.h"

namespace shardprep {

enum class Verdict { kOk, kWarn, kFail };

struct Finding {
  Verdict verdict = Verdict::kOk;
  std::string subject;  // "conditional put"
  std::string what;     // what was seen
  std::string advice;   // what to do; empty with kOk
};

// "warn  free space  3.2 GiB: make room ...", without a line feed.
std::string FindingLine(const Finding& finding);

struct StoreProbe {
  std::string id;  // of the objects that are written: 1 to 100 of a-z, 0-9 and `-`
  // Of the large object, for multipart uploads and speed.
  int64_t size_bytes = int64_t{64} << 20;
};

// Writes two objects `_shardprep/probe-{id}...` and tries with them what jobs rely on: put,
// conditional put, overwriting, listing right after a write, streaming a large object (multipart
// upload, or preallocation, fsync and rename), ranged reads, deleting; measures speed, and looks at
// free space. Removes what it wrote; if it cannot, a finding names it. A store that takes no object
// at all has one finding that fails, and one that says what was not tried. Blocks.
std::vector<Finding> ProbeStore(ObjectStore& store, const StoreProbe& probe);

// The clock of this machine against a server's, which knows the time to a second. S3 refuses
// requests that are 15 minutes off.
Finding CheckClock(absl::Time ours, absl::Time servers);

// The three files of one end: readable, of one pair, signed by the authority, valid now and for two
// more weeks. One finding for each certificate of the process and of the authority.
std::vector<Finding> CheckCertificates(const TlsFiles& tls, absl::Time now);

// Whether the policy has a rule for the target, and engines read the profile with it. `backend` may
// be AUTO.
Finding CheckTarget(const AlignmentPolicy& policy, const std::string& backend,
                    const std::string& activation, const std::string& architecture,
                    const std::string& profile);

// Where shuffles would run for `device` (kernels/device_choice.h), with all threads of this
// machine.
Finding CheckDevice(const std::string& device);

}  // namespace shardprep
