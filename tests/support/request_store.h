// A store in front of another that behaves like one where each read is a request: it prefers large
// reads, notes every read, and lets a test delay, fail or refuse requests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "workers/object_store.h"

namespace shardprep {

// Passes everything on; a base for test stores that change something. `store` must outlive it.
class ForwardingStore : public ObjectStore {
 public:
  explicit ForwardingStore(ObjectStore* store) : store_(store) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override { return store_->Head(key); }
  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    return store_->Open(key);
  }
  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    return store_->Get(key, max_bytes);
  }
  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override {
    return store_->List(prefix);
  }
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override {
    return store_->Create(key, options);
  }
  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override {
    return store_->Put(key, bytes, gate);
  }
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    return store_->PutIfAbsent(key, bytes, gate);
  }
  absl::Status Delete(const std::string& key) override { return store_->Delete(key); }
  int64_t WriteBufferBytes(int64_t object, int64_t reserve) const override {
    return store_->WriteBufferBytes(object, reserve);
  }
  int64_t FurtherWriteBytes(int64_t object, int64_t reserve) const override {
    return store_->FurtherWriteBytes(object, reserve);
  }
  int64_t PreferredReadBytes() const override { return store_->PreferredReadBytes(); }
  absl::StatusOr<int64_t> FreeBytes() override { return store_->FreeBytes(); }
  absl::Status CheckWritable() override { return store_->CheckWritable(); }
  const std::string& uri() const override { return store_->uri(); }

 private:
  ObjectStore* const store_;
};

class RequestStore : public ForwardingStore {
 public:
  struct Request {
    std::string key;
    int64_t offset = 0;
    int64_t size_bytes = 0;
  };
  // Called before a request is passed on, from the thread that makes it, with no lock held; an
  // error is its answer.
  using Hook = std::function<absl::Status(const Request& request)>;

  RequestStore(ObjectStore* store, int64_t preferred_read_bytes)
      : ForwardingStore(store), preferred_(preferred_read_bytes) {}

  // Set before the store is used.
  Hook before_open;
  Hook before_read;
  Hook before_head;

  int64_t PreferredReadBytes() const override { return preferred_; }

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override {
    absl::Status status = Ask(before_head, {key, 0, 0});
    if (!status.ok()) return status;
    return ForwardingStore::Head(key);
  }

  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    absl::Status status = Ask(before_open, {key, 0, 0});
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<ObjectReader>> reader = ForwardingStore::Open(key);
    if (!reader.ok()) return reader;
    return std::make_unique<Reader>(this, key, *std::move(reader));
  }

  // Every read so far, in the order in which they began.
  std::vector<Request> Reads() const {
    absl::MutexLock lock(&mu_);
    return reads_;
  }
  void Forget() {
    absl::MutexLock lock(&mu_);
    reads_.clear();
  }

 private:
  class Reader : public ObjectReader {
   public:
    Reader(RequestStore* store, std::string key, std::unique_ptr<ObjectReader> reader)
        : store_(store), key_(std::move(key)), reader_(std::move(reader)) {}
    absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
      const Request request{key_, offset, static_cast<int64_t>(out.size())};
      {
        absl::MutexLock lock(&store_->mu_);
        store_->reads_.push_back(request);
      }
      const absl::Status status = Ask(store_->before_read, request);
      return status.ok() ? reader_->ReadAt(offset, out) : status;
    }
    absl::Status CheckUnchanged() override { return reader_->CheckUnchanged(); }
    const ObjectInfo& info() const override { return reader_->info(); }

   private:
    RequestStore* const store_;
    const std::string key_;
    const std::unique_ptr<ObjectReader> reader_;
  };

  static absl::Status Ask(const Hook& hook, const Request& request) {
    return hook ? hook(request) : absl::OkStatus();
  }

  const int64_t preferred_;
  mutable absl::Mutex mu_;
  std::vector<Request> reads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardprep
