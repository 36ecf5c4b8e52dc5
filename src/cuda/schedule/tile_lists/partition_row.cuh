#pragma once

#include "cuda/schedule/tile_lists/partition_keys.cuh"

namespace flash_dmattn::cuda::key_tree {

// Splits short rows among tiles in one kernel, without lists of nodes in memory. The block of a node reads the
// intervals of all keys that its queries may see, keeps the visible keys, and partitions them among its tiles.
template <class Children>
struct PartitionRowKernel {
  struct Params {
    AllKeys keys;
    Level nodes;
    Children children;
  };
  static constexpr int threads = key_tree::threads;
  static constexpr int min_blocks = 2;
  static constexpr int steps = 8;
  static constexpr int max_node_keys = threads * steps;
  static constexpr int words = 2;  // words of 32 keys per lane
  static constexpr int max_keys = threads * words * warp_size;
  static constexpr int together = 8;  // loads of a lane in flight

  static bool takes(const Level& nodes, std::int64_t seqlen_k) {
    return seqlen_k <= max_keys && nodes.capacity() <= max_node_keys;
  }

  struct SharedStorage {
    int2 entries[max_node_keys];  // the node's keys in order
    int warp_keys[warps];
    int counts[warps][max_lists];
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    const int rows = static_cast<int>(gridDim.x) / p.nodes.nodes();
    const int row = static_cast<int>(blockIdx.x) % rows;
    // The last nodes run first, because they may see the most keys.
    const int index = p.nodes.nodes() - 1 - static_cast<int>(blockIdx.x) / rows;
    const Node node = p.nodes.node(row, index);
    const AllKeys::Items all = p.keys.items(row, 0);
    const int size = collect_keys(p, node, all, shared);
    complete_entries(all, size, shared);
    const Level::Items items(shared.entries, size);
    const Batch<steps> batch(items, node, p.children, 0, size);
    shared.counts[warp_id()][lane_id()] = batch.count();
    __syncthreads();
    int length = 0;
    int next = count_before_warp(shared.counts, length);
    next += p.children.first_place(length);
    store_batch(batch, node, p.children, next);
    p.children.finish(node, length);
  }

 private:
  // Lists the keys that the node's queries see, and returns their number, limited by the room for them. A lane has the
  // keys of whole words, so that it finds their places by itself.
  static __device__ int collect_keys(const Params& p, const Node& node, const AllKeys::Items& all,
                                     SharedStorage& shared) {
    const int lane = lane_id();
    const Queries queries = p.keys.queries(node);
    const int end = p.keys.keys_before(queries.end);
    const int warp_keys = ceil_div(end, threads) * warp_size;
    const int warp_begin = warp_id() * warp_keys;
    const int warp_end = min(warp_begin + warp_keys, end);
    unsigned seen[words] = {};
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int word_begin = warp_begin + w * warp_size * warp_size;
#pragma unroll 1
      for (int i = 0; i < warp_size; i += together) {
        const int first = word_begin + i * warp_size;
        if (first >= warp_end) break;
        const int own = lane - i;
        int2 interval[together];
#pragma unroll
        for (int k = 0; k < together; ++k) {
          interval[k] = all.interval(min(first + k * warp_size + lane, warp_end - 1));
        }
#pragma unroll
        for (int k = 0; k < together; ++k) {
          const unsigned keys =
              warp_ballot(max(interval[k].x, queries.begin) < min(interval[k].y, queries.end));
          if (own == k) seen[w] = keys;
        }
      }
      // Lanes past the end read the last key again.
      seen[w] &= bit_range(0, min(max(warp_end - word_begin - lane * warp_size, 0), warp_size));
    }
    int place[words];
    int count = 0;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int through = warp_inclusive_sum(__popc(seen[w]), lane);
      place[w] = count + through - __popc(seen[w]);
      count += shuffle(through, warp_size - 1);
    }
    if (lane == 0) shared.warp_keys[warp_id()] = count;
    __syncthreads();
    const int warp_count = lane < warps ? shared.warp_keys[lane] : 0;
    const int before = warp_sum(lane < warp_id() ? warp_count : 0);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int first = warp_begin + (w * warp_size + lane) * warp_size;
      // Every lane starts from another bit, so that the lanes of a warp that sees all keys store to different banks.
      for (unsigned rest = __funnelshift_r(seen[w], seen[w], lane); rest != 0; rest &= rest - 1) {
        const int bit = (__ffs(static_cast<int>(rest)) - 1 + lane) % warp_size;
        const int to = before + place[w] + count_before(seen[w], bit);
        if (to < p.nodes.capacity()) shared.entries[to].x = first + bit;
      }
    }
    __syncthreads();
    return min(warp_sum(warp_count), p.nodes.capacity());
  }

  static __device__ void complete_entries(const AllKeys::Items& all, int size,
                                          SharedStorage& shared) {
    constexpr int half = steps / 2;  // steps with loads in flight
    for (int first = static_cast<int>(threadIdx.x); first < size; first += half * threads) {
      int key[half];
      int2 queries[half];
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const int i = first + k * threads;
        key[k] = i < size ? shared.entries[i].x : 0;
        queries[k] = all.interval(key[k]);
      }
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const int i = first + k * threads;
        if (i < size) shared.entries[i] = all.entry(key[k], queries[k]).stored();
      }
    }
    __syncthreads();
  }
};

}  // namespace flash_dmattn::cuda::key_tree
