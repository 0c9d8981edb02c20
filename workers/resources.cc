#include "workers/resources.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace shardprep {
namespace {

constexpr int64_t kUsualBudget = int64_t{512} << 20;

// The first line of a small file; empty when there is none.
std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "200000 100000" is two processors; "max 100000" is no limit.
std::optional<double> ParseCpuMax(const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  int64_t quota = 0;
  int64_t period = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &quota) ||
      !absl::SimpleAtoi(words[1], &period) || quota <= 0 || period <= 0) {
    return std::nullopt;
  }
  return static_cast<double>(quota) / static_cast<double>(period);
}

std::optional<int64_t> ParseMemoryMax(const std::string& line) {
  int64_t bytes = 0;
  if (!absl::SimpleAtoi(line, &bytes) || bytes <= 0) return std::nullopt;
  return bytes;
}

constexpr int kMostProcessors = CPU_SETSIZE;

// "0-15,32-47"; empty for anything else.
Processors ParseProcessorList(const std::string& line) {
  Processors processors;
  for (const absl::string_view range : absl::StrSplit(line, ',')) {
    const std::vector<std::string> ends = absl::StrSplit(range, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last >= kMostProcessors) {
      return {};
    }
    for (int processor = first; processor <= last; ++processor) processors.push_back(processor);
  }
  std::sort(processors.begin(), processors.end());
  return processors;
}

template <typename T>
void Tighten(std::optional<T>& limit, const std::optional<T>& other) {
  if (other.has_value() && (!limit.has_value() || *other < *limit)) limit = other;
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& membership, const std::string& root) {
  CgroupLimits limits;
  for (const absl::string_view line : absl::StrSplit(membership, '\n')) {
    absl::string_view path = line;
    if (!absl::ConsumePrefix(&path, "0::/")) continue;  // the line of version 2
    std::string group = absl::StrCat(root, "/", path);
    while (group.size() >= root.size()) {
      Tighten(limits.cpus, ParseCpuMax(FirstLine(group + "/cpu.max")));
      Tighten(limits.memory_bytes, ParseMemoryMax(FirstLine(group + "/memory.max")));
      group = group.substr(0, group.rfind('/'));
    }
  }
  return limits;
}

CgroupLimits OwnCgroupLimits() {
  std::stringstream membership;
  membership << std::ifstream("/proc/self/cgroup").rdbuf();
  return ReadCgroupLimits(membership.str());
}

int DefaultThreads(const CgroupLimits& limits, int processors) {
  const int most =
      limits.cpus.has_value() ? static_cast<int>(std::min(*limits.cpus, 1e6)) : processors;
  return std::max(1, std::min(processors, most));
}

// Not by std::thread::hardware_concurrency() where it can be helped: with glibc 2.36 that is the
// machine's processors, whatever the process is bound to.
int DefaultThreads() {
  const Processors own = OwnProcessors();
  const size_t processors = own.empty() ? std::thread::hardware_concurrency() : own.size();
  return DefaultThreads(OwnCgroupLimits(), static_cast<int>(processors));
}

Processors OwnProcessors() {
  Processors processors;
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return processors;
  for (int processor = 0; processor < kMostProcessors; ++processor) {
    if (CPU_ISSET(processor, &set)) processors.push_back(processor);
  }
  return processors;
}

Processors ProcessorsNear(const std::string& address, const Processors& own,
                          const std::string& sysfs) {
  int node = -1;  // what Linux says where nodes are not told apart
  const std::string device =
      absl::StrCat(sysfs, "/bus/pci/devices/", absl::AsciiStrToLower(address));
  if (!absl::SimpleAtoi(FirstLine(device + "/numa_node"), &node) || node < 0) return {};
  const Processors there = ParseProcessorList(
      FirstLine(absl::StrCat(sysfs, "/devices/system/node/node", node, "/cpulist")));
  Processors near;
  std::set_intersection(there.begin(), there.end(), own.begin(), own.end(),
                        std::back_inserter(near));
  return near;
}

bool RunOnlyOn(const Processors& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) CPU_SET(processor, &set);
  return ::sched_setaffinity(0, sizeof(set), &set) == 0;
}

absl::Status StartOverOn(const Processors& processors, char* const* argv) {
  const Processors own = OwnProcessors();
  const auto refused = [](const char* call) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, ": ", std::generic_category().message(errno)));
  };
  if (!RunOnlyOn(processors)) return refused("sched_setaffinity");
  ::execv("/proc/self/exe", argv);
  const absl::Status status = refused("execv /proc/self/exe");
  RunOnlyOn(own);
  return status;
}

int64_t DefaultMemoryBudget(const CgroupLimits& limits) {
  if (!limits.memory_bytes.has_value()) return kUsualBudget;
  return std::min(kUsualBudget, std::max<int64_t>(1, *limits.memory_bytes / 2));
}

}  // namespace shardprep
