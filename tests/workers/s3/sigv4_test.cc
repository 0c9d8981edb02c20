#include "workers/s3/sigv4.h"

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/civil_time.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "workers/digest.h"

namespace shardprep {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

absl::Time Utc(int year, int month, int day, int hour, int minute, int second) {
  return absl::FromCivil(absl::CivilSecond(year, month, day, hour, minute, second),
                         absl::UTCTimeZone());
}

std::string ValueOf(const std::vector<HttpHeader>& headers, const std::string& name) {
  std::string value;
  int found = 0;
  for (const HttpHeader& header : headers) {
    if (header.name != name) continue;
    value = header.value;
    ++found;
  }
  EXPECT_LE(found, 1) << name;
  return value;
}

// Amazon S3 API Reference, "Examples: Signature Calculations".
TEST(SigV4, S3ReferenceExamples) {
  const AwsCredentials credentials = {"AKIAIOSFODNN7EXAMPLE",
                                      "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
  const struct {
    std::string method;
    std::string path;
    QueryParameters query;
    std::vector<HttpHeader> headers;
    std::string payload;
    std::string signed_headers;
    std::string signature;
  } kCases[] = {
      {"GET",
       "/test.txt",
       {},
       {{"range", "bytes=0-9"}},
       "",
       "host;range;x-amz-content-sha256;x-amz-date",
       "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
      {"PUT",
       "/test$file.text",
       {},
       {{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
       "Welcome to Amazon S3.",
       "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
       "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"},
      {"GET",
       "/",
       {{"lifecycle", ""}},
       {},
       "",
       "host;x-amz-content-sha256;x-amz-date",
       "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
      {"GET",
       "/",
       {{"prefix", "J"}, {"max-keys", "2"}},
       {},
       "",
       "host;x-amz-content-sha256;x-amz-date",
       "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
  };
  for (const auto& c : kCases) {
    const RequestToSign request = {.method = c.method,
                                   .host = "examplebucket.s3.amazonaws.com",
                                   .escaped_path = UriEscape(c.path, true),
                                   .canonical_query = CanonicalQuery(c.query),
                                   .headers = c.headers,
                                   .payload_sha256 = Sha256Hex(c.payload)};
    const auto headers =
        Sign(request, credentials, {.region = "us-east-1"}, Utc(2013, 5, 24, 0, 0, 0));
    EXPECT_EQ(ValueOf(headers, "authorization"),
              absl::StrCat("AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/"
                           "aws4_request, SignedHeaders=",
                           c.signed_headers, ", Signature=", c.signature))
        << c.path;
    EXPECT_EQ(ValueOf(headers, "host"), "examplebucket.s3.amazonaws.com");
    EXPECT_EQ(ValueOf(headers, "x-amz-date"), "20130524T000000Z");
    EXPECT_EQ(ValueOf(headers, "x-amz-content-sha256"), Sha256Hex(c.payload));
    EXPECT_EQ(headers.size(), 4U);
  }
}

// The aws-sig-v4-test-suite, which signs for a service without S3's own rules and headers.
TEST(SigV4, PublishedTestSuite) {
  const AwsCredentials credentials = {"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
                                      ""};
  const struct {
    std::string name;
    std::string method;
    std::string path;
    QueryParameters query;
    std::vector<HttpHeader> headers;
    std::string payload;
    std::string signature;
  } kCases[] = {
      {"get-vanilla",
       "GET",
       "/",
       {},
       {},
       "",
       "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
      {"get-vanilla-query-order-key-case",
       "GET",
       "/",
       {{"Param2", "value2"}, {"Param1", "value1"}},
       {},
       "",
       "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
      {"get-vanilla-empty-query-key",
       "GET",
       "/",
       {{"Param1", "value1"}},
       {},
       "",
       "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb"},
      {"get-utf8",
       "GET",
       "/\xE1\x88\xB4",
       {},
       {},
       "",
       "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"},
      {"get-vanilla-utf8-query",
       "GET",
       "/",
       {{"\xE1\x88\xB4", "bar"}},
       {},
       "",
       "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"},
      {"get-header-value-trim",
       "GET",
       "/",
       {},
       {{"my-header1", " value1"}, {"my-header2", " \"a   b   c\""}},
       "",
       "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
      {"get-header-key-duplicate",
       "GET",
       "/",
       {},
       {{"my-header1", "value2"}, {"my-header1", "value2"}, {"my-header1", "value1"}},
       "",
       "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea"},
      {"get-header-value-order",
       "GET",
       "/",
       {},
       {{"my-header1", "value4"},
        {"my-header1", "value1"},
        {"my-header1", "value3"},
        {"my-header1", "value2"}},
       "",
       "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01"},
      {"post-vanilla",
       "POST",
       "/",
       {},
       {},
       "",
       "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
      {"post-vanilla-query",
       "POST",
       "/",
       {{"Param1", "value1"}},
       {},
       "",
       "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"},
      {"post-header-key-sort",
       "POST",
       "/",
       {},
       {{"my-header1", "value1"}},
       "",
       "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c"},
      {"post-header-value-case",
       "POST",
       "/",
       {},
       {{"my-header1", "VALUE1"}},
       "",
       "cdbc9802e29d2942e5e10b5bccfdd67c5f22c7c4e8ae67b53629efa58b974b7d"},
      {"post-x-www-form-urlencoded",
       "POST",
       "/",
       {},
       {{"content-type", "application/x-www-form-urlencoded"}},
       "Param1=value1",
       "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"},
  };
  for (const auto& c : kCases) {
    const RequestToSign request = {.method = c.method,
                                   .escaped_path = UriEscape(c.path, true),
                                   .canonical_query = CanonicalQuery(c.query),
                                   .payload_sha256 = Sha256Hex(c.payload)};
    std::vector<HttpHeader> headers = {{"x-amz-date", "20150830T123600Z"},
                                       {"host", "example.amazonaws.com"}};
    headers.insert(headers.end(), c.headers.begin(), c.headers.end());
    const SignatureSteps steps =
        SignExactly(request, headers, credentials, {.region = "us-east-1", .service = "service"},
                    Utc(2015, 8, 30, 12, 36, 0));
    EXPECT_THAT(steps.authorization, EndsWith("Signature=" + c.signature))
        << c.name << "\n"
        << steps.canonical_request << "\n"
        << steps.string_to_sign;
  }
}

TEST(SigV4, StepsOfTheSuitesFirstCase) {
  const RequestToSign request = {
      .method = "GET", .escaped_path = "/", .payload_sha256 = Sha256Hex(std::string())};
  const SignatureSteps steps =
      SignExactly(request, {{"x-amz-date", "20150830T123600Z"}, {"host", "example.amazonaws.com"}},
                  {"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", ""},
                  {.region = "us-east-1", .service = "service"}, Utc(2015, 8, 30, 12, 36, 0));
  EXPECT_EQ(steps.canonical_request,
            "GET\n/\n\nhost:example.amazonaws.com\nx-amz-date:20150830T123600Z\n\nhost;x-amz-date\n"
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(steps.string_to_sign,
            "AWS4-HMAC-SHA256\n20150830T123600Z\n20150830/us-east-1/service/aws4_request\n"
            "bb579772317eb040ac9ed261061d46c1f17a8133879d6129b6e1c25292927e63");
}

TEST(SigV4, SessionTokenIsSentAndSigned) {
  const RequestToSign request = {.method = "PUT",
                                 .host = "store:9000",
                                 .escaped_path = "/bucket/key",
                                 .payload_sha256 = kUnsignedPayload};
  const auto headers = Sign(request, {"id", "secret", "the/token=="}, {.region = "eu-west-1"},
                            Utc(2026, 1, 2, 3, 4, 5));
  EXPECT_EQ(ValueOf(headers, "x-amz-security-token"), "the/token==");
  EXPECT_EQ(ValueOf(headers, "x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
  EXPECT_EQ(ValueOf(headers, "x-amz-date"), "20260102T030405Z");
  EXPECT_THAT(ValueOf(headers, "authorization"),
              HasSubstr("Credential=id/20260102/eu-west-1/s3/aws4_request, SignedHeaders="
                        "host;x-amz-content-sha256;x-amz-date;x-amz-security-token, "));
  for (const HttpHeader& header : headers) {
    EXPECT_EQ(header.value.find("secret"), std::string::npos) << header.name;
  }
}

TEST(SigV4, EveryPartOfARequestIsCovered) {
  const RequestToSign request = {.method = "PUT",
                                 .host = "store",
                                 .escaped_path = "/b/k",
                                 .canonical_query = "partNumber=1&uploadId=u",
                                 .headers = {{"if-none-match", "*"}},
                                 .payload_sha256 = Sha256Hex(std::string("x"))};
  const AwsCredentials credentials = {"id", "secret", "token"};
  const SignatureScope scope = {.region = "r"};
  const absl::Time now = Utc(2026, 1, 2, 3, 4, 5);
  const auto signature = [&](const RequestToSign& r, const AwsCredentials& c,
                             const SignatureScope& s, absl::Time t) {
    const std::string value = ValueOf(Sign(r, c, s, t), "authorization");
    return value.substr(value.find("Signature="));
  };
  std::vector<RequestToSign> changed(6, request);
  changed[0].method = "POST";
  changed[1].host = "store:1";
  changed[2].escaped_path = "/b//k";
  changed[3].canonical_query = "partNumber=2&uploadId=u";
  changed[4].headers[0].value = "\"etag\"";
  changed[5].payload_sha256 = Sha256Hex(std::string("y"));
  std::vector<std::string> signatures = {
      signature(request, credentials, scope, now),
      signature(request, {"id", "other", "token"}, scope, now),
      signature(request, {"id", "secret", "other"}, scope, now),
      signature(request, credentials, {.region = "q"}, now),
      signature(request, credentials, scope, now + absl::Seconds(1))};
  for (const RequestToSign& other : changed) {
    signatures.push_back(signature(other, credentials, scope, now));
  }
  for (size_t i = 0; i < signatures.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(signatures[i], signatures[j]) << i << " " << j;
  }
}

TEST(SigV4, OnlyUnreservedCharactersStayAsTheyAre) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string text(1, static_cast<char>(byte));
    const bool unreserved =
        std::string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
            .find(text) != std::string::npos;
    const std::string want =
        unreserved ? text : absl::StrCat("%", absl::Hex(byte, absl::kZeroPad2));
    EXPECT_EQ(absl::AsciiStrToUpper(UriEscape(text, false)), absl::AsciiStrToUpper(want)) << byte;
  }
  EXPECT_EQ(UriEscape("a+b c=1@x/\xD0\xBC%2F/", true), "a%2Bb%20c%3D1%40x/%D0%BC%252F/");
  EXPECT_EQ(UriEscape("a/b*", false), "a%2Fb%2A");
}

TEST(SigV4, QueriesAreSortedByEscapedBytes) {
  const struct {
    QueryParameters parameters;
    std::string want;
  } kCases[] = {
      {{}, ""},
      {{{"uploads", ""}}, "uploads="},
      {{{"list-type", "2"}, {"continuation-token", "a+b/c=="}, {"prefix", "m/1/"}},
       "continuation-token=a%2Bb%2Fc%3D%3D&list-type=2&prefix=m%2F1%2F"},
      // `[` is above `A` but its escape is below.
      {{{"A", "1"}, {"[", "2"}, {"a", "3"}, {"B", "4"}}, "%5B=2&A=1&B=4&a=3"},
      // `a` and `a-`: names are compared without the `=`, which is above `-`.
      {{{"a-", "1"}, {"a", "2"}, {"a", "1"}}, "a=1&a=2&a-=1"},
  };
  for (const auto& c : kCases) EXPECT_EQ(CanonicalQuery(c.parameters), c.want);
}

}  // namespace
}  // namespace shardprep
