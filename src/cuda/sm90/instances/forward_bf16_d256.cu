#include "cuda/sm90/launch_forward.cuh"

namespace flash_dmattn::cuda::sm90 {
template void launch_forward<__nv_bfloat16, 256>(const ForwardChoice&, const ForwardParams&,
                                                 const ForwardWorkspace&, cudaStream_t);
}  // namespace flash_dmattn::cuda::sm90
