#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "flash_dmattn/error.h"
#include "flash_dmattn/selection.h"
#include "reference/selection.h"
#include "support/buffer.h"
#include "support/cases.h"
#include "support/expect_invalid.h"
#include "support/random.h"
#include "support/run.h"
#include "support/selection_rules.h"
#include "support/tensor.h"

namespace flash_dmattn::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The kind of scores: from all different to all equal, and with every special value.
enum class Scores { distinct, few, signed_zeros, special, equal, rising, falling };
constexpr Scores all_scores[] = {Scores::distinct, Scores::few,   Scores::signed_zeros,
                                 Scores::special,  Scores::equal, Scores::rising,
                                 Scores::falling};

double score(Scores kind, Random& random, std::int64_t j) {
  constexpr double special[] = {infinity, -infinity, std::numeric_limits<double>::quiet_NaN(),
                                0.0,      -0.0,      1e30};
  switch (kind) {
    case Scores::distinct: return random.normal();
    case Scores::few: return static_cast<double>(random.below(4));
    case Scores::signed_zeros: return random.below(2) == 0 ? 0.0 : -0.0;
    case Scores::special: return special[random.below(6)];
    case Scores::equal: return 0.25;
    case Scores::rising: return static_cast<double>(j) / 8;
    default: return -static_cast<double>(j) / 8;
  }
}

// Scores, key mask and intervals of one selection.
struct SelectionProblem {
  SelectionArgs args;
  Tensor scores, key_mask;
  GuardedBuffer intervals;

  SelectionProblem(const SelectionArgs& shape, Scores kind, bool masked, Layout layout,
                   Random& random)
      : args(shape),
        scores("scores", element_of(args.scores_dtype), {args.batch, args.heads, args.seqlen_k, 1},
               layout),
        key_mask("key_mask", Element::u8, scores.shape(), layout),
        intervals(static_cast<std::size_t>(scores.elements()) * sizeof(KeyInterval), "intervals") {
    scores.fill([&](const Index& i) { return score(kind, random, i[2]); });
    key_mask.fill([&](const Index&) { return random.below(4) != 0; });
    args.scores = scores.const_view().data;
    args.scores_stride = {scores.stride()[0], scores.stride()[1], scores.stride()[2]};
    if (masked) args.key_mask = static_cast<const std::uint8_t*>(key_mask.const_view().data);
    args.key_mask_stride = {key_mask.stride()[0], key_mask.stride()[1], key_mask.stride()[2]};
    args.intervals = result();
  }

  KeyInterval* result() { return reinterpret_cast<KeyInterval*>(intervals.data()); }

  void select(const Execution& execution) {
    intervals.poison();
    run_in_new_workspace(SelectCall(args, execution));
  }
};

void expect_as_defined(SelectionProblem& problem, const std::string& what) {
  const SelectionArgs& args = problem.args;
  problem.select(sequential_execution(1));
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      const auto expected = reference::select_key_intervals(args, b, h);
      const KeyInterval* actual = problem.result() + (b * args.heads + h) * args.seqlen_k;
      for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
        const KeyInterval& e = expected[static_cast<std::size_t>(j)];
        ASSERT_TRUE(actual[j].first == e.first && actual[j].last == e.last)
            << what << ", batch " << b << ", head " << h << ", key " << j << ": expected ["
            << e.first << ", " << e.last << "), actual [" << actual[j].first << ", "
            << actual[j].last << ")";
      }
    }
  }
}

SelectionArgs shape_of(std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t window) {
  SelectionArgs args;
  args.batch = 1;
  args.heads = 1;
  args.seqlen_q = seqlen_q;
  args.seqlen_k = seqlen_k;
  args.rule.window = window;
  args.scores_dtype = DType::f32;
  return args;
}

std::vector<KeyInterval> select(SelectionArgs args, const std::vector<float>& scores) {
  std::vector<KeyInterval> intervals(scores.size());
  args.scores = scores.data();
  args.scores_stride = {0, 0, 1};
  args.intervals = intervals.data();
  run_in_new_workspace(SelectCall(args, sequential_execution(1)));
  return intervals;
}

void expect_intervals(const std::vector<KeyInterval>& actual,
                      const std::vector<KeyInterval>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t j = 0; j < actual.size(); ++j) {
    EXPECT_EQ(actual[j].first, expected[j].first) << "key " << j;
    EXPECT_EQ(actual[j].last, expected[j].last) << "key " << j;
  }
}

// The most keys that `queries` consecutive queries of a row see together.
std::int64_t most_keys(const SelectionArgs& args, const KeyInterval* row, std::int64_t queries) {
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < args.seqlen_q; ++i) {
    most = std::max<std::int64_t>(
        most, std::count_if(row, row + args.seqlen_k, [&](const KeyInterval& key) {
          return key.first < i + queries && key.last > i;
        }));
  }
  return most;
}

TEST(Selection, RandomRulesMatchDefinition) {
  Random random(7);
  int rows = 0;
  while (rows < 24000) {
    SelectionArgs args = shape_of(random.below(24), random.below(24), 0);
    args.batch = 2;
    args.heads = 1 + random.below(3);
    args.causal = random.below(5) != 0;
    args.scores_dtype = static_cast<DType>(random.below(4));
    std::vector<std::int64_t> head_windows;
    args.rule = random_rule(args, head_windows, random);
    const auto layout = static_cast<Layout>(random.below(4));
    const Scores kind = all_scores[random.below(std::size(all_scores))];
    SelectionProblem problem(args, kind, random.below(2) == 0, layout, random);
    expect_as_defined(problem, text_of(args));
    if (HasFatalFailure()) return;
    const KeyBound bound = key_bound(args);
    for (std::int64_t row = 0; row < args.batch * args.heads; ++row) {
      const KeyInterval* intervals = problem.result() + row * args.seqlen_k;
      for (const std::int64_t queries : {1, 3, 8}) {
        ASSERT_LE(most_keys(args, intervals, queries), bound.base + bound.per_query * queries)
            << text_of(args) << ", " << queries << " consecutive queries";
      }
    }
    rows += static_cast<int>(args.batch * args.heads);
  }
}

TEST(Selection, LongRowsWithRulesMatchDefinition) {
  Random random(8);
  // 28 rounds have every dtype with every kind of scores.
  for (int round = 0; round < (is_quick_run() ? 14 : 28); ++round) {
    SelectionArgs args = shape_of(1 + random.below(150), 1 + random.below(1200), 0);
    args.scores_dtype = static_cast<DType>(round % 4);
    std::vector<std::int64_t> head_windows;
    args.rule = random_rule(args, head_windows, random);
    SelectionProblem problem(args, all_scores[round % std::size(all_scores)], random.below(2) == 0,
                             Layout::contiguous, random);
    expect_as_defined(problem, text_of(args));
  }
}

TEST(Selection, DecodingSelectsSameKeysAsTraining) {
  Random random(5);
  std::vector<float> scores(97);
  for (float& x : scores) x = static_cast<float>(random.below(20));
  const SelectionRule rule{
      .window = 11, .recent_window = 7, .sink_tokens = 2, .score_threshold = 3};
  SelectionRule competing = rule;
  competing.recent_competes = true;
  for (const SelectionRule& tested : {SelectionRule{.window = 11}, rule, competing}) {
    const auto select_for = [&](std::int64_t seqlen_q, std::int64_t seqlen_k) {
      SelectionArgs args = shape_of(seqlen_q, seqlen_k, 0);
      args.rule = tested;
      return select(args, {scores.begin(), scores.begin() + seqlen_k});
    };
    const auto whole = select_for(97, 97);
    for (std::int64_t length = 1; length <= 97; ++length) {
      const auto last_query = select_for(1, length);
      for (std::size_t j = 0; j < last_query.size(); ++j) {
        const bool expected = whole[j].first <= length - 1 && length - 1 < whole[j].last;
        ASSERT_EQ(last_query[j].first < last_query[j].last, expected)
            << "recent " << tested.recent_window << ", " << length << " keys, key " << j;
      }
    }
  }
}

TEST(Selection, RecentKeysCompeteOrWait) {
  SelectionArgs args = shape_of(6, 6, 1);
  args.rule.recent_window = 2;
  const std::vector<float> scores = {1, 5, 2, 3, 9, 4};
  // Key 1 is beaten by key 4 when that is no longer recent, or when it is written.
  expect_intervals(select(args, scores), {{0, 3}, {1, 6}, {2, 4}, {3, 5}, {4, 6}, {5, 6}});
  args.rule.recent_competes = true;
  expect_intervals(select(args, scores), {{0, 2}, {1, 4}, {2, 4}, {3, 5}, {4, 6}, {5, 6}});
}

TEST(Selection, SinksAreTheFirstPresentKeys) {
  SelectionArgs args = shape_of(5, 5, 0);
  args.rule.sink_tokens = 2;
  const std::uint8_t mask[] = {0, 1, 0, 1, 1};
  args.key_mask = mask;
  args.key_mask_stride = {0, 0, 1};
  expect_intervals(select(args, {9, NAN, 9, 1, 9}), {{0, 0}, {1, 5}, {0, 0}, {3, 5}, {0, 0}});
}

TEST(Selection, ThresholdKeepsScoresAtOrAboveIt) {
  SelectionArgs args = shape_of(4, 4, every_key);
  args.rule.score_threshold = 0.5;
  args.rule.recent_window = 1;
  expect_intervals(select(args, {0.5f, 0.25f, NAN, 1}), {{0, 4}, {1, 2}, {2, 3}, {3, 4}});
}

TEST(Selection, MissingStridesMeanDense) {
  Random random(4);
  SelectionArgs shape = shape_of(20, 24, 5);
  shape.batch = 2;
  shape.heads = 3;
  SelectionProblem given(shape, Scores::distinct, true, Layout::contiguous, random);
  expect_as_defined(given, "strides given");
  const auto entries = shape.batch * shape.heads * shape.seqlen_k;
  const std::vector<KeyInterval> expected(given.result(), given.result() + entries);
  given.args.scores_stride = SelectionArgs{}.scores_stride;
  given.args.key_mask_stride = SelectionArgs{}.key_mask_stride;
  given.select(sequential_execution(1));
  expect_intervals({given.result(), given.result() + entries}, expected);
}

TEST(Selection, DoubleScoresAreNotRounded) {
  SelectionArgs args = shape_of(2, 2, 1);
  args.scores_dtype = DType::f64;
  Random random(4);
  SelectionProblem problem(args, Scores::equal, false, Layout::contiguous, random);
  problem.scores.set({0, 0, 0, 0}, 1 + 0x1p-50);
  problem.scores.set({0, 0, 1, 0}, 1);
  expect_as_defined(problem, "scores that differ beyond fp32");
  EXPECT_EQ(problem.result()[0].last, 2);
}

TEST(Selection, WorkerCountDoesNotChangeIntervals) {
  Random random(6);
  SelectionArgs args = shape_of(500, 700, 90);
  args.batch = 3;
  args.heads = 5;
  SelectionProblem problem(args, Scores::few, true, Layout::padded, random);
  problem.select(sequential_execution(1));
  const std::vector<std::byte> expected(problem.intervals.data(),
                                        problem.intervals.data() + problem.intervals.size());
  for (const Execution& execution : {sequential_execution(4), threaded_execution(3),
                                     threaded_execution(31), pooled_execution()}) {
    problem.select(execution);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), problem.intervals.data()));
  }
}

TEST(Selection, EmptyProblemNeedsNoMemory) {
  SelectionArgs no_keys = shape_of(4, 0, 2);
  select_key_intervals(no_keys, Execution{});
  SelectionArgs no_batch = shape_of(4, 4, 2);
  no_batch.batch = 0;
  select_key_intervals(no_batch, Execution{});
}

TEST(Selection, WorkspaceGrowsWithRowsInProgress) {
  constexpr std::int64_t longest = (std::int64_t{1} << 31) - 1;
  SelectionArgs args = shape_of(longest, longest, longest);
  const double score = 0;
  KeyInterval interval;
  args.scores = &score;
  args.scores_dtype = DType::f64;
  args.intervals = &interval;
  Execution execution;
  const std::size_t one_heap = SelectCall(args, execution).workspace_size();
  EXPECT_GE(one_heap, std::size_t{16} * longest);
  execution.workers = std::numeric_limits<int>::max();
  EXPECT_EQ(SelectCall(args, execution).workspace_size(), one_heap);
}

class SelectionArguments : public ::testing::Test {
 protected:
  SelectionArguments() {
    args_.scores = scores_;
    args_.scores_stride = {0, 0, 1};
    args_.intervals = intervals_;
    execution_.workspace = workspace_.data();
    execution_.workspace_bytes = workspace_.size();
  }

  void expect_rejected(const std::string& argument) {
    expect_invalid([&] { select_key_intervals(args_, execution_); }, argument);
    for (const KeyInterval& interval : intervals_) EXPECT_EQ(interval.first, -7);
  }

  float scores_[3] = {1, 2, 3};
  KeyInterval intervals_[3] = {{-7, -7}, {-7, -7}, {-7, -7}};
  SelectionArgs args_ = shape_of(3, 3, 2);
  GuardedBuffer workspace_{4096, "workspace"};
  Execution execution_;
};

TEST_F(SelectionArguments, InvalidArgumentThrows) {
  const SelectionArgs good = args_;
  const Execution good_execution = execution_;
  const auto with = [&](auto change, const std::string& argument) {
    args_ = good;
    execution_ = good_execution;
    change();
    expect_rejected(argument);
  };
  with([&] { args_.rule.window = -1; }, "window");
  with([&] { args_.batch = -1; }, "batch");
  with([&] { args_.heads = -1; }, "heads");
  with([&] { args_.seqlen_q = -1; }, "seqlen_q");
  with([&] { args_.seqlen_k = std::int64_t{1} << 31; }, "seqlen_k");
  constexpr std::int64_t longest = (std::int64_t{1} << 31) - 1;
  with([&] { args_.batch = args_.heads = args_.seqlen_k = longest; }, "batch");
  with([&] { args_.scores = nullptr; }, "scores");
  with([&] { args_.intervals = nullptr; }, "intervals");
  with([&] { args_.rule.selection = static_cast<Selection>(9); }, "selection");
  with([&] { args_.rule.recent_window = -1; }, "recent_window");
  with(
      [&] {
        args_.rule.recent_window = 1;
        args_.causal = false;
      },
      "recent_window");
  with([&] { args_.rule.sink_tokens = -1; }, "sink_tokens");
  with([&] { args_.rule.score_threshold = NAN; }, "score_threshold");
  const std::int64_t bad_windows[] = {-2};
  with([&] { args_.rule.head_windows = bad_windows; }, "head_windows");
  with([&] { args_.scores_dtype = static_cast<DType>(9); }, "scores_dtype");
  with([&] { args_.scores_dtype = SelectionArgs{}.scores_dtype; }, "scores_dtype");
  with([&] { execution_.workers = 0; }, "execution.workers");
  with([&] { execution_.workspace_bytes = 0; }, "execution.workspace_bytes");
}

TEST_F(SelectionArguments, WindowIsNotReadWhereHeadsHaveWindows) {
  const std::int64_t windows[] = {2};
  args_.rule.window = SelectionRule{}.window;
  args_.rule.head_windows = windows;
  EXPECT_NO_THROW(SelectCall(args_, execution_));
  EXPECT_EQ(key_bound(args_).base, 2);
}

TEST_F(SelectionArguments, BoundOfInvalidArgumentThrows) {
  const SelectionArgs good = args_;
  const auto with = [&](auto change, const std::string& argument) {
    args_ = good;
    change();
    expect_invalid([&] { key_bound(args_); }, argument);
  };
  with([&] { args_.heads = -1; }, "heads");
  with([&] { args_.seqlen_k = -1; }, "seqlen_k");
  with([&] { args_.rule.window = -1; }, "window");
}

}  // namespace
}  // namespace flash_dmattn::testing
