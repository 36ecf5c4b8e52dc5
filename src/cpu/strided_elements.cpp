#include "cpu/strided_elements.h"

#include <cmath>

#include "float_types.h"

namespace flash_dmattn::cpu {
namespace {

// Calls body(place, offset) for each element in row-major order, until it returns false.
template <class Body>
void for_each_element(const std::array<std::int64_t, 4>& shape,
                      const std::array<std::int64_t, 4>& stride, const Body& body) {
  std::int64_t place = 0;
  for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
        for (std::int64_t i3 = 0; i3 < shape[3]; ++i3) {
          const std::int64_t offset =
              i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
          if (!body(place++, offset)) return;
        }
      }
    }
  }
}

}  // namespace

void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape) {
  if (tensor.data == nullptr) return;
  for_each_element(shape, tensor.stride, [&](std::int64_t, std::int64_t offset) {
    store(tensor.data, dtype, offset, 0);
    return true;
  });
}

NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution&) {
  NonFiniteElement found;
  for_each_element(shape, tensor.stride, [&](std::int64_t place, std::int64_t offset) {
    const double value = load(tensor.data, dtype, offset);
    if (std::isfinite(value) || (minus_inf && value < 0)) return true;  // a NaN is not below 0
    found = {place, value};
    return false;
  });
  return found;
}

}  // namespace flash_dmattn::cpu
