#include "cuda/sm90/kernel_choice.h"

#include <cstdlib>

#include "cuda/family.h"
#include "cuda/sm90/compiled.h"

namespace flash_dmattn::cuda::sm90 {

std::string_view name_of(DenseAccess dense) {
  return dense == DenseAccess::tiles ? "dense" : "dense_elementwise";
}

std::string kernel_name(std::string_view direction, DType dtype, int head_dim, int value_dim,
                        std::string_view variant, bool overlaps) {
  std::string name = cuda::kernel_name("sm90", direction, dtype, head_dim);
  if (value_dim != head_dim) name.append("v").append(std::to_string(value_dim));
  return name.append(" ").append(variant).append(overlaps ? "" : " no_overlap");
}

bool overlaps(DType dtype, int head_dim) {
  if (!has_no_overlap(dtype, head_dim)) return true;
  const char* const chosen = std::getenv("FLASH_DMATTN_CUDA_NO_OVERLAP");
  return chosen == nullptr || *chosen == '\0';
}

}  // namespace flash_dmattn::cuda::sm90
