#include "workers/s3/credentials.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 20;
// Two writes within a file system's clock tick leave the same times. A file that was younger than
// this when it was read may have been written once more without a trace, and is read again.
constexpr absl::Duration kSettledAge = absl::Seconds(2);

bool operator==(const AwsCredentials& a, const AwsCredentials& b) {
  return a.access_key_id == b.access_key_id && a.secret_access_key == b.secret_access_key &&
         a.session_token == b.session_token;
}

// Header values and keys of a hash: a line break or a space is the trace of a careless copy.
absl::Status CheckCharacters(const std::string& value, const std::string& name) {
  for (const char c : value) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " holds a space, line break or other character that no key has"));
    }
  }
  return absl::OkStatus();
}

absl::string_view WithoutComment(absl::string_view line) {
  for (size_t i = 0; i < line.size(); ++i) {
    const bool starts_word = i == 0 || absl::ascii_isspace(static_cast<unsigned char>(line[i - 1]));
    if ((line[i] == '#' || line[i] == ';') && starts_word) return line.substr(0, i);
  }
  return line;
}

size_t Indentation(absl::string_view line) {
  size_t indentation = 0;
  while (indentation < line.size() && (line[indentation] == ' ' || line[indentation] == '\t')) {
    ++indentation;
  }
  return indentation;
}

// Reads the lines of a credentials file and keeps the keys of one section.
class SectionParser {
 public:
  explicit SectionParser(const std::string& profile) : profile_(profile) {}

  absl::Status Add(absl::string_view raw, int64_t number) {
    const absl::string_view line = absl::StripTrailingAsciiWhitespace(WithoutComment(raw));
    const size_t indentation = Indentation(line);
    if (indentation == line.size()) return absl::OkStatus();
    if (last_key_ && indentation > last_key_indentation_) return Continue(number);
    const absl::string_view text = line.substr(indentation);
    return text.front() == '[' ? StartSection(text, number) : SetKey(text, indentation, number);
  }

  absl::StatusOr<AwsCredentials> Finish() const {
    if (!found_section_) {
      return absl::NotFoundError(absl::StrCat("no section [", profile_, "]"));
    }
    for (const auto& [key, value] :
         {std::pair<const char*, const std::string&>("aws_access_key_id", found_.access_key_id),
          std::pair<const char*, const std::string&>("aws_secret_access_key",
                                                     found_.secret_access_key)}) {
      if (value.empty()) {
        return absl::NotFoundError(absl::StrCat("no ", key, " in section [", profile_, "]"));
      }
    }
    return found_;
  }

 private:
  static absl::Status Refuse(int64_t number, const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", what));
  }

  std::string* Wanted(const std::string& lower_key) {
    if (!in_profile_) return nullptr;
    if (lower_key == "aws_access_key_id") return &found_.access_key_id;
    if (lower_key == "aws_secret_access_key") return &found_.secret_access_key;
    if (lower_key == "aws_session_token") return &found_.session_token;
    return nullptr;
  }

  absl::Status StartSection(absl::string_view text, int64_t number) {
    const size_t end = text.find(']');
    if (end == absl::string_view::npos || end + 1 != text.size()) {
      return Refuse(number, "want [section] alone on its line");
    }
    in_section_ = true;
    in_profile_ = absl::StripAsciiWhitespace(text.substr(1, end - 1)) == profile_;
    found_section_ = found_section_ || in_profile_;
    last_key_.reset();
    return absl::OkStatus();
  }

  absl::Status SetKey(absl::string_view text, size_t indentation, int64_t number) {
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos || equals == 0) {
      return Refuse(number, "want [section] or key = value");
    }
    if (!in_section_) return Refuse(number, "want a [section] before the first key");
    const std::string key =
        absl::AsciiStrToLower(absl::StripTrailingAsciiWhitespace(text.substr(0, equals)));
    last_key_ = key;
    last_key_indentation_ = indentation;
    std::string* const value = Wanted(key);
    if (value == nullptr) return absl::OkStatus();
    *value = std::string(absl::StripAsciiWhitespace(text.substr(equals + 1)));
    const absl::Status status = CheckCharacters(*value, key);
    return status.ok() ? status : Refuse(number, std::string(status.message()));
  }

  // Nested settings of other programs are none of ours, but a key that goes on in the next line
  // would be used by half.
  absl::Status Continue(int64_t number) {
    if (Wanted(*last_key_) == nullptr) return absl::OkStatus();
    return Refuse(number, absl::StrCat("indented below ", *last_key_, ", which is one line"));
  }

  const std::string profile_;
  bool in_section_ = false;
  bool in_profile_ = false;
  bool found_section_ = false;
  std::optional<std::string> last_key_;
  size_t last_key_indentation_ = 0;
  AwsCredentials found_;
};

// What changes when a file is written or another takes its name.
struct FileStamp {
  dev_t device = 0;
  ino_t inode = 0;
  off_t size_bytes = 0;
  absl::Time modified;
  absl::Time changed;  // of the inode: cannot be set back as the modification time can

  bool operator==(const FileStamp&) const = default;
};

FileStamp StampOf(const struct stat& info) {
  return {info.st_dev, info.st_ino, info.st_size, absl::TimeFromTimespec(info.st_mtim),
          absl::TimeFromTimespec(info.st_ctim)};
}

absl::Status ErrnoStatus(const std::string& path) {
  return absl::FailedPreconditionError(absl::StrCat(path, ": ", std::strerror(errno)));
}

struct FileContent {
  std::string text;
  FileStamp stamp;
};

absl::StatusOr<FileContent> ReadSmallFile(const std::string& path) {
  // Not to wait for the writer of a FIFO; what is no file is refused below.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(path);
  const absl::Cleanup close_fd = [fd] { ::close(fd); };
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ErrnoStatus(path);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is no regular file"));
  }
  FileContent content{.stamp = StampOf(info)};
  std::vector<char> piece(16 << 10);
  while (true) {
    const ssize_t got = ::read(fd, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(path);
    if (got == 0) break;
    content.text.append(piece.data(), static_cast<size_t>(got));
    if (static_cast<int64_t>(content.text.size()) > kMaxFileBytes) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": more than ", kMaxFileBytes, " bytes, want a credentials file"));
    }
  }
  if (::fstat(fd, &info) != 0) return ErrnoStatus(path);
  if (!(StampOf(info) == content.stamp)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is being written"));
  }
  return content;
}

absl::Status CheckEnvironment(const AwsCredentials& credentials) {
  const struct {
    const char* name;
    const std::string& value;
    bool required;
  } kVariables[] = {{"AWS_ACCESS_KEY_ID", credentials.access_key_id, true},
                    {"AWS_SECRET_ACCESS_KEY", credentials.secret_access_key, true},
                    {"AWS_SESSION_TOKEN", credentials.session_token, false}};
  for (const auto& variable : kVariables) {
    if (variable.required && variable.value.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("S3 credentials: ", variable.name,
                       " is not set, want AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY both"));
    }
    const absl::Status status = CheckCharacters(variable.value, variable.name);
    if (!status.ok()) {
      return absl::FailedPreconditionError(absl::StrCat("S3 credentials: ", status.message()));
    }
  }
  return absl::OkStatus();
}

class FixedCredentials : public CredentialsProvider {
 public:
  explicit FixedCredentials(const AwsCredentials& credentials) : credentials_(credentials) {}

  absl::StatusOr<AwsCredentials> Get() override {
    SP_RETURN_IF_ERROR(CheckEnvironment(credentials_));
    return credentials_;
  }

  bool Refresh(const AwsCredentials& used) override { return !(credentials_ == used); }

 private:
  const AwsCredentials credentials_;
};

class FileCredentials : public CredentialsProvider {
 public:
  FileCredentials(const std::string& file, const std::string& profile)
      : file_(file), profile_(profile) {}

  absl::StatusOr<AwsCredentials> Get() override {
    absl::MutexLock lock(&mutex_);
    if (MayHaveChanged()) Read();
    if (good_) return *good_;
    return absl::FailedPreconditionError(absl::StrCat(
        "S3 credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and ", problem_));
  }

  bool Refresh(const AwsCredentials& used) override {
    absl::MutexLock lock(&mutex_);
    Read();
    return good_ && !(*good_ == used);
  }

 private:
  bool MayHaveChanged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    struct stat info = {};
    return !settled_ || ::stat(file_.c_str(), &info) != 0 || !(StampOf(info) == *settled_);
  }

  // Takes the file's credentials when it has some, else notes why not. One that is unusable has no
  // stamp, so that the next call tries again.
  void Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    settled_.reset();
    if (file_.empty()) {
      problem_ = "neither AWS_SHARED_CREDENTIALS_FILE nor HOME names a file";
      return;
    }
    const absl::Time started = absl::Now();
    const absl::StatusOr<FileContent> content = ReadSmallFile(file_);
    if (!content.ok()) {
      problem_ = std::string(content.status().message());
      return;
    }
    const absl::StatusOr<AwsCredentials> parsed = ParseCredentialsFile(content->text, profile_);
    if (!parsed.ok()) {
      problem_ = absl::StrCat(file_, ": ", parsed.status().message());
      return;
    }
    good_ = *parsed;
    if (content->stamp.changed + kSettledAge < started) settled_ = content->stamp;
  }

  const std::string file_;
  const std::string profile_;
  absl::Mutex mutex_;
  std::optional<AwsCredentials> good_ ABSL_GUARDED_BY(mutex_);
  std::optional<FileStamp> settled_ ABSL_GUARDED_BY(mutex_);  // of the file that gave good_
  std::string problem_ ABSL_GUARDED_BY(mutex_);               // of the last read that failed
};

}  // namespace

absl::StatusOr<AwsCredentials> ParseCredentialsFile(const std::string& text,
                                                    const std::string& profile) {
  absl::string_view rest = text;
  absl::ConsumePrefix(&rest, "\xEF\xBB\xBF");  // the byte order mark that some editors leave
  SectionParser parser(profile);
  int64_t number = 0;
  for (const absl::string_view line : absl::StrSplit(rest, '\n')) {
    SP_RETURN_IF_ERROR(parser.Add(line, ++number));
  }
  return parser.Finish();
}

std::unique_ptr<CredentialsProvider> MakeCredentialsProvider(const CredentialsSource& source) {
  const AwsCredentials& environment = source.environment;
  if (!environment.access_key_id.empty() || !environment.secret_access_key.empty()) {
    return std::make_unique<FixedCredentials>(environment);
  }
  return std::make_unique<FileCredentials>(source.file, source.profile);
}

}  // namespace shardprep
