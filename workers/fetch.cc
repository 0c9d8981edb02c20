// How a directory of fetched shards comes to be.
//
// 1. Expectations are held against the manifest before anything is written.
// 2. Files are gathered in `<DIR>.shardprep-partial`, beside DIR so that a rename can move it. A
//    lock file in it keeps a second process out. manifest.json goes in first and says what the rest
//    belongs to: a partial directory with another manifest is emptied.
// 3. Space for what is missing must be free. Where each is a request, all objects are opened before
//    the first is read, several at a time, so that no stream waits at the start of a file and an
//    object that is not there is known at once.
// 4. Data files are read chunk by chunk (16 MiB, the unit of their digests), several at a time.
//    A chunk that is there already with the right digest is kept; any other is read from the store,
//    digested while it arrives, once more if it is wrong, and written in place. There is no record
//    of progress that could be wrong: the digests are the record, so a resumed fetch reads again
//    only what was not finished, at most one chunk for each that was in flight.
// 5. When all is there: fsync of each file and the directory, rename to DIR, fsync of its parent.
#include "workers/fetch.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/manifest.h"
#include "workers/object_names.h"
#include "workers/parallel.h"
#include "workers/proto_json.h"

namespace shardprep {
namespace {

constexpr char kPartialSuffix[] = ".shardprep-partial";
constexpr char kLockName[] = ".lock";
constexpr int kMaxParallel = 256;
constexpr size_t kMaxRanks = 65'536;
constexpr size_t kMaxExpectationBytes = 4096;
constexpr int64_t kMaxNumber = 999'999'999;

// -- Expectations --

enum class ValueKind { kText, kNumber, kVersion, kHash };

struct KeyInfo {
  const char* key;
  ValueKind kind;
};

constexpr KeyInfo kKeys[] = {
    {"backend", ValueKind::kText},     {"activation", ValueKind::kText},
    {"arch", ValueKind::kText},        {"tp", ValueKind::kNumber},
    {"ep", ValueKind::kNumber},        {"profile", ValueKind::kText},
    {"width", ValueKind::kNumber},     {"hidden", ValueKind::kNumber},
    {"gate_mode", ValueKind::kText},   {"aiter", ValueKind::kVersion},
    {"fingerprint", ValueKind::kHash}, {"content", ValueKind::kHash},
};

// A number from 0 to kMaxNumber, written as one writes it: no sign, no leading zero.
std::optional<int64_t> ParseNumber(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < 0 || value > kMaxNumber || absl::StrCat(value) != text) return std::nullopt;
  return value;
}

absl::StatusOr<Expectation> ParseExpectation(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("expectation '", text, "' is not of the form key=value"));
  }
  Expectation expectation{text.substr(0, equals), text.substr(equals + 1)};
  const auto* info = std::find_if(std::begin(kKeys), std::end(kKeys),
                                  [&](const KeyInfo& k) { return expectation.key == k.key; });
  if (info == std::end(kKeys)) {
    const auto name = [](std::string* out, const KeyInfo& k) { out->append(k.key); };
    return absl::InvalidArgumentError(absl::StrCat("unknown expectation '", expectation.key,
                                                   "'; known: ", absl::StrJoin(kKeys, ", ", name)));
  }
  const auto fail = [&](const char* want) {
    return absl::InvalidArgumentError(absl::StrCat("expectation ", expectation.key, " is '",
                                                   expectation.value, "', want ", want));
  };
  switch (info->kind) {
    case ValueKind::kText:
      if (expectation.value.empty()) return fail("a value");
      break;
    case ValueKind::kNumber:
      if (ParseNumber(expectation.value).value_or(0) < 1) return fail("a number from 1");
      break;
    case ValueKind::kVersion:
      if (!CompareVersions(expectation.value, "0").ok()) return fail("a version like 0.1.16");
      break;
    case ValueKind::kHash:
      if (!IsFingerprint(expectation.value)) return fail("64 lower-case hexadecimal digits");
      break;
  }
  return expectation;
}

// What the manifest has for a key other than aiter.
std::string ManifestValue(const v1::Manifest& manifest, const std::string& key) {
  const v1::KernelTarget& kernel = manifest.kernel_target();
  const v1::ParallelLayout& parallel = manifest.parallel_layout();
  if (key == "backend") return kernel.backend();
  if (key == "activation") return kernel.activation();
  if (key == "arch") return kernel.architecture();
  if (key == "tp") return absl::StrCat(parallel.tensor_parallel_size());
  if (key == "ep") return absl::StrCat(parallel.expert_parallel_size());
  if (key == "profile") return kernel.profile();
  if (key == "width") return absl::StrCat(manifest.extents().padded_intermediate());
  if (key == "hidden") return absl::StrCat(manifest.extents().padded_hidden());
  if (key == "gate_mode") return manifest.gate_mode();
  if (key == "fingerprint") return manifest.layout_fingerprint();
  return manifest.content_id();
}

absl::Status CheckExpectation(const v1::Manifest& manifest, const Expectation& expectation,
                              const std::string& uri) {
  if (expectation.key == "aiter") {
    const std::string& minimum = manifest.minimum_aiter_version();
    if (minimum.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("aiter: expected ", expectation.value, ", found that ", uri,
                       " states no version that it needs, so there is nothing to hold it against"));
    }
    SP_ASSIGN_OR_RETURN(const int order, CompareVersions(expectation.value, minimum));
    if (order >= 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("aiter: expected ", expectation.value,
                                                      ", found that ", uri, " needs ", minimum,
                                                      " or later"));
  }
  const std::string found = ManifestValue(manifest, expectation.key);
  if (found == expectation.value) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      expectation.key, ": expected ", expectation.value, ", found ", found, " in ", uri));
}

absl::Status CheckExpectations(const v1::Manifest& manifest, const FetchOptions& options,
                               const std::string& uri) {
  std::set<std::string> stated;
  for (const Expectation& given : options.expect) {
    // Callers of the library may have filled the structure themselves.
    SP_ASSIGN_OR_RETURN(const Expectation expectation,
                        ParseExpectation(absl::StrCat(given.key, "=", given.value)));
    SP_RETURN_IF_ERROR(CheckExpectation(manifest, expectation, uri));
    stated.insert(expectation.key);
  }
  if (options.no_expect || (stated.contains("profile") && stated.contains("width"))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the expectation must state at least profile and width, because files of another profile or "
      "width load without an error and compute garbage; ",
      uri, " has profile=", ManifestValue(manifest, "profile"),
      ",width=", ManifestValue(manifest, "width")));
}

// -- Versions --

// A version as a sequence that compares in the order of PEP 440.
struct Version {
  std::vector<int64_t> release;  // without trailing zeros
  int64_t pre_phase = 0;         // a, b, rc, none; before them a .dev release without any
  int64_t pre_number = 0;
  int64_t post = -1;
  int64_t dev = std::numeric_limits<int64_t>::max();
  auto operator<=>(const Version&) const = default;
};

class VersionParser {
 public:
  explicit VersionParser(const std::string& text) : text_(text), rest_(text) {}

  absl::StatusOr<Version> Parse() {
    Version version;
    std::optional<int64_t> number = Digits();
    if (!number.has_value()) return Fail();
    version.release.push_back(*number);
    while (rest_.size() > 1 && rest_[0] == '.' && absl::ascii_isdigit(rest_[1])) {
      rest_.erase(0, 1);
      number = Digits();
      if (!number.has_value()) return Fail();
      version.release.push_back(*number);
    }
    while (version.release.size() > 1 && version.release.back() == 0) version.release.pop_back();
    constexpr const char* kPhases[] = {"a", "b", "rc"};
    constexpr int64_t kNoPhase = 3;
    version.pre_phase = kNoPhase;
    for (int64_t phase = 0; phase < kNoPhase && version.pre_phase == kNoPhase; ++phase) {
      if (!Word(kPhases[phase])) continue;
      version.pre_phase = phase;
      number = Digits();
      if (!number.has_value()) return Fail();
      version.pre_number = *number;
    }
    if (Word(".post")) {
      number = Digits();
      if (!number.has_value()) return Fail();
      version.post = *number;
    }
    if (Word(".dev")) {
      number = Digits();
      if (!number.has_value()) return Fail();
      version.dev = *number;
      if (version.pre_phase == kNoPhase && version.post < 0) version.pre_phase = -1;
    }
    if (!rest_.empty() && !IsLocalPart()) return Fail();
    return version;
  }

 private:
  absl::Status Fail() const {
    return absl::InvalidArgumentError(absl::StrCat("'", text_, "' is no version"));
  }

  bool Word(const std::string& word) {
    if (!absl::StartsWith(rest_, word)) return false;
    rest_.erase(0, word.size());
    return true;
  }

  std::optional<int64_t> Digits() {
    size_t size = 0;
    while (size < rest_.size() && absl::ascii_isdigit(rest_[size])) ++size;
    int64_t value = 0;
    if (size == 0 || size > 9 || !absl::SimpleAtoi(rest_.substr(0, size), &value)) {
      return std::nullopt;
    }
    rest_.erase(0, size);
    return value;
  }

  bool IsLocalPart() const {
    return rest_.size() > 1 && rest_.size() < 256 && rest_[0] == '+' &&
           std::all_of(
               rest_.begin() + 1, rest_.end(),
               [](char c) { return absl::ascii_isalnum(c) || c == '.'; });
  }

  const std::string& text_;
  std::string rest_;
};

// -- What is to be fetched --

struct Wanted {
  v1::Manifest manifest;
  std::map<std::string, std::string> small_files;  // key -> bytes, manifest.json among them
  std::vector<v1::FileRecord> data_files;
  int64_t data_bytes = 0;

  bool Has(const std::string& name) const {
    return small_files.contains(name) ||
           std::any_of(data_files.begin(), data_files.end(),
                       [&](const v1::FileRecord& file) { return file.key() == name; });
  }
};

absl::Status Malformed(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("manifest.json: ", what));
}

absl::Status CheckRanks(const std::vector<int32_t>& ranks, const v1::Manifest& manifest) {
  if (ranks.empty()) return absl::InvalidArgumentError("no ranks to fetch");
  std::set<int32_t> seen;
  for (const int32_t rank : ranks) {
    if (rank < 0 || rank >= manifest.rank_count()) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": the artefact has ",
                                                     manifest.rank_count(), " ranks, 0 to ",
                                                     manifest.rank_count() - 1));
    }
    if (!seen.insert(rank).second) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " is given twice"));
    }
  }
  return absl::OkStatus();
}

// Small objects by key: their bytes, or why they cannot be had.
using Texts = std::map<std::string, absl::StatusOr<std::string>>;

// Reads them at once where each is a request with a latency of its own.
Texts GetEach(ObjectStore& store, const std::vector<std::string>& keys) {
  std::vector<absl::StatusOr<std::string>> texts(keys.size());
  ForEachAtOnce(static_cast<int64_t>(keys.size()),
                store.PreferredReadBytes() > 0 ? kRequestsAtOnce : 1, [&](int64_t i) {
                  texts[static_cast<size_t>(i)] =
                      store.Get(keys[static_cast<size_t>(i)], kMaxDocumentBytes);
                });
  Texts by_key;
  for (size_t i = 0; i < keys.size(); ++i) by_key.emplace(keys[i], std::move(texts[i]));
  return by_key;
}

absl::StatusOr<std::string> TextOf(const Texts& texts, const std::string& key) {
  const auto& text = texts.at(key);
  if (absl::IsNotFound(text.status())) return absl::DataLossError(absl::StrCat(key, ": missing"));
  return text;
}

// A rank manifest and the data files that it lists. Names come from outside: each must be the one
// that we would have given, so none can leave the directory.
absl::Status AddRank(const Texts& texts, const v1::SmallFile& reference, int32_t rank,
                     Wanted& wanted) {
  SP_ASSIGN_OR_RETURN(const std::string text, TextOf(texts, reference.key()));
  SP_ASSIGN_OR_RETURN(const v1::RankManifest manifest, ParseRankManifest(text, reference));
  if (!manifest.has_rank() || manifest.rank() != rank ||
      manifest.layout_fingerprint() != wanted.manifest.layout_fingerprint()) {
    return absl::DataLossError(absl::StrCat(reference.key(), ": is of rank ", manifest.rank(),
                                            " and fingerprint ", manifest.layout_fingerprint(),
                                            ", want rank ", rank, " and ",
                                            wanted.manifest.layout_fingerprint()));
  }
  for (int part = 0; part < manifest.files_size(); ++part) {
    const v1::FileRecord& file = manifest.files(part);
    const std::string want = rank == kReplicatedRank
                                 ? ObjectKey(ReplicatedPart{.part = part})
                                 : ObjectKey(RankPart{.rank = rank, .part = part});
    if (file.key() != want) {
      return absl::DataLossError(
          absl::StrCat(reference.key(), ": file ", part, " is ", file.key(), ", want ", want));
    }
    SP_RETURN_IF_ERROR(CheckFileRecord(file));
    wanted.data_bytes += file.size_bytes();
    wanted.data_files.push_back(file);
  }
  wanted.small_files[reference.key()] = text;
  return absl::OkStatus();
}

absl::Status AddSmallFile(const Texts& texts, const v1::SmallFile& file, Wanted& wanted) {
  SP_ASSIGN_OR_RETURN(const std::string bytes, TextOf(texts, file.key()));
  if (static_cast<int64_t>(bytes.size()) != file.size_bytes() ||
      Sha256Hex(bytes) != file.sha256()) {
    return absl::DataLossError(
        absl::StrCat(file.key(), ": SHA-256 ", Sha256Hex(bytes), ", want ", file.sha256()));
  }
  wanted.small_files[file.key()] = bytes;
  return absl::OkStatus();
}

// The small files of the ranks besides their manifests: expert maps, where the artefact has any,
// and copied files. Their names come from outside as well.
absl::StatusOr<std::vector<v1::SmallFile>> SmallFilesOf(const v1::Manifest& manifest,
                                                        const std::vector<int32_t>& ranks) {
  std::vector<v1::SmallFile> files;
  files.reserve(ranks.size() + static_cast<size_t>(manifest.copied_files_size()));
  std::map<std::string, const v1::SmallFile*> maps;
  for (const v1::SmallFile& file : manifest.expert_maps()) maps[file.key()] = &file;
  for (const int32_t rank : ranks) {
    if (maps.empty()) break;
    const auto it = maps.find(ObjectKey(ExpertMap{.rank = rank}));
    if (it == maps.end()) return Malformed(absl::StrCat("no expert map of rank ", rank));
    files.push_back(*it->second);
  }
  for (const v1::SmallFile& file : manifest.copied_files()) {
    if (!CopiedFileKey(file.key()).ok() || absl::StrContains(file.key(), '/')) {
      return Malformed(absl::StrCat("copied file '", file.key(), "' has no name to copy to"));
    }
    files.push_back(file);
  }
  return files;
}

absl::StatusOr<Wanted> FindWanted(ObjectStore& store, const FetchOptions& options) {
  Wanted wanted;
  const std::string manifest_key = ObjectKey(ManifestName{});
  SP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(store));
  // Before anything is believed that the manifest says.
  if (!options.trusted.empty()) SP_RETURN_IF_ERROR(options.trusted.CheckStored(store, text));
  SP_ASSIGN_OR_RETURN(wanted.manifest, ParseManifest(text));
  SP_RETURN_IF_ERROR(CheckExpectations(wanted.manifest, options, store.uri()));
  SP_RETURN_IF_ERROR(CheckRanks(options.ranks, wanted.manifest));
  wanted.small_files[manifest_key] = text;

  std::map<std::string, int32_t> ranks;
  for (const int32_t rank : options.ranks) ranks[ObjectKey(RankManifest{.rank = rank})] = rank;
  ranks[ObjectKey(ReplicatedManifest{})] = kReplicatedRank;
  SP_ASSIGN_OR_RETURN(const std::vector<v1::SmallFile> small_files,
                      SmallFilesOf(wanted.manifest, options.ranks));
  std::vector<std::string> keys;
  keys.reserve(ranks.size() + small_files.size());
  for (const auto& [key, rank] : ranks) keys.push_back(key);
  for (const v1::SmallFile& file : small_files) keys.push_back(file.key());
  const Texts texts = GetEach(store, keys);

  size_t found = 0;
  for (const v1::SmallFile& reference : wanted.manifest.rank_manifests()) {
    const auto it = ranks.find(reference.key());
    if (it == ranks.end()) continue;
    SP_RETURN_IF_ERROR(AddRank(texts, reference, it->second, wanted));
    if (it->second != kReplicatedRank) ++found;
  }
  if (found != options.ranks.size()) {
    return Malformed("a rank manifest is missing or listed twice");
  }
  for (const v1::SmallFile& file : small_files) {
    SP_RETURN_IF_ERROR(AddSmallFile(texts, file, wanted));
  }
  return wanted;
}

// -- The file system --

absl::Status ErrnoStatus(int error, const std::string& path, const char* what) {
  const std::string message =
      absl::StrCat(path, ": ", what, ": ", std::generic_category().message(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case EIO:
      return absl::DataLossError(message);
    case EAGAIN:
    case EBUSY:
    case ESTALE:
      return absl::UnavailableError(message);
    default:
      return absl::FailedPreconditionError(message);
  }
}

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { Reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  void Reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

absl::Status WriteAll(int fd, const uint8_t* data, int64_t size, int64_t offset,
                      const std::string& path) {
  while (size > 0) {
    const ssize_t n = ::pwrite(fd, data, size, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n < 0 ? errno : EIO, path, "write");
    data += n;
    size -= n;
    offset += n;
  }
  return absl::OkStatus();
}

// False when the file ends before.
absl::StatusOr<bool> ReadAll(int fd, absl::Span<uint8_t> out, int64_t offset,
                             const std::string& path) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n =
        ::pread(fd, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, path, "read");
    if (n == 0) return false;
    done += n;
  }
  return true;
}

absl::Status SyncAndClose(Fd& fd, const std::string& path) {
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, path, "fsync");
  fd.Reset();
  return absl::OkStatus();
}

absl::Status SyncDirectory(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok()) return ErrnoStatus(errno, path, "open");
  return SyncAndClose(fd, path);
}

absl::Status WriteSmallFile(const std::string& path, const std::string& bytes) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd.ok()) return ErrnoStatus(errno, path, "create");
  SP_RETURN_IF_ERROR(WriteAll(fd.get(), reinterpret_cast<const uint8_t*>(bytes.data()),
                              static_cast<int64_t>(bytes.size()), 0, path));
  return SyncAndClose(fd, path);
}

// The bytes of a file that should have `size` bytes; nothing when it is not there or has another.
absl::StatusOr<std::optional<std::string>> ReadSmallFile(const std::string& path, size_t size) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.ok() && errno == ENOENT) return std::nullopt;
  if (!fd.ok()) return ErrnoStatus(errno, path, "open");
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return ErrnoStatus(errno, path, "stat");
  if (!S_ISREG(st.st_mode) || static_cast<size_t>(st.st_size) != size) return std::nullopt;
  std::string bytes(size, '\0');
  SP_ASSIGN_OR_RETURN(const bool whole,
                      ReadAll(fd.get(), {reinterpret_cast<uint8_t*>(bytes.data()), size}, 0, path));
  if (!whole) return std::nullopt;
  return bytes;
}

// Names of the entries of a directory, sorted.
absl::StatusOr<std::vector<std::string>> ListNames(const std::string& path) {
  DIR* const stream = ::opendir(path.c_str());
  if (stream == nullptr) return ErrnoStatus(errno, path, "open directory");
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  if (error != 0) return ErrnoStatus(error, path, "read directory");
  std::sort(names.begin(), names.end());
  return names;
}

// -- Chunks --

// Where chunks come from and what a wrong one means.
enum class ChunkMode {
  kFill,   // a chunk that is not there is read from the store
  kCheck,  // all must be there
};

// The SHA-256 of a chunk at most that is filled from its start, kept up with while it is.
class ArrivingDigest {
 public:
  explicit ArrivingDigest(absl::Span<const uint8_t> bytes) : bytes_(bytes) {}

  // As Arrived of workers/object_store.h.
  void Reach(int64_t count) {
    if (count < done_) Restart();
    digest_.Update(bytes_.subspan(static_cast<size_t>(done_), static_cast<size_t>(count - done_)));
    done_ = count;
  }

  // All has arrived. Leaves the object as new.
  std::string FinishHex() {
    Reach(static_cast<int64_t>(bytes_.size()));
    return HexEncode(Restart().chunk_sha256.front());
  }

 private:
  FileDigest Restart() {
    done_ = 0;
    return digest_.Finish();
  }

  const absl::Span<const uint8_t> bytes_;
  ChunkedDigest digest_;
  int64_t done_ = 0;
};

// One data file while its chunks are in work.
struct OpenFile {
  const v1::FileRecord* record = nullptr;
  std::string path;
  int64_t chunks = 1;  // at least one step, which makes an empty file
  absl::Mutex mu;
  bool is_open ABSL_GUARDED_BY(mu) = false;
  int64_t done_chunks ABSL_GUARDED_BY(mu) = 0;
  Fd fd;                                 // set once under mu, then read-only until closed
  bool is_new = false;                   // likewise: nothing in it can be right
  std::unique_ptr<ObjectReader> reader;  // likewise, or set before any thread has the file
};

// Fills or checks all data files, `parallel` chunks at a time.
class ChunkRun {
 public:
  ChunkRun(ObjectStore& store, const Wanted& wanted, const std::string& directory, ChunkMode mode,
           const FetchOptions& options)
      : store_(store),
        wanted_(wanted),
        mode_(mode),
        options_(options),
        files_(wanted.data_files.size()) {
    for (size_t f = 0; f < files_.size(); ++f) {
      files_[f].record = &wanted.data_files[f];
      files_[f].path = absl::StrCat(directory, "/", files_[f].record->key());
      files_[f].chunks = std::max(1, files_[f].record->chunk_sha256_size());
    }
  }

  absl::Status Run() {
    if (mode_ == ChunkMode::kFill && store_.PreferredReadBytes() > 0) {
      SP_RETURN_IF_ERROR(OpenObjects());
    }
    std::vector<std::thread> pool;
    for (int t = 1; t < options_.parallel; ++t) pool.emplace_back([this] { Work(); });
    Work();
    for (std::thread& thread : pool) thread.join();
    absl::MutexLock lock(&mu_);
    return error_;
  }

  int64_t downloaded_bytes() {
    absl::MutexLock lock(&mu_);
    return downloaded_bytes_;
  }

 private:
  void Work() {
    std::vector<uint8_t> buffer;
    for (;;) {
      size_t file = 0;
      int64_t chunk = 0;
      {
        absl::MutexLock lock(&mu_);
        if (!error_.ok() || next_file_ == files_.size()) return;
        file = next_file_;
        chunk = next_chunk_++;
        if (next_chunk_ == files_[file].chunks) {
          ++next_file_;
          next_chunk_ = 0;
        }
      }
      const absl::Status status = DoChunk(files_[file], chunk, buffer);
      if (status.ok()) continue;
      absl::MutexLock lock(&mu_);
      error_.Update(status);
    }
  }

  absl::Status DoChunk(OpenFile& file, int64_t chunk, std::vector<uint8_t>& buffer) {
    SP_RETURN_IF_ERROR(EnsureOpen(file));
    const int64_t begin = chunk * kDigestChunkBytes;
    const int64_t size = std::min(kDigestChunkBytes, file.record->size_bytes() - begin);
    int64_t downloaded = 0;
    if (size > 0) {
      buffer.resize(kDigestChunkBytes);
      const absl::Span<uint8_t> bytes = absl::MakeSpan(buffer).subspan(0, size);
      SP_ASSIGN_OR_RETURN(const bool there, IsThere(file, chunk, begin, bytes));
      if (!there) {
        SP_RETURN_IF_ERROR(Download(file, chunk, begin, bytes));
        SP_RETURN_IF_ERROR(WriteAll(file.fd.get(), bytes.data(), size, begin, file.path));
        // Else all of it would be written by the fsync at the end, and the stream wait for that.
        ::sync_file_range(file.fd.get(), begin, size, SYNC_FILE_RANGE_WRITE);
        downloaded = size;
      }
    }
    SP_RETURN_IF_ERROR(EndChunk(file));
    absl::MutexLock lock(&mu_);
    downloaded_bytes_ += downloaded;
    done_bytes_ += size;
    if (options_.progress) options_.progress(done_bytes_, wanted_.data_bytes);
    return absl::OkStatus();
  }

  absl::Status EnsureOpen(OpenFile& file) {
    absl::MutexLock lock(&file.mu);
    if (file.is_open) return absl::OkStatus();
    if (mode_ == ChunkMode::kFill) {
      file.fd =
          Fd(::open(file.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
      file.is_new = file.fd.ok();
      if (!file.is_new && errno != EEXIST) return ErrnoStatus(errno, file.path, "create");
    }
    if (!file.fd.ok()) {
      const int access = mode_ == ChunkMode::kFill ? O_RDWR : O_RDONLY;
      file.fd = Fd(::open(file.path.c_str(), access | O_NOFOLLOW | O_CLOEXEC));
      if (!file.fd.ok()) return ErrnoStatus(errno, file.path, "open");
    }
    SP_RETURN_IF_ERROR(mode_ == ChunkMode::kFill ? Prepare(file) : CheckSize(file));
    file.is_open = true;
    return absl::OkStatus();
  }

  // An object that is no file here costs no descriptor while it is open.
  absl::Status OpenObjects() {
    return TryForEachAtOnce(static_cast<int64_t>(files_.size()), kRequestsAtOnce,
                            [&](int64_t f) { return OpenObject(files_[static_cast<size_t>(f)]); });
  }

  absl::Status Prepare(OpenFile& file) {
    if (::ftruncate(file.fd.get(), file.record->size_bytes()) != 0) {
      return ErrnoStatus(errno, file.path, "set the size");
    }
    return file.reader == nullptr ? OpenObject(file) : absl::OkStatus();
  }

  absl::Status OpenObject(OpenFile& file) {
    const int64_t size = file.record->size_bytes();
    auto reader = store_.Open(file.record->key());
    if (absl::IsNotFound(reader.status())) {
      return absl::DataLossError(absl::StrCat(file.record->key(), ": missing"));
    }
    SP_RETURN_IF_ERROR(reader.status());
    if ((*reader)->info().size_bytes != size) {
      return absl::DataLossError(absl::StrCat(file.record->key(), ": ",
                                              (*reader)->info().size_bytes, " bytes, want ", size));
    }
    file.reader = *std::move(reader);
    return absl::OkStatus();
  }

  absl::Status CheckSize(const OpenFile& file) const {
    struct stat st;
    if (::fstat(file.fd.get(), &st) != 0) return ErrnoStatus(errno, file.path, "stat");
    if (S_ISREG(st.st_mode) && st.st_size == file.record->size_bytes()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(file.path, ": ", st.st_size, " bytes, want ", file.record->size_bytes()));
  }

  absl::StatusOr<bool> IsThere(const OpenFile& file, int64_t chunk, int64_t begin,
                               absl::Span<uint8_t> bytes) const {
    if (file.is_new) return false;
    SP_ASSIGN_OR_RETURN(const bool whole, ReadAll(file.fd.get(), bytes, begin, file.path));
    const std::string& want = file.record->chunk_sha256(static_cast<int>(chunk));
    const std::string found = whole ? Sha256Hex(bytes) : "of nothing, the file ends before";
    if (found == want) return true;
    if (mode_ == ChunkMode::kFill) return false;
    return absl::DataLossError(absl::StrCat(file.path, ": chunk ", chunk, " has SHA-256 ", found,
                                            ", want ", want,
                                            "; remove the directory and fetch again"));
  }

  absl::Status Download(const OpenFile& file, int64_t chunk, int64_t begin,
                        absl::Span<uint8_t> bytes) {
    const std::string& want = file.record->chunk_sha256(static_cast<int>(chunk));
    std::string found;
    ArrivingDigest digest(bytes);
    for (int attempt = 0; attempt < 2; ++attempt) {
      SP_RETURN_IF_ERROR(file.reader->ReadAsItArrives(
          begin, bytes, [&digest](int64_t count) { digest.Reach(count); }));
      found = digest.FinishHex();
      if (found == want) return absl::OkStatus();
    }
    return absl::DataLossError(absl::StrCat(file.record->key(), " at ", store_.uri(), ": chunk ",
                                            chunk, " has SHA-256 ", found, " twice, want ", want));
  }

  absl::Status EndChunk(OpenFile& file) {
    absl::MutexLock lock(&file.mu);
    if (++file.done_chunks < file.chunks) return absl::OkStatus();
    file.reader.reset();
    if (mode_ == ChunkMode::kFill) return SyncAndClose(file.fd, file.path);
    file.fd.Reset();
    return absl::OkStatus();
  }

  ObjectStore& store_;
  const Wanted& wanted_;
  const ChunkMode mode_;
  const FetchOptions& options_;
  std::vector<OpenFile> files_;
  absl::Mutex mu_;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  size_t next_file_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t next_chunk_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t downloaded_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t done_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

// -- The directory --

// Where the files go, as a path without trailing slashes.
absl::StatusOr<std::string> TargetPath(const std::string& into) {
  std::string path = into;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string name = std::filesystem::path(path).filename().string();
  if (name.empty() || name == "." || name == ".." || absl::StrContains(path, '\0')) {
    return absl::InvalidArgumentError(absl::StrCat("'", into, "' names no directory to create"));
  }
  return path;
}

std::string ParentOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

enum class TargetState { kFree, kSameArtefact };

// Whether the target can be made, or is there with this very manifest.
absl::StatusOr<TargetState> LookAtTarget(const std::string& path, const Wanted& wanted) {
  struct stat st;
  if (::stat(path.c_str(), &st) != 0) {
    if (errno == ENOENT) return TargetState::kFree;
    return ErrnoStatus(errno, path, "stat");
  }
  if (!S_ISDIR(st.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a directory"));
  }
  SP_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(path));
  if (names.empty()) {
    struct stat parent;
    if (::lstat(path.c_str(), &st) != 0 || ::stat(ParentOf(path).c_str(), &parent) != 0) {
      return ErrnoStatus(errno, path, "stat");
    }
    if (S_ISLNK(st.st_mode) || st.st_dev != parent.st_dev) {
      return absl::FailedPreconditionError(absl::StrCat(
          path,
          " is a mount point or a link, which a rename cannot replace; name a directory "
          "below it"));
    }
    return TargetState::kFree;
  }
  const std::string manifest_key = ObjectKey(ManifestName{});
  const std::string& text = wanted.small_files.at(manifest_key);
  SP_ASSIGN_OR_RETURN(const auto found,
                      ReadSmallFile(absl::StrCat(path, "/", manifest_key), text.size()));
  if (found != text) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " exists and holds something else (", names.front(), ")"));
  }
  for (const std::string& name : names) {
    if (!wanted.Has(name)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " holds this artefact and also ", name,
                       ", which these ranks do not have; fetch into another directory"));
    }
  }
  const size_t want = wanted.small_files.size() + wanted.data_files.size();
  if (names.size() != want) {
    return absl::FailedPreconditionError(absl::StrCat(path, " holds this artefact with ",
                                                      names.size(), " of ", want,
                                                      " files; fetch into another directory"));
  }
  return TargetState::kSameArtefact;
}

absl::Status CheckSmallFiles(const std::string& path, const Wanted& wanted) {
  for (const auto& [key, bytes] : wanted.small_files) {
    const std::string file = absl::StrCat(path, "/", key);
    SP_ASSIGN_OR_RETURN(const auto found, ReadSmallFile(file, bytes.size()));
    if (found != bytes) {
      return absl::DataLossError(absl::StrCat(
          file, ": is not what the artefact has; remove the directory and fetch again"));
    }
  }
  return absl::OkStatus();
}

// The partial directory, locked for this process.
class PartialDirectory {
 public:
  static absl::StatusOr<PartialDirectory> Open(const std::string& target) {
    PartialDirectory partial;
    partial.path_ = absl::StrCat(target, kPartialSuffix);
    std::error_code error;
    std::filesystem::create_directories(ParentOf(target), error);
    if (error) return ErrnoStatus(error.value(), ParentOf(target), "create directory");
    if (::mkdir(partial.path_.c_str(), 0755) != 0 && errno != EEXIST) {
      return ErrnoStatus(errno, partial.path_, "create directory");
    }
    const std::string lock = partial.PathOf(kLockName);
    partial.lock_ = Fd(::open(lock.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (!partial.lock_.ok()) return ErrnoStatus(errno, lock, "create");
    // The winner of a race removes the lock file before it lets go; then ours is no longer the one
    // that the name stands for.
    struct stat held, named;
    if (::flock(partial.lock_.get(), LOCK_EX | LOCK_NB) != 0 ||
        ::fstat(partial.lock_.get(), &held) != 0 || ::stat(lock.c_str(), &named) != 0 ||
        held.st_ino != named.st_ino) {
      return absl::FailedPreconditionError(
          absl::StrCat("another process is fetching into ", target));
    }
    return partial;
  }

  std::string PathOf(const std::string& name) const { return absl::StrCat(path_, "/", name); }
  const std::string& path() const { return path_; }

  // Removes what does not belong to this fetch: everything when the manifest there is another.
  absl::Status Tidy(const Wanted& wanted) const {
    const std::string key = ObjectKey(ManifestName{});
    const std::string& text = wanted.small_files.at(key);
    SP_ASSIGN_OR_RETURN(const auto found, ReadSmallFile(PathOf(key), text.size()));
    SP_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(path_));
    for (const std::string& name : names) {
      if (name == kLockName || (found == text && wanted.Has(name))) continue;
      if (::unlink(PathOf(name).c_str()) != 0) {
        return ErrnoStatus(errno, PathOf(name), "remove what is in the way");
      }
    }
    return absl::OkStatus();
  }

  // RESOURCE_EXHAUSTED when the file system has no room for what is missing of the data files.
  absl::Status CheckSpace(const Wanted& wanted) const {
    int64_t want = 0;
    for (const v1::FileRecord& file : wanted.data_files) {
      struct stat st;
      const bool is_there = ::stat(PathOf(file.key()).c_str(), &st) == 0;
      want += std::max<int64_t>(0, file.size_bytes() - (is_there ? 512 * st.st_blocks : 0));
    }
    struct statvfs space;
    if (::statvfs(path_.c_str(), &space) != 0) return ErrnoStatus(errno, path_, "ask for space");
    const auto free = static_cast<int64_t>(space.f_bavail * space.f_frsize);
    // Some file systems know of no blocks.
    if (space.f_blocks == 0 || want <= free) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat(path_, ": ", free, " bytes free, want ", want, " for what is to be fetched"));
  }

  // Makes the directory appear as `target`, durably.
  absl::Status Publish(const std::string& target) {
    if (::unlink(PathOf(kLockName).c_str()) != 0) {
      return ErrnoStatus(errno, PathOf(kLockName), "remove");
    }
    SP_RETURN_IF_ERROR(SyncDirectory(path_));
    if (::rename(path_.c_str(), target.c_str()) != 0) {
      return ErrnoStatus(errno, target, "rename");
    }
    lock_.Reset();
    return SyncDirectory(ParentOf(target));
  }

 private:
  std::string path_;
  Fd lock_;
};

}  // namespace

absl::StatusOr<std::vector<Expectation>> ParseExpectations(const std::string& text) {
  if (text.size() > kMaxExpectationBytes) {
    return absl::InvalidArgumentError(absl::StrCat("expectation of ", text.size(),
                                                   " bytes, want at most ", kMaxExpectationBytes));
  }
  std::vector<Expectation> expectations;
  if (text.empty()) return expectations;
  std::set<std::string> keys;
  for (const std::string& item : std::vector<std::string>(absl::StrSplit(text, ','))) {
    SP_ASSIGN_OR_RETURN(Expectation expectation, ParseExpectation(item));
    if (!keys.insert(expectation.key).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("expectation ", expectation.key, " is given twice"));
    }
    expectations.push_back(std::move(expectation));
  }
  return expectations;
}

absl::StatusOr<std::vector<int32_t>> ParseRankList(const std::string& text) {
  const auto fail = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("rank list '", text.substr(0, 200), "': ", why));
  };
  std::set<int32_t> ranks;
  for (const std::string& item : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const size_t dash = item.find('-');
    const std::optional<int64_t> first = ParseNumber(item.substr(0, dash));
    const std::optional<int64_t> last =
        dash == std::string::npos ? first : ParseNumber(item.substr(dash + 1));
    if (!first.has_value() || !last.has_value()) {
      return fail(absl::StrCat("'", item.substr(0, 200), "' is neither a rank nor a range"));
    }
    if (*last < *first) return fail(absl::StrCat(item, " runs backwards"));
    if (*last - *first >= static_cast<int64_t>(kMaxRanks)) {
      return fail(absl::StrCat("more than ", kMaxRanks, " ranks"));
    }
    for (int64_t rank = *first; rank <= *last; ++rank) {
      if (!ranks.insert(static_cast<int32_t>(rank)).second) {
        return fail(absl::StrCat("rank ", rank, " is given twice"));
      }
    }
    if (ranks.size() > kMaxRanks) return fail(absl::StrCat("more than ", kMaxRanks, " ranks"));
  }
  return std::vector<int32_t>(ranks.begin(), ranks.end());
}

absl::StatusOr<int> CompareVersions(const std::string& a, const std::string& b) {
  SP_ASSIGN_OR_RETURN(const Version left, VersionParser(a).Parse());
  SP_ASSIGN_OR_RETURN(const Version right, VersionParser(b).Parse());
  return left < right ? -1 : (left == right ? 0 : 1);
}

absl::StatusOr<FetchReport> FetchRanks(ObjectStore& artifact, const FetchOptions& options) {
  if (options.parallel < 1 || options.parallel > kMaxParallel) {
    return absl::InvalidArgumentError(
        absl::StrCat("parallel is ", options.parallel, ", want 1 to ", kMaxParallel));
  }
  SP_ASSIGN_OR_RETURN(const std::string target, TargetPath(options.into));
  SP_ASSIGN_OR_RETURN(const Wanted wanted, FindWanted(artifact, options));
  FetchReport report;
  report.layout_fingerprint = wanted.manifest.layout_fingerprint();
  report.content_id = wanted.manifest.content_id();
  report.files = static_cast<int64_t>(wanted.small_files.size() + wanted.data_files.size());
  report.bytes = wanted.data_bytes;
  for (const auto& [key, bytes] : wanted.small_files) {
    report.bytes += static_cast<int64_t>(bytes.size());
  }
  SP_ASSIGN_OR_RETURN(const TargetState state, LookAtTarget(target, wanted));
  if (state == TargetState::kSameArtefact) {
    SP_RETURN_IF_ERROR(CheckSmallFiles(target, wanted));
    SP_RETURN_IF_ERROR(ChunkRun(artifact, wanted, target, ChunkMode::kCheck, options).Run());
    report.was_complete = true;
    return report;
  }
  SP_ASSIGN_OR_RETURN(PartialDirectory partial, PartialDirectory::Open(target));
  SP_RETURN_IF_ERROR(partial.Tidy(wanted));
  SP_RETURN_IF_ERROR(partial.CheckSpace(wanted));
  const std::string manifest_key = ObjectKey(ManifestName{});
  SP_RETURN_IF_ERROR(
      WriteSmallFile(partial.PathOf(manifest_key), wanted.small_files.at(manifest_key)));
  for (const auto& [key, bytes] : wanted.small_files) {
    if (key != manifest_key) SP_RETURN_IF_ERROR(WriteSmallFile(partial.PathOf(key), bytes));
  }
  ChunkRun run(artifact, wanted, partial.path(), ChunkMode::kFill, options);
  SP_RETURN_IF_ERROR(run.Run());
  report.bytes_downloaded = run.downloaded_bytes();
  SP_RETURN_IF_ERROR(partial.Publish(target));
  return report;
}

absl::StatusOr<FetchReport> FetchRanks(const std::string& uri, const OpenStoreOptions& store,
                                       const FetchOptions& options) {
  SP_ASSIGN_OR_RETURN(const auto artifact, OpenStore(uri, store));
  return FetchRanks(*artifact, options);
}

}  // namespace shardprep
