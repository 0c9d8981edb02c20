#include "workers/metered_store.h"

#include <utility>

#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "workers/worker_metrics.h"

namespace shardprep {
namespace {

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

template <typename Call>
auto Counted(WorkerMetrics* metrics, StoreOperation operation, Call call) {
  if (metrics == nullptr) return call();
  const absl::Time start = absl::Now();
  auto result = call();
  metrics->StoreRequest(operation, StatusOf(result).code(), absl::Now() - start);
  return result;
}

class MeteredReader : public ObjectReader {
 public:
  MeteredReader(std::unique_ptr<ObjectReader> reader, WorkerMetrics* metrics)
      : reader_(std::move(reader)), metrics_(metrics) {}
  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
    return Counted(metrics_, StoreOperation::kRead, [&] { return reader_->ReadAt(offset, out); });
  }
  absl::Status ReadAsItArrives(int64_t offset, absl::Span<uint8_t> out,
                               const Arrived& arrived) override {
    return Counted(metrics_, StoreOperation::kRead,
                   [&] { return reader_->ReadAsItArrives(offset, out, arrived); });
  }
  void WillNeed(int64_t offset, int64_t size) override { reader_->WillNeed(offset, size); }
  absl::Status CheckUnchanged() override {
    return Counted(metrics_, StoreOperation::kHead, [&] { return reader_->CheckUnchanged(); });
  }
  const ObjectInfo& info() const override { return reader_->info(); }

 private:
  std::unique_ptr<ObjectReader> reader_;
  WorkerMetrics* metrics_;
};

// A request is the whole object: counted once, when it is committed.
class MeteredWriter : public ObjectWriter {
 public:
  MeteredWriter(std::unique_ptr<ObjectWriter> writer, WorkerMetrics* metrics)
      : writer_(std::move(writer)), metrics_(metrics) {}
  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) override {
    return writer_->Reserve(size);
  }
  absl::Status Advance(int64_t size) override { return writer_->Advance(size); }
  absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate) override {
    return Counted(metrics_, StoreOperation::kWrite, [&] { return writer_->Commit(gate); });
  }

 private:
  std::unique_ptr<ObjectWriter> writer_;
  WorkerMetrics* metrics_;
};

}  // namespace

absl::StatusOr<ObjectInfo> MeteredStore::Head(const std::string& key) {
  return Counted(metrics_, StoreOperation::kHead, [&] { return store_->Head(key); });
}

absl::StatusOr<std::unique_ptr<ObjectReader>> MeteredStore::Open(const std::string& key) {
  SP_ASSIGN_OR_RETURN(auto reader,
                      Counted(metrics_, StoreOperation::kHead, [&] { return store_->Open(key); }));
  return std::make_unique<MeteredReader>(std::move(reader), metrics_);
}

absl::StatusOr<std::string> MeteredStore::Get(const std::string& key, int64_t max_bytes) {
  return Counted(metrics_, StoreOperation::kGet, [&] { return store_->Get(key, max_bytes); });
}

absl::StatusOr<std::vector<ObjectEntry>> MeteredStore::List(const std::string& prefix) {
  return Counted(metrics_, StoreOperation::kList, [&] { return store_->List(prefix); });
}

absl::StatusOr<std::unique_ptr<ObjectWriter>> MeteredStore::Create(const std::string& key,
                                                                   const WriteOptions& options) {
  SP_ASSIGN_OR_RETURN(auto writer, store_->Create(key, options));
  return std::make_unique<MeteredWriter>(std::move(writer), metrics_);
}

absl::StatusOr<ObjectInfo> MeteredStore::Put(const std::string& key, const std::string& bytes,
                                             const CommitGate& gate) {
  return Counted(metrics_, StoreOperation::kPut, [&] { return store_->Put(key, bytes, gate); });
}

absl::StatusOr<ObjectInfo> MeteredStore::PutIfAbsent(const std::string& key,
                                                     const std::string& bytes,
                                                     const CommitGate& gate) {
  return Counted(metrics_, StoreOperation::kPut,
                 [&] { return store_->PutIfAbsent(key, bytes, gate); });
}

absl::Status MeteredStore::Delete(const std::string& key) {
  return Counted(metrics_, StoreOperation::kDelete, [&] { return store_->Delete(key); });
}

absl::Status MeteredStore::CheckWritable() {
  return Counted(metrics_, StoreOperation::kProbe, [&] { return store_->CheckWritable(); });
}

}  // namespace shardprep
