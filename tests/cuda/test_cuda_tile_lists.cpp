#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/schedule/schedule.h"
#include "cuda/selection/selection.h"
#include "device.h"
#include "flash_dmattn/error.h"
#include "support/random.h"
#include "tile_list_comparison.h"

// Query tiles' key lists of hand-made intervals on the device.
namespace flash_dmattn {
namespace {

using testing::DeviceBuffer;
using testing::download;
using testing::expect_same_lists;
using testing::HostWorkspace;
using testing::measured_on_both;
using testing::Random;

class SmallCudaTileLists : public testing::OnDevice {};

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
    DeviceBuffer on_device(intervals.size() * sizeof(KeyInterval));
    on_device.upload(intervals.data());
    if (kind != 3) {
      args.intervals = {reinterpret_cast<const KeyInterval*>(on_device.data()),
                        args.heads * args.seqlen_k, args.seqlen_k};
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
  DeviceBuffer on_device(intervals.size() * sizeof(KeyInterval));
  on_device.upload(intervals.data());
  args.intervals = {reinterpret_cast<const KeyInterval*>(on_device.data()), args.seqlen_k,
                    args.seqlen_k};
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
  DeviceBuffer begin(tiles * 8);
  DeviceBuffer count(tiles * 4);
  DeviceBuffer full(tiles * 4);
  DeviceBuffer keys(static_cast<std::size_t>(tiles * capacity) * 4);
  const std::size_t bytes = cuda::tile_lists_workspace_size(args);
  DeviceBuffer workspace(bytes);
  Execution execution;
  execution.workspace = workspace.data();
  execution.workspace_bytes = bytes;
  cuda::build_tile_lists(
      args,
      {reinterpret_cast<std::int64_t*>(begin.data()), reinterpret_cast<std::int32_t*>(count.data()),
       reinterpret_cast<std::int32_t*>(full.data()), reinterpret_cast<std::int32_t*>(keys.data())},
      execution);
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
    select.keep.window = 1 + random.below(select.seqlen_k);
    select.keep.selection = Selection::global;
    select.causal = round % 3 != 0;
    const std::int64_t rows = select.batch * select.heads;
    std::vector<float> scores(static_cast<std::size_t>(rows * select.seqlen_k));
    for (float& score : scores) score = static_cast<float>(random.below(50));
    std::vector<KeyInterval> intervals(scores.size());
    select.scores = scores.data();
    select.scores_dtype = DType::f32;
    select.intervals = intervals.data();
    Execution on_host;
    HostWorkspace select_workspace(select_workspace_size(select, on_host));
    on_host.workspace = select_workspace.data();
    on_host.workspace_bytes = select_workspace.size();
    select_key_intervals(select, on_host);

    DeviceBuffer device_scores(scores.size() * sizeof(float));
    device_scores.upload(scores.data());
    SelectionArgs on_device = select;
    on_device.device = Device::cuda;
    on_device.scores = device_scores.data();
    const std::int64_t stride = key_list_stride(on_device);
    DeviceBuffer keys(static_cast<std::size_t>(rows * stride) * 4);
    DeviceBuffer sizes(static_cast<std::size_t>(rows) * 4);
    DeviceBuffer workspace(select_list_workspace_size(on_device));
    Execution execution;
    execution.workspace = workspace.data();
    execution.workspace_bytes = select_list_workspace_size(on_device);

    const KeyList list = select_key_list(on_device, reinterpret_cast<std::int32_t*>(keys.data()),
                                         reinterpret_cast<std::int32_t*>(sizes.data()), execution);
    Problem problem;
    problem.batch = select.batch;
    problem.heads_q = problem.heads_kv = select.heads;
    problem.seqlen_q = select.seqlen_q;
    problem.seqlen_k = select.seqlen_k;
    problem.causal = select.causal;
    problem.key_list_shape = {select.batch, select.heads};
    const Visibility visibility{.key_list = list};
    const std::int64_t tile_rows = 1 + random.below(200);

    TileListArgs args = tile_list_args(problem, {}, tile_rows);
    args.intervals = {intervals.data(), args.heads * args.seqlen_k, args.seqlen_k};
    const testing::OwnedTileLists owned = testing::make_tile_lists(args, testing::in_turn(1));
    const QueryTileLists& expected = owned.lists;
    const std::int64_t lists = args.lists();
    const cuda::ListSchedule plan(problem, visibility, Direction::forward, tile_rows, true);
    EXPECT_EQ(plan.size, tile_list_bytes(lists, 0));
    DeviceBuffer memory(plan.size);
    const ScheduleContents schedule = plan.build({memory.data(), plan.size}, execution);
    EXPECT_EQ(schedule.kind, ScheduleKind::key_list_tiles);

    std::vector<std::byte> host(plan.size);
    memory.download(host.data());
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
  good.keep.window = 10;
  good.scores_dtype = DType::f32;
  const auto expect_error = [&](const auto& change, const std::string& argument) {
    SelectionArgs args = good;
    change(args);
    for (const bool stride : {true, false}) {
      try {
        stride ? static_cast<void>(key_list_stride(args))
               : static_cast<void>(select_list_workspace_size(args));
        ADD_FAILURE() << "accepted a bad " << argument;
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(error.argument(), argument) << error.what();
      }
    }
  };
  static constexpr std::int64_t windows[] = {10};
  expect_error([](SelectionArgs& args) { args.keep.recent_window = 1; }, "recent_window");
  expect_error([](SelectionArgs& args) { args.keep.sink_tokens = 1; }, "sink_tokens");
  expect_error([](SelectionArgs& args) { args.keep.head_windows = windows; }, "head_windows");
  expect_error([](SelectionArgs& args) { args.keep.window = -1; }, "window");
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
}  // namespace flash_dmattn
