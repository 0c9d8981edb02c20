// A JobBackend without files: what plans come to, what lies at destinations, and what fails is set
// by the test.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "service/job_backend.h"

namespace shardprep {

// Thread safe.
class FakeBackend : public JobBackend {
 public:
  struct Failures {
    absl::Status plan, forget, inspect, room, clear, commit, remove;
  };
  struct Calls {
    int plans = 0, room_checks = 0, clears = 0, commits = 0, removals = 0, tidies = 0, forgets = 0;
  };

  // Regions of each plan, and ranks of each region.
  int regions = 2;
  int ranks = 2;
  // Called by each start while it reads recorded parts.
  std::function<void()> while_forgetting;

  void Fail(const Failures& failures) {
    absl::MutexLock lock(&mu_);
    failures_ = failures;
  }
  Calls calls() {
    absl::MutexLock lock(&mu_);
    return calls_;
  }
  // Plans wait until Release(); for tests of what happens meanwhile.
  void Hold() {
    absl::MutexLock lock(&mu_);
    held_ = true;
  }
  void Release() {
    absl::MutexLock lock(&mu_);
    held_ = false;
  }
  void AwaitWaitingPlans(int count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return waiting_ >= count; };
    mu_.Await(absl::Condition(&enough));
  }
  void PutArtefact(const std::string& destination, const std::string& fingerprint) {
    absl::MutexLock lock(&mu_);
    artefacts_[destination] = fingerprint;
  }
  bool HasArtefact(const std::string& destination) {
    absl::MutexLock lock(&mu_);
    return artefacts_.count(destination) != 0;
  }
  static std::string FingerprintOf(const v1::PrepJobSpec& spec) {
    return absl::StrCat("print-of-", spec.source_uri());
  }

  absl::StatusOr<v1::PrepJobSpec> Normalize(const v1::PrepJobSpec& spec) override {
    if (spec.source_uri().empty()) return absl::InvalidArgumentError("source_uri is not set");
    if (spec.targets_size() != 1) return absl::InvalidArgumentError("targets: want exactly one");
    v1::PrepJobSpec normal = spec;
    if (normal.part_size_bytes() == 0) normal.set_part_size_bytes(int64_t{2} << 30);
    return normal;
  }

  absl::StatusOr<std::unique_ptr<PlannedJob>> Plan(const v1::PrepJobSpec& spec,
                                                   int64_t memory_budget_bytes) override;

 private:
  friend class FakePlannedJob;

  absl::Mutex mu_;
  Failures failures_ ABSL_GUARDED_BY(mu_);
  Calls calls_ ABSL_GUARDED_BY(mu_);
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, std::string> artefacts_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> claimed_ ABSL_GUARDED_BY(mu_);
};

class FakePlannedJob : public PlannedJob {
 public:
  FakePlannedJob(FakeBackend* backend, PlanFacts facts)
      : backend_(backend), facts_(std::move(facts)) {}
  ~FakePlannedJob() override { FakePlannedJob::ReleaseDestination(); }

  const PlanFacts& facts() const override { return facts_; }

  absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const override {
    if (memory_budget_bytes < 10) return absl::InvalidArgumentError("the minimum is 10 bytes");
    return static_cast<int32_t>(memory_budget_bytes / 10);
  }

  absl::Status ClaimDestination() override {
    absl::MutexLock lock(&backend_->mu_);
    if (claimed_ || backend_->claimed_.insert(facts_.destination).second) {
      claimed_ = true;
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError("another job has the destination");
  }

  void ReleaseDestination() override {
    absl::MutexLock lock(&backend_->mu_);
    if (claimed_) backend_->claimed_.erase(facts_.destination);
    claimed_ = false;
  }

  absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
      const std::function<absl::Status()>& go_on) override {
    {
      absl::MutexLock lock(&backend_->mu_);
      ++backend_->calls_.forgets;
      if (!backend_->failures_.forget.ok()) return backend_->failures_.forget;
    }
    if (backend_->while_forgetting) backend_->while_forgetting();
    absl::Status wanted = go_on();
    if (!wanted.ok()) return wanted;
    return std::vector<std::string>();
  }

  absl::StatusOr<InspectedDestination> Inspect() override {
    absl::MutexLock lock(&backend_->mu_);
    if (!backend_->failures_.inspect.ok()) return backend_->failures_.inspect;
    InspectedDestination found;
    found.regions = facts_.regions;
    const auto artefact = backend_->artefacts_.find(facts_.destination);
    if (artefact == backend_->artefacts_.end()) return found;
    if (artefact->second != facts_.fingerprint) {
      return absl::FailedPreconditionError("another artefact is there");
    }
    found.complete = Manifest();
    return found;
  }

  absl::Status CheckRoom(const InspectedDestination& /*found*/) override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.room_checks;
    return backend_->failures_.room;
  }

  absl::Status ClearLeftovers() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.clears;
    return backend_->failures_.clear;
  }

  absl::StatusOr<v1::ManifestReference> Commit() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.commits;
    if (!backend_->failures_.commit.ok()) return backend_->failures_.commit;
    backend_->artefacts_[facts_.destination] = facts_.fingerprint;
    return Manifest();
  }

  absl::Status RemoveJournal() override { return absl::OkStatus(); }

  absl::Status RemoveOutput() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.removals;
    return backend_->failures_.remove;
  }

  absl::Status RemoveUnrecorded() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.tidies;
    return backend_->failures_.remove;
  }

 private:
  v1::ManifestReference Manifest() const {
    v1::ManifestReference manifest;
    manifest.set_uri(facts_.destination + "/manifest.json");
    manifest.set_layout_fingerprint(facts_.fingerprint);
    return manifest;
  }

  FakeBackend* const backend_;
  const PlanFacts facts_;
  bool claimed_ = false;  // guarded by the backend's mutex
};

inline absl::StatusOr<std::unique_ptr<PlannedJob>> FakeBackend::Plan(
    const v1::PrepJobSpec& spec, int64_t /*memory_budget_bytes*/) {
  PlanFacts facts;
  {
    absl::MutexLock lock(&mu_);
    ++calls_.plans;
    ++waiting_;
    const auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !held_; };
    mu_.Await(absl::Condition(&free));
    --waiting_;
    if (!failures_.plan.ok()) return failures_.plan;
  }
  facts.fingerprint = FingerprintOf(spec);
  facts.source_token = "token";
  facts.destination = spec.targets(0).destination_uri();
  facts.summary.set_layout_fingerprint(facts.fingerprint);
  facts.summary.set_rank_count(ranks);
  for (int r = 0; r < regions; ++r) {
    RegionTasks tasks;
    for (int rank = 0; rank < ranks; ++rank) tasks.ranks.push_back(rank);
    tasks.bytes_per_rank = 100;
    facts.regions.push_back(std::move(tasks));
  }
  return {std::make_unique<FakePlannedJob>(this, std::move(facts))};
}

}  // namespace shardprep
