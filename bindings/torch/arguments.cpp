#include "arguments.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>

namespace flash_dmattn::binding {
namespace {

std::string device_text(const Tensor& tensor) {
  const torch::stable::Device device = tensor.device();
  if (tensor.is_cpu()) return "cpu";
  return (device.is_cuda() ? "cuda:" : "another device, ") + std::to_string(device.index());
}

std::array<std::int64_t, 4> strides_of(const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  return {tensor.stride(0), tensor.stride(1), last == 2 ? 0 : tensor.stride(2),
          // The stride over a single element has no meaning, and in torch may have any value.
          tensor.size(last) <= 1 ? 1 : tensor.stride(last)};
}

}  // namespace

// The package's errors in Python write shapes like this: "shape (2, 3)", "shape (2,)".
std::string shape_text(Shape shape) {
  std::string text = "shape (";
  for (std::size_t d = 0; d < shape.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "torch.float32";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    default: return torch::headeronly::toString(type);
  }
}

DType dtype_of(const Tensor& tensor, std::string_view argument) {
  switch (const ScalarType type = tensor.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Double: return DType::f64;
    default:
      throw InvalidArgument(argument, dtype_text(type), "float32, bfloat16, float16 or float64");
  }
}

void expect(const Tensor& tensor, std::string_view argument, Shape shape, ScalarType type,
            const Tensor& other, std::string_view other_argument) {
  if (!std::ranges::equal(tensor.sizes(), shape)) {
    throw InvalidArgument(argument, shape_text(tensor), shape_text(shape));
  }
  if (tensor.scalar_type() != type) {
    throw InvalidArgument(argument, dtype_text(tensor.scalar_type()), dtype_text(type));
  }
  expect_on_device_of(tensor, argument, other, other_argument);
}

void expect_on_device_of(const Tensor& tensor, std::string_view argument, const Tensor& other,
                         std::string_view other_argument) {
  if (tensor.device() == other.device()) return;
  throw InvalidArgument(argument, device_text(tensor),
                        "the device of " + std::string(other_argument) + ", " + device_text(other));
}

Tensor with_dense_rows(const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  if (tensor.size(last) <= 1 || tensor.stride(last) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

ConstTensor4 view4(const Tensor& tensor) { return {tensor.const_data_ptr(), strides_of(tensor)}; }

Tensor4 mutable_view4(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), strides_of(tensor)};
}

Broadcast broadcast_argument(const Tensor& tensor, std::string_view argument, bool merge_expanded) {
  const std::int64_t dims = tensor.dim();
  if (dims != 3 && dims != 4) {
    throw InvalidArgument(argument, shape_text(tensor), "3 dimensions, or 4 with queries");
  }
  const auto expanded = [&](std::int64_t d) { return merge_expanded && tensor.stride(d) == 0; };
  Broadcast result{expanded(dims - 1) ? tensor : with_dense_rows(tensor), {1, 1, 1, 1}, {}};
  std::array<std::int64_t, 4> strides{};
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    if (tensor.size(dim) == 1 || (tensor.size(dim) > 0 && expanded(dim))) continue;
    const auto d = static_cast<std::size_t>(dims == 3 && dim == 2 ? 3 : dim);  // no queries
    result.shape[d] = tensor.size(dim);
    strides[d] = result.tensor.stride(dim);
  }
  result.view = {result.tensor.const_data_ptr(), strides};
  return result;
}

namespace {

// torch's allocator returns large tensors to the system, so that every call gets fresh memory. Faulting
// in 64 MiB takes 33 ms in pages of 4 KiB and 7 in pages of 2 MiB (Zen 4, a virtual
// machine); in small pages that was 5 % of a backward.
void ask_for_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t huge = std::uintptr_t{2} << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t first = (address + huge - 1) / huge * huge;
  const std::uintptr_t last = (address + bytes) / huge * huge;
  // The call does nothing on a system without huge pages.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// The strides of a contiguous tensor of up to 4 dimensions.
std::array<std::int64_t, 4> contiguous_strides(Shape shape) {
  std::array<std::int64_t, 4> strides{};
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0; stride *= std::max<std::int64_t>(shape[d], 1)) {
    strides.at(d) = stride;
  }
  return strides;
}

// torch::stable::new_empty without its look-up of the operator by name, 0.3 µs. empty_strided takes a trip through the
// dispatcher less, but on the CPU it leaves out the NaN that torch.utils.deterministic.fill_uninitialized_memory asks for.
Tensor new_empty(const Tensor& like, Shape shape, ScalarType type) {
  std::int32_t dtype = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type));
  std::int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto dims = static_cast<std::int64_t>(shape.size());
  AtenTensorHandle made = nullptr;
  if (like.is_cpu()) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_aten_new_empty(like.get(), shape.data(), dims, &dtype, /*layout=*/nullptr,
                                  &device, like.get_device_index(), /*pin_memory=*/nullptr, &made));
  } else {
    const std::array<std::int64_t, 4> strides = contiguous_strides(shape);
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, shape.data(), strides.data(), dtype,
                                                    device, like.get_device_index(), &made));
  }
  return Tensor(made);
}

}  // namespace

Tensor allocate(Shape shape, ScalarType type, const Tensor& like) {
  const Tensor tensor = new_empty(like, shape, type);
  if (tensor.is_cpu()) {
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    ask_for_huge_pages(tensor.mutable_data_ptr(), bytes);
  }
  return tensor;
}

Tensor allocate_bytes(std::size_t bytes, const Tensor& like) {
  return allocate({static_cast<std::int64_t>(bytes)}, ScalarType::Byte, like);
}

std::span<std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

OptionalTensor give_workspace(Execution& execution, std::size_t bytes, const Tensor& like) {
  if (bytes == 0) return {};
  Tensor storage = allocate_bytes(bytes, like);
  execution.workspace = storage.mutable_data_ptr();
  execution.workspace_bytes = bytes;
  return storage;
}

}  // namespace flash_dmattn::binding
