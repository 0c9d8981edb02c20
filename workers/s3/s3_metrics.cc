#include "workers/s3/s3_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/registry.h>

namespace shardprep {
namespace {

constexpr const char* kOperations[] = {"AbortMultipartUpload",
                                       "CompleteMultipartUpload",
                                       "CreateMultipartUpload",
                                       "DeleteObject",
                                       "GetObject",
                                       "HeadObject",
                                       "ListObjectsV2",
                                       "PutObject",
                                       "UploadPart"};
constexpr const char* kOther = "other";  // of operations and of answers
constexpr const char* kAnswers[] = {"2xx", "3xx", "4xx", "5xx", "none", kOther};

const char* AnswerOf(const S3Exchange& exchange) {
  // A body that was cut is no answer, whatever its status was.
  if (exchange.http_status == 0 || exchange.transport != absl::StatusCode::kOk) return "none";
  const int first_digit = exchange.http_status / 100;
  return first_digit >= 2 && first_digit <= 5 ? kAnswers[first_digit - 2] : kOther;
}

prometheus::Counter* AddCounter(prometheus::Registry& registry, const char* name,
                                const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

}  // namespace

S3Metrics::S3Metrics(prometheus::Registry& registry)
    : retries_(
          AddCounter(registry, "shardprep_s3_retries_total", "S3 requests that were sent again.")),
      failed_aborts_(AddCounter(registry, "shardprep_s3_failed_aborts_total",
                                "Multipart uploads that could not be aborted; their records stay "
                                "for the next clean-up.")) {
  auto& requests = prometheus::BuildCounter()
                       .Name("shardprep_s3_requests_total")
                       .Help("S3 requests, retries included, by operation and class of answer.")
                       .Register(registry);
  const auto add = [&](const std::string& operation) {
    for (const std::string answer : kAnswers) {
      requests_[{operation, answer}] =
          &requests.Add({{"operation", operation}, {"answer", answer}});
    }
  };
  for (const char* operation : kOperations) add(operation);
  add(kOther);
}

void S3Metrics::OnExchange(const S3Exchange& exchange) {
  auto found = requests_.find({exchange.operation, AnswerOf(exchange)});
  if (found == requests_.end()) found = requests_.find({kOther, AnswerOf(exchange)});
  found->second->Increment();
  if (exchange.attempt > 1) retries_->Increment();
}

void S3Metrics::OnAbortFailed() { failed_aborts_->Increment(); }

}  // namespace shardprep
