#pragma once

#include "support/data.h"
#include "support/run.h"

namespace flash_dmattn::testing {

// The rounding errors to expect from an implementation with the yardstick's intermediate precisions, in units
// of the tensor. They are the floor of the bound where the yardstick happens to be exact.
struct Noise {
  double max = 0;
  double sum = 0;
  std::int64_t count = 0;

  void add(double noise);
  double mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// The result of a plain implementation in the dtype of the problem: matrix products accumulate in fp32, and
// everything between them is rounded to the dtype. Its error is the measure of the library's error.
struct Yardstick {
  Results results;
  Noise out, lse, dq, dk, dv, dbias;

  explicit Yardstick(const Data& data);
};

// The unit roundoff: half the distance from 1 to the next number.
double unit_roundoff(Element element);

}  // namespace flash_dmattn::testing
