#pragma once

#include <gtest/gtest.h>

#include "support/run.h"
#include "support/yardstick.h"

namespace flash_dmattn::testing {

// The largest and the mean error over the finite elements of `expected`.
struct Errors {
  double max = 0;
  double mean = 0;
  Index worst{};
};
Errors errors(const Tensor& actual, const Tensor& expected);

// Whether every element is infinite or NaN exactly where the expected element is, with the same sign.
::testing::AssertionResult same_nonfinite(const Tensor& actual, const Tensor& expected);

// Compares non-finite elements first, and then requires the largest and the mean error to be within
//   2 * (error of the yardstick) + one unit in the last place of `expected` + noise.
// A yardstick that is not finite gives no bound, so then only non-finite elements are compared.
::testing::AssertionResult within_bound(const Tensor& actual, const Tensor& expected,
                                        const Tensor& yardstick, const Noise& noise);

bool all_finite(const Tensor& tensor);

// The exact results of a problem, computed by the reference in f64 and limited to the range of the dtype.
Results oracle(const Data& data);

// Expects bit-identical out and gradients.
void expect_same_bits(const Results& actual, const Results& expected);

// Expects the wanted outputs to be within their bounds.
void expect_close(const Data& data, const Results& actual, const Results& expected,
                  const Yardstick& yardstick, const Wanted& wanted = {});

// Runs a problem and expects the results, which it returns, to be within their bounds. A quick run under sanitizers
// only runs it: they look for reads and writes, and the oracle would take most of the time.
Results run_and_compare(const Data& data, const RunOptions& options = {});

}  // namespace flash_dmattn::testing
