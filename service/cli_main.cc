// shardprep: finds the command and hands it the rest of the line.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "service/cli.h"
#include "service/cli_signals.h"
#include "workers/environment.h"
#include "workers/version.h"

namespace shardprep {
namespace {

struct Command {
  const char* name;
  const char* summary;
  int (*run)(const CliContext&, const CliArguments&);
};

constexpr Command kCommands[] = {
    {"prepare", "Prepares a checkpoint on this machine, with progress.", &RunPrepare},
    {"plan", "Shows what prepare would do; writes nothing.", &RunPlan},
    {"verify", "Reads an artefact back and proves every byte of it.", &RunVerify},
    {"sign", "Verifies an artefact and signs its manifest.", &RunSign},
    {"fetch", "Gets the files of some ranks, if they fit.", &RunFetch},
    {"doctor", "Tries what jobs will need, and says what is missing.", &RunDoctor},
    {"layout", "Applies one layout to raw bytes; lists layouts.", &RunLayout},
    {"bench", "Measures this machine and how near a job comes to it.", &RunBench},
    {"submit", "Gives a job to a running controller.", &RunSubmit},
    {"get", "Shows a job.", &RunGet},
    {"list", "Lists jobs.", &RunList},
    {"watch", "Follows a job to its end.", &RunWatch},
    {"cancel", "Cancels a job and removes what it wrote.", &RunCancel},
};

void PrintHelp() {
  std::printf(
      "shardprep %s cuts mixture-of-experts checkpoints into native per-rank slices, pads and\n"
      "shuffles them for the kernel that reads them, and writes verified safetensors.\n"
      "\n"
      "usage: shardprep COMMAND [flags]\n"
      "\n"
      "Commands:\n",
      kToolVersion);
  for (const Command& command : kCommands) {
    std::printf("  %-10s%s\n", command.name, command.summary);
  }
  std::printf(
      "\n"
      "`shardprep COMMAND --help` explains a command; `shardprep --version` prints the version.\n"
      "\n"
      "Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted by Ctrl-C (143 by "
      "SIGTERM).\n"
      "\n"
      "Example:\n"
      "  shardprep prepare --source DeepSeek-V4-Pro --destination prepared \\\n"
      "    --tensor-parallel-size 8\n");
}

int UnknownCommand(const std::string& word) {
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  const std::string nearest = NearestWord(word, names);
  std::fprintf(stderr, "shardprep: unknown command '%s'%s\nSee: shardprep --help\n", word.c_str(),
               nearest.empty() ? "" : ("; did you mean " + nearest + "?").c_str());
  return kExitUsage;
}

int Dispatch(const CliContext& context, const CliArguments& words) {
  if (words.empty()) {
    std::fprintf(stderr, "shardprep: a command is missing\nSee: shardprep --help\n");
    return kExitUsage;
  }
  const std::string& word = words.front();
  CliArguments rest(words.begin() + 1, words.end());
  if (word == "--help" || word == "-h" || (word == "help" && rest.empty())) {
    PrintHelp();
    return kExitOk;
  }
  if (word == "--version") {
    std::printf("shardprep %s\n", kToolVersion);
    return kExitOk;
  }
  const bool help = word == "help";
  const std::string name = help ? rest.front() : word;
  if (help) rest = {"--help"};
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run(context, rest);
  }
  return UnknownCommand(name);
}

int Main(const CliArguments& words) {
  // A closed pipe is an error of the write, reported below, and no reason to drop a job.
  signal(SIGPIPE, SIG_IGN);
  Interrupts interrupts;
  char directory[PATH_MAX];
  if (getcwd(directory, sizeof(directory)) == nullptr) {
    std::fprintf(stderr, "shardprep: the working directory cannot be found: %s\n",
                 std::strerror(errno));
    return kExitFailure;
  }
  const int exit_code = Dispatch({.working_directory = directory,
                                  .interrupts = &interrupts,
                                  .environment = ReadEnvironmentVariable},
                                 words);
  const bool flushed = std::fflush(stdout) == 0;
  if (!flushed || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "shardprep: standard output cannot be written\n");
    return exit_code == kExitOk ? kExitFailure : exit_code;
  }
  return exit_code;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  return shardprep::Main(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
}
