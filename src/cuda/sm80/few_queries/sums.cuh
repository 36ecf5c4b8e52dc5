#pragma once

#include "cuda/attention/recomputed_row.cuh"
#include "cuda/attention/slot_scan.cuh"
#include "cuda/sm80/few_queries/rows.cuh"
#include "cuda/sm80/forward/epilogue.cuh"

// Combines sums over parts of the keys.
namespace flash_dmattn::cuda::sm80::few_queries {

// Whether a row sees no key of a part. Its output of that part is then skipped, because 0 times a non-finite value is
// NaN.
__device__ inline bool sees_nothing(RowSums sums) {
  return sums.max == negative_infinity && sums.sum == 0;
}

// A part without keys.
__device__ inline RowSums no_sums() { return {negative_infinity, 0, 0}; }

// The difference of two maxima, in units of log 2. Equal references cost no digits.
__device__ inline float growth(RowSums from, RowSums to) {
  return to.max - from.max + (to.reference - from.reference) * log2e;
}

// Takes over the maximum of a part if it is larger.
__device__ inline void raise_max(RowSums& sums, RowSums part) {
  if (sums.max == negative_infinity || growth(sums, part) > 0) {
    sums.max = part.max;
    sums.reference = part.reference;
  }
}

// The factor for the weights of a part when its maximum becomes that of `larger`.
__device__ inline float rescale(RowSums part, RowSums larger) {
  return part.max == negative_infinity ? 0 : exp2_approx(-growth(part, larger));
}

// A lane's columns of an output with D columns, beginning at lane_columns * lane.
template <int D>
struct alignas(D == 64 ? 8 : 16) LaneColumns {
  static constexpr int count = D / warp_size;
  float x[count] = {};
};

// The sum of parts, computed by a warp. Its rounding depends on the order of the parts, which is fixed.
template <int D>
struct RowTotal {
  using Columns = LaneColumns<D>;

  RowSums sums = no_sums();
  Columns out;

  // Adds several parts at once, so that their weights are computed independently.
  template <int Count>
  __device__ void add(const RowSums (&parts)[Count], const Columns (&values)[Count]) {
    RowSums larger = sums;
#pragma unroll
    for (int n = 0; n < Count; ++n) raise_max(larger, parts[n]);
    const float scale = rescale(sums, larger);
    sums = {larger.max, sums.sum * scale, larger.reference};
#pragma unroll
    for (int i = 0; i < Columns::count; ++i) out.x[i] *= scale;
#pragma unroll
    for (int n = 0; n < Count; ++n) {
      if (sees_nothing(parts[n])) continue;
      const float part_scale = rescale(parts[n], larger);
      sums.sum = fmaf(parts[n].sum, part_scale, sums.sum);
#pragma unroll
      for (int i = 0; i < Columns::count; ++i)
        out.x[i] = fmaf(values[n].x[i], part_scale, out.x[i]);
    }
  }

  // Adds parts first, first + step, ... of `parts`, with the loads of Batch parts in flight at once. `sums_of(i)` and
  // `columns_of(i)` return pointers to the sums and columns of part i.
  template <int Batch, class SumsOf, class ColumnsOf>
  __device__ void add_parts(int first, int step, int parts, const SumsOf& sums_of,
                            const ColumnsOf& columns_of) {
    for (int begin = first; begin < parts; begin += Batch * step) {
      RowSums part[Batch];
      Columns values[Batch];
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int n = begin + i * step;
        part[i] = no_sums();
        if (n >= parts) continue;
        part[i] = *sums_of(n);
        values[i] = reinterpret_cast<const Columns*>(columns_of(n))[lane_id()];
      }
      add(part, values);
    }
  }
};

// The slots of a KV cache that hold keys, of those that have been taken, as AllKeys (recomputed_row.cuh).
struct SlotsWithKeys {
  const std::int32_t* entries;
  int rows_ahead;   // of the row of the call, in the arrays
  int rows_before;  // HeadSlots::rows_before

  __device__ bool operator()(int slot) const { return entries[slot] != no_key; }
  __device__ void move_to_row(ForwardParams& p) const {
    p.k.data += rows_ahead * p.k.batch + rows_before * p.k.row;
    p.v.data += rows_ahead * p.v.batch + rows_before * p.v.row;
    if (p.score.bias.data != nullptr) {
      p.score.bias.data +=
          (rows_ahead * p.score.bias.batch + rows_before) * std::int64_t{sizeof(float)};
    }
  }
};

// Stores the output and lse of a row with one warp. Rows that overflow fp32 are recomputed, over those of the
// first `keys` keys that are present.
template <class T, int D, class Present>
__device__ inline void store_row(const ForwardParams& p, const QueryHead& head, int query, int keys,
                                 const Present& present, const RowTotal<D>& row) {
  constexpr int lane_columns = LaneColumns<D>::count;
  float largest = 0;
#pragma unroll
  for (int i = 0; i < lane_columns; ++i) largest = max_or_nan(largest, fabsf(row.out.x[i]));
  const RowSums sums = row.sums;
  const bool ordinary = sums.sum > 0 && isfinite(sums.sum) && isfinite(largest) &&
                        fabsf(sums.max) < 1e38f && fabsf(sums.reference) < 1e38f;
  if (!warp_all(ordinary)) {
    ForwardParams row_params = p;
    row_params.shape.seqlen_k = keys;
    present.move_to_row(row_params);
    recompute_row<T, true>(row_params, head, query, present);
    return;
  }
  const float inverse = 1 / sums.sum;
  const int column = lane_id() * lane_columns;
  auto* const to = reinterpret_cast<std::uint16_t*>(row_of<T>(p.out, head.batch, query, head.head));
#pragma unroll
  for (int i = 0; i < lane_columns; i += 2) {
    if (column + i >= p.shape.value_dim) continue;
    const std::uint32_t two =
        pack_output<T>(row.out.x[i] * inverse, row.out.x[i + 1] * inverse, p.saturate);
    if (p.out.aligned) {
      *reinterpret_cast<std::uint32_t*>(to + column + i) = two;
    } else {
      to[column + i] = static_cast<std::uint16_t>(two);
      to[column + i + 1] = static_cast<std::uint16_t>(two >> 16);
    }
  }
  if (lane_id() == 0) {
    store_lse(p, head.row_index(p.shape, query),
              log_sum_exp<T>(sums.max, sums.sum, sums.reference));
  }
}

}  // namespace flash_dmattn::cuda::sm80::few_queries
