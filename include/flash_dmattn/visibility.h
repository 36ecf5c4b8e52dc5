#pragma once

#include <cstdint>

#include "flash_dmattn/types.h"

// Keys that a query sees, in addition to masks, biases and causality.
//
// The score of dynamic mask attention belongs to the key, not to the (query, key) element. Under causal per-query
// top-w selection key j is visible to a query at position t >= j while fewer than w of the keys at
// positions 0..t beat it. The number of keys that beat it only grows with t, so every key is visible
// in one interval of queries, and two integers per key replace the Sq x Sk mask. Sliding windows,
// prefixes, padding and packed documents have the same form.
namespace flash_dmattn {

// Key j is visible to query i exactly when first <= i < last, with i counted in rows of q: query i
// is at key position i + Sk - Sq. first >= last: never visible.
struct KeyInterval {
  std::int32_t first;
  std::int32_t last;
};

// [B|1, Hkv|1, Sk] intervals; strides in KeyInterval elements, not used for a dimension of size 1, keys
// contiguous.
struct KeyIntervals {
  const KeyInterval* data = nullptr;
  std::int64_t stride_batch = dense_stride;
  std::int64_t stride_head = dense_stride;
};

// A bound on intervals that is known without reading them: any n consecutive queries together see at
// most base + per_query * n keys (and never more than Sk). A GPU needs it, because the workspace is
// allocated before the intervals are known.
//   selection of w keys              key_bound(args): {w, causal and per query ? 1 : 0}
//   sliding window of w              {w, 1, true}
//   packed documents of length <= l  {2 l, 1, true}
//   anything                         {Sk, 0}, or measure_key_bound
struct KeyBound {
  std::int64_t base = -1;  // negative: unknown
  std::int64_t per_query = 0;
  // The keys that one query sees are consecutive, or nearly: a GPU then visits all from the first to the last.
  bool consecutive = false;

  constexpr bool known() const { return base >= 0; }
};

// Without intervals every key is visible.
struct Visibility {
  KeyIntervals intervals{};
  KeyBound bound{};  // of the intervals; a GPU throws without it, the CPU does not use it
};

}  // namespace flash_dmattn
