#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda/device.h"
#include "cuda/schedule/schedule.h"
#include "cuda/schedule/slots/key_slots.h"
#include "cuda/selection/selection.h"
#include "device.h"
#include "least_bound.h"
#include "support/random.h"
#include "tile_list_comparison.h"

// Slots of hand-made intervals on the device.
namespace flash_dmattn::testing {
namespace {

class SmallCudaSlots : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    if (cuda::current_device().shared_bytes < cuda::slot_shared_bytes())
      GTEST_SKIP() << "slots take " << cuda::slot_shared_bytes() << " bytes of shared memory";
  }
};
class CudaSlots : public SmallCudaSlots {};

// Follows the slots of one row on the host and checks what key_slots.h promises of them.
void expect_valid_slots(const TileListArgs& args, const cuda::KeySlotShape& shape, std::int64_t row,
                        const KeyInterval* intervals, const std::int32_t* arrivals,
                        const std::int32_t* successor, std::int32_t count, std::int32_t used,
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
  std::vector<std::int64_t> of_two_tiles(static_cast<std::size_t>(tiles) + 1);  // differences
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    std::int64_t first = std::max<std::int64_t>(intervals[j].first, 0);
    if (args.causal) first = std::max(first, j - args.seqlen_k + args.seqlen_q);
    const std::int64_t last = std::min<std::int64_t>(intervals[j].last, args.seqlen_q);
    if (first >= last) continue;
    lives[static_cast<std::size_t>(j)] = {first / args.tile_rows, (last - 1) / args.tile_rows};
    ++visible;
    // A tile and the one before it see the key.
    ++of_two_tiles[static_cast<std::size_t>(first / args.tile_rows)];
    --of_two_tiles[static_cast<std::size_t>(std::min((last - 1) / args.tile_rows + 2, tiles))];
  }
  ASSERT_EQ(count, visible) << "row " << row;
  std::partial_sum(of_two_tiles.begin(), of_two_tiles.end(), of_two_tiles.begin());
  std::vector<std::int64_t> most_of_two(of_two_tiles.size());
  std::partial_sum(of_two_tiles.begin(), of_two_tiles.end(), most_of_two.begin(),
                   [](std::int64_t a, std::int64_t b) { return std::max(a, b); });
  ASSERT_EQ(used, most_of_two.back()) << "row " << row;
  ASSERT_LE(used, shape.slots);
  for (std::int32_t slot = 0; slot < shape.slots; ++slot) {
    std::vector<std::int32_t> start(static_cast<std::size_t>(shape.segments), -1);
    std::int64_t previous = -2;
    // A slot begins in the first tile that needs it.
    if (slot < used) {
      const std::int32_t first = starts[slot];
      ASSERT_GE(first, 0) << "slot " << slot;
      const auto tile = lives[static_cast<std::size_t>(arrivals[first])].first;
      ASSERT_LE(slot + 1, most_of_two[static_cast<std::size_t>(tile)]) << "slot " << slot;
      ASSERT_TRUE(tile == 0 || slot >= most_of_two[static_cast<std::size_t>(tile - 1)]);
    }
    for (std::int32_t n = slot < used ? starts[slot] : -1; n >= 0; n = successor[n]) {
      Life& life = lives[static_cast<std::size_t>(arrivals[n])];
      ASSERT_FALSE(life.placed) << "key " << arrivals[n] << " has two slots";
      ASSERT_LT(previous + 1, life.first) << "slot " << slot << " does not rest between two keys";
      life.placed = true;
      previous = life.last;
      for (std::size_t g = 0; g < start.size(); ++g) {
        const auto segment_begin = static_cast<std::int64_t>(g) * segment_tiles;
        if (start[g] < 0 && life.last >= segment_begin) start[g] = n;
      }
    }
    for (std::size_t g = 0; g < start.size(); ++g) {
      ASSERT_EQ(starts[static_cast<std::int64_t>(g) * shape.slots + slot], start[g])
          << "slot " << slot << ", segment " << g;
    }
  }
  for (const Life& life : lives) ASSERT_EQ(life.placed, life.last >= 0);
  for (std::int64_t n = count; n < args.seqlen_k; ++n) ASSERT_EQ(arrivals[n], -1);
}

void compare_slots(std::uint64_t seed, int rounds, std::int64_t longest,
                   std::int64_t most_tile_rows = 130) {
  Random random(seed);
  int with_slots = 0;
  for (int round = 0; round < rounds; ++round) {
    TileListArgs args;
    args.batch = 1 + random.below(2);
    args.heads = 1 + random.below(4);
    args.seqlen_q = 1 + random.below(longest);
    args.seqlen_k = random.below(2) == 0 ? args.seqlen_q : 1 + random.below(longest);
    args.tile_rows = 1 + random.below(most_tile_rows);
    args.causal = random.below(2) == 0;
    const std::int64_t rows = args.batch * args.heads;
    // Every third call has heads with few keys, and every other of these heads has none.
    const bool ragged = round % 3 == 1;
    const std::int64_t longest_life = 1 + random.below(400);
    std::vector<KeyInterval> intervals(static_cast<std::size_t>(rows * args.seqlen_k));
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      const auto j = static_cast<std::int64_t>(i) % args.seqlen_k;
      const std::int64_t first =
          round % 2 == 0 ? j - args.seqlen_k + args.seqlen_q : random.below(args.seqlen_q);
      const std::int64_t life = round % 2 == 0 ? longest_life : random.below(longest_life + 1);
      const auto row = static_cast<std::int64_t>(i) / args.seqlen_k;
      const bool seen = !ragged || row % 4 == 0 || (row % 2 == 0 && random.below(20) == 0);
      intervals[i] = {static_cast<std::int32_t>(first),
                      static_cast<std::int32_t>(first + (seen ? life : 0))};
    }
    const DeviceBuffer on_device(intervals);
    args.intervals = {on_device.as<KeyInterval>(), args.heads * args.seqlen_k, args.seqlen_k};
    const Problem problem = problem_of(args);
    args.bound = round % 3 == 0 ? measured_on_both(args, intervals)
                                : least_bound(on_host(args, intervals).intervals, problem);
    const Visibility visibility{.intervals = args.intervals, .bound = args.bound};
    const cuda::SlotGeometry geometry{.tile_rows = args.tile_rows,
                                      .segments = round % 4 == 0 ? 64 : 1 + random.below(5)};
    cuda::SlotSchedule schedule(problem, visibility, geometry);
    TileListArgs two_tiles = args;
    two_tiles.tile_rows *= 2;
    const std::int64_t slot_count = cuda::tile_list_capacity(two_tiles);
    if (2 * slot_count > args.seqlen_k) {
      ASSERT_FALSE(schedule.exists());
      continue;
    }
    ++with_slots;
    cuda::WorkspaceAllocator counted(nullptr);
    schedule.place(counted);
    const DeviceBuffer memory(counted.bytes());
    cuda::WorkspaceAllocator on_gpu(memory.data());
    schedule.place(on_gpu);
    schedule.build({});

    auto host = download<std::byte>(memory, static_cast<std::int64_t>(counted.bytes()));
    cuda::WorkspaceAllocator downloaded(host.data());
    schedule.place(downloaded);
    const cuda::KeySlots slots = schedule.slots();
    ASSERT_EQ(slots.shape.slots, slot_count);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t begin = row * args.seqlen_k;
      expect_valid_slots(args, slots.shape, row, intervals.data() + begin, slots.arrivals + begin,
                         slots.successor + begin, slots.count[row], slots.used[row],
                         slots.starts + row * slots.shape.segments * slots.shape.slots);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(with_slots, rounds / 4);
}

TEST_F(SmallCudaSlots, NoVisibleKeyGivesNoSchedule) {
  const Problem problem = problem_of({.batch = 1, .heads = 1, .seqlen_q = 300, .seqlen_k = 300});
  const std::vector<KeyInterval> intervals(300);
  const Visibility visibility{.intervals = {.data = intervals.data()}, .bound = {.base = 0}};
  EXPECT_FALSE(cuda::SlotSchedule(problem, visibility, {.tile_rows = 64, .segments = 8}).exists());
}

TEST_F(SmallCudaSlots, RandomIntervalsGiveValidSlots) { compare_slots(21, 12, 1500); }
TEST_F(SmallCudaSlots, IntervalsOfManyTilesGiveValidSlots) { compare_slots(23, 12, 9000, 2); }
TEST_F(CudaSlots, LongRandomIntervalsGiveValidSlots) { compare_slots(22, 60, 30000); }
TEST_F(CudaSlots, TilesBeyond16BitsGiveValidSlots) { compare_slots(24, 8, 400000, 3); }

}  // namespace
}  // namespace flash_dmattn::testing
