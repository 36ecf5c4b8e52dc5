#pragma once

#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm90/forward/producer.cuh"

namespace flash_dmattn::cuda::sm90 {

// Gathers rows of a tile list or of consecutive keys by index, with all 128 threads. Thread (r, c) copies chunks c and c
// + 8 of rows r, r + 16, ..., so that its addresses in shared memory are one register and constants. The order of a
// list's keys in a tile is free: row r + 16 i has entry r * steps + i, so that a thread loads its indices at once.
// Consecutive keys keep their order, so that results have the same bits as with TMA tiles. Indices are loaded one tile
// ahead, before the copies of V, which hide their latency. The tensor cores read the rows through the async proxy: each
// thread waits for its copies to a buffer, fences and arrives, after issuing the copies to the next buffer, or before
// waiting for consumers that may need the last one. Rows of q with any strides are passed on with their first keys.
template <class Kernel>
struct GatherProducer : ProducerBase<Kernel> {
  using Base = ProducerBase<Kernel>;
  using Storage = typename Base::Storage;
  using Base::keys, Base::p, Base::storage;
  using KeyTile = typename Storage::KeyTile;
  using ValueTile = typename Storage::ValueTile;
  static constexpr bool any_strides = Kernel::load == KeyLoad::any;
  static constexpr int rows_at_once = 16;
  static constexpr int steps = keys / rows_at_once;

  // This thread's rows of a tile, and the key whose info it copies.
  struct Indices {
    int row[steps];
    int info;
  };

  // A work tile and this thread's addresses for it. They are computed once, so that the copies of a tile are issued as
  // soon as its buffer is free.
  struct Source {
    WorkTile work;
    const std::byte* k;  // this thread's chunk of row 0
    const std::byte* v;
    const std::int32_t* list;  // null for consecutive keys
    const float* biases;
  };

  __device__ void run() const {
    int n = 0;
    int work_count = 0;
    int number = static_cast<int>(blockIdx.x);
    Source source = get_source(number);  // there is work for every block
    Indices k_indices = fetch(source, 0);
    Indices v_indices{};
    const std::byte* v = nullptr;
    for (; number < p.work_tiles; ++work_count) {
      int taken = 0;
      hand_over(source.work, work_count);
      const int visits = source.work.visits;
#pragma unroll 1
      for (int visit = 0; visit < visits; ++visit, ++n) {
        if (threadIdx.x == 0 && visit == visits - 1) taken = this->take_work();
        load_k(source, k_indices, visit, n);
        if (visit > 0 && n > 1) announce<1>(storage.v_pipeline, n - 2);
        Indices ahead = k_indices;
        if (visit + 1 < visits) ahead = fetch(source, visit + 1);
        if (n > 0) {
          load_v(v, v_indices, n - 1);
          announce<1>(storage.k_pipeline, n);
        } else {
          announce<0>(storage.k_pipeline, n);
        }
        // The copies of q are older than those of its first keys.
        if (any_strides && visit == 0) mbarrier_arrive(storage.q_pipeline.full_of(work_count));
        v_indices = k_indices;
        k_indices = ahead;
        v = source.v;
      }
      // The consumers still compute two tiles, which hides the latency of the counter.
      int& shared_number = storage.next_work[work_count % 2];
      if (threadIdx.x == 0) shared_number = taken;
      named_barrier_sync(Kernel::producer_barrier, 128);
      number = shared_number;
      if (number < p.work_tiles) {
        source = get_source(number);
        k_indices = fetch(source, 0);
      }
      if (n > 1) announce<0>(storage.v_pipeline, n - 2);
    }
    load_v(v, v_indices, n - 1);
    announce<0>(storage.v_pipeline, n - 1);
    if (threadIdx.x == 0) this->load_end_of_work(work_count);
  }

 private:
  static __device__ int copy_row() { return static_cast<int>(threadIdx.x) / 8; }
  static __device__ int copy_chunk() { return static_cast<int>(threadIdx.x) % 8; }

  static __device__ const std::byte* rows_of_head(const InputRows& rows, int batch, int head) {
    return rows.data + batch * rows.batch + head * rows.head + copy_chunk() * 16;
  }

  __device__ Source get_source(int number) const {
    Source source;
    source.work = this->get_work(number);
    const WorkTile& work = source.work;
    source.k = rows_of_head(p.forward.k, work.batch, work.kv_head);
    source.v = rows_of_head(p.forward.v, work.batch, work.kv_head);
    source.list = nullptr;
    if (p.forward.tile_lists.keys != nullptr) {
      source.list = p.forward.tile_lists.keys +
                    __ldg(p.forward.tile_lists.begin + list_of(p.forward.tile_lists, work));
    }
    source.biases = this->biases(work);
    // Keeps the addresses in registers instead of recomputing them at each use.
    make_opaque(source.k, source.v, source.biases);
    return source;
  }

  // The keys of this thread's rows; key 0 for entries past the end.
  __device__ Indices fetch(const Source& source, int visit) const {
    const int tile = source.work.template first_key<keys>(visit);
    const int first = tile + copy_row() * steps;
    const int mine = tile + static_cast<int>(threadIdx.x);
    Indices indices;
    if (source.list == nullptr) {
#pragma unroll
      for (int i = 0; i < steps; ++i)
        indices.row[i] = min(tile + copy_row() + rows_at_once * i, p.forward.shape.seqlen_k - 1);
      indices.info = mine;
      return indices;
    }
    const std::int32_t* const from = source.list + first;
    const int end = source.work.end;
    if (first + steps <= end && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < steps; i += 4) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(from + i));
        indices.row[i] = four.x;
        indices.row[i + 1] = four.y;
        indices.row[i + 2] = four.z;
        indices.row[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < steps; ++i) indices.row[i] = first + i < end ? __ldg(from + i) : 0;
    }
    indices.info = mine < end ? __ldg(source.list + mine) : 0;
    return indices;
  }

  // Copies bias and range of entry threadIdx.x to the row of shared memory that has its key.
  __device__ void load_info(const Source& source, int key, int visit, int n) const {
    const int place = static_cast<int>(threadIdx.x);
    const int row = source.list == nullptr ? place : place / steps + rows_at_once * (place % steps);
    const int stage = Storage::info_stage(n);
    const float* bias = source.biases + key;
    if constexpr (Kernel::delays) {
      if (p.info.recent != 0) bias += load_delayed(source, key, row, stage);
    }
    if (place >= keys) return;
    cp_async_4(shared_address(&storage.info.bias[stage][row]), bias, true);
    if (source.work.is_partial(visit)) {
      const bool exists = source.work.template first_key<keys>(visit) + place < source.work.end;
      cp_async_8(shared_address(&storage.info.range[stage][row]), this->ranges(source.work) + key,
                 exists);
    }
  }

  // Copies the delayed bias of a key to `row` of shared memory, 0 unless it counts for some but not all queries of the
  // work tile. Returns the distance to the bias with which the accumulators begin. Called by all lanes of a warp.
  __device__ std::int64_t load_delayed(const Source& source, int key, int row, int stage) const {
    const BiasBounds bounds(p.forward, source.work.row, Base::rows);
    const bool exists = static_cast<int>(threadIdx.x) < keys;
    const bool recent = key >= bounds.all_end;
    const bool delayed = exists && recent && key < bounds.some_end;
    const bool any = warp_any(delayed);
    if (lane_id() == 0) storage.info.exists[stage][warp_id()] = any;
    if (exists) {
      cp_async_4(shared_address(&storage.info.delayed[stage][row]), source.biases + key, delayed);
      storage.info.begin[stage][row] = delayed_bias_begin(p.forward.score, p.forward.shape, key);
    }
    return recent ? p.info.recent : 0;
  }

  __device__ void load_k(const Source& source, const Indices& at, int visit, int n) const {
    auto& pipeline = storage.k_pipeline;
    pipeline.wait_empty(n);
    copy_tile<KeyTile>(p.forward.k, p.forward.shape.head_dim, source.k,
                       shared_address(storage.k[pipeline.stage(n)]), at.row);
    load_info(source, at.info, visit, n);
    cp_async_commit();
  }

  __device__ void load_v(const std::byte* v, const Indices& at, int n) const {
    auto& pipeline = storage.v_pipeline;
    pipeline.wait_empty(n);
    copy_tile<ValueTile>(p.forward.v, p.forward.shape.value_dim, v,
                         shared_address(storage.v[pipeline.stage(n)]), at.row);
    cp_async_commit();
  }

  __device__ void hand_over(const WorkTile& work, int n) const {
    if constexpr (!any_strides) {
      if (threadIdx.x == 0) this->load_q(work, n);
    } else {
      using QTile = typename Storage::QTile;
      auto& pipeline = storage.q_pipeline;
      pipeline.wait_empty(n);
      if (threadIdx.x == 0) storage.work[pipeline.stage(n)] = work;
      int row[QTile::rows / rows_at_once];
#pragma unroll
      for (int i = 0; i < QTile::rows / rows_at_once; ++i)
        row[i] = min(work.row + copy_row() + rows_at_once * i, p.forward.shape.seqlen_q - 1);
      copy_tile<QTile>(p.forward.q, p.forward.shape.head_dim,
                       rows_of_head(p.forward.q, work.batch, work.head),
                       shared_address(storage.q[pipeline.stage(n)]), row);
    }
  }

  // Passes this thread's rows of buffer n to the consumers. It has issued copies to `Pending` buffers since.
  template <int Pending, class AnyPipeline>
  static __device__ void announce(const AnyPipeline& pipeline, int n) {
    cp_async_wait<Pending>();
    fence_async_proxy();
    mbarrier_arrive(pipeline.full_of(n));
  }

  // Copies rows; columns from `columns` on become zero. `data` is this thread's chunk of row 0.
  template <class Tile, int Steps>
  __device__ void copy_tile(const InputRows& rows, int columns, const std::byte* data,
                            std::uint32_t tile, const int (&index)[Steps]) const {
    const int chunk = copy_chunk();
    const int chunks = columns / 8;
    const std::uint32_t to = tile + Tile::offset(copy_row(), chunk);
    if (any_strides && !rows.aligned) {
#pragma unroll 1
      for (int j = 0; j < Tile::panels; ++j) {
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
          uint4 value{0, 0, 0, 0};
          if (chunk + 8 * j < chunks)
            value = load_unaligned_chunk(data + index[i] * rows.row + j * 128);
          store_shared_16(to + j * Tile::panel_bytes + i * rows_at_once * panel_row_bytes, value);
        }
      }
      return;
    }
    int bytes[Tile::panels];
#pragma unroll
    for (int j = 0; j < Tile::panels; ++j) bytes[j] = chunk + 8 * j < chunks ? 16 : 0;
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      // The address is one multiply-add if strides are known to be nonnegative.
      const std::byte* const row =
          any_strides ? data + index[i] * rows.row
                      : data + static_cast<std::uint64_t>(static_cast<unsigned>(index[i])) *
                                   static_cast<unsigned>(rows.row_step);
#pragma unroll
      for (int j = 0; j < Tile::panels; ++j) {
        cp_async_part(to + j * Tile::panel_bytes + i * rows_at_once * panel_row_bytes,
                      row + j * 128, bytes[j]);
      }
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
