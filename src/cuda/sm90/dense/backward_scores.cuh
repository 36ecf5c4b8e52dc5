#pragma once

#include "cuda/attention/score.cuh"
#include "cuda/hopper/ptx.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/query_visits.cuh"

// Adds a dense mask and bias to a backward warp's scores, [16 keys, 64 queries], and stores dS for the gradient of the
// bias. Mask and bias are the initial values of the accumulators of S, -inf where masked.
namespace flash_dmattn::cuda::sm90 {

template <class Kernel>
struct NoDenseScores {
  __device__ NoDenseScores(const BackwardKernelParams&, typename Kernel::SharedStorage&, int) {}
  template <class Visit>
  __device__ void begin(const BackwardWork&, const Visit&, int) {}
  template <class Visit, class Scores>
  __device__ void begin_scores(const Visit&, int, Scores&) const {}
  template <class Visit, class Packed>
  __device__ void sum_heads(const Visit&, const Packed&, int) const {}
};

// Common to both DenseAccess.
template <class Kernel>
class DenseScores {
 protected:
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using ScoreTile = typename Storage::ScoreTile;
  static constexpr int rows = Kernel::policy.rows;
  static constexpr int block_bytes = 16 * panel_row_bytes;  // 16 queries

 public:
  __device__ DenseScores(const BackwardKernelParams& p, Storage& storage, int warpgroup)
      : p_(p), storage_(storage), warpgroup_(warpgroup) {}

  // dS, packed, becomes rows of keys in the tile of visit n.
  template <class Visit>
  __device__ void store_ds(const Visit& at, const std::uint32_t (&ds)[rows / 4], int n) const {
    if constexpr (Kernel::variant.dense == DenseAccess::elements)
      storage_.dense.computed.wait_empty(n);
    const std::uint32_t to = fragment_of(n);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const std::uint32_t block[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      stmatrix_x4_trans(to + static_cast<std::uint32_t>(i * block_bytes), block);
    }
    fence_async_proxy();
    if (!at.is_second_of_two()) hand_over(n);
  }

  // Adds dS of the second of two heads to dS of the first, in the first's tile, because dQ of the second reads its own.
  // Called by the warps that stored both, after a barrier of all consumers, when dQ of the first is complete. Runs
  // during dQ of the second, before dK reads the registers of dS. Rounds like an fp32 sum that is stored.
  template <class Visit>
  __device__ void sum_heads(const Visit& at, const std::uint32_t (&ds)[rows / 4], int n) const {
    if (!at.is_second_of_two()) return;
    const std::uint32_t first = fragment_of(n - 1);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      const std::uint32_t address = first + static_cast<std::uint32_t>(i * block_bytes);
      std::uint32_t block[4];
      ldmatrix_x4_trans(block, address);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        block[j] = add_gradients_packed2<T>(block[j], ds[4 * i + j], p_.backward.saturate);
      }
      stmatrix_x4_trans(address, block);
    }
    fence_async_proxy();
    hand_over(n);
  }

 protected:
  // The lane's part of a tile, in the order of stmatrix.
  __device__ std::uint32_t fragment_of(int n) const {
    return shared_address(storage_.ds[Pipeline<Kernel::policy.score_tiles>::stage(n)]) +
           fragment_offset();
  }

  // Hands the tile to the writer of dbias; one lane arrives for the warp.
  __device__ void hand_over(int n) const {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(storage_.dense.computed.full_of(n));
  }

  __device__ int warp() const { return static_cast<int>(threadIdx.x) / 32 % 4; }

  // Offset of the lane's row in the warp's first 16 x 16 block of a [queries][keys] tile. Its 8 x 8 matrices are of
  // queries and keys (0, 0), (0, 8), (8, 0), (8, 8), as the registers of an A operand have them transposed.
  __device__ std::uint32_t fragment_offset() const {
    // Recomputed at each use: the loop has no register for it.
    int lane = lane_id();
    make_opaque(lane);
    const int query = lane / 16 * 8 + lane % 8;
    const int chunk = warpgroup_ * 8 + warp() * 2 + lane / 8 % 2;
    return ScoreTile::offset(query, chunk);
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const int warpgroup_;
};

// Reads from shared memory (DenseAccess::tiles). A thread keeps its biases in 16 bits, -inf where masked. It loads them
// during the products of the previous tile, once for all heads that share them.
template <class Kernel>
class DenseTileScores : public DenseScores<Kernel> {
  using Base = DenseScores<Kernel>;
  using Base::p_, Base::storage_, Base::warpgroup_, Base::rows;
  using typename Base::T;

 public:
  using Base::Base;

  template <class Visit>
  __device__ void begin(const BackwardWork&, const Visit& at, int n) {
    load(at.masked(), n);
  }

  // Loads the biases for the visit after `at`, which is visit n. After the last visit it loads that one again, because
  // a branch would keep old values in registers.
  template <class Visit>
  __device__ void load_next(const Visit& at, int n) {
    if constexpr (Kernel::policy.keeps_biases) {
      if (warp_any(at.loads_next())) load(at.next_masked(), n + 1);
    } else {
      load(at.next_masked(), at.is_last() ? n : n + 1);
    }
  }

  template <class Visit>
  __device__ void begin_scores(const Visit&, int n, float (&scores)[rows / 2]) const {
    const float factor = p_.bias_factor;
#pragma unroll
    for (int i = 0; i < rows / 4; ++i) {
      const float2 bias = Element<T>::widen_packed2(biases_[i]);
      scores[2 * i] = fmaf(bias.x, factor, scores[2 * i]);
      scores[2 * i + 1] = fmaf(bias.y, factor, scores[2 * i + 1]);
    }
    // The tile may now take dS: its loader has waited for the writer of dbias. The wait is here and not before dS is
    // stored, because the compiler would move these instructions past a wait for a product.
    pin(scores);
    storage_.dense.loaded.wait_full(n);
  }

 private:
  __device__ void load(bool masked, int n) {
    storage_.dense.loaded.wait_full(n);
    const int tile = Pipeline<Kernel::policy.score_tiles>::stage(n);
    const std::uint32_t biases = this->fragment_of(n);
    // Per query, a warpgroup's 64 keys are one 64-bit word and a warp's 16 keys a quarter of it.
    const std::uint32_t bits =
        shared_address(storage_.dense.bits[tile][warpgroup_]) +
        static_cast<std::uint32_t>(lane_id() % 4 * 16 + this->warp() / 2 * 4);
    // Moves the thread's keys to the highest bits of two bytes, which spread to the two queries' elements.
    const int shift = 7 - lane_id() / 4;
    const std::uint32_t bytes = 0xcc88u + static_cast<std::uint32_t>(this->warp() % 2) * 0x2222u;
    // Branch-free: a missing mask shows all, a missing bias is 0.
    const std::uint32_t unmasked = masked ? 0 : ~0u;
    const std::uint32_t has_bias = p_.backward.score.bias.dense ? ~0u : 0;
    const std::uint32_t mask_values = packed_mask_value<T>(p_.backward.score);
#pragma unroll
    for (int i = 0; i < rows / 16; ++i) {
      std::uint32_t block[4];
      ldmatrix_x4_trans(block, biases + static_cast<std::uint32_t>(i * Base::block_bytes));
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        std::uint32_t seen[2];  // of two queries
#pragma unroll
        for (int e = 0; e < 2; ++e)
          seen[e] = load_shared_4(bits + static_cast<std::uint32_t>((8 * j + e) * 8)) << shift;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::uint32_t visible =
              spread_signs(seen[0], seen[1], bytes + static_cast<std::uint32_t>(h) * 0x1111u);
          biases_[2 * j + h] = hide_masking_biases<T>(block[j % 2 * 2 + h] & has_bias, mask_values,
                                                      visible | unmasked);
        }
      }
    }
  }

  std::uint32_t biases_[rows / 4];
};

// Reads from global memory (DenseAccess::elements), any dtype and strides. Keys and queries past the end read the last
// ones: the key info hides such keys, and such queries have no P.
template <class Kernel>
class DenseElementScores : public DenseScores<Kernel> {
  using Base = DenseScores<Kernel>;
  using Base::p_, Base::storage_, Base::warpgroup_, Base::rows;
  using typename Base::T;

 public:
  using Base::Base;

  template <class Visit>
  __device__ void begin(const BackwardWork&, const Visit&, int) {}

  template <class Visit>
  __device__ void load_next(const Visit&, int) {}

  template <class Visit>
  __device__ void begin_scores(const Visit& at, int, float (&scores)[rows / 2]) const {
    const ScoreParams& score = p_.backward.score;
    const std::int64_t mask = begin_of(score.mask, at.head());
    const std::int64_t bias = begin_of(score.bias, at.head());
    const int last_query = p_.backward.shape.seqlen_q - 1;
    const int first_query = at.tile() * rows + 2 * (lane_id() % 4);
    const float factor = p_.bias_factor;
    const int last_key = p_.backward.shape.seqlen_k - 1;
    const int first_key = storage_.work[0].key + row();
    const int key[2] = {min(first_key, last_key), min(first_key + 8, last_key)};
#pragma unroll
    for (int j = 0; j < rows / 8; ++j) {
      // Limits the loads in flight to the registers that there are.
      if (j % 2 == 0) compiler_fence();
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::int64_t query = min(first_query + 8 * j + e, last_query);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& s = scores[4 * j + 2 * h + e];
          bool visible = true;
          if (score.mask.dense) {
            const auto* const from = reinterpret_cast<const std::uint8_t*>(score.mask.data);
            visible = from[mask + query * score.mask.query + key[h] * score.mask.key] != 0;
          }
          if (score.bias.dense) {
            const float value =
                load_bias<T>(score.bias, bias + query * score.bias.query + key[h] * score.bias.key);
            visible = visible && value > score.mask_value;
            s = fmaf(value, factor, s);
          }
          if (!visible) s = negative_infinity;
        }
      }
    }
  }

 private:
  __device__ std::int64_t begin_of(const Broadcast& b, int head) const {
    const BackwardWork& work = storage_.work[0];
    return work.batch * b.batch + head * b.head_q + work.kv_head * b.head_kv;
  }

  // The thread's first key in the block.
  __device__ int row() const { return warpgroup_ * 64 + this->warp() * 16 + lane_id() / 4; }
};

}  // namespace flash_dmattn::cuda::sm90
