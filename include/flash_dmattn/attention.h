#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/problem.h"
#include "flash_dmattn/types.h"
#include "flash_dmattn/visibility.h"

// Exact masked softmax attention with an additive bias, forward and backward:
//
//   s_ij   = clamp(softcap(scale * q_i . k_j) + bias_ij)       softcap(x) = c tanh(x / c) for c > 0
//            with a delay W > 0, bias_ij counts as 0 where i + Sk - Sq < j + W
//   vis_ij = mask_ij and interval_j contains i and (not causal or j <= i + Sk - Sq)
//            and bias_ij > mask_value(bias_dtype)              a NaN bias masks; where s_ij has it
//   p_ij   = exp(s_ij - lse_i) where visible, else 0           lse_i = log sum_j exp s_ij
//   out_i  = sum_j p_ij v_j
//
//   dp_ij  = dout_i . v_j                                      delta_i = dout_i . out_i - dlse_i
//   ds_ij  = p_ij (dp_ij - delta_i), 0 wherever p_ij is 0      dbias = ds, summed over what broadcast, where s_ij has the bias
//   dt_ij  = ds_ij (1 - tanh^2(scale q_i . k_j / c))           (dt = ds without softcap)
//   dq_i   = scale sum_j dt_ij k_j,  dk_j = scale sum_i dt_ij q_i,  dv_j = sum_i p_ij dout_i
//
// clamp limits a score to the finite range of fp32 (of double for f64). With NonFinite::saturate it turns a NaN into the
// lowest finite number. With NonFinite::propagate, a score that an inf or NaN of q, k or bias enters is NaN, and so are
// out and lse of its row. A query that sees no key gets out = 0, lse = -inf and zero gradients.
// (Flash attention: Dao et al., arXiv 2205.14135 and 2307.08691; dynamic masks: arXiv 2508.02124.)
namespace flash_dmattn {

// The inputs both directions share. Strides are in elements; the stride of a dimension of size 1 is ignored.
struct Inputs {
  ConstTensor4 q{};     // [B, Sq, Hq, D]   the last dimension contiguous, here and below
  ConstTensor4 k{};     // [B, Sk, Hkv, D]
  ConstTensor4 v{};     // [B, Sk, Hkv, Dv]
  ConstTensor4 mask{};  // mask_shape, one byte each, 0 = masked
  ConstTensor4 bias{};  // bias_shape, bias_dtype
  Visibility visibility{};
};

// One number per row, [B, Hq, Sq] dense: double for an f64 problem, else float.
struct RowValues {
  void* data = nullptr;
  DType dtype = DType::f32;

  constexpr RowValues() = default;
  constexpr RowValues(std::nullptr_t) {}
  constexpr RowValues(float* values) : data(values) {}
  constexpr RowValues(double* values) : data(values), dtype(DType::f64) {}
};

struct ConstRowValues {
  const void* data = nullptr;
  DType dtype = DType::f32;

  constexpr ConstRowValues() = default;
  constexpr ConstRowValues(std::nullptr_t) {}
  constexpr ConstRowValues(const float* values) : data(values) {}
  constexpr ConstRowValues(const double* values) : data(values), dtype(DType::f64) {}
  constexpr ConstRowValues(const RowValues& values) : data(values.data), dtype(values.dtype) {}
};

struct ForwardArgs {
  Problem problem{};
  Inputs in{};
  Tensor4 out{};    // [B, Sq, Hq, Dv]
  RowValues lse{};  // natural logarithm
  // The part of lse that rounding removed; may be null. With it the backward keeps its precision where |lse|
  // is large.
  RowValues lse_low{};
};

struct BackwardArgs {
  Problem problem{};
  Inputs in{};
  ConstTensor4 out{};  // as forward wrote them
  ConstRowValues lse{};
  ConstRowValues lse_low{};  // may be null
  ConstTensor4 dout{};       // [B, Sq, Hq, Dv]
  ConstRowValues dlse{};     // the gradient of lse; may be null: 0
  // Gradients; written, not added to. Null data: not wanted.
  Tensor4 dq{};  // [B, Sq, Hq, D]
  Tensor4 dk{};  // [B, Sk, Hkv, D]
  Tensor4 dv{};  // [B, Sk, Hkv, Dv]
  // Its shape is bias_shape, its dtype bias_dtype: summed in fp32 over the dimensions that were broadcast.
  Tensor4 dbias{};
};

// A backend by name: "cuda", "cpu", "reference". Empty: the first in order of preference that supports
// the problem. A build without a backend lists it too, as not available.
struct BackendInfo {
  std::string_view name;
  bool available;
  std::string reason;  // why not, or what it runs on ("avx512_bf16")
};
std::vector<BackendInfo> backends();

// The main kernels that `backend` can run on this machine, on a GPU those that the build holds for the current
// device: "sm80 forward bf16 d128 key_list 163KB". CheckedCall::kernel_name is one of them. Throws
// InvalidArgument for a name that no backend has.
std::vector<std::string> kernel_names(std::string_view backend);

// "" when `backend` (or, with an empty name, any backend) can compute the problem, else why not.
// Throws InvalidArgument for a name that no backend has and for a problem that is not one.
std::string supports(const Problem& problem, std::string_view backend = {});

// Every element of every output is written. Both check their arguments first and throw InvalidArgument
// with nothing written. Both use execution.workspace, which needs ForwardCall::workspace_size() or
// BackwardCall::workspace_size() bytes (calls.h). On a GPU they only enqueue work on execution.stream.
void forward(const ForwardArgs& args, const Execution& execution, std::string_view backend = {});
void backward(const BackwardArgs& args, const Execution& execution, std::string_view backend = {});

}  // namespace flash_dmattn
