#include "cuda/sm80/few_queries/launch.cuh"
#include "cuda/sm80/instances/compiled_class.h"

namespace flash_dmattn::cuda::sm80::few_queries {
template void launch_split<__half, 256, compiled_class>(const Choice&, const Params&, cudaStream_t);
template void launch_step<__half, 256, compiled_class>(const Choice&, const StepParams&,
                                                       cudaStream_t);
}  // namespace flash_dmattn::cuda::sm80::few_queries
