#pragma once

#include <cstdint>

#include "flash_dmattn/kv_cache.h"

namespace flash_dmattn {

// The row of the arrays for row b of a call; negative: none.
inline std::int64_t row_of(const KvCache& cache, std::int64_t b) {
  return cache.rows.index == nullptr ? b : cache.rows.index[b * cache.rows.index_stride];
}

inline std::int32_t& seen_of(const KvCache& cache, std::int64_t row) {
  return cache.seen[row * cache.rows.seen_stride];
}

// The number of tokens that fill brings to row b of a call, and that commit keeps.
inline std::int32_t length_of(const FillArgs& args, std::int64_t b) {
  return args.lengths == nullptr ? static_cast<std::int32_t>(args.seqlen_k) : args.lengths[b];
}
inline std::int32_t kept_of(const CommitArgs& args, std::int64_t b) {
  return args.kept_tokens == nullptr ? static_cast<std::int32_t>(args.cache.pending)
                                     : args.kept_tokens[b];
}

// Views slots [B, Hkv, slots, D] as [B, slots, Hkv, D], as attention reads its keys.
inline Tensor4 by_token(const Tensor4& slots) {
  const auto& [batch, head, slot, element] = slots.stride;
  return {slots.data, {batch, slot, head, element}};
}

}  // namespace flash_dmattn
