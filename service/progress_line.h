// Progress as one line: a bar that is drawn over itself on a terminal, plain lines elsewhere. Pure:
// the caller passes time and width, and writes what it gets.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "absl/time/time.h"

namespace shardprep {

struct ProgressState {
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;  // 0 while it is not known
  std::string note;         // shown last, for example "rank tasks 12/32"
};

// "103,428,390,912 B  96.325 GiB": what exact reports say of a size.
std::string ExactSize(int64_t bytes);

// "0:07", "12:03", "1:02:03"; parts of a second are dropped, and negative durations are 0.
std::string ClockText(absl::Duration duration);

// A line of at most `columns` characters, for example
//   prepare [######------]  45.3%  1.230 GiB of 2.715 GiB  812.3 MiB/s  ETA 0:01  rank tasks 12/32
// When it does not fit, the bar shrinks to ten characters, then pieces go from the right, and the
// bar last but one. `bytes_per_second` 0 means unknown: no rate and no ETA.
std::string FormatProgress(const std::string& label, const ProgressState& state,
                           double bytes_per_second, bool bar, int columns);

// Decides when a line is due, and measures the rate over the last seconds, so that neither resumed
// bytes nor a slow start count. Not thread safe.
class ProgressMeter {
 public:
  // `terminal`: draw a bar over itself, at most ten times a second. Otherwise lines, one for each
  // 5 % but not two within 200 ms, and one every 2 s, in long runs every tenth of the time so far
  // up to a minute.
  ProgressMeter(std::string label, bool terminal);

  // What to write now, empty when nothing is due. `now` is monotonic time from any origin.
  std::string Update(const ProgressState& state, absl::Duration now, int columns);

  // What to write at the end, so that the last state stands there in a line of its own, with the
  // rate over the whole time.
  std::string Finish(const ProgressState& state, absl::Duration now, int columns);

  // On a terminal: `lines` (each with its line feed) with the bar drawn again below them.
  std::string Above(const std::string& lines) const;

 private:
  struct Sample {
    absl::Duration at;
    int64_t done_bytes;
  };

  void Measure(const ProgressState& state, absl::Duration now);
  double Rate() const;
  bool Due(const ProgressState& state, absl::Duration now) const;

  const std::string label_;
  const bool terminal_;
  std::deque<Sample> samples_;
  absl::Duration started_;
  absl::Duration shown_at_;
  int64_t started_bytes_ = 0;
  int shown_step_ = -1;  // of 5 %
  int64_t shown_done_bytes_ = -1;
  std::string shown_note_;
  bool begun_ = false;
  std::string shown_;
};

}  // namespace shardprep
