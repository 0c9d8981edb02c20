#include "workers/object_names.h"

#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardprep {
namespace {

const std::string kFingerprint("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");

TEST(ObjectNames, EveryNameIsMadeAndParsed) {
  const std::pair<ObjectName, std::string> kCases[] = {
      {RankPart{0, 0}, "model-rank-0-part-0.safetensors"},
      {RankPart{31, 204}, "model-rank-31-part-204.safetensors"},
      {RankPart{kMaxNameNumber, kMaxNameNumber}, "model-rank-999999999-part-999999999.safetensors"},
      {ReplicatedPart{7}, "model-replicated-part-7.safetensors"},
      {RankManifest{10}, "rank-10.json"},
      {ReplicatedManifest{}, "replicated.json"},
      {ExpertMap{3}, "expert-map-rank-3.json"},
      {ManifestName{}, "manifest.json"},
      {ManifestSignature{}, "manifest.json.sig"},
      {RankJournal{kFingerprint, 12, 5}, "_shardprep/" + kFingerprint + "/12-5.json"},
      {ReplicatedJournal{kFingerprint, 5}, "_shardprep/" + kFingerprint + "/replicated-5.json"},
      {CommitIntent{kFingerprint}, "_shardprep/" + kFingerprint + "/commit.json"},
      {TemporaryFile{"00ff-1"}, "_shardprep/tmp/00ff-1"},
      {Probe{"00ff-1"}, "_shardprep/probe-00ff-1"},
  };
  for (const auto& [name, key] : kCases) {
    EXPECT_EQ(ObjectKey(name), key);
    EXPECT_TRUE(ParseObjectName(key) == name) << key;
    EXPECT_TRUE(ValidateObjectKey(key).ok()) << key;
  }
  EXPECT_EQ(JournalPrefix(kFingerprint), "_shardprep/" + kFingerprint + "/");
  EXPECT_TRUE(ValidateObjectPrefix(JournalPrefix(kFingerprint)).ok());
}

TEST(ObjectNames, WhatWeWouldNotHaveMadeIsUnknown) {
  const std::string upper = "0123456789ABCDEF" + kFingerprint.substr(16);
  const std::string kUnknown[] = {
      "",
      "config.json",
      "model.safetensors",
      "model-00001-of-00064.safetensors",
      "model-rank-00-part-0.safetensors",
      "model-rank-0-part-01.safetensors",
      "model-rank--1-part-0.safetensors",
      "model-rank-+1-part-0.safetensors",
      "model-rank- 1-part-0.safetensors",
      "model-rank-0x1-part-0.safetensors",
      "model-rank-0-part-.safetensors",
      "model-rank--part-0.safetensors",
      "model-rank-0-part-0-part-0.safetensors",
      "model-rank-0-part-0.safetensors.tmp",
      "model-rank-0.safetensors",
      "model-rank-1000000000-part-0.safetensors",
      "model-rank-18446744073709551616-part-0.safetensors",
      "model-rank-replicated-part-0.safetensors",
      "sub/model-rank-0-part-0.safetensors",
      "Model-rank-0-part-0.safetensors",
      "rank-.json",
      "rank-01.json",
      "rank-1.json/",
      "expert-map-rank-x.json",
      "manifest.json ",
      "sub/manifest.json",
      "_shardprep/",
      "_shardprep/manifest.json",
      "_shardprep/tmp",
      "_shardprep/tmp/",
      "_shardprep/tmp/a/b",
      "_shardprep/tmp/UPPER",
      "_shardprep/tmp/" + std::string(129, 'a'),
      "_shardprep/probe-",
      "_shardprep/" + kFingerprint,
      "_shardprep/" + kFingerprint + "/",
      "_shardprep/" + kFingerprint + "/0-0.json.json",
      "_shardprep/" + kFingerprint + "/0.json",
      "_shardprep/" + kFingerprint + "/0-0-0.json",
      "_shardprep/" + kFingerprint + "/00-0.json",
      "_shardprep/" + kFingerprint.substr(1) + "/0-0.json",
      "_shardprep/" + upper + "/0-0.json",
      "/manifest.json",
  };
  for (const std::string& key : kUnknown) {
    EXPECT_TRUE(std::holds_alternative<std::monostate>(ParseObjectName(key))) << key;
  }
}

TEST(ObjectNamesDeathTest, ANumberOutOfBoundsIsABrokenInvariant) {
  EXPECT_DEATH(ObjectKey(RankPart{-1, 0}), "broken invariant");
  EXPECT_DEATH(ObjectKey(RankPart{0, kMaxNameNumber + 1}), "broken invariant");
  EXPECT_DEATH(ObjectKey(RankJournal{"abc", 0, 0}), "broken invariant");
  EXPECT_DEATH(ObjectKey(TemporaryFile{"a/b"}), "broken invariant");
  EXPECT_DEATH(ObjectKey(std::monostate()), "broken invariant");
}

TEST(ObjectNames, ACopiedFileKeepsItsNameUnlessItIsOneOfOurs) {
  for (const std::string name : {"config.json", "tokenizer.json", "tokenizer_config.json",
                                 "encoding/encoding_dsv4.py", "generation_config.json"}) {
    const auto key = CopiedFileKey(name);
    ASSERT_TRUE(key.ok()) << key.status();
    EXPECT_EQ(*key, name);
  }
  for (const std::string name : {"manifest.json", "rank-0.json", "replicated.json",
                                 "expert-map-rank-1.json", "model-rank-0-part-0.safetensors",
                                 "_shardprep", "_shardprep/x", "../config.json", "/etc/passwd"}) {
    EXPECT_EQ(CopiedFileKey(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(ObjectKeys, RefusesWhatCouldLeaveTheStore) {
  const std::string kBad[] = {
      "",
      "/",
      "/etc/passwd",
      "../../etc/passwd",
      "..",
      ".",
      "a/..",
      "a/../b",
      "a/./b",
      "./a",
      "a//b",
      "a/",
      "a\\b",
      std::string("a\0b", 3),
      std::string(1025, 'k'),
  };
  for (const std::string& key : kBad) {
    const auto status = ValidateObjectKey(key);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << key;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("object key"));
    EXPECT_LT(status.message().size(), 1000u);
  }
}

TEST(ObjectKeys, TakesSubFoldersAndOddNames) {
  for (const std::string& key :
       {std::string("a/b/c"), std::string("...x"), std::string("..a"), std::string("a b+c=1@x"),
        std::string("\xd0\xbc\xd0\xbe\xd0\xb4\xd0\xb5\xd0\xbb\xd1\x8c%2F"),
        std::string(1024, 'k')}) {
    EXPECT_TRUE(ValidateObjectKey(key).ok()) << key;
  }
}

TEST(ObjectKeys, APrefixIsEmptyOrEndsInASlash) {
  EXPECT_TRUE(ValidateObjectPrefix("").ok());
  EXPECT_TRUE(ValidateObjectPrefix("m/1/").ok());
  for (const std::string prefix : {"m/1", "/", "m//", "../", "/m/"}) {
    EXPECT_EQ(ValidateObjectPrefix(prefix).code(), absl::StatusCode::kInvalidArgument) << prefix;
  }
}

}  // namespace
}  // namespace shardprep
