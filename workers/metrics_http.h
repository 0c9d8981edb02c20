// HTTP for machines that watch us: Prometheus text under /metrics and liveness under /livez, on a
// port and threads of their own, so that neither waits for work.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace prometheus {
class Registry;
}  // namespace prometheus

namespace shardprep {

class MetricsServer {
 public:
  // Listens on `address` ("127.0.0.1:9464", "0.0.0.0:0", "[::1]:0"). GET and HEAD /metrics answer
  // 200, with shardprep_resident_memory_bytes of that moment (workers/process_metrics.h), which is
  // added to the registry; /livez answers 200 while `alive` says true (empty: always), else 503.
  // `alive` is called from the server's threads and must not block. Errors: INVALID_ARGUMENT for a
  // malformed address, UNAVAILABLE when the port cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& address, std::shared_ptr<prometheus::Registry> registry,
      std::function<bool()> alive = {});

  virtual ~MetricsServer() = default;

  // The address with the port that was chosen when 0 was asked for.
  virtual const std::string& address() const = 0;
};

}  // namespace shardprep
