#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/float_types.h"
#include "support/cases.h"

namespace flash_dmattn::testing {
namespace {

using Values = std::vector<double>;

std::string text_of_element(const Shape& shape, std::size_t place) {
  Index index{};
  auto rest = static_cast<std::int64_t>(place);
  for (std::size_t dim = 4; dim-- > 0; rest /= shape[dim]) index[dim] = rest % shape[dim];
  return text(index);
}

Errors errors(const Values& actual, const Values& expected) {
  Errors result;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double difference = std::abs(actual[i] - expected[i]);
    const double error = std::isnan(difference) ? HUGE_VAL : difference;
    result.mean += error / static_cast<double>(expected.size());
    if (error <= result.max) continue;
    result.max = error;
    result.worst = i;
  }
  return result;
}

::testing::AssertionResult same_nonfinite(const Tensor& tensor, const Values& actual,
                                          const Values& expected) {
  std::size_t differing = 0, first = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const bool same =
        std::isfinite(expected[i])
            ? std::isfinite(actual[i])
            : actual[i] == expected[i] || (std::isnan(actual[i]) && std::isnan(expected[i]));
    if (!same && differing++ == 0) first = i;
  }
  if (differing == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << tensor.name() << ": " << differing << " of " << actual.size()
         << " elements differ in being finite, the first at "
         << text_of_element(tensor.shape(), first) << ": expected " << expected[first]
         << ", actual " << actual[first];
}

double smallest(Element element) {
  switch (element) {
    case Element::f16: return 0x1p-24;
    case Element::bf16: return 0x1p-133;
    default: return std::numeric_limits<float>::denorm_min();
  }
}

bool overflows(DType dtype, double value) {
  double stored = 0;
  store(&stored, dtype, 0, value);
  return std::isinf(load(&stored, dtype, 0));
}

// Limits exact values to the range of the dtype, like a store.
void limit(const Problem& p, double largest, Tensor& tensor) {
  tensor.fill([&](const Index& i) {
    const double value = tensor.get(i);
    if (p.nonfinite == NonFinite::saturate) return std::clamp(value, -largest, largest);
    return overflows(p.dtype, value) ? std::copysign(HUGE_VAL, value) : value;
  });
}

// The exact results of a problem, computed by the reference in f64 and limited to the range of the dtype.
Results oracle(const Data& data) {
  const Data wide = data.to_f64();
  const RunOptions options{.backend = "reference", .execution = pooled_execution()};
  Results results = run(wide, options);
  const Problem& p = data.problem;
  limit(p, largest(p.dtype), results.out);
  for (Tensor* tensor : {&results.dq, &results.dk, &results.dv})
    limit(p, gradient_limit(p.dtype), *tensor);
  return results;
}

}  // namespace

Errors errors(const Tensor& actual, const Tensor& expected) {
  return errors(actual.values(), expected.values());
}

::testing::AssertionResult same_nonfinite(const Tensor& actual, const Tensor& expected) {
  return same_nonfinite(actual, actual.values(), expected.values());
}

Bound::Bound(const Tensor& expected, const Tensor& yardstick, const Noise& noise)
    : expected_(expected.values()), yardstick_(errors(yardstick.values(), expected_)) {
  double largest = 0, mean = 0;
  for (const double value : expected_) {
    if (!std::isfinite(value)) continue;
    largest = std::max(largest, std::abs(value));
    mean += std::abs(value) / static_cast<double>(expected_.size());
  }
  const double ulp = 2 * unit_roundoff(yardstick.element());
  const double floor = smallest(yardstick.element());
  limit_.max = 2 * yardstick_.max + ulp * largest + noise.max + floor;
  limit_.mean = 2 * yardstick_.mean + ulp * mean + noise.mean() + floor;
}

::testing::AssertionResult Bound::holds_for(const Tensor& actual) const {
  const Values values = actual.values();
  const auto finite = same_nonfinite(actual, values, expected_);
  if (!finite || !std::isfinite(yardstick_.max)) return finite;
  const Errors ours = errors(values, expected_);
  const auto failure = [&](const char* which, double error, double bound, double yardstick) {
    return ::testing::AssertionFailure()
           << actual.name() << ": " << which << " error " << error << " above the bound " << bound
           << " (yardstick's error " << yardstick << "); worst at "
           << text_of_element(actual.shape(), ours.worst) << ": expected " << expected_[ours.worst]
           << ", actual " << values[ours.worst];
  };
  if (!(ours.max <= limit_.max)) return failure("max", ours.max, limit_.max, yardstick_.max);
  if (!(ours.mean <= limit_.mean)) {
    return failure("mean", ours.mean, limit_.mean, yardstick_.mean);
  }
  return ::testing::AssertionSuccess();
}

Bounds::Bounds(const Data& data) : Bounds(oracle(data), Yardstick(data)) {}

Bounds::Bounds(const Results& expected, const Yardstick& yardstick)
    : out_(expected.out, yardstick.results.out, yardstick.out),
      lse_(expected.lse, yardstick.results.lse, yardstick.lse),
      dq_(expected.dq, yardstick.results.dq, yardstick.dq),
      dk_(expected.dk, yardstick.results.dk, yardstick.dk),
      dv_(expected.dv, yardstick.results.dv, yardstick.dv),
      dbias_(expected.dbias, yardstick.results.dbias, yardstick.dbias) {}

void Bounds::expect(const Results& actual, const Wanted& wanted) const {
  EXPECT_TRUE(out_.holds_for(actual.out));
  EXPECT_TRUE(lse_.holds_for(actual.lse));
  if (wanted.dq) {
    EXPECT_TRUE(dq_.holds_for(actual.dq));
  }
  if (wanted.dk) {
    EXPECT_TRUE(dk_.holds_for(actual.dk));
  }
  if (wanted.dv) {
    EXPECT_TRUE(dv_.holds_for(actual.dv));
  }
  if (wanted.dbias) {
    EXPECT_TRUE(dbias_.holds_for(actual.dbias));
  }
}

bool all_finite(const Tensor& tensor) {
  const Values values = tensor.values();
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

void expect_all(const Tensor& tensor, double expected) {
  tensor.for_each([&](const Index& i, double value) {
    ASSERT_EQ(value, expected) << tensor.name() << " " << text(i);
  });
}

void expect_finite(const Results& results) {
  for (const Tensor* tensor :
       {&results.out, &results.dq, &results.dk, &results.dv, &results.dbias}) {
    EXPECT_TRUE(all_finite(*tensor)) << tensor->name();
  }
  results.lse.for_each([](const Index&, double lse) { ASSERT_LT(lse, HUGE_VAL); });
}

void expect_same_gradients(const Results& actual, const Results& expected) {
  EXPECT_TRUE(actual.dq.same_bits(expected.dq)) << "dq";
  EXPECT_TRUE(actual.dk.same_bits(expected.dk)) << "dk";
  EXPECT_TRUE(actual.dv.same_bits(expected.dv)) << "dv";
  EXPECT_TRUE(actual.dbias.same_bits(expected.dbias)) << "dbias";
}

void expect_same_bits(const Results& actual, const Results& expected) {
  EXPECT_TRUE(actual.out.same_bits(expected.out)) << "out";
  EXPECT_TRUE(actual.lse.same_bits(expected.lse)) << "lse";
  EXPECT_TRUE(actual.lse_low.same_bits(expected.lse_low)) << "lse_low";
  expect_same_gradients(actual, expected);
}

Results run_and_compare(const Data& data, const RunOptions& options) {
  Results actual = run(data, options);
  if (!is_sanitized || !is_quick_run()) Bounds(data).expect(actual, options.wanted);
  return actual;
}

}  // namespace flash_dmattn::testing
