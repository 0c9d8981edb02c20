// Objects become visible by one request: a PUT, or the Complete of a multipart upload. S3 makes
// neither visible before it is whole, so nothing needs a temporary name.
//
// A streamed object (Create) of more than one part:
//   1. CreateMultipartUpload, when the first part is full.
//   2. A record of it, `_shardprep/tmp/<SHA-256 of the upload id>`, holding {"key", "upload_id"}.
//   3. UploadPart for each part, while the next is being filled in another area of the buffer. When
//      that is full before an area is free again, it leaves as well, and the producer waits: so
//      WriteOptions::writes_at_once are under way as long as there is work, and one more at most.
//      Parts have one size, the last excepted: Cloudflare R2 refuses others. What a producer wrote
//      beyond the part's end moves to the start of the next area.
//   4. The gate is asked; CompleteMultipartUpload. Its 200 may carry an <Error>. If its answer was
//      lost, the repetition finds no such upload, and the object's size and ETag tell whether it is
//      ours.
//   5. The record is deleted.
//   6. At the same time HEAD: the store must hold as many bytes as were written, whatever it has
//      answered. Some stores show a new object only after a moment (404).
//   Given up before 4: AbortMultipartUpload, then 5. If that fails the record stays.
//   An object of one part is put together in memory, and 4 is a PUT.
//
// Cleaning up. Parts of an upload that was neither completed nor aborted are invisible and paid
// for. Whoever cleans `_shardprep/tmp/` deletes the records there, and Delete() of a record first
// aborts the upload that it names: exactly that one, never all of a prefix, so nobody else's upload
// is hit, even when the whole process that began it was killed. The producer of an upload aborted
// in this way gets ABORTED from its next part: the clean-up of a successor fences its predecessor.
// A crash between 1 and 2 leaves an upload that holds no bytes and no record; so may a lost answer
// to 1. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) removes those.
//
// Write if absent. A PUT with `If-None-Match: *` is atomic where the store honours it, which is
// found out once per bucket: a probe object is put twice, and the second must be refused (412).
// Where it is not honoured: HEAD, PUT, then GET and compare; writers of this process take turns,
// those of others are only found out if they come in between. That is logged as a warning. If the
// answer to a conditional PUT was lost, the repetition is refused because of its own first attempt;
// equal bytes in the store prove that.
//
// Reading is pinned to the ETag of Open(): every ranged GET carries If-Match, and ETag, range and
// total size of each answer are checked. A body that ends early is taken up where it ended.
#include "workers/s3/s3_store.h"

#include <openssl/evp.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/status_macros.h"
#include "nlohmann/json.hpp"
#include "workers/digest.h"
#include "workers/log.h"
#include "workers/object_names.h"

namespace shardprep {
namespace {

constexpr char kScheme[] = "s3://";
constexpr int64_t kMiB = int64_t{1} << 20;
// A page holds up to 1000 keys of 1024 bytes, each of which may be escaped to three.
constexpr int64_t kMaxListBytes = 16 * kMiB;
constexpr int64_t kMaxRecordBytes = int64_t{64} << 10;
// Each read is a request with a latency of its own; beyond some MiB it does not matter any more.
constexpr int64_t kPreferredReadBytes = 8 * kMiB;
// Larger reads are split: one TCP stream seldom fills a link.
constexpr int64_t kSplitReadBytes = 16 * kMiB;
constexpr int64_t kMaxSplit = 4;
// How often the HEAD after an upload is asked again for an object that is not there yet: 3 s with
// the default pauses.
constexpr int kVisibilityPauses = 5;

absl::Span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string EtagOf(const HttpResponse& response) {
  const std::string* etag = response.Header("etag");
  return etag == nullptr ? "" : UnquoteEtag(*etag);
}

std::string Quoted(const std::string& etag) { return absl::StrCat("\"", etag, "\""); }

// Every object of S3 has an ETag; an answer without one came from something else.
absl::Status CheckEtag(const HttpResponse& response) {
  if (!EtagOf(response).empty()) return absl::OkStatus();
  return absl::FailedPreconditionError("the answer has no ETag: it does not come from an S3 store");
}

// A bucket or what lies below a prefix of it, and the requests that stores, readers and writers
// make there. Keys are relative to the prefix.
class Site {
 public:
  Site(std::string uri, std::string bucket, std::string prefix,
       std::shared_ptr<S3Connection> connection, const std::atomic<bool>* stop)
      : uri_(std::move(uri)),
        bucket_(std::move(bucket)),
        prefix_(std::move(prefix)),
        connection_(std::move(connection)),
        stop_(stop) {}

  const std::string& uri() const { return uri_; }
  const std::string& bucket() const { return bucket_; }
  const std::string& prefix() const { return prefix_; }
  S3Connection& connection() const { return *connection_; }
  std::string NameOf(const std::string& key) const { return absl::StrCat(uri_, "/", key); }

  // ValidateObjectKey(), and S3's own bound on the whole key.
  absl::Status CheckKey(const std::string& key) const;

  S3Call CallOf(const char* operation, const char* method, const std::string& key) const;
  // Cleaning up goes on when everything else is to stop.
  S3Call CleanUpCallOf(const char* operation, const std::string& key) const {
    S3Call call = CallOf(operation, "DELETE", key);
    call.stop = nullptr;
    return call;
  }

  absl::StatusOr<ObjectInfo> Head(const std::string& key) const;

  struct Whole {
    std::string bytes;
    ObjectInfo info;
  };
  absl::StatusOr<Whole> Get(const std::string& key, int64_t max_bytes) const;

  // `condition` is a header of its own, such as if-none-match. The answer's ETag may be empty.
  S3Answer Put(const std::string& key, absl::Span<const uint8_t> bytes, const CommitGate& gate,
               const std::vector<HttpHeader>& condition) const;
  absl::Status Delete(const std::string& key) const;

  // OK when there is no such upload (any more).
  absl::Status Abort(const std::string& key, const std::string& upload_id) const;

 private:
  const std::string uri_;
  const std::string bucket_;
  const std::string prefix_;  // empty or ends in `/`
  const std::shared_ptr<S3Connection> connection_;
  const std::atomic<bool>* const stop_;
};

absl::Status Site::CheckKey(const std::string& key) const {
  SP_RETURN_IF_ERROR(ValidateObjectKey(key));
  const auto size = static_cast<int64_t>(prefix_.size() + key.size());
  if (size <= kMaxKeyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      NameOf(key), ": the key has ", size, " bytes with its prefix, want at most ", kMaxKeyBytes));
}

S3Call Site::CallOf(const char* operation, const char* method, const std::string& key) const {
  S3Call call;
  call.operation = operation;
  call.method = method;
  call.bucket = bucket_;
  call.key = absl::StrCat(prefix_, key);
  call.stop = stop_;
  return call;
}

absl::StatusOr<ObjectInfo> Site::Head(const std::string& key) const {
  S3Call call = CallOf("HeadObject", "HEAD", key);
  call.accept = [](const HttpResponse& response, S3Call*) { return CheckEtag(response); };
  const S3Answer answer = connection_->Exchange(std::move(call));
  SP_RETURN_IF_ERROR(answer.status);
  ObjectInfo info;
  info.etag = EtagOf(answer.response);
  const std::string* length = answer.response.Header("content-length");
  if (length == nullptr || !absl::SimpleAtoi(*length, &info.size_bytes) || info.size_bytes < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(NameOf(key), ": HEAD answered content-length \"",
                     length == nullptr ? "" : *length, "\", want a size"));
  }
  return info;
}

absl::StatusOr<Site::Whole> Site::Get(const std::string& key, int64_t max_bytes) const {
  S3Call call = CallOf("GetObject", "GET", key);
  call.max_body_bytes = max_bytes;
  call.accept = [](const HttpResponse& response, S3Call*) {
    if (response.status == 200) return CheckEtag(response);
    return absl::FailedPreconditionError(
        absl::StrCat("HTTP ", response.status, " for a whole object, want 200"));
  };
  S3Answer answer = connection_->Exchange(std::move(call));
  const auto size = static_cast<int64_t>(answer.response.body.size());
  const bool too_long = absl::IsResourceExhausted(answer.response.transport);
  if (answer.response.status == 200 && (too_long || (answer.status.ok() && size > max_bytes))) {
    const std::string* length = answer.response.Header("content-length");
    return absl::ResourceExhaustedError(absl::StrCat(
        NameOf(key), ": ", length == nullptr ? absl::StrCat("over ", max_bytes) : *length,
        " bytes, want at most ", max_bytes));
  }
  SP_RETURN_IF_ERROR(answer.status);
  Whole whole;
  whole.info.size_bytes = size;
  whole.info.etag = EtagOf(answer.response);
  whole.bytes = std::move(answer.response.body);
  return whole;
}

S3Answer Site::Put(const std::string& key, absl::Span<const uint8_t> bytes, const CommitGate& gate,
                   const std::vector<HttpHeader>& condition) const {
  S3Call call = CallOf("PutObject", "PUT", key);
  call.headers = condition;
  call.headers.push_back({"content-type", "application/octet-stream"});
  call.body = bytes;
  call.gate = gate;
  call.timeout = connection_->environment().publish_timeout;
  return connection_->Exchange(std::move(call));
}

absl::Status Site::Delete(const std::string& key) const {
  const S3Answer answer = connection_->Exchange(CleanUpCallOf("DeleteObject", key));
  // Amazon answers 204 for what was never there, others 404.
  if (answer.response.status == 404 && answer.error.code != "NoSuchBucket") return absl::OkStatus();
  return answer.status;
}

absl::Status Site::Abort(const std::string& key, const std::string& upload_id) const {
  S3Call call = CleanUpCallOf("AbortMultipartUpload", key);
  call.query = {{"uploadId", upload_id}};
  const S3Answer answer = connection_->Exchange(std::move(call));
  if (answer.response.status == 404 && answer.error.code != "NoSuchBucket") return absl::OkStatus();
  return answer.status;
}

// What an upload is found by after its process was killed.
struct UploadRecord {
  std::string key;
  std::string upload_id;
};

std::string RecordKey(const std::string& upload_id) {
  return ObjectKey(TemporaryFile{Sha256Hex(upload_id)});
}

absl::StatusOr<std::string> FormatRecord(const UploadRecord& record) {
  try {
    return nlohmann::json{{"key", record.key}, {"upload_id", record.upload_id}}.dump();
  } catch (const nlohmann::json::exception&) {
    return absl::InvalidArgumentError(
        absl::StrCat(record.key, ": the key is not UTF-8, which S3 keys must be"));
  }
}

// Nothing for whatever a writer here would not have put under that key.
std::optional<UploadRecord> ParseRecord(const std::string& record_key, const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const auto key = json.find("key");
  const auto upload_id = json.find("upload_id");
  if (key == json.end() || !key->is_string()) return std::nullopt;
  if (upload_id == json.end() || !upload_id->is_string()) return std::nullopt;
  UploadRecord record{key->get<std::string>(), upload_id->get<std::string>()};
  if (RecordKey(record.upload_id) != record_key) return std::nullopt;
  if (!ValidateObjectKey(record.key).ok()) return std::nullopt;
  return record;
}

// The range of a Content-Range header, "bytes 0-99/1000", and the total size when it is told.
struct ContentRange {
  int64_t first = 0;
  int64_t last = 0;
  std::optional<int64_t> total;
};

std::optional<ContentRange> ParseContentRange(const HttpResponse& response) {
  const std::string* header = response.Header("content-range");
  if (header == nullptr) return std::nullopt;
  absl::string_view text = *header;
  if (!absl::ConsumePrefix(&text, "bytes ")) return std::nullopt;
  const std::vector<absl::string_view> pieces = absl::StrSplit(text, absl::ByAnyChar("-/"));
  ContentRange range;
  int64_t total = 0;
  if (pieces.size() != 3 || !absl::SimpleAtoi(pieces[0], &range.first) ||
      !absl::SimpleAtoi(pieces[1], &range.last)) {
    return std::nullopt;
  }
  if (pieces[2] == "*") return range;
  if (!absl::SimpleAtoi(pieces[2], &total)) return std::nullopt;
  range.total = total;
  return range;
}

class S3Reader final : public ObjectReader {
 public:
  S3Reader(const Site* site, std::string key, ObjectInfo info)
      : site_(site), key_(std::move(key)), info_(std::move(info)) {}

  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override;

  // Reads that are split arrive from several sides at once.
  absl::Status ReadAsItArrives(int64_t offset, absl::Span<uint8_t> out,
                               const Arrived& arrived) override {
    if (static_cast<int64_t>(out.size()) > kSplitReadBytes) {
      return ObjectReader::ReadAsItArrives(offset, out, arrived);
    }
    SP_RETURN_IF_ERROR(CheckRange(offset, static_cast<int64_t>(out.size())));
    return ReadRange(offset, out, arrived);
  }

  absl::Status CheckUnchanged() override { return Compare(); }

  const ObjectInfo& info() const override { return info_; }

 private:
  absl::Status Compare() const;
  absl::Status CheckRange(int64_t offset, int64_t size) const;
  absl::Status ReadRange(int64_t offset, absl::Span<uint8_t> out, const Arrived& arrived) const;
  absl::Status CheckAnswer(const HttpResponse& response, int64_t offset, int64_t size) const;

  std::string Name() const { return site_->NameOf(key_); }
  absl::Status Gone() const {
    return absl::DataLossError(
        absl::StrCat(Name(), ": removed while reading, want ETag ", info_.etag));
  }

  const Site* const site_;
  const std::string key_;
  const ObjectInfo info_;
};

absl::Status S3Reader::Compare() const {
  const auto now = site_->Head(key_);
  if (absl::IsNotFound(now.status())) return Gone();
  SP_RETURN_IF_ERROR(now.status());
  if (now->etag == info_.etag) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(Name(), ": replaced while reading: ETag ", now->etag, ", want ", info_.etag));
}

absl::Status S3Reader::CheckRange(int64_t offset, int64_t size) const {
  if (offset >= 0 && offset <= info_.size_bytes && size <= info_.size_bytes - offset) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(absl::StrCat(Name(), ": ", size, " bytes from offset ", offset,
                                            " on, want a range in [0, ", info_.size_bytes, ")"));
}

absl::Status S3Reader::ReadAt(int64_t offset, absl::Span<uint8_t> out) {
  const auto size = static_cast<int64_t>(out.size());
  SP_RETURN_IF_ERROR(CheckRange(offset, size));
  if (size <= kSplitReadBytes) return ReadRange(offset, out, nullptr);
  const int64_t pieces = std::min(kMaxSplit, (size - 1) / kPreferredReadBytes + 1);
  const int64_t piece_bytes = (size - 1) / pieces + 1;
  std::vector<absl::Status> statuses(static_cast<size_t>(pieces));
  absl::BlockingCounter others(static_cast<int>(pieces - 1));
  const auto read = [&](int64_t piece) {
    const int64_t start = piece * piece_bytes;
    statuses[static_cast<size_t>(piece)] = ReadRange(
        offset + start, out.subspan(static_cast<size_t>(start), static_cast<size_t>(piece_bytes)),
        nullptr);
  };
  for (int64_t piece = 1; piece < pieces; ++piece) {
    site_->connection().Run([&read, &others, piece] {
      read(piece);
      others.DecrementCount();
    });
  }
  read(0);
  others.Wait();
  for (const absl::Status& status : statuses) SP_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status S3Reader::ReadRange(int64_t offset, absl::Span<uint8_t> out,
                                 const Arrived& arrived) const {
  if (out.empty()) return absl::OkStatus();  // HTTP has no empty range
  const auto size = static_cast<int64_t>(out.size());
  int64_t done = 0;
  const auto ask_for_rest = [&](S3Call* call) {
    if (arrived) arrived(done);
    call->into = out.subspan(static_cast<size_t>(done));
    call->headers = {
        {"range", absl::StrCat("bytes=", offset + done, "-", offset + size - 1)},
        {"if-match", Quoted(info_.etag)},
    };
  };
  S3Call call = site_->CallOf("GetObject", "GET", key_);
  ask_for_rest(&call);
  if (arrived) call.arrived = [&](int64_t bytes) { arrived(done + bytes); };
  call.accept = [&](const HttpResponse& response, S3Call* again) -> absl::Status {
    const int64_t wanted = size - done;
    SP_RETURN_IF_ERROR(CheckAnswer(response, offset + done, wanted));
    if (absl::IsResourceExhausted(response.transport)) {
      return absl::FailedPreconditionError(
          absl::StrCat("more bytes than the ", wanted, " asked for"));
    }
    if (response.into_bytes == wanted) {
      // The end was not seen: all is asked for again.
      if (!response.transport.ok()) ask_for_rest(again);
      return response.transport;
    }
    // A store that answers 200 would answer so for the rest as well.
    if (response.status == 206) done += response.into_bytes;
    ask_for_rest(again);
    return absl::UnavailableError(absl::StrCat(
        response.into_bytes, " of ", wanted, " bytes arrived",
        response.transport.ok() ? "" : absl::StrCat(": ", response.transport.ToString())));
  };
  const S3Answer answer = site_->connection().Exchange(std::move(call));
  if (answer.status.ok()) return answer.status;
  if (answer.response.status == 404 && answer.error.code != "NoSuchBucket") return Gone();
  if (answer.response.status != 412 && answer.response.status != 416) return answer.status;
  SP_RETURN_IF_ERROR(Compare());
  return absl::DataLossError(absl::StrCat(Name(), ": ", answer.status.message(), ", want ETag ",
                                          info_.etag, " of ", info_.size_bytes, " bytes"));
}

absl::Status S3Reader::CheckAnswer(const HttpResponse& response, int64_t offset,
                                   int64_t size) const {
  const bool is_all = offset == 0 && size == info_.size_bytes;
  if (response.status != 206 && !(response.status == 200 && is_all)) {
    return absl::FailedPreconditionError(
        absl::StrCat("HTTP ", response.status, " for ", size, " bytes from offset ", offset,
                     " on, want 206: the store does not serve ranges"));
  }
  SP_RETURN_IF_ERROR(CheckEtag(response));
  if (EtagOf(response) != info_.etag) {
    return absl::DataLossError(
        absl::StrCat("replaced while reading: ETag ", EtagOf(response), ", want ", info_.etag));
  }
  if (response.status == 200) return absl::OkStatus();
  const std::optional<ContentRange> range = ParseContentRange(response);
  if (!range || range->first != offset || range->last < offset || range->last >= offset + size) {
    const std::string* header = response.Header("content-range");
    return absl::FailedPreconditionError(
        absl::StrCat("Content-Range \"", header == nullptr ? "" : *header, "\", want bytes ",
                     offset, "-", offset + size - 1));
  }
  if (range->total && *range->total != info_.size_bytes) {
    return absl::DataLossError(
        absl::StrCat("replaced while reading: ", *range->total, " bytes, want ", info_.size_bytes));
  }
  return absl::OkStatus();
}

// The caller's buffer is one area for an object of one part; otherwise one for each part under way
// and one more. The current area holds [0, filled_) finished bytes and behind them the reservation.
class S3Writer final : public ObjectWriter {
 public:
  S3Writer(const Site* site, std::string key, const WriteOptions& options, int64_t part_bytes)
      : site_(site),
        key_(std::move(key)),
        size_bytes_(options.size_bytes),
        sha256_of_(options.sha256_of),
        part_bytes_(part_bytes),
        is_multipart_(options.size_bytes > part_bytes),
        areas_(is_multipart_ ? static_cast<size_t>(options.writes_at_once) + 1 : 1),
        area_bytes_(static_cast<int64_t>(options.buffer.size() / areas_.size())) {
    for (size_t i = 0; i < areas_.size(); ++i) {
      areas_[i].memory = options.buffer.subspan(i * static_cast<size_t>(area_bytes_),
                                                static_cast<size_t>(area_bytes_));
    }
  }

  ~S3Writer() override {
    WaitForParts().IgnoreError();  // they read the buffer
    if (!upload_id_.empty()) GiveUp();
  }

  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) override;
  absl::Status Advance(int64_t size) override;
  absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate) override;

 private:
  struct Area {
    absl::Span<uint8_t> memory;
    bool uploading = false;  // a part leaves from here
  };

  std::string Name() const { return site_->NameOf(key_); }
  S3Connection& connection() const { return site_->connection(); }
  absl::Status Fail(absl::Status status) {
    status_ = status;
    return status;
  }

  absl::Status BeginUpload();
  absl::Status ShipPart();
  void UploadPart(Area& area, int64_t number, int64_t size, const std::string& sha256);
  absl::Status WaitForArea(const Area& area);
  absl::Status WaitForParts();
  absl::StatusOr<std::string> PutWhole(const CommitGate& gate);
  absl::StatusOr<std::string> Complete(const CommitGate& gate);
  absl::StatusOr<std::string> FindCompleted(const std::vector<UploadedPart>& parts,
                                            const absl::Status& why);
  absl::StatusOr<ObjectInfo> CheckStored(const std::string& etag);
  void ForgetUpload(const std::string& upload_id);
  void GiveUp();

  const Site* const site_;
  const std::string key_;
  const int64_t size_bytes_;
  const std::function<std::string(int64_t, int64_t)> sha256_of_;
  const int64_t part_bytes_;
  const bool is_multipart_;
  absl::Mutex mu_;
  std::vector<Area> areas_;  // `uploading` is guarded by mu_
  const int64_t area_bytes_;
  absl::Status upload_status_ ABSL_GUARDED_BY(mu_);
  std::vector<UploadedPart> parts_ ABSL_GUARDED_BY(mu_);  // in the order in which they arrived

  size_t current_ = 0;    // index of the area being filled
  int64_t shipped_ = 0;   // bytes of the parts before
  int64_t filled_ = 0;    // finished bytes in the current area
  int64_t reserved_ = 0;  // bytes behind them that the caller may fill
  absl::Status status_;
  std::string upload_id_;  // empty: none begun, or none left
};

absl::StatusOr<absl::Span<uint8_t>> S3Writer::Reserve(int64_t size) {
  SP_RETURN_IF_ERROR(status_);
  const int64_t room = area_bytes_ - filled_;
  if (size < 0 || size > room) {
    return Fail(absl::InvalidArgumentError(
        absl::StrCat(Name(), ": reservation of ", size, " bytes, want 0 to ", room,
                     " (what the write buffer has room for beside a part of ", part_bytes_, ")")));
  }
  reserved_ = room;
  return areas_[current_].memory.subspan(static_cast<size_t>(filled_));
}

absl::Status S3Writer::Advance(int64_t size) {
  SP_RETURN_IF_ERROR(status_);
  const int64_t left = size_bytes_ - shipped_ - filled_;
  if (size < 0 || size > reserved_ || size > left) {
    return Fail(absl::InvalidArgumentError(absl::StrCat(
        Name(), ": advance by ", size, " bytes, want at most ", std::min(reserved_, left), " (",
        reserved_, " reserved, ", left, " left of the announced ", size_bytes_, ")")));
  }
  filled_ += size;
  reserved_ = 0;
  while (is_multipart_ && filled_ >= part_bytes_) SP_RETURN_IF_ERROR(ShipPart());
  return absl::OkStatus();
}

absl::Status S3Writer::BeginUpload() {
  S3Call call = site_->CallOf("CreateMultipartUpload", "POST", key_);
  call.query = {{"uploads", ""}};
  call.headers = {{"content-type", "application/octet-stream"}};
  std::string upload_id;
  call.accept = [&upload_id](const HttpResponse& response, S3Call*) {
    const auto parsed = ParseUploadId(response.body);
    if (!parsed.ok()) return absl::UnavailableError(std::string(parsed.status().message()));
    upload_id = *parsed;
    return absl::OkStatus();
  };
  const S3Answer answer = connection().Exchange(std::move(call));
  SP_RETURN_IF_ERROR(answer.status);
  upload_id_ = upload_id;
  SP_ASSIGN_OR_RETURN(const std::string record, FormatRecord({key_, upload_id_}));
  return site_->Put(RecordKey(upload_id_), BytesOf(record), CommitGate(), {}).status;
}

// Starts the upload of the next part from the current area and goes on in the next one when that is
// free.
absl::Status S3Writer::ShipPart() {
  if (upload_id_.empty()) {
    const absl::Status begun = BeginUpload();
    if (!begun.ok()) return Fail(begun);
  }
  const int64_t size = std::min(filled_, part_bytes_);
  const int64_t number = shipped_ / part_bytes_ + 1;
  Area& full = areas_[current_];
  {
    absl::MutexLock lock(&mu_);
    full.uploading = true;
  }
  const std::string sha256 = sha256_of_ ? sha256_of_(shipped_, shipped_ + size) : "";
  connection().Run([=, this, &full] { UploadPart(full, number, size, sha256); });
  current_ = (current_ + 1) % areas_.size();
  Area& next = areas_[current_];
  const absl::Status status = WaitForArea(next);
  if (!status.ok()) return Fail(status);
  std::copy_n(full.memory.data() + size, filled_ - size, next.memory.data());
  shipped_ += size;
  filled_ -= size;
  return absl::OkStatus();
}

void S3Writer::UploadPart(Area& area, int64_t number, int64_t size, const std::string& sha256) {
  S3Call call = site_->CallOf("UploadPart", "PUT", key_);
  call.query = {{"partNumber", absl::StrCat(number)}, {"uploadId", upload_id_}};
  call.body = area.memory.first(static_cast<size_t>(size));
  call.body_sha256 = sha256;
  call.accept = [](const HttpResponse& response, S3Call*) { return CheckEtag(response); };
  const S3Answer answer = connection().Exchange(std::move(call));
  absl::Status status = answer.status;
  if (answer.error.code == "NoSuchUpload") {
    status = absl::AbortedError(absl::StrCat(Name(), ": its upload was aborted by another"));
  }
  absl::MutexLock lock(&mu_);
  area.uploading = false;
  upload_status_.Update(status);
  if (status.ok()) parts_.push_back({number, EtagOf(answer.response)});
}

// The first error of any part, also of one that has not left this area.
absl::Status S3Writer::WaitForArea(const Area& area) {
  const auto is_free = [&area] { return !area.uploading; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&is_free));
  return upload_status_;
}

absl::Status S3Writer::WaitForParts() {
  absl::Status status;
  for (const Area& area : areas_) status = WaitForArea(area);
  return status;
}

absl::StatusOr<ObjectInfo> S3Writer::Commit(const CommitGate& gate) {
  SP_RETURN_IF_ERROR(status_);
  if (shipped_ + filled_ != size_bytes_) {
    return Fail(
        absl::FailedPreconditionError(absl::StrCat(Name(), ": commit after ", shipped_ + filled_,
                                                   " bytes, want the announced ", size_bytes_)));
  }
  if (is_multipart_ && filled_ > 0) SP_RETURN_IF_ERROR(ShipPart());
  const absl::Status uploaded = WaitForParts();
  if (!uploaded.ok()) return Fail(uploaded);
  status_ = absl::FailedPreconditionError(absl::StrCat(Name(), ": already committed"));
  SP_ASSIGN_OR_RETURN(const std::string etag, is_multipart_ ? Complete(gate) : PutWhole(gate));
  if (!is_multipart_) return CheckStored(etag);
  absl::Notification forgotten;
  connection().Run([this, &forgotten] {
    ForgetUpload(upload_id_);
    forgotten.Notify();
  });
  absl::StatusOr<ObjectInfo> stored = CheckStored(etag);
  forgotten.WaitForNotification();
  upload_id_.clear();
  return stored;
}

absl::StatusOr<std::string> S3Writer::PutWhole(const CommitGate& gate) {
  const auto bytes = areas_[0].memory.first(static_cast<size_t>(filled_));
  const S3Answer answer = site_->Put(key_, bytes, gate, {});
  SP_RETURN_IF_ERROR(answer.status);
  return EtagOf(answer.response);
}

absl::StatusOr<std::string> S3Writer::Complete(const CommitGate& gate) {
  std::vector<UploadedPart> parts;
  {
    absl::MutexLock lock(&mu_);
    parts = parts_;
  }
  std::sort(parts.begin(), parts.end(),
            [](const UploadedPart& a, const UploadedPart& b) { return a.number < b.number; });
  const std::string document = FormatCompleteUpload(parts);
  S3Call call = site_->CallOf("CompleteMultipartUpload", "POST", key_);
  call.query = {{"uploadId", upload_id_}};
  call.headers = {{"content-type", "application/xml"}};
  call.body = BytesOf(document);
  call.gate = gate;
  call.timeout = connection().environment().publish_timeout;
  std::string etag;
  std::string late_code;  // of an error that came with 200
  call.accept = [&](const HttpResponse& response, S3Call* again) -> absl::Status {
    const auto error = ParseS3Error(response.body);
    late_code = error.ok() ? error->code : "";
    if (error.ok()) return connection().ErrorStatus(*again, *error);
    const auto completed = ParseCompletedEtag(response.body);
    if (!completed.ok()) return absl::UnavailableError(std::string(completed.status().message()));
    etag = *completed;
    return absl::OkStatus();
  };
  const S3Answer answer = connection().Exchange(std::move(call));
  if (answer.status.ok()) return etag.empty() ? CompositeEtag(parts) : etag;
  if (answer.error.code == "NoSuchUpload" || late_code == "NoSuchUpload") {
    if (answer.in_doubt) return FindCompleted(parts, answer.status);
    return absl::AbortedError(absl::StrCat(Name(), ": its upload was aborted by another"));
  }
  return answer.status;
}

// Whether the object in the store is what a Complete without an answer has made.
absl::StatusOr<std::string> S3Writer::FindCompleted(const std::vector<UploadedPart>& parts,
                                                    const absl::Status& why) {
  const auto info = site_->Head(key_);
  if (info.ok() && info->size_bytes == size_bytes_) {
    const std::string expected = CompositeEtag(parts);
    const bool is_ours = expected.empty()
                             ? absl::EndsWith(info->etag, absl::StrCat("-", parts.size()))
                             : info->etag == expected;
    if (is_ours) return info->etag;
  }
  return absl::UnavailableError(
      absl::StrCat(Name(), ": not known whether it was completed: ", why.message()));
}

// `etag` is the new object's, as far as the store told; empty: not known.
absl::StatusOr<ObjectInfo> S3Writer::CheckStored(const std::string& etag) {
  absl::StatusOr<ObjectInfo> info = site_->Head(key_);
  for (int pause = 1; absl::IsNotFound(info.status()) && pause <= kVisibilityPauses; ++pause) {
    connection().PauseBefore(pause);
    info = site_->Head(key_);
  }
  if (absl::IsNotFound(info.status())) {
    return absl::UnavailableError(
        absl::StrCat(Name(), ": not there after its upload: ", info.status().message()));
  }
  SP_RETURN_IF_ERROR(info.status());
  // Another writer has replaced it in the meantime; what was ours cannot be looked at any more.
  if (!etag.empty() && info->etag != etag && info->size_bytes != size_bytes_) {
    return ObjectInfo{size_bytes_, etag};
  }
  if (info->size_bytes != size_bytes_) {
    return absl::DataLossError(absl::StrCat(Name(), ": the store holds ", info->size_bytes,
                                            " bytes, want the ", size_bytes_, " written"));
  }
  return info;
}

// The upload exists no more. A record that stays is harmless: its clean-up finds no upload.
void S3Writer::ForgetUpload(const std::string& upload_id) {
  const absl::Status deleted = site_->Delete(RecordKey(upload_id));
  if (deleted.ok()) return;
  Log(LogLevel::kWarning, "s3", "the record of a finished upload stays",
      {{"object", Name()}, {"status", deleted}});
}

void S3Writer::GiveUp() {
  const absl::Status aborted = site_->Abort(key_, upload_id_);
  if (aborted.ok()) return ForgetUpload(upload_id_);
  if (connection().environment().observer != nullptr) {
    connection().environment().observer->OnAbortFailed();
  }
  Log(LogLevel::kWarning, "s3", "an upload could not be aborted; its record stays",
      {{"object", Name()}, {"record", RecordKey(upload_id_)}, {"status", aborted}});
}

class S3Store final : public ObjectStore {
 public:
  explicit S3Store(std::unique_ptr<const Site> site) : site_(std::move(site)) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override {
    SP_RETURN_IF_ERROR(site_->CheckKey(key));
    return site_->Head(key);
  }

  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(ObjectInfo info, Head(key));
    return std::make_unique<S3Reader>(site_.get(), key, std::move(info));
  }

  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    SP_RETURN_IF_ERROR(site_->CheckKey(key));
    SP_ASSIGN_OR_RETURN(Site::Whole whole, site_->Get(key, max_bytes));
    return std::move(whole.bytes);
  }

  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override;
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override;
  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override;
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override;
  absl::Status Delete(const std::string& key) override;
  int64_t WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const override;
  int64_t FurtherWriteBytes(int64_t largest_object, int64_t largest_reserve) const override;
  int64_t PreferredReadBytes() const override { return kPreferredReadBytes; }
  absl::StatusOr<int64_t> FreeBytes() override { return kUnlimitedBytes; }
  absl::Status CheckWritable() override;
  const std::string& uri() const override { return site_->uri(); }

 private:
  S3Connection& connection() const { return site_->connection(); }
  absl::StatusOr<S3ListPage> ListPage(const std::string& prefix, const std::string& token);
  int64_t PartBytesOf(int64_t largest_object) const;
  absl::Status CheckPutSize(const std::string& key, const std::string& bytes) const;
  absl::StatusOr<ObjectInfo> InfoAfterPut(const std::string& key, const std::string& bytes,
                                          const S3Answer& answer);
  S3Answer PutNew(const std::string& key, const std::string& bytes, const CommitGate& gate);
  absl::StatusOr<bool> HonoursConditionalPut();
  absl::StatusOr<bool> ProbeConditionalPut(const std::string& probe);
  absl::StatusOr<ObjectInfo> PutConditionally(const std::string& key, const std::string& bytes,
                                              const CommitGate& gate);
  absl::StatusOr<ObjectInfo> PutAfterLooking(const std::string& key, const std::string& bytes,
                                             const CommitGate& gate);
  absl::StatusOr<ObjectInfo> CompareStored(const std::string& key, const std::string& bytes);
  absl::Status AlreadyExists(const std::string& key) const {
    return absl::AlreadyExistsError(
        absl::StrCat(site_->NameOf(key), ": an object of that name exists"));
  }

  const std::unique_ptr<const Site> site_;
};

absl::StatusOr<S3ListPage> S3Store::ListPage(const std::string& prefix, const std::string& token) {
  S3Call call = site_->CallOf("ListObjectsV2", "GET", "");
  call.key.clear();
  call.query = {{"list-type", "2"},
                {"encoding-type", "url"},
                {"prefix", absl::StrCat(site_->prefix(), prefix)}};
  if (!token.empty()) call.query.emplace_back("continuation-token", token);
  call.max_body_bytes = kMaxListBytes;
  S3ListPage page;
  call.accept = [&page](const HttpResponse& response, S3Call*) {
    SP_RETURN_IF_ERROR(response.transport);
    auto parsed = ParseListPage(response.body);
    if (!parsed.ok()) return absl::UnavailableError(std::string(parsed.status().message()));
    page = *std::move(parsed);
    return absl::OkStatus();
  };
  const S3Answer answer = connection().Exchange(std::move(call));
  SP_RETURN_IF_ERROR(answer.status);
  return page;
}

// Left out, because no method here would serve them: keys that ValidateObjectKey() refuses. These
// are the "directory markers" of web consoles (`m/`), and keys such as `a//b` or `../x`.
absl::StatusOr<std::vector<ObjectEntry>> S3Store::List(const std::string& prefix) {
  SP_RETURN_IF_ERROR(ValidateObjectPrefix(prefix));
  const std::string whole_prefix = absl::StrCat(site_->prefix(), prefix);
  std::vector<ObjectEntry> entries;
  int64_t left = connection().options().max_listed_entries;
  std::string token;
  do {
    SP_ASSIGN_OR_RETURN(S3ListPage page, ListPage(prefix, token));
    left -= static_cast<int64_t>(page.entries.size());
    if (left < 0) return TooManyEntries(uri(), connection().options().max_listed_entries);
    if (!page.next_token.empty() && page.next_token == token) {
      return absl::FailedPreconditionError(absl::StrCat(
          site_->NameOf(prefix), ": the listing does not get on after ", entries.size(), " keys"));
    }
    token = page.next_token;
    for (ObjectEntry& entry : page.entries) {
      // Not every store applies the prefix to every page.
      if (!absl::StartsWith(entry.key, whole_prefix)) continue;
      entry.key.erase(0, site_->prefix().size());
      if (ValidateObjectKey(entry.key).ok()) entries.push_back(std::move(entry));
    }
  } while (!token.empty());
  std::sort(entries.begin(), entries.end(),
            [](const ObjectEntry& a, const ObjectEntry& b) { return a.key < b.key; });
  return entries;
}

int64_t S3Store::PartBytesOf(int64_t largest_object) const {
  const S3Limits& limits = connection().environment().limits;
  // Create() refuses what is larger.
  const int64_t object = std::clamp(largest_object, int64_t{0}, limits.largest_object_bytes);
  return UploadPartBytes(object, connection().options().upload_part_bytes, limits)
      .value_or(limits.largest_part_bytes);
}

int64_t S3Store::WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const {
  const int64_t part = PartBytesOf(largest_object);
  return largest_object <= part ? std::max(largest_object, int64_t{0}) + largest_reserve
                                : 2 * (part + largest_reserve);
}

int64_t S3Store::FurtherWriteBytes(int64_t largest_object, int64_t largest_reserve) const {
  const int64_t part = PartBytesOf(largest_object);
  return largest_object <= part ? 0 : part + largest_reserve;
}

absl::StatusOr<std::unique_ptr<ObjectWriter>> S3Store::Create(const std::string& key,
                                                              const WriteOptions& options) {
  SP_RETURN_IF_ERROR(site_->CheckKey(key));
  SP_RETURN_IF_ERROR(CheckWriteOptions(site_->NameOf(key), options));
  const auto part_bytes =
      UploadPartBytes(options.size_bytes, connection().options().upload_part_bytes,
                      connection().environment().limits);
  if (!part_bytes.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(site_->NameOf(key), ": ", part_bytes.status().message()));
  }
  const int64_t least = options.size_bytes > *part_bytes
                            ? (options.writes_at_once + 1) * *part_bytes
                            : options.size_bytes;
  const auto given = static_cast<int64_t>(options.buffer.size());
  if (given < least) {
    return absl::InvalidArgumentError(absl::StrCat(site_->NameOf(key), ": write buffer of ", given,
                                                   " bytes, want at least ", least));
  }
  return std::make_unique<S3Writer>(site_.get(), key, options, *part_bytes);
}

absl::Status S3Store::CheckPutSize(const std::string& key, const std::string& bytes) const {
  const int64_t largest = connection().environment().limits.largest_part_bytes;
  if (static_cast<int64_t>(bytes.size()) <= largest) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(site_->NameOf(key), ": ", bytes.size(),
                                                 " bytes in one request, want at most ", largest));
}

absl::StatusOr<ObjectInfo> S3Store::InfoAfterPut(const std::string& key, const std::string& bytes,
                                                 const S3Answer& answer) {
  ObjectInfo info;
  info.size_bytes = static_cast<int64_t>(bytes.size());
  info.etag = EtagOf(answer.response);
  if (!info.etag.empty()) return info;
  return site_->Head(key);
}

absl::StatusOr<ObjectInfo> S3Store::Put(const std::string& key, const std::string& bytes,
                                        const CommitGate& gate) {
  SP_RETURN_IF_ERROR(site_->CheckKey(key));
  SP_RETURN_IF_ERROR(CheckPutSize(key, bytes));
  const S3Answer answer = site_->Put(key, BytesOf(bytes), gate, {});
  SP_RETURN_IF_ERROR(answer.status);
  return InfoAfterPut(key, bytes, answer);
}

absl::StatusOr<ObjectInfo> S3Store::PutIfAbsent(const std::string& key, const std::string& bytes,
                                                const CommitGate& gate) {
  SP_RETURN_IF_ERROR(site_->CheckKey(key));
  SP_RETURN_IF_ERROR(CheckPutSize(key, bytes));
  SP_ASSIGN_OR_RETURN(const bool is_honoured, HonoursConditionalPut());
  return is_honoured ? PutConditionally(key, bytes, gate) : PutAfterLooking(key, bytes, gate);
}

S3Answer S3Store::PutNew(const std::string& key, const std::string& bytes, const CommitGate& gate) {
  return site_->Put(key, BytesOf(bytes), gate, {{"if-none-match", "*"}});
}

absl::StatusOr<bool> S3Store::HonoursConditionalPut() {
  const std::string& bucket = site_->bucket();
  const auto turn = connection().TakeTurn(absl::StrCat("conditional PUT: ", bucket));
  ConditionalPut known = connection().conditional_put(bucket);
  if (known == ConditionalPut::kUnknown) {
    const std::string probe = ObjectKey(Probe{connection().NewId()});
    const auto is_honoured = ProbeConditionalPut(probe);
    const absl::Status deleted = site_->Delete(probe);
    SP_RETURN_IF_ERROR(is_honoured.status());
    if (!deleted.ok()) {
      Log(LogLevel::kWarning, "s3", "a probe stays",
          {{"object", site_->NameOf(probe)}, {"status", deleted}});
    }
    known = *is_honoured ? ConditionalPut::kHonoured : ConditionalPut::kMissing;
    connection().set_conditional_put(bucket, known);
    if (!*is_honoured) {
      Log(LogLevel::kWarning, "s3",
          "the store does not honour If-None-Match: two jobs that commit at one place at the same "
          "moment are not kept apart",
          {{"bucket", bucket}});
    }
  }
  return known == ConditionalPut::kHonoured;
}

absl::StatusOr<bool> S3Store::ProbeConditionalPut(const std::string& probe) {
  const std::string bytes = "probe";
  for (int put = 0; put < 2; ++put) {
    const S3Answer answer = PutNew(probe, bytes, CommitGate());
    // Refused the first time: that was the repetition of an attempt without an answer.
    if (answer.response.status == 412) return true;
    const std::string& code = answer.error.code;
    if (answer.response.status == 501 || code == "NotImplemented" || code == "InvalidRequest" ||
        code == "InvalidArgument") {
      return false;
    }
    SP_RETURN_IF_ERROR(answer.status);
  }
  return false;
}

absl::StatusOr<ObjectInfo> S3Store::PutConditionally(const std::string& key,
                                                     const std::string& bytes,
                                                     const CommitGate& gate) {
  const S3Answer answer = PutNew(key, bytes, gate);
  if (answer.status.ok()) return InfoAfterPut(key, bytes, answer);
  if (answer.response.status != 412) return answer.status;
  if (!answer.in_doubt) return AlreadyExists(key);
  return CompareStored(key, bytes);
}

absl::StatusOr<ObjectInfo> S3Store::PutAfterLooking(const std::string& key,
                                                    const std::string& bytes,
                                                    const CommitGate& gate) {
  // A writer whose lease is lost need not wait for its turn.
  if (gate) SP_RETURN_IF_ERROR(gate());
  const auto turn = connection().TakeTurn(site_->NameOf(key));
  absl::Status present = site_->Head(key).status();
  if (present.ok()) return AlreadyExists(key);
  if (!absl::IsNotFound(present)) return present;
  const S3Answer answer = site_->Put(key, BytesOf(bytes), gate, {});
  SP_RETURN_IF_ERROR(answer.status);
  return CompareStored(key, bytes);
}

// Of an object that may be ours: its version when it holds these bytes, else ALREADY_EXISTS.
absl::StatusOr<ObjectInfo> S3Store::CompareStored(const std::string& key,
                                                  const std::string& bytes) {
  const auto stored = site_->Get(key, static_cast<int64_t>(bytes.size()));
  if (absl::IsResourceExhausted(stored.status())) return AlreadyExists(key);
  if (absl::IsNotFound(stored.status())) {
    return absl::UnavailableError(absl::StrCat(
        site_->NameOf(key), ": written, and then not there: ", stored.status().message()));
  }
  SP_RETURN_IF_ERROR(stored.status());
  if (stored->bytes != bytes) return AlreadyExists(key);
  return stored->info;
}

absl::Status S3Store::Delete(const std::string& key) {
  SP_RETURN_IF_ERROR(site_->CheckKey(key));
  if (absl::StartsWith(key, kTemporaryPrefix)) {
    const auto text = site_->Get(key, kMaxRecordBytes);
    if (absl::IsNotFound(text.status())) return absl::OkStatus();
    // Something larger is no record.
    if (!text.ok() && !absl::IsResourceExhausted(text.status())) return text.status();
    if (text.ok()) {
      const auto record = ParseRecord(key, text->bytes);
      if (record) SP_RETURN_IF_ERROR(site_->Abort(record->key, record->upload_id));
    }
  }
  return site_->Delete(key);
}

absl::Status S3Store::CheckWritable() {
  const std::string probe = ObjectKey(Probe{connection().NewId()});
  SP_RETURN_IF_ERROR(Put(probe, "probe", CommitGate()).status());
  return Delete(probe);
}

bool IsMd5(const std::string& etag) { return etag.size() == 32 && HexDecode(etag).ok(); }

}  // namespace

absl::StatusOr<int64_t> UploadPartBytes(int64_t object_bytes, int64_t wanted_bytes,
                                        const S3Limits& limits) {
  if (object_bytes < 0 || object_bytes > limits.largest_object_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("object of ", object_bytes, " bytes, want 0 to ",
                                                   limits.largest_object_bytes));
  }
  int64_t part = std::max(wanted_bytes, limits.least_part_bytes);
  const int64_t least = (object_bytes + limits.largest_parts - 1) / limits.largest_parts;
  if (least > part) part = (least + kMiB - 1) / kMiB * kMiB;
  if (part <= limits.largest_part_bytes) return part;
  return absl::InvalidArgumentError(
      absl::StrCat("parts of ", part, " bytes (", wanted_bytes, " asked for), want at most ",
                   limits.largest_part_bytes, " in at most ", limits.largest_parts, " parts"));
}

std::string CompositeEtag(absl::Span<const UploadedPart> parts) {
  std::vector<uint8_t> digests;
  for (const UploadedPart& part : parts) {
    if (!IsMd5(part.etag)) return "";
    const std::vector<uint8_t> digest = *HexDecode(part.etag);
    digests.insert(digests.end(), digest.begin(), digest.end());
  }
  uint8_t md5[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  // Not to be had where OpenSSL runs in FIPS mode: then the ETag is not known.
  if (EVP_Digest(digests.data(), digests.size(), md5, &size, EVP_md5(), nullptr) != 1) return "";
  return absl::StrCat(HexEncode({md5, size}), "-", parts.size());
}

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenS3Store(const std::string& normalised_uri,
                                                         std::shared_ptr<S3Connection> connection,
                                                         const std::atomic<bool>* stop) {
  absl::string_view rest = normalised_uri;
  if (!absl::ConsumePrefix(&rest, kScheme)) {
    return absl::InvalidArgumentError(absl::StrCat(normalised_uri, ": want s3://bucket/prefix"));
  }
  const std::pair<absl::string_view, absl::string_view> pieces =
      absl::StrSplit(rest, absl::MaxSplits('/', 1));
  const std::string bucket(pieces.first);
  std::string prefix(pieces.second);
  if (!prefix.empty()) SP_RETURN_IF_ERROR(ValidateObjectKey(prefix));
  // The name becomes part of a host name or path.
  const bool is_name = !bucket.empty() && std::all_of(bucket.begin(), bucket.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_';
  });
  if (!is_name || bucket.front() == '.') {
    return absl::InvalidArgumentError(
        absl::StrCat(normalised_uri, ": \"", bucket, "\" is no bucket name"));
  }
  if (!prefix.empty()) prefix.push_back('/');
  return std::make_unique<S3Store>(
      std::make_unique<const Site>(normalised_uri, bucket, prefix, std::move(connection), stop));
}

}  // namespace shardprep
