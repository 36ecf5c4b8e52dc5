#include "cuda/schedule/slots/long_rows.h"

#include <algorithm>
#include <cstdint>

#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/schedule/key_tree.cuh"
#include "cuda/schedule/slots/tile_use.cuh"

namespace flash_dmattn::cuda::long_rows {
namespace {

// An event of a row: its tile, and below that the number by which events of one tile are ordered. Keys that no query
// sees have the tile after the last, so they are the last events of a row.
struct EventLayout {
  int number_bits = 0;
  int tile_bits = 0;

  __device__ std::uint64_t pack(int row, int tile, int number) const {
    const auto row_tile =
        static_cast<std::uint64_t>(row) << tile_bits | static_cast<std::uint64_t>(tile);
    return row_tile << number_bits | static_cast<std::uint64_t>(number);
  }
  __device__ int number(std::uint64_t event) const {
    return static_cast<int>(event & ((std::uint64_t{1} << number_bits) - 1));
  }
  __device__ int tile(std::uint64_t event) const {
    return static_cast<int>(event >> number_bits & ((std::uint64_t{1} << tile_bits) - 1));
  }
};

struct Rows {
  key_tree::AllKeys<key_tree::LongRowEntry> keys;
  KeySlotBuffers out;
  EventLayout layout;
  int rows = 0;
  int seqlen_k = 0;
  int tiles = 0;
  int segment_tiles = 1;
  int slots = 0;
  int segments = 1;

  // A head is a key with which a slot starts a segment.
  int max_heads = 0;
  std::int32_t* head_count = nullptr;     // [rows]
  std::int32_t* heads = nullptr;          // [rows, max_heads] arrival numbers, in any order
  std::int32_t* last_segment = nullptr;   // [rows, Sk] by arrival number, as the next array
  std::int32_t* previous_head = nullptr;  // the slot's previous head; -1 if there is none
  TileUse* use = nullptr;                 // [rows, tiles]

  long all_keys() const { return long{rows} * seqlen_k; }
  long all_heads() const { return long{rows} * max_heads; }
  long all_tiles() const { return long{rows} * tiles; }
  long all_starts() const { return long{rows} * segments * slots; }
  __device__ std::int64_t row_begin(int row) const { return std::int64_t{row} * seqlen_k; }
  __device__ TileUse* row_use(int row) const { return use + std::int64_t{row} * tiles; }
  __device__ RowUse use_of(int row) const { return {row_use(row), tiles}; }
  // The first tile that sees an arrival, which is number `item` of all rows.
  __device__ int arrival_tile(int row, long item) const {
    return tiles_of(row, out.arrivals[item]).first_touched();
  }

  __device__ key_tree::HalfTiles tiles_of(int row, int key) const {
    return keys.items(row, 0)[key].within(0, tiles);
  }
  __device__ void add_head(int row, int arrival) const {
    const int place = atomicAdd(&head_count[row], 1);
    if (place < max_heads) heads[std::int64_t{row} * max_heads + place] = arrival;
  }
};

// Makes the arrivals in the order of keys.
struct PackArrivals {
  Rows rows;
  std::uint64_t* events;  // [rows, Sk]

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.seqlen_k);
    const int key = static_cast<int>(item % rows.seqlen_k);
    const key_tree::HalfTiles tiles = rows.tiles_of(row, key);
    const bool is_seen = tiles.first_touched() < tiles.end_touched();
    events[item] = rows.layout.pack(row, is_seen ? tiles.first_touched() : rows.tiles, key);
  }
};

// Stores the sorted arrivals, and makes the departures in their order.
struct ListArrivals {
  Rows rows;
  const std::uint64_t* arrivals;  // [rows, Sk]
  std::uint64_t* departures;      // [rows, Sk]

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.seqlen_k);
    const int number = static_cast<int>(item % rows.seqlen_k);
    const bool is_seen = this->is_seen(item);
    const int key = rows.layout.number(arrivals[item]);
    const int last = is_seen ? rows.tiles_of(row, key).end_touched() - 1 : rows.tiles;
    departures[item] = rows.layout.pack(row, last, number);
    rows.last_segment[item] = last / rows.segment_tiles;
    rows.previous_head[item] = -1;
    rows.out.arrivals[item] = is_seen ? key : -1;
    if (number == 0) rows.head_count[row] = 0;
    if (number == 0 && !is_seen) rows.out.count[row] = 0;
    const bool is_last = number + 1 == rows.seqlen_k || !this->is_seen(item + 1);
    if (is_seen && is_last) rows.out.count[row] = number + 1;
  }

 private:
  __device__ bool is_seen(long item) const { return rows.layout.tile(arrivals[item]) < rows.tiles; }
};

// Counts the arrivals so far, and those that did not depart before the previous tile, at the last arrival of each tile.
// `rows.use` has been cleared.
struct CountSlots {
  Rows rows;
  const std::uint64_t* departures;  // [rows, Sk]

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.seqlen_k);
    const int number = static_cast<int>(item % rows.seqlen_k);
    const int count = rows.out.count[row];
    if (number >= count) return;
    const int tile = rows.arrival_tile(row, item);
    if (number + 1 < count && rows.arrival_tile(row, item + 1) == tile) return;
    const std::uint64_t* const row_departures = departures + rows.row_begin(row);
    int departed = 0;
    for (int end = count; departed < end;) {
      const int middle = departed + (end - departed) / 2;
      rows.layout.tile(row_departures[middle]) + 1 < tile ? departed = middle + 1 : end = middle;
    }
    rows.row_use(row)[tile] = {min(number + 1 - departed, rows.slots), number + 1};
  }
};

// Turns the counts of each tile into the most of all tiles up to it. A block has a row.
struct ScanUse {
  using Params = Rows;
  static constexpr int threads = 512;
  static constexpr int min_blocks = 1;
  struct Most {
    __device__ TileUse operator()(const TileUse& a, const TileUse& b) const {
      return {max(a.used, b.used), max(a.arrived, b.arrived)};
    }
  };
  using Scan = cub::BlockScan<TileUse, threads>;
  using SharedStorage = typename Scan::TempStorage;

  __device__ void operator()(const Params& rows, SharedStorage& shared) const {
    const auto row = static_cast<int>(blockIdx.x);
    TileUse* const use = rows.row_use(row);
    TileUse before{0, 0};
    for (int first = 0; first < rows.tiles; first += threads) {
      const int tile = first + static_cast<int>(threadIdx.x);
      TileUse through = tile < rows.tiles ? use[tile] : TileUse{0, 0};
      TileUse all;
      Scan(shared).InclusiveScan(through, through, Most{}, all);
      if (tile < rows.tiles) use[tile] = Most{}(before, through);
      before = Most{}(before, all);
      __syncthreads();  // the scan's memory is used again
    }
    if (threadIdx.x == 0) rows.out.used[row] = before.used;
  }
};

// Finds each key's successor from the sorted departures, and the heads.
struct LinkKeys {
  Rows rows;
  const std::uint64_t* departures;  // [rows, Sk]

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.seqlen_k);
    const int departure = static_cast<int>(item % rows.seqlen_k);
    const int count = rows.out.count[row];
    if (departure >= count) return;
    const RowUse use = rows.use_of(row);
    if (departure < rows.out.used[row])
      rows.add_head(row, use.first_arrival(departure));  // of a slot
    const std::int64_t row_begin = rows.row_begin(row);
    const std::int32_t* const last_segment = rows.last_segment + row_begin;
    const int number = rows.layout.number(departures[item]);
    const int successor = use.successor(departure, rows.layout.tile(departures[item]));
    rows.out.successor[row_begin + number] = successor;
    if (successor >= 0 && last_segment[successor] > last_segment[number])
      rows.add_head(row, successor);
  }
};

// Follows a slot from a head to the next. The keys between them leave in the last segment of the first head.
struct LinkHeads {
  Rows rows;

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.max_heads);
    if (item % rows.max_heads >= rows.head_count[row]) return;
    const std::int64_t row_begin = rows.row_begin(row);
    const std::int32_t* const successor = rows.out.successor + row_begin;
    const std::int32_t* const last_segment = rows.last_segment + row_begin;
    const int head = rows.heads[item];
    const int segment = last_segment[head];
    int next = successor[head];
    while (next >= 0) {
      const int after = successor[next];  // both loads are in flight together
      if (last_segment[next] != segment) break;
      next = after;
    }
    if (next >= 0) rows.previous_head[row_begin + next] = head;
  }
};

// Stores a head as the start of the segments after that of the slot's previous head, which are at most all segments.
struct StoreStarts {
  Rows rows;

  __device__ void operator()(long item) const {
    const int row = static_cast<int>(item / rows.max_heads);
    if (item % rows.max_heads >= rows.head_count[row]) return;
    const std::int32_t* const previous_head = rows.previous_head + rows.row_begin(row);
    const std::int32_t* const last_segment = rows.last_segment + rows.row_begin(row);
    const int head = rows.heads[item];
    int first = head;
    while (previous_head[first] >= 0) first = previous_head[first];
    const int slot =
        rows.use_of(row).new_slot(first, rows.arrival_tile(row, rows.row_begin(row) + first));
    if (slot < 0) return;
    const int begin = first == head ? 0 : last_segment[previous_head[head]] + 1;
    for (int segment = begin; segment <= last_segment[head]; ++segment) {
      rows.out.starts[(std::int64_t{row} * rows.segments + segment) * rows.slots + slot] = head;
    }
  }
};

struct Work {
  Rows rows;
  std::uint64_t* events[2];  // [rows, Sk], two buffers of a sort
  void* sort_workspace;
  std::size_t sort_bytes = 0;
  std::size_t bytes;

  Work(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out, void* base)
      : rows{.keys = key_tree::AllKeys<key_tree::LongRowEntry>(args),
             .out = out,
             .layout = {.number_bits = bits_for(args.seqlen_k),
                        .tile_bits = bits_for(args.tiles() + 1)},
             .rows = static_cast<int>(shape.rows),
             .seqlen_k = static_cast<int>(args.seqlen_k),
             .tiles = static_cast<int>(args.tiles()),
             .segment_tiles = static_cast<int>(ceil_div(args.tiles(), shape.segments)),
             .slots = static_cast<int>(shape.slots),
             .segments = static_cast<int>(shape.segments),
             .max_heads = static_cast<int>(std::min(shape.segments * shape.slots, args.seqlen_k))} {
    WorkspaceAllocator workspace(base);
    rows.head_count = workspace.take<std::int32_t>(rows.rows);
    rows.heads = workspace.take<std::int32_t>(rows.all_heads());
    rows.last_segment = workspace.take<std::int32_t>(rows.all_keys());
    rows.previous_head = workspace.take<std::int32_t>(rows.all_keys());
    rows.use = workspace.take<TileUse>(rows.all_tiles());
    for (std::uint64_t*& buffer : events) buffer = workspace.take<std::uint64_t>(rows.all_keys());
    cub::DoubleBuffer<std::uint64_t> buffers(events[0], events[1]);
    sort(buffers, nullptr, nullptr);
    sort_workspace = workspace.take<char>(static_cast<std::int64_t>(sort_bytes));
    bytes = workspace.used();
  }

  // Sorts the events by row and tile. With a null workspace it only sets sort_bytes.
  void sort(cub::DoubleBuffer<std::uint64_t>& buffers, void* workspace, cudaStream_t stream) {
    const int end_bit = rows.layout.number_bits + rows.layout.tile_bits + bits_for(rows.rows);
    check(cub::DeviceRadixSort::SortKeys(workspace, sort_bytes, buffers, rows.all_keys(),
                                         rows.layout.number_bits, end_bit, stream),
          "sorting arrivals and departures");
  }
};

}  // namespace

std::size_t workspace_size(const TileListArgs& args, const KeySlotShape& shape) {
  return Work(args, shape, {}, nullptr).bytes;
}

void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  Work work(args, shape, out, execution.workspace);
  const Rows& rows = work.rows;
  // Slots are empty where no head starts them.
  const std::size_t starts = sizeof(std::int32_t) * static_cast<std::size_t>(rows.all_starts());
  check(cudaMemsetAsync(out.starts, 0xff, starts, stream), "clearing the starts of segments");
  cub::DoubleBuffer<std::uint64_t> arrivals(work.events[0], work.events[1]);
  for_each(rows.all_keys(), PackArrivals{rows, arrivals.Current()}, stream);
  work.sort(arrivals, work.sort_workspace, stream);
  cub::DoubleBuffer<std::uint64_t> departures(arrivals.Alternate(), arrivals.Current());
  for_each(rows.all_keys(), ListArrivals{rows, arrivals.Current(), departures.Current()}, stream);
  work.sort(departures, work.sort_workspace, stream);
  const std::size_t use = sizeof(TileUse) * static_cast<std::size_t>(rows.all_tiles());
  check(cudaMemsetAsync(rows.use, 0, use, stream), "clearing the use of slots");
  for_each(rows.all_keys(), CountSlots{rows, departures.Current()}, stream);
  launch<ScanUse>(rows.rows, rows, stream);
  for_each(rows.all_keys(), LinkKeys{rows, departures.Current()}, stream);
  for_each(rows.all_heads(), LinkHeads{rows}, stream);
  for_each(rows.all_heads(), StoreStarts{rows}, stream);
}

}  // namespace flash_dmattn::cuda::long_rows
