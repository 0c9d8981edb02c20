#include "workers/proto_json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/json_util.h>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

std::string VersionOf(const google::protobuf::Message& message) {
  const google::protobuf::FieldDescriptor* field =
      message.GetDescriptor()->FindFieldByName("format_version");
  SP_CHECK(field != nullptr);
  return message.GetReflection()->GetString(message, field);
}

absl::Status CheckVersion(const std::string& name, const std::string& found,
                          const std::string& want) {
  if (found == want) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(name, ": format version '", found, "', this build reads '", want, "'"));
}

}  // namespace

absl::StatusOr<std::string> StoredJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(message.GetTypeName(), ": ", std::string(status.message())));
  }
  if (text.empty() || text.back() != '\n') text += '\n';
  return text;
}

absl::Status ParseStoredJson(const std::string& text, const std::string& name,
                             const std::string& format_version,
                             google::protobuf::Message& message) {
  if (static_cast<int64_t>(text.size()) > kMaxDocumentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", text.size(), " bytes, want at most ", kMaxDocumentBytes));
  }
  google::protobuf::util::JsonParseOptions strict;
  const auto status = google::protobuf::util::JsonStringToMessage(text, &message, strict);
  if (status.ok()) return CheckVersion(name, VersionOf(message), format_version);
  // Fields of a later version are unknown here; say so rather than that the document is broken.
  google::protobuf::util::JsonParseOptions lenient;
  lenient.ignore_unknown_fields = true;
  if (google::protobuf::util::JsonStringToMessage(text, &message, lenient).ok()) {
    SP_RETURN_IF_ERROR(CheckVersion(name, VersionOf(message), format_version));
  }
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", std::string(status.message())));
}

}  // namespace shardprep
