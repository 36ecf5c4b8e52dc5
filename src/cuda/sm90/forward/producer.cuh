#pragma once

#include "cuda/sm90/forward/repetition.cuh"
#include "cuda/sm90/forward/storage.cuh"

// The producer warpgroup loads q, K and V to shared memory in the order of the products:
//
//   q(0) K(0) | K(1) V(0) | K(2) V(1) | ...   and at the end of a work tile   | q(1) K(n) V(n - 1) | ...
namespace flash_dmattn::cuda::sm90 {

// The common part of all producers, for work tiles and for tiles of q by the TMA unit.
template <class Kernel>
struct ProducerBase {
  using Storage = typename Kernel::SharedStorage;
  static constexpr int keys = Kernel::policy.keys;
  static constexpr int rows = Kernel::policy.rows();

  const ForwardKernelParams& p;
  Storage& storage;

  __device__ WorkTile get_work(int number) const {
    return get_work_tile<rows, keys>(p.forward, number);
  }

  // Takes the next work tile as late as the latency can be hidden. The longest work tiles come first, and a block that
  // takes the next one early leaves too few for blocks that end before it.
  __device__ int take_work() const {
    if (Kernel::can_be_short && p.next_work == nullptr) return p.work_tiles;
    if (is_first_run(Kernel::repetition, p) && load_relaxed(p.has_large_rows) != 0)
      return p.work_tiles;
    const int run = is_second_run(Kernel::repetition, p) ? 1 : 0;
    return atomicAdd(p.next_work + run, 1) + static_cast<int>(gridDim.x);
  }

  // Passes work tile `n` of this block and its q to the consumers. Called by one thread.
  __device__ void load_q(const WorkTile& work, int n) const {
    auto& pipeline = storage.q_pipeline;
    pipeline.wait_empty(n);
    storage.work[pipeline.stage(n)] = work;
    const std::uint32_t full = pipeline.full_of(n);
    mbarrier_arrive_expect(full, Storage::QTile::bytes);
    const std::uint32_t tile = shared_address(storage.q[pipeline.stage(n)]);
    // A box has all rows, or with two heads eight queries of one head and the same eight of the other.
    const int boxes = Kernel::dense == DenseAccess::tiles && p.two_heads ? rows / 16 : 1;
#pragma unroll
    for (int i = 0; i < Storage::QTile::panels; ++i) {
#pragma unroll 1
      for (int j = 0; j < boxes; ++j) {
        tma_load(tile + i * Storage::QTile::panel_bytes + j * 16 * panel_row_bytes, p.q_map, full,
                 i * panel_columns, work.row + 8 * j, work.head, work.batch);
      }
    }
  }

  // Passes the end of work to the consumers. Called by one thread.
  __device__ void load_end_of_work(int n) const {
    auto& pipeline = storage.q_pipeline;
    pipeline.wait_empty(n);
    storage.work[pipeline.stage(n)] = WorkTile::end_of_work();
    for (int i = 0; i < Kernel::q_arrivals; ++i) mbarrier_arrive(pipeline.full_of(n));
  }

  __device__ const KeyInterval* ranges(const WorkTile& work) const {
    return p.info.ranges_of(work.batch, work.kv_head);
  }
  // In the unit of Kernel::key_bias_factor.
  __device__ const float* biases(const WorkTile& work) const {
    return p.info.biases_of(work.batch, work.head, work.kv_head) +
           (Kernel::repetition == Repetition::repeats ? p.info.caller_biases : 0);
  }
};

// Loads consecutive keys with one thread.
template <class Kernel>
struct TmaProducer : ProducerBase<Kernel> {
  using Base = ProducerBase<Kernel>;
  using Storage = typename Base::Storage;
  using Base::keys, Base::p, Base::storage;
  using KeyTile = typename Storage::KeyTile;
  using ValueTile = typename Storage::ValueTile;

  // The coordinates of a key tile.
  struct Place {
    int batch;
    int kv_head;
    int key;
  };
  // The key info of a work tile, from key 0 on.
  struct Info {
    const float* biases = nullptr;
    const KeyInterval* ranges = nullptr;
    int row = 0;  // first query
  };

  __device__ void run() const {
    if (warp_id() != 0 || !elect_lane()) return;
    int n = 0;
    int work_count = 0;
    Place before{};
    for (int number = static_cast<int>(blockIdx.x); number < p.work_tiles; ++work_count) {
      const WorkTile work = this->get_work(number);
      const Info info = info_of(work);
      this->load_q(work, work_count);
      for (int visit = 0; visit < work.visits; ++visit, ++n) {
        if (visit == work.visits - 1) number = this->take_work();
        const Place here{work.batch, work.kv_head, work.template first_key<keys>(visit)};
        load_k(info, here, work.is_partial(visit), n);
        if (n > 0) load_v(before, n - 1);
        before = here;
      }
    }
    if (n > 0) load_v(before, n - 1);
    this->load_end_of_work(work_count);
  }

 protected:
  __device__ Info info_of(const WorkTile& work) const {
    if constexpr (Kernel::has_key_info) return {this->biases(work), this->ranges(work), work.row};
    return {};
  }

  __device__ void load_k(const Info& info, const Place& at, bool partial, int n) const {
    auto& pipeline = storage.k_pipeline;
    pipeline.wait_empty(n);
    const std::uint32_t full = pipeline.full_of(n);
    if constexpr (Kernel::has_key_info) {
      if (!Kernel::computes_key_info(p)) load_info(info, at, partial, n, full);
    }
    mbarrier_arrive_expect(full, KeyTile::bytes);
    load_tile<KeyTile>(p.k_map, shared_address(storage.k[pipeline.stage(n)]), full, at);
  }

  __device__ void load_v(const Place& at, int n) const {
    auto& pipeline = storage.v_pipeline;
    pipeline.wait_empty(n);
    const std::uint32_t full = pipeline.full_of(n);
    mbarrier_arrive_expect(full, ValueTile::bytes);
    load_tile<ValueTile>(p.v_map, shared_address(storage.v[pipeline.stage(n)]), full, at);
  }

 private:
  __device__ void load_info(const Info& info, const Place& at, bool partial, int n,
                            std::uint32_t full) const {
    const int stage = Storage::info_stage(n);
    constexpr int bias_bytes = keys * static_cast<int>(sizeof(float));
    constexpr int range_bytes = keys * static_cast<int>(sizeof(KeyInterval));
    const float* const biases = info.biases + at.key;
    std::int64_t recent = 0;
    if constexpr (Kernel::delays) {
      if (p.info.recent != 0) {
        const BiasBounds bounds(p.forward, info.row, Base::rows);
        if (at.key + keys > bounds.all_end) recent = p.info.recent;
        const bool delayed = recent != 0 && at.key < bounds.some_end;
        storage.info.set_delayed(stage, delayed);
        if (delayed) {
          mbarrier_expect(full, bias_bytes);
          bulk_load(shared_address(storage.info.delayed[stage]), biases, bias_bytes, full);
        }
      }
    }
    mbarrier_expect(full, bias_bytes + (partial ? range_bytes : 0));
    bulk_load(shared_address(storage.info.bias[stage]), biases + recent, bias_bytes, full);
    if (partial) {
      bulk_load(shared_address(storage.info.range[stage]), info.ranges + at.key, range_bytes, full);
    }
  }

  template <class Tile>
  __device__ static void load_tile(const CUtensorMap& map, std::uint32_t tile, std::uint32_t full,
                                   const Place& at) {
#pragma unroll
    for (int i = 0; i < Tile::panels; ++i) {
      tma_load(tile + i * Tile::panel_bytes, map, full, i * panel_columns, at.key, at.kv_head,
               at.batch);
    }
  }
};

}  // namespace flash_dmattn::cuda::sm90
