#pragma once

#include <cuda_runtime.h>

#include "cuda/primitives/device_workspace.h"
#include "cuda/sm90/forward/choice.h"
#include "cuda/sm90/forward/params.h"

// Launches the kernels of one dtype and head-dim bucket D. instances/ has a template of their files.
namespace flash_dmattn::cuda::sm90 {

// The arrays of a forward in the caller's workspace. Their sizes follow from shapes and strides. A short call, whose
// blocks have one work tile each, has at most key info, and none if it computes it, which saves launches.
struct ForwardWorkspace {
  KeyInfo info;
  int* next_work = nullptr;
  std::uint32_t* needs_fix = nullptr;
  std::uint32_t* has_large_rows = nullptr;  // null for a call with one run

  ForwardWorkspace() = default;
  ForwardWorkspace(const ForwardChoice& choice, const ForwardParams& params, int multiprocessors,
                   WorkspaceAllocator& workspace);
};

template <class T, int D>
void launch_forward(const ForwardChoice& choice, const ForwardParams& params,
                    const ForwardWorkspace& workspace, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
