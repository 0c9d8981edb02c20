// AITER's own answers for the kernels' tests: recorded digests, and an independent emulation of its
// view / permute sequences.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/layout.h"

namespace shardprep {

// A recorded call of an AITER function that is one of our layouts.
struct AiterCase {
  std::string name;
  LayoutId layout;
  RowOrder row_order;
  MatrixShape shape;    // of the input
  int64_t padded_cols;  // shape.cols, or what AITER's pad_k_to makes of it
  uint64_t seed;
  std::string input_sha256;
  std::string output_sha256;
};

// Every such case of tests/golden/aiter_shuffles.json, and what its "layout" key leaves out but the
// same maps cover (other names of the same function, padded columns). Fails the test on a bad file.
std::vector<AiterCase> AiterCases();

// The input of a case: byte k depends on k and the seed only.
std::vector<uint8_t> AiterInput(uint64_t seed, int64_t bytes);

// Row-major bytes of shape `dims`, transposed so that output axis k is input axis axes[k].
std::vector<uint8_t> Permute(const std::vector<uint8_t>& in, const std::vector<int64_t>& dims,
                             const std::vector<size_t>& axes);

// What AITER's view / permute sequence for `layout` returns, with our fills.
std::vector<uint8_t> EmulateAiter(LayoutId layout, const MatrixShape& shape,
                                  const std::vector<uint8_t>& in);

// Rows g0,u0,g1,u1... of each expert for kGateUpRows, else a copy.
std::vector<uint8_t> OrderRows(RowOrder order, const MatrixShape& shape,
                               const std::vector<uint8_t>& in);

// Widens rows of `cols` bytes to `wide` bytes, new bytes `fill`; then adds rows up to `rows`.
std::vector<uint8_t> PadMatrix(const std::vector<uint8_t>& in, int64_t cols, int64_t wide,
                               int64_t rows, uint8_t fill);

}  // namespace shardprep
