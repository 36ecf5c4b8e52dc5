#pragma once

#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// The order in which blocks of neighbouring keys add to a tile of dq (primitives/semaphore.cuh). Additions are published
// for `group` tiles at once: a release waits until they are in memory, which may take longer than a tile.
template <class Kernel>
class BlockOrder {
  using Semaphore = typename Kernel::SharedStorage::Semaphore;
  static constexpr int rows = Kernel::policy.rows;
  static constexpr int group = 128 / rows;

 public:
  __device__ BlockOrder(const BackwardKernelParams& p, typename Kernel::SharedStorage& storage,
                        int predecessor)
      : p_(p),
        semaphore_(p.order, storage.semaphore, ThreadGroup<warp_size>::of_warp(), predecessor) {}

  __device__ void begin_tile(const BackwardWork& work,
                             const QueryVisits<Kernel::variant>& at) const {
    if (at.tile() != work.tile_begin && at.tile() % group != 0) return;
    const int last = min(at.tile() / group * group + group, work.tile_end) - 1;
    const auto index =
        static_cast<int>(tile_index(p_.backward.shape, rows, work.batch, at.head(), last));
    bulk_wait();
    semaphore_.advance(index);
    semaphore_.wait(index);
  }
  __device__ void end_work(const BackwardWork&) const {}
  __device__ void finish() const { semaphore_.finish(); }

 private:
  const BackwardKernelParams& p_;
  Semaphore semaphore_;
};

// The order of additions with a dense mask or bias: each block visits its own selection of tiles, ordered by their index
// among all.
template <class Kernel>
class VisitOrder {
  using Semaphore = typename Kernel::SharedStorage::Semaphore;
  static constexpr int group = 2;

 public:
  __device__ VisitOrder(const BackwardKernelParams& p, typename Kernel::SharedStorage& storage,
                        int predecessor)
      : p_(p),
        semaphore_(p.order, storage.semaphore, ThreadGroup<warp_size>::of_warp(), predecessor) {}

  __device__ void begin_tile(const BackwardWork& work, const QueryVisits<Kernel::variant>& at) {
    const Shape& shape = p_.backward.shape;
    const int heads = shape.group_heads();
    const int head = at.head() - work.kv_head * heads;
    const int place = p_.visits.heads_together
                          ? at.tile() * heads + head
                          : head * ceil_div(shape.seqlen_q, Kernel::policy.rows) + at.tile();
    if (place <= last_) return;
    last_ = place / group * group + group - 1;
    bulk_wait();
    semaphore_.advance(last_);
    semaphore_.wait(last_);
  }
  __device__ void end_work(const BackwardWork&) const {}
  __device__ void finish() const { semaphore_.finish(); }

 private:
  const BackwardKernelParams& p_;
  Semaphore semaphore_;
  int last_ = -1;  // the last index at which the block may add
};

// The order of parts of chains of slots, by counts of the blocks that have added to the tiles of two heads of a group.
// Blocks then follow each other at a distance of two tiles for any group: at the distance of a round of eight heads, q,
// dout and dq of all rounds in flight do not fit into the L2.
template <class Kernel>
class SlotOrder {
 public:
  __device__ SlotOrder(const BackwardKernelParams& p, typename Kernel::SharedStorage&, int)
      : p_(p) {}

  __device__ void begin_tile(const BackwardWork& work,
                             const QueryVisits<Kernel::variant>& at) const {
    const int member = at.head() - work.kv_head * p_.backward.shape.group_heads();
    if (member % order_heads != 0 || lane_id() != 0) return;
    const int step = first_step(work, at.tile()) + member / order_heads;
    // Later blocks need not wait until this block may add.
    if (member > 0 || at.tile() > work.tile_begin) publish(work, step - 1);
    while (load_acquire(published(step)) != work.position) {
    }
  }
  __device__ void end_work(const BackwardWork& work) const {
    if (lane_id() == 0) publish(work, first_step(work, work.tile_end) - 1);
  }
  __device__ void finish() const {}

 private:
  // Steps are numbered in the order of visits.
  __device__ int first_step(const BackwardWork& work, int tile) const {
    const Shape& shape = p_.backward.shape;
    return ((work.batch * shape.heads_kv + work.kv_head) *
                ceil_div(shape.seqlen_q, slot_tile_rows) +
            tile) *
           ceil_div(shape.group_heads(), order_heads);
  }
  __device__ void publish(const BackwardWork& work, int step) const {
    bulk_wait();
    store_release(published(step), work.position + 1);
  }
  // The count of a step. Each block of a pair has its own, as it adds other elements.
  __device__ int* published(int step) const {
    return p_.order.published + step * Kernel::policy.cluster + Kernel::rank();
  }

  const BackwardKernelParams& p_;
};

// Adds the consumers' tiles of dq in shared memory to the sums in global memory. A part has two named barriers between
// this warp and the warpgroup that computes the part: the part is free, and it is full.
template <class Kernel>
struct DqWriter {
  using Storage = typename Kernel::SharedStorage;
  using Layout = typename Kernel::DqLayout;
  using NeighbourOrder =
      std::conditional_t<Kernel::variant.has_dense(), VisitOrder<Kernel>, BlockOrder<Kernel>>;
  using Order = std::conditional_t<Kernel::has_slots, SlotOrder<Kernel>, NeighbourOrder>;
  static constexpr int parts = Kernel::policy.dq_parts(Kernel::head_dim);
  static constexpr bool shares_tile = Kernel::policy.shares_dq_tile;
  static constexpr int part_bytes = Layout::part_floats * sizeof(float);
  static constexpr int threads = 128 + warp_size;  // of these barriers

  const BackwardKernelParams& p;
  Storage& storage;
  Order& order;

  // Called by all lanes of one warp.
  __device__ void run(const BackwardWork& work) const {
    const bool ordered = p.order.published != nullptr;
    int n = 0;
#pragma unroll 1
    for (QueryVisits<Kernel::variant> at(p, work); at.has(); at.advance(), ++n) {
      const std::int64_t index =
          tile_index(p.backward.shape, Kernel::policy.rows, work.batch, at.head(), at.tile());
      float* const to = p.dq_accum + index * Layout::floats;
      const int turn = Kernel::turn(at);
      // The warpgroup that makes two of three parts, of which the second follows the other's part.
      const int makes_two = n % 2;
      if constexpr (parts == 3) {
        bulk_wait_read<1>();
        free_part(makes_two);
        bulk_wait_read<0>();
        free_part(1 - makes_two);
      } else if constexpr (!shares_tile) {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          // If every tile has all parts, the addition of the next part may still read shared memory.
          if (part + 1 < parts && !Kernel::takes_turns)
            bulk_wait_read<1>();
          else
            bulk_wait_read<0>();
          if (Kernel::makes_dq(turn, part)) free_part(part);
        }
      }
      if (ordered) {
        order.begin_tile(work, at);
        __syncwarp();
        fence_async_proxy_global();
      }
      if constexpr (parts == 3) {
        add(makes_two, to + makes_two * Layout::part_floats);
        add(1 - makes_two, to + (1 - makes_two) * Layout::part_floats);
        bulk_wait_read<1>();
        free_part(makes_two);
        add(makes_two, to + 2 * Layout::part_floats);
      } else {
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          if (!Kernel::makes_dq(turn, part)) continue;
          if constexpr (shares_tile) {
            bulk_wait_read<0>();
            free_part(part);
          }
          add(part, to + number(turn, part) * Layout::part_floats);
        }
      }
    }
    bulk_wait();
    __syncwarp();
    if (ordered) order.end_work(work);
  }

 private:
  // Adds the part that a warpgroup has passed.
  __device__ void add(int warpgroup, float* to) const {
    named_barrier_sync(Kernel::dq_full_barrier + warpgroup, threads);
    if (lane_id() == 0 && p.dq_accum != nullptr) {
      constexpr int tiles = Kernel::policy.dq_tiles(Kernel::head_dim);
      bulk_add(to, shared_address(storage.dq[warpgroup % tiles]), part_bytes);
    }
  }
  static __device__ void free_part(int part) {
    __syncwarp();
    named_barrier_arrive(Kernel::dq_free_barrier + part, threads);
  }
  // The number of a part of this block among the parts of a tile of dq.
  static __device__ int number(int turn, int part) {
    return Kernel::policy.dq == DqSplit::columns ? Kernel::dq_panel(turn, part) : part;
  }
};

}  // namespace flash_dmattn::cuda::sm90
