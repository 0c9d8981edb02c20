// An operator's alignment policy. Input: its JSON.
#include <string>

#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz_target.h"
#include "workers/policy_file.h"

namespace shardprep {
namespace {

// A policy that was accepted answers for every pair of names that it lists.
void CheckAnswers(const AlignmentPolicy& policy) {
  for (const Platform& platform : policy.platforms) {
    const std::string architecture = platform.prefix + "950";
    for (const std::string& backend : policy.backends) {
      for (const std::string& activation : policy.activations) {
        const auto decision = policy.Decide(backend, activation, architecture);
        FUZZ_REQUIRE(decision.ok(), decision.status().ToString());
        FUZZ_REQUIRE(!decision->rule_id.empty(), backend);
        policy.CheckProfile(backend, activation, architecture, ProfileId::kLogical).IgnoreError();
      }
    }
    FUZZ_REQUIRE(policy.ResolveBackend("AUTO", architecture).ok(), architecture);
    policy.GenericRule(architecture).status().IgnoreError();
  }
}

}  // namespace

void FuzzOne(const std::string& input) {
  const auto policy = ParseAlignmentPolicy(input);
  if (!policy.ok()) {
    FUZZ_REQUIRE(absl::IsInvalidArgument(policy.status()), policy.status().ToString());
    return;
  }
  FUZZ_REQUIRE(policy->sha256_hex.size() == 64, policy->sha256_hex);
  CheckAnswers(policy->policy);
  // White space and the order of keys say nothing.
  const nlohmann::json json = nlohmann::json::parse(input, nullptr, /*allow_exceptions=*/false);
  FUZZ_REQUIRE(!json.is_discarded(), "accepted, but not JSON");
  const auto again = ParseAlignmentPolicy(json.dump(3));
  FUZZ_REQUIRE(again.ok(), again.status().ToString());
  FUZZ_REQUIRE(again->sha256_hex == policy->sha256_hex, json.dump());
}

}  // namespace shardprep
