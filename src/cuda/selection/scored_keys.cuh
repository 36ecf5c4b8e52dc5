#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/selection/device.cuh"
#include "flash_dmattn/selection.h"

namespace flash_dmattn::cuda {

// The scores of all rows as unsigned integers in the same order. A row is one (batch, kv head).
struct ScoredKeys {
  const void* scores = nullptr;
  const std::uint8_t* mask = nullptr;  // null: no key is masked
  DType dtype = DType::f32;
  int heads = 1;
  std::int64_t stride[3] = {};
  std::int64_t mask_stride[3] = {};

  ScoredKeys() = default;
  explicit ScoredKeys(const SelectionArgs& args)
      : scores(args.scores),
        mask(args.key_mask),
        dtype(args.scores_dtype),
        heads(static_cast<int>(args.heads)) {
    std::copy(args.scores_stride.begin(), args.scores_stride.end(), stride);
    std::copy(args.key_mask_stride.begin(), args.key_mask_stride.end(), mask_stride);
  }

  // NaN and masked keys; no valid score has this code, since it would be that of a negative NaN.
  static constexpr std::uint32_t never = 0;

  // 0 for a key that must not be chosen, else a code that is higher for a higher score.
  __device__ std::uint32_t code(int row, int key) const {
    const std::int64_t b = row / heads;
    const std::int64_t h = row % heads;
    if (mask != nullptr &&
        mask[b * mask_stride[0] + h * mask_stride[1] + key * mask_stride[2]] == 0) {
      return never;
    }
    const std::int64_t at = b * stride[0] + h * stride[1] + key * stride[2];
    return of_bits(dtype == DType::f32 ? static_cast<const std::uint32_t*>(scores)[at]
                                       : static_cast<const std::uint16_t*>(scores)[at]);
  }

  // Those of several keys, whose loads are in flight together; `never` where a key is negative.
  template <int Count>
  __device__ void codes(int row, const int (&key)[Count], std::uint32_t (&code)[Count]) const {
    const std::int64_t b = row / heads;
    const std::int64_t h = row % heads;
    const std::int64_t begin = b * stride[0] + h * stride[1];
    const auto* const wide = static_cast<const std::uint32_t*>(scores) + begin;
    const auto* const narrow = static_cast<const std::uint16_t*>(scores) + begin;
    if (dtype == DType::f32) {
#pragma unroll
      for (int i = 0; i < Count; ++i) code[i] = key[i] < 0 ? 0 : wide[key[i] * stride[2]];
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) code[i] = key[i] < 0 ? 0 : narrow[key[i] * stride[2]];
    }
    bool shown[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) shown[i] = key[i] >= 0;
    if (mask != nullptr) {
      const std::uint8_t* const row_mask = mask + b * mask_stride[0] + h * mask_stride[1];
#pragma unroll
      for (int i = 0; i < Count; ++i)
        shown[i] = key[i] >= 0 && row_mask[key[i] * mask_stride[2]] != 0;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) code[i] = shown[i] ? of_bits(code[i]) : never;
  }

 private:
  __device__ std::uint32_t of_bits(std::uint32_t bits) const {
    if (dtype == DType::f32) return ordered(bits, 0x80000000u, 0x7f800000u);
    return ordered(bits, 0x8000u, dtype == DType::bf16 ? 0x7f80u : 0x7c00u);
  }

  // Works on the bits, so that subnormal scores keep their order in every compilation mode.
  __device__ static std::uint32_t ordered(std::uint32_t bits, std::uint32_t sign,
                                          std::uint32_t infinity) {
    const std::uint32_t magnitude = bits & (sign - 1u);
    if (magnitude > infinity) return never;
    if (magnitude == 0) return sign;  // -0 and +0 tie
    return (bits & sign) != 0 ? (sign - 1u) - magnitude : sign + magnitude;
  }
};

// The positions of queries among the keys: converts positions to intervals of queries.
struct QueryClip {
  int seqlen_q = 0;
  int shift = 0;  // position of query 0: Sk - Sq
  bool causal = true;

  QueryClip() = default;
  explicit QueryClip(const SelectionArgs& args)
      : seqlen_q(static_cast<int>(args.seqlen_q)),
        shift(static_cast<int>(args.seqlen_k - args.seqlen_q)),
        causal(args.causal) {}

  // Key `position`, visible to queries at positions below `end`.
  __device__ KeyInterval until(int position, int end) const {
    const int last = min(max(end - shift, 0), seqlen_q);
    const int first = first_query(position);
    return first < last ? KeyInterval{first, last} : KeyInterval{0, 0};
  }

  __device__ KeyInterval forever(int position) const { return {first_query(position), seqlen_q}; }

 private:
  __device__ int first_query(int position) const { return causal ? max(position - shift, 0) : 0; }
};

// Bits of a score's code.
inline int score_bits(DType scores) { return scores == DType::f32 ? 32 : 16; }

// One 8-byte store.
__device__ inline void store(KeyInterval* to, KeyInterval interval) {
  *reinterpret_cast<int2*>(to) = make_int2(interval.first, interval.last);
}

}  // namespace flash_dmattn::cuda
