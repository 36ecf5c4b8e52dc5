#pragma once

#include <cstdint>

#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

// k and v of a block of keys in the layouts that products need: in the scratch of a worker, which packs
// the keys that its tile sees, or in the workspace, packed once for all tiles of a head. Tails of the
// block are zeros.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The classes of k and v of a block.
struct KeyNumbers {
  Numbers k, v;
};

template <class In, class Element>
struct ForwardKeys {
  Panels k;  // transposed: b of s = q k^T
  Panels v;  // b of out += p v, without inf and NaN
  KeyNumbers* numbers;

  ForwardKeys(const Task& t, ScratchAllocator& allocator)
      : k(Shape<Element>(t).take_transposed(allocator)),
        v(Shape<Element>(t, t.value_dim).take_key_panels(allocator)),
        numbers(allocator.take<KeyNumbers>(1)) {}

  template <class RowAt>
  void pack(const Task& t, const RowAt& k_row, const RowAt& v_row, int count) const {
    numbers->k = numbers_of(pack_transposed<In, Element>(k_row, count, t.head_dim, k));
    numbers->v =
        pack_finite_panels<In, Element>(v_row, count, padded_depth<Element>(count), t.value_dim, v);
  }
};

template <class In, class Element>
struct BackwardKeys {
  Panels k_transposed;  // b of s = q k^T; not of few queries
  Panels k_panels;      // b of dq += ds k, without inf and NaN
  Panels v_transposed;  // b of dp = dout v^T
  KeyNumbers* numbers;

  BackwardKeys(const Task& t, ScratchAllocator& allocator)
      : k_transposed(Shape<Element>(t).take_transposed(allocator)),
        k_panels(Shape<Element>(t).take_key_panels(allocator)),
        v_transposed(Shape<Element>(t, t.value_dim).take_transposed(allocator)),
        numbers(allocator.take<KeyNumbers>(1)) {}

  template <class RowAt>
  void pack(const Task& t, const RowAt& k_row, const RowAt& v_row, int count) const {
    if (!t.few_queries) pack_transposed<In, Element>(k_row, count, t.head_dim, k_transposed);
    numbers->k = pack_finite_panels<In, Element>(k_row, count, padded_depth<Element>(count),
                                                 t.head_dim, k_panels);
    numbers->v = numbers_of(pack_transposed<In, Element>(v_row, count, t.value_dim, v_transposed));
  }
};

// Bytes of a block.
template <class Keys>
std::int64_t key_block_bytes(const Task& t) {
  ScratchAllocator allocator(nullptr);
  Keys(t, allocator);
  return allocator.used();
}

// The block of t.packed_keys that begins with key `start` of a kv head.
template <class Keys>
Keys shared_keys(const Task& t, std::int64_t batch, std::int64_t head, std::int64_t start) {
  const std::int64_t index = (batch * t.heads_kv + head) * t.key_blocks() + start / block_keys;
  ScratchAllocator allocator(t.packed_keys + index * t.packed_block_bytes);
  return Keys(t, allocator);
}

// Fills t.packed_keys; items are blocks of keys of a kv head.
template <class Keys, class In>
void pack_key_block(const Task& t, std::int64_t item) {
  const std::int64_t blocks = t.key_blocks();
  const std::int64_t head = item / blocks % t.heads_kv;
  const std::int64_t batch = item / blocks / t.heads_kv;
  KeyBlock block{.start = item % blocks * block_keys};
  const std::int64_t left = t.seqlen_k - block.start;
  block.count = left < block_keys ? static_cast<int>(left) : block_keys;
  shared_keys<Keys>(t, batch, head, block.start)
      .pack(t, key_rows<In>(t.k, batch, head, block), key_rows<In>(t.v, batch, head, block),
            block.count);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
