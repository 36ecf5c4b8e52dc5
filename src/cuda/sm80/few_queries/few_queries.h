#pragma once

#include "cuda/family.h"

// Computes few queries over many keys. The keys are divided among the whole GPU, and the query heads that share a kv
// head are computed together, so that K and V are read once. A cluster combines the parts of a row, or a second kernel
// if there are more parts (split_keys in choice.h).
namespace flash_dmattn::cuda::sm80::few_queries {

// The family's kernels for its member `few_queries`.
std::string decline(const Problem& p);
void plan_split(const ForwardArgs& args, const Execution& execution, Plan<ForwardArgs>& plan);
std::vector<std::string> split_names(const DeviceProperties& device);

// A decode step, whose keys are the slots of a KV cache. The same kernel inserts the token into a slot.
std::string decline_cache(const KvCacheShape& shape);
void plan_step(const DecodeStepArgs& args, const Execution& execution, Plan<DecodeStepArgs>& plan);
std::vector<std::string> step_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm80::few_queries
