#include "workers/checkpoint.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/digest.h"
#include "workers/object_names.h"
#include "workers/parallel.h"

namespace shardprep {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr char kConfigName[] = "config.json";
constexpr char kDataExtension[] = ".safetensors";
constexpr char kIndexExtension[] = ".safetensors.index.json";
constexpr char kNestedConfig[] = "text_config";
constexpr int64_t kMaxManifestBytes = int64_t{64} << 20;
// Read at once in the hope that it holds the whole header: a request saved per file. A file of
// V4-Pro has a header of 300 KB.
constexpr int64_t kFirstReadBytes = int64_t{512} << 10;
// Messages travel in gRPC trailers, which are small.
constexpr size_t kMaxListed = 20;

// "a, b and 3 more".
std::string ListNames(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxListed);
  std::string text = absl::StrJoin(
      names.begin(), names.begin() + static_cast<int64_t>(shown), ", ",
      [](std::string* out, const std::string& name) { absl::StrAppend(out, PrintableName(name)); });
  if (names.size() > shown) absl::StrAppend(&text, " and ", names.size() - shown, " more");
  return text;
}

absl::StatusOr<nlohmann::json> ParseObject(const std::string& text, const std::string& name) {
  try {
    // A NUL would pass for the end of the text.
    nlohmann::json value = text.find('\0') == std::string::npos
                               ? nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false)
                               : nlohmann::json(nlohmann::json::value_t::discarded);
    if (value.is_object()) return value;
    return absl::InvalidArgumentError(
        absl::StrCat(name, value.is_discarded() ? ": not JSON" : ": want an object at the top"));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", e.what()));
  }
}

// Whether manifest.json is the one that shardprep publishes. Protobuf JSON spells a field in two
// ways.
bool IsPreparedManifest(const nlohmann::json& manifest) {
  const auto stage = manifest.find("stage");
  return stage != manifest.end() && *stage == "prepared" &&
         (manifest.contains("layoutFingerprint") || manifest.contains("layout_fingerprint"));
}

absl::Status PreparedOutputError(const std::string& where, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat(where, ": output of shardprep (", why,
                   ") cannot be a source: its experts are already cut and shuffled; name the "
                   "original checkpoint"));
}

// `model-00002-of-00004.safetensors`: the set's name `model`, 2 and 4.
struct SplitName {
  std::string stem;
  int64_t number = 0;
  int64_t count = 0;
  size_t digits = 0;
};

std::optional<SplitName> ParseSplitName(const std::string& file) {
  absl::string_view text = file;
  if (!absl::ConsumeSuffix(&text, kDataExtension)) return std::nullopt;
  const size_t of = text.rfind("-of-");
  if (of == absl::string_view::npos || of == 0) return std::nullopt;
  const size_t dash = text.rfind('-', of - 1);
  if (dash == absl::string_view::npos) return std::nullopt;
  const absl::string_view number = text.substr(dash + 1, of - dash - 1);
  const absl::string_view count = text.substr(of + 4);
  const auto all_digits = [](absl::string_view digits) {
    return !digits.empty() && digits.size() <= 9 &&
           digits.find_first_not_of("0123456789") == absl::string_view::npos;
  };
  if (!all_digits(number) || !all_digits(count)) return std::nullopt;
  SplitName split{.stem = std::string(text.substr(0, dash)), .digits = number.size()};
  if (!absl::SimpleAtoi(number, &split.number) || !absl::SimpleAtoi(count, &split.count)) {
    return std::nullopt;
  }
  return split;
}

// Files of numbered sets that `names` begins but does not complete.
std::vector<std::string> MissingOfSplits(const std::vector<std::string>& names) {
  std::vector<std::string> missing;
  const std::set<std::string> present(names.begin(), names.end());
  std::set<std::pair<std::string, int64_t>> done;
  for (const std::string& name : names) {
    const std::optional<SplitName> split = ParseSplitName(name);
    if (!split || !done.emplace(split->stem, split->count).second) continue;
    const std::string tail = name.substr(split->stem.size() + 1 + split->digits);
    for (int64_t i = 1; i <= split->count && missing.size() <= kMaxListed; ++i) {
      std::string number = absl::StrCat(i);
      if (number.size() < split->digits) number.insert(0, split->digits - number.size(), '0');
      const std::string expected = absl::StrCat(split->stem, "-", number, tail);
      if (present.count(expected) == 0) missing.push_back(expected);
    }
  }
  return missing;
}

bool IsSmallFileName(const std::string& name) {
  if (absl::EndsWith(name, kDataExtension) || absl::EndsWith(name, kIndexExtension)) return false;
  if (absl::StartsWith(name, "tokenizer")) return true;
  constexpr std::array kExtensions = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"};
  return std::any_of(kExtensions.begin(), kExtensions.end(),
                     [&](const char* extension) { return absl::EndsWith(name, extension); });
}

}  // namespace

// One reading of a source; see ReadCheckpoint().
class CheckpointReader {
 public:
  CheckpointReader(ObjectStore& source, const CheckpointOptions& options)
      : source_(source), options_(options) {}

  absl::StatusOr<Checkpoint> Read() {
    SP_RETURN_IF_ERROR(ListRoot());
    SP_RETURN_IF_ERROR(RefusePreparedSource());
    SP_RETURN_IF_ERROR(ChooseFiles());
    SP_RETURN_IF_ERROR(ReadConfig());
    SP_RETURN_IF_ERROR(ReadFiles());
    found_.SortByName();
    SP_ASSIGN_OR_RETURN(const std::vector<bool> taken,
                        index_.has_value() ? TakeIndexedTensors() : TakeAllTensors());
    found_.Keep(taken);
    result_.tensors_ = std::move(found_);
    SortRootFiles();
    return std::move(result_);
  }

 private:
  absl::Status ListRoot() {
    SP_ASSIGN_OR_RETURN(std::vector<ObjectEntry> entries, source_.List(""));
    for (ObjectEntry& entry : entries) {
      listed_.insert(entry.key);
      if (entry.key.find('/') == std::string::npos) root_.push_back(std::move(entry));
    }
    return absl::OkStatus();
  }

  bool RootHas(const std::string& name) const {
    return std::any_of(root_.begin(), root_.end(),
                       [&](const ObjectEntry& entry) { return entry.key == name; });
  }

  absl::Status RefusePreparedSource() {
    const std::string name = ObjectKey(ManifestName{});
    if (!RootHas(name)) return absl::OkStatus();
    const absl::StatusOr<std::string> text = source_.Get(name, kMaxManifestBytes);
    if (!text.ok()) return Prefixed(name, text.status());
    const absl::StatusOr<nlohmann::json> manifest = ParseObject(*text, name);
    // A file of that name that is something else does no harm.
    if (manifest.ok() && IsPreparedManifest(*manifest)) {
      return PreparedOutputError(source_.uri(), "it has our manifest.json");
    }
    return absl::OkStatus();
  }

  absl::Status ChooseFiles() {
    const absl::StatusOr<std::string> text = source_.Get(kIndexName, options_.max_index_bytes);
    if (!text.ok() && !absl::IsNotFound(text.status())) {
      return Prefixed(kIndexName, text.status());
    }
    SP_RETURN_IF_ERROR(text.ok() ? ChooseIndexedFiles(*text) : ChooseRootFiles());
    if (static_cast<int64_t>(names_.size()) <= options_.max_files) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(
        source_.uri(), ": ", names_.size(), " checkpoint files, at most ", options_.max_files));
  }

  absl::Status ChooseIndexedFiles(const std::string& text) {
    SP_ASSIGN_OR_RETURN(index_, ParseIndex(text, kIndexName));
    names_ = index_->files;
    if (names_.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(kIndexName, ": weight_map names no file"));
    }
    if (static_cast<int64_t>(names_.size()) > options_.max_files) return absl::OkStatus();
    for (const std::string& name : names_) {
      const absl::Status valid = ValidateObjectKey(name);
      if (!valid.ok()) return Prefixed(absl::StrCat(kIndexName, ": weight_map"), valid);
      if (!absl::EndsWith(name, kDataExtension)) {
        return absl::InvalidArgumentError(absl::StrCat(
            kIndexName, ": weight_map: ", PrintableName(name), " is no *.safetensors"));
      }
    }
    return CheckIndexedFilesExist();
  }

  absl::Status CheckIndexedFilesExist() {
    std::vector<std::string> missing;
    for (const std::string& name : names_) {
      if (listed_.count(name) != 0) continue;
      // Listings leave out what cannot be opened, and do not say why.
      const absl::Status status = source_.Head(name).status();
      if (absl::IsNotFound(status)) {
        missing.push_back(name);
      } else if (!status.ok()) {
        return Prefixed(PrintableName(name), status);
      }
    }
    if (missing.empty()) return absl::OkStatus();
    std::string error =
        absl::StrCat(source_.uri(), ": ", kIndexName, " names ", names_.size(), " files, ",
                     missing.size(), " of them missing: ", ListNames(missing));
    const std::vector<std::string> present = RootDataFiles();
    if (missing.size() == names_.size() && !present.empty()) {
      absl::StrAppend(&error, "; the index does not belong to these files: ", ListNames(present));
    }
    return absl::FailedPreconditionError(error);
  }

  std::vector<std::string> RootDataFiles() const {
    std::vector<std::string> names;
    for (const ObjectEntry& entry : root_) {
      if (absl::EndsWith(entry.key, kDataExtension)) names.push_back(entry.key);
    }
    return names;
  }

  absl::Status ChooseRootFiles() {
    for (const ObjectEntry& entry : root_) {
      if (absl::EndsWith(entry.key, kIndexExtension)) {
        return absl::FailedPreconditionError(
            absl::StrCat(source_.uri(), ": has an index ", PrintableName(entry.key),
                         ", but only one named ", kIndexName, " is read"));
      }
    }
    names_ = RootDataFiles();
    const bool none = names_.empty();
    const std::vector<std::string> missing =
        none ? std::vector<std::string>{kSingleName} : MissingOfSplits(names_);
    if (missing.empty()) return absl::OkStatus();
    // Listings leave out what cannot be opened, such as a dangling link.
    const absl::Status why = source_.Head(missing.front()).status();
    if (!why.ok() && !absl::IsNotFound(why)) return Prefixed(PrintableName(missing.front()), why);
    return absl::FailedPreconditionError(
        none ? absl::StrCat(source_.uri(), ": no checkpoint: neither ", kIndexName, " nor *",
                            kDataExtension)
             : absl::StrCat(source_.uri(), ": no index, and files of a numbered set are missing: ",
                            ListNames(missing)));
  }

  absl::Status ReadConfig() {
    absl::StatusOr<std::string> text = source_.Get(kConfigName, options_.max_config_bytes);
    if (absl::IsNotFound(text.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(source_.uri(), ": ", kConfigName, " is missing"));
    }
    if (!text.ok()) return Prefixed(kConfigName, text.status());
    SP_ASSIGN_OR_RETURN(nlohmann::json config, ParseObject(*text, kConfigName));
    result_.config_ = std::make_unique<nlohmann::json>(std::move(config));
    result_.config_text_ = *std::move(text);
    return absl::OkStatus();
  }

  // A file whose header is being read.
  struct OpenFile {
    std::string name;
    std::unique_ptr<ObjectReader> reader;
    std::string bytes;   // of the file's start
    int64_t needed = 0;  // of them: 8 + N
    absl::Status status;
  };

  // Where each read is a request, those of several files are under way at once; what is found, and
  // which error is reported, does not depend on it.
  absl::Status ReadFiles() {
    const size_t at_once = source_.PreferredReadBytes() > 0 ? kRequestsAtOnce : 1;
    for (size_t begin = 0; begin < names_.size(); begin += at_once) {
      std::vector<OpenFile> files(std::min(at_once, names_.size() - begin));
      for (size_t f = 0; f < files.size(); ++f) files[f].name = names_[begin + f];
      ReadHeaders(files);
      for (const OpenFile& file : files) SP_RETURN_IF_ERROR(AddFile(file));
    }
    return absl::OkStatus();
  }

  // Reads the header bytes of the files up to the first that fails.
  void ReadHeaders(std::vector<OpenFile>& files) {
    const auto for_each = [&](size_t count, const std::function<absl::Status(OpenFile&)>& step) {
      ForEachAtOnce(static_cast<int64_t>(count), static_cast<int>(files.size()), [&](int64_t f) {
        OpenFile& file = files[static_cast<size_t>(f)];
        if (file.status.ok()) file.status = step(file);
      });
    };
    for_each(files.size(), [this](OpenFile& file) { return ReadStart(file); });
    size_t good = 0;
    for (; good < files.size(); ++good) {
      OpenFile& file = files[good];
      if (file.status.ok()) file.status = CountHeader(file);
      if (!file.status.ok()) break;
    }
    for_each(good, ReadRest);
  }

  absl::Status ReadStart(OpenFile& file) const {
    absl::StatusOr<std::unique_ptr<ObjectReader>> reader = source_.Open(file.name);
    if (!reader.ok()) return Prefixed(PrintableName(file.name), reader.status());
    file.reader = *std::move(reader);
    const int64_t size_bytes = file.reader->info().size_bytes;
    file.bytes.resize(static_cast<size_t>(std::min(size_bytes, kFirstReadBytes)));
    return file.bytes.empty() ? absl::OkStatus() : ReadFrom(file, 0);
  }

  // Reads what is left of the header.
  static absl::Status ReadRest(OpenFile& file) {
    const auto have = static_cast<int64_t>(file.bytes.size());
    file.bytes.resize(static_cast<size_t>(file.needed));
    return file.needed > have ? ReadFrom(file, have) : absl::OkStatus();
  }

  static absl::Status ReadFrom(OpenFile& file, int64_t from) {
    auto* data = reinterpret_cast<uint8_t*>(file.bytes.data());
    return file.reader->ReadAt(from, absl::MakeSpan(data + from, file.bytes.size() - from));
  }

  // How long the header is, by the first bytes, and whether that is not too much.
  absl::Status CountHeader(OpenFile& file) {
    const std::string name = PrintableName(file.name);
    SP_ASSIGN_OR_RETURN(const int64_t length,
                        ParseHeaderLength(file.bytes, file.reader->info().size_bytes, name));
    file.needed = kHeaderLengthBytes + length;
    header_bytes_total_ += file.needed;
    if (header_bytes_total_ > options_.max_header_bytes_total) {
      return absl::ResourceExhaustedError(absl::StrCat(name, ": headers up to this file are ",
                                                       header_bytes_total_, " bytes, at most ",
                                                       options_.max_header_bytes_total));
    }
    return absl::OkStatus();
  }

  absl::Status AddFile(const OpenFile& file) {
    SP_RETURN_IF_ERROR(file.status);
    const ObjectInfo& info = file.reader->info();
    SP_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                        ParseHeader(absl::string_view(file.bytes).substr(kHeaderLengthBytes),
                                    info.size_bytes, PrintableName(file.name)));
    if (header.metadata.count(kFingerprintMetadataKey) != 0) {
      return PreparedOutputError(PrintableName(file.name),
                                 absl::StrCat("its header has ", kFingerprintMetadataKey));
    }
    for (int64_t i = 0; i < header.tensors.size(); ++i) {
      TensorInfo tensor = header.tensors.at(i);
      tensor.file = static_cast<int64_t>(result_.files_.size());
      found_.Add(tensor);
    }
    result_.files_.push_back({.name = file.name,
                              .size_bytes = info.size_bytes,
                              .data_start = header.data_start,
                              .header_sha256 = Sha256Hex(file.bytes),
                              .etag = info.etag});
    return absl::OkStatus();
  }

  const std::string& FileName(int64_t file) const {
    return result_.files_[static_cast<size_t>(file)].name;
  }

  // Which of found_ make up the checkpoint.
  absl::StatusOr<std::vector<bool>> TakeAllTensors() {
    for (int64_t i = 1; i < found_.size(); ++i) {
      const TensorInfo tensor = found_.at(i);
      if (found_.at(i - 1).name == tensor.name) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", PrintableName(tensor.name), ": in both ",
                         PrintableName(FileName(found_.at(i - 1).file)), " and ",
                         PrintableName(FileName(tensor.file)), ", and no index says which counts"));
      }
    }
    return std::vector<bool>(static_cast<size_t>(found_.size()), true);
  }

  // Walks index and headers, both sorted by name. The index's files are numbered as result_.files_
  // is, since all of them were read in that order.
  absl::StatusOr<std::vector<bool>> TakeIndexedTensors() {
    std::vector<bool> take(static_cast<size_t>(found_.size()), false);
    std::vector<int64_t> indexed(names_.size(), 0);
    std::vector<int64_t> taken(names_.size(), 0);
    int64_t at = 0;
    const auto pass_by = [&](const TensorInfo& tensor) {
      result_.unindexed_.push_back({.tensor = std::string(tensor.name),
                                    .file = FileName(tensor.file),
                                    .size_bytes = tensor.size_bytes});
    };
    for (int64_t i = 0; i < index_->tensors.size(); ++i) {
      const TensorInfo entry = index_->tensors.at(i);
      ++indexed[static_cast<size_t>(entry.file)];
      while (at < found_.size() && found_.at(at).name < entry.name) pass_by(found_.at(at++));
      bool found = false;
      for (; at < found_.size() && found_.at(at).name == entry.name; ++at) {
        const TensorInfo tensor = found_.at(at);
        if (tensor.file == entry.file) {
          take[static_cast<size_t>(at)] = true;
          ++taken[static_cast<size_t>(entry.file)];
          found = true;
        } else {
          pass_by(tensor);
        }
      }
      if (!found) {
        result_.stale_.push_back({.tensor = std::string(entry.name), .file = FileName(entry.file)});
      }
    }
    while (at < found_.size()) pass_by(found_.at(at++));
    SP_RETURN_IF_ERROR(CheckEachFileGaveSome(indexed, taken));
    return take;
  }

  // `indexed` and `taken` count the tensors of each file.
  absl::Status CheckEachFileGaveSome(const std::vector<int64_t>& indexed,
                                     const std::vector<int64_t>& taken) const {
    for (size_t file = 0; file < names_.size(); ++file) {
      if (taken[file] != 0) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          PrintableName(names_[file]), ": holds none of the ", indexed[file], " tensors that ",
          kIndexName, " places there; index and files do not belong together"));
    }
    return absl::OkStatus();
  }

  void SortRootFiles() {
    const std::set<std::string> opened(names_.begin(), names_.end());
    for (ObjectEntry& entry : root_) {
      if (opened.count(entry.key) != 0 || entry.key == kIndexName) continue;
      const bool copied = IsSmallFileName(entry.key) && CopiedFileKey(entry.key).ok() &&
                          entry.info.size_bytes <= options_.max_small_file_bytes;
      (copied ? result_.small_files_ : result_.left_files_)
          .push_back({.name = entry.key, .info = std::move(entry.info)});
    }
  }

  ObjectStore& source_;
  const CheckpointOptions& options_;
  std::vector<ObjectEntry> root_;
  std::set<std::string> listed_;  // every key of the source
  std::optional<SafetensorsIndex> index_;
  std::vector<std::string> names_;  // of the files to open, sorted
  int64_t header_bytes_total_ = 0;
  TensorTable found_;  // tensors of all opened files
  Checkpoint result_;
};

Checkpoint::Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

std::optional<int64_t> Checkpoint::FindTensor(absl::string_view name) const {
  int64_t low = 0;
  int64_t high = tensors_.size();
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (tensors_.at(middle).name < name) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == tensors_.size() || tensors_.at(low).name != name) return std::nullopt;
  return low;
}

const nlohmann::json* Checkpoint::FindConfig(const std::string& key) const {
  const auto find = [](const nlohmann::json& object,
                       const std::string& name) -> const nlohmann::json* {
    const auto it = object.find(name);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  };
  absl::string_view nested_key = key;
  const bool only_nested = absl::ConsumePrefix(&nested_key, absl::StrCat(kNestedConfig, "."));
  if (!only_nested) {
    if (const nlohmann::json* value = find(*config_, key)) return value;
  }
  const nlohmann::json* nested = find(*config_, kNestedConfig);
  if (nested == nullptr || !nested->is_object()) return nullptr;
  return find(*nested, std::string(nested_key));
}

absl::StatusOr<int64_t> Checkpoint::ConfigInt(const std::string& key) const {
  const nlohmann::json* value = FindConfig(key);
  if (value == nullptr) return absl::NotFoundError(absl::StrCat(kConfigName, ": no ", key));
  const bool fits =
      value->is_number_integer() &&
      (!value->is_number_unsigned() ||
       value->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (fits) return value->get<int64_t>();
  return absl::InvalidArgumentError(absl::StrCat(
      kConfigName, ": ", key, ": want an integer, found ", PrintableName(value->dump())));
}

absl::StatusOr<std::string> Checkpoint::ConfigString(const std::string& key) const {
  const nlohmann::json* value = FindConfig(key);
  if (value == nullptr) return absl::NotFoundError(absl::StrCat(kConfigName, ": no ", key));
  if (value->is_string()) return value->get<std::string>();
  return absl::InvalidArgumentError(absl::StrCat(kConfigName, ": ", key, ": want a string, found ",
                                                 PrintableName(value->dump())));
}

absl::StatusOr<Checkpoint> ReadCheckpoint(ObjectStore& source, const CheckpointOptions& options) {
  return CheckpointReader(source, options).Read();
}

}  // namespace shardprep
