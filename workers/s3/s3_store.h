// An S3 bucket, or what lies below a prefix of it, as an object store. How objects become visible,
// how unfinished uploads are found again and what each guarantee rests on is explained at the top
// of s3_store.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "workers/object_store.h"
#include "workers/s3/s3_client.h"

namespace shardprep {

// `s3://bucket` or `s3://bucket/prefix`, as NormalizeUri() gives it. Asks for nothing yet: a
// missing bucket, a wrong region, key or clock is found by the first call, whose status says so.
// INVALID_ARGUMENT for another URI. Codes of the store's calls: those of S3Connection::Exchange().
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenS3Store(const std::string& normalised_uri,
                                                         std::shared_ptr<S3Connection> connection,
                                                         const std::atomic<bool>* stop = nullptr);

// Bytes of each upload part but the last of an object of `object_bytes`: `wanted_bytes`, or the
// least that the store takes, or what keeps the object within the largest number of parts, rounded
// up to 1 MiB. INVALID_ARGUMENT when no size does.
absl::StatusOr<int64_t> UploadPartBytes(int64_t object_bytes, int64_t wanted_bytes,
                                        const S3Limits& limits);

// The ETag that a store gives to an object of these parts when it follows Amazon's scheme: the MD5
// of the parts' MD5s, `-`, and the number of parts. Empty when some part's ETag is no MD5. Only
// ever compared with what a store says; bytes are never checked against it.
std::string CompositeEtag(absl::Span<const UploadedPart> parts);

}  // namespace shardprep
