#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/exact_gradients.h"
#include "support/random.h"
#include "support/run.h"
#include "support/yardstick.h"

// Gradients of inputs so large that intermediate sums leave fp32: ds alone reaches 2^265. Each element has to
// be within rounding of its exact value, or saturated with its sign. Rounding is measured by the magnitude
// of the terms that cancel.
namespace flash_dmattn::testing {
namespace {

// Returns how many elements saturate.
std::int64_t expect_within_rounding(const Tensor& actual, const std::vector<Sum>& exact,
                                    std::int64_t rows, std::int64_t heads, std::int64_t dim,
                                    double rounding) {
  const DType dtype = actual.element() == Element::bf16 ? DType::bf16 : DType::f32;
  const double limit = gradient_limit(dtype);
  std::int64_t saturated = 0;
  actual.for_each([&](const Index& i, double value) {
    const Sum& sum = exact[ExactGradients::at(i, rows, heads, dim)];
    const double error = rounding * sum.magnitude;
    ASSERT_TRUE(std::clamp(sum.value - error, -limit, limit) <= value &&
                value <= std::clamp(sum.value + error, -limit, limit))
        << actual.name() << " " << text(i) << ": " << value << ", exactly " << sum.value
        << " of terms of " << sum.magnitude;
    if (std::abs(sum.value) - error > limit) ++saturated;
  });
  return saturated;
}

class LargeNumbers : public ::testing::TestWithParam<const char*> {
 protected:
  // q and k keep scores of order 1, so that rounding of scores does not dominate p.
  static Data data_of(const char* dtype, int pattern, bool per_key_bias, bool intervals) {
    CaseWords words = {"seqlen_q=130 seqlen_k=230 head_dim=40 heads_q=4 heads_kv=2 causal=1",
                       {{"dtype", dtype}}};
    if (per_key_bias) words.insert({{"bias", "bv1k"}, {"bias_fill", "normal"}});
    if (intervals)
      words.insert({{"intervals", "sliding"}, {"intervals_shape", "11"}, {"window", "1000"}});
    Data data(case_from(words));
    fill(data, pattern);
    return data;
  }

  static void fill(Data& data, int pattern) {
    const double limit = largest(data.problem.dtype);
    Random random(static_cast<std::uint64_t>(pattern));
    const auto sign = [&] { return random.below(2) == 0 ? 1.0 : -1.0; };
    const auto all = [&](Tensor& tensor) {
      tensor.fill([&](const Index&) { return sign() * limit; });
    };
    switch (pattern) {
      case 0:  // ds is near 2^260 everywhere
        all(data.v);
        all(data.dout);
        break;
      case 1:  // some large rows of each tensor among ordinary rows
        for (Tensor* tensor : {&data.v, &data.dout}) {
          tensor->fill([&](const Index& i) {
            const double value = tensor->get(i);
            return i[1] % 5 == 3 ? sign() * limit : value;
          });
        }
        break;
      case 2:  // all magnitudes next to each other
        for (Tensor* tensor : {&data.v, &data.dout}) {
          tensor->fill([&](const Index&) { return sign() * std::exp2(127 * random.uniform()); });
        }
        break;
      case 3:  // large and ordinary elements of q in one row of dk
        all(data.v);
        all(data.dout);
        data.q.fill([&](const Index& i) { return i[3] % 2 == 0 ? sign() * 0x1p120 : sign(); });
        data.k.fill([&](const Index& i) { return i[3] % 2 == 0 ? sign() * 0x1p-121 : sign() / 8; });
        break;
      default:  // one large element in an ordinary tensor
        data.dout.set({0, 77, 1, 5}, limit);
        data.v.set({0, 150, 0, 5}, -limit);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, LargeNumbers, ::testing::Values("f32", "bf16"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(LargeNumbers, GradientsAreCorrectOrSaturateWithSign) {
  for (int pattern = 0; pattern < 5; ++pattern) {
    for (const bool bias : {false, true}) {
      for (const bool intervals : {false, true}) {
        // Large rows among ordinary ones, with a bias and intervals, have sums that leave fp32.
        if (is_sanitized && is_quick_run() && !(pattern == 1 && bias && intervals)) continue;
        SCOPED_TRACE("pattern " + std::to_string(pattern) + (bias ? ", bias" : "") +
                     (intervals ? ", intervals" : ""));
        const Data data = data_of(GetParam(), pattern, bias, intervals);
        const Problem& p = data.problem;
        const ExactGradients exact(data);
        const Results actual = run(data, {});
        // Scores, p and, in bf16, out are rounded before the terms are formed.
        const double rounding = std::max(4 * unit_roundoff(data.q.element()), 2e-6);
        std::int64_t saturated = 0;
        saturated += expect_within_rounding(actual.dq, exact.dq, p.seqlen_q, p.heads_q, p.head_dim,
                                            rounding);
        saturated += expect_within_rounding(actual.dk, exact.dk, p.seqlen_k, p.heads_kv, p.head_dim,
                                            rounding);
        saturated += expect_within_rounding(actual.dv, exact.dv, p.seqlen_k, p.heads_kv, p.head_dim,
                                            rounding);
        if (bias) {
          saturated += expect_within_rounding(actual.dbias, exact.dbias, p.heads_kv, 1, p.seqlen_k,
                                              rounding);
        }
        EXPECT_GT(saturated, 0);
      }
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
