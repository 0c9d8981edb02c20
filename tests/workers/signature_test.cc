#include "workers/signature.h"

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/request_store.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_artifact.h"
#include "tests/support/test_keys.h"
#include "workers/artifact.h"
#include "workers/fetch.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSignature[] = "manifest.json.sig";
constexpr char kManifest[] = "manifest.json";

std::shared_ptr<const SigningKey> KeyOf(const TestKeyPair& pair) {
  auto key = SigningKey::Read(pair.private_path());
  SP_CHECK(key.ok());
  return *key;
}

TrustedKeys Trusting(const std::vector<const TestKeyPair*>& pairs) {
  std::vector<std::string> paths;
  paths.reserve(pairs.size());
  for (const TestKeyPair* pair : pairs) paths.push_back(pair->public_path());
  auto keys = TrustedKeys::Read(paths);
  SP_CHECK(keys.ok());
  return *keys;
}

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

// -- Keys --

TEST(SigningKey, WhatItSignsItsPublicKeyChecks) {
  const TestKeyPair pair;
  for (const std::string& text : {std::string(), std::string("{}\n"), std::string(1 << 20, 'm')}) {
    const auto signature = KeyOf(pair)->Sign(text);
    ASSERT_TRUE(signature.ok());
    EXPECT_EQ(Trusting({&pair}).Check(*signature, text), absl::OkStatus());
    EXPECT_EQ(KeyOf(pair)->Sign(text).value(), *signature) << "equal input, equal bytes";
    EXPECT_EQ(SignatureKeyId(*signature).value(), KeyOf(pair)->key_id());
    ExpectStatus(Trusting({&pair}).Check(*signature, text + " "), absl::StatusCode::kDataLoss,
                 KeyOf(pair)->key_id());
  }
}

// What the operations guide tells people to type gives the same id and accepts the signature.
TEST(SigningKey, FormatIsThatOfTheOpensslTool) {
  ASSERT_EQ(std::system("command -v openssl >/dev/null"), 0)
      << "want the openssl tool: deploy/install_packages.sh check";
  const TestKeyPair pair;
  const TempDir directory;
  WriteFileBytes(directory / kManifest, "{\"row\": 7}\n");
  WriteFileBytes(directory / kSignature, KeyOf(pair)->Sign("{\"row\": 7}\n").value());
  WriteFileBytes(directory / "id", KeyOf(pair)->key_id());
  const std::string script = absl::StrCat(
      "cd ", directory / "", " && test \"$(openssl pkey -pubin -in ", pair.public_path(),
      " -outform DER | sha256sum | cut -d' ' -f1)\" = \"$(cat id)\" && sed -n 2p ", kSignature,
      " | cut -d' ' -f3 | base64 -d > raw && openssl pkeyutl -verify -pubin -inkey ",
      pair.public_path(), " -rawin -in ", kManifest, " -sigfile raw >/dev/null");
  EXPECT_EQ(std::system(script.c_str()), 0) << script;
}

TEST(SigningKey, BadKeyFilesAreRefusedByName) {
  const TempDir directory;
  const TestKeyPair ed25519;
  const TestKeyPair ec(TestKeyPair::Kind::kEcP256);
  const TestKeyPair locked(TestKeyPair::Kind::kEd25519WithPassphrase);
  WriteFileBytes(directory / "text", "no key");
  WriteFileBytes(directory / "empty", "");
  WriteFileBytes(directory / "large", std::string(1 << 20, '-'));
  const std::string whole = ReadFileBytes(ed25519.private_path());
  WriteFileBytes(directory / "cut", whole.substr(0, whole.size() / 2));
  const struct {
    std::string path;
    absl::StatusCode code;
  } bad[] = {{directory / "absent", absl::StatusCode::kFailedPrecondition},
             {directory / "text", absl::StatusCode::kInvalidArgument},
             {directory / "empty", absl::StatusCode::kInvalidArgument},
             {directory / "large", absl::StatusCode::kInvalidArgument},
             {directory / "cut", absl::StatusCode::kInvalidArgument}};
  for (const auto& [path, code] : bad) {
    ExpectStatus(SigningKey::Read(path).status(), code, path);
    ExpectStatus(TrustedKeys::Read({path}).status(), code, path);
  }
  ExpectStatus(SigningKey::Read(ec.private_path()).status(), absl::StatusCode::kInvalidArgument,
               "a key for EC");
  ExpectStatus(TrustedKeys::Read({ec.public_path()}).status(), absl::StatusCode::kInvalidArgument,
               "a key for EC");
  ExpectStatus(SigningKey::Read(locked.private_path()).status(), absl::StatusCode::kInvalidArgument,
               "without passphrase");
  // Each in the place of the other.
  ExpectStatus(SigningKey::Read(ed25519.public_path()).status(), absl::StatusCode::kInvalidArgument,
               "private key");
  ExpectStatus(TrustedKeys::Read({ed25519.private_path()}).status(),
               absl::StatusCode::kInvalidArgument, "public key");
}

TEST(TrustedKeys, AnyOneOfThemSuffices) {
  const TestKeyPair old_pair;
  const TestKeyPair new_pair;
  const TestKeyPair other;
  for (const TestKeyPair* signer : {&old_pair, &new_pair}) {
    const std::string signature = KeyOf(*signer)->Sign("manifest").value();
    EXPECT_EQ(Trusting({&old_pair, &new_pair}).Check(signature, "manifest"), absl::OkStatus());
    ExpectStatus(Trusting({&other}).Check(signature, "manifest"),
                 absl::StatusCode::kPermissionDenied, KeyOf(*signer)->key_id());
  }
}

TEST(TrustedKeys, MalformedSignaturesAreRefused) {
  const TestKeyPair pair;
  const TrustedKeys trusted = Trusting({&pair});
  const std::string whole = KeyOf(pair)->Sign("manifest").value();
  for (size_t size = 0; size < whole.size(); ++size) {
    ExpectStatus(trusted.Check(whole.substr(0, size), "manifest"), absl::StatusCode::kDataLoss,
                 kSignature);
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(trusted.Check(changed, "manifest").ok()) << at;
  }
  ExpectStatus(trusted.Check(whole + "\n", "manifest"), absl::StatusCode::kDataLoss, kSignature);
  ExpectStatus(trusted.Check(absl::StrCat("shardprep-signature 2", whole.substr(21)), "manifest"),
               absl::StatusCode::kDataLoss, "shardprep-signature 1");
}

// -- Artefacts --

class SignedArtifact : public ::testing::Test {
 protected:
  void Make() {
    ASSERT_TRUE(artifact_.Prepare().ok());
    const auto committed = Commit(KeyOf(pair_).get());
    ASSERT_TRUE(committed.ok()) << committed.status();
    ASSERT_TRUE(RemoveJournal(artifact_.destination()).ok());
  }
  absl::StatusOr<v1::ManifestReference> Commit(const SigningKey* signer) {
    return CommitArtifact(artifact_.plan(), artifact_.source(), artifact_.destination(), signer);
  }
  absl::Status Verify(const TrustedKeys& trusted) {
    VerifyOptions options;
    options.trusted = trusted;
    return VerifyArtifact(artifact_.destination(), options).status();
  }
  absl::Status Fetch(const TrustedKeys& trusted) {
    FetchOptions options;
    options.ranks = {1};
    options.into = directory_ / absl::StrCat("rank-", ++fetches_);
    options.no_expect = true;
    options.trusted = trusted;
    const absl::Status status = FetchRanks(artifact_.destination(), options).status();
    EXPECT_EQ(std::filesystem::exists(options.into), status.ok());
    return status;
  }
  void ExpectRefused(const TrustedKeys& trusted, absl::StatusCode code, const std::string& text) {
    ExpectStatus(Fetch(trusted), code, text);
    ExpectStatus(Verify(trusted), code, text);
  }
  bool Has(const std::string& key) { return std::filesystem::exists(artifact_.Path(key)); }

  const TestKeyPair pair_;
  TestArtifact artifact_;
  TempDir directory_;
  int fetches_ = 0;
};

TEST_F(SignedArtifact, IsTakenByThoseWhoTrustTheKeyAndByThoseWhoDoNotAsk) {
  Make();
  EXPECT_EQ(Fetch(Trusting({&pair_})), absl::OkStatus());
  EXPECT_EQ(Verify(Trusting({&pair_})), absl::OkStatus());
  EXPECT_EQ(Fetch({}), absl::OkStatus());
  EXPECT_EQ(Verify({}), absl::OkStatus());
}

TEST_F(SignedArtifact, TamperedManifestIsRefused) {
  Make();
  // Everything made to agree again, as somebody would who can write there but has no key.
  artifact_.Reseal(0, [](v1::RankManifest& rank) {
    rank.mutable_files(0)->mutable_tensors(0)->set_name("model.layers.0.other");
  });
  ExpectRefused(Trusting({&pair_}), absl::StatusCode::kDataLoss, "one of the two was changed");
}

TEST_F(SignedArtifact, WrongMissingAndTruncatedSignaturesAreRefused) {
  Make();
  const TestKeyPair stranger;
  ExpectRefused(Trusting({&stranger}), absl::StatusCode::kPermissionDenied, KeyOf(pair_)->key_id());
  const std::string signature = ReadFileBytes(artifact_.Path(kSignature));
  WriteFileBytes(artifact_.Path(kSignature), signature.substr(0, signature.size() - 1));
  ExpectRefused(Trusting({&pair_}), absl::StatusCode::kDataLoss, "cut off");
  WriteFileBytes(artifact_.Path(kSignature), std::string(5000, 's'));
  ExpectRefused(Trusting({&pair_}), absl::StatusCode::kDataLoss, "more than 4096 bytes");
  std::filesystem::remove(artifact_.Path(kSignature));
  ExpectRefused(Trusting({&pair_}), absl::StatusCode::kFailedPrecondition, "is not signed");
}

// Looks, when the manifest is about to appear, whether its signature is there.
class OrderStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    if (key == kManifest) signed_first = Head(kSignature).ok();
    return ForwardingStore::PutIfAbsent(key, bytes, gate);
  }
  bool signed_first = false;
};

TEST_F(SignedArtifact, SignatureIsThereBeforeTheManifestIs) {
  ASSERT_TRUE(artifact_.Prepare().ok());
  OrderStore store(&artifact_.destination());
  const auto committed =
      CommitArtifact(artifact_.plan(), artifact_.source(), store, KeyOf(pair_).get());
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_TRUE(store.signed_first);
}

// A commit that ended between signature and manifest, and who comes after it.
class LeftSignature : public SignedArtifact {
 protected:
  void SetUp() override {
    ASSERT_TRUE(artifact_.Prepare().ok());
    ASSERT_TRUE(Commit(KeyOf(pair_).get()).ok());
    std::filesystem::remove(artifact_.Path(kManifest));
    ASSERT_TRUE(Has(kSignature));
  }
};

TEST_F(LeftSignature, IsOfOursAndTheCommitIsFinished) {
  const auto state =
      InspectDestination(artifact_.plan(), artifact_.source(), artifact_.destination());
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->kind, DestinationState::Kind::kResumable);
  ASSERT_TRUE(ClearLeftovers(artifact_.plan(), artifact_.destination()).ok());
  ASSERT_TRUE(Commit(KeyOf(pair_).get()).ok());
  EXPECT_EQ(Verify(Trusting({&pair_})), absl::OkStatus());
}

TEST_F(LeftSignature, GivesWayToAnotherKeysAndToNone) {
  const TestKeyPair next;
  ASSERT_TRUE(Commit(KeyOf(next).get()).ok());
  EXPECT_EQ(Verify(Trusting({&next})), absl::OkStatus());
  std::filesystem::remove(artifact_.Path(kManifest));
  ASSERT_TRUE(Commit(nullptr).ok());
  EXPECT_FALSE(Has(kSignature));
}

TEST_F(LeftSignature, GoesWithACancelledJob) {
  ASSERT_TRUE(RemoveJobOutput(artifact_.plan(), artifact_.destination()).ok());
  EXPECT_FALSE(Has(kSignature));
}

TEST_F(SignedArtifact, ForeignSignatureFileIsANameClash) {
  std::filesystem::create_directories(artifact_.destination_path());
  WriteFileBytes(artifact_.Path(kSignature), "somebody's");
  ExpectStatus(
      InspectDestination(artifact_.plan(), artifact_.source(), artifact_.destination()).status(),
      absl::StatusCode::kFailedPrecondition, "no record of ours accounts for it");
}

TEST_F(SignedArtifact, GoesWithItsManifestWhenTheArtefactIsDamaged) {
  Make();
  std::filesystem::remove(artifact_.Path("model-rank-0-part-0.safetensors"));
  ASSERT_TRUE(ClearLeftovers(artifact_.plan(), artifact_.destination()).ok());
  EXPECT_THAT(artifact_.Keys(), Not(Contains(kManifest)));
  EXPECT_THAT(artifact_.Keys(), Not(Contains(kSignature)));
}

// What lies there may be anybody's work, so a job does not sign it unseen.
TEST_F(SignedArtifact, CompleteArtefactOfAnotherKeyIsNotTakenOver) {
  Make();
  const auto inspect = [this](const SigningKey* signer) {
    return InspectDestination(artifact_.plan(), artifact_.source(), artifact_.destination(),
                              signer);
  };
  EXPECT_EQ(inspect(KeyOf(pair_).get())->kind, DestinationState::Kind::kComplete);
  EXPECT_EQ(inspect(nullptr)->kind, DestinationState::Kind::kComplete);
  const TestKeyPair next;
  ExpectStatus(inspect(KeyOf(next).get()).status(), absl::StatusCode::kFailedPrecondition,
               absl::StrCat("it is by key ", KeyOf(pair_)->key_id()));
  ExpectStatus(Commit(KeyOf(next).get()).status(), absl::StatusCode::kFailedPrecondition,
               "shardprep sign");
  std::filesystem::remove(artifact_.Path(kSignature));
  ExpectStatus(inspect(KeyOf(pair_).get()).status(), absl::StatusCode::kFailedPrecondition,
               "there is none");
}

TEST_F(SignedArtifact, IsSignedAnewWhenItsManifestIsTheOneThatWasVerified) {
  Make();
  const TestKeyPair next;
  const auto report = VerifyArtifact(artifact_.destination(), {});
  ASSERT_TRUE(report.ok());
  ASSERT_EQ(SignArtifact(artifact_.destination(), report->manifest_sha256, *KeyOf(next)),
            absl::OkStatus());
  EXPECT_EQ(Verify(Trusting({&next})), absl::OkStatus());
  ExpectStatus(SignArtifact(artifact_.destination(), std::string(64, '0'), *KeyOf(pair_)),
               absl::StatusCode::kFailedPrecondition, "that was verified");
  EXPECT_EQ(Verify(Trusting({&next})), absl::OkStatus());
}

}  // namespace
}  // namespace shardprep
