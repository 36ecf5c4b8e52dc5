#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/cases.h"

namespace flash_dmattn::testing {
namespace {

std::string text(const Index& i) {
  return "[" + std::to_string(i[0]) + ", " + std::to_string(i[1]) + ", " + std::to_string(i[2]) +
         ", " + std::to_string(i[3]) + "]";
}

struct Magnitude {
  double max = 0;
  double mean = 0;
};

Magnitude magnitude(const Tensor& tensor) {
  Magnitude result;
  tensor.for_each([&](const Index&, double value) {
    if (!std::isfinite(value)) return;
    result.max = std::max(result.max, std::abs(value));
    result.mean += std::abs(value) / static_cast<double>(tensor.elements());
  });
  return result;
}

double smallest(Element element) {
  switch (element) {
    case Element::f16: return 0x1p-24;
    case Element::bf16: return 0x1p-133;
    default: return std::numeric_limits<float>::denorm_min();
  }
}

::testing::AssertionResult failure(const char* which, const Tensor& actual, const Tensor& expected,
                                   const Index& worst, double error, double bound,
                                   double yardstick) {
  return ::testing::AssertionFailure()
         << actual.name() << ": " << which << " error " << error << " above the bound " << bound
         << " (yardstick's error " << yardstick << "); worst at " << text(worst) << ": expected "
         << expected.get(worst) << ", actual " << actual.get(worst);
}

// Limits exact values to the range of the dtype, like a store.
void limit(const Problem& p, double largest, Tensor& tensor) {
  tensor.fill([&](const Index& i) {
    const double value = tensor.get(i);
    if (p.nonfinite == NonFinite::saturate) return std::clamp(value, -largest, largest);
    return std::isinf(round_to(element_of(p.dtype), value)) ? std::copysign(HUGE_VAL, value)
                                                            : value;
  });
}

}  // namespace

Errors errors(const Tensor& actual, const Tensor& expected) {
  Errors result;
  const std::vector<double> actual_values = actual.values();
  auto got = actual_values.begin();
  expected.for_each([&](const Index& i, double value) {
    const double difference = std::abs(*got++ - value);
    if (!std::isfinite(value)) return;
    const double error = std::isnan(difference) ? HUGE_VAL : difference;
    result.mean += error / static_cast<double>(expected.elements());
    if (error <= result.max) return;
    result.max = error;
    result.worst = i;
  });
  return result;
}

::testing::AssertionResult same_nonfinite(const Tensor& actual, const Tensor& expected) {
  std::int64_t differing = 0;
  Index first{};
  const std::vector<double> actual_values = actual.values();
  auto next = actual_values.begin();
  expected.for_each([&](const Index& i, double value) {
    const double got = *next++;
    const bool same = std::isfinite(value) ? std::isfinite(got)
                                           : got == value || (std::isnan(got) && std::isnan(value));
    if (!same && differing++ == 0) first = i;
  });
  if (differing == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << actual.name() << ": " << differing << " of " << actual.elements()
         << " elements differ in being finite, the first at " << text(first) << ": expected "
         << expected.get(first) << ", actual " << actual.get(first);
}

::testing::AssertionResult within_bound(const Tensor& actual, const Tensor& expected,
                                        const Tensor& yardstick, const Noise& noise) {
  const auto finite = same_nonfinite(actual, expected);
  if (!finite) return finite;
  const Errors theirs = errors(yardstick, expected);
  if (!std::isfinite(theirs.max)) return ::testing::AssertionSuccess();
  const Errors ours = errors(actual, expected);
  const Magnitude size = magnitude(expected);
  const double ulp = 2 * unit_roundoff(actual.element());
  const double floor = smallest(actual.element());
  const double max_bound = 2 * theirs.max + ulp * size.max + noise.max + floor;
  const double mean_bound = 2 * theirs.mean + ulp * size.mean + noise.mean() + floor;
  if (!(ours.max <= max_bound)) {
    return failure("max", actual, expected, ours.worst, ours.max, max_bound, theirs.max);
  }
  if (!(ours.mean <= mean_bound)) {
    return failure("mean", actual, expected, ours.worst, ours.mean, mean_bound, theirs.mean);
  }
  return ::testing::AssertionSuccess();
}

bool all_finite(const Tensor& tensor) {
  bool finite = true;
  tensor.for_each([&](const Index&, double value) { finite = finite && std::isfinite(value); });
  return finite;
}

Results oracle(const Data& data) {
  const Data wide = data.to_f64();
  const RunOptions options{.backend = "reference", .execution = on_pool()};
  Results results = run(wide, options);
  const Problem& p = data.problem;
  limit(p, largest(p.dtype), results.out);
  for (Tensor* tensor : {&results.dq, &results.dk, &results.dv})
    limit(p, gradient_limit(p.dtype), *tensor);
  return results;
}

void expect_same_bits(const Results& actual, const Results& expected) {
  EXPECT_TRUE(actual.out.same_bits(expected.out)) << "out";
  EXPECT_TRUE(actual.dq.same_bits(expected.dq)) << "dq";
  EXPECT_TRUE(actual.dk.same_bits(expected.dk)) << "dk";
  EXPECT_TRUE(actual.dv.same_bits(expected.dv)) << "dv";
  EXPECT_TRUE(actual.dbias.same_bits(expected.dbias)) << "dbias";
}

void expect_close(const Data& data, const Results& actual, const Results& expected,
                  const Yardstick& yardstick, const Wanted& wanted) {
  const Results& plain = yardstick.results;
  EXPECT_TRUE(within_bound(actual.out, expected.out, plain.out, yardstick.out));
  EXPECT_TRUE(within_bound(actual.lse, expected.lse, plain.lse, yardstick.lse));
  if (wanted.dq) {
    EXPECT_TRUE(within_bound(actual.dq, expected.dq, plain.dq, yardstick.dq));
  }
  if (wanted.dk) {
    EXPECT_TRUE(within_bound(actual.dk, expected.dk, plain.dk, yardstick.dk));
  }
  if (wanted.dv) {
    EXPECT_TRUE(within_bound(actual.dv, expected.dv, plain.dv, yardstick.dv));
  }
  if (wanted.dbias && data.has_bias()) {
    EXPECT_TRUE(within_bound(actual.dbias, expected.dbias, plain.dbias, yardstick.dbias));
  }
}

Results run_and_compare(const Data& data, const RunOptions& options) {
  Results actual = run(data, options);
  if (!is_sanitized || !is_quick_run()) {
    expect_close(data, actual, oracle(data), Yardstick(data));
  }
  return actual;
}

}  // namespace flash_dmattn::testing
