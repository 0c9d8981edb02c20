// The names that dashboards and alerts rely on, and the port that serves them.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <prometheus/registry.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "service/controller_metrics.h"
#include "workers/metrics_http.h"
#include "workers/process_metrics.h"
#include "workers/s3/s3_metrics.h"
#include "workers/worker_metrics.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const char* TypeName(prometheus::MetricType type) {
  switch (type) {
    case prometheus::MetricType::Counter:
      return "counter";
    case prometheus::MetricType::Gauge:
      return "gauge";
    case prometheus::MetricType::Histogram:
      return "histogram";
    default:
      return "other";
  }
}

// One line for each family: name, type, labels with their values, help.
std::string Describe(const char* process, const prometheus::Registry& registry) {
  std::set<std::string> lines;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    std::map<std::string, std::set<std::string>> labels;
    for (const prometheus::ClientMetric& metric : family.metric) {
      for (const auto& label : metric.label) labels[label.name].insert(label.value);
    }
    std::string line = absl::StrCat(process, " ", family.name, " ", TypeName(family.type));
    for (const auto& [name, values] : labels) {
      absl::StrAppend(&line, " ", name, "=", absl::StrJoin(values, "|"));
    }
    lines.insert(absl::StrCat(line, " # ", family.help));
  }
  return absl::StrCat(absl::StrJoin(lines, "\n"), "\n");
}

// A changed name breaks dashboards and alerts: change tests/service/metrics_golden.txt, and them.
TEST(Metrics, NamesTypesAndLabelsAreAsInTheGoldenFile) {
  prometheus::Registry controller;
  const ControllerMetrics controller_metrics(controller, "1.2.3");
  const ProcessMetrics of_controller(controller);
  prometheus::Registry worker;
  const WorkerMetrics worker_metrics(worker, "1.2.3");
  const ProcessMetrics of_worker(worker);
  const S3Metrics s3_metrics(worker);
  std::ifstream file(SHARDPREP_METRICS_GOLDEN);
  std::stringstream golden;
  golden << file.rdbuf();
  EXPECT_EQ(Describe("controller", controller) + Describe("worker", worker), golden.str());
}

TEST(Metrics, EveryNameIsPrefixedAndEverySeriesStartsAtZero) {
  prometheus::Registry registry;
  const WorkerMetrics worker_metrics(registry, "1.2.3");
  const S3Metrics s3_metrics(registry);
  prometheus::Registry controller;
  const ControllerMetrics controller_metrics(controller, "1.2.3");
  for (const prometheus::Registry* r : {&registry, &controller}) {
    for (const prometheus::MetricFamily& family : r->Collect()) {
      EXPECT_THAT(family.name, StartsWith("shardprep_"));
      if (family.name == "shardprep_build_info") continue;
      EXPECT_FALSE(family.metric.empty()) << family.name;
      for (const prometheus::ClientMetric& metric : family.metric) {
        EXPECT_EQ(metric.counter.value + metric.gauge.value + metric.histogram.sample_sum, 0)
            << family.name;
      }
    }
  }
}

TEST(Metrics, MemoryIsThatOfTheProcessWhenThePageIsRead) {
  prometheus::Registry registry;
  ProcessMetrics metrics(registry);
  const auto value = [&registry] { return registry.Collect().front().metric.front().gauge.value; };
  const double before = value();
  EXPECT_GT(before, 1 << 20);
  const std::string more(size_t{64} << 20, 'm');
  metrics.Update();
  EXPECT_GT(value(), before + (60 << 20)) << more.size();
}

TEST(WorkerMetrics, EveryCallCanBeCountedWithEveryCode) {
  prometheus::Registry registry;
  WorkerMetrics metrics(registry, "1.2.3");
  for (int code = 0; code <= 16; ++code) {
    for (const StoreOperation operation :
         {StoreOperation::kHead, StoreOperation::kRead, StoreOperation::kGet, StoreOperation::kList,
          StoreOperation::kWrite, StoreOperation::kPut, StoreOperation::kDelete,
          StoreOperation::kProbe}) {
      metrics.StoreRequest(operation, static_cast<absl::StatusCode>(code), absl::Seconds(1));
    }
    metrics.RankFailed(static_cast<absl::StatusCode>(code));
  }
  const std::string described = Describe("worker", registry);
  EXPECT_THAT(described, Not(HasSubstr("UNKNOWN")));  // folded into OTHER
}

TEST(S3Metrics, CountsRequestsByAnswerAndRetries) {
  prometheus::Registry registry;
  S3Metrics metrics(registry);
  const auto value = [&registry](const std::string& name, const std::string& operation,
                                 const std::string& answer) {
    for (const prometheus::MetricFamily& family : registry.Collect()) {
      if (family.name != name) continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        std::map<std::string, std::string> labels;
        for (const auto& label : metric.label) labels[label.name] = label.value;
        if (labels["operation"] == operation && labels["answer"] == answer) {
          return metric.counter.value;
        }
      }
    }
    return -1.0;
  };
  S3Exchange exchange;
  exchange.operation = "UploadPart";
  exchange.http_status = 200;
  metrics.OnExchange(exchange);
  exchange.http_status = 503;
  metrics.OnExchange(exchange);
  exchange.attempt = 2;
  exchange.http_status = 206;
  exchange.transport = absl::StatusCode::kUnavailable;  // cut in its body
  metrics.OnExchange(exchange);
  exchange = S3Exchange();
  exchange.operation = "SomethingNew";
  exchange.http_status = 101;
  metrics.OnExchange(exchange);
  metrics.OnAbortFailed();
  const char* const requests = "shardprep_s3_requests_total";
  EXPECT_EQ(value(requests, "UploadPart", "2xx"), 1);
  EXPECT_EQ(value(requests, "UploadPart", "5xx"), 1);
  EXPECT_EQ(value(requests, "UploadPart", "none"), 1);
  EXPECT_EQ(value(requests, "other", "other"), 1);
  EXPECT_EQ(value("shardprep_s3_retries_total", "", ""), 1);
  EXPECT_EQ(value("shardprep_s3_failed_aborts_total", "", ""), 1);
}

// The whole answer to one request.
std::string Ask(const std::string& address, const std::string& request_line) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  const std::string request = request_line + " HTTP/1.1\r\nHost: x\r\n\r\n";
  EXPECT_EQ(::write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t n = 0; (n = ::read(fd, buffer, sizeof buffer)) > 0;) {
    answer.append(buffer, static_cast<size_t>(n));
  }
  ::close(fd);
  return answer;
}

TEST(MetricsServer, ServesMetricsAndLiveness) {
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics(*registry, "1.2.3");
  metrics.AddReadBytes(12345);
  std::atomic<bool> alive{true};
  const auto server =
      MetricsServer::Start("127.0.0.1:0", registry, [&alive] { return alive.load(); });
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string& address = (*server)->address();
  EXPECT_THAT(address, Not(HasSubstr(":0")));
  const std::string got = Ask(address, "GET /metrics");
  EXPECT_THAT(got, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(got, HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(got, HasSubstr("shardprep_read_bytes_total 12345"));
  EXPECT_THAT(got, HasSubstr("shardprep_build_info{version=\"1.2.3\"} 1"));
  const std::string head = Ask(address, "HEAD /metrics");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(head, Not(HasSubstr("shardprep_")));
  EXPECT_THAT(Ask(address, "GET /livez"), StartsWith("HTTP/1.1 200"));
  alive = false;
  EXPECT_THAT(Ask(address, "GET /livez"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(Ask(address, "POST /metrics"), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask(address, "GET /etc/passwd"), StartsWith("HTTP/1.1 404"));
}

TEST(MetricsServer, TakenPortsAndMalformedAddressesAreRefused) {
  auto registry = std::make_shared<prometheus::Registry>();
  const auto first = MetricsServer::Start("127.0.0.1:0", registry);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(MetricsServer::Start((*first)->address(), registry).status().code(),
            absl::StatusCode::kUnavailable);
  for (const char* bad : {"", "9464", ":9464", "127.0.0.1:x", "127.0.0.1:1,127.0.0.1:2"}) {
    EXPECT_EQ(MetricsServer::Start(bad, registry).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

TEST(MetricsServer, StopsWithoutWaitingForItsPoll) {
  auto registry = std::make_shared<prometheus::Registry>();
  auto server = MetricsServer::Start("127.0.0.1:0", registry);
  ASSERT_TRUE(server.ok());
  const absl::Time begin = absl::Now();
  server->reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1.5));
}

}  // namespace
}  // namespace shardprep
