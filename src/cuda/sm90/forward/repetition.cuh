#pragma once

#include "cuda/sm90/forward/params.h"
#include "cuda/sm90/policy.h"

// The repetition of a call or of a block's work tile, if it has large rows.
//
// Accumulators that begin with a large bias of a key lose digits of products. Kernels with ForwardVariant::shapes add biases
// later, less a reference of their row, and are slower. They do the second run of a call whose first run finds a large row:
//
// - The consumer that stores a row tests its offset, which follows its largest score. Keys far below that have no weight.
// - Long calls have a flag in memory. After it is set, blocks of the first run take no more work. The kernel of the second
//   run is always launched. It returns at once without the flag, and otherwise stores every row again, so that results do
//   not depend on the time at which the first run stopped. PrepareForward clears the flag and both runs' work counters.
// - A block of a short call has one work tile, a flag in shared memory and both loops. The second has new barriers.
// - Both runs have the same work tiles, lists, ranges of keys and needs_fix, whose marks of the first run cost a test only.
// - The second run reads KeyInfo::caller_biases, or its warps compute the same: -inf where mask or bias hide a key, as in the
//   first run. Delayed biases have no such array; their calls are not repeated.
namespace flash_dmattn::cuda::sm90 {

// The part of a kernel in a repetition.
enum class Repetition : std::uint8_t {
  none,
  by_kernel,  // its calls are repeated by another kernel, and never short
  by_block,   // the same, but short calls are repeated by their blocks
  repeats,    // it repeats calls, or runs first and alone
};

constexpr Repetition repetition_of(int head_dim, int value_dim, const ForwardVariant& variant) {
  if (!variant.has_key_info || variant.dense != DenseAccess::none) return Repetition::none;
  if (variant.shapes) return Repetition::repeats;
  // With gathered keys the second loop would spill registers.
  const bool by_block = variant.load == KeyLoad::tma && value_dim == head_dim;
  return by_block ? Repetition::by_block : Repetition::by_kernel;
}
constexpr bool is_repeated(Repetition r) {
  return r == Repetition::by_kernel || r == Repetition::by_block;
}
constexpr ForwardVariant repeating_variant(int head_dim, ForwardVariant variant) {
  variant.shapes = true;
  if (!has_kernel(head_dim, variant)) variant.load = KeyLoad::any;
  return variant;
}

// Whether a call of a repeated kernel may have large rows.
inline __host__ __device__ bool may_have_large_rows(const ScoreParams& score) {
  return has_key_bias(score) && score.bias_delay == 0;
}
// Whether scores have a size at which their rounding, in units of log 2, exceeds that of weights in fp16.
__device__ inline bool is_large_row(float log2_offset) { return fabsf(log2_offset) > 4096; }

// Whether a kernel's run is the first or the second one of a long call that may be repeated.
__device__ inline bool is_first_run(Repetition r, const ForwardKernelParams& p) {
  return is_repeated(r) && p.has_large_rows != nullptr;
}
__device__ inline bool is_second_run(Repetition r, const ForwardKernelParams& p) {
  return r == Repetition::repeats && p.has_large_rows != nullptr;
}

}  // namespace flash_dmattn::cuda::sm90
