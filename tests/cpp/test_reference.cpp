#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "reference/selection.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/random.h"
#include "support/run.h"
#include "support/small.h"

// Compares the reference backend and the reference selection with independent results: finite differences
// and results computed by hand.
namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
// ---- Finite differences --------------------------------------------------------------------------

// The loss sum(out * dout), whose gradients are dq, dk, dv and dbias.
double loss(const Data& data) {
  Results results(data);
  run_forward(data, reference(), results);
  double sum = 0;
  results.out.for_each(
      [&](const Index& index, double value) { sum += value * data.dout.get(index); });
  return sum;
}

void expect_slopes(Data& data, Tensor& input, const Tensor& gradient) {
  constexpr double step = 0x1p-17;  // error: step^2 of the truncation, 2^-53 / step of the rounding
  gradient.for_each([&](const Index& index, double slope) {
    const double value = input.get(index);
    input.set(index, value + step);
    const double above = loss(data);
    input.set(index, value - step);
    const double below = loss(data);
    input.set(index, value);
    EXPECT_NEAR(slope, (above - below) / (2 * step), 2e-8 * (1 + std::abs(slope)))
        << gradient.name() << " " << text(index);
  });
}

class FiniteDifferences : public ::testing::TestWithParam<CaseWords> {};

TEST_P(FiniteDifferences, GradientsEqualFiniteDifferences) {
  CaseWords words = "batch=2 heads_q=4 heads_kv=2 seqlen_q=5 seqlen_k=7 head_dim=3 dtype=f64";
  for (const auto& [column, word] : GetParam()) words[column] = word;
  Data data(case_from(words));
  const Results results = run(data, reference());
  expect_slopes(data, data.q, results.dq);
  expect_slopes(data, data.k, results.dk);
  expect_slopes(data, data.v, results.dv);
  if (data.has_bias()) expect_slopes(data, data.bias, results.dbias);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, FiniteDifferences,
    ::testing::Values(
        CaseWords("name=grouped_queries"), CaseWords("name=one_group heads_kv=1"),
        CaseWords("name=causal_more_keys causal=1"),
        CaseWords("name=delayed_bias causal=1 bias=bv1k bias_fill=normal bias_delay=2"),
        CaseWords("name=causal_more_queries causal=1 seqlen_q=8 seqlen_k=6"),
        CaseWords("name=fewer_columns_of_values value_dim=2 causal=1"),
        CaseWords("name=softcap softcap=0.75 scale=1.5"),
        CaseWords("name=softcap_bias softcap=2 bias=bhqk bias_fill=normal"),
        CaseWords("name=mask_full mask=bhqk mask_fill=rows"),
        CaseWords("name=mask_kv_heads mask=1vqk mask_fill=random causal=1"),
        CaseWords("name=mask_padding mask=b11k mask_fill=padding_left"),
        CaseWords("name=mask_queries mask=11q1 mask_fill=random"),
        CaseWords("name=all_masked mask=1111 mask_fill=none bias=bh1k bias_fill=normal"),
        CaseWords("name=bias_full bias=bhqk bias_fill=inf"),
        CaseWords("name=bias_per_key bias=bv1k bias_fill=normal causal=1"),
        CaseWords("name=bias_per_query_head bias=1h1k bias_fill=inf"),
        CaseWords("name=bias_shared_heads bias=b1qk bias_fill=normal"),
        CaseWords("name=bias_shared_batch bias=1vqk bias_fill=normal"),
        CaseWords("name=bias_scalar bias=1111 bias_fill=normal"),
        CaseWords("name=bias_per_query bias=bhq1 bias_fill=normal"),
        CaseWords("name=intervals_random intervals=random intervals_shape=bv"),
        CaseWords("name=intervals_sliding intervals=sliding intervals_shape=11 window=3 causal=1"),
        CaseWords("name=everything intervals=per_query intervals_shape=1v window=3 causal=1 "
                  "mask=b1qk mask_fill=random bias=bv1k bias_fill=normal softcap=3 layout=padded")),
    [](const auto& test) { return test.param.at("name"); });

// ---- Results computed by hand --------------------------------------------------------------------

TEST(Reference, OneVisibleKeyGivesItsValue) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    Data data = small(1, 3, 2, dtype, {}, {1, 1, 1, 3});
    set_row(data.q, 0, {0.5, -2});
    set_row(data.k, 1, {3, 0.25});
    set_row(data.v, 1, {1.5, -7});
    set_row(data.v, 2, {infinity, nan});  // not visible
    data.mask.set({0, 0, 0, 0}, 0);
    data.mask.set({0, 0, 0, 2}, 0);
    set_row(data.dout, 0, {2, 4});
    const Results results = run(data, reference());
    EXPECT_EQ(values_of(results.out), (Values{1.5, -7}));
    EXPECT_EQ(values_of(results.lse), Values{1});  // its score
    EXPECT_EQ(values_of(results.lse_low), Values{0});
    EXPECT_EQ(values_of(results.dq), (Values{0, 0}));
    EXPECT_EQ(values_of(results.dk), (Values{0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(values_of(results.dv), (Values{0, 0, 2, 4, 0, 0}));
  }
}

TEST(Reference, EqualScoresGiveTheMean) {
  for (const std::int64_t keys : {1, 2, 8, 64}) {
    Data data = small(1, keys, 1);
    for (std::int64_t j = 0; j < keys; ++j) {
      set_row(data.k, j, {3});
      set_row(data.v, j, {static_cast<double>(2 * j + 1)});
    }
    set_row(data.q, 0, {1});
    set_row(data.dout, 0, {1});
    const Results results = run(data, reference());
    EXPECT_EQ(values_of(results.out), Values{static_cast<double>(keys)});
    EXPECT_FLOAT_EQ(static_cast<float>(results.lse.get({0, 0, 0, 0})),
                    3 + std::log(static_cast<float>(keys)));
    for (const double value : values_of(results.dv)) {
      EXPECT_NEAR(value, 1.0 / static_cast<double>(keys), 1e-7);
    }
  }
}

// p = (1/4, 3/4): dp = (4, 8), delta = 7, ds = (-3/4, 3/4).
TEST(Reference, TwoKeysMatchHandComputedResults) {
  Data data = small(1, 2, 1, DType::f64, {1, 1, 1, 2});
  data.problem.scale = 0.5;
  set_row(data.q, 0, {2});
  set_row(data.k, 0, {0});
  set_row(data.k, 1, {1});
  set_row(data.v, 0, {4});
  set_row(data.v, 1, {8});
  data.bias.set({0, 0, 0, 1}, std::log(3) - 1);  // on a score of 1
  set_row(data.dout, 0, {1});
  const Results results = run(data, reference());
  const auto expect_near = [](const Tensor& tensor, const Values& expected) {
    const Values values = values_of(tensor);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-14);
  };
  expect_near(results.out, {7});
  expect_near(results.lse, {std::log(4)});
  expect_near(results.dbias, {-0.75, 0.75});
  expect_near(results.dq, {0.375});
  expect_near(results.dk, {-0.75, 0.75});
  expect_near(results.dv, {0.25, 0.75});
}

TEST(Reference, RowsWithoutVisibleKeysGiveZeros) {
  Data data = small(2, 2, 1, DType::bf16, {1, 1, 1, 2}, {1, 1, 2, 1});
  data.q.fill([](const Index&) { return 1.0; });
  data.k.fill([](const Index&) { return 2.0; });
  data.v.fill([](const Index&) { return 3.0; });
  data.dout.fill([](const Index&) { return infinity; });
  data.problem.nonfinite = NonFinite::propagate;
  data.mask.fill([](const Index&) { return 0.0; });
  const Results results = run(data, reference());
  EXPECT_EQ(values_of(results.out), (Values{0, 0}));
  EXPECT_EQ(values_of(results.lse), (Values{-infinity, -infinity}));
  EXPECT_EQ(values_of(results.lse_low), (Values{0, 0}));
  for (const Tensor* tensor : {&results.dq, &results.dk, &results.dv, &results.dbias}) {
    EXPECT_EQ(values_of(*tensor), (Values{0, 0})) << tensor->name();
  }
}

TEST(Reference, BiasAtMaskValueOfItsDtypeMasks) {
  struct Dtypes {
    DType qkv;
    DType bias;
    double mask_value;
  };
  for (const auto [dtype, bias_dtype, masks_at] :
       {Dtypes{DType::f64, DType::f64, -1e30}, Dtypes{DType::f32, DType::f32, -1e30},
        Dtypes{DType::bf16, DType::bf16, -1e30}, Dtypes{DType::bf16, DType::f32, -1e30},
        Dtypes{DType::f16, DType::f16, -1e4}, Dtypes{DType::f16, DType::f32, -1e30}}) {
    SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + std::string(name_of(bias_dtype)));
    for (const double masking : {masks_at, -infinity, nan}) {
      Data data = small(1, 2, 1, dtype, {1, 1, 1, 2}, {}, bias_dtype);
      set_row(data.v, 0, {5});
      set_row(data.v, 1, {3});
      set_row(data.dout, 0, {1});
      data.bias.set({0, 0, 0, 0}, masking);
      const Results results = run(data, reference());
      EXPECT_EQ(values_of(results.out), Values{3});
      EXPECT_EQ(values_of(results.dv), (Values{0, 1}));
      EXPECT_EQ(values_of(results.dbias), (Values{0, 0}));
    }
    // A key just above the mask value is visible and, being alone, has all of the weight.
    Data data = small(1, 1, 1, dtype, {1, 1, 1, 1}, {}, bias_dtype);
    set_row(data.v, 0, {5});
    data.bias.set({0, 0, 0, 0}, 0.75 * masks_at);
    EXPECT_EQ(values_of(run(data, reference()).out), Values{5});
  }
}

TEST(Reference, DelayedBiasEqualsDenseBias) {
  for (const char* delay : {"1", "3", "6", "100"}) {
    for (const char* fill : {"normal", "inf"}) {
      SCOPED_TRACE(std::string("delay ") + delay + ", bias " + fill);
      CaseWords words = {
          "name=delayed batch=2 heads_q=4 heads_kv=2 seqlen_q=9 seqlen_k=6 dtype=f64 bias=bv1k",
          {{"bias_fill", fill}, {"bias_delay", delay}}};
      const Data delayed(case_from(words));
      words["bias"] = "bvqk";
      words["bias_delay"] = "0";
      Data pairs(case_from(words));
      pairs.q.fill(elements_of(delayed.q));
      pairs.k.fill(elements_of(delayed.k));
      pairs.v.fill(elements_of(delayed.v));
      pairs.dout.fill(elements_of(delayed.dout));
      // Query i is at position i - 3.
      const auto counts = [&](const Index& i) { return i[2] - 3 - i[3] >= std::stoll(delay); };
      pairs.bias.fill(
          [&](const Index& i) { return counts(i) ? delayed.bias.get({i[0], i[1], 0, i[3]}) : 0; });
      const Results results = run(delayed, reference());
      const Results expected = run(pairs, reference());
      EXPECT_TRUE(results.out.same_bits(expected.out));
      EXPECT_TRUE(results.dq.same_bits(expected.dq));
      EXPECT_TRUE(results.dk.same_bits(expected.dk));
      EXPECT_TRUE(results.dv.same_bits(expected.dv));
      results.dbias.for_each([&](const Index& i, double dbias) {
        double sum = 0;
        for (std::int64_t query = 0; query < 9; ++query) {
          const Index pair{i[0], i[1], query, i[3]};
          if (counts(pair)) sum += expected.dbias.get(pair);
        }
        EXPECT_NEAR(dbias, sum, 1e-14);
      });
    }
  }
}

// lse is 1e30 + log 4, of which f32 keeps 1e30, so without lse_low every p would be 1.
TEST(Reference, LargeLseWithLseLowKeepsBackwardNormalised) {
  Data data = small(1, 4, 1, DType::f32, {1, 1, 1, 1});
  data.bias.set({0, 0, 0, 0}, 1e30);
  set_row(data.dout, 0, {1});
  RunOptions options = reference();
  Results results = run(data, options);
  EXPECT_EQ(results.lse_low.get({0, 0, 0, 0}),
            static_cast<double>(static_cast<float>(std::log(4))));
  for (const double value : values_of(results.dv)) EXPECT_NEAR(value, 0.25, 1e-7);
  options.lse_low = false;
  results = run(data, options);
  EXPECT_EQ(values_of(results.dv), (Values{1, 1, 1, 1}));
}

TEST(Reference, UnwantedGradientsAreNotWritten) {
  Data data(case_from("bias=bv1k bias_fill=normal"));
  const Results all = run(data, reference());
  RunOptions options = reference();
  options.wanted = {.dq = false, .dk = true, .dv = false, .dbias = false};
  const Results one = run(data, options);
  EXPECT_TRUE(one.dk.same_bits(all.dk));
  const Results poisoned(data);
  EXPECT_TRUE(one.dq.same_bits(poisoned.dq));
  EXPECT_TRUE(one.dv.same_bits(poisoned.dv));
  EXPECT_TRUE(one.dbias.same_bits(poisoned.dbias));
}

TEST(Reference, WorkerCountDoesNotChangeBits) {
  for (const char* shape : {"bhqk", "bv1k", "1vqk", "b11k", "111k"}) {
    const Data data(
        case_from({"batch=3 heads_q=6 heads_kv=3 seqlen_q=9 seqlen_k=11 head_dim=8 dtype=bf16 "
                   "bias_fill=normal",
                   {{"bias", shape}}}));
    const Results expected = run(data, reference());
    for (const int workers : {2, 5, 100}) {
      RunOptions options = reference();
      options.execution = threaded_execution(workers);
      SCOPED_TRACE(shape);
      expect_same_bits(run(data, options), expected);
    }
  }
}

// ---- Selection -----------------------------------------------------------------------------------

struct Scores {
  std::vector<float> scores;
  std::vector<std::uint8_t> key_mask;
  SelectionArgs args;

  Scores(std::vector<float> values, std::int64_t seqlen_q, std::int64_t window)
      : scores(std::move(values)), key_mask(scores.size(), 1) {
    args.batch = 1;
    args.heads = 1;
    args.seqlen_q = seqlen_q;
    args.seqlen_k = static_cast<std::int64_t>(scores.size());
    args.rule.window = window;
    args.scores = scores.data();
    args.scores_dtype = DType::f32;
    args.scores_stride = {0, 0, 1};
    args.key_mask = key_mask.data();
    args.key_mask_stride = {0, 0, 1};
  }

  std::string visible() const {
    std::string rows;
    const auto elements = reference::visible_elements(args, 0, 0);
    for (std::size_t n = 0; n < elements.size(); ++n) {
      if (n > 0 && n % scores.size() == 0) rows += ' ';
      rows += elements[n] != 0 ? 'x' : '.';
    }
    return rows;
  }
};

TEST(ReferenceSelection, FiveKeysMatchHandComputedVisibility) {
  Scores scores({5, 1, 3, 4, 2}, 5, 2);
  EXPECT_EQ(scores.visible(), "x.... xx... x.x.. x..x. x..x.");
  scores.args.rule.selection = Selection::global;
  EXPECT_EQ(scores.visible(), "x.... x.... x.... x..x. x..x.");
  scores.args.causal = false;
  EXPECT_EQ(scores.visible(), "x..x. x..x. x..x. x..x. x..x.");
  scores.args.rule.selection = Selection::per_query;
  EXPECT_EQ(scores.visible(), "x..x. x..x. x..x. x..x. x..x.");
}

TEST(ReferenceSelection, EqualScoresSelectMoreRecentKeys) {
  EXPECT_EQ(Scores({1, 1, 1, 1}, 4, 2).visible(), "x... xx.. .xx. ..xx");
  EXPECT_EQ(Scores({0.0f, -0.0f, 0.0f}, 3, 1).visible(), "x.. .x. ..x");
}

TEST(ReferenceSelection, NanAndMaskedKeysAreIgnored) {
  Scores scores({std::numeric_limits<float>::quiet_NaN(), 1, 9, 2}, 4, 2);
  scores.key_mask[2] = 0;
  EXPECT_EQ(scores.visible(), ".... .x.. .x.. .x.x");
}

TEST(ReferenceSelection, FewerQueriesThanKeysAlignToTheEnd) {
  EXPECT_EQ(Scores({5, 1, 3, 4, 2}, 2, 2).visible(), "x..x. x..x.");
  EXPECT_EQ(Scores({2, 1}, 4, 2).visible(), ".. .. x. xx");
}

TEST(ReferenceSelection, WindowOfZeroOrAllKeysSelectsNoneOrAll) {
  EXPECT_EQ(Scores({2, 1, 3}, 3, 0).visible(), "... ... ...");
  EXPECT_EQ(Scores({2, 1, 3}, 3, 100).visible(), "x.. xx. xxx");
}

TEST(ReferenceSelection, RandomScoresGiveIntervals) {
  Random random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<float> values(static_cast<std::size_t>(random.below(12) + 1));
    for (float& value : values) value = static_cast<float>(random.below(5));
    Scores scores(values, random.below(15) + 1, random.below(6));
    for (auto& element : scores.key_mask) element = random.uniform() < 0.8;
    scores.args.causal = round % 3 != 0;
    scores.args.rule.selection = round % 2 == 0 ? Selection::per_query : Selection::global;
    const auto intervals = reference::select_key_intervals(scores.args, 0, 0);  // throws otherwise
    const auto elements = reference::visible_elements(scores.args, 0, 0);
    for (std::size_t n = 0; n < elements.size(); ++n) {
      const KeyInterval interval = intervals[n % values.size()];
      const auto query = static_cast<std::int64_t>(n / values.size());
      ASSERT_EQ(elements[n] != 0, interval.first <= query && query < interval.last);
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing
