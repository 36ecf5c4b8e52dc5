#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>

#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/instruction_sets.h"
#include "support/random.h"
#include "support/run.h"
#include "support/yardstick.h"

// Compares the backend "cpu" with the reference over the case table, and with exact results of a few problems. The
// table runs once for all instruction sets, because its reference takes longest. FLASH_DMATTN_MAX_ISA selects the
// instruction set of the other tests (main.cpp).
namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---- The case table --------------------------------------------------------------------------------

class AttentionTable : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionTable, ResultsAreWithinBounds) {
  const Case& c = GetParam();
  if (c.only_on_gpus) GTEST_SKIP() << "its size is for the kernels of GPUs";
  if (c.slow && is_quick_run()) GTEST_SKIP() << "slow, and FLASH_DMATTN_QUICK_TESTS is set";
  const std::string reason = supports(c.problem, "cpu");
  ASSERT_EQ(reason, "");
  const Data data(c);
  const RunOptions options{.execution = pooled_execution()};
  if (is_quick_run()) {
    choose_by_name(c.name);
    run_and_compare(data, options);
    // For tests that choose none.
    cpu::choose_instruction_set(cpu::allowed_instruction_sets().back());
    return;
  }
  const Bounds bounds(data);
  on_each_instruction_set([&] { bounds.expect(run(data, options)); });
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTable, ::testing::ValuesIn(attention_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- Delays of the bias ----------------------------------------------------------------------------

TEST(AttentionDelay, RandomDelaysAreWithinBounds) {
  Random random(0);
  const auto one_of = [&](std::initializer_list<const char*> words) {
    return std::string(words.begin()[random.below(static_cast<std::int64_t>(words.size()))]);
  };
  for (int draw = 0; draw < (is_quick_run() ? 10 : 30); ++draw) {
    const std::int64_t seqlen_k = 1 + random.below(500);
    const std::string delay =
        std::to_string(one_of({"1", "0"}) == "1" ? 1 + random.below(seqlen_k) : random.below(40));
    const Case c = case_from(
        {"heads_q=4 heads_kv=2 mask_fill=random bias_dtype=f32 intervals_shape=bv window=40",
         {{"seqlen_q", std::to_string(1 + random.below(400))},
          {"seqlen_k", std::to_string(seqlen_k)},
          {"head_dim", one_of({"8", "24", "64"})},
          {"value_dim", one_of({"0", "0", "8", "5"})},
          {"dtype", one_of({"f32", "bf16", "f16"})},
          {"causal", one_of({"0", "1"})},
          {"softcap", one_of({"0", "0", "5"})},
          {"mask", one_of({"none", "none", "b11k", "b1qk"})},
          {"bias", one_of({"bv1k", "1h1k", "b11k", "1h11"})},
          {"bias_fill", one_of({"normal", "inf"})},
          {"intervals", one_of({"none", "random", "per_query"})},
          {"seed", std::to_string(draw)},
          {"bias_delay", delay}}});
    SCOPED_TRACE("draw " + std::to_string(draw) + ", delay " + delay);
    run_and_compare(Data(c));
  }
}

// ---- The number of workers -------------------------------------------------------------------------

class AttentionWorkers : public ::testing::TestWithParam<const char*> {};

TEST_P(AttentionWorkers, WorkerCountDoesNotChangeBits) {
  const Data data(attention_case(GetParam()));
  const Results expected = run(data, {.execution = sequential_execution(1)});
  for (const Execution& execution :
       {sequential_execution(1), sequential_execution(3), threaded_execution(2),
        threaded_execution(7), threaded_execution(40), pooled_execution()}) {
    SCOPED_TRACE(std::to_string(execution.workers) + " workers");
    expect_same_bits(run(data, {.execution = execution}), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionWorkers,
                         ::testing::Values("group_1_f32", "group_4_bf16", "group_8_f16",
                                           "per_query_f32", "per_query_bf16",
                                           "per_query_heads_shared", "bias_111k", "bias_b1q1",
                                           "mask_b1qk_bias_bv1k_bf16", "mask_bhqk_bias_bhqk_f32",
                                           "mask_rows_bf16", "size_1x799_bf16", "size_256x256_f16",
                                           "random_intervals_f16", "bias_11qk"),
                         [](const auto& test) { return std::string(test.param); });

// A worker on a new thread of the default environment, and whether that is its environment afterwards.
Execution on_threads_of_default_environment(int workers) {
  Execution execution = sequential_execution(workers);
  execution.parallel_for = [](void*, int count, void (*body)(void*, int), void* argument) {
    for (int worker = 0; worker < count; ++worker) {
      std::thread([&] {
        std::fesetenv(FE_DFL_ENV);
        body(argument, worker);
        EXPECT_EQ(std::fegetround(), FE_TONEAREST);
      }).join();
    }
  };
  return execution;
}

TEST(Attention, WorkersRoundAsTheCallerDoes) {
  for (const char* name : {"group_4_f32", "per_query_bf16", "few_chunk_f16"}) {
    SCOPED_TRACE(name);
    const Data data(attention_case(name));
    const auto run_rounding = [&](int mode, const Execution& execution) {
      std::fesetround(mode);
      Results results = run(data, {.execution = execution});
      std::fesetround(FE_TONEAREST);
      return results;
    };
    const Results upward = run_rounding(FE_UPWARD, sequential_execution(1));
    EXPECT_FALSE(upward.out.same_bits(run_rounding(FE_TONEAREST, sequential_execution(1)).out));
    expect_same_bits(run_rounding(FE_UPWARD, on_threads_of_default_environment(3)), upward);
  }
}

// ---- Subsets of the gradients ----------------------------------------------------------------------

class AttentionGradients : public ::testing::TestWithParam<const char*> {};

TEST_P(AttentionGradients, AnySubsetIsCorrect) {
  const Data data(attention_case(GetParam()));
  const Bounds bounds(data);
  for (int subset = 0; subset < 16; ++subset) {
    SCOPED_TRACE("subset " + std::to_string(subset));
    const Wanted wanted{.dq = (subset & 1) != 0,
                        .dk = (subset & 2) != 0,
                        .dv = (subset & 4) != 0,
                        .dbias = (subset & 8) != 0};
    bounds.expect(run(data, {.wanted = wanted}), wanted);
  }
}

TEST_P(AttentionGradients, MissingLseLowGivesCorrectGradients) {
  run_and_compare(Data(attention_case(GetParam())), {.lse_low = false});
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionGradients,
                         ::testing::Values("group_4_f32", "group_4_bf16", "group_4_f16",
                                           "mask_bhqk_bias_bhqk_f32", "mask_b1qk_bias_bv1k_bf16",
                                           "layout_padded_f16", "random_intervals_bf16"),
                         [](const auto& test) { return std::string(test.param); });

// ---- Layouts ---------------------------------------------------------------------------------------

TEST(Attention, LayoutsDoNotChangeBits) {
  for (const char* intervals : {"none", "per_query"}) {
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      const auto in_layout = [&](const char* layout) {
        const Data data(
            case_from({"batch=2 heads_q=4 heads_kv=2 head_dim=40 causal=1 bias=bv1k "
                       "bias_fill=normal intervals_shape=bv window=30",
                       {{"dtype", dtype}, {"intervals", intervals}, {"layout", layout}}}));
        return run(data, {});
      };
      const Results contiguous = in_layout("contiguous");
      for (const char* layout : {"permuted", "padded", "reversed"}) {
        SCOPED_TRACE(std::string(layout) + " " + dtype + ", intervals " + intervals);
        expect_same_bits(in_layout(layout), contiguous);
      }
    }
  }
}

// ---- One query of a generation step -----------------------------------------------------------------

TEST(Attention, LastQueryAloneHasTheResultsOfTheWholeSequence) {
  for (const char* dtype : {"bf16", "f16"}) {
    SCOPED_TRACE(dtype);
    const auto data_with_queries = [&](const char* seqlen_q) {
      return Data(
          case_from({"heads_q=4 heads_kv=2 seqlen_k=300 causal=1 bias=bv1k bias_fill=normal "
                     "intervals=per_query intervals_shape=bv window=40",
                     {{"dtype", dtype}, {"seqlen_q", seqlen_q}}}));
    };
    const Data whole = data_with_queries("300");
    Data step = data_with_queries("1");
    const auto index_in_whole = [](const Index& i) { return Index{i[0], 299, i[2], i[3]}; };
    step.q.fill([&](const Index& i) { return whole.q.get(index_in_whole(i)); });
    step.k.fill([&](const Index& i) { return whole.k.get(i); });
    step.v.fill([&](const Index& i) { return whole.v.get(i); });
    step.bias.fill([&](const Index& i) { return whole.bias.get(i); });
    for (std::size_t j = 0; j < step.intervals.size(); ++j) {
      step.intervals[j] = {0, whole.intervals[j].last == 300 ? 1 : 0};
    }
    Results all(whole), last(step), expected(step);
    run_forward(whole, {}, all);
    run_forward(step, {}, last);
    expected.out.fill([&](const Index& i) { return all.out.get(index_in_whole(i)); });
    // Two units in the last place of the largest element, as each result is rounded once.
    double largest = 0;
    expected.out.for_each(
        [&](const Index&, double x) { largest = std::max(largest, std::abs(x)); });
    EXPECT_LE(errors(last.out, expected.out).max, 4 * unit_roundoff(last.out.element()) * largest);
  }
}

// ---- Exact results ---------------------------------------------------------------------------------

class AttentionExact : public ::testing::TestWithParam<const char*> {
 protected:
  Case with(CaseWords words) const {
    words["dtype"] = GetParam();
    return case_from(words);
  }
};

TEST_P(AttentionExact, OneVisibleKeyIsCopied) {
  // Query i sees key i alone, so p = 1, however large its score is: out is v, ds = 0.
  for (const char* length : {"60", "150"}) {
    for (const char* softcap : {"0", "10"}) {
      SCOPED_TRACE(std::string("length ") + length + ", softcap " + softcap);
      Data data(
          with({"heads_q=1 head_dim=100 scale=1 inputs=extreme intervals=packed intervals_shape=11 "
                "window=1 bias=bhqk bias_fill=normal",
                {{"seqlen_q", length}, {"seqlen_k", length}, {"softcap", softcap}}}));
      // Few significant bits, so that no sum of products rounds and delta equals dp to the bit.
      const auto few_bits = [](const Index& i) {
        return static_cast<double>((i[1] * 7 + i[3] * 5) % 9 - 4) / 4;
      };
      data.v.fill(few_bits);
      data.dout.fill(few_bits);
      const Results actual = run(data, {});
      EXPECT_TRUE(actual.out.same_bits(data.v));
      EXPECT_TRUE(actual.dv.same_bits(data.dout));
      expect_all(actual.dq, 0);
      expect_all(actual.dk, 0);
      expect_all(actual.dbias, 0);
    }
  }
}

TEST_P(AttentionExact, BackwardHasTheProbabilitiesOfTheForward) {
  // All keys are one, with scores of up to 10^4: p = exp(s - lse) is 1 / Sk only where both directions form the same s.
  for (const char* length : {"1", "60", "150"}) {
    for (const char* softcap : {"0", "3000"}) {
      SCOPED_TRACE(std::string("length ") + length + ", softcap " + softcap);
      Data data(with({"seqlen_k=512 heads_q=1 head_dim=100 scale=1 inputs=extreme",
                      {{"seqlen_q", length}, {"softcap", softcap}}}));
      data.k.fill([&](const Index& i) { return data.k.get({i[0], 0, i[2], i[3]}); });
      data.dout.fill([](const Index& i) { return i[1] == 0 ? 512.0 : 0.0; });  // dv_j = 512 p_0j
      const double bound = 8 * unit_roundoff(data.v.element());
      run(data, {}).dv.for_each(
          [&](const Index&, double probability) { ASSERT_NEAR(probability, 1, bound); });
    }
  }
}

TEST_P(AttentionExact, EqualScoresAverage) {
  // q = 0: all 2^n visible keys have the same probability.
  Data data(with("seqlen_q=70 seqlen_k=128 inputs=zero"));
  data.v.fill([](const Index& i) { return static_cast<double>(i[1] % 2); });
  const Results actual = run(data, {});
  expect_all(actual.out, 0.5);
  actual.lse.for_each([](const Index&, double lse) { ASSERT_NEAR(lse, std::log(128.0), 1e-6); });
}

TEST_P(AttentionExact, NothingVisibleGivesZeros) {
  const std::vector<CaseWords> all_words = {
      "mask=b1qk mask_fill=none bias=bhqk bias_fill=normal",
      "mask=b1qk mask_fill=full bias=bhqk bias_fill=all_masked", "seqlen_k=0",
      "seqlen_q=0 bias=b11k bias_fill=normal"};
  for (const CaseWords& words : all_words) {
    const Results actual = run(Data(with(words)), {});
    expect_all(actual.out, 0);
    expect_all(actual.lse, -infinity);
    for (const Tensor* gradient : {&actual.dq, &actual.dk, &actual.dv, &actual.dbias}) {
      expect_all(*gradient, 0);
    }
  }
}

TEST_P(AttentionExact, EquivalentIntervalsAndMaskAgree) {
  const Data intervals(
      with("heads_q=4 heads_kv=2 seqlen_q=203 causal=1 intervals=per_query intervals_shape=bv "
           "window=40"));
  Data mask(with("heads_q=4 heads_kv=2 seqlen_q=203 mask=bvqk mask_fill=full"));
  mask.mask.fill([&](const Index& i) { return intervals.visible(i[0], 2 * i[1], i[2], i[3]); });
  const Bounds bounds(intervals);
  bounds.expect(run(intervals, {}));
  bounds.expect(run(mask, {}));
}

TEST_P(AttentionExact, LseLowIsTheRoundingError) {
  // A bias of 1000 takes six of the 24 bits of lse in fp32.
  Data data(with("inputs=zero bias=1111 bias_fill=equal"));
  data.bias.fill([](const Index&) { return 1000; });
  const Results actual = run(data, {});
  actual.lse.for_each([&](const Index& i, double lse) {
    const double exact = 1000 + std::log(203.0);
    ASSERT_NEAR(lse, exact, 4e-5);
    ASSERT_NEAR(lse + actual.lse_low.get(i), exact, 2e-6);
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AttentionExact, ::testing::Values("f32", "bf16", "f16"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace flash_dmattn::testing
