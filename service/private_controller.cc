#include "service/private_controller.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "service/controller_host.h"
#include "service/socket_directory.h"

namespace shardprep {
namespace {

// Short, since socket addresses hold 107 bytes.
constexpr char kSocketParent[] = "/tmp";

class HostedController : public PrivateController {
 public:
  explicit HostedController(std::unique_ptr<SocketDirectory> directory)
      : directory_(std::move(directory)),
        address_(absl::StrCat("unix:", directory_->socket_path())) {}

  ~HostedController() override { HostedController::Stop(absl::ZeroDuration()); }

  absl::Status Start(const PrivateControllerOptions& options) {
    ControllerHostOptions host;
    host.listen = {address_};
    host.metrics_listen = options.metrics_listen;
    host.allow_source_root = options.allow_source_root;
    host.sign_key = options.sign_key;
    host.s3 = options.s3;
    host.s3_flags = options.s3_flags;
    host.local_workers = options.workers;
    host.worker_program = options.worker_program;
    host.device = options.device;
    host.worker_threads = options.worker_threads;
    host.memory_budget_bytes = options.memory_budget_bytes;
    SP_ASSIGN_OR_RETURN(host_, ControllerHost::Start(host));
    return absl::OkStatus();
  }

  const std::string& address() const override { return address_; }

  std::string metrics_address() const override {
    return host_ == nullptr ? "" : host_->metrics_address();
  }

  void Stop(absl::Duration grace) override {
    if (host_ != nullptr) host_->Drain(grace);
    host_.reset();
    directory_.reset();
  }

 private:
  std::unique_ptr<SocketDirectory> directory_;
  const std::string address_;
  std::unique_ptr<ControllerHost> host_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrivateController>> PrivateController::Start(
    const PrivateControllerOptions& options) {
  if (options.workers < 1) return absl::InvalidArgumentError("workers: want at least 1");
  SP_ASSIGN_OR_RETURN(std::unique_ptr<SocketDirectory> directory,
                      SocketDirectory::Make(kSocketParent));
  auto controller = std::make_unique<HostedController>(std::move(directory));
  SP_RETURN_IF_ERROR(controller->Start(options));
  return {std::move(controller)};
}

}  // namespace shardprep
