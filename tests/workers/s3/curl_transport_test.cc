#include "workers/s3/curl_transport.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status_macros.h"
#include "tests/support/temp_dir.h"
#include "tests/workers/s3/loopback_server.h"
#include "workers/s3/sigv4.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAreArray;
using Then = ScriptedAnswer::Then;

constexpr size_t kLargeBytes = size_t{16} << 20;

std::unique_ptr<HttpTransport> Transport() { return MakeCurlTransport(CurlTransportOptions{}); }

absl::Span<const uint8_t> AsBytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Bytes whose value depends on their position with a period that divides no buffer's size.
std::string Pattern(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i % 251);
  return bytes;
}

// Memory for an answer between guard bytes.
class Landing {
 public:
  explicit Landing(size_t size) : bytes_(size + 2 * kGuardBytes, kGuard) {}

  absl::Span<uint8_t> span() {
    return absl::MakeSpan(bytes_).subspan(kGuardBytes, bytes_.size() - 2 * kGuardBytes);
  }
  std::string Text(int64_t size) const {
    return {reinterpret_cast<const char*>(bytes_.data()) + kGuardBytes, static_cast<size_t>(size)};
  }
  bool GuardsAreWhole() const {
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    return std::all_of(bytes_.begin(), bytes_.begin() + kGuardBytes, is_guard) &&
           std::all_of(bytes_.end() - kGuardBytes, bytes_.end(), is_guard);
  }

 private:
  static constexpr size_t kGuardBytes = 64;
  static constexpr uint8_t kGuard = 0xA5;
  std::vector<uint8_t> bytes_;
};

// A loopback port on which nobody listens, kept from everybody else meanwhile.
class DeafPort {
 public:
  DeafPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address_;
    SP_CHECK(::bind(fd_, reinterpret_cast<sockaddr*>(&address_), size) == 0);
    SP_CHECK(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address_), &size) == 0);
  }
  ~DeafPort() { ::close(fd_); }
  DeafPort(const DeafPort&) = delete;
  DeafPort& operator=(const DeafPort&) = delete;

  std::string url() const { return absl::StrCat("http://127.0.0.1:", ntohs(address_.sin_port)); }

 private:
  const int fd_;
  sockaddr_in address_ = {};
};

TEST(CurlTransport, BodyOfAGoodAnswerGoesIntoTheCallersMemory) {
  const LoopbackServer server(
      {.bytes = "HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nETag:  \"a b\" \r\n"
                "CONTENT-RANGE: bytes 0-9/100\r\n\r\n0123456789"});
  Landing landing(12);
  const HttpResponse response =
      Transport()->Send({.method = "GET", .url = server.url() + "/b/k", .into = landing.span()});
  ASSERT_TRUE(response.transport.ok()) << response.transport;
  EXPECT_EQ(response.status, 206);
  EXPECT_EQ(response.into_bytes, 10);
  EXPECT_EQ(landing.Text(10), "0123456789");
  EXPECT_EQ(response.body, "");
  ASSERT_NE(response.Header("etag"), nullptr);
  EXPECT_EQ(*response.Header("etag"), "\"a b\"");
  ASSERT_NE(response.Header("content-range"), nullptr);
  EXPECT_EQ(*response.Header("content-range"), "bytes 0-9/100");
  EXPECT_EQ(response.Header("x-amz-missing"), nullptr);
  EXPECT_TRUE(landing.GuardsAreWhole());
}

TEST(CurlTransport, RequestsArriveByteForByte) {
  // A path that would be normalised, a query that would be unescaped.
  const std::string target = absl::StrCat(UriEscape("/b/../a+b c=1@x/\xD0\xBC%2F//./k", true), "?",
                                          CanonicalQuery({{"uploadId", "a/b+c=="}, {"acl", ""}}));
  const struct {
    std::string method;
    std::string body;
    std::vector<std::string> length;  // lines that the transport adds
  } kCases[] = {
      {"GET", "", {}},
      {"DELETE", "", {}},
      {"PUT", "", {"content-length: 0"}},
      {"PUT", "0123456789", {"content-length: 10"}},
      {"POST", "", {"content-length: 0"}},
      {"POST", "<Complete/>", {"content-length: 11"}},
      // Above the size from which libcurl would wait for a "100 Continue".
      {"PUT", Pattern(2 << 20), {"content-length: 2097152"}},
  };
  const LoopbackServer server({.bytes = WholeAnswer(200, "")});
  const auto transport = Transport();
  for (const auto& c : kCases) {
    const HttpResponse response = transport->Send({.method = c.method,
                                                   .url = server.url() + target,
                                                   .headers = {{"host", "bucket.example"},
                                                               {"x-amz-meta-a", "two  spaces"},
                                                               {"x-amz-empty", ""},
                                                               {"authorization", "AWS4 x=y, z"}},
                                                   .body = AsBytes(c.body)});
    ASSERT_TRUE(response.transport.ok()) << c.method << response.transport;
    const ReceivedRequest received = server.requests().back();
    EXPECT_THAT(received.head, StartsWith(absl::StrCat(c.method, " ", target, " HTTP/1.1\r\n")));
    std::vector<std::string> want = {"host: bucket.example", "x-amz-meta-a: two  spaces",
                                     "x-amz-empty: ", "authorization: AWS4 x=y, z"};
    want.insert(want.end(), c.length.begin(), c.length.end());
    std::vector<std::string> lines;
    lines.reserve(received.headers.size());
    for (const HttpHeader& header : received.headers) {
      lines.push_back(absl::StrCat(header.name, ": ", header.value));
    }
    EXPECT_THAT(lines, UnorderedElementsAreArray(want)) << c.method;
    EXPECT_EQ(received.body, c.body) << c.method;
  }
}

TEST(CurlTransport, ConnectionsAreKept) {
  const LoopbackServer server({.bytes = WholeAnswer(200, "body")});
  const auto transport = Transport();
  for (const char* method : {"GET", "PUT", "POST", "DELETE", "GET"}) {
    const HttpResponse response = transport->Send({.method = method, .url = server.url() + "/k"});
    ASSERT_TRUE(response.transport.ok()) << response.transport;
    EXPECT_EQ(response.body, "body");
  }
  EXPECT_EQ(server.requests().size(), 5U);
  EXPECT_EQ(server.connections(), 1);
}

TEST(CurlTransport, EachOriginKeepsItsOwnConnection) {
  const LoopbackServer a({.bytes = WholeAnswer(200, "a")});
  const LoopbackServer b({.bytes = WholeAnswer(200, "b")});
  const auto transport = Transport();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(transport->Send({.method = "GET", .url = a.url() + "/k?x=1"}).body, "a");
    EXPECT_EQ(transport->Send({.method = "GET", .url = b.url() + "/k"}).body, "b");
  }
  EXPECT_EQ(a.connections(), 1);
  EXPECT_EQ(b.connections(), 1);
}

TEST(CurlTransport, CutBodyIsUnavailableAndSaysWhatArrived) {
  const std::string kChunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
  const struct {
    std::string name;
    std::string bytes;
    std::string arrived;
  } kCases[] = {
      {"length", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + Pattern(40), Pattern(40)},
      {"chunk", kChunkedHead + "40\r\n" + Pattern(40), Pattern(40)},
      {"chunk's end", kChunkedHead + "28\r\n" + Pattern(40) + "\r\n", Pattern(40)},
      {"before the body", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", ""},
  };
  for (const auto& c : kCases) {
    const LoopbackServer server({.bytes = c.bytes, .then = Then::kClose});
    Landing landing(100);
    const HttpResponse into =
        Transport()->Send({.method = "GET", .url = server.url() + "/k", .into = landing.span()});
    EXPECT_EQ(into.transport.code(), absl::StatusCode::kUnavailable) << c.name << into.transport;
    EXPECT_EQ(into.status, 200) << c.name;
    EXPECT_EQ(landing.Text(into.into_bytes), c.arrived) << c.name;
    EXPECT_TRUE(landing.GuardsAreWhole());

    const HttpResponse body = Transport()->Send({.method = "GET", .url = server.url() + "/k"});
    EXPECT_EQ(body.transport.code(), absl::StatusCode::kUnavailable) << c.name << body.transport;
    EXPECT_EQ(body.body, c.arrived) << c.name;
  }
}

TEST(CurlTransport, CutHeaderOrNoHttpIsUnavailable) {
  for (const std::string& bytes :
       {std::string(), std::string("HTTP/1.1 20"), std::string("HTTP/1.1 200 OK\r\nETag: x"),
        std::string("HTTP/1.1 200 OK\r\nETag: \"x\"\r\n"), std::string("SSH-2.0-OpenSSH_9.2\r\n"),
        std::string("HTTP/1.1 100 Continue\r\n\r\n")}) {
    const LoopbackServer server({.bytes = bytes, .then = Then::kClose});
    const HttpResponse response = Transport()->Send({.method = "GET", .url = server.url() + "/k"});
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable)
        << bytes << response.transport;
    EXPECT_TRUE(response.status == 0 || response.status == 200) << bytes << response.status;
  }
}

TEST(CurlTransport, BodyOfAnErrorIsNotContent) {
  for (const int status : {301, 400, 403, 404, 416, 500, 503}) {
    const LoopbackServer server({.bytes = WholeAnswer(status, "<Error/>")});
    Landing landing(100);
    const HttpResponse response =
        Transport()->Send({.method = "GET", .url = server.url() + "/k", .into = landing.span()});
    ASSERT_TRUE(response.transport.ok()) << response.transport;
    EXPECT_EQ(response.status, status);
    EXPECT_EQ(response.body, "<Error/>");
    EXPECT_EQ(response.into_bytes, 0);
    EXPECT_EQ(landing.Text(100), std::string(100, '\xA5'));
  }
}

TEST(CurlTransport, TooLongABodyFailsAndOverrunsNothing) {
  const std::string kHead = "HTTP/1.1 200 OK\r\n";
  const std::string kBody = Pattern(200'000);
  const std::string kCases[] = {
      kHead + "Content-Length: 200000\r\n\r\n" + kBody,
      kHead + "Transfer-Encoding: chunked\r\n\r\n30d40\r\n" + kBody + "\r\n0\r\n\r\n",
      kHead + "Connection: close\r\n\r\n" + kBody,
      kHead + "Content-Length: 101\r\n\r\n" + kBody.substr(0, 101),
  };
  for (const std::string& bytes : kCases) {
    const LoopbackServer server({.bytes = bytes, .then = Then::kClose});
    Landing landing(100);
    const HttpResponse into =
        Transport()->Send({.method = "GET", .url = server.url() + "/k", .into = landing.span()});
    EXPECT_EQ(into.transport.code(), absl::StatusCode::kResourceExhausted) << into.transport;
    EXPECT_THAT(into.transport.message(), HasSubstr("want at most 100"));
    EXPECT_EQ(into.status, 200);
    EXPECT_LE(into.into_bytes, 100);
    EXPECT_TRUE(landing.GuardsAreWhole());

    const HttpResponse body =
        Transport()->Send({.method = "GET", .url = server.url() + "/k", .max_body_bytes = 100});
    EXPECT_EQ(body.transport.code(), absl::StatusCode::kResourceExhausted) << body.transport;
    EXPECT_LE(body.body.size(), 100U);
  }
}

TEST(CurlTransport, AWholeObjectForARangeDoesNotPassForTheRange) {
  const LoopbackServer server({.bytes = WholeAnswer(200, Pattern(1000))});
  Landing landing(10);
  const HttpResponse response = Transport()->Send({.method = "GET",
                                                   .url = server.url() + "/k",
                                                   .headers = {{"range", "bytes=990-999"}},
                                                   .into = landing.span()});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.into_bytes, 0);
}

TEST(CurlTransport, HeadersAreBounded) {
  std::string bytes = "HTTP/1.1 200 OK\r\n";
  for (int i = 0; i < 400; ++i)
    absl::StrAppend(&bytes, "x-", i, ": ", std::string(1000, 'x'), "\r\n");
  const LoopbackServer server({.bytes = bytes + "\r\n", .then = Then::kClose});
  const HttpResponse response = Transport()->Send({.method = "GET", .url = server.url() + "/k"});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kResourceExhausted) << response.transport;
}

TEST(CurlTransport, WholeAnswersInTheirForms) {
  const struct {
    std::string name;
    std::string method;
    std::string bytes;
    Then then;
    int status;
    std::string body;
  } kCases[] = {
      {"chunked", "GET",
       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n",
       Then::kKeep, 200, "0123456789"},
      {"until the end", "GET", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n0123", Then::kClose,
       200, "0123"},
      {"HEAD", "HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 5000000000\r\n\r\n", Then::kKeep, 200,
       ""},
      {"HEAD 404", "HEAD", "HTTP/1.1 404 Not Found\r\nContent-Length: 300\r\n\r\n", Then::kKeep,
       404, ""},
      {"no content", "DELETE", "HTTP/1.1 204 No Content\r\n\r\n", Then::kKeep, 204, ""},
      {"interim answers", "PUT",
       "HTTP/1.1 100 Continue\r\nETag: no\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 "
       "OK\r\nETag: yes\r\nContent-Length: 2\r\n\r\nok",
       Then::kKeep, 200, "ok"},
      {"not followed", "GET",
       "HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 2\r\n\r\nno",
       Then::kKeep, 307, "no"},
      {"not decoded", "GET",
       "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nraw!", Then::kKeep,
       200, "raw!"},
  };
  for (const auto& c : kCases) {
    const LoopbackServer server({.bytes = c.bytes, .then = c.then});
    const HttpResponse response =
        Transport()->Send({.method = c.method, .url = server.url() + "/k"});
    ASSERT_TRUE(response.transport.ok()) << c.name << response.transport;
    EXPECT_EQ(response.status, c.status) << c.name;
    EXPECT_EQ(response.body, c.body) << c.name;
    EXPECT_EQ(server.requests().size(), 1U) << c.name;
    const std::string* const etag = response.Header("etag");
    if (etag != nullptr) {
      EXPECT_EQ(*etag, "yes") << c.name;
    }
  }
}

TEST(CurlTransport, LargeUploadsArriveWhole) {
  const LoopbackServer server({.bytes = WholeAnswer(200, "")});
  const std::string body = Pattern(kLargeBytes);
  const HttpResponse response =
      Transport()->Send({.method = "PUT", .url = server.url() + "/k", .body = AsBytes(body)});
  ASSERT_TRUE(response.transport.ok()) << response.transport;
  EXPECT_TRUE(server.requests().front().body == body);
}

TEST(CurlTransport, LargeDownloadsArriveWhole) {
  const std::string body = Pattern(kLargeBytes);
  const LoopbackServer server({.bytes = WholeAnswer(200, body)});
  Landing landing(kLargeBytes);
  std::vector<int64_t> told;
  const auto arrived = [&](int64_t bytes) {
    const int64_t before = told.empty() ? 0 : told.back();
    EXPECT_GT(bytes, before);
    EXPECT_TRUE(std::equal(body.begin() + before, body.begin() + bytes,
                           landing.span().begin() + before,
                           [](char a, uint8_t b) { return uint8_t(a) == b; }));
    told.push_back(bytes);
  };
  const HttpResponse response = Transport()->Send(
      {.method = "GET", .url = server.url() + "/k", .into = landing.span(), .arrived = arrived});
  ASSERT_TRUE(response.transport.ok()) << response.transport;
  EXPECT_EQ(response.into_bytes, static_cast<int64_t>(kLargeBytes));
  EXPECT_GT(told.size(), 1U);
  EXPECT_EQ(told.back(), response.into_bytes);
  EXPECT_TRUE(landing.Text(response.into_bytes) == body);
  EXPECT_TRUE(landing.GuardsAreWhole());
}

TEST(CurlTransport, RequestOnAConnectionThatClosedIsNotSentAgain) {
  std::atomic<int> received{0};
  const LoopbackServer server({.answer = [&received](const ReceivedRequest&) {
    // As a server does that closes an idle connection just when the next request is on its way.
    if (++received == 2) return ScriptedAnswer{.bytes = "", .then = Then::kClose};
    return ScriptedAnswer{.bytes = WholeAnswer(200, "")};
  }});
  const auto transport = Transport();
  const std::string body = Pattern(300'000);
  const HttpRequest put = {.method = "PUT", .url = server.url() + "/k", .body = AsBytes(body)};
  EXPECT_TRUE(transport->Send(put).transport.ok());
  const HttpResponse lost = transport->Send(put);
  EXPECT_EQ(lost.transport.code(), absl::StatusCode::kUnavailable) << lost.transport;
  EXPECT_THAT(lost.transport.message(), HasSubstr("closed the kept connection"));
  EXPECT_EQ(server.requests().size(), 2U);
  EXPECT_TRUE(transport->Send(put).transport.ok());
  const auto requests = server.requests();
  ASSERT_EQ(requests.size(), 3U);
  for (const ReceivedRequest& request : requests) EXPECT_TRUE(request.body == body);
}

TEST(CurlTransport, ErrorThatComesBeforeTheUploadsEndIsSeen) {
  const LoopbackServer server({.answer =
                                   [](const ReceivedRequest&) {
                                     return ScriptedAnswer{
                                         .bytes = WholeAnswer(503, "<Code>SlowDown</Code>"),
                                         .then = Then::kHang};
                                   },
                               .read_bodies = false});
  const std::string body = Pattern(kLargeBytes);
  const HttpResponse response =
      Transport()->Send({.method = "PUT", .url = server.url() + "/k", .body = AsBytes(body)});
  ASSERT_TRUE(response.transport.ok()) << response.transport;
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(response.body, "<Code>SlowDown</Code>");
}

TEST(CurlTransport, RefusedConnectionIsUnavailable) {
  const DeafPort port;
  const HttpResponse response =
      Transport()->Send({.method = "GET", .url = port.url() + "/bucket/key?signature=SECRET"});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(response.status, 0);
  EXPECT_THAT(response.transport.message(), HasSubstr("GET " + port.url() + "/bucket/key: "));
  EXPECT_THAT(response.transport.message(), Not(HasSubstr("SECRET")));
}

// A label of more than 63 bytes is refused by the resolver itself, without a name server.
TEST(CurlTransport, NameThatDoesNotResolveIsUnavailableEachTime) {
  const std::unique_ptr<HttpTransport> transport = MakeCurlTransport(CurlTransportOptions{});
  const std::string url = absl::StrCat("http://", std::string(64, 'x'), ".invalid/k");
  for (int attempt = 1; attempt <= 3; ++attempt) {
    const HttpResponse response = transport->Send({.method = "GET", .url = url});
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable)
        << "attempt " << attempt << ": " << response.transport;
    EXPECT_THAT(response.transport.message(), HasSubstr("resolve"));
  }
}

TEST(CurlTransport, AStopEndsAnExchangeThatHangs) {
  std::atomic<bool> stop{false};
  const LoopbackServer server({.answer =
                                   [&stop](const ReceivedRequest&) {
                                     stop = true;
                                     return ScriptedAnswer{.bytes = "", .then = Then::kHang};
                                   },
                               .read_bodies = true});
  const absl::Time start = absl::Now();
  const HttpResponse response =
      Transport()->Send({.method = "GET", .url = server.url() + "/k", .stop = &stop});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kCancelled) << response.transport;
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));  // of a stall timeout of 20 s
}

TEST(CurlTransport, NothingMovesForTheStallTimeout) {
  const struct {
    std::string name;
    std::string bytes;
    bool read_bodies;
    size_t upload_bytes;
  } kCases[] = {
      {"no answer", "", true, 10},
      {"in the header", "HTTP/1.1 200 OK\r\nETag: x\r\n", true, 10},
      {"in the body", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + Pattern(40), true, 10},
      {"in the upload", "", false, kLargeBytes},
  };
  // At the same time, because each takes a second or two.
  std::vector<std::thread> threads;
  for (const auto& c : kCases) {
    threads.emplace_back([&c] {
      const LoopbackServer server({.answer =
                                       [&c](const ReceivedRequest&) {
                                         return ScriptedAnswer{.bytes = c.bytes,
                                                               .then = Then::kHang};
                                       },
                                   .read_bodies = c.read_bodies});
      const std::string body = Pattern(c.upload_bytes);
      Landing landing(100);
      const HttpResponse response = Transport()->Send({.method = "PUT",
                                                       .url = server.url() + "/k",
                                                       .body = AsBytes(body),
                                                       .into = landing.span(),
                                                       .stall_timeout = absl::Seconds(1)});
      EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable) << c.name;
      EXPECT_THAT(response.transport.message(), HasSubstr("stalled: nothing moved for 1s"))
          << c.name;
      EXPECT_EQ(response.into_bytes, c.name == "in the body" ? 40 : 0) << c.name;
      EXPECT_TRUE(landing.GuardsAreWhole());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CurlTransport, TotalTimeoutEndsAnExchange) {
  const LoopbackServer server({.bytes = "HTTP/1.1 200 OK\r\n", .then = Then::kHang});
  const HttpResponse response = Transport()->Send(
      {.method = "GET", .url = server.url() + "/k", .timeout = absl::Milliseconds(50)});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable) << response.transport;
  EXPECT_THAT(response.transport.message(), HasSubstr("timed out"));
}

TEST(CurlTransport, ConnectTimeoutCoversTheHandshake) {
  // A server that waits for a request and so never takes its part in the handshake.
  const LoopbackServer server({.bytes = ""});
  const std::string url = "https" + server.url().substr(4) + "/k";
  const HttpResponse response =
      Transport()->Send({.method = "GET", .url = url, .connect_timeout = absl::Milliseconds(50)});
  EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable) << response.transport;
  EXPECT_EQ(response.status, 0);
}

TEST(CurlTransport, NothingIsSentWhenTheTimeIsOver) {
  const LoopbackServer server({.bytes = WholeAnswer(200, "")});
  for (const absl::Duration timeout :
       {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
    const HttpResponse response =
        Transport()->Send({.method = "PUT", .url = server.url() + "/k", .timeout = timeout});
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(server.connections(), 0);
}

TEST(CurlTransport, ExchangesAreBoundedAndTheOthersWait) {
  std::atomic<int> now{0};
  std::atomic<int> most{0};
  const LoopbackServer server({.answer = [&](const ReceivedRequest& request) {
    int seen = most;
    const int mine = ++now;
    while (seen < mine && !most.compare_exchange_weak(seen, mine)) {
    }
    --now;
    return ScriptedAnswer{.bytes = WholeAnswer(200, request.target)};
  }});
  const auto transport = MakeCurlTransport(CurlTransportOptions{.max_connections = 2});
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 8; ++i) {
        const std::string target = absl::StrCat("/", t, "/", i);
        const HttpResponse response =
            transport->Send({.method = "GET", .url = server.url() + target});
        EXPECT_EQ(response.body, target) << response.transport;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, 2);
  EXPECT_LE(server.connections(), 2);
  EXPECT_EQ(server.requests().size(), 64U);
}

TEST(CurlTransport, WaitingForAConnectionCountsAsTimeOfTheExchange) {
  LoopbackServer server({.bytes = "", .then = Then::kHang});
  const auto transport = MakeCurlTransport(CurlTransportOptions{.max_connections = 1});
  std::thread first([&] {
    const HttpResponse response = transport->Send({.method = "GET", .url = server.url() + "/1"});
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable) << response.transport;
  });
  server.WaitForRequests(1);
  const HttpResponse second = transport->Send(
      {.method = "GET", .url = server.url() + "/2", .timeout = absl::Milliseconds(20)});
  EXPECT_EQ(second.transport.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.transport.message(), HasSubstr("before it could be sent"));
  EXPECT_EQ(server.requests().size(), 1U);
  server.Stop();
  first.join();
}

TEST(CurlTransport, RequestsThatCouldSmuggleAreRefused) {
  const LoopbackServer server({.bytes = WholeAnswer(200, "")});
  const std::string body = "body";
  const std::string url = server.url() + "/k";
  const HttpRequest kCases[] = {
      {.method = "PATCH", .url = url},
      {.method = "get", .url = url},
      {.method = "GET", .url = url, .body = AsBytes(body)},
      {.method = "GET", .url = "file:///etc/passwd"},
      {.method = "GET", .url = url + " HTTP/1.1\r\nx: y"},
      {.method = "GET", .url = url + "?a=b c"},
      {.method = "GET", .url = url, .headers = {{"x", "a\r\ny: b"}}},
      {.method = "GET", .url = url, .headers = {{"x", std::string("a\0b", 3)}}},
      {.method = "GET", .url = url, .headers = {{"x: y\r\nz", "a"}}},
  };
  for (const HttpRequest& request : kCases) {
    const HttpResponse response = Transport()->Send(request);
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kInvalidArgument)
        << request.url << response.transport;
  }
  EXPECT_EQ(server.connections(), 0);
}

TEST(CurlTransport, ProxiesAreUsedWhenStatedAndOnlyThen) {
  const LoopbackServer proxy({.bytes = WholeAnswer(200, "from the proxy")});
  const LoopbackServer server({.bytes = WholeAnswer(200, "from the server")});
  const DeafPort deaf;

  const auto through = MakeCurlTransport(CurlTransportOptions{.proxy = proxy.url()});
  EXPECT_EQ(through->Send({.method = "GET", .url = "http://s3.invalid/b/k?x=%2F"}).body,
            "from the proxy");
  EXPECT_EQ(proxy.requests().front().target, "http://s3.invalid/b/k?x=%2F");

  const auto around =
      MakeCurlTransport(CurlTransportOptions{.proxy = deaf.url(), .no_proxy = "127.0.0.0/8"});
  EXPECT_EQ(around->Send({.method = "GET", .url = server.url() + "/k"}).body, "from the server");

  for (const char* variable : {"http_proxy", "all_proxy", "ALL_PROXY"}) {
    ASSERT_EQ(::setenv(variable, deaf.url().c_str(), 1), 0);
  }
  EXPECT_EQ(Transport()->Send({.method = "GET", .url = server.url() + "/k"}).body,
            "from the server");
  ASSERT_EQ(::setenv("no_proxy", "*", 1), 0);
  EXPECT_EQ(through->Send({.method = "GET", .url = "http://s3.invalid/b/k"}).body,
            "from the proxy");
  for (const char* variable : {"http_proxy", "all_proxy", "ALL_PROXY", "no_proxy"}) {
    ::unsetenv(variable);
  }
}

// TLS with a certificate that signs itself.
class CurlTransportTls : public ::testing::Test {
 protected:
  CurlTransportTls() {
    std::ofstream(dir_ / "ca.pem") << certificate_.Pem();
    std::ofstream(dir_ / "other.pem") << TestCertificate().Pem();
  }

  HttpResponse Get(const std::string& url, const std::string& ca_bundle) {
    return MakeCurlTransport(CurlTransportOptions{.ca_bundle = ca_bundle})
        ->Send({.method = "GET", .url = url});
  }

  const TempDir dir_;
  const TestCertificate certificate_;
};

TEST_F(CurlTransportTls, AuthoritiesOfTheBundleAndNoOthersAreTrusted) {
  const LoopbackServer server(
      {.answer =
           [](const ReceivedRequest&) { return ScriptedAnswer{.bytes = WholeAnswer(200, "tls")}; },
       .certificate = &certificate_});
  const HttpResponse good = Get(server.url() + "/k", dir_ / "ca.pem");
  ASSERT_TRUE(good.transport.ok()) << good.transport;
  EXPECT_EQ(good.body, "tls");

  const std::string port = server.url().substr(server.url().rfind(':'));
  const struct {
    std::string url;
    std::string ca_bundle;
  } kRefused[] = {
      {server.url(), ""},
      {server.url(), dir_ / "other.pem"},
      {server.url(), dir_ / "missing.pem"},
      {"https://localhost" + port, dir_ / "ca.pem"},  // a name the certificate does not have
  };
  for (const auto& c : kRefused) {
    const HttpResponse response = Get(c.url + "/k", c.ca_bundle);
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kFailedPrecondition)
        << c.ca_bundle << response.transport;
    EXPECT_EQ(response.status, 0);
  }
  EXPECT_EQ(server.requests().size(), 1U);
}

TEST_F(CurlTransportTls, LargeBodiesPassBothWays) {
  const LoopbackServer server({.answer =
                                   [](const ReceivedRequest& request) {
                                     return ScriptedAnswer{.bytes = WholeAnswer(200, request.body)};
                                   },
                               .certificate = &certificate_});
  const auto transport = MakeCurlTransport(CurlTransportOptions{.ca_bundle = dir_ / "ca.pem"});
  const std::string body = Pattern(kLargeBytes);
  for (int i = 0; i < 2; ++i) {
    Landing landing(kLargeBytes);
    const HttpResponse response = transport->Send({.method = "PUT",
                                                   .url = server.url() + "/k",
                                                   .body = AsBytes(body),
                                                   .into = landing.span()});
    ASSERT_TRUE(response.transport.ok()) << response.transport;
    EXPECT_TRUE(landing.Text(response.into_bytes) == body);
  }
  EXPECT_EQ(server.connections(), 1);
}

TEST_F(CurlTransportTls, PeerThatLeavesDuringAnUploadDoesNotEndTheProcess) {
  for (const TestCertificate* certificate :
       {&certificate_, static_cast<const TestCertificate*>(nullptr)}) {
    const LoopbackServer server({.answer =
                                     [](const ReceivedRequest&) {
                                       return ScriptedAnswer{.bytes = "", .then = Then::kClose};
                                     },
                                 .certificate = certificate,
                                 .read_bodies = false});
    const std::string body = Pattern(kLargeBytes);
    const HttpResponse response =
        MakeCurlTransport(CurlTransportOptions{.ca_bundle = dir_ / "ca.pem"})
            ->Send({.method = "PUT", .url = server.url() + "/k", .body = AsBytes(body)});
    EXPECT_EQ(response.transport.code(), absl::StatusCode::kUnavailable) << response.transport;
  }
}

}  // namespace
}  // namespace shardprep
