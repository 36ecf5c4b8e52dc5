#pragma once

#include <cstdint>

#include "cuda/schedule/key_tree.cuh"

// Builds tile lists by splitting lists of keys down a tree of tile ranges. A node lists the keys that its tiles'
// queries see. A CTA reads that list and copies every key, in order, to up to 32 lists of children that see it. These
// are the lists of lower nodes, or at the bottom two lists for each tile, of full and of partial keys. Every entry is
// read once for all children.
//
// A lane makes a word of its key, with one bit for each list that the key joins. Transposing the words of a warp gives
// lane b the keys of list b, with a bit for each lane. The population count of that word is the growth of the list, and
// a key's index in the list follows from the bits below the key's bit.
namespace flash_dmattn::cuda::key_tree {

// The next keys of a warp and their transposed lists, of which lane b has the keys of list b.
template <int Steps, class Entry>
struct Batch {
  typename Entry::Stored entry[Steps];
  unsigned keys_of_list[Steps];

  // The warp's part of items [begin, end).
  template <class Items, class Children>
  __device__ Batch(const Items& items, const Node& node, const Children& children, int begin,
                   int end) {
    const int lane = lane_id();
    const int steps = min(ceil_div(end - begin, threads), Steps);  // the same for every warp
    const int first = begin + warp_id() * steps * warp_size + lane;
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
      const int i = first + k * warp_size;
      entry[k] = (k < steps && i < end ? items[i] : Entry(0, {0, 0})).stored();
    }
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
      keys_of_list[k] = 0;
      if (k >= steps) continue;
      const HalfTiles tiles = Entry(entry[k]).within(node.first_tile, node.end_tile);
      keys_of_list[k] = transpose_bits(children.lists_of(tiles), lane);
    }
  }

  __device__ int count() const {
    int sum = 0;
#pragma unroll
    for (int k = 0; k < Steps; ++k) sum += __popc(keys_of_list[k]);
    return sum;
  }
};

// Several CTAs split a long list, each a part of it. They run twice: first to count the keys of each list in each part,
// and then to store.
struct Parts {
  int parts = 1;          // parts of every list
  int items = 0;          // items of a part
  int* counts = nullptr;  // [rows, nodes, parts, max_lists]; null for one part
};

// The number of keys that earlier warps put into list `lane`; `total` receives the number of all warps.
__device__ inline int count_before_warp(const int (&counts)[warps][max_lists], int& total) {
  const int lane = lane_id();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    if (w == warp_id()) before = total;
    total += counts[w][lane];
  }
  return before;
}

// Places the keys of a warp. Lane b has the place of the warp's next key in list b.
template <int Steps, class Entry, class Children>
__device__ void store_batch(const Batch<Steps, Entry>& batch, const Node& node,
                            const Children& children, int next) {
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    if (!warp_any(batch.keys_of_list[k] != 0)) continue;
    children.store(node, batch.keys_of_list[k], next, Entry(batch.entry[k]));
    next += __popc(batch.keys_of_list[k]);
  }
}

// Counts the keys of each child's list in a part of a parent's list.
template <int Steps, class Parent, class Children>
__global__ void __launch_bounds__(threads)
    count_part(Parent parent, Children children, Parts parts) {
  wait_for_previous_kernel();
  using Batch = key_tree::Batch<Steps, typename Parent::Items::Entry>;
  __shared__ int counts[max_lists];
  const int part = static_cast<int>(blockIdx.x) % parts.parts;
  const int list = static_cast<int>(blockIdx.x) / parts.parts;
  const int row = list / parent.nodes();
  const Node node = parent.node(row, list % parent.nodes());
  const auto items = parent.items(row, list % parent.nodes());
  const int end = min((part + 1) * parts.items, items.size());
  if (threadIdx.x < max_lists) counts[threadIdx.x] = 0;
  __syncthreads();
  int count = 0;
  for (int i = part * parts.items; i < end; i += threads * Steps) {
    count += Batch(items, node, children, i, end).count();
  }
  if (count != 0) atomicAdd(&counts[lane_id()], count);
  __syncthreads();
  if (threadIdx.x < max_lists) {
    parts.counts[std::int64_t{blockIdx.x} * max_lists + threadIdx.x] = counts[threadIdx.x];
  }
}

// Partitions the keys of each of the parent's nodes, or of a part of them, among the children.
template <int Steps, class Parent, class Children>
__global__ void __launch_bounds__(threads)
    partition_keys(Parent parent, Children children, Parts parts) {
  wait_for_previous_kernel();
  using Batch = key_tree::Batch<Steps, typename Parent::Items::Entry>;
  __shared__ int counts[2][warps][max_lists];
  __shared__ int before_part[max_lists];
  __shared__ int lengths[max_lists];
  const int lane = lane_id();
  const int warp = warp_id();
  const int part = static_cast<int>(blockIdx.x) % parts.parts;
  const int list = static_cast<int>(blockIdx.x) / parts.parts;
  const int row = list / parent.nodes();
  const Node node = parent.node(row, list % parent.nodes());
  const auto items = parent.items(row, list % parent.nodes());
  const int begin = part * parts.items;
  const int end = min(begin + parts.items, items.size());
  const bool one_batch = parts.counts == nullptr && end <= threads * Steps;

  // The number of keys that earlier parts put into a list, and the number of all parts.
  if (threadIdx.x < max_lists) before_part[lane] = lengths[lane] = 0;
  if (!one_batch) __syncthreads();
  if (parts.counts != nullptr) {
    const int* const list_counts = parts.counts + std::int64_t{list} * parts.parts * max_lists;
    int mine = 0;
    int all = 0;
#pragma unroll 4
    for (int p = warp; p < parts.parts; p += warps) {
      const int count = list_counts[p * max_lists + lane];
      all += count;
      mine += p < part ? count : 0;
    }
    if (mine != 0) atomicAdd(&before_part[lane], mine);
    if (all != 0) atomicAdd(&lengths[lane], all);
  } else if (!one_batch) {  // the lengths take a pass of their own
    int count = 0;
    for (int i = begin; i < end; i += threads * Steps) {
      count += Batch(items, node, children, i, end).count();
    }
    if (count != 0) atomicAdd(&lengths[lane], count);
  }

  int stored = 0;  // keys of earlier batches
  int length = 0;
  int parity = 0;
  for (int i = begin; i < end; i += threads * Steps) {
    const Batch batch(items, node, children, i, end);
    counts[parity][warp][lane] = batch.count();
    __syncthreads();  // one barrier per batch, as the counts alternate between two arrays
    int total = 0;
    int next = before_part[lane] + stored + count_before_warp(counts[parity], total);
    length = one_batch ? total : lengths[lane];
    next += children.first_place(length);
    store_batch(batch, node, children, next);
    stored += total;
    parity ^= 1;
  }
  if (part != parts.parts - 1) return;
  if (begin >= end) {  // an empty part has passed no barrier since the lengths were summed
    __syncthreads();
    length = lengths[lane];
  }
  children.finish(node, length);
}

}  // namespace flash_dmattn::cuda::key_tree
