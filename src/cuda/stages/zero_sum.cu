#include "cuda/stages/zero_sum.h"

#include <cfloat>

#include "cuda/primitives/launch.h"
#include "cuda/primitives/warp.cuh"

namespace flash_dmattn::cuda {
namespace {

// A block computes a row. Sums are in double, which the largest floats cannot overflow.
struct ZeroSumKernel {
  static constexpr int threads = 1024;
  static constexpr int min_blocks = 1;
  static constexpr int warps = threads / warp_size;

  struct Params {
    const float* gradient;
    float* out;
    std::int64_t columns;
  };

  struct SharedStorage {
    double sum[warps];
    double count[warps];
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const float* const row = p.gradient + blockIdx.x * p.columns;
    double sum = 0;
    double count = 0;
    for (std::int64_t i = threadIdx.x; i < p.columns; i += threads) {
      sum += row[i];
      count += row[i] != 0 ? 1 : 0;
    }
    sum = warp_sum(sum);
    count = warp_sum(count);
    if (lane_id() == 0) {
      shared.sum[warp_id()] = sum;
      shared.count[warp_id()] = count;
    }
    __syncthreads();
    const double mean = warp_sum(shared.sum[lane_id()]) / warp_sum(shared.count[lane_id()]);
    float* const out = p.out + blockIdx.x * p.columns;
    for (std::int64_t i = threadIdx.x; i < p.columns; i += threads) {
      out[i] = row[i] != 0 ? saturated(row[i] - mean) : 0.f;
    }
  }

 private:
  static_assert(warps == warp_size, "a lane for each warp's sums");

  // Limits x to the range of float; a NaN stays NaN.
  static __device__ float saturated(double x) {
    return static_cast<float>(x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x);
  }
};

}  // namespace

void make_zero_sum(const float* gradient, float* out, std::int64_t rows, std::int64_t columns,
                   const Execution& execution) {
  if (columns == 0) return;
  launch<ZeroSumKernel>(rows, {gradient, out, columns},
                        static_cast<cudaStream_t>(execution.stream));
}

}  // namespace flash_dmattn::cuda
