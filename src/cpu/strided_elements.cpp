#include "cpu/strided_elements.h"

#include "float_types.h"

namespace flash_dmattn::cpu {

void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape) {
  if (tensor.data == nullptr) return;
  const auto& stride = tensor.stride;
  for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
        for (std::int64_t i3 = 0; i3 < shape[3]; ++i3) {
          const std::int64_t offset =
              i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
          store(tensor.data, dtype, offset, 0);
        }
      }
    }
  }
}

}  // namespace flash_dmattn::cpu
