#include "workers/process_metrics.h"

#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <unistd.h>

#include <fstream>

namespace shardprep {

int64_t ResidentMemoryBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size_pages = 0;
  int64_t resident_pages = 0;
  if (!(statm >> size_pages >> resident_pages)) return -1;
  return resident_pages * ::sysconf(_SC_PAGESIZE);
}

ProcessMetrics::ProcessMetrics(prometheus::Registry& registry)
    : resident_bytes_(&prometheus::BuildGauge()
                           .Name("shardprep_resident_memory_bytes")
                           .Help("Memory of the process that is in use by it.")
                           .Register(registry)
                           .Add({})) {
  Update();
}

void ProcessMetrics::Update() {
  const int64_t bytes = ResidentMemoryBytes();
  if (bytes >= 0) resident_bytes_->Set(static_cast<double>(bytes));
}

}  // namespace shardprep
