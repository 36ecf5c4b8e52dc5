#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/primitives/convert.cuh"
#include "cuda/sm90/backward/keys/key_biases.cuh"
#include "cuda/sm90/backward/keys/key_gradients.h"
#include "cuda/sm90/backward/keys/key_visibility.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// A block of slots, for a warpgroup with 64 of them, which are number `key_group`. It is the counterpart of KeyBlock.
// When a key leaves its slot, its rows of dk and dv and the sum of its dS are stored.
//
// Rows are stored when no product of this warpgroup is in flight, in branches that are uniform over the warp and
// without branches between lanes. ptxas serializes all products of a kernel that accesses accumulators elsewhere.
template <class Kernel>
class SlotBlock {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  static constexpr BackwardPolicy policy = Kernel::policy;
  static constexpr int rows = policy.rows;
  static constexpr int head_dim = Kernel::head_dim;

 public:
  using Visit = QueryVisits<Kernel::variant>;
  using Biases = KeyBiases<rows, Kernel::variant.delays>;

  __device__ SlotBlock(const BackwardKernelParams& p, Storage& storage, int key_group)
      : p_(p), storage_(storage), key_group_(key_group) {}

  __device__ void begin(int work_count) { work_ = &storage_.work[work_count % 2]; }

  // Loads the keys of the slots and the queries that see them. Called before the scores of a query tile are
  // initialized.
  __device__ void begin_tile(const Visit& at) {
    if (!at.is_first_head()) return;
    const int round = round_ends_ ? round_ + 1 : round_;
    storage_.slots.pipeline.wait_full(round);
    const int first_query = at.tile() * rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible_.see(h, storage_.slots.records[round % 2][slot(h)], first_query);
    }
  }

  __device__ float bias(int h) const { return visible_.bias(h); }

  __device__ Biases biases_of(const Visit& at) const {
    if constexpr (Kernel::variant.delays) {
      return Biases(p_, at.tile() * rows, record(0), record(1));
    } else {
      return Biases(bias(0), bias(1));
    }
  }

  // Stores the rows of leaving keys. Called before the products of a query tile.
  template <class... Sums>
  __device__ void leave(const Visit& at, const Sums&... sums) {
    if (!at.is_first_head()) return;
    leave_rows<0>(visible_.is_gone(0), sums...);
    leave_rows<1>(visible_.is_gone(1), sums...);
  }

  __device__ void prepare_mask(const Visit& at) {
    const int first_query = at.tile() * rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Delayed biases leave no registers to keep it from the beginning of the round.
      if constexpr (Kernel::variant.delays) visible_.see(h, record(h), first_query);
      if (visible_.is_partial(h)) visible_.prepare_mask(h, record(h), first_query);
    }
  }

  __device__ void mask(const Visit&, float (&scores)[rows / 2]) const {
    if (visible_.is_partial(0)) visible_.template mask<0>(scores);
    if (visible_.is_partial(1)) visible_.template mask<1>(scores);
  }

  __device__ void add_dbias(const float (&sums)[2]) {
    dbias_[0] += sums[0];
    dbias_[1] += sums[1];
  }

  __device__ void end_dbias(const Visit&) {}

  __device__ void end_tile(const Visit& at) {
    round_ends_ = at.is_last_head();
    part_ends_ = at.is_last();
  }

  // Called when no product of the query tile is in flight. The records of a part's last query tile are read once more.
  __device__ void release() {
    if (round_ends_ && !part_ends_) end_round();
  }

  // Stores the rows of the keys that are still in slots at the end of a part.
  template <class... Sums>
  __device__ void store(const Sums&... sums) {
    leave_rows<0>(is_here(0), sums...);
    leave_rows<1>(is_here(1), sums...);
    end_round();
  }

 private:
  __device__ int slot(int h) const {
    return key_group_ * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane_id() / 4 + 8 * h;
  }

  __device__ const KeyRecord& record(int h) const {
    return storage_.slots.records[round_ % 2][slot(h)];
  }

  __device__ void end_round() {
    storage_.slots.pipeline.release(round_);
    ++round_;
    round_ends_ = false;
  }

  __device__ bool is_here(int h) const {
    return !visible_.is_gone(h) && record(h).first < work_->tile_end * rows;
  }

  // Stores the rows of keys that are `on` and clears their sums. A key whose whole lifetime was in the slot gets dk and
  // dv in 16 bits, any other key a part of them in fp32. The warpgroup with dk has the sums for dbias.
  template <int H, class... Sums>
  __device__ void leave_rows(bool on, const Sums&... sums) {
    constexpr bool has_dk = (Sums::is_dk || ...);
    if (!warp_any(on)) return;
    const BackwardParams& p = p_.backward;
    const KeyRecord leaving = record(H);
    const bool came_before = leaving.first < work_->tile_begin * rows;
    const bool whole = on && !came_before && leaving.last <= work_->tile_end * rows;
    const bool part = on && !whole;
    const float dbias = quad_reduce(dbias_[H], [](float x, float y) { return x + y; });
    dbias_[H] = on ? 0 : dbias_[H];
    const bool first_lane = lane_id() % 4 == 0;
    if (warp_any(whole)) {
      (store_row<H>(whole, sums, leaving.key), ...);
      if constexpr (has_dk) {
        store_if(whole && first_lane && p.dbias.data != nullptr,
                 reinterpret_cast<float*>(p.dbias.data) + work_->batch * p.dbias.batch +
                     work_->kv_head * (p.dbias.head_q + p.dbias.head_kv) + leaving.key,
                 dbias);
      }
    }
    if (warp_any(part)) {
      const std::int64_t row =
          (std::int64_t{work_->part} * 2 + (came_before ? 0 : 1)) * policy.work_keys() +
          Kernel::rank() * policy.keys + slot(H);
      float* const to =
          p_.slots.part_sums + row * (head_dim + Kernel::value_dim) + lane_id() % 4 * 2;
      (store_part<H>(part, to, sums), ...);
      if constexpr (has_dk) store_if(part && first_lane, p_.slots.part_dbias + row, dbias);
    }
    (clear_row<H>(on, sums), ...);
  }

  template <int H, class Sums>
  static __device__ void clear_row(bool on, const Sums& gradient) {
#pragma unroll
    for (int j = 0; j < Sums::columns / 8; ++j) {
#pragma unroll
      for (int e = 2 * H; e < 2 * H + 2; ++e)
        gradient.sums[4 * j + e] = on ? 0 : gradient.sums[4 * j + e];
    }
  }

  // Each lane stores its two columns of eight. Exchanging words among the lanes of a row, for stores of 16 bytes, takes
  // more instructions than it saves, and the other warps wait for this warp.
  template <int H, class Sums>
  __device__ void store_row(bool on, const Sums& gradient, int key) const {
    const OutputRows& to = gradient.rows(p_.backward);
    const float scale = gradient.scale(p_.backward);
    on = on && to.data != nullptr;
    std::byte* const row = to.data + work_->batch * to.batch + work_->kv_head * to.head +
                           key * to.row + lane_id() % 4 * 4;
    // NaN means no limit, because a minimum with NaN is the other number.
    const std::uint32_t limit =
        p_.backward.saturate ? Element<T>::gradient_limit_packed2 : 0x7fff7fffu;
#pragma unroll
    for (int chunk = 0; chunk < Sums::columns / 8; ++chunk) {
      const float* const two = gradient.sums + 4 * chunk + 2 * H;
      store_if(on && chunk < gradient.existing_columns(p_.backward.shape) / 8, row + chunk * 16,
               clamp_packed2<T>(pack<T>(two[0] * scale, two[1] * scale), limit));
    }
  }

  // A row of a part has dk and then dv.
  template <int H, class Sums>
  static __device__ void store_part(bool on, float* to, const Sums& gradient) {
    constexpr int first = Sums::is_dk ? 0 : head_dim;
#pragma unroll
    for (int j = 0; j < Sums::columns / 8; ++j) {
      store_if(on, to + first + 8 * j, gradient.sums[4 * j + 2 * H],
               gradient.sums[4 * j + 2 * H + 1]);
    }
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const int key_group_;
  const BackwardWork* work_ = nullptr;
  int round_ = 0;  // number of earlier query tiles of this block
  bool round_ends_ = false;
  bool part_ends_ = false;
  KeyVisibility<rows> visible_;
  float dbias_[2] = {};
};

}  // namespace flash_dmattn::cuda::sm90
