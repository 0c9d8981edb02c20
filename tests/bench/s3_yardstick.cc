// s3_yardstick: moves files to and from an S3 bucket in the plainest way, and through the S3 store,
// for s3_bench.py to compare.
//
//   s3_yardstick put-unsigned PREFIX STREAMS FILE... libcurl alone: multipart PUTs
//   s3_yardstick put-signed PREFIX STREAMS FILE...   the same with payloads hashed and signed
//   s3_yardstick put-store  PREFIX STREAMS FILE...   ObjectStore::Create() of the S3 store
//   s3_yardstick get-bare   PREFIX STREAMS DIR NAME...  libcurl alone: ranged GETs into files
//
// STREAMS requests are in flight at a time. Server, bucket and credentials come from the
// environment that tests/support/s3_servers/server.sh describes.
#include <curl/curl.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/s3/s3_client.h"
#include "workers/s3/s3_options.h"
#include "workers/s3/s3_store.h"
#include "workers/s3/sigv4.h"

namespace shardprep {
namespace {

constexpr int64_t kPieceBytes = int64_t{16} << 20;

std::string Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  SP_CHECK(value != nullptr);
  return value;
}

class File {
 public:
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    SP_CHECK(fd_ >= 0);
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int64_t size() const {
    struct stat info{};
    SP_CHECK(::fstat(fd_, &info) == 0);
    return info.st_size;
  }
  void Read(int64_t offset, absl::Span<uint8_t> out) const {
    SP_CHECK(::pread(fd_, out.data(), out.size(), offset) == static_cast<ssize_t>(out.size()));
  }
  void Write(int64_t offset, absl::Span<const uint8_t> bytes) const {
    SP_CHECK(::pwrite(fd_, bytes.data(), bytes.size(), offset) ==
             static_cast<ssize_t>(bytes.size()));
  }
  void Extend(int64_t size) const { SP_CHECK(::ftruncate(fd_, size) == 0); }

 private:
  int fd_;
};

// Runs `work(i)` for 0 <= i < count on so many threads.
void InParallel(int threads, size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next = 0;
  std::vector<std::thread> pool;
  pool.reserve(static_cast<size_t>(threads));
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&] {
      for (size_t i = next++; i < count; i = next++) work(i);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

// -- libcurl alone --

// One connection; one request at a time. Without signed payloads nothing could be barer.
class Curl {
 public:
  explicit Curl(bool signs_payload) : signs_payload_(signs_payload), curl_(curl_easy_init()) {
    SP_CHECK(curl_ != nullptr);
  }
  ~Curl() { curl_easy_cleanup(curl_); }
  Curl(const Curl&) = delete;
  Curl& operator=(const Curl&) = delete;

  struct Answer {
    std::string body;
    std::string etag;
    int64_t size_bytes = 0;  // of Content-Length
  };

  // Bytes of the answer go to `into` when it is not empty. Anything but 2xx ends the program.
  Answer Send(const std::string& method, const std::string& key, const QueryParameters& query,
              absl::Span<const uint8_t> body, const std::string& range, absl::Span<uint8_t> into) {
    const std::string endpoint = Environment("SHARDPREP_TEST_S3_ENDPOINT");
    RequestToSign request;
    request.method = method;
    request.host = endpoint.substr(endpoint.find("//") + 2);
    request.escaped_path =
        UriEscape(absl::StrCat("/", Environment("SHARDPREP_TEST_S3_BUCKET"), "/", key), true);
    request.canonical_query = CanonicalQuery(query);
    request.payload_sha256 = signs_payload_ ? Sha256Hex(body) : kUnsignedPayload;
    const AwsCredentials credentials{Environment("AWS_ACCESS_KEY_ID"),
                                     Environment("AWS_SECRET_ACCESS_KEY"), ""};
    curl_slist* list = nullptr;
    for (const HttpHeader& header :
         Sign(request, credentials, {Environment("AWS_REGION")}, absl::Now())) {
      list = curl_slist_append(list, absl::StrCat(header.name, ": ", header.value).c_str());
    }
    list = curl_slist_append(list, "Expect:");
    list = curl_slist_append(list, "Content-Type:");
    if (!range.empty()) list = curl_slist_append(list, absl::StrCat("Range: ", range).c_str());
    std::string url = endpoint + request.escaped_path;
    if (!request.canonical_query.empty()) url += "?" + request.canonical_query;

    unsent_ = body;
    into_ = into;
    answer_ = {};
    curl_easy_reset(curl_);
    curl_easy_setopt(curl_, CURLOPT_URL, url.c_str());
    curl_easy_setopt(curl_, CURLOPT_HTTPHEADER, list);
    curl_easy_setopt(curl_, CURLOPT_FAILONERROR, 1L);
    curl_easy_setopt(curl_, CURLOPT_BUFFERSIZE, 512L << 10);
    curl_easy_setopt(curl_, CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
    curl_easy_setopt(curl_, CURLOPT_WRITEFUNCTION, &Curl::OnBody);
    curl_easy_setopt(curl_, CURLOPT_WRITEDATA, this);
    curl_easy_setopt(curl_, CURLOPT_HEADERFUNCTION, &Curl::OnHeader);
    curl_easy_setopt(curl_, CURLOPT_HEADERDATA, this);
    if (method == "HEAD") curl_easy_setopt(curl_, CURLOPT_NOBODY, 1L);
    if (method == "PUT" || method == "POST") {
      curl_easy_setopt(curl_, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(curl_, CURLOPT_CUSTOMREQUEST, method.c_str());
      curl_easy_setopt(curl_, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(body.size()));
      curl_easy_setopt(curl_, CURLOPT_READFUNCTION, &Curl::OnSend);
      curl_easy_setopt(curl_, CURLOPT_READDATA, this);
    }
    const CURLcode code = curl_easy_perform(curl_);
    curl_slist_free_all(list);
    if (code != CURLE_OK) {
      std::fprintf(stderr, "%s %s: %s\n", method.c_str(), key.c_str(), curl_easy_strerror(code));
      std::exit(1);
    }
    return answer_;
  }

 private:
  static size_t OnBody(char* data, size_t one, size_t size, void* self) {
    Curl& curl = *static_cast<Curl*>(self);
    if (curl.into_.empty()) {
      curl.answer_.body.append(data, one * size);
    } else {
      if (size > curl.into_.size()) return 0;
      std::memcpy(curl.into_.data(), data, size);
      curl.into_.remove_prefix(size);
    }
    return one * size;
  }

  static size_t OnSend(char* data, size_t one, size_t size, void* self) {
    Curl& curl = *static_cast<Curl*>(self);
    const size_t count = std::min(one * size, curl.unsent_.size());
    std::memcpy(data, curl.unsent_.data(), count);
    curl.unsent_.remove_prefix(count);
    return count;
  }

  static size_t OnHeader(char* data, size_t one, size_t size, void* self) {
    Curl& curl = *static_cast<Curl*>(self);
    const std::string line = std::string(absl::StripAsciiWhitespace({data, one * size}));
    const size_t colon = line.find(':');
    if (colon == std::string::npos) return one * size;
    const std::string name = absl::AsciiStrToLower(line.substr(0, colon));
    const std::string value = std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
    if (name == "etag") curl.answer_.etag = value;
    if (name == "content-length") curl.answer_.size_bytes = std::atoll(value.c_str());
    return one * size;
  }

  const bool signs_payload_;
  CURL* curl_;
  absl::Span<const uint8_t> unsent_;
  absl::Span<uint8_t> into_;
  Answer answer_;
};

void PutBare(Curl& curl, const std::string& key, const File& file, std::vector<uint8_t>& buffer) {
  const Curl::Answer begun = curl.Send("POST", key, {{"uploads", ""}}, {}, "", {});
  const size_t begin = begun.body.find("<UploadId>") + 10;
  const std::string id = begun.body.substr(begin, begun.body.find("</UploadId>") - begin);
  std::string parts = "<CompleteMultipartUpload>";
  int number = 0;
  for (int64_t at = 0; at < file.size(); at += kPieceBytes) {
    const auto piece =
        absl::MakeSpan(buffer).first(static_cast<size_t>(std::min(kPieceBytes, file.size() - at)));
    file.Read(at, piece);
    const QueryParameters query = {{"partNumber", absl::StrCat(++number)}, {"uploadId", id}};
    const Curl::Answer answer = curl.Send("PUT", key, query, piece, "", {});
    absl::StrAppend(&parts, "<Part><PartNumber>", number, "</PartNumber><ETag>", answer.etag,
                    "</ETag></Part>");
  }
  parts += "</CompleteMultipartUpload>";
  const auto* bytes = reinterpret_cast<const uint8_t*>(parts.data());
  const Curl::Answer done =
      curl.Send("POST", key, {{"uploadId", id}}, absl::MakeSpan(bytes, parts.size()), "", {});
  SP_CHECK(absl::StrContains(done.body, "CompleteMultipartUploadResult"));
}

struct Arguments {
  std::string prefix;
  int streams = 1;
  std::vector<std::string> names;
};

std::string KeyOf(const Arguments& arguments, const std::string& path) {
  return absl::StrCat(arguments.prefix, "/", std::filesystem::path(path).filename().string());
}

void PutAllBare(const Arguments& arguments, bool signs_payload) {
  std::atomic<size_t> next = 0;
  InParallel(arguments.streams, static_cast<size_t>(arguments.streams), [&](size_t) {
    Curl curl(signs_payload);
    std::vector<uint8_t> buffer(kPieceBytes);
    for (size_t i = next++; i < arguments.names.size(); i = next++) {
      PutBare(curl, KeyOf(arguments, arguments.names[i]), File(arguments.names[i], O_RDONLY),
              buffer);
    }
  });
}

void GetAllBare(const Arguments& arguments, const std::string& directory) {
  struct Piece {
    const File* file;
    std::string key;
    int64_t offset;
    int64_t size;
  };
  std::vector<std::unique_ptr<File>> files;
  std::vector<Piece> pieces;
  Curl head(false);
  for (const std::string& name : arguments.names) {
    files.push_back(std::make_unique<File>(absl::StrCat(directory, "/", name), O_RDWR | O_CREAT));
    const std::string key = absl::StrCat(arguments.prefix, "/", name);
    const int64_t size = head.Send("HEAD", key, {}, {}, "", {}).size_bytes;
    files.back()->Extend(size);
    for (int64_t at = 0; at < size; at += kPieceBytes) {
      pieces.push_back({files.back().get(), key, at, std::min(kPieceBytes, size - at)});
    }
  }
  std::atomic<size_t> next = 0;
  InParallel(arguments.streams, static_cast<size_t>(arguments.streams), [&](size_t) {
    Curl curl(false);
    std::vector<uint8_t> buffer(kPieceBytes);
    for (size_t i = next++; i < pieces.size(); i = next++) {
      const Piece& piece = pieces[i];
      const auto into = absl::MakeSpan(buffer).first(static_cast<size_t>(piece.size));
      curl.Send("GET", piece.key, {}, {},
                absl::StrCat("bytes=", piece.offset, "-", piece.offset + piece.size - 1), into);
      piece.file->Write(piece.offset, into);
    }
  });
}

// -- The store --

absl::Status PutFile(ObjectStore& store, const std::string& key, const File& file,
                     std::vector<uint8_t>& buffer) {
  constexpr int64_t kReserve = int64_t{1} << 20;
  buffer.resize(static_cast<size_t>(store.WriteBufferBytes(file.size(), kReserve)));
  WriteOptions options;
  options.size_bytes = file.size();
  options.buffer = absl::MakeSpan(buffer);
  SP_ASSIGN_OR_RETURN(const auto writer, store.Create(key, options));
  for (int64_t at = 0; at < file.size(); at += kReserve) {
    const int64_t size = std::min(kReserve, file.size() - at);
    SP_ASSIGN_OR_RETURN(const absl::Span<uint8_t> room, writer->Reserve(size));
    file.Read(at, room.first(static_cast<size_t>(size)));
    SP_RETURN_IF_ERROR(writer->Advance(size));
  }
  return writer->Commit(nullptr).status();
}

absl::Status PutAllThroughStore(const Arguments& arguments) {
  S3Flags flags;
  flags.endpoint = Environment("SHARDPREP_TEST_S3_ENDPOINT");
  SP_ASSIGN_OR_RETURN(const S3Options options, MakeS3Options(flags, [](const std::string& name) {
                        const char* value = std::getenv(name.c_str());
                        return value == nullptr ? std::nullopt : std::optional<std::string>(value);
                      }));
  SP_ASSIGN_OR_RETURN(const auto connection, ConnectS3(options));
  SP_ASSIGN_OR_RETURN(const auto store,
                      OpenS3Store(absl::StrCat("s3://", Environment("SHARDPREP_TEST_S3_BUCKET"),
                                               "/", arguments.prefix),
                                  connection));
  std::vector<absl::Status> results(static_cast<size_t>(arguments.streams));
  std::atomic<size_t> next = 0;
  InParallel(arguments.streams, results.size(), [&](size_t stream) {
    std::vector<uint8_t> buffer;
    for (size_t i = next++; i < arguments.names.size(); i = next++) {
      const std::string& path = arguments.names[i];
      const absl::Status status = PutFile(*store, std::filesystem::path(path).filename().string(),
                                          File(path, O_RDONLY), buffer);
      if (!status.ok()) results[stream] = status;
    }
  });
  for (const absl::Status& result : results) SP_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

int Main(const std::vector<std::string>& words) {
  const std::string mode = words.size() > 1 ? words[1] : "";
  const bool is_get = mode == "get-bare";
  const bool is_bare_put = mode == "put-unsigned" || mode == "put-signed";
  if (words.size() < 5 || (!is_get && !is_bare_put && mode != "put-store")) {
    std::fprintf(stderr,
                 "usage: s3_yardstick put-unsigned|put-signed|put-store PREFIX STREAMS FILE...\n"
                 "       s3_yardstick get-bare PREFIX STREAMS DIR NAME...\n");
    return 2;
  }
  const Arguments arguments{
      words[2], std::atoi(words[3].c_str()), {words.begin() + (is_get ? 5 : 4), words.end()}};
  SP_CHECK(arguments.streams > 0);
  SP_CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK);
  absl::Status status;
  if (is_bare_put) PutAllBare(arguments, mode == "put-signed");
  if (mode == "put-store") status = PutAllThroughStore(arguments);
  if (is_get) GetAllBare(arguments, words[4]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "s3_yardstick: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) { return shardprep::Main({argv, argv + argc}); }
