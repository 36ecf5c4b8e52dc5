#pragma once

#include <algorithm>
#include <cstdint>

#include "common/float_types.h"
#include "cuda/selection/device.cuh"
#include "flash_dmattn/selection.h"

namespace flash_dmattn::cuda {

// Maps the scores of all rows to unsigned integers in the same order. A row is one (batch, kv head).
struct ScoredKeys {
  const void* scores = nullptr;
  const std::uint8_t* mask = nullptr;  // null if no key is masked
  DType dtype = DType::f32;
  int heads = 1;
  std::uint32_t least_code = 0;  // that of the threshold
  std::int64_t stride[3] = {};
  std::int64_t mask_stride[3] = {};

  ScoredKeys() = default;
  explicit ScoredKeys(const SelectionArgs& args)
      : scores(args.scores),
        mask(args.key_mask),
        dtype(args.scores_dtype),
        heads(static_cast<int>(args.heads)),
        least_code(code_at_or_above(args.rule.score_threshold, args.scores_dtype)) {
    std::copy(args.scores_stride.begin(), args.scores_stride.end(), stride);
    std::copy(args.key_mask_stride.begin(), args.key_mask_stride.end(), mask_stride);
  }

  // The code of NaN, of masked keys and of those below the threshold. No valid score has it, as it would be the code of a negative NaN.
  static constexpr std::uint32_t never = 0;

  // `never` for a key that must not be chosen, otherwise a code that is higher for a higher score.
  __device__ std::uint32_t code(int row, int key) const {
    const std::int64_t b = row / heads;
    const std::int64_t h = row % heads;
    if (mask != nullptr &&
        mask[b * mask_stride[0] + h * mask_stride[1] + key * mask_stride[2]] == 0) {
      return never;
    }
    const std::int64_t at = b * stride[0] + h * stride[1] + key * stride[2];
    return code_of_bits(dtype == DType::f32 ? static_cast<const std::uint32_t*>(scores)[at]
                                            : static_cast<const std::uint16_t*>(scores)[at]);
  }

  // The codes of the keys first, first + step, ..., whose loads are in flight together; `never` for keys outside [0,
  // end).
  template <int Count>
  __device__ void codes(int row, int first, int step, int end, std::uint32_t (&code)[Count]) const {
    const std::int64_t b = row / heads;
    const std::int64_t h = row % heads;
    const std::int64_t at = b * stride[0] + h * stride[1] + first * stride[2];
    const auto is_key = [&](int i) {
      return static_cast<unsigned>(first + i * step) < static_cast<unsigned>(end);
    };
    if (dtype == DType::f32) {
      load(static_cast<const std::uint32_t*>(scores) + at, step * stride[2], is_key, code);
    } else {
      load(static_cast<const std::uint16_t*>(scores) + at, step * stride[2], is_key, code);
    }
    if (mask != nullptr) {
      std::uint32_t allowed[Count];
      load(mask + b * mask_stride[0] + h * mask_stride[1] + first * mask_stride[2],
           step * mask_stride[2], is_key, allowed);
#pragma unroll
      for (int i = 0; i < Count; ++i) code[i] = allowed[i] == 0 ? nan : code[i];
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) code[i] = code_of_bits(code[i]);
  }

 private:
  static constexpr std::uint32_t nan = 0xffffffffu;  // a NaN in every dtype

  // Loads elements that are `step` apart, or NaN where there is no key.
  template <class T, class IsKey, int Count>
  __device__ static void load(const T* from, std::int64_t step, const IsKey& is_key,
                              std::uint32_t (&to)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i, from += step) to[i] = is_key(i) ? *from : nan;
  }

  __device__ std::uint32_t code_of_bits(std::uint32_t bits) const {
    const std::uint32_t code = code_of_bits(bits, dtype);
    return code < least_code ? never : code;
  }

  // Works on the bits, so that subnormal scores keep their order in every compilation mode, and without branches,
  // because the signs of neighbouring keys differ.
  static __host__ __device__ std::uint32_t code_of_bits(std::uint32_t bits, DType dtype) {
    const std::uint32_t sign = dtype == DType::f32 ? 0x80000000u : 0x8000u;
    const std::uint32_t infinity = dtype == DType::f32    ? 0x7f800000u
                                   : dtype == DType::bf16 ? 0x7f80u
                                                          : 0x7c00u;
    const std::uint32_t magnitude = bits & (sign - 1u);
    const bool is_negative = bits > sign;  // -0 and +0 tie
    const std::uint32_t code = is_negative ? sign - 1u - magnitude : sign + magnitude;
    return magnitude > infinity ? never : code;
  }

  // The code that the scores at or above a threshold have at least.
  static std::uint32_t code_at_or_above(double threshold, DType dtype) {
    std::uint64_t bits = 0;  // room for any dtype
    flash_dmattn::store(&bits, dtype, 0, threshold);
    const double rounded = flash_dmattn::load(&bits, dtype, 0);
    return code_of_bits(static_cast<std::uint32_t>(bits), dtype) + (rounded < threshold ? 1 : 0);
  }
};

// Converts positions of keys to intervals of queries.
struct QueryClip {
  int seqlen_q = 0;
  int shift = 0;  // position of query 0: Sk - Sq
  bool causal = true;

  QueryClip() = default;
  explicit QueryClip(const SelectionArgs& args)
      : seqlen_q(static_cast<int>(args.seqlen_q)),
        shift(static_cast<int>(args.seqlen_k - args.seqlen_q)),
        causal(args.causal) {}

  // The interval of key `position`, which is visible to queries at positions below `end`.
  __device__ KeyInterval interval_until(int position, int end) const {
    const int last = min(max(end - shift, 0), seqlen_q);
    const int first = first_query(position);
    return first < last ? KeyInterval{first, last} : KeyInterval{0, 0};
  }

  __device__ KeyInterval interval_to_last_query(int position) const {
    return {first_query(position), seqlen_q};
  }

 private:
  __device__ int first_query(int position) const { return causal ? max(position - shift, 0) : 0; }
};

// The number of bits of a score's code.
inline int score_bits(DType scores) { return scores == DType::f32 ? 32 : 16; }

// Stores an interval in 8 bytes at once.
__device__ inline void store(KeyInterval* to, KeyInterval interval) {
  *reinterpret_cast<int2*>(to) = make_int2(interval.first, interval.last);
}

}  // namespace flash_dmattn::cuda
