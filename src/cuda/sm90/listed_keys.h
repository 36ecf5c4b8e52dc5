#pragma once

#include <cstdint>

namespace flash_dmattn::cuda::sm90 {

// A key list as the keys of a smaller problem, in which position i is the i-th key of the list. Without a list,
// positions are keys.
struct ListedKeys {
  const std::int32_t* keys = nullptr;
  const std::int32_t* count = nullptr;
  std::int64_t stride = 0;  // stride between rows of `keys`
  // The number of rows from one batch element or kv head to the next.
  std::int64_t row_batch = 0;
  std::int64_t row_head = 0;

  __device__ std::int64_t row(int batch, int kv_head) const {
    return batch * row_batch + kv_head * row_head;
  }

  // The key at a position, or -1 past the last.
  __device__ int key(int batch, int kv_head, int position) const {
    if (keys == nullptr) return position;
    const std::int64_t r = row(batch, kv_head);
    return position < count[r] ? keys[r * stride + position] : -1;
  }

  // The position of a key, or -1 if it is not listed.
  __device__ int position(int batch, int kv_head, int key) const {
    if (keys == nullptr) return key;
    const std::int64_t r = row(batch, kv_head);
    const std::int32_t* const list = keys + r * stride;
    int begin = 0;
    int end = count[r];
    while (begin < end) {
      const int middle = begin + (end - begin) / 2;
      if (list[middle] < key) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin < count[r] && list[begin] == key ? begin : -1;
  }
};

}  // namespace flash_dmattn::cuda::sm90
