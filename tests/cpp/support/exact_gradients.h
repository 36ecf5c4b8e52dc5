#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/data.h"

namespace flash_dmattn::testing {

// A sum, and the sum of the magnitudes of its terms.
struct Sum {
  double value = 0;
  double magnitude = 0;

  void add(double factor, const Sum& term) {
    value += factor * term.value;
    magnitude += std::abs(factor) * term.magnitude;
  }
};

// dq, dk, dv and dbias in double, for problems without a mask and with at most a bias [B, Hkv, 1, Sk].
struct ExactGradients {
  std::vector<Sum> dq, dk, dv, dbias;

  explicit ExactGradients(const Data& data);

  static std::size_t at(const Index& i, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
    return static_cast<std::size_t>(((i[0] * rows + i[1]) * heads + i[2]) * dim + i[3]);
  }

 private:
  void add_row(const Data& data, std::int64_t b, std::int64_t h, std::int64_t i);
};

}  // namespace flash_dmattn::testing
