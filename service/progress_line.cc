#include "service/progress_line.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "workers/byte_size.h"

namespace shardprep {
namespace {

constexpr absl::Duration kRateWindow = absl::Seconds(10);
constexpr absl::Duration kRateLeast = absl::Milliseconds(500);
constexpr absl::Duration kRedraw = absl::Milliseconds(100);
constexpr absl::Duration kLineLeast = absl::Milliseconds(200);
constexpr absl::Duration kLineFirst = absl::Seconds(2);
constexpr absl::Duration kLineMost = absl::Minutes(1);
constexpr size_t kBarLeast = 10;
constexpr size_t kBarMost = 40;
constexpr size_t kBarFrame = 3;  // a space and brackets
constexpr char kEraseToEnd[] = "\x1b[K";

double Share(const ProgressState& state) {
  if (state.total_bytes <= 0) return 0;
  const double share =
      static_cast<double>(state.done_bytes) / static_cast<double>(state.total_bytes);
  return std::clamp(share, 0.0, 1.0);
}

std::string RateText(double bytes_per_second) {
  const double mebibytes = bytes_per_second / (1 << 20);
  if (mebibytes >= 1024) return absl::StrFormat("%.2f GiB/s", mebibytes / 1024);
  return absl::StrFormat("%.1f MiB/s", mebibytes);
}

std::string Bar(double share, int width) {
  const int filled = static_cast<int>(std::floor(share * width));
  return absl::StrCat(" [", std::string(static_cast<size_t>(filled), '#'),
                      std::string(static_cast<size_t>(width - filled), '-'), "]");
}

// Everything but label and bar, most important first.
std::vector<std::string> Pieces(const ProgressState& state, double bytes_per_second) {
  std::vector<std::string> pieces;
  if (state.total_bytes <= 0) {
    pieces.push_back(FormatByteSize(state.done_bytes));
  } else {
    // Rounded down: 100 % means all of it.
    pieces.push_back(absl::StrFormat("%5.1f%%", std::floor(Share(state) * 1000) / 10));
    pieces.push_back(
        absl::StrCat(FormatByteSize(state.done_bytes), " of ", FormatByteSize(state.total_bytes)));
  }
  if (bytes_per_second > 0) {
    pieces.push_back(RateText(bytes_per_second));
    const int64_t left = state.total_bytes - state.done_bytes;
    if (left > 0) {
      const double seconds = static_cast<double>(left) / bytes_per_second;
      pieces.push_back(absl::StrCat("ETA ", ClockText(absl::Seconds(std::ceil(seconds)))));
    }
  }
  if (!state.note.empty()) pieces.push_back(state.note);
  return pieces;
}

}  // namespace

std::string ExactSize(int64_t bytes) {
  return absl::StrFormat("%s B  %.3f GiB", FormatThousands(bytes),
                         static_cast<double>(bytes) / (int64_t{1} << 30));
}

std::string ClockText(absl::Duration duration) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(duration));
  const int64_t minutes = seconds / 60;
  if (minutes < 60) return absl::StrFormat("%d:%02d", minutes, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", minutes / 60, minutes % 60, seconds % 60);
}

std::string FormatProgress(const std::string& label, const ProgressState& state,
                           double bytes_per_second, bool bar, int columns) {
  const size_t width = static_cast<size_t>(std::max(columns, 1));
  const std::vector<std::string> pieces = Pieces(state, bytes_per_second);
  const size_t least = label.size() + 2 + pieces.front().size();
  bar = bar && state.total_bytes > 0 && least + kBarLeast + kBarFrame <= width;
  const size_t tail_width = width - (bar ? kBarLeast + kBarFrame : 0);
  std::string tail;
  for (const std::string& piece : pieces) {
    if (!tail.empty() && label.size() + tail.size() + 2 + piece.size() > tail_width) break;
    absl::StrAppend(&tail, "  ", piece);
  }
  std::string line = label;
  if (bar) {
    const size_t room = width - label.size() - tail.size() - kBarFrame;
    absl::StrAppend(&line, Bar(Share(state), static_cast<int>(std::min(room, kBarMost))));
  }
  absl::StrAppend(&line, tail);
  return line.substr(0, width);
}

ProgressMeter::ProgressMeter(std::string label, bool terminal)
    : label_(std::move(label)), terminal_(terminal) {}

void ProgressMeter::Measure(const ProgressState& state, absl::Duration now) {
  if (!begun_) {
    begun_ = true;
    started_ = now;
    started_bytes_ = state.done_bytes;
  }
  // Work that is done again takes bytes back: what was measured before says nothing any more.
  if (!samples_.empty() && state.done_bytes < samples_.back().done_bytes) samples_.clear();
  if (samples_.empty() || now - samples_.back().at >= kRedraw) {
    samples_.push_back({now, state.done_bytes});
  }
  while (samples_.size() > 2 && now - samples_[1].at >= kRateWindow) samples_.pop_front();
}

double ProgressMeter::Rate() const {
  if (samples_.size() < 2) return 0;
  const absl::Duration span = samples_.back().at - samples_.front().at;
  if (span < kRateLeast) return 0;
  return static_cast<double>(samples_.back().done_bytes - samples_.front().done_bytes) /
         absl::ToDoubleSeconds(span);
}

bool ProgressMeter::Due(const ProgressState& state, absl::Duration now) const {
  if (shown_.empty()) return true;
  const absl::Duration since = now - shown_at_;
  if (terminal_) return since >= kRedraw;
  const bool further = static_cast<int>(Share(state) * 20) > shown_step_;
  if (further) return since >= kLineLeast;
  return since >= std::clamp((now - started_) / 10, kLineFirst, kLineMost);
}

std::string ProgressMeter::Update(const ProgressState& state, absl::Duration now, int columns) {
  Measure(state, now);
  if (!Due(state, now)) return "";
  std::string line = FormatProgress(label_, state, Rate(), terminal_, columns);
  shown_at_ = now;
  shown_step_ = static_cast<int>(Share(state) * 20);
  shown_done_bytes_ = state.done_bytes;
  shown_note_ = state.note;
  if (!terminal_) {
    shown_ = line;
    return absl::StrCat(line, "\n");
  }
  if (line == shown_) return "";
  shown_ = std::move(line);
  return absl::StrCat("\r", shown_, kEraseToEnd);
}

std::string ProgressMeter::Finish(const ProgressState& state, absl::Duration now, int columns) {
  Measure(state, now);
  const bool repeated =
      !terminal_ && shown_done_bytes_ == state.done_bytes && shown_note_ == state.note;
  const double seconds = absl::ToDoubleSeconds(now - started_);
  const double rate =
      seconds > 0 ? static_cast<double>(state.done_bytes - started_bytes_) / seconds : 0;
  const std::string line = FormatProgress(label_, state, std::max(rate, 0.0), terminal_, columns);
  shown_.clear();
  if (terminal_) return absl::StrCat("\r", line, kEraseToEnd, "\n");
  return repeated ? "" : absl::StrCat(line, "\n");
}

std::string ProgressMeter::Above(const std::string& lines) const {
  if (!terminal_ || shown_.empty()) return lines;
  return absl::StrCat("\r", kEraseToEnd, lines, shown_, kEraseToEnd);
}

}  // namespace shardprep
