// What a process counts of its S3 requests, on an injected registry. Every series exists from the
// start with value 0, and no label value comes from input.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "workers/s3/s3_client.h"

namespace prometheus {
class Counter;
class Registry;
}  // namespace prometheus

namespace shardprep {

// Thread safe. The registry must outlive it, and it the connection that it observes.
class S3Metrics : public S3Observer {
 public:
  explicit S3Metrics(prometheus::Registry& registry);

  void OnExchange(const S3Exchange& exchange) override;
  void OnAbortFailed() override;

 private:
  // By operation of the API and class of the answer.
  std::map<std::pair<std::string, std::string>, prometheus::Counter*> requests_;
  prometheus::Counter* retries_;
  prometheus::Counter* failed_aborts_;
};

}  // namespace shardprep
