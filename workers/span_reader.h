// Reads the spans of a part ahead of the threads that use them.
//
// Memory is one ring: spans lie in it whole, in the order of the plan, and the oldest makes room
// when every consumer has moved past it. Reader threads take the ranges of all spans that have
// room, in order, so many requests are in flight, those of one span among them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "workers/source_spans.h"

namespace shardprep {

// The bytes of a span that has been read.
struct SpanBytes {
  const SourceSpan* span = nullptr;
  const uint8_t* data = nullptr;

  const uint8_t* At(int64_t file, int64_t offset, int64_t size_bytes) const {
    return data + span->Position(file, offset, size_bytes);
  }
};

class SpanReader {
 public:
  // Fetches a range into memory of its size. From many threads at once.
  using Read = std::function<absl::Status(const SourceRange& range, absl::Span<uint8_t> out)>;

  // Starts reading. `spans` must outlive this. `ring` must hold the largest; with room for two,
  // reading overlaps with use. At most `readers` reads are under way at a time. Every span is some
  // consumer's. `stop` may be null; once it is set, no further read starts.
  SpanReader(const std::vector<SourceSpan>& spans, absl::Span<uint8_t> ring, int consumers,
             int readers, Read read, const std::atomic<bool>* stop);
  // Starts no further read and waits for those under way, each bounded by its store's timeouts.
  ~SpanReader();
  SpanReader(const SpanReader&) = delete;
  SpanReader& operator=(const SpanReader&) = delete;

  // A consumer, counted from 0, is done with all spans before `span` and waits for it; numbers
  // never fall. The bytes stay until its next call. Errors: the first failed read's or Fail()'s;
  // CANCELLED, within a moment, once `stop` is set.
  absl::StatusOr<SpanBytes> MoveTo(int consumer, int64_t span);

  // The same without waiting: the consumer will not ask for spans before `span`, and does not use
  // the bytes that it had.
  void Pass(int consumer, int64_t span);

  // A consumer needs no further span. Others wait for good without this.
  void Finish(int consumer);

  // Wakes every waiting consumer with this status and starts no further read.
  void Fail(const absl::Status& status);

 private:
  // A range to be read.
  struct Work {
    int64_t span = 0;
    const SourceRange* range = nullptr;
  };
  struct Place {
    int64_t position = 0;  // in the ring
    int64_t unread = 0;    // ranges that have not arrived
  };

  void ReadRanges();
  void Advance(int consumer, int64_t span) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PlaceSpans() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t FindRoom(int64_t size_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::vector<SourceSpan>& spans_;
  const absl::Span<uint8_t> ring_;
  const Read read_;
  const std::atomic<bool>* const stop_;

  absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::vector<int64_t> consumers_ ABSL_GUARDED_BY(mu_);  // the span that each is at
  int64_t oldest_ ABSL_GUARDED_BY(mu_) = 0;              // least of consumers_
  // Of the spans [0, places_.size()), which have been given room; those before oldest_ have lost
  // it. Bytes of the ring are written by readers until `unread` is 0, and read by consumers after.
  std::vector<Place> places_ ABSL_GUARDED_BY(mu_);
  std::deque<Work> work_ ABSL_GUARDED_BY(mu_);

  std::vector<std::thread> threads_;
};

}  // namespace shardprep
