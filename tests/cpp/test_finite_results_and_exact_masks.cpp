#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/random.h"
#include "support/run.h"

// Invariants for all numbers: finite inputs give finite results, masked elements have no effect, and
// no unwritten memory is read. Every run poisons outputs and workspace, guards all buffers, and checks
// the gaps between elements (support/run.h).
namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Expects equality up to rounding; sums of large numbers are formed in double.
void expect_similar(const Tensor& actual, const Tensor& expected) {
  double size = 0;
  expected.for_each([&](const Index&, double value) { size = std::max(size, std::abs(value)); });
  // dq over all keys is a difference whose terms are a few times larger.
  const double relative = std::max(16 * unit_roundoff(expected.element()), 4e-6);
  EXPECT_LE(errors(actual, expected).max, relative * size) << expected.name();
}

// The words that all tests of a dtype share.
class FiniteAndMasked : public ::testing::TestWithParam<const char*> {
 protected:
  Case with(CaseWords words) const {
    words["dtype"] = GetParam();
    return case_from(words);
  }

  // There are two paths: key intervals with a bias for each key, and a dense mask and bias.
  static constexpr int paths = 2;
  Case with_path(int path, CaseWords words) const {
    const CaseWords intervals =
        "bias=bv1k bias_fill=normal intervals=per_query intervals_shape=bv window=30 causal=1";
    const CaseWords dense = "mask=b1qk mask_fill=random bias=bhqk bias_fill=normal";
    for (const auto& [column, word] : path == 0 ? intervals : dense) {
      words.insert({column, word});
    }
    return with(words);
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, FiniteAndMasked, ::testing::Values("f32", "bf16", "f16"),
                         [](const auto& test) { return std::string(test.param); });

// ---- Tails -----------------------------------------------------------------------------------------

TEST_P(FiniteAndMasked, NanAfterRowTailsHasNoEffect) {
  // Gaps after every row hold NaN, so that reading one lane too many spoils a sum.
  for (const char* head_dim : {"1", "7", "9", "17", "31", "33", "80"}) {
    for (const char* seqlen_k : {"1", "15", "17", "63", "65", "192"}) {
      for (int path = 0; path < paths; ++path) {
        SCOPED_TRACE(std::string(head_dim) + " dims, " + seqlen_k + " keys");
        run_and_compare(Data(with_path(path, {"layout=padded seqlen_q=19",
                                              {{"head_dim", head_dim}, {"seqlen_k", seqlen_k}}})));
      }
    }
  }
}

TEST_P(FiniteAndMasked, UninitialisedWorkspaceHasNoEffect) {
  for (int path = 0; path < paths; ++path) {
    const Data data(with_path(path, "seqlen_q=203"));
    const Results expected = run(data, {.workspace_fill = std::byte{0}});
    for (const int fill : {0xFF, 0x7F, 0x55}) {
      const Results actual = run(data, {.workspace_fill = static_cast<std::byte>(fill)});
      expect_same_bits(actual, expected);
    }
  }
}

// ---- Limits of the dtypes --------------------------------------------------------------------------

TEST_P(FiniteAndMasked, FiniteInputsGiveFiniteResults) {
  // Every element of every input has the largest magnitude, in several patterns of signs.
  const int patterns = is_quick_run() ? 2 : 6;
  for (int pattern = 0; pattern < patterns; ++pattern) {
    for (const char* softcap : {"0", "20"}) {
      for (int path = 0; path < paths; ++path) {
        SCOPED_TRACE("pattern " + std::to_string(pattern) + ", softcap " + softcap);
        Data data(with_path(path, {"heads_q=4 heads_kv=2", {{"softcap", softcap}}}));
        const double limit = largest(data.problem.dtype);
        Random random(static_cast<std::uint64_t>(pattern));
        for (Tensor* tensor : {&data.q, &data.k, &data.v, &data.dout}) {
          const bool same_sign = random.below(2) == 0;
          tensor->fill(
              [&](const Index&) { return same_sign || random.below(2) == 0 ? limit : -limit; });
        }
        expect_finite(run(data, {}));
      }
    }
  }
}

TEST_P(FiniteAndMasked, LargeBiasesGiveFiniteResults) {
  for (const char* shape : {"bv1k", "bhqk", "b1q1"}) {
    Data data(with({"bias_fill=normal causal=1", {{"bias", shape}}}));
    const double limit = largest(data.problem.dtype);
    Random random(1);
    data.bias.fill([&](const Index&) { return (2 * random.uniform() - 1) * limit; });
    expect_finite(run(data, {}));
  }
}

TEST_P(FiniteAndMasked, GradientsSaturateAtDtypeLimit) {
  // All queries see one key with p = 1, so dv is the sum of dout. The limit for gradients is half of the range in bf16, and
  // the whole range in other dtypes.
  for (const char* queries : {"1", "239"}) {
    for (const double sign : {1.0, -1.0}) {
      Data data(with({"seqlen_k=1 heads_q=1", {{"seqlen_q", queries}}}));
      const double limit = largest(data.problem.dtype);
      data.v.fill([](const Index&) { return 0.0; });
      data.dout.fill([&](const Index&) { return sign * limit; });
      expect_all(run(data, {}).dv, sign * gradient_limit(data.problem.dtype));
      data.problem.nonfinite = NonFinite::propagate;
      expect_all(run(data, {}).dv, sign * (data.problem.seqlen_q == 1 ? limit : infinity));
    }
  }
}

// ---- Scores beyond fp32 ----------------------------------------------------------------------------

// A problem whose score of query i and key j is 1e60 * sign(j).
template <class Sign>
Data huge_scores(const Case& c, const Sign& sign) {
  Data data(c);
  data.q.fill([](const Index& i) { return i[3] == 0 ? 1e30 : 0.0; });
  data.k.fill([&](const Index& i) { return i[3] == 0 ? 1e30 * sign(i[1]) : 0.0; });
  return data;
}

TEST_P(FiniteAndMasked, ScoresBeyondFp32Saturate) {
  if (GetParam() == std::string("f16")) return;  // 65504^2 * 256 is within fp32
  const Case c = with("heads_q=1 seqlen_k=130");
  const double fp32_max = double{std::numeric_limits<float>::max()};

  const Data one = huge_scores(c, [](std::int64_t j) { return j == 77 ? 1.0 : 0.0; });
  const Results winner = run(one, {});
  winner.out.for_each(
      [&](const Index& i, double out) { ASSERT_EQ(out, one.v.get({0, 77, 0, i[3]})); });
  expect_all(winner.lse, fp32_max);
  expect_finite(winner);

  Data all = huge_scores(c, [](std::int64_t) { return 1.0; });
  all.v.fill([](const Index& i) { return static_cast<double>(i[1] % 2); });
  const Results ties = run(all, {});
  ties.out.for_each([](const Index&, double out) { ASSERT_NEAR(out, 0.5, 1e-6); });
  expect_finite(ties);

  const Data none = huge_scores(c, [](std::int64_t j) { return j < 2 ? 0.0 : -1.0; });
  const Results losers = run(none, {});
  losers.lse.for_each([](const Index&, double lse) { ASSERT_NEAR(lse, std::log(2.0), 1e-6); });
  expect_finite(losers);

  const Data lowest = huge_scores(c, [](std::int64_t) { return -1.0; });
  const Results low = run(lowest, {});
  expect_all(low.lse, -fp32_max);
  expect_finite(low);
}

// ---- Zero probability ------------------------------------------------------------------------------

TEST_P(FiniteAndMasked, ZeroProbabilityGivesZeroGradientForAnyDp) {
  // dp is infinite or NaN for the odd keys, which are masked or have a score that is 1000 lower.
  for (const bool masked : {true, false}) {
    for (const NonFinite nonfinite : {NonFinite::saturate, NonFinite::propagate}) {
      SCOPED_TRACE(masked ? "masked" : "lost");
      Data data(with("bias=b11k bias_fill=equal mask=b11k mask_fill=full seqlen_q=70"));
      data.problem.nonfinite = nonfinite;
      data.mask.fill([&](const Index& i) { return !masked || i[3] % 2 == 0; });
      data.bias.fill([&](const Index& i) { return masked || i[3] % 2 == 0 ? 0.0 : -1000.0; });
      data.dout.fill([](const Index& i) { return i[3] % 3 == 0 ? 50.0 : -20.0; });
      data.v.fill([](const Index& i) { return static_cast<double>((i[1] + i[3]) % 5) / 4; });
      const Results expected = run(data, {});
      const double limit = largest(data.problem.dtype);
      data.v.fill([&](const Index& i) {
        if (i[1] % 2 == 0) return data.v.get(i);
        return i[3] % 4 < 2 ? limit : -limit;
      });
      const Results actual = run(data, {});
      EXPECT_TRUE(actual.out.same_bits(expected.out));
      expect_similar(actual.dq, expected.dq);
      expect_similar(actual.dk, expected.dk);
      expect_similar(actual.dv, expected.dv);
      expect_similar(actual.dbias, expected.dbias);
      actual.dbias.for_each(
          [](const Index& i, double dbias) { ASSERT_TRUE(dbias == 0 || i[3] % 2 == 0); });
      actual.dk.for_each([](const Index& i, double dk) { ASSERT_TRUE(dk == 0 || i[1] % 2 == 0); });
    }
  }
}

TEST_P(FiniteAndMasked, NanInKeysWithoutIntervalHasNoEffect) {
  Data data(with("intervals=padding_left intervals_shape=b1 causal=1"));
  const std::int64_t padded = data.problem.seqlen_k / 7;
  for (Tensor* tensor : {&data.k, &data.v}) {
    tensor->fill([&](const Index& i) { return i[1] < padded ? nan : tensor->get(i); });
  }
  expect_finite(run(data, {}));
}

// ---- Fills that mask -------------------------------------------------------------------------------

TEST_P(FiniteAndMasked, MaskingBiasGivesZeroGradients) {
  for (const char* fill : {"finfo_min", "inf", "nan"}) {
    for (const char* bias_dtype : {"same", "f32"}) {
      SCOPED_TRACE(std::string(fill) + ", bias " + bias_dtype);
      Data data(with({"bias=bhqk", {{"bias_fill", fill}, {"bias_dtype", bias_dtype}}}));
      // Key 3 is masked for all queries.
      data.bias.fill([&](const Index& i) { return i[3] == 3 ? -infinity : data.bias.get(i); });
      const Results actual = run_and_compare(data);
      expect_finite(actual);
      actual.dbias.for_each([&](const Index& i, double dbias) {
        ASSERT_TRUE(dbias == 0 || data.visible(i[0], i[1], i[2], i[3])) << text(i);
      });
      for (const Tensor* gradient : {&actual.dk, &actual.dv}) {
        gradient->for_each(
            [](const Index& i, double value) { ASSERT_TRUE(value == 0 || i[1] != 3); });
      }
    }
  }
}

TEST_P(FiniteAndMasked, OnlyBiasUpToMaskValueOfItsDtypeMasks) {
  for (const char* bias : {"b11k", "b1qk"}) {
    for (const char* bias_dtype : {"same", "f32"}) {
      SCOPED_TRACE(std::string(bias) + " " + bias_dtype);
      Data data(with(
          {"seqlen_q=3 seqlen_k=2 bias_fill=equal", {{"bias", bias}, {"bias_dtype", bias_dtype}}}));
      const bool f16 = data.problem.bias_dtype == DType::f16;
      const float threshold = f16 ? -1e4f : -1e30f;
      data.bias.fill([&](const Index&) { return double{threshold}; });
      expect_all(run(data, {}).lse, -infinity);
      const bool f32 = data.problem.bias_dtype == DType::f32;
      const float above = f32 ? std::nextafter(threshold, 0.0f) : 0.99f * threshold;
      data.bias.fill([&](const Index&) { return double{above}; });
      run(data, {}).lse.for_each([](const Index&, double lse) { ASSERT_TRUE(std::isfinite(lse)); });
    }
  }
}

TEST_P(FiniteAndMasked, QueriesWithoutVisibleKeysHaveNoEffect) {
  // Causality is aligned to the bottom right, so with 90 more queries than keys the first 90 queries see nothing.
  for (const char* intervals : {"none", "per_query"}) {
    Data data(with({"seqlen_q=203 seqlen_k=113 causal=1 intervals_shape=bv window=20",
                    {{"intervals", intervals}}}));
    data.dout.fill(
        [&](const Index& i) { return i[1] < 90 ? largest(data.problem.dtype) : data.dout.get(i); });
    const Results actual = run_and_compare(data);
    for (const Tensor* tensor : {&actual.out, &actual.dq}) {
      tensor->for_each([](const Index& i, double value) { ASSERT_TRUE(value == 0 || i[1] >= 90); });
    }
    actual.lse.for_each([](const Index& i, double lse) { ASSERT_EQ(lse == -infinity, i[2] < 90); });
    expect_finite(actual);
  }
}

// ---- Non-finite inputs -----------------------------------------------------------------------------

TEST_P(FiniteAndMasked, NonFiniteDoutCountsAsZero) {
  for (int path = 0; path < paths; ++path) {
    for (const double value : {infinity, -infinity, nan}) {
      Data data(with_path(path, {}));
      Data zeroed(with_path(path, {}));
      for (const Index& i : {Index{0, 0, 0, 0}, Index{0, 50, 1, 7}, Index{0, 112, 1, 63}}) {
        data.dout.set(i, value);
        zeroed.dout.set(i, 0);
      }
      const Results actual = run(data, {});
      expect_finite(actual);
      expect_same_gradients(actual, run(zeroed, {}));
    }
  }
}

TEST_P(FiniteAndMasked, NonFiniteInputsPropagateToDependentResults) {
  const std::vector<std::pair<Tensor Data::*, Index>> elements = {{&Data::q, {0, 50, 1, 7}},
                                                                  {&Data::k, {0, 30, 0, 7}},
                                                                  {&Data::v, {0, 30, 0, 7}},
                                                                  {&Data::bias, {0, 0, 112, 30}},
                                                                  {&Data::dout, {0, 50, 1, 7}}};
  for (int path = 0; path < paths; ++path) {
    for (const auto& [input, element] : elements) {
      for (const double value : {nan, infinity, -infinity}) {
        if (is_quick_run() && !std::isnan(value)) continue;
        Data data(with_path(path, "nonfinite=propagate"));
        Tensor& tensor = data.*input;
        SCOPED_TRACE("path " + std::to_string(path) + ", " + std::string(tensor.name()) + ", " +
                     std::to_string(value));
        Index at = element;
        at[2] = std::min(at[2], tensor.shape()[2] - 1);  // a bias for each key has one row
        tensor.set(at, value);
        const Results actual = run(data, {});
        const Results expected = run(data, {.backend = "reference"});
        for (const auto result : {&Results::out, &Results::lse, &Results::dq, &Results::dk,
                                  &Results::dv, &Results::dbias}) {
          (expected.*result).for_each([&](const Index& i, double x) {
            ASSERT_EQ(std::isfinite((actual.*result).get(i)), std::isfinite(x))
                << (expected.*result).name() << " " << text(i);
          });
        }
        const bool masks = input == &Data::bias && !(value > 0);
        const bool is_dout = input == &Data::dout;
        EXPECT_EQ(all_finite(actual.out), masks || is_dout);
        EXPECT_EQ(all_finite(actual.dq), masks);
        EXPECT_EQ(all_finite(actual.dk), masks);
        EXPECT_FALSE(is_dout && all_finite(actual.dv));
      }
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
