// An object store that counts its requests and their latencies, and is otherwise the one it wraps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "workers/object_store.h"

namespace shardprep {

class WorkerMetrics;

// `store` must outlive it; without `metrics` nothing is counted. Reads and writes of the readers
// and writers that it hands out are counted too.
class MeteredStore : public ObjectStore {
 public:
  MeteredStore(ObjectStore* store, WorkerMetrics* metrics) : store_(store), metrics_(metrics) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override;
  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override;
  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override;
  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override;
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override;
  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override;
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override;
  absl::Status Delete(const std::string& key) override;
  int64_t WriteBufferBytes(int64_t largest_object, int64_t largest_reserve) const override {
    return store_->WriteBufferBytes(largest_object, largest_reserve);
  }
  int64_t FurtherWriteBytes(int64_t largest_object, int64_t largest_reserve) const override {
    return store_->FurtherWriteBytes(largest_object, largest_reserve);
  }
  int64_t PreferredReadBytes() const override { return store_->PreferredReadBytes(); }
  absl::StatusOr<int64_t> FreeBytes() override { return store_->FreeBytes(); }
  absl::StatusOr<std::unique_ptr<StoreClaim>> Claim() override { return store_->Claim(); }
  absl::Status CheckWritable() override;
  absl::Status CheckNotObstructed(const std::string& key) override {
    return store_->CheckNotObstructed(key);
  }
  const std::string& uri() const override { return store_->uri(); }

 private:
  ObjectStore* const store_;
  WorkerMetrics* const metrics_;
};

}  // namespace shardprep
