#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// The sums of a unit of the backward: dk, dv and the gradient of the key biases in its slots.
struct SlotSums {
  const BackwardTask& t;
  std::int32_t* slot_of_key;  // [Sk]; only where the unit's slots are not the keys
  std::int64_t first_slot = 0, slots = 0;

  SlotSums(const BackwardTask& task, ScratchAllocator& allocator)
      : t(task), slot_of_key(allocator.take<std::int32_t>(is_gathered() ? t.seqlen_k : 0)) {}

  bool is_gathered() const { return t.slot_keys != nullptr; }

  // Selects the unit whose slots are added to.
  void select(std::int64_t segment, std::int64_t batch, std::int64_t head) {
    const std::int64_t unit = (segment * t.batch + batch) * t.heads_kv + head;
    first_slot = t.slot_begin[unit];
    slots = t.slot_count[unit];
    if (!is_gathered()) return;
    for (std::int64_t i = 0; i < slots; ++i) {
      slot_of_key[t.slot_keys[first_slot + i]] = static_cast<std::int32_t>(i);
    }
  }

  void set_to_zero() const {
    clear(dk(0), slots * t.head_dim_padded);
    clear(dv(0), slots * t.head_dim_padded);
    if (t.dbias_kind == DbiasKind::per_key) {
      clear(t.key_sums + first_slot * t.key_sum_heads, slots * t.key_sum_heads);
    }
  }

  float* dk(std::int64_t slot) const { return t.dk_sums + (first_slot + slot) * t.head_dim_padded; }
  float* dv(std::int64_t slot) const { return t.dv_sums + (first_slot + slot) * t.head_dim_padded; }
  std::int64_t slot_of(std::int64_t key) const { return is_gathered() ? slot_of_key[key] : key; }

  double& key_bias_sum(int head, std::int64_t key) const {
    return t.key_sums[first_slot * t.key_sum_heads + head * slots + slot_of(key)];
  }

  // to_sums[slot of key n] += rows[n]. to_sums: t.dk_sums or t.dv_sums.
  void add_rows(const KeyBlock& block, const Product& rows, int columns, float* to_sums) const {
    for (int n = 0; n < block.count; ++n) {
      float* to = to_sums + (first_slot + slot_of(block.key(n))) * t.head_dim_padded;
      const float* from = rows.data + n * rows.ld;
      for (int d = 0; d < columns; d += lanes) store(to + d, load(to + d) + load(from + d));
    }
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
