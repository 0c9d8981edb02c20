#include "workers/program_flags.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
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

namespace shardprep {
namespace {

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

}  // namespace

void ParseProgramFlags(int argc, char** argv, const std::string& usage) {
  const std::string name = Name(argv[0]);
  absl::FlagsUsageConfig config;
  config.contains_help_flags = &IsOurs;
  config.contains_helpshort_flags = &IsOurs;
  config.version_string = [name] { return absl::StrCat(name, " ", kToolVersion, "\n"); };
  absl::SetFlagsUsageConfig(config);
  absl::SetProgramUsageMessage(usage);
  for (int i = 1; i < argc; ++i) UseUnderscores(argv[i]);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() == 1) return;
  std::fprintf(stderr,
               "%s: unexpected argument '%s'; several values of a flag stand in a list a,b\n",
               name.c_str(), rest[1]);
  std::exit(1);
}

S3Flags S3ProgramFlags() {
  return {.endpoint = absl::GetFlag(FLAGS_s3_endpoint),
          .region = absl::GetFlag(FLAGS_s3_region),
          .addressing = absl::GetFlag(FLAGS_s3_addressing),
          .ca_bundle = absl::GetFlag(FLAGS_s3_ca_bundle),
          .payload = absl::GetFlag(FLAGS_s3_payload)};
}

}  // namespace shardprep
