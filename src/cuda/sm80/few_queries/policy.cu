#include "cuda/sm80/few_queries/policy.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/common/integers.h"
#include "cuda/problem.h"

namespace flash_dmattn::cuda::sm80::few_queries {

std::string name(const Choice& choice) {
  std::string text = "sm80 few_queries ";
  text.append(flash_dmattn::name_of(choice.dtype));
  text.append(" d").append(std::to_string(choice.head_dim));
  text.append(choice.many_rows ? " rows64" : " rows16");
  if (choice.elementwise) text.append(" elementwise");
  return text.append(choice.shared == SharedClass::kb99 ? " 99KB" : " 163KB");
}

std::vector<Choice> choices(SharedClass shared) {
  std::vector<Choice> result;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const bool many_rows : {false, true}) {
        for (const bool elementwise : {false, true})
          result.push_back({dtype, head_dim, shared, many_rows, elementwise});
      }
    }
  }
  return result;
}

Choice choose(const Problem& p, SharedClass shared) {
  const std::int64_t group = p.heads_kv == 0 ? 1 : p.heads_q / p.heads_kv;
  const auto differs_between_heads = [&](const BroadcastShape& shape) {
    return group > 1 && shape[1] > 1 && shape[1] == p.heads_q;
  };
  return {.dtype = p.dtype,
          .head_dim = head_dim_bucket(static_cast<int>(p.head_dim)),
          .shared = shared,
          .many_rows = p.seqlen_q * group > policy(64, shared, false).rows(),
          .elementwise = has_dense_mask(p) || is_dense(p.bias_shape) ||
                         differs_between_heads(p.mask_shape) ||
                         differs_between_heads(p.bias_shape)};
}

// The time of a block in tiles is that of its keys and one more, in which it fills its pipeline. Of the splits
// that take the least time the smallest leaves the least to combine.
Split split_keys(const Problem& p, const Policy& policy, std::int64_t most_keys,
                 int multiprocessors) {
  constexpr std::int64_t most_splits = 512;
  Split result;
  if (p.heads_kv == 0) return result;
  result.row_tiles =
      static_cast<int>(ceil_div(p.seqlen_q * (p.heads_q / p.heads_kv), policy.rows()));
  const std::int64_t units = p.batch * p.heads_kv * result.row_tiles;
  const std::int64_t tiles = ceil_div(most_keys, policy.keys);
  const std::int64_t places = static_cast<std::int64_t>(multiprocessors) * policy.min_blocks;
  const auto time = [&](std::int64_t splits) {
    return ceil_div(units * splits, places) * (ceil_div(tiles, splits) + 1);
  };
  // Beyond a few waves of blocks nothing is gained.
  const std::int64_t waves_of_one = ceil_div(std::max(units, std::int64_t{1}), places);
  const std::int64_t last = std::min(
      {tiles, most_splits, waves_of_one * 4 * ceil_div(places, std::max(units, std::int64_t{1}))});
  std::int64_t best = time(1);
  for (std::int64_t splits = 2; splits <= last; ++splits) best = std::min(best, time(splits));
  // 2 % are noise.
  while (time(result.splits) * 50 > best * 51) ++result.splits;
  return result;
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
