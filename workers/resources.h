// What this process may use: processors and memory, as the machine and its control groups (version
// 2) say, and what of it lies near a device. A container sees the processors and the memory of its
// node; its limits stand elsewhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardprep {

struct CgroupLimits {
  std::optional<double> cpus;           // cpu.max: quota over period
  std::optional<int64_t> memory_bytes;  // memory.max
};

// The tightest limits of the process's group and of all above it. `membership` is the text of
// /proc/self/cgroup, `root` where the hierarchy is mounted. What is missing or malformed limits
// nothing: version 1, no control groups, a file that cannot be read.
CgroupLimits ReadCgroupLimits(const std::string& membership,
                              const std::string& root = "/sys/fs/cgroup");

// Of this process.
CgroupLimits OwnCgroupLimits();

// Threads that compute, when nobody says how many: the processors that the process may run on, but
// no more than whole processors of the quota, and at least one. More would be stopped together for
// the rest of each period.
int DefaultThreads(const CgroupLimits& limits, int processors);
int DefaultThreads();
// The same for people, behind what a flag counts.
inline constexpr char kDefaultThreadsHelp[] =
    "0: one for each processor that it may run on, and no more than whole processors of its "
    "control "
    "group's quota.";

// A worker's budget when nobody says one: 512 MiB, or half of the limit where that is less. The
// other half is for what is not in the budget.
int64_t DefaultMemoryBudget(const CgroupLimits& limits);

// Numbers of processors, in rising order.
using Processors = std::vector<int>;

// Those that the calling thread may run on. Empty on a machine with more than 1024.
Processors OwnProcessors();

// Of `own`, those of the memory node that the PCI device at `address` ("0000:c1:00.0") is attached
// to. Empty when that is not known: no such device, a machine whose nodes are not told apart, a
// file of `sysfs` that cannot be read; and when none of `own` is there.
Processors ProcessorsNear(const std::string& address, const Processors& own,
                          const std::string& sysfs = "/sys");

// Binds the calling thread, and those that it starts. False where the system refuses.
bool RunOnlyOn(const Processors& processors);

// Starts this program over, bound to these processors, so that all threads and memory that it has
// come to be there: the same process and arguments (`argv` as of main()), nothing else kept but
// open files. Returns only where the system refuses, with why, and bound as before.
// FAILED_PRECONDITION.
absl::Status StartOverOn(const Processors& processors, char* const* argv);

}  // namespace shardprep
