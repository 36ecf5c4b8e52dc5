#include <gtest/gtest.h>

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
class CudaTileLists : public OnDevice {};

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
    const int kind = round % 5;
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
      const auto end = static_cast<std::int32_t>(args.seqlen_q);
      if (kind == 4 && random.below(2) == 0) intervals[i] = {query, end};  // a global selection
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

// More tiles than a list of keys covers, and more than a root has. A few keys are visible to the end.
TEST_F(CudaTileLists, TilesOfLongRowsMatchCpu) {
  struct Size {
    std::int64_t queries, keys, tile_rows;
  };
  Random random(10);
  for (const auto [queries, keys, tile_rows] :
       {Size{70'000, 70'000, 1}, Size{300'001, 3'000, 3}, Size{270'000, 270'000, 1}}) {
    TileListArgs args;
    args.batch = 1;
    args.heads = 1;
    args.seqlen_q = queries;
    args.seqlen_k = keys;
    args.tile_rows = tile_rows;
    args.causal = true;
    args.by_position = keys == 3'000;
    std::vector<KeyInterval> intervals;
    for (std::int64_t key = 0; key < keys; ++key) {
      const std::int64_t first = key * queries / keys;
      const std::int64_t life = 5 * queries / keys;
      const std::int64_t last = key % 20'000 == 7 ? queries : first + random.below(life);
      intervals.push_back({static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)});
    }
    const DeviceBuffer on_device(intervals);
    args.intervals = {on_device.as<KeyInterval>(), keys, keys};
    args.bound = measured_on_both(args, intervals);
    expect_same_lists(args, intervals);
    if (HasFatalFailure()) return;
  }
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

// The memory of a schedule follows from shapes and bound alone.
TEST(CudaTileListSchedules, SizeFollowsFromShapesAndBound) {
  Problem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = 2;
  p.seqlen_q = p.seqlen_k = 1 << 17;
  p.causal = true;
  p.intervals_shape = {1, 2};
  static constexpr KeyInterval interval{0, 1};
  const auto place = [&](const KeyBound& bound) {
    const Visibility visibility{.intervals = {&interval, 0, 0}, .bound = bound};
    cuda::ListSchedule schedule(p, visibility, cuda::ListSchedule::Order::full_first);
    cuda::WorkspaceAllocator workspace(nullptr);
    schedule.place(workspace);
    return workspace;
  };
  constexpr std::int64_t lists = 2 * 1024;
  cuda::WorkspaceAllocator expected(nullptr);
  take_tile_lists(expected, lists, lists * 1152);
  EXPECT_EQ(place({.base = 1000, .per_query = 1}).used(), expected.used());
  EXPECT_EQ(place({.base = 1000, .per_query = 1, .consecutive = true}).bytes(), 0u);
  EXPECT_EQ(place({.consecutive = true}).bytes(), 0u);
  EXPECT_EQ(place({.base = p.seqlen_k}).bytes(), 0u);  // lists of all keys
  expect_invalid([&] { place({}); }, "visibility.bound",
                 "got unknown, expected one of key_bound or measure_key_bound");
}

}  // namespace
}  // namespace flash_dmattn::testing
