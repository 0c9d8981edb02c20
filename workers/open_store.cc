#include "workers/open_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"
#include "workers/directory_store.h"
#include "workers/log.h"
#include "workers/object_names.h"
#include "workers/s3/s3_store.h"

namespace shardprep {
namespace {

constexpr char kS3Scheme[] = "s3://";
constexpr size_t kMaxUriBytes = 4096;  // PATH_MAX

absl::Status BadUri(const std::string& uri, absl::string_view reason) {
  const std::string shown = absl::CHexEscape(UriWithoutSecrets(uri).substr(0, 300));
  return absl::InvalidArgumentError(absl::StrCat("URI \"", shown, "\": ", reason));
}

// The lower-case scheme and what follows its colon. Only `scheme://`, `file:/` and `s3:/` count as
// having one: `model:v2` is a path.
struct SplitUri {
  std::string scheme;
  std::string rest;
};

SplitUri SplitScheme(const std::string& uri) {
  const size_t colon = uri.find(':');
  if (colon == std::string::npos || colon == 0) return {"", uri};
  const std::string scheme = absl::AsciiStrToLower(uri.substr(0, colon));
  const std::string rest = uri.substr(colon + 1);
  const bool is_name = absl::ascii_isalpha(static_cast<unsigned char>(scheme.front())) &&
                       std::all_of(scheme.begin(), scheme.end(), [](char c) {
                         return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '+' ||
                                c == '-' || c == '.';
                       });
  const bool is_ours = (scheme == "file" || scheme == "s3") && absl::StartsWith(rest, "/");
  if (!is_name || !(is_ours || absl::StartsWith(rest, "//"))) return {"", uri};
  return {scheme, rest};
}

absl::StatusOr<std::string> PercentDecode(const std::string& uri, absl::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded.push_back(text[i]);
      continue;
    }
    const absl::string_view digits = text.substr(i + 1, 2);
    if (digits.size() != 2 || !std::all_of(digits.begin(), digits.end(), [](unsigned char c) {
          return absl::ascii_isxdigit(c);
        })) {
      return BadUri(uri, "a % that two hex digits do not follow");
    }
    decoded.append(absl::HexStringToBytes(digits));
    i += 2;
  }
  return decoded;
}

// What follows `file:` as a path.
absl::StatusOr<std::string> FilePath(const std::string& uri, const std::string& rest) {
  absl::string_view path = rest;
  if (absl::ConsumePrefix(&path, "//")) {
    absl::ConsumePrefix(&path, "localhost");
    if (!absl::StartsWith(path, "/")) {
      return BadUri(uri, "a file URI names a host, want file:///absolute/path");
    }
  }
  if (path.find_first_of("?#") != absl::string_view::npos) {
    return BadUri(uri, "a query or fragment in a file URI; write ? as %3F and # as %23");
  }
  return PercentDecode(uri, path);
}

absl::StatusOr<std::string> NormalizePath(const std::string& uri, const std::string& path,
                                          const std::string& base_directory) {
  std::vector<std::string> segments;
  bool dots_may_follow = false;
  if (path.front() != '/') {
    if (base_directory.empty()) return BadUri(uri, "a relative path, want an absolute one");
    SP_ASSIGN_OR_RETURN(const std::string base, NormalizeUri(base_directory));
    segments = absl::StrSplit(base, '/', absl::SkipEmpty());
    dots_may_follow = true;
  }
  for (const absl::string_view segment : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (segment == ".") continue;
    if (segment == "..") {
      if (!dots_may_follow || segments.empty()) {
        return BadUri(uri, "holds the segment \"..\" where it is ambiguous");
      }
      segments.pop_back();
      continue;
    }
    dots_may_follow = false;
    segments.emplace_back(segment);
  }
  return absl::StrCat("/", absl::StrJoin(segments, "/"));
}

absl::StatusOr<std::string> NormalizeS3(const std::string& uri, const std::string& rest) {
  if (!absl::StartsWith(rest, "//")) return BadUri(uri, "want s3://bucket/prefix");
  const std::string place(absl::StripSuffix(absl::StripPrefix(rest, "//"), "/"));
  const size_t slash = place.find('/');
  const std::string bucket = place.substr(0, slash);
  const bool is_name = bucket.size() >= 3 && bucket.size() <= 63 &&
                       std::all_of(bucket.begin(), bucket.end(), [](char c) {
                         return absl::ascii_islower(static_cast<unsigned char>(c)) ||
                                absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-' ||
                                c == '.';
                       });
  if (!is_name) return BadUri(uri, "a bucket has 3 to 63 of a-z, 0-9, - and .");
  if (slash == std::string::npos) return absl::StrCat(kS3Scheme, bucket);
  const std::string prefix = place.substr(slash + 1);
  const absl::Status valid = ValidateObjectKey(prefix);
  if (!valid.ok()) return BadUri(uri, valid.message());
  return absl::StrCat(kS3Scheme, bucket, "/", prefix);
}

}  // namespace

absl::StatusOr<std::string> NormalizeUri(const std::string& uri,
                                         const std::string& base_directory) {
  if (uri.empty()) return BadUri(uri, "empty");
  if (uri.size() > kMaxUriBytes) {
    return BadUri(uri, absl::StrCat(uri.size(), " bytes, want at most ", kMaxUriBytes));
  }
  const SplitUri split = SplitScheme(uri);
  if (split.scheme == "s3") return NormalizeS3(uri, split.rest);
  std::string path = split.rest;
  if (split.scheme == "file") {
    SP_ASSIGN_OR_RETURN(path, FilePath(uri, split.rest));
  } else if (!split.scheme.empty()) {
    return BadUri(uri, absl::StrCat("scheme ", split.scheme, ", want a path, file:// or s3://"));
  }
  if (path.find('\0') != std::string::npos) return BadUri(uri, "holds a NUL");
  return NormalizePath(uri, path, base_directory);
}

bool IsSameOrInside(const std::string& inner, const std::string& outer) {
  if (inner == outer) return true;
  if (outer == "/") return absl::StartsWith(inner, "/");
  return absl::StartsWith(inner, absl::StrCat(outer, "/"));
}

bool IsS3Uri(const std::string& uri) { return SplitScheme(uri).scheme == "s3"; }

absl::StatusOr<std::unique_ptr<ObjectStore>> OpenStore(const std::string& uri,
                                                       const OpenStoreOptions& options) {
  SP_ASSIGN_OR_RETURN(std::string normal, NormalizeUri(uri));
  if (absl::StartsWith(normal, kS3Scheme)) {
    if (options.s3 == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(normal, ": access to S3 is not set up here"));
    }
    return OpenS3Store(normal, options.s3, options.stop);
  }
  DirectoryStoreOptions directory;
  directory.root = std::move(normal);
  directory.create = options.create;
  directory.allowed_roots = options.allowed_roots;
  return OpenDirectoryStore(std::move(directory));
}

}  // namespace shardprep
