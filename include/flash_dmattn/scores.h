#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/types.h"

// Features of tokens -> one number per key and head, the argument of a score's activation. Sizes have no default: -1 is
// refused.
namespace flash_dmattn {

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

  void* scores = nullptr;  // out: [B, H, S] dense; f64 if hidden is f64, else f32
};

// Writes hidden . weight + bias for every token and head.
//
// The bits of a result depend on its token's features, the head's weights and its bias alone: not on the other tokens, their
// number and layout, nor on worker, instruction set or device. On "cpu" and "cuda" a result is
//   p_i = sum of hidden_f weight_f over f = i, i + 64, i + 128, ... in this order, for i in [0, 64)
//   p_i += p_(i + n) for i in [0, n), for n = 32, 16, 8, 4, 2, 1
//   p_0 + bias
// in f32, where each product and each sum is rounded (no fused multiply-add). "reference" adds in double.
//
// Needs no workspace; on a GPU it only enqueues work. Throws InvalidArgument.
void project_scores(const ScoreProjectionArgs& args, const Execution& execution,
                    std::string_view backend = {});

}  // namespace flash_dmattn
