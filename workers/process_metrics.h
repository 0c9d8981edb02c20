// What a process knows of itself, for its metrics page.
#pragma once

#include <cstdint>

namespace prometheus {
class Gauge;
class Registry;
}  // namespace prometheus

namespace shardprep {

// shardprep_resident_memory_bytes on an injected registry, which must outlive it. Thread safe.
class ProcessMetrics {
 public:
  explicit ProcessMetrics(prometheus::Registry& registry);

  // Sets the gauge to the present value; leaves it when that cannot be read.
  void Update();

 private:
  prometheus::Gauge* resident_bytes_;
};

// Memory of this process that is in use by it, in bytes; -1 when it cannot be read.
int64_t ResidentMemoryBytes();

}  // namespace shardprep
