#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/backward/choice.h"
#include "cuda/sm90/backward/params.h"

namespace flash_dmattn::cuda::sm90 {

// Launches the kernels of one dtype and head-dim bucket D, with the kernels before and after them. instances/ has a
// template of their files.
template <class T, int D>
void launch_backward(const BackwardChoice& choice, const BackwardKernelParams& params,
                     cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
