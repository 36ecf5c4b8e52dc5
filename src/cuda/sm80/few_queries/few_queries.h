#pragma once

#include "cuda/family.h"

// Few queries over many keys: the keys are split over the whole GPU, and the query heads that share a kv head are
// computed together, so that K and V are read once. The parts of a row are combined within a cluster, or by a second
// kernel where there are more of them (split_keys in policy.h).
namespace flash_dmattn::cuda::sm80::few_queries {

// The family's kernels in its seat `few_queries`.
std::string decline(const Problem& p);
std::size_t workspace_size(const ForwardArgs& args, const DeviceProperties& device);
void run(const ForwardArgs& args, const DeviceProperties& device, const Execution& execution);
std::string name(const ForwardArgs& args, const DeviceProperties& device);
std::vector<std::string> names(const DeviceProperties& device);

// A decode step: the keys are the slots of a KV cache, and the token is inserted into one of them by the same kernel.
std::string decline_cache(const KvCacheShape& shape);
std::size_t step_workspace_size(const DecodeStepArgs& args, const DeviceProperties& device);
void run_step(const DecodeStepArgs& args, const DeviceProperties& device,
              const Execution& execution);
std::string step_name(const DecodeStepArgs& args, const DeviceProperties& device);
std::vector<std::string> step_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm80::few_queries
