#include "cuda/stages/check_finite.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <limits>
#include <memory>

#include "cuda/primitives/launch.h"

namespace flash_dmattn::cuda {
namespace {

struct Elements {
  const void* data;
  std::int64_t shape[4];
  std::int64_t stride[4];
  DType dtype;

  __device__ double operator[](std::int64_t index) const {
    std::int64_t at = 0;
    for (int d = 3; d >= 0; --d) {
      at += index % shape[d] * stride[d];
      index /= shape[d];
    }
    switch (dtype) {
      case DType::f64: return static_cast<const double*>(data)[at];
      case DType::f32: return static_cast<const float*>(data)[at];
      case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
      default: return __half2float(static_cast<const __half*>(data)[at]);
    }
  }
};

struct FindFirst {
  Elements elements;
  bool minus_inf;
  unsigned long long* first;

  __device__ void operator()(long i) const {
    const double value = elements[i];
    if (isfinite(value) || (minus_inf && value < 0)) return;  // a NaN is not below 0
    atomicMin(first, static_cast<unsigned long long>(i));
  }
};

struct ReadElement {
  Elements elements;
  unsigned long long* first;  // receives the bits of that element

  __device__ void operator()(long) const {
    *first = static_cast<unsigned long long>(
        __double_as_longlong(elements[static_cast<std::int64_t>(*first)]));
  }
};

}  // namespace

NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution& execution) {
  const std::int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
  if (count == 0) return {};
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  refuse_capture(stream, "FLASH_DMATTN_CHECK_FINITE waits for the device");

  unsigned long long* word = nullptr;
  check(cudaMalloc(&word, sizeof(*word)), "cudaMalloc");
  const std::unique_ptr<unsigned long long, cudaError_t (*)(void*)> owned(word, cudaFree);
  Elements elements{tensor.data, {}, {}, dtype};
  for (std::size_t d = 0; d < 4; ++d) {
    elements.shape[d] = shape[d];
    elements.stride[d] = tensor.stride[d];
  }
  const auto read = [&] {
    unsigned long long value = 0;
    check(cudaMemcpyAsync(&value, word, sizeof(value), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "the finite check");
    return value;
  };
  check(cudaMemsetAsync(word, 0xFF, sizeof(*word), stream), "cudaMemsetAsync");
  for_each(count, FindFirst{elements, minus_inf, word}, stream);
  const unsigned long long first = read();
  if (first == std::numeric_limits<unsigned long long>::max()) return {};
  for_each(1, ReadElement{elements, word}, stream);
  const unsigned long long bits = read();
  return {static_cast<std::int64_t>(first), std::bit_cast<double>(bits)};
}

}  // namespace flash_dmattn::cuda
