#include "cuda/sm80/instances/compiled_class.h"
#include "cuda/sm80/launch_forward.cuh"

namespace flash_dmattn::cuda::sm80 {
template void launch_forward<__half, 128, compiled_class>(ForwardLoop, const ForwardParams&,
                                                          cudaStream_t);
}  // namespace flash_dmattn::cuda::sm80
