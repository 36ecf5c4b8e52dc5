#pragma once

#include <array>
#include <cstddef>
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

  bool has_mask() const { return any(problem.mask_shape); }
  bool has_bias() const { return any(problem.bias_shape); }
  bool has_intervals() const { return any(problem.intervals_shape); }

  KeyIntervals intervals_view() const;
  Inputs inputs() const;

  // vis_ij of attention.h for query head `head`; an implementation of the definition of its own.
  bool visible(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;
  // The element of `tensor`, a mask or a bias, of (query, key).
  double broadcast(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t query,
                   std::int64_t key) const;

  // The same in f64 without rounding. A bias that masks becomes -inf, so that it still does.
  Data to_f64() const;

 private:
  // A comparison with an empty shape is a call of memcmp, which takes longer than the rest of visible().
  template <std::size_t dims>
  static bool any(const std::array<std::int64_t, dims>& shape) {
    for (const std::int64_t size : shape) {
      if (size != 0) return true;
    }
    return false;
  }
};

}  // namespace flash_dmattn::testing
