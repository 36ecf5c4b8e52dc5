#pragma once

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/stages/dq_fixup.cuh"

namespace flash_dmattn::cuda {

// Recomputes every gradient in double, for main loops without a slow path, if scores are so large that P needs lse as
// two floats, or overflowed fp32 (lse_has_low). It is launched after every such backward, before the sums of dbias are
// stored. A warp computes a key or a query row, and a thread an element of the gradient of a dense bias. If the flag is
// not set, this kernel acts as DqFixupKernel, which recomputes only rows of dq.
template <class T>
struct Fp64BackwardKernel {
  using Params = BackwardParams;
  using Fixup = DqFixupKernel<T>;
  using SharedStorage = typename Fixup::SharedStorage;
  static constexpr int threads = Fixup::threads;
  static constexpr int warps = threads / warp_size;
  static constexpr int min_blocks = 1;

  static long blocks(const Params& p) { return Fixup::blocks(p); }

  __device__ void operator()(const Params& p, SharedStorage& shared) const {
    if ((*p.flags & lse_has_low) == 0) {
      if (p.dq.data != nullptr) Fixup()(p, shared);
      return;
    }
    const std::int64_t keys = std::int64_t{p.shape.batch} * p.shape.heads_kv * p.shape.seqlen_k;
    const std::int64_t rows =
        p.dq.data == nullptr ? 0 : std::int64_t{p.shape.batch} * p.shape.heads_q * p.shape.seqlen_q;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * warps + warp_id();
         i < keys + rows; i += static_cast<std::int64_t>(gridDim.x) * warps) {
      i < keys ? compute_key(p, i) : compute_row(p, i - keys);
    }
    if (p.dbias.data == nullptr || !p.dbias.dense) return;
    const DenseElements elements(p);
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
         i < elements.count(); i += static_cast<std::int64_t>(gridDim.x) * threads) {
      elements.compute(p, i);
    }
  }

 private:
  struct Sums {
    double dk[8] = {};  // columns lane + 32 c
    double dv[8] = {};
    double dbias = 0;
  };

  // The elements of a dense dbias or of its sums. Each element sums over all batch elements, heads and keys that share
  // it.
  struct DenseElements {
    int batches;
    int heads;
    int rows;
    int keys;

    __device__ explicit DenseElements(const Params& p)
        : batches(p.dbias.batch != 0 ? p.shape.batch : 1),
          heads(p.dbias.head_q != 0    ? p.shape.heads_q
                : p.dbias.head_kv != 0 ? p.shape.heads_kv
                                       : 1),
          rows(p.shape.seqlen_q),
          keys(p.dbias.key != 0 ? p.shape.seqlen_k : 1) {}

    __device__ std::int64_t count() const { return std::int64_t{batches} * heads * rows * keys; }

    __device__ void compute(const Params& p, std::int64_t index) const {
      const Shape& shape = p.shape;
      const auto key = static_cast<int>(index % keys);
      const auto row = static_cast<int>(index / keys % rows);
      const auto head = static_cast<int>(index / keys / rows % heads);
      const auto batch = static_cast<int>(index / keys / rows / heads);
      const int shared_heads = shape.heads_q / heads;
      double sum = 0;
      for (int b = batch; b < shape.batch; b += batches) {
        for (int h = head * shared_heads; h < (head + 1) * shared_heads; ++h) {
          const QueryHead at{b, h, h / shape.group_heads()};
          for (int k = key; k < shape.seqlen_k; k += keys) sum += ds(p, at, row, k);
        }
      }
      const QueryHead first{batch, head * shared_heads, head * shared_heads / shape.group_heads()};
      store_gradient<T>(p.dbias, first.element(p.dbias, row, key), static_cast<float>(sum), false,
                        p.saturate);
    }

   private:
    static __device__ double ds(const Params& p, QueryHead head, int row, int key) {
      const std::int64_t index = head.row_index(p.shape, row);
      if (!isfinite(p.lse[index])) return 0;
      return fp64_ds<T>(p, head, row, key, static_cast<double>(p.delta[index]));
    }
  };

  static __device__ void compute_row(const Params& p, std::int64_t index) {
    fp64_dq_row<T>(p, query_head(p.shape, static_cast<int>(index / p.shape.seqlen_q)),
                   static_cast<int>(index % p.shape.seqlen_q));
  }

  static __device__ void compute_key(const Params& p, std::int64_t index) {
    const int key = static_cast<int>(index % p.shape.seqlen_k);
    const std::int64_t head_index = index / p.shape.seqlen_k;
    const int group = p.shape.group_heads();
    QueryHead head{static_cast<int>(head_index / p.shape.heads_kv), 0,
                   static_cast<int>(head_index % p.shape.heads_kv)};
    Sums sums;
    for (int g = 0; g < group; ++g) {
      head.head = head.kv_head * group + g;
      for (int row = 0; row < p.shape.seqlen_q; row += warp_size) add_rows(p, head, row, key, sums);
      if (p.dbias.data != nullptr && !p.dbias.dense && (p.dbias.head_q != 0 || g + 1 == group)) {
        const auto sum = static_cast<float>(sums.dbias);
        if (lane_id() == 0)
          store_gradient<T>(p.dbias, head.element(p.dbias, 0, key), sum, false, p.saturate);
        sums.dbias = 0;
      }
    }
    store(p, p.dk, p.shape.head_dim, head, key, sums.dk, static_cast<double>(p.score.scale));
    store(p, p.dv, p.shape.value_dim, head, key, sums.dv, 1);
  }

  // Adds the contributions of queries [row, row + 32) of a head.
  static __device__ void add_rows(const Params& p, QueryHead head, int row, int key, Sums& sums) {
    const int lane = lane_id();
    const int mine = row + lane;
    float probability = 0;
    double ds = 0;
    if (mine < p.shape.seqlen_q && isfinite(p.lse[head.row_index(p.shape, mine)])) {
      probability = fminf(fp64_probability<T, false>(p, head, mine, key), 1);
      if (probability > 0) {
        ds = fp64_ds<T>(p, head, mine, key,
                        static_cast<double>(p.delta[head.row_index(p.shape, mine)]));
      }
    }
    for (unsigned left = warp_ballot(probability > 0); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const auto weight = static_cast<double>(shuffle(probability, i));
      const double slope = shuffle(ds, i);
      const T* const q = row_of<T>(p.q, head.batch, row + i, head.head);
      const T* const dout = row_of<T>(p.dout, head.batch, row + i, head.head);
      if (has_bias(p.score, p.shape, row + i, key)) sums.dbias += slope;
      for (int c = 0; lane + warp_size * c < p.shape.head_dim; ++c) {
        const float query = Element<T>::widen(q[lane + warp_size * c]);
        if (p.saturate || isfinite(query)) sums.dk[c] += slope * static_cast<double>(query);
      }
      for (int c = 0; lane + warp_size * c < p.shape.value_dim; ++c) {
        const float gradient = Element<T>::widen(dout[lane + warp_size * c]);
        if (isfinite(gradient)) sums.dv[c] += weight * static_cast<double>(gradient);
      }
    }
  }

  static __device__ void store(const Params& p, const OutputRows& to, int columns, QueryHead head,
                               int key, const double (&sums)[8], double scale) {
    if (to.data == nullptr) return;
    auto* const row =
        reinterpret_cast<std::uint16_t*>(row_of<T>(to, head.batch, key, head.kv_head));
    for (int c = 0; lane_id() + warp_size * c < columns; ++c) {
      row[lane_id() + warp_size * c] = static_cast<std::uint16_t>(
          pack_gradient<T>(static_cast<float>(sums[c] * scale), 0, p.saturate));
    }
  }
};

}  // namespace flash_dmattn::cuda
