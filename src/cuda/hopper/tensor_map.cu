#include "cuda/hopper/tensor_map.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/primitives/launch.h"

namespace flash_dmattn::cuda {
namespace {

constexpr std::int64_t max_stride = std::int64_t{1} << 40;

// A dimension of one element may have any stride, but the TMA unit accepts only some.
std::uint64_t stride_of(std::int64_t bytes, int size) {
  return size > 1 ? static_cast<std::uint64_t>(bytes) : 16;
}

bool is_readable(std::int64_t bytes, int size) {
  return size <= 1 || (bytes > 0 && bytes % 16 == 0 && bytes < max_stride);
}

// Gets the driver's function, as the library does not link to the driver.
auto encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("the NVIDIA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

bool has_tensor_map(const InputRows& tensor, int seqlen, int heads, int batch) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         is_readable(tensor.row, seqlen) && is_readable(tensor.head, heads) &&
         is_readable(tensor.batch, batch);
}

CUtensorMap make_tensor_map(const InputRows& tensor, int head_dim, int seqlen, int heads, int batch,
                            int box_rows, bool bf16, int box_heads) {
  static const auto encode = encode_function();
  const cuuint64_t size[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(seqlen),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t stride[3] = {stride_of(tensor.row, seqlen), stride_of(tensor.head, heads),
                                stride_of(tensor.batch, batch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<std::byte*>(tensor.data), size, stride, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled: error " + std::to_string(result));
  }
  return map;
}

}  // namespace flash_dmattn::cuda
