// The entry point that libFuzzer calls.
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  shardprep::FuzzOne(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
