#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "common/arguments.h"
#include "common/tasks.h"
#include "cpu/selection/selection.h"

// Two passes over the intervals of a row. The first counts the keys of each tile: a key touches a
// range of tiles and fills a range within it, so both counts are running sums of +1 where a range
// begins and -1 where it ends. The second appends every key to the lists of its tiles, in ascending
// order, with one cursor for full keys and one for partial keys.
namespace flash_dmattn::cpu {
namespace {

// Tiles [touched_begin, touched_end) see the key; for [full_begin, full_end) all rows do.
struct TileRanges {
  std::int64_t touched_begin = 0;
  std::int64_t touched_end = 0;
  std::int64_t full_begin = 0;
  std::int64_t full_end = 0;
};

// The places of a tile's next full and next partial key.
struct Cursors {
  std::int64_t full;
  std::int64_t partial;
};

// The intervals of one (b, h), in tiles.
class Row {
 public:
  Row(const TileListArgs& args, std::int64_t row)
      : seqlen_q_(args.seqlen_q),
        shift_(args.seqlen_k - args.seqlen_q),
        tile_rows_(static_cast<std::uint32_t>(std::min(args.tile_rows, args.seqlen_q))),
        causal_(args.causal),
        by_position_(args.by_position) {
    if (args.intervals.data == nullptr) return;
    const std::int64_t b = row / args.heads;
    const std::int64_t h = row % args.heads;
    intervals_ =
        args.intervals.data + b * args.intervals.stride_batch + h * args.intervals.stride_head;
  }

  // The queries [first, last) that see a key, within [0, Sq); last <= first if no query does.
  KeyInterval queries_of(std::int64_t key) const {
    std::int64_t first = 0;
    std::int64_t last = seqlen_q_;
    if (intervals_ != nullptr) {
      first = std::max<std::int64_t>(intervals_[key].first, 0);
      last = std::min<std::int64_t>(intervals_[key].last, seqlen_q_);
    }
    if (causal_) first = std::max(first, key - shift_);
    return {static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)};
  }

  TileRanges tiles_of(KeyInterval queries) const {
    if (queries.first >= queries.last) return {};
    const auto first = static_cast<std::uint32_t>(queries.first);  // 32-bit divisions are cheaper
    const auto last = static_cast<std::uint32_t>(queries.last);
    TileRanges tiles;
    tiles.touched_begin = first / tile_rows_;
    tiles.touched_end = (last - 1) / tile_rows_ + std::int64_t{1};
    // The last tile may be short; a key that all its rows see fills it.
    tiles.full_begin = tiles.touched_begin + (first % tile_rows_ != 0 ? 1 : 0);
    tiles.full_end = queries.last == seqlen_q_ ? tiles.touched_end : last / tile_rows_;
    tiles.full_end = std::max(tiles.full_begin, tiles.full_end);
    if (by_position_) tiles.full_begin = tiles.full_end = tiles.touched_end;
    return tiles;
  }

 private:
  const KeyInterval* intervals_ = nullptr;
  std::int64_t seqlen_q_;
  std::int64_t shift_;  // position of query 0
  std::uint32_t tile_rows_;
  bool causal_;
  bool by_position_;
};

void add_range(std::int32_t* differences, std::int64_t tiles, std::int64_t begin,
               std::int64_t end) {
  if (begin >= end) return;
  ++differences[begin];
  if (end < tiles) --differences[end];
}

void count_row(const TileListArgs& args, std::int64_t row, const TileListBuffers& buffers) {
  const std::int64_t tiles = args.tiles();
  std::int32_t* count = buffers.count + row * tiles;
  std::int32_t* full = buffers.full + row * tiles;
  std::fill(count, count + tiles, 0);
  std::fill(full, full + tiles, 0);
  const Row intervals(args, row);
  for (std::int64_t key = 0; key < args.seqlen_k; ++key) {
    const TileRanges ranges = intervals.tiles_of(intervals.queries_of(key));
    add_range(count, tiles, ranges.touched_begin, ranges.touched_end);
    add_range(full, tiles, ranges.full_begin, ranges.full_end);
  }
  for (std::int64_t t = 1; t < tiles; ++t) {
    count[t] += count[t - 1];
    full[t] += full[t - 1];
  }
}

// Fills the lists of tiles [begin, end) of a row. `cursors` has one entry for each tile of the row.
void fill_tiles(const TileListArgs& args, std::int64_t row, std::int64_t begin, std::int64_t end,
                const TileListBuffers& buffers, Cursors* cursors) {
  const std::int64_t tiles = args.tiles();
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int64_t start = buffers.begin[row * tiles + t];
    cursors[t] = {start, start + buffers.full[row * tiles + t]};
  }
  const Row intervals(args, row);
  for (std::int64_t key = 0; key < args.seqlen_k; ++key) {
    const KeyInterval queries = intervals.queries_of(key);
    if (queries.last <= begin * args.tile_rows || queries.first >= end * args.tile_rows) continue;
    const TileRanges ranges = intervals.tiles_of(queries);
    const auto clip = [&](std::int64_t tile) { return std::clamp(tile, begin, end); };
    const auto value = static_cast<std::int32_t>(key);
    const std::int64_t full_begin = clip(ranges.full_begin);
    const std::int64_t full_end = clip(ranges.full_end);
    const std::int64_t touched_end = clip(ranges.touched_end);
    std::int64_t t = clip(ranges.touched_begin);
    for (; t < full_begin; ++t) buffers.keys[cursors[t].partial++] = value;
    for (; t < full_end; ++t) buffers.keys[cursors[t].full++] = value;
    for (; t < touched_end; ++t) buffers.keys[cursors[t].partial++] = value;
  }
}

// The numbers of keys of a row that become visible in a tile, and that are no longer visible when it begins.
struct Change {
  std::int64_t entered;
  std::int64_t left;
};

// The largest number of keys that are visible before a tile's own queries add new keys, and the largest
// number of new keys.
struct Most {
  std::int64_t before;
  std::int64_t entered;
};

// Measures a row. Keys that are visible from query 0 on count as visible before the first tile.
Most measure_row(const TileListArgs& args, std::int64_t row, Change* changes) {
  const std::int64_t tiles = args.tiles();
  std::fill(changes, changes + tiles, Change{0, 0});
  const Row intervals(args, row);
  std::int64_t before = 0;
  for (std::int64_t key = 0; key < args.seqlen_k; ++key) {
    const KeyInterval queries = intervals.queries_of(key);
    const TileRanges ranges = intervals.tiles_of(queries);
    if (ranges.touched_begin == ranges.touched_end) continue;
    ++(queries.first == 0 ? before : changes[ranges.touched_begin].entered);
    if (ranges.touched_end < tiles) ++changes[ranges.touched_end].left;
  }
  Most most{0, 0};
  for (std::int64_t t = 0; t < tiles; ++t) {
    before -= changes[t].left;
    most = {std::max(most.before, before), std::max(most.entered, changes[t].entered)};
    before += changes[t].entered;
  }
  return most;
}

void raise(std::atomic<std::int64_t>& most, std::int64_t value) {
  std::int64_t seen = most.load(std::memory_order_relaxed);
  while (seen < value && !most.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// Rows are split when there are too few to keep the workers busy. Every segment reads all intervals of its
// row again, so there are at most two tasks per worker.
std::int64_t segments_per_row(const TileListArgs& args, const Execution& execution) {
  const std::int64_t rows = args.batch * args.heads;
  const std::int64_t wanted = execution.workers == 1 ? 1 : 2 * std::int64_t{execution.workers};
  return std::clamp<std::int64_t>((wanted + rows - 1) / rows, 1, args.tiles());
}

void validate(const TileListArgs& args, const Execution& execution) {
  require_length("batch", args.batch);
  require_length("heads", args.heads);
  require_length("seqlen_q", args.seqlen_q);
  require_length("seqlen_k", args.seqlen_k);
  require_rows(args.batch, args.heads, std::max(args.seqlen_q, args.seqlen_k));
  require_workers(execution);
  require_range("tile_rows", args.tile_rows, 1, std::numeric_limits<std::int32_t>::max());
}

}  // namespace

std::size_t tile_lists_workspace_size(const TileListArgs& args, const Execution& execution) {
  validate(args, execution);
  return static_cast<std::size_t>(args.batch * args.heads * args.tiles()) * sizeof(Cursors);
}

std::int64_t tile_list_entries(const TileListArgs& args, const Execution& execution) {
  validate(args, execution);
  std::atomic<std::int64_t> total{0};
  for_each_task(execution, args.batch * args.heads, [&](std::int64_t row, int) {
    const Row intervals(args, row);
    std::int64_t entries = 0;
    for (std::int64_t key = 0; key < args.seqlen_k; ++key) {
      const TileRanges ranges = intervals.tiles_of(intervals.queries_of(key));
      entries += ranges.touched_end - ranges.touched_begin;
    }
    total.fetch_add(entries, std::memory_order_relaxed);
  });
  return total.load();
}

QueryTileLists build_tile_lists(const TileListArgs& args, const TileListBuffers& buffers,
                                std::int64_t capacity, const Execution& execution) {
  const std::size_t bytes = tile_lists_workspace_size(args, execution);
  const std::int64_t rows = args.batch * args.heads;
  const std::int64_t tiles = args.tiles();
  require_workspace(execution, bytes);
  if (args.lists() == 0) return view_of(buffers, args);

  for_each_task(execution, rows, [&](std::int64_t row, int) { count_row(args, row, buffers); });
  std::int64_t entries = 0;
  for (std::int64_t t = 0; t < rows * tiles; ++t) {
    buffers.begin[t] = entries;
    entries += buffers.count[t];
  }
  if (entries > capacity) {
    throw InvalidArgument("visibility.intervals", std::to_string(entries) + " keys in all tiles",
                          "at most " + std::to_string(capacity) + ", as when the call was made");
  }

  auto* cursors = static_cast<Cursors*>(execution.workspace);
  const std::int64_t segments = segments_per_row(args, execution);
  for_each_task(execution, rows * segments, [&](std::int64_t task, int) {
    const std::int64_t row = task / segments;
    const std::int64_t segment = task % segments;
    fill_tiles(args, row, tiles * segment / segments, tiles * (segment + 1) / segments, buffers,
               cursors + row * tiles);
  });
  return view_of(buffers, args);
}

std::size_t measure_workspace_size(const TileListArgs& args, const Execution& execution) {
  validate(args, execution);
  return static_cast<std::size_t>(args.batch * args.heads * args.tiles()) * sizeof(Change);
}

KeyBound measure_key_bound(const TileListArgs& args, const Execution& execution) {
  require_workspace(execution, cpu::measure_workspace_size(args, execution));
  const std::int64_t tiles = args.tiles();
  if (tiles == 0) return {0, 0};
  auto* changes = static_cast<Change*>(execution.workspace);
  std::atomic<std::int64_t> before{0};
  std::atomic<std::int64_t> entered{0};
  for_each_task(execution, args.batch * args.heads, [&](std::int64_t row, int) {
    const Most most = measure_row(args, row, changes + row * tiles);
    raise(before, most.before);
    raise(entered, most.entered);
  });
  return {.base = before.load(),
          .per_query = (entered.load() + args.tile_rows - 1) / args.tile_rows};
}

}  // namespace flash_dmattn::cpu
