#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "flash_dmattn/flash_dmattn.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/run.h"
#include "support/small.h"

// The rules of attention.h for non-finite and out-of-range numbers, in the reference backend.
namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double float_max = std::numeric_limits<float>::max();

TEST(NonFiniteReference, ScoresSaturateAtTheRangeOfFp32) {
  Data data = small(2, 2, 2);
  set_row(data.q, 0, {3e38, 0});
  set_row(data.q, 1, {-3e38, 0});
  set_row(data.k, 0, {3e38, 0});
  set_row(data.k, 1, {1, 0});
  set_row(data.v, 0, {1, 2});
  set_row(data.v, 1, {5, 6});
  set_row(data.dout, 0, {1, 1});
  set_row(data.dout, 1, {1, 1});
  const Results results = run(data, reference());
  EXPECT_EQ(values_of(results.out), (Values{1, 2, 5, 6}));
  // Both scores of query 1 are beyond -3e38, but only one of them is beyond the range.
  EXPECT_EQ(values_of(results.lse), (Values{float_max, -static_cast<double>(3e38f)}));
  EXPECT_EQ(values_of(results.dv), (Values{1, 1, 1, 1}));
  EXPECT_EQ(values_of(results.dq), (Values{0, 0, 0, 0}));
}

TEST(NonFiniteReference, NanScoreSaturatesToTheLowest) {
  Data data = small(1, 2, 1);
  set_row(data.q, 0, {1});
  set_row(data.k, 0, {nan});
  set_row(data.v, 0, {4});
  set_row(data.v, 1, {8});
  const Results results = run(data, reference());
  EXPECT_EQ(values_of(results.out), Values{8});
  EXPECT_EQ(values_of(results.lse), Values{0});
}

// Query 0 sees key 0 alone, query 1 sees both keys.
TEST(NonFiniteReference, NonFiniteInputsOfVisibleScoresPropagate) {
  const auto all_nan = [](const Values& values) {
    return std::all_of(values.begin(), values.end(), [](double x) { return std::isnan(x); });
  };
  for (const double bad : {infinity, -infinity, nan}) {
    SCOPED_TRACE(bad);
    Data data = small(2, 2, 1, DType::f32, {1, 1, 2, 2}, {1, 1, 2, 2});
    data.problem.nonfinite = NonFinite::propagate;
    data.q.fill([](const Index&) { return 1.0; });
    data.k.fill([](const Index&) { return 1.0; });
    data.v.fill([](const Index&) { return 1.0; });
    data.dout.fill([](const Index&) { return 1.0; });
    data.bias.fill([](const Index&) { return 0.0; });
    data.mask.set({0, 0, 0, 1}, 0);
    const Results finite = run(data, reference());

    data.k.set({0, 1, 0, 0}, bad);
    const Results results = run(data, reference());
    for (const Tensor* each : {&results.out, &results.dq}) {
      EXPECT_EQ(each->get({0, 0, 0, 0}), each == &results.out ? 1 : 0);
      EXPECT_TRUE(std::isnan(each->get({0, 1, 0, 0})));
    }
    EXPECT_TRUE(std::isnan(values_of(results.lse)[1]));
    EXPECT_TRUE(all_nan(values_of(results.dk)) && all_nan(values_of(results.dv)));
    EXPECT_EQ(results.dbias.get({0, 0, 0, 0}), 0);
    EXPECT_TRUE(std::isnan(results.dbias.get({0, 0, 1, 1})));

    data.mask.set({0, 0, 1, 1}, 0);  // and nobody sees key 1
    const Results hidden = run(data, reference());
    EXPECT_EQ(values_of(hidden.out), (Values{1, 1}));
    EXPECT_EQ(values_of(hidden.dk), (Values{0, 0}));
    EXPECT_EQ(values_of(hidden.dv), (Values{2, 0}));
    data.mask.set({0, 0, 1, 1}, 1);
    data.k.set({0, 1, 0, 0}, 1);

    data.bias.set({0, 0, 1, 0}, bad);
    const Results biased = run(data, reference());
    EXPECT_EQ(biased.out.get({0, 0, 0, 0}), 1);
    // NaN and -inf mask; +inf is a value.
    EXPECT_EQ(std::isnan(biased.out.get({0, 1, 0, 0})), bad == infinity);
    data.bias.set({0, 0, 1, 0}, 0);
    EXPECT_EQ(values_of(run(data, reference()).out), values_of(finite.out));
  }
}

TEST(NonFiniteReference, NonFiniteDoutCountsAsZeroOrPropagates) {
  for (const double bad : {infinity, -infinity, nan}) {
    Data data = small(2, 2, 2, DType::f32, {1, 1, 1, 2}, {1, 1, 2, 2});
    data.mask.set({0, 0, 0, 1}, 0);  // query 0 sees key 0 only
    data.q.fill([](const Index&) { return 1.0; });
    data.k.fill([](const Index&) { return 1.0; });
    data.v.fill([](const Index&) { return 1.0; });
    data.bias.set({0, 0, 0, 1}, 1.0);
    set_row(data.dout, 0, {bad, 3});
    set_row(data.dout, 1, {0, 0});

    const Results saturated = run(data, reference());
    EXPECT_EQ(values_of(saturated.dv), (Values{0, 3, 0, 0}));
    EXPECT_EQ(values_of(saturated.dq), (Values{0, 0, 0, 0}));

    data.problem.nonfinite = NonFinite::propagate;
    const Results propagated = run(data, reference());
    const Values dv = values_of(propagated.dv);
    EXPECT_TRUE(std::isnan(bad) ? std::isnan(dv[0]) : dv[0] == bad);
    EXPECT_EQ(dv[1], 3);
    EXPECT_EQ(dv[2], 0);  // masked for query 0, whatever its dout is
    EXPECT_EQ(dv[3], 0);
    const Values dq = values_of(propagated.dq);
    EXPECT_TRUE(std::isnan(dq[0]) && std::isnan(dq[1]));
    EXPECT_EQ(dq[2], 0);
    EXPECT_EQ(dq[3], 0);
    const Values dbias = values_of(propagated.dbias);
    EXPECT_TRUE(std::isnan(dbias[0]));
    EXPECT_EQ(dbias[1], 0);
  }
}

TEST(NonFiniteReference, VisibleElementOfZeroProbabilityPropagates) {
  Data data = small(1, 2, 1, DType::f32, {1, 1, 1, 2});
  data.bias.set({0, 0, 0, 0}, -1e6);  // visible, but exp(-1e6) is 0
  set_row(data.dout, 0, {infinity});
  set_row(data.v, 0, {nan});
  set_row(data.v, 1, {1});
  const Results saturated = run(data, reference());
  EXPECT_EQ(values_of(saturated.out), Values{1});
  EXPECT_EQ(values_of(saturated.dv), (Values{0, 0}));
  EXPECT_EQ(values_of(saturated.dk), (Values{0, 0}));
  EXPECT_EQ(saturated.dbias.get({0, 0, 0, 0}), 0);

  data.problem.nonfinite = NonFinite::propagate;
  const Results propagated = run(data, reference());
  EXPECT_TRUE(std::isnan(values_of(propagated.out)[0]));
  EXPECT_TRUE(std::isnan(values_of(propagated.dv)[0]));
  EXPECT_EQ(values_of(propagated.dv)[1], infinity);
  EXPECT_TRUE(std::isnan(propagated.dk.get({0, 0, 0, 0})));
  EXPECT_TRUE(std::isnan(propagated.dbias.get({0, 0, 0, 0})));

  data.bias.set({0, 0, 0, 0}, -infinity);
  EXPECT_EQ(values_of(run(data, reference()).out), Values{1});
}

struct Limit {
  DType dtype;
  double input;     // two of them added exceed the range
  double gradient;  // what a gradient saturates at
};

class GradientLimit : public ::testing::TestWithParam<Limit> {};

TEST_P(GradientLimit, GradientsSaturateAtDtypeLimit) {
  const auto [dtype, input, limit] = GetParam();
  Data data = small(2, 1, 2, dtype);
  set_row(data.dout, 0, {input, -input});
  set_row(data.dout, 1, {input, -input});
  EXPECT_EQ(values_of(run(data, reference()).dv), (Values{limit, -limit}));
  data.problem.nonfinite = NonFinite::propagate;
  EXPECT_EQ(values_of(run(data, reference()).dv), (Values{infinity, -infinity}));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GradientLimit,
                         ::testing::Values(Limit{DType::f64, 1.5e308, 0x1.fffffffffffffp1023},
                                           Limit{DType::f32, 3e38, float_max},
                                           Limit{DType::bf16, 0x1.8p127, 0x1.fep126},
                                           Limit{DType::f16, 60000, 65504}),
                         [](const auto& test) { return std::string(name_of(test.param.dtype)); });

// ds is +-2^29 here. The limit of f16 does not apply to it, only to stored gradients.
TEST(NonFiniteReference, DsHasNoDtypeLimit) {
  Data data = small(1, 2, 1, DType::f16, {1, 1, 1, 2});
  set_row(data.v, 0, {0x1p15});
  set_row(data.v, 1, {-0x1p15});
  set_row(data.dout, 0, {0x1p15});
  set_row(data.q, 0, {0x1p-20});
  set_row(data.k, 0, {0});
  set_row(data.k, 1, {0});
  const double ds = data.v.get({0, 0, 0, 0}) * data.dout.get({0, 0, 0, 0}) / 2;
  const Results results = run(data, reference());
  EXPECT_EQ(values_of(results.dbias), (Values{ds, -ds}));
  EXPECT_EQ(values_of(results.dk), (Values{ds * 0x1p-20, -ds * 0x1p-20}));
}

TEST(NonFiniteReference, OutReachesDtypeMaximum) {
  for (const auto& [dtype, largest] :
       {std::pair{DType::f32, float_max}, std::pair{DType::bf16, 0x1.fep127},
        std::pair{DType::f16, 65504.0}}) {
    SCOPED_TRACE(name_of(dtype));
    Data data = small(1, 3, 1, dtype);
    data.v.fill([value = largest](const Index&) { return value; });
    EXPECT_EQ(values_of(run(data, reference()).out), Values{largest});
    data.v.set({0, 1, 0, 0}, infinity);
    EXPECT_EQ(values_of(run(data, reference()).out), Values{largest});
    data.problem.nonfinite = NonFinite::propagate;
    EXPECT_EQ(values_of(run(data, reference()).out), Values{infinity});
  }
}

// Inputs are finite and arbitrarily large, in every dtype and under both policies of scores and weights.
TEST(NonFiniteReference, FiniteInputsGiveFiniteResults) {
  for (const char* dtype : {"f64", "f32", "bf16", "f16"}) {
    for (const char* softcap : {"0", "30"}) {
      SCOPED_TRACE(std::string(dtype) + " softcap " + softcap);
      Data data(case_from(
          {"seqlen_q=9 seqlen_k=13 head_dim=8 causal=1 inputs=limits bias=bhqk bias_fill=finfo_min",
           {{"dtype", dtype}, {"softcap", softcap}}}));
      data.dout.fill([&](const Index& index) { return data.q.get(index); });
      expect_finite(run(data, reference()));
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
