#pragma once

#include "cuda/sm80/backward/query_tile_iterator.cuh"
#include "cuda/sm80/params.h"
#include "cuda/sm80/policy.h"
#include "cuda/sm80/tile/tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// The gradient of a dense bias, from the dS of a block in shared memory, [128 keys in LaneContiguous<4> order] [64
// queries]. Each of 4 warps takes 16 queries, and a lane takes 8 neighbouring keys of two of them in every 32. Every
// element is written once: dS of a visited tile, the completed sum of dS of the heads that share the bias, or zero for
// skipped tiles. Two heads are summed in 16 bits, which rounds no more often than a sum in fp32 that is then stored. If
// more dS share an element, they are added in fp32 in memory.
template <class T, int D>
class DenseBiasGradient {
 public:
  static constexpr int rows = 64;
  static constexpr int keys = 128;
  static constexpr bool can_sum = sums_dense_dbias(D);

  // `warp` is the number of the warp, in [0, 4).
  __device__ DenseBiasGradient(const KeyMajorParams& p, const KeyTile& tile, int warp)
      : p_(p), tile_(tile), lane_(lane_id()), warp_(warp) {}

  __device__ bool wanted() const { return p_.dbias.data != nullptr && p_.dbias.dense; }

  // Adds dS of a tile, a SharedTile<keys, rows>. `last` means the last of the heads that share the bias.
  __device__ void add(QueryTilePosition at, std::uint32_t ds, bool last) {
    if constexpr (can_sum) {
      if (sums() && !last) {
        for_each_block([&](int half, int i) { load(first_head_[half][i], ds, half, i); });
        has_first_head_ = true;
        return;
      }
    }
    const int query = 16 * warp_ + lane_ / 4;
    const int key = tile_.key + lane_ % 4 * 8;
    const std::int64_t first = index(at) + query * p_.dbias.query + key;
    const auto element = [&](int half, int i) {
      return first + 8 * half * p_.dbias.query + 32 * i;
    };
    const bool full = p_.dbias.aligned_16B && at.row + rows <= p_.shape.seqlen_q &&
                      tile_.key + keys <= p_.shape.seqlen_k;
    if (full && !p_.dbias_accumulates) {
      for_each_block([&](int half, int i) {
        *reinterpret_cast<uint4*>(p_.dbias.data + 2 * element(half, i)) = eight_keys(ds, half, i);
      });
    } else {
      for_each_block([&](int half, int i) {
        const bool exists = at.row + query + 8 * half < p_.shape.seqlen_q;
        const int count = exists ? p_.shape.seqlen_k - key - 32 * i : 0;
        p_.dbias_accumulates ? add_in_memory(element(half, i), eight_keys(ds, half, i), count)
                             : write(element(half, i), eight_keys(ds, half, i), count);
      });
    }
    has_first_head_ = false;
  }

  // Stores zeros for the tiles of `heads` heads that are skipped after tile `number` and before tile `next`. Called by
  // all four warps.
  __device__ void clear(int first_head, int heads, int number, int next) const {
    if (p_.dbias_accumulates || next <= number + 1) return;
    const int together = shared_by_group() ? heads : 1;
    const int begin = number < 0 ? 0 : number / together + 1;
    for (int i = begin; i < next / together; ++i) {
      const int tile = i * together;
      const QueryTilePosition at{first_head + tile % heads, tile / heads * rows, false};
      const int key = tile_.key + lane_ % 16 * 8;
      const int end = min(rows, p_.shape.seqlen_q - at.row);
      for (int r = 2 * warp_ + lane_ / 16; r < end; r += 8) {
        write(index(at) + r * p_.dbias.query + key, {0, 0, 0, 0}, p_.shape.seqlen_k - key);
      }
    }
  }

 private:
  __device__ bool shared_by_group() const { return p_.dbias.head_q == 0; }

  __device__ std::int64_t index(QueryTilePosition at) const {
    const OutputBroadcast& b = p_.dbias;
    return tile_.batch * b.batch + at.head * b.head_q + tile_.kv_head * b.head_kv +
           at.row * b.query;
  }

  // Whether two heads of a group share the elements.
  __device__ bool sums() const {
    return !p_.dbias_accumulates && p_.shape.heads_q != p_.shape.heads_kv && shared_by_group();
  }

  // Calls body(half, i) for both halves of the warp's queries and every 32 keys.
  template <class Body>
  static __device__ void for_each_block(const Body& body) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < keys / 32; ++i) body(half, i);
    }
  }

  // Loads dS of the lane's query and eight keys: word b has keys b and 4 + b.
  __device__ void load(std::uint32_t (&block)[4], std::uint32_t ds, int half, int i) const {
    ldmatrix_x4_trans(block, ds + SharedTile<keys, rows>::offset(32 * i + lane_, 2 * warp_ + half));
  }

  // The eight keys in order, plus dS of the first head if it is kept.
  __device__ uint4 eight_keys(std::uint32_t ds, int half, int i) const {
    std::uint32_t block[4];
    load(block, ds, half, i);
    if constexpr (can_sum) {
      if (has_first_head_) {
#pragma unroll
        for (int b = 0; b < 4; ++b)
          block[b] = add_gradients_packed2<T>(first_head_[half][i][b], block[b], p_.saturate);
      }
    }
    return {__byte_perm(block[0], block[1], 0x5410), __byte_perm(block[2], block[3], 0x5410),
            __byte_perm(block[0], block[1], 0x7632), __byte_perm(block[2], block[3], 0x7632)};
  }

  // Writes the first `count` elements, a multiple of four.
  __device__ void write(std::int64_t index, uint4 eight, int count) const {
    std::byte* const to = p_.dbias.data + 2 * index;
    if (count >= 8 && p_.dbias.aligned_16B) {
      *reinterpret_cast<uint4*>(to) = eight;
    } else {
      if (count > 0) *reinterpret_cast<uint2*>(to) = {eight.x, eight.y};
      if (count > 4) *reinterpret_cast<uint2*>(to + 8) = {eight.z, eight.w};
    }
  }

  __device__ void add_in_memory(std::int64_t index, uint4 eight, int count) const {
    const auto add = [&](std::int64_t to, std::uint32_t low, std::uint32_t high) {
      if (((low | high) & 0x7fff7fffu) == 0) return;
      const float2 x = Element<T>::widen_packed2(low);
      const float2 y = Element<T>::widen_packed2(high);
      reduce_add(reinterpret_cast<float*>(p_.dbias.data) + to, x.x, x.y, y.x, y.y);
    };
    if (count > 0) add(index, eight.x, eight.y);
    if (count > 4) add(index + 4, eight.z, eight.w);
  }

  const KeyMajorParams& p_;
  KeyTile tile_;
  int lane_;
  int warp_;
  // dS of the first of two heads, kept until dS of the second is computed.
  std::uint32_t first_head_[2][can_sum ? keys / 32 : 1][4];
  bool has_first_head_ = false;
};

}  // namespace flash_dmattn::cuda::sm80
