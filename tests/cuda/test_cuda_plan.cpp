#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/selection/selection.h"
#include "device.h"
#include "plan_comparison.h"
#include "support/random.h"

// Plans and slots of hand-made intervals on the device.
namespace flash_dmattn {
namespace {

using testing::DeviceBuffer;
using testing::download;
using testing::expect_same_plan;
using testing::HostWorkspace;
using testing::measured_on_both;
using testing::Random;

class SmallCudaPlan : public testing::OnDevice {};
class SmallCudaSlots : public testing::OnDevice {};
class CudaSlots : public testing::OnDevice {};

// Intervals of every form and a bound that holds for them.
TEST_F(SmallCudaPlan, HandMadeIntervals) {
  Random random(9);
  for (int round = 0; round < 40; ++round) {
    PlanArgs args;
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
    expect_same_plan(args, intervals);
    if (HasFatalFailure()) return;
    args.bound = measured_on_both(args, intervals);
    expect_same_plan(args, intervals);
    if (HasFatalFailure()) return;
  }
}

// So many tiles that the lists are split at every level of the tree.
TEST_F(SmallCudaPlan, ThousandsOfTiles) {
  PlanArgs args;
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
  expect_same_plan(args, intervals);
}

// The guards of the buffers say whether anything was written outside.
TEST_F(SmallCudaPlan, BrokenBoundStaysInsideTheBuffers) {
  PlanArgs args;
  args.batch = 1;
  args.heads = 1;
  args.seqlen_q = 10000;
  args.seqlen_k = 10000;
  args.tile_rows = 128;
  args.bound = {10, 0};
  const std::int64_t tiles = 79;
  const std::int64_t capacity = cuda::plan_capacity(args);
  DeviceBuffer begin(tiles * 8);
  DeviceBuffer count(tiles * 4);
  DeviceBuffer full(tiles * 4);
  DeviceBuffer keys(static_cast<std::size_t>(tiles * capacity) * 4);
  const std::size_t bytes = cuda::plan_workspace_size(args);
  DeviceBuffer workspace(bytes);
  Execution execution;
  execution.workspace = workspace.data();
  execution.workspace_bytes = bytes;
  cuda::build_plan(
      args,
      {reinterpret_cast<std::int64_t*>(begin.data()), reinterpret_cast<std::int32_t*>(count.data()),
       reinterpret_cast<std::int32_t*>(full.data()), reinterpret_cast<std::int32_t*>(keys.data())},
      execution);
  for (const std::int32_t stored : download<std::int32_t>(count, tiles)) {
    EXPECT_LE(stored, capacity);
  }
}

// The plan of a key list against the host's plan of the intervals of the same selection.
TEST_F(SmallCudaPlan, KeyList) {
  Random random(31);
  for (int round = 0; round < 12; ++round) {
    SelectionArgs select;
    select.batch = 1 + random.below(2);
    select.heads = 1 + random.below(3);
    select.seqlen_q = 1 + random.below(700);
    select.seqlen_k = 1 + random.below(1500);
    select.window = 1 + random.below(select.seqlen_k);
    select.selection = Selection::global;
    select.causal = round % 3 != 0;
    select.scores_stride = {select.heads * select.seqlen_k, select.seqlen_k, 1};
    const std::int64_t rows = select.batch * select.heads;
    std::vector<float> scores(static_cast<std::size_t>(rows * select.seqlen_k));
    for (float& score : scores) score = static_cast<float>(random.below(50));
    std::vector<KeyInterval> intervals(scores.size());
    select.scores = scores.data();
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

    PlanArgs args;
    args.batch = select.batch;
    args.heads = select.heads;
    args.seqlen_q = select.seqlen_q;
    args.seqlen_k = select.seqlen_k;
    args.tile_rows = 1 + random.below(200);
    args.causal = select.causal;
    args.intervals = {intervals.data(), args.heads * args.seqlen_k, args.seqlen_k};
    const testing::OwnedPlan expected = testing::make_plan(args, testing::in_turn(1));
    const std::int64_t lists = rows * expected.plan.tiles;
    DeviceBuffer begin(static_cast<std::size_t>(lists) * 8);
    DeviceBuffer count(static_cast<std::size_t>(lists) * 4);
    DeviceBuffer full(static_cast<std::size_t>(lists) * 4);
    PlanArgs list_args = args;
    list_args.device = Device::cuda;
    list_args.intervals = {};
    list_args.list = select_key_list(on_device, reinterpret_cast<std::int32_t*>(keys.data()),
                                     reinterpret_cast<std::int32_t*>(sizes.data()), execution);
    EXPECT_EQ(plan_entries(list_args, execution), 0);
    build_plan(list_args,
               {reinterpret_cast<std::int64_t*>(begin.data()),
                reinterpret_cast<std::int32_t*>(count.data()),
                reinterpret_cast<std::int32_t*>(full.data()), nullptr},
               execution);

    const auto actual_begin = download<std::int64_t>(begin, lists);
    const auto actual_count = download<std::int32_t>(count, lists);
    const auto actual_full = download<std::int32_t>(full, lists);
    const auto actual_keys = download<std::int32_t>(keys, rows * stride);
    for (std::int64_t t = 0; t < lists; ++t) {
      const auto i = static_cast<std::size_t>(t);
      ASSERT_EQ(actual_count[i], expected.plan.count[t]) << "list " << t;
      ASSERT_EQ(actual_full[i], expected.plan.full[t]) << "list " << t;
      const std::int32_t* actual = actual_keys.data() + actual_begin[i];
      const std::int32_t* wanted = expected.plan.keys + expected.plan.begin[t];
      ASSERT_TRUE(std::equal(actual, actual + actual_count[i], wanted)) << "list " << t;
    }
  }
}

// Follows the slots of one row on the host and checks what SlotSchedule promises of them.
void expect_valid_slots(const PlanArgs& args, const cuda::SlotSchedule& shape, std::int64_t row,
                        const KeyInterval* intervals, const std::int32_t* arrivals,
                        const std::int32_t* successor, std::int32_t count,
                        const std::int32_t* starts) {
  const std::int64_t tiles = (args.seqlen_q + args.tile_rows - 1) / args.tile_rows;
  const std::int64_t segment_tiles = (tiles + shape.segments - 1) / shape.segments;
  struct Life {
    std::int64_t first = 0;
    std::int64_t last = -1;  // tiles
    bool placed = false;
  };
  std::vector<Life> lives(static_cast<std::size_t>(args.seqlen_k));
  std::int64_t visible = 0;
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    std::int64_t first = std::max<std::int64_t>(intervals[j].first, 0);
    if (args.causal) first = std::max(first, j - args.seqlen_k + args.seqlen_q);
    const std::int64_t last = std::min<std::int64_t>(intervals[j].last, args.seqlen_q);
    if (first >= last) continue;
    lives[static_cast<std::size_t>(j)] = {first / args.tile_rows, (last - 1) / args.tile_rows};
    ++visible;
  }
  ASSERT_EQ(count, visible) << "row " << row;
  for (std::int32_t slot = 0; slot < shape.slots; ++slot) {
    std::vector<std::int32_t> start(static_cast<std::size_t>(shape.segments), -1);
    std::int64_t previous = -1;
    for (std::int32_t n = slot < count ? slot : -1; n >= 0; n = successor[n]) {
      Life& life = lives[static_cast<std::size_t>(arrivals[n])];
      ASSERT_FALSE(life.placed) << "key " << arrivals[n] << " has two slots";
      ASSERT_LT(previous, life.first) << "slot " << slot << " holds two keys";
      life.placed = true;
      previous = life.last;
      for (std::size_t g = 0; g < start.size(); ++g) {
        const auto segment_begin = static_cast<std::int64_t>(g) * segment_tiles;
        if (start[g] < 0 && life.last >= segment_begin) start[g] = n;
      }
    }
    for (std::size_t g = 0; g < start.size(); ++g) {
      ASSERT_EQ(starts[static_cast<std::int32_t>(g) * shape.slots + slot], start[g])
          << "slot " << slot << ", segment " << g;
    }
  }
  for (const Life& life : lives) ASSERT_EQ(life.placed, life.last >= 0);
  for (std::int64_t n = count; n < args.seqlen_k; ++n) ASSERT_EQ(arrivals[n], -1);
}

void compare_slots(std::uint64_t seed, int rounds, std::int64_t longest) {
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    PlanArgs args;
    args.batch = 1 + random.below(2);
    args.heads = 1 + random.below(2);
    args.seqlen_q = 1 + random.below(longest);
    args.seqlen_k = random.below(2) == 0 ? args.seqlen_q : 1 + random.below(longest);
    args.tile_rows = 1 + random.below(130);
    args.causal = random.below(2) == 0;
    const std::int64_t rows = args.batch * args.heads;
    const std::int64_t longest_life = 1 + random.below(400);
    std::vector<KeyInterval> intervals(static_cast<std::size_t>(rows * args.seqlen_k));
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      const auto j = static_cast<std::int64_t>(i) % args.seqlen_k;
      const std::int64_t first =
          round % 2 == 0 ? j - args.seqlen_k + args.seqlen_q : random.below(args.seqlen_q);
      const std::int64_t life = round % 2 == 0 ? longest_life : random.below(longest_life + 1);
      intervals[i] = {static_cast<std::int32_t>(first), static_cast<std::int32_t>(first + life)};
    }
    args.bound = {args.seqlen_k, 0};
    if (round % 2 == 0) args.bound = {longest_life, 1};
    DeviceBuffer on_device(intervals.size() * sizeof(KeyInterval));
    on_device.upload(intervals.data());
    args.intervals = {reinterpret_cast<const KeyInterval*>(on_device.data()),
                      args.heads * args.seqlen_k, args.seqlen_k};

    cuda::SlotSchedule schedule;
    schedule.slots = static_cast<int>(cuda::plan_capacity(args));
    schedule.segments = static_cast<int>(1 + random.below(5));
    const std::int64_t starts_count = rows * schedule.segments * schedule.slots;
    DeviceBuffer arrivals(intervals.size() * 4);
    DeviceBuffer successor(intervals.size() * 4);
    DeviceBuffer count(static_cast<std::size_t>(rows) * 4);
    DeviceBuffer starts(static_cast<std::size_t>(starts_count) * 4);
    schedule.arrivals = reinterpret_cast<std::int32_t*>(arrivals.data());
    schedule.successor = reinterpret_cast<std::int32_t*>(successor.data());
    schedule.count = reinterpret_cast<std::int32_t*>(count.data());
    schedule.starts = reinterpret_cast<std::int32_t*>(starts.data());
    const std::size_t bytes = cuda::slot_workspace_size(args);
    DeviceBuffer workspace(bytes);
    Execution execution;
    execution.workspace = workspace.data();
    execution.workspace_bytes = bytes;
    cuda::assign_slots(args, schedule, execution);

    const std::int64_t keys = rows * args.seqlen_k;
    const auto host_arrivals = download<std::int32_t>(arrivals, keys);
    const auto host_successor = download<std::int32_t>(successor, keys);
    const auto host_count = download<std::int32_t>(count, rows);
    const auto host_starts = download<std::int32_t>(starts, starts_count);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t begin = row * args.seqlen_k;
      expect_valid_slots(args, schedule, row, intervals.data() + begin,
                         host_arrivals.data() + begin, host_successor.data() + begin,
                         host_count[static_cast<std::size_t>(row)],
                         host_starts.data() + row * schedule.segments * schedule.slots);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_F(SmallCudaSlots, Random) { compare_slots(21, 12, 1500); }
TEST_F(CudaSlots, RandomLong) { compare_slots(22, 60, 30000); }

}  // namespace
}  // namespace flash_dmattn
