#include "service/prep_backend.h"

#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"
#include "kernels/status_text.h"
#include "workers/artifact.h"
#include "workers/byte_size.h"
#include "workers/grpc_status.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/open_store.h"
#include "workers/target_set.h"

namespace shardprep {
namespace {

// The URI of a directory with every symbolic link resolved as far as it exists; others unchanged.
// Allow-lists are about places, and a link inside an allowed folder may lead out of it.
absl::StatusOr<std::string> Resolved(const std::string& uri) {
  if (absl::StrContains(uri, "://")) return uri;
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(uri, error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat(uri, ": ", error.message()));
  }
  return NormalizeUri(path.string());
}

absl::StatusOr<std::vector<std::string>> ResolvedList(const std::vector<std::string>& uris) {
  std::vector<std::string> resolved;
  for (const std::string& uri : uris) {
    SP_ASSIGN_OR_RETURN(const std::string normalized, NormalizeUri(uri));
    SP_ASSIGN_OR_RETURN(std::string place, Resolved(normalized));
    resolved.push_back(std::move(place));
  }
  return resolved;
}

absl::Status CheckAllowed(const char* what, const std::string& uri, const std::string& place,
                          const std::vector<std::string>& allowed) {
  if (allowed.empty()) return absl::OkStatus();
  for (const std::string& outer : allowed) {
    if (IsSameOrInside(place, outer)) return absl::OkStatus();
  }
  const std::string resolved = place == uri ? "" : absl::StrCat(" (", place, ")");
  return WithReason(absl::PermissionDeniedError(absl::StrCat(
                        what, " ", uri, resolved, " is outside of what this controller allows: ",
                        absl::StrJoin(allowed, ", "))),
                    "URI_NOT_ALLOWED", {{"uri", uri}});
}

// The device that a directory lies on, or will when it is made; nothing for other places.
std::optional<dev_t> DeviceOf(const std::string& uri) {
  if (absl::StrContains(uri, "://")) return std::nullopt;
  std::filesystem::path path = uri;
  struct stat found;
  while (::stat(path.c_str(), &found) != 0) {
    if (errno != ENOENT || path == path.parent_path()) return std::nullopt;
    path = path.parent_path();
  }
  return found.st_dev;
}

class RealPlannedJob : public PlannedJob {
 public:
  // `destinations` by target.
  RealPlannedJob(std::shared_ptr<const TargetSet> targets, std::unique_ptr<ObjectStore> source,
                 std::vector<std::unique_ptr<ObjectStore>> destinations,
                 std::shared_ptr<const SigningKey> signer)
      : targets_(std::move(targets)),
        source_(std::move(source)),
        destinations_(std::move(destinations)),
        signer_(std::move(signer)),
        complete_(destinations_.size(), false) {
    facts_.summary = targets_->summary();
    facts_.fingerprint = targets_->fingerprint();
    facts_.source_token = targets_->source_token();
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      const JobPlan& plan = targets_->plan(t);
      v1::PlanSummary& summary =
          t == 0 ? facts_.summary : *facts_.summary.mutable_other_targets(t - 1);
      summary.set_layout_fingerprint(plan.fingerprint);
      summary.set_destination_free_bytes(KnownFreeBytes(destination(t)));
      facts_.places.push_back({plan.target().destination_uri(), plan.fingerprint});
    }
    for (int32_t r = 0; r < targets_->region_count(); ++r) facts_.regions.push_back(TasksOf(r));
  }

  const PlanFacts& facts() const override { return facts_; }

  absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const override {
    return targets_->RanksPerLease(memory_budget_bytes);
  }

  absl::Status ClaimDestination() override {
    if (!claims_.empty()) return absl::OkStatus();
    std::vector<std::unique_ptr<StoreClaim>> claims;  // given back unless it comes to all
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      auto claim = destination(t).Claim();
      if (!claim.ok()) return WithReason(Of(t, claim.status()), "DESTINATION_BUSY");
      claims.push_back(std::move(*claim));
    }
    claims_ = std::move(claims);
    return absl::OkStatus();
  }

  void ReleaseDestination() override { claims_.clear(); }

  absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
      const std::function<absl::Status()>& go_on) override {
    std::vector<std::string> keys;
    if (!targets_->spec().verify_after_write()) return keys;
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      const auto damaged = shardprep::ForgetDamagedParts(targets_->plan(t), destination(t), go_on);
      if (!damaged.ok()) return Of(t, damaged.status());
      const std::string place = is_alone() ? "" : absl::StrCat(destination(t).uri(), "/");
      for (const std::string& key : *damaged) keys.push_back(absl::StrCat(place, key));
    }
    return keys;
  }

  absl::StatusOr<InspectedDestinations> Inspect() override {
    InspectedDestinations found;
    found.regions = facts_.regions;
    std::vector<v1::ManifestReference> manifests;
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      const auto state =
          InspectDestination(targets_->plan(t), *source_, destination(t), signer_.get());
      if (!state.ok()) return Of(t, state.status());
      complete_[static_cast<size_t>(t)] = state->kind == DestinationState::Kind::kComplete;
      if (state->kind == DestinationState::Kind::kComplete) {
        manifests.push_back(state->manifest);
        MarkAllDone(t, found.regions);
      }
      for (const RankTaskId& task : state->done) {
        RegionTasks& region = found.regions.at(static_cast<size_t>(task.region));
        region.done.push_back(targets_->NumberOf({t, task.rank}));
      }
    }
    if (manifests.size() == destinations_.size()) found.complete = std::move(manifests);
    return found;
  }

  absl::Status CheckRoom(const InspectedDestinations& found) override {
    SP_ASSIGN_OR_RETURN(const std::vector<int64_t> needed, NeededBytes(found));
    for (const std::vector<int32_t>& together : ByDevice()) {
      SP_RETURN_IF_ERROR(CheckRoomFor(together, needed));
    }
    return ForEachOpen([this](int32_t t) { return destination(t).CheckWritable(); });
  }

  absl::Status ClearLeftovers() override {
    return ForEachOpen(
        [this](int32_t t) { return shardprep::ClearLeftovers(targets_->plan(t), destination(t)); });
  }

  // Of a target that is published already both steps do nothing.
  absl::StatusOr<std::vector<v1::ManifestReference>> Commit() override {
    std::vector<v1::ManifestReference> manifests;
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      const auto manifest =
          CommitArtifact(targets_->plan(t), *source_, destination(t), signer_.get());
      if (IsNoSpace(manifest.status())) {
        return WithReason(Of(t, manifest.status()), "NO_SPACE");
      }
      if (!manifest.ok()) return Of(t, manifest.status());
      SP_RETURN_IF_ERROR(Of(t, shardprep::RemoveJournal(destination(t))));
      manifests.push_back(*manifest);
    }
    return manifests;
  }

  absl::Status RemoveJournal() override {
    return ForEach([this](int32_t t) { return shardprep::RemoveJournal(destination(t)); });
  }

  // These leave the files of a complete artefact alone, whoever made it.
  absl::Status RemoveOutput() override {
    return ForEach(
        [this](int32_t t) { return RemoveJobOutput(targets_->plan(t), destination(t)); });
  }
  absl::Status RemoveUnrecorded() override {
    return ForEach([this](int32_t t) {
      return shardprep::RemoveUnrecorded(targets_->plan(t), destination(t));
    });
  }

 private:
  bool is_alone() const { return targets_->target_count() == 1; }
  ObjectStore& destination(int32_t target) const {
    return *destinations_[static_cast<size_t>(target)];
  }

  // `status` with the target that it is about, where there are several.
  absl::Status Of(int32_t target, const absl::Status& status) const {
    return InTarget(status, target, targets_->target_count());
  }

  // Does something for each target, also after an error. The first error.
  absl::Status ForEach(const std::function<absl::Status(int32_t)>& act) const {
    absl::Status first;
    for (int32_t t = 0; t < targets_->target_count(); ++t) first.Update(Of(t, act(t)));
    return first;
  }

  // Does something for each target that was not complete when it was looked at, until an error.
  absl::Status ForEachOpen(const std::function<absl::Status(int32_t)>& act) const {
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      if (complete_[static_cast<size_t>(t)]) continue;
      SP_RETURN_IF_ERROR(Of(t, act(t)));
    }
    return absl::OkStatus();
  }

  RegionTasks TasksOf(int32_t region) const {
    RegionTasks tasks;
    tasks.bytes_per_rank =
        targets_->plan(0).slices.regions()[static_cast<size_t>(region)].bytes_per_rank;
    tasks.ranks = targets_->RanksOf(region);
    for (const int32_t number : tasks.ranks) {
      const auto rank = targets_->RankOf(number);
      SP_CHECK(rank.ok());
      const SlicePlan& slices = targets_->plan(rank->target).slices;
      const Region& own = slices.regions()[static_cast<size_t>(region)];
      int64_t bytes = 0;
      for (const PartPlan& part : slices.PartsOf(own, rank->rank)) bytes += part.data_bytes;
      if (bytes != tasks.bytes_per_rank) tasks.other_bytes[number] = bytes;
    }
    return tasks;
  }

  void MarkAllDone(int32_t target, std::vector<RegionTasks>& regions) const {
    const SlicePlan& slices = targets_->plan(target).slices;
    for (size_t r = 0; r < regions.size(); ++r) {
      for (const int32_t rank : slices.RanksOf(slices.regions()[r])) {
        regions[r].done.push_back(targets_->NumberOf({target, rank}));
      }
    }
  }

  // What is left to write, by target.
  absl::StatusOr<std::vector<int64_t>> NeededBytes(const InspectedDestinations& found) const {
    std::vector<int64_t> needed;
    for (const auto& plan : targets_->plans()) needed.push_back(plan->summary.output_bytes());
    for (const RegionTasks& region : found.regions) {
      for (const int32_t number : region.done) {
        SP_ASSIGN_OR_RETURN(const TargetRank rank, targets_->RankOf(number));
        needed[static_cast<size_t>(rank.target)] -= region.BytesOf(number);
      }
    }
    for (size_t t = 0; t < needed.size(); ++t) {
      if (complete_[t]) needed[t] = 0;  // headers and small files are there too
    }
    return needed;
  }

  // The targets, those together whose directories have their free bytes in common.
  std::vector<std::vector<int32_t>> ByDevice() const {
    std::vector<std::vector<int32_t>> groups;
    std::map<dev_t, size_t> group_of;
    for (int32_t t = 0; t < targets_->target_count(); ++t) {
      const std::optional<dev_t> device = DeviceOf(destination(t).uri());
      size_t group = groups.size();
      if (device.has_value()) group = group_of.try_emplace(*device, group).first->second;
      if (group == groups.size()) groups.emplace_back();
      groups[group].push_back(t);
    }
    return groups;
  }

  absl::Status CheckRoomFor(const std::vector<int32_t>& together,
                            const std::vector<int64_t>& needed_by_target) const {
    int64_t needed = 0;
    std::vector<std::string> places;
    for (const int32_t t : together) {
      if (complete_[static_cast<size_t>(t)]) continue;
      needed += needed_by_target[static_cast<size_t>(t)];
      places.push_back(destination(t).uri());
    }
    if (places.empty()) return absl::OkStatus();
    SP_ASSIGN_OR_RETURN(const int64_t free, destination(together.front()).FreeBytes());
    if (free >= needed) return absl::OkStatus();
    return WithReason(absl::ResourceExhaustedError(
                          absl::StrCat(places.size() == 1 ? "destination " : "destinations ",
                                       absl::StrJoin(places, ", "), ": ", FormatThousands(free),
                                       " bytes are free, the job needs ", FormatThousands(needed))),
                      "NO_SPACE",
                      {{"free_bytes", absl::StrCat(free)}, {"needed_bytes", absl::StrCat(needed)}});
  }

  static int64_t KnownFreeBytes(ObjectStore& store) {
    const absl::StatusOr<int64_t> free = store.FreeBytes();
    return free.ok() && *free != kUnlimitedBytes ? *free : -1;
  }

  const std::shared_ptr<const TargetSet> targets_;
  const std::unique_ptr<ObjectStore> source_;
  const std::vector<std::unique_ptr<ObjectStore>> destinations_;
  const std::shared_ptr<const SigningKey> signer_;
  std::vector<std::unique_ptr<StoreClaim>> claims_;  // one for each target, or none
  std::vector<bool> complete_;                       // by target, as of the last Inspect()
  PlanFacts facts_;
};

class PrepBackend : public JobBackend {
 public:
  explicit PrepBackend(PrepBackendOptions options) : options_(std::move(options)) {}

  absl::StatusOr<v1::PrepJobSpec> Normalize(const v1::PrepJobSpec& spec) override {
    return NormalizeSpec(spec);
  }

  absl::StatusOr<std::unique_ptr<PlannedJob>> Plan(const v1::PrepJobSpec& spec,
                                                   int64_t memory_budget_bytes) override {
    SP_RETURN_IF_ERROR(CheckPlaces(spec));
    PlanOptions plan_options;
    plan_options.memory_budget_bytes = memory_budget_bytes;
    plan_options.thread_count = options_.planning_threads;
    plan_options.allowed_source_roots = options_.allow_source_root;
    plan_options.s3 = options_.s3;
    SP_ASSIGN_OR_RETURN(std::shared_ptr<const TargetSet> targets, PlanTargets(spec, plan_options));
    SP_ASSIGN_OR_RETURN(std::unique_ptr<ObjectStore> source,
                        OpenStore(spec.source_uri(), {.create = false,
                                                      .allowed_roots = options_.allow_source_root,
                                                      .s3 = options_.s3}));
    std::vector<std::unique_ptr<ObjectStore>> destinations;
    for (const v1::Target& target : spec.targets()) {
      SP_ASSIGN_OR_RETURN(std::unique_ptr<ObjectStore> destination,
                          OpenStore(target.destination_uri(),
                                    {.create = true, .allowed_roots = {}, .s3 = options_.s3}));
      destinations.push_back(std::move(destination));
    }
    return {std::make_unique<RealPlannedJob>(std::move(targets), std::move(source),
                                             std::move(destinations), options_.signer)};
  }

 private:
  absl::Status CheckPlaces(const v1::PrepJobSpec& spec) const {
    SP_ASSIGN_OR_RETURN(const std::string source, Resolved(spec.source_uri()));
    SP_RETURN_IF_ERROR(CheckAllowed("source", spec.source_uri(), source, options_.allow_source));
    std::map<std::string, std::string> taken;  // destinations, by where they lie
    for (const v1::Target& target : spec.targets()) {
      SP_ASSIGN_OR_RETURN(const std::string destination, Resolved(target.destination_uri()));
      SP_RETURN_IF_ERROR(CheckAllowed("destination", target.destination_uri(), destination,
                                      options_.allow_destination));
      if (destination == source) {
        return absl::InvalidArgumentError(
            absl::StrCat("destination ", target.destination_uri(), " is the source itself"));
      }
      const auto [other, is_new] = taken.try_emplace(destination, target.destination_uri());
      if (!is_new) {
        return absl::InvalidArgumentError(absl::StrCat("destinations ", other->second, " and ",
                                                       target.destination_uri(),
                                                       " are one place, want one for each target"));
      }
    }
    return absl::OkStatus();
  }

  const PrepBackendOptions options_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobBackend>> MakePrepBackend(const PrepBackendOptions& options) {
  PrepBackendOptions resolved = options;
  SP_ASSIGN_OR_RETURN(resolved.allow_source, ResolvedList(options.allow_source));
  SP_ASSIGN_OR_RETURN(resolved.allow_destination, ResolvedList(options.allow_destination));
  return {std::make_unique<PrepBackend>(std::move(resolved))};
}

}  // namespace shardprep
