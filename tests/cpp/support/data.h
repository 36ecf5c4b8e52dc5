#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "flash_dmattn/attention.h"
#include "support/cases.h"
#include "support/tensor.h"

namespace flash_dmattn::testing {

// The data of a case, drawn from its seed according to its words.
struct Data {
  Problem problem;
  Layout layout;
  Tensor q, k, v;
  Tensor mask;  // empty if there is none, like the bias
  Tensor bias;
  Tensor dout;
  Tensor dlse;                         // [B, Hq, Sq, 1]; empty if there is none
  std::vector<KeyInterval> intervals;  // [B|1, Hkv|1, Sk]

  explicit Data(const Case& c);
  explicit Data(const Problem& problem, Layout layout = Layout::contiguous);  // all poisoned

  bool has_mask() const { return any(problem.mask_shape); }
  bool has_dlse() const { return any(dlse.shape()); }
  bool has_bias() const { return any(problem.bias_shape); }
  bool has_intervals() const { return any(problem.intervals_shape); }

  KeyIntervals intervals_view() const;
  Inputs inputs() const;
  ConstRowValues dlse_values() const;

  // Gives the data a dlse of unknown numbers.
  void add_dlse();

  // vis_ij of attention.h for query head `head`, implemented independently of the library.
  bool visible(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;
  // Whether the score of an element has a bias.
  bool biased(std::int64_t query, std::int64_t key) const;
  // The element of `tensor`, a mask or a bias, for (query, key).
  double broadcast(const Tensor& tensor, std::int64_t batch, std::int64_t head, std::int64_t query,
                   std::int64_t key) const;

  // The same data in f64, without rounding. A masking bias becomes -inf, so that it still masks.
  Data to_f64() const;

 private:
  // A comparison with an empty shape calls memcmp, which takes longer than the rest of visible().
  template <std::size_t dims>
  static bool any(const std::array<std::int64_t, dims>& shape) {
    for (const std::int64_t size : shape) {
      if (size != 0) return true;
    }
    return false;
  }
};

}  // namespace flash_dmattn::testing
