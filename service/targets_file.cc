#include "service/targets_file.h"

#include <set>
#include <utility>

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/status_macros.h"
#include "service/job_queue_types.h"

namespace shardprep {
namespace {

// The list, with each key of each object once: neither parser would say otherwise.
absl::StatusOr<nlohmann::json> ParseList(const std::string& text) {
  std::vector<std::set<std::string>> open;  // keys of the objects that are being read
  std::string twice;
  const auto note = [&](int /*depth*/, nlohmann::json::parse_event_t event,
                        const nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::object_start) open.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) open.pop_back();
    if (event == nlohmann::json::parse_event_t::key) {
      const auto key = value.get<std::string>();
      // A field may be spelled destination_uri or destinationUri.
      const std::string field = absl::AsciiStrToLower(absl::StrReplaceAll(key, {{"_", ""}}));
      if (!open.back().insert(field).second && twice.empty()) twice = key;
    }
    return true;
  };
  nlohmann::json root = nlohmann::json::parse(text, note, /*allow_exceptions=*/false);
  if (!root.is_array() || root.empty()) {
    return absl::InvalidArgumentError("want a JSON list of at least one target");
  }
  if (!twice.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the field \"", twice, "\" is given twice"));
  }
  if (root.size() > kMaxTargets) {
    return absl::InvalidArgumentError(absl::StrCat(root.size(), " targets, at most ", kMaxTargets));
  }
  return root;
}

absl::StatusOr<v1::Target> ParseTarget(const nlohmann::json& entry) {
  if (!entry.is_object()) return absl::InvalidArgumentError("want a JSON object");
  v1::Target target;
  google::protobuf::util::JsonParseOptions strict;
  const auto status = google::protobuf::util::JsonStringToMessage(entry.dump(), &target, strict);
  if (!status.ok()) {
    // What follows the first line is a piece of the text.
    const std::string fault(status.message());
    return absl::InvalidArgumentError(fault.substr(0, fault.find('\n')));
  }
  if (target.destination_uri().empty()) {
    return absl::InvalidArgumentError("destination_uri is not set");
  }
  return target;
}

}  // namespace

absl::StatusOr<std::vector<v1::Target>> ParseTargets(const std::string& text) {
  SP_ASSIGN_OR_RETURN(const nlohmann::json list, ParseList(text));
  std::vector<v1::Target> targets;
  for (size_t t = 0; t < list.size(); ++t) {
    absl::StatusOr<v1::Target> target = ParseTarget(list[t]);
    if (!target.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("targets[", t, "]: ", target.status().message()));
    }
    targets.push_back(*std::move(target));
  }
  return targets;
}

}  // namespace shardprep
