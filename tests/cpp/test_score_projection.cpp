#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "common/score_form.h"
#include "flash_dmattn/calls.h"
#include "support/expect_invalid.h"
#include "support/instruction_sets.h"
#include "support/random.h"
#include "support/run.h"
#include "support/tensor.h"

// Projections of scores have the bits of their definition, on every instruction set, in every layout and division of the work.
namespace flash_dmattn::testing {
namespace {

struct ProjectionProblem {
  ScoreProjectionArgs args;
  Tensor hidden, weight, bias, factor, scores;

  ProjectionProblem(const ScoreProjectionArgs& shape, Layout layout, Random& random)
      : args(shape),
        hidden("hidden", element_of(args.hidden_dtype), {args.batch, args.seqlen, 1, args.features},
               layout),
        weight("weight", element_of(args.weight_dtype), {args.heads, 1, 1, args.features}, layout),
        bias("bias", element_of(args.bias_dtype), {1, 1, 1, args.heads}),
        factor("factor", element_of(args.factor_dtype), {1, 1, 1, args.heads}),
        scores("scores", args.hidden_dtype == DType::f64 ? Element::f64 : Element::f32,
               {args.batch, args.heads, args.seqlen, 1}) {
    for (Tensor* tensor : {&hidden, &weight, &bias, &factor}) {
      tensor->fill([&](const Index&) { return random.normal(); });
    }
    factor.fill([&](const Index& i) { return factor.get(i) / 100; });
    args.hidden = hidden.const_view().data;
    args.hidden_stride = {hidden.stride()[0], hidden.stride()[1]};
    args.weight = weight.const_view().data;
    args.weight_stride = weight.stride()[0];
    if (random.below(3) != 0) args.bias = bias.const_view().data;
    args.factor = factor.const_view().data;
    args.scores = scores.view().data;
  }

  void run(const Execution& execution, std::string_view backend = {}) {
    scores.poison();
    run_in_new_workspace(ScoreProjectionCall(args, execution, backend));
  }

  template <class Read>
  Tensor filled(const Read& read) const {
    Tensor result("definition", scores.element(), scores.shape());
    result.fill([&](const Index& i) { return read(i[0], i[2], static_cast<std::int64_t>(i[1])); });
    return result;
  }

  // A score by the definition in scores.h.
  float defined(std::int64_t b, std::int64_t s, std::int64_t h) const {
    std::vector<float> sums(64);
    for (std::int64_t f = 0; f < args.features; ++f) {
      const volatile float product =  // which no compiler fuses with the sum
          static_cast<float>(hidden.get({b, s, 0, f})) *
          static_cast<float>(weight.get({h, 0, 0, f}));
      sums[static_cast<std::size_t>(f % 64)] += product;
    }
    for (std::size_t n = 32; n > 0; n /= 2) {
      for (std::size_t i = 0; i < n; ++i) sums[i] += sums[i + n];
    }
    if (args.bias != nullptr) sums[0] += static_cast<float>(bias.get({0, 0, 0, h}));
    return score_of(args.form, sums[0], static_cast<float>(factor.get({0, 0, 0, h})));
  }
};

ScoreProjectionArgs random_shape(Random& random) {
  constexpr std::int64_t sizes[] = {0, 1, 2, 3, 7, 8, 16, 17, 35};
  constexpr std::int64_t features[] = {0, 1, 2, 7, 8, 31, 63, 64, 65, 66, 130, 511, 1024, 2300};
  ScoreProjectionArgs args;
  args.batch = random.below(4);
  args.seqlen = sizes[random.below(std::size(sizes))];
  args.heads = sizes[random.below(std::size(sizes) - 1)];
  args.features = features[random.below(std::size(features))];
  args.hidden_dtype = static_cast<DType>(random.below(3));
  args.weight_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.bias_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.factor_dtype = random.below(2) == 0 ? DType::f32 : args.hidden_dtype;
  args.form = static_cast<ScoreForm>(random.below(5));
  return args;
}

TEST(ScoreProjection, BitsAreThoseOfDefinitionOnEachInstructionSet) {
  constexpr Layout layouts[] = {Layout::contiguous, Layout::padded, Layout::gaps, Layout::reversed};
  Random random(11);
  for (int round = 0; round < 200; ++round) {
    ProjectionProblem problem(random_shape(random), layouts[random.below(4)], random);
    const Tensor expected = problem.filled([&](std::int64_t b, std::int64_t s, std::int64_t h) {
      return static_cast<double>(problem.defined(b, s, h));
    });
    const int workers = 1 + static_cast<int>(random.below(3));
    on_each_instruction_set([&] {
      problem.run(sequential_execution(workers));
      ASSERT_TRUE(problem.scores.same_bits(expected))
          << "round " << round << ", " << problem.args.features << " features, "
          << problem.args.heads << " heads, " << name_of(problem.args.hidden_dtype);
    });
    if (HasFatalFailure()) return;
  }
}

double exact_score(ScoreForm form, double z, double factor) {
  const double softplus = std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z)));
  switch (form) {
    case ScoreForm::gelu: return z * std::erfc(-z * std::sqrt(0.5)) / 2;
    case ScoreForm::gate: return z - softplus;
    case ScoreForm::linear: return factor * softplus;
    case ScoreForm::doge: return std::exp(factor * softplus);
    default: return z;
  }
}

TEST(ScoreProjection, FormsAreFiniteForAllFiniteProjections) {
  constexpr float largest = std::numeric_limits<float>::max();
  for (const float z : {-largest, -100.0f, -1e-30f, 0.0f, 3.0f, 20.0f, 88.0f, largest}) {
    for (const float factor : {-largest, -2.0f, 0.0f, 0.5f}) {
      for (const ScoreForm form : {ScoreForm::gelu, ScoreForm::gate, ScoreForm::doge}) {
        const float score = score_of(form, z, factor);
        EXPECT_TRUE(std::isfinite(score)) << z << " and " << factor;
        if (form != ScoreForm::doge || score < largest / 2) {
          EXPECT_NEAR(score, exact_score(form, z, factor), 1e-5 * (1 + std::abs(double{score})));
        }
      }
    }
    EXPECT_EQ(score_of(ScoreForm::doge, largest, largest), score_of(ScoreForm::doge, 1.0f, 100.0f));
  }
}

TEST(ScoreProjection, ReferenceAddsInDouble) {
  Random random(12);
  for (int round = 0; round < 40; ++round) {
    ScoreProjectionArgs shape = random_shape(random);
    if (round % 2 == 0) {
      shape.hidden_dtype = shape.weight_dtype = shape.bias_dtype = shape.factor_dtype = DType::f64;
    }
    ProjectionProblem problem(shape, Layout::padded, random);
    problem.run(sequential_execution(2), shape.hidden_dtype == DType::f64 ? "" : "reference");
    problem.scores.for_each([&](const Index& i, double actual) {
      double exact =
          shape.heads > 0 && problem.args.bias != nullptr ? problem.bias.get({0, 0, 0, i[1]}) : 0;
      for (std::int64_t f = 0; f < shape.features; ++f) {
        exact += problem.hidden.get({i[0], i[2], 0, f}) * problem.weight.get({i[1], 0, 0, f});
      }
      exact = exact_score(shape.form, exact, problem.factor.get({0, 0, 0, i[1]}));
      const double unit = shape.hidden_dtype == DType::f64 ? 1e-11 : 1e-6;
      ASSERT_NEAR(actual, exact, unit * (1 + std::abs(exact)));
    });
  }
}

TEST(ScoreProjection, BadArgumentThrows) {
  Random random(13);
  ScoreProjectionArgs shape;
  shape.batch = shape.seqlen = shape.heads = 2;
  shape.features = 8;
  shape.hidden_dtype = shape.weight_dtype = shape.bias_dtype = shape.factor_dtype = DType::bf16;
  shape.form = ScoreForm::linear;
  const ProjectionProblem problem(shape, Layout::contiguous, random);
  const auto expect = [&](const std::string& argument, const std::string& message,
                          const auto& spoil) {
    ScoreProjectionArgs args = problem.args;
    spoil(args);
    expect_invalid([&] { project_scores(args, sequential_execution(1)); }, argument, message);
  };
  using Args = ScoreProjectionArgs;
  const std::string length = "got -1, expected a length in [0, 2^31)";
  expect("batch", length, [](Args& a) { a.batch = Args{}.batch; });
  expect("seqlen", length, [](Args& a) { a.seqlen = Args{}.seqlen; });
  expect("features", length, [](Args& a) { a.features = Args{}.features; });
  expect("heads", length, [](Args& a) { a.heads = Args{}.heads; });
  expect("hidden_dtype", "got no dtype, expected f32, bf16, f16 or f64",
         [](Args& a) { a.hidden_dtype = no_dtype; });
  expect("weight_dtype", "got f16, expected f32 or bf16",
         [](Args& a) { a.weight_dtype = DType::f16; });
  expect("bias_dtype", "got no dtype, expected f32 or bf16", [&](Args& a) {
    a.bias = problem.bias.const_view().data;
    a.bias_dtype = no_dtype;
  });
  expect("weight_dtype", "got bf16, expected f64", [](Args& a) { a.hidden_dtype = DType::f64; });
  expect("hidden", "got null, expected a pointer", [](Args& a) { a.hidden = nullptr; });
  expect("weight", "got null, expected a pointer", [](Args& a) { a.weight = nullptr; });
  expect("scores", "got null, expected a pointer", [](Args& a) { a.scores = nullptr; });
  expect("factor", "got null, expected a pointer", [](Args& a) { a.factor = nullptr; });
  expect("factor_dtype", "got f32, expected f64", [](Args& a) {
    a.hidden_dtype = a.weight_dtype = a.bias_dtype = DType::f64;
    a.factor_dtype = DType::f32;
  });
}

}  // namespace
}  // namespace flash_dmattn::testing
