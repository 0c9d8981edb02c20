#include "service/prep_backend.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/status_macros.h"
#include "workers/artifact.h"
#include "workers/byte_size.h"
#include "workers/grpc_status.h"
#include "workers/job_plan.h"
#include "workers/object_store.h"
#include "workers/open_store.h"

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

class RealPlannedJob : public PlannedJob {
 public:
  RealPlannedJob(std::shared_ptr<const JobPlan> plan, std::unique_ptr<ObjectStore> source,
                 std::unique_ptr<ObjectStore> destination, std::shared_ptr<const SigningKey> signer)
      : plan_(std::move(plan)),
        source_(std::move(source)),
        destination_(std::move(destination)),
        signer_(std::move(signer)) {
    facts_.summary = plan_->summary;
    facts_.summary.set_layout_fingerprint(plan_->fingerprint);
    facts_.summary.set_destination_free_bytes(KnownFreeBytes());
    facts_.fingerprint = plan_->fingerprint;
    facts_.source_token = plan_->source_token;
    facts_.destination = plan_->target().destination_uri();
    for (const Region& region : plan_->slices.regions()) {
      RegionTasks tasks;
      tasks.ranks = plan_->slices.RanksOf(region);
      tasks.bytes_per_rank = region.bytes_per_rank;
      for (const int32_t rank : tasks.ranks) {
        int64_t bytes = 0;
        for (const PartPlan& part : plan_->slices.PartsOf(region, rank)) bytes += part.data_bytes;
        if (bytes != tasks.bytes_per_rank) tasks.other_bytes[rank] = bytes;
      }
      facts_.regions.push_back(std::move(tasks));
    }
  }

  const PlanFacts& facts() const override { return facts_; }

  absl::StatusOr<int32_t> RanksPerLease(int64_t memory_budget_bytes) const override {
    return shardprep::RanksPerLease(*plan_, memory_budget_bytes);
  }

  absl::Status ClaimDestination() override {
    if (claim_ != nullptr) return absl::OkStatus();
    auto claim = destination_->Claim();
    if (!claim.ok()) return WithReason(claim.status(), "DESTINATION_BUSY");
    claim_ = std::move(*claim);
    return absl::OkStatus();
  }

  void ReleaseDestination() override { claim_.reset(); }

  absl::StatusOr<std::vector<std::string>> ForgetDamagedParts(
      const std::function<absl::Status()>& go_on) override {
    if (!plan_->spec.verify_after_write()) return std::vector<std::string>();
    return shardprep::ForgetDamagedParts(*plan_, *destination_, go_on);
  }

  absl::StatusOr<InspectedDestination> Inspect() override {
    SP_ASSIGN_OR_RETURN(const DestinationState state,
                        InspectDestination(*plan_, *source_, *destination_, signer_.get()));
    InspectedDestination found;
    found.regions = facts_.regions;
    if (state.kind == DestinationState::Kind::kComplete) found.complete = state.manifest;
    for (const RankTaskId& task : state.done) {
      found.regions.at(static_cast<size_t>(task.region)).done.push_back(task.rank);
    }
    return found;
  }

  absl::Status CheckRoom(const InspectedDestination& found) override {
    int64_t needed = facts_.summary.output_bytes();
    for (const RegionTasks& region : found.regions) {
      needed -= region.BytesOf(region.done);
    }
    SP_ASSIGN_OR_RETURN(const int64_t free, destination_->FreeBytes());
    if (free < needed) {
      return WithReason(
          absl::ResourceExhaustedError(
              absl::StrCat("destination ", facts_.destination, ": ", FormatThousands(free),
                           " bytes are free, the job needs ", FormatThousands(needed))),
          "NO_SPACE", {{"free_bytes", absl::StrCat(free)}, {"needed_bytes", absl::StrCat(needed)}});
    }
    return destination_->CheckWritable();
  }

  absl::Status ClearLeftovers() override {
    return shardprep::ClearLeftovers(*plan_, *destination_);
  }

  absl::StatusOr<v1::ManifestReference> Commit() override {
    absl::StatusOr<v1::ManifestReference> manifest =
        CommitArtifact(*plan_, *source_, *destination_, signer_.get());
    if (IsNoSpace(manifest.status())) return WithReason(manifest.status(), "NO_SPACE");
    SP_RETURN_IF_ERROR(manifest.status());
    SP_RETURN_IF_ERROR(RemoveJournal());
    return manifest;
  }

  absl::Status RemoveJournal() override { return shardprep::RemoveJournal(*destination_); }

  absl::Status RemoveOutput() override { return RemoveJobOutput(*plan_, *destination_); }

  absl::Status RemoveUnrecorded() override {
    return shardprep::RemoveUnrecorded(*plan_, *destination_);
  }

 private:
  int64_t KnownFreeBytes() {
    const absl::StatusOr<int64_t> free = destination_->FreeBytes();
    return free.ok() && *free != kUnlimitedBytes ? *free : -1;
  }

  const std::shared_ptr<const JobPlan> plan_;
  const std::unique_ptr<ObjectStore> source_;
  const std::unique_ptr<ObjectStore> destination_;
  const std::shared_ptr<const SigningKey> signer_;
  std::unique_ptr<StoreClaim> claim_;
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
    SP_ASSIGN_OR_RETURN(std::shared_ptr<const JobPlan> plan, PlanJob(spec, plan_options));
    SP_ASSIGN_OR_RETURN(std::unique_ptr<ObjectStore> source,
                        OpenStore(spec.source_uri(), {.create = false,
                                                      .allowed_roots = options_.allow_source_root,
                                                      .s3 = options_.s3}));
    SP_ASSIGN_OR_RETURN(std::unique_ptr<ObjectStore> destination,
                        OpenStore(spec.targets(0).destination_uri(),
                                  {.create = true, .allowed_roots = {}, .s3 = options_.s3}));
    return {std::make_unique<RealPlannedJob>(std::move(plan), std::move(source),
                                             std::move(destination), options_.signer)};
  }

 private:
  absl::Status CheckPlaces(const v1::PrepJobSpec& spec) const {
    SP_ASSIGN_OR_RETURN(const std::string source, Resolved(spec.source_uri()));
    SP_RETURN_IF_ERROR(CheckAllowed("source", spec.source_uri(), source, options_.allow_source));
    for (const v1::Target& target : spec.targets()) {
      SP_ASSIGN_OR_RETURN(const std::string destination, Resolved(target.destination_uri()));
      SP_RETURN_IF_ERROR(CheckAllowed("destination", target.destination_uri(), destination,
                                      options_.allow_destination));
      if (destination == source) {
        return absl::InvalidArgumentError(
            absl::StrCat("destination ", target.destination_uri(), " is the source itself"));
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
