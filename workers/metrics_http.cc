#include "workers/metrics_http.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <netinet/in.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "workers/process_metrics.h"

namespace shardprep {
namespace {

// Host and port of "host:port"; brackets around an IPv6 host stay.
absl::Status CheckListenAddress(const std::string& address, std::string* host) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535 ||
      address.find_first_of(", \t") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address \"", address, "\": want host:port"));
  }
  *host = address.substr(0, colon);
  return absl::OkStatus();
}

// Opens and closes a connection to a port of this machine. Whether it comes about does not matter.
void Poke(int port, bool ipv6) {
  sockaddr_storage to = {};
  socklen_t size = 0;
  if (ipv6) {
    auto* const v6 = reinterpret_cast<sockaddr_in6*>(&to);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    v6->sin6_addr = in6addr_loopback;
    size = sizeof *v6;
  } else {
    auto* const v4 = reinterpret_cast<sockaddr_in*>(&to);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    size = sizeof *v4;
  }
  const int fd = ::socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  [[maybe_unused]] const int ignored = ::connect(fd, reinterpret_cast<sockaddr*>(&to), size);
  ::close(fd);
}

class CivetMetricsServer : public MetricsServer {
 public:
  CivetMetricsServer(std::shared_ptr<prometheus::Registry> registry, std::function<bool()> alive)
      : registry_(std::move(registry)), alive_(std::move(alive)), process_(*registry_) {}

  // mg_stop() waits for a poll(2) of up to two seconds on the listening socket; connecting to it
  // ends the poll at once.
  ~CivetMetricsServer() override {
    if (context_ == nullptr) return;
    std::atomic<bool> stopped{false};
    std::thread stopper([this, &stopped] {
      mg_stop(context_);
      stopped = true;
    });
    while (!stopped) {
      Poke(port_, ipv6_);
      absl::SleepFor(absl::Milliseconds(10));
    }
    stopper.join();
    mg_exit_library();
  }

  absl::Status Listen(const std::string& address) {
    std::string host;
    if (absl::Status status = CheckListenAddress(address, &host); !status.ok()) return status;
    mg_init_library(0);
    const char* options[] = {"listening_ports",    address.c_str(), "num_threads", "2",
                             "request_timeout_ms", "5000",          nullptr};
    mg_callbacks callbacks = {};
    context_ = mg_start(&callbacks, nullptr, options);
    if (context_ == nullptr) {
      mg_exit_library();
      return absl::UnavailableError(absl::StrCat("metrics address ", address, ": cannot listen"));
    }
    mg_server_port ports[1] = {};
    if (mg_get_server_ports(context_, 1, ports) != 1) {
      return absl::UnavailableError(absl::StrCat("metrics address ", address, ": no port"));
    }
    port_ = ports[0].port;
    ipv6_ = host.front() == '[';
    address_ = absl::StrCat(host, ":", port_);
    mg_set_request_handler(context_, "/metrics$", &ServeMetrics, this);
    mg_set_request_handler(context_, "/livez$", &ServeLiveness, this);
    return absl::OkStatus();
  }

  const std::string& address() const override { return address_; }

 private:
  static int Answer(mg_connection* connection, int code, const char* reason, const char* type,
                    const std::string& body) {
    const char* method = mg_get_request_info(connection)->request_method;
    const bool head = std::strcmp(method, "HEAD") == 0;
    if (!head && std::strcmp(method, "GET") != 0) {
      mg_printf(connection,
                "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\nContent-Length: 0\r\n"
                "Connection: close\r\n\r\n");
      return 405;
    }
    mg_printf(connection,
              "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
              "Connection: close\r\n\r\n",
              code, reason, type, body.size());
    if (!head) mg_write(connection, body.data(), body.size());
    return code;
  }

  static int ServeMetrics(mg_connection* connection, void* self) {
    auto* server = static_cast<CivetMetricsServer*>(self);
    server->process_.Update();
    const prometheus::TextSerializer serializer;
    return Answer(connection, 200, "OK", "text/plain; version=0.0.4; charset=utf-8",
                  serializer.Serialize(server->registry_->Collect()));
  }

  static int ServeLiveness(mg_connection* connection, void* self) {
    const auto* server = static_cast<const CivetMetricsServer*>(self);
    const bool alive = !server->alive_ || server->alive_();
    return Answer(connection, alive ? 200 : 503, alive ? "OK" : "Service Unavailable", "text/plain",
                  alive ? "ok\n" : "no progress\n");
  }

  const std::shared_ptr<prometheus::Registry> registry_;
  const std::function<bool()> alive_;
  ProcessMetrics process_;
  mg_context* context_ = nullptr;
  int port_ = 0;
  bool ipv6_ = false;
  std::string address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, std::shared_ptr<prometheus::Registry> registry,
    std::function<bool()> alive) {
  auto server = std::make_unique<CivetMetricsServer>(std::move(registry), std::move(alive));
  if (absl::Status status = server->Listen(address); !status.ok()) return status;
  return {std::move(server)};
}

}  // namespace shardprep
