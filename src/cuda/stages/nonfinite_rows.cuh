#pragma once

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/recomputed_row.cuh"
#include "cuda/primitives/integers.h"

namespace flash_dmattn::cuda {

// Whether a row that sees a key has no P. Then its dq and its contributions to dk, dv and dbias are NaN.
__device__ inline bool has_undefined_p(float lse) {
  return !isfinite(lse) && lse != negative_infinity;
}

// Whether a row that sees a key has a non-finite dS. Then its dq, dk and dbias are not finite.
__device__ inline bool has_nonfinite_ds(float lse, float delta) {
  return lse != negative_infinity && (!isfinite(lse) || !isfinite(delta));
}

// Without `saturate`, inf and NaN of the inputs propagate to the gradients of exactly the keys that a row sees. A
// product of whole tiles would propagate them to every key of a tile. The main loops therefore treat non-finite
// elements of q and dout as 0, and rows without P as rows that see no key. This kernel adds the contributions of such
// rows: NaN, or inf where that is certain. It is launched after every backward that does not saturate, after the
// gradients and before the sums of dbias are stored, and returns at once if the flag is not set. A block processes a
// tile of a head's rows.
template <class T>
struct NonFiniteRowsKernel {
  using Params = BackwardParams;
  static constexpr int rows = 64;  // divides query_tile_rows
  static constexpr int threads = 256;
  static constexpr int min_blocks = 1;

  struct Row {
    int row;
    bool undefined_p;
    bool nonfinite_dout;
  };
  struct SharedStorage {
    int count;
    Row rows[NonFiniteRowsKernel::rows];
  };

  static long blocks(const Params& p) {
    return static_cast<long>(p.shape.batch) * p.shape.heads_q * ceil_div(p.shape.seqlen_q, rows);
  }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    if ((*p.flags & row_not_finite) == 0) return;
    const int tiles = ceil_div(p.shape.seqlen_q, rows);
    const int first_row = static_cast<int>(blockIdx.x) % tiles * rows;
    const QueryHead head = query_head(p.shape, static_cast<int>(blockIdx.x) / tiles);
    find_rows(p, head, first_row, shared);
    if (shared.count == 0) return;
    if (p.dq.data != nullptr) {
      for (int i = static_cast<int>(threadIdx.x); i < shared.count; i += threads)
        fill_with_nan(p.shape.head_dim, row_of<T>(p.dq, head.batch, shared.rows[i].row, head.head));
    }
    const KeysOfRows keys(p, head, first_row, rows);
    for (int i = static_cast<int>(threadIdx.x); i < keys.count; i += threads)
      add_to_key(p, head, keys[i], shared);
  }

 private:
  static __device__ void find_rows(const Params& p, QueryHead head, int first_row,
                                   SharedStorage& shared) {
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    const int row = first_row + static_cast<int>(threadIdx.x);
    if (threadIdx.x < rows && row < p.shape.seqlen_q) {
      const std::int64_t index = head.row_index(p.shape, row);
      const float lse = p.lse[index];
      if (has_nonfinite_ds(lse, p.delta[index])) {
        const T* const dout = row_of<T>(p.dout, head.batch, row, head.head);
        bool nonfinite_dout = false;
        for (int d = 0; d < p.shape.value_dim; ++d)
          nonfinite_dout = nonfinite_dout || !isfinite(Element<T>::widen(dout[d]));
        shared.rows[atomicAdd(&shared.count, 1)] = {row, has_undefined_p(lse), nonfinite_dout};
      }
    }
    __syncthreads();
  }

  static __device__ void add_to_key(const Params& p, QueryHead head, int key,
                                    const SharedStorage& shared) {
    bool dk = false;
    bool dv = false;
    for (int i = 0; i < shared.count; ++i) {
      const Row row = shared.rows[i];
      if (!is_visible<T, true>(p.score, p.shape, head, row.row, key)) continue;
      dk = true;
      dv = dv || row.undefined_p;
      if (p.dbias.data != nullptr && has_bias(p.score, p.shape, row.row, key)) {
        store_gradient<T>(p.dbias, head.element(p.dbias, row.row, key), nan(), false, false);
      }
      if (row.nonfinite_dout && p.dv.data != nullptr) add_dout(p, head, row.row, key);
    }
    if (dk && p.dk.data != nullptr)
      fill_with_nan(p.shape.head_dim, row_of<T>(p.dk, head.batch, key, head.kv_head));
    if (dv && p.dv.data != nullptr)
      fill_with_nan(p.shape.value_dim, row_of<T>(p.dv, head.batch, key, head.kv_head));
  }

  // Several blocks may do this for a key at the same time. Whichever result remains is not finite.
  static __device__ void add_dout(const Params& p, QueryHead head, int row, int key) {
    const T* const dout = row_of<T>(p.dout, head.batch, row, head.head);
    T* const dv = row_of<T>(p.dv, head.batch, key, head.kv_head);
    for (int d = 0; d < p.shape.value_dim; ++d) {
      const float gradient = Element<T>::widen(dout[d]);
      if (!isfinite(gradient)) store(dv + d, Element<T>::widen(dv[d]) + gradient);
    }
  }

  static __device__ void fill_with_nan(int columns, T* row) {
    for (int d = 0; d < columns; ++d) store(row + d, nan());
  }

  static __device__ void store(T* to, float value) {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(pack<T>(value, 0));
  }

  static __device__ float nan() { return __int_as_float(0x7fffffff); }
};

}  // namespace flash_dmattn::cuda
