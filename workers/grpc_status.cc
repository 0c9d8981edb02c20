#include "workers/grpc_status.h"

#include <grpcpp/support/status.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "workers/printable.h"

namespace shardprep {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kDomain[] = "shardprep";
constexpr size_t kMaxMessageSize = 4096;
// A client takes trailers of 8 KiB unless it says otherwise, and reports any larger as an error of
// its own. So much of them the message may take, in both of its forms, and the reason's metadata.
constexpr size_t kMaxTrailerMessage = 4608;
constexpr size_t kMaxTrailerMetadata = 1024;
constexpr size_t kMaxTrailerValue = 256;

std::optional<google::rpc::ErrorInfo> AttachedInfo(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kErrorInfoUrl);
  google::rpc::ErrorInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return info;
}

void Attach(const google::rpc::ErrorInfo& info, absl::Status* status) {
  const std::string bytes = info.SerializeAsString();
  // Not from the string itself: compilers disagree on the name of that template, and Debian's
  // library has it only under GCC's.
  status->SetPayload(kErrorInfoUrl, absl::Cord(absl::string_view(bytes)));
}

google::rpc::ErrorInfo InfoOf(const absl::Status& status) {
  if (std::optional<google::rpc::ErrorInfo> info = AttachedInfo(status)) return *info;
  google::rpc::ErrorInfo info;
  info.set_reason(absl::StatusCodeToString(status.code()));
  info.set_domain(kDomain);
  return info;
}

// Protobuf strings are UTF-8, and messages quote names that need not be. Cuts at a character's
// start, so that what is left stays valid.
std::string Shortened(absl::string_view text, size_t end = kMaxMessageSize) {
  std::string message = Printable(text);
  if (message.size() <= end) return message;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return message.substr(0, end) + "...";
}

// How much of a printable message fits kMaxTrailerMessage: it travels percent-encoded, where a byte
// that is no printable ASCII takes three, and again in base64, where three bytes take four.
size_t TrailerPrefix(const std::string& message) {
  size_t thirds = 0;
  size_t end = 0;
  for (; end < message.size(); ++end) {
    const bool bare = message[end] >= ' ' && message[end] <= '~' && message[end] != '%';
    thirds += (bare ? 3 : 9) + 4;
    if (thirds > 3 * kMaxTrailerMessage) break;
  }
  return end;
}

}  // namespace

absl::Status WithReason(absl::Status status, const std::string& reason,
                        const std::map<std::string, std::string>& metadata) {
  if (status.ok()) return status;
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kDomain);
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = Printable(value);
  Attach(info, &status);
  return status;
}

ErrorReason ReasonOf(const absl::Status& status) {
  const google::rpc::ErrorInfo info = InfoOf(status);
  ErrorReason result;
  result.reason = info.reason();
  for (const auto& [key, value] : info.metadata()) result.metadata[key] = value;
  return result;
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status result;
  if (status.ok()) return result;
  result.set_code(static_cast<int>(status.code()));
  result.set_message(Shortened(status.message()));
  google::rpc::ErrorInfo info = InfoOf(status);
  for (auto& [key, value] : *info.mutable_metadata()) value = Shortened(value);
  result.add_details()->PackFrom(info);
  return result;
}

absl::Status FromRpcStatus(const google::rpc::Status& status) {
  if (status.code() == 0) return absl::OkStatus();
  const bool canonical = status.code() > 0 && status.code() <= 16;
  absl::Status result(
      canonical ? static_cast<absl::StatusCode>(status.code()) : absl::StatusCode::kUnknown,
      status.message());
  for (const google::protobuf::Any& detail : status.details()) {
    google::rpc::ErrorInfo info;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) {
      Attach(info, &result);
    }
  }
  return result;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  const std::string message = Printable(status.message());
  details.set_message(Shortened(message, TrailerPrefix(message)));
  google::rpc::ErrorInfo info = InfoOf(status);
  size_t left = kMaxTrailerMetadata;
  for (auto& [key, value] : *info.mutable_metadata()) {
    value = Shortened(value, std::min(left, kMaxTrailerValue));
    left -= std::min(left, key.size() + value.size());
  }
  details.add_details()->PackFrom(info);
  return grpc::Status(static_cast<grpc::StatusCode>(details.code()), details.message(),
                      details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status details;
  if (!status.error_details().empty() && details.ParseFromString(status.error_details()) &&
      details.code() == static_cast<int>(status.error_code())) {
    return FromRpcStatus(details);
  }
  details.Clear();
  details.set_code(static_cast<int>(status.error_code()));
  details.set_message(status.error_message());
  return FromRpcStatus(details);
}

}  // namespace shardprep
