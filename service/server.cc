#include "service/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "service/prep_service.h"
#include "service/worker_service.h"

namespace shardprep {
namespace {

constexpr char kServiceName[] = "shardprep.v1.PrepService";
constexpr char kLivenessName[] = "liveness";
// Memory that gRPC may take for calls in hand, and calls on one connection.
constexpr size_t kQuotaBytes = size_t{256} << 20;
constexpr int kMaxConcurrentStreams = 1024;
// Clients may ping every 30 s, streams open or not; ours do so every minute
// (workers/grpc_channel.cc). The rest is room for timers that run early: three pings in shorter
// intervals end the connection.
constexpr int kMinPingMillis = 20'000;
// Our own pings find clients that are gone, so that their watches end.
constexpr int kKeepaliveMillis = 60'000;
constexpr int kKeepaliveTimeoutMillis = 20'000;
// Of headers that a request may have, what gRPC takes by default.
constexpr int kMaxMetadataBytes = 8 << 10;

class GrpcServer : public Server {
 public:
  GrpcServer(const ServerOptions& options, Controller* controller)
      : options_(options),
        prep_service_(MakePrepService(controller)),
        worker_service_(MakeWorkerService(controller)) {}

  ~GrpcServer() override { GrpcServer::Shutdown(absl::ZeroDuration()); }

  absl::Status Listen() {
    if (options_.listen.empty()) return absl::InvalidArgumentError("no address to listen on");
    for (const std::string& address : options_.listen) {
      SP_RETURN_IF_ERROR(CheckAddress(address, options_.security));
    }
    grpc::EnableDefaultHealthCheckService(true);
    if (options_.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    std::vector<int> ports(options_.listen.size(), 0);
    for (size_t i = 0; i < options_.listen.size(); ++i) {
      SP_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> credentials,
                          MakeServerCredentials(options_.security));
      builder.AddListeningPort(options_.listen[i], credentials, &ports[i]);
    }
    grpc::ResourceQuota quota("shardprep");
    quota.Resize(kQuotaBytes);
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
    builder.SetMaxSendMessageSize(kMaxMessageBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kMinPingMillis);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMillis);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMillis);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
    // Two controllers that share one port would split the workers between them.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(prep_service_.get());
    builder.RegisterService(worker_service_.get());
    server_ = builder.BuildAndStart();
    return CheckBound(ports);
  }

  const std::vector<std::string>& addresses() const override { return addresses_; }

  void SetReady(bool ready) override {
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    health->SetServingStatus("", ready);
    health->SetServingStatus(kServiceName, ready);
    health->SetServingStatus(kLivenessName, true);
  }

  void Shutdown(absl::Duration grace) override {
    if (server_ == nullptr) return;
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
    server_.reset();
    for (const std::string& address : addresses_) {
      if (absl::StartsWith(address, "unix:")) ::unlink(address.c_str() + 5);
    }
  }

 private:
  absl::Status CheckBound(const std::vector<int>& ports) {
    for (size_t i = 0; i < ports.size(); ++i) {
      const std::string& address = options_.listen[i];
      if (server_ == nullptr || ports[i] == 0) {
        return absl::UnavailableError(absl::StrCat(
            "cannot listen on ", options_.listen.size() == 1 ? address : "one of the addresses"));
      }
      addresses_.push_back(
          absl::StartsWith(address, "unix:")
              ? address
              : absl::StrCat(address.substr(0, address.rfind(':')), ":", ports[i]));
    }
    SetReady(false);
    return absl::OkStatus();
  }

  const ServerOptions options_;
  const std::unique_ptr<grpc::Service> prep_service_;
  const std::unique_ptr<grpc::Service> worker_service_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> addresses_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      Controller* controller) {
  auto server = std::make_unique<GrpcServer>(options, controller);
  SP_RETURN_IF_ERROR(server->Listen());
  return {std::move(server)};
}

}  // namespace shardprep
