#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "flash_dmattn/types.h"

namespace flash_dmattn {

// The treatment of non-finite values. Finite inputs give finite results either way up to overflow.
enum class NonFinite : std::uint8_t {
  // Non-finite elements of dout and dlse count as 0. Gradients saturate on conversion: bf16 at +-1.69e38
  // (half its maximum), f16 at +-65504, f32 at its maximum; a NaN becomes the positive limit. On a GPU dt
  // saturates in the same way before it is multiplied in low precision; on the CPU only stored
  // results are limited. out saturates at its dtype's maximum.
  saturate,
  // inf and NaN pass through, as GradScaler and the search for a divergence need them.
  propagate,
};

// Shape of a mask or a bias: ({B|1}, {Hq|Hkv|1}, {Sq|1}, {Sk|1}). All zero: there is none.
using BroadcastShape = std::array<std::int64_t, 4>;

// A problem without its data: what decides whether and how it can be computed. Sizes and dtypes have no default (-1 and
// no_dtype are refused) but value_dim.
struct Problem {
  std::int64_t batch = -1;
  // A multiple of heads_kv; head h uses kv head h / (heads_q / heads_kv).
  std::int64_t heads_q = -1;
  std::int64_t heads_kv = -1;
  std::int64_t seqlen_q = -1;  // any length may be 0
  std::int64_t seqlen_k = -1;
  std::int64_t head_dim = -1;   // D, 1..256, of q and k
  std::int64_t value_dim = 0;   // Dv, 1..D, of v and out; 0 = D
  DType dtype = no_dtype;       // of q, k, v, out and their gradients
  Device device = Device::cpu;  // of every pointer of the call, workspace included

  // The factor on q . k; default_scale(head_dim) is customary. scale and softcap must be finite in fp32 (in double for
  // an f64 problem); kernels round them once.
  double scale = std::numeric_limits<double>::quiet_NaN();
  double softcap = 0;  // c; 0 = none
  bool causal = false;
  bool deterministic = false;  // the CPU backends always are
  NonFinite nonfinite = NonFinite::saturate;

  BroadcastShape mask_shape{};
  BroadcastShape bias_shape{};
  DType bias_dtype = no_dtype;  // where there is a bias: dtype, or f32; dbias has it too
  // W; 0 = none. The bias of key j counts only for queries at positions i + Sk - Sq >= j + W. The bias then has no query
  // dimension.
  std::int64_t bias_delay = 0;

  // [B|1, Hkv|1] of the key intervals in Inputs::visibility; zeros mean that there are none.
  std::array<std::int64_t, 2> intervals_shape{};

  bool operator==(const Problem&) const = default;
};

// The head dimension of v, out and their gradients.
constexpr std::int64_t value_dim_of(const Problem& p) {
  return p.value_dim == 0 ? p.head_dim : p.value_dim;
}

// The shapes of q, k, v and out.
constexpr std::array<std::int64_t, 4> query_shape(const Problem& p) {
  return {p.batch, p.seqlen_q, p.heads_q, p.head_dim};
}
constexpr std::array<std::int64_t, 4> key_shape(const Problem& p) {
  return {p.batch, p.seqlen_k, p.heads_kv, p.head_dim};
}
constexpr std::array<std::int64_t, 4> value_shape(const Problem& p) {
  return {p.batch, p.seqlen_k, p.heads_kv, value_dim_of(p)};
}
constexpr std::array<std::int64_t, 4> out_shape(const Problem& p) {
  return {p.batch, p.seqlen_q, p.heads_q, value_dim_of(p)};
}

// 1 / sqrt(head_dim).
double default_scale(std::int64_t head_dim);

}  // namespace flash_dmattn
