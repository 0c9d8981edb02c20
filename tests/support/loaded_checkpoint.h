// A test checkpoint on disk, read and recognised, to be planned in several ways.
#pragma once

#include <memory>
#include <utility>

#include "kernels/status_macros.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/checkpoint.h"
#include "workers/family.h"
#include "workers/open_store.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Aborts the test binary when the checkpoint cannot be made, read or planned.
class LoadedCheckpoint {
 public:
  explicit LoadedCheckpoint(const CheckpointSpec& spec) {
    SP_CHECK(WriteTestCheckpoint(directory_.path(), spec).ok());
    store_ = Require(OpenStore(directory_.path(), {}));
    checkpoint_ = std::make_shared<const Checkpoint>(Require(ReadCheckpoint(*store_)));
    moe_ = std::make_shared<const MoeCheckpoint>(Require(RecognizeFamily(*checkpoint_)));
  }

  SlicePlan Plan(const SlicePlanInputs& inputs) const {
    return Require(SlicePlan::Make(checkpoint_, moe_, inputs));
  }

  ObjectStore& store() { return *store_; }

 private:
  template <typename T>
  static T Require(absl::StatusOr<T> result) {
    SP_CHECK(result.ok());
    return *std::move(result);
  }

  TempDir directory_;
  std::unique_ptr<ObjectStore> store_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::shared_ptr<const MoeCheckpoint> moe_;
};

}  // namespace shardprep
