#pragma once

#include "support/data.h"
#include "support/run.h"

namespace flash_dmattn::testing {

// Rounding errors to expect of an implementation with this one's intermediate precisions, in units of
// the tensor: the floor of the bound where the yardstick happens to be exact.
struct Noise {
  double max = 0;
  double sum = 0;
  std::int64_t count = 0;

  void add(double noise);
  double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// The result of a plain implementation in the dtype of the problem: matrix products that accumulate in
// fp32, everything between them rounded to the dtype. Its error is the measure of ours.
struct Yardstick {
  Results results;
  Noise out, lse, dq, dk, dv, dbias;

  explicit Yardstick(const Data& data);
};

// The unit roundoff: half the distance from 1 to the next number.
double unit_roundoff(Element element);

}  // namespace flash_dmattn::testing
