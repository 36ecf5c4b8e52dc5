#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/types.h"

// Exact masked softmax attention with an additive bias, forward and backward:
//
//   s_ij   = clamp(softcap(scale * q_i . k_j) + bias_ij)       softcap(x) = c tanh(x / c) for c > 0
//   vis_ij = mask_ij and interval_j contains i and (not causal or j <= i + Sk - Sq)
//            and key_rank_j < rank_limit_i                     a choice among the keys of a mask
//            and bias_ij > mask_value(dtype)                   a NaN bias masks
//   p_ij   = exp(s_ij - lse_i) where visible, else 0           lse_i = log sum_j exp s_ij
//   out_i  = sum_j p_ij v_j
//
//   dp_ij  = dout_i . v_j                                      delta_i = dout_i . out_i
//   ds_ij  = p_ij (dp_ij - delta_i), 0 wherever p_ij is 0      dbias = ds, summed over what broadcast
//   dt_ij  = ds_ij (1 - tanh^2(scale q_i . k_j / c))           (dt = ds without softcap)
//   dq_i   = scale sum_j dt_ij k_j,  dk_j = scale sum_i dt_ij q_i,  dv_j = sum_i p_ij dout_i
//
// clamp limits a score to the finite range of fp32 (of double for f64) and takes a NaN to its lower
// end, so no score is infinite and none is NaN. A query that sees no key gets out = 0, lse = -inf and
// zero gradients everywhere it would take part.
// (Flash attention: Dao et al., arXiv 2205.14135 and 2307.08691; dynamic masks: arXiv 2508.02124.)
namespace flash_dmattn {

// What becomes of non-finite values. Finite inputs give finite results either way up to overflow.
enum class NonFinite : std::uint8_t {
  // Non-finite elements of dout count as 0. Gradients saturate on conversion: bf16 at +-1.69e38 (half
  // its maximum), f16 at +-65504, f32 at its maximum; a NaN becomes the positive limit. On a GPU dt
  // saturates in the same way before it is multiplied in low precision; on the CPU nothing is limited
  // but what is stored. out saturates at its dtype's maximum.
  saturate,
  // inf and NaN pass through, as GradScaler and the hunt for a divergence need them.
  propagate,
};

// Shape of a mask or a bias: ({B|1}, {Hq|Hkv|1}, {Sq|1}, {Sk|1}). All zero: there is none.
using BroadcastShape = std::array<std::int64_t, 4>;

// A problem without its data: what decides whether and how it can be computed.
struct Problem {
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;  // a multiple of heads_kv; head h uses kv head h / (heads_q / heads_kv)
  std::int64_t heads_kv = 0;
  std::int64_t seqlen_q = 0;  // any length may be 0
  std::int64_t seqlen_k = 0;
  std::int64_t head_dim = 0;    // 1..256
  DType dtype = DType::f32;     // of q, k, v, out and their gradients
  Device device = Device::cpu;  // of every pointer of the call, workspace included

  float scale = 0;    // the factor on q . k; default_scale(head_dim) is customary
  float softcap = 0;  // c; 0 = none
  bool causal = false;
  bool deterministic = false;  // the CPU backends always are
  NonFinite nonfinite = NonFinite::saturate;

  BroadcastShape mask_shape{};
  BroadcastShape bias_shape{};
  DType bias_dtype = DType::f32;  // dtype, or f32; dbias has it too

  // Of Inputs::key_rank and Inputs::rank_limit, ({B|1}, {Hq|Hkv|1}, 1, Sk) and ({B|1}, {Hq|Hkv|1}, Sq, 1).
  // Given together, with a mask and without intervals. All zero: there are none.
  BroadcastShape rank_shape{};
  BroadcastShape limit_shape{};

  // [B|1, Hkv|1] of the key intervals or of the key list; all zero: there are none.
  std::array<std::int64_t, 2> intervals_shape{};
};

// 1 / sqrt(head_dim).
float default_scale(std::int64_t head_dim);

// The inputs both directions share. Strides in elements; that of a dimension of size 1 is not used.
struct Inputs {
  ConstTensor4 q;     // [B, Sq, Hq, D]   D contiguous, here and below
  ConstTensor4 k;     // [B, Sk, Hkv, D]
  ConstTensor4 v;     // [B, Sk, Hkv, D]
  ConstTensor4 mask;  // mask_shape, one byte each, 0 = masked
  ConstTensor4 bias;  // bias_shape, bias_dtype
  // The backends cuda and reference know ranks.
  ConstTensor4 key_rank;    // rank_shape, int32, the keys contiguous
  ConstTensor4 rank_limit;  // limit_shape, int32
  KeyIntervals intervals;
  Plan plan;  // of the intervals, `causal` as in the problem; the reference backend needs none.
  // Without intervals_shape there is none. On a GPU null interval data and the plan of a
  // KeyList mean that the lists say everything but causality.
};

struct ForwardArgs {
  Problem problem;
  Inputs in;
  Tensor4 out;           // [B, Sq, Hq, D]
  float* lse = nullptr;  // [B, Hq, Sq] dense, natural logarithm; double* when the dtype is f64
  // [B, Hq, Sq] dense, may be null: what rounding took from lse. With it the backward keeps its
  // precision where |lse| is large. double* when the dtype is f64.
  float* lse_low = nullptr;
};

struct BackwardArgs {
  Problem problem;
  Inputs in;
  ConstTensor4 out;  // as forward wrote them
  const float* lse = nullptr;
  const float* lse_low = nullptr;  // may be null
  ConstTensor4 dout;               // [B, Sq, Hq, D]
  // Gradients; written, not added to. Null data: not wanted.
  Tensor4 dq;     // [B, Sq, Hq, D]
  Tensor4 dk;     // [B, Sk, Hkv, D]
  Tensor4 dv;     // [B, Sk, Hkv, D]
  Tensor4 dbias;  // bias_shape, bias_dtype: summed in fp32 over the dimensions that were broadcast
};

// A backend by name: "cuda", "cpu", "reference". Empty: the first in order of preference that supports
// the problem. A build without a backend lists it too, and says so.
struct BackendInfo {
  std::string_view name;
  bool available;
  std::string reason;  // why not, or what it runs on ("avx512_bf16")
};
std::vector<BackendInfo> backends();

// "" when `backend` (or, with an empty name, any backend) can compute the problem, else why not.
// Throws InvalidArgument for a name that no backend has and for a problem that is not one.
std::string supports(const Problem& problem, std::string_view backend = {});

// Queries per tile that the backend wants of a plan.
std::int64_t query_tile_rows(const Problem& problem, std::string_view backend = {});

// Whether forward and backward are quicker with the plan of the problem's intervals than without, as far
// as `bound` tells. Where the keys of a query are consecutive a GPU need not list them: it walks from the
// first to the last. Where this is false the plan may be left out.
bool wants_plan(const Problem& problem, const KeyBound& bound, std::string_view backend = {});

// Workspace bytes of a call. The arguments are those of the call; outputs need not be set, and the CPU
// backends read the plan.
std::size_t forward_workspace_size(const ForwardArgs& args, const Execution& execution,
                                   std::string_view backend = {});
std::size_t backward_workspace_size(const BackwardArgs& args, const Execution& execution,
                                    std::string_view backend = {});

// Every element of every output is written. All check their arguments first and throw InvalidArgument
// with nothing written; with FLASH_DMATTN_CHECK_FINITE=1 in the environment they throw NonFiniteError.
// On a GPU they only enqueue work on execution.stream, except that the finite check waits for it.
void forward(const ForwardArgs& args, const Execution& execution, std::string_view backend = {});
void backward(const BackwardArgs& args, const Execution& execution, std::string_view backend = {});

}  // namespace flash_dmattn
