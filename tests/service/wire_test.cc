// Statuses on the wire, addresses, and log lines.
#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "workers/grpc_channel.h"
#include "workers/grpc_status.h"
#include "workers/log.h"
#include "workers/printable.h"

namespace shardprep {
namespace {

TEST(GrpcStatus, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "what failed");
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)).code(), status.code());
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)).message(), status.message());
    EXPECT_EQ(FromRpcStatus(ToRpcStatus(status)).code(), status.code());
  }
}

TEST(GrpcStatus, EveryErrorCarriesAnErrorInfo) {
  const grpc::Status plain = ToGrpcStatus(absl::DataLossError("short"));
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(plain.error_details()));
  ASSERT_EQ(details.details_size(), 1);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.domain(), "shardprep");
  EXPECT_EQ(info.reason(), "DATA_LOSS");
}

TEST(GrpcStatus, ReasonAndMetadataSurviveTheRoundTrip) {
  const absl::Status status =
      WithReason(absl::ResourceExhaustedError("full"), "NO_SPACE", {{"free_bytes", "12"}});
  const ErrorReason back = ReasonOf(FromGrpcStatus(ToGrpcStatus(status)));
  EXPECT_EQ(back.reason, "NO_SPACE");
  EXPECT_EQ(back.metadata.at("free_bytes"), "12");
  EXPECT_TRUE(WithReason(absl::OkStatus(), "NO_SPACE").ok());
}

TEST(GrpcStatus, LongMessagesAreCutBetweenCharacters) {
  std::string message(4095, 'x');
  message += "äää";  // two bytes each, so the bound falls inside one
  EXPECT_EQ(ToRpcStatus(absl::InternalError(message)).message(), std::string(4095, 'x') + "...");
}

TEST(GrpcStatus, TrailersFitWhatAClientTakesByDefault) {
  std::map<std::string, std::string> metadata;
  for (char key = 'a'; key <= 'j'; ++key) metadata[std::string(1, key)] = std::string(4000, 'v');
  for (const char* character : {"x", "ä", "%"}) {
    std::string message;
    while (message.size() < 4000) message += character;
    const absl::Status status = WithReason(absl::InternalError(message), "LONG", metadata);
    const grpc::Status wire = ToGrpcStatus(status);
    size_t encoded = (wire.error_details().size() + 2) / 3 * 4;
    for (const char c : wire.error_message()) encoded += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
    EXPECT_LT(encoded, 7U << 10) << character;
    EXPECT_GT(encoded, 4U << 10) << character;
    const absl::Status there = FromGrpcStatus(wire);
    EXPECT_EQ(std::string(there.message()), wire.error_message());
    EXPECT_EQ(ReasonOf(there).reason, "LONG");
    EXPECT_EQ(ReasonOf(there).metadata.size(), 10U);
  }
}

// A protobuf string that is no UTF-8 does not survive parsing, and would take the status with it.
TEST(GrpcStatus, MessagesThatAreNotPrintableArriveAllTheSame) {
  absl::Status status =
      WithReason(absl::DataLossError("file a\xff\x1b[2J: short"), "SHORT", {{"file", "a\xff"}});
  const absl::Status there = FromGrpcStatus(ToGrpcStatus(status));
  EXPECT_EQ(there.message(), "file a\\xff\\x1b[2J: short");
  EXPECT_EQ(ReasonOf(there).metadata.at("file"), "a\\xff");
}

TEST(Printable, KeepsTextAndShowsBytesThatAreNone) {
  const std::map<std::string, std::string> cases = {
      {"", ""},
      {"plain, \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\n",
       "plain, \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\n"},
      {std::string("a\0b", 3), "a\\x00b"},
      {"\x1b[31mred\x7f", "\\x1b[31mred\\x7f"},
      {"\xc2\x9b"
       "31m",
       "\\xc2\\x9b"
       "31m"},                                       // C1: a terminal takes it for an escape
      {"\xc0\xaf", "\\xc0\\xaf"},                    // overlong
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond U+10FFFF
      {"cut \xe2\x82", "cut \\xe2\\x82"},
      {"\xff", "\\xff"},
  };
  for (const auto& [text, want] : cases) {
    EXPECT_EQ(Printable(text), want);
    EXPECT_EQ(Printable(Printable(text)), want);
  }
}

TEST(Printable, Utf8IsToldFromOtherBytes) {
  for (const char* text : {"", "plain\x1b", "\xc3\xa9 \xf0\x9f\x98\x80", "\xc2\x9b"}) {
    EXPECT_TRUE(IsUtf8(text)) << Printable(text);
  }
  for (const char* text : {"\xff", "cut \xe2\x82", "\xc0\xaf", "\xed\xa0\x80"}) {
    EXPECT_FALSE(IsUtf8(text)) << Printable(text);
  }
}

TEST(GrpcStatus, ForeignStatusesAreTakenAsTheyAre) {
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::StatusCode::UNAVAILABLE, "no route")).code(),
            absl::StatusCode::kUnavailable);
  google::rpc::Status odd;
  odd.set_code(99);
  EXPECT_EQ(FromRpcStatus(odd).code(), absl::StatusCode::kUnknown);
}

TEST(GrpcChannel, LocalAddressesAreRecognised) {
  for (const char* local :
       {"unix:/run/x", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"}) {
    EXPECT_TRUE(IsLocalAddress(local)) << local;
  }
  for (const char* other : {"0.0.0.0:1", "10.0.0.1:1", "[::]:1", "node-3:1", "127.example.com:1",
                            "localhost.example.com:1", "127.0.0.1.example.com:1"}) {
    EXPECT_FALSE(IsLocalAddress(other)) << other;
  }
}

TEST(GrpcChannel, PlaintextIsForLocalAddressesUnlessAllowed) {
  ConnectionSecurity open;
  EXPECT_EQ(CheckAddress("10.0.0.1:7070", open).code(), absl::StatusCode::kFailedPrecondition);
  open.allow_insecure = true;
  EXPECT_EQ(CheckAddress("10.0.0.1:7070", open), absl::OkStatus());
  EXPECT_EQ(CheckAddress("127.0.0.1:7070", {}), absl::OkStatus());
}

TEST(GrpcChannel, MalformedAddressesAreRefused) {
  for (const char* bad : {"", "localhost", ":1", "localhost:", "localhost:x", "localhost:65536",
                          "localhost:-1", "http://localhost:1", "unix:"}) {
    EXPECT_EQ(CheckAddress(bad, {}).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(CheckAddress("unix:/" + std::string(107, 'x'), {}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckAddress("unix:/" + std::string(106, 'x'), {}), absl::OkStatus());
}

TEST(GrpcChannel, TlsNeedsAllThreeFiles) {
  ConnectionSecurity security;
  security.tls.certificate = "/dev/null";
  EXPECT_EQ(CheckAddress("127.0.0.1:1", security).code(), absl::StatusCode::kInvalidArgument);
  security.tls.key = "/dev/null";
  security.tls.ca = "/nowhere/ca.pem";
  EXPECT_EQ(CheckAddress("127.0.0.1:1", security).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Log, LineIsOneLineOfPairs) {
  const absl::Time time = absl::FromUnixMillis(1'700'000'000'123);
  EXPECT_EQ(FormatLogLine(LogLevel::kInfo, time, "worker", "lease started",
                          {{"job", "v4"}, {"rank", 3}, {"bytes", int64_t{1} << 40}}),
            "level=info ts=2023-11-14T22:13:20.123Z component=worker msg=\"lease started\" job=v4 "
            "rank=3 bytes=1099511627776\n");
}

TEST(Log, LevelsHaveNames) {
  EXPECT_EQ(ParseLogLevel("warning").value_or(LogLevel::kError), LogLevel::kWarning);
  EXPECT_EQ(ParseLogLevel("WARN").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LeastLogLevel(), LogLevel::kInfo);
}

TEST(Log, UrisAreShownWithoutWhatMayBeSecret) {
  const std::pair<std::string, std::string> places[] = {
      {"/models/a@b?c", "/models/a@b?c"},
      {"s3://bucket/a@b", "s3://bucket/a@b"},
      {"s3://key:secret@bucket/p", "s3://bucket/p"},
      {"s3://key:se@cret@bucket", "s3://bucket"},
      {"s3://key:se/cr@et@bucket/p", "s3://bucket/p"},
      {"http://host:9000/a", "http://host:9000/a"},
      {"s3://key:secret@", "s3://"},
      {"https://host/p?X-Amz-Signature=1", "https://host/p"},
      {"https://user@host#part", "https://host"},
      {"file:///models", "file:///models"},
      {"s3://", "s3://"}};
  for (const auto& [uri, want] : places) EXPECT_EQ(UriWithoutSecrets(uri), want);
}

TEST(Log, ValuesCannotBreakOutOfTheirLine) {
  const std::string line = FormatLogLine(
      LogLevel::kError, absl::UnixEpoch(), "c", "m",
      {{"a", "x\ny"}, {"b", "say \"hi\" \\"}, {"c", ""}, {"d", "k=v"}, {"e", "\x01"}});
  EXPECT_EQ(line,
            "level=error ts=1970-01-01T00:00:00.000Z component=c msg=m a=\"x\\ny\" "
            "b=\"say \\\"hi\\\" \\\\\" c=\"\" d=k=v e=\"\\x01\"\n");
}

}  // namespace
}  // namespace shardprep
