#include "service/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "tests/service/test_certificates.h"
#include "tests/support/memory_store.h"
#include "tests/support/request_store.h"
#include "tests/support/temp_dir.h"
#include "workers/open_store.h"
#include "workers/policy_file.h"

namespace shardprep {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;

const StoreProbe kProbe = {.id = "test-1", .size_bytes = (int64_t{3} << 20) + 4711};

const Finding* FindingOf(const std::vector<Finding>& findings, const std::string& subject) {
  for (const Finding& finding : findings) {
    if (finding.subject == subject) return &finding;
  }
  return nullptr;
}

TEST(Doctor, SoundStoresHaveNothingToPutRightAndNothingStays) {
  const TempDir directory;
  auto files = OpenStore(directory / "root", {.create = true});
  ASSERT_TRUE(files.ok());
  const std::unique_ptr<ObjectStore> memory = MakeMemoryStore();
  for (ObjectStore* store : {files->get(), memory.get()}) {
    ASSERT_TRUE(store->Put("config.json", "{}", CommitGate()).ok());
    const std::vector<Finding> findings = ProbeStore(*store, kProbe);
    EXPECT_THAT(findings, Each(Field(&Finding::verdict, Not(Verdict::kFail)))) << store->uri();
    std::vector<std::string> subjects;
    subjects.reserve(findings.size());
    for (const Finding& finding : findings) subjects.push_back(finding.subject);
    EXPECT_THAT(subjects,
                ElementsAre("put", "conditional put", "read after write", "list after write",
                            "large object", "ranged reads", "delete", "free space"));
    const auto left = store->List("");
    ASSERT_EQ(left->size(), 1U);
    EXPECT_EQ(left->front().key, "config.json");
  }
}

// A store with one fault, and the one finding that must see it.
struct Fault {
  std::string name;
  std::string subject;
  std::string what;
  std::function<std::unique_ptr<ObjectStore>(ObjectStore*)> make;
};

class OverwritingStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<ObjectInfo> PutIfAbsent(const std::string& key, const std::string& bytes,
                                         const CommitGate& gate) override {
    return Put(key, bytes, gate);
  }
};

class StaleStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::string> Get(const std::string& key, int64_t max_bytes) override {
    if (first_.empty()) {
      SP_ASSIGN_OR_RETURN(first_, ForwardingStore::Get(key, max_bytes));
    }
    return first_;
  }

 private:
  std::string first_;
};

class ForgetfulList : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& /*prefix*/) override {
    return std::vector<ObjectEntry>();
  }
};

class LaggingList : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::vector<ObjectEntry>> List(const std::string& prefix) override {
    auto entries = ForwardingStore::List(prefix);
    for (ObjectEntry& entry : *entries) entry.info.etag += "-old";
    return entries;
  }
};

// Answers a range from another place of the object.
class ShiftedReads : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    SP_ASSIGN_OR_RETURN(std::unique_ptr<ObjectReader> reader, ForwardingStore::Open(key));
    return std::make_unique<Reader>(std::move(reader));
  }

 private:
  class Reader : public ObjectReader {
   public:
    explicit Reader(std::unique_ptr<ObjectReader> reader) : reader_(std::move(reader)) {}
    absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
      return reader_->ReadAt(offset == (int64_t{1} << 20) + 4711 ? offset + 8 : offset, out);
    }
    absl::Status CheckUnchanged() override { return reader_->CheckUnchanged(); }
    const ObjectInfo& info() const override { return reader_->info(); }

   private:
    const std::unique_ptr<ObjectReader> reader_;
  };
};

class KeepingStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::Status Delete(const std::string& /*key*/) override {
    return absl::PermissionDeniedError("no deletes");
  }
};

class SmallStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<std::unique_ptr<ObjectWriter>> Create(const std::string& /*key*/,
                                                       const WriteOptions& /*options*/) override {
    return absl::ResourceExhaustedError("no large objects");
  }
  absl::StatusOr<int64_t> FreeBytes() override { return 4096; }
};

template <typename Store>
std::unique_ptr<ObjectStore> Make(ObjectStore* store) {
  return std::make_unique<Store>(store);
}

class DoctorFault : public ::testing::TestWithParam<Fault> {};

TEST_P(DoctorFault, IsTheOneThingThatIsFound) {
  const std::unique_ptr<ObjectStore> sound = MakeMemoryStore();
  const std::unique_ptr<ObjectStore> store = GetParam().make(sound.get());
  const std::vector<Finding> findings = ProbeStore(*store, kProbe);
  for (const Finding& finding : findings) {
    const bool expected = finding.subject == GetParam().subject;
    EXPECT_TRUE(expected || finding.verdict != Verdict::kFail) << FindingLine(finding);
    EXPECT_EQ(finding.verdict == Verdict::kOk, finding.advice.empty()) << FindingLine(finding);
  }
  const Finding* const found = FindingOf(findings, GetParam().subject);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->verdict, Verdict::kFail);
  EXPECT_THAT(found->what, HasSubstr(GetParam().what));
}

INSTANTIATE_TEST_SUITE_P(
    All, DoctorFault,
    ::testing::Values(
        Fault{"PutsOverWhatIsThere", "conditional put", "was replaced", &Make<OverwritingStore>},
        Fault{"ReadsAnOldVersion", "read after write", "older version", &Make<StaleStore>},
        Fault{"ListsNothing", "list after write", "is not listed", &Make<ForgetfulList>},
        Fault{"ListsAnOldVersion", "list after write", "another version", &Make<LaggingList>},
        Fault{"ReadsElsewhere", "ranged reads", "byte 1053287 is", &Make<ShiftedReads>},
        Fault{"KeepsWhatIsDeleted", "delete", "no deletes", &Make<KeepingStore>},
        Fault{"TakesNoLargeObject", "large object", "no large objects", &Make<SmallStore>}),
    [](const auto& test) { return test.param.name; });

TEST(Doctor, WhatCannotBeRemovedIsNamed) {
  const std::unique_ptr<ObjectStore> sound = MakeMemoryStore();
  KeepingStore store(sound.get());
  const Finding* const left = FindingOf(ProbeStore(store, kProbe), "clean-up");
  ASSERT_NE(left, nullptr);
}

TEST(Doctor, AStoreThatTakesNothingIsNotTriedFurther) {
  const TempDir directory;
  const std::string file = directory / "file";
  std::ofstream(file) << "x";
  auto store = OpenStore(file + "/below", {.create = true});
  const std::vector<Finding> findings =
      store.ok() ? ProbeStore(**store, kProbe) : std::vector<Finding>();
  if (store.ok()) {
    ASSERT_EQ(findings.size(), 2U);
    EXPECT_EQ(findings[0].subject, "put");
    EXPECT_EQ(findings[0].verdict, Verdict::kFail);
    EXPECT_THAT(findings[1].what, HasSubstr("not tried"));
  } else {
    EXPECT_EQ(store.status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(Doctor, ClocksMayDifferALittle) {
  const absl::Time now = absl::FromUnixSeconds(1'800'000'000);
  const std::pair<absl::Duration, Verdict> cases[] = {{absl::ZeroDuration(), Verdict::kOk},
                                                      {absl::Seconds(59), Verdict::kOk},
                                                      {absl::Seconds(61), Verdict::kWarn},
                                                      {absl::Minutes(6), Verdict::kFail}};
  for (const auto& [skew, verdict] : cases) {
    EXPECT_EQ(CheckClock(now + skew, now).verdict, verdict) << skew;
    EXPECT_EQ(CheckClock(now - skew, now).verdict, verdict) << skew;
  }
  EXPECT_THAT(CheckClock(now + absl::Minutes(6), now).what, HasSubstr("6m ahead of"));
  EXPECT_THAT(CheckClock(now - absl::Minutes(6), now).what, HasSubstr("6m behind"));
}

TEST(Doctor, CertificatesAreCheckedForDatesKeyAndAuthority) {
  TestCertificates certificates;
  const absl::Time now = absl::Now();
  const TlsFiles good = certificates.Security().tls;
  // Test certificates live for a day, which is soon; the dates are the only thing to look at.
  for (const Finding& finding : CheckCertificates(good, now)) {
    EXPECT_NE(finding.verdict, Verdict::kFail) << FindingLine(finding);
  }
  EXPECT_EQ(FindingOf(CheckCertificates(good, now), "private key")->verdict, Verdict::kOk);
  EXPECT_EQ(FindingOf(CheckCertificates(good, now), "authority")->verdict, Verdict::kOk);
  const Finding* found = nullptr;
  const std::vector<Finding> soon = CheckCertificates(good, now);
  found = FindingOf(soon, "certificate localhost");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->verdict, Verdict::kWarn);
  const std::vector<Finding> late = CheckCertificates(good, now + absl::Hours(48));
  found = FindingOf(late, "certificate localhost");
  EXPECT_EQ(found->verdict, Verdict::kFail);
  EXPECT_THAT(found->what, HasSubstr("expired on"));
  const std::vector<Finding> early = CheckCertificates(good, now - absl::Hours(48));
  EXPECT_THAT(FindingOf(early, "certificate localhost")->what, HasSubstr("valid from"));

  certificates.Issue("other", {});
  TlsFiles mixed = good;
  mixed.key = certificates.path("other.key");
  const std::vector<Finding> wrong_key = CheckCertificates(mixed, now);
  EXPECT_EQ(FindingOf(wrong_key, "private key")->verdict, Verdict::kFail);
  const TestCertificates strangers;
  TlsFiles foreign = good;
  foreign.ca = strangers.path("ca.pem");
  const std::vector<Finding> wrong_ca = CheckCertificates(foreign, now);
  EXPECT_EQ(FindingOf(wrong_ca, "authority")->verdict, Verdict::kWarn);
  TlsFiles absent = good;
  absent.ca = certificates.path("absent");
  const std::vector<Finding> none = CheckCertificates(absent, now);
  EXPECT_EQ(FindingOf(none, "certificates")->verdict, Verdict::kFail);
}

TEST(Doctor, TargetsAreHeldAgainstThePolicy) {
  const AlignmentPolicy policy = DefaultAlignmentPolicy().policy;
  const Finding good = CheckTarget(policy, "AITER_MXFP4_BF16", "SILU", "gfx950", "aiter-separated");
  EXPECT_EQ(good.verdict, Verdict::kOk) << FindingLine(good);
  EXPECT_THAT(good.what, HasSubstr("aligns to 128"));
  EXPECT_EQ(CheckTarget(policy, "AUTO", "SILU", "gfx950", "aiter-separated").verdict, Verdict::kOk);
  EXPECT_EQ(CheckTarget(policy, "NONE", "SILU", "gfx950", "aiter-separated").verdict,
            Verdict::kFail);
  EXPECT_EQ(CheckTarget(policy, "AUTO", "SILU", "gfx950", "other").verdict, Verdict::kFail);
}

TEST(Doctor, DevicesAreThoseThatAreThere) {
  EXPECT_EQ(CheckDevice("cpu").verdict, Verdict::kOk);
  const Finding none = CheckDevice("hip:99");
  EXPECT_EQ(none.verdict, Verdict::kFail);
  EXPECT_THAT(none.advice, HasSubstr("--device cpu"));
}

TEST(Doctor, LinesHaveVerdictSubjectAndAdvice) {
  EXPECT_EQ(FindingLine({Verdict::kOk, "put", "done", ""}), "ok    put                 done");
  EXPECT_EQ(FindingLine({Verdict::kFail, "put", "denied", "ask"}),
            "fail  put                 denied; to do: ask");
}

}  // namespace
}  // namespace shardprep
