#include "workers/program_flags.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "workers/version.h"

namespace shardprep {
namespace {

// absl/flags would look for flags of a file with the program's name, which no file of ours has.
bool IsOfMain(absl::string_view file) { return absl::EndsWith(file, "_main.cc"); }

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
  config.contains_help_flags = &IsOfMain;
  config.contains_helpshort_flags = &IsOfMain;
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

}  // namespace shardprep
