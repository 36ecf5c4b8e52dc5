#include "cuda/sm80/launch_forward.cuh"

namespace flash_dmattn::cuda::sm80 {
template void launch_forward<__half, 64>(const ForwardParams&, SharedClass, cudaStream_t);
}  // namespace flash_dmattn::cuda::sm80
