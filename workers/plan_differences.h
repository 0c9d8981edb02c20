// How two plans differ, for people.
#pragma once

#include <string>

namespace shardprep {

// Of two fingerprint inputs (JobPlan::fingerprint_inputs): "profile is logical, want
// aiter-separated; ...". Source files are named. Empty when they do not differ or are not JSON.
std::string DescribeInputs(const std::string& found, const std::string& want);

// The same of two source tokens (JobPlan::source_token).
std::string DescribeTokens(const std::string& found, const std::string& want);

}  // namespace shardprep
