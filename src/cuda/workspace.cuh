#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/common/carver.h"
#include "cuda/common/key_runs.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/policy.h"
#include "cuda/problem.h"
#include "cuda/sm80/params.h"

// What a call keeps in the caller's workspace, and which kernels that follows from.
namespace flash_dmattn::cuda {

// What query tiles walk where there are intervals and no lists of keys.
struct KeyRunsWorkspace {
  KeyBlock* blocks = nullptr;
  KeyRun* runs = nullptr;

  KeyRunsWorkspace() = default;
  KeyRunsWorkspace(const Problem& p, const Inputs& in, bool planned, Carver& carver) {
    if (in.visibility.intervals.data == nullptr || planned) return;
    const std::int64_t rows = p.intervals_shape[0] * p.intervals_shape[1];
    const KeyRunsParams sizes = params(p, in);
    blocks = carver.take<KeyBlock>(rows * sizes.key_blocks());
    runs = carver.take<KeyRun>(rows * sizes.query_tiles());
  }

  KeyRunsParams params(const Problem& p, const Inputs& in) const {
    return {.intervals = in.visibility.intervals,
            .heads = static_cast<int>(p.intervals_shape[1]),
            .seqlen_q = static_cast<int>(p.seqlen_q),
            .seqlen_k = static_cast<int>(p.seqlen_k),
            .causal = p.causal,
            .blocks = blocks,
            .runs = runs};
  }
};

// The mask is packed where the kernels walk all keys; with a list they read single elements.
inline PackedMask carve_packed_mask(const Problem& p, bool planned, Carver& workspace) {
  PackedMask packed;
  if (planned || !masks_pairs(p)) return packed;
  const auto shape = packed_shape(p);
  const std::int64_t words = (p.seqlen_k + PackedMask::side - 1) / PackedMask::side;
  const std::int64_t matrices = shape[0] * shape[1];
  const std::int64_t row_tiles = (p.seqlen_q + PackedMask::side - 1) / PackedMask::side;
  packed.bits = workspace.take<std::uint64_t>(matrices * row_tiles * PackedMask::side * words);
  packed.states = workspace.take<std::uint8_t>(matrices * row_tiles * words);
  packed.words = static_cast<int>(words);
  packed.batch = shape[0] > 1 ? static_cast<int>(shape[1]) : 0;
  if (shape[1] > 1) (shape[1] == p.heads_q ? packed.head_q : packed.head_kv) = 1;
  return packed;
}

// ---- Backward -----------------------------------------------------------------------------------

inline std::int64_t elements(const BroadcastShape& shape) {
  return shape[0] * shape[1] * shape[2] * shape[3];
}

// What the fp32 sums of dbias are of. Heads and batch elements have sums of their own where these are
// not pairs: then no two blocks add to the same one in an order that varies.
inline BroadcastShape bias_sum_shape(const Problem& p) {
  const BroadcastShape& bias = p.bias_shape;
  if (bias[2] <= 1) {
    return {p.batch, bias[1] == p.heads_q ? p.heads_q : p.heads_kv, 1, p.seqlen_k};
  }
  if (bias[3] <= 1) return {p.batch, p.heads_q, p.seqlen_q, 1};
  return bias;
}

// Whether the elements of the bias and of its gradient, if wanted, lie in fours.
inline bool bias_in_fours(const BackwardArgs& args) {
  const Problem& p = args.problem;
  const auto in_fours = [&](const void* data, const std::array<std::int64_t, 4>& stride) {
    return broadcast_of(p, p.bias_shape, data, stride, size_of(p.bias_dtype)).in_fours;
  };
  return in_fours(args.in.bias.data, args.in.bias.stride) &&
         (args.dbias.data == nullptr || in_fours(args.dbias.data, args.dbias.stride));
}

// Which kernel makes the gradients. It follows from shapes, but for elements of pairs that do not
// lie in fours.
struct BackwardRoute {
  bool key_major;  // the kernel that owns keys
  bool adds_bias;  // several pairs share an element of dbias: fp32 sums in memory

  // `fours`: the elements of pairs lie in fours, as far as alignment goes.
  BackwardRoute(const Problem& p, bool planned, SharedClass shared, bool fours) {
    const int bucket = head_dim_bucket(static_cast<int>(p.head_dim));
    const bool pairs = masks_pairs(p) || has_pairs(p.bias_shape);
    const bool bias_in_fours =
        !has_pairs(p.bias_shape) || (fours && p.bias_shape[3] > 1 && size_of(p.bias_dtype) == 2);
    // Not with a list, nor with a softcap's slope, which its warps would have to hand over with P, nor
    // where its additions to the gradient of a bias of pairs would have to take turns.
    key_major = has_key_major_backward(bucket, shared) && p.softcap <= 0 && !planned &&
                (!pairs || (!p.deterministic && p.seqlen_k % 4 == 0 && bias_in_fours));
    // The two heads of a group are walked together, unless their keys are seen by different queries.
    const bool apart =
        has(p.mask_shape) && !masks_pairs(p) && p.mask_shape[1] == p.heads_q && p.heads_q > 1;
    const bool sums_heads =
        key_major && sums_pair_gradients(bucket) && p.heads_q == 2 * p.heads_kv && !apart;
    const BroadcastShape& bias = p.bias_shape;
    const bool own_element = bias[0] == p.batch && bias[2] == p.seqlen_q && bias[3] == p.seqlen_k &&
                             (bias[1] == p.heads_q || (bias[1] == p.heads_kv && sums_heads));
    adds_bias = !own_element || p.seqlen_q == 1;
  }
};

// Blocks of the main loop.
inline std::int64_t backward_blocks(const Problem& p, bool key_major, SharedClass shared) {
  const int bucket = head_dim_bucket(static_cast<int>(p.head_dim));
  return key_major ? KeyTile::count(shape_of(p), owned_keys)
                   : QueryTile::count(shape_of(p), backward_policy(bucket, shared).rows);
}

inline std::int64_t query_sum_floats(const Shape& shape) {
  switch (head_dim_bucket(shape.head_dim)) {
    case 64: return sm80::QuerySumTile<64>::count(shape) * sm80::QuerySumTile<64>::floats;
    default: return sm80::QuerySumTile<128>::count(shape) * sm80::QuerySumTile<128>::floats;
  }
}

struct BackwardWorkspace {
  float* lse2;
  float* lse2_low;
  float* delta;
  // Zeroed before the main loop, together.
  std::uint32_t* flags;
  Turns turns;
  float* dk_sum;
  float* dv_sum;
  float* dq_sum;
  float* dbias_sum;
  std::size_t zeroed_bytes;
  PackedMask packed_mask;
  KeyRunsWorkspace runs;
  std::size_t bytes;

  BackwardWorkspace(const Problem& p, const Inputs& in, bool planned, BackwardRoute route,
                    SharedClass shared, void* base) {
    Carver carver(base);
    const std::int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    lse2 = carver.take<float>(rows);
    lse2_low = carver.take<float>(rows);
    delta = carver.take<float>(rows);
    const std::size_t zeroed_begin = carver.used();
    const std::int64_t key_sums =
        route.key_major
            ? 0
            : p.batch * p.heads_kv * p.seqlen_k * sm80::sum_columns(static_cast<int>(p.head_dim));
    flags = carver.take<std::uint32_t>(1);
    if (p.deterministic) {
      turns.started = carver.take<int>(1);
      turns.passed = carver.take<int>(backward_blocks(p, route.key_major, shared));
      turns.across_heads = has_pairs(p.bias_shape) && p.bias_shape[3] > 1 &&
                           (p.bias_shape[0] < p.batch || p.bias_shape[1] < p.heads_kv);
    }
    dk_sum = carver.take<float>(key_sums);
    dv_sum = carver.take<float>(key_sums);
    dq_sum = carver.take<float>(route.key_major ? query_sum_floats(shape_of(p)) : 0);
    dbias_sum =
        carver.take<float>(has(p.bias_shape) && route.adds_bias ? elements(bias_sum_shape(p)) : 0);
    zeroed_bytes = carver.used() - zeroed_begin;
    packed_mask = carve_packed_mask(p, !route.key_major, carver);
    if (!route.key_major) runs = KeyRunsWorkspace(p, in, planned, carver);
    bytes = carver.used();
  }
};

}  // namespace flash_dmattn::cuda
