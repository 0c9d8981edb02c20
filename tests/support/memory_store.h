// An object store in memory: the least that passes tests/workers/object_store_conformance.h, for
// tests of what stands on stores.
#pragma once

#include <memory>
#include <string>

#include "workers/object_store.h"

namespace shardprep {

// Empty. Objects live as long as it does.
std::unique_ptr<ObjectStore> MakeMemoryStore(const std::string& uri = "memory:");

}  // namespace shardprep
