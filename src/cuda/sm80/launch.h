#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/params.h"
#include "cuda/policy.h"
#include "cuda/sm80/params.h"

// The kernels of one dtype and head-dim bucket D; each is instantiated in a file of instances/.
namespace flash_dmattn::cuda::sm80 {

template <class T, int D>
void launch_forward(const ForwardParams& params, SharedClass shared, cudaStream_t stream);

template <class T, int D>
void launch_backward(const QueryMajorParams& params, SharedClass shared, cudaStream_t stream);

template <class T, int D>
void launch_backward(const KeyMajorParams& params, SharedClass shared, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
