#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/slot_scan.cuh"
#include "cuda/primitives/block.cuh"
#include "cuda/primitives/warp.cuh"
#include "flash_dmattn/kv_cache.h"

// The kernels' view of a KV cache.
namespace flash_dmattn::cuda::kv {

// Rows of 16-bit elements. `Byte` is const if they are only read. Strides are in bytes.
template <class Byte>
struct RowTensor {
  Byte* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;  // stride of a token or slot

  __device__ Byte* at(std::int64_t b, std::int64_t h, std::int64_t t) const {
    return data + b * batch + h * head + t * token;
  }
};

using ReadRows = RowTensor<const std::byte>;
using WrittenRows = RowTensor<std::byte>;

struct Slots {
  WrittenRows k, v;
  float* scores;
  std::int32_t* entries;  // `positions` of KvCache
  SlotCount* counts;
  std::int32_t* seen;
  RowIndex rows;
  CacheRule rule;
  int heads;
  int pending;

  __device__ int places(int h) const { return rule[h].places; }
  // The first slot of a head, in `scores` and `entries`, and its count.
  __device__ std::int64_t first(int row, int h) const {
    return row * rows.slot_stride + rule[h].first;
  }
  // The rows of a slot.
  __device__ std::byte* key(int row, int h, int slot) const {
    return k.at(row, h, rule[h].rows_before + slot);
  }
  __device__ std::byte* value(int row, int h, int slot) const {
    return v.at(row, h, rule[h].rows_before + slot);
  }
  __device__ SlotCount& count(int row, int h) const { return counts[row * rows.count_stride + h]; }
  __device__ std::int32_t& seen_of(int row) const { return seen[row * rows.seen_stride]; }
};

// The scores of tokens, and their mask.
struct TokenScores {
  ScoreRows scores;
  TokenMask mask;

  __device__ float operator()(int b, int h, int t) const {
    return scores.data[b * scores.stride[0] + h * scores.stride[1] + t * scores.stride[2]];
  }
  __device__ bool is_present(int b, int t) const {
    return mask.data == nullptr || mask.data[b * mask.stride[0] + t * mask.stride[1]] != 0;
  }
};

// Copies rows of k and v in units of 16 bytes if all rows of a call are aligned to 16 bytes, otherwise in units of an
// element.
struct RowCopy {
  int unit = 2;
  int units = 0;        // of a row of k, which has at least as many as one of v
  int value_units = 0;  // of a row of v

  __device__ void k(std::byte* to, const std::byte* from, int i) const { copy(to, from, i); }
  __device__ void v(std::byte* to, const std::byte* from, int i) const {
    if (i < value_units) copy(to, from, i);
  }

 private:
  __device__ void copy(std::byte* to, const std::byte* from, int i) const {
    if (unit == 16) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      reinterpret_cast<std::uint16_t*>(to)[i] = reinterpret_cast<const std::uint16_t*>(from)[i];
    }
  }
};

// Collects victim, free slot and leaving key among the taken slots from `first` on. The result is in thread 0.
template <int Threads>
struct BlockScan {
  struct Storage {
    SlotScan scans[Threads / warp_size];
  };

  static __device__ SlotScan find(Storage& storage, const Slots& cache, const HeadRule& rule,
                                  std::int64_t first, int count, int tokens) {
    const SlotScan::ScanPositions positions(rule, tokens);
    SlotScan scan = SlotScan::nothing();
    for (int slot = static_cast<int>(threadIdx.x); slot < count; slot += Threads) {
      const std::int64_t at = first + slot;
      scan.add(positions, cache.scores[at], cache.entries[at], slot);
    }
    scan = scan.warp_sum();
    if (lane_id() == 0) storage.scans[warp_id()] = scan;
    __syncthreads();
    if (warp_id() > 0) return scan;
    return storage.scans[lane_id() % (Threads / warp_size)].warp_sum();
  }
};

}  // namespace flash_dmattn::cuda::kv
