#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "support/run.h"
#include "support/yardstick.h"

namespace flash_dmattn::testing {

// The largest and the mean error over the finite elements of `expected`.
struct Errors {
  double max = 0;
  double mean = 0;
  std::size_t worst = 0;  // in row-major order
};
Errors errors(const Tensor& actual, const Tensor& expected);

// Whether every element is infinite or NaN exactly where the expected element is, with the same sign.
::testing::AssertionResult same_nonfinite(const Tensor& actual, const Tensor& expected);

// Whether a tensor is one that is expected: its non-finite elements, and then the largest and the mean error within
//   2 * (error of the yardstick) + one unit in the last place of the expected values + noise.
// A yardstick that is not finite gives no bound, so then only non-finite elements are compared.
class Bound {
 public:
  Bound(const Tensor& expected, const Tensor& yardstick, const Noise& noise);
  ::testing::AssertionResult holds_for(const Tensor& actual) const;

 private:
  std::vector<double> expected_;
  Errors yardstick_, limit_;
};

// The bounds of all results of a problem. They take longer than a run, and are for any number of runs.
class Bounds {
 public:
  explicit Bounds(const Data& data);
  // Expects the wanted outputs to be within their bounds.
  void expect(const Results& actual, const Wanted& wanted = {}) const;

 private:
  Bounds(const Results& expected, const Yardstick& yardstick);

  Bound out_, lse_, dq_, dk_, dv_, dbias_;
};

bool all_finite(const Tensor& tensor);

// Expects every element to have a value.
void expect_all(const Tensor& tensor, double expected);

// Expects a finite out, finite gradients, and an lse that is neither NaN nor inf.
void expect_finite(const Results& results);

// Expects bit-identical gradients; bit-identical out, lse and gradients.
void expect_same_gradients(const Results& actual, const Results& expected);
void expect_same_bits(const Results& actual, const Results& expected);

// Runs a problem and expects the results, which it returns, to be within their bounds. A quick run under sanitizers
// only runs it: they look for reads and writes, and the bounds would take most of the time.
Results run_and_compare(const Data& data, const RunOptions& options = {});

}  // namespace flash_dmattn::testing
