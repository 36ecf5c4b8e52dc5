#include "cuda/sm80/few_queries/choice.h"

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "cuda/attention/problem.h"
#include "cuda/family.h"
#include "cuda/primitives/integers.h"
#include "cuda/sm80/kernel_choice.h"

namespace flash_dmattn::cuda::sm80::few_queries {

namespace {

std::string name_in(std::string_view kind, const Choice& choice) {
  std::string name = kernel_name("sm80", kind, choice.dtype, choice.head_dim);
  name.append(" rows").append(std::to_string(policy_of(choice).rows()));
  if (choice.elementwise) name.append(" elementwise");
  return name.append(class_suffix(choice.shared));
}

}  // namespace

std::string name(const Choice& choice) { return name_in("few_queries", choice); }

std::string step_name(const Choice& choice) { return name_in("decode_step", choice); }

std::vector<Choice> step_choices(SharedClass shared) {
  std::vector<Choice> result;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : head_dims) {
      for (const bool many_rows : {false, true}) {
        result.push_back({dtype, head_dim, shared, many_rows});
      }
    }
  }
  return result;
}

std::vector<Choice> split_choices(SharedClass shared) {
  std::vector<Choice> result;
  for (Choice choice : step_choices(shared)) {
    for (const bool elementwise : {false, true}) {
      choice.elementwise = elementwise;
      result.push_back(choice);
    }
  }
  return result;
}

Choice choose_kernel(const Problem& p, SharedClass shared) {
  const std::int64_t group = p.heads_kv == 0 ? 1 : p.heads_q / p.heads_kv;
  const auto differs_between_heads = [&](const BroadcastShape& shape) {
    return group > 1 && shape[1] > 1 && shape[1] == p.heads_q;
  };
  return {.dtype = p.dtype,
          .head_dim = head_dim_bucket(static_cast<int>(p.head_dim)),
          .shared = shared,
          .many_rows = p.seqlen_q * group > policy_of(64, shared, false).rows(),
          .elementwise = is_dense(p.mask_shape) || is_dense(p.bias_shape) ||
                         differs_between_heads(p.mask_shape) ||
                         differs_between_heads(p.bias_shape)};
}

namespace {

// The time of a split call, in tiles: the tiles of a block, and one more in which it fills its pipeline.
struct SplitTime {
  std::int64_t units;   // kv heads and row tiles
  std::int64_t tiles;   // tiles of each unit
  std::int64_t places;  // blocks that run at a time

  std::int64_t operator()(std::int64_t splits) const {
    return ceil_div(units * splits, places) * (ceil_div(tiles, splits) + 1);
  }
};

// The smallest of the splits 1, next(1), ... up to `most` whose time is at most 2 % above the least.
template <class Next>
int best_split(const SplitTime& time, std::int64_t most, const Next& next) {
  std::int64_t best = time(1);
  for (std::int64_t splits = 1; splits <= most; splits = next(splits))
    best = std::min(best, time(splits));
  std::int64_t result = 1;
  while (time(result) * 50 > best * 51) result = next(result);
  return static_cast<int>(result);
}

}  // namespace

Split split_keys(const Problem& p, const Policy& policy, std::int64_t most_keys,
                 const DeviceProperties& device) {
  Split result;
  if (p.batch * p.heads_kv == 0) return result;
  result.row_tiles =
      static_cast<int>(ceil_div(p.seqlen_q * (p.heads_q / p.heads_kv), policy.rows()));
  const SplitTime time{
      .units = std::max(p.batch * p.heads_kv * result.row_tiles, std::int64_t{1}),
      .tiles = ceil_div(most_keys, policy.keys),
      .places = static_cast<std::int64_t>(device.multiprocessors) * policy.min_blocks};
  // More than a few waves of blocks are not faster.
  constexpr std::int64_t most_splits = 512;
  const std::int64_t most =
      std::min({time.tiles, most_splits,
                4 * ceil_div(time.units, time.places) * ceil_div(time.places, time.units)});
  result.splits = best_split(time, most, [](std::int64_t splits) { return splits + 1; });
  const int cluster = best_split(time, std::min<std::int64_t>(most, most_cluster_blocks(device)),
                                 [](std::int64_t splits) { return 2 * splits; });
  // A second kernel takes longer than a tile.
  if (time(cluster) <= time(result.splits) + 1) {
    result.splits = cluster;
    result.in_cluster = true;
  }
  return result;
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
