#include "tests/kernels/aiter_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

namespace shardprep {
namespace {

using Json = nlohmann::json;

struct SameMap {
  LayoutId layout;
  RowOrder row_order;
};

// Recorded under another name of the same function, or for a part of what we do.
const std::map<std::string, SameMap>& CasesWithoutLayoutKey() {
  static const auto& cases = *new std::map<std::string, SameMap>{
      {"sw16_padk_2x32x96_256", {LayoutId::kAiter16x16, RowOrder::kAsIs}},
      {"moesw_gfx1250_gguu_2x64x64", {LayoutId::kAiter16x16, RowOrder::kAsIs}},
      {"moesw_gfx950_gguu_2x64x64", {LayoutId::kAiter16x16, RowOrder::kAsIs}},
      {"moess_gfx950_gguu_512x16", {LayoutId::kAiterE8m0, RowOrder::kAsIs}},
      {"moesw_gfx950_gugu_2x64x64", {LayoutId::kAiter16x16GateUp, RowOrder::kAsIs}},
      {"moess_gfx950_gugu_512x16", {LayoutId::kAiterE8m0GateUp, RowOrder::kAsIs}},
      {"interleave_gate_up_rows_2x64x8", {LayoutId::kRowMajor, RowOrder::kGateUpRows}},
      {"swf4_64x64", {LayoutId::kAiter16x16, RowOrder::kAsIs}},
      {"ssf4_mx_64x16", {LayoutId::kAiterN32K4, RowOrder::kAsIs}},
      {"mx8f4_b_32x64", {LayoutId::kAiter16x16, RowOrder::kAsIs}},
  };
  return cases;
}

MatrixShape ShapeOf(const Json& entry) {
  const auto dims = entry.at("input_shape").get<std::vector<int64_t>>();
  if (dims.size() == 3) return {dims[0], dims[1], dims[2]};
  const int64_t experts = entry.at("args").value("experts_cnt", int64_t{1});
  return {experts, dims[0] / experts, dims[1]};
}

}  // namespace

std::vector<AiterCase> AiterCases() {
  std::ifstream stream(SP_GOLDEN_DIR "/aiter_shuffles.json");
  const Json root = Json::parse(stream);
  std::vector<AiterCase> cases;
  for (const Json& entry : root.at("cases")) {
    AiterCase one;
    one.name = entry.at("name").get<std::string>();
    const auto by_name = CasesWithoutLayoutKey().find(one.name);
    if (entry.contains("layout")) {
      one.layout = ParseLayoutId(entry.at("layout").get<std::string>()).value();
      const bool rows_alternate =
          one.layout == LayoutId::kAiterN32K4 && entry.at("args").value("gate_up", false);
      one.row_order = rows_alternate ? RowOrder::kGateUpRows : RowOrder::kAsIs;
    } else if (by_name != CasesWithoutLayoutKey().end()) {
      one.layout = by_name->second.layout;
      one.row_order = by_name->second.row_order;
    } else {
      continue;
    }
    one.shape = ShapeOf(entry);
    const bool pads_columns = entry.at("args").contains("pad_k_to");
    one.padded_cols =
        pads_columns ? entry.at("output_shape").back().get<int64_t>() : one.shape.cols;
    one.seed = entry.at("seed").get<uint64_t>();
    one.input_sha256 = entry.at("input_sha256").get<std::string>();
    one.output_sha256 = entry.at("output_sha256").get<std::string>();
    cases.push_back(std::move(one));
  }
  EXPECT_GE(cases.size(), 60U);
  return cases;
}

std::vector<uint8_t> AiterInput(uint64_t seed, int64_t bytes) {
  std::vector<uint8_t> input(static_cast<size_t>(bytes));
  for (size_t k = 0; k < input.size(); ++k) {
    uint64_t z = ((seed << 40) + k + 1) * 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    z ^= z >> 31;
    input[k] = static_cast<uint8_t>(z >> 56);
  }
  return input;
}

std::vector<uint8_t> Permute(const std::vector<uint8_t>& in, const std::vector<int64_t>& dims,
                             const std::vector<size_t>& axes) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t k = dims.size() - 1; k > 0; --k) strides[k - 1] = strides[k] * dims[k];
  EXPECT_EQ(strides[0] * dims[0], static_cast<int64_t>(in.size()));
  std::vector<uint8_t> out;
  out.reserve(in.size());
  std::vector<int64_t> at(dims.size(), 0);  // in output axis order
  while (out.size() < in.size()) {
    int64_t source = 0;
    for (size_t k = 0; k < axes.size(); ++k) source += at[k] * strides[axes[k]];
    out.push_back(in[static_cast<size_t>(source)]);
    for (size_t k = axes.size(); k-- > 0;) {
      if (++at[k] < dims[axes[k]]) break;
      at[k] = 0;
    }
  }
  return out;
}

std::vector<uint8_t> PadMatrix(const std::vector<uint8_t>& in, int64_t cols, int64_t wide,
                               int64_t rows, uint8_t fill) {
  std::vector<uint8_t> out(static_cast<size_t>(rows * wide), fill);
  for (size_t row = 0; row < in.size() / static_cast<size_t>(cols); ++row) {
    std::copy_n(in.begin() + static_cast<int64_t>(row) * cols, cols,
                out.begin() + static_cast<int64_t>(row) * wide);
  }
  return out;
}

std::vector<uint8_t> OrderRows(RowOrder order, const MatrixShape& shape,
                               const std::vector<uint8_t>& in) {
  if (order == RowOrder::kAsIs) return in;
  return Permute(in, {shape.experts, 2, shape.rows / 2, shape.cols}, {0, 2, 1, 3});
}

std::vector<uint8_t> EmulateAiter(LayoutId layout, const MatrixShape& shape,
                                  const std::vector<uint8_t>& in) {
  const int64_t e = shape.experts;
  const int64_t n = shape.rows;
  const int64_t k = shape.cols;
  const int64_t wide = (k + 7) / 8 * 8;
  const int64_t tall = (e * n + 255) / 256 * 256;
  switch (layout) {
    case LayoutId::kRowMajor:
      return in;
    case LayoutId::kAiter16x16:
      return Permute(in, {e, n / 16, 16, k / 32, 2, 16}, {0, 1, 3, 4, 2, 5});
    case LayoutId::kAiter16x16GateUp:
      return Permute(in, {e, 2, n / 32, 16, k / 64, 4, 16}, {0, 2, 1, 4, 5, 3, 6});
    case LayoutId::kAiterE8m0:
      return Permute(PadMatrix(in, k, wide, tall, 0x00), {tall / 32, 2, 16, wide / 8, 2, 4},
                     {0, 3, 5, 2, 4, 1});
    case LayoutId::kAiterE8m0Expert:
      return Permute(PadMatrix(in, k, wide, e * n, 0x7F), {e, n / 32, 2, 16, wide / 8, 2, 4},
                     {0, 1, 4, 6, 3, 5, 2});
    case LayoutId::kAiterE8m0GateUp:
      return Permute(PadMatrix(in, k, wide, e * n, 0x7F), {e, 2, n / 32, 16, wide / 8, 2, 4},
                     {0, 2, 4, 6, 3, 5, 1});
    case LayoutId::kAiterN32K4:
      return Permute(in, {e, n / 32, 32, k / 4, 4}, {0, 1, 3, 2, 4});
  }
  return {};
}

}  // namespace shardprep
