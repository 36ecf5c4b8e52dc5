#pragma once

#include "cuda/family.h"

// Computes few queries over many keys. The keys are divided among the whole GPU, and the query heads that share a kv
// head are computed together, so that K and V are read once. A cluster combines the parts of a row, or a second kernel
// if there are more parts (split_keys in policy.h).
namespace flash_dmattn::cuda::sm80::few_queries {

// The family's kernels for its member `few_queries`.
std::string decline(const Problem& p);
std::size_t workspace_size(const ForwardArgs& args, const DeviceProperties& device);
void run(const ForwardArgs& args, const DeviceProperties& device, const Execution& execution);
std::string name(const ForwardArgs& args, const DeviceProperties& device);
std::vector<std::string> names(const DeviceProperties& device);

// A decode step, whose keys are the slots of a KV cache. The same kernel inserts the token into a slot.
std::string decline_cache(const KvCacheShape& shape);
std::size_t step_workspace_size(const DecodeStepArgs& args, const DeviceProperties& device);
void run_step(const DecodeStepArgs& args, const DeviceProperties& device,
              const Execution& execution);
std::string step_name(const DecodeStepArgs& args, const DeviceProperties& device);
std::vector<std::string> step_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm80::few_queries
