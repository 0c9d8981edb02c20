#include "workers/proto_json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/json_util.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"

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

const google::protobuf::FieldDescriptor* SealField(const google::protobuf::Message& message) {
  return message.GetDescriptor()->FindFieldByName("document_sha256");
}

absl::StatusOr<std::string> Json(const google::protobuf::Message& message) {
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

// The digest that a document with a seal field must carry there.
absl::StatusOr<std::string> DigestUnsealed(const google::protobuf::Message& message) {
  const std::unique_ptr<google::protobuf::Message> open(message.New());
  open->CopyFrom(message);
  open->GetReflection()->ClearField(open.get(), SealField(message));
  SP_ASSIGN_OR_RETURN(const std::string text, Json(*open));
  return Sha256Hex(text);
}

// Checks the seal and takes it off: it belongs to the bytes, not to what they say.
absl::Status TakeSeal(const std::string& name, google::protobuf::Message& message) {
  const google::protobuf::FieldDescriptor* seal = SealField(message);
  if (seal == nullptr) return absl::OkStatus();
  SP_ASSIGN_OR_RETURN(const std::string want, DigestUnsealed(message));
  const std::string found = message.GetReflection()->GetString(message, seal);
  message.GetReflection()->ClearField(&message, seal);
  if (found == want) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(name,
                                          ": was changed after it was written: its SHA-256 is ",
                                          want, ", but it states ", found));
}

}  // namespace

absl::StatusOr<std::string> StoredJson(const google::protobuf::Message& message) {
  const google::protobuf::FieldDescriptor* seal = SealField(message);
  if (seal == nullptr) return Json(message);
  SP_ASSIGN_OR_RETURN(const std::string digest, DigestUnsealed(message));
  const std::unique_ptr<google::protobuf::Message> sealed(message.New());
  sealed->CopyFrom(message);
  sealed->GetReflection()->SetString(sealed.get(), seal, digest);
  return Json(*sealed);
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
  if (status.ok()) {
    SP_RETURN_IF_ERROR(CheckVersion(name, VersionOf(message), format_version));
    return TakeSeal(name, message);
  }
  // Fields of a later version are unknown here; say so rather than that the document is broken.
  google::protobuf::util::JsonParseOptions lenient;
  lenient.ignore_unknown_fields = true;
  if (google::protobuf::util::JsonStringToMessage(text, &message, lenient).ok()) {
    SP_RETURN_IF_ERROR(CheckVersion(name, VersionOf(message), format_version));
  }
  // What follows the first line is a piece of the document.
  const std::string fault(status.message());
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", fault.substr(0, fault.find('\n'))));
}

}  // namespace shardprep
