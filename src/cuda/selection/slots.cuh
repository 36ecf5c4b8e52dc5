#pragma once

#include <cstdint>

#include "cuda/selection/key_tree.cuh"
#include "cuda/selection/selection.h"

// A key's life in its slot, from tables of who comes and who goes; see SlotSchedule. Both tables
// are one sort of events, in order of rows, arrivals before departures, tiles and keys.
namespace flash_dmattn::cuda::slots {

inline constexpr int threads = 256;

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

struct Rows {
  EventLayout layout;
  int seqlen_k = 0;
  int tiles = 0;
  int ctas_per_row = 0;  // of a thread for each key
  int segment_tiles = 1;
  std::uint64_t* events = nullptr;    // [rows, 2, Sk]; sorted: arrivals, departures
  std::int32_t* departure = nullptr;  // [rows, Sk] by key: its number among the departures
  SlotSchedule schedule;

  __device__ std::int64_t row_begin(int row) const {
    return static_cast<std::int64_t>(row) * seqlen_k;
  }
};

struct RowKey {
  int row;
  int key;
  __device__ explicit RowKey(const Rows& rows)
      : row(static_cast<int>(blockIdx.x) / rows.ctas_per_row),
        key(static_cast<int>(blockIdx.x) % rows.ctas_per_row * threads +
            static_cast<int>(threadIdx.x)) {}
};

__global__ void __launch_bounds__(threads) list_events(key_tree::AllKeys keys, Rows rows) {
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
__global__ void __launch_bounds__(threads) number_events(Rows rows) {
  wait_for_previous_kernel();
  const RowKey at(rows);  // the n-th arrival and the n-th departure
  if (at.key >= rows.seqlen_k) return;
  const int n = at.key;
  const std::int64_t begin = rows.row_begin(at.row);
  const std::uint64_t* const arrivals = rows.events + 2 * begin;
  const bool arrives = rows.layout.tile(arrivals[n]) != rows.layout.never;
  rows.schedule.arrivals[begin + n] = arrives ? rows.layout.key(arrivals[n]) : -1;
  const std::uint64_t departure = arrivals[rows.seqlen_k + n];
  if (rows.layout.tile(departure) != rows.layout.never) {
    rows.departure[begin + rows.layout.key(departure)] = n;
  }
  // As many depart as arrive.
  const bool last =
      n + 1 == rows.seqlen_k || rows.layout.tile(arrivals[n + 1]) == rows.layout.never;
  if (arrives && last) rows.schedule.count[at.row] = n + 1;
  if (n == 0 && !arrives) rows.schedule.count[at.row] = 0;
}

// One thread for each slot follows the keys that live in it.
__global__ void __launch_bounds__(threads) follow_slots(Rows rows) {
  wait_for_previous_kernel();
  const int slots = rows.schedule.slots;
  const int ctas = ceil_div(slots, threads);
  const int row = static_cast<int>(blockIdx.x) / ctas;
  const int slot = static_cast<int>(blockIdx.x) % ctas * threads + static_cast<int>(threadIdx.x);
  if (slot >= slots) return;
  const std::int64_t begin = rows.row_begin(row);
  const std::uint64_t* const departures = rows.events + 2 * begin + rows.seqlen_k;
  const int segments = rows.schedule.segments;
  std::int32_t* start =
      rows.schedule.starts + static_cast<std::int64_t>(row) * segments * slots + slot;
  const int count = rows.schedule.count[row];
  int segment = 0;  // the next whose start is not known
  for (std::int64_t n = slot; n < count;) {
    const int departure = rows.departure[begin + rows.schedule.arrivals[begin + n]];
    const int last_segment = rows.layout.tile(departures[departure]) / rows.segment_tiles;
    for (; segment <= last_segment; ++segment, start += slots) *start = static_cast<int>(n);
    const std::int64_t next = std::int64_t{departure} + slots;
    rows.schedule.successor[begin + n] = next < count ? static_cast<int>(next) : -1;
    n = next;
  }
  for (; segment < segments; ++segment, start += slots) *start = -1;
}

}  // namespace flash_dmattn::cuda::slots
