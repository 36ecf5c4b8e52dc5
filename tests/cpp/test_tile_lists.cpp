#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "common/query_tile_lists.h"
#include "flash_dmattn/error.h"
#include "flash_dmattn/selection.h"
#include "support/expect_invalid.h"
#include "support/random.h"
#include "support/run.h"

namespace flash_dmattn::testing {
namespace {

// Intervals [batch, heads, Sk], and the arguments that refer to them.
struct Intervals {
  TileListArgs args;
  std::vector<KeyInterval> data;

  Intervals(std::int64_t batch, std::int64_t heads, std::int64_t seqlen_q, std::int64_t seqlen_k,
            std::int64_t tile_rows, bool causal = false)
      : data(static_cast<std::size_t>(batch * heads * seqlen_k)) {
    args.batch = batch;
    args.heads = heads;
    args.seqlen_q = seqlen_q;
    args.seqlen_k = seqlen_k;
    args.tile_rows = tile_rows;
    args.causal = causal;
    args.intervals = {data.data(), batch == 1 ? 0 : heads * seqlen_k, heads == 1 ? 0 : seqlen_k};
  }

  // Sets the interval of key j to interval(j) in every row.
  template <class Interval>
  void fill(const Interval& interval) {
    for (std::size_t n = 0; n < data.size(); ++n) {
      const auto [first, last] = interval(static_cast<std::int64_t>(n) % args.seqlen_k);
      data[n] = {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)};
    }
  }
};

using Pair = std::pair<std::int64_t, std::int64_t>;

// The keys of a tile by a test of every (query, key): the full keys, then the partial keys.
struct TileKeys {
  std::vector<std::int32_t> full, partial;
};

TileKeys keys_of(const TileListArgs& args, std::int64_t b, std::int64_t h, std::int64_t tile) {
  TileKeys keys;
  const std::int64_t begin = tile * args.tile_rows;
  const std::int64_t end = std::min(begin + args.tile_rows, args.seqlen_q);
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    std::int64_t seen = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const KeyInterval* interval = args.intervals.data;
      bool visible = !args.causal || j <= i + args.seqlen_k - args.seqlen_q;
      if (interval != nullptr) {
        interval += b * args.intervals.stride_batch + h * args.intervals.stride_head + j;
        visible = visible && interval->first <= i && i < interval->last;
      }
      seen += visible ? 1 : 0;
    }
    if (seen == 0) continue;
    const bool counts_as_full = seen == end - begin && !args.by_position;
    (counts_as_full ? keys.full : keys.partial).push_back(std::int32_t(j));
  }
  return keys;
}

void expect_as_defined(const TileListArgs& args) {
  const OwnedTileLists owned = make_tile_lists(args, sequential_execution(1));
  const QueryTileLists& lists = owned.lists;
  ASSERT_EQ(lists.tile_rows, args.tile_rows);
  ASSERT_EQ(lists.tiles, (args.seqlen_q + args.tile_rows - 1) / args.tile_rows);
  std::int64_t entries = 0;
  for (std::int64_t b = 0; b < args.batch; ++b) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      for (std::int64_t t = 0; t < lists.tiles; ++t) {
        const TileKeys expected = keys_of(args, b, h, t);
        const std::int64_t at = b * lists.stride_batch + h * lists.stride_head + t;
        const std::int32_t* keys = lists.keys + lists.begin[at];
        const std::string where = "batch " + std::to_string(b) + ", head " + std::to_string(h) +
                                  ", tile " + std::to_string(t);
        ASSERT_EQ(lists.begin[at], entries) << where;
        ASSERT_EQ(std::vector<std::int32_t>(keys, keys + lists.full[at]), expected.full) << where;
        ASSERT_EQ(std::vector<std::int32_t>(keys + lists.full[at], keys + lists.count[at]),
                  expected.partial)
            << where;
        entries += lists.count[at];
      }
    }
  }
  EXPECT_EQ(tile_list_entries(Device::cpu, args, sequential_execution(1)), entries);
}

// Expects that the bound holds for consecutive tiles.
void expect_bound_holds(const TileListArgs& args, const KeyBound& bound) {
  ASSERT_TRUE(bound.known());
  const OwnedTileLists owned = make_tile_lists(args, sequential_execution(1));
  const QueryTileLists& lists = owned.lists;
  for (std::int64_t row = 0; row < args.batch * args.heads; ++row) {
    for (std::int64_t first = 0; first < lists.tiles; ++first) {
      std::set<std::int32_t> seen;
      for (std::int64_t t = first; t < lists.tiles; ++t) {
        const std::int64_t at = row * lists.tiles + t;
        seen.insert(lists.keys + lists.begin[at], lists.keys + lists.begin[at] + lists.count[at]);
        ASSERT_LE(static_cast<std::int64_t>(seen.size()),
                  bound.base + bound.per_query * (t + 1 - first) * lists.tile_rows);
      }
    }
  }
}

void expect_bound(const TileListArgs& args) {
  const Execution execution = sequential_execution(2);
  const Workspace workspace(measure_workspace_size(Device::cpu, args, execution), execution);
  expect_bound_holds(args, measure_key_bound(Device::cpu, args, workspace));
}

// Slots need a bound for any two neighbouring tiles of 64 queries, lists for tiles of 128.
TEST(TileLists, MeasuredBoundHoldsForTilesOf64Queries) {
  for (const std::int64_t chunk : {60, 64, 100, 128, 192, 256, 300}) {
    Intervals intervals(1, 1, 2048, 2048, 64);
    intervals.fill([&](std::int64_t j) { return Pair{j, (j / chunk + 1) * chunk}; });
    const MeasureArgs args{.batch = 1,
                           .heads = 1,
                           .seqlen_q = 2048,
                           .seqlen_k = 2048,
                           .intervals = intervals.args.intervals};
    const Execution execution = sequential_execution(2);
    const Workspace workspace(measure_workspace_size(args, execution), execution);
    expect_bound_holds(intervals.args, measure_key_bound(args, workspace));
  }
}

TEST(TileLists, RandomIntervalsMatchDefinition) {
  Random random(1);
  for (int round = 0; round < 400; ++round) {
    const std::int64_t seqlen_q = random.below(70);
    const std::int64_t seqlen_k = random.below(70);
    Intervals intervals(1 + random.below(2), 1 + random.below(3), seqlen_q, seqlen_k,
                        1 + random.below(20), random.below(2) == 0);
    // Intervals may lie outside of [0, Sq), be empty, or be reversed.
    for (KeyInterval& interval : intervals.data) {
      interval = {static_cast<std::int32_t>(random.below(seqlen_q + 20) - 10),
                  static_cast<std::int32_t>(random.below(seqlen_q + 20) - 10)};
    }
    expect_as_defined(intervals.args);
    expect_bound(intervals.args);
    intervals.args.by_position = true;
    expect_as_defined(intervals.args);
    if (HasFatalFailure()) return;
  }
}

TEST(TileLists, SlidingWindowMeasuresTightBound) {
  Intervals intervals(1, 1, 640, 640, 64, false);
  intervals.fill([](std::int64_t j) { return Pair{j, j + 100}; });
  const Execution execution = sequential_execution(1);
  const Workspace workspace(measure_workspace_size(Device::cpu, intervals.args, execution),
                            execution);
  const KeyBound bound = measure_key_bound(Device::cpu, intervals.args, workspace);
  EXPECT_EQ(bound.base, 99);
  EXPECT_EQ(bound.per_query, 1);
}

TEST(TileLists, HandmadeIntervalsMatchDefinition) {
  for (const std::int64_t tile_rows : {1, 5, 16, 64, 100, 1000}) {
    for (const bool causal : {false, true}) {
      for (const auto& [seqlen_q, seqlen_k] : {Pair{100, 100}, Pair{33, 100}, Pair{100, 33}}) {
        SCOPED_TRACE(std::to_string(tile_rows) + " rows a tile, " + std::to_string(seqlen_q) +
                     " queries, " + std::to_string(seqlen_k) + " keys, causal " +
                     std::to_string(causal));
        Intervals intervals(1, 2, seqlen_q, seqlen_k, tile_rows, causal);
        const std::int64_t rows = seqlen_q;
        const std::int64_t shift = seqlen_k - seqlen_q;
        const auto check = [&](auto interval) {
          intervals.fill(interval);
          expect_as_defined(intervals.args);
        };
        check([&](std::int64_t) { return Pair{0, rows}; });                     // all visible
        check([&](std::int64_t) { return Pair{0, 0}; });                        // none visible
        check([&](std::int64_t j) { return Pair{j - shift, j - shift + 9}; });  // sliding window
        check([&](std::int64_t j) { return Pair{j < 20 ? 0 : j - shift, rows}; });   // prefix
        check([&](std::int64_t j) { return Pair{j / 13 * 13, j / 13 * 13 + 13}; });  // packed
        check([&](std::int64_t j) { return Pair{0, j < 7 ? 0 : rows}; });            // padding
        check([&](std::int64_t j) { return Pair{rows - j, rows}; });                 // first falls
        check([&](std::int64_t j) { return Pair{j % 3 * 10, j % 5 * 20}; });         // repeated
        check([&](std::int64_t j) { return Pair{j, j + 1}; });  // one query each
        intervals.args.intervals = {};                          // no intervals
        expect_as_defined(intervals.args);
      }
    }
  }
}

TEST(TileLists, SharedIntervalsGiveStrideZero) {
  Intervals intervals(1, 1, 10, 10, 4);
  const OwnedTileLists shared = make_tile_lists(intervals.args, sequential_execution(1));
  EXPECT_EQ(shared.lists.stride_batch, 0);
  EXPECT_EQ(shared.lists.stride_head, 0);
  Intervals many(2, 3, 10, 10, 4);
  const OwnedTileLists separate = make_tile_lists(many.args, sequential_execution(1));
  EXPECT_EQ(separate.lists.stride_batch, 9);
  EXPECT_EQ(separate.lists.stride_head, 3);
}

bool same_bytes(const GuardedBuffer& a, const GuardedBuffer& b) {
  return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data());
}

TEST(TileLists, WorkerCountDoesNotChangeLists) {
  Random random(2);
  for (const std::int64_t heads : {1, 3, 8}) {
    Intervals intervals(1, heads, 1000, 900, 17, true);
    for (KeyInterval& interval : intervals.data) {
      interval = {static_cast<std::int32_t>(random.below(1000)),
                  static_cast<std::int32_t>(random.below(1000))};
    }
    const OwnedTileLists expected = make_tile_lists(intervals.args, sequential_execution(1));
    for (const Execution& execution : {sequential_execution(5), threaded_execution(2),
                                       threaded_execution(23), pooled_execution()}) {
      const OwnedTileLists actual = make_tile_lists(intervals.args, execution);
      EXPECT_TRUE(same_bytes(actual.begin, expected.begin));
      EXPECT_TRUE(same_bytes(actual.count, expected.count));
      EXPECT_TRUE(same_bytes(actual.full, expected.full));
      EXPECT_TRUE(same_bytes(actual.keys, expected.keys));
    }
  }
}

class TileListArguments : public ::testing::Test {
 protected:
  TileListArguments() {
    intervals_.fill([](std::int64_t) { return Pair{0, 6}; });
    execution_.workspace = workspace_.data();
    execution_.workspace_bytes = workspace_.size();
  }

  void expect_rejected(const std::string& argument) {
    expect_invalid([&] { build_tile_lists(Device::cpu, args_, buffers_, execution_); }, argument);
    EXPECT_EQ(begin_[0], -7);
    EXPECT_EQ(count_[0], -7);
    EXPECT_EQ(full_[0], -7);
    EXPECT_EQ(keys_[0], -7);
  }

  Intervals intervals_{1, 1, 6, 5, 4};
  std::int64_t begin_[2] = {-7, -7};
  std::int32_t count_[2] = {-7, -7};
  std::int32_t full_[2] = {-7, -7};
  std::int32_t keys_[10] = {-7};
  TileListArgs args_ = intervals_.args;
  TileListBuffers buffers_{begin_, count_, full_, keys_};
  GuardedBuffer workspace_{4096, "workspace"};
  Execution execution_;
};

TEST_F(TileListArguments, InvalidArgumentThrows) {
  const TileListArgs good = args_;
  const Execution good_execution = execution_;
  const auto with = [&](auto change, const std::string& argument) {
    args_ = good;
    execution_ = good_execution;
    change();
    expect_rejected(argument);
  };
  with([&] { args_.tile_rows = 0; }, "tile_rows");
  with([&] { args_.batch = -1; }, "batch");
  with([&] { args_.heads = -1; }, "heads");
  with([&] { args_.seqlen_q = -1; }, "seqlen_q");
  with([&] { args_.seqlen_k = std::int64_t{1} << 31; }, "seqlen_k");
  constexpr std::int64_t longest = (std::int64_t{1} << 31) - 1;
  with([&] { args_.batch = args_.heads = args_.seqlen_q = longest, args_.tile_rows = 1; }, "batch");
  with([&] { execution_.workers = 0; }, "execution.workers");
  with([&] { execution_.workspace_bytes = 1; }, "execution.workspace_bytes");
}

TEST_F(TileListArguments, NothingVisibleAllowsNullKeys) {
  intervals_.fill([](std::int64_t) { return Pair{0, 0}; });
  buffers_.keys = nullptr;
  build_tile_lists(Device::cpu, args_, buffers_, execution_);
  EXPECT_EQ(count_[0], 0);
}

}  // namespace
}  // namespace flash_dmattn::testing
