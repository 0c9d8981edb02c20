// The index of a checkpoint. Input: its JSON.
#include <algorithm>
#include <map>
#include <string>

#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz_target.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

using Places = std::map<std::string, std::string>;  // tensor name to file name

Places PlacesOf(const SafetensorsIndex& index) {
  Places places;
  for (int64_t i = 0; i < index.tensors.size(); ++i) {
    const TensorInfo tensor = index.tensors.at(i);
    FUZZ_REQUIRE(tensor.file >= 0 && tensor.file < static_cast<int64_t>(index.files.size()),
                 PrintableName(tensor.name));
    FUZZ_REQUIRE(i == 0 || index.tensors.at(i - 1).name < tensor.name, PrintableName(tensor.name));
    places[std::string(tensor.name)] = index.files[static_cast<size_t>(tensor.file)];
  }
  return places;
}

}  // namespace

void FuzzOne(const std::string& input) {
  const auto index = ParseIndex(input, "index");
  if (!index.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(index.status()), index.status().ToString());
    return;
  }
  FUZZ_REQUIRE(std::is_sorted(index->files.begin(), index->files.end()), "files");
  FUZZ_REQUIRE(std::adjacent_find(index->files.begin(), index->files.end()) == index->files.end(),
               "files");
  const Places places = PlacesOf(*index);
  const nlohmann::json again = {
      {"weight_map", places.empty() ? nlohmann::json::object() : nlohmann::json(places)}};
  const auto reread = ParseIndex(again.dump(), "index");
  FUZZ_REQUIRE(reread.ok(), reread.status().message());
  FUZZ_REQUIRE(PlacesOf(*reread) == places && reread->files == index->files, again.dump());
}

}  // namespace shardprep
