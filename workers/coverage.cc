#include "workers/coverage.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

// How a tensor of the checkpoint is carried.
enum class Way : uint8_t { kNone, kRouted, kReplicated, kDense };

class CoverageProof {
 public:
  explicit CoverageProof(const SlicePlan& plan)
      : plan_(plan), ways_(plan.checkpoint().tensors().size(), Way::kNone) {}

  absl::StatusOr<CoverageTotals> Run() {
    for (const Region& region : plan_.regions()) {
      SP_RETURN_IF_ERROR(Cover(region));
    }
    SP_RETURN_IF_ERROR(CheckRest());
    return totals_;
  }

 private:
  absl::Status Cover(const Region& region) {
    switch (region.kind) {
      case Region::Kind::kRouted:
        return CoverRouted(region);
      case Region::Kind::kReplicated:
        return CoverReplicated(region);
      case Region::Kind::kDense:
        return CoverDense(region);
    }
    SP_CHECK(false);
  }

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

  using SlicesByTensor = std::map<int32_t, std::vector<Slice>>;

  absl::Status CoverRouted(const Region& region) {
    SlicesByTensor by_tensor;
    for (int shape = 0; shape < plan_.shape_count(); ++shape) {
      SP_RETURN_IF_ERROR(CoverShape(region, shape, by_tensor));
    }
    for (auto& [tensor, slices] : by_tensor) {
      SP_RETURN_IF_ERROR(Claim(tensor, Way::kRouted));
      SP_RETURN_IF_ERROR(CheckTiling(tensor, slices));
      for (const Slice& slice : slices) totals_.routed_bytes += slice.rows * slice.col_bytes;
    }
    return absl::OkStatus();
  }

  absl::Status CoverShape(const Region& region, int shape, SlicesByTensor& by_tensor) const {
    for (const int32_t rank : plan_.RanksOf(region)) {
      if (plan_.ShapeOf(rank) != shape) continue;
      for (const PartPlan& part : plan_.PartsOf(region, rank)) {
        for (const PartTensor& tensor : part.tensors) {
          const FusedTensor& fused = plan_.FusedTensorsOf(rank)[tensor.source];
          for (int64_t slot = 0; slot < fused.experts; ++slot) {
            const std::vector<Slice> slices = plan_.SlicesOf(region, fused, rank, slot);
            SP_RETURN_IF_ERROR(CheckMatrix(region, fused, rank, slot, slices));
            for (const Slice& slice : slices) by_tensor[slice.tensor].push_back(slice);
          }
        }
      }
    }
    return absl::OkStatus();
  }

  // The slices in one slot of one rank, on the side where they land.
  absl::Status CheckMatrix(const Region& region, const FusedTensor& fused, int32_t rank,
                           int64_t slot, const std::vector<Slice>& slices) const {
    const auto fail = [&](const std::string& what) {
      return absl::DataLossError(absl::StrCat(region.name, ", ", fused.name, ", rank ", rank,
                                              ", slot ", slot, ": ", what));
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

  // The slices of one source tensor over all ranks and slots: bands of whole rows, or bands of
  // whole columns of the same rows, that follow each other without gap or overlap. Rows that are
  // taken every other one are two tensors side by side.
  absl::Status CheckTiling(int32_t tensor, std::vector<Slice>& slices) const {
    const int64_t row_bytes = slices.front().source_row_bytes;
    const int64_t step = slices.front().row_step;
    const int64_t size = plan_.checkpoint().tensors().at(tensor).size_bytes;
    if (row_bytes < 1 || step < 1 || size % (row_bytes * step) != 0) {
      return Fail(tensor, absl::StrCat(size, " bytes in rows of ", row_bytes));
    }
    std::vector<std::vector<Slice>> lanes(static_cast<size_t>(step));
    for (const Slice& slice : slices) {
      if (slice.source_row_bytes != row_bytes || slice.row_step != step || slice.row_begin < 0) {
        return Fail(tensor, "its slices do not all see the same rows");
      }
      lanes[static_cast<size_t>(slice.row_begin % step)].push_back(slice);
    }
    for (std::vector<Slice>& lane : lanes) {
      SP_RETURN_IF_ERROR(CheckLane(tensor, size / row_bytes / step, lane));
    }
    return absl::OkStatus();
  }

  // As CheckTiling; rows are counted in steps.
  absl::Status CheckLane(int32_t tensor, int64_t rows, std::vector<Slice>& slices) const {
    const auto key = [](const Slice& s) {
      return std::make_tuple(s.row_begin / s.row_step, s.rows, s.col_begin, s.col_bytes);
    };
    std::sort(slices.begin(), slices.end(),
              [&](const Slice& a, const Slice& b) { return key(a) < key(b); });
    int64_t next_row = 0;
    for (size_t at = 0; at < slices.size();) {
      const int64_t begin = slices[at].row_begin / slices[at].row_step;
      const int64_t band_rows = slices[at].rows;
      if (begin != next_row) {
        return Fail(tensor,
                    absl::StrCat(begin > next_row ? "gap" : "overlap", " between row ",
                                 std::min(begin, next_row), " and ", std::max(begin, next_row)));
      }
      int64_t next_column = 0;
      size_t copies = 0;
      while (at < slices.size() && slices[at].row_begin / slices[at].row_step == begin) {
        const Slice& slice = slices[at];
        if (slice.rows != band_rows) return Fail(tensor, "its slices do not go across the tensor");
        if (slice.col_begin != next_column) {
          return Fail(tensor,
                      absl::StrCat(slice.col_begin > next_column ? "gap" : "overlap",
                                   " between byte column ", std::min(slice.col_begin, next_column),
                                   " and ", std::max(slice.col_begin, next_column)));
        }
        size_t same = at;
        while (same < slices.size() && key(slices[same]) == key(slice)) ++same;
        if (copies == 0) copies = same - at;
        if (same - at != copies) {
          return Fail(tensor, absl::StrCat("rows from ", begin, " are carried ", copies,
                                           " times, some columns of them ", same - at));
        }
        next_column += slice.col_bytes;
        at = same;
      }
      if (next_column != slices.front().source_row_bytes) {
        return Fail(tensor, absl::StrCat("slices cover ", next_column, " byte columns, want ",
                                         slices.front().source_row_bytes));
      }
      next_row += band_rows;
    }
    if (next_row == rows) return absl::OkStatus();
    return Fail(tensor, absl::StrCat("slices cover ", next_row, " rows, want ", rows));
  }

  absl::Status CoverReplicated(const Region& region) {
    for (const PartPlan& part : region.parts) {
      for (const PartTensor& tensor : part.tensors) {
        const DenseTensor& dense = plan_.dense_tensors()[static_cast<size_t>(tensor.source)];
        int64_t size = 0;
        for (const DenseSource& source : dense.sources) {
          SP_RETURN_IF_ERROR(Claim(source.tensor, Way::kReplicated));
          size += plan_.checkpoint().tensors().at(source.tensor).size_bytes;
        }
        if (tensor.size_bytes != size) {
          return Fail(dense.sources.front().tensor,
                      absl::StrCat(tensor.size_bytes, " bytes stored, want ", size));
        }
        totals_.replicated_bytes += size;
      }
    }
    return absl::OkStatus();
  }

  absl::Status CoverDense(const Region& region) {
    SlicesByTensor by_tensor;
    for (const int32_t rank : plan_.RanksOf(region)) {
      for (const PartPlan& part : plan_.PartsOf(region, rank)) {
        for (const PartTensor& tensor : part.tensors) {
          SP_RETURN_IF_ERROR(CoverDenseTensor(tensor, rank, by_tensor));
        }
      }
    }
    for (auto& [tensor, slices] : by_tensor) {
      SP_RETURN_IF_ERROR(Claim(tensor, Way::kDense));
      SP_RETURN_IF_ERROR(CheckTiling(tensor, slices));
      for (const Slice& slice : slices) totals_.dense_bytes += slice.rows * slice.col_bytes;
    }
    return absl::OkStatus();
  }

  // The slices of a tensor on one rank fill it up to its tail.
  absl::Status CoverDenseTensor(const PartTensor& tensor, int32_t rank,
                                SlicesByTensor& by_tensor) const {
    const DenseTensor& dense = plan_.dense_tensors()[static_cast<size_t>(tensor.source)];
    int64_t filled = dense.tail_bytes;
    for (const DenseSource& source : dense.sources) {
      const Slice slice = plan_.DenseSliceOf(dense, source, rank);
      filled += slice.rows * slice.col_bytes;
      by_tensor[source.tensor].push_back(slice);
    }
    if (filled == tensor.size_bytes) return absl::OkStatus();
    return Fail(
        dense.sources.front().tensor,
        absl::StrCat("rank ", rank, " has ", filled, " bytes of it, want ", tensor.size_bytes));
  }

  // What is not carried is on the list of what is left behind. That list may also
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
