#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "common/kv_cache/step.h"
#include "flash_dmattn/flash_dmattn.h"
#include "support/cases.h"
#include "support/expect_invalid.h"
#include "support/kv_calls.h"
#include "support/kv_stream.h"
#include "support/run.h"

// Compares KV caches with the definition over random streams, and tests the checks of arguments.
namespace flash_dmattn::testing {
namespace {

class KvCacheStreams
    : public ::testing::TestWithParam<std::tuple<const char*, StreamScores, DType>> {};

// A window alone for one seed in four, else a rule with every part as often at one of its ends as between them.
StreamOptions random_options(std::uint64_t seed, const char* backend, StreamScores scores,
                             DType dtype) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double thresholds[] = {-infinity, -1e300, -0.5, 0.0, 1.0 / 3, 1.0, 1e300, infinity};
  Random random(seed * 977 + 5);
  StreamOptions options{.scores = scores, .seed = seed, .backend = backend};
  options.shape = {.batch = 1 + random.below(3),
                   .heads_kv = 1 + random.below(3),
                   .rule = {.window = random.below(10)},
                   .chunk = random.below(8),
                   .head_dim = 1 + random.below(20),
                   .dtype = dtype};
  if (random.below(2) == 0) {
    options.shape.value_dim = 1 + random.below(options.shape.head_dim);
  }
  options.group = 1 + random.below(3);
  options.nan_share = random.below(2) == 0 ? 0 : 0.3;
  options.masked_share = random.below(2) == 0 ? 0 : 0.3;
  options.softcap = random.below(4) == 0 ? 2 : 0;
  options.use = random.below(4) == 0 ? ScoreUse::choose : ScoreUse::choose_and_bias;
  SelectionRule& rule = options.shape.rule;
  if (seed % 4 == 0) {
    rule.window = std::max<std::int64_t>(rule.window, 1);
    return options;
  }
  rule.recent_window = random.below(3) == 0 ? 0 : random.below(8);
  rule.recent_competes = random.below(2) == 0;
  rule.sink_tokens = random.below(2) == 0 ? 0 : random.below(5);
  if (random.below(3) == 0) rule.score_threshold = thresholds[random.below(8)];
  if (options.shape.places(0) == 0) rule.window = 1;
  for (std::int64_t h = 0; h < options.shape.heads_kv && seed % 3 == 0; ++h) {
    options.head_windows.push_back(random.below(rule.window + 1));
  }
  return options;
}

void run_stream(const StreamOptions& options) {
  KvStream stream(options);
  if (stream.random().below(2) == 0) {
    ASSERT_NO_FATAL_FAILURE(stream.fill(1 + stream.random().below(20)));
  }
  for (int i = 0; i < 12; ++i) {
    const std::int64_t room = options.shape.chunk - stream.pending();
    const std::int64_t action = stream.random().below(8);
    if (action < 2 && room > 0) {
      ASSERT_NO_FATAL_FAILURE(stream.append(1 + stream.random().below(room)));
    } else if (action == 2) {
      ASSERT_NO_FATAL_FAILURE(stream.reorder());
    } else if (action == 3) {
      ASSERT_NO_FATAL_FAILURE(stream.save_and_restore());
    } else if (stream.pending() > 0) {
      ASSERT_NO_FATAL_FAILURE(stream.commit(action < 7));
    } else {
      ASSERT_NO_FATAL_FAILURE(stream.step());
    }
    if (stream.pending() == 0) {
      ASSERT_NO_FATAL_FAILURE(stream.check_slots());
    }
  }
}

TEST_P(KvCacheStreams, ShortStreamEqualsAttentionOverShownKeys) {
  const auto& [backend, scores, dtype] = GetParam();
  const std::uint64_t streams = is_quick_run() ? 40 : 650;
  for (std::uint64_t seed = 0; seed < streams; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_FATAL_FAILURE(run_stream(random_options(seed, backend, scores, dtype)));
  }
}

// The reference has neither blocks nor splits, which long streams are for: one shows that its loops do not end early.
// Scores change no address, which quick runs are about.
std::string reason_without_long_stream(const char* backend, StreamScores scores, DType dtype) {
  const bool is_reference = std::string(backend) == "reference";
  const bool is_first = scores == StreamScores::normal && dtype == DType::f32;
  if (is_reference && !is_first) return "the reference has one long stream";
  const bool is_left_out = is_reference || scores != StreamScores::normal;
  return is_quick_run() && is_left_out ? "slow, and FLASH_DMATTN_QUICK_TESTS is set" : "";
}

// The rule has enough slots for several blocks of keys, splits and whole vectors.
void run_long_stream(const SelectionRule& rule, const std::vector<std::int64_t>& head_windows,
                     const char* backend, StreamScores scores, DType dtype) {
  StreamOptions options{.scores = scores, .nan_share = 0.1, .seed = 3, .backend = backend};
  options.shape = {.batch = 2,
                   .heads_kv = 2,
                   .rule = rule,
                   .chunk = 70,
                   .head_dim = 32,
                   .value_dim = rule.recent_window > 0 ? 21 : 32,
                   .dtype = dtype};
  options.masked_share = rule.recent_window > 0 ? 0.1 : 0;
  options.head_windows = head_windows;
  options.group = 2;
  KvStream stream(options);
  ASSERT_NO_FATAL_FAILURE(stream.fill(1200));
  ASSERT_NO_FATAL_FAILURE(stream.check_slots());
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(stream.step());
  ASSERT_NO_FATAL_FAILURE(stream.append(50));
  ASSERT_NO_FATAL_FAILURE(stream.append(20));
  ASSERT_NO_FATAL_FAILURE(stream.commit(true));
  ASSERT_NO_FATAL_FAILURE(stream.check_slots());
  ASSERT_NO_FATAL_FAILURE(stream.step());
}

TEST_P(KvCacheStreams, LongStreamEqualsAttentionOverShownKeys) {
  const auto& [backend, scores, dtype] = GetParam();
  const std::string reason = reason_without_long_stream(backend, scores, dtype);
  if (!reason.empty()) GTEST_SKIP() << reason;
  const SelectionRule rule{
      .window = 600, .recent_window = 300, .sink_tokens = 4, .score_threshold = -1};
  SelectionRule competing = rule;
  competing.recent_competes = true;
  for (const SelectionRule& tested : {SelectionRule{.window = 900}, rule, competing}) {
    ASSERT_NO_FATAL_FAILURE(run_long_stream(tested, {}, backend, scores, dtype));
  }
  ASSERT_NO_FATAL_FAILURE(run_long_stream(rule, {3, 600}, backend, scores, dtype));
}

auto streams_of(const char* backend) {
  return ::testing::Combine(
      ::testing::Values(backend),
      ::testing::Values(StreamScores::normal, StreamScores::ties, StreamScores::equal),
      ::testing::Values(DType::f32, DType::bf16, DType::f16));
}
INSTANTIATE_TEST_SUITE_P(Cpu, KvCacheStreams, streams_of("cpu"));
INSTANTIATE_TEST_SUITE_P(Reference, KvCacheStreams, streams_of("reference"));

// A long stream does not enlarge the cache, which has the best of all keys at the end.
TEST(KvCache, HalfAMillionTokensLeaveTheBestKeys) {
  if (is_quick_run()) GTEST_SKIP() << "slow, and FLASH_DMATTN_QUICK_TESTS is set";
  constexpr std::int64_t tokens = 524288, window = 64, head_dim = 8;
  const KvCacheShape shape{.batch = 1,
                           .heads_kv = 1,
                           .rule = {.window = window},
                           .head_dim = head_dim,
                           .dtype = DType::f32};
  GuardedBuffer memory(kv_cache_size(shape), "cache");
  EXPECT_LT(memory.size(), window * (2 * head_dim * 4 + 8) + 512);
  const KvCache cache = kv_cache_in(memory, shape);
  clear_cache(cache, sequential_execution(1));
  Random random(1);
  std::vector<float> scores;
  std::vector<float> row(head_dim), out(head_dim);
  float lse = 0;
  const std::array stride = contiguous_strides({1, 1, 1, head_dim});
  DecodeStepArgs args{.cache = cache,
                      .heads_q = 1,
                      .scale = 1,
                      .q = {row.data(), stride},
                      .k = {row.data(), stride},
                      .v = {row.data(), stride},
                      .out = {out.data(), stride},
                      .lse = &lse};
  float score = 0;
  args.scores.data = &score;
  const DecodeStepCall step(args, sequential_execution(1));
  GuardedBuffer workspace(step.workspace_size(), "workspace");
  for (std::int64_t t = 0; t < tokens; ++t) {
    score = static_cast<float>(random.normal());
    scores.push_back(score);
    for (float& x : row) x = static_cast<float>(t);  // the key is its position
    step.run(workspace);
  }
  EXPECT_EQ(cache.seen[0], tokens);
  std::vector<float> best = scores;
  std::nth_element(best.begin(), best.begin() + window, best.end(), std::greater<>());
  best.resize(window);
  std::vector<float> held(cache.scores, cache.scores + window);
  std::sort(best.begin(), best.end());
  std::sort(held.begin(), held.end());
  EXPECT_EQ(held, best);
  for (std::int64_t slot = 0; slot < window; ++slot) {
    const std::int32_t position = cache.positions[slot];
    EXPECT_EQ(scores[static_cast<std::size_t>(position)], cache.scores[slot]);
    EXPECT_EQ(static_cast<const float*>(cache.k.data)[slot * head_dim],
              static_cast<float>(position));
  }
}

// Heads with 0 to 1173 keys and 60 pending tokens.
TEST(KvCache, MemoryIsTheSumOverHeads) {
  static constexpr std::int64_t windows[] = {3, 40, 1173, 0, 7, 64, 12, 90};
  KvCacheShape shape{.batch = 2,
                     .heads_kv = 8,
                     .rule = {.window = 1173, .recent_window = 16, .sink_tokens = 4},
                     .chunk = 60,
                     .head_dim = 64,
                     .dtype = DType::bf16};
  shape.rule.head_windows = windows;
  EXPECT_EQ(shape.total_slots(), 1389 + 8 * (16 + 4 + 60));
  EXPECT_EQ(shape.most_places(), 1193);
  const auto bytes = [&](std::int64_t slots) { return 2 * slots * (2 * 64 * 2 + 8); };
  EXPECT_NEAR(static_cast<double>(kv_cache_size(shape)),
              static_cast<double>(bytes(shape.total_slots())), 1024);
  static constexpr std::int64_t equal[] = {9, 9, 9, 9, 9, 9, 9, 9};
  KvCacheShape rectangle = shape;
  rectangle.rule.window = 9;
  const std::size_t size = kv_cache_size([&] {
    KvCacheShape with_windows = rectangle;
    with_windows.rule.head_windows = equal;
    return with_windows;
  }());
  rectangle.rule.head_windows = nullptr;
  EXPECT_EQ(size, kv_cache_size(rectangle));
}

// ---- Arguments -----------------------------------------------------------------------------------

void expect_error(const std::string& argument, const std::function<void(KvCalls&)>& spoil) {
  KvCalls calls;
  ASSERT_NO_THROW(calls.run());
  spoil(calls);
  expect_invalid([&] { calls.run(); }, argument);
}

TEST(KvCacheArguments, InvalidArgumentIsNamed) {
  const auto expect_rule_error = [](const std::string& argument, auto spoil) {
    expect_error("cache.shape.rule." + argument,
                 [&](KvCalls& c) { spoil(c.append_args.cache.shape.rule); });
  };
  expect_rule_error("window", [](SelectionRule& rule) { rule.window = 0; });
  expect_rule_error("window", [](SelectionRule& rule) { rule.window = SelectionRule{}.window; });
  expect_rule_error("window", [](SelectionRule& rule) { rule.window = every_key; });
  expect_rule_error("recent_window", [](SelectionRule& rule) { rule.recent_window = -1; });
  expect_rule_error("sink_tokens", [](SelectionRule& rule) { rule.sink_tokens = -1; });
  expect_rule_error("selection", [](SelectionRule& rule) { rule.selection = Selection::global; });
  expect_rule_error("score_threshold", [](SelectionRule& rule) { rule.score_threshold = NAN; });
  static constexpr std::int64_t windows[] = {4, 5};
  expect_rule_error("head_windows[1]", [](SelectionRule& rule) { rule.head_windows = windows; });
  expect_error("cache.shape.batch", [](KvCalls& c) { c.append_args.cache.shape.batch = -1; });
  expect_error("cache.shape.head_dim",
               [](KvCalls& c) { c.append_args.cache.shape.head_dim = 257; });
  expect_error("cache.shape.value_dim",
               [](KvCalls& c) { c.append_args.cache.shape.value_dim = 9; });
  expect_error("cache.shape.dtype",
               [](KvCalls& c) { c.append_args.cache.shape.dtype = DType::f64; });
  expect_error("cache.shape.dtype",
               [](KvCalls& c) { c.append_args.cache.shape.dtype = KvCacheShape{}.dtype; });
  expect_error("cache.k", [](KvCalls& c) { c.append_args.cache.k.data = nullptr; });
  expect_error("cache.v", [](KvCalls& c) { c.append_args.cache.v.stride[2] = 0; });
  expect_error("cache.scores", [](KvCalls& c) { c.append_args.cache.scores = nullptr; });
  expect_error("cache.positions", [](KvCalls& c) { c.append_args.cache.positions = nullptr; });
  expect_error("cache.counts", [](KvCalls& c) { c.append_args.cache.counts = nullptr; });
  expect_error("cache.seen", [](KvCalls& c) { c.append_args.cache.seen = nullptr; });
  expect_error("cache.counts[1].count", [](KvCalls& c) { c.cache.counts[1].count = 5; });
  expect_error("cache.counts[0].count", [](KvCalls& c) { c.cache.counts[0].count = -1; });
  expect_error("cache.counts[0].victim",
               [](KvCalls& c) { c.cache.counts[0] = {.count = 4, .competed = 4, .victim = 4}; });
  expect_error("cache.counts[0].competed", [](KvCalls& c) { c.cache.counts[0].competed = -1; });
  expect_error("cache.counts[0].free", [](KvCalls& c) { c.cache.counts[0].free = 5; });
  expect_error("cache.counts[0].leaving", [](KvCalls& c) { c.cache.counts[0].leaving = 4; });
  expect_error("cache.pending", [](KvCalls& c) { c.append_args.cache.pending = 4; });
  expect_error("cache.pending", [](KvCalls& c) { c.step_args.cache.pending = 1; });
  expect_error("seqlen", [](KvCalls& c) { c.append_args.seqlen = 4; });
  expect_error("k", [](KvCalls& c) { c.append_args.k.data = nullptr; });
  expect_error("v", [](KvCalls& c) { c.fill_args.v.stride[3] = 2; });
  expect_error("scores", [](KvCalls& c) { c.step_args.scores.data = nullptr; });
  expect_error("intervals", [](KvCalls& c) { c.fill_args.intervals.data = nullptr; });
  expect_error("intervals", [](KvCalls& c) { c.intervals_args.intervals = nullptr; });
  expect_error("seqlen_q", [](KvCalls& c) { c.intervals_args.seqlen_q = 2; });
  expect_error("problem.heads_q", [](KvCalls& c) { c.step_args.heads_q = 3; });
  expect_error("problem.scale", [](KvCalls& c) { c.step_args.scale = 1.0f / 0.0f; });
  expect_error("problem.softcap", [](KvCalls& c) { c.step_args.softcap = -1; });
  expect_error("q", [](KvCalls& c) { c.step_args.q.data = nullptr; });
  expect_error("out", [](KvCalls& c) { c.step_args.out.data = nullptr; });
  expect_error("lse", [](KvCalls& c) { c.step_args.lse = nullptr; });
  expect_error("index", [](KvCalls& c) { c.copy_args.index = nullptr; });
  expect_error("index[1]", [](KvCalls& c) { c.index[1] = 2; });
  expect_error("index[0]", [](KvCalls& c) { c.index[0] = -1; });
  expect_error("kept_tokens[0]",
               [](KvCalls& c) { c.commit_args.kept_tokens = (c.index = {2, 0}).data(); });
  expect_error("kept_tokens[1]",
               [](KvCalls& c) { c.intervals_args.kept_tokens = (c.index = {0, -1}).data(); });
  expect_error("lengths[1]", [](KvCalls& c) { c.fill_args.lengths = (c.index = {1, 2}).data(); });
  expect_error("to.shape.value_dim", [](KvCalls& c) { c.copy_args.to.shape.value_dim = 7; });
  expect_error("to.shape.rule.window", [](KvCalls& c) { c.copy_args.to.shape.rule.window = 3; });
  expect_error("cache.shape.heads_kv",
               [](KvCalls& c) { c.append_args.cache.shape.heads_kv = KvCacheShape{}.heads_kv; });
  expect_error("seqlen", [](KvCalls& c) { c.append_args.seqlen = AppendArgs{}.seqlen; });
  expect_error("seqlen", [](KvCalls& c) { c.fill_args.seqlen_k = FillArgs{}.seqlen_k; });
  expect_error("seqlen_q", [](KvCalls& c) { c.fill_args.seqlen_q = FillArgs{}.seqlen_q; });
  expect_error("seqlen_q",
               [](KvCalls& c) { c.intervals_args.seqlen_q = PendingIntervalsArgs{}.seqlen_q; });
  expect_error("problem.heads_q",
               [](KvCalls& c) { c.step_args.heads_q = DecodeStepArgs{}.heads_q; });
  expect_error("from.k", [](KvCalls& c) { c.copy_args.from.k.data = nullptr; });
  static constexpr std::int32_t rows[] = {-1, 2};
  const auto expect_rows_error = [](const std::string& argument, auto spoil) {
    expect_error("cache.rows" + argument, [&](KvCalls& c) { spoil(c.step_args.cache.rows); });
  };
  expect_rows_error(".slot_stride", [](CacheRows& r) { r.slot_stride = 2 * 7 - 1; });
  expect_rows_error(".count_stride", [](CacheRows& r) { r.count_stride = 1; });
  expect_rows_error(".seen_stride", [](CacheRows& r) { r.seen_stride = 0; });
  expect_rows_error(".index_stride",
                    [](CacheRows& r) { r = {.index = rows, .count = 2, .index_stride = 0}; });
  expect_rows_error(".count", [](CacheRows& r) { r = {.index = rows, .count = -1}; });
  expect_rows_error(".index[1]", [](CacheRows& r) { r = {.index = rows, .count = 2}; });
  expect_error("cache.rows", [](KvCalls& c) { c.append_args.cache.rows = {rows, 3}; });
  expect_error("cache.rows", [](KvCalls& c) { c.intervals_args.cache.rows.seen_stride = 2; });
  expect_error("cache.rows", [](KvCalls& c) { c.commit_args.cache.rows.slot_stride = 15; });
  expect_error("from.rows.index", [](KvCalls& c) { c.copy_args.from.rows = {rows, 2}; });
  expect_error("execution.workers", [](KvCalls& c) { c.execution.workers = 0; });
  expect_error("execution.workspace_bytes", [](KvCalls& c) { c.execution.workspace_bytes = 0; });
}

TEST(KvCacheArguments, AppendWithoutRoomNamesTheChunk) {
  KvCalls calls;
  calls.append_args.cache.shape.chunk = 0;
  expect_invalid([&] { append_tokens(calls.append_args, calls.execution); }, "seqlen",
                 "got 1, expected at most 0: cache.shape.chunk has room for 0 pending tokens, of "
                 "which 0 are taken");
}

TEST(KvCacheArguments, CopyToAnotherHeadDimNamesTheExpectedOne) {
  KvCalls calls;
  const std::int64_t expected = calls.copy_args.from.shape.head_dim;
  calls.copy_args.to.shape.head_dim = expected + 1;
  expect_invalid([&] { copy_rows(calls.copy_args, calls.execution); }, "to.shape.head_dim",
                 "got " + std::to_string(expected + 1) + ", expected " + std::to_string(expected));
}

// A GPU's counts are not checked before a step.
TEST(KvCache, StepFromAnyCountsChangesOnlyExistingSlots) {
  constexpr std::int32_t largest = std::numeric_limits<std::int32_t>::max();
  constexpr std::array numbers = {-largest - 1, -1, 0, 1, 3, 6, 7, 1000000, largest};
  Random random(1);
  const auto number = [&] {
    return numbers[static_cast<std::size_t>(random.below(std::ssize(numbers)))];
  };
  for (int i = 0; i < 20000; ++i) {
    const KvCacheShape shape{.heads_kv = 1,
                             .rule = {.window = 1 + random.below(3),
                                      .recent_window = random.below(3),
                                      .recent_competes = random.below(2) == 0,
                                      .sink_tokens = random.below(3)}};
    const SlotCount counts{.count = number(),
                           .competed = static_cast<std::int32_t>(random.below(9)),
                           .free = number(),
                           .leaving = number(),
                           .leaving_score = static_cast<float>(random.normal()),
                           .victim = number(),
                           .victim_score = static_cast<float>(random.normal()),
                           .victim_position = number()};
    const StepChange change =
        change_of_step(rule_of_head(shape, 0), counts, static_cast<std::int32_t>(random.below(100)),
                       static_cast<float>(random.normal()), random.below(4) > 0);
    ASSERT_LT(change.target, shape.places(0));
    ASSERT_GE(change.count, 0);
    ASSERT_LE(change.count, shape.places(0));
  }
}

TEST(KvCache, DecodeStepNamesItsKernel) {
  const KvCalls calls;
  const DecodeStepCall step(calls.step_args, calls.execution, "cpu");
  const std::vector<std::string> names = kernel_names("cpu");
  EXPECT_NE(std::find(names.begin(), names.end(), step.kernel_name()), names.end())
      << step.kernel_name();
}

TEST(KvCacheArguments, OtherDeviceIsDeclinedWithReason) {
  KvCacheShape shape{
      .batch = 1, .heads_kv = 1, .rule = {.window = 4}, .head_dim = 8, .dtype = DType::f32};
  EXPECT_EQ(supports(shape), "");
  EXPECT_EQ(supports(shape, "reference"), "");
  EXPECT_THROW(supports(shape, "gpu"), InvalidArgument);
  shape.device = Device::cuda;
  EXPECT_NE(supports(shape, "cpu").find("computes in cpu memory"), std::string::npos);
}

TEST(KvCacheArguments, ShortOrUnalignedMemoryThrows) {
  const KvCacheShape shape{
      .batch = 1, .heads_kv = 1, .rule = {.window = 4}, .head_dim = 8, .dtype = DType::f32};
  GuardedBuffer memory(kv_cache_size(shape), "cache");
  EXPECT_THROW(kv_cache_in({memory.data(), memory.size() - 1}, shape), InvalidArgument);
  EXPECT_THROW(kv_cache_in({memory.data() + 4, memory.size()}, shape), InvalidArgument);
}

}  // namespace
}  // namespace flash_dmattn::testing
