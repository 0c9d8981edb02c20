#include "workers/s3/s3_xml.h"

#include <pugixml.hpp>

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// pugixml expands no entities but the five predefined ones and numbers, and loads nothing: a
// hostile document costs no more than its size.
absl::StatusOr<pugi::xml_node> LoadRoot(const std::string& text, const char* root,
                                        pugi::xml_document* document) {
  const pugi::xml_parse_result parsed =
      document->load_buffer(text.data(), text.size(), pugi::parse_default, pugi::encoding_utf8);
  if (!parsed) {
    return absl::InvalidArgumentError(absl::StrCat("no XML: ", parsed.description(), " at byte ",
                                                   parsed.offset, " of ", text.size()));
  }
  const pugi::xml_node node = document->child(root);
  if (!node) {
    return absl::InvalidArgumentError(absl::StrCat(
        "XML of another kind: <", document->document_element().name(), ">, want <", root, ">"));
  }
  return node;
}

std::string Text(const pugi::xml_node& node, const char* child) { return node.child_value(child); }

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Undoes encoding-type=url. Amazon writes a space as `+` there and a plus as %2B.
std::optional<std::string> DecodeKey(absl::string_view text) {
  std::string key;
  key.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+') {
      key.push_back(' ');
    } else if (text[i] != '%') {
      key.push_back(text[i]);
    } else {
      if (text.size() - i < 3) return std::nullopt;
      const int high = HexValue(text[i + 1]);
      const int low = HexValue(text[i + 2]);
      if (high < 0 || low < 0) return std::nullopt;
      key.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    }
  }
  return key;
}

absl::StatusOr<ObjectEntry> ParseEntry(const pugi::xml_node& contents, bool encoded) {
  const std::string text = Text(contents, "Key");
  const std::optional<std::string> key = encoded ? DecodeKey(text) : text;
  if (!key || key->empty()) {
    return absl::InvalidArgumentError(absl::StrCat("listing: bad key \"", text, "\""));
  }
  ObjectEntry entry;
  entry.key = *key;
  const std::string size = Text(contents, "Size");
  if (!absl::SimpleAtoi(size, &entry.info.size_bytes) || entry.info.size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("listing: ", *key, ": size \"", size, "\""));
  }
  entry.info.etag = UnquoteEtag(Text(contents, "ETag"));
  return entry;
}

}  // namespace

absl::StatusOr<S3Error> ParseS3Error(const std::string& text) {
  pugi::xml_document document;
  SP_ASSIGN_OR_RETURN(const pugi::xml_node root, LoadRoot(text, "Error", &document));
  S3Error error;
  error.code = Text(root, "Code");
  error.message = Text(root, "Message");
  error.region = Text(root, "Region");
  error.endpoint = Text(root, "Endpoint");
  return error;
}

absl::StatusOr<S3ListPage> ParseListPage(const std::string& text) {
  pugi::xml_document document;
  SP_ASSIGN_OR_RETURN(const pugi::xml_node root, LoadRoot(text, "ListBucketResult", &document));
  // A server that does not know the parameter says nothing and sends keys as they are.
  const bool encoded = Text(root, "EncodingType") == "url";
  S3ListPage page;
  for (const pugi::xml_node& contents : root.children("Contents")) {
    SP_ASSIGN_OR_RETURN(ObjectEntry entry, ParseEntry(contents, encoded));
    page.entries.push_back(std::move(entry));
  }
  const std::string truncated = Text(root, "IsTruncated");
  if (truncated == "true") page.next_token = Text(root, "NextContinuationToken");
  if (truncated != "false" && page.next_token.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("listing: IsTruncated \"", truncated, "\" without NextContinuationToken"));
  }
  return page;
}

absl::StatusOr<std::string> ParseUploadId(const std::string& text) {
  pugi::xml_document document;
  SP_ASSIGN_OR_RETURN(const pugi::xml_node root,
                      LoadRoot(text, "InitiateMultipartUploadResult", &document));
  std::string id = Text(root, "UploadId");
  if (id.empty()) return absl::InvalidArgumentError("no UploadId");
  return id;
}

absl::StatusOr<std::string> ParseCompletedEtag(const std::string& text) {
  pugi::xml_document document;
  SP_ASSIGN_OR_RETURN(const pugi::xml_node root,
                      LoadRoot(text, "CompleteMultipartUploadResult", &document));
  return UnquoteEtag(Text(root, "ETag"));
}

std::string FormatCompleteUpload(absl::Span<const UploadedPart> parts) {
  pugi::xml_document document;
  pugi::xml_node root = document.append_child("CompleteMultipartUpload");
  root.append_attribute("xmlns") = "http://s3.amazonaws.com/doc/2006-03-01/";
  for (const UploadedPart& part : parts) {
    pugi::xml_node node = root.append_child("Part");
    node.append_child("PartNumber").text().set(static_cast<unsigned>(part.number));
    node.append_child("ETag").text().set(absl::StrCat("\"", part.etag, "\"").c_str());
  }
  struct : pugi::xml_writer {
    void write(const void* data, size_t size) override {
      text.append(static_cast<const char*>(data), size);
    }
    std::string text;
  } writer;
  document.save(writer, "", pugi::format_raw, pugi::encoding_utf8);
  return std::move(writer.text);
}

std::string UnquoteEtag(const std::string& value) {
  absl::string_view text = value;
  absl::ConsumePrefix(&text, "W/");
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text.remove_prefix(1);
    text.remove_suffix(1);
  }
  return std::string(text);
}

}  // namespace shardprep
