// From a URI to an object store.
//
//   /data/model, file:///data/model    a directory (workers/directory_store.h)
//   s3://bucket/prefix                 objects below a prefix of a bucket
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "workers/object_store.h"

namespace shardprep {

class S3Connection;

struct OpenStoreOptions {
  // A root that is missing is made by the first write, and reads find nothing until then. Without
  // it a missing root is NOT_FOUND.
  bool create = false;
  // Absolute directories that symbolic links of a directory store may lead into, besides its root.
  std::vector<std::string> allowed_roots;
  // How s3:// is reached (workers/s3/s3_store.h); without it such URIs are FAILED_PRECONDITION.
  std::shared_ptr<S3Connection> s3;
  // Once true, requests in flight, and pauses between them, end as CANCELLED within about a second;
  // those that clean up go on. Must outlive the store; may be null. Directories do not look at it.
  const std::atomic<bool>* stop = nullptr;
};

// Whether a URI needs OpenStoreOptions::s3.
bool IsS3Uri(const std::string& uri);

// The one spelling of a URI: a directory is its absolute path, without `file://`, without empty or
// `.` segments and without a trailing slash; S3 is `s3://bucket` or `s3://bucket/prefix`. Equal
// results mean the same place; symbolic links are not looked at, nothing is touched.
//
// A relative path is taken from `base_directory`, the caller's physical working directory, and may
// start with `..` segments; `..` anywhere else is refused, because it means one thing to the text
// and another to the file system once a link is involved. `%` escapes are decoded in `file://` URIs
// only. INVALID_ARGUMENT, naming the URI, for everything malformed, for an unknown scheme, for a
// host in a `file://` URI and for a relative path with no base directory.
absl::StatusOr<std::string> NormalizeUri(const std::string& uri,
                                         const std::string& base_directory = "");

// Whether normalised `inner` is normalised `outer` or lies below it: by whole segments, so
// /data/m10 is not inside /data/m1.
bool IsSameOrInside(const std::string& inner, const std::string& outer);

// Opens the store at `uri`, which NormalizeUri() must accept without a base directory. Writes
// nothing. INVALID_ARGUMENT as NormalizeUri(); NOT_FOUND for a missing root; FAILED_PRECONDITION
// when the root is not a directory or may not be read, or s3:// was not set up. Of S3 nothing is
// asked yet: a missing bucket is found by the first call.
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(const std::string& uri,
                                                       const OpenStoreOptions& options);

}  // namespace shardprep
