// A plan as people read it. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardprep {

namespace v1 {
class PlanSummary;
class PrepJobSpec;
}  // namespace v1

// A table: what stands behind every number of the plan, sizes as exact bytes and GiB. `spec` is the
// normalised one. Ends with a line feed. Lists at most ten tensors that are left behind; the JSON
// form has a hundred.
std::string PlanReport(const v1::PrepJobSpec& spec, const v1::PlanSummary& plan);

// Lines "  name   value" with the values in one column; a line feed in a value continues in that
// column. Ends with a line feed unless there are no rows.
std::string AlignedRows(const std::vector<std::pair<std::string, std::string>>& rows);

// Rows of cells with two spaces between columns; the first `left` columns are aligned left, the
// others right. Each line begins with two spaces and ends with a line feed.
std::string AlignedTable(const std::vector<std::vector<std::string>>& rows, size_t left);

}  // namespace shardprep
