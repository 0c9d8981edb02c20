// How a region is prepared for several targets.
//
// 1. PlanJointSpans() says in which order the source is read and what each rank takes of each span.
//    A SpanReader reads the spans ahead, whatever the source.
// 2. Each rank is a stream of shares in the order of its output. A thread takes the stream whose
//    next share lies in the oldest span, works off what it has in that span and puts it back, so
//    any number of threads is busy however unevenly targets cut the source. No two threads work on
//    one stream at a time.
// 3. A share is shuffled into the rank's write buffer, block by block, as region_prep.cc does it.
// 4. Parts begin and end where the rank's own plan says so. The last parts of all ranks end
//    together: then the waiting, for requests or until files and names are durable, is shared.
#include "workers/joint_prep.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"
#include "workers/joint_spans.h"
#include "workers/journal.h"
#include "workers/parallel.h"
#include "workers/rank_rows.h"
#include "workers/rank_stream.h"
#include "workers/source_files.h"
#include "workers/span_reader.h"

namespace shardprep {
namespace {

// A rank of the set that has parts to make.
struct Member {
  const JointTask::Target* target = nullptr;
  int32_t rank = 0;
  std::vector<const PartPlan*> parts;  // those that are not recorded, in order
  JointRank wants;
};

// Where a member's shares belong: its parts as runs of tensors, counted over all parts.
struct PartRange {
  const PartPlan* part = nullptr;
  int32_t last_tensor = 0;
};

class JointRegion {
 public:
  JointRegion(const JointTask& task, RegionProgress& progress, std::vector<Member> members,
              absl::Span<uint8_t> memory, const LeaseShape& shape, const MemoryNeed& need)
      : task_(task),
        progress_(progress),
        files_(members.front().wants.plan->checkpoint(), *task.source, progress),
        plan_(PlanJointSpans(task.region, WantsOf(members), JointSpanBytes(need))) {
    const auto buffer_bytes = static_cast<size_t>(need.WriteBuffer(shape.writes));
    streams_.reserve(members.size());
    for (size_t m = 0; m < members.size(); ++m) {
      const Member& member = members[m];
      const auto buffer = memory.subspan(m * buffer_bytes, buffer_bytes);
      streams_.push_back(std::make_unique<Stream>(
          Stream{.out = RankStream({member.target->plan, task.region, member.rank,
                                    member.target->destination, &task.gate},
                                   progress, buffer, shape.writes),
                 .target = member.target,
                 .parts = PartRangesOf(member),
                 .shares = &plan_.shares[m]}));
    }
    const auto read = [this](const SourceRange& range, absl::Span<uint8_t> out) {
      return files_.Read(range.file, range.offset, out);
    };
    const auto ring =
        memory.subspan(members.size() * buffer_bytes, static_cast<size_t>(shape.read_ahead));
    reader_.emplace(plan_.spans, ring, static_cast<int>(streams_.size()),
                    need.preferred_read > 0 ? kSourceReaders : kJointFileReaders, read, task.stop);
    // Whoever comes in later must not hold up the spans of the others.
    for (size_t s = 0; s < streams_.size(); ++s) {
      reader_->Pass(static_cast<int>(s), streams_[s]->share().span);
    }
  }

  absl::Status Run(int32_t threads) {
    std::vector<std::thread> pool;
    for (int32_t t = 1; t < threads; ++t) pool.emplace_back([this] { Work(); });
    Work();
    for (std::thread& thread : pool) thread.join();
    SP_RETURN_IF_ERROR(first_error());
    SP_RETURN_IF_ERROR(files_.CheckUnchanged());
    return EndLastParts();
  }

 private:
  struct Stream {
    RankStream out;
    const JointTask::Target* target = nullptr;
    std::vector<PartRange> parts;
    const std::vector<JointShare>* shares = nullptr;
    // The rest belongs to whoever has the stream.
    size_t next_part = 0;
    size_t next_share = 0;
    bool part_begun = false;
    bool busy = false;  // guarded by mu_

    bool done() const { return next_share == shares->size(); }
    const JointShare& share() const { return (*shares)[next_share]; }
  };

  static std::vector<JointRank> WantsOf(const std::vector<Member>& members) {
    std::vector<JointRank> wants;
    wants.reserve(members.size());
    for (const Member& member : members) wants.push_back(member.wants);
    return wants;
  }

  std::vector<PartRange> PartRangesOf(const Member& member) const {
    const SlicePlan& plan = *member.wants.plan;
    const Region& region = plan.regions()[static_cast<size_t>(task_.region)];
    std::vector<PartRange> ranges;
    int32_t tensors = 0;
    for (const PartPlan& part : plan.PartsOf(region, member.rank)) {
      tensors += static_cast<int32_t>(part.tensors.size());
      if (std::find(member.parts.begin(), member.parts.end(), &part) == member.parts.end())
        continue;
      ranges.push_back({&part, tensors - 1});
    }
    return ranges;
  }

  void Work() {
    while (const std::optional<size_t> number = TakeStream()) {
      const absl::Status status = WorkOn(static_cast<int>(*number));
      if (!status.ok()) Fail(status);
      absl::MutexLock lock(&mu_);
      streams_[*number]->busy = false;
    }
  }

  // The stream that is furthest behind of those that nobody works on; none when all are done or one
  // has failed.
  std::optional<size_t> TakeStream() {
    std::optional<size_t> oldest;
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (!error_.ok()) return true;
      oldest.reset();
      bool waiting = false;  // for a stream that may have more to do
      for (size_t s = 0; s < streams_.size(); ++s) {
        const Stream& stream = *streams_[s];
        if (stream.busy) {
          waiting = true;
        } else if (!stream.done() &&
                   (!oldest.has_value() || stream.share().span < streams_[*oldest]->share().span)) {
          oldest = s;
        }
      }
      return oldest.has_value() || !waiting;
    };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&ready));
    if (!error_.ok() || !oldest.has_value()) return std::nullopt;
    streams_[*oldest]->busy = true;
    return oldest;
  }

  // The shares that the stream has in its next span.
  absl::Status WorkOn(int number) {
    Stream& stream = *streams_[static_cast<size_t>(number)];
    const int64_t span = stream.share().span;
    SP_RETURN_IF_ERROR(BeginPart(stream));
    SP_ASSIGN_OR_RETURN(const SpanBytes bytes, reader_->MoveTo(number, span));
    while (!stream.done() && stream.share().span == span) {
      SP_RETURN_IF_ERROR(BeginPart(stream));
      const JointShare& share = stream.share();
      SP_RETURN_IF_ERROR(Take(share, bytes, stream));
      ++stream.next_share;
      if (share.ends_slot) stream.out.EndExpert();
      if (share.ends_tensor) SP_RETURN_IF_ERROR(EndTensor(share.tensor, stream));
    }
    if (stream.done()) {
      reader_->Finish(number);
    } else {
      reader_->Pass(number, stream.share().span);
    }
    return absl::OkStatus();
  }

  absl::Status BeginPart(Stream& stream) {
    if (stream.part_begun) return absl::OkStatus();
    stream.part_begun = true;
    return stream.out.BeginPart(*stream.parts.at(stream.next_part).part);
  }

  const Region& RegionOf(const Stream& stream) const {
    return stream.out.slices().regions()[static_cast<size_t>(task_.region)];
  }

  absl::Status Take(const JointShare& share, const SpanBytes& bytes, Stream& stream) {
    if (RegionOf(stream).kind == Region::Kind::kRouted) return TakeRouted(share, bytes, stream);
    return TakeDense(share, bytes, stream);
  }

  absl::Status TakeRouted(const JointShare& share, const SpanBytes& bytes, Stream& stream) {
    const FusedTensor& fused = FusedOf(share.tensor, stream);
    const int64_t block_rows = BlockShapeOf(fused).rows;
    for (int64_t begin = share.begin; begin < share.end; begin += block_rows) {
      SP_RETURN_IF_ERROR(CheckStop());
      const int64_t end = std::min(begin + block_rows, share.end);
      SP_RETURN_IF_ERROR(FuseSpanRows(RegionOf(stream), fused, share.slot, begin, end, bytes,
                                      *task_.shuffler, progress_, stream.out));
    }
    return absl::OkStatus();
  }

  absl::Status TakeDense(const JointShare& share, const SpanBytes& bytes, Stream& stream) {
    const DenseTensor& dense = DenseOf(share.tensor, stream);
    const DenseSource& source = dense.sources[static_cast<size_t>(share.slot)];
    const TensorInfo info = stream.out.slices().checkpoint().tensors().at(source.tensor);
    const int64_t block_rows = DenseBlockRows(source);
    for (int64_t begin = share.begin; begin < share.end; begin += block_rows) {
      SP_RETURN_IF_ERROR(CheckStop());
      const int64_t end = std::min(begin + block_rows, share.end);
      const uint8_t* rows = bytes.At(info.file, info.offset + begin * source.row_bytes,
                                     (end - begin) * source.row_bytes);
      SP_RETURN_IF_ERROR(AppendDenseRows(dense, source, begin, end, rows, stream.out));
    }
    return absl::OkStatus();
  }

  static const FusedTensor& FusedOf(int32_t tensor, const Stream& stream) {
    return stream.out.slices().FusedTensorsOf(stream.out.rank())[static_cast<size_t>(tensor)];
  }

  const DenseTensor& DenseOf(int32_t tensor, const Stream& stream) const {
    const SlicePlan& plan = stream.out.slices();
    const PartPlan& part = plan.PartsOf(RegionOf(stream), stream.out.rank()).front();
    return plan
        .dense_tensors()[static_cast<size_t>(part.tensors[static_cast<size_t>(tensor)].source)];
  }

  absl::Status EndTensor(int32_t tensor, Stream& stream) {
    if (RegionOf(stream).kind == Region::Kind::kRouted) {
      const FusedTensor& fused = FusedOf(tensor, stream);
      SP_RETURN_IF_ERROR(stream.out.AppendFill(fused.tail_bytes, fused.fill));
    } else {
      SP_RETURN_IF_ERROR(AppendDenseTail(DenseOf(tensor, stream), stream.out));
    }
    stream.out.EndTensor();
    // The last part is ended with those of the others.
    if (tensor != stream.parts[stream.next_part].last_tensor || stream.done()) {
      return absl::OkStatus();
    }
    SP_RETURN_IF_ERROR(files_.CheckUnchanged());
    ++stream.next_part;
    stream.part_begun = false;
    StageTimer timer(progress_, Stage::kWrite);
    return stream.out.EndPart();
  }

  absl::Status EndLastParts() {
    StageTimer timer(progress_, Stage::kWrite);
    std::vector<absl::Status> ended(streams_.size());
    ForEachAtOnce(static_cast<int64_t>(streams_.size()), kRequestsAtOnce, [&](int64_t s) {
      Stream& stream = *streams_[static_cast<size_t>(s)];
      absl::Status& status = ended[static_cast<size_t>(s)];
      status = CheckStop();
      if (status.ok()) status = stream.out.EndPart();
      if (!status.ok()) {
        Fail(status);
      } else if (stream.target->rank_done) {
        stream.target->rank_done(stream.out.rank());
      }
    });
    return first_error();
  }

  absl::Status CheckStop() {
    SP_RETURN_IF_ERROR(first_error());
    if (task_.stop != nullptr && *task_.stop) return absl::CancelledError("stopped");
    return absl::OkStatus();
  }

  // The first error counts; the others are its consequences.
  void Fail(const absl::Status& status) {
    {
      absl::MutexLock lock(&mu_);
      error_.Update(status);
    }
    failed_ = true;
    reader_->Fail(absl::CancelledError("another thread of the region failed"));
  }

  absl::Status first_error() {
    if (!failed_) return absl::OkStatus();
    absl::MutexLock lock(&mu_);
    return error_;
  }

  const JointTask& task_;
  RegionProgress& progress_;
  SourceFiles files_;
  const JointSpans plan_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::atomic<bool> failed_{false};
  absl::Mutex mu_;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  std::optional<SpanReader> reader_;  // last: its threads use the rest
};

// The ranks of a target that have parts to make; those that have none are done.
absl::Status AddMembers(const JointTask& task, const JointTask::Target& target,
                        std::vector<Member>& members) {
  const SlicePlan& plan = target.plan->slices;
  const Region& region = plan.regions()[static_cast<size_t>(task.region)];
  std::vector<absl::StatusOr<Member>> found(target.ranks.size(), Member());
  const int at_once = target.destination->PreferredReadBytes() > 0 ? kRequestsAtOnce : 1;
  ForEachAtOnce(static_cast<int64_t>(target.ranks.size()), at_once, [&](int64_t r) {
    const int32_t rank = target.ranks[static_cast<size_t>(r)];
    Member member{.target = &target, .rank = rank, .parts = {}, .wants = {&plan, rank, {}}};
    for (const PartPlan& part : plan.PartsOf(region, rank)) {
      const absl::StatusOr<bool> recorded =
          IsRecorded(*target.plan, {task.region, rank, &part}, *target.destination);
      if (!recorded.ok()) {
        found[static_cast<size_t>(r)] = recorded.status();
        return;
      }
      if (!*recorded) member.parts.push_back(&part);
      member.wants.wanted.insert(member.wants.wanted.end(), part.tensors.size(), !*recorded);
    }
    found[static_cast<size_t>(r)] = std::move(member);
  });
  for (absl::StatusOr<Member>& member : found) {
    SP_RETURN_IF_ERROR(member.status());
    if (!member->parts.empty()) {
      members.push_back(*std::move(member));
    } else if (target.rank_done) {
      target.rank_done(member->rank);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PrepareJointly(const JointTask& task, RegionProgress& progress) {
  std::vector<Member> members;
  for (const JointTask::Target& target : task.targets) {
    SP_RETURN_IF_ERROR(AddMembers(task, target, members));
  }
  if (members.empty()) return absl::OkStatus();
  const MemoryNeed& need = *task.need;
  const auto ranks = static_cast<int32_t>(members.size());
  SP_ASSIGN_OR_RETURN(
      const LeaseShape shape,
      FitLease(need, static_cast<int64_t>(task.memory.size()), ranks, task.threads));
  if (shape.ranks < ranks) {
    return absl::InvalidArgumentError(absl::StrCat("memory of ", task.memory.size(),
                                                   " bytes is too small for ", ranks,
                                                   " ranks, want ", need.Total(ranks, 1)));
  }
  JointRegion region(task, progress, std::move(members), task.memory, shape, need);
  return region.Run(shape.threads);
}

}  // namespace shardprep
