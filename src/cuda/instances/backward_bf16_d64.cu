#include "cuda/sm80/launch_backward.cuh"

namespace flash_dmattn::cuda::sm80 {
template void launch_backward<__nv_bfloat16, 64>(const QueryMajorParams&, SharedClass,
                                                 cudaStream_t);
template void launch_backward<__nv_bfloat16, 64>(const KeyMajorParams&, SharedClass, cudaStream_t);
}  // namespace flash_dmattn::cuda::sm80
