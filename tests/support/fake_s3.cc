#include "tests/support/fake_s3.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <pugixml.hpp>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

std::string DigestBytes(const EVP_MD* kind, absl::string_view text) {
  uint8_t out[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  SP_CHECK(EVP_Digest(text.data(), text.size(), out, &size, kind, nullptr) == 1);
  return {reinterpret_cast<const char*>(out), size};
}

std::string Md5(absl::string_view text) { return DigestBytes(EVP_md5(), text); }

std::string Hex(const std::string& bytes) { return absl::BytesToHexString(bytes); }

std::string Hmac(const std::string& key, const std::string& text) {
  uint8_t out[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  SP_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                reinterpret_cast<const uint8_t*>(text.data()), text.size(), out, &size) != nullptr);
  return {reinterpret_cast<const char*>(out), size};
}

absl::string_view BodyOf(const HttpRequest& http) {
  return {reinterpret_cast<const char*>(http.body.data()), http.body.size()};
}

int HexDigit(char c) {
  static constexpr absl::string_view kDigits = "0123456789ABCDEF";
  const size_t at = kDigits.find(absl::ascii_toupper(static_cast<unsigned char>(c)));
  return at == absl::string_view::npos ? 0 : static_cast<int>(at);
}

std::string Unescape(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      out.push_back(static_cast<char>(HexDigit(text[i + 1]) * 16 + HexDigit(text[i + 2])));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

// What Amazon's encoding-type=url does, with a space as `+`.
std::string EscapeListed(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (absl::ascii_isalnum(byte) || absl::StrContains("-_.*/", absl::string_view(&c, 1))) {
      out.push_back(c);
    } else if (c == ' ') {
      out.push_back('+');
    } else {
      absl::StrAppend(&out, "%", absl::AsciiStrToUpper(Hex(std::string(1, c))));
    }
  }
  return out;
}

// A URL taken apart, still escaped.
struct Url {
  std::string host;
  std::string path;
  std::string query;
};

Url ParseUrl(const std::string& url) {
  Url parsed;
  absl::string_view rest = url;
  rest.remove_prefix(rest.find("://") + 3);
  const std::pair<absl::string_view, absl::string_view> query =
      absl::StrSplit(rest, absl::MaxSplits('?', 1));
  parsed.query = std::string(query.second);
  const size_t slash = std::min(query.first.find('/'), query.first.size());
  parsed.host = std::string(query.first.substr(0, slash));
  parsed.path = std::string(query.first.substr(slash));
  return parsed;
}

std::string OperationOf(const std::string& method, bool has_key,
                        const std::map<std::string, std::string>& query) {
  if (!has_key) return query.contains("list-type") ? "ListObjectsV2" : "HeadBucket";
  const bool has_upload = query.contains("uploadId");
  if (method == "PUT") return has_upload ? "UploadPart" : "PutObject";
  if (method == "DELETE") return has_upload ? "AbortMultipartUpload" : "DeleteObject";
  if (method == "POST") return has_upload ? "CompleteMultipartUpload" : "CreateMultipartUpload";
  return method == "HEAD" ? "HeadObject" : "GetObject";
}

std::string HeaderOf(const FakeRequest& request, const std::string& name) {
  const auto found = request.headers.find(name);
  return found == request.headers.end() ? "" : found->second;
}

std::string QueryOf(const FakeRequest& request, const std::string& name) {
  const auto found = request.query.find(name);
  return found == request.query.end() ? "" : found->second;
}

std::string Xml(const std::string& root,
                const std::vector<std::pair<std::string, std::string>>& fields) {
  pugi::xml_document document;
  pugi::xml_node node = document.append_child(root.c_str());
  for (const auto& [name, value] : fields) {
    node.append_child(name.c_str()).text().set(value.c_str());
  }
  struct : pugi::xml_writer {
    void write(const void* data, size_t size) override {
      text.append(static_cast<const char*>(data), size);
    }
    std::string text;
  } writer;
  document.save(writer);
  return writer.text;
}

std::string Quoted(const std::string& etag) { return absl::StrCat("\"", etag, "\""); }

// Outer spaces go, inner ones become one.
std::string HeaderForSigning(std::string value) {
  absl::RemoveExtraAsciiWhitespace(&value);
  return value;
}

// The signature of the request as it stands on the wire, after AWS's description of Signature
// Version 4; `signed_headers` and `scope` are those of its Authorization header.
std::string ExpectedSignature(const HttpRequest& http, const FakeRequest& request,
                              const std::string& secret, const std::string& signed_headers,
                              const std::vector<std::string>& scope) {
  const Url url = ParseUrl(http.url);
  std::vector<std::string> query = absl::StrSplit(url.query, '&', absl::SkipEmpty());
  std::sort(query.begin(), query.end());
  std::string canonical =
      absl::StrCat(http.method, "\n", url.path, "\n", absl::StrJoin(query, "&"), "\n");
  for (const absl::string_view name : absl::StrSplit(signed_headers, ';')) {
    absl::StrAppend(&canonical, name, ":", HeaderForSigning(HeaderOf(request, std::string(name))),
                    "\n");
  }
  absl::StrAppend(&canonical, "\n", signed_headers, "\n",
                  HeaderOf(request, "x-amz-content-sha256"));
  const std::string to_sign =
      absl::StrCat("AWS4-HMAC-SHA256\n", HeaderOf(request, "x-amz-date"), "\n",
                   absl::StrJoin(scope, "/"), "\n", Hex(DigestBytes(EVP_sha256(), canonical)));
  std::string key = absl::StrCat("AWS4", secret);
  for (const std::string& step : scope) key = Hmac(key, step);
  return Hex(Hmac(key, to_sign));
}

// "a=b, c=d" after the algorithm of an Authorization header.
std::map<std::string, std::string> AuthorizationFields(absl::string_view header) {
  std::map<std::string, std::string> fields;
  absl::ConsumePrefix(&header, "AWS4-HMAC-SHA256 ");
  for (const absl::string_view piece : absl::StrSplit(header, ',')) {
    const std::pair<std::string, std::string> field =
        absl::StrSplit(absl::StripAsciiWhitespace(piece), absl::MaxSplits('=', 1));
    fields.insert(field);
  }
  return fields;
}

}  // namespace

void FakeAnswer::SetHeader(const std::string& name, const std::string& value) {
  headers.erase(std::remove_if(headers.begin(), headers.end(),
                               [&](const HttpHeader& header) { return header.name == name; }),
                headers.end());
  headers.push_back({name, value});
}

FakeAnswer FakeError(int status, const std::string& code, const std::string& message) {
  FakeAnswer answer;
  answer.status = status;
  answer.body = Xml("Error", {{"Code", code}, {"Message", message}, {"RequestId", "1"}});
  return answer;
}

class FakeS3::Transport final : public HttpTransport {
 public:
  explicit Transport(FakeS3* server) : server_(server) {}
  HttpResponse Send(const HttpRequest& request) override { return server_->Serve(request); }

 private:
  FakeS3* const server_;
};

FakeS3::FakeS3(FakeS3Options options, const Clock* clock)
    : options_(std::move(options)), clock_(clock) {
  accounts_.push_back({options_.credentials});
}

std::unique_ptr<HttpTransport> FakeS3::Connect() { return std::make_unique<Transport>(this); }

void FakeS3::set_down(bool down) {
  absl::MutexLock lock(&mu_);
  is_down_ = down;
}

void FakeS3::set_skew(absl::Duration skew) {
  absl::MutexLock lock(&mu_);
  skew_ = skew;
}

void FakeS3::set_credentials(const AwsCredentials& credentials) {
  absl::MutexLock lock(&mu_);
  std::erase_if(accounts_, [](const Account& account) { return !account.is_expired; });
  accounts_.push_back({credentials});
}

void FakeS3::Expire(const std::string& access_key_id) {
  absl::MutexLock lock(&mu_);
  for (Account& account : accounts_) {
    if (account.credentials.access_key_id == access_key_id) account.is_expired = true;
  }
}

void FakeS3::RemoveBucket() {
  absl::MutexLock lock(&mu_);
  has_bucket_ = false;
}

FakeS3::Count FakeS3::count(const std::string& operation) const {
  absl::MutexLock lock(&mu_);
  const auto found = counts_.find(operation);
  return found == counts_.end() ? Count() : found->second;
}

int64_t FakeS3::requests() const {
  absl::MutexLock lock(&mu_);
  int64_t sum = 0;
  for (const auto& [operation, count] : counts_) sum += count.requests;
  return sum;
}

int FakeS3::most_in_flight() const {
  absl::MutexLock lock(&mu_);
  return most_in_flight_;
}

std::vector<std::string> FakeS3::Keys() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::string> keys;
  keys.reserve(objects_.size());
  for (const auto& [key, stored] : objects_) keys.push_back(key);
  return keys;
}

std::optional<std::string> FakeS3::Object(const std::string& key) const {
  absl::MutexLock lock(&mu_);
  const auto found = objects_.find(key);
  if (found == objects_.end()) return std::nullopt;
  return *found->second.bytes;
}

void FakeS3::PutObject(const std::string& key, const std::string& bytes) {
  absl::MutexLock lock(&mu_);
  Store(key, std::make_shared<const std::string>(bytes), Hex(Md5(bytes)));
}

std::vector<std::string> FakeS3::Uploads() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::string> uploads;
  uploads.reserve(uploads_.size());
  for (const auto& [id, upload] : uploads_) uploads.push_back(absl::StrCat(upload.key, " ", id));
  return uploads;
}

std::string FakeS3::BeginUpload(const std::string& key) {
  absl::MutexLock lock(&mu_);
  // Ids hold what must be escaped in a query.
  std::string id = absl::StrCat("upload+/=", next_upload_++);
  uploads_[id].key = key;
  return id;
}

absl::Time FakeS3::Now() const {
  absl::MutexLock lock(&mu_);
  return clock_->Wall() + skew_;
}

HttpResponse FakeS3::Serve(const HttpRequest& http) {
  const Url url = ParseUrl(http.url);
  FakeRequest request;
  for (const HttpHeader& header : http.headers) request.headers[header.name] = header.value;
  for (const absl::string_view piece : absl::StrSplit(url.query, '&', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(piece, absl::MaxSplits('=', 1));
    request.query[Unescape(pair.first)] = Unescape(pair.second);
  }
  request.host = url.host;
  std::string path = url.path;
  const bool in_host = absl::StartsWith(url.host, absl::StrCat(options_.bucket, "."));
  if (!in_host) path = path.substr(std::min(path.find('/', 1), path.size()));
  request.key = path.empty() ? "" : Unescape(path).substr(1);
  request.operation = OperationOf(http.method, !request.key.empty(), request.query);
  request.body_bytes = static_cast<int64_t>(http.body.size());

  HttpResponse lost;
  lost.transport = absl::UnavailableError("connection closed");
  {
    absl::MutexLock lock(&mu_);
    Count& count = counts_[request.operation];
    request.number = static_cast<int>(++count.requests);
    count.received_bytes += request.body_bytes;
    most_in_flight_ = std::max(most_in_flight_, ++in_flight_);
  }
  const FakeFault fault = fault_ ? fault_(request) : FakeFault();
  FakeAnswer answer;
  bool is_lost = fault.lose_request;
  {
    absl::MutexLock lock(&mu_);
    --in_flight_;
    is_lost = is_lost || is_down_;
  }
  if (is_lost) return lost;
  answer = fault.instead ? *fault.instead : Answer(http, request);
  answer.headers.push_back(
      {"date", absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", Now(), absl::UTCTimeZone())});
  if (http.method == "HEAD") answer.body.clear();
  if (fault.edit) fault.edit(&answer);
  if (fault.lose_answer) return lost;

  HttpResponse response;
  response.status = answer.status;
  response.headers = answer.headers;
  const auto length = static_cast<int64_t>(answer.body.size());
  if (fault.cut_body_after >= 0 && fault.cut_body_after < length) {
    answer.body.resize(static_cast<size_t>(fault.cut_body_after));
    response.transport = absl::UnavailableError(
        absl::StrCat("connection closed after ", fault.cut_body_after, " of ", length, " bytes"));
  }
  const bool goes_into = answer.status / 100 == 2 && !http.into.empty();
  const size_t bound = goes_into ? http.into.size() : static_cast<size_t>(http.max_body_bytes);
  if (answer.body.size() > bound) {
    answer.body.resize(bound);
    response.transport = absl::ResourceExhaustedError(absl::StrCat("body over ", bound));
  }
  {
    absl::MutexLock lock(&mu_);
    counts_[request.operation].sent_bytes += static_cast<int64_t>(answer.body.size());
  }
  if (goes_into) {
    // In two pieces, as a network might.
    const size_t pieces[] = {answer.body.size() / 2, answer.body.size() - answer.body.size() / 2};
    for (const size_t piece : pieces) {
      std::copy_n(answer.body.data() + response.into_bytes, piece,
                  http.into.data() + response.into_bytes);
      response.into_bytes += static_cast<int64_t>(piece);
      if (http.arrived && piece > 0) http.arrived(response.into_bytes);
    }
  } else {
    response.body = std::move(answer.body);
  }
  return response;
}

FakeAnswer FakeS3::Answer(const HttpRequest& http, const FakeRequest& request) {
  const std::optional<FakeAnswer> refused = CheckSignature(http, request);
  if (refused) return *refused;
  return CarryOut(http, request);
}

std::optional<FakeAnswer> FakeS3::CheckSignature(const HttpRequest& http,
                                                 const FakeRequest& request) const {
  const auto fields = AuthorizationFields(HeaderOf(request, "authorization"));
  if (!fields.contains("Credential") || !fields.contains("SignedHeaders")) {
    return FakeError(403, "AccessDenied", "no authorization");
  }
  std::vector<std::string> scope = absl::StrSplit(fields.at("Credential"), '/');
  const std::string access_key_id = scope.front();
  scope.erase(scope.begin());
  std::optional<Account> account;
  {
    absl::MutexLock lock(&mu_);
    for (const Account& known : accounts_) {
      if (known.credentials.access_key_id == access_key_id) account = known;
    }
  }
  if (!account) return FakeError(403, "InvalidAccessKeyId", "no such key");
  if (account->is_expired) return FakeError(400, "ExpiredToken", "The provided token has expired.");
  if (HeaderOf(request, "x-amz-security-token") != account->credentials.session_token) {
    return FakeError(400, "InvalidToken", "wrong token");
  }
  if (scope.size() != 4 || scope[2] != "s3" || scope[3] != "aws4_request") {
    return FakeError(400, "AuthorizationHeaderMalformed", "bad scope");
  }
  absl::Time sent;
  std::string why;
  const std::string date = HeaderOf(request, "x-amz-date");
  if (!absl::ParseTime("%E4Y%m%dT%H%M%SZ", date, &sent, &why) ||
      absl::AbsDuration(sent - Now()) > absl::Minutes(15)) {
    return FakeError(403, "RequestTimeTooSkewed", "The difference is too large.");
  }
  if (scope[0] != date.substr(0, 8)) return FakeError(400, "AuthorizationHeaderMalformed", "date");
  if (HeaderOf(request, "host") != ParseUrl(http.url).host) {
    return FakeError(400, "InvalidRequest", "host");
  }
  // Every x-amz-* header and the host must be signed.
  const std::string& names = fields.at("SignedHeaders");
  const std::vector<std::string> signed_names = absl::StrSplit(names, ';');
  for (const auto& [name, value] : request.headers) {
    const bool must = name == "host" || absl::StartsWith(name, "x-amz-");
    if (must && std::find(signed_names.begin(), signed_names.end(), name) == signed_names.end()) {
      return FakeError(403, "AccessDenied", absl::StrCat("header not signed: ", name));
    }
  }
  const std::string expected =
      ExpectedSignature(http, request, account->credentials.secret_access_key, names, scope);
  if (!fields.contains("Signature") || fields.at("Signature") != expected) {
    FakeAnswer answer = FakeError(403, "SignatureDoesNotMatch", "");
    answer.body = Xml("Error", {{"Code", "SignatureDoesNotMatch"},
                                {"Message", "The request signature we calculated differs."},
                                {"AWSAccessKeyId", access_key_id},
                                {"SignatureProvided", fields.at("Signature")}});
    return answer;
  }
  const std::string payload = HeaderOf(request, "x-amz-content-sha256");
  if (payload != "UNSIGNED-PAYLOAD" && payload != Hex(DigestBytes(EVP_sha256(), BodyOf(http)))) {
    return FakeError(400, "XAmzContentSHA256Mismatch", "");
  }
  if (scope[1] == options_.region) return std::nullopt;
  // Amazon's endpoints redirect, other servers find the scope wrong.
  const bool redirects = absl::EndsWith(request.host, ".amazonaws.com");
  FakeAnswer answer;
  answer.status = redirects ? 301 : 400;
  answer.body =
      Xml("Error", {{"Code", redirects ? "PermanentRedirect" : "AuthorizationHeaderMalformed"},
                    {"Message", "wrong region"},
                    {"Region", options_.region}});
  if (redirects) answer.SetHeader("x-amz-bucket-region", options_.region);
  return answer;
}

FakeAnswer FakeS3::CarryOut(const HttpRequest& http, const FakeRequest& request) {
  const std::string bucket_in_path = Unescape(ParseUrl(http.url).path.substr(1));
  const bool names_bucket = absl::StartsWith(request.host, absl::StrCat(options_.bucket, ".")) ||
                            bucket_in_path == options_.bucket ||
                            absl::StartsWith(bucket_in_path, absl::StrCat(options_.bucket, "/"));
  absl::MutexLock lock(&mu_);
  if (!has_bucket_ || !names_bucket) return FakeError(404, "NoSuchBucket", "no such bucket");
  const std::string& operation = request.operation;
  if (operation == "ListObjectsV2") return List(request);
  if (operation == "PutObject") return Put(http, request);
  if (operation == "GetObject" || operation == "HeadObject") return Read(request);
  if (operation == "DeleteObject") {
    objects_.erase(request.key);
    FakeAnswer answer;
    answer.status = 204;
    return answer;
  }
  if (operation == "CreateMultipartUpload") {
    const std::string id = absl::StrCat("upload+/=", next_upload_++);
    uploads_[id].key = request.key;
    FakeAnswer answer;
    answer.body = Xml("InitiateMultipartUploadResult",
                      {{"Bucket", options_.bucket}, {"Key", request.key}, {"UploadId", id}});
    return answer;
  }
  const auto upload = uploads_.find(QueryOf(request, "uploadId"));
  if (upload == uploads_.end() || upload->second.key != request.key) {
    return FakeError(404, "NoSuchUpload", "no such upload");
  }
  if (operation == "UploadPart") return PutPart(http, request);
  if (operation == "CompleteMultipartUpload") return Complete(http, request);
  uploads_.erase(upload);
  FakeAnswer answer;
  answer.status = 204;
  return answer;
}

void FakeS3::Store(const std::string& key, std::shared_ptr<const std::string> bytes,
                   const std::string& etag) {
  const auto found = objects_.find(key);
  const absl::Time since = found == objects_.end() ? clock_->Wall() : found->second.since;
  objects_[key] = Stored{std::move(bytes), etag, since};
}

FakeAnswer FakeS3::Put(const HttpRequest& http, const FakeRequest& request) {
  if (!HeaderOf(request, "if-none-match").empty()) {
    using Kind = FakeS3Options::ConditionalPut;
    if (options_.conditional_put == Kind::kNotImplemented) {
      return FakeError(501, "NotImplemented", "a header you provided is not implemented");
    }
    if (options_.conditional_put == Kind::kHonoured && objects_.contains(request.key)) {
      return FakeError(412, "PreconditionFailed", "");
    }
  }
  const absl::string_view body = BodyOf(http);
  const std::string etag = Hex(Md5(body));
  Store(request.key, std::make_shared<const std::string>(body), etag);
  FakeAnswer answer;
  answer.SetHeader("etag", Quoted(etag));
  return answer;
}

FakeAnswer FakeS3::Read(const FakeRequest& request) {
  const auto found = objects_.find(request.key);
  if (found == objects_.end() || clock_->Wall() - found->second.since < options_.visible_after) {
    return FakeError(404, "NoSuchKey", "The specified key does not exist.");
  }
  const Stored& stored = found->second;
  const std::string if_match = HeaderOf(request, "if-match");
  if (!if_match.empty() && if_match != Quoted(stored.etag)) {
    return FakeError(412, "PreconditionFailed", "");
  }
  FakeAnswer answer;
  answer.SetHeader("etag", Quoted(stored.etag));
  const auto size = static_cast<int64_t>(stored.bytes->size());
  int64_t first = 0;
  int64_t last = size - 1;
  std::string range = HeaderOf(request, "range");
  if (!range.empty()) {
    const std::vector<std::string> ends = absl::StrSplit(range.substr(6), '-');
    SP_CHECK(absl::StartsWith(range, "bytes=") && ends.size() == 2 &&
             absl::SimpleAtoi(ends[0], &first) && absl::SimpleAtoi(ends[1], &last));
    last = std::min(last, size - 1);
    if (first >= size) return FakeError(416, "InvalidRange", "");
    answer.status = 206;
    answer.SetHeader("content-range", absl::StrCat("bytes ", first, "-", last, "/", size));
  }
  const int64_t length = last - first + 1;
  answer.SetHeader("content-length", absl::StrCat(length));
  if (request.operation == "GetObject") {
    answer.body = stored.bytes->substr(static_cast<size_t>(first), static_cast<size_t>(length));
  }
  return answer;
}

FakeAnswer FakeS3::List(const FakeRequest& request) {
  const std::string prefix = QueryOf(request, "prefix");
  const std::string token = QueryOf(request, "continuation-token");
  const bool encodes = options_.encodes_keys && QueryOf(request, "encoding-type") == "url";
  // The last key that was listed, in a form whose characters must be escaped in a query.
  std::string after;
  if (!token.empty() && !absl::Base64Unescape(token.substr(2), &after)) {
    return FakeError(400, "InvalidArgument", "token");
  }
  pugi::xml_document document;
  pugi::xml_node root = document.append_child("ListBucketResult");
  if (encodes) root.append_child("EncodingType").text().set("url");
  int64_t listed = 0;
  std::string last;
  bool is_truncated = false;
  for (const auto& [key, stored] : objects_) {
    if (!absl::StartsWith(key, prefix) || (!token.empty() && key <= after)) continue;
    if (listed == options_.page_keys) {
      is_truncated = true;
      break;
    }
    ++listed;
    last = key;
    pugi::xml_node contents = root.append_child("Contents");
    contents.append_child("Key").text().set((encodes ? EscapeListed(key) : key).c_str());
    contents.append_child("ETag").text().set(Quoted(stored.etag).c_str());
    contents.append_child("Size").text().set(absl::StrCat(stored.bytes->size()).c_str());
  }
  root.append_child("IsTruncated").text().set(is_truncated ? "true" : "false");
  if (is_truncated) {
    root.append_child("NextContinuationToken")
        .text()
        .set(absl::StrCat("+=", absl::Base64Escape(last)).c_str());
  }
  struct : pugi::xml_writer {
    void write(const void* data, size_t size) override {
      text.append(static_cast<const char*>(data), size);
    }
    std::string text;
  } writer;
  document.save(writer);
  FakeAnswer answer;
  answer.body = std::move(writer.text);
  return answer;
}

FakeAnswer FakeS3::PutPart(const HttpRequest& http, const FakeRequest& request) {
  int number = 0;
  if (!absl::SimpleAtoi(QueryOf(request, "partNumber"), &number) || number < 1 || number > 10000) {
    return FakeError(400, "InvalidArgument", "part number");
  }
  const absl::string_view body = BodyOf(http);
  Part& part = uploads_.at(QueryOf(request, "uploadId")).parts[number];
  part = Part{std::make_shared<const std::string>(body), Md5(body)};
  FakeAnswer answer;
  answer.SetHeader("etag", Quoted(Hex(part.md5)));
  return answer;
}

FakeAnswer FakeS3::Complete(const HttpRequest& http, const FakeRequest& request) {
  pugi::xml_document document;
  if (!document.load_buffer(http.body.data(), http.body.size())) {
    return FakeError(400, "MalformedXML", "");
  }
  const std::string id = QueryOf(request, "uploadId");
  const std::map<int, Part>& parts = uploads_.at(id).parts;
  std::string bytes;
  std::string md5s;
  int count = 0;
  size_t part_bytes = 0;
  for (const pugi::xml_node& node : document.child("CompleteMultipartUpload").children("Part")) {
    const auto part = parts.find(node.child("PartNumber").text().as_int());
    if (part == parts.end() || node.child("ETag").text().get() != Quoted(Hex(part->second.md5))) {
      return FakeError(400, "InvalidPart", "");
    }
    const bool is_last = !node.next_sibling("Part");
    const size_t size = part->second.bytes->size();
    if (count == 0) part_bytes = size;
    if (!is_last && static_cast<int64_t>(size) < options_.least_part_bytes) {
      return FakeError(400, "EntityTooSmall", "");
    }
    // As Cloudflare R2 wants it, so that nobody relies on less; no store takes empty parts.
    if (size == 0 || size > part_bytes || (!is_last && size != part_bytes)) {
      return FakeError(400, "InvalidPart", "All non-trailing parts must have the same length.");
    }
    bytes += *part->second.bytes;
    md5s += part->second.md5;
    ++count;
  }
  if (count == 0) return FakeError(400, "MalformedXML", "no parts");
  const std::string etag = absl::StrCat(Hex(Md5(md5s)), "-", count);
  uploads_.erase(id);
  Store(request.key, std::make_shared<const std::string>(std::move(bytes)), etag);
  FakeAnswer answer;
  answer.body =
      Xml("CompleteMultipartUploadResult",
          {{"Key", request.key}, {"ETag", options_.empty_complete_etag ? "" : Quoted(etag)}});
  return answer;
}

}  // namespace shardprep
