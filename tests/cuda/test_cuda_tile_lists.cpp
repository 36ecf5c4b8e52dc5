#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/schedule/schedule.h"
#include "cuda/selection/selection.h"
#include "device.h"
#include "support/expect_invalid.h"
#include "support/random.h"
#include "tile_list_comparison.h"

// Query tiles' key lists of hand-made intervals on the device.
namespace flash_dmattn::testing {
namespace {

class SmallCudaTileLists : public OnDevice {};

// Intervals of every form and a bound that holds for them.
TEST_F(SmallCudaTileLists, HandmadeIntervalsMatchCpu) {
  Random random(9);
  for (int round = 0; round < 40; ++round) {
    TileListArgs args;
    args.batch = 1 + random.below(2);
    args.heads = 1 + random.below(2);
    args.seqlen_q = 1 + random.below(2000);
    args.seqlen_k = random.below(2) == 0 ? args.seqlen_q : 1 + random.below(1500);
    constexpr std::int64_t tile_rows[] = {4, 16, 37, 128};
    args.tile_rows = tile_rows[random.below(4)];
    args.causal = random.below(2) == 0;
    args.by_position = random.below(3) == 0;
    const std::int64_t window = 1 + random.below(300);
    const int kind = round % 4;
    std::vector<KeyInterval> intervals(
        static_cast<std::size_t>(args.batch * args.heads * args.seqlen_k));
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      const auto j = static_cast<std::int64_t>(i) % args.seqlen_k;
      const auto anywhere = [&] {
        return static_cast<std::int32_t>(random.below(args.seqlen_q + 20) - 10);
      };
      const auto query = static_cast<std::int32_t>(j - args.seqlen_k + args.seqlen_q);
      const auto document = static_cast<std::int32_t>(j / window * window);
      if (kind == 0) intervals[i] = {anywhere(), anywhere()};
      if (kind == 1) intervals[i] = {query, query + static_cast<std::int32_t>(window)};
      if (kind == 2) intervals[i] = {document, document + static_cast<std::int32_t>(window)};
    }
    args.bound = {args.seqlen_k, 0};
    if (kind == 1) args.bound = {window, 1};
    if (kind == 2) args.bound = {2 * window, 1};
    const DeviceBuffer on_device(intervals);
    if (kind != 3) {
      args.intervals = {on_device.as<KeyInterval>(), args.heads * args.seqlen_k, args.seqlen_k};
    }
    expect_same_lists(args, intervals);
    if (HasFatalFailure()) return;
    args.bound = measured_on_both(args, intervals);
    expect_same_lists(args, intervals);
    if (HasFatalFailure()) return;
  }
}

// Enough tiles that the lists are split at every level of the tree.
TEST_F(SmallCudaTileLists, ThousandsOfTilesMatchCpu) {
  TileListArgs args;
  args.batch = 1;
  args.heads = 1;
  args.seqlen_q = 8500;
  args.seqlen_k = 8500;
  args.tile_rows = 1;
  args.bound = {20, 1};
  std::vector<KeyInterval> intervals;
  for (std::int32_t j = 0; j < 8500; ++j) intervals.push_back({j, j + 1 + j % 20});
  const DeviceBuffer on_device(intervals);
  args.intervals = {on_device.as<KeyInterval>(), args.seqlen_k, args.seqlen_k};
  expect_same_lists(args, intervals);
}

// The guards of the buffers say whether anything was written outside.
TEST_F(SmallCudaTileLists, BrokenBoundWritesNothingOutside) {
  TileListArgs args;
  args.batch = 1;
  args.heads = 1;
  args.seqlen_q = 10000;
  args.seqlen_k = 10000;
  args.tile_rows = 128;
  args.bound = {10, 0};
  const std::int64_t tiles = 79;
  const std::int64_t capacity = cuda::tile_list_capacity(args);
  const DeviceBuffer begin(tiles * 8), count(tiles * 4), full(tiles * 4);
  const DeviceBuffer keys(static_cast<std::size_t>(tiles * capacity) * 4);
  cuda::build_tile_lists(args,
                         {begin.as<std::int64_t>(), count.as<std::int32_t>(),
                          full.as<std::int32_t>(), keys.as<std::int32_t>()},
                         DeviceWorkspace(cuda::tile_lists_workspace_size(args)));
  for (const std::int32_t stored : download<std::int32_t>(count, tiles)) {
    EXPECT_LE(stored, capacity);
  }
}

// The schedule of a key list against the host's lists of the intervals of the same selection.
TEST_F(SmallCudaTileLists, KeyListMatchesIntervals) {
  Random random(31);
  for (int round = 0; round < 12; ++round) {
    SelectionArgs select;
    select.batch = 1 + random.below(2);
    select.heads = 1 + random.below(3);
    select.seqlen_q = 1 + random.below(700);
    select.seqlen_k = 1 + random.below(1500);
    select.rule.window = 1 + random.below(select.seqlen_k);
    select.rule.selection = Selection::global;
    select.causal = round % 3 != 0;
    const std::int64_t rows = select.batch * select.heads;
    std::vector<float> scores(static_cast<std::size_t>(rows * select.seqlen_k));
    for (float& score : scores) score = static_cast<float>(random.below(50));
    std::vector<KeyInterval> intervals(scores.size());
    select.scores = scores.data();
    select.scores_dtype = DType::f32;
    select.intervals = intervals.data();
    run_in_new_workspace(SelectCall(select, {}));

    const DeviceBuffer device_scores(scores);
    SelectionArgs on_device = select;
    on_device.device = Device::cuda;
    on_device.scores = device_scores.data();
    const std::int64_t stride = key_list_stride(on_device);
    const DeviceBuffer keys(static_cast<std::size_t>(rows * stride) * 4);
    const DeviceBuffer sizes(static_cast<std::size_t>(rows) * 4);
    const DeviceWorkspace workspace(select_list_workspace_size(on_device));
    const KeyList list =
        select_key_list(on_device, keys.as<std::int32_t>(), sizes.as<std::int32_t>(), workspace);
    const std::int64_t tile_rows = 1 + random.below(200);
    const TileListArgs args{
        .batch = select.batch,
        .heads = select.heads,
        .seqlen_q = select.seqlen_q,
        .seqlen_k = select.seqlen_k,
        .tile_rows = tile_rows,
        .causal = select.causal,
        .intervals = {intervals.data(), select.heads * select.seqlen_k, select.seqlen_k}};
    Problem problem = problem_of(args);
    std::swap(problem.intervals_shape, problem.key_list_shape);
    const Visibility visibility{.key_list = list};
    const OwnedTileLists owned = make_tile_lists(args, in_turn(1));
    const QueryTileLists& expected = owned.lists;
    const std::int64_t lists = args.lists();
    const cuda::ListSchedule plan(problem, visibility, Direction::forward, tile_rows, true);
    EXPECT_EQ(plan.size, tile_list_bytes(lists, 0));
    const DeviceBuffer memory(plan.size);
    const ScheduleContents schedule = plan.build(memory, workspace);
    EXPECT_EQ(schedule.kind, ScheduleKind::key_list_tiles);

    auto host = download<std::byte>(memory, static_cast<std::int64_t>(plan.size));
    ScheduleAllocator allocator(host.data());
    const TileListBuffers actual = take_tile_lists(allocator, lists, 0);
    const auto actual_keys = download<std::int32_t>(keys, rows * stride);
    for (std::int64_t t = 0; t < lists; ++t) {
      ASSERT_EQ(actual.count[t], expected.count[t]) << "list " << t;
      ASSERT_EQ(actual.full[t], expected.full[t]) << "list " << t;
      const std::int32_t* listed = actual_keys.data() + actual.begin[t];
      const std::int32_t* wanted = expected.keys + expected.begin[t];
      ASSERT_TRUE(std::equal(listed, listed + actual.count[t], wanted)) << "list " << t;
    }
  }
}

// It needs no GPU.
TEST(CudaKeyLists, SelectionThatNoListExpressesThrows) {
  SelectionArgs good;
  good.device = Device::cuda;
  good.batch = good.heads = 1;
  good.seqlen_k = 100;
  good.rule.window = 10;
  good.scores_dtype = DType::f32;
  const auto expect_error = [&](const auto& change, const std::string& argument) {
    SelectionArgs args = good;
    change(args);
    expect_invalid([&] { key_list_stride(args); }, argument);
    expect_invalid([&] { select_list_workspace_size(args); }, argument);
  };
  static constexpr std::int64_t windows[] = {10};
  expect_error([](SelectionArgs& args) { args.rule.recent_window = 1; }, "recent_window");
  expect_error([](SelectionArgs& args) { args.rule.sink_tokens = 1; }, "sink_tokens");
  expect_error([](SelectionArgs& args) { args.rule.head_windows = windows; }, "head_windows");
  expect_error([](SelectionArgs& args) { args.rule.window = -1; }, "window");
  expect_error([](SelectionArgs& args) { args.heads = -1; }, "heads");
}

// The schedule of a direction follows from shapes and bound alone.
TEST(CudaTileListSchedules, SizeFollowsFromShapesAndBound) {
  Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = 2;
  p.seqlen_q = p.seqlen_k = 1 << 17;
  p.causal = true;
  p.intervals_shape = {1, 2};
  static constexpr KeyInterval interval{0, 1};
  const auto size = [&](const KeyBound& bound) {
    const Visibility visibility{.intervals = {&interval, 0, 0}, .bound = bound};
    return cuda::ListSchedule(p, visibility, Direction::backward, 128, true).size;
  };
  constexpr std::int64_t lists = 2 * 1024;
  EXPECT_EQ(size({.base = 1000, .per_query = 1}), tile_list_bytes(lists, lists * 1152));
  EXPECT_EQ(size({.base = 1000, .per_query = 1, .consecutive = true}), 0u);
  EXPECT_EQ(size({.consecutive = true}), 0u);
  EXPECT_EQ(size({.base = p.seqlen_k}), 0u);  // lists of all keys
  EXPECT_THROW(size({}), InvalidArgument);
}

}  // namespace
}  // namespace flash_dmattn::testing
