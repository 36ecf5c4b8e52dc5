#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "flash_dmattn/problem.h"
#include "flash_dmattn/visibility.h"

namespace flash_dmattn::testing {

// The least bound of intervals, in host memory, that grows by one key for each query.
//
// Queries [a, b) together see the keys that arrive before b, except the keys that leave at or before a: at most
// base + b - a keys for all a < b.
inline KeyBound least_bound(const KeyIntervals& intervals, const Problem& p) {
  const auto [batch, heads] = p.intervals_shape;
  const auto queries = static_cast<std::size_t>(p.seqlen_q);
  std::int64_t base = 0;
  for (std::int64_t row = 0; row < batch * heads; ++row) {
    const KeyInterval* const keys = intervals.data +
                                    (batch > 1 ? row / heads * intervals.stride_batch : 0) +
                                    (heads > 1 ? row % heads * intervals.stride_head : 0);
    std::vector<std::int64_t> come(queries + 1), gone(queries + 1);  // at each query
    for (std::int64_t key = 0; key < p.seqlen_k; ++key) {
      std::int64_t first = std::max<std::int64_t>(keys[key].first, 0);
      if (p.causal) first = std::max(first, key - (p.seqlen_k - p.seqlen_q));
      const std::int64_t last = std::min<std::int64_t>(keys[key].last, p.seqlen_q);
      if (first >= last) continue;
      ++come[static_cast<std::size_t>(first)];
      ++gone[static_cast<std::size_t>(last)];
    }
    std::int64_t came = 0;
    std::int64_t went = 0;
    std::int64_t most = std::numeric_limits<std::int64_t>::min();  // of a without those gone at a
    for (std::int64_t query = 0; query < p.seqlen_q; ++query) {
      went += gone[static_cast<std::size_t>(query)];
      most = std::max(most, query - went);
      came += come[static_cast<std::size_t>(query)];
      base = std::max(base, came - (query + 1) + most);
    }
  }
  return {.base = base, .per_query = 1};
}

}  // namespace flash_dmattn::testing
