// The command line of the two server programs.
#pragma once

#include <string>

#include "workers/s3/s3_options.h"

namespace shardprep {

// Reads the flags of absl/flags from the command line. `_` and `-` are the same in a flag's name,
// so that what the command line tool understands is understood here as well. Ends the process with
// 1, and a line on standard error, for a flag that is unknown or malformed and for an argument that
// is none: `--allow_source /a /b` would allow less than was meant. Ends it with 0 for --version,
// and with 1, as absl/flags does, for --help: both print to standard output. `usage` says what the
// program is for. Call it once, before the first thread.
void ParseProgramFlags(int argc, char** argv, const std::string& usage);

// What the flags --s3_* of both programs state.
S3Flags S3ProgramFlags();

}  // namespace shardprep
