#include "service/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
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
// The same for probes, which ask for a name of a few bytes.
constexpr size_t kProbeQuotaBytes = size_t{16} << 20;
constexpr int kProbeMessageBytes = 4096;
// Clients may ping every 30 s, streams open or not; ours do so every minute
// (workers/grpc_channel.cc). The rest is room for timers that run early: three pings in shorter
// intervals end the connection.
constexpr int kMinPingMillis = 20'000;
// Our own pings find clients that are gone, so that their watches end.
constexpr int kKeepaliveMillis = 60'000;
constexpr int kKeepaliveTimeoutMillis = 20'000;
// Of headers that a request may have, what gRPC takes by default.
constexpr int kMaxMetadataBytes = 8 << 10;

// Takes plug-ins such as reflection, which are registered for the whole process, off one server.
class WithoutPlugins : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

// `asked` with the port that was chosen.
std::string WithPort(const std::string& asked, int port) {
  if (absl::StartsWith(asked, "unix:")) return asked;
  return absl::StrCat(asked.substr(0, asked.rfind(':')), ":", port);
}

class GrpcServer : public Server {
 public:
  GrpcServer(const ServerOptions& options, PeerPolicy peers, Controller* controller)
      : options_(options),
        peers_(std::move(peers)),
        prep_service_(MakePrepService(controller, &peers_)),
        worker_service_(MakeWorkerService(controller, &peers_)) {}

  ~GrpcServer() override { GrpcServer::Shutdown(absl::ZeroDuration()); }

  absl::Status Listen() {
    if (options_.listen.empty()) return absl::InvalidArgumentError("no address to listen on");
    for (const std::string& address : options_.listen) {
      SP_RETURN_IF_ERROR(CheckAddress(address, options_.security));
    }
    if (!options_.health_listen.empty()) {
      SP_RETURN_IF_ERROR(CheckAddress(options_.health_listen, {.allow_insecure = true}));
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
    Limit(builder, kQuotaBytes, kMaxMessageBytes);
    builder.RegisterService(prep_service_.get());
    builder.RegisterService(worker_service_.get());
    server_ = builder.BuildAndStart();
    SP_RETURN_IF_ERROR(CheckBound(ports));
    if (!options_.health_listen.empty()) SP_RETURN_IF_ERROR(ListenForProbes());
    SetReady(false);
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return addresses_; }

  const std::string& health_address() const override { return health_address_; }

  void SetReady(bool ready) override {
    for (grpc::Server* server : {server_.get(), health_server_.get()}) {
      if (server == nullptr) continue;
      grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
      health->SetServingStatus("", ready);
      health->SetServingStatus(kServiceName, ready);
      health->SetServingStatus(kLivenessName, true);
    }
  }

  void Shutdown(absl::Duration grace) override {
    if (server_ == nullptr) return;
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
    server_.reset();
    if (health_server_ != nullptr) {
      // Probes see to the end that the process lives, and none of them is worth waiting for.
      health_server_->Shutdown(absl::ToChronoTime(absl::Now()));
      health_server_->Wait();
      health_server_.reset();
    }
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
      addresses_.push_back(WithPort(address, ports[i]));
    }
    return absl::OkStatus();
  }

  static void Limit(grpc::ServerBuilder& builder, size_t quota_bytes, int message_bytes) {
    grpc::ResourceQuota quota("shardprep");
    quota.Resize(quota_bytes);
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(message_bytes);
    builder.SetMaxSendMessageSize(message_bytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                               kMinPingMillis);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMillis);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMillis);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
    // Two controllers that share one port would split the workers between them.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  }

  absl::Status ListenForProbes() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(options_.health_listen, grpc::InsecureServerCredentials(), &port);
    Limit(builder, kProbeQuotaBytes, kProbeMessageBytes);
    builder.SetOption(std::make_unique<WithoutPlugins>());
    builder.RegisterCallbackGenericService(&nothing_else_);
    health_server_ = builder.BuildAndStart();
    if (health_server_ == nullptr || port == 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", options_.health_listen, " for probes"));
    }
    health_address_ = WithPort(options_.health_listen, port);
    return absl::OkStatus();
  }

  const ServerOptions options_;
  const PeerPolicy peers_;
  const std::unique_ptr<grpc::Service> prep_service_;
  const std::unique_ptr<grpc::Service> worker_service_;
  std::unique_ptr<grpc::Server> server_;
  grpc::CallbackGenericService nothing_else_;  // answers UNIMPLEMENTED
  std::unique_ptr<grpc::Server> health_server_;
  std::vector<std::string> addresses_;
  std::string health_address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      Controller* controller) {
  SP_ASSIGN_OR_RETURN(PeerPolicy peers, PeerPolicy::Make(options.roles, options.security));
  auto server = std::make_unique<GrpcServer>(options, std::move(peers), controller);
  SP_RETURN_IF_ERROR(server->Listen());
  return {std::move(server)};
}

}  // namespace shardprep
