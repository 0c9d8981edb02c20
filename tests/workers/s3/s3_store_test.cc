#include "workers/s3/s3_store.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_s3.h"
#include "tests/workers/object_store_conformance.h"
#include "tests/workers/s3/s3_test_bed.h"
#include "workers/digest.h"
#include "workers/object_names.h"

namespace shardprep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;

constexpr int64_t kPart = S3TestBed::kPartBytes;

// ---------------------------------------------------------------------------------------------
// The suite that every store passes, over servers that differ.

class S3UnderTest final : public StoreUnderTest {
 public:
  S3UnderTest(const FakeS3Options& server, const std::string& uri)
      : bed_(server, S3TestBed::Options(), uri) {
    // What others have in the bucket is never seen.
    bed_.server.PutObject("a/bc", "x");
    bed_.server.PutObject("z", "x");
    if (uri == "s3://bucket") bed_.server.set_fault(nullptr);
  }
  ~S3UnderTest() override { EXPECT_THAT(bed_.server.Uploads(), IsEmpty()); }
  ObjectStore& store() override { return *bed_.store; }

 private:
  S3TestBed bed_;
};

StoreParam Variant(const std::string& name, const std::function<void(FakeS3Options*)>& change) {
  FakeS3Options options;
  options.page_keys = 7;
  change(&options);
  return StoreParam{
      name, [options] { return std::make_unique<S3UnderTest>(options, "s3://bucket/a/b"); }, 20};
}

INSTANTIATE_TEST_SUITE_P(
    S3, ObjectStoreConformance,
    testing::Values(Variant("Plain", [](FakeS3Options*) {}),
                    Variant("IgnoresConditions",
                            [](FakeS3Options* options) {
                              options->conditional_put = FakeS3Options::ConditionalPut::kIgnored;
                            }),
                    Variant("RefusesConditions",
                            [](FakeS3Options* options) {
                              options->conditional_put =
                                  FakeS3Options::ConditionalPut::kNotImplemented;
                            }),
                    Variant("CompletesWithoutEtag",
                            [](FakeS3Options* options) { options->empty_complete_etag = true; })),
    StoreParamName);

// ---------------------------------------------------------------------------------------------

// Faults for requests of one operation, by their number.
using Fault = std::function<FakeFault(const FakeRequest&)>;

Fault On(const std::string& operation, int first, int last, const FakeFault& fault) {
  return [=](const FakeRequest& request) {
    const bool is_meant =
        request.operation == operation && request.number >= first && request.number <= last;
    return is_meant ? fault : FakeFault();
  };
}

FakeFault Instead(const FakeAnswer& answer) {
  FakeFault fault;
  fault.instead = answer;
  return fault;
}
FakeFault LostRequest() {
  FakeFault fault;
  fault.lose_request = true;
  return fault;
}
FakeFault LostAnswer() {
  FakeFault fault;
  fault.lose_answer = true;
  return fault;
}
FakeFault Edited(std::function<void(FakeAnswer*)> edit) {
  FakeFault fault;
  fault.edit = std::move(edit);
  return fault;
}
FakeFault Cut(int64_t after) {
  FakeFault fault;
  fault.cut_body_after = after;
  return fault;
}

absl::Status ReadAll(ObjectReader& reader, std::string* out) {
  out->assign(static_cast<size_t>(reader.info().size_bytes), '\xa5');
  return reader.ReadAt(0, {reinterpret_cast<uint8_t*>(out->data()), out->size()});
}

std::vector<std::string> Keys(ObjectStore& store, const std::string& prefix) {
  std::vector<std::string> keys;
  const auto entries = store.List(prefix);
  EXPECT_TRUE(entries.ok()) << entries.status();
  if (!entries.ok()) return keys;
  for (const ObjectEntry& entry : *entries) keys.push_back(entry.key);
  return keys;
}

// ---------------------------------------------------------------------------------------------
// Opening

TEST(S3Store, OnlyBucketsAndPrefixesAreOpened) {
  S3TestBed bed;
  for (const std::string uri :
       {"/data", "s3://", "s3:///x", "s3://b/", "s3://bucket/../x", "s3://bu?cket/x", "s3://.."}) {
    if (uri == "s3://b/") continue;  // normalised before
    EXPECT_THAT(OpenS3Store(uri, bed.connection), HasCode(absl::StatusCode::kInvalidArgument))
        << uri;
  }
  EXPECT_EQ(bed.server.requests(), 0);
}

TEST(S3Store, AMissingBucketIsNotFoundWhateverIsAsked) {
  S3TestBed bed;
  bed.server.RemoveBucket();
  const auto missing = HasCodeAndText(absl::StatusCode::kNotFound, "no bucket bucket");
  EXPECT_THAT(bed.store->Head("k"), missing);
  EXPECT_THAT(bed.store->Open("k"), missing);
  EXPECT_THAT(bed.store->Get("k", 10), missing);
  EXPECT_THAT(bed.store->List(""), missing);
  EXPECT_THAT(bed.store->Put("k", "x", nullptr), missing);
  EXPECT_THAT(bed.store->PutIfAbsent("k", "x", nullptr), missing);
  EXPECT_THAT(bed.store->Delete("k"), missing);
  EXPECT_THAT(bed.store->CheckWritable(), missing);
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(3 * kPart), 100).Commit(), missing);
}

TEST(S3Store, RefusedAccessNamesBucketKeyAndOperation) {
  S3TestBed bed;
  bed.server.set_fault(
      [](const FakeRequest&) { return Instead(FakeError(403, "AccessDenied", "Access Denied")); });
  const auto denied = [](const std::string& operation) {
    return AllOf(HasCodeAndText(absl::StatusCode::kFailedPrecondition, "403 AccessDenied"),
                 HasCodeAndText(absl::StatusCode::kFailedPrecondition, "s3://bucket/a/b/k"),
                 HasCodeAndText(absl::StatusCode::kFailedPrecondition, operation));
  };
  EXPECT_THAT(bed.store->Head("k"), denied("HeadObject"));
  EXPECT_THAT(bed.store->Get("k", 10), denied("GetObject"));
  EXPECT_THAT(bed.store->Put("k", "x", nullptr), denied("PutObject"));
  EXPECT_THAT(bed.store->Delete("k"), denied("DeleteObject"));
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(3 * kPart), 100).Commit(),
              denied("CreateMultipartUpload"));
  EXPECT_THAT(bed.store->List(""),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition, "s3://bucket: ListObjectsV2"));
}

TEST(S3Store, APageOfAProxyIsNoObject) {
  S3TestBed bed;
  FakeAnswer page;
  page.body = "<html>Please log in</html>";
  bed.server.set_fault([page](const FakeRequest&) { return Instead(page); });
  EXPECT_THAT(bed.store->Head("k"), HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(bed.store->Get("k", 1000), HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(bed.store->List(""), HasCode(absl::StatusCode::kUnavailable));
}

// ---------------------------------------------------------------------------------------------
// Reading

class S3Reading : public testing::Test {
 protected:
  S3Reading() {
    bed_.server.PutObject("a/b/object", bytes_);
    auto opened = bed_.store->Open("object");
    EXPECT_TRUE(opened.ok()) << opened.status();
    reader_ = *std::move(opened);
  }

  // Reads 400 bytes from 100 on.
  absl::Status Read(std::string* out) {
    out->assign(400, '\xa5');
    return reader_->ReadAt(100, {reinterpret_cast<uint8_t*>(out->data()), out->size()});
  }

  const std::string bytes_ = PositionBytes(1000);
  S3TestBed bed_;
  std::unique_ptr<ObjectReader> reader_;
};

TEST_F(S3Reading, ABodyThatEndsEarlyIsTakenUpWhereItEnded) {
  std::vector<std::string> ranges;
  bed_.server.set_fault([&](const FakeRequest& request) {
    ranges.push_back(request.headers.at("range"));
    if (request.number == 1) return Cut(150);
    if (request.number == 2) return LostRequest();
    if (request.number == 3) return Cut(50);
    return FakeFault();
  });
  std::string out;
  EXPECT_THAT(Read(&out), IsOk());
  EXPECT_EQ(out, bytes_.substr(100, 400));
  EXPECT_THAT(ranges,
              ElementsAre("bytes=100-499", "bytes=250-499", "bytes=250-499", "bytes=300-499"));
  EXPECT_EQ(bed_.server.count("GetObject").sent_bytes, 150 + 50 + 200);
}

TEST_F(S3Reading, ABodyShorterThanItsRangeIsNeverTakenAsComplete) {
  const auto shorten = Edited([](FakeAnswer* answer) { answer->body.resize(40); });
  bed_.server.set_fault(On("GetObject", 1, 1, shorten));
  std::string out;
  EXPECT_THAT(Read(&out), IsOk());
  EXPECT_EQ(out, bytes_.substr(100, 400));
  bed_.server.set_fault(
      On("GetObject", 1, 1000, Edited([](FakeAnswer* answer) { answer->body.clear(); })));
  EXPECT_THAT(Read(&out), HasCodeAndText(absl::StatusCode::kUnavailable, "0 of 400 bytes"));
}

// A store that answers with the whole object begins at its start each time.
TEST_F(S3Reading, WhatHasArrivedIsTakenBackBeforeItComesAnew) {
  bed_.server.set_fault([&](const FakeRequest& request) {
    FakeFault fault = Edited([&, number = request.number](FakeAnswer* answer) {
      answer->status = 200;
      if (number == 1) answer->body.replace(0, 500, std::string(500, 'x'));
    });
    if (request.number == 1) fault.cut_body_after = 700;
    return fault;
  });
  ArrivalFollower follower(1000);
  EXPECT_THAT(follower.Read(*reader_, 0), IsOk());
  EXPECT_EQ(follower.out(), bytes_);
  EXPECT_EQ(follower.seen(), bytes_);
}

TEST_F(S3Reading, AServerThatAnswersLessThanTheRangeIsAskedForTheRest) {
  bed_.server.set_fault(On("GetObject", 1, 1, Edited([](FakeAnswer* answer) {
                             answer->body.resize(10);
                             answer->SetHeader("content-range", "bytes 100-109/1000");
                           })));
  std::string out;
  EXPECT_THAT(Read(&out), IsOk());
  EXPECT_EQ(out, bytes_.substr(100, 400));
}

TEST_F(S3Reading, AnswersForAnotherRangeAreRefused) {
  struct Case {
    std::string range;
    absl::StatusCode code;
  };
  const Case kCases[] = {{"bytes 0-399/1000", absl::StatusCode::kFailedPrecondition},
                         {"bytes 100-500/1000", absl::StatusCode::kFailedPrecondition},
                         {"bytes 100-99/1000", absl::StatusCode::kFailedPrecondition},
                         {"bytes 100-499", absl::StatusCode::kFailedPrecondition},
                         {"", absl::StatusCode::kFailedPrecondition},
                         {"bytes 100-499/1001", absl::StatusCode::kDataLoss},
                         {"bytes 100-499/*", absl::StatusCode::kOk}};
  for (const Case& c : kCases) {
    bed_.server.set_fault([&](const FakeRequest&) {
      return Edited([&](FakeAnswer* answer) { answer->SetHeader("content-range", c.range); });
    });
    std::string out;
    EXPECT_THAT(Read(&out), HasCode(c.code)) << c.range;
  }
}

TEST_F(S3Reading, AServerWithoutRangesIsFoundOut) {
  FakeFault everything = Edited([this](FakeAnswer* answer) {
    answer->status = 200;
    answer->body = bytes_;
  });
  bed_.server.set_fault([everything](const FakeRequest&) { return everything; });
  std::string out;
  EXPECT_THAT(Read(&out),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition, "s3://bucket/a/b/object"));
  // A request for everything is answered so as well, and right.
  EXPECT_THAT(ReadAll(*reader_, &out), IsOk());
  EXPECT_EQ(out, bytes_);
  // Cut off, it is asked for as a whole again.
  const int next = static_cast<int>(bed_.server.count("GetObject").requests) + 1;
  bed_.server.set_fault([&](const FakeRequest& request) {
    FakeFault fault = everything;
    if (request.number == next) fault.cut_body_after = 700;
    return fault;
  });
  EXPECT_THAT(ReadAll(*reader_, &out), IsOk());
  EXPECT_EQ(out, bytes_);
}

TEST_F(S3Reading, ABodyLongerThanItsRangeIsRefused) {
  bed_.server.set_fault([](const FakeRequest&) {
    return Edited([](FakeAnswer* answer) { answer->body += "more"; });
  });
  std::vector<uint8_t> out(500, 0xa5);
  EXPECT_THAT(reader_->ReadAt(100, absl::MakeSpan(out).first(400)),
              HasCodeAndText(absl::StatusCode::kFailedPrecondition, "more bytes"));
  EXPECT_EQ(std::count(out.begin() + 400, out.end(), 0xa5), 100);
}

TEST_F(S3Reading, AnotherVersionIsDataLossNamingBoth) {
  const std::string etag = reader_->info().etag;
  std::string out;
  // Found by If-Match, by the ETag of an answer that ignores it, and by a deletion.
  bed_.server.PutObject("a/b/object", PositionBytes(1000, 2));
  const auto now = bed_.store->Head("object");
  ASSERT_TRUE(now.ok());
  EXPECT_THAT(Read(&out), AllOf(HasCodeAndText(absl::StatusCode::kDataLoss, etag),
                                HasCodeAndText(absl::StatusCode::kDataLoss, now->etag),
                                HasCodeAndText(absl::StatusCode::kDataLoss, "a/b/object")));
  bed_.server.PutObject("a/b/object", bytes_);
  bed_.server.set_fault([](const FakeRequest&) {
    return Edited([](FakeAnswer* answer) { answer->SetHeader("etag", "\"other\""); });
  });
  EXPECT_THAT(Read(&out), HasCodeAndText(absl::StatusCode::kDataLoss, "other"));
  bed_.server.set_fault(nullptr);
  EXPECT_THAT(Read(&out), IsOk());
  ASSERT_THAT(bed_.store->Delete("object"), IsOk());
  EXPECT_THAT(Read(&out), HasCodeAndText(absl::StatusCode::kDataLoss, "removed"));
}

TEST_F(S3Reading, ATruncatedObjectIsDataLoss) {
  bed_.server.set_fault([](const FakeRequest& request) {
    return request.operation == "GetObject" ? Instead(FakeError(416, "InvalidRange")) : FakeFault();
  });
  std::string out;
  EXPECT_THAT(Read(&out), HasCodeAndText(absl::StatusCode::kDataLoss, "1000"));
}

TEST_F(S3Reading, ErrorDocumentsNeverBecomeContent) {
  for (const int status : {301, 403, 404, 500}) {
    bed_.server.set_fault([&](const FakeRequest&) {
      return Instead(FakeError(status, "Code", std::string(300, 'x')));
    });
    std::string out;
    EXPECT_FALSE(Read(&out).ok());
    EXPECT_EQ(out, std::string(400, '\xa5'));
  }
}

TEST(S3Store, LargeReadsAreSplitIntoAFewRanges) {
  S3TestBed bed;
  const std::string bytes = PositionBytes((int64_t{33} << 20) + 17);
  bed.server.PutObject("a/b/object", bytes);
  const auto reader = bed.store->Open("object");
  ASSERT_TRUE(reader.ok());
  std::string out;
  ASSERT_THAT(ReadAll(**reader, &out), IsOk());
  EXPECT_TRUE(out == bytes);
  EXPECT_EQ(bed.server.count("GetObject").requests, 4);
  EXPECT_EQ(bed.server.count("GetObject").sent_bytes, static_cast<int64_t>(bytes.size()));
  // A fault of one of them is repeated alone.
  bed.server.set_fault(On("GetObject", 6, 6, Cut(1'000'000)));
  ASSERT_THAT(ReadAll(**reader, &out), IsOk());
  EXPECT_TRUE(out == bytes);
  EXPECT_EQ(bed.server.count("GetObject").sent_bytes, 2 * static_cast<int64_t>(bytes.size()));
  bed.server.set_fault(On("GetObject", 1, 1000, Instead(FakeError(403, "AccessDenied"))));
  EXPECT_THAT(ReadAll(**reader, &out), HasCode(absl::StatusCode::kFailedPrecondition));
}

// ---------------------------------------------------------------------------------------------
// Part sizes

TEST(S3UploadParts, SizesGrowWithTheObjectAndStayWithinTheLimits) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  constexpr int64_t kGiB = int64_t{1} << 30;
  constexpr int64_t kTiB = int64_t{1} << 40;
  constexpr int64_t kManyParts = int64_t{10'000} * 16 * kMiB;
  struct Case {
    int64_t object;
    int64_t wanted;
    int64_t part;
  };
  const Case kCases[] = {
      {0, 16 * kMiB, 16 * kMiB},
      {kManyParts, 16 * kMiB, 16 * kMiB},
      {kManyParts + 1, 16 * kMiB, 17 * kMiB},
      {kTiB, 16 * kMiB, 105 * kMiB},
      {5 * kTiB, 16 * kMiB, 525 * kMiB},
      {5 * kGiB + 1, 16 * kMiB, 16 * kMiB},
      {kGiB, 5'000'000, 5 * kMiB},
      {kGiB, 1, 5 * kMiB},
      {kGiB, 5 * kGiB, 5 * kGiB},
  };
  const S3Limits limits;
  for (const Case& c : kCases) {
    const auto part = UploadPartBytes(c.object, c.wanted, limits);
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_EQ(*part, c.part) << c.object;
    EXPECT_LE((c.object + *part - 1) / *part, limits.largest_parts);
  }
  for (const auto& [object, wanted] : {std::pair<int64_t, int64_t>{5 * kTiB + 1, 16 * kMiB},
                                       {-1, 16 * kMiB},
                                       {kGiB, 5 * kGiB + 1}}) {
    EXPECT_THAT(UploadPartBytes(object, wanted, limits),
                HasCode(absl::StatusCode::kInvalidArgument));
  }
}

TEST(S3UploadParts, AnObjectThatNoUploadCanHoldIsRefusedUpFront) {
  S3TestBed bed;
  std::vector<uint8_t> buffer(4 * kPart);
  EXPECT_THAT(bed.store->Create("k", {(int64_t{5} << 40) + 1, absl::MakeSpan(buffer)}),
              HasCodeAndText(absl::StatusCode::kInvalidArgument, "s3://bucket/a/b/k"));
  EXPECT_EQ(bed.server.requests(), 0);
}

TEST(S3UploadParts, BuffersHoldAPartOfEachWriteAtOnceAndOneMore) {
  S3TestBed bed;
  EXPECT_EQ(bed.store->FurtherWriteBytes(kPart, 100), 0);
  EXPECT_EQ(bed.store->FurtherWriteBytes(kPart + 1, 100), kPart + 100);
  EXPECT_EQ(bed.store->FurtherWriteBytes(int64_t{5} << 40, 0), int64_t{525} << 20);
  EXPECT_GT(bed.store->FurtherWriteBytes(std::numeric_limits<int64_t>::max(), 5), 5);
  EXPECT_EQ(bed.store->WriteBufferBytes(kPart, 100), kPart + 100);
  EXPECT_EQ(bed.store->WriteBufferBytes(kPart + 1, 100), 2 * (kPart + 100));
  EXPECT_EQ(bed.store->WriteBufferBytes(int64_t{5} << 40, 0), 2 * (int64_t{525} << 20));
  EXPECT_GT(bed.store->WriteBufferBytes(std::numeric_limits<int64_t>::max(), 5), 5);
}

TEST(S3UploadParts, ObjectsOfAnySizeHaveEqualPartsAndNoEmptyOne) {
  for (const int64_t size :
       {int64_t{0}, int64_t{1}, kPart - 1, kPart, kPart + 1, 2 * kPart, 2 * kPart + 1, 7 * kPart}) {
    for (const int64_t reserve : {int64_t{777}, kPart, 3 * kPart + 5}) {
      S3TestBed bed;
      const std::string bytes = PositionBytes(size);
      const auto info = StreamedWrite(*bed.store, "k", bytes, reserve).Commit();
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
      EXPECT_EQ(bed.server.count("UploadPart").requests,
                size > kPart ? (size + kPart - 1) / kPart : 0);
      EXPECT_EQ(bed.server.count("CompleteMultipartUpload").requests, size > kPart ? 1 : 0);
      EXPECT_THAT(bed.server.Keys(), ElementsAre("a/b/k"));
    }
  }
}

TEST(S3UploadParts, PartsLeaveWhileTheObjectIsBeingProduced) {
  S3TestBed bed;
  absl::Notification second_part_arrived;
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation == "UploadPart" && request.number == 2) second_part_arrived.Notify();
    return FakeFault();
  });
  const std::string bytes = PositionBytes(4 * kPart);
  StreamedWrite write(*bed.store, "k", bytes, 1000);
  ASSERT_THAT(write.WriteTo(2 * kPart), IsOk());
  second_part_arrived.WaitForNotification();
  EXPECT_EQ(bed.server.count("CompleteMultipartUpload").requests, 0);
  EXPECT_THAT(write.Commit(), IsOk());
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
}

TEST(S3UploadParts, OnePartIsFilledWhileAnotherIsSent) {
  S3TestBed bed;
  absl::Notification may_go_on;
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation == "UploadPart" && request.number == 1) {
      may_go_on.WaitForNotification();
    }
    return FakeFault();
  });
  const std::string bytes = PositionBytes(3 * kPart);
  StreamedWrite write(*bed.store, "k", bytes, 1000);
  // The producer gets nearly two parts ahead without the first one having left.
  ASSERT_THAT(write.WriteTo(2 * kPart - 1), IsOk());
  may_go_on.Notify();
  EXPECT_THAT(write.Commit(), IsOk());
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
}

TEST(S3UploadParts, AFullPartLeavesBeforeTheOneBeforeItHasArrived) {
  S3TestBed bed;
  absl::Notification second_part_came;
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation != "UploadPart") return FakeFault();
    if (request.query.at("partNumber") == "2") second_part_came.Notify();
    if (request.query.at("partNumber") == "1") second_part_came.WaitForNotification();
    return FakeFault();
  });
  const std::string bytes = PositionBytes(4 * kPart + 1);
  EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(), IsOk());
  // Put together in their order, not in that of their arrival.
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
}

TEST(S3UploadParts, AsManyAreUnderWayAsTheCallerAllows) {
  S3TestBed bed;
  // Of a buffer for three writes at once all four areas are under way while the producer waits.
  auto* const barrier = new absl::Barrier(4);
  bed.server.set_fault([barrier](const FakeRequest& request) {
    if (request.operation == "UploadPart" && request.number <= 4 && barrier->Block()) {
      delete barrier;
    }
    return FakeFault();
  });
  const std::string bytes = PositionBytes(11 * kPart + 1);
  EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000, /*writes_at_once=*/3).Commit(), IsOk());
  EXPECT_EQ(bed.server.most_in_flight(), 4);
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
  EXPECT_THAT(bed.server.Keys(), ElementsAre("a/b/k"));
}

// ---------------------------------------------------------------------------------------------
// Commit

TEST(S3Commit, UploadsSurviveEveryPassingFault) {
  const std::string bytes = PositionBytes(3 * kPart + 5);
  const std::string kOperations[] = {"CreateMultipartUpload",   "PutObject",  "UploadPart",
                                     "CompleteMultipartUpload", "HeadObject", "DeleteObject"};
  const FakeFault kFaults[] = {LostRequest(),
                               LostAnswer(),
                               Instead(FakeError(500, "InternalError")),
                               Instead(FakeError(503, "SlowDown")),
                               Instead(FakeError(429, "")),
                               Instead(FakeError(400, "RequestTimeout"))};
  for (const std::string& operation : kOperations) {
    for (const FakeFault& fault : kFaults) {
      for (const int number : {1, 2}) {
        S3TestBed bed;
        bed.server.set_fault(On(operation, number, number, fault));
        const auto info = StreamedWrite(*bed.store, "k", bytes, 1000).Commit();
        ASSERT_TRUE(info.ok()) << operation << ": " << info.status();
        EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
        EXPECT_THAT(bed.server.Keys(), ElementsAre("a/b/k"));
        const auto head = bed.store->Head("k");
        ASSERT_TRUE(head.ok());
        EXPECT_EQ(head->etag, info->etag);
        // A begun upload of which the answer was lost holds no parts and cannot be known.
        const bool is_orphan =
            operation == "CreateMultipartUpload" && fault.lose_answer && number == 1;
        EXPECT_THAT(bed.server.Uploads(), SizeIs(is_orphan ? 1 : 0));
      }
    }
  }
}

TEST(S3Commit, EveryPartIsSentAgainWithTheSameBytes) {
  S3TestBed bed;
  bed.server.set_fault(On("UploadPart", 1, 3, LostRequest()));
  const std::string bytes = PositionBytes(3 * kPart);
  EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(), IsOk());
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
  EXPECT_EQ(bed.server.count("UploadPart").requests, 6);
}

TEST(S3Commit, AnErrorThatComesWith200IsAnError) {
  FakeAnswer error = FakeError(200, "InternalError", "try again");
  error.status = 200;
  const std::string bytes = PositionBytes(2 * kPart);
  {
    S3TestBed bed;
    bed.server.set_fault(On("CompleteMultipartUpload", 1, 2, Instead(error)));
    EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(), IsOk());
    EXPECT_EQ(bed.server.count("CompleteMultipartUpload").requests, 3);
  }
  {
    S3TestBed bed;
    bed.server.set_fault(On("CompleteMultipartUpload", 1, 1000, Instead(error)));
    EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(),
                HasCodeAndText(absl::StatusCode::kUnavailable, "InternalError: try again"));
    EXPECT_THAT(bed.server.Keys(), IsEmpty());
    EXPECT_THAT(bed.server.Uploads(), IsEmpty());
  }
  {
    S3TestBed bed;
    FakeAnswer final_error = FakeError(200, "EntityTooSmall", "");
    bed.server.set_fault(On("CompleteMultipartUpload", 1, 1000, Instead(final_error)));
    EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, "EntityTooSmall"));
    EXPECT_EQ(bed.server.count("CompleteMultipartUpload").requests, 1);
  }
}

TEST(S3Commit, ALostAnswerIsFoundOutByWhatTheStoreHolds) {
  const std::string bytes = PositionBytes(2 * kPart);
  S3TestBed bed;
  bed.server.PutObject("a/b/k", PositionBytes(2 * kPart, 9));
  bed.server.set_fault([](const FakeRequest& request) {
    if (request.operation != "CompleteMultipartUpload") return FakeFault();
    // The first is lost on its way, and then the upload is gone: an older object is not ours.
    return request.number == 1 ? LostRequest() : Instead(FakeError(404, "NoSuchUpload"));
  });
  EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(),
              HasCodeAndText(absl::StatusCode::kUnavailable, "not known"));
  bed.server.set_fault(On("CompleteMultipartUpload", 3, 3, LostAnswer()));
  EXPECT_THAT(StreamedWrite(*bed.store, "k", bytes, 1000).Commit(), IsOk());
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
}

TEST(S3Commit, AnObjectThatIsShortInTheStoreIsDataLoss) {
  for (const int64_t size : {kPart, 3 * kPart}) {
    S3TestBed bed;
    bed.server.set_fault(On("HeadObject", 1, 1000, Edited([](FakeAnswer* answer) {
                              answer->SetHeader("content-length", absl::StrCat(kPart / 2));
                            })));
    EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(size), 1000).Commit(),
                AllOf(HasCodeAndText(absl::StatusCode::kDataLoss, absl::StrCat(kPart / 2)),
                      HasCodeAndText(absl::StatusCode::kDataLoss, absl::StrCat(size))));
  }
}

TEST(S3Commit, AnObjectMayAppearALittleLate) {
  FakeS3Options server;
  server.visible_after = absl::Seconds(2);
  S3TestBed bed(server);
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(3 * kPart), 1000).Commit(), IsOk());
  EXPECT_FALSE(bed.pauses().empty());
  // What was never written is missing at once.
  const size_t pauses = bed.pauses().size();
  EXPECT_THAT(bed.store->Open("missing"), HasCode(absl::StatusCode::kNotFound));
  EXPECT_THAT(bed.pauses(), SizeIs(pauses));

  server.visible_after = absl::Hours(1);
  S3TestBed never(server);
  EXPECT_THAT(StreamedWrite(*never.store, "k", PositionBytes(3 * kPart), 1000).Commit(),
              HasCode(absl::StatusCode::kUnavailable));
}

TEST(S3Commit, EtagsAreVersionsAndNeverTakenForDigests) {
  // As with server-side encryption: 32 hex digits that are no MD5.
  S3TestBed bed;
  bed.server.set_fault([](const FakeRequest& request) {
    if (request.operation != "PutObject" && request.operation != "HeadObject") return FakeFault();
    return Edited([](FakeAnswer* answer) {
      if (answer->status == 200) answer->SetHeader("etag", "\"0123456789abcdef0123456789abcdef\"");
    });
  });
  const auto info = StreamedWrite(*bed.store, "k", "some bytes", 10).Commit();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->etag, "0123456789abcdef0123456789abcdef");
  EXPECT_EQ(CompositeEtag({{1, "not-an-md5"}}), "");
  // By Python: md5(md5(b"").digest() * 2).
  const std::string empty = "d41d8cd98f00b204e9800998ecf8427e";
  EXPECT_EQ(CompositeEtag({{1, empty}, {2, empty}}), "5873dd45edd01f09c1ef2e7819369e8e-2");
}

TEST(S3Commit, OfTwoWritersThatInterleaveTheLastStaysWhole) {
  S3TestBed bed;
  const std::string a = PositionBytes(3 * kPart, 1);
  const std::string b = PositionBytes(2 * kPart + 1, 2);
  StreamedWrite first(*bed.store, "k", a, 1000);
  StreamedWrite second(*bed.store, "k", b, 1000);
  ASSERT_THAT(first.WriteTo(2 * kPart), IsOk());
  ASSERT_THAT(second.WriteTo(kPart), IsOk());
  // The second commits between the first's Complete and the HEAD after it.
  absl::StatusOr<ObjectInfo> second_info;
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation == "HeadObject" && request.number == 1) {
      second_info = second.Commit();
    }
    return FakeFault();
  });
  const auto first_info = first.Commit();
  ASSERT_TRUE(first_info.ok()) << first_info.status();
  ASSERT_TRUE(second_info.ok()) << second_info.status();
  EXPECT_NE(first_info->etag, second_info->etag);
  EXPECT_EQ(first_info->size_bytes, 3 * kPart);
  EXPECT_TRUE(bed.server.Object("a/b/k") == b);
}

TEST(S3Commit, CredentialsMayBeRotatedInTheMiddleOfAnUpload) {
  const AwsCredentials next = {"AKIDNEXT", "next-secret", "next-token"};
  S3TestBed bed;
  const std::string bytes = PositionBytes(5 * kPart);
  StreamedWrite write(*bed.store, "k", bytes, 1000);
  ASSERT_THAT(write.WriteTo(2 * kPart), IsOk());
  bed.server.Expire("AKIDFAKE");
  bed.server.set_credentials(next);
  bed.credentials->Rotate(next);
  EXPECT_THAT(write.Commit(), IsOk());
  EXPECT_TRUE(bed.server.Object("a/b/k") == bytes);
  EXPECT_EQ(bed.server.count("CreateMultipartUpload").requests, 1) << "earlier parts are kept";
}

TEST(S3Commit, AFailedPartFailsTheWriterAndTheUploadIsAborted) {
  for (const int part : {1, 3}) {
    S3TestBed bed;
    bed.server.set_fault(On("UploadPart", part, 1000, Instead(FakeError(403, "AccessDenied"))));
    EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(4 * kPart), 1000).Commit(),
                HasCodeAndText(absl::StatusCode::kFailedPrecondition, "UploadPart"));
    EXPECT_THAT(bed.server.Keys(), IsEmpty());
    EXPECT_THAT(bed.server.Uploads(), IsEmpty());
    EXPECT_EQ(bed.server.count("CompleteMultipartUpload").requests, 0);
  }
}

// ---------------------------------------------------------------------------------------------
// Unfinished uploads

// Deletes what lies below `_shardprep/tmp/`, as whoever starts or ends a job there does.
absl::Status CleanUp(ObjectStore& store) {
  const auto entries = store.List(kTemporaryPrefix);
  if (!entries.ok()) return entries.status();
  for (const ObjectEntry& entry : *entries) {
    absl::Status deleted = store.Delete(entry.key);
    if (!deleted.ok()) return deleted;
  }
  return absl::OkStatus();
}

TEST(S3Uploads, AKilledWritersUploadIsAbortedByWhoeverCleansUpAndNoOther) {
  S3TestBed bed;
  const std::string stranger = bed.server.BeginUpload("a/b/k");
  StreamedWrite write(*bed.store, "k", PositionBytes(4 * kPart), 1000);
  ASSERT_THAT(write.WriteTo(2 * kPart), IsOk());
  // To the server a client that cannot reach it any more has been killed.
  bed.server.set_down(true);
  write.Drop();
  bed.server.set_down(false);
  EXPECT_EQ(bed.observer.failed_aborts(), 1);
  EXPECT_THAT(bed.server.Uploads(), SizeIs(2));
  EXPECT_THAT(bed.server.Keys(), ElementsAre(StartsWith("a/b/_shardprep/tmp/")));
  EXPECT_THAT(ParseObjectName(bed.server.Keys()[0].substr(4)),
              testing::VariantWith<TemporaryFile>(testing::_));

  bed.connection = bed.Connect(S3TestBed::Options());
  const auto next = bed.OpenStoreAt("s3://bucket/a/b");
  EXPECT_THAT(CleanUp(*next), IsOk());
  EXPECT_THAT(bed.server.Keys(), IsEmpty());
  EXPECT_THAT(bed.server.Uploads(), ElementsAre("a/b/k " + stranger));
}

TEST(S3Uploads, TheRecordIsThereBeforeTheFirstPartAndGoneAfterTheLast) {
  S3TestBed bed;
  int parts = 0;
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation == "UploadPart") {
      ++parts;
      EXPECT_THAT(bed.server.Keys(), ElementsAre(StartsWith("a/b/_shardprep/tmp/")));
    }
    return FakeFault();
  });
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(3 * kPart), 1000).Commit(), IsOk());
  EXPECT_EQ(parts, 3);
  EXPECT_THAT(bed.server.Keys(), ElementsAre("a/b/k"));
}

TEST(S3Uploads, WithoutARecordThereAreNoParts) {
  S3TestBed bed;
  bed.server.set_fault(On("PutObject", 1, 1000, Instead(FakeError(403, "AccessDenied"))));
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(3 * kPart), 1000).Commit(),
              HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(bed.server.count("UploadPart").requests, 0);
  EXPECT_THAT(bed.server.Uploads(), IsEmpty());
}

TEST(S3Uploads, ARecordStaysUntilItsUploadIsAborted) {
  S3TestBed bed;
  StreamedWrite write(*bed.store, "k", PositionBytes(4 * kPart), 1000);
  ASSERT_THAT(write.WriteTo(kPart), IsOk());
  bed.server.set_fault(On("AbortMultipartUpload", 1, 1000, Instead(FakeError(503, "SlowDown"))));
  write.Drop();
  EXPECT_THAT(CleanUp(*bed.store), HasCode(absl::StatusCode::kUnavailable));
  EXPECT_THAT(bed.server.Keys(), SizeIs(1));
  EXPECT_THAT(bed.server.Uploads(), SizeIs(1));
  bed.server.set_fault(nullptr);
  EXPECT_THAT(CleanUp(*bed.store), IsOk());
  EXPECT_THAT(bed.server.Keys(), IsEmpty());
  EXPECT_THAT(bed.server.Uploads(), IsEmpty());
}

TEST(S3Uploads, CleaningUpFencesAWriterThatIsStillAlive) {
  S3TestBed bed;
  StreamedWrite write(*bed.store, "k", PositionBytes(4 * kPart), 1000);
  ASSERT_THAT(write.WriteTo(2 * kPart), IsOk());
  const auto other = bed.OpenStoreAt("s3://bucket/a/b");
  EXPECT_THAT(CleanUp(*other), IsOk());
  EXPECT_THAT(write.Commit(), HasCodeAndText(absl::StatusCode::kAborted, "aborted by another"));
  EXPECT_THAT(bed.server.Keys(), IsEmpty());
}

TEST(S3Commit, DigestsThatTheCallerHasAreSentAndHeldByTheStore) {
  S3TestBed bed;
  const std::string bytes = PositionBytes(3 * kPart);
  std::vector<uint8_t> buffer(static_cast<size_t>(bed.store->WriteBufferBytes(3 * kPart, 1000)));
  for (const bool right : {true, false}) {
    std::vector<std::pair<int64_t, int64_t>> asked;
    WriteOptions options;
    options.size_bytes = 3 * kPart;
    options.buffer = absl::MakeSpan(buffer);
    options.sha256_of = [&](int64_t begin, int64_t end) -> std::string {
      asked.emplace_back(begin, end);
      if (begin == 2 * kPart) return "";
      return Sha256Hex(bytes.substr(static_cast<size_t>(right ? begin : begin + 1),
                                    static_cast<size_t>(end - begin)));
    };
    const auto writer = bed.store->Create("k", options);
    ASSERT_THAT(writer, IsOk());
    absl::Status status;
    for (size_t at = 0; at < bytes.size() && status.ok(); at += 512) {
      const auto room = (*writer)->Reserve(512);
      status = room.status();
      if (!status.ok()) break;
      std::copy_n(bytes.data() + at, 512, room->data());
      status = (*writer)->Advance(512);
    }
    if (status.ok()) status = (*writer)->Commit(CommitGate()).status();
    if (right) {
      EXPECT_THAT(status, IsOk());
      EXPECT_THAT(asked, ElementsAre(std::pair(0, kPart), std::pair(kPart, 2 * kPart),
                                     std::pair(2 * kPart, 3 * kPart)));
      EXPECT_EQ(*bed.store->Get("k", 3 * kPart), bytes);
      EXPECT_THAT(bed.store->Delete("k"), IsOk());
    } else {
      EXPECT_THAT(status, HasCodeAndText(absl::StatusCode::kUnavailable, "SHA256"));
    }
  }
  EXPECT_THAT(bed.store->Head("k"), HasCode(absl::StatusCode::kNotFound));
}

TEST(S3Uploads, AStoppedWriterCleansUp) {
  S3TestBed bed;
  std::atomic<bool> stop{false};
  const auto store = OpenS3Store("s3://bucket/a/b", bed.connection, &stop);
  ASSERT_TRUE(store.ok()) << store.status();
  {
    StreamedWrite write(**store, "k", PositionBytes(4 * kPart), 1000);
    ASSERT_THAT(write.WriteTo(2 * kPart), IsOk());
    ASSERT_THAT(bed.server.Uploads(), SizeIs(1));
    stop = true;
    EXPECT_THAT(write.Commit(), HasCode(absl::StatusCode::kCancelled));
  }
  EXPECT_THAT(bed.server.Uploads(), IsEmpty());
  EXPECT_THAT(bed.server.Keys(), IsEmpty());
  EXPECT_THAT((*store)->Head("k"), HasCode(absl::StatusCode::kCancelled));
}

TEST(S3Store, AStopEndsThePausesOfAStoreThatFails) {
  S3TestBed bed;
  std::atomic<bool> stop{false};
  const auto store = OpenS3Store("s3://bucket/a/b", bed.connection, &stop);
  ASSERT_TRUE(store.ok()) << store.status();
  bed.server.set_fault([&stop](const FakeRequest&) {
    stop = true;  // its sender is about to pause
    return Instead(FakeError(503, "SlowDown"));
  });
  EXPECT_THAT((*store)->List(""), HasCodeAndText(absl::StatusCode::kCancelled, "stopped"));
  EXPECT_THAT(bed.pauses(), IsEmpty());
}

TEST(S3Uploads, OfTemporaryObjectsOnlyRecordsAbortAnything) {
  S3TestBed bed;
  const std::string id = bed.server.BeginUpload("a/b/k");
  const std::string kTexts[] = {"", "{", "[]", "{\"key\":1,\"upload_id\":2}",
                                // Of another name than its upload's.
                                "{\"key\":\"k\",\"upload_id\":\"" + id + "\"}",
                                std::string(100'000, 'x')};
  for (const std::string& text : kTexts) {
    const std::string key = ObjectKey(TemporaryFile{"abc-1"});
    bed.server.PutObject("a/b/" + key, text);
    EXPECT_THAT(bed.store->Delete(key), IsOk());
    EXPECT_THAT(bed.server.Keys(), IsEmpty());
  }
  EXPECT_THAT(bed.server.Uploads(), SizeIs(1));
}

TEST(S3Uploads, SmallObjectsNeedNoRecord) {
  S3TestBed bed;
  EXPECT_THAT(StreamedWrite(*bed.store, "k", PositionBytes(kPart), 1000).Commit(), IsOk());
  EXPECT_EQ(bed.server.requests(), 2);  // PUT, HEAD
}

// ---------------------------------------------------------------------------------------------
// Write if absent

TEST(S3PutIfAbsent, SupportIsLearnedOncePerBucket) {
  S3TestBed bed;
  for (int i = 0; i < 5; ++i) {
    const auto store = bed.OpenStoreAt(absl::StrCat("s3://bucket/", i));
    EXPECT_THAT(store->PutIfAbsent("m", "bytes", nullptr), IsOk());
  }
  EXPECT_EQ(bed.connection->conditional_put("bucket"), ConditionalPut::kHonoured);
  EXPECT_EQ(bed.server.count("PutObject").requests, 2 + 5);
  EXPECT_THAT(bed.server.Keys(), ElementsAre("0/m", "1/m", "2/m", "3/m", "4/m"));
}

TEST(S3PutIfAbsent, AProbeThatFailsTeachesNothing) {
  S3TestBed bed;
  bed.server.set_fault(On("PutObject", 1, 6, LostRequest()));
  EXPECT_THAT(bed.store->PutIfAbsent("m", "bytes", nullptr),
              HasCode(absl::StatusCode::kUnavailable));
  EXPECT_EQ(bed.connection->conditional_put("bucket"), ConditionalPut::kUnknown);
  EXPECT_THAT(bed.store->PutIfAbsent("m", "bytes", nullptr), IsOk());
  EXPECT_EQ(bed.connection->conditional_put("bucket"), ConditionalPut::kHonoured);
}

TEST(S3PutIfAbsent, ALostAnswerIsNotTakenForAnotherWriter) {
  for (const bool is_ours : {true, false}) {
    S3TestBed bed;
    ASSERT_THAT(bed.store->PutIfAbsent("first", "x", nullptr), IsOk());  // learns
    const int number = static_cast<int>(bed.server.count("PutObject").requests) + 1;
    bed.server.set_fault([&, number](const FakeRequest& request) {
      if (request.operation != "PutObject" || request.number != number) return FakeFault();
      if (is_ours) return LostAnswer();
      bed.server.PutObject("a/b/m", "theirs");
      return LostRequest();
    });
    const auto info = bed.store->PutIfAbsent("m", "bytes!", nullptr);
    if (is_ours) {
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_EQ(info->etag, bed.store->Head("m")->etag);
    } else {
      EXPECT_THAT(info, HasCode(absl::StatusCode::kAlreadyExists));
      EXPECT_EQ(bed.server.Object("a/b/m").value_or("?"), "theirs");
    }
  }
}

TEST(S3PutIfAbsent, AConflictIsRepeated) {
  S3TestBed bed;
  bed.server.set_fault(
      On("PutObject", 3, 4, Instead(FakeError(409, "ConditionalRequestConflict"))));
  EXPECT_THAT(bed.store->PutIfAbsent("m", "bytes", nullptr), IsOk());
  EXPECT_EQ(bed.server.count("PutObject").requests, 5);
}

TEST(S3PutIfAbsent, WithoutConditionsALaterWriterIsFoundOut) {
  FakeS3Options server;
  server.conditional_put = FakeS3Options::ConditionalPut::kIgnored;
  S3TestBed bed(server);
  ASSERT_THAT(bed.store->PutIfAbsent("first", "x", nullptr), IsOk());
  EXPECT_EQ(bed.connection->conditional_put("bucket"), ConditionalPut::kMissing);
  // Another process writes between our PUT and the GET that compares.
  bed.server.set_fault([&](const FakeRequest& request) {
    if (request.operation == "GetObject") bed.server.PutObject("a/b/m", "theirs");
    return FakeFault();
  });
  // The first HEAD of a name asks with GET for the reason only while the bucket never answered.
  EXPECT_THAT(bed.store->PutIfAbsent("m", "ours..", nullptr),
              HasCode(absl::StatusCode::kAlreadyExists));
}

// ---------------------------------------------------------------------------------------------
// Listing

TEST(S3List, PagesOfAThousandKeysAndSiblingsOfThePrefix) {
  S3TestBed bed({}, S3TestBed::Options(), "s3://bucket/m/1");
  std::vector<std::string> want;
  for (int i = 0; i < 2501; ++i) {
    want.push_back(absl::StrCat("part ", i, "+"));
    bed.server.PutObject("m/1/" + want.back(), "x");
  }
  for (const std::string other : {"m/1", "m/1-", "m/10/a", "m/1/", "m/1/sub/", "m/1/a//b"}) {
    bed.server.PutObject(other, "x");
  }
  std::sort(want.begin(), want.end());
  EXPECT_EQ(Keys(*bed.store, ""), want);
  EXPECT_EQ(bed.server.count("ListObjectsV2").requests, 3);
  // Pages are asked for again one by one.
  bed.server.set_fault(On("ListObjectsV2", 5, 5, Cut(1000)));
  EXPECT_EQ(Keys(*bed.store, ""), want);
  EXPECT_EQ(bed.server.count("ListObjectsV2").requests, 3 + 4);
}

TEST(S3List, EndsAtItsBound) {
  S3Options options = S3TestBed::Options();
  options.max_listed_entries = 1500;
  S3TestBed bed({}, options);
  for (int i = 0; i < 1501; ++i) bed.server.PutObject(absl::StrCat("a/b/", i), "x");
  const absl::Status refused = bed.store->List("").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("more than 1500"));
  EXPECT_EQ(bed.server.count("ListObjectsV2").requests, 2);
}

TEST(S3List, AServerThatEncodesNothingIsUnderstood) {
  FakeS3Options server;
  server.encodes_keys = false;
  S3TestBed bed(server);
  bed.server.PutObject("a/b/x%2By+z", "x");
  EXPECT_THAT(Keys(*bed.store, ""), ElementsAre("x%2By+z"));
}

TEST(S3List, KeysOutsideThePrefixAreNotOurs) {
  S3TestBed bed;
  bed.server.PutObject("a/b/k", "x");
  bed.server.set_fault(On("ListObjectsV2", 1, 1, Edited([](FakeAnswer* answer) {
                            const size_t at = answer->body.find("<Contents>");
                            answer->body.insert(at,
                                                "<Contents><Key>other/k</Key><Size>1</Size>"
                                                "<ETag>&quot;e&quot;</ETag></Contents>");
                          })));
  EXPECT_THAT(Keys(*bed.store, ""), ElementsAre("k"));
}

TEST(S3List, AListingThatDoesNotGetOnEnds) {
  FakeS3Options server;
  server.page_keys = 1;
  S3TestBed bed(server);
  bed.server.PutObject("a/b/1", "x");
  bed.server.PutObject("a/b/2", "x");
  FakeAnswer first;
  first.body =
      "<ListBucketResult><IsTruncated>true</IsTruncated>"
      "<NextContinuationToken>t</NextContinuationToken></ListBucketResult>";
  bed.server.set_fault([first](const FakeRequest&) { return Instead(first); });
  EXPECT_THAT(bed.store->List(""), HasCode(absl::StatusCode::kFailedPrecondition));
}

TEST(S3Store, KeysAreBoundedWithTheirPrefix) {
  S3TestBed bed;
  const std::string key(1024 - 4, 'k');
  EXPECT_THAT(bed.store->Put(key, "x", nullptr), IsOk());
  EXPECT_THAT(bed.store->Put(key + "k", "x", nullptr),
              HasCodeAndText(absl::StatusCode::kInvalidArgument, "1025"));
}

TEST(S3Store, AStoreAtTheRootOfABucketSeesAllOfIt) {
  S3TestBed bed({}, S3TestBed::Options(), "s3://bucket");
  EXPECT_THAT(bed.store->Put("x/y", "1", nullptr), IsOk());
  EXPECT_EQ(bed.server.Object("x/y").value_or("?"), "1");
  EXPECT_THAT(Keys(*bed.store, ""), ElementsAre("x/y"));
  EXPECT_EQ(bed.store->uri(), "s3://bucket");
}

}  // namespace
}  // namespace shardprep
