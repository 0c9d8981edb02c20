#include "workers/plan_differences.h"

#include <map>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardprep {
namespace {

constexpr int kDifferencesShown = 5;

std::map<std::string, std::string> Flatten(const nlohmann::json& json) {
  std::map<std::string, std::string> flat;
  if (!json.is_structured() || json.empty()) return flat;
  const nlohmann::json flattened = json.flatten();
  for (const auto& [path, value] : flattened.items()) {
    flat[path.substr(1)] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return flat;
}

// Text from a stored document; what is nested deeper than ours ever is, is dropped.
nlohmann::json ParseShallow(const std::string& text) {
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    return depth < 16;
  };
  return nlohmann::json::parse(text, shallow, /*allow_exceptions=*/false);
}

// Source files by name instead of position, so that a difference names the file.
nlohmann::json ParseInputs(const std::string& text) {
  nlohmann::json json = ParseShallow(text);
  if (!json.is_object() || !json.contains("source_files")) return json;
  nlohmann::json files = nlohmann::json::object();
  for (const nlohmann::json& file : json["source_files"]) {
    if (!file.is_object() || !file.contains("name") || !file["name"].is_string()) continue;
    files[file["name"].get<std::string>()] = file;
  }
  json["source_files"] = files;
  return json;
}

// "profile is logical, want aiter-separated; ..."
std::string DescribeDifferences(const nlohmann::json& found, const nlohmann::json& want) {
  const std::map<std::string, std::string> a = Flatten(found), b = Flatten(want);
  std::set<std::string> paths;
  for (const auto& [path, value] : a) paths.insert(path);
  for (const auto& [path, value] : b) paths.insert(path);
  std::vector<std::string> differences;
  int more = 0;
  for (const std::string& path : paths) {
    const auto in_a = a.find(path), in_b = b.find(path);
    const std::string value_a = in_a == a.end() ? "absent" : in_a->second;
    const std::string value_b = in_b == b.end() ? "absent" : in_b->second;
    if (value_a == value_b) continue;
    if (static_cast<int>(differences.size()) == kDifferencesShown) {
      ++more;
    } else {
      differences.push_back(absl::StrCat(path, " is ", value_a, ", want ", value_b));
    }
  }
  if (more > 0) differences.push_back(absl::StrCat("and ", more, " more"));
  return absl::StrJoin(differences, "; ");
}

}  // namespace

std::string DescribeInputs(const std::string& found, const std::string& want) {
  return DescribeDifferences(ParseInputs(found), ParseInputs(want));
}

std::string DescribeTokens(const std::string& found, const std::string& want) {
  return DescribeDifferences(ParseShallow(found), ParseShallow(want));
}

}  // namespace shardprep
