// Drives a fuzz target without libFuzzer:
//
//   fuzz_NAME [--mutations=N] [--seed=N] FILE_OR_DIRECTORY...
//
// Runs every file, then N inputs that are mutations of them. Equal arguments give equal inputs on
// every machine. An input that ends the process is left in the file that standard error names.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/fuzz/fuzz_target.h"

namespace shardprep {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxInputBytes = 16 << 10;

std::string ReadBytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<fs::path> FilesOf(const fs::path& place) {
  std::vector<fs::path> files;
  if (fs::is_directory(place)) {
    for (const auto& entry : fs::directory_iterator(place)) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(place);
  }
  return files;
}

// std::uniform_int_distribution differs between libraries; this does not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  size_t Below(size_t count) { return count == 0 ? 0 : static_cast<size_t>(engine_() % count); }

 private:
  std::mt19937_64 engine_;
};

// Draws stand one to a statement: arguments are evaluated in another order by another compiler.
void MutateOnce(std::string& bytes, const std::vector<std::string>& corpus, Dice& dice) {
  const size_t at = dice.Below(bytes.size() + 1);
  const size_t length = std::min(dice.Below(16) + 1, bytes.size() - at);
  switch (dice.Below(7)) {
    case 0:
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << dice.Below(8)));
      break;
    case 1:
      if (at < bytes.size()) bytes[at] = static_cast<char>(dice.Below(256));
      break;
    case 2: {
      const size_t count = 1 + dice.Below(8);
      bytes.insert(at, count, static_cast<char>(dice.Below(256)));
      break;
    }
    case 3:
      bytes.erase(at, length);
      break;
    case 4:  // doubles a run
      bytes.insert(at, bytes.substr(at, length));
      break;
    case 5: {  // the other half of another input
      const std::string& other = corpus[dice.Below(corpus.size())];
      bytes = bytes.substr(0, at) + other.substr(dice.Below(other.size() + 1));
      break;
    }
    default: {  // a piece of another input
      const std::string& other = corpus[dice.Below(corpus.size())];
      const size_t from = dice.Below(other.size() + 1);
      bytes.insert(at, other.substr(from, 1 + dice.Below(64)));
      break;
    }
  }
  if (bytes.size() > kMaxInputBytes) bytes.resize(kMaxInputBytes);
}

// The input that runs, and where it goes if the target does not come back. For the signal handler.
const std::string* current_input = nullptr;
std::string kept_path;

void KeepInput(int signal) {
  const int fd = ::open(kept_path.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
  if (fd >= 0 && current_input != nullptr &&
      ::write(fd, current_input->data(), current_input->size()) >= 0 &&
      ::write(STDERR_FILENO, kept_path.data(), kept_path.size()) >= 0) {
    static_cast<void>(::write(STDERR_FILENO, "\n", 1) == 1);
  }
  ::raise(signal);  // with the default action now
}

void KeepInputsThatEndTheProcess() {
  kept_path = (fs::temp_directory_path() / ("fuzz-input-" + std::to_string(::getpid()))).string();
  struct sigaction action = {};
  action.sa_handler = KeepInput;
  action.sa_flags = SA_RESETHAND | SA_NODEFER;
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    ::sigaction(signal, &action, nullptr);
  }
}

void RunOne(const std::string& input) {
  current_input = &input;
  FuzzOne(input);
}

int Run(const std::vector<std::string>& arguments) {
  KeepInputsThatEndTheProcess();
  uint64_t mutations = 0;
  uint64_t seed = 1;
  std::vector<std::string> corpus;
  for (const std::string& argument : arguments) {
    absl::string_view value = argument;
    if (absl::ConsumePrefix(&value, "--mutations=")) {
      if (!absl::SimpleAtoi(value, &mutations)) return 2;
    } else if (absl::ConsumePrefix(&value, "--seed=")) {
      if (!absl::SimpleAtoi(value, &seed)) return 2;
    } else {
      for (const fs::path& file : FilesOf(argument)) {
        corpus.push_back(ReadBytes(file));
        RunOne(corpus.back());
      }
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "no inputs: want files, or directories of them\n");
    return 2;
  }
  Dice dice(seed);
  for (uint64_t i = 0; i < mutations; ++i) {
    std::string input = corpus[dice.Below(corpus.size())];
    for (size_t more = 1 + dice.Below(6); more > 0; --more) MutateOnce(input, corpus, dice);
    RunOne(input);
  }
  std::printf("%zu inputs and %llu mutations of them by seed %llu\n", corpus.size(),
              static_cast<unsigned long long>(mutations), static_cast<unsigned long long>(seed));
  return 0;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  return shardprep::Run(std::vector<std::string>(argv + 1, argv + argc));
}
