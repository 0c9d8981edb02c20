// The parameters of an engine, against which a plan is held before a job is accepted.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "workers/slice_plan.h"

namespace shardprep {

// Whether each rank's own files hold exactly the tensors that `text` lists: JSON of name to
// {"dtype": "BF16", "shape": [16, 8]}, dumped from an engine's state_dict(). Dtypes are named as
// safetensors or torch does; FP4 that is stored as U8 may be called float4_e2m1fn_x2, as which a
// loader views its bytes. Every key and extent counts, since loaders of vLLM's `sharded_state`
// narrow a parameter to a smaller tensor in silence (model_loader/sharded_state_loader.py).
// INVALID_ARGUMENT for any other text, and for differences: the first ten by name, and how many.
absl::Status CheckStateDict(const std::string& text, const SlicePlan& plan);

}  // namespace shardprep
