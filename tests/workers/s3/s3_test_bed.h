// An S3 connection to a fake server, with a clock that stands still, pauses that take no time and
// credentials that tests rotate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tests/support/fake_s3.h"
#include "workers/clock.h"
#include "workers/s3/s3_client.h"
#include "workers/s3/s3_store.h"

namespace shardprep {

// What the file of credentials holds is `next`; what is in use follows only at a refresh.
class RotatingCredentials final : public CredentialsProvider {
 public:
  explicit RotatingCredentials(AwsCredentials first) : now_(first), next_(std::move(first)) {}

  void Rotate(AwsCredentials next) {
    absl::MutexLock lock(&mu_);
    next_ = std::move(next);
  }
  absl::StatusOr<AwsCredentials> Get() override {
    absl::MutexLock lock(&mu_);
    return now_;
  }
  bool Refresh(const AwsCredentials& used) override {
    absl::MutexLock lock(&mu_);
    ++refreshes_;
    now_ = next_;
    return now_.access_key_id != used.access_key_id;
  }
  int refreshes() const {
    absl::MutexLock lock(&mu_);
    return refreshes_;
  }

 private:
  mutable absl::Mutex mu_;
  AwsCredentials now_ ABSL_GUARDED_BY(mu_);
  AwsCredentials next_ ABSL_GUARDED_BY(mu_);
  int refreshes_ ABSL_GUARDED_BY(mu_) = 0;
};

class RecordingObserver final : public S3Observer {
 public:
  void OnExchange(const S3Exchange& exchange) override {
    absl::MutexLock lock(&mu_);
    exchanges_.push_back(exchange);
  }
  void OnAbortFailed() override {
    absl::MutexLock lock(&mu_);
    ++failed_aborts_;
  }
  std::vector<S3Exchange> exchanges() const {
    absl::MutexLock lock(&mu_);
    return exchanges_;
  }
  int failed_aborts() const {
    absl::MutexLock lock(&mu_);
    return failed_aborts_;
  }

 private:
  mutable absl::Mutex mu_;
  std::vector<S3Exchange> exchanges_ ABSL_GUARDED_BY(mu_);
  int failed_aborts_ ABSL_GUARDED_BY(mu_) = 0;
};

class S3TestBed {
 public:
  static constexpr int64_t kPartBytes = int64_t{64} << 10;

  static S3Options Options() {
    S3Options options;
    options.endpoint = "http://s3.test:9000";
    options.upload_part_bytes = kPartBytes;
    return options;
  }

  explicit S3TestBed(FakeS3Options server_options = {}, const S3Options& options = Options(),
                     const std::string& uri = "s3://bucket/a/b")
      : server(std::move(server_options), &clock) {
    connection = Connect(options);
    store = OpenStoreAt(uri);
  }

  // As another process would.
  std::shared_ptr<S3Connection> Connect(const S3Options& options) {
    auto provider = std::make_unique<RotatingCredentials>(FakeS3Options().credentials);
    credentials = provider.get();
    S3Environment environment;
    environment.clock = &clock;
    environment.seed = ++seed_;
    environment.observer = &observer;
    environment.limits.least_part_bytes = 1000;
    environment.sleep = [this](absl::Duration pause) {
      {
        absl::MutexLock lock(&mu_);
        pauses_.push_back(pause);
      }
      clock.Advance(pause);
    };
    return MakeS3Connection(options, server.Connect(), std::move(provider), environment);
  }

  std::unique_ptr<ObjectStore> OpenStoreAt(const std::string& uri) const {
    auto opened = OpenS3Store(uri, connection);
    return opened.ok() ? *std::move(opened) : nullptr;
  }

  std::vector<absl::Duration> pauses() const {
    absl::MutexLock lock(&mu_);
    return pauses_;
  }

  FakeClock clock;
  FakeS3 server;
  RecordingObserver observer;
  RotatingCredentials* credentials = nullptr;  // of the last Connect()
  std::shared_ptr<S3Connection> connection;
  std::unique_ptr<ObjectStore> store;

 private:
  mutable absl::Mutex mu_;
  std::vector<absl::Duration> pauses_ ABSL_GUARDED_BY(mu_);
  uint64_t seed_ = 0;
};

// Streams into a store in reservations of one size.
class StreamedWrite {
 public:
  StreamedWrite(ObjectStore& store, const std::string& key, std::string bytes, int64_t reserve,
                int writes_at_once = 1)
      : bytes_(std::move(bytes)), reserve_(reserve) {
    const auto size = static_cast<int64_t>(bytes_.size());
    buffer_.resize(static_cast<size_t>(store.BufferBytes(size, reserve, writes_at_once)));
    auto created = store.Create(
        key,
        {.size_bytes = size, .buffer = absl::MakeSpan(buffer_), .writes_at_once = writes_at_once});
    status_ = created.status();
    if (created.ok()) writer_ = *std::move(created);
  }

  // Up to `end` bytes of the object in all.
  absl::Status WriteTo(int64_t end) {
    while (status_.ok() && written_ < end) {
      const auto room = writer_->Reserve(reserve_);
      if (!room.ok()) return status_ = room.status();
      const int64_t size = std::min(reserve_, end - written_);
      std::copy_n(bytes_.data() + written_, size, room->data());
      status_ = writer_->Advance(size);
      written_ += size;
    }
    return status_;
  }

  absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate = CommitGate()) {
    absl::Status written = WriteTo(static_cast<int64_t>(bytes_.size()));
    if (!written.ok()) return written;
    return writer_->Commit(gate);
  }

  // Ends the writer without a commit.
  void Drop() { writer_.reset(); }

 private:
  const std::string bytes_;
  const int64_t reserve_;
  std::vector<uint8_t> buffer_;
  std::unique_ptr<ObjectWriter> writer_;
  absl::Status status_;
  int64_t written_ = 0;
};

}  // namespace shardprep
