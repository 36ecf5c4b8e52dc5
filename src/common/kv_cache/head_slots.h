#pragma once

#include <cstdint>

#include "common/kv_cache/step.h"
#include "flash_dmattn/kv_cache.h"

// Where the slots of the heads of a KV cache are in a row, for the CPU and for GPUs.
namespace flash_dmattn {

// The slots of a head: `places` for keys, `window` of them for selected ones, and those for pending tokens.
struct HeadSlots {
  std::int64_t first;  // slot 0 in a row of scores and positions
  // In k and v, whose stride of heads is 0 if heads have different numbers of slots.
  std::int64_t rows_before;
  std::int32_t places;
  std::int32_t window;
};

inline HeadSlots head_slots(const KvCacheShape& shape, std::int64_t head) {
  const std::int64_t first = shape.first_slot(head);
  return {first, shape.has_equal_heads() ? 0 : first, static_cast<std::int32_t>(shape.places(head)),
          static_cast<std::int32_t>(shape.window(head))};
}

// The head h with first[h] <= number < first[h + 1], where `first` ascends.
template <class Int>
constexpr int head_at(const Int* first, int heads, int number) {
  int low = 0;
  int high = heads;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first[middle] <= number ? low : high) = middle;
  }
  return low;
}

// A GPU supports up to this number of heads with different numbers of slots. Kernel parameters hold these numbers, so that
// no copy to the device is needed.
inline constexpr int most_unequal_heads = 128;

// The rule of a cache and the slots of its heads, as a parameter of kernels.
struct CacheRule {
  HeadRule common{};     // of head 0; other heads have another window at most
  int slots = 0;         // of head 0
  bool by_head = false;  // heads have different numbers of slots
  std::int32_t first_slots[most_unequal_heads + 1] = {};  // `by_head`: of each head, then of all

  CacheRule() = default;
  explicit CacheRule(const KvCacheShape& shape)
      : common(rule_of_head(shape, 0)),
        slots(static_cast<int>(shape.slots(0))),
        by_head(!shape.has_equal_heads()) {
    for (std::int64_t h = 0; by_head && h < shape.heads_kv; ++h) {
      first_slots[h + 1] = first_slots[h] + static_cast<std::int32_t>(shape.slots(h));
    }
  }

  constexpr HeadSlots operator[](int head) const {
    if (!by_head) return {std::int64_t{head} * slots, 0, common.places, common.window};
    const int more = first_slots[head + 1] - first_slots[head] - slots;
    return {first_slots[head], first_slots[head], common.places + more, common.window + more};
  }
  constexpr HeadRule head_rule(int head) const {
    HeadRule rule = common;
    rule.window = (*this)[head].window;
    rule.places = (*this)[head].places;
    return rule;
  }
  // The first slot of head index % heads in row index / heads, where rows are dense.
  constexpr std::int64_t first_in_rows(std::int64_t index, int heads) const {
    if (!by_head) return index * slots;
    return index / heads * first_slots[heads] + first_slots[index % heads];
  }
};

}  // namespace flash_dmattn
