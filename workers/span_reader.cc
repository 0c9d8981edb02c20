#include "workers/span_reader.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

// How often a waiting consumer looks at the stop flag, which nobody announces.
constexpr absl::Duration kStopPoll = absl::Milliseconds(50);

// Room that a span takes in the ring.
int64_t RoomOf(const SourceSpan& span) {
  return std::max<int64_t>(1, (span.size_bytes + kSpanAlignment - 1) / kSpanAlignment) *
         kSpanAlignment;
}

}  // namespace

SpanReader::SpanReader(const std::vector<SourceSpan>& spans, absl::Span<uint8_t> ring,
                       int consumers, int readers, Read read, const std::atomic<bool>* stop)
    : spans_(spans), ring_(ring), read_(std::move(read)), stop_(stop), consumers_(consumers, 0) {
  int64_t ranges = 0;
  for (const SourceSpan& span : spans) {
    SP_CHECK(RoomOf(span) <= static_cast<int64_t>(ring.size()));
    ranges += static_cast<int64_t>(span.ranges.size());
  }
  {
    absl::MutexLock lock(&mu_);
    PlaceSpans();
  }
  const auto threads = std::min<int64_t>(readers, ranges);
  for (int64_t t = 0; t < threads; ++t) threads_.emplace_back([this] { ReadRanges(); });
}

SpanReader::~SpanReader() {
  Fail(absl::CancelledError("reading ahead has ended"));
  for (std::thread& thread : threads_) thread.join();
}

void SpanReader::ReadRanges() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !failure_.ok() || !work_.empty() || places_.size() == spans_.size();
  };
  for (;;) {
    if (stop_ != nullptr && *stop_) return;  // consumers see it for themselves
    Work work;
    uint8_t* data = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (!failure_.ok() || work_.empty()) return;
      work = work_.front();
      work_.pop_front();
      data = ring_.data() + places_[work.span].position + work.range->at;
    }
    const absl::Status status =
        read_(*work.range, absl::MakeSpan(data, static_cast<size_t>(work.range->size_bytes)));
    absl::MutexLock lock(&mu_);
    if (status.ok()) {
      --places_[work.span].unread;
    } else {
      failure_.Update(status);
    }
  }
}

absl::StatusOr<SpanBytes> SpanReader::MoveTo(int consumer, int64_t span) {
  absl::MutexLock lock(&mu_);
  SP_CHECK(span >= 0 && span < static_cast<int64_t>(spans_.size()));
  Advance(consumer, span);
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !failure_.ok() ||
           (span < static_cast<int64_t>(places_.size()) && places_[span].unread == 0);
  };
  while (!mu_.AwaitWithTimeout(absl::Condition(&ready), kStopPoll)) {
    if (stop_ != nullptr && *stop_) return absl::CancelledError("stopped");
  }
  if (!failure_.ok()) return failure_;
  return SpanBytes{&spans_[span], ring_.data() + places_[span].position};
}

void SpanReader::Pass(int consumer, int64_t span) {
  absl::MutexLock lock(&mu_);
  Advance(consumer, span);
}

void SpanReader::Finish(int consumer) { Pass(consumer, static_cast<int64_t>(spans_.size())); }

void SpanReader::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  failure_.Update(status);
}

void SpanReader::Advance(int consumer, int64_t span) {
  SP_CHECK(consumers_[consumer] <= span);
  consumers_[consumer] = span;
  oldest_ = *std::min_element(consumers_.begin(), consumers_.end());
  PlaceSpans();
}

// Gives room to as many further spans as there is room for, and their ranges to the readers.
void SpanReader::PlaceSpans() {
  while (places_.size() < spans_.size()) {
    const auto next = static_cast<int64_t>(places_.size());
    const SourceSpan& span = spans_[next];
    const int64_t position = FindRoom(RoomOf(span));
    if (position < 0) return;
    places_.push_back({position, static_cast<int64_t>(span.ranges.size())});
    for (const SourceRange& range : span.ranges) work_.push_back({next, &range});
  }
}

// A position behind the newest span with that much room, or -1. Spans in use run from the oldest to
// the newest, around the end of the ring at most once.
int64_t SpanReader::FindRoom(int64_t size_bytes) const {
  const auto next = static_cast<int64_t>(places_.size());
  if (oldest_ >= next) return 0;
  const int64_t begin = places_[oldest_].position;
  const int64_t end = places_[next - 1].position + RoomOf(spans_[next - 1]);
  if (end > begin) {
    if (end + size_bytes <= static_cast<int64_t>(ring_.size())) return end;
    return size_bytes <= begin ? 0 : -1;
  }
  return end + size_bytes <= begin ? end : -1;
}

}  // namespace shardprep
