#include "workers/s3/s3_client.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_s3.h"
#include "tests/workers/s3/s3_test_bed.h"
#include "workers/object_store.h"

namespace shardprep {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;
using testing::Not;
using testing::SizeIs;

S3Call GetCall(const std::string& key) {
  S3Call call;
  call.operation = "GetObject";
  call.method = "GET";
  call.bucket = "bucket";
  call.key = key;
  return call;
}

// Answers the first `times` requests so, and carries out the others.
std::function<FakeFault(const FakeRequest&)> FirstTimes(int times, const FakeFault& fault) {
  return [times, fault](const FakeRequest& request) {
    return request.number <= times ? fault : FakeFault();
  };
}

FakeFault Instead(const FakeAnswer& answer) {
  FakeFault fault;
  fault.instead = answer;
  return fault;
}

FakeFault Lost() {
  FakeFault fault;
  fault.lose_request = true;
  return fault;
}

TEST(S3Client, PassingFaultsAreRetried) {
  struct Case {
    std::string name;
    FakeFault fault;
    bool in_doubt;
  };
  FakeAnswer empty;
  empty.status = 500;
  FakeAnswer page;
  page.status = 502;
  page.body = "<html>Bad gateway</html>";
  const Case kCases[] = {
      {"no answer", Lost(), true},
      {"500", Instead(FakeError(500, "InternalError")), true},
      {"500 without body", Instead(empty), true},
      {"502 of a proxy", Instead(page), true},
      {"503", Instead(FakeError(503, "SlowDown")), true},
      {"504", Instead(FakeError(504, "")), true},
      {"429", Instead(FakeError(429, "TooManyRequests")), false},
      {"408", Instead(FakeError(408, "")), false},
      {"slow body", Instead(FakeError(400, "RequestTimeout")), false},
      {"damaged body", Instead(FakeError(400, "XAmzContentSHA256Mismatch")), false},
      {"conflict", Instead(FakeError(409, "OperationAborted")), false},
  };
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    S3TestBed bed;
    bed.server.PutObject("k", "content");
    bed.server.set_fault(FirstTimes(2, c.fault));
    const S3Answer answer = bed.connection->Exchange(GetCall("k"));
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.response.body, "content");
    EXPECT_EQ(answer.attempts, 3);
    EXPECT_EQ(answer.in_doubt, c.in_doubt);
    EXPECT_THAT(bed.pauses(), SizeIs(2));
  }
}

TEST(S3Client, WhatDoesNotPassIsAnsweredAtOnceAndSaysWhatItIs) {
  struct Case {
    FakeAnswer answer;
    absl::StatusCode code;
    std::string text;
  };
  const Case kCases[] = {
      {FakeError(404, "NoSuchKey", "not there"), absl::StatusCode::kNotFound, "404 NoSuchKey"},
      {FakeError(404, "NoSuchBucket"), absl::StatusCode::kNotFound, "no bucket bucket"},
      {FakeError(403, "AccessDenied", "no"), absl::StatusCode::kFailedPrecondition,
       "403 AccessDenied: no"},
      {FakeError(403, "SignatureDoesNotMatch"), absl::StatusCode::kFailedPrecondition,
       "SignatureDoesNotMatch"},
      {FakeError(501, "NotImplemented"), absl::StatusCode::kFailedPrecondition, "501"},
      {FakeError(507, ""), absl::StatusCode::kResourceExhausted, "507"},
      {FakeError(403, "QuotaExceeded"), absl::StatusCode::kResourceExhausted, "QuotaExceeded"},
      {FakeError(400, "KeyTooLongError"), absl::StatusCode::kInvalidArgument, "KeyTooLongError"},
      {FakeError(400, "InvalidPart"), absl::StatusCode::kDataLoss, "InvalidPart"},
      {FakeError(405, ""), absl::StatusCode::kFailedPrecondition, "405"},
      {FakeError(302, ""), absl::StatusCode::kFailedPrecondition, "302"},
  };
  for (const Case& c : kCases) {
    S3TestBed bed;
    bed.server.set_fault(FirstTimes(100, Instead(c.answer)));
    const S3Answer answer = bed.connection->Exchange(GetCall("some/key"));
    EXPECT_EQ(answer.status.code(), c.code) << answer.status;
    // A full store is its operator's to enlarge; trying again does not help.
    EXPECT_EQ(IsNoSpace(answer.status), c.code == absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(answer.status.message()),
                AllOf(HasSubstr("s3://bucket/some/key"), HasSubstr("GetObject"),
                      HasSubstr("http://s3.test:9000"), HasSubstr(c.text)));
    EXPECT_EQ(answer.attempts, 1);
    EXPECT_EQ(bed.server.requests(), 1);
  }
}

TEST(S3Client, ExhaustedAttemptsNameTheLastCause) {
  S3TestBed bed;
  bed.server.set_fault(FirstTimes(100, Instead(FakeError(503, "SlowDown", "reduce your rate"))));
  const S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()),
              AllOf(HasSubstr("s3://bucket/k: GetObject"), HasSubstr("after 6 attempts"),
                    HasSubstr("503 SlowDown: reduce your rate")));
  EXPECT_EQ(bed.server.requests(), 6);
}

TEST(S3Client, PausesAreRandomDoubledAndCapped) {
  S3Options options = S3TestBed::Options();
  options.max_attempts = 9;
  options.first_pause = absl::Seconds(1);
  options.max_pause = absl::Seconds(5);
  std::set<absl::Duration> seen;
  for (int run = 0; run < 20; ++run) {
    S3TestBed bed({}, options);
    for (int other = 0; other < run; ++other) bed.connection = bed.Connect(options);
    bed.server.set_fault(FirstTimes(100, Lost()));
    EXPECT_FALSE(bed.connection->Exchange(GetCall("k")).status.ok());
    const std::vector<absl::Duration> pauses = bed.pauses();
    ASSERT_THAT(pauses, SizeIs(8));
    for (size_t i = 0; i < pauses.size(); ++i) {
      EXPECT_GE(pauses[i], absl::ZeroDuration());
      EXPECT_LE(pauses[i], std::min(absl::Seconds(5), absl::Seconds(1) * (1 << i)));
    }
    seen.insert(pauses.begin(), pauses.end());
  }
  // Clients that failed together do not come back together.
  EXPECT_THAT(seen, SizeIs(Ge(150)));
  EXPECT_GT(*seen.rbegin(), absl::Seconds(4));
  EXPECT_LT(*seen.begin(), absl::Milliseconds(200));
}

TEST(S3Client, RetryAfterIsTheLeastPauseUpToTheCap) {
  for (const int seconds : {3, 4000}) {
    S3TestBed bed;
    FakeAnswer answer = FakeError(429, "TooManyRequests");
    answer.SetHeader("retry-after", absl::StrCat(seconds));
    bed.server.PutObject("k", "content");
    bed.server.set_fault(FirstTimes(3, Instead(answer)));
    EXPECT_TRUE(bed.connection->Exchange(GetCall("k")).status.ok());
    EXPECT_THAT(bed.pauses(), SizeIs(3));
    EXPECT_THAT(bed.pauses(), Each(Ge(std::min(absl::Seconds(seconds), absl::Seconds(10)))));
    EXPECT_THAT(bed.pauses(), Each(Le(absl::Seconds(10))));
  }
}

TEST(S3Client, AStormUsesUpTheSharedBudgetAndThenEachCallIsSentOnce) {
  S3Options options = S3TestBed::Options();
  options.max_connections = 4;
  options.max_attempts = 6;
  S3TestBed bed({}, options);
  bed.server.PutObject("k", "content");
  bed.server.set_fault(FirstTimes(1 << 20, Instead(FakeError(503, "SlowDown"))));
  constexpr int kCalls = 100;
  for (int i = 0; i < kCalls; ++i) {
    EXPECT_EQ(bed.connection->Exchange(GetCall("k")).status.code(), absl::StatusCode::kUnavailable);
  }
  // Each of the 4 places could use all its repetitions once.
  EXPECT_EQ(bed.server.requests(), kCalls + 4 * 5);
  // Successes fill the budget again.
  bed.server.set_fault(nullptr);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(bed.connection->Exchange(GetCall("k")).status.ok());
  const int64_t before = bed.server.requests();
  const int failing = static_cast<int>(before) + 1;
  bed.server.set_fault([failing](const FakeRequest& request) {
    return request.number == failing ? Lost() : FakeFault();
  });
  EXPECT_TRUE(bed.connection->Exchange(GetCall("k")).status.ok());
  EXPECT_EQ(bed.server.requests(), before + 2);
}

TEST(S3Client, RetriesAddNothingToWhatIsInFlight) {
  S3Options options = S3TestBed::Options();
  options.max_connections = 3;
  S3TestBed bed({}, options);
  bed.server.PutObject("k", "content");
  absl::Barrier* const barrier = new absl::Barrier(3);
  bed.server.set_fault([barrier](const FakeRequest& request) {
    // The first three are in flight at once, for certain.
    if (request.number <= 3 && barrier->Block()) delete barrier;
    return request.number <= 6 ? Instead(FakeError(503, "SlowDown")) : FakeFault();
  });
  std::vector<std::thread> threads;
  threads.reserve(8);
  std::atomic<int> failed = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      if (!bed.connection->Exchange(GetCall("k")).status.ok()) ++failed;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(bed.server.most_in_flight(), 3);
}

TEST(S3Client, TheGateIsAskedBeforeEveryAttempt) {
  S3TestBed bed;
  bed.server.set_fault(FirstTimes(100, Lost()));
  int asked = 0;
  S3Call call = GetCall("k");
  call.gate = [&] {
    EXPECT_EQ(bed.server.requests(), asked);
    return ++asked <= 2 ? absl::OkStatus() : absl::AbortedError("lease lost");
  };
  const S3Answer answer = bed.connection->Exchange(call);
  EXPECT_EQ(answer.status, absl::AbortedError("lease lost"));
  EXPECT_EQ(bed.server.requests(), 2);
  EXPECT_TRUE(answer.in_doubt);
}

TEST(S3Client, ExpiredCredentialsAreRefreshedOnce) {
  const AwsCredentials next = {"AKIDNEXT", "next-secret", ""};
  S3TestBed bed;
  bed.server.PutObject("k", "content");
  bed.server.Expire("AKIDFAKE");
  bed.server.set_credentials(next);
  bed.credentials->Rotate(next);
  const S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(bed.credentials->refreshes(), 1);
  EXPECT_EQ(bed.server.requests(), 2);
  EXPECT_THAT(bed.pauses(), SizeIs(0));
}

TEST(S3Client, CredentialsThatStayExpiredAreAnError) {
  S3TestBed bed;
  bed.server.PutObject("k", "content");
  bed.server.Expire("AKIDFAKE");
  S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("credentials expired"));
  EXPECT_EQ(bed.server.requests(), 1) << "the same credentials need not be tried again";
  // New ones that have expired as well end it too.
  const AwsCredentials next = {"AKIDNEXT", "next-secret", ""};
  bed.server.set_credentials(next);
  bed.server.Expire("AKIDNEXT");
  bed.credentials->Rotate(next);
  answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(bed.server.requests(), 3);
}

TEST(S3Client, AHeadWithoutReasonAsksForIt) {
  S3TestBed bed;
  bed.server.PutObject("k", "content");
  S3Call call = GetCall("k");
  call.method = "HEAD";
  call.operation = "HeadObject";
  bed.server.Expire("AKIDFAKE");
  const S3Answer answer = bed.connection->Exchange(call);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("ExpiredToken"));
  EXPECT_EQ(bed.server.count("GetObject").requests, 1);

  S3TestBed other;
  other.server.RemoveBucket();
  EXPECT_THAT(std::string(other.connection->Exchange(call).status.message()),
              HasSubstr("no bucket bucket"));
}

TEST(S3Client, AWrongClockIsNamedWithBothTimes) {
  S3TestBed bed;
  bed.server.PutObject("k", "content");
  bed.server.set_skew(absl::Minutes(20));
  const S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answer.status.message()),
              AllOf(HasSubstr("RequestTimeTooSkewed"), HasSubstr("1200 s apart"),
                    HasSubstr("2023-11-14T22:30:00"), HasSubstr("2023-11-14T22:50:00")));
  // Nothing of it is remembered once the clock was set.
  bed.server.set_skew(absl::ZeroDuration());
  EXPECT_TRUE(bed.connection->Exchange(GetCall("k")).status.ok());
}

TEST(S3Client, AWrongRegionIsNamedWhereTheEndpointWasChosen) {
  FakeS3Options server;
  server.region = "eu-west-3";
  S3TestBed bed(server);
  const S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answer.status.message()),
              AllOf(HasSubstr("in region eu-west-3"), HasSubstr("asked in us-east-1")));
  EXPECT_EQ(bed.server.requests(), 1);
}

TEST(S3Client, AtAmazonsEndpointTheBucketsRegionIsLearnedOnce) {
  for (const auto addressing :
       {S3Options::Addressing::kPath, S3Options::Addressing::kVirtualHost}) {
    FakeS3Options server;
    server.region = "eu-west-3";
    S3Options options = S3TestBed::Options();
    options.endpoint = "";
    options.addressing = addressing;
    S3TestBed bed(server, options);
    bed.server.PutObject("k", "content");
    std::vector<std::string> hosts;
    bed.server.set_fault([&hosts](const FakeRequest& request) {
      hosts.push_back(request.host);
      return FakeFault();
    });
    EXPECT_EQ(bed.connection->Exchange(GetCall("k")).response.body, "content");
    EXPECT_EQ(bed.connection->Exchange(GetCall("k")).response.body, "content");
    const std::string before = addressing == S3Options::Addressing::kPath ? "" : "bucket.";
    EXPECT_THAT(hosts, ElementsAre(before + "s3.us-east-1.amazonaws.com",
                                   before + "s3.eu-west-3.amazonaws.com",
                                   before + "s3.eu-west-3.amazonaws.com"));
  }
}

TEST(S3Client, ARegionThatIsNoNameIsNotFollowed) {
  S3Options options = S3TestBed::Options();
  options.endpoint = "";
  S3TestBed bed({}, options);
  FakeAnswer answer = FakeError(301, "PermanentRedirect");
  answer.SetHeader("x-amz-bucket-region", "evil.example/?");
  bed.server.set_fault(FirstTimes(100, Instead(answer)));
  EXPECT_EQ(bed.connection->Exchange(GetCall("k")).status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(bed.server.requests(), 1);
}

TEST(S3Client, ABucketWithDotsGoesIntoThePathOverTls) {
  FakeS3Options server;
  server.bucket = "a.b";
  S3Options options = S3TestBed::Options();
  options.endpoint = "https://s3.test";
  options.addressing = S3Options::Addressing::kVirtualHost;
  S3TestBed bed(server, options, "s3://a.b");
  std::vector<std::string> hosts;
  bed.server.set_fault([&hosts](const FakeRequest& request) {
    hosts.push_back(request.host);
    return FakeFault();
  });
  bed.server.PutObject("k", "content");
  EXPECT_EQ(bed.store->Get("k", 100).value_or("?"), "content");
  EXPECT_THAT(hosts, ElementsAre("s3.test"));
}

TEST(S3Client, NoMessageHoldsSecrets) {
  const AwsCredentials credentials = FakeS3Options().credentials;
  const std::string kMessages[] = {
      credentials.secret_access_key, credentials.session_token, credentials.access_key_id,
      "you sent Authorization: AWS4-HMAC-SHA256 Credential=x, Signature=abcdef"};
  for (const std::string& message : kMessages) {
    for (const int status : {403, 503}) {
      S3TestBed bed;
      bed.server.set_fault(
          FirstTimes(100, Instead(FakeError(status, "Custom", "echo: " + message))));
      const S3Answer answer = bed.connection->Exchange(GetCall("k"));
      EXPECT_FALSE(answer.status.ok());
      EXPECT_THAT(std::string(answer.status.message()), Not(HasSubstr("echo")));
      EXPECT_THAT(std::string(answer.status.message()), HasSubstr("Custom"));
    }
  }
}

TEST(S3Client, MessagesOfServersStayOneBoundedLine) {
  S3TestBed bed;
  const std::string text = "line\nnext\x1b[31m" + std::string(5000, 'x');
  bed.server.set_fault(
      FirstTimes(1, Instead(FakeError(403, "AccessDenied", "line\nnext " + text.substr(5)))));
  const S3Answer answer = bed.connection->Exchange(GetCall("k"));
  EXPECT_THAT(std::string(answer.status.message()), Not(HasSubstr("\n")));
  EXPECT_LT(answer.status.message().size(), 600u);
}

TEST(S3Client, BodiesAndKeysAreSignedAsTheyAreSent) {
  for (const bool is_unsigned : {false, true}) {
    S3Options options = S3TestBed::Options();
    options.unsigned_payload = is_unsigned;
    S3TestBed bed({}, options);
    const std::string key = "a+b c=1@x/\xd0\xbc%2F/~'()*!\n";
    const std::string body = "some bytes";
    S3Call call = GetCall(key);
    call.operation = "PutObject";
    call.method = "PUT";
    call.body = {reinterpret_cast<const uint8_t*>(body.data()), body.size()};
    call.headers = {{"x-amz-meta-text", "  two  words "}};
    const S3Answer answer = bed.connection->Exchange(call);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(bed.server.Object(key).value_or("?"), body);
  }
}

TEST(S3Client, TheObserverSeesEveryExchange) {
  S3TestBed bed;
  bed.server.PutObject("k", "content");
  bed.server.set_fault([](const FakeRequest& request) {
    if (request.number == 1) return Lost();
    return request.number == 2 ? Instead(FakeError(503, "SlowDown")) : FakeFault();
  });
  EXPECT_TRUE(bed.connection->Exchange(GetCall("k")).status.ok());
  const std::vector<S3Exchange> exchanges = bed.observer.exchanges();
  ASSERT_THAT(exchanges, SizeIs(3));
  const int kStatuses[] = {0, 503, 200};
  for (int i = 0; i < 3; ++i) {
    EXPECT_STREQ(exchanges[static_cast<size_t>(i)].operation, "GetObject");
    EXPECT_EQ(exchanges[static_cast<size_t>(i)].attempt, i + 1);
    EXPECT_EQ(exchanges[static_cast<size_t>(i)].http_status, kStatuses[i]);
  }
  EXPECT_EQ(exchanges[0].transport, absl::StatusCode::kUnavailable);
  EXPECT_EQ(exchanges[2].received_bytes, 7);
}

TEST(S3Client, PooledWorkAllRunsOnBoundedThreads) {
  S3Options options = S3TestBed::Options();
  options.max_connections = 3;
  S3TestBed bed({}, options);
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  absl::BlockingCounter left(50);
  for (int i = 0; i < 50; ++i) {
    bed.connection->Run([&] {
      const int now = ++running;
      int seen = most;
      while (seen < now && !most.compare_exchange_weak(seen, now)) {
      }
      std::this_thread::yield();
      --running;
      left.DecrementCount();
    });
  }
  left.Wait();
  EXPECT_LE(most, 3);
}

TEST(S3Client, BoundsThatLeaveNothingToDoAreRefused) {
  for (int i = 0; i < 3; ++i) {
    S3Options options = S3TestBed::Options();
    if (i == 0) options.max_connections = 0;
    if (i == 1) options.max_attempts = 0;
    if (i == 2) options.upload_part_bytes = 0;
    EXPECT_EQ(ConnectS3(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace shardprep
