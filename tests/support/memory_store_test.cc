#include "tests/support/memory_store.h"

#include <memory>

#include "gtest/gtest.h"
#include "tests/workers/object_store_conformance.h"

namespace shardprep {
namespace {

class MemoryUnderTest final : public StoreUnderTest {
 public:
  ObjectStore& store() override { return *store_; }

 private:
  const std::unique_ptr<ObjectStore> store_ = MakeMemoryStore();
};

INSTANTIATE_TEST_SUITE_P(Memory, ObjectStoreConformance,
                         testing::Values(StoreParam{
                             "Memory", [] { return std::make_unique<MemoryUnderTest>(); }, 20}),
                         StoreParamName);

}  // namespace
}  // namespace shardprep
