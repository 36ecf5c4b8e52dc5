#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/sm90/policy.h"
#include "flash_dmattn/types.h"

// The parts that the choices of both directions share (forward/choice.h, backward/choice.h).
namespace flash_dmattn::cuda::sm90 {

// The kernel of the family that runs, as a value. A call chooses it once and dispatches on it; printed, it is the
// kernel's name.
template <class Variant>
struct KernelChoice {
  DType dtype = DType::bf16;
  int head_dim = 0;   // the bucket
  int value_dim = 0;  // the columns of V, and of dout, that the kernel multiplies
  Variant variant;
};

// The part of a name for a kernel with a dense mask or bias.
std::string_view name_of(DenseAccess dense);

// The name of a kernel, such as "sm90 forward bf16 d128 gather". `variant` is the part for its variant.
std::string kernel_name(std::string_view direction, DType dtype, int head_dim, int value_dim,
                        std::string_view variant, bool overlaps);

template <class Variant>
std::string kernel_name(std::string_view direction, const KernelChoice<Variant>& c,
                        std::string_view variant) {
  return kernel_name(direction, c.dtype, c.head_dim, c.value_dim, variant, c.variant.overlaps);
}

// Whether the kernels with overlap run. They do unless there are others and FLASH_DMATTN_CUDA_NO_OVERLAP selects these.
bool overlaps(DType dtype, int head_dim);

// The choices with a kernel, in the order of their dtypes, head-dim buckets and variants.
template <class Variant, std::size_t count>
std::vector<KernelChoice<Variant>> all_choices(const std::array<Variant, count>& variants) {
  std::vector<KernelChoice<Variant>> result;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : head_dims) {
      for (const Variant& variant : variants) {
        if (!has_kernel(head_dim, variant)) continue;
        const Variant chosen = with_overlap(variant, overlaps(dtype, head_dim));
        result.push_back({dtype, head_dim, head_dim, chosen});
        const int value_dim = smallest_value_dim(head_dim, variant);
        if (value_dim != head_dim) result.push_back({dtype, head_dim, value_dim, chosen});
      }
    }
  }
  return result;
}

}  // namespace flash_dmattn::cuda::sm90
