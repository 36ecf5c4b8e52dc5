#include "support/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/float_types.h"

namespace flash_dmattn::testing {
namespace {

// The dtype of a floating-point element.
DType dtype_of(Element element) {
  switch (element) {
    case Element::f64: return DType::f64;
    case Element::f32: return DType::f32;
    case Element::bf16: return DType::bf16;
    default: return DType::f16;
  }
}

struct Placement {
  Shape stride{};
  std::int64_t origin = 0;
  std::int64_t span = 0;  // elements of storage
};

Placement place(const Shape& shape, Layout layout, bool broadcast) {
  const bool padded = layout == Layout::padded;
  std::array<int, 4> order{0, 1, 2, 3};  // dimensions from outermost to innermost in memory
  if (layout == Layout::permuted) std::swap(order[1], order[2]);
  Placement place;
  std::int64_t step = 1;
  for (int axis = 3; axis >= 0; --axis) {
    const auto dim = static_cast<std::size_t>(order[static_cast<std::size_t>(axis)]);
    const bool zero = (broadcast && shape[dim] == 1) || (layout == Layout::expanded && dim == 2);
    place.stride[dim] = zero ? 0 : step;
    if (!zero) step = step * shape[dim] + (padded ? 3 + 2 * axis : 0);
    if (layout == Layout::gaps && axis == 3) step = (step + 15) / 16 * 16;
  }
  place.origin = padded ? 1 : 0;
  place.span = place.origin + step;
  if (layout == Layout::reversed) {
    for (std::size_t dim = 0; dim < 3; ++dim) {
      place.origin += place.stride[dim] * std::max<std::int64_t>(shape[dim] - 1, 0);
      place.stride[dim] = -place.stride[dim];
    }
  }
  return place;
}

}  // namespace

std::string text(const Index& i) {
  return "[" + std::to_string(i[0]) + ", " + std::to_string(i[1]) + ", " + std::to_string(i[2]) +
         ", " + std::to_string(i[3]) + "]";
}

std::int64_t bytes_of(Element element) {
  return element == Element::u8 ? 1 : size_of(dtype_of(element));
}

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return Element::f64;
    case DType::f32: return Element::f32;
    case DType::bf16: return Element::bf16;
    default: return Element::f16;
  }
}

double largest(Element element) {
  switch (element) {
    case Element::f16: return 65504;
    case Element::bf16: return 0x1.fep127;
    case Element::f32: return std::numeric_limits<float>::max();
    default: return std::numeric_limits<double>::max();
  }
}

double gradient_limit(DType dtype) {
  return dtype == DType::bf16 ? largest(dtype) / 2 : largest(dtype);
}

Tensor::Tensor(std::string_view name, Element element, const Shape& shape, Layout layout,
               bool broadcast)
    : name_(name),
      element_(element),
      shape_(shape),
      stride_(place(shape, layout, broadcast).stride),
      origin_(place(shape, layout, broadcast).origin),
      buffer_(static_cast<std::size_t>(place(shape, layout, broadcast).span * bytes_of(element)),
              name) {}

std::int64_t Tensor::offset_of(const Index& index) const {
  std::int64_t offset = origin_;
  for (std::size_t dim = 0; dim < 4; ++dim) offset += index[dim] * stride_[dim];
  return offset;
}

double Tensor::get(const Index& index) const {
  const std::int64_t offset = offset_of(index);
  if (element_ == Element::u8) return static_cast<double>(buffer_.data()[offset]);
  return load(buffer_.data(), dtype_of(element_), offset);
}

std::vector<double> Tensor::values() const {
  std::vector<double> result;
  result.reserve(static_cast<std::size_t>(elements()));
  const auto append = [&](const auto& element_at) {
    Index i{};
    for (i[0] = 0; i[0] < shape_[0]; ++i[0]) {
      for (i[1] = 0; i[1] < shape_[1]; ++i[1]) {
        for (i[2] = 0; i[2] < shape_[2]; ++i[2]) {
          const std::int64_t row = offset_of(i);
          for (std::int64_t n = 0; n < shape_[3]; ++n)
            result.push_back(element_at(row + n * stride_[3]));
        }
      }
    }
  };
  const std::byte* data = buffer_.data();
  switch (element_) {
    case Element::f64: append([&](std::int64_t n) { return load(data, DType::f64, n); }); break;
    case Element::f32: append([&](std::int64_t n) { return load(data, DType::f32, n); }); break;
    case Element::bf16: append([&](std::int64_t n) { return load(data, DType::bf16, n); }); break;
    case Element::f16: append([&](std::int64_t n) { return load(data, DType::f16, n); }); break;
    default: append([&](std::int64_t n) { return static_cast<double>(data[n]); });
  }
  return result;
}

double Tensor::get_broadcast(const Index& index) const {
  Index clipped = index;
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (shape_[dim] == 1) clipped[dim] = 0;
  }
  return get(clipped);
}

void Tensor::set(const Index& index, double value) {
  const std::int64_t offset = offset_of(index);
  if (element_ == Element::u8) {
    buffer_.data()[offset] = std::byte{value != 0};
  } else {
    store(buffer_.data(), dtype_of(element_), offset, value);
  }
}

bool Tensor::gaps_intact() const {
  if (static_cast<std::size_t>(elements() * bytes_of(element_)) == buffer_.size()) return true;
  std::vector<bool> is_element(buffer_.size(), false);
  for_each_index(shape_, [&](const Index& index) {
    const auto offset = static_cast<std::ptrdiff_t>(offset_of(index) * bytes_of(element_));
    std::fill_n(is_element.begin() + offset, bytes_of(element_), true);
  });
  for (std::size_t byte = 0; byte < buffer_.size(); ++byte) {
    if (!is_element[byte] && buffer_.data()[byte] != std::byte{0xFF}) return false;
  }
  return true;
}

bool Tensor::same_bits(const Tensor& other) const {
  if (shape_ != other.shape_ || element_ != other.element_) return false;
  bool same = true;
  for_each_index(shape_, [&](const Index& index) {
    const auto size = static_cast<std::size_t>(bytes_of(element_));
    const std::byte* mine = buffer_.data() + offset_of(index) * bytes_of(element_);
    const std::byte* theirs = other.buffer_.data() + other.offset_of(index) * bytes_of(element_);
    same = same && std::memcmp(mine, theirs, size) == 0;
  });
  return same;
}

Tensor4 Tensor::view() { return {buffer_.data() + origin_ * bytes_of(element_), stride_}; }

ConstTensor4 Tensor::const_view() const {
  return {buffer_.data() + origin_ * bytes_of(element_), stride_};
}

}  // namespace flash_dmattn::testing
