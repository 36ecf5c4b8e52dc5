#include <algorithm>
#include <cstdint>

#include <cub/device/device_radix_sort.cuh>

#include "arguments.h"
#include "cuda/selection/key_slots.h"
#include "cuda/selection/key_tree.cuh"
#include "cuda/selection/tile_list_arguments.h"

// Builds the arrays of KeySlots from arrivals and departures. One sort orders these events by row, kind (arrivals
// first), tile and key.
namespace flash_dmattn::cuda {
namespace {

constexpr int threads = 256;

// An event is a number: row, kind, tile, key from the top down. Keys never seen have a tile past
// all.
struct EventLayout {
  int key_bits = 0;
  int tile_bits = 0;
  int never = 0;  // the tile of keys never seen

  __host__ __device__ int row_shift() const { return key_bits + tile_bits + 1; }
  __device__ std::uint64_t pack(int row, bool departs, int tile, int key) const {
    const std::uint64_t list = static_cast<std::uint64_t>(row) << 1 | (departs ? 1u : 0u);
    return (list << tile_bits | static_cast<std::uint64_t>(tile)) << key_bits |
           static_cast<std::uint64_t>(key);
  }
  __device__ int key(std::uint64_t event) const {
    return static_cast<int>(event & ((std::uint64_t{1} << key_bits) - 1));
  }
  __device__ int tile(std::uint64_t event) const {
    return static_cast<int>((event >> key_bits) & ((std::uint64_t{1} << tile_bits) - 1));
  }
};

struct SlotRows {
  EventLayout layout;
  int seqlen_k = 0;
  int tiles = 0;
  int ctas_per_row = 0;  // of a thread for each key
  int segment_tiles = 1;
  int slots = 0;
  int segments = 1;
  std::uint64_t* events = nullptr;    // [rows, 2, Sk]; sorted: arrivals, departures
  std::int32_t* departure = nullptr;  // [rows, Sk] by key: its number among the departures
  KeySlotBuffers out;

  __device__ std::int64_t row_begin(int row) const {
    return static_cast<std::int64_t>(row) * seqlen_k;
  }
};

struct RowKey {
  int row;
  int key;
  __device__ explicit RowKey(const SlotRows& rows)
      : row(static_cast<int>(blockIdx.x) / rows.ctas_per_row),
        key(static_cast<int>(blockIdx.x) % rows.ctas_per_row * threads +
            static_cast<int>(threadIdx.x)) {}
};

__global__ void __launch_bounds__(threads) list_events(key_tree::AllKeys keys, SlotRows rows) {
  wait_for_previous_kernel();
  const RowKey at(rows);
  if (at.key >= rows.seqlen_k) return;
  const key_tree::HalfTiles seen = keys.items(at.row, 0)[at.key].within(0, rows.tiles);
  const bool never = seen.first_touched() >= seen.end_touched();
  std::uint64_t* const events = rows.events + 2 * rows.row_begin(at.row);
  events[at.key] =
      rows.layout.pack(at.row, false, never ? rows.layout.never : seen.first_touched(), at.key);
  events[rows.seqlen_k + at.key] =
      rows.layout.pack(at.row, true, never ? rows.layout.never : seen.end_touched() - 1, at.key);
}

// Numbers the sorted events.
__global__ void __launch_bounds__(threads) number_events(SlotRows rows) {
  wait_for_previous_kernel();
  const RowKey at(rows);  // the n-th arrival and the n-th departure
  if (at.key >= rows.seqlen_k) return;
  const int n = at.key;
  const std::int64_t begin = rows.row_begin(at.row);
  const std::uint64_t* const arrivals = rows.events + 2 * begin;
  const bool arrives = rows.layout.tile(arrivals[n]) != rows.layout.never;
  rows.out.arrivals[begin + n] = arrives ? rows.layout.key(arrivals[n]) : -1;
  const std::uint64_t departure = arrivals[rows.seqlen_k + n];
  if (rows.layout.tile(departure) != rows.layout.never) {
    rows.departure[begin + rows.layout.key(departure)] = n;
  }
  // As many depart as arrive.
  const bool last =
      n + 1 == rows.seqlen_k || rows.layout.tile(arrivals[n + 1]) == rows.layout.never;
  if (arrives && last) rows.out.count[at.row] = n + 1;
  if (n == 0 && !arrives) rows.out.count[at.row] = 0;
}

// One thread for each slot follows the keys that live in it.
__global__ void __launch_bounds__(threads) follow_slots(SlotRows rows) {
  wait_for_previous_kernel();
  const int slots = rows.slots;
  const int ctas = ceil_div(slots, threads);
  const int row = static_cast<int>(blockIdx.x) / ctas;
  const int slot = static_cast<int>(blockIdx.x) % ctas * threads + static_cast<int>(threadIdx.x);
  if (slot >= slots) return;
  const std::int64_t begin = rows.row_begin(row);
  const std::uint64_t* const departures = rows.events + 2 * begin + rows.seqlen_k;
  const int segments = rows.segments;
  std::int32_t* start = rows.out.starts + static_cast<std::int64_t>(row) * segments * slots + slot;
  const int count = rows.out.count[row];
  int segment = 0;  // the next whose start is not known
  for (std::int64_t n = slot; n < count;) {
    const int departure = rows.departure[begin + rows.out.arrivals[begin + n]];
    const int last_segment = rows.layout.tile(departures[departure]) / rows.segment_tiles;
    for (; segment <= last_segment; ++segment, start += slots) *start = static_cast<int>(n);
    const std::int64_t next = std::int64_t{departure} + slots;
    rows.out.successor[begin + n] = next < count ? static_cast<int>(next) : -1;
    n = next;
  }
  for (; segment < segments; ++segment, start += slots) *start = -1;
}

// ---- Launches -----------------------------------------------------------------------------------

std::int64_t row_count(const TileListArgs& args) { return args.batch * args.heads; }

// Sorts the events of all rows. Keys come in order and stay so among equals, the sort being stable. With a null
// workspace it only sets `bytes`.
void sort(const TileListArgs& args, const EventLayout& layout,
          cub::DoubleBuffer<std::uint64_t>& events, void* workspace, std::size_t& bytes,
          cudaStream_t stream) {
  check(cub::DeviceRadixSort::SortKeys(workspace, bytes, events,
                                       2 * row_count(args) * args.seqlen_k, layout.key_bits,
                                       layout.row_shift() + bits_for(row_count(args)), stream),
        "sorting arrivals and departures");
}

EventLayout event_layout(const TileListArgs& args) {
  const auto tiles = static_cast<int>(args.tiles());
  return {.key_bits = bits_for(args.seqlen_k),
          .tile_bits = bits_for(std::int64_t{tiles} + 1),
          .never = tiles};
}

struct Workspace {
  std::uint64_t* events;  // [rows, 2, Sk], twice: what is sorted, and the sort's other buffer
  std::uint64_t* other;
  std::int32_t* departure;
  void* sort;
  std::size_t sort_bytes = 0;
  std::size_t bytes;

  Workspace(const TileListArgs& args, void* base) {
    WorkspaceAllocator workspace(base);
    const std::int64_t keys = row_count(args) * args.seqlen_k;
    events = workspace.take<std::uint64_t>(2 * keys);
    other = workspace.take<std::uint64_t>(2 * keys);
    departure = workspace.take<std::int32_t>(keys);
    cub::DoubleBuffer<std::uint64_t> buffers(events, other);
    cuda::sort(args, event_layout(args), buffers, nullptr, sort_bytes, nullptr);
    sort = workspace.take<char>(static_cast<std::int64_t>(sort_bytes));
    bytes = workspace.used();
  }
};

}  // namespace

KeySlotBuffers take_key_slots(ScheduleAllocator& memory, const KeySlotShape& shape) {
  return {.count = memory.take<std::int32_t>(shape.rows),
          .arrivals = memory.take<std::int32_t>(shape.rows * shape.seqlen_k),
          .successor = memory.take<std::int32_t>(shape.rows * shape.seqlen_k),
          .starts = memory.take<std::int32_t>(shape.rows * shape.segments * shape.slots)};
}

std::size_t key_slot_bytes(const KeySlotShape& shape) {
  ScheduleAllocator counted(nullptr);
  take_key_slots(counted, shape);
  return counted.used();
}

std::size_t slot_workspace_size(const TileListArgs& args) {
  validate_tile_list_args(args);
  return row_count(args) * args.seqlen_k == 0 ? 0 : Workspace(args, nullptr).bytes;
}

void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution) {
  validate_tile_list_args(args);
  const std::int64_t row_ctas = row_count(args);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  if (row_ctas == 0) return;
  if (args.seqlen_k == 0) {
    check(cudaMemsetAsync(out.count, 0, static_cast<std::size_t>(row_ctas) * 4, stream),
          "clearing the count of arrivals");
    return;
  }
  Workspace workspace(args, execution.workspace);
  require_workspace(execution, workspace.bytes);
  SlotRows rows;
  rows.layout = event_layout(args);
  rows.seqlen_k = static_cast<int>(args.seqlen_k);
  rows.tiles = static_cast<int>(args.tiles());
  rows.ctas_per_row = ceil_div(rows.seqlen_k, threads);
  rows.segment_tiles = ceil_div(std::max(rows.tiles, 1), static_cast<int>(shape.segments));
  rows.slots = static_cast<int>(shape.slots);
  rows.segments = static_cast<int>(shape.segments);
  rows.events = workspace.events;
  rows.departure = workspace.departure;
  rows.out = out;
  const std::int64_t key_ctas = row_ctas * rows.ctas_per_row;
  launch_grid<list_events>({key_ctas, threads}, stream, key_tree::AllKeys(args), rows);
  cub::DoubleBuffer<std::uint64_t> events(workspace.events, workspace.other);
  sort(args, rows.layout, events, workspace.sort, workspace.sort_bytes, stream);
  rows.events = events.Current();
  launch_grid<number_events>({key_ctas, threads}, stream, rows);
  launch_grid<follow_slots>({row_ctas * ceil_div(rows.slots, threads), threads}, stream, rows);
}

}  // namespace flash_dmattn::cuda
