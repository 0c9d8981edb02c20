#include "service/local_workers.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "workers/log.h"
#include "workers/program_flags.h"

namespace shardprep {
namespace {

std::string EndText(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrCat("killed by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)),
                        ")");
  }
  return absl::StrCat("exited with code ", WEXITSTATUS(status));
}

struct Process {
  pid_t pid = -1;
  int stdin_pipe = -1;  // our end
};

// Starts the program with a pipe as its standard input, no signal blocked and none ignored.
absl::StatusOr<Process> Spawn(const std::string& program, std::vector<std::string> arguments) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("pipe: ", ::strerror(errno)));
  }
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // dup2 clears close-on-exec on the copy.
  posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  // The flags of a worker are the arguments; variables with flags are the controller's own.
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!absl::StartsWith(*variable, kFlagVariablePrefix)) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  Process process;
  const int error = ::posix_spawn(&process.pid, program.c_str(), &actions, &attributes, argv.data(),
                                  environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[0]);
  if (error != 0) {
    ::close(ends[1]);
    return absl::FailedPreconditionError(absl::StrCat(program, ": ", ::strerror(error)));
  }
  process.stdin_pipe = ends[1];
  return process;
}

class SpawnedWorkers : public LocalWorkers {
 public:
  SpawnedWorkers(LocalWorkersOptions options,
                 std::function<void(const std::string&, const std::string&)> gone)
      : options_(std::move(options)), gone_(std::move(gone)) {
    threads_.reserve(static_cast<size_t>(options_.count));
    for (int slot = 0; slot < options_.count; ++slot) {
      threads_.emplace_back([this, slot] { RunSlot(slot); });
      ::pthread_setname_np(threads_.back().native_handle(), "sp-worker");
    }
  }

  ~SpawnedWorkers() override { SpawnedWorkers::Stop(absl::ZeroDuration()); }

  void Kill(const std::string& worker_id) override {
    absl::MutexLock lock(&mu_);
    const auto found = running_.find(worker_id);
    if (found != running_.end()) ::kill(found->second.pid, SIGKILL);
  }

  void Stop(absl::Duration grace) override {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
      for (const auto& [id, process] : running_) ::kill(process.pid, SIGTERM);
      const auto all_gone = [this]()
                                ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return running_.empty(); };
      if (!mu_.AwaitWithTimeout(absl::Condition(&all_gone), grace)) {
        for (const auto& [id, process] : running_) ::kill(process.pid, SIGKILL);
      }
    }
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

  std::vector<std::string> Running() override {
    absl::MutexLock lock(&mu_);
    std::vector<std::string> ids;
    ids.reserve(running_.size());
    for (const auto& [id, process] : running_) ids.push_back(id);
    return ids;
  }

 private:
  void RunSlot(int slot) {
    absl::Duration pause = options_.restart_pause;
    for (int generation = 0;; ++generation) {
      const absl::Time begin = absl::Now();
      const std::string id = absl::StrCat(options_.id_prefix, "-", slot, "-", generation);
      if (!RunProcess(slot, id)) return;
      if (absl::Now() - begin >= options_.settled) pause = options_.restart_pause;
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), pause)) return;
      pause = std::min(pause * 2, options_.max_restart_pause);
    }
  }

  // One process from start to end. False when there is to be no other.
  bool RunProcess(int slot, const std::string& id) {
    std::vector<std::string> arguments = options_.arguments;
    if (!options_.slot_arguments.empty()) {
      const std::vector<std::string>& more = options_.slot_arguments[static_cast<size_t>(slot)];
      arguments.insert(arguments.end(), more.begin(), more.end());
    }
    for (std::string& argument : arguments) {
      argument = absl::StrReplaceAll(argument, {{"{id}", id}});
    }
    Process process;
    {
      absl::MutexLock lock(&mu_);
      if (stopping_) return false;
      absl::StatusOr<Process> spawned = Spawn(options_.program, std::move(arguments));
      if (!spawned.ok()) {
        Log(LogLevel::kError, "local-workers", "cannot start a worker",
            {{"worker", id}, {"status", spawned.status()}});
        return true;
      }
      process = *spawned;
      running_[id] = process;
    }
    Log(LogLevel::kInfo, "local-workers", "worker started",
        {{"worker", id}, {"pid", int64_t{process.pid}}});
    const std::string how = Await(id, process);
    Log(LogLevel::kInfo, "local-workers", "worker ended", {{"worker", id}, {"how", how}});
    gone_(id, how);
    return true;
  }

  // Waits without reaping first, so that until the entry is gone its pid is nobody else's and may
  // be signalled.
  std::string Await(const std::string& id, const Process& process) {
    siginfo_t info;
    while (::waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOWAIT) != 0 &&
           errno == EINTR) {
    }
    absl::MutexLock lock(&mu_);
    int status = 0;
    while (::waitpid(process.pid, &status, 0) < 0 && errno == EINTR) {
    }
    ::close(process.stdin_pipe);
    running_.erase(id);
    return EndText(status);
  }

  const LocalWorkersOptions options_;
  const std::function<void(const std::string&, const std::string&)> gone_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::map<std::string, Process> running_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LocalWorkers>> LocalWorkers::Start(
    const LocalWorkersOptions& options,
    std::function<void(const std::string& worker_id, const std::string& how)> gone) {
  if (::access(options.program.c_str(), X_OK) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker program ", options.program, ": ", ::strerror(errno)));
  }
  return {std::make_unique<SpawnedWorkers>(options, std::move(gone))};
}

absl::StatusOr<std::string> BinaryBesideOwn(const std::string& name) {
  char own[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", own, sizeof own - 1);
  if (size < 0) {
    return absl::FailedPreconditionError(absl::StrCat("/proc/self/exe: ", ::strerror(errno)));
  }
  const std::string self(own, static_cast<size_t>(size));
  std::string path = absl::StrCat(self.substr(0, self.rfind('/') + 1), name);
  if (::access(path.c_str(), X_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", ::strerror(errno)));
  }
  return path;
}

}  // namespace shardprep
