// Every malformed file that the suites of the Rust crate, of its Python binding and of the Run:ai
// streamer reject is a row of RejectsMalformedFiles. Two of their groups have no counterpart here:
// slicing errors (TooManySlices, SliceOutOfRange), since this reader hands out no slices, and
// InvalidTensorView, which is about buffers given to a writer in memory; the writer here is given
// sizes, and Writer.RefusesWhatNoReaderWouldOpen has the same mistake.
#include "workers/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::StartsWith;

constexpr char kFile[] = "model-1.safetensors";

std::string LengthBytes(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(length >> (8 * i)));
  return bytes;
}

// A file with this JSON and so many bytes of data.
std::string FileWith(const std::string& json, size_t data_bytes) {
  return LengthBytes(json.size()) + json + std::string(data_bytes, '\x5A');
}

// Reads a whole file that is in memory, as ReadCheckpoint() reads one from a store.
absl::StatusOr<SafetensorsHeader> Read(const std::string& file) {
  const auto size_bytes = static_cast<int64_t>(file.size());
  const auto length = ParseHeaderLength(file, size_bytes, kFile);
  if (!length.ok()) return length.status();
  return ParseHeader(absl::string_view(file).substr(8, static_cast<size_t>(*length)), size_bytes,
                     kFile);
}

std::string Tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return absl::StrCat("\"", name, R"(":{"dtype":")", dtype, R"(","shape":)", shape,
                      R"(,"data_offsets":)", offsets, "}");
}

// One tensor `a` of two U8, with some of its JSON replaced.
std::string OneTensor(const std::string& shape, const std::string& offsets = "[0,2]") {
  return absl::StrCat("{", Tensor("a", "U8", shape, offsets), "}");
}

std::vector<int64_t> Shape(const TensorInfo& tensor) {
  return {tensor.shape.begin(), tensor.shape.end()};
}

std::vector<std::string> Names(const SafetensorsHeader& header) {
  std::vector<std::string> names;
  names.reserve(static_cast<size_t>(header.tensors.size()));
  for (int64_t i = 0; i < header.tensors.size(); ++i) {
    names.emplace_back(header.tensors.at(i).name);
  }
  return names;
}

struct Rejected {
  const char* name;
  std::string file;
  const char* error;  // behind the file's name
};

std::vector<Rejected> RejectedFiles() {
  std::string same_range = "{";
  for (int i = 0; i < 10; ++i) {
    absl::StrAppend(&same_range, i == 0 ? "" : ",",
                    Tensor(absl::StrCat("t", i), "I32", "[2,2]", "[0,16]"));
  }
  same_range += "}";
  const std::string valid = FileWith(OneTensor("[2]"), 2);
  const std::string two = absl::StrCat("{", Tensor("a", "U8", "[4]", "[0,4]"), ",",
                                       Tensor("b", "U8", "[4]", "[4,8]"), "}");
  const auto b_at = [](const std::string& offsets) {
    return absl::StrCat("{", Tensor("a", "U8", "[4]", "[0,4]"), ",",
                        Tensor("b", "U8", "[4]", offsets), "}");
  };
  std::string deep = R"({"a":{"extra":)" + std::string(100'000, '[');
  return {
      // First eight bytes.
      {"empty", "", "HeaderTooSmall: 0 bytes"},
      {"seven bytes", std::string(7, '\0'), "HeaderTooSmall: 7 bytes"},
      {"length far beyond the limit", LengthBytes(0xFFFFFF000000003C), "HeaderTooLarge"},
      {"length of eight 0xFF", std::string(8, '\xFF'), "HeaderTooLarge"},
      {"length 2^63", LengthBytes(uint64_t{1} << 63), "HeaderTooLarge"},
      {"length of 132,095,296", LengthBytes(0x07DF9D40) + "{}", "HeaderTooLarge"},
      {"length beyond the end", "<" + std::string(7, '\0'), "InvalidHeaderLength"},
      {"header cut off", valid.substr(0, 20), "InvalidHeaderLength"},
      // Not the right JSON.
      {"byte 0xFF", FileWith("\xFF", 0), "InvalidHeader: byte 0 is not UTF-8"},
      {"bad UTF-8 in a name", FileWith("{\"a\xC3\":{}}", 0), "InvalidHeader: byte 3"},
      {"UTF-8 of a surrogate", FileWith("{\"\xED\xA0\x80\":{}}", 0), "InvalidHeader: byte 2"},
      {"overlong UTF-8", FileWith("{\"\xC0\xAF\":{}}", 0), "InvalidHeader: byte 2"},
      {"beyond U+10FFFF", FileWith("{\"\xF4\x90\x80\x80\":{}}", 0), "InvalidHeader: byte 2"},
      {"only {", FileWith("{", 0), "InvalidHeaderDeserialization: not JSON"},
      {"no JSON", FileWith("", 0), "InvalidHeaderDeserialization: not JSON"},
      {"only white space", FileWith(" \n ", 0), "InvalidHeaderDeserialization: not JSON"},
      {"two values", FileWith("{}{}", 0), "InvalidHeaderDeserialization: not JSON"},
      {"NUL behind", FileWith(std::string("{}\0", 3), 0), "InvalidHeaderDeserialization: a NUL"},
      {"NUL between", FileWith(std::string("{}\0{", 4), 0), "InvalidHeaderDeserialization: a NUL"},
      {"byte order mark", FileWith("\xEF\xBB\xBF{}", 0),
       "InvalidHeaderDeserialization: a byte order mark"},
      {"array at the top", FileWith("[]", 0), "InvalidHeaderDeserialization: want an object"},
      {"number at the top", FileWith("1", 0), "InvalidHeaderDeserialization: want an object"},
      {"comment", FileWith("{/**/}", 0), "InvalidHeaderDeserialization: not JSON"},
      {"tensor is a string", FileWith(R"({"a":"b"})", 0),
       "InvalidHeaderDeserialization: tensor a: want an object, found a string"},
      {"tensor is an array", FileWith(R"({"a":[]})", 0),
       "InvalidHeaderDeserialization: tensor a: want an object, found an array"},
      {"no dtype", FileWith(R"({"a":{"shape":[],"data_offsets":[0,1]}})", 1),
       "InvalidHeaderDeserialization: tensor a: no dtype"},
      {"no shape", FileWith(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1),
       "InvalidHeaderDeserialization: tensor a: no shape"},
      {"no data_offsets", FileWith(R"({"a":{"dtype":"U8","shape":[1]}})", 1),
       "InvalidHeaderDeserialization: tensor a: no data_offsets"},
      {"unknown dtype", FileWith(absl::StrCat("{", Tensor("a", "XYZ", "[1]", "[0,1]"), "}"), 1),
       "InvalidHeaderDeserialization: tensor a: unknown dtype 'XYZ'"},
      {"dtype in lower case",
       FileWith(absl::StrCat("{", Tensor("a", "u8", "[1]", "[0,1]"), "}"), 1),
       "InvalidHeaderDeserialization: tensor a: unknown dtype 'u8'"},
      {"dtype is a number", FileWith(R"({"a":{"dtype":1,"shape":[],"data_offsets":[0,1]}})", 1),
       "InvalidHeaderDeserialization: tensor a: dtype: want a string"},
      {"dtype is an array", FileWith(R"({"a":{"dtype":["U8"]}})", 1),
       "InvalidHeaderDeserialization: tensor a: dtype: found an array"},
      {"shape is a number", FileWith(OneTensor("2"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want an array, found a number"},
      {"shape is null", FileWith(OneTensor("null"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want an array, found null"},
      {"shape is an object", FileWith(OneTensor("{}"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: found an object"},
      {"nested shape", FileWith(OneTensor("[[2]]"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: nested"},
      {"65 dimensions",
       FileWith(OneTensor("[1" +
                          [] {
                            std::string ones;
                            for (int i = 0; i < 64; ++i) ones += ",1";
                            return ones;
                          }() +
                          "]"),
                2),
       "InvalidHeaderDeserialization: tensor a: shape: more than 64 dimensions"},
      {"dimension as a string", FileWith(OneTensor(R"(["2"])"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found a string"},
      {"dimension true", FileWith(OneTensor("[true]"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found a boolean"},
      {"dimension -2", FileWith(OneTensor("[-2]"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found a negative"},
      {"dimension -0", FileWith(OneTensor("[-0]", "[0,0]"), 0),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found a negative"},
      {"dimension 2.0", FileWith(OneTensor("[2.0]"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found the number "
       "2.0"},
      {"dimension 1e3", FileWith(OneTensor("[1e3]", "[0,1000]"), 1000),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers, found the number "
       "1e3"},
      {"dimension 2^64", FileWith(OneTensor("[18446744073709551616]"), 2),
       "InvalidHeaderDeserialization: tensor a: shape: want unsigned integers"},
      {"dimension 02", FileWith(OneTensor("[02]"), 2), "InvalidHeaderDeserialization: not JSON"},
      {"offset -1", FileWith(OneTensor("[2]", "[-1,1]"), 2),
       "InvalidHeaderDeserialization: tensor a: data_offsets: want unsigned integers"},
      {"offset 1e3", FileWith(OneTensor("[2]", "[0,1e3]"), 2),
       "InvalidHeaderDeserialization: tensor a: data_offsets: want unsigned integers"},
      {"one offset", FileWith(OneTensor("[2]", "[2]"), 2),
       "InvalidHeaderDeserialization: tensor a: data_offsets: 1 numbers, want 2"},
      {"three offsets", FileWith(OneTensor("[2]", "[0,2,2]"), 2),
       "InvalidHeaderDeserialization: tensor a: data_offsets: 3 numbers, want 2"},
      {"metadata is an array", FileWith(R"({"__metadata__":[]})", 0),
       "InvalidHeaderDeserialization: __metadata__: want an object, found an array"},
      {"metadata is a string", FileWith(R"({"__metadata__":"x"})", 0),
       "InvalidHeaderDeserialization: __metadata__: want an object, found a string"},
      {"number in the metadata", FileWith(R"({"__metadata__":{"n":0}})", 0),
       "InvalidHeaderDeserialization: __metadata__: 'n': want a string, found a number"},
      {"object in the metadata", FileWith(R"({"__metadata__":{"n":{}}})", 0),
       "InvalidHeaderDeserialization: __metadata__: 'n': want a string, found an object"},
      {"deep nesting", FileWith(deep, 0), "InvalidHeaderDeserialization: nested too deeply"},
      // Names.
      {"duplicate tensor",
       FileWith(absl::StrCat("{", Tensor("a", "U8", "[1]", "[0,1]"), ",",
                             Tensor("a", "U8", "[1]", "[1,2]"), "}"),
                2),
       "InvalidHeaderDeserialization: duplicate key 'a'"},
      {"duplicate tensor, one name escaped",
       FileWith(absl::StrCat("{", Tensor("caf\xC3\xA9", "U8", "[1]", "[0,1]"), ",",
                             Tensor("caf\\u00e9", "U8", "[1]", "[1,2]"), "}"),
                2),
       "InvalidHeaderDeserialization: duplicate key 'caf\xC3\xA9'"},
      {"duplicate metadata", FileWith(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "InvalidHeaderDeserialization: duplicate key '__metadata__'"},
      {"duplicate metadata key", FileWith(R"({"__metadata__":{"k":"1","k":"1"}})", 0),
       "InvalidHeaderDeserialization: __metadata__: duplicate key 'k'"},
      {"duplicate dtype", FileWith(R"({"a":{"dtype":"U8","dtype":"U8"}})", 0),
       "InvalidHeaderDeserialization: tensor a: duplicate key 'dtype'"},
      {"duplicate unknown key", FileWith(R"({"a":{"x":1,"x":1}})", 0),
       "InvalidHeaderDeserialization: tensor a: duplicate key 'x'"},
      {"NUL in a name",
       FileWith(absl::StrCat("{", Tensor("a\\u0000b", "U8", "[1]", "[0,1]"), "}"), 1),
       "InvalidHeaderDeserialization: NUL in tensor name 'a\\000b'"},
      {"lone surrogate",
       FileWith(absl::StrCat("{", Tensor("a\\ud800", "U8", "[1]", "[0,1]"), "}"), 1),
       "InvalidHeaderDeserialization: not JSON"},
      {"lone low surrogate",
       FileWith(absl::StrCat("{", Tensor("\\udc00a", "U8", "[1]", "[0,1]"), "}"), 1),
       "InvalidHeaderDeserialization: not JSON"},
      // Offsets and sizes.
      {"ten tensors on one range", FileWith(same_range, 16),
       "InvalidOffset: tensor t1: begins at 0"},
      {"equal ranges", FileWith(b_at("[0,4]"), 4), "InvalidOffset: tensor b: begins at 0, want 4"},
      {"overlap", FileWith(b_at("[3,7]"), 7), "InvalidOffset: tensor b: begins at 3, want 4"},
      {"hole", FileWith(b_at("[5,9]"), 9), "InvalidOffset: tensor b: begins at 5, want 4"},
      {"first tensor not at 0", FileWith(OneTensor("[2]", "[1,3]"), 3),
       "InvalidOffset: tensor a: begins at 1, want 0"},
      {"reversed", FileWith(OneTensor("[2]", "[2,0]"), 2),
       "InvalidOffset: tensor a: begins at 2, want 0"},
      {"reversed behind another", FileWith(b_at("[4,2]"), 4),
       "InvalidOffset: tensor b: ends at 2, before it begins at 4"},
      {"offset 2^63", FileWith(OneTensor("[2]", "[0,9223372036854775808]"), 2),
       "InvalidOffset: tensor a: data_offsets: 9223372036854775808 is beyond any file"},
      {"4 bytes for I32 [2,2]",
       FileWith(absl::StrCat("{", Tensor("a", "I32", "[2,2]", "[0,4]"), "}"), 4),
       "TensorInvalidInfo: tensor a: 4 bytes of data, I32 [2,2] wants 16"},
      {"4 bytes for F32 [1000,1000]",
       FileWith(absl::StrCat("{", Tensor("a", "F32", "[1000,1000]", "[0,4]"), "}"), 4),
       "TensorInvalidInfo: tensor a: 4 bytes of data, F32 [1000,1000] wants 4000000"},
      {"no bytes for a scalar", FileWith(OneTensor("[]", "[0,0]"), 0),
       "TensorInvalidInfo: tensor a: 0 bytes of data, U8 [] wants 1"},
      {"shape [2, 2^64-2]", FileWith(OneTensor("[2,18446744073709551614]"), 2),
       "ValidationOverflow: tensor a: shape: 18446744073709551614 is beyond any file"},
      {"shape [2, 2^63-1] of I32",
       FileWith(absl::StrCat("{", Tensor("a", "I32", "[2,9223372036854775807]", "[0,4]"), "}"), 4),
       "ValidationOverflow: tensor a: I32 [2,9223372036854775807]"},
      {"shape [2^33, 2^33]", FileWith(OneTensor("[8589934592,8589934592]"), 2),
       "ValidationOverflow: tensor a"},
      {"F4 of 12 bits", FileWith(absl::StrCat("{", Tensor("a", "F4", "[1,3]", "[0,2]"), "}"), 2),
       "MisalignedSlice: tensor a: F4 [1,3] has 12 bits"},
      {"F4 [1,2] with 2 bytes",
       FileWith(absl::StrCat("{", Tensor("a", "F4", "[1,2]", "[0,2]"), "}"), 2),
       "TensorInvalidInfo: tensor a: 2 bytes of data, F4 [1,2] wants 1"},
      // End of the file.
      {"4 trailing bytes", FileWith(OneTensor("[2]"), 2) + std::string("\x09\x07\x2F\x00", 4),
       "MetadataIncompleteBuffer: 4 trailing bytes"},
      {"trailing bytes and no tensor", FileWith("{}", 3),
       "MetadataIncompleteBuffer: 3 trailing bytes"},
      {"2 bytes missing", FileWith(two, 6),
       "MetadataIncompleteBuffer: truncated: 6 bytes of data, the header wants 8"},
      {"4 MiB claimed, 1 byte there", FileWith(OneTensor("[4194304]", "[0,4194304]"), 1),
       "MetadataIncompleteBuffer: truncated: 1 bytes of data, the header wants 4194304"},
  };
}

TEST(SafetensorsReader, RejectsMalformedFiles) {
  for (const Rejected& c : RejectedFiles()) {
    SCOPED_TRACE(c.name);
    const auto header = Read(c.file);
    ASSERT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(header.status().message()),
                StartsWith(absl::StrCat(kFile, ": ", c.error)));
  }
}

TEST(SafetensorsReader, ManyTensorsOnOneRangeAreRefused) {
  std::string json = "{";
  for (int i = 0; i < 100'000; ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", Tensor(absl::StrCat("t", i), "U8", "[16]", "[0,16]"));
  }
  const auto header = Read(FileWith(json + "}", 16));
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(header.status().message()), HasSubstr("InvalidOffset"));
}

TEST(SafetensorsReader, HeaderLengthLimitIsInclusive) {
  const int64_t huge = int64_t{1} << 40;
  const auto at_limit = ParseHeaderLength(LengthBytes(100'000'000), huge, kFile);
  ASSERT_TRUE(at_limit.ok()) << at_limit.status();
  EXPECT_EQ(*at_limit, 100'000'000);
  const auto above = ParseHeaderLength(LengthBytes(100'000'001), huge, kFile);
  EXPECT_EQ(above.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(above.status().message()), HasSubstr("HeaderTooLarge"));
}

// The length does not count its own eight bytes.
TEST(SafetensorsReader, HeaderLengthLeavesRoomForThePrefix) {
  for (uint64_t length = 0; length <= 20; ++length) {
    const auto parsed = ParseHeaderLength(LengthBytes(length), 20, kFile);
    EXPECT_EQ(parsed.ok(), length <= 12) << length;
  }
}

TEST(SafetensorsReader, RecognisesGitLfsPointers) {
  const std::string stub =
      "version https://git-lfs.github.com/spec/v1\n"
      "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
      "size 12345678901\n";
  const auto header = Read(stub);
  EXPECT_EQ(header.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(header.status().message()),
              StartsWith("model-1.safetensors: Git LFS pointer, expected size 12345678901"));
  EXPECT_THAT(std::string(Read("version https://git-lfs.github.com/spec/v1\n").status().message()),
              HasSubstr("expected size unknown"));
}

TEST(SafetensorsReader, AcceptsAnyOrderAndWhiteSpace) {
  const std::string a = Tensor("a", "U8", "[4]", "[0,4]");
  const std::string b = R"("b":{"data_offsets":[4,8], "shape":[ 2 ,2 ],"dtype":"U8"})";
  const std::string metadata = R"("__metadata__":{"k":"{\"}\\\"{","l":""})";
  const std::string kCases[] = {
      absl::StrCat("{", metadata, ",", a, ",", b, "}"),
      absl::StrCat("{", b, ",", metadata, ",", a, "}"),
      absl::StrCat("{", b, ",", a, ",", metadata, "}"),
      absl::StrCat("\t\n\r {\n", a, " ,\t", metadata, ",", b, "} \t\n\r"),
  };
  for (const std::string& json : kCases) {
    SCOPED_TRACE(json);
    const auto header = Read(FileWith(json, 8));
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_THAT(Names(*header), ElementsAre("a", "b"));
    EXPECT_THAT(header->metadata, ElementsAre(Pair("k", "{\"}\\\"{"), Pair("l", "")));
    EXPECT_EQ(header->data_start, 8 + static_cast<int64_t>(json.size()));
    EXPECT_EQ(header->tensors.at(0).offset, header->data_start);
    EXPECT_EQ(header->tensors.at(1).offset, header->data_start + 4);
    EXPECT_EQ(header->tensors.at(1).size_bytes, 4);
    EXPECT_THAT(Shape(header->tensors.at(1)), ElementsAre(2, 2));
  }
}

TEST(SafetensorsReader, AcceptsFilesWithoutTensors) {
  for (const char* json : {"{}", " {}\n", "\t\n\r {} \t\n\r", R"({"__metadata__":{}})",
                           R"({"__metadata__":{"format":"pt"}})"}) {
    const auto header = Read(FileWith(json, 0));
    ASSERT_TRUE(header.ok()) << json << header.status();
    EXPECT_EQ(header->tensors.size(), 0);
  }
}

TEST(SafetensorsReader, AcceptsScalarsAndZeroSizeTensorsAnywhere) {
  const std::string json = absl::StrCat(
      "{", Tensor("first", "F8_E4M3", "[0]", "[0,0]"), ",",
      Tensor("also_first", "F32", "[4,0,8]", "[0,0]"), ",", Tensor("scalar", "F32", "[]", "[0,4]"),
      ",", Tensor("middle", "U8", "[0,9223372036854775807]", "[4,4]"), ",",
      Tensor("pair", "BF16", "[2]", "[4,8]"), ",", Tensor("last", "I64", "[2,0]", "[8,8]"), "}");
  const auto header = Read(FileWith(json, 8));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_THAT(Names(*header),
              ElementsAre("first", "also_first", "scalar", "middle", "pair", "last"));
  EXPECT_THAT(Shape(header->tensors.at(1)), ElementsAre(4, 0, 8));
  EXPECT_THAT(Shape(header->tensors.at(2)), ElementsAre());
  EXPECT_EQ(header->tensors.at(2).size_bytes, 4);
  const auto alone = Read(FileWith(OneTensor("[0]", "[0,0]"), 0));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->tensors.size(), 1);
}

// A header that is not padded puts BF16 at odd offsets; nothing here minds.
TEST(SafetensorsReader, AcceptsOddHeaderLengths) {
  std::set<int64_t> remainders;
  for (const char* padding : {"", " ", "  ", "   ", "    ", "     ", "      ", "       "}) {
    const std::string json = absl::StrCat("{", Tensor("a", "BF16", "[3]", "[0,6]"), "}", padding);
    const auto header = Read(FileWith(json, 6));
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->tensors.at(0).offset, 8 + static_cast<int64_t>(json.size()));
    remainders.insert(header->tensors.at(0).offset % 8);
  }
  EXPECT_EQ(remainders.size(), 8u);
}

TEST(SafetensorsReader, KnowsE8M0AndPackedF4) {
  const std::string json = absl::StrCat("{", Tensor("s", "F8_E8M0", "[3]", "[0,3]"), ",",
                                        Tensor("w", "F4", "[2,8]", "[3,11]"), "}");
  const auto header = Read(FileWith(json, 11));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors.at(0).dtype, Dtype::kF8E8M0);
  EXPECT_EQ(header->tensors.at(1).dtype, Dtype::kF4);
  EXPECT_EQ(header->tensors.at(1).size_bytes, 8);
}

TEST(SafetensorsReader, CountsEveryDtypeInItsOwnBits) {
  for (int i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const int64_t bytes = 8 * DtypeBits(dtype) / 8;
    const std::string json = absl::StrCat(
        "{", Tensor("a", std::string(DtypeName(dtype)), "[8]", absl::StrCat("[0,", bytes, "]")),
        "}");
    const auto header = Read(FileWith(json, static_cast<size_t>(bytes)));
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->tensors.at(0).dtype, dtype);
    EXPECT_FALSE(Read(FileWith(json, static_cast<size_t>(bytes + 1))).ok());
  }
}

TEST(SafetensorsReader, NamesMayBeAnyUnicodeAndDifferInCase) {
  const std::string json = absl::StrCat(
      "{", Tensor("caf\\u00e9", "U8", "[1]", "[0,1]"), ",",
      Tensor("CAF\xC3\x89", "U8", "[1]", "[1,2]"), ",",
      Tensor("\\ud83d\\ude00", "U8", "[1]", "[2,3]"), ",", Tensor("W", "U8", "[1]", "[3,4]"), ",",
      Tensor("w", "U8", "[1]", "[4,5]"), ",", Tensor("", "U8", "[1]", "[5,6]"), "}");
  const auto header = Read(FileWith(json, 6));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_THAT(Names(*header),
              ElementsAre("caf\xC3\xA9", "CAF\xC3\x89", "\xF0\x9F\x98\x80", "W", "w", ""));
}

TEST(SafetensorsReader, IgnoresUnknownKeysOfATensor) {
  const std::string json =
      R"({"a":{"note":{"shape":[9],"x":[{"y":null}]},"dtype":"U8","n":-1.5,"shape":[1],)"
      R"("data_offsets":[0,1],"s":"}"}})";
  const auto header = Read(FileWith(json, 1));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_THAT(Shape(header->tensors.at(0)), ElementsAre(1));
}

TEST(SafetensorsReader, OffsetsBeyondFourGibibytes) {
  const std::string json =
      absl::StrCat("{", Tensor("a", "U8", "[4294967301]", "[0,4294967301]"), ",",
                   Tensor("b", "BF16", "[2,2]", "[4294967301,4294967309]"), "}");
  const auto start = 8 + static_cast<int64_t>(json.size());
  const auto header = ParseHeader(json, start + 4294967309, kFile);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors.at(0).size_bytes, 4294967301);
  EXPECT_EQ(header->tensors.at(1).offset, start + 4294967301);
}

// Any change of a valid file is refused or read as a layout that covers the file exactly.
TEST(SafetensorsReader, DamagedFilesNeverGiveTensorsOutsideTheFile) {
  const std::string valid =
      FileWith(absl::StrCat(R"({"__metadata__":{"k":"v"},)", Tensor("a", "I32", "[2,3]", "[0,24]"),
                            ",", Tensor("b", "F4", "[4,2]", "[24,28]"), "}"),
               28);
  ASSERT_TRUE(Read(valid).ok());
  const auto check = [](const std::string& file) {
    const auto header = Read(file);
    if (!header.ok()) return;
    int64_t end = header->data_start;
    for (int64_t i = 0; i < header->tensors.size(); ++i) {
      EXPECT_EQ(header->tensors.at(i).offset, end);
      end += header->tensors.at(i).size_bytes;
    }
    EXPECT_EQ(end, static_cast<int64_t>(file.size()));
  };
  for (size_t size = 0; size < valid.size(); ++size) {
    EXPECT_FALSE(Read(valid.substr(0, size)).ok()) << size;
  }
  std::minstd_rand random(20240229);
  for (int round = 0; round < 20'000; ++round) {
    std::string file = valid;
    for (unsigned i = 0; i <= random() % 3; ++i) {
      file[random() % (file.size() - 28)] = static_cast<char>(random() % 256);
    }
    check(file);
  }
}

TEST(TensorBytes, RefusesNegativeAndOverflowingShapes) {
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(*TensorBytes(Dtype::kF4, {3, 2}), 3);
  EXPECT_EQ(*TensorBytes(Dtype::kF6E2M3, {4}), 3);
  EXPECT_EQ(*TensorBytes(Dtype::kU64, {}), 8);
  EXPECT_EQ(*TensorBytes(Dtype::kU8, {int64_t{1} << 60}), int64_t{1} << 60);
  EXPECT_FALSE(TensorBytes(Dtype::kF4, {1}).ok());
  EXPECT_FALSE(TensorBytes(Dtype::kU8, {-1}).ok());
  EXPECT_FALSE(TensorBytes(Dtype::kU8, {-1, -1}).ok());
  EXPECT_FALSE(TensorBytes(Dtype::kU8, {max}).ok());
  EXPECT_FALSE(TensorBytes(Dtype::kU8, {max, max, 0}).ok());
}

std::vector<TensorEntry> TwoEntries() {
  return {{.name = "w13", .dtype = Dtype::kU8, .shape = {2, 4, 8}, .begin = 0, .size_bytes = 64},
          {.name = "q\"\\\n\xC3\xA9",
           .dtype = Dtype::kBF16,
           .shape = {},
           .begin = 64,
           .size_bytes = 2}};
}

TEST(SafetensorsWriter, ReadersGetBackWhatWasWritten) {
  const std::map<std::string, std::string> metadata = {{"shardprep.rank", "3"}, {"a", "\"{}\""}};
  const auto bytes = SerializeHeader(TwoEntries(), metadata);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto header = Read(*bytes + std::string(66, 'x'));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata, metadata);
  EXPECT_THAT(Names(*header), ElementsAre("w13", "q\"\\\n\xC3\xA9"));
  EXPECT_THAT(Shape(header->tensors.at(0)), ElementsAre(2, 4, 8));
  EXPECT_EQ(header->tensors.at(1).dtype, Dtype::kBF16);
  EXPECT_EQ(header->tensors.at(1).offset, static_cast<int64_t>(bytes->size()) + 64);
}

TEST(SafetensorsWriter, StartsWithABraceAndPadsToAPage) {
  std::set<size_t> sizes;
  for (size_t extra = 0; extra < 5000; extra += 499) {
    const auto bytes = SerializeHeader(TwoEntries(), {{"pad", std::string(extra, 'p')}});
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(bytes->size() % 4096, 0u);
    EXPECT_THAT(bytes->substr(8), StartsWith(R"({"__metadata__":{"pad":)"));
    const size_t end = bytes->find_last_not_of(' ');
    EXPECT_EQ((*bytes)[end], '}');
    EXPECT_LT(bytes->size() - end, 4098u);
    sizes.insert(bytes->size());
  }
  EXPECT_GT(sizes.size(), 1u);
}

TEST(SafetensorsWriter, ExactBytes) {
  const auto bytes = SerializeHeader(
      {{.name = "a", .dtype = Dtype::kU8, .shape = {1, 2}, .begin = 0, .size_bytes = 2}},
      {{"z", "1"}, {"b", "2"}});
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  std::string json =
      R"({"__metadata__":{"b":"2","z":"1"},"a":{"dtype":"U8","shape":[1,2],"data_offsets":[0,2]}})";
  json.resize(4096 - 8, ' ');
  EXPECT_EQ(*bytes, LengthBytes(4088) + json);
}

TEST(SafetensorsWriter, FilesWithoutTensorsAreValid) {
  for (const std::map<std::string, std::string>& metadata :
       {std::map<std::string, std::string>{}, {{"k", "v"}}}) {
    const auto bytes = SerializeHeader({}, metadata);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(bytes->size(), 4096u);
    const auto header = Read(*bytes);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->metadata, metadata);
  }
}

TEST(SafetensorsWriter, RefusesWhatNoReaderWouldOpen) {
  const auto changed = [](auto&& change) {
    std::vector<TensorEntry> entries = TwoEntries();
    change(entries);
    return entries;
  };
  const struct {
    const char* name;
    std::vector<TensorEntry> entries;
    const char* error;
  } kCases[] = {
      {"reserved name", changed([](auto& e) { e[1].name = "__metadata__"; }), "reserved"},
      {"name twice", changed([](auto& e) { e[1].name = "w13"; }), "tensor w13: listed twice"},
      {"NUL", changed([](auto& e) { e[1].name = std::string("a\0b", 3); }), "NUL"},
      {"not UTF-8", changed([](auto& e) { e[1].name = "\xFF"; }), "not UTF-8"},
      {"hole", changed([](auto& e) { e[1].begin = 65; }), "InvalidOffset: tensor q"},
      {"overlap", changed([](auto& e) { e[1].begin = 63; }), "begins at 63, want 64"},
      {"size of another shape", changed([](auto& e) { e[0].size_bytes = 60; }),
       "TensorInvalidInfo: tensor w13: 60 bytes, U8 [2,4,8] wants 64"},
      {"half a byte", changed([](auto& e) { e[0] = {"w", Dtype::kF4, {3}, 0, 2}; }),
       "MisalignedSlice"},
      {"negative", changed([](auto& e) { e[0] = {"w", Dtype::kU8, {-4}, 0, -4}; }),
       "ValidationOverflow"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto bytes = SerializeHeader(c.entries, {});
    ASSERT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(bytes.status().message()), HasSubstr(c.error));
  }
  EXPECT_FALSE(SerializeHeader({}, {{"k", "\xFF"}}).ok());
}

TEST(SafetensorsWriter, RefusesHeadersAboveTheLimit) {
  std::string value;
  value.resize(100'000'000, 'v');
  const auto bytes = SerializeHeader({}, {{"k", value}});
  ASSERT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bytes.status().message()), HasSubstr("HeaderTooLarge"));
}

TEST(SafetensorsIndex, SortsFilesAndTensors) {
  const auto index = ParseIndex(
      R"({"metadata":{"total_size":1,"weight_map":{"x":[1]}},
          "weight_map":{"b":"z.safetensors","a":"sub/y.safetensors","c":"z.safetensors"}})",
      "index.json");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files, ElementsAre("sub/y.safetensors", "z.safetensors"));
  ASSERT_EQ(index->tensors.size(), 3);
  EXPECT_EQ(std::string(index->tensors.at(0).name), "a");
  EXPECT_EQ(index->tensors.at(0).file, 0);
  EXPECT_EQ(index->tensors.at(1).file, 1);
  EXPECT_EQ(index->tensors.at(2).file, 1);
}

TEST(SafetensorsIndex, RejectsMalformedIndexes) {
  const struct {
    std::string json;
    const char* error;
  } kCases[] = {
      {"", "not JSON"},
      {"[]", "want an object at the top, found an array"},
      {"{}", "no weight_map"},
      {R"({"weight_map":[]})", "weight_map: want an object, found an array"},
      {R"({"weight_map":"x"})", "weight_map: want an object, found a string"},
      {R"({"weight_map":{"a":1}})", "weight_map: a: want a file name, found a number"},
      {R"({"weight_map":{"a":{}}})", "weight_map: a: want a file name, found an object"},
      {R"({"weight_map":{"a":["f"]}})", "weight_map: a: want a file name, found an array"},
      {R"({"weight_map":{},"weight_map":{}})", "duplicate key 'weight_map'"},
      {R"({"weight_map":{"a":"f39","b":"f39","a":"f40"}})", "duplicate key 'a': in f39 and f40"},
      {R"({"weight_map":{"a":"f39","a":"f39"}})", "duplicate key 'a': in f39 and f39"},
      {R"({"weight_map":{"a\u0000":"f"}})", "NUL in tensor name"},
      {"{\"weight_map\":{\"\xFF\":\"f\"}}", "not UTF-8"},
      {R"({"metadata":)" + std::string(100'000, '[') + "}", "nested too deeply"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.json.substr(0, 60));
    const auto index = ParseIndex(c.json, "index.json");
    ASSERT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(index.status().message()), StartsWith("index.json: "));
    EXPECT_THAT(std::string(index.status().message()), HasSubstr(c.error));
  }
}

TEST(PrintableName, EscapesAndCutsBetweenCharacters) {
  EXPECT_EQ(PrintableName("layers.3.w1"), "layers.3.w1");
  EXPECT_EQ(PrintableName("a\nb"), "a\\nb");
  EXPECT_EQ(PrintableName("caf\xC3\xA9"), "caf\xC3\xA9");
  const std::string long_name = std::string(199, 'x') + "\xC3\xA9" + std::string(50, 'y');
  EXPECT_EQ(PrintableName(long_name), std::string(199, 'x') + "...");
}

}  // namespace
}  // namespace shardprep
