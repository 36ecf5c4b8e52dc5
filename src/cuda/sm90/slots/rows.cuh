#pragma once

#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/work/work.cuh"
#include "cuda/stages/postprocess.cuh"

// Kernels before and after a main loop over slots.
namespace flash_dmattn::cuda::sm90 {

// Computes SlotParams::records from the key info, with one thread for each arrival.
template <class T>
struct PrepareSlotRecords {
  BackwardParams backward;
  KeyInfo info;
  SlotParams slots;

  long items() const {
    const Shape& shape = backward.shape;
    return long{shape.batch} * shape.heads_kv * shape.seqlen_k;
  }

  __device__ void operator()(long item) const {
    const Shape& shape = backward.shape;
    const int arrival = static_cast<int>(item % shape.seqlen_k);
    const int head = static_cast<int>(item / shape.seqlen_k % shape.heads_kv);
    const int batch = static_cast<int>(item / shape.seqlen_k / shape.heads_kv);
    const std::int64_t row = batch * slots.row_batch + head * slots.row_head;
    const int key = slots.slots.arrivals[row * shape.seqlen_k + arrival];
    if (key < 0) return;
    KeyRecord record = first_record(shape, info, batch, head, key);
    if ((*backward.flags & lse_is_large) != 0)
      record.bias = unscaled_bias<T>(backward, batch, head, record);
    slots.records[item] = record;
  }
};

// Adds the fp32 parts of a key that cuts divide, in the order of query tiles. A warp computes a slot of the part in
// which the slot's key arrives and at whose end the key stays.
template <class T, int D, int Dv>
struct AddSlotParts {
  using Params = BackwardKernelParams;
  struct SharedStorage {};
  static constexpr int threads = 256;
  static constexpr int warps = threads / warp_size;
  static constexpr int min_blocks = 1;
  static constexpr int work_slots =
      backward_policy(D, Dv, {.placement = KeyPlacement::slots}).work_keys();
  static constexpr int columns = D + Dv;  // dk, then dv
  static constexpr int lane_columns = 4 * warp_size;
  static constexpr int steps = ceil_div(columns, lane_columns);  // with four columns per lane

  static long blocks(const Params& p) {
    return long{p.slots.partition.cut_parts()} * (work_slots / warps);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const SlotParams& slots = p.slots;
    const SlotPartition& partition = slots.partition;
    const int index = static_cast<int>(blockIdx.x) * warps + warp_id();
    const int slot = index % work_slots;
    const SlotPart part = cut_part(partition, index / work_slots);
    if (part.unit_begin >= part.unit_end || part.unit_end >= partition.units) return;

    const BackwardWork work = work_of(p, part);
    const KeySlotShape& shape = slots.slots.shape;
    if (work.key + slot >= shape.slots) return;
    const std::int64_t row = work.batch * slots.row_batch + work.kv_head * slots.row_head;
    const int arrival =
        slots.slots.starts[(row * shape.segments + part.unit_end) * shape.slots + work.key + slot];
    if (arrival < 0) return;
    const KeyRecord record =
        slots.records[(std::int64_t{work.batch} * p.backward.shape.heads_kv + work.kv_head) *
                          p.backward.shape.seqlen_k +
                      arrival];
    const int unit_rows = slots.segment_tiles * slot_tile_rows;
    if (record.first < part.unit_begin * unit_rows || record.first >= part.unit_end * unit_rows)
      return;

    Sums sums;
    sums.add(Sums(slots, part.id, 1, slot));
    add_later_parts(slots, part, ceil_div(record.last, unit_rows), slot, sums);
    store(p, work, record.key, sums);
  }

 private:
  static __device__ SlotPart cut_part(const SlotPartition& partition, int id) {
    constexpr int rest = SlotPartition::rest_parts;
    const int piece = id - rest * partition.blocks;
    return piece < 0 ? partition.part(id / rest, id % rest)
                     : partition.part(piece % partition.blocks, rest + piece / partition.blocks);
  }

  // Whether the lane has columns in a step.
  static __device__ bool has_columns(int step) {
    return columns % lane_columns == 0 || (lane_id() + step * warp_size) * 4 < columns;
  }

  // A lane's columns of a row.
  struct Sums {
    float4 row[steps] = {};
    float dbias = 0;

    Sums() = default;
    // Loads the sums of a slot in a part, for the key that the part begins or ends with.
    __device__ Sums(const SlotParams& slots, int part, int stays, int slot) {
      const std::int64_t index = (std::int64_t{part} * 2 + stays) * work_slots + slot;
      const auto* const from = reinterpret_cast<const float4*>(slots.part_sums + index * columns);
      for (int i = 0; i < steps; ++i)
        if (has_columns(i)) row[i] = from[lane_id() + i * warp_size];
      dbias = slots.part_dbias[index];
    }

    __device__ void add(const Sums& x) {
      for (int i = 0; i < steps; ++i) {
        row[i] = {row[i].x + x.row[i].x, row[i].y + x.row[i].y, row[i].z + x.row[i].z,
                  row[i].w + x.row[i].w};
      }
      dbias += x.dbias;
    }
  };

  // Adds the parts of a chain after `part`, up to unit `end`. A key that is visible in a whole sequence has dozens of
  // parts. A lane finds the part of a unit, and the loads of several parts are in flight together.
  static __device__ void add_later_parts(const SlotParams& slots, const SlotPart& part, int end,
                                         int slot, Sums& sums) {
    constexpr int at_once = 4;
    for (int unit = part.unit_end; unit < end; unit += warp_size) {
      const int mine = min(unit + lane_id(), end - 1);
      const SlotPart my_part = slots.partition.part_of(part.chain, mine);
      unsigned begins = warp_ballot(unit + lane_id() < end && my_part.unit_begin == mine);
      while (begins != 0) {
        Sums loaded[at_once];
#pragma unroll
        for (Sums& x : loaded) {
          if (begins != 0) {
            x = Sums(slots, shuffle(my_part.id, __ffs(static_cast<int>(begins)) - 1), 0, slot);
          }
          begins &= begins - 1;
        }
#pragma unroll
        for (const Sums& x : loaded) sums.add(x);
      }
    }
  }

  static __device__ void store(const Params& params, const BackwardWork& work, int key,
                               const Sums& sums) {
    const BackwardParams& p = params.backward;
    for (int i = 0; i < steps; ++i) {
      const int place = (lane_id() + i * warp_size) * 4;
      const bool is_dk = place < D;
      const int column = is_dk ? place : place - D;
      const OutputRows& to = is_dk ? p.dk : p.dv;
      const float scale = is_dk ? p.score.scale : 1;
      const int existing = is_dk ? p.shape.head_dim : p.shape.value_dim;
      if (!has_columns(i) || to.data == nullptr || column >= existing) continue;
      *reinterpret_cast<uint2*>(to.data + work.batch * to.batch + key * to.row +
                                work.kv_head * to.head + column * 2) = {
          pack_gradient<T>(sums.row[i].x * scale, sums.row[i].y * scale, p.saturate),
          pack_gradient<T>(sums.row[i].z * scale, sums.row[i].w * scale, p.saturate)};
    }
    if (lane_id() == 0 && p.dbias.data != nullptr) {
      reinterpret_cast<float*>(
          p.dbias.data)[work.batch * p.dbias.batch +
                        work.kv_head * (p.dbias.head_q + p.dbias.head_kv) + key] = sums.dbias;
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
