#include "workers/coverage.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// How a tensor of the checkpoint is carried.
enum class Way : uint8_t { kNone, kRouted, kReplicated };

class CoverageProof {
 public:
  explicit CoverageProof(const SlicePlan& plan)
      : plan_(plan), ways_(plan.checkpoint().tensors().size(), Way::kNone) {}

  absl::StatusOr<CoverageTotals> Run() {
    for (const Region& region : plan_.regions()) {
      SP_RETURN_IF_ERROR(region.kind == Region::Kind::kRouted ? CoverRouted(region)
                                                              : CoverReplicated(region));
    }
    SP_RETURN_IF_ERROR(CheckRest());
    return totals_;
  }

 private:
  absl::Status Fail(int32_t tensor, const std::string& what) const {
    return absl::DataLossError(
        absl::StrCat(std::string(plan_.checkpoint().tensors().at(tensor).name), ": ", what));
  }

  absl::Status Claim(int32_t tensor, Way way) {
    if (tensor < 0 || tensor >= static_cast<int64_t>(ways_.size())) {
      return absl::DataLossError(
          absl::StrCat("the plan names tensor ", tensor, " of ", ways_.size()));
    }
    if (ways_[tensor] != Way::kNone) return Fail(tensor, "is carried twice");
    ways_[tensor] = way;
    return absl::OkStatus();
  }

  absl::Status CoverRouted(const Region& region) {
    for (const PartPlan& part : region.parts) {
      for (const PartTensor& tensor : part.tensors) {
        SP_RETURN_IF_ERROR(CoverFused(region, plan_.fused_tensors()[tensor.source]));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CoverFused(const Region& region, const FusedTensor& fused) {
    std::map<int32_t, std::vector<Slice>> by_tensor;
    for (const int32_t rank : plan_.RanksOf(region)) {
      for (int64_t expert = 0; expert < fused.experts; ++expert) {
        const std::vector<Slice> slices = plan_.SlicesOf(region, fused, rank, expert);
        SP_RETURN_IF_ERROR(CheckMatrix(region, fused, rank, expert, slices));
        for (const Slice& slice : slices) by_tensor[slice.tensor].push_back(slice);
      }
    }
    for (auto& [tensor, slices] : by_tensor) {
      SP_RETURN_IF_ERROR(Claim(tensor, Way::kRouted));
      SP_RETURN_IF_ERROR(CheckTiling(tensor, slices));
      totals_.routed_bytes += plan_.checkpoint().tensors().at(tensor).size_bytes;
    }
    return absl::OkStatus();
  }

  // The slices of one rank's matrix, on the side where they land.
  absl::Status CheckMatrix(const Region& region, const FusedTensor& fused, int32_t rank,
                           int64_t expert, const std::vector<Slice>& slices) const {
    const auto fail = [&](const std::string& what) {
      return absl::DataLossError(absl::StrCat(region.name, ", ", std::string(RoleName(fused.role)),
                                              ", rank ", rank, ", expert ", expert, ": ", what));
    };
    const int64_t half_rows = fused.job.rows / fused.halves;
    std::vector<int64_t> filled(fused.halves, 0);
    for (const Slice& slice : slices) {
      if (slice.col_bytes != fused.job.native_cols) {
        return fail(absl::StrCat(slice.col_bytes, " bytes a row, want ", fused.job.native_cols));
      }
      const int64_t half = slice.first_row / half_rows;
      if (slice.first_row < 0 || half >= fused.halves) {
        return fail(absl::StrCat("rows from ", slice.first_row, " of ", fused.job.rows));
      }
      if (slice.first_row != half * half_rows + filled[half]) {
        return fail(absl::StrCat("rows from ", slice.first_row, ", want ",
                                 half * half_rows + filled[half]));
      }
      filled[half] += slice.rows;
    }
    for (const int64_t rows : filled) {
      if (rows != fused.native_rows / fused.halves || rows > half_rows) {
        return fail(absl::StrCat(rows, " rows in a half of ", half_rows, ", want ",
                                 fused.native_rows / fused.halves));
      }
    }
    return absl::OkStatus();
  }

  // The slices of one source tensor over all ranks: bands of whole rows or of whole columns that
  // follow each other without gap or overlap.
  absl::Status CheckTiling(int32_t tensor, std::vector<Slice>& slices) const {
    const int64_t row_bytes = slices.front().source_row_bytes;
    const int64_t size = plan_.checkpoint().tensors().at(tensor).size_bytes;
    if (row_bytes < 1 || size % row_bytes != 0) {
      return Fail(tensor, absl::StrCat(size, " bytes in rows of ", row_bytes));
    }
    const int64_t rows = size / row_bytes;
    const bool row_bands = slices.front().whole_rows();
    std::sort(slices.begin(), slices.end(), [row_bands](const Slice& a, const Slice& b) {
      return row_bands ? a.row_begin < b.row_begin : a.col_begin < b.col_begin;
    });
    int64_t next = 0;
    for (const Slice& slice : slices) {
      const bool across =
          row_bands ? slice.whole_rows() : slice.row_begin == 0 && slice.rows == rows;
      if (!across || slice.source_row_bytes != row_bytes) {
        return Fail(tensor, "its slices do not all go across the tensor");
      }
      const int64_t begin = row_bands ? slice.row_begin : slice.col_begin;
      if (begin != next) {
        return Fail(tensor, absl::StrCat(begin > next ? "gap" : "overlap", " between ",
                                         row_bands ? "row " : "byte column ", std::min(begin, next),
                                         " and ", std::max(begin, next)));
      }
      next += row_bands ? slice.rows : slice.col_bytes;
    }
    const int64_t want = row_bands ? rows : row_bytes;
    if (next != want) {
      return Fail(tensor, absl::StrCat("slices cover ", next, row_bands ? " rows" : " byte columns",
                                       ", want ", want));
    }
    return absl::OkStatus();
  }

  absl::Status CoverReplicated(const Region& region) {
    for (const PartPlan& part : region.parts) {
      for (const PartTensor& tensor : part.tensors) {
        SP_RETURN_IF_ERROR(Claim(tensor.source, Way::kReplicated));
        const int64_t size = plan_.checkpoint().tensors().at(tensor.source).size_bytes;
        if (tensor.size_bytes != size) {
          return Fail(tensor.source, absl::StrCat(tensor.size_bytes, " bytes stored, want ", size));
        }
        totals_.replicated_bytes += size;
      }
    }
    return absl::OkStatus();
  }

  // What is neither routed nor replicated is on the list of what is left behind. That list may also
  // name tensors that the index hides, which are none of the checkpoint's.
  absl::Status CheckRest() const {
    std::vector<bool> omitted(ways_.size(), false);
    for (const OmittedTensor& tensor : plan_.omitted()) {
      const auto index = plan_.checkpoint().FindTensor(tensor.name);
      if (index.has_value()) omitted[*index] = true;
    }
    for (int32_t t = 0; t < static_cast<int64_t>(ways_.size()); ++t) {
      if (ways_[t] == Way::kNone && !omitted[t]) {
        return Fail(t, "is neither carried nor listed as not carried");
      }
    }
    return absl::OkStatus();
  }

  const SlicePlan& plan_;
  std::vector<Way> ways_;  // by index into Checkpoint::tensors()
  CoverageTotals totals_;
};

}  // namespace

absl::StatusOr<CoverageTotals> ProveCoverage(const SlicePlan& plan) {
  return CoverageProof(plan).Run();
}

}  // namespace shardprep
