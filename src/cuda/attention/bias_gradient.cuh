#pragma once

#include "cuda/attention/params.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/warp.cuh"

// Stores dbias, for the main loops and for the postprocess of their fp32 sums.
namespace flash_dmattn::cuda {

// Stores element `index` of a gradient in fp32 or 16 bits.
template <class T>
__device__ inline void store_element(std::byte* to, bool f32, std::int64_t index, float value,
                                     bool saturate) {
  constexpr float limit = 3.4028235e38f;
  if (f32) {
    reinterpret_cast<float*>(to)[index] = saturate ? fmaxf(fminf(value, limit), -limit) : value;
  } else {
    reinterpret_cast<std::uint16_t*>(to)[index] =
        static_cast<std::uint16_t>(pack_gradient<T>(value, 0, saturate));
  }
}

// Stores element `index` of dbias, or adds to it.
template <class T>
__device__ inline void store_gradient(const OutputBroadcast& dbias, std::int64_t index, float value,
                                      bool add, bool saturate) {
  if (!add) {
    store_element<T>(dbias.data, dbias.f32, index, value, saturate);
  } else if (value != 0) {
    atomicAdd(reinterpret_cast<float*>(dbias.data) + index, value);
  }
}

// Stores or adds elements `index` and `index` + 1 of a dbias that is aligned by twos.
template <class T>
__device__ inline void store_gradient_x2(const OutputBroadcast& dbias, std::int64_t index,
                                         float first, float second, bool saturate) {
  if (dbias.f32) {
    store_gradient<T>(dbias, index, first, false, saturate);
    store_gradient<T>(dbias, index + 1, second, false, saturate);
  } else {
    *reinterpret_cast<std::uint32_t*>(dbias.data + 2 * index) =
        pack_gradient<T>(first, second, saturate);
  }
}

// Stores strided elements of dbias from dense fp32 sums of the same shape, or zeros if there are none.
template <class T>
struct BwdPostprocessBias {
  std::int64_t shape[4];
  std::int64_t stride[4];
  std::byte* to;
  const float* sums;  // dense; null: zeros
  bool f32;
  bool saturate;

  long items() const { return static_cast<long>(shape[0] * shape[1] * shape[2] * shape[3]); }

  __device__ void operator()(long item) const { store(item, sums == nullptr ? 0 : sums[item]); }

  __device__ void store(long item, float sum) const {
    std::int64_t rest = item;
    std::int64_t index = 0;
    for (int i = 3; i >= 0; --i) {
      index += rest % shape[i] * stride[i];
      rest /= shape[i];
    }
    store_element<T>(to, f32, index, sum, saturate);
  }
};

// Adds up a bias gradient from sums whose shape is `parts` times larger in each dimension. A warp adds the sums of each element in a
// fixed order.
template <class T>
struct BwdPostprocessSummedBias {
  BwdPostprocessBias<T> whole;
  std::int64_t parts[4];

  long items() const { return whole.items() * 32; }

  __device__ void operator()(long item) const {
    const long element = item / 32;
    const long count = static_cast<long>(parts[0] * parts[1] * parts[2] * parts[3]);
    float sum = 0;
    for (long part = item % 32; part < count; part += 32) sum += whole.sums[index(element, part)];
    for (int step = 16; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    if (item % 32 == 0) whole.store(element, sum);
  }

 private:
  // The index in the sums of part `part` of an element.
  __device__ std::int64_t index(std::int64_t element, std::int64_t part) const {
    std::int64_t index = 0;
    std::int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      index += (element % whole.shape[i] * parts[i] + part % parts[i]) * stride;
      stride *= whole.shape[i] * parts[i];
      element /= whole.shape[i];
      part /= parts[i];
    }
    return index;
  }
};

}  // namespace flash_dmattn::cuda
