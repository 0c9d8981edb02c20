// The XML of the S3 API: what servers answer and the one document that a client sends. Pure.
//
// Answers are untrusted: whatever they hold, a parser here returns an error and never throws. Keys
// come back as the bytes that they are: listings are asked for with encoding-type=url, because XML
// 1.0 cannot carry every character of a key.
//
// Source: "Actions", Amazon S3 API Reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "workers/object_store.h"

namespace shardprep {

// The <Error> document. Only these fields are ever taken from it: others repeat what was signed.
struct S3Error {
  std::string code;      // "NoSuchKey"
  std::string message;   // for people; untrusted text
  std::string region;    // where the bucket is, when the error is about that
  std::string endpoint;  // host to use instead, alike
};

// INVALID_ARGUMENT when `text` is no XML with <Error> as its root: a proxy's page, or nothing.
absl::StatusOr<S3Error> ParseS3Error(const std::string& text);

// One page of ListObjectsV2. Keys are whole, from the bucket's root on.
struct S3ListPage {
  std::vector<ObjectEntry> entries;
  std::string next_token;  // empty on the last page
};

// INVALID_ARGUMENT for anything but a whole <ListBucketResult>, for a size that is no number, a key
// that does not decode, or a page that says that it was cut but not how to go on.
absl::StatusOr<S3ListPage> ParseListPage(const std::string& text);

// The upload id of an <InitiateMultipartUploadResult>. INVALID_ARGUMENT when there is none.
absl::StatusOr<std::string> ParseUploadId(const std::string& text);

// The ETag, without quotes, of a <CompleteMultipartUploadResult>; empty where the server leaves it
// out (radosgw 16 on memstore does). INVALID_ARGUMENT for any other document; ask ParseS3Error()
// first, because Complete answers 200 before it knows whether it will succeed.
absl::StatusOr<std::string> ParseCompletedEtag(const std::string& text);

// A part that was uploaded.
struct UploadedPart {
  int64_t number = 0;  // from 1
  std::string etag;    // without quotes
};

// The <CompleteMultipartUpload> document that names all parts in order.
std::string FormatCompleteUpload(absl::Span<const UploadedPart> parts);

// An ETag as HTTP carries it, quoted and perhaps marked weak, as the opaque version it is.
std::string UnquoteEtag(const std::string& value);

}  // namespace shardprep
