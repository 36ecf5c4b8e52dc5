#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/warp.cuh"
#include "cuda/sm90/forward/quad_transpose.cuh"
#include "cuda/sm90/forward/repetition.cuh"
#include "cuda/sm90/forward/work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

// Two packed elements, each of which becomes NaN once an element of `two` was not finite.
template <class T>
__device__ inline std::uint32_t add_non_finite(std::uint32_t seen, std::uint32_t two) {
  using Packed2 = typename Element<T>::Packed2;
  const Packed2 result = __hfma2(reinterpret_cast<const Packed2&>(two), Element<T>::pack(0, 0),
                                 reinterpret_cast<const Packed2&>(seen));
  return reinterpret_cast<const std::uint32_t&>(result);
}

// A row of the output.
struct OutputRow {
  int head;
  int query;
};

// What was subtracted from a row's scores: the sum of a term in units of log 2 and of one in the caller's units.
struct RowOffset {
  float log2;
  float reference;
};

// Stores out / sum and lse = log 2 (offset + log2 sum) of a thread's two rows from registers. The lanes of a quad
// exchange words so that each stores 16 bytes. There are no branches (ptx.cuh). Rows that overflow fp32 or the output's
// dtype, or that see no key, get an lse of NaN and are recomputed and saturated later (fix_rows.cuh).
template <class Kernel>
__device__ inline void store_output(const ForwardKernelParams& params, const WorkTile& work,
                                    const OutputRow (&rows)[2],
                                    const float (&out)[Kernel::value_dim / 2],
                                    const float (&sums)[2], const RowOffset (&offsets)[2]) {
  using T = typename Kernel::Element;
  const ForwardParams& p = params.forward;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const bool empty = !work.has_keys();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto [head, query] = rows[h];
    const bool exists = query < p.shape.seqlen_q;
    const float sum = quad_sum(sums[h]);

    const float inverse = sum > 0 ? reciprocal_approx(sum) : 0;
    std::byte* const to = p.out.data + work.batch * p.out.batch + head * p.out.head +
                          query * p.out.row + lane % 4 * 16;
    std::uint32_t non_finite = 0;
#pragma unroll
    for (int chunk = 0; chunk < Kernel::value_dim / 8; chunk += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const two = out + 4 * (chunk + j) + 2 * h;
        words[j] = pack<T>(two[0] * inverse, two[1] * inverse);
        non_finite = add_non_finite<T>(non_finite, words[j]);
      }
      transpose_in_quad(words);
      const bool stores = exists && chunk + lane % 4 < p.shape.value_dim / 8;
      if constexpr (Kernel::load == KeyLoad::any) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          store_16_bits_if(stores, to + chunk * 16 + i * 2, words[i / 2] >> (i % 2 * 16));
      } else {
        store_if(stores, to + chunk * 16, words);
      }
    }
    non_finite |= shuffle_xor(non_finite, 1);
    non_finite |= shuffle_xor(non_finite, 2);

    constexpr float largest = 3.4028235e38f;
    // A tile without keys multiplies hidden rows of V by 0, and these rows may have any value.
    const bool ordinary =
        non_finite == 0 && (empty || (sum > 0 && sum <= largest && fabsf(offsets[h].log2) < 1e38f &&
                                      fabsf(offsets[h].reference) < 1e38f));
    constexpr double ln2 = 0.6931471805599453;
    const double log2_weight =
        static_cast<double>(offsets[h].log2) + static_cast<double>(log2_approx(sum));
    const double lse = log2_weight * ln2 + static_cast<double>(offsets[h].reference);
    const float rounded = static_cast<float>(lse);
    const std::int64_t lse_row =
        (static_cast<std::int64_t>(work.batch) * p.shape.heads_q + head) * p.shape.seqlen_q + query;
    const bool stores_lse = lane % 4 == 0 && exists;
    store_if(stores_lse, p.lse + lse_row,
             !ordinary ? __int_as_float(0x7fffffff)
             : empty   ? negative_infinity
                       : rounded);
    store_if(stores_lse && p.lse_low != nullptr, p.lse_low + lse_row,
             empty ? 0.0f : static_cast<float>(lse - static_cast<double>(rounded)));
    const bool has_flag = !Kernel::can_be_short || params.needs_fix != nullptr;
    set_flag_if(stores_lse && !ordinary && has_flag, params.needs_fix);
    if constexpr (is_repeated(Kernel::repetition)) {
      set_flag_if(stores_lse && is_large_row(offsets[h].log2) && params.has_large_rows != nullptr,
                  params.has_large_rows);
    }
  }
}

}  // namespace flash_dmattn::cuda::sm90
