// Alignment policy: what width and hidden size a kernel backend needs, as data.
//
// Alignment is a property of backend and activation (and of the architecture where a row says so),
// never of a model (vLLM #51473). Rows, constraints and tables are values here; their text lives in
// kernels/alignment_policy.json and is read by workers/policy_file.h. Pure and thread safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/extents.h"
#include "kernels/profile.h"

namespace shardprep {

// In every list of names below, {"*"} stands for all.

// Architectures are named by prefix: "gfx" is the platform "rocm".
struct Platform {
  std::string name;
  std::string prefix;
};

// The first row that matches decides; the last one matches everything.
struct AlignmentRow {
  std::string id;
  std::vector<std::string> backends;
  std::vector<std::string> activations;
  std::vector<std::string> platforms;
  Alignment intermediate{1};
  Alignment hidden{1};
  std::string source;
};

// A width that computes wrong numbers: the padded width must be a multiple.
struct WidthConstraint {
  std::string id;
  std::vector<std::string> backends;
  std::vector<std::string> activations;
  int64_t padded_multiple_of = 1;
  std::string source;
};

// A profile that a backend reads.
struct ProfileSupport {
  ProfileId profile = ProfileId::kLogical;
  std::vector<std::string> backends;
  std::vector<std::string> activations;
  std::vector<std::string> architectures;
  std::string source;
};

enum class WidthKind : uint8_t { kNative, kPadded };

// The backends that read weights of one format: "mxfp4" (E2M1 with a scale for 32 elements of a
// row), "fp8-block" (E4M3 with a scale for 128 x 128), "bf16".
struct WeightSupport {
  std::string weights;
  std::vector<std::string> backends;
  std::string source;
};

// The first AITER release that serves a profile; where unless_multiple_of > 1 only for widths that
// are not such a multiple, else always.
struct AiterMinimum {
  ProfileId profile = ProfileId::kLogical;
  std::vector<std::string> weights;
  WidthKind width = WidthKind::kPadded;
  int64_t unless_multiple_of = 1;
  std::string version;  // "0.1.16"
  std::string source;
};

// What AUTO stands for; the first row whose architectures and weights match.
struct AutoBackend {
  std::vector<std::string> architectures;
  std::vector<std::string> weights;
  std::string backend;
  std::string reason;
};

struct AlignmentDecision {
  std::string rule_id;
  std::string source;
  std::string backend;     // empty in a generic rule
  std::string activation;  // empty in a generic rule
  Alignment intermediate{1};
  Alignment hidden{1};
  std::vector<WidthConstraint> constraints;  // that apply to backend and activation
};

struct BackendChoice {
  std::string backend;
  std::string reason;
};

struct AlignmentPolicy {
  int64_t version = 0;
  std::vector<Platform> platforms;
  std::vector<std::string> backends;
  std::vector<std::string> activations;
  std::vector<AlignmentRow> rows;
  std::vector<WidthConstraint> constraints;
  std::vector<ProfileSupport> profiles;
  std::vector<WeightSupport> weights;
  std::vector<AiterMinimum> aiter_minimums;
  std::vector<AutoBackend> auto_backends;

  // The rule for a backend. INVALID_ARGUMENT for a backend, activation or architecture that the
  // policy does not know; the message lists those it does. A misspelt name must not fall through to
  // the generic row. "AUTO" is not a backend: resolve it first.
  absl::StatusOr<AlignmentDecision> Decide(absl::string_view backend, absl::string_view activation,
                                           absl::string_view architecture) const;

  // The rule of the platform for backends without a row of their own (the first row for all
  // backends and activations): the yardstick for what a native width saves. INVALID_ARGUMENT for an
  // unknown architecture.
  absl::StatusOr<AlignmentDecision> GenericRule(absl::string_view architecture) const;

  // FAILED_PRECONDITION when no engine with this backend reads `profile`; the message names the
  // profiles that work. INVALID_ARGUMENT as Decide.
  absl::Status CheckProfile(absl::string_view backend, absl::string_view activation,
                            absl::string_view architecture, ProfileId profile) const;

  // INVALID_ARGUMENT when the backend does not read weights of this format, which nothing converts;
  // the message names the backends that do.
  absl::Status CheckWeights(absl::string_view backend, absl::string_view weights) const;

  // The rows that ask for an AITER release for the profile at these per-rank widths.
  std::vector<AiterMinimum> AiterMinimumsFor(ProfileId profile, NativeExtent native,
                                             PaddedExtent padded,
                                             absl::string_view weights = "mxfp4") const;

  // The least AITER release for the profile at these per-rank widths, "0.1.16"; empty when any
  // release will do.
  std::string MinimumAiterVersion(ProfileId profile, NativeExtent native, PaddedExtent padded,
                                  absl::string_view weights = "mxfp4") const;

  // Turns "AUTO" into a backend for weights of a format; any other known name stands for itself.
  // INVALID_ARGUMENT for an unknown backend or architecture.
  absl::StatusOr<BackendChoice> ResolveBackend(absl::string_view backend,
                                               absl::string_view architecture,
                                               absl::string_view weights = "mxfp4") const;
};

// FAILED_PRECONDITION when a constraint forbids the decision's alignment or the padded width,
// citing its source; INVALID_ARGUMENT when `padded` is not `native` rounded up by the decision.
absl::Status CheckWidth(const AlignmentDecision& decision, NativeExtent native,
                        PaddedExtent padded);

}  // namespace shardprep
