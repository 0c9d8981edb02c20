// Standard error while a command runs: a progress line, and lines above it that do not break it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "service/progress_line.h"
#include "workers/clock.h"

namespace shardprep {

// Thread safe. At most one at a time that captures.
class Console {
 public:
  // `label` begins the progress line. With `capture_logs` what this process and its children write
  // to standard error goes to memory instead, until destruction; Progress() and PollLogs() pass its
  // lines on, as LinesForPeople() says. A process that aborts still prints it.
  Console(const std::string& label, bool capture_logs);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // Shows the state when a line is due.
  void Progress(const ProgressState& state);
  // Shows the last state in a line of its own, if any state was shown.
  void EndProgress();
  // Prints a line.
  void Line(const std::string& text);
  // Passes on what was captured since the last time.
  void PollLogs();
  // What is captured from now on is dropped, for tearing down what nobody needs any more.
  void DropLogs();

 private:
  std::string TakeCaptured() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Write(const std::string& text) const;
  int Columns() const;

  absl::Mutex mu_;
  const SystemClock clock_;
  int terminal_fd_ = 2;  // the standard error that the process started with
  int capture_fd_ = -1;
  bool is_terminal_ = false;
  int64_t captured_ ABSL_GUARDED_BY(mu_) = 0;  // bytes taken so far
  std::string partial_ ABSL_GUARDED_BY(mu_);   // a line whose end has not been captured
  ProgressMeter meter_ ABSL_GUARDED_BY(mu_);
  ProgressState state_ ABSL_GUARDED_BY(mu_);
  bool shown_ ABSL_GUARDED_BY(mu_) = false;
  bool drop_logs_ ABSL_GUARDED_BY(mu_) = false;
};

// Of captured lines those for people: log lines (workers/log.h) of level info are left out, but for
// the device that a worker chose and why. Pure.
std::string LinesForPeople(const std::string& lines);

}  // namespace shardprep
