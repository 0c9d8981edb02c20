// The header of a safetensors file. Input: the size of the data in decimal, a line feed, the JSON.
// So a mutation of the JSON needs no matching length in front, and the raw bytes serve as the first
// bytes of a file besides.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "tests/fuzz/fuzz_target.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

// What every accepted header promises its readers.
void CheckTiling(const SafetensorsHeader& header, int64_t file_size) {
  int64_t end = header.data_start;
  for (int64_t i = 0; i < header.tensors.size(); ++i) {
    const TensorInfo tensor = header.tensors.at(i);
    FUZZ_REQUIRE(tensor.offset == end, PrintableName(tensor.name));
    FUZZ_REQUIRE(tensor.size_bytes >= 0 && tensor.size_bytes <= file_size - end,
                 PrintableName(tensor.name));
    const auto bytes = TensorBytes(tensor.dtype, tensor.shape);
    FUZZ_REQUIRE(bytes.ok() && *bytes == tensor.size_bytes, PrintableName(tensor.name));
    FUZZ_REQUIRE(tensor.name.find('\0') == absl::string_view::npos, PrintableName(tensor.name));
    end += tensor.size_bytes;
  }
  FUZZ_REQUIRE(end == file_size, std::to_string(end));
}

std::vector<TensorEntry> EntriesOf(const SafetensorsHeader& header) {
  std::vector<TensorEntry> entries;
  for (int64_t i = 0; i < header.tensors.size(); ++i) {
    const TensorInfo tensor = header.tensors.at(i);
    entries.push_back({.name = std::string(tensor.name),
                       .dtype = tensor.dtype,
                       .shape = {tensor.shape.begin(), tensor.shape.end()},
                       .begin = tensor.offset - header.data_start,
                       .size_bytes = tensor.size_bytes});
  }
  return entries;
}

bool AreEqual(const TensorEntry& a, const TensorEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.begin == b.begin &&
         a.size_bytes == b.size_bytes;
}

// What was read can be written, and reads back as the same.
void CheckRewriting(const SafetensorsHeader& header, int64_t data_bytes) {
  const std::vector<TensorEntry> entries = EntriesOf(header);
  const auto text = SerializeHeader(entries, header.metadata);
  FUZZ_REQUIRE(text.ok(), text.status().message());
  FUZZ_REQUIRE(text->size() % kDataAlignment == 0 && (*text)[kHeaderLengthBytes] == '{', *text);
  const auto file_size = static_cast<int64_t>(text->size()) + data_bytes;
  const auto length = ParseHeaderLength(*text, file_size, "again");
  FUZZ_REQUIRE(length.ok() && *length == static_cast<int64_t>(text->size()) - kHeaderLengthBytes,
               length.status().message());
  const auto again = ParseHeader(text->substr(kHeaderLengthBytes), file_size, "again");
  FUZZ_REQUIRE(again.ok(), again.status().message());
  FUZZ_REQUIRE(again->metadata == header.metadata, *text);
  const std::vector<TensorEntry> found = EntriesOf(*again);
  FUZZ_REQUIRE(std::equal(entries.begin(), entries.end(), found.begin(), found.end(), AreEqual),
               *text);
}

}  // namespace

void FuzzOne(const std::string& input) {
  const auto size = static_cast<int64_t>(input.size());
  const auto length = ParseHeaderLength(input, size, "raw");
  if (length.ok()) {
    FUZZ_REQUIRE(*length >= 0 && *length <= size - kHeaderLengthBytes, std::to_string(*length));
    const auto raw = ParseHeader(input.substr(kHeaderLengthBytes, *length), size, "raw");
    if (raw.ok()) CheckTiling(*raw, size);
  }
  const size_t line = input.find('\n');
  int64_t data_bytes = 0;
  if (line == std::string::npos || !absl::SimpleAtoi(input.substr(0, line), &data_bytes)) return;
  if (data_bytes < 0 || data_bytes > int64_t{1} << 60) return;
  const std::string json = input.substr(line + 1);
  const int64_t file_size = kHeaderLengthBytes + static_cast<int64_t>(json.size()) + data_bytes;
  const auto header = ParseHeader(json, file_size, "file");
  if (!header.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(header.status()), header.status().ToString());
    return;
  }
  CheckTiling(*header, file_size);
  CheckRewriting(*header, data_bytes);
}

}  // namespace shardprep
