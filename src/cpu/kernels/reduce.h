#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/task.h"

// The last step of the backward. It makes dk and dv of a block of keys from the sums of all units that saw
// them, in the order of the segments.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The slot of `key` in a unit, or -1 if it has none.
inline std::int64_t find_slot(const BackwardTask& t, std::int64_t unit, std::int64_t key) {
  const std::int64_t count = t.slot_count[unit];
  if (t.slot_keys == nullptr) return key < count ? key : -1;
  const std::int32_t* keys = t.slot_keys + t.slot_begin[unit];
  std::int64_t low = 0;
  for (std::int64_t size = count; size > 0;) {
    const std::int64_t half = size / 2;
    const bool right = keys[low + half] < key;
    low += right ? half + 1 : 0;
    size = right ? size - half - 1 : half;
  }
  return low < count && keys[low] == key ? low : -1;
}

template <class In>
void reduce_rows(const BackwardTask& t, std::int64_t batch, std::int64_t head, std::int64_t key,
                 const float* sums, int columns, float scale, const Rows& rows) {
  if (rows.data == nullptr) return;
  alignas(64) float total[max_head_dim] = {};
  for (int segment = 0; segment < t.segments; ++segment) {
    const std::int64_t unit = (segment * t.batch + batch) * t.heads_kv + head;
    const std::int64_t slot = find_slot(t, unit, key);
    if (slot < 0) continue;
    const float* from = sums + (t.slot_begin[unit] + slot) * t.head_dim_padded;
    for (int d = 0; d < columns; d += lanes) {
      store(total + d, load(total + d) + load(from + d));
    }
  }
  auto* to = static_cast<typename In::Storage*>(rows.data) + batch * rows.batch + key * rows.row +
             head * rows.head;
  for (int d = 0; d < columns; d += lanes) {
    Vec value = load(total + d) * splat(scale);
    if (t.saturate) value = saturated(value, In::gradient_limit);
    store_narrowed<In>(to + d, value, columns - d);
  }
}

// Items are blocks of keys of a kv head.
template <class In>
void reduce_item(const BackwardTask& t, std::int64_t item) {
  const std::int64_t blocks = t.key_blocks();
  const std::int64_t head = item / blocks % t.heads_kv;
  const std::int64_t batch = item / blocks / t.heads_kv;
  const std::int64_t begin = item % blocks * block_keys;
  const std::int64_t end = begin + block_keys < t.seqlen_k ? begin + block_keys : t.seqlen_k;
  for (std::int64_t key = begin; key < end; ++key) {
    reduce_rows<In>(t, batch, head, key, t.dk_sums, t.head_dim, t.scale, t.dk);
    reduce_rows<In>(t, batch, head, key, t.dv_sums, t.value_dim, 1.0f, t.dv);
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
