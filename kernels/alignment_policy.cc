#include "kernels/alignment_policy.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

bool Contains(const std::vector<std::string>& names, absl::string_view name) {
  return std::any_of(names.begin(), names.end(),
                     [name](const std::string& known) { return name == known; });
}

bool MatchesAll(const std::vector<std::string>& names) { return Contains(names, "*"); }

bool Matches(const std::vector<std::string>& names, absl::string_view name) {
  return MatchesAll(names) || Contains(names, name);
}

absl::Status CheckKnown(const char* what, const std::vector<std::string>& known,
                        absl::string_view name) {
  if (Contains(known, name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ", what, " '", name, "', known: ", absl::StrJoin(known, ", ")));
}

absl::StatusOr<std::string> PlatformOf(const AlignmentPolicy& policy,
                                       absl::string_view architecture) {
  std::vector<std::string> known;
  for (const Platform& platform : policy.platforms) {
    if (absl::StartsWith(architecture, platform.prefix)) return platform.name;
    known.push_back(absl::StrCat(platform.prefix, "*"));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown architecture '", architecture,
                                                 "', known: ", absl::StrJoin(known, ", ")));
}

AlignmentDecision DecisionOf(const AlignmentRow& row) {
  AlignmentDecision decision;
  decision.rule_id = row.id;
  decision.source = row.source;
  decision.intermediate = row.intermediate;
  decision.hidden = row.hidden;
  return decision;
}

// Dotted releases compare number by number, missing numbers as 0.
bool VersionLess(const std::string& a, const std::string& b) {
  const std::vector<std::string> left = absl::StrSplit(a, '.');
  const std::vector<std::string> right = absl::StrSplit(b, '.');
  for (size_t k = 0; k < std::max(left.size(), right.size()); ++k) {
    int64_t x = 0;
    int64_t y = 0;
    if (k < left.size()) SP_CHECK(absl::SimpleAtoi(left[k], &x));
    if (k < right.size()) SP_CHECK(absl::SimpleAtoi(right[k], &y));
    if (x != y) return x < y;
  }
  return false;
}

}  // namespace

absl::StatusOr<AlignmentDecision> AlignmentPolicy::Decide(absl::string_view backend,
                                                          absl::string_view activation,
                                                          absl::string_view architecture) const {
  SP_RETURN_IF_ERROR(CheckKnown("backend", backends, backend));
  SP_RETURN_IF_ERROR(CheckKnown("activation", activations, activation));
  SP_ASSIGN_OR_RETURN(const std::string platform, PlatformOf(*this, architecture));
  for (const AlignmentRow& row : rows) {
    if (!Matches(row.backends, backend) || !Matches(row.activations, activation) ||
        !Matches(row.platforms, platform)) {
      continue;
    }
    AlignmentDecision decision = DecisionOf(row);
    decision.backend = std::string(backend);
    decision.activation = std::string(activation);
    for (const WidthConstraint& constraint : constraints) {
      if (Matches(constraint.backends, backend) && Matches(constraint.activations, activation)) {
        decision.constraints.push_back(constraint);
      }
    }
    return decision;
  }
  return absl::InvalidArgumentError(absl::StrCat("the alignment policy has no row for backend ",
                                                 backend, ", activation ", activation,
                                                 ", architecture ", architecture));
}

absl::StatusOr<AlignmentDecision> AlignmentPolicy::GenericRule(
    absl::string_view architecture) const {
  SP_ASSIGN_OR_RETURN(const std::string platform, PlatformOf(*this, architecture));
  for (const AlignmentRow& row : rows) {
    if (MatchesAll(row.backends) && MatchesAll(row.activations) &&
        Matches(row.platforms, platform)) {
      return DecisionOf(row);
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the alignment policy has no generic row for architecture ", architecture));
}

absl::Status AlignmentPolicy::CheckProfile(absl::string_view backend, absl::string_view activation,
                                           absl::string_view architecture,
                                           ProfileId profile) const {
  SP_RETURN_IF_ERROR(Decide(backend, activation, architecture).status());
  std::vector<absl::string_view> working;
  for (const ProfileSupport& support : profiles) {
    if (!Matches(support.backends, backend) || !Matches(support.activations, activation) ||
        !Matches(support.architectures, architecture)) {
      continue;
    }
    if (support.profile == profile) return absl::OkStatus();
    working.push_back(GetProfile(support.profile).name);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "backend ", backend, " with activation ", activation, " on ", architecture,
      " does not read profile ", GetProfile(profile).name,
      ", profiles that work: ", working.empty() ? "none" : absl::StrJoin(working, ", ")));
}

absl::Status AlignmentPolicy::CheckWeights(absl::string_view backend,
                                           absl::string_view format) const {
  std::vector<std::string> working;
  for (const WeightSupport& support : weights) {
    if (support.weights != format) continue;
    if (Matches(support.backends, backend)) return absl::OkStatus();
    working.insert(working.end(), support.backends.begin(), support.backends.end());
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "backend ", backend, " does not read ", format, " weights, and nothing converts them",
      "; backends that do: ", working.empty() ? "none" : absl::StrJoin(working, ", ")));
}

std::vector<AiterMinimum> AlignmentPolicy::AiterMinimumsFor(ProfileId profile, NativeExtent native,
                                                            PaddedExtent padded,
                                                            absl::string_view format) const {
  std::vector<AiterMinimum> found;
  for (const AiterMinimum& minimum : aiter_minimums) {
    if (minimum.profile != profile || !Matches(minimum.weights, format)) continue;
    const int64_t width =
        minimum.width == WidthKind::kNative ? native.elements() : padded.elements();
    if (minimum.unless_multiple_of > 1 && width % minimum.unless_multiple_of == 0) continue;
    found.push_back(minimum);
  }
  return found;
}

std::string AlignmentPolicy::MinimumAiterVersion(ProfileId profile, NativeExtent native,
                                                 PaddedExtent padded,
                                                 absl::string_view format) const {
  std::string least;
  for (const AiterMinimum& minimum : AiterMinimumsFor(profile, native, padded, format)) {
    if (least.empty() || VersionLess(least, minimum.version)) least = minimum.version;
  }
  return least;
}

absl::StatusOr<BackendChoice> AlignmentPolicy::ResolveBackend(absl::string_view backend,
                                                              absl::string_view architecture,
                                                              absl::string_view format) const {
  SP_RETURN_IF_ERROR(PlatformOf(*this, architecture).status());
  if (backend != "AUTO") {
    SP_RETURN_IF_ERROR(CheckKnown("backend", backends, backend));
    return BackendChoice{std::string(backend), absl::StrCat(backend, " was asked for")};
  }
  for (const AutoBackend& row : auto_backends) {
    if (Matches(row.architectures, architecture) && Matches(row.weights, format)) {
      return BackendChoice{row.backend, row.reason};
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the alignment policy has no backend for AUTO on ", architecture));
}

absl::Status CheckWidth(const AlignmentDecision& decision, NativeExtent native,
                        PaddedExtent padded) {
  const PaddedExtent want = RoundUp(native, decision.intermediate);
  if (padded != want) {
    return absl::InvalidArgumentError(absl::StrCat("rule ", decision.rule_id, ": padded width ",
                                                   padded.elements(), " of native width ",
                                                   native.elements(), ", want ", want.elements()));
  }
  for (const WidthConstraint& constraint : decision.constraints) {
    const int64_t multiple = constraint.padded_multiple_of;
    // The alignment is checked too: a table that is wrong only at some widths is wrong.
    if (decision.intermediate.elements() % multiple == 0 && padded.elements() % multiple == 0) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "rule ", decision.rule_id, " gives backend ", decision.backend, " with activation ",
        decision.activation, " alignment ", decision.intermediate.elements(), " and padded width ",
        padded.elements(), ", want multiples of ", multiple, " (constraint ", constraint.id, "; ",
        constraint.source, ")"));
  }
  return absl::OkStatus();
}

}  // namespace shardprep
