#pragma once

#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// A warp that loads keys into slots. While query tile t is computed, it prepares tile t + 1. A slot whose key was last
// seen before t is empty during t (cuda/schedule/slots/key_slots.h), and the rows of K and V of its next key are loaded.
// Scores of an empty slot are initialized with -inf, so that its rows may change during the products. The record of a
// key is loaded together with its predecessor, because a round with one head per group is no longer than two latencies
// of the L2.
template <class Kernel>
struct SlotLoader {
  using Storage = typename Kernel::SharedStorage;
  using Tile = typename Storage::KeyTile;
  using ValueTile = typename Storage::ValueTile;
  static constexpr BackwardPolicy policy = Kernel::policy;
  // The slots of the block, and then those of the other block of a pair.
  static constexpr int slots = policy.work_keys();
  static constexpr int no_query = 0x7fffffff;  // first and last query of an empty slot

  const BackwardKernelParams& p;
  Storage& storage;

  // `round` is the number of earlier query tiles of this block, and `work_count` the number of earlier parts.
  __device__ int run(const BackwardWork& work, const SlotPart& part, int work_count,
                     int round) const {
    if (round > 0) storage.slots.pipeline.wait_released(round - 1);
    if (lane_id() == 0) storage.work[work_count % 2] = work;
    begin(work, part, round);
#pragma unroll 1
    for (int tile = work.tile_begin; tile + 1 < work.tile_end; ++tile, ++round) {
      storage.slots.pipeline.wait_empty(round + 1);
      prepare_next(work, tile, round);
    }
    return round + 1;
  }

 private:
  __device__ std::int64_t row(const BackwardWork& work) const {
    return work.batch * p.slots.row_batch + work.kv_head * p.slots.row_head;
  }
  __device__ const KeyRecord* records(const BackwardWork& work) const {
    return p.slots.records + (std::int64_t{work.batch} * p.backward.shape.heads_kv + work.kv_head) *
                                 p.backward.shape.seqlen_k;
  }
  __device__ const int* successors(const BackwardWork& work) const {
    return p.slots.slots.successor + row(work) * p.backward.shape.seqlen_k;
  }

  // Loads the keys of the slots at the beginning of a part. Some of these keys arrive later.
  __device__ void begin(const BackwardWork& work, const SlotPart& part, int round) const {
    const KeySlotShape& shape = p.slots.slots.shape;
    const int* const starts =
        p.slots.slots.starts + (row(work) * shape.segments + part.unit_begin) * shape.slots;
#pragma unroll 1
    for (int i = 0; i < slots; i += warp_size) {
      const int slot = i + lane_id();
      const int number = number_of(work, slot);
      const int arrival = number < shape.slots ? starts[number] : -1;
      KeyRecord record = no_key();
      int successor = -1;
      if (arrival >= 0) {
        const int4 words = __ldg(reinterpret_cast<const int4*>(records(work)) + arrival);
        record = {words.x, words.y, words.z, __int_as_float(words.w)};
        successor = __ldg(successors(work) + arrival);
      }
      put(work, record, successor, slot, round);
#pragma unroll 4
      for (int l = 0; l < warp_size; ++l) copy_rows(work, i + l, shuffle(record.key, l));
    }
    publish(round);
  }

  __device__ void prepare_next(const BackwardWork& work, int tile, int round) const {
#pragma unroll 1
    for (int i = 0; i < slots; i += warp_size) {
      const int slot = i + lane_id();
      KeyRecord record = storage.slots.records[round % 2][slot];
      const bool rests = record.last <= tile * slot_tile_rows;
      if (rests) {
        const bool has_successor = storage.slots.successor[slot] >= 0;
        record = has_successor ? storage.slots.coming[slot] : no_key();
        put(work, record, has_successor ? storage.slots.after_successor[slot] : -1, slot,
            round + 1);
      } else {
        storage.slots.records[(round + 1) % 2][slot] = record;
      }
      unsigned arriving = warp_ballot(rests && record.key >= 0);
      for (; arriving != 0; arriving &= arriving - 1) {
        const int l = __ffs(static_cast<int>(arriving)) - 1;
        copy_rows(work, i + l, shuffle(record.key, l));
      }
    }
    publish(round + 1);
  }

  // The number of a slot in its chain.
  static __device__ int number_of(const BackwardWork& work, int slot) {
    return work.key + (slot + Kernel::rank() * policy.keys) % slots;
  }

  static __device__ KeyRecord no_key() { return {no_query, no_query, -1, 0}; }

  // Puts a key into a slot and starts the load of its successor's record; a negative `successor` means none.
  __device__ void put(const BackwardWork& work, const KeyRecord& record, int successor, int slot,
                      int round) const {
    storage.slots.records[round % 2][slot] = record;
    storage.slots.successor[slot] = successor;
    if (successor < 0) return;
    cp_async_16(shared_address(&storage.slots.coming[slot]), records(work) + successor);
    cp_async_4(shared_address(&storage.slots.after_successor[slot]), successors(work) + successor,
               true);
  }

  // Copies a key's row of K and then its row of V, or of a key of the other block the columns of K in which this block
  // makes dq. A negative key gives zeros.
  __device__ void copy_rows(const BackwardWork& work, int slot, int key) const {
    if constexpr (policy.paired()) {
      if (slot >= policy.keys) return copy_partner_row(work, slot - policy.keys, key);
    }
#pragma unroll
    for (int first = 0; first < 2 * Tile::chunks; first += warp_size) {
      const int tensor = (first + lane_id()) / Tile::chunks;
      const int chunk = (first + lane_id()) % Tile::chunks;
      if (tensor > 1) return;
      const bool is_k = tensor == 0;
      if (!is_k && chunk >= ValueTile::chunks) continue;
      const Shape& shape = p.backward.shape;
      // Both tiles have the same offsets, as their panels have the same rows.
      copy_chunk(is_k ? p.backward.k : p.backward.v, is_k ? shape.head_dim : shape.value_dim, work,
                 key, chunk,
                 shared_address(is_k ? storage.k : storage.v) + Tile::offset(slot, chunk));
    }
  }

  __device__ void copy_partner_row(const BackwardWork& work, int row, int key) const {
    using Tile = typename Storage::Partner::KeyTile;
    constexpr int panel_chunks = panel_columns / 8;
    const int chunk = lane_id();
    if (chunk >= Tile::chunks) return;
    copy_chunk(p.backward.k, p.backward.shape.head_dim, work, key,
               Kernel::first_partner_panel() * panel_chunks + chunk,
               shared_address(storage.partner.k) + Tile::offset(row, chunk));
  }

  __device__ void copy_chunk(const InputRows& source, int columns, const BackwardWork& work,
                             int key, int chunk, std::uint32_t to) const {
    const bool valid = key >= 0 && chunk < columns / 8;
    const std::byte* const from = source.data + work.batch * source.batch +
                                  work.kv_head * source.head +
                                  static_cast<std::int64_t>(max(key, 0)) * source.row_step;
    cp_async_16(to, from + (valid ? chunk * 16 : 0), valid);
  }

  __device__ void publish(int round) const {
    cp_async_wait_all();
    fence_async_proxy();
    mbarrier_arrive(storage.slots.pipeline.full_of(round));
  }
};

}  // namespace flash_dmattn::cuda::sm90
