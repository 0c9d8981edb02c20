#include "service/cli_signals.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <utility>

namespace shardprep {
namespace {

sigset_t EndingSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

Interrupts::Interrupts() {
  const sigset_t set = EndingSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { Wait(); });
}

Interrupts::~Interrupts() {
  done_ = true;
  pthread_kill(thread_.native_handle(), SIGINT);  // wakes it
  thread_.join();
}

void Interrupts::Handle(std::function<void(int)> stop) {
  absl::MutexLock lock(&mu_);
  stop_ = std::move(stop);
  if (stop_ && taken_ != 0) stop_(taken_);
}

void Interrupts::Wait() {
  const sigset_t set = EndingSignals();
  const timespec turn{.tv_sec = 0, .tv_nsec = 50'000'000};
  while (!done_) {
    const int signal = sigtimedwait(&set, nullptr, &turn);
    if (signal > 0 && !done_) Take(signal);
  }
}

void Interrupts::Take(int signal) {
  if (taken_ != 0) _exit(128 + signal);
  taken_ = signal;
  absl::MutexLock lock(&mu_);
  if (!stop_) {
    // Ends a progress bar, so that the shell's prompt does not land on it.
    if (isatty(STDERR_FILENO) == 1) {
      [[maybe_unused]] const ssize_t wrote = write(STDERR_FILENO, "\n", 1);
    }
    _exit(128 + signal);
  }
  stop_(signal);
}

}  // namespace shardprep
