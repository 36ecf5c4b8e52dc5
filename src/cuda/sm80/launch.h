#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/sm80/kernel_choice.h"
#include "cuda/sm80/params.h"

// The kernels of one dtype, head-dim bucket D and shared-memory class S. instances/ has a template of the files, one
// for each dtype and bucket. Each file is compiled once for every class, for the GPUs of that class.
namespace flash_dmattn::cuda::sm80 {

template <class T, int D, SharedClass S>
void launch_forward(ForwardLoop loop, const ForwardParams& params, cudaStream_t stream);

template <class T, int D, SharedClass S>
void launch_backward(const BackwardChoice& choice, const QueryMajorParams& params,
                     cudaStream_t stream);

template <class T, int D, SharedClass S>
void launch_backward(const BackwardChoice& choice, const KeyMajorParams& params,
                     cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
