#pragma once

#include <algorithm>

#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/work/work.cuh"
#include "cuda/stages/postprocess.cuh"

// Kernels before and after a main loop over slots.
namespace flash_dmattn::cuda::sm90 {

// A block as the team of a SlotPlanner.
template <int Threads>
class SlotPlanTeam {
 public:
  static constexpr int warps = Threads / warp_size;
  struct Storage {
    int warp_results[warps];
  };

  __device__ explicit SlotPlanTeam(Storage& storage) : storage_(storage) {}

  template <class Body>
  __device__ void for_each(int n, const Body& body) const {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += Threads) body(i);
    __syncthreads();
  }

  template <class Value>
  __device__ int sum(int n, const Value& value) const {
    int mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += Threads) mine += value(i);
    return combine(warp_sum(mine), [](int x) { return warp_sum(x); });
  }

  // Of numbers that are not negative.
  template <class Value>
  __device__ int most(int n, const Value& value) const {
    int mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += Threads) mine = max(mine, value(i));
    return combine(warp_max(mine), [](int x) { return warp_max(x); });
  }

  __device__ void scan(int* numbers, int n) const {
    int before = 0;
    for (int first = 0; first < n; first += Threads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int mine = i < n ? numbers[i] : 0;
      const int through = warp_inclusive_sum(mine, lane_id());
      if (lane_id() == warp_size - 1) storage_.warp_results[warp_id()] = through;
      __syncthreads();
      const int total = lane_id() < warps ? storage_.warp_results[lane_id()] : 0;
      const int warps_before = warp_sum(lane_id() < warp_id() ? total : 0);
      if (i < n) numbers[i] = before + warps_before + through - mine;
      before += warp_sum(total);
      __syncthreads();
    }
    if (threadIdx.x == 0) numbers[n] = before;
    __syncthreads();
  }

 private:
  static_assert(warps <= warp_size);

  // `result` is that of the warp.
  template <class Combine>
  __device__ int combine(int result, const Combine& of_lanes) const {
    if (lane_id() == 0) storage_.warp_results[warp_id()] = result;
    __syncthreads();
    const int all = of_lanes(lane_id() < warps ? storage_.warp_results[lane_id()] : 0);
    __syncthreads();
    return all;
  }

  Storage& storage_;
};

// Computes SlotParams::records from the key info, with one thread for each arrival, and SlotParams::plan, in one block
// beside these.
template <class T>
struct PrepareSlots {
  struct Params {
    BackwardParams backward;
    KeyInfo info;
    SlotParams slots;
  };
  static constexpr int threads = 512;
  static constexpr int min_blocks = 2;
  using Team = SlotPlanTeam<threads>;
  struct SharedStorage {
    typename Team::Storage team;
    int scratch[10 * 1024];
  };

  static long items(const Params& p) {
    const Shape& shape = p.backward.shape;
    return long{shape.batch} * shape.heads_kv * shape.seqlen_k;
  }
  static long blocks(const Params& p) { return 1 + std::min(ceil_div(items(p), threads), 65535l); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    if (blockIdx.x == 0) return plan(p, shared);
    const Shape& shape = p.backward.shape;
    const long count = long{shape.batch} * shape.heads_kv * shape.seqlen_k;
    const long step = (static_cast<long>(gridDim.x) - 1) * threads;
    for (long i = (static_cast<long>(blockIdx.x) - 1) * threads + threadIdx.x; i < count; i += step)
      store_record(p, i);
  }

 private:
  static __device__ void store_record(const Params& p, long item) {
    const Shape& shape = p.backward.shape;
    const int arrival = static_cast<int>(item % shape.seqlen_k);
    const int head = static_cast<int>(item / shape.seqlen_k % shape.heads_kv);
    const int batch = static_cast<int>(item / shape.seqlen_k / shape.heads_kv);
    const int key = p.slots.slots.arrivals[p.slots.row(batch, head) * shape.seqlen_k + arrival];
    if (key < 0) return;
    KeyRecord record = first_record(shape, p.info, batch, head, key);
    if ((*p.backward.flags & lse_is_large) != 0)
      record.bias = unscaled_bias<T>(p.backward, batch, head, record);
    p.slots.records[item] = record;
  }

  // The chains of the heads for a SlotPlanner.
  struct Chains {
    const Params& p;

    __device__ int chains(int head) const {
      const int heads_kv = p.backward.shape.heads_kv;
      const std::int64_t row = p.slots.row(head / heads_kv, head % heads_kv);
      return ceil_div(p.slots.slots.used[row], p.slots.work_slots);
    }
    __device__ int first_unit(int head, int chain) const {
      const Shape& shape = p.backward.shape;
      const int batch = head / shape.heads_kv;
      const int kv_head = head % shape.heads_kv;
      const int arrival = p.slots.first_arrival(batch, kv_head, chain * p.slots.work_slots);
      const int key =
          p.slots.slots.arrivals[p.slots.row(batch, kv_head) * shape.seqlen_k + arrival];
      const int first = p.info.ranges_of(batch, kv_head)[key].first;
      return first / slot_tile_rows / p.slots.segment_tiles;
    }
  };

  static __device__ void plan(const Params& p, SharedStorage& shared) {
    const SlotPlanShape& shape = p.slots.plan_shape;
    const Team team(shared.team);
    const Chains chains{p};
    const bool fits = shape.scratch() * sizeof(int) <= sizeof(shared.scratch);
    SlotPlanner(team, shape, chains, fits ? shared.scratch : p.slots.plan_scratch)
        .make(p.slots.plan);
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
    return long{p.slots.plan_shape.most_cut_parts()} * (work_slots / warps);
  }

  __device__ void operator()(const Params& p, SharedStorage&) const {
    const SlotParams& slots = p.slots;
    const int index = static_cast<int>(blockIdx.x) * warps + warp_id();
    const int slot = index % work_slots;
    if (index / work_slots >= slots.plan.counts->cut_parts) return;
    const SlotPart part = slots.plan.cut[index / work_slots];
    if (part.unit_end >= slots.plan_shape.units) return;

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
  // parts. They have the following ids, and the loads of several are in flight together.
  static __device__ void add_later_parts(const SlotParams& slots, const SlotPart& part, int end,
                                         int slot, Sums& sums) {
    constexpr int at_once = 4;
    const int parts = slots.plan.counts->cut_parts;
    for (int first = part.id + 1;; first += warp_size) {
      const int mine = first + lane_id();
      const SlotPart later = slots.plan.cut[min(mine, parts - 1)];
      const bool follows = mine < parts && later.head == part.head && later.block == part.block &&
                           later.unit_begin < end;
      const int count = __popc(warp_ballot(follows));
      for (int i = 0; i < count; i += at_once) {
        Sums loaded[at_once];
#pragma unroll
        for (int j = 0; j < at_once; ++j)
          if (i + j < count) loaded[j] = Sums(slots, first + i + j, 0, slot);
#pragma unroll
        for (const Sums& x : loaded) sums.add(x);
      }
      if (count < warp_size) return;
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
