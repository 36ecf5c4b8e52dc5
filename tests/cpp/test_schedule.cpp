#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "flash_dmattn/flash_dmattn.h"
#include "selection/query_tile_lists.h"
#include "selection/schedule_contents.h"
#include "support/expect_invalid.h"
#include "support/random.h"
#include "support/run.h"

// Tests schedules on the CPU through the public functions: size, content, and the calls that they serve.
namespace flash_dmattn::testing {
namespace {

// Random intervals of a problem with 3 kv heads, and their schedule.
struct Scheduled {
  Problem problem;
  std::vector<KeyInterval> intervals;
  Visibility visibility;

  explicit Scheduled(std::int64_t seqlen_q = 300, std::int64_t seqlen_k = 400)
      : intervals(static_cast<std::size_t>(2 * 3 * seqlen_k)) {
    problem.batch = 2;
    problem.heads_q = 6;
    problem.heads_kv = 3;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_k = seqlen_k;
    problem.head_dim = 32;
    problem.dtype = DType::f32;
    problem.scale = 1;
    problem.causal = true;
    problem.intervals_shape = {2, 3};
    Random random(3);
    for (KeyInterval& interval : intervals) {
      interval = {static_cast<std::int32_t>(random.below(seqlen_q + 1)),
                  static_cast<std::int32_t>(random.below(seqlen_q + 1))};
    }
    visibility.intervals.data = intervals.data();  // dense, as by default
  }

  std::size_t size(Direction direction) const {
    return schedule_size(problem, visibility, direction, in_turn(1), "cpu");
  }

  Schedule build(std::span<std::byte> memory, const Execution& execution,
                 Direction direction = Direction::forward) const {
    const ScheduleCall call(problem, visibility, direction, execution, "cpu");
    GuardedBuffer workspace(call.workspace_size(), "workspace");
    return call.build(memory, workspace);
  }
};

TEST(Schedule, HasTileListsOfIntervals) {
  const Scheduled s;
  GuardedBuffer memory(s.size(Direction::forward), "schedule");
  const Schedule schedule = s.build(memory, in_turn(1));
  const ScheduleContents contents = ScheduleContents::of(schedule);
  ASSERT_EQ(contents.kind, ScheduleKind::query_tile_lists);
  const QueryTileLists actual = query_tile_lists(schedule, contents.tile_rows);

  TileListArgs args = tile_list_args(s.problem, s.visibility, contents.tile_rows);
  args.intervals.stride_batch = 3 * s.problem.seqlen_k;
  args.intervals.stride_head = s.problem.seqlen_k;
  const OwnedTileLists owned = make_tile_lists(args, in_turn(1));
  const QueryTileLists& expected = owned.lists;
  ASSERT_EQ(actual.tiles, expected.tiles);
  ASSERT_EQ(actual.stride_batch, expected.stride_batch);
  ASSERT_EQ(actual.stride_head, expected.stride_head);
  for (std::int64_t t = 0; t < args.lists(); ++t) {
    ASSERT_EQ(actual.count[t], expected.count[t]);
    ASSERT_EQ(actual.full[t], expected.full[t]);
    const std::int32_t* keys = expected.keys + expected.begin[t];
    ASSERT_TRUE(std::equal(keys, keys + expected.count[t], actual.keys + actual.begin[t]));
  }
}

TEST(Schedule, CpuScheduleServesBothDirections) {
  const Scheduled s;
  ASSERT_EQ(s.size(Direction::forward), s.size(Direction::backward));
  GuardedBuffer forward(s.size(Direction::forward), "schedule");
  GuardedBuffer backward(s.size(Direction::backward), "schedule");
  const Schedule schedule = s.build(forward, in_turn(1));
  EXPECT_TRUE(schedule.serves(Direction::forward));
  EXPECT_TRUE(schedule.serves(Direction::backward));
  s.build(backward, in_turn(1), Direction::backward);
  EXPECT_TRUE(std::equal(forward.data(), forward.data() + forward.size(), backward.data()));
}

TEST(Schedule, WorkerCountDoesNotChangeSchedule) {
  const Scheduled s;
  GuardedBuffer expected(s.size(Direction::forward), "schedule");
  s.build(expected, in_turn(1));
  for (const Execution& execution : {in_turn(5), on_threads(3), on_pool()}) {
    GuardedBuffer actual(s.size(Direction::forward), "schedule");
    s.build(actual, execution);
    EXPECT_TRUE(std::equal(actual.data(), actual.data() + actual.size(), expected.data()));
  }
}

TEST(Schedule, IsEmptyWithoutIntervalsOrQueries) {
  Scheduled s;
  s.problem.seqlen_q = 0;
  EXPECT_EQ(s.size(Direction::forward), 0u);
  EXPECT_TRUE(s.build({}, in_turn(1)).empty());
  s.problem.seqlen_q = 300;
  s.problem.intervals_shape = {};
  s.visibility = {};
  EXPECT_EQ(s.size(Direction::forward), 0u);
  EXPECT_TRUE(s.build({}, in_turn(1)).empty());
}

// Memory that is too small is not written past its end.
TEST(Schedule, ShortMemoryThrows) {
  const Scheduled s;
  const std::size_t bytes = s.size(Direction::forward);
  for (const std::size_t given : {std::size_t{0}, bytes / 8, bytes - workspace_alignment}) {
    GuardedBuffer memory(given, "schedule");
    SCOPED_TRACE(std::to_string(given) + " of " + std::to_string(bytes) + " bytes");
    expect_invalid([&] { s.build(memory, in_turn(1)); }, "memory");
  }
}

TEST(Schedule, UnalignedMemoryThrows) {
  const Scheduled s;
  GuardedBuffer memory(s.size(Direction::forward) + 8, "schedule");
  EXPECT_THROW(s.build(std::span<std::byte>(memory).subspan(8), in_turn(1)), InvalidArgument);
}

}  // namespace
}  // namespace flash_dmattn::testing
