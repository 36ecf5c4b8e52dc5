#pragma once

#include <cuda_runtime.h>

#include "cuda/sm80/few_queries/params.h"

namespace flash_dmattn::cuda::sm80::few_queries {

// The kernels of one dtype, head-dim bucket D and shared-memory class S, like launch_forward (sm80/launch.h).
template <class T, int D, SharedClass S>
void launch_split(const Choice& choice, const Params& params, cudaStream_t stream);

template <class T, int D, SharedClass S>
void launch_step(const Choice& choice, const StepParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80::few_queries
