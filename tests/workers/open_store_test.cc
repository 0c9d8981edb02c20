#include "workers/open_store.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

TEST(NormalizeUri, EqualPlacesAreEqualText) {
  const std::pair<std::string, std::string> kCases[] = {
      {"/data/model", "/data/model"},
      {"/data/model/", "/data/model"},
      {"//data///model//", "/data/model"},
      {"/data/./model/.", "/data/model"},
      {"/", "/"},
      {"///", "/"},
      {"file:///data/model/", "/data/model"},
      {"file://localhost/data/model", "/data/model"},
      {"file:/data/model", "/data/model"},
      {"FILE:///data/model", "/data/model"},
      {"file:///data/a%20b%2Fc%2fd", "/data/a b/c/d"},
      {"file:///data/%D0%BC+%25", "/data/\xd0\xbc+%"},
      {"/data/a%20b", "/data/a%20b"},
      {"/data/with:colon", "/data/with:colon"},
      {"/data/...", "/data/..."},
      {"s3://bucket", "s3://bucket"},
      {"s3://bucket/", "s3://bucket"},
      {"S3://bucket/a b/c%2F=1/", "s3://bucket/a b/c%2F=1"},
  };
  for (const auto& [uri, want] : kCases) {
    const auto normal = NormalizeUri(uri);
    ASSERT_TRUE(normal.ok()) << normal.status();
    EXPECT_EQ(*normal, want) << uri;
    EXPECT_EQ(NormalizeUri(*normal).value_or("?"), want) << "not a fixed point";
  }
}

TEST(NormalizeUri, RefusesWhatIsMalformed) {
  const std::string kBad[] = {
      "",
      "relative",
      "./relative",
      "../relative",
      "/data/../etc",
      "/data/..",
      "/..",
      "file:///data/%2e%2e/etc",
      "file://host/data",
      "file://",
      "file:relative",
      "file:///data/%",
      "file:///data/%4",
      "file:///data/%zz",
      "file:///data/%00",
      "file:///data?x=1",
      "file:///data#x",
      std::string("/data\0x", 7),
      "http://host/data",
      "gs://bucket/x",
      "s3:/bucket",
      "s3://",
      "s3:///x",
      "s3://Bucket/x",
      "s3://b_t/x",
      "s3://ab",
      "s3://bucket/a//b",
      "s3://bucket//",
      "s3://bucket/../x",
      "/" + std::string(4096, 'x'),
  };
  for (const std::string& uri : kBad) {
    const auto status = NormalizeUri(uri).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << uri;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("URI \""));
  }
}

TEST(NormalizeUri, RelativePathsNeedABase) {
  const std::pair<std::string, std::string> kCases[] = {
      {"model", "/home/user/model"},
      {"./model/", "/home/user/model"},
      {".", "/home/user"},
      {"../model", "/home/model"},
      {"../../model", "/model"},
      {"model:v2", "/home/user/model:v2"},
      {"a:b/c", "/home/user/a:b/c"},
      {"/absolute", "/absolute"},
      {"s3://bucket/x", "s3://bucket/x"},
  };
  for (const auto& [uri, want] : kCases) {
    EXPECT_EQ(NormalizeUri(uri, "/home/user").value_or("?"), want) << uri;
  }
  // What lacks a slash of a scheme is no directory of that name.
  for (const std::string uri : {"model/../other", "../../../x", "./../a/..", "s3:/bucket/x"}) {
    EXPECT_EQ(NormalizeUri(uri, "/home/user").status().code(), absl::StatusCode::kInvalidArgument)
        << uri;
  }
}

TEST(IsSameOrInside, ComparesWholeSegments) {
  EXPECT_TRUE(IsSameOrInside("/data/m1", "/data/m1"));
  EXPECT_TRUE(IsSameOrInside("/data/m1/out", "/data/m1"));
  EXPECT_TRUE(IsSameOrInside("/data", "/"));
  EXPECT_TRUE(IsSameOrInside("s3://bucket/a/b", "s3://bucket/a"));
  EXPECT_TRUE(IsSameOrInside("s3://bucket/a", "s3://bucket"));
  EXPECT_FALSE(IsSameOrInside("/data/m10", "/data/m1"));
  EXPECT_FALSE(IsSameOrInside("/data", "/data/m1"));
  EXPECT_FALSE(IsSameOrInside("s3://bucket-2/a", "s3://bucket"));
  EXPECT_FALSE(IsSameOrInside("s3://bucket/a", "/"));
}

TEST(OpenStore, OpensDirectoriesByPathAndByFileUri) {
  std::string name = testing::TempDir() + "/open store_XXXXXX";
  const std::string root = std::filesystem::canonical(::mkdtemp(name.data())).string();
  std::string encoded = root;
  encoded.replace(encoded.find(' '), 1, "%20");
  for (const std::string& uri : {root, root + "/", "file://" + encoded}) {
    const auto store = OpenStore(uri, {});
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ((*store)->uri(), root);
  }
  EXPECT_EQ(OpenStore(root + "/missing", {}).status().code(), absl::StatusCode::kNotFound);
  OpenStoreOptions create;
  create.create = true;
  EXPECT_TRUE(OpenStore(root + "/missing", create).ok());
  EXPECT_FALSE(std::filesystem::exists(root + "/missing"));
  std::filesystem::remove_all(root);
}

TEST(OpenStore, SaysWhatItCannotOpen) {
  EXPECT_EQ(OpenStore("relative", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenStore("http://host/x", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenStore("s3://bucket/x", {}).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardprep
