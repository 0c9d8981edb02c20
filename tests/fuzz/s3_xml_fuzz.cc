// What an S3 server answers. Input: the document, which every parser is given.
#include <string>
#include <vector>

#include <pugixml.hpp>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/s3/s3_xml.h"

namespace shardprep {
namespace {

// Every byte as the client asks servers to write it.
std::string UrlEncoded(const std::string& text) {
  std::string encoded;
  for (const char c : text)
    absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
  return encoded;
}

// As numbers, since XML knows few characters; white space alone would not be kept.
bool CanStandInXml(const std::string& text) {
  if (text.empty() || text.front() <= ' ' || text.back() <= ' ') return text.empty();
  for (const char c : text) {
    if (c < ' ' || c > '~') return false;
  }
  return true;
}

std::string XmlEscaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) absl::StrAppendFormat(&escaped, "&#%d;", static_cast<int>(c));
  return escaped;
}

// A page printed and read is the same page.
void CheckPage(const S3ListPage& page) {
  std::string text = "<ListBucketResult><EncodingType>url</EncodingType>";
  for (const ObjectEntry& entry : page.entries) {
    FUZZ_REQUIRE(!entry.key.empty() && entry.info.size_bytes >= 0, entry.key);
    if (!CanStandInXml(entry.info.etag)) return;
    absl::StrAppend(&text, "<Contents><Key>", UrlEncoded(entry.key), "</Key><Size>",
                    entry.info.size_bytes, "</Size><ETag>&quot;", XmlEscaped(entry.info.etag),
                    "&quot;</ETag></Contents>");
  }
  if (!CanStandInXml(page.next_token)) return;
  const bool is_last = page.next_token.empty();
  absl::StrAppend(&text, "<IsTruncated>", is_last ? "false" : "true", "</IsTruncated>",
                  "<NextContinuationToken>", XmlEscaped(page.next_token),
                  "</NextContinuationToken></ListBucketResult>");
  const auto again = ParseListPage(text);
  FUZZ_REQUIRE(again.ok(), again.status().ToString());
  FUZZ_REQUIRE(again->next_token == page.next_token, text);
  FUZZ_REQUIRE(again->entries.size() == page.entries.size(), text);
  for (size_t i = 0; i < page.entries.size(); ++i) {
    FUZZ_REQUIRE(again->entries[i].key == page.entries[i].key, text);
    FUZZ_REQUIRE(again->entries[i].info.size_bytes == page.entries[i].info.size_bytes, text);
    FUZZ_REQUIRE(again->entries[i].info.etag == page.entries[i].info.etag, text);
  }
}

// The document that we send holds each ETag as it is, whatever a server chose for one.
void CheckCompletion(const std::string& etag) {
  if (!CanStandInXml(etag)) return;
  const std::vector<UploadedPart> parts = {{1, etag}, {2, "other"}};
  const std::string text = FormatCompleteUpload(parts);
  pugi::xml_document document;
  FUZZ_REQUIRE(document.load_buffer(text.data(), text.size()), text);
  const pugi::xml_node first = document.child("CompleteMultipartUpload").child("Part");
  FUZZ_REQUIRE(first.child("ETag").text().get() == absl::StrCat("\"", etag, "\""), text);
  FUZZ_REQUIRE(first.child("PartNumber").text().as_int() == 1, text);
}

template <typename T>
void RequireRefused(const absl::StatusOr<T>& parsed) {
  FUZZ_REQUIRE(parsed.ok() || absl::IsInvalidArgument(parsed.status()), parsed.status().ToString());
}

}  // namespace

void FuzzOne(const std::string& input) {
  RequireRefused(ParseS3Error(input));
  const auto page = ParseListPage(input);
  RequireRefused(page);
  if (page.ok()) CheckPage(*page);
  const auto id = ParseUploadId(input);
  RequireRefused(id);
  FUZZ_REQUIRE(!id.ok() || !id->empty(), input);
  const auto etag = ParseCompletedEtag(input);
  RequireRefused(etag);
  if (etag.ok()) CheckCompletion(*etag);
  const std::string unquoted = UnquoteEtag(input);
  FUZZ_REQUIRE(UnquoteEtag(absl::StrCat("\"", unquoted, "\"")) == unquoted, input);
}

}  // namespace shardprep
