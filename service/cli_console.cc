#include "service/cli_console.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int kPlainColumns = 160;
constexpr int64_t kPage = 4096;
// How workers/worker_main.cc logs it.
constexpr absl::string_view kDeviceChosen = " component=worker msg=\"device chosen\" ";

// For the handler of SIGABRT, which may only use what is lock-free and async-signal-safe.
std::atomic<int> g_capture_fd{-1};
std::atomic<int> g_terminal_fd{-1};
std::atomic<int64_t> g_captured{0};

void PrintCapturedAndAbort(int /*signal*/) {
  std::array<char, 4096> buffer;
  int64_t at = g_captured;
  for (;;) {
    const ssize_t got = pread(g_capture_fd, buffer.data(), buffer.size(), at);
    if (got <= 0) break;
    if (write(g_terminal_fd, buffer.data(), static_cast<size_t>(got)) <= 0) break;
    at += got;
  }
  // The handler was installed for one signal, so this one ends the process.
  raise(SIGABRT);
}

void HandleAbort() {
  struct sigaction action = {};
  action.sa_handler = &PrintCapturedAndAbort;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  sigaction(SIGABRT, &action, nullptr);
}

}  // namespace

std::string LinesForPeople(const std::string& lines) {
  std::string kept;
  for (const absl::string_view line : absl::StrSplit(lines, '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(line, "level=audit ")) continue;
    if (!absl::StartsWith(line, "level=info ")) {
      absl::StrAppend(&kept, line, "\n");
    } else if (const size_t at = line.find(kDeviceChosen); at != line.npos) {
      absl::StrAppend(&kept, "worker: ", line.substr(at + kDeviceChosen.size()), "\n");
    }
  }
  return kept;
}

Console::Console(const std::string& label, bool capture_logs)
    : is_terminal_(isatty(STDERR_FILENO) == 1), meter_(label, is_terminal_) {
  if (!capture_logs) return;
  // Memory rather than a pipe: a writer never waits for a reader, and needs none to live.
  const int memory = memfd_create("shardprep-log", MFD_CLOEXEC);
  const int saved = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
  if (memory < 0 || saved < 0 || fcntl(memory, F_SETFL, O_APPEND) != 0 ||
      dup2(memory, STDERR_FILENO) < 0) {
    if (memory >= 0) close(memory);
    if (saved >= 0) close(saved);
    return;  // logs then go where they went before
  }
  capture_fd_ = memory;
  terminal_fd_ = saved;
  g_captured = 0;
  g_terminal_fd = saved;
  g_capture_fd = memory;
  HandleAbort();
}

Console::~Console() {
  if (capture_fd_ < 0) return;
  PollLogs();
  {
    absl::MutexLock lock(&mu_);
    if (!drop_logs_) Write(LinesForPeople(partial_));
  }
  signal(SIGABRT, SIG_DFL);
  dup2(terminal_fd_, STDERR_FILENO);
  g_capture_fd = -1;
  close(capture_fd_);
  close(terminal_fd_);
}

int Console::Columns() const {
  if (!is_terminal_) return kPlainColumns;
  winsize size = {};
  if (ioctl(terminal_fd_, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 79;
  // In the last column some terminals wrap.
  return std::max(20, static_cast<int>(size.ws_col) - 1);
}

void Console::Write(const std::string& text) const {
  size_t at = 0;
  while (at < text.size()) {
    const ssize_t wrote = write(terminal_fd_, text.data() + at, text.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;  // there is nowhere left to say so
    at += static_cast<size_t>(wrote);
  }
}

std::string Console::TakeCaptured() {
  if (capture_fd_ < 0) return "";
  std::string text = std::move(partial_);
  std::array<char, 65536> buffer;
  for (;;) {
    const ssize_t got = pread(capture_fd_, buffer.data(), buffer.size(), captured_);
    if (got <= 0) break;
    text.append(buffer.data(), static_cast<size_t>(got));
    captured_ += got;
  }
  g_captured = captured_;
  // Memory of what was taken is given back.
  fallocate(capture_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, captured_ / kPage * kPage);
  const size_t end = text.rfind('\n');
  const size_t whole = end == std::string::npos ? 0 : end + 1;
  partial_ = text.substr(whole);
  return drop_logs_ ? "" : LinesForPeople(text.substr(0, whole));
}

void Console::DropLogs() {
  absl::MutexLock lock(&mu_);
  const std::string lines = TakeCaptured();
  if (!lines.empty()) Write(meter_.Above(lines));
  drop_logs_ = true;
}

void Console::PollLogs() {
  absl::MutexLock lock(&mu_);
  const std::string lines = TakeCaptured();
  if (!lines.empty()) Write(meter_.Above(lines));
}

void Console::Line(const std::string& text) {
  absl::MutexLock lock(&mu_);
  Write(meter_.Above(absl::StrCat(TakeCaptured(), text, "\n")));
}

void Console::Progress(const ProgressState& state) {
  absl::MutexLock lock(&mu_);
  const std::string lines = TakeCaptured();
  if (!lines.empty()) Write(meter_.Above(lines));
  state_ = state;
  shown_ = true;
  const std::string text = meter_.Update(state, clock_.Monotonic(), Columns());
  if (!text.empty()) Write(text);
}

void Console::EndProgress() {
  absl::MutexLock lock(&mu_);
  const std::string lines = TakeCaptured();
  if (!lines.empty()) Write(meter_.Above(lines));
  if (!shown_) return;
  Write(meter_.Finish(state_, clock_.Monotonic(), Columns()));
  shown_ = false;
}

}  // namespace shardprep
