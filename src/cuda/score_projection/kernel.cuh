#pragma once

#include <cstddef>
#include <cstdint>

#include "common/score_form.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/warp.cuh"

// The projection of scores (flash_dmattn/scores.h). A lane of a warp has two of the 64 partial sums of each token and head:
// features 2 lane and 2 lane + 1 of every 64. Products and sums are rounded apart, as on CPUs without a fused form; the
// intrinsics keep the compiler from fusing them.
namespace flash_dmattn::cuda {

struct ScoreProjectionParams {
  const void* hidden;
  const void* weight;
  const void* bias;    // may be null
  const void* factor;  // may be null
  float* scores;       // [batch, heads, seqlen]
  std::int64_t hidden_batch;
  std::int64_t hidden_token;
  std::int64_t weight_head;
  std::int64_t tokens;  // of all rows
  std::int64_t seqlen;
  unsigned features;  // below 2^31, so that sums with a warp's width fit
  int heads;
  flash_dmattn::ScoreForm form;
  DType bias_dtype;
  DType factor_dtype;
  bool
      has_aligned_pairs;  // features 2 i and 2 i + 1 of every token and head are in one aligned word
  int head_groups = 1;    // of the heads that a warp computes
};

template <class T>
struct FeaturePair {
  using Word = std::uint32_t;
  static __device__ float2 widen(Word word) { return Element<T>::widen_packed2(word); }
  static __device__ float widen_one(T x) { return Element<T>::widen(x); }
};

template <>
struct FeaturePair<float> {
  using Word = float2;
  static __device__ float2 widen(Word word) { return word; }
  static __device__ float widen_one(float x) { return x; }
};

// Loads the features f and f + 1 of a row, or 0 beyond its end. The row may begin at any element.
template <class T>
__device__ inline float2 load_single_features(const T* row, unsigned f, unsigned features) {
  return {f < features ? FeaturePair<T>::widen_one(row[f]) : 0.0f,
          f + 1 < features ? FeaturePair<T>::widen_one(row[f + 1]) : 0.0f};
}

// A bias or a factor of a head.
__device__ inline float load_of_head(const void* data, DType dtype, int head) {
  switch (dtype) {
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[head]);
    case DType::f16: return __half2float(static_cast<const __half*>(data)[head]);
    default: return static_cast<const float*>(data)[head];
  }
}

__device__ inline void add_products(float2& sum, float2 features, float2 weights) {
  sum.x = __fadd_rn(sum.x, __fmul_rn(features.x, weights.x));
  sum.y = __fadd_rn(sum.y, __fmul_rn(features.y, weights.y));
}

// Adds each half of the partial sums of a warp to the other half. While a lane has sums of several results, it keeps half
// of the results and gives the others away, so that in the end each lane has few.
template <int Results, int Distance = warp_size / 2>
__device__ inline void fold_lanes(float2* sums) {
  if constexpr (Results > 1) {
    constexpr int half = Results / 2;
    const bool is_upper = (lane_id() & Distance) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float2 given = is_upper ? sums[i] : sums[i + half];
      const float2 kept = is_upper ? sums[i + half] : sums[i];
      sums[i] = {__fadd_rn(kept.x, shuffle_xor(given.x, Distance)),
                 __fadd_rn(kept.y, shuffle_xor(given.y, Distance))};
    }
  } else {
    *sums = {__fadd_rn(sums->x, shuffle_xor(sums->x, Distance)),
             __fadd_rn(sums->y, shuffle_xor(sums->y, Distance))};
  }
  if constexpr (Distance > 1) fold_lanes<(Results > 1 ? Results / 2 : 1), Distance / 2>(sums);
}

// A warp computes Tokens consecutive tokens of all rows and Heads heads. It reads its tokens once; weights come from the L1,
// where other warps have read them: shared memory would have to be refilled for each part of the features, and a step of
// few tokens would wait for it.
template <class T, class Weight, int Tokens, int Heads, int Warps, int MinBlocks>
struct ScoreProjectionKernel {
  using Params = ScoreProjectionParams;
  struct SharedStorage {};
  static constexpr int threads = Warps * warp_size;
  static constexpr int min_blocks = MinBlocks;
  static constexpr int tokens = Tokens;
  static constexpr int heads = Heads;

  static std::int64_t blocks(const Params& p) {
    const std::int64_t tiles = (p.tokens + Tokens - 1) / Tokens;
    return (tiles + Warps - 1) / Warps * p.head_groups;
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const std::int64_t tile =
        static_cast<std::int64_t>(blockIdx.x) / p.head_groups * Warps + warp_id();
    const std::int64_t first = tile * Tokens;
    if (first >= p.tokens) return;
    const int head = static_cast<int>(blockIdx.x % p.head_groups) * Heads;

    const T* hidden[Tokens];
#pragma unroll
    for (int t = 0; t < Tokens; ++t) {
      const std::int64_t token = first + t < p.tokens ? first + t : p.tokens - 1;
      hidden[t] = static_cast<const T*>(p.hidden) + token / p.seqlen * p.hidden_batch +
                  token % p.seqlen * p.hidden_token;
    }
    const Weight* weight[Heads];
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      const int own = head + h < p.heads ? head + h : p.heads - 1;
      weight[h] = static_cast<const Weight*>(p.weight) + own * p.weight_head;
    }
    float2 sums[Heads * Tokens] = {};
    add_all(p, hidden, weight, sums);
    fold_lanes<Heads * Tokens>(sums);
    store(p, first, head, __fadd_rn(sums->x, sums->y));
  }

 private:
  using Features = FeaturePair<T>;
  using Weights = FeaturePair<Weight>;
  static constexpr unsigned block = 2 * warp_size;  // features of one load
  // Loads of tokens' features that are in flight at a time: 16 words of a lane.
  static constexpr int steps = 64 / static_cast<int>(sizeof(typename Features::Word)) / Tokens;

  static __device__ void add_all(const Params& p, const T* const (&hidden)[Tokens],
                                 const Weight* const (&weight)[Heads], float2* sums) {
    const unsigned lane = 2 * static_cast<unsigned>(lane_id());
    unsigned f = lane;
    if (p.has_aligned_pairs) {
      for (; f - lane + steps * block <= p.features; f += steps * block) {
        typename Features::Word words[steps][Tokens];
#pragma unroll
        for (int step = 0; step < steps; ++step) {
#pragma unroll
          for (int t = 0; t < Tokens; ++t) {
            words[step][t] = __ldcs(
                reinterpret_cast<const typename Features::Word*>(hidden[t] + f + step * block));
          }
        }
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          float2 features[Tokens];
#pragma unroll
          for (int t = 0; t < Tokens; ++t) features[t] = Features::widen(words[step][t]);
#pragma unroll
          for (int h = 0; h < Heads; ++h) {
            const float2 weights = Weights::widen(__ldg(
                reinterpret_cast<const typename Weights::Word*>(weight[h] + f + step * block)));
#pragma unroll
            for (int t = 0; t < Tokens; ++t) {
              add_products(sums[h * Tokens + t], features[t], weights);
            }
          }
        }
      }
    }
    // The rest of the features, or all of them if pairs are not aligned. Every lane takes part, with zeros beyond the end.
    for (; f - lane < p.features; f += block) {
      float2 features[Tokens];
#pragma unroll
      for (int t = 0; t < Tokens; ++t) {
        features[t] = load_single_features(hidden[t], f, p.features);
      }
#pragma unroll
      for (int h = 0; h < Heads; ++h) {
        const float2 weights = load_single_features(weight[h], f, p.features);
#pragma unroll
        for (int t = 0; t < Tokens; ++t) {
          add_products(sums[h * Tokens + t], features[t], weights);
        }
      }
    }
  }

  // Stores this lane's result. After fold_lanes, groups of warp_size / (Heads Tokens) lanes have the same one.
  static __device__ void store(const Params& p, std::int64_t first, int head, float score) {
    constexpr int copies = warp_size / (Heads * Tokens);
    static_assert(copies >= 1 && warp_size % (Heads * Tokens) == 0);
    const int result = lane_id() / copies;
    const std::int64_t token = first + result % Tokens;
    const int own_head = head + result / Tokens;
    if (lane_id() % copies != 0 || token >= p.tokens || own_head >= p.heads) return;
    if (p.bias != nullptr) score = __fadd_rn(score, load_of_head(p.bias, p.bias_dtype, own_head));
    const float factor =
        p.factor == nullptr ? 0.0f : load_of_head(p.factor, p.factor_dtype, own_head);
    p.scores[(token / p.seqlen * p.heads + own_head) * p.seqlen + token % p.seqlen] =
        score_of(p.form, score, factor);
  }
};

}  // namespace flash_dmattn::cuda
