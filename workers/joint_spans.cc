#include "workers/joint_spans.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/types/span.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"

namespace shardprep {
namespace {

constexpr int64_t kRowMultiple = 32;  // whole blocks of every layout

// Rank `rank` (index into the set) has the expert in this slot.
struct Holder {
  int32_t rank = 0;
  int64_t slot = 0;
};

// An expert of the source and the ranks that take it while it is in memory.
struct ExpertVisit {
  int64_t expert = 0;
  std::vector<Holder> holders;
};

// The order in which experts are visited. Every rank holds some experts, by slot, and takes them in
// that order. An expert that no rank would want again later goes first; of several, that of the
// rank that is furthest behind, so that the groups of expert parallelism advance together.
class ExpertOrder {
 public:
  // `experts` by rank and slot; empty for ranks that want nothing.
  explicit ExpertOrder(std::vector<std::vector<int32_t>> experts)
      : experts_(std::move(experts)), next_(experts_.size(), 0) {
    for (const auto& slots : experts_) {
      for (const int32_t expert : slots) ++wanted_[expert];
    }
  }

  std::vector<ExpertVisit> Take() {
    std::vector<ExpertVisit> visits;
    while (std::optional<int32_t> expert = Next()) {
      ExpertVisit visit{.expert = *expert, .holders = {}};
      for (size_t r = 0; r < experts_.size(); ++r) {
        if (next_[r] == experts_[r].size() || experts_[r][next_[r]] != *expert) continue;
        visit.holders.push_back({static_cast<int32_t>(r), static_cast<int64_t>(next_[r]++)});
        --wanted_[*expert];
      }
      visits.push_back(std::move(visit));
    }
    return visits;
  }

 private:
  struct Candidate {
    int64_t ready = 0;      // ranks whose next slot has the expert
    double progress = 1.0;  // of the one that is furthest behind
  };

  std::optional<int32_t> Next() const {
    std::map<int32_t, Candidate> candidates;
    for (size_t r = 0; r < experts_.size(); ++r) {
      if (next_[r] == experts_[r].size()) continue;
      Candidate& candidate = candidates[experts_[r][next_[r]]];
      ++candidate.ready;
      candidate.progress =
          std::min(candidate.progress,
                   static_cast<double>(next_[r]) / static_cast<double>(experts_[r].size()));
    }
    std::optional<int32_t> best;
    const auto key = [&](int32_t expert) {
      const Candidate& candidate = candidates.at(expert);
      return std::make_tuple(candidate.ready != wanted_.at(expert), candidate.progress, expert);
    };
    for (const auto& [expert, candidate] : candidates) {
      if (!best.has_value() || key(expert) < key(*best)) best = expert;
    }
    return best;
  }

  const std::vector<std::vector<int32_t>> experts_;
  std::vector<size_t> next_;           // slot, by rank
  std::map<int32_t, int64_t> wanted_;  // slots that have not been taken, by expert
};

// A rank that takes an expert, and where its rows lie among those of the expert.
struct Taker {
  Holder holder;
  const FusedTensor* tensor = nullptr;
  std::vector<Slice> slices;
  int64_t begin = 0;  // rows [begin, begin + rows) of one half of the source tensor
  int64_t rows = 0;
  bool alternates = false;  // gate and up rows alternate in its output

  int64_t end() const { return begin + rows; }
};

enum class Pass { kAll, kGate, kUp };

class JointPlanner {
 public:
  JointPlanner(int32_t region, const std::vector<JointRank>& ranks, int64_t span_bytes)
      : region_(region), ranks_(ranks), span_bytes_(span_bytes), filler_(span_bytes) {
    result_.shares.resize(ranks.size());
  }

  JointSpans Plan() {
    const auto tensors = static_cast<int32_t>(ranks_.front().wanted.size());
    for (int32_t t = 0; t < tensors; ++t) {
      if (RegionOf(ranks_.front()).kind == Region::Kind::kRouted) {
        PlanFused(t);
      } else {
        PlanDense(t);
      }
      for (std::vector<JointShare>& shares : result_.shares) {
        if (!shares.empty() && shares.back().tensor == t) shares.back().ends_tensor = true;
      }
    }
    result_.spans = filler_.Take();
    return std::move(result_);
  }

 private:
  const Region& RegionOf(const JointRank& rank) const {
    return rank.plan->regions()[static_cast<size_t>(region_)];
  }

  void PlanFused(int32_t tensor) {
    std::vector<std::vector<int32_t>> experts(ranks_.size());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const JointRank& rank = ranks_[r];
      if (!rank.wanted[static_cast<size_t>(tensor)]) continue;
      experts[r] = rank.plan->expert_slots().LogicalOf(rank.plan->GroupOf(rank.rank));
    }
    for (const ExpertVisit& visit : ExpertOrder(std::move(experts)).Take()) {
      PlanExpert(tensor, TakersOf(tensor, visit));
    }
  }

  std::vector<Taker> TakersOf(int32_t tensor, const ExpertVisit& visit) const {
    std::vector<Taker> takers;
    takers.reserve(visit.holders.size());
    for (const Holder& holder : visit.holders) {
      const JointRank& rank = ranks_[static_cast<size_t>(holder.rank)];
      Taker taker;
      taker.holder = holder;
      taker.tensor = &rank.plan->FusedTensorsOf(rank.rank)[static_cast<size_t>(tensor)];
      taker.slices = rank.plan->SlicesOf(RegionOf(rank), *taker.tensor, rank.rank, holder.slot);
      taker.alternates = AlternatesHalves(*taker.tensor);
      if (!taker.slices.empty()) {
        taker.begin = taker.slices.front().row_begin / taker.slices.front().row_step;
        taker.rows = taker.slices.front().rows;
      }
      takers.push_back(std::move(taker));
    }
    return takers;
  }

  void PlanExpert(int32_t tensor, const std::vector<Taker>& takers) {
    int64_t begin = INT64_MAX, end = 0;
    bool halves_apart = true;
    for (const Taker& taker : takers) {
      if (taker.rows == 0) continue;
      begin = std::min(begin, taker.begin);
      end = std::max(end, taker.end());
      halves_apart = halves_apart && taker.tensor->halves == 2 && taker.tensor->row_step == 1 &&
                     !taker.alternates;
    }
    if (begin < end && halves_apart) {
      Cut(tensor, takers, Pass::kGate, {begin, end});
      Cut(tensor, takers, Pass::kUp, {begin, end});
    } else if (begin < end) {
      Cut(tensor, takers, Pass::kAll, {begin, end});
    }
    // Ranks that have nothing of the source in it, as of a bias that another adds.
    for (const Taker& taker : takers) {
      if (taker.rows == 0) AddShares(tensor, {&taker, 1}, Pass::kAll, {0, 0});
    }
  }

  // Adds rows [range.begin, range.end) of the expert's source rows as one piece, or cut in two.
  void Cut(int32_t tensor, const std::vector<Taker>& takers, Pass pass, const RowRange& range) {
    const std::vector<SourceRange> bytes = RangesOf(takers, pass, range);
    const std::optional<int64_t> cut =
        TotalBytes(bytes) > span_bytes_ ? CutBetween(takers, pass, range) : std::nullopt;
    if (!cut.has_value()) return AddShares(tensor, takers, pass, range);
    Cut(tensor, takers, pass, {range.begin, *cut});
    Cut(tensor, takers, pass, {*cut, range.end});
  }

  // The row nearest to the middle at which the piece can be cut.
  static std::optional<int64_t> CutBetween(absl::Span<const Taker> takers, Pass pass,
                                           const RowRange& range) {
    const int64_t middle = (range.begin + range.end) / 2;
    const int64_t farthest = (range.end - range.begin) / 2 + 1;
    for (int64_t distance = 0; distance <= farthest; ++distance) {
      for (const int64_t row : {middle - distance, middle + distance}) {
        if (row > range.begin && row < range.end && MayCut(takers, pass, row)) return row;
      }
    }
    return std::nullopt;
  }

  static bool MayCut(absl::Span<const Taker> takers, Pass pass, int64_t row) {
    return std::all_of(takers.begin(), takers.end(), [&](const Taker& taker) {
      if (row <= taker.begin || row >= taker.end()) return true;
      const int64_t own = row - taker.begin;
      if (pass != Pass::kAll || taker.tensor->halves == 1) return own % kRowMultiple == 0;
      return taker.alternates && own % (kRowMultiple / 2) == 0;
    });
  }

  // The output rows that a rank makes of source rows, and its pads where they are its last.
  static RowRange OutputRows(const Taker& taker, Pass pass, const RowRange& range) {
    const int64_t all = taker.tensor->job.rows, half = all / 2;
    if (taker.rows == 0) return {0, all};
    const int64_t begin = std::max(range.begin, taker.begin) - taker.begin;
    const int64_t end = std::min(range.end, taker.end()) - taker.begin;
    if (begin >= end) return {0, 0};
    const bool last = end == taker.rows;
    if (pass == Pass::kGate) return {begin, last ? half : end};
    if (pass == Pass::kUp) return {half + begin, last ? all : half + end};
    if (taker.tensor->halves == 1) return {begin, last ? all : end};
    if (taker.alternates) return {2 * begin, last ? all : 2 * end};
    SP_CHECK(begin == 0 && last);  // MayCut()
    return {0, all};
  }

  std::vector<SourceRange> RangesOf(absl::Span<const Taker> takers, Pass pass,
                                    const RowRange& range) const {
    std::vector<SourceRange> ranges;
    for (const Taker& taker : takers) {
      if (taker.rows == 0) continue;
      const RowRange rows = OutputRows(taker, pass, range);
      if (rows.begin == rows.end) continue;
      for (const RowRange& logical : LogicalRanges(*taker.tensor, rows.begin, rows.end)) {
        AddRanges(taker, logical, ranges);
      }
    }
    return JoinRanges(std::move(ranges));
  }

  void AddRanges(const Taker& taker, const RowRange& logical,
                 std::vector<SourceRange>& ranges) const {
    const SlicePlan& plan = *ranks_[static_cast<size_t>(taker.holder.rank)].plan;
    for (const SlicePiece& piece : PiecesIn(taker.slices, logical)) {
      const Slice& slice = taker.slices[static_cast<size_t>(piece.slice)];
      const TensorInfo info = plan.checkpoint().tensors().at(slice.tensor);
      ranges.push_back({info.file, info.offset + piece.source_row * slice.source_row_bytes,
                        piece.source_rows * slice.source_row_bytes, 0});
    }
  }

  void AddShares(int32_t tensor, absl::Span<const Taker> takers, Pass pass, const RowRange& range) {
    const int64_t span = filler_.Add(RangesOf(takers, pass, range));
    for (const Taker& taker : takers) {
      // Those without rows come on their own.
      if (taker.rows == 0 && range.begin < range.end) continue;
      const RowRange rows = OutputRows(taker, pass, range);
      if (rows.begin == rows.end) continue;
      result_.shares[static_cast<size_t>(taker.holder.rank)].push_back(
          {.tensor = tensor,
           .slot = taker.holder.slot,
           .begin = rows.begin,
           .end = rows.end,
           .span = span,
           .ends_slot = rows.end == taker.tensor->job.rows,
           .ends_tensor = false});
    }
  }

  const DenseTensor& DenseOf(const JointRank& rank, int32_t tensor) const {
    const PartPlan& part = rank.plan->PartsOf(RegionOf(rank), rank.rank).front();
    return rank.plan
        ->dense_tensors()[static_cast<size_t>(part.tensors[static_cast<size_t>(tensor)].source)];
  }

  void PlanDense(int32_t tensor) {
    const size_t sources = DenseOf(ranks_.front(), tensor).sources.size();
    for (size_t s = 0; s < sources; ++s) PlanSource(tensor, s);
    // A tensor of no bytes is one of every rank all the same.
    for (size_t r = 0; r < ranks_.size(); ++r) {
      std::vector<JointShare>& shares = result_.shares[r];
      if (!ranks_[r].wanted[static_cast<size_t>(tensor)]) continue;
      if (!shares.empty() && shares.back().tensor == tensor) continue;
      shares.push_back({.tensor = tensor,
                        .slot = 0,
                        .begin = 0,
                        .end = 0,
                        .span = filler_.Add({}),
                        .ends_slot = true,
                        .ends_tensor = false});
    }
  }

  // The rows that a rank has of one source of a dense tensor.
  RowRange DenseRows(const JointRank& rank, int32_t tensor, size_t source) const {
    const DenseTensor& dense = DenseOf(rank, tensor);
    const Slice slice = rank.plan->DenseSliceOf(dense, dense.sources[source], rank.rank);
    return {slice.row_begin, slice.row_begin + slice.rows};
  }

  void PlanSource(int32_t tensor, size_t number) {
    const DenseSource& source = DenseOf(ranks_.front(), tensor).sources[number];
    const int64_t most = std::max<int64_t>(1, span_bytes_ / source.row_bytes);
    for (const RowRange& needed : NeededRows(tensor, number)) {
      const int64_t rows = needed.end - needed.begin;
      const int64_t pieces = (rows + most - 1) / most;
      const int64_t piece = (rows + pieces - 1) / pieces;
      for (int64_t begin = needed.begin; begin < needed.end; begin += piece) {
        AddDensePiece(tensor, number, {begin, std::min(begin + piece, needed.end)});
      }
    }
    for (std::vector<JointShare>& shares : result_.shares) {
      if (shares.empty()) continue;
      JointShare& last = shares.back();
      if (last.tensor == tensor && last.slot == static_cast<int64_t>(number)) last.ends_slot = true;
    }
  }

  // In order, apart from each other.
  std::vector<RowRange> NeededRows(int32_t tensor, size_t number) const {
    std::vector<RowRange> needed;
    for (const JointRank& rank : ranks_) {
      if (!rank.wanted[static_cast<size_t>(tensor)]) continue;
      const RowRange rows = DenseRows(rank, tensor, number);
      if (rows.begin < rows.end) needed.push_back(rows);
    }
    return JoinRows(std::move(needed));
  }

  void AddDensePiece(int32_t tensor, size_t number, const RowRange& piece) {
    const JointRank& first = ranks_.front();
    const DenseSource& source = DenseOf(first, tensor).sources[number];
    const TensorInfo info = first.plan->checkpoint().tensors().at(source.tensor);
    const int64_t span = filler_.Add({{info.file, info.offset + piece.begin * source.row_bytes,
                                       (piece.end - piece.begin) * source.row_bytes, 0}});
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].wanted[static_cast<size_t>(tensor)]) continue;
      const RowRange rows = DenseRows(ranks_[r], tensor, number);
      if (rows.begin >= piece.end || piece.begin >= rows.end) continue;
      result_.shares[r].push_back({.tensor = tensor,
                                   .slot = static_cast<int64_t>(number),
                                   .begin = piece.begin,
                                   .end = piece.end,
                                   .span = span,
                                   .ends_slot = false,
                                   .ends_tensor = false});
    }
  }

  const int32_t region_;
  const std::vector<JointRank>& ranks_;
  const int64_t span_bytes_;
  SpanFiller filler_;
  JointSpans result_;
};

}  // namespace

JointSpans PlanJointSpans(int32_t region, const std::vector<JointRank>& ranks, int64_t span_bytes) {
  return JointPlanner(region, ranks, span_bytes).Plan();
}

}  // namespace shardprep
