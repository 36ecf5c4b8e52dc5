#include "cuda/sm90/launch_backward.cuh"

namespace flash_dmattn::cuda::sm90 {
template void launch_backward<__nv_bfloat16, 64>(const BackwardChoice&, const BackwardKernelParams&,
                                                 cudaStream_t);
}  // namespace flash_dmattn::cuda::sm90
