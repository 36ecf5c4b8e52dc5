#pragma once

#include <cstddef>
#include <cstdint>

// Views of tensors in device memory.
namespace flash_dmattn::cuda {

// The rows of a [B, S, H, D] tensor of 16-bit elements. `Byte` is const for rows that are only read. Strides are in
// bytes.
template <class Byte>
struct RowsView {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;
  bool aligned = false;  // every row begins at a multiple of 16 bytes, and `row` fits into:
  int row_step = 0;      // `row`, so that an address is one multiply-add
};
using InputRows = RowsView<const std::byte>;
using OutputRows = RowsView<std::byte>;

// A mask or a bias, ({B|1}, {Hq|Hkv|1}, {Sq|1}, {Sk|1}). Strides are in elements, 0 for a broadcast dimension. The
// head's stride is split in two, one of which is 0, so that kernels need no branch on the kind of head.
template <class Byte>
struct BroadcastView {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head_q = 0;
  std::int64_t head_kv = 0;
  std::int64_t query = 0;
  std::int64_t key = 0;
  bool dense = false;        // has a query dimension
  bool aligned_x2 = false;   // elements 2 i and 2 i + 1 of every row are in one aligned word
  bool aligned_x4 = false;   // so are elements 4 i ... 4 i + 3; `query` fits into 31 bits
  bool aligned_16B = false;  // so are the elements of every 16 bytes (16-bit elements or bytes)
  bool f32 = false;          // a bias has fp32 instead of 16-bit elements

  // The first element of a head.
  constexpr std::int64_t begin(int batch_index, int head, int kv_head) const {
    return batch_index * batch + head * head_q + kv_head * head_kv;
  }
};
using Broadcast = BroadcastView<const std::byte>;
using OutputBroadcast = BroadcastView<std::byte>;

}  // namespace flash_dmattn::cuda
