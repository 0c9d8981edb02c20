// Which source bytes the ranks of several targets need of one region, in an order in which each
// byte is read once for all of them. Pure.
//
// Targets cut an expert's tensor at different rows: for TP4 a rank takes what two ranks of TP8
// share, under expert parallelism one rank takes all. The source is walked tensor by tensor, expert
// by expert, piece by piece; a piece is a run of rows of the expert that is held in memory, as a
// span, while every rank takes its share of it. Each rank meets its shares in the order of its own
// output, so that its parts stay sequential streams. Pieces are cut where that allows it:
// - at a rank's first row, or whole blocks of 32 output rows behind it;
// - where all ranks want gate rows before up rows, first all pieces of gate, then those of up;
//   where some want them alternating, pieces hold the rows of both, and for a rank that wants gate
//   first the piece cannot end inside of its rows.
// Experts follow in the order of the ranks' slots. Where orders contradict each other, or a rank
// holds two copies of an expert, it is read again. Explicit maps bring that about, and copies of
// experts beside a target that takes all of them in order: the copies of the first come last.
#pragma once

#include <cstdint>
#include <vector>

#include "workers/slice_plan.h"
#include "workers/source_spans.h"

namespace shardprep {

// A rank, which may be kReplicatedRank, of one target, and what of the region it still has to make.
struct JointRank {
  const SlicePlan* plan = nullptr;
  int32_t rank = 0;
  std::vector<bool> wanted;  // by tensor, over the parts of the region in order
};

// What one rank takes of a piece.
struct JointShare {
  int32_t tensor = 0;  // counted as JointRank::wanted
  int64_t slot = 0;    // of a routed region; else the source, see DenseTensor
  // Output rows of the expert's matrix, multiples of 32 but for the last; else rows of the source.
  int64_t begin = 0;
  int64_t end = 0;
  int64_t span = 0;  // index into JointSpans::spans; rises
  bool ends_slot = false;
  bool ends_tensor = false;
};

struct JointSpans {
  std::vector<std::vector<JointShare>> shares;  // by rank
  std::vector<SourceSpan> spans;
};

// `region` is an index into the regions of every plan, which all cut the same source tensors. Spans
// are at most `span_bytes` large except where a piece cannot be cut.
JointSpans PlanJointSpans(int32_t region, const std::vector<JointRank>& ranks, int64_t span_bytes);

}  // namespace shardprep
