#include "cuda/sm80/instances/compiled_class.h"
#include "cuda/sm80/launch_backward.cuh"

namespace flash_dmattn::cuda::sm80 {
template void launch_backward<__nv_bfloat16, 256, compiled_class>(const BackwardChoice&,
                                                                  const QueryMajorParams&,
                                                                  cudaStream_t);
template void launch_backward<__nv_bfloat16, 256, compiled_class>(const BackwardChoice&,
                                                                  const KeyMajorParams&,
                                                                  cudaStream_t);
}  // namespace flash_dmattn::cuda::sm80
