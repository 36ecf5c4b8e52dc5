#pragma once

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/query_visits.cuh"
#include "cuda/sm90/dense/rows.h"

// The gradient of a dense bias, from the tiles of dS in shared memory. A block stores each element of its keys once. If
// dS of several blocks share an element, they are added in memory.
namespace flash_dmattn::cuda::sm90 {

// The elements of dbias that belong to a head and a block of keys, eight neighbouring keys of a query at a time.
template <class Kernel>
class DbiasRows {
  using T = typename Kernel::Element;
  static constexpr int rows = Kernel::policy.rows;
  static constexpr int chunks = Kernel::SharedStorage::ScoreTile::chunks;
  static constexpr int rows_at_once = warp_size / chunks;

 public:
  __device__ DbiasRows(const BackwardKernelParams& p, const BackwardWork& work, int head)
      : p_(p),
        work_(work),
        begin_(p.backward.dbias.begin(work.batch, head, work.kv_head)),
        first_key_(work.key + 8 * chunk()),
        count_(min(p.backward.shape.seqlen_k - first_key_, 8)) {}

  // The chunk of the lane's keys in a row of a tile.
  static __device__ int chunk() { return lane_id() % chunks; }

  // Stores or adds queries [first_query, first_query + rows). chunk_of(row): the lane's eight elements of a row.
  template <class ChunkOf>
  __device__ void store_or_add_rows(int first_query, const ChunkOf& chunk_of) const {
    const OutputBroadcast& dbias = p_.backward.dbias;
    const int existing = min(rows, p_.backward.shape.seqlen_q - first_query);
    const int first_row = lane_id() / chunks;
    if (count_ == 8 && dbias.aligned_16B) {
      std::byte* to =
          dbias.data + 2 * (begin_ + (first_query + first_row) * dbias.query + first_key_);
#pragma unroll 4
      for (int row = first_row; row < existing; row += rows_at_once) {
        *reinterpret_cast<uint4*>(to) = chunk_of(row);
        to += 2 * rows_at_once * dbias.query;
      }
    } else {
#pragma unroll 1
      for (int row = first_row; row < existing; row += rows_at_once)
        store_or_add_chunk(begin_ + (first_query + row) * dbias.query, chunk_of(row));
    }
  }

  // Adds the sum of a row, for a bias that all keys of a query share.
  __device__ void add_sum(int query, float sum) const {
    if (query >= p_.backward.shape.seqlen_q) return;
    store_gradient<T>(p_.backward.dbias, begin_ + query * p_.backward.dbias.query, sum, true,
                      p_.backward.saturate);
  }

 private:
  // Stores or adds eight elements. `row`: the first element of the query's row.
  __device__ void store_or_add_chunk(std::int64_t row, uint4 eight) const {
    const OutputBroadcast& dbias = p_.backward.dbias;
    if (dbias.key != 1) {
      store_or_add_one_by_one(row, eight);
    } else if (dbias.f32) {
      auto* const to = reinterpret_cast<float*>(dbias.data) + row + first_key_;
      store_or_add_four(to, count_, eight.x, eight.y);
      store_or_add_four(to + 4, count_ - 4, eight.z, eight.w);
    } else {
      auto* const to = reinterpret_cast<std::uint16_t*>(dbias.data) + row + first_key_;
      const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count_) to[i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
      }
    }
  }

  // Stores or adds the first `count` of four fp32 elements.
  __device__ void store_or_add_four(float* to, int count, std::uint32_t low,
                                    std::uint32_t high) const {
    const float2 x = Element<T>::widen_packed2(low);
    const float2 y = Element<T>::widen_packed2(high);
    const float four[4] = {x.x, x.y, y.x, y.y};
    const bool adds = p_.backward.dbias_accumulates;
    if (adds && ((low | high) & 0x7fff7fffu) == 0) return;
    if (count >= 4 && p_.backward.dbias.aligned_x4) {
      if (adds) {
        reduce_add(to, x.x, x.y, y.x, y.y);
      } else {
        *reinterpret_cast<float4*>(to) = {x.x, x.y, y.x, y.y};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      if (adds) {
        atomicAdd(to + i, four[i]);
      } else {
        to[i] = four[i];
      }
    }
  }

  __device__ void store_or_add_one_by_one(std::int64_t row, uint4 eight) const {
    const OutputBroadcast& dbias = p_.backward.dbias;
#pragma unroll 1
    for (int i = 0; i < count_; ++i) {
      store_gradient<T>(dbias, row + (first_key_ + i) * dbias.key,
                        Element<T>::widen_packed2(eight.x).x, p_.backward.dbias_accumulates,
                        p_.backward.saturate);
      eight = {__funnelshift_r(eight.x, eight.y, 16), __funnelshift_r(eight.y, eight.z, 16),
               __funnelshift_r(eight.z, eight.w, 16), eight.w >> 16};
    }
  }

  const BackwardKernelParams& p_;
  const BackwardWork& work_;
  std::int64_t begin_;
  int first_key_;  // the first of the lane's eight, a position in the block's problem
  int count_;      // how many of the eight exist
};

// Stores a tile of dbias by the TMA unit, panel i from `from + i * panel_stride`. Called by one lane; commits its own bulk
// group.
template <class Kernel>
__device__ inline void store_dbias_by_tma(const BackwardKernelParams& p, const BackwardWork& work,
                                          int head, int tile, std::uint32_t from,
                                          int panel_stride) {
  const auto [map_head, map_batch] = index_in_map(p.backward.dbias, work.batch, head, work.kv_head);
#pragma unroll
  for (int i = 0; i < Kernel::SharedStorage::ScoreTile::panels; ++i) {
    tma_store(p.dbias_map, from + static_cast<std::uint32_t>(i * panel_stride),
              work.key + i * panel_columns, tile * Kernel::policy.rows, map_head, map_batch);
  }
  bulk_commit();
}

// A warp that stores the tiles of dS, in the order of the visits.
template <class Kernel>
struct DbiasWriter {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using ScoreTile = typename Storage::ScoreTile;
  using Visits = QueryVisits<Kernel::variant>;
  static constexpr int rows = Kernel::policy.rows;
  static constexpr int chunks = ScoreTile::chunks;  // chunks of eight keys per row

  const BackwardKernelParams& p;
  Storage& storage;

  __device__ void run(const BackwardWork& work) const {
    auto& computed = storage.dense.computed;
    int n = 0;
#pragma unroll 1
    for (Visits at(p, work); at.has(); at.advance(), ++n) {
      computed.wait_full(n);
      // The sum of two heads is in the tile of the first, and is stored when the second has been added.
      if (at.is_first_of_two()) continue;
      const int summed = at.is_second_of_two() ? n - 1 : n;
      if (wanted()) {
        if (p.dense_dbias.by_tma) {
          store_by_tma(work, at, tile(summed));
        } else {
          shares_row() ? add_row_sums(work, at, tile(summed)) : store(work, at, tile(summed));
        }
      }
      if (summed != n) computed.release(summed);
      computed.release(n);
    }
  }

 private:
  __device__ bool wanted() const {
    return p.backward.dbias.data != nullptr && p.backward.dbias.dense;
  }
  __device__ bool shares_row() const { return p.backward.dbias.key == 0; }

  __device__ std::uint32_t tile(int n) const {
    return shared_address(storage.ds[Pipeline<Kernel::policy.score_tiles>::stage(n)]);
  }

  __device__ void store_by_tma(const BackwardWork& work, const Visits& at,
                               std::uint32_t from) const {
    if (lane_id() != 0) return;
    store_dbias_by_tma<Kernel>(p, work, at.head(), at.tile(), from, ScoreTile::panel_bytes);
    bulk_wait_read<0>();
  }

  __device__ void store(const BackwardWork& work, const Visits& at, std::uint32_t from) const {
    using Rows = DbiasRows<Kernel>;
    Rows(p, work, at.head()).store_or_add_rows(at.tile() * rows, [&](int row) {
      return load_shared_16(from + ScoreTile::offset(row, Rows::chunk()));
    });
  }

  __device__ void add_row_sums(const BackwardWork& work, const Visits& at,
                               std::uint32_t from) const {
    const DbiasRows<Kernel> dbias(p, work, at.head());
#pragma unroll 1
    for (int row = lane_id(); row < rows; row += warp_size) {
      float sum = 0;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint4 eight = load_shared_16(from + ScoreTile::offset(row, chunk));
        for (const std::uint32_t word : {eight.x, eight.y, eight.z, eight.w}) {
          const float2 two = Element<T>::widen_packed2(word);
          sum += two.x + two.y;
        }
      }
      dbias.add_sum(at.tile() * rows + row, sum);
    }
  }
};

// Stores zeros to the tiles that no visit computes, one tile per step. The TMA unit stores one panel of zeros repeatedly
// and the warp waits once at the end; plain stores would delay its loads.
template <class Kernel>
class DbiasClearer {
  using Storage = typename Kernel::SharedStorage;

 public:
  __device__ DbiasClearer(const BackwardKernelParams& p, Storage& storage, const BackwardWork& work)
      : p_(p), storage_(storage), work_(work), at_(p, work) {
    if (!p_.dense_dbias.by_tma) return;
    for (int i = lane_id() * 16; i < static_cast<int>(sizeof(storage.dense.zeros));
         i += warp_size * 16) {
      store_shared_16(zeros() + static_cast<std::uint32_t>(i), {0, 0, 0, 0});
    }
    fence_async_proxy();
    __syncwarp();
  }

  // Number of steps per visit, so that the zeros are spread over all visits.
  __device__ int steps_of_visit() const { return 1 + tiles() / max(work_.tile_end, 1); }

  // Stores the zeros of one tile or passes one visit; returns false when all is done.
  __device__ bool step() {
    if (!p_.dense_dbias.clears) return false;
    const int end = at_.has() ? number() : tiles();
    if (next_ < end) {
      clear(next_++);
      return true;
    }
    if (!at_.has()) return false;
    next_ = max(next_, end + 1);
    at_.advance();
    return true;
  }

  __device__ void finish() {
#pragma unroll 1
    while (step()) {
    }
    if (elect_lane()) bulk_wait_read<0>();
    __syncwarp();
  }

 private:
  static constexpr int rows = Kernel::policy.rows;

  __device__ int first_head() const { return work_.kv_head * p_.backward.shape.group_heads(); }
  // Heads of the group that have their own dbias.
  __device__ int heads() const {
    return p_.backward.dbias.head_q != 0 ? p_.backward.shape.group_heads() : 1;
  }
  __device__ int tiles() const { return ceil_div(p_.backward.shape.seqlen_q, rows) * heads(); }
  __device__ std::uint32_t zeros() const { return shared_address(storage_.dense.zeros); }

  // Tiles are numbered in the order of the visits: the heads of a query tile follow each other.
  __device__ int number() const {
    return at_.tile() * heads() + (heads() > 1 ? at_.head() - first_head() : 0);
  }

  __device__ void clear(int number) const {
    const int head = first_head() + (heads() > 1 ? number % heads() : 0);
    const int tile = number / heads();
    if (p_.dense_dbias.by_tma) {
      if (elect_lane()) store_dbias_by_tma<Kernel>(p_, work_, head, tile, zeros(), 0);
      __syncwarp();
    } else {
      const DbiasRows<Kernel> dbias(p_, work_, head);
      dbias.store_or_add_rows(tile * rows, [](int) { return uint4{0, 0, 0, 0}; });
    }
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const BackwardWork& work_;
  QueryVisits<Kernel::variant> at_;  // the next visit to pass
  int next_ = 0;                     // the next tile to pass or to clear
};

}  // namespace flash_dmattn::cuda::sm90
