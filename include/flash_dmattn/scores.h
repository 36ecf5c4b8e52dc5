#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

// Features of tokens -> one score per key and head. Sizes have no default: -1 is refused.
namespace flash_dmattn {

// A score as a function of z = hidden . weight + bias, and for some forms of one factor A per head.
enum class ScoreForm : std::uint8_t {
  projection,  // z
  gelu,        // z times the normal distribution function of z, between two projections
  gate,        // log sigmoid(z)
  linear,      // A log(1 + exp(z))
  doge,        // exp(A log(1 + exp(z))), at most the largest number of the dtype
};

// Arguments of project_scores.
struct ScoreProjectionArgs {
  Device device = Device::cpu;  // of all pointers
  std::int64_t batch = -1;      // B
  std::int64_t seqlen = -1;     // S, the tokens of a row
  std::int64_t features = -1;   // F
  std::int64_t heads = -1;      // H

  const void* hidden =
      nullptr;  // [B, S, F], F contiguous; f32, bf16, f16, or f64 (reference alone)
  DType hidden_dtype = no_dtype;                                 // to be given, as the other two
  std::array<std::int64_t, 2> hidden_stride = dense_strides<2>;  // of B and S, in elements

  const void* weight = nullptr;               // [H, F], F contiguous; f32, or the dtype of hidden
  DType weight_dtype = no_dtype;              // f32 only with the dtypes of 4 and 2 bytes
  std::int64_t weight_stride = dense_stride;  // of H

  const void* bias = nullptr;   // [H] dense; f32, or the dtype of hidden; null: none
  DType bias_dtype = no_dtype;  // required with a bias

  ScoreForm form = ScoreForm::projection;
  const void* factor = nullptr;   // A, [H] dense; f32, or the dtype of hidden; for linear and doge
  DType factor_dtype = no_dtype;  // required with a factor

  void* scores = nullptr;  // out: [B, H, S] dense; f64 if hidden is f64, else f32
};

// Writes the score of every token for every head.
//
// The bits of a result depend on its token's features, the head's weights, bias and factor alone: not on the other tokens,
// their number and layout, nor on worker or instruction set. On "cpu" and "cuda" z is
//   p_i = sum of hidden_f weight_f over f = i, i + 64, i + 128, ... in this order, for i in [0, 64)
//   p_i += p_(i + n) for i in [0, n), for n = 32, 16, 8, 4, 2, 1
//   p_0 + bias
// in f32, where each product and each sum is rounded (no fused multiply-add), so it has the same bits on both. exp and log
// are those of the device's library of functions, in f32. "reference" computes in double.
//
// Needs no workspace; on a GPU it only enqueues work. Throws InvalidArgument.
void project_scores(const ScoreProjectionArgs& args, const Execution& execution,
                    std::string_view backend = {});

}  // namespace flash_dmattn
