#include "workers/policy_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/default_alignment_policy.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

using Json = nlohmann::json;

constexpr int64_t kFormat = 1;
constexpr size_t kMaxFileBytes = size_t{1} << 20;

absl::Status Bad(const std::string& where, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("alignment policy: ", where, ": ", what));
}

// The library keeps the last of two equal keys; a table with two answers is refused.
absl::StatusOr<Json> ParseWithoutDoubledKeys(const std::string& text) {
  std::vector<std::set<std::string>> open_objects;
  std::string doubled;
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) {
      open_objects.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second && doubled.empty()) doubled = key;
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, watch);
  } catch (const std::exception& error) {
    return Bad("text", error.what());
  }
  if (!doubled.empty()) return Bad(doubled, "key appears twice in one object");
  return json;
}

// One object of the table. Every Read marks its key; Finish() refuses keys that nothing read.
class Fields {
 public:
  Fields(std::string where, const Json& object) : where_(std::move(where)), object_(object) {}

  const std::string& where() const { return where_; }

  absl::StatusOr<std::string> Text(const char* key) {
    SP_ASSIGN_OR_RETURN(const Json* value, Find(key));
    return TextOf(key, *value);
  }

  absl::StatusOr<int64_t> Positive(const char* key) {
    SP_ASSIGN_OR_RETURN(const Json* value, Find(key));
    if (!value->is_number_integer() || (value->is_number_unsigned() && TooLarge(*value))) {
      return Bad(At(key), absl::StrCat("want an integer, found ", value->dump()));
    }
    const int64_t number = value->get<int64_t>();
    if (number < 1) return Bad(At(key), absl::StrCat("want at least 1, found ", number));
    return number;
  }

  absl::StatusOr<std::vector<std::string>> Names(const char* key) {
    SP_ASSIGN_OR_RETURN(const Json* value, Find(key));
    if (!value->is_array() || value->empty()) return Bad(At(key), "want a list that is not empty");
    std::vector<std::string> names;
    for (const Json& entry : *value) {
      SP_ASSIGN_OR_RETURN(std::string name, TextOf(key, entry));
      if (std::find(names.begin(), names.end(), name) != names.end()) {
        return Bad(At(key), absl::StrCat("'", name, "' appears twice"));
      }
      names.push_back(std::move(name));
    }
    return names;
  }

  // Names out of `known`, or "*" alone.
  absl::StatusOr<std::vector<std::string>> NamesOf(const char* key,
                                                   const std::vector<std::string>& known) {
    SP_ASSIGN_OR_RETURN(std::vector<std::string> names, Names(key));
    for (const std::string& name : names) {
      if (name == "*" && names.size() > 1) return Bad(At(key), "'*' stands beside other names");
      if (name != "*" && std::find(known.begin(), known.end(), name) == known.end()) {
        return Bad(At(key), absl::StrCat("unknown name '", name, "'"));
      }
    }
    return names;
  }

  absl::StatusOr<ProfileId> Profile(const char* key) {
    SP_ASSIGN_OR_RETURN(const std::string name, Text(key));
    const absl::StatusOr<ProfileId> profile = ParseProfile(name);
    if (!profile.ok()) return Bad(At(key), std::string(profile.status().message()));
    return *profile;
  }

  absl::Status Finish() const {
    for (const auto& [key, value] : object_.items()) {
      if (read_.count(key) == 0) return Bad(At(key.c_str()), "unknown key");
    }
    return absl::OkStatus();
  }

  std::string At(const char* key) const { return absl::StrCat(where_, ".", key); }

 private:
  absl::StatusOr<const Json*> Find(const char* key) {
    const auto found = object_.find(key);
    if (found == object_.end()) return Bad(At(key), "missing");
    read_.insert(key);
    return &*found;
  }

  absl::StatusOr<std::string> TextOf(const char* key, const Json& value) const {
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
      return Bad(At(key), absl::StrCat("want a string that is not empty, found ", value.dump()));
    }
    return value.get<std::string>();
  }

  static bool TooLarge(const Json& value) {
    return value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  }

  std::string where_;
  const Json& object_;
  std::set<std::string> read_;
};

enum class Rows { kSome, kAny };

// Calls read(fields) for each object of the list `key`. A row is named by its id where it has one,
// else by its position.
template <typename Read>
absl::Status ForEachRow(const Json& root, const char* key, Rows rows, Read read) {
  const auto list = root.find(key);
  if (list == root.end()) return Bad(key, "missing");
  if (!list->is_array()) return Bad(key, "want a list");
  if (list->empty() && rows == Rows::kSome) return Bad(key, "want a list that is not empty");
  size_t position = 0;
  for (const Json& row : *list) {
    std::string where = absl::StrCat(key, "[", position++, "]");
    if (!row.is_object()) return Bad(where, "want an object");
    const auto id = row.find("id");
    if (id != row.end() && id->is_string()) {
      where = absl::StrCat(key, "[", id->get_ref<const std::string&>(), "]");
    }
    Fields fields(where, row);
    SP_RETURN_IF_ERROR(read(fields));
    SP_RETURN_IF_ERROR(fields.Finish());
  }
  return absl::OkStatus();
}

absl::Status CheckNew(const std::string& where, const std::string& id, std::set<std::string>& ids) {
  if (ids.insert(id).second) return absl::OkStatus();
  return Bad(where, "id appears twice");
}

absl::Status ReadPlatforms(const Json& root, AlignmentPolicy& policy) {
  std::set<std::string> prefixes;
  return ForEachRow(root, "platforms", Rows::kSome, [&](Fields& fields) -> absl::Status {
    Platform platform;
    SP_ASSIGN_OR_RETURN(platform.name, fields.Text("name"));
    SP_ASSIGN_OR_RETURN(platform.prefix, fields.Text("prefix"));
    SP_RETURN_IF_ERROR(CheckNew(fields.At("prefix"), platform.prefix, prefixes));
    policy.platforms.push_back(std::move(platform));
    return absl::OkStatus();
  });
}

std::vector<std::string> PlatformNames(const AlignmentPolicy& policy) {
  std::vector<std::string> names;
  names.reserve(policy.platforms.size());
  for (const Platform& platform : policy.platforms) names.push_back(platform.name);
  return names;
}

absl::Status ReadRows(const Json& root, AlignmentPolicy& policy) {
  const std::vector<std::string> platforms = PlatformNames(policy);
  std::set<std::string> ids;
  const absl::Status read =
      ForEachRow(root, "rows", Rows::kSome, [&](Fields& fields) -> absl::Status {
        AlignmentRow row;
        SP_ASSIGN_OR_RETURN(row.id, fields.Text("id"));
        SP_RETURN_IF_ERROR(CheckNew(fields.where(), row.id, ids));
        SP_ASSIGN_OR_RETURN(row.backends, fields.NamesOf("backends", policy.backends));
        SP_ASSIGN_OR_RETURN(row.activations, fields.NamesOf("activations", policy.activations));
        SP_ASSIGN_OR_RETURN(row.platforms, fields.NamesOf("platforms", platforms));
        SP_ASSIGN_OR_RETURN(const int64_t intermediate, fields.Positive("intermediate"));
        SP_ASSIGN_OR_RETURN(const int64_t hidden, fields.Positive("hidden"));
        row.intermediate = Alignment(intermediate);
        row.hidden = Alignment(hidden);
        SP_ASSIGN_OR_RETURN(row.source, fields.Text("source"));
        policy.rows.push_back(std::move(row));
        return absl::OkStatus();
      });
  SP_RETURN_IF_ERROR(read);
  const AlignmentRow& last = policy.rows.back();
  const std::vector<std::string> all = {"*"};
  if (last.backends != all || last.activations != all || last.platforms != all) {
    return Bad(absl::StrCat("rows[", last.id, "]"),
               "the last row must match every backend, activation and platform");
  }
  return absl::OkStatus();
}

absl::Status ReadConstraints(const Json& root, AlignmentPolicy& policy) {
  std::set<std::string> ids;
  return ForEachRow(root, "constraints", Rows::kAny, [&](Fields& fields) -> absl::Status {
    WidthConstraint constraint;
    SP_ASSIGN_OR_RETURN(constraint.id, fields.Text("id"));
    SP_RETURN_IF_ERROR(CheckNew(fields.where(), constraint.id, ids));
    SP_ASSIGN_OR_RETURN(constraint.backends, fields.NamesOf("backends", policy.backends));
    SP_ASSIGN_OR_RETURN(constraint.activations, fields.NamesOf("activations", policy.activations));
    SP_ASSIGN_OR_RETURN(constraint.padded_multiple_of, fields.Positive("padded_multiple_of"));
    SP_ASSIGN_OR_RETURN(constraint.source, fields.Text("source"));
    policy.constraints.push_back(std::move(constraint));
    return absl::OkStatus();
  });
}

absl::Status ReadProfiles(const Json& root, AlignmentPolicy& policy) {
  return ForEachRow(root, "profiles", Rows::kSome, [&](Fields& fields) -> absl::Status {
    ProfileSupport support;
    SP_ASSIGN_OR_RETURN(support.profile, fields.Profile("profile"));
    SP_ASSIGN_OR_RETURN(support.backends, fields.NamesOf("backends", policy.backends));
    SP_ASSIGN_OR_RETURN(support.activations, fields.NamesOf("activations", policy.activations));
    SP_ASSIGN_OR_RETURN(support.architectures, fields.Names("architectures"));
    SP_ASSIGN_OR_RETURN(support.source, fields.Text("source"));
    policy.profiles.push_back(std::move(support));
    return absl::OkStatus();
  });
}

absl::Status ReadWeights(const Json& root, AlignmentPolicy& policy) {
  std::set<std::string> names;
  return ForEachRow(root, "weights", Rows::kSome, [&](Fields& fields) -> absl::Status {
    WeightSupport support;
    SP_ASSIGN_OR_RETURN(support.weights, fields.Text("weights"));
    SP_RETURN_IF_ERROR(CheckNew(fields.At("weights"), support.weights, names));
    SP_ASSIGN_OR_RETURN(support.backends, fields.NamesOf("backends", policy.backends));
    SP_ASSIGN_OR_RETURN(support.source, fields.Text("source"));
    policy.weights.push_back(std::move(support));
    return absl::OkStatus();
  });
}

std::vector<std::string> WeightNames(const AlignmentPolicy& policy) {
  std::vector<std::string> names;
  names.reserve(policy.weights.size());
  for (const WeightSupport& support : policy.weights) names.push_back(support.weights);
  return names;
}

absl::Status CheckDottedNumbers(const std::string& where, const std::string& version) {
  for (const std::string& number : std::vector<std::string>(absl::StrSplit(version, '.'))) {
    const bool digits =
        std::all_of(number.begin(), number.end(), [](char c) { return absl::ascii_isdigit(c); });
    if (number.empty() || number.size() > 9 || !digits) {
      return Bad(where, absl::StrCat("want numbers and dots, found '", version, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadAiterMinimums(const Json& root, AlignmentPolicy& policy) {
  return ForEachRow(root, "aiter_minimums", Rows::kAny, [&](Fields& fields) -> absl::Status {
    AiterMinimum minimum;
    SP_ASSIGN_OR_RETURN(minimum.profile, fields.Profile("profile"));
    SP_ASSIGN_OR_RETURN(minimum.weights, fields.NamesOf("weights", WeightNames(policy)));
    SP_ASSIGN_OR_RETURN(const std::string width, fields.Text("width"));
    if (width != "native" && width != "padded") {
      return Bad(fields.At("width"), absl::StrCat("want native or padded, found '", width, "'"));
    }
    minimum.width = width == "native" ? WidthKind::kNative : WidthKind::kPadded;
    SP_ASSIGN_OR_RETURN(minimum.unless_multiple_of, fields.Positive("unless_multiple_of"));
    SP_ASSIGN_OR_RETURN(minimum.version, fields.Text("version"));
    SP_RETURN_IF_ERROR(CheckDottedNumbers(fields.At("version"), minimum.version));
    SP_ASSIGN_OR_RETURN(minimum.source, fields.Text("source"));
    policy.aiter_minimums.push_back(std::move(minimum));
    return absl::OkStatus();
  });
}

absl::Status ReadAutoBackends(const Json& root, AlignmentPolicy& policy) {
  const absl::Status read =
      ForEachRow(root, "auto_backends", Rows::kSome, [&](Fields& fields) -> absl::Status {
        AutoBackend row;
        SP_ASSIGN_OR_RETURN(row.architectures, fields.Names("architectures"));
        SP_ASSIGN_OR_RETURN(row.weights, fields.NamesOf("weights", WeightNames(policy)));
        SP_ASSIGN_OR_RETURN(row.backend, fields.Text("backend"));
        if (std::find(policy.backends.begin(), policy.backends.end(), row.backend) ==
            policy.backends.end()) {
          return Bad(fields.At("backend"), absl::StrCat("unknown name '", row.backend, "'"));
        }
        SP_ASSIGN_OR_RETURN(row.reason, fields.Text("reason"));
        policy.auto_backends.push_back(std::move(row));
        return absl::OkStatus();
      });
  SP_RETURN_IF_ERROR(read);
  const std::vector<std::string> all = {"*"};
  const AutoBackend& last = policy.auto_backends.back();
  if (last.architectures != all || last.weights != all) {
    return Bad("auto_backends", "the last row must match every architecture and all weights");
  }
  return absl::OkStatus();
}

// The keys whose values are lists of rows, which ForEachRow reads.
constexpr std::initializer_list<const char*> kTables = {
    "platforms", "rows", "constraints", "profiles", "weights", "aiter_minimums", "auto_backends"};

absl::StatusOr<AlignmentPolicy> PolicyOf(const Json& root) {
  if (!root.is_object()) return Bad("text", "want an object");
  Json scalars = root;
  for (const char* table : kTables) scalars.erase(table);
  Fields fields("root", scalars);
  SP_ASSIGN_OR_RETURN(const int64_t format, fields.Positive("format"));
  if (format != kFormat) {
    return Bad("root.format", absl::StrCat("found ", format, ", want ", kFormat));
  }
  AlignmentPolicy policy;
  SP_ASSIGN_OR_RETURN(policy.version, fields.Positive("version"));
  SP_ASSIGN_OR_RETURN(policy.backends, fields.Names("backends"));
  SP_ASSIGN_OR_RETURN(policy.activations, fields.Names("activations"));
  SP_RETURN_IF_ERROR(fields.Finish());
  SP_RETURN_IF_ERROR(ReadPlatforms(root, policy));
  SP_RETURN_IF_ERROR(ReadRows(root, policy));
  SP_RETURN_IF_ERROR(ReadConstraints(root, policy));
  SP_RETURN_IF_ERROR(ReadProfiles(root, policy));
  SP_RETURN_IF_ERROR(ReadWeights(root, policy));
  SP_RETURN_IF_ERROR(ReadAiterMinimums(root, policy));
  SP_RETURN_IF_ERROR(ReadAutoBackends(root, policy));
  return policy;
}

}  // namespace

absl::StatusOr<PolicyFile> ParseAlignmentPolicy(const std::string& text) {
  SP_ASSIGN_OR_RETURN(const Json root, ParseWithoutDoubledKeys(text));
  PolicyFile file;
  SP_ASSIGN_OR_RETURN(file.policy, PolicyOf(root));
  // The library orders keys and escapes alike whatever the text looked like; a table that parsed
  // holds valid UTF-8, so this cannot throw.
  file.sha256_hex = Sha256Hex(root.dump());
  return file;
}

PolicyFile DefaultAlignmentPolicy() {
  absl::StatusOr<PolicyFile> file = ParseAlignmentPolicy(kDefaultAlignmentPolicy);
  SP_CHECK(file.ok());
  return *std::move(file);
}

absl::StatusOr<PolicyFile> ReadAlignmentPolicy(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    const int error = errno;
    const std::string message = absl::StrCat(path, ": ", std::strerror(error));
    if (error == ENOENT) return absl::NotFoundError(message);
    if (error == EACCES) return absl::PermissionDeniedError(message);
    return absl::UnavailableError(message);
  }
  std::string text(kMaxFileBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad()) return absl::UnavailableError(absl::StrCat(path, ": cannot be read"));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kMaxFileBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, ": larger than ", kMaxFileBytes, " bytes"));
  }
  absl::StatusOr<PolicyFile> file = ParseAlignmentPolicy(text);
  if (!file.ok()) return Prefixed(path, file.status());
  return file;
}

}  // namespace shardprep
