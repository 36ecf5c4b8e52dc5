#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/cases.h"
#include "support/compare.h"
#include "support/data.h"
#include "support/random.h"
#include "support/run.h"
#include "support/yardstick.h"

// Calls for which other implementations returned NaN or wrong gradients, at full size except in quick runs.
namespace flash_dmattn {
namespace {

using testing::case_from;
using testing::Data;
using testing::Index;
using testing::Layout;
using testing::Random;
using testing::Results;
using testing::RunOptions;
using testing::Tensor;
using testing::Yardstick;

void expect_finite(const Results& results) {
  for (const Tensor* tensor :
       {&results.out, &results.lse, &results.dq, &results.dk, &results.dv, &results.dbias}) {
    EXPECT_TRUE(testing::all_finite(*tensor)) << tensor->name();
  }
}

// Copies the slice of `from` at the given places of dimension `dim`.
void copy_slice(const Tensor& from, std::size_t dim, const std::vector<std::int64_t>& places,
                Tensor& to) {
  to.fill([&](const Index& i) {
    Index at = i;
    at[dim] = places[static_cast<std::size_t>(i[dim])];
    return from.get(at);
  });
}

// All of `from`, which has one batch.
void copy(const Tensor& from, Tensor& to) { copy_slice(from, 0, {0}, to); }

// Expects equality within two units in the last place of the largest element.
void expect_near(const Tensor& actual, const Tensor& expected) {
  double size = 0;
  expected.for_each([&](const Index&, double x) { size = std::max(size, std::abs(x)); });
  const double bound = 4 * testing::unit_roundoff(actual.element()) * size;
  EXPECT_LE(testing::errors(actual, expected).max, bound) << actual.name();
}

std::vector<std::int64_t> some_of(std::int64_t count, std::int64_t size, Random& random) {
  std::vector<std::int64_t> places(static_cast<std::size_t>(count));
  for (std::int64_t& place : places) place = random.below(size);
  return places;
}

// ---- bf16, 4096 tokens, window 2048, head dim 128, 4-d mask and bias -------------------------------

class LongDenseMask : public ::testing::Test {
 protected:
  const std::int64_t length = testing::is_quick_run() ? 1024 : 4096;
  const std::int64_t window = length / 2;

  Data make() const {
    Problem p;
    p.batch = p.heads_q = p.heads_kv = 1;
    p.seqlen_q = p.seqlen_k = length;
    p.head_dim = 128;
    p.dtype = p.bias_dtype = DType::bf16;
    p.scale = default_scale(p.head_dim);
    p.mask_shape = p.bias_shape = {1, 1, length, length};
    Data data(p);
    Random random(1);
    for (Tensor* tensor : {&data.q, &data.k, &data.v, &data.dout, &data.bias}) {
      tensor->fill([&](const Index&) { return random.normal(); });
    }
    // The mask is causal, and a query sees about as many earlier keys as the window holds.
    data.mask.fill([&](const Index& i) {
      return i[3] <= i[2] && random.below(std::max(i[2], window)) < window;
    });
    return data;
  }

  // The problem restricted to some queries, or some keys, of the whole problem.
  static Data of_queries(const Data& whole, const std::vector<std::int64_t>& queries) {
    Problem p = whole.problem;
    p.seqlen_q = p.mask_shape[2] = p.bias_shape[2] = static_cast<std::int64_t>(queries.size());
    Data part(p);
    copy_slice(whole.q, 1, queries, part.q);
    copy_slice(whole.dout, 1, queries, part.dout);
    copy(whole.k, part.k);
    copy(whole.v, part.v);
    copy_slice(whole.mask, 2, queries, part.mask);
    copy_slice(whole.bias, 2, queries, part.bias);
    return part;
  }

  static Data of_keys(const Data& whole, const std::vector<std::int64_t>& keys) {
    Problem p = whole.problem;
    p.seqlen_k = p.mask_shape[3] = p.bias_shape[3] = static_cast<std::int64_t>(keys.size());
    Data part(p);
    copy(whole.q, part.q);
    copy(whole.dout, part.dout);
    copy_slice(whole.k, 1, keys, part.k);
    copy_slice(whole.v, 1, keys, part.v);
    copy_slice(whole.mask, 3, keys, part.mask);
    copy_slice(whole.bias, 3, keys, part.bias);
    return part;
  }
};

TEST_F(LongDenseMask, ResultsAreCorrectAndFinite) {
  const Data whole = make();
  const Results actual = testing::run(whole, {.execution = testing::on_pool()});
  expect_finite(actual);

  // Queries do not depend on each other, so some of them give out, lse, dq and rows of dbias.
  Random random(2);
  const auto queries = some_of(24, length, random);
  const Data rows = of_queries(whole, queries);
  Results of_rows(rows);
  copy_slice(actual.out, 1, queries, of_rows.out);
  copy_slice(actual.lse, 2, queries, of_rows.lse);
  copy_slice(actual.dq, 1, queries, of_rows.dq);
  copy_slice(actual.dbias, 2, queries, of_rows.dbias);
  testing::expect_close(rows, of_rows, testing::oracle(rows), Yardstick(rows),
                        {.dk = false, .dv = false});

  // With out and lse given, keys do not either, so some of them give dk, dv and columns of dbias. The
  // reference in bf16 gets the same rounded out.
  const auto keys = some_of(24, length, random);
  const Data columns = of_keys(whole, keys);
  Results expected(columns);
  copy(actual.out, expected.out);
  copy(actual.lse, expected.lse);
  copy(actual.lse_low, expected.lse_low);
  testing::run_backward(columns, {.backend = "reference", .execution = testing::on_pool()},
                        expected);
  Results of_columns(columns);
  copy_slice(actual.dk, 1, keys, of_columns.dk);
  copy_slice(actual.dv, 1, keys, of_columns.dv);
  copy_slice(actual.dbias, 3, keys, of_columns.dbias);
  expect_near(of_columns.dk, expected.dk);
  expect_near(of_columns.dv, expected.dv);
  expect_near(of_columns.dbias, expected.dbias);
}

// ---- dv at 256 x 256, head dim 64, causal ----------------------------------------------------------

TEST(FailedElsewhere, DvIsFiniteAt256By256ForManySeeds) {
  const int seeds = testing::is_quick_run() ? 4 : 40;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (int seed = 0; seed < seeds; ++seed) {
      const Data data(case_from({{"name", "dv"},
                                 {"dtype", dtype},
                                 {"seqlen_q", "256"},
                                 {"seqlen_k", "256"},
                                 {"head_dim", "64"},
                                 {"heads_q", "1"},
                                 {"causal", "1"},
                                 {"seed", std::to_string(seed)}}));
      const RunOptions options{.execution = testing::on_pool()};
      expect_finite(seed > 0 ? testing::run(data, options)
                             : testing::run_and_compare(data, options));
    }
  }
}

// ---- Key length 192, head dim 80 -------------------------------------------------------------------

class OrdinarySizes
    : public ::testing::TestWithParam<std::tuple<const char*, const char*, const char*>> {};

TEST_P(OrdinarySizes, ResultsAreCorrect) {
  const auto& [seqlen_k, head_dim, dtype] = GetParam();
  for (const char* intervals : {"none", "per_query"}) {
    const Data data(case_from({{"name", "size"},
                               {"dtype", dtype},
                               {"seqlen_q", "128"},
                               {"seqlen_k", seqlen_k},
                               {"head_dim", head_dim},
                               {"causal", "1"},
                               {"bias", "bv1k"},
                               {"bias_fill", "normal"},
                               {"intervals", intervals},
                               {"intervals_shape", "bv"},
                               {"window", "60"}}));
    expect_finite(testing::run_and_compare(data));
  }
}

INSTANTIATE_TEST_SUITE_P(KeyLengthAndHeadDim, OrdinarySizes,
                         ::testing::Combine(::testing::Values("192", "128"),
                                            ::testing::Values("80", "64", "128"),
                                            ::testing::Values("f32", "bf16", "f16")),
                         [](const auto& test) {
                           return std::string("keys_") + std::get<0>(test.param) + "_dim_" +
                                  std::get<1>(test.param) + "_" + std::get<2>(test.param);
                         });

// ---- One query of a generation step ----------------------------------------------------------------

TEST(FailedElsewhere, GenerationStepMatchesFullSequence) {
  // The last query alone must equal the same query within the whole sequence.
  const auto words = [](const char* seqlen_q) {
    return testing::CaseWords{{"name", "step"},          {"dtype", "bf16"},
                              {"heads_q", "4"},          {"heads_kv", "2"},
                              {"seqlen_q", seqlen_q},    {"seqlen_k", "300"},
                              {"causal", "1"},           {"bias", "bv1k"},
                              {"bias_fill", "normal"},   {"intervals", "per_query"},
                              {"intervals_shape", "bv"}, {"window", "40"}};
  };
  const Data whole(case_from(words("300")));
  Data step(case_from(words("1")));
  copy_slice(whole.q, 1, {299}, step.q);
  copy(whole.k, step.k);
  copy(whole.v, step.v);
  copy(whole.bias, step.bias);
  for (std::size_t j = 0; j < step.intervals.size(); ++j) {
    step.intervals[j] = {0, whole.intervals[j].last == 300 ? 1 : 0};
  }
  const Results all = testing::run(whole, {});
  Results last(step);
  testing::run_forward(step, {}, last);
  Results expected(step);
  copy_slice(all.out, 1, {299}, expected.out);
  expect_near(last.out, expected.out);
}

}  // namespace
}  // namespace flash_dmattn
