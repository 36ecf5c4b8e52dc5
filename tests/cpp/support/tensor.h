#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flash_dmattn/types.h"
#include "support/buffer.h"

namespace flash_dmattn::testing {

using Shape = std::array<std::int64_t, 4>;
using Index = std::array<std::int64_t, 4>;

std::string text(const Index& index);

enum class Element : std::uint8_t { f32, bf16, f16, f64, u8 };
Element element_of(DType dtype);
std::int64_t bytes_of(Element element);
double largest(Element element);  // the largest finite number
inline double largest(DType dtype) { return largest(element_of(dtype)); }
// The limit of gradients under NonFinite::saturate (attention.h).
double gradient_limit(DType dtype);

// The layout of a tensor's elements in memory. The gaps between elements stay poisoned.
enum class Layout : std::uint8_t {
  contiguous,
  permuted,  // the two middle dimensions swapped: [B, H, S, D] memory under a [B, S, H, D] view
  padded,    // gaps after every row, matrix and batch, and a start off any vector alignment
  gaps,      // after every row, up to a multiple of 16 elements
  reversed,  // the first three dimensions run backwards
  expanded,  // stride 0 over dimension 2, so all heads share memory (inputs only)
};

// Calls visit(index) for every element in row-major order.
template <class Visit>
void for_each_index(const Shape& shape, const Visit& visit) {
  Index i{};
  for (i[0] = 0; i[0] < shape[0]; ++i[0]) {
    for (i[1] = 0; i[1] < shape[1]; ++i[1]) {
      for (i[2] = 0; i[2] < shape[2]; ++i[2]) {
        for (i[3] = 0; i[3] < shape[3]; ++i[3]) visit(i);
      }
    }
  }
}

class Tensor {
 public:
  // Dimensions of size 1 get stride 0 when `broadcast`, as masks and biases need.
  explicit Tensor(std::string_view name = "tensor", Element element = Element::f32,
                  const Shape& shape = {}, Layout layout = Layout::contiguous,
                  bool broadcast = false);

  const Shape& shape() const { return shape_; }
  const Shape& stride() const { return stride_; }
  Element element() const { return element_; }
  std::string_view name() const { return name_; }
  std::int64_t elements() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }

  double get(const Index& index) const;
  // All elements in row-major order; much faster than get() of each.
  std::vector<double> values() const;
  // Treats indices of size-1 dimensions as 0.
  double get_broadcast(const Index& index) const;
  void set(const Index& index, double value);
  // Sets every element to value(index).
  template <class Value>
  void fill(const Value& value) {
    for_each_index(shape_, [&](const Index& index) { set(index, value(index)); });
  }
  // Calls visit(index, element) for every element in row-major order.
  template <class Visit>
  void for_each(const Visit& visit) const {
    const std::vector<double> elements = values();
    auto element = elements.begin();
    for_each_index(shape_, [&](const Index& index) { visit(index, *element++); });
  }

  void poison() { buffer_.poison(); }
  // True if every byte between the elements is still poison.
  bool gaps_intact() const;
  // True if all elements are equal bit for bit; layouts may differ.
  bool same_bits(const Tensor& other) const;

  Tensor4 view();
  ConstTensor4 const_view() const;
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(buffer_.data());
  }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(buffer_.data());
  }

 private:
  std::int64_t offset_of(const Index& index) const;  // in elements

  std::string_view name_;
  Element element_;
  Shape shape_;
  Shape stride_{};
  std::int64_t origin_ = 0;  // offset of element {0, 0, 0, 0}
  GuardedBuffer buffer_;
};

// The elements of a tensor, to fill another one with.
inline auto elements_of(const Tensor& tensor) {
  return [&tensor](const Index& index) { return tensor.get(index); };
}

}  // namespace flash_dmattn::testing
