#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/primitives/device_workspace.h"
#include "cuda/sm90/backward/params.h"
#include "cuda/sm90/backward/policy.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/plan.h"

namespace flash_dmattn::cuda::sm90 {

// The kernel of a backward that runs, as a value. A call chooses it once and dispatches on it; printed, it is the
// kernel's name.
struct BackwardChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;   // the bucket
  int value_dim = 0;  // the columns of V and dout that the kernel multiplies
  BackwardVariant variant;
};

// The name of a choice, such as "sm90 backward bf16 d128 block".
std::string name(const BackwardChoice& choice);

BackwardChoice choose_backward(const BackwardArgs& args, bool has_slots);

// Launches the kernels of one dtype and head-dim bucket D, with the kernels before and after them. instances/ has a
// template of their files.
template <class T, int D>
void launch_backward(const BackwardChoice& choice, const BackwardKernelParams& params,
                     cudaStream_t stream);

// The functions of the backward for the family's table (cuda/family.h).
std::string decline_backward(const Problem& problem);
std::vector<std::string> backward_names(const DeviceProperties& device);

}  // namespace flash_dmattn::cuda::sm90
