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
    int published = 0;  // targets that `commit` comes after
  };
  struct Calls {
    int plans = 0, room_checks = 0, clears = 0, commits = 0, removals = 0, tidies = 0, forgets = 0;
  };

  // Regions of each plan, and ranks of each target in each region.
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
  // Of one target.
  static std::string FingerprintOf(const v1::PrepJobSpec& spec, int target = 0) {
    const v1::ParallelLayout& layout = spec.targets(target).parallel_layout();
    return absl::StrCat("print-of-", spec.source_uri(),
                        layout.has_tensor_parallel_size()
                            ? absl::StrCat("-tp", layout.tensor_parallel_size())
                            : "");
  }

  absl::StatusOr<v1::PrepJobSpec> Normalize(const v1::PrepJobSpec& spec) override {
    if (spec.source_uri().empty()) return absl::InvalidArgumentError("source_uri is not set");
    if (spec.targets_size() == 0) return absl::InvalidArgumentError("targets: want one");
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
      : backend_(backend), facts_(std::move(facts)), ranks_(backend->ranks) {}
  ~FakePlannedJob() override { FakePlannedJob::ReleaseDestination(); }

  const PlanFacts& facts() const override { return facts_; }

  absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const override {
    if (memory_budget_bytes < 10) return absl::InvalidArgumentError("the minimum is 10 bytes");
    return static_cast<int32_t>(memory_budget_bytes / 10);
  }

  absl::Status ClaimDestination() override {
    absl::MutexLock lock(&backend_->mu_);
    if (claimed_) return absl::OkStatus();
    for (const JobPlace& place : facts_.places) {
      if (backend_->claimed_.count(place.destination) == 0) continue;
      return absl::FailedPreconditionError("another job has the destination");
    }
    for (const JobPlace& place : facts_.places) backend_->claimed_.insert(place.destination);
    claimed_ = true;
    return absl::OkStatus();
  }

  void ReleaseDestination() override {
    absl::MutexLock lock(&backend_->mu_);
    if (!claimed_) return;
    for (const JobPlace& place : facts_.places) backend_->claimed_.erase(place.destination);
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

  absl::StatusOr<InspectedDestinations> Inspect() override {
    absl::MutexLock lock(&backend_->mu_);
    if (!backend_->failures_.inspect.ok()) return backend_->failures_.inspect;
    InspectedDestinations found;
    found.regions = facts_.regions;
    std::vector<v1::ManifestReference> manifests;
    for (int t = 0; t < static_cast<int>(facts_.places.size()); ++t) {
      const JobPlace& place = facts_.places[static_cast<size_t>(t)];
      const auto artefact = backend_->artefacts_.find(place.destination);
      if (artefact == backend_->artefacts_.end()) continue;
      if (artefact->second != place.fingerprint) {
        return absl::FailedPreconditionError("another artefact is there");
      }
      manifests.push_back(ManifestOf(place));
      for (RegionTasks& region : found.regions) {
        for (int r = 0; r < ranks_; ++r) region.done.push_back(t * ranks_ + r);
      }
    }
    if (manifests.size() == facts_.places.size()) found.complete = manifests;
    return found;
  }

  absl::Status CheckRoom(const InspectedDestinations& /*found*/) override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.room_checks;
    return backend_->failures_.room;
  }

  absl::Status ClearLeftovers() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.clears;
    return backend_->failures_.clear;
  }

  absl::StatusOr<std::vector<v1::ManifestReference>> Commit() override {
    absl::MutexLock lock(&backend_->mu_);
    ++backend_->calls_.commits;
    const FakeBackend::Failures failures = backend_->failures_;
    std::vector<v1::ManifestReference> manifests;
    for (const JobPlace& place : facts_.places) {
      if (!failures.commit.ok() && static_cast<int>(manifests.size()) == failures.published) {
        return failures.commit;
      }
      backend_->artefacts_[place.destination] = place.fingerprint;
      manifests.push_back(ManifestOf(place));
    }
    return manifests;
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
  static v1::ManifestReference ManifestOf(const JobPlace& place) {
    v1::ManifestReference manifest;
    manifest.set_uri(place.destination + "/manifest.json");
    manifest.set_layout_fingerprint(place.fingerprint);
    return manifest;
  }

  FakeBackend* const backend_;
  const PlanFacts facts_;
  const int ranks_;
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
  facts.source_token = "token";
  for (int t = 0; t < spec.targets_size(); ++t) {
    v1::PlanSummary& summary = t == 0 ? facts.summary : *facts.summary.add_other_targets();
    summary.set_layout_fingerprint(FingerprintOf(spec, t));
    summary.set_rank_count(ranks);
    facts.places.push_back({spec.targets(t).destination_uri(), FingerprintOf(spec, t)});
    absl::StrAppend(&facts.fingerprint, t == 0 ? "" : " and ", FingerprintOf(spec, t));
  }
  for (int r = 0; r < regions; ++r) {
    RegionTasks tasks;
    for (int rank = 0; rank < spec.targets_size() * ranks; ++rank) tasks.ranks.push_back(rank);
    tasks.bytes_per_rank = 100;
    facts.regions.push_back(std::move(tasks));
  }
  return {std::make_unique<FakePlannedJob>(this, std::move(facts))};
}

}  // namespace shardprep
