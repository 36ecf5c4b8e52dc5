#pragma once

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/primitives/tile_copy.cuh"
#include "cuda/sm90/backward/keys/key_biases.cuh"
#include "cuda/sm90/backward/keys/key_gradients.h"
#include "cuda/sm90/backward/keys/key_visibility.cuh"
#include "cuda/sm90/backward/storage.cuh"
#include "cuda/sm90/backward/work/loaded_visits.cuh"
#include "cuda/sm90/backward/work/work.cuh"

namespace flash_dmattn::cuda::sm90 {

// A block of neighbouring keys, for a warpgroup with 64 of them, which are number `key_group`. It knows the queries that
// see a thread's two keys, and the keys' biases and gradients. Keys are the rows of the accumulators; a thread has row()
// and row() + 8.
template <class Kernel>
class KeyBlock {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  using Rows = typename Storage::KeyTile;
  using StagedRows = typename Storage::ValueTile;
  static constexpr BackwardPolicy policy = Kernel::policy;
  static constexpr int rows = policy.rows;
  static constexpr int columns = rows / 2;  // a thread's score accumulators
  static constexpr bool has_info = Kernel::variant.has_info();
  static constexpr bool has_dense = Kernel::variant.has_dense();

 public:
  using Visit = std::conditional_t<has_dense, LoadedVisits<Kernel>, QueryVisits<Kernel::variant>>;
  using Biases = KeyBiases<rows, Kernel::variant.delays>;

  __device__ KeyBlock(const BackwardKernelParams& p, Storage& storage, int key_group)
      : p_(p), storage_(storage), work_(storage.work[0]), key_group_(key_group) {}

  // Called before the first query tile, when K and V are loaded, by the warpgroups that compute scores.
  __device__ void begin(int) {
    if constexpr (has_dense) {
      store_ranges();
    } else if constexpr (!has_info) {
      full_begin_ = warp_max(max(first_query_of(0), first_query_of(1)));
    }
    if constexpr (has_info) clear_unseen_rows();
  }

  // Called before the scores of a query tile are initialized; with a dense mask or bias only for the first tile.
  __device__ void begin_tile(const Visit& at) {
    if constexpr (has_dense) {
      load_biases(at.head());
    } else if constexpr (has_info) {
      // The comparison reads the work in shared memory. With the visit's registers ptxas treats the branch, and thus
      // the whole loop, as divergent (docs/kernels/sm90-backward.md).
      if (p_.info.bias_head_q != 0 && at.tile() == work_.tile_begin) change_biases(at.head());
    }
  }

  // No key leaves before the end.
  template <class... Sums>
  __device__ void leave(const Visit&, const Sums&...) {}

  // The bias of a row in units of the accumulator.
  __device__ float bias(int h) const {
    if constexpr (has_dense) {
      return bias_[h];
    } else {
      return visible_.bias(h);
    }
  }

  __device__ Biases biases_of(const Visit& at) const {
    if constexpr (Kernel::variant.delays) {
      return Biases(p_, at.tile() * rows, record(0), record(1));
    } else {
      return Biases(bias(0), bias(1));
    }
  }

  // Loads the biases of the next tile, with a dense mask or bias, during the products of a tile.
  __device__ void load_next(const Visit& at) { load_biases(at.next_head()); }

  // Called while the scores of a tile are computed.
  __device__ void prepare_mask(const Visit& at) {
    if constexpr (has_info && !has_dense) {
      const int first_query = at.tile() * rows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        visible_.see(h, record(h), first_query);
        if (visible_.is_partial(h)) visible_.prepare_mask(h, record(h), first_query);
      }
    }
  }

  // Sets scores of keys that a query does not see to -inf. Queries past the end have no P.
  __device__ void mask(const Visit& at, float (&scores)[columns]) const {
    const int first_query = at.tile() * rows;
    if constexpr (has_dense) {
      mask_by_ranges(first_query, scores);
    } else if constexpr (has_info) {
      if (visible_.is_partial(0)) visible_.template mask<0>(scores);
      if (visible_.is_partial(1)) visible_.template mask<1>(scores);
    } else {
      if (first_query >= full_begin_) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = first_query_of(h) - first_query - 2 * (lane_id() % 4);
#pragma unroll
        for (int j = 0; j < rows / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e < first) scores[4 * j + 2 * h + e] = negative_infinity;
        }
      }
    }
  }

  // Whether the sums of dS, the gradient of a key bias, are wanted.
  __device__ bool wants_sums() const {
    const OutputBroadcast& dbias = p_.backward.dbias;
    return has_info && dbias.data != nullptr && !dbias.dense;
  }

  // Adds the sums of a tile's dS over this thread's rows.
  __device__ void add_dbias(const float (&sums)[2]) {
    if constexpr (has_info) {
      dbias_[0] += sums[0];
      dbias_[1] += sums[1];
    }
  }

  __device__ void end_tile(const Visit&) {}

  // Called after a query tile by the warpgroup that has its dS.
  __device__ void end_dbias(const Visit& at) {
    if (!wants_sums()) return;
    const bool ends = p_.backward.dbias.head_q != 0 ? at.is_last_of_head() : at.is_last();
    if (ends) store_dbias(at.head());
  }

  __device__ void release() {}

  // Stores gradients through shared memory that only this warpgroup still reads: rows of V, or dout where another
  // warpgroup has read V. Rows of dk may be longer than those of V.
  template <class... Sums>
  __device__ void store(const Sums&... sums) {
    constexpr bool has_dk = (Sums::is_dk || ...);
    (store_rows(sums, shared_address(has_dk ? storage_.v : storage_.dout[0])), ...);
  }

 private:
  __device__ int warp_row() const {
    return key_group_ * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  }
  __device__ int row() const { return warp_row() + lane_id() / 4; }
  __device__ int key(int h) const { return work_.key + row() + 8 * h; }

  // The first query that sees a key, without key info.
  __device__ int first_query_of(int h) const {
    const Shape& shape = p_.backward.shape;
    const int first =
        p_.backward.score.causal ? max(key(h) - (shape.seqlen_k - shape.seqlen_q), 0) : 0;
    return key(h) < shape.seqlen_k ? first : 0x7fffffff;
  }

  __device__ const KeyInterval* ranges() const {
    return p_.info.ranges_of(work_.batch, work_.kv_head) + work_.key;
  }

  __device__ const float* biases(int head) const {
    return p_.info.biases_of(work_.batch, head, work_.kv_head);
  }

  __device__ const KeyRecord& record(int h) const { return storage_.block.records[row() + 8 * h]; }

  // Loads the biases of the warp's 16 keys for another head. No other warp reads them.
  __device__ void change_biases(int head) {
    __syncwarp();
    if (lane_id() < 16) {
      const int row = warp_row() + lane_id();
      KeyRecord& record = storage_.block.records[row];
      record.bias = biases(head)[work_.key + row];
      if constexpr (Kernel::variant.large_lse)
        record.bias = unscaled_bias<T>(p_.backward, work_.batch, work_.kv_head, record, head);
    }
    __syncwarp();
  }

  __device__ bool is_unseen(const KeyRecord& record) const {
    const bool hidden = p_.info.bias_head_q == 0 && record.bias == negative_infinity;
    return record.first >= record.last || hidden;
  }

  // Replaces keys that no query sees by zeros, because their inf and NaN would be multiplied by the zeros of dS.
  __device__ void clear_unseen_rows() {
    constexpr int threads = 128 * (policy.split == ConsumerSplit::keys ? 2 : 1);
    constexpr int row_threads = threads / Rows::rows;
    const int thread = static_cast<int>(threadIdx.x) % threads;
    const int r = thread / row_threads;
    const KeyRecord record = [&] {
      if constexpr (has_dense) {
        const KeyInterval seen = ranges()[r];
        return KeyRecord{seen.first, seen.last, work_.key + r, biases(0)[work_.key + r]};
      } else {
        return storage_.block.records[r];
      }
    }();
    if (is_unseen(record)) {
#pragma unroll 1
      for (int chunk = thread % row_threads; chunk < Rows::chunks; chunk += row_threads) {
        store_shared_16(shared_address(storage_.k) + Rows::offset(r, chunk), {0, 0, 0, 0});
      }
    }
    if constexpr (policy.paired()) {
      using Tile = typename Storage::Partner::KeyTile;
      const KeyRecord other = first_record(p_.backward.shape, p_.info, work_.batch, work_.kv_head,
                                           Kernel::partner_key(work_) + r);
      if (is_unseen(other)) {
#pragma unroll 1
        for (int chunk = thread % row_threads; chunk < Tile::chunks; chunk += row_threads) {
          store_shared_16(shared_address(storage_.partner.k) + Tile::offset(r, chunk),
                          {0, 0, 0, 0});
        }
      }
    }
    fence_async_proxy();
    named_barrier_sync(Kernel::consumer_barrier, threads);
  }

  // Stores the queries that see each of the warp's 16 keys and the queries that see all of them, with a dense mask or
  // bias, whose loop has no registers for them.
  __device__ void store_ranges() {
    KeyInterval full{0, p_.backward.shape.seqlen_q};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyInterval seen = ranges()[row() + 8 * h];
      full = {max(full.first, seen.first), min(full.last, seen.last)};
      storage_.dense.ranges[row() + 8 * h] = seen;
    }
    storage_.dense.full_queries[warp_row() / 16] = {warp_max(full.first), warp_min(full.last)};
    __syncwarp();
  }

  __device__ void load_biases(int head) {
    bias_[0] = biases(head)[key(0)];
    bias_[1] = biases(head)[key(1)];
  }

  __device__ void mask_by_ranges(int first_query, float (&scores)[columns]) const {
    const KeyInterval full = storage_.dense.full_queries[warp_row() / 16];
    if (first_query >= full.first && first_query + rows <= full.last) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyInterval seen = storage_.dense.ranges[row() + 8 * h];
      const int column = first_query + 2 * (lane_id() % 4);
      const int first = seen.first - column;
      const int last = seen.last - column;
#pragma unroll
      for (int j = 0; j < rows / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = 8 * j + e;
          if (query < first || query >= last) scores[4 * j + 2 * h + e] = negative_infinity;
        }
      }
    }
  }

  __device__ void store_dbias(int head) {
    const OutputBroadcast& dbias = p_.backward.dbias;
    float* const to = reinterpret_cast<float*>(dbias.data) + work_.batch * dbias.batch +
                      head * dbias.head_q + work_.kv_head * dbias.head_kv;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_reduce(dbias_[h], [](float x, float y) { return x + y; });
      if (lane_id() % 4 == 0 && key(h) < p_.backward.shape.seqlen_k) to[key(h)] = sum;
      dbias_[h] = 0;
    }
  }

  template <class Sums>
  __device__ void store_rows(const Sums& gradient, std::uint32_t staged) const {
    const OutputRows& to = gradient.rows(p_.backward);
    const float scale = gradient.scale(p_.backward);
    if (to.data == nullptr) return;
    const Shape& shape = p_.backward.shape;
#pragma unroll
    for (int first = 0; first < Sums::columns; first += StagedRows::columns) {
#pragma unroll
      for (int column = first; column < min(first + StagedRows::columns, Sums::columns);
           column += 16) {
        std::uint32_t block[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const two = gradient.sums + 4 * (column / 8 + i / 2) + 2 * (i % 2);
          block[i] = pack_gradient<T>(two[0] * scale, two[1] * scale, p_.backward.saturate);
        }
        store_block<StagedRows>(
            staged, [&](int r) { return warp_row() + r; }, column - first, block);
      }
      __syncwarp();
      OutputRows part = to;
      part.data += first * sizeof(T);
      copy_s2g<StagedRows>(ThreadGroup<warp_size>::of_warp(), staged, warp_row(),
                           min(warp_row() + 16, shape.seqlen_k - work_.key), work_.key, part,
                           work_.batch, work_.kv_head, gradient.existing_columns(shape) - first);
      __syncwarp();
    }
  }

  const BackwardKernelParams& p_;
  Storage& storage_;
  const BackwardWork& work_;  // read again at each use, as there are no registers for it
  const int key_group_;
  KeyVisibility<rows> visible_;  // used with key info
  float bias_[2] = {};           // used instead with a dense mask or bias
  int full_begin_ = 0;  // the first query that sees every key of the warp, without key info
  float dbias_[2] = {};
};

}  // namespace flash_dmattn::cuda::sm90
