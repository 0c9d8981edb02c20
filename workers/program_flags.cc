#include "workers/program_flags.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"
#include "workers/config_file.h"
#include "workers/log.h"
#include "workers/version.h"

ABSL_FLAG(
    std::string, s3_endpoint, "",
    "S3 endpoint, http(s)://host[:port]. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else "
    "that of AWS.");
ABSL_FLAG(std::string, s3_region, "", "S3 region. Default: AWS_REGION, AWS_DEFAULT_REGION.");
ABSL_FLAG(std::string, s3_addressing, "",
          "Where the bucket stands in S3 requests: path or virtual (in the host name).");
ABSL_FLAG(std::string, s3_ca_bundle, "",
          "PEM certificates that sign the S3 endpoint's. Default: AWS_CA_BUNDLE, the system's.");
ABSL_FLAG(
    std::string, s3_payload, "",
    "signed (default) or unsigned: hash payloads before they are sent. Unsigned over TLS only.");

ABSL_FLAG(std::string, config, "",
          "File with a line `name = value` for each flag that neither the command line nor the "
          "environment (SHARDPREP_FLAG_NAME) sets.");
ABSL_FLAG(bool, validate_config, false,
          "Checks everything that can be checked without starting, prints the effective "
          "configuration, and ends.");

namespace shardprep {
namespace {

constexpr char kConfigVariable[] = "SHARDPREP_FLAG_CONFIG";

// absl/flags would look for flags of a file with the program's name, which no file of ours has.
bool IsOurs(absl::string_view file) {
  return absl::EndsWith(file, "_main.cc") || absl::EndsWith(file, "/program_flags.cc");
}

std::string Name(const char* argv0) {
  const char* const slash = std::strrchr(argv0, '/');
  return slash == nullptr ? argv0 : slash + 1;
}

void UseUnderscores(char* argument) {
  if (std::strncmp(argument, "--", 2) != 0) return;
  char* const name = argument + 2;
  std::replace(name, name + std::strcspn(name, "="), '-', '_');
}

// Where a flag's value comes from, by its name; the default where there is no entry.
using Sources = std::map<std::string, std::string>;

// The flag, if it is one that a file or a variable may set.
absl::CommandLineFlag* FindOwnFlag(const std::string& name) {
  if (name == "config" || name == "validate_config") return nullptr;
  absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(name);
  return flag != nullptr && IsOurs(flag->Filename()) ? flag : nullptr;
}

absl::Status SetFlagFrom(const std::string& where, const std::string& name,
                         const std::string& value, const std::string& source, Sources& sources) {
  absl::CommandLineFlag* const flag = FindOwnFlag(name);
  if (flag == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": there is no flag ", name, "; --help lists them"));
  }
  std::string error;
  if (!flag->ParseFrom(value, &error)) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": ", name, ": '", value, "' is no value for it", error.empty() ? "" : ": ", error));
  }
  sources[name] = source;
  return absl::OkStatus();
}

absl::Status TakeConfig(const std::string& path, Sources& sources) {
  if (path.empty()) return absl::OkStatus();
  SP_ASSIGN_OR_RETURN(const std::vector<ConfigEntry> entries, ReadConfig(path));
  for (const ConfigEntry& entry : entries) {
    const std::string where = absl::StrCat(path, ":", entry.line);
    SP_RETURN_IF_ERROR(SetFlagFrom(where, entry.name, entry.value, where, sources));
  }
  return absl::OkStatus();
}

absl::Status TakeEnvironment(Sources& sources) {
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const absl::string_view text = *variable;
    if (!absl::StartsWith(text, kFlagVariablePrefix)) continue;
    const std::string name(text.substr(0, text.find('=')));
    if (name == kConfigVariable) continue;
    const std::string value(text.substr(std::min(text.size(), name.size() + 1)));
    const std::string flag = absl::AsciiStrToLower(name.substr(sizeof(kFlagVariablePrefix) - 1));
    SP_RETURN_IF_ERROR(SetFlagFrom(name, flag, value, name, sources));
  }
  return absl::OkStatus();
}

// Of --config on the command line, the last one, or of its variable.
std::string ConfigPath(int argc, char** argv) {
  const char* const variable = std::getenv(kConfigVariable);
  std::string path = variable == nullptr ? "" : variable;
  for (int i = 1; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
    if (std::strcmp(argv[i], "--config") == 0 && i + 1 < argc) path = argv[++i];
    if (std::strncmp(argv[i], "--config=", 9) == 0) path = argv[i] + 9;
  }
  return path;
}

std::vector<std::string> NamesOnCommandLine(int argc, char** argv) {
  std::vector<std::string> names;
  for (int i = 1; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
    absl::string_view word = argv[i];
    if (!absl::ConsumePrefix(&word, "--")) continue;
    std::string name(word.substr(0, word.find('=')));
    if (FindOwnFlag(name) == nullptr && absl::StartsWith(name, "no")) name = name.substr(2);
    names.push_back(std::move(name));
  }
  return names;
}

// Values that are lists of URIs lose what may be secret in each.
std::string ShownValue(const std::string& value) {
  return absl::StrJoin(absl::StrSplit(value, ','), ",",
                       [](std::string* out, absl::string_view item) {
                         out->append(UriWithoutSecrets(std::string(item)));
                       });
}

std::string EffectiveConfig(const Sources& sources) {
  std::map<std::string, std::string> lines;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    const std::string key(name);
    if (FindOwnFlag(key) == nullptr) continue;
    const auto source = sources.find(key);
    lines[key] = absl::StrCat("# ", source == sources.end() ? "default" : source->second, "\n", key,
                              " = ", ShownValue(flag->CurrentValue()), "\n");
  }
  std::string text;
  for (const auto& [name, line] : lines) text += line;
  return text;
}

}  // namespace

std::optional<std::string> ParseProgramFlags(int argc, char** argv, const std::string& usage) {
  const std::string name = Name(argv[0]);
  absl::FlagsUsageConfig config;
  config.contains_help_flags = &IsOurs;
  config.contains_helpshort_flags = &IsOurs;
  config.version_string = [name] { return absl::StrCat(name, " ", kToolVersion, "\n"); };
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage(usage);
  for (int i = 1; i < argc; ++i) UseUnderscores(argv[i]);
  Sources sources;
  absl::Status status = TakeConfig(ConfigPath(argc, argv), sources);
  if (status.ok()) status = TakeEnvironment(sources);
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), std::string(status.message()).c_str());
    std::exit(1);
  }
  const std::vector<std::string> given = NamesOnCommandLine(argc, argv);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() != 1) {
    std::fprintf(stderr,
                 "%s: unexpected argument '%s'; several values of a flag stand in a list a,b\n",
                 name.c_str(), rest[1]);
    std::exit(1);
  }
  for (const std::string& flag : given) sources[flag] = "command line";
  if (!absl::GetFlag(FLAGS_validate_config)) return std::nullopt;
  return EffectiveConfig(sources);
}

S3Flags S3ProgramFlags() {
  return {.endpoint = absl::GetFlag(FLAGS_s3_endpoint),
          .region = absl::GetFlag(FLAGS_s3_region),
          .addressing = absl::GetFlag(FLAGS_s3_addressing),
          .ca_bundle = absl::GetFlag(FLAGS_s3_ca_bundle),
          .payload = absl::GetFlag(FLAGS_s3_payload)};
}

}  // namespace shardprep
