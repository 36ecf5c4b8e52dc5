#include "cuda/sm80/few_queries/choice.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
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

  double operator()(std::int64_t splits) const {
    return static_cast<double>(ceil_div(units * splits, places) * (ceil_div(tiles, splits) + 1));
  }
};

// The smallest of the splits 1, next(1), ... up to `most` whose time is at most 2 % above the least.
template <class Time, class Next>
int best_split(const Time& time, std::int64_t most, const Next& next) {
  double least = time(1);
  for (std::int64_t splits = 1; splits <= most; splits = next(splits))
    least = std::min(least, time(splits));
  std::int64_t result = 1;
  while (time(result) > 1.02 * least) result = next(result);
  return static_cast<int>(result);
}

// Divides keys into at most `most` splits, by their time if a second kernel adds the parts and if a cluster does.
template <class Time, class ClusterTime, class Next>
Split divide(std::int64_t most, const DeviceProperties& device, const Time& time,
             const ClusterTime& cluster_time, const Next& next) {
  const std::int64_t most_cluster = std::min<std::int64_t>(most, most_cluster_blocks(device));
  const int splits = best_split(time, most, next);
  const int cluster = best_split(cluster_time, most_cluster, [](std::int64_t n) { return 2 * n; });
  // A second kernel takes longer than a tile.
  const bool in_cluster = splits == 1 || cluster_time(cluster) <= time(splits) + 1;
  return {.row_tiles = 1, .splits = in_cluster ? cluster : splits, .in_cluster = in_cluster};
}

}  // namespace

Split split_keys(const Problem& p, const Policy& policy, std::int64_t most_keys,
                 const DeviceProperties& device) {
  Split result;
  if (p.batch * p.heads_kv == 0) return result;
  const auto row_tiles =
      static_cast<int>(ceil_div(p.seqlen_q * (p.heads_q / p.heads_kv), policy.rows()));
  const SplitTime time{
      .units = std::max(p.batch * p.heads_kv * row_tiles, std::int64_t{1}),
      .tiles = ceil_div(most_keys, policy.keys),
      .places = static_cast<std::int64_t>(device.multiprocessors) * policy.min_blocks};
  // More than a few waves of blocks are not faster.
  constexpr std::int64_t most_splits = 512;
  const std::int64_t most =
      std::min({time.tiles, most_splits,
                4 * ceil_div(time.units, time.places) * ceil_div(time.places, time.units)});
  result = divide(most, device, time, time, [](std::int64_t splits) { return splits + 1; });
  result.row_tiles = row_tiles;
  return result;
}

namespace {

// The number of tiles of each head, in the order of HeadBlocks.
struct HeadTiles {
  std::int64_t tiles[most_unequal_heads];
  std::int64_t heads;
  std::int64_t batch;
  double places;  // blocks that run at a time

  // The time in tiles, if blocks have up to `block_tiles` and the first ones begin first. With a `cluster`, each head has
  // that many blocks, and one without tiles takes the time of a fifth of a tile.
  double time(std::int64_t block_tiles, std::int64_t cluster) const {
    double work = 0;
    std::int64_t blocks = 0;
    for (std::int64_t i = 0; i < heads; ++i) {
      const std::int64_t with_tiles = ceil_div(tiles[i], block_tiles);
      const std::int64_t idle = std::max<std::int64_t>(cluster - with_tiles, 0);
      work += static_cast<double>(tiles[i] + with_tiles) + 0.2 * static_cast<double>(idle);
      blocks += with_tiles + idle;
    }
    const std::int64_t last_tiles = std::min(block_tiles, tiles[heads - 1]) + 1;
    const auto longest = static_cast<double>(block_tiles + 1);
    if (static_cast<double>(blocks * batch) <= places) return longest;
    return std::max(
        longest, work * static_cast<double>(batch) / places + static_cast<double>(last_tiles) / 2);
  }
};

}  // namespace

Split split_heads(const KvCacheShape& shape, const Policy& policy, const DeviceProperties& device,
                  HeadBlocks& blocks) {
  const auto heads = static_cast<int>(shape.heads_kv);
  std::iota(blocks.head, blocks.head + heads, std::uint8_t{0});
  std::stable_sort(blocks.head, blocks.head + heads, [&](std::uint8_t a, std::uint8_t b) {
    return shape.places(a) > shape.places(b);
  });
  // Blocks with a tile wait for latency. They run beside the blocks of the largest head, which fill the memory's bandwidth.
  std::stable_partition(blocks.head + std::min(heads, 1), blocks.head + heads,
                        [&](std::uint8_t h) { return shape.places(h) <= policy.keys; });
  HeadTiles head_tiles{.tiles = {},
                       .heads = heads,
                       .batch = std::max<std::int64_t>(shape.batch, 1),
                       .places = static_cast<double>(device.multiprocessors) * policy.min_blocks};
  for (int i = 0; i < heads; ++i) {
    const std::int64_t tiles = ceil_div(shape.places(blocks.head[i]), std::int64_t{policy.keys});
    head_tiles.tiles[i] = std::max<std::int64_t>(tiles, 1);
    blocks.place[blocks.head[i]] = static_cast<std::uint8_t>(i);
  }
  const std::int64_t most = head_tiles.tiles[0];
  const auto time = [&](std::int64_t splits) { return head_tiles.time(ceil_div(most, splits), 1); };
  const auto cluster_time = [&](std::int64_t splits) {
    return head_tiles.time(ceil_div(most, splits), splits);
  };
  // The next number of splits with fewer tiles for each.
  const auto next_split = [most](std::int64_t splits) {
    const std::int64_t tiles = ceil_div(most, splits);
    return tiles == 1 ? splits + 1 : ceil_div(most, tiles - 1);
  };
  constexpr std::int64_t most_splits = 511;  // so that all counts fit into 16 bits
  const Split result = divide(std::min(most, most_splits), device, time, cluster_time, next_split);
  const std::int64_t block_tiles = ceil_div(most, std::int64_t{result.splits});
  for (int i = 0; i < heads; ++i) {
    const std::int64_t used = ceil_div(head_tiles.tiles[i], block_tiles);
    if (result.in_cluster) blocks.used[i] = static_cast<std::uint8_t>(used);
    const std::int64_t count = result.in_cluster ? result.splits : used;
    blocks.first[i + 1] = static_cast<std::uint16_t>(blocks.first[i] + count);
  }
  return result;
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
