#include "workers/s3/s3_xml.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using testing::HasSubstr;

TEST(S3Xml, ErrorsGiveCodeMessageAndRegionOnly) {
  const auto error = ParseS3Error(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>AuthorizationHeaderMalformed</Code>"
      "<Message>region &apos;us-east-1&apos; is wrong</Message><Region>eu-west-3</Region>"
      "<Endpoint>s3.eu-west-3.example</Endpoint><StringToSign>secret</StringToSign></Error>");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->code, "AuthorizationHeaderMalformed");
  EXPECT_EQ(error->message, "region 'us-east-1' is wrong");
  EXPECT_EQ(error->region, "eu-west-3");
  EXPECT_EQ(error->endpoint, "s3.eu-west-3.example");
}

TEST(S3Xml, WhatIsNoAnswerOfS3IsRefused) {
  const std::string deep(100'000, '<');
  for (const std::string& text :
       {std::string(), std::string("   \n"), std::string("<html><body>Bad gateway</body></html>"),
        std::string("<Error><Code>Slow"), std::string("{\"error\": 1}"), std::string("\0\0", 2),
        deep, std::string("<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>")}) {
    EXPECT_EQ(ParseS3Error(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(ParseListPage(text).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ParseUploadId(text).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ParseCompletedEtag(text).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

std::string Listing(const std::string& inside, const std::string& truncated = "false") {
  return absl::StrCat("<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">",
                      inside, "<IsTruncated>", truncated, "</IsTruncated></ListBucketResult>");
}

std::string Contents(const std::string& key, const std::string& size) {
  return absl::StrCat("<Contents><Key>", key, "</Key><ETag>&quot;e1&quot;</ETag><Size>", size,
                      "</Size></Contents>");
}

TEST(S3Xml, ListedKeysAreDecodedWhenTheServerSaysThatTheyAreEncoded) {
  struct Case {
    std::string encoding;
    std::string key;
    std::string want;
  };
  const Case kCases[] = {
      {"<EncodingType>url</EncodingType>", "a%2Bb+c%3d1/%D0%BC%252F", "a+b c=1/\xd0\xbc%2F"},
      {"<EncodingType>url</EncodingType>", "new%0Aline", "new\nline"},
      {"", "a%2Bb+c", "a%2Bb+c"},
      {"", "a&amp;b&lt;", "a&b<"},
  };
  for (const Case& c : kCases) {
    const auto page = ParseListPage(Listing(c.encoding + Contents(c.key, "12")));
    ASSERT_TRUE(page.ok()) << page.status();
    ASSERT_EQ(page->entries.size(), 1u);
    EXPECT_EQ(page->entries[0].key, c.want);
    EXPECT_EQ(page->entries[0].info.size_bytes, 12);
    EXPECT_EQ(page->entries[0].info.etag, "e1");
    EXPECT_EQ(page->next_token, "");
  }
}

TEST(S3Xml, AnEmptyListingIsAPageWithoutKeys) {
  const auto page = ParseListPage(Listing(""));
  ASSERT_TRUE(page.ok());
  EXPECT_TRUE(page->entries.empty());
}

TEST(S3Xml, ListingsThatAreDamagedAreRefused) {
  const std::string encoded = "<EncodingType>url</EncodingType>";
  const std::string kTexts[] = {
      Listing(Contents("a", "-1")),
      Listing(Contents("a", "")),
      Listing(Contents("a", "99999999999999999999")),
      Listing(Contents("", "1")),
      Listing(encoded + Contents("a%2", "1")),
      Listing(encoded + Contents("a%zz", "1")),
      Listing(Contents("a", "1"), "true"),
      Listing(Contents("a", "1"), ""),
  };
  for (const std::string& text : kTexts) {
    EXPECT_EQ(ParseListPage(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  const auto page = ParseListPage(
      Listing("<NextContinuationToken>a+/=</NextContinuationToken>" + Contents("a", "1"), "true"));
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->next_token, "a+/=");
}

TEST(S3Xml, CompletionNamesEveryPartInOrder) {
  const std::vector<UploadedPart> parts = {{1, "abc"}, {2, "d&f"}};
  EXPECT_THAT(FormatCompleteUpload(parts),
              HasSubstr("<Part><PartNumber>1</PartNumber><ETag>\"abc\"</ETag></Part>"
                        "<Part><PartNumber>2</PartNumber><ETag>\"d&amp;f\"</ETag></Part>"));
}

TEST(S3Xml, UploadIdsAndEtagsAreTakenFromTheirDocuments) {
  EXPECT_EQ(ParseUploadId("<InitiateMultipartUploadResult><UploadId>a+/=</UploadId>"
                          "</InitiateMultipartUploadResult>")
                .value_or("?"),
            "a+/=");
  EXPECT_EQ(ParseUploadId("<InitiateMultipartUploadResult/>").status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string before = "<CompleteMultipartUploadResult><ETag>";
  const std::string after = "</ETag></CompleteMultipartUploadResult>";
  EXPECT_EQ(ParseCompletedEtag("\n \n" + before + "&quot;ab-2&quot;" + after).value_or("?"),
            "ab-2");
  EXPECT_EQ(ParseCompletedEtag(before + after).value_or("?"), "");
  EXPECT_FALSE(ParseCompletedEtag("<Error><Code>InternalError</Code></Error>").ok());
}

TEST(S3Xml, EtagsAreOpaqueOnceUnquoted) {
  EXPECT_EQ(UnquoteEtag("\"abc-2\""), "abc-2");
  EXPECT_EQ(UnquoteEtag("W/\"abc\""), "abc");
  EXPECT_EQ(UnquoteEtag("abc"), "abc");
  EXPECT_EQ(UnquoteEtag("\""), "\"");
  EXPECT_EQ(UnquoteEtag(""), "");
}

}  // namespace
}  // namespace shardprep
