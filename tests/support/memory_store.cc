#include "tests/support/memory_store.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"
#include "workers/object_names.h"

namespace shardprep {
namespace {

struct Version {
  std::shared_ptr<const std::string> bytes;
  ObjectInfo info;
};

enum class IfPresent { kReplace, kFail };

// Thread safe.
class Objects {
 public:
  explicit Objects(std::string uri) : uri_(std::move(uri)) {}
  const std::string& uri() const { return uri_; }
  std::string NameOf(const std::string& key) const { return absl::StrCat(uri_, "/", key); }

  absl::StatusOr<Version> Find(const std::string& key) const {
    SP_RETURN_IF_ERROR(ValidateObjectKey(key));
    absl::MutexLock lock(&mu_);
    const auto found = versions_.find(key);
    if (found != versions_.end()) return found->second;
    return absl::NotFoundError(absl::StrCat(NameOf(key), ": no such object"));
  }

  // The gate is asked with no lock held: it may look at the store.
  absl::StatusOr<ObjectInfo> Store(const std::string& key, std::string bytes, IfPresent if_present,
                                   const CommitGate& gate) {
    SP_RETURN_IF_ERROR(ValidateObjectKey(key));
    if (gate) SP_RETURN_IF_ERROR(gate());
    absl::MutexLock lock(&mu_);
    if (if_present == IfPresent::kFail && versions_.contains(key)) {
      return absl::AlreadyExistsError(absl::StrCat(NameOf(key), ": an object of that name exists"));
    }
    Version version;
    version.info.size_bytes = static_cast<int64_t>(bytes.size());
    version.info.etag = absl::StrCat("v", ++last_version_);
    version.bytes = std::make_shared<const std::string>(std::move(bytes));
    versions_[key] = version;
    return version.info;
  }

  void Erase(const std::string& key) {
    absl::MutexLock lock(&mu_);
    versions_.erase(key);
  }

  std::vector<ObjectEntry> List(const std::string& prefix) const {
    absl::MutexLock lock(&mu_);
    std::vector<ObjectEntry> entries;
    for (const auto& [key, version] : versions_) {
      if (absl::StartsWith(key, prefix)) entries.push_back({key, version.info});
    }
    return entries;
  }

 private:
  const std::string uri_;
  mutable absl::Mutex mu_;
  int64_t last_version_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Version> versions_ ABSL_GUARDED_BY(mu_);
};

class MemoryReader final : public ObjectReader {
 public:
  MemoryReader(const Objects* objects, std::string key, Version version)
      : objects_(objects), key_(std::move(key)), version_(std::move(version)) {}

  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
    const auto size = static_cast<int64_t>(out.size());
    const int64_t whole = version_.info.size_bytes;
    if (offset < 0 || offset > whole || size > whole - offset) {
      return absl::OutOfRangeError(absl::StrCat(objects_->NameOf(key_), ": ", size,
                                                " bytes from offset ", offset,
                                                " on, want a range in [0, ", whole, ")"));
    }
    std::copy_n(version_.bytes->begin() + offset, size, out.begin());
    return absl::OkStatus();
  }

  absl::Status CheckUnchanged() override {
    const auto now = objects_->Find(key_);
    if (now.ok() && now->info.etag == version_.info.etag) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        objects_->NameOf(key_), ": replaced or removed: ", now.ok() ? now->info.etag : "gone",
        ", want ", version_.info.etag));
  }

  const ObjectInfo& info() const override { return version_.info; }

 private:
  const Objects* const objects_;
  const std::string key_;
  const Version version_;
};

// Reservations lie in the caller's buffer; finished bytes leave it at once.
class MemoryWriter final : public ObjectWriter {
 public:
  MemoryWriter(Objects* objects, std::string key, WriteOptions options)
      : objects_(objects), key_(std::move(key)), options_(std::move(options)) {}

  absl::StatusOr<absl::Span<uint8_t>> Reserve(int64_t size) override {
    SP_RETURN_IF_ERROR(status_);
    const auto room = static_cast<int64_t>(options_.buffer.size());
    if (size < 0 || size > room) {
      return Fail(absl::InvalidArgumentError(absl::StrCat(
          objects_->NameOf(key_), ": reservation of ", size, " bytes, want 0 to ", room)));
    }
    reserved_ = room;
    return options_.buffer;
  }

  absl::Status Advance(int64_t size) override {
    SP_RETURN_IF_ERROR(status_);
    const int64_t left = options_.size_bytes - static_cast<int64_t>(bytes_.size());
    if (size < 0 || size > reserved_ || size > left) {
      return Fail(absl::InvalidArgumentError(absl::StrCat(objects_->NameOf(key_), ": advance by ",
                                                          size, " bytes, want at most ",
                                                          std::min(reserved_, left))));
    }
    bytes_.append(reinterpret_cast<const char*>(options_.buffer.data()), static_cast<size_t>(size));
    reserved_ = 0;
    return absl::OkStatus();
  }

  absl::StatusOr<ObjectInfo> Commit(const CommitGate& gate) override {
    SP_RETURN_IF_ERROR(status_);
    const auto written = static_cast<int64_t>(bytes_.size());
    if (written != options_.size_bytes) {
      return Fail(absl::FailedPreconditionError(
          absl::StrCat(objects_->NameOf(key_), ": commit after ", written,
                       " bytes, want the announced ", options_.size_bytes)));
    }
    status_ =
        absl::FailedPreconditionError(absl::StrCat(objects_->NameOf(key_), ": already committed"));
    return objects_->Store(key_, std::move(bytes_), IfPresent::kReplace, gate);
  }

 private:
  absl::Status Fail(absl::Status status) {
    status_ = status;
    return status;
  }

  Objects* const objects_;
  const std::string key_;
  const WriteOptions options_;
  std::string bytes_;
  int64_t reserved_ = 0;
  absl::Status status_;
};

class MemoryStore final : public ObjectStore {
 public:
  explicit MemoryStore(const std::string& uri) : objects_(uri) {}

  absl::StatusOr<ObjectInfo> Head(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(const Version version, objects_.Find(key));
    return version.info;
  }

  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(Version version, objects_.Find(key));
    return std::make_unique<MemoryReader>(&objects_, key, std::move(version));
  }

  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    SP_ASSIGN_OR_RETURN(const Version version, objects_.Find(key));
    if (version.info.size_bytes <= max_bytes) return *version.bytes;
    return absl::ResourceExhaustedError(absl::StrCat(
        objects_.NameOf(key), ": ", version.info.size_bytes, " bytes, want at most ", max_bytes));
  }

  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override {
    SP_RETURN_IF_ERROR(ValidateObjectPrefix(prefix));
    return objects_.List(prefix);
  }

  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& key,
                                                       const WriteOptions& options) override {
    SP_RETURN_IF_ERROR(ValidateObjectKey(key));
    SP_RETURN_IF_ERROR(CheckWriteOptions(objects_.NameOf(key), options));
    return std::make_unique<MemoryWriter>(&objects_, key, options);
  }

  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string& bytes,
                                 const CommitGate& gate) override {
    return objects_.Store(key, bytes, IfPresent::kReplace, gate);
  }

  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    return objects_.Store(key, bytes, IfPresent::kFail, gate);
  }

  absl::Status Delete(const std::string& key) override {
    SP_RETURN_IF_ERROR(ValidateObjectKey(key));
    objects_.Erase(key);
    return absl::OkStatus();
  }

  int64_t WriteBufferBytes(int64_t /*largest_object*/, int64_t largest_reserve) const override {
    return std::max(largest_reserve, int64_t{64} << 10);
  }
  absl::StatusOr<int64_t> FreeBytes() override { return kUnlimitedBytes; }
  absl::Status CheckWritable() override { return absl::OkStatus(); }
  const std::string& uri() const override { return objects_.uri(); }

 private:
  Objects objects_;
};

}  // namespace

std::unique_ptr<ObjectStore> MakeMemoryStore(const std::string& uri) {
  return std::make_unique<MemoryStore>(uri);
}

}  // namespace shardprep
