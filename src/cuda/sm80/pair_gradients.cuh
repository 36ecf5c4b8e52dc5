#pragma once

#include "cuda/policy.h"
#include "cuda/sm80/pair_rows.cuh"

namespace flash_dmattn::cuda::sm80 {

// The gradient of a bias with a query dimension, out of the dS of warps that have 32 keys each in
// FourByLane order. Every element is written once: that of a tile which is visited when its dS, or
// the sum of those of the heads that share the bias, is there, the others as zeros when the walk has
// passed them. Two heads are summed in 16 bits, which rounds no more often than a sum in fp32 that is
// then stored; where more share an element it is added to in fp32 in memory.
template <class T, int D>
class PairGradients {
 public:
  static constexpr int n8 = 8;
  static constexpr int rows = 8 * n8;
  static constexpr bool can_sum = sums_pair_gradients(D);
  using Gradients = std::uint32_t[2][n8 / 2][4];  // dS as an A operand

  // `first_key`: the first of the lane's warp; `heads`: that are walked together.
  __device__ PairGradients(const BackwardParams& p, const KeyTile& tile, int first_key)
      : p_(p),
        tile_(tile),
        key_(first_key + static_cast<int>(threadIdx.x) % 32 / 4 * 4),
        query_(static_cast<int>(threadIdx.x) % 4 * 2) {
    if constexpr (can_sum) clear_sums();
  }

  __device__ bool wanted() const { return p_.dbias.data != nullptr && p_.dbias.per_query; }

  // dS of a tile. `last`: of the heads that share the bias.
  __device__ void add(QueryPlace place, const Gradients& ds, bool last) {
    const auto four = [&](int n, int e) {
      const auto of_block = [&](int m) {
        return __byte_perm(ds[m][n / 2][n % 2 * 2], ds[m][n / 2][n % 2 * 2 + 1],
                           e == 0 ? 0x5410 : 0x7632);
      };
      return uint2{of_block(0), of_block(1)};
    };
    if (p_.dbias_add) {
      for_each_query(place,
                     [&](std::int64_t index, int n, int e) { add_in_memory(index, four(n, e)); });
    } else if (!can_sum || p_.shape.heads_q == p_.shape.heads_kv || !shared_by_group()) {
      for_each_query(place, [&](std::int64_t index, int n, int e) { write(index, four(n, e)); });
    } else if constexpr (can_sum) {
#pragma unroll
      for (int n = 0; n < n8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint2 more = four(n, e);
          sums_[n][e] = {add_pair(sums_[n][e].x, more.x), add_pair(sums_[n][e].y, more.y)};
        }
      }
      if (!last) return;
      for_each_query(place, [&](std::int64_t index, int n, int e) { write(index, sums_[n][e]); });
      clear_sums();
    }
  }

  // Zeros for the tiles that a walk of `heads` heads passes after tile `number` and before tile
  // `next`, by the whole block.
  __device__ void clear(int first_head, int heads, int number, int next) const {
    if (p_.dbias_add || next <= number + 1) return;
    const int together = shared_by_group() ? heads : 1;
    const int begin = number < 0 ? 0 : number / together + 1;
    for (int i = begin; i < next / together; ++i) {
      const int tile = i * together;
      const QueryPlace place{first_head + tile % heads, tile / heads * rows, false};
      const int key = tile_.key + static_cast<int>(threadIdx.x) % 32 * 4;
      if (key >= p_.shape.seqlen_k) continue;
      const int end = min(rows, p_.shape.seqlen_q - place.row);
      for (int r = static_cast<int>(threadIdx.x) / 32; r < end;
           r += static_cast<int>(blockDim.x) / 32) {
        write(index(place) + r * p_.dbias.query + key, {0, 0});
      }
    }
  }

 private:
  __device__ bool shared_by_group() const { return p_.dbias.head_q == 0; }

  __device__ std::int64_t index(QueryPlace place) const {
    const Broadcast& b = p_.dbias;
    return tile_.batch * b.batch + place.head * b.head_q + tile_.kv_head * b.head_kv +
           place.row * b.query;
  }

  // Calls body(element of the lane's first key, n, e) for its queries.
  template <class Body>
  __device__ void for_each_query(QueryPlace place, const Body& body) const {
    const int left = key_ < p_.shape.seqlen_k ? p_.shape.seqlen_q - place.row - query_ : 0;
    const int step = static_cast<int>(p_.dbias.query);
    const std::int64_t begin = index(place) + key_ + static_cast<std::int64_t>(query_) * step;
#pragma unroll
    for (int n = 0; n < n8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * n + e < left) body(begin + static_cast<std::int64_t>(8 * n + e) * step, n, e);
      }
    }
  }

  __device__ void write(std::int64_t index, uint2 four) const {
    *reinterpret_cast<uint2*>(p_.dbias.data + 2 * index) = four;
  }

  __device__ void add_in_memory(std::int64_t index, uint2 four) const {
    if (((four.x | four.y) & 0x7fff7fffu) == 0) return;
    float sums[4] = {};
    add_to(sums, four);
    reduce_add(reinterpret_cast<float*>(p_.dbias.data) + index, sums[0], sums[1], sums[2], sums[3]);
  }

  static __device__ void add_to(float (&sums)[4], uint2 four) {
    const auto low = reinterpret_cast<const typename Element<T>::Pair&>(four.x);
    const auto high = reinterpret_cast<const typename Element<T>::Pair&>(four.y);
    sums[0] += Element<T>::widen(low.x);
    sums[1] += Element<T>::widen(low.y);
    sums[2] += Element<T>::widen(high.x);
    sums[3] += Element<T>::widen(high.y);
  }

  __device__ std::uint32_t add_pair(std::uint32_t x, std::uint32_t y) const {
    using Pair = typename Element<T>::Pair;
    const Pair sum = __hadd2(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(y));
    const auto bits = reinterpret_cast<const std::uint32_t&>(sum);
    return p_.saturate ? clamp_pair<T>(bits, Element<T>::gradient_pair) : bits;
  }

  __device__ void clear_sums() {
#pragma unroll
    for (int n = 0; n < n8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) sums_[n][e] = {0, 0};
    }
  }

  const BackwardParams& p_;
  KeyTile tile_;
  int key_;
  int query_;
  uint2 sums_[can_sum ? n8 : 1][2];
};

}  // namespace flash_dmattn::cuda::sm80
