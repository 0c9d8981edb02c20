#include "workers/safetensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr char kMetadataName[] = "__metadata__";
constexpr char kLfsPointer[] = "version https://git-lfs";
constexpr char kDeserialization[] = "InvalidHeaderDeserialization";
constexpr size_t kMaxRank = 64;         // more than any array library has
constexpr int kMaxNesting = 32;         // of values that we skip
constexpr size_t kMaxUnknownKeys = 64;  // of one tensor

// What is wrong with a header: the Rust reader's name for it, and the detail.
struct HeaderError {
  const char* name;
  std::string detail;
};

absl::Status Malformed(const std::string& file, absl::string_view error, absl::string_view detail) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", error, ": ", detail));
}

// Length of the well-formed UTF-8 sequence at `text[i]`, 0 when there is none (Unicode 15, table
// 3-7: no surrogates, no overlong forms, nothing above U+10FFFF).
size_t Utf8SequenceLength(absl::string_view text, size_t i) {
  const auto byte = [&](size_t k) { return static_cast<uint8_t>(text[i + k]); };
  const auto tail = [&](size_t k, uint8_t low, uint8_t high) {
    return i + k < text.size() && byte(k) >= low && byte(k) <= high;
  };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return tail(1, 0x80, 0xBF) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const uint8_t low = lead == 0xE0 ? 0xA0 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : 0xBF;
    return tail(1, low, high) && tail(2, 0x80, 0xBF) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const uint8_t low = lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xF4 ? 0x8F : 0xBF;
    return tail(1, low, high) && tail(2, 0x80, 0xBF) && tail(3, 0x80, 0xBF) ? 4 : 0;
  }
  return 0;
}

// Offset of the first byte that is not UTF-8, or text.size().
size_t FindInvalidUtf8(absl::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    // Headers are ASCII but for odd names: eight bytes at a time.
    uint64_t word = 0;
    if (text.size() - i >= sizeof(word)) {
      std::memcpy(&word, text.data() + i, sizeof(word));
      if ((word & 0x8080808080808080u) == 0) {
        i += sizeof(word);
        continue;
      }
    }
    const size_t length = Utf8SequenceLength(text, i);
    if (length == 0) break;
    i += length;
  }
  return i;
}

bool HasNul(absl::string_view text) {
  return std::memchr(text.data(), '\0', text.size()) != nullptr;
}

// SAX events reduced to what the two grammars here need, with the first error kept. nlohmann's DOM
// would drop duplicate keys and turn -0 into an integer; the events show both.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  enum class Scalar { kString, kUnsigned, kOther };

  // The error that stopped the parse; OK when the whole text was accepted.
  const std::string& error() const { return error_; }
  const char* error_name() const { return error_name_; }

  bool null() override { return Value(Scalar::kOther, 0, nullptr, "null"); }
  bool boolean(bool) override { return Value(Scalar::kOther, 0, nullptr, "a boolean"); }
  // Only numbers that begin with a minus sign arrive here, -0 among them.
  bool number_integer(number_integer_t) override {
    return Value(Scalar::kOther, 0, nullptr, "a negative number");
  }
  bool number_unsigned(number_unsigned_t value) override {
    return Value(Scalar::kUnsigned, value, nullptr, "a number");
  }
  // Also integers of 2^64 and more.
  bool number_float(number_float_t, const string_t& text) override {
    return Value(Scalar::kOther, 0, nullptr, absl::StrCat("the number ", text.substr(0, 40)));
  }
  bool string(string_t& value) override { return Value(Scalar::kString, 0, &value, "a string"); }
  bool binary(binary_t&) override { return Fail("binary data"); }
  bool start_object(size_t) override { return Open(true); }
  bool start_array(size_t) override { return Open(false); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& value) override { return skip_depth_ > 0 || OnKey(value); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return Fail(absl::StrCat("not JSON at byte ", position));
  }

 protected:
  // `what` names the kind of value for messages.
  virtual bool OnScalar(Scalar kind, uint64_t number, std::string* text,
                        absl::string_view what) = 0;
  virtual bool OnOpen(bool object) = 0;
  virtual bool OnClose() = 0;
  virtual bool OnKey(std::string& key) = 0;

  // The value that follows is of no interest.
  void SkipNext() { skip_next_ = true; }

  bool Fail(std::string error, const char* name = kDeserialization) {
    if (error_.empty()) {
      error_ = std::move(error);
      error_name_ = name;
    }
    return false;
  }

 private:
  bool Value(Scalar kind, uint64_t number, std::string* text, absl::string_view what) {
    if (skip_depth_ > 0 || std::exchange(skip_next_, false)) return true;
    return OnScalar(kind, number, text, what);
  }
  bool Open(bool object) {
    if (skip_depth_ == 0 && !std::exchange(skip_next_, false)) return OnOpen(object);
    if (++skip_depth_ > kMaxNesting) return Fail("nested too deeply");
    return true;
  }
  bool Close() {
    if (skip_depth_ == 0) return OnClose();
    --skip_depth_;
    return true;
  }

  std::string error_;
  const char* error_name_ = kDeserialization;
  bool skip_next_ = false;
  int skip_depth_ = 0;
};

// Runs `events` over `json`.
std::optional<HeaderError> ParseJson(absl::string_view json, JsonEvents& events) {
  const size_t bad = FindInvalidUtf8(json);
  if (bad != json.size()) {
    return HeaderError{"InvalidHeader", absl::StrCat("byte ", bad, " is not UTF-8")};
  }
  // The parser would take a NUL for the end of the text, and would skip a byte order mark.
  if (HasNul(json)) return HeaderError{kDeserialization, "a NUL byte in the JSON"};
  if (absl::StartsWith(json, "\xEF\xBB\xBF")) {
    return HeaderError{kDeserialization, "a byte order mark before the JSON"};
  }
  try {
    if (nlohmann::json::sax_parse(json.data(), json.data() + json.size(), &events)) {
      return std::nullopt;
    }
  } catch (const std::exception& e) {
    return HeaderError{kDeserialization, e.what()};
  }
  return HeaderError{events.error_name(), events.error()};
}

// One tensor as the JSON states it, before it is held against the file.
struct DraftTensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<int64_t> shape;
  std::array<int64_t, 2> offsets{};
};

class HeaderEvents : public JsonEvents {
 public:
  // `header.tensors` gets offsets from the data start and, in size_bytes, the *end* offset, which
  // CheckTensors() replaces.
  explicit HeaderEvents(SafetensorsHeader& header) : header_(header) {}

 private:
  enum class Where { kOutside, kRoot, kMetadata, kTensor, kShape, kOffsets };
  enum Field : unsigned { kDtypeField = 1, kShapeField = 2, kOffsetsField = 4, kNoField = 0 };

  bool OnKey(std::string& key) override {
    if (where_ == Where::kRoot) return OnRootKey(key);
    if (where_ == Where::kMetadata) {
      const auto [it, fresh] = header_.metadata.try_emplace(key);
      metadata_value_ = &it->second;
      return fresh || Fail(absl::StrCat("__metadata__: duplicate key '", PrintableName(key), "'"));
    }
    return OnTensorKey(key);
  }

  bool OnRootKey(std::string& key) {
    if (key == kMetadataName) {
      in_metadata_ = true;
      return !std::exchange(seen_metadata_, true) || Fail("duplicate key '__metadata__'");
    }
    if (HasNul(key)) return Fail(absl::StrCat("NUL in tensor name '", PrintableName(key), "'"));
    in_metadata_ = false;
    tensor_.name = key;
    tensor_.shape.clear();
    seen_fields_ = 0;
    unknown_keys_.clear();
    return true;
  }

  bool OnTensorKey(const std::string& key) {
    field_ = key == "dtype"          ? kDtypeField
             : key == "shape"        ? kShapeField
             : key == "data_offsets" ? kOffsetsField
                                     : kNoField;
    if (field_ == kNoField) {
      const bool known =
          std::find(unknown_keys_.begin(), unknown_keys_.end(), key) != unknown_keys_.end();
      if (known) return FailTensor(absl::StrCat("duplicate key '", PrintableName(key), "'"));
      if (unknown_keys_.size() == kMaxUnknownKeys) return FailTensor("too many unknown keys");
      unknown_keys_.push_back(key);
      SkipNext();
      return true;
    }
    if ((seen_fields_ & field_) != 0) return FailTensor(absl::StrCat("duplicate key '", key, "'"));
    seen_fields_ |= field_;
    return true;
  }

  bool OnOpen(bool object) override {
    switch (where_) {
      case Where::kOutside:
        where_ = Where::kRoot;
        return object || Fail("want an object at the top, found an array");
      case Where::kRoot:
        where_ = in_metadata_ ? Where::kMetadata : Where::kTensor;
        if (object) return true;
        return in_metadata_ ? Fail("__metadata__: want an object, found an array")
                            : FailTensor("want an object, found an array");
      case Where::kTensor:
        return OnOpenInTensor(object);
      case Where::kMetadata:
        return OnScalar(Scalar::kOther, 0, nullptr, object ? "an object" : "an array");
      case Where::kShape:
      case Where::kOffsets:
        return FailTensor(absl::StrCat(FieldName(), ": nested"));
    }
    return false;
  }

  bool OnOpenInTensor(bool object) {
    if (object || field_ == kDtypeField) {
      return FailTensor(absl::StrCat(FieldName(), ": found ", object ? "an object" : "an array"));
    }
    where_ = field_ == kShapeField ? Where::kShape : Where::kOffsets;
    offset_count_ = 0;
    return true;
  }

  bool OnClose() override {
    switch (where_) {
      case Where::kOffsets:
        where_ = Where::kTensor;
        return offset_count_ == 2 ||
               FailTensor(absl::StrCat("data_offsets: ", offset_count_, " numbers, want 2"));
      case Where::kShape:
        where_ = Where::kTensor;
        return true;
      case Where::kTensor:
        where_ = Where::kRoot;
        return EndTensor();
      case Where::kMetadata:
        where_ = Where::kRoot;
        return true;
      case Where::kRoot:
      case Where::kOutside:
        where_ = Where::kOutside;
        return true;
    }
    return false;
  }

  bool EndTensor() {
    for (const auto& [field, name] :
         {std::pair(kDtypeField, "dtype"), std::pair(kShapeField, "shape"),
          std::pair(kOffsetsField, "data_offsets")}) {
      if ((seen_fields_ & field) == 0) return FailTensor(absl::StrCat("no ", name));
    }
    header_.tensors.Add({.name = tensor_.name,
                         .dtype = tensor_.dtype,
                         .shape = tensor_.shape,
                         .file = 0,
                         .offset = tensor_.offsets[0],
                         .size_bytes = tensor_.offsets[1]});
    return true;
  }

  bool OnScalar(Scalar kind, uint64_t number, std::string* text, absl::string_view what) override {
    switch (where_) {
      case Where::kOutside:
        return Fail(absl::StrCat("want an object at the top, found ", what));
      case Where::kRoot:
        return in_metadata_ ? Fail(absl::StrCat("__metadata__: want an object, found ", what))
                            : FailTensor(absl::StrCat("want an object, found ", what));
      case Where::kMetadata:
        return OnMetadataValue(kind, text, what);
      case Where::kTensor:
        return OnTensorScalar(kind, text, what);
      case Where::kShape:
      case Where::kOffsets:
        return OnArrayNumber(kind, number, what);
    }
    return false;
  }

  bool OnMetadataValue(Scalar kind, std::string* text, absl::string_view what) {
    if (kind == Scalar::kString) {
      *metadata_value_ = std::move(*text);
      return true;
    }
    const auto same = [this](const auto& item) { return &item.second == metadata_value_; };
    const auto it = std::find_if(header_.metadata.begin(), header_.metadata.end(), same);
    return Fail(absl::StrCat("__metadata__: '", PrintableName(it->first),
                             "': want a string, found ", what));
  }

  bool OnTensorScalar(Scalar kind, std::string* text, absl::string_view what) {
    if (field_ != kDtypeField) {
      return FailTensor(absl::StrCat(FieldName(), ": want an array, found ", what));
    }
    if (kind != Scalar::kString) {
      return FailTensor(absl::StrCat("dtype: want a string, found ", what));
    }
    absl::StatusOr<Dtype> dtype = ParseDtype(*text);
    if (!dtype.ok()) return FailTensor(dtype.status().message());
    tensor_.dtype = *dtype;
    return true;
  }

  bool OnArrayNumber(Scalar kind, uint64_t number, absl::string_view what) {
    if (kind != Scalar::kUnsigned) {
      return FailTensor(absl::StrCat(FieldName(), ": want unsigned integers, found ", what));
    }
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return FailTensor(absl::StrCat(FieldName(), ": ", number, " is beyond any file"),
                        where_ == Where::kShape ? "ValidationOverflow" : "InvalidOffset");
    }
    const auto value = static_cast<int64_t>(number);
    if (where_ == Where::kShape) {
      if (tensor_.shape.size() == kMaxRank) {
        return FailTensor(absl::StrCat("shape: more than ", kMaxRank, " dimensions"));
      }
      tensor_.shape.push_back(value);
      return true;
    }
    if (offset_count_ < 2) tensor_.offsets.at(offset_count_) = value;
    ++offset_count_;
    return true;
  }

  const char* FieldName() const {
    return field_ == kDtypeField ? "dtype" : field_ == kShapeField ? "shape" : "data_offsets";
  }

  bool FailTensor(absl::string_view detail, const char* name = kDeserialization) {
    return Fail(absl::StrCat("tensor ", PrintableName(tensor_.name), ": ", detail), name);
  }

  SafetensorsHeader& header_;
  Where where_ = Where::kOutside;
  Field field_ = kNoField;
  unsigned seen_fields_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string* metadata_value_ = nullptr;
  DraftTensor tensor_;
  size_t offset_count_ = 0;
  std::vector<std::string> unknown_keys_;
};

absl::Status CheckNamesUnique(const TensorTable& tensors, const std::string& file) {
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(static_cast<size_t>(tensors.size()));
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const absl::string_view name = tensors.at(i).name;
    if (names.insert(name).second) continue;
    return Malformed(file, kDeserialization,
                     absl::StrCat("duplicate key '", PrintableName(name), "'"));
  }
  return absl::OkStatus();
}

std::optional<HeaderError> CountBytes(Dtype dtype, absl::Span<const int64_t> shape,
                                      int64_t* size_bytes) {
  uint64_t elements = 1;
  uint64_t bits = 0;
  bool overflow = false;
  for (const int64_t dimension : shape) {
    overflow |= dimension < 0;
    overflow |= __builtin_mul_overflow(elements, static_cast<uint64_t>(dimension), &elements);
  }
  overflow |= __builtin_mul_overflow(elements, static_cast<uint64_t>(DtypeBits(dtype)), &bits);
  if (overflow) {
    return HeaderError{"ValidationOverflow", absl::StrCat(DescribeTensor(dtype, shape),
                                                          " is negative or exceeds 64 bits")};
  }
  if (bits % 8 != 0) {
    return HeaderError{"MisalignedSlice", absl::StrCat(DescribeTensor(dtype, shape), " has ", bits,
                                                       " bits, not whole bytes")};
  }
  *size_bytes = static_cast<int64_t>(bits / 8);
  return std::nullopt;
}

// Holds drafts (see HeaderEvents), in offset order, against the file and finishes them.
absl::StatusOr<TensorTable> CheckTensors(const TensorTable& drafts, int64_t data_start,
                                         int64_t data_bytes, const std::string& file) {
  TensorTable tensors;
  int64_t previous_end = 0;
  for (int64_t i = 0; i < drafts.size(); ++i) {
    TensorInfo tensor = drafts.at(i);
    const int64_t begin = tensor.offset;
    const int64_t end = tensor.size_bytes;
    const std::string object = absl::StrCat("tensor ", PrintableName(tensor.name), ": ");
    if (begin != previous_end) {
      return Malformed(file, "InvalidOffset",
                       absl::StrCat(object, "begins at ", begin, ", want ", previous_end));
    }
    if (end < begin) {
      return Malformed(file, "InvalidOffset",
                       absl::StrCat(object, "ends at ", end, ", before it begins at ", begin));
    }
    if (const auto error = CountBytes(tensor.dtype, tensor.shape, &tensor.size_bytes)) {
      return Malformed(file, error->name, absl::StrCat(object, error->detail));
    }
    if (end - begin != tensor.size_bytes) {
      return Malformed(
          file, "TensorInvalidInfo",
          absl::StrCat(object, end - begin, " bytes of data, ",
                       DescribeTensor(tensor.dtype, tensor.shape), " wants ", tensor.size_bytes));
    }
    previous_end = end;
    tensor.offset = data_start + begin;
    tensors.Add(tensor);
  }
  if (previous_end < data_bytes) {
    return Malformed(
        file, "MetadataIncompleteBuffer",
        absl::StrCat(data_bytes - previous_end, " trailing bytes after the last tensor"));
  }
  if (previous_end > data_bytes) {
    return Malformed(
        file, "MetadataIncompleteBuffer",
        absl::StrCat("truncated: ", data_bytes, " bytes of data, the header wants ", previous_end));
  }
  return tensors;
}

class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(TensorTable& tensors) : tensors_(tensors) {}

  bool seen_weight_map() const { return seen_weight_map_; }
  std::vector<std::string>& files() { return files_; }

 private:
  enum class Where { kOutside, kRoot, kWeightMap };

  bool OnKey(std::string& key) override {
    if (where_ == Where::kWeightMap) {
      if (HasNul(key)) return Fail(absl::StrCat("NUL in tensor name '", PrintableName(key), "'"));
      tensor_ = key;
      return true;
    }
    if (std::find(root_keys_.begin(), root_keys_.end(), key) != root_keys_.end()) {
      return Fail(absl::StrCat("duplicate key '", PrintableName(key), "'"));
    }
    if (root_keys_.size() == kMaxUnknownKeys) return Fail("too many keys at the top");
    root_keys_.push_back(key);
    if (key == "weight_map") {
      seen_weight_map_ = true;
    } else {
      SkipNext();
    }
    return true;
  }

  bool OnOpen(bool object) override {
    if (!object) return OnScalar(Scalar::kOther, 0, nullptr, "an array");
    if (where_ == Where::kWeightMap) return OnScalar(Scalar::kOther, 0, nullptr, "an object");
    where_ = where_ == Where::kOutside ? Where::kRoot : Where::kWeightMap;
    return true;
  }

  bool OnClose() override {
    where_ = where_ == Where::kWeightMap ? Where::kRoot : Where::kOutside;
    return true;
  }

  bool OnScalar(Scalar kind, uint64_t, std::string* text, absl::string_view what) override {
    if (where_ == Where::kOutside) {
      return Fail(absl::StrCat("want an object at the top, found ", what));
    }
    if (where_ == Where::kRoot) {
      return Fail(absl::StrCat("weight_map: want an object, found ", what));
    }
    if (kind != Scalar::kString) {
      return Fail(
          absl::StrCat("weight_map: ", PrintableName(tensor_), ": want a file name, found ", what));
    }
    TensorInfo tensor;
    tensor.name = tensor_;
    tensor.file = FileNumber(*text);
    tensors_.Add(tensor);
    return true;
  }

  // Runs of tensors share a file, so the last one is asked first.
  int64_t FileNumber(const std::string& file) {
    if (files_.empty() || files_[last_file_] != file) {
      const auto [it, fresh] = numbers_.try_emplace(file, files_.size());
      if (fresh) files_.push_back(file);
      last_file_ = it->second;
    }
    return static_cast<int64_t>(last_file_);
  }

  TensorTable& tensors_;
  Where where_ = Where::kOutside;
  bool seen_weight_map_ = false;
  std::vector<std::string> root_keys_;
  std::string tensor_;
  std::vector<std::string> files_;
  std::map<std::string, size_t> numbers_;
  size_t last_file_ = 0;
};

std::string JsonString(const std::string& text) {
  // Valid UTF-8 only, so that dump() has nothing to throw about.
  return nlohmann::json(text).dump();
}

absl::Status CheckEntry(const TensorEntry& entry, int64_t previous_end) {
  const std::string object = absl::StrCat("tensor ", PrintableName(entry.name), ": ");
  if (entry.name == kMetadataName) {
    return absl::InvalidArgumentError(absl::StrCat(object, "the name is reserved"));
  }
  if (HasNul(entry.name) || FindInvalidUtf8(entry.name) != entry.name.size()) {
    return absl::InvalidArgumentError(absl::StrCat(object, "the name holds NUL or is not UTF-8"));
  }
  int64_t size_bytes = 0;
  if (const auto error = CountBytes(entry.dtype, entry.shape, &size_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(error->name, ": ", object, error->detail));
  }
  if (entry.size_bytes != size_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("TensorInvalidInfo: ", object, entry.size_bytes, " bytes, ",
                     DescribeTensor(entry.dtype, entry.shape), " wants ", size_bytes));
  }
  if (entry.begin != previous_end) {
    return absl::InvalidArgumentError(absl::StrCat("InvalidOffset: ", object, "begins at ",
                                                   entry.begin, ", want ", previous_end));
  }
  return absl::OkStatus();
}

absl::Status AppendMetadata(const std::map<std::string, std::string>& metadata, std::string* json) {
  absl::StrAppend(json, "\"", kMetadataName, "\":{");
  const char* separator = "";
  for (const auto& [key, value] : metadata) {
    if (static_cast<int64_t>(json->size() + key.size() + value.size()) > kMaxHeaderBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "HeaderTooLarge: __metadata__: '", PrintableName(key), "' has ", value.size(), " bytes"));
    }
    if (FindInvalidUtf8(key) != key.size() || FindInvalidUtf8(value) != value.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("__metadata__: '", PrintableName(key), "' is not UTF-8"));
    }
    absl::StrAppend(json, separator, JsonString(key), ":", JsonString(value));
    separator = ",";
  }
  json->push_back('}');
  return absl::OkStatus();
}

// The length prefix, `json`, and spaces up to the alignment of the data.
absl::StatusOr<std::string> PadHeader(std::string json) {
  const int64_t used = kHeaderLengthBytes + static_cast<int64_t>(json.size());
  const int64_t padded = (used + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  const int64_t length = padded - kHeaderLengthBytes;
  if (length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("HeaderTooLarge: a header of ", length, " bytes, at most ", kMaxHeaderBytes));
  }
  json.resize(static_cast<size_t>(length), ' ');
  std::string bytes;
  bytes.reserve(static_cast<size_t>(padded));
  for (int i = 0; i < kHeaderLengthBytes; ++i) {
    bytes.push_back(static_cast<char>(static_cast<uint64_t>(length) >> (8 * i)));
  }
  bytes += json;
  return bytes;
}

}  // namespace

absl::string_view TensorTable::NameOf(const Entry& entry) const {
  return absl::string_view(names_.data() + entry.name_begin, entry.name_size);
}

TensorInfo TensorTable::at(int64_t index) const {
  const Entry& entry = entries_[static_cast<size_t>(index)];
  return {.name = NameOf(entry),
          .dtype = entry.dtype,
          .shape = absl::MakeConstSpan(shapes_.data() + entry.shape_begin, entry.rank),
          .file = entry.file,
          .offset = entry.offset,
          .size_bytes = entry.size_bytes};
}

void TensorTable::Add(const TensorInfo& tensor) {
  SP_CHECK(names_.size() + tensor.name.size() <= std::numeric_limits<uint32_t>::max());
  SP_CHECK(tensor.shape.size() <= kMaxRank);
  entries_.push_back({.offset = tensor.offset,
                      .size_bytes = tensor.size_bytes,
                      .name_begin = static_cast<uint32_t>(names_.size()),
                      .name_size = static_cast<uint32_t>(tensor.name.size()),
                      .shape_begin = static_cast<uint32_t>(shapes_.size()),
                      .file = static_cast<int32_t>(tensor.file),
                      .rank = static_cast<uint8_t>(tensor.shape.size()),
                      .dtype = tensor.dtype});
  names_.insert(names_.end(), tensor.name.begin(), tensor.name.end());
  shapes_.insert(shapes_.end(), tensor.shape.begin(), tensor.shape.end());
}

void TensorTable::Keep(const std::vector<bool>& keep) {
  SP_CHECK(keep.size() == entries_.size());
  size_t kept = 0;
  for (size_t i = 0; i < keep.size(); ++i) {
    if (keep[i]) entries_[kept++] = entries_[i];
  }
  entries_.resize(kept);
  entries_.shrink_to_fit();
  names_.shrink_to_fit();
  shapes_.shrink_to_fit();
}

void TensorTable::RenumberFiles(absl::Span<const int64_t> numbers) {
  for (Entry& entry : entries_) {
    entry.file = static_cast<int32_t>(numbers.at(static_cast<size_t>(entry.file)));
  }
}

void TensorTable::SortByName() {
  const auto less = [this](const Entry& a, const Entry& b) {
    const int order = NameOf(a).compare(NameOf(b));
    return order != 0 ? order < 0 : a.file < b.file;
  };
  if (!std::is_sorted(entries_.begin(), entries_.end(), less)) {
    std::sort(entries_.begin(), entries_.end(), less);
  }
}

void TensorTable::SortByOffset() {
  const auto less = [](const Entry& a, const Entry& b) {
    // Zero-size tensors at one place keep the order in which they were added.
    return std::tie(a.offset, a.size_bytes, a.name_begin) <
           std::tie(b.offset, b.size_bytes, b.name_begin);
  };
  if (!std::is_sorted(entries_.begin(), entries_.end(), less)) {
    std::sort(entries_.begin(), entries_.end(), less);
  }
}

std::string PrintableName(absl::string_view name) {
  constexpr size_t kMaxShown = 200;
  if (name.size() <= kMaxShown) return absl::Utf8SafeCEscape(name);
  size_t cut = kMaxShown;
  // Not inside a UTF-8 sequence.
  while (cut > 0 && (static_cast<uint8_t>(name[cut]) & 0xC0) == 0x80) --cut;
  return absl::StrCat(absl::Utf8SafeCEscape(name.substr(0, cut)), "...");
}

std::string DescribeTensor(Dtype dtype, absl::Span<const int64_t> shape) {
  return absl::StrCat(DtypeName(dtype), " [", absl::StrJoin(shape, ","), "]");
}

absl::StatusOr<int64_t> TensorBytes(Dtype dtype, absl::Span<const int64_t> shape) {
  int64_t size_bytes = 0;
  if (const auto error = CountBytes(dtype, shape, &size_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(error->name, ": ", error->detail));
  }
  return size_bytes;
}

absl::StatusOr<int64_t> ParseHeaderLength(absl::string_view first_bytes, int64_t file_size,
                                          const std::string& file_name) {
  if (absl::StartsWith(first_bytes, kLfsPointer)) {
    const size_t at = first_bytes.find("\nsize ");
    int64_t size_bytes = 0;
    const bool found =
        at != absl::string_view::npos &&
        absl::SimpleAtoi(first_bytes.substr(at + 6, first_bytes.find('\n', at + 6) - at - 6),
                         &size_bytes);
    return absl::FailedPreconditionError(
        absl::StrCat(file_name, ": Git LFS pointer, expected size ",
                     found ? absl::StrCat(size_bytes) : "unknown", "; found ", file_size,
                     " bytes of text instead of the weights"));
  }
  if (file_size < kHeaderLengthBytes ||
      first_bytes.size() < static_cast<size_t>(kHeaderLengthBytes)) {
    return Malformed(file_name, "HeaderTooSmall", absl::StrCat(file_size, " bytes, want 8"));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kHeaderLengthBytes; ++i) {
    length |= uint64_t{static_cast<uint8_t>(first_bytes[i])} << (8 * i);
  }
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return Malformed(file_name, "HeaderTooLarge",
                     absl::StrCat("a header of ", length, " bytes, at most ", kMaxHeaderBytes));
  }
  const auto length_bytes = static_cast<int64_t>(length);
  if (length_bytes > file_size - kHeaderLengthBytes) {
    return Malformed(file_name, "InvalidHeaderLength",
                     absl::StrCat("a header of ", length_bytes, " bytes in a file of ", file_size));
  }
  return length_bytes;
}

absl::StatusOr<SafetensorsHeader> ParseHeader(absl::string_view json, int64_t file_size,
                                              const std::string& file_name) {
  SafetensorsHeader header;
  header.data_start = kHeaderLengthBytes + static_cast<int64_t>(json.size());
  HeaderEvents events(header);
  if (const auto error = ParseJson(json, events)) {
    return Malformed(file_name, error->name, error->detail);
  }
  SP_RETURN_IF_ERROR(CheckNamesUnique(header.tensors, file_name));
  header.tensors.SortByOffset();
  SP_ASSIGN_OR_RETURN(header.tensors, CheckTensors(header.tensors, header.data_start,
                                                   file_size - header.data_start, file_name));
  return header;
}

absl::StatusOr<std::string> SerializeHeader(const std::vector<TensorEntry>& tensors,
                                            const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  if (!metadata.empty()) SP_RETURN_IF_ERROR(AppendMetadata(metadata, &json));
  absl::flat_hash_set<absl::string_view> names;
  int64_t end = 0;
  for (const TensorEntry& entry : tensors) {
    SP_RETURN_IF_ERROR(CheckEntry(entry, end));
    if (!names.insert(entry.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", PrintableName(entry.name), ": listed twice"));
    }
    if (__builtin_add_overflow(end, entry.size_bytes, &end)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ValidationOverflow: tensor ", PrintableName(entry.name), ": ends beyond any file"));
    }
    absl::StrAppend(&json, json.size() > 1 ? "," : "", JsonString(entry.name), ":{\"dtype\":\"",
                    DtypeName(entry.dtype), "\",\"shape\":[", absl::StrJoin(entry.shape, ","),
                    "],\"data_offsets\":[", entry.begin, ",", end, "]}");
  }
  json.push_back('}');
  return PadHeader(std::move(json));
}

absl::StatusOr<SafetensorsIndex> ParseIndex(absl::string_view json, const std::string& file_name) {
  SafetensorsIndex index;
  IndexEvents events(index.tensors);
  if (const auto error = ParseJson(json, events)) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": ", error->detail));
  }
  if (!events.seen_weight_map()) {
    return absl::InvalidArgumentError(absl::StrCat(file_name, ": no weight_map"));
  }
  const std::vector<std::string>& files = events.files();
  index.files = files;
  std::sort(index.files.begin(), index.files.end());
  std::vector<int64_t> numbers(files.size());
  for (size_t i = 0; i < files.size(); ++i) {
    const auto it = std::lower_bound(index.files.begin(), index.files.end(), files[i]);
    numbers[i] = it - index.files.begin();
  }
  index.tensors.RenumberFiles(numbers);
  index.tensors.SortByName();
  for (int64_t i = 1; i < index.tensors.size(); ++i) {
    const TensorInfo tensor = index.tensors.at(i);
    const TensorInfo previous = index.tensors.at(i - 1);
    if (previous.name != tensor.name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(file_name, ": duplicate key '", PrintableName(tensor.name), "': in ",
                     PrintableName(index.files[static_cast<size_t>(previous.file)]), " and ",
                     PrintableName(index.files[static_cast<size_t>(tensor.file)])));
  }
  return index;
}

}  // namespace shardprep
