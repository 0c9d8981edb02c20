#include "workers/span_reader.h"

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

// The byte at an offset of a file, by what it belongs to.
uint8_t ByteAt(int64_t file, int64_t offset) {
  return static_cast<uint8_t>(17 * file + offset + offset / 251);
}

absl::Status ReadModel(const SourceRange& range, absl::Span<uint8_t> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = ByteAt(range.file, range.offset + static_cast<int64_t>(i));
  }
  return absl::OkStatus();
}

// Spans with one to three ranges of random sizes; each range lies in a file of its own.
SpanPlan RandomSpans(int count, int64_t largest_range, uint32_t seed) {
  std::mt19937 random(seed);
  SpanPlan plan;
  int64_t file = 0;
  for (int s = 0; s < count; ++s) {
    SourceSpan span;
    for (uint32_t r = 0; r <= random() % 3; ++r) {
      const auto size = static_cast<int64_t>(1 + random() % largest_range);
      span.ranges.push_back({file++, static_cast<int64_t>(random() % 1000), size, span.size_bytes});
      span.size_bytes += size;
    }
    plan.spans.push_back(std::move(span));
  }
  return plan;
}

void ExpectModelBytes(const SpanBytes& bytes) {
  for (const SourceRange& range : bytes.span->ranges) {
    const uint8_t* data = bytes.At(range.file, range.offset, range.size_bytes);
    int64_t wrong = 0;
    for (int64_t i = 0; i < range.size_bytes; ++i) {
      wrong += data[i] != ByteAt(range.file, range.offset + i) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0) << "file " << range.file;
  }
}

TEST(SpanReader, EveryConsumerSeesItsSpansWholeWhateverTheRing) {
  constexpr int64_t kLargestRange = 2000;
  constexpr int64_t kLargestSpan = 3 * kLargestRange + kSpanAlignment;
  const SpanPlan plan = RandomSpans(200, kLargestRange, 1);
  for (const int64_t ring_bytes :
       {kLargestSpan, kLargestSpan + 1000, 3 * kLargestSpan, int64_t{1} << 20}) {
    for (const int readers : {1, 3, 16}) {
      for (const int consumers : {1, 2, 5}) {
        SCOPED_TRACE(
            absl::StrCat("ring ", ring_bytes, " readers ", readers, " consumers ", consumers));
        std::vector<uint8_t> ring(ring_bytes);
        SpanReader reader(plan.spans, absl::MakeSpan(ring), consumers, readers, ReadModel, nullptr);
        const auto consume = [&](int consumer) {
          for (int64_t s = 0; s < static_cast<int64_t>(plan.spans.size()); ++s) {
            // Every span is somebody's, and most are everybody's.
            if (s % 7 == 3 && s % consumers != consumer) continue;
            const absl::StatusOr<SpanBytes> bytes = reader.MoveTo(consumer, s);
            ASSERT_TRUE(bytes.ok()) << bytes.status();
            ExpectModelBytes(*bytes);
          }
          reader.Finish(consumer);
        };
        std::vector<std::thread> threads;
        for (int c = 1; c < consumers; ++c) threads.emplace_back(consume, c);
        consume(0);
        for (std::thread& thread : threads) thread.join();
      }
    }
  }
}

TEST(SpanReader, AsManyReadsAreUnderWayAsWereAskedFor) {
  constexpr int kReaders = 6;
  const SpanPlan plan = RandomSpans(20, 100, 2);
  std::atomic<int> begun{0};
  absl::Notification all;
  const auto read = [&](const SourceRange& range, absl::Span<uint8_t> out) {
    if (++begun == kReaders) all.Notify();
    all.WaitForNotification();  // would never come if they waited for each other
    return ReadModel(range, out);
  };
  std::vector<uint8_t> ring(1 << 20);
  SpanReader reader(plan.spans, absl::MakeSpan(ring), 1, kReaders, read, nullptr);
  for (int64_t s = 0; s < static_cast<int64_t>(plan.spans.size()); ++s) {
    const absl::StatusOr<SpanBytes> bytes = reader.MoveTo(0, s);
    ASSERT_TRUE(bytes.ok());
    ExpectModelBytes(*bytes);
  }
}

TEST(SpanReader, ASpanThatSomebodyStillUsesIsNotOverwritten) {
  // Two spans fit. The slow consumer holds the first until the other has waited for the second.
  SpanPlan plan;
  for (int64_t s = 0; s < 5; ++s) {
    plan.spans.push_back({.ranges = {{s, 0, 640, 0}}, .size_bytes = 640});
  }
  std::vector<uint8_t> ring(size_t{2} * 640);
  SpanReader reader(plan.spans, absl::MakeSpan(ring), 2, 4, ReadModel, nullptr);
  const absl::StatusOr<SpanBytes> held = reader.MoveTo(1, 0);
  ASSERT_TRUE(held.ok());
  ASSERT_TRUE(reader.MoveTo(0, 0).ok());
  ASSERT_TRUE(reader.MoveTo(0, 1).ok());
  std::thread fast([&] {
    for (int64_t s = 2; s < 5; ++s) {
      const absl::StatusOr<SpanBytes> bytes = reader.MoveTo(0, s);
      ASSERT_TRUE(bytes.ok());
      ExpectModelBytes(*bytes);
    }
    reader.Finish(0);
  });
  ExpectModelBytes(*held);
  for (int64_t s = 1; s < 5; ++s) {
    const absl::StatusOr<SpanBytes> bytes = reader.MoveTo(1, s);
    ASSERT_TRUE(bytes.ok());
    ExpectModelBytes(*bytes);
  }
  reader.Finish(1);
  fast.join();
}

// A consumer that is needed late does not hold the ring.
TEST(SpanReader, AConsumerThatPassesSpansGivesTheirRoomToOthers) {
  const SpanPlan plan = RandomSpans(20, 100, 3);
  std::vector<uint8_t> ring(size_t{3} * 100 + kSpanAlignment);  // for one at a time
  SpanReader reader(plan.spans, absl::MakeSpan(ring), 2, 1, ReadModel, nullptr);
  const auto last = static_cast<int64_t>(plan.spans.size()) - 1;
  reader.Pass(1, last);
  for (int64_t span = 0; span <= last; ++span) {
    const auto bytes = reader.MoveTo(0, span);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ExpectModelBytes(*bytes);
  }
  const auto late = reader.MoveTo(1, last);
  ASSERT_TRUE(late.ok()) << late.status();
  ExpectModelBytes(*late);
}

TEST(SpanReader, AFailedReadReachesEveryConsumerAndEndsReading) {
  const SpanPlan plan = RandomSpans(50, 100, 3);
  std::atomic<int> reads{0};
  const auto read = [&](const SourceRange& range, absl::Span<uint8_t> out) -> absl::Status {
    if (++reads == 4) return absl::UnavailableError("fourth read");
    return ReadModel(range, out);
  };
  std::vector<uint8_t> ring(1 << 20);
  {
    SpanReader reader(plan.spans, absl::MakeSpan(ring), 3, 1, read, nullptr);
    for (int consumer = 0; consumer < 3; ++consumer) {
      EXPECT_EQ(reader.MoveTo(consumer, 49).status(), absl::UnavailableError("fourth read"));
    }
  }
  EXPECT_EQ(reads, 4);
}

TEST(SpanReader, AFailureElsewhereWakesThoseWhoWait) {
  const SpanPlan plan = RandomSpans(3, 100, 4);
  absl::Notification release;
  const auto read = [&](const SourceRange& range, absl::Span<uint8_t> out) {
    release.WaitForNotification();
    return ReadModel(range, out);
  };
  std::vector<uint8_t> ring(1 << 20);
  SpanReader reader(plan.spans, absl::MakeSpan(ring), 1, 2, read, nullptr);
  absl::Status waited;
  std::thread consumer([&] { waited = reader.MoveTo(0, 0).status(); });
  reader.Fail(absl::AbortedError("lease over"));
  consumer.join();
  EXPECT_EQ(waited, absl::AbortedError("lease over"));
  release.Notify();
}

TEST(SpanReader, StopEndsTheWaitForAReadThatDoesNotEnd) {
  const SpanPlan plan = RandomSpans(3, 100, 5);
  absl::Notification begun, release;
  const auto read = [&](const SourceRange& range, absl::Span<uint8_t> out) {
    if (!begun.HasBeenNotified()) begun.Notify();
    release.WaitForNotification();
    return ReadModel(range, out);
  };
  std::atomic<bool> stop{false};
  std::vector<uint8_t> ring(1 << 20);
  SpanReader reader(plan.spans, absl::MakeSpan(ring), 1, 1, read, &stop);
  absl::Status waited;
  std::thread consumer([&] { waited = reader.MoveTo(0, 2).status(); });
  begun.WaitForNotification();
  stop = true;
  consumer.join();  // while the read is still under way
  EXPECT_EQ(waited.code(), absl::StatusCode::kCancelled);
  release.Notify();
}

}  // namespace
}  // namespace shardprep
