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
#include "support/random.h"
#include "support/run.h"

// Elements of any magnitude, and scores whose magnitude is far above their differences.
namespace flash_dmattn::testing {
namespace {

class LargeNumbers : public ::testing::TestWithParam<const char*> {
 protected:
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

TEST_P(LargeNumbers, FiniteInputsOfAnyMagnitudeGiveFiniteResults) {
  for (int pattern = 0; pattern < 5; ++pattern) {
    for (const bool bias : {false, true}) {
      for (const bool intervals : {false, true}) {
        // Large rows among ordinary ones, with a bias and intervals, have sums that leave fp32.
        if (is_sanitized && is_quick_run() && !(pattern == 1 && bias && intervals)) continue;
        SCOPED_TRACE("pattern " + std::to_string(pattern) + (bias ? ", bias" : "") +
                     (intervals ? ", intervals" : ""));
        expect_finite(run(data_of(GetParam(), pattern, bias, intervals), {}));
      }
    }
  }
}

// ---- Shifted scores --------------------------------------------------------------------------------

class ShiftedScores : public ::testing::TestWithParam<const char*> {
 protected:
  // The forms of a call: a bias of keys, with a softcap too, of elements, and of a KV cache's few queries.
  static constexpr const char* forms[] = {
      "seqlen_q=130 bias=bv1k", "seqlen_q=130 bias=bv1k intervals=per_query intervals_shape=bv",
      "seqlen_q=130 bias=bv1k softcap=4 mask=b1qk mask_fill=random", "seqlen_q=130 bias=bhqk",
      "seqlen_q=3 bias=bv1k"};

  // Biases are multiples of 1/8, so that the shifted ones are exact in fp32.
  static Data data_of(const char* form) {
    CaseWords words = form;
    const CaseWords common =
        "seqlen_k=230 head_dim=40 heads_q=4 heads_kv=2 causal=1 window=60 bias_fill=normal "
        "bias_dtype=f32";
    words.insert(common.begin(), common.end());
    words["dtype"] = GetParam();
    Data data(case_from(words));
    data.bias.fill([&](const Index& i) { return std::round(8 * data.bias.get(i)) / 8; });
    return data;
  }
  template <class Shift>
  static Data shifted(const char* form, const Shift& shift) {
    Data data = data_of(form);
    data.bias.fill([&](const Index& i) { return data.bias.get(i) + shift(i); });
    return data;
  }

  // Expects that all errors but that of lse are at most `factor` times those without a shift. The mean of a few hundred
  // rounding errors varies by some percent, for which a fraction of their maximum allows.
  static void expect_errors(const Results& actual, const Results& before, const Results& exact,
                            double factor) {
    for (const auto result :
         {&Results::out, &Results::dq, &Results::dk, &Results::dv, &Results::dbias}) {
      const Tensor& wanted = exact.*result;
      const Errors unshifted = errors(before.*result, wanted);
      const double allowed = factor * unshifted.mean + unshifted.max / 50;
      EXPECT_LE(errors(actual.*result, wanted).mean, allowed) << wanted.name();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, ShiftedScores, ::testing::Values("f32", "bf16", "f16"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(ShiftedScores, NumberAddedToAllScoresOfARowKeepsErrors) {
  const RunOptions reference{.backend = "reference"};
  for (const char* form : forms) {
    SCOPED_TRACE(form);
    const Data data = data_of(form);
    const Results before = run(data, {}), exact = run(data.to_f64(), reference);
    for (const double shift : {100.0, 6000.0, -6000.0, 1e5}) {
      SCOPED_TRACE(shift);
      // Rows of a dense bias have shifts of their own.
      const auto of_row = [&](const Index& i) {
        return data.bias.shape()[2] == 1 ? shift : shift * (1 - static_cast<double>(i[2] % 3));
      };
      expect_errors(run(shifted(form, of_row), {}), before, exact, shift == 1e5 ? 2 : 1.1);
    }
    run_and_compare(shifted(form, [](const Index&) { return 0x1p20; }));
    for (const double shift : {0x1p24, 0x1p40, 1e30, 3e38, -1e29}) {
      expect_finite(run(shifted(form, [&](const Index&) { return shift; }), {}));
    }
  }
}

TEST_P(ShiftedScores, OneLargeScoreLeavesRowsThatDoNotSeeItUnchanged) {
  for (const char* form : forms) {
    SCOPED_TRACE(form);
    const Data data = data_of(form);
    const std::int64_t first = data.problem.seqlen_q - 1 - data.problem.seqlen_q / 3;
    const std::int64_t key = first + data.problem.seqlen_k - data.problem.seqlen_q;
    const Results before = run(data, {});
    for (const double shift : {6000.0, 1e5, 0x1p24, 1e30}) {
      SCOPED_TRACE(shift);
      const Data one = shifted(form, [&](const Index& i) { return i[3] == key ? shift : 0.0; });
      const Results results = shift > 0x1p20 ? run(one, {}) : run_and_compare(one);
      expect_finite(results);
      results.out.for_each([&](const Index& i, double out) {
        if (i[1] < first) {
          ASSERT_EQ(out, before.out.get(i)) << text(i);
        }
      });
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
