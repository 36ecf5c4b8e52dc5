#pragma once

#include <cstdint>
#include <vector>

#include "flash_dmattn/attention.h"
#include "support/cases.h"
#include "support/tensor.h"

namespace flash_dmattn::testing {

// The data of a case: what its words mean, drawn from its seed.
struct Data {
  Problem problem;
  Layout layout;
  Tensor q, k, v;
  Tensor mask;  // without elements when there is none, as is the bias
  Tensor bias;
  Tensor dout;
  std::vector<KeyInterval> intervals;  // [B|1, Hkv|1, Sk]

  explicit Data(const Case& c);
  explicit Data(const Problem& problem, Layout layout = Layout::contiguous);  // all poisoned

  bool has_mask() const { return problem.mask_shape != BroadcastShape{}; }
  bool has_bias() const { return problem.bias_shape != BroadcastShape{}; }
  bool has_intervals() const { return problem.intervals_shape != std::array<std::int64_t, 2>{}; }

  KeyIntervals intervals_view() const;
  Inputs inputs() const;  // all but the plan

  // vis_ij of attention.h for query head `head`; an implementation of the definition of its own.
  bool visible(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;
  // The element of `tensor`, a mask or a bias, that belongs to the pair.
  double broadcast(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t query,
                   std::int64_t key) const;

  // The same in f64 without rounding. A bias that masks becomes -inf, so that it still does.
  Data to_f64() const;
};

}  // namespace flash_dmattn::testing
