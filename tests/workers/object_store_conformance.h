// What every object store must do (workers/object_store.h), as one parameterised suite.
//
// A test of a store includes this file once and instantiates the suite:
//
//   INSTANTIATE_TEST_SUITE_P(Directory, ObjectStoreConformance,
//                            testing::Values(StoreParam{"Directory", MakeDirectory, 20}),
//                            StoreParamName);
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "workers/object_store.h"

namespace shardprep {

// One fresh, empty store; its destructor removes all that the store left behind.
class StoreUnderTest {
 public:
  virtual ~StoreUnderTest() = default;
  virtual ObjectStore& store() = 0;
};

struct StoreParam {
  std::string name;
  std::function<std::unique_ptr<StoreUnderTest>()> make;
  int64_t list_objects;  // how many objects one listing is tried with: more than one page of it
};

inline std::string StoreParamName(const testing::TestParamInfo<StoreParam>& info) {
  return info.param.name;
}

// Keeps gtest from printing the parameter as raw bytes.
inline void PrintTo(const StoreParam& param, std::ostream* out) { *out << param.name; }

// Larger than any piece in which a store moves bytes.
inline constexpr int64_t kLargeObject = int64_t{256} << 20;

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER_P(HasCode, code, "") { return StatusOf(arg).code() == code; }
MATCHER_P2(HasCodeAndText, code, text, "") {
  const absl::Status status = StatusOf(arg);
  *result_listener << status;
  return status.code() == code && std::string(status.message()).find(text) != std::string::npos;
}
MATCHER(IsOk, "") {
  *result_listener << StatusOf(arg);
  return StatusOf(arg).ok();
}

// Bytes that say where they belong: no shift, swap or repetition of blocks keeps them equal.
inline std::string PositionBytes(int64_t size, uint32_t seed = 0) {
  std::string bytes(static_cast<size_t>(size), '\0');
  uint32_t state = seed * 2654435761u + 12345;
  for (char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

class ObjectStoreConformance : public testing::TestWithParam<StoreParam> {
 protected:
  ObjectStoreConformance() : under_test_(GetParam().make()) {}

  ObjectStore& store() { return under_test_->store(); }

  static CommitGate Open() {
    return [] { return absl::OkStatus(); };
  }
  static CommitGate LostLease() {
    return [] { return absl::AbortedError("lease lost"); };
  }

  void MustPut(const std::string& key, const std::string& bytes) {
    const auto info = store().Put(key, bytes, Open());
    ASSERT_TRUE(info.ok()) << info.status();
  }

  // The object's bytes by a whole read, "<status>" when there is none.
  std::string Content(const std::string& key) {
    const auto bytes = store().Get(key, int64_t{1} << 30);
    return bytes.ok() ? *bytes : "<" + bytes.status().ToString() + ">";
  }

  std::vector<std::string> Keys(const std::string& prefix) {
    std::vector<std::string> keys;
    const auto entries = store().List(prefix);
    EXPECT_TRUE(entries.ok()) << entries.status();
    if (!entries.ok()) return keys;
    for (const ObjectEntry& entry : *entries) keys.push_back(entry.key);
    return keys;
  }

  // Streams `bytes` in reservations of random sizes up to `largest`, scribbling over what is
  // reserved and not advanced over.
  absl::StatusOr<ObjectInfo> Stream(const std::string& key, const std::string& bytes,
                                    int64_t largest, const CommitGate& gate,
                                    int writes_at_once = 1) {
    WriteOptions options;
    options.size_bytes = static_cast<int64_t>(bytes.size());
    options.writes_at_once = writes_at_once;
    std::vector<uint8_t> buffer(
        static_cast<size_t>(store().BufferBytes(options.size_bytes, largest, writes_at_once)),
        0xee);
    options.buffer = absl::MakeSpan(buffer);
    auto writer = store().Create(key, options);
    if (!writer.ok()) return writer.status();
    std::mt19937 random(7);
    for (size_t at = 0; at < bytes.size();) {
      const size_t reserve = 1 + random() % static_cast<size_t>(largest);
      const auto room = (*writer)->Reserve(static_cast<int64_t>(reserve));
      if (!room.ok()) return room.status();
      EXPECT_GE(room->size(), reserve);
      std::fill(room->begin(), room->end(), uint8_t{0xee});
      const size_t size = std::min(reserve - random() % (reserve / 2 + 1), bytes.size() - at);
      std::copy_n(bytes.data() + at, size, room->data());
      absl::Status advanced = (*writer)->Advance(static_cast<int64_t>(size));
      if (!advanced.ok()) return advanced;
      at += size;
    }
    return (*writer)->Commit(gate);
  }

 private:
  std::unique_ptr<StoreUnderTest> under_test_;
};

TEST_P(ObjectStoreConformance, ReadsExactlyTheRange) {
  const std::string bytes = PositionBytes(1000);
  MustPut("object", bytes);
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->info().size_bytes, 1000);
  const std::pair<int64_t, int64_t> kRanges[] = {{0, 0},   {0, 1},    {0, 1000}, {1, 999},
                                                 {999, 1}, {1000, 0}, {37, 400}};
  for (const auto& [offset, size] : kRanges) {
    // Poison on both sides must survive, poison inside must not.
    std::vector<uint8_t> out(static_cast<size_t>(size) + 16, 0xa5);
    ASSERT_THAT(
        (*reader)->ReadAt(offset, absl::MakeSpan(out).subspan(8, static_cast<size_t>(size))),
        IsOk());
    std::string want(8, '\xa5');
    want += bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(size));
    want += std::string(8, '\xa5');
    EXPECT_EQ(std::string(out.begin(), out.end()), want) << offset << "+" << size;
  }
  EXPECT_THAT((*reader)->CheckUnchanged(), IsOk());
}

// What a caller sees who looks at bytes as soon as they have arrived, and starts again when told.
class ArrivalFollower {
 public:
  explicit ArrivalFollower(size_t size) : out_(size, 0xa5) {}

  absl::Status Read(ObjectReader& reader, int64_t offset) {
    return reader.ReadAsItArrives(offset, absl::MakeSpan(out_), [this](int64_t bytes) {
      ASSERT_LE(bytes, static_cast<int64_t>(out_.size()));
      seen_.resize(std::min(seen_.size(), static_cast<size_t>(bytes)));
      seen_.append(out_.begin() + static_cast<int64_t>(seen_.size()), out_.begin() + bytes);
    });
  }
  const std::string& seen() const { return seen_; }
  std::string out() const { return {out_.begin(), out_.end()}; }

 private:
  std::vector<uint8_t> out_;
  std::string seen_;
};

TEST_P(ObjectStoreConformance, TellsWhatHasArrived) {
  const std::string bytes = PositionBytes(1000);
  MustPut("object", bytes);
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const auto& [offset, size] : {std::pair<int64_t, size_t>{0, 1000}, {37, 400}, {999, 1}}) {
    ArrivalFollower follower(size);
    ASSERT_THAT(follower.Read(**reader, offset), IsOk());
    EXPECT_EQ(follower.seen(), bytes.substr(static_cast<size_t>(offset), size));
  }
  EXPECT_THAT(ArrivalFollower(0).Read(**reader, 1000), IsOk());
  EXPECT_THAT(ArrivalFollower(2).Read(**reader, 999), HasCode(absl::StatusCode::kOutOfRange));
}

TEST_P(ObjectStoreConformance, RefusesRangesBeyondTheEnd) {
  MustPut("object", PositionBytes(1000));
  MustPut("empty", "");
  const auto reader = store().Open("object");
  const auto empty = store().Open("empty");
  ASSERT_TRUE(reader.ok() && empty.ok());
  std::vector<uint8_t> out(2000, 0xa5);
  const std::pair<int64_t, size_t> kRanges[] = {{1000, 1},
                                                {999, 2},
                                                {0, 1001},
                                                {-1, 1},
                                                {-1, 0},
                                                {1001, 0},
                                                {std::numeric_limits<int64_t>::max(), 1},
                                                {std::numeric_limits<int64_t>::min(), 1}};
  for (const auto& [offset, size] : kRanges) {
    EXPECT_THAT((*reader)->ReadAt(offset, absl::MakeSpan(out).first(size)),
                HasCode(absl::StatusCode::kOutOfRange))
        << offset << "+" << size;
  }
  EXPECT_THAT((*empty)->ReadAt(0, absl::MakeSpan(out).first(1)),
              HasCode(absl::StatusCode::kOutOfRange));
  EXPECT_THAT((*empty)->ReadAt(0, {}), IsOk());
  EXPECT_EQ((*empty)->info().size_bytes, 0);
  EXPECT_EQ(std::count(out.begin(), out.end(), 0xa5), 2000);
}

TEST_P(ObjectStoreConformance, HintsOfAnyRangeAreHarmless) {
  MustPut("object", PositionBytes(1000));
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok());
  for (const int64_t offset : {int64_t{-5}, int64_t{0}, int64_t{999}, int64_t{1} << 40}) {
    for (const int64_t size : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{1} << 40}) {
      (*reader)->WillNeed(offset, size);
    }
  }
  std::string out(1000, '\0');
  ASSERT_THAT((*reader)->ReadAt(0, {reinterpret_cast<uint8_t*>(out.data()), out.size()}), IsOk());
  EXPECT_EQ(out, PositionBytes(1000));
}

TEST_P(ObjectStoreConformance, ReadsFromManyThreads) {
  constexpr int64_t kSize = 1 << 20;
  const std::string bytes = PositionBytes(kSize);
  MustPut("object", bytes);
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 50; ++i) {
        const auto offset = static_cast<int64_t>(random() % kSize);
        const auto size = static_cast<int64_t>(random() % static_cast<size_t>(kSize - offset));
        std::vector<uint8_t> out(static_cast<size_t>(size));
        const absl::Status read = (*reader)->ReadAt(offset, absl::MakeSpan(out));
        if (!read.ok() || !std::equal(out.begin(), out.end(), bytes.begin() + offset,
                                      [](uint8_t a, char b) { return a == uint8_t(b); })) {
          ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(ObjectStoreConformance, WritesAnySizeInAnyReservations) {
  const int64_t piece = store().WriteBufferBytes(kLargeObject, 1);
  uint32_t seed = 0;
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{4097}, piece - 1, piece,
        piece + 1, 2 * piece, 5 * piece + 17, (int64_t{9} << 20) + 3}) {
    for (const int64_t largest : {int64_t{10'000}, piece, 3 * piece + 1}) {
      const std::string bytes = PositionBytes(size, ++seed);
      const int writes_at_once = 1 + static_cast<int>(seed % 4);
      const auto info = Stream("sub/object", bytes, largest, Open(), writes_at_once);
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_EQ(info->size_bytes, size);
      ASSERT_TRUE(Content("sub/object") == bytes)
          << size << " in up to " << largest << ", " << writes_at_once << " at once";
      const auto head = store().Head("sub/object");
      ASSERT_TRUE(head.ok());
      EXPECT_EQ(head->size_bytes, size);
      EXPECT_EQ(head->etag, info->etag);
    }
  }
}

TEST_P(ObjectStoreConformance, AnAbandonedWriteLeavesNothing) {
  MustPut("old", "old bytes");
  const std::vector<std::string> before = Keys("");
  std::vector<uint8_t> buffer(static_cast<size_t>(store().WriteBufferBytes(kLargeObject, 1000)));
  for (const std::string key : {"old", "new", "sub/new"}) {
    WriteOptions options;
    options.size_bytes = 2 * static_cast<int64_t>(buffer.size());
    options.buffer = absl::MakeSpan(buffer);
    auto writer = store().Create(key, options);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t written = 0; written < buffer.size();) {
      const auto room = (*writer)->Reserve(1000);
      ASSERT_TRUE(room.ok());
      std::fill(room->begin(), room->end(), uint8_t{1});
      ASSERT_THAT((*writer)->Advance(1000), IsOk());
      written += 1000;
    }
    if (key == "old") {
      EXPECT_EQ(Content("old"), "old bytes");
    } else {
      EXPECT_THAT(store().Head(key), HasCode(absl::StatusCode::kNotFound));
    }
  }
  EXPECT_EQ(Keys(""), before);
  EXPECT_EQ(Content("old"), "old bytes");
}

TEST_P(ObjectStoreConformance, ARefusingGateLeavesNothing) {
  MustPut("old", "old bytes");
  const std::vector<std::string> before = Keys("");
  for (const std::string key : {"old", "new", "sub/new"}) {
    EXPECT_THAT(Stream(key, PositionBytes(700'000), 100'000, LostLease()),
                HasCodeAndText(absl::StatusCode::kAborted, "lease lost"));
    EXPECT_THAT(store().Put(key, "other", LostLease()),
                HasCodeAndText(absl::StatusCode::kAborted, "lease lost"));
    EXPECT_EQ(Keys(""), before);
  }
  EXPECT_THAT(store().PutIfAbsent("new", "other", LostLease()),
              HasCodeAndText(absl::StatusCode::kAborted, "lease lost"));
  EXPECT_EQ(Keys(""), before);
  EXPECT_EQ(Content("old"), "old bytes");
}

TEST_P(ObjectStoreConformance, TheGateIsAskedWhileNothingIsVisible) {
  int asked = 0;
  const auto gate = [&] {
    ++asked;
    EXPECT_THAT(store().Head("object"), HasCode(absl::StatusCode::kNotFound));
    return absl::OkStatus();
  };
  const std::function<absl::StatusOr<ObjectInfo>()> kWrites[] = {
      [&] { return Stream("object", PositionBytes(1'000'000), 100'000, gate); },
      [&] { return store().Put("object", "small", gate); },
      [&] { return store().PutIfAbsent("object", "small", gate); }};
  for (const auto& write : kWrites) {
    asked = 0;
    EXPECT_THAT(write(), IsOk());
    EXPECT_GE(asked, 1);
    EXPECT_THAT(store().Head("object"), IsOk());
    ASSERT_THAT(store().Delete("object"), IsOk());
  }
}

TEST_P(ObjectStoreConformance, AnEmptyGateAgrees) {
  EXPECT_THAT(store().Put("a", "1", CommitGate()), IsOk());
  EXPECT_THAT(store().PutIfAbsent("b", "2", CommitGate()), IsOk());
  EXPECT_THAT(Stream("c", "3", 10, CommitGate()), IsOk());
  EXPECT_EQ(Content("a") + Content("b") + Content("c"), "123");
}

TEST_P(ObjectStoreConformance, CommitNeedsEveryAnnouncedByte) {
  std::vector<uint8_t> buffer(static_cast<size_t>(store().WriteBufferBytes(kLargeObject, 100)));
  WriteOptions options;
  options.size_bytes = 100;
  options.buffer = absl::MakeSpan(buffer);
  {
    auto writer = store().Create("short", options);
    ASSERT_TRUE(writer.ok());
    ASSERT_THAT((*writer)->Reserve(100), IsOk());
    ASSERT_THAT((*writer)->Advance(99), IsOk());
    EXPECT_THAT((*writer)->Commit(Open()),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, "99"));
  }
  EXPECT_THAT(store().Head("short"), HasCode(absl::StatusCode::kNotFound));
  auto writer = store().Create("twice", options);
  ASSERT_TRUE(writer.ok());
  ASSERT_THAT((*writer)->Reserve(100), IsOk());
  ASSERT_THAT((*writer)->Advance(100), IsOk());
  EXPECT_THAT((*writer)->Commit(Open()), IsOk());
  EXPECT_THAT((*writer)->Commit(Open()), HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(store().Head("twice"), IsOk());
}

TEST_P(ObjectStoreConformance, RefusesMoreThanWasAnnouncedOrReserved) {
  const int64_t buffer_bytes = store().WriteBufferBytes(kLargeObject, 100);
  std::vector<uint8_t> buffer(static_cast<size_t>(buffer_bytes));
  const auto create = [&](int64_t size) {
    WriteOptions options;
    options.size_bytes = size;
    options.buffer = absl::MakeSpan(buffer);
    return store().Create("object", options);
  };
  EXPECT_THAT(create(-1), HasCode(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(
      store().Create("object",
                     {.size_bytes = 10, .buffer = absl::MakeSpan(buffer), .writes_at_once = 0}),
      HasCodeAndText(absl::StatusCode::kInvalidArgument, "0 writes at once"));
  {
    auto writer = create(10);
    ASSERT_TRUE(writer.ok());
    ASSERT_THAT((*writer)->Reserve(100), IsOk());
    EXPECT_THAT((*writer)->Advance(11), HasCode(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT((*writer)->Commit(Open()), HasCode(absl::StatusCode::kInvalidArgument));
  }
  {
    auto writer = create(2 * buffer_bytes);
    ASSERT_TRUE(writer.ok());
    EXPECT_THAT((*writer)->Advance(1), HasCode(absl::StatusCode::kInvalidArgument));
  }
  for (const int64_t reserve : {int64_t{-1}, buffer_bytes + 1}) {
    auto writer = create(2 * buffer_bytes);
    ASSERT_TRUE(writer.ok());
    EXPECT_THAT((*writer)->Reserve(reserve), HasCode(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_THAT(store().Head("object"), HasCode(absl::StatusCode::kNotFound));
}

TEST_P(ObjectStoreConformance, ReplacingChangesTheVersion) {
  std::vector<std::string> etags;
  for (const std::string bytes : {"first", "other", "other"}) {
    const auto info = store().Put("object", bytes, Open());
    ASSERT_TRUE(info.ok());
    const auto head = store().Head("object");
    ASSERT_TRUE(head.ok());
    EXPECT_EQ(head->etag, info->etag);
    EXPECT_FALSE(info->etag.empty());
    EXPECT_EQ(Content("object"), bytes);
    etags.push_back(info->etag);
  }
  EXPECT_NE(etags[0], etags[1]);
}

TEST_P(ObjectStoreConformance, AReaderNeverSeesAnotherVersion) {
  const std::string old_bytes = PositionBytes(100'000, 1);
  const std::string new_bytes = PositionBytes(100'000, 2);
  MustPut("object", old_bytes);
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok());
  MustPut("object", new_bytes);
  std::string out(50'000, '\0');
  const absl::Status read =
      (*reader)->ReadAt(25'000, {reinterpret_cast<uint8_t*>(out.data()), out.size()});
  if (read.ok()) {
    EXPECT_TRUE(out == old_bytes.substr(25'000, 50'000));
  } else {
    EXPECT_THAT(read, HasCodeAndText(absl::StatusCode::kDataLoss, "object"));
  }
  EXPECT_THAT((*reader)->CheckUnchanged(), HasCodeAndText(absl::StatusCode::kDataLoss, "object"));
}

TEST_P(ObjectStoreConformance, ADeletedObjectIsNotUnchanged) {
  MustPut("object", "bytes");
  const auto reader = store().Open("object");
  ASSERT_TRUE(reader.ok());
  ASSERT_THAT((*reader)->CheckUnchanged(), IsOk());
  ASSERT_THAT(store().Delete("object"), IsOk());
  EXPECT_THAT((*reader)->CheckUnchanged(), HasCodeAndText(absl::StatusCode::kDataLoss, "object"));
}

TEST_P(ObjectStoreConformance, MissingIsNotFound) {
  MustPut("folder/object", "x");
  for (const std::string key :
       {"missing", "folder/missing", "missing/missing", "folder", "folder/object/below"}) {
    EXPECT_THAT(store().Head(key), HasCodeAndText(absl::StatusCode::kNotFound, key));
    EXPECT_THAT(store().Open(key), HasCodeAndText(absl::StatusCode::kNotFound, key));
    EXPECT_THAT(store().Get(key, 100), HasCodeAndText(absl::StatusCode::kNotFound, key));
  }
}

TEST_P(ObjectStoreConformance, GetIsBounded) {
  MustPut("object", "12345");
  EXPECT_EQ(store().Get("object", 5).value_or("?"), "12345");
  EXPECT_THAT(store().Get("object", 4),
              HasCodeAndText(absl::StatusCode::kResourceExhausted, "want at most 4"));
  MustPut("empty", "");
  EXPECT_EQ(store().Get("empty", 0).value_or("?"), "");
}

TEST_P(ObjectStoreConformance, PutIfAbsentNeverReplaces) {
  EXPECT_THAT(store().PutIfAbsent("sub/object", "first", Open()), IsOk());
  EXPECT_THAT(store().PutIfAbsent("sub/object", "second", Open()),
              HasCodeAndText(absl::StatusCode::kAlreadyExists, "sub/object"));
  EXPECT_EQ(Content("sub/object"), "first");
  EXPECT_EQ(Keys(""), std::vector<std::string>{"sub/object"});
  ASSERT_THAT(store().Delete("sub/object"), IsOk());
  const auto info = store().PutIfAbsent("sub/object", "third", Open());
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(Content("sub/object"), "third");
  const auto head = store().Head("sub/object");
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->etag, info->etag);
}

TEST_P(ObjectStoreConformance, OfManyPutIfAbsentExactlyOneWins) {
  for (int round = 0; round < 5; ++round) {
    const std::string key = "manifest-" + std::to_string(round);
    constexpr size_t kWriters = 8;
    std::atomic<size_t> ready = 0;
    std::vector<absl::Status> results(kWriters);
    std::vector<std::thread> threads;
    threads.reserve(kWriters);
    for (size_t i = 0; i < kWriters; ++i) {
      threads.emplace_back([&, i] {
        const auto gate = [&] {
          // All stand at the gate before any goes through.
          ++ready;
          while (ready < kWriters) std::this_thread::yield();
          return absl::OkStatus();
        };
        results[i] = store().PutIfAbsent(key, PositionBytes(5000, uint32_t(i)), gate).status();
        ++ready;  // one that never came to the gate must not keep the others there
      });
    }
    for (std::thread& thread : threads) thread.join();
    size_t winners = 0;
    for (size_t i = 0; i < kWriters; ++i) {
      if (results[i].ok()) {
        ++winners;
        EXPECT_TRUE(Content(key) == PositionBytes(5000, uint32_t(i)));
      } else {
        EXPECT_THAT(results[i], HasCode(absl::StatusCode::kAlreadyExists));
      }
    }
    EXPECT_EQ(winners, 1u);
  }
}

TEST_P(ObjectStoreConformance, OfTwoWritersOfOneKeyTheLastCommitStaysWhole) {
  const std::string a = PositionBytes(800'000, 1);
  const std::string b = PositionBytes(700'000, 2);
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  for (const std::string* bytes : {&a, &b}) {
    threads.emplace_back([&, bytes] {
      for (int i = 0; i < 5; ++i) {
        if (!Stream("object", *bytes, 50'000, Open()).ok()) ++failed;
        const std::string now = Content("object");
        if (now != a && now != b) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(Keys(""), std::vector<std::string>{"object"});
}

TEST_P(ObjectStoreConformance, ListsWholeSegmentsInOrder) {
  const std::vector<std::string> keys = {"m",      "m/1/a", "m/1/b/c", "m/1/b-",
                                         "m/10/a", "m/2",   "m1/1/a",  "z"};
  MustPut("top", "x");
  for (const std::string& key : keys) {
    if (key == "m") continue;  // a directory cannot be an object as well
    MustPut(key, key);
  }
  const std::vector<std::string> all = {"m/1/a", "m/1/b-", "m/1/b/c", "m/10/a",
                                        "m/2",   "m1/1/a", "top",     "z"};
  EXPECT_EQ(Keys(""), all);
  EXPECT_EQ(Keys("m/1/"), (std::vector<std::string>{"m/1/a", "m/1/b-", "m/1/b/c"}));
  EXPECT_EQ(Keys("m/1/b/"), (std::vector<std::string>{"m/1/b/c"}));
  EXPECT_EQ(Keys("m/2/"), std::vector<std::string>{});
  EXPECT_EQ(Keys("missing/"), std::vector<std::string>{});
  EXPECT_THAT(store().List("m/1"), HasCode(absl::StatusCode::kInvalidArgument));
  const auto entries = store().List("m/");
  ASSERT_TRUE(entries.ok());
  for (const ObjectEntry& entry : *entries) {
    const auto head = store().Head(entry.key);
    ASSERT_TRUE(head.ok());
    EXPECT_EQ(entry.info.etag, head->etag);
    EXPECT_EQ(entry.info.size_bytes, static_cast<int64_t>(entry.key.size()));
  }
}

TEST_P(ObjectStoreConformance, ListsMoreThanOnePage) {
  std::vector<std::string> want;
  for (int64_t i = 0; i < GetParam().list_objects; ++i) {
    want.push_back("m/1/" + std::to_string(i));
    MustPut(want.back(), "x");
  }
  MustPut("m/10", "x");
  std::sort(want.begin(), want.end());
  EXPECT_EQ(Keys("m/1/"), want);
}

TEST_P(ObjectStoreConformance, KeysMayHoldAnyCharacters) {
  const std::string kKeys[] = {"a+b c=1@x/\xd0\xbc\xd0\xbe\xd0\xb4\xd0\xb5\xd0\xbb\xd1\x8c%2F/file",
                               "%41%00",
                               "q?x=1&y#z",
                               "tilde~'\"!*();:,$[]{}|^`<>",
                               "\xf0\x9f\x98\x80",
                               " lead",
                               "trail ",
                               "new\nline",
                               "...",
                               "-rf"};
  std::vector<std::string> want;
  for (const std::string& key : kKeys) {
    MustPut(key, "content of " + key);
    EXPECT_THAT(Stream(key + ".2", "stream of " + key, 10, Open()), IsOk());
    want.push_back(key);
    want.push_back(key + ".2");
  }
  std::sort(want.begin(), want.end());
  EXPECT_EQ(Keys(""), want);
  EXPECT_EQ(Keys("a+b c=1@x/").size(), 2u);
  for (const std::string& key : kKeys) {
    EXPECT_EQ(Content(key), "content of " + key);
    EXPECT_EQ(Content(key + ".2"), "stream of " + key);
    EXPECT_THAT(store().Delete(key), IsOk());
    EXPECT_THAT(store().Delete(key + ".2"), IsOk());
  }
  EXPECT_EQ(Keys(""), std::vector<std::string>{});
}

TEST_P(ObjectStoreConformance, BadKeysAreRefusedByEveryMethod) {
  std::vector<uint8_t> buffer(static_cast<size_t>(store().WriteBufferBytes(kLargeObject, 1)));
  WriteOptions options;
  options.buffer = absl::MakeSpan(buffer);
  for (const std::string& key :
       {std::string(), std::string("../x"), std::string("/etc/passwd"), std::string("a/../../b"),
        std::string("a//b"), std::string("a\\b"), std::string("a\0b", 3)}) {
    const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(store().Head(key), invalid);
    EXPECT_THAT(store().Open(key), invalid);
    EXPECT_THAT(store().Get(key, 10), invalid);
    EXPECT_THAT(store().Create(key, options), invalid);
    EXPECT_THAT(store().Put(key, "x", Open()), invalid);
    EXPECT_THAT(store().PutIfAbsent(key, "x", Open()), invalid);
    EXPECT_THAT(store().Delete(key), invalid);
    EXPECT_THAT(store().List(key + "/"), invalid);
  }
  EXPECT_EQ(Keys(""), std::vector<std::string>{});
}

TEST_P(ObjectStoreConformance, DeletingTwiceIsOk) {
  MustPut("sub/object", "x");
  MustPut("sub/other", "y");
  EXPECT_THAT(store().Delete("sub/object"), IsOk());
  EXPECT_THAT(store().Delete("sub/object"), IsOk());
  EXPECT_THAT(store().Delete("never/was"), IsOk());
  EXPECT_THAT(store().Delete("sub/other/below"), IsOk());
  EXPECT_EQ(Keys(""), std::vector<std::string>{"sub/other"});
}

TEST_P(ObjectStoreConformance, ManyAreWrittenAndDeletedAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kObjects = 3;  // of each thread
  const auto key = [](int thread, int object) {
    return "_shardprep/" + std::string(64, 'a') + "/" + std::to_string(thread) + "-" +
           std::to_string(object) + ".json";
  };
  const auto at_once = [&](const std::function<absl::Status(const std::string&)>& work) {
    std::vector<absl::Status> results(kThreads);
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int k = 0; k < kObjects; ++k) results[t].Update(work(key(t, k)));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& result : results) EXPECT_THAT(result, IsOk());
  };
  MustPut("unrelated", "x");
  for (int round = 0; round < 3; ++round) {
    at_once([&](const std::string& k) { return store().Put(k, k, Open()).status(); });
    EXPECT_EQ(Keys("").size(), size_t{kThreads * kObjects + 1});
    EXPECT_EQ(Content(key(3, 1)), key(3, 1));
    at_once([&](const std::string& k) { return store().Delete(k); });
    EXPECT_EQ(Keys(""), std::vector<std::string>{"unrelated"});
  }
}

TEST_P(ObjectStoreConformance, CheckWritableLeavesNothing) {
  EXPECT_THAT(store().CheckWritable(), IsOk());
  EXPECT_EQ(Keys(""), std::vector<std::string>{});
}

TEST_P(ObjectStoreConformance, TellsFreeSpaceAndBufferNeeds) {
  const auto free = store().FreeBytes();
  ASSERT_TRUE(free.ok());
  EXPECT_GT(*free, 0);
  for (const int64_t reserve : {int64_t{0}, int64_t{1}, int64_t{100'000}, int64_t{64} << 20}) {
    for (const int64_t object : {reserve, kLargeObject, int64_t{1} << 42}) {
      EXPECT_GE(store().WriteBufferBytes(object, reserve), reserve);
      const int64_t further = store().FurtherWriteBytes(object, reserve);
      EXPECT_TRUE(further == 0 || further >= reserve) << further;
    }
  }
  EXPECT_FALSE(store().uri().empty());
}

}  // namespace shardprep
