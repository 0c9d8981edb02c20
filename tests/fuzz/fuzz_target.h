// What a fuzz target is: one function that takes any bytes, and states what must hold for them.
//
// With the preset `fuzz` each target is a libFuzzer binary. Everywhere else replay.cc drives it:
// the corpus, and mutations of it from a fixed seed, so that every ctest run covers what was found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

// Ends the process, so that the fuzzer keeps the input, unless `condition` holds.
#define FUZZ_REQUIRE(condition, message)                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::fprintf(stderr, "%s:%d: does not hold: %s (%s)\n", __FILE__, __LINE__, #condition, \
                   std::string(message).c_str());                                             \
      std::abort();                                                                           \
    }                                                                                         \
  } while (false)

namespace shardprep {

// Implemented by each target.
void FuzzOne(const std::string& input);

// Reads an input as a sequence of small choices; behind its end every choice is 0.
class ChoiceReader {
 public:
  explicit ChoiceReader(const std::string& input) : input_(input) {}

  bool empty() const { return at_ >= input_.size(); }
  uint8_t Byte() { return empty() ? 0 : static_cast<uint8_t>(input_[at_++]); }
  // 0 to count - 1; count is 1 to 256.
  int Below(int count) { return Byte() % count; }
  bool OneIn(int count) { return Below(count) == 1 % count; }

 private:
  const std::string& input_;
  size_t at_ = 0;
};

}  // namespace shardprep
