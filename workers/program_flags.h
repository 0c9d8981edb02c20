// The command line of the two server programs.
#pragma once

#include <optional>
#include <string>

#include "workers/s3/s3_options.h"

namespace shardprep {

// Reads the flags of absl/flags. Each takes its value from the first of these that has one:
//
//   1. the command line;
//   2. the environment variable SHARDPREP_FLAG_NAME, the flag's name in capitals;
//   3. the file that --config names (workers/config_file.h);
//   4. its default.
//
// `_` and `-` are the same in a flag's name, so that what the command line tool understands is
// understood here as well. Ends the process with 1, and a line on standard error that names flag,
// variable or file and line, for what is unknown or malformed and for an argument that is no flag:
// `--allow_source /a /b` would allow less than was meant. Ends it with 0 for --version, and with 1,
// as absl/flags does, for --help: both print to standard output. `usage` says what the program is
// for. Call it once, before the first thread.
//
// With --validate_config the result is the effective configuration, as a file that --config would
// read: every flag, where its value comes from, and URIs without what may be secret in them. The
// caller then checks its options, prints it and ends.
std::optional<std::string> ParseProgramFlags(int argc, char** argv, const std::string& usage);

// Variables that begin so are for one program; one that starts another takes them away.
inline constexpr char kFlagVariablePrefix[] = "SHARDPREP_FLAG_";

// What the flags --s3_* of both programs state.
S3Flags S3ProgramFlags();

}  // namespace shardprep
