// The S3 store against a real server: the conformance suite, and what only a server can show.
//
// The server is the one that the environment names, as tests/support/s3_servers/server.sh describes
// it; without one every test fails. Each test has a prefix of its own in the server's bucket.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/status_macros.h"
#include "tests/workers/object_store_conformance.h"
#include "workers/object_names.h"
#include "workers/s3/s3_client.h"
#include "workers/s3/s3_options.h"
#include "workers/s3/s3_store.h"

namespace shardprep {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

// More than one page of a listing.
constexpr int kListObjects = 1'005;
constexpr int64_t kPartBytes = int64_t{5} << 20;

std::optional<std::string> Environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::string MustHave(const std::string& name) {
  const auto value = Environment(name);
  if (!value.has_value()) ADD_FAILURE() << name << " is not set: no server to test against";
  return value.value_or("");
}

std::shared_ptr<S3Connection> Connect() {
  S3Flags flags;
  flags.endpoint = MustHave("SHARDPREP_TEST_S3_ENDPOINT");
  auto options = MakeS3Options(flags, Environment);
  SP_CHECK(options.ok());
  // The least that servers take, so that objects of a few MiB have several parts.
  options->upload_part_bytes = kPartBytes;
  auto connection = ConnectS3(*options);
  SP_CHECK(connection.ok());
  return *std::move(connection);
}

// Keys of the uploads below a prefix that were begun and neither completed nor aborted.
std::string OpenUploads(S3Connection& connection, const std::string& prefix) {
  S3Call call;
  call.operation = "ListMultipartUploads";
  call.method = "GET";
  call.bucket = MustHave("SHARDPREP_TEST_S3_BUCKET");
  call.query = {{"uploads", ""}, {"prefix", prefix}};
  const S3Answer answer = connection.Exchange(std::move(call));
  if (!answer.status.ok()) return answer.status.ToString();
  return absl::StrContains(answer.response.body, "<Upload>") ? answer.response.body : "";
}

class ServerStore : public StoreUnderTest {
 public:
  ServerStore() : prefix_(absl::StrCat("test-", getpid(), "-", ++count_)), connection_(Connect()) {
    store_ = OpenAgain(connection_);
  }

  ~ServerStore() override {
    EXPECT_EQ(OpenUploads(*connection_, prefix_ + "/"), "");
    const auto entries = store_->List("");
    EXPECT_TRUE(entries.ok()) << entries.status();
    if (!entries.ok()) return;
    for (const ObjectEntry& entry : *entries) EXPECT_THAT(store_->Delete(entry.key), IsOk());
  }

  ObjectStore& store() override { return *store_; }
  S3Connection& connection() { return *connection_; }
  const std::string& prefix() const { return prefix_; }

  // The same place, as another process would open it.
  std::unique_ptr<ObjectStore> OpenAgain(const std::shared_ptr<S3Connection>& connection) const {
    auto store = OpenS3Store(
        absl::StrCat("s3://", MustHave("SHARDPREP_TEST_S3_BUCKET"), "/", prefix_), connection);
    SP_CHECK(store.ok());
    return *std::move(store);
  }

 private:
  inline static std::atomic<int> count_ = 0;
  const std::string prefix_;
  std::shared_ptr<S3Connection> connection_;
  std::unique_ptr<ObjectStore> store_;
};

INSTANTIATE_TEST_SUITE_P(Server, ObjectStoreConformance,
                         testing::Values(StoreParam{"Server",
                                                    [] { return std::make_unique<ServerStore>(); },
                                                    kListObjects}),
                         StoreParamName);

// Streams the first `size_bytes` of an object of twice that size.
std::unique_ptr<ObjectWriter> HalfWritten(ObjectStore& store, const std::string& key,
                                          int64_t size_bytes, std::vector<uint8_t>& buffer) {
  constexpr int64_t kPiece = 1 << 20;
  buffer.resize(static_cast<size_t>(store.WriteBufferBytes(2 * size_bytes, kPiece)));
  WriteOptions options;
  options.size_bytes = 2 * size_bytes;
  options.buffer = absl::MakeSpan(buffer);
  auto writer = store.Create(key, options);
  EXPECT_TRUE(writer.ok()) << writer.status();
  if (!writer.ok()) return nullptr;
  for (int64_t written = 0; written < size_bytes; written += kPiece) {
    const auto room = (*writer)->Reserve(kPiece);
    EXPECT_TRUE(room.ok()) << room.status();
    if (!room.ok()) return nullptr;
    std::fill(room->begin(), room->end(), uint8_t{1});
    EXPECT_THAT((*writer)->Advance(kPiece), IsOk());
  }
  return *std::move(writer);
}

TEST(S3Server, AnAbandonedUploadIsAborted) {
  ServerStore under_test;
  std::vector<uint8_t> buffer;
  auto writer = HalfWritten(under_test.store(), "object", 4 * kPartBytes, buffer);
  ASSERT_NE(writer, nullptr);
  EXPECT_THAT(OpenUploads(under_test.connection(), under_test.prefix()),
              testing::HasSubstr(under_test.prefix() + "/object"));
  writer.reset();
  EXPECT_EQ(OpenUploads(under_test.connection(), under_test.prefix()), "");
}

// The record below _shardprep/tmp/ is all that is needed to abort the upload of a process that was
// killed: another one that deletes it aborts exactly that upload.
TEST(S3Server, TheUploadOfAKilledProcessIsAbortedWithItsRecord) {
  // What a killed process does: nothing more. The writer and what it uses stay as they are.
  struct Killed {
    std::vector<uint8_t> buffer;
    std::shared_ptr<S3Connection> connection;
    std::unique_ptr<ObjectStore> store;
    std::unique_ptr<ObjectWriter> writer;
  };
  static std::vector<Killed*>& killed = *new std::vector<Killed*>;
  ServerStore under_test;
  killed.push_back(new Killed);
  killed.back()->connection = Connect();
  killed.back()->store = under_test.OpenAgain(killed.back()->connection);
  killed.back()->writer =
      HalfWritten(*killed.back()->store, "killed", 4 * kPartBytes, killed.back()->buffer);
  ASSERT_NE(killed.back()->writer, nullptr);

  std::vector<uint8_t> buffer;
  auto living = HalfWritten(under_test.store(), "living", 4 * kPartBytes, buffer);
  ASSERT_NE(living, nullptr);
  const auto records = under_test.store().List(kTemporaryPrefix);
  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_THAT(*records, SizeIs(2));
  for (const ObjectEntry& record : *records) {
    const auto text = under_test.store().Get(record.key, 1 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    if (!absl::StrContains(*text, "killed")) continue;
    EXPECT_THAT(under_test.store().Delete(record.key), IsOk());
  }
  const std::string left = OpenUploads(under_test.connection(), under_test.prefix());
  EXPECT_FALSE(absl::StrContains(left, under_test.prefix() + "/killed")) << left;
  EXPECT_TRUE(absl::StrContains(left, under_test.prefix() + "/living")) << left;
  living.reset();
  EXPECT_THAT(*under_test.store().List(""), IsEmpty());
}

TEST(S3Server, AMissingBucketIsNamed) {
  const auto connection = Connect();
  const auto store = OpenS3Store("s3://shardprep-no-such-bucket/prefix", connection);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_THAT((*store)->List(""),
              HasCodeAndText(absl::StatusCode::kNotFound, "shardprep-no-such-bucket"));
  EXPECT_FALSE((*store)->Put("key", "bytes", nullptr).ok());
}

TEST(S3Server, AWrongSecretIsRefusedAndNotShown) {
  const auto options = MakeS3Options({}, [](const std::string& name) {
    const auto value = Environment(name);
    return name == "AWS_SECRET_ACCESS_KEY" ? std::optional<std::string>(*value + "x") : value;
  });
  ASSERT_TRUE(options.ok()) << options.status();
  const auto connection = ConnectS3(*options);
  ASSERT_TRUE(connection.ok()) << connection.status();
  const auto store =
      OpenS3Store(absl::StrCat("s3://", MustHave("SHARDPREP_TEST_S3_BUCKET"), "/x"), *connection);
  ASSERT_TRUE(store.ok()) << store.status();
  const absl::Status status = (*store)->Get("key", 100).status();
  EXPECT_THAT(status, HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_FALSE(absl::StrContains(status.message(), MustHave("AWS_SECRET_ACCESS_KEY"))) << status;
}

}  // namespace
}  // namespace shardprep
