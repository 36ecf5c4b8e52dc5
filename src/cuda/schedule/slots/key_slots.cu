#include <algorithm>
#include <cstdint>

#include "common/arguments.h"
#include "cuda/schedule/key_tree.cuh"
#include "cuda/schedule/slots/key_slots.h"
#include "cuda/schedule/slots/long_rows.h"
#include "cuda/schedule/slots/tile_use.cuh"
#include "cuda/schedule/tile_list_arguments.h"
#include "cuda/selection/cluster_rows.cuh"

// Builds the arrays of KeySlots in one kernel, in which a cluster of blocks computes a row. It counts the arrivals and
// departures of each tile, numbers them, and follows the slots. Long rows have other kernels (long_rows.cu).
namespace flash_dmattn::cuda {
namespace {

// The lifetime of a key that some query sees.
struct alignas(16) Life {
  std::int32_t key;
  std::uint16_t first;  // first and last tile
  std::uint16_t last;
  std::int32_t arrival;  // number among the arrivals and among the departures
  std::int32_t departure;
};

struct SlotRows {
  key_tree::AllKeys<key_tree::Entry> keys;
  KeySlotBuffers out;
  int blocks = 1;  // blocks of a cluster
  int seqlen_k = 0;
  int tiles = 0;
  int segment_tiles = 1;
  int slots = 0;
  int segments = 1;
  // [rows, Sk], where a warp's lifetimes begin at its first key; null if they are in shared memory
  Life* lives = nullptr;
  std::int32_t* last_segment = nullptr;  // [rows, Sk] by arrival number
  TileUse* use = nullptr;                // [rows, tiles]

  __device__ RowUse use_of(int row) const { return {use + std::int64_t{row} * tiles, tiles}; }
};

// Counts of arrivals and departures.
struct alignas(8) Events {
  int arrivals;
  int departures;

  __device__ Events& operator+=(const Events& other) {
    arrivals += other.arrivals;
    departures += other.departures;
    return *this;
  }
  __device__ Events& operator-=(const Events& other) {
    arrivals -= other.arrivals;
    departures -= other.departures;
    return *this;
  }
};

struct AssignSlotsKernel {
  using Params = SlotRows;
  static constexpr int threads = cluster_rows::threads;
  static constexpr int min_blocks = cluster_rows::min_blocks;
  static constexpr int warps = cluster_rows::warps;
  static constexpr int window =
      threads;                         // tiles whose events are numbered at a time, one per thread
  static constexpr int lane_keys = 4;  // keys of a lane with loads in flight together
  static constexpr int segments_together = 2 * window / warp_size;
  static constexpr int none = -2;  // no key enters a slot
  // A warp keeps up to this many key lifetimes in shared memory, otherwise in global memory. Two blocks of a
  // multiprocessor have no more room.
  static constexpr int most_shared_lives = 128;

  static __host__ __device__ int keys_of_warp(int seqlen_k, int blocks) {
    return ceil_div(seqlen_k, blocks * threads) * warp_size;
  }

  struct WarpNumbers {
    // The number of the warp's events in each tile, and later the number of the next event.
    int arrivals[window];
    int departures[window];
  };
  struct SharedStorage {
    union {
      WarpNumbers numbers[warps];
      std::int32_t starts[warps][segments_together][warp_size];  // at the end, one slot per lane
    };
    // The block's totals, in two copies, because other blocks may still read those of the previous window.
    Events totals[2][window];
    Events warp_sums[warps];
    int departed[window];  // departures of the row through a tile
    int warp_used[warps];
    Life lives[warps][most_shared_lives];
  };

  // A warp's part of a row: consecutive keys, and later their lifetimes.
  struct Part {
    int row;
    int rank;  // rank of the block in the cluster
    int begin;
    int end;

    __device__ explicit Part(const Params& p)
        : row(static_cast<int>(blockIdx.x) / p.blocks),
          rank(static_cast<int>(blockIdx.x) % p.blocks) {
      const int warp_keys = keys_of_warp(p.seqlen_k, p.blocks);
      begin = (rank * warps + warp_id()) * warp_keys;
      end = min(begin + warp_keys, p.seqlen_k);
    }

    // Calls use(at, load(at)) for every place, by whole warps; `at` is -1 in lanes past the end.
    template <class Load, class Use>
    __device__ void for_each(const Load& load, const Use& use) const {
      for (int first = begin; first < end; first += lane_keys * warp_size) {
        decltype(load(0)) loaded[lane_keys];
#pragma unroll
        for (int i = 0; i < lane_keys; ++i) {
          loaded[i] = load(min(first + i * warp_size + lane_id(), end - 1));
        }
#pragma unroll
        for (int i = 0; i < lane_keys; ++i) {
          if (first + i * warp_size >= end) break;
          const int at = first + i * warp_size + lane_id();
          use(at < end ? at : -1, loaded[i]);
        }
      }
    }
  };

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    Part part(p);
    const std::int64_t row_begin = static_cast<std::int64_t>(part.row) * p.seqlen_k;
    Life* const lives =
        p.lives == nullptr ? shared.lives[warp_id()] : p.lives + row_begin + part.begin;
    part.end = list_lives(p, part, lives);
    part.begin = 0;
    Events numbered{};
    RunningUse use{};
    for (int first_tile = 0, parity = 0; first_tile < p.tiles; first_tile += window, parity ^= 1) {
      const int tiles = min(window, p.tiles - first_tile);
      count_events(shared, part, lives, first_tile, tiles);
      number_tiles(p, shared, part, first_tile, tiles, parity, numbered, use);
      number_events(shared, part, lives, first_tile, tiles);
    }
    const int count = numbered.arrivals;  // equals the number of departures
    cluster_sync();                       // the use of slots is stored
    store_keys(p, part, lives);
    const int thread = part.rank * threads + static_cast<int>(threadIdx.x);
    for (int n = count + thread; n < p.seqlen_k; n += p.blocks * threads) {
      p.out.arrivals[row_begin + n] = -1;
    }
    if (thread == 0) p.out.count[part.row] = count;
    if (thread == 0) p.out.used[part.row] = use.used;
    cluster_sync();
    follow_slots(p, shared, part, use.used);
  }

 private:
  // Lists, in order, the visible keys of a warp. Returns their number.
  static __device__ int list_lives(const Params& p, const Part& part, Life* lives) {
    const auto items = p.keys.items(part.row, 0);
    int listed = 0;
    part.for_each([&](int key) { return items[key].stored(); },
                  [&](int key, int2 stored) {
                    const key_tree::HalfTiles tiles = key_tree::Entry(stored).within(0, p.tiles);
                    const bool is_seen = key >= 0 && tiles.first_touched() < tiles.end_touched();
                    const unsigned seen = warp_ballot(is_seen);
                    if (is_seen) {
                      Life& life = lives[listed + count_before(seen, lane_id())];
                      life.key = key;
                      life.first = static_cast<std::uint16_t>(tiles.first_touched());
                      life.last = static_cast<std::uint16_t>(tiles.end_touched() - 1);
                    }
                    listed += __popc(seen);
                  });
    __syncwarp();
    return listed;
  }

  // The bin of a tile in the window; -1 for other tiles and for lanes without a key.
  static __device__ int bin_of(int at, int tile, int first_tile, int tiles) {
    const int bin = tile - first_tile;
    return at >= 0 && 0 <= bin && bin < tiles ? bin : -1;
  }

  static __device__ void count_events(SharedStorage& shared, const Part& part, const Life* lives,
                                      int first_tile, int tiles) {
    WarpNumbers& counts = shared.numbers[warp_id()];
    __syncwarp();
    for (int bin = lane_id(); bin < tiles; bin += warp_size) {
      counts.arrivals[bin] = counts.departures[bin] = 0;
    }
    __syncwarp();
    part.for_each([&](int at) { return lives[at]; },
                  [&](int at, const Life& life) {
                    const int arrives = bin_of(at, life.first, first_tile, tiles);
                    const int departs = bin_of(at, life.last, first_tile, tiles);
                    if (arrives >= 0) atomicAdd(&counts.arrivals[arrives], 1);
                    if (departs >= 0) atomicAdd(&counts.departures[departs], 1);
                  });
    __syncthreads();
  }

  // The slots in use by the end of the previous windows, and the departures before the last of their tiles.
  struct RunningUse {
    int used = 0;
    int departed = 0;
  };

  // The most of this thread's number and those of the threads before it. `most` is that of all threads. Contains one barrier.
  static __device__ int most_through(SharedStorage& shared, int number, int& most) {
#pragma unroll
    for (int distance = 1; distance < warp_size; distance *= 2) {
      const int other = __shfl_up_sync(full_mask, number, distance);
      if (lane_id() >= distance) number = max(number, other);
    }
    if (lane_id() == warp_size - 1) shared.warp_used[warp_id()] = number;
    __syncthreads();
    const int of_warp = lane_id() < warps ? shared.warp_used[lane_id()] : 0;
    most = warp_max(of_warp);
    return max(number, warp_max(lane_id() < warp_id() ? of_warp : 0));
  }

  // Turns the counts of the window's tiles into the numbers of each warp's first events, which continue from
  // `numbered`, adds the counts to `numbered`, and stores the use of slots. A thread has a tile.
  static __device__ void number_tiles(const Params& p, SharedStorage& shared, const Part& part,
                                      int first_tile, int tiles, int parity, Events& numbered,
                                      RunningUse& use) {
    const auto tile = static_cast<int>(threadIdx.x);
    const bool is_tile = tile < tiles;
    Events& total = shared.totals[parity][tile];
    const auto numbers = [&](int warp) {
      WarpNumbers& warp_numbers = shared.numbers[warp];
      return Events{warp_numbers.arrivals[tile], warp_numbers.departures[tile]};
    };
    if (is_tile) {
      Events sum{};
#pragma unroll
      for (int w = 0; w < warps; ++w) sum += numbers(w);
      total = sum;
    }
    cluster_sync();
    cluster_rows::BlockSums<Events> sums;
    if (is_tile) sums.add(&total, part.rank, p.blocks);
    const Events through{warp_inclusive_sum(sums.all.arrivals, lane_id()),
                         warp_inclusive_sum(sums.all.departures, lane_id())};
    if (lane_id() == warp_size - 1) shared.warp_sums[warp_id()] = through;
    __syncthreads();
    const Events warp_events = lane_id() < warps ? shared.warp_sums[lane_id()] : Events{};
    const bool is_before = lane_id() < warp_id();
    Events number = numbered;
    number += {warp_sum(is_before ? warp_events.arrivals : 0),
               warp_sum(is_before ? warp_events.departures : 0)};
    number += through;
    const Events passed = number;  // by the end of the tile
    if (is_tile) shared.departed[tile] = passed.departures;
    number -= sums.all;
    number += sums.before;
    if (is_tile) {
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        const Events count = numbers(w);
        shared.numbers[w].arrivals[tile] = number.arrivals;
        shared.numbers[w].departures[tile] = number.departures;
        number += count;
      }
    }
    __syncthreads();
    // The keys that the tile and the one before it see did not depart before that one.
    int departed = use.departed;
    if (tile > 0) departed = tile > 1 ? shared.departed[tile - 2] : numbered.departures;
    int most = 0;
    const int own = most_through(shared, is_tile ? passed.arrivals - departed : 0, most);
    if (is_tile && part.rank == 0) {
      p.use[std::int64_t{part.row} * p.tiles + first_tile + tile] = {
          min(max(own, use.used), p.slots), passed.arrivals};
    }
    use = {min(max(most, use.used), p.slots), shared.departed[window - 2]};
    numbered += {warp_sum(warp_events.arrivals), warp_sum(warp_events.departures)};
  }

  static __device__ void number_events(SharedStorage& shared, const Part& part, Life* lives,
                                       int first_tile, int tiles) {
    WarpNumbers& next = shared.numbers[warp_id()];
    part.for_each([&](int at) { return lives[at]; },
                  [&](int at, const Life& life) {
                    const int arrives = bin_of(at, life.first, first_tile, tiles);
                    const int departs = bin_of(at, life.last, first_tile, tiles);
                    const int arrival = take_number(next.arrivals, arrives);
                    const int departure = take_number(next.departures, departs);
                    if (arrives >= 0) lives[at].arrival = arrival;
                    if (departs >= 0) lives[at].departure = departure;
                  });
    __syncwarp();
  }

  // Takes the number of the event of this lane's key in a tile of the window. Called by all lanes.
  static __device__ int take_number(int (&next)[window], int bin) {
    if (!warp_any(bin >= 0)) return -1;
    // The keys of a warp are neighbours, so their events are in few tiles.
    const unsigned same = __match_any_sync(full_mask, bin);
    int number[1];
    take_numbers({bin}, {same}, next, number);
    return number[0];
  }

  static __device__ void store_keys(const Params& p, const Part& part, const Life* lives) {
    const std::int64_t row_begin = static_cast<std::int64_t>(part.row) * p.seqlen_k;
    const RowUse use = p.use_of(part.row);
    part.for_each([&](int at) { return lives[at]; },
                  [&](int at, const Life& life) {
                    if (at < 0) return;
                    const std::int64_t to = row_begin + life.arrival;
                    p.out.arrivals[to] = life.key;
                    p.out.successor[to] = use.successor(life.departure, life.last);
                    p.last_segment[to] = life.last / p.segment_tiles;
                  });
  }

  // A key in a slot.
  struct Visit {
    int number;        // number of the arrival, -1 after the last
    int successor;     // -1 if there is none
    int last_segment;  // the last segment that starts with this key

    __device__ Visit(const Params& p, std::int64_t row_begin, int number_) : number(number_) {
      successor = number < 0 ? -1 : p.out.successor[row_begin + number];
      last_segment = number < 0 ? p.segments - 1 : p.last_segment[row_begin + number];
    }
  };

  // A lane follows the keys of a slot. The warps of all blocks share the slots. A warp collects the starts of its slots
  // in shared memory, because they are far apart in global memory, while the next key is being loaded. A key is stored
  // at the first segment that it starts, and copied from there to the others.
  static __device__ void follow_slots(const Params& p, SharedStorage& shared, const Part& part,
                                      int used) {
    const std::int64_t row_begin = static_cast<std::int64_t>(part.row) * p.seqlen_k;
    std::int32_t* const starts =
        p.out.starts + static_cast<std::int64_t>(part.row) * p.segments * p.slots;
    auto& collected = shared.starts[warp_id()];
    for (int first_slot = (warp_id() * p.blocks + part.rank) * warp_size; first_slot < p.slots;
         first_slot += p.blocks * threads) {
      const int slot = first_slot + lane_id();
      std::int32_t* start = starts + slot;
      Visit visit(p, row_begin, slot < used ? p.use_of(part.row).first_arrival(slot) : -1);
      for (int first = 0; first < p.segments; first += segments_together) {
        const int end = min(first + segments_together, p.segments);
#pragma unroll
        for (int i = 0; i < segments_together; ++i) collected[i][lane_id()] = none;
        for (int segment = first; segment < end;) {
          const Visit next(p, row_begin, visit.successor);
          if (visit.last_segment >= segment) {
            collected[segment - first][lane_id()] = visit.number;
            segment = visit.last_segment + 1;
          }
          if (segment < end) visit = next;
        }
        __syncwarp();  // so that neighbouring slots are stored together
        int number = none;
#pragma unroll 8
        for (int segment = first; segment < end; ++segment, start += p.slots) {
          const int entered = collected[segment - first][lane_id()];
          if (entered != none) number = entered;
          if (slot < p.slots) *start = number;
        }
      }
    }
  }
};

std::int64_t row_count(const TileListArgs& args) { return args.batch * args.heads; }

// Whether other kernels assign the slots. The kernel of this file visits all keys of a row once for every
// AssignSlotsKernel::window tiles, and lanes follow chains that grow with the row.
bool is_long(const TileListArgs& args) {
  constexpr std::int64_t most_tiles = 2048;
  static_assert(most_tiles <= key_tree::most_listed_tiles);
  return args.tiles() > most_tiles;
}

struct SlotWorkspace {
  Life* lives = nullptr;
  std::int32_t* last_segment;
  TileUse* use;
  std::size_t bytes;

  SlotWorkspace(const TileListArgs& args, void* base) {
    WorkspaceAllocator workspace(base);
    const std::int64_t keys = row_count(args) * args.seqlen_k;
    const int warp_keys = AssignSlotsKernel::keys_of_warp(
        static_cast<int>(args.seqlen_k), cluster_rows::blocks_of_row(args.seqlen_k));
    if (warp_keys > AssignSlotsKernel::most_shared_lives) lives = workspace.take<Life>(keys);
    last_segment = workspace.take<std::int32_t>(keys);
    use = workspace.take<TileUse>(row_count(args) * args.tiles());
    bytes = workspace.used();
  }
};

}  // namespace

KeySlotBuffers take_key_slots(WorkspaceAllocator& workspace, const KeySlotShape& shape) {
  return {.count = workspace.take<std::int32_t>(shape.rows),
          .used = workspace.take<std::int32_t>(shape.rows),
          .arrivals = workspace.take<std::int32_t>(shape.rows * shape.seqlen_k),
          .successor = workspace.take<std::int32_t>(shape.rows * shape.seqlen_k),
          .starts = workspace.take<std::int32_t>(shape.rows * shape.segments * shape.slots)};
}

int slot_shared_bytes() { return sizeof(AssignSlotsKernel::SharedStorage); }

std::size_t slot_workspace_size(const TileListArgs& args, const KeySlotShape& shape) {
  validate_tile_list_args(args);
  return is_long(args) ? long_rows::workspace_size(args, shape)
                       : SlotWorkspace(args, nullptr).bytes;
}

void assign_slots(const TileListArgs& args, const KeySlotShape& shape, const KeySlotBuffers& out,
                  const Execution& execution) {
  require_workspace(execution, slot_workspace_size(args, shape));
  if (is_long(args)) return long_rows::assign_slots(args, shape, out, execution);
  const SlotWorkspace workspace(args, execution.workspace);
  const int tiles = static_cast<int>(args.tiles());
  const SlotRows rows{
      .keys = key_tree::AllKeys<key_tree::Entry>(args),
      .out = out,
      .blocks = cluster_rows::blocks_of_row(args.seqlen_k),
      .seqlen_k = static_cast<int>(args.seqlen_k),
      .tiles = tiles,
      .segment_tiles = ceil_div(std::max(tiles, 1), static_cast<int>(shape.segments)),
      .slots = static_cast<int>(shape.slots),
      .segments = static_cast<int>(shape.segments),
      .lives = workspace.lives,
      .last_segment = workspace.last_segment,
      .use = workspace.use};
  launch<AssignSlotsKernel>(row_count(args) * rows.blocks, rows,
                            static_cast<cudaStream_t>(execution.stream), {.cluster = rows.blocks});
}

}  // namespace flash_dmattn::cuda
