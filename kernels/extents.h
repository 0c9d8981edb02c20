// Widths and hidden sizes, in elements, before and after rounding up to what a kernel needs.
//
// The two must never be mixed: a loader that steps through a checkpoint with the padded width reads
// nothing on the last ranks (vLLM #42595). They are therefore different types, and RoundUp() is the
// only way from one to the other.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>

#include "kernels/status_macros.h"

namespace shardprep {

// The smallest q with q * divisor >= value. value >= 0, divisor >= 1.
constexpr int64_t CeilDiv(int64_t value, int64_t divisor) {
  SP_CHECK(value >= 0 && divisor >= 1);
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// The smallest multiple of `multiple` that is >= value. value >= 0, multiple >= 1; aborts when the
// result does not fit in int64_t, so untrusted sizes are bounded before they come here.
constexpr int64_t RoundUpTo(int64_t value, int64_t multiple) {
  const int64_t quotient = CeilDiv(value, multiple);
  SP_CHECK(quotient <= std::numeric_limits<int64_t>::max() / multiple);
  return quotient * multiple;
}

// A multiple that an extent is rounded up to, in elements, >= 1.
class Alignment {
 public:
  explicit constexpr Alignment(int64_t elements) : elements_(elements) { SP_CHECK(elements >= 1); }
  constexpr int64_t elements() const { return elements_; }
  constexpr auto operator<=>(const Alignment&) const = default;

 private:
  int64_t elements_;
};

// What the checkpoint holds for one rank, in elements, >= 0.
class NativeExtent {
 public:
  explicit constexpr NativeExtent(int64_t elements) : elements_(elements) {
    SP_CHECK(elements >= 0);
  }
  constexpr int64_t elements() const { return elements_; }
  constexpr auto operator<=>(const NativeExtent&) const = default;

 private:
  int64_t elements_;
};

// What the kernel is given for one rank, in elements, >= 0.
class PaddedExtent {
 public:
  explicit constexpr PaddedExtent(int64_t elements) : elements_(elements) {
    SP_CHECK(elements >= 0);
  }
  constexpr int64_t elements() const { return elements_; }
  constexpr auto operator<=>(const PaddedExtent&) const = default;

 private:
  int64_t elements_;
};

constexpr PaddedExtent RoundUp(NativeExtent native, Alignment alignment) {
  return PaddedExtent(RoundUpTo(native.elements(), alignment.elements()));
}

}  // namespace shardprep
