// A shuffler that shows whether calls are under way at once.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/shuffle.h"

namespace shardprep {

// Its first calls wait for each other, for ever where they are not all made.
class MeetingShuffler : public Shuffler {
 public:
  explicit MeetingShuffler(int calls) : left_(calls), meet_(calls) {}

  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t out_begin,
                       int64_t out_end, uint8_t* out) override {
    if (left_-- > 0) meet_.arrive_and_wait();
    return host_->Shuffle(job, views, out_begin, out_end, out);
  }
  std::string name() const override { return host_->name(); }

 private:
  const std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
  std::atomic<int> left_;
  std::barrier<> meet_;
};

}  // namespace shardprep
