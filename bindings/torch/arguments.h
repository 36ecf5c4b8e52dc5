#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/flash_dmattn.h"

// The operators' namespace in torch.ops; CMake gives it, Hugging Face's kernel-builder calls it TORCH_EXTENSION_NAME.
#ifndef FLASH_DMATTN_NAMESPACE
#define FLASH_DMATTN_NAMESPACE TORCH_EXTENSION_NAME
#endif

// torch tensors as arguments of the C++ API. The API has only pointers and strides; whether shapes, dtypes
// and devices agree with one another is checked here.
namespace flash_dmattn::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

std::string dtype_text(ScalarType type);
std::string shape_text(Shape shape);
inline std::string shape_text(const Tensor& tensor) { return shape_text(tensor.sizes()); }

// The dtype of `tensor`; throws InvalidArgument where the library has no such type.
DType dtype_of(const Tensor& tensor, std::string_view argument);

// Throws InvalidArgument unless the tensor has this shape and dtype, and the device of another one.
void expect(const Tensor& tensor, std::string_view argument, Shape shape, ScalarType type,
            const Tensor& other, std::string_view other_argument);

// Throws InvalidArgument unless both tensors are on one device.
void expect_on_device_of(const Tensor& tensor, std::string_view argument, const Tensor& other,
                         std::string_view other_argument);

// `tensor` itself, or a copy where its last dimension is not dense.
Tensor with_dense_rows(const Tensor& tensor);

// `tensor` itself, or a copy where it is not contiguous. torch's own looks its operator up by name, whatever the tensor:
// 0.3 µs.
Tensor as_contiguous(const Tensor& tensor);

// Pointer and strides of a 4-d tensor with dense rows; of a 3-d one, [B, H, Sk], as [B, H, 1, Sk].
ConstTensor4 view4(const Tensor& tensor);
Tensor4 mutable_view4(const Tensor& tensor);

// A mask or bias [B, H, Sq, Sk], or [B, H, Sk] for every query: dimensions of size 1 get stride 0. With `merge_expanded`,
// a dimension of stride 0 (torch's expand) counts as size 1, so that an expanded key mask stays one.
struct Broadcast {
  Tensor tensor;  // keeps the memory that `view` points to
  BroadcastShape shape;
  ConstTensor4 view;
};
Broadcast broadcast_argument(const Tensor& tensor, std::string_view argument, bool merge_expanded);

// An uninitialised tensor of up to 4 dimensions on the device of `like`.
Tensor allocate(Shape shape, ScalarType type, const Tensor& like);

// Uninitialised memory that lives as long as the returned tensor.
Tensor allocate_bytes(std::size_t bytes, const Tensor& like);

// The memory of a tensor of bytes.
std::span<std::byte> bytes_of(const Tensor& tensor);

// Runs a call in a workspace of its own, on the device of `like`.
template <class Args>
void run(const CheckedCall<Args>& call, const Tensor& like) {
  if (call.workspace_size() == 0) return call.run({});
  call.run(bytes_of(allocate_bytes(call.workspace_size(), like)));
}

// Gives `execution` a workspace that lives as long as the returned tensor. Returns nothing if `bytes` is 0.
[[nodiscard]] OptionalTensor give_workspace(Execution& execution, std::size_t bytes,
                                            const Tensor& like);

}  // namespace flash_dmattn::binding
