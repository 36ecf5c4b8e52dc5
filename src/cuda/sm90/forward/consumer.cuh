#pragma once

#include "cuda/attention/softmax.cuh"
#include "cuda/sm90/dense/elements.cuh"
#include "cuda/sm90/dense/forward_scores.cuh"
#include "cuda/sm90/forward/epilogue.cuh"
#include "cuda/sm90/forward/fix_rows.cuh"
#include "cuda/sm90/forward/storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// A consumer warpgroup, which computes 64 queries of a work tile. The key tiles of all work tiles are one sequence,
// n = 0, 1, ...; one step of it:
//
//   tensor cores   S = Q K(n)^T , O += P V(n - 1)   .............
//   threads        wait for S                       softmax of S    wait for O, P = S in 16 bits
//
// While the threads of one warpgroup compute a softmax, the products of the others run: named barriers order the
// warpgroups' issues (ping-pong scheduling). At the end of a work tile the step is the same with Q and K of the next
// one, and O is stored after it, so that the tensor cores do not idle between work tiles.
template <class Kernel>
class ForwardConsumer {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  static constexpr int head_dim = Kernel::head_dim;
  static constexpr int keys = Kernel::policy.keys;
  static constexpr int warpgroups = Kernel::policy.warpgroups;
  static constexpr bool has_info = Kernel::has_key_info;
  // Then the number of tiles is not known beforehand; the producer flags each tile.
  static constexpr bool has_dense_tiles = Kernel::dense == DenseAccess::tiles;
  // Whether the accumulators of scores begin with the biases of keys.
  static constexpr bool begins_with_biases = has_info && !has_dense_tiles;
  // Whether a dense mask and bias are read while the scores are computed, and kept. Three warpgroups have no registers
  // for that, and need it less.
  static constexpr bool keeps_dense = has_dense_tiles && warpgroups == 2;
  static constexpr float max_growth = 8;  // in log2: growth of a row's maximum that O tolerates
  // Whether each lane votes by the maximum of its own columns, and a quad compares maxima only when O is rescaled.
  // D 128: 2 % faster. D 64: 4 % slower over lists, level elsewhere.
  static constexpr bool lanes_vote = head_dim > 64;

 public:
  __device__ ForwardConsumer(const ForwardKernelParams& p, Storage& storage)
      : p_(p),
        storage_(storage),
        // Uniform over the warp, and known so to the compiler.
        warpgroup_(shuffle(static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        shapes_(Kernel::shapes && shapes_scores(p.forward)),
        factor_(shapes_ ? 1.0f : p.forward.score.factor),
        warpgroup_query_(first_warpgroup_query()) {
    // Keeps the sum in one register instead of its summands.
    if constexpr (has_dense_tiles) make_opaque(warpgroup_query_);
  }

  __device__ void run() {
    if (warpgroup_ == 0) give_turn_to(0);
    storage_.q_pipeline.wait_full(0);
    // There is work for every block.
    WorkTile work = storage_.work[0];
    storage_.k_pipeline.wait_full(0);
    fence_copies();
    begin_scores(0);
    issue_scores(0, 0);
    load_dense_scores(0);
    wait_scores<0>(0);
    softmax<true, true>(work, 0, 0);
    pack_weights();
    clear_out();

    // The weights of the work tile's first key tile are ready here.
    int n = 0;
    for (int count = 0;; ++count) {
      if (is_last(work, 0)) storage_.q_pipeline.release_operand(count);
      ++n;
      int visit = 1;
      if constexpr (has_dense_tiles) {
#pragma unroll 1
        for (; !is_last(work, visit - 1); ++visit, ++n) step<true>(work, count, n, visit);
      } else {
#pragma unroll 1
        for (; visit < tested_visits(work); ++visit, ++n) step<true>(work, count, n, visit);
#pragma unroll 1
        for (; visit < work.visits; ++visit, ++n) step<false>(work, count, n, visit);
      }

      storage_.q_pipeline.wait_full(count + 1);
      const WorkTile next = storage_.work[storage_.q_pipeline.stage(count + 1)];
      if (next.visits == 0) break;
      issue(n, count + 1);
      const float sums[2] = {sum_[0], sum_[1]};
      const float offsets[2] = {offset<true>(0), offset<true>(1)};
      softmax<true, true>(next, n, 0);
      wait_out(n - 1);
      pack_weights();
      store(work, sums, offsets);
      clear_out();
      work = next;
    }
    storage_.v_pipeline.wait_full(n - 1);
    fence_copies();
    issue_out(n - 1);
    wait_out(n - 1);
    const float offsets[2] = {offset<true>(0), offset<true>(1)};
    store(work, sum_, offsets);
    if constexpr (Kernel::fixes_rows) {
      if (p_.needs_fix == nullptr) fix(work);
    }
  }

 private:
  __device__ void wait_for_turn() const {
    if constexpr (Kernel::overlaps) {
      named_barrier_sync(Kernel::first_scheduler_barrier + warpgroup_, 256);
    }
  }
  static __device__ void give_turn_to(int warpgroup) {
    if constexpr (Kernel::overlaps) {
      named_barrier_arrive(Kernel::first_scheduler_barrier + warpgroup, 256);
    }
  }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % warp_size; }
  // This thread's first column in a key tile.
  static __device__ int column() { return 2 * (lane() % 4); }
  // A thread's two rows are 8 apart: two queries of a head; or, with two heads, one query of both, so that its dense bias and
  // the bits of its mask are read, combined and widened once.
  __device__ bool has_two_heads() const { return has_dense_tiles && p_.two_heads; }
  // Query of the thread's first row, relative to the warpgroup.
  __device__ int first_warpgroup_query() const {
    const int warp = static_cast<int>(threadIdx.x) / warp_size % 4;
    return warp * (has_two_heads() ? 8 : 16) + lane() / 4;
  }
  // Query of the thread's first row, relative to the work tile, and the step to the query of its second row.
  __device__ int first_query() const {
    return warpgroup_ * (has_two_heads() ? 32 : 64) + warpgroup_query_;
  }
  __device__ int query_step() const { return has_two_heads() ? 0 : 8; }

  // Fences rows of any strides that cp.async copied, because the tensor cores read them through the async proxy
  // (docs/kernels/sm90.md). Called after the wait for the copies.
  static __device__ void fence_copies() {
    if constexpr (Kernel::load == KeyLoad::any) fence_async_proxy();
  }

  // Whether the key tile whose scores were issued last is the last one of the work tile.
  __device__ bool is_last(const WorkTile& work, int visit) const {
    return has_dense_tiles ? (tile_flags_ & last_of_work_tile) != 0 : visit == work.visits - 1;
  }

  // The first visits, whose elements are tested. Without delays they are the partial ones, which saves a register.
  static __device__ int tested_visits(const WorkTile& work) {
    return Kernel::delays ? work.tested : work.partial;
  }

  // ---- A step --------------------------------------------------------------------------------------

  template <bool Partial>
  __device__ void step(const WorkTile& work, int work_count, int n, int visit) {
    issue(n, work_count);
    if (is_last(work, visit)) storage_.q_pipeline.release_operand(work_count);
    softmax<Partial, false>(work, n, visit);
    wait_out(n - 1);
    pack_weights();
    if (rescales_) {
#pragma unroll
      for (int i = 0; i < head_dim / 2; ++i) out_[i] *= rescale_[i / 2 % 2];
    }
  }

  // Issues S of tile n and O of tile n - 1 together; returns when S is complete.
  __device__ void issue(int n, int work_count) {
    storage_.k_pipeline.wait_full(n);
    fence_copies();
    begin_scores(n);
    wait_for_turn();
    issue_scores(n, work_count);
    if constexpr (!Kernel::overlaps) wgmma_wait<0>();
    storage_.v_pipeline.wait_full(n - 1);
    fence_copies();
    issue_out(n - 1);
    if constexpr (!Kernel::overlaps) wgmma_wait<0>();
    give_turn_to((warpgroup_ + 1) % warpgroups);
    load_dense_scores(n);
    wait_scores<1>(n);
  }

  // Initializes the scores with biases, before the warpgroup waits for its order to issue.
  __device__ void begin_scores(int n) {
    if constexpr (begins_with_biases) {
      const float* const biases = storage_.info.bias[Storage::info_stage(n)] + column();
#pragma unroll
      for (int i = 0; i < keys / 8; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
        scores_[4 * i] = scores_[4 * i + 2] = shapes_ ? 0 : two.x;
        scores_[4 * i + 1] = scores_[4 * i + 3] = shapes_ ? 0 : two.y;
      }
    }
    if constexpr (has_dense_tiles) tile_flags_ = storage_.dense.flags[Storage::info_stage(n)];
  }

  __device__ void issue_scores(int n, int work_count) {
    using KeyTile = typename Storage::KeyTile;
    using QTile = typename Storage::QTile;
    const KMajorOperand<keys> k(shared_address(storage_.k[storage_.k_pipeline.stage(n)]));
    const KMajorOperand<QTile::rows> q(
        shared_address(storage_.q[storage_.q_pipeline.stage(work_count)]) +
        warpgroup_ * 64 * panel_row_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < head_dim / 16; ++i)
      wgmma<T>(scores_, q.at(i), k.at(i), begins_with_biases || i > 0);
    wgmma_commit();
  }

  __device__ void issue_out(int n) {
    const RowMajorOperand<keys> v(shared_address(storage_.v[storage_.v_pipeline.stage(n)]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < keys / 16; ++i) wgmma<T>(out_, weights_ + 4 * i, v.at(i));
    wgmma_commit();
  }

  template <int Batches>
  __device__ void wait_scores(int n) {
    wgmma_wait<Batches>();
    pin(scores_);
    storage_.k_pipeline.release_operand(n);
  }

  __device__ void wait_out(int n) {
    wgmma_wait<0>();
    pin(out_);
    storage_.v_pipeline.release_operand(n);
  }

  __device__ void clear_out() {
#pragma unroll
    for (int i = 0; i < head_dim / 2; ++i) out_[i] = 0;
  }

  // ---- Scores --------------------------------------------------------------------------------------

  // Calls visit.operator()<Queries, HasBias, Mask>(tile, mask_values) for the dense mask and bias of a tile.
  template <class Visit>
  __device__ void visit_dense_tile(int n, const Visit& visit) {
    auto& pipeline = storage_.dense.pipeline;
    const int use = n * warpgroups + warpgroup_;
    pipeline.wait_full(use);
    const auto& tile = storage_.dense.of_use(use);
    has_two_heads() ? visit_dense_queries<1>(tile, visit) : visit_dense_queries<2>(tile, visit);
    pipeline.release(use);
  }

  template <int Queries, class Visit>
  __device__ void visit_dense_queries(const typename Storage::DenseTile& tile,
                                      const Visit& visit) const {
    if ((tile_flags_ & is_masked_tile) == 0) {
      if (p_.forward.score.bias.dense) visit_dense_biases<Queries, MaskForm::none>(tile, visit);
      return;
    }
    if constexpr (Kernel::policy.has_mask_bytes) {
      if (p_.reads_mask_bytes()) return visit_dense_biases<Queries, MaskForm::bytes>(tile, visit);
    }
    visit_dense_biases<Queries, MaskForm::bits>(tile, visit);
  }

  template <int Queries, MaskForm Mask, class Visit>
  __device__ void visit_dense_biases(const typename Storage::DenseTile& tile,
                                     const Visit& visit) const {
    const ScoreParams& score = p_.forward.score;
    if (Mask == MaskForm::none || score.bias.dense) {
      visit.template operator()<Queries, true, Mask>(tile, packed_mask_value<T>(score));
    } else {
      visit.template operator()<Queries, false, Mask>(tile, 0);
    }
  }

  // Reads the dense mask and bias of a tile while the products run.
  __device__ void load_dense_scores(int n) {
    if constexpr (keeps_dense) {
      visit_dense_tile(n, [&]<int Queries, bool HasBias, MaskForm Mask>(const auto& tile,
                                                                        std::uint32_t mask_values) {
        dense_.template load<Queries, HasBias, Mask>(tile, warpgroup_query_, mask_values);
      });
    }
  }

  // Adds the dense mask and bias, and key biases, which rarely occur together with them.
  __device__ void add_dense_scores(int n) {
    if constexpr (keeps_dense) {
      const bool has_dense = p_.forward.score.bias.dense || (tile_flags_ & is_masked_tile) != 0;
      if (has_dense) {
        has_two_heads() ? dense_.template add<1>(p_.bias_factor, scores_)
                        : dense_.template add<2>(p_.bias_factor, scores_);
      }
    } else {
      visit_dense_tile(n, [&]<int Queries, bool HasBias, MaskForm Mask>(const auto& tile,
                                                                        std::uint32_t mask_values) {
        dense_.template load_and_add<Queries, HasBias, Mask>(tile, warpgroup_query_, mask_values,
                                                             p_.bias_factor, scores_);
      });
    }
    if (!has_key_biases(p_.forward.score)) return;
    const float* const biases = storage_.info.bias[Storage::info_stage(n)] + column();
#pragma unroll
    for (int i = 0; i < keys / 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) scores_[4 * i + e] += e % 2 == 0 ? two.x : two.y;
    }
  }

  // Keeps loads from shared memory apart; hoisted together they exceed the registers.
  static __device__ void keep_loads_apart() { compiler_fence(); }

  // Softcap or a factor that is not positive, and the bias, in units of log 2. A product that has overflowed
  // may have the wrong sign, which a softcap would hide: it becomes NaN.
  template <bool Capped>
  __device__ void shape_scores(int n) {
    const ScoreParams& score = p_.forward.score;
    const float* const biases = storage_.info.bias[Storage::info_stage(n)] + column();
    const float inner = score.form == ScoreForm::product ? 1.0f : score.inner;
#pragma unroll
    for (int i = 0; i < keys / 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float s = scores_[4 * i + e];
        s = fmaf(s, 0.0f, s) * inner;
        if constexpr (Capped) s = tanh_from_log2(s);
        scores_[4 * i + e] = fmaf(s, score.factor, e % 2 == 0 ? two.x : two.y);
      }
      keep_loads_apart();
    }
  }

  // Adds the delayed biases of keys that count for some queries of the work tile; the scores are without them.
  __device__ void add_delayed_biases(const WorkTile& work, int n, int visit) {
    const int stage = Storage::info_stage(n);
    if (p_.info.recent == 0 || !storage_.info.has_delayed(stage)) return;
    const int first = first_query() + work.row;
    const float* const biases = storage_.info.delayed[stage] + column();
    const int* const begins = storage_.info.begin[stage] + column();
    const int first_begin = delayed_bias_begin(p_.forward.score, p_.forward.shape,
                                               work.template first_key<keys>(visit) + column());
#pragma unroll
    for (int i = 0; i < keys / 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
      int2 begin{first_begin + 8 * i, first_begin + 8 * i + 1};
      if constexpr (Kernel::load != KeyLoad::tma)
        begin = *reinterpret_cast<const int2*>(begins + 8 * i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = first + 8 * h;
        float* const s = scores_ + 4 * i + 2 * h;
        if (query >= begin.x) s[0] += two.x;
        if (query >= begin.y) s[1] += two.y;
      }
      if constexpr (Kernel::shapes) keep_loads_apart();
    }
  }

  __device__ void mask_scores(const WorkTile& work, int n, int visit) {
    if (has_dense_tiles && (tile_flags_ & is_partial_tile) == 0) return;
    if (Kernel::delays && !work.is_partial(visit)) return;
    int first = first_query();
    // Recomputed for each partial tile to save the register that would hold the sum.
    if constexpr (has_dense_tiles) make_opaque(first);
    first += work.row;
    if constexpr (has_info) {
      const KeyInterval* const ranges = storage_.info.range[Storage::info_stage(n)] + column();
#pragma unroll
      for (int i = 0; i < keys / 8; ++i) {
        const int4 two = *reinterpret_cast<const int4*>(ranges + 8 * i);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int query = first + h * query_step();
          float* const s = scores_ + 4 * i + 2 * h;
          if (query < two.x || query >= two.y) s[0] = negative_infinity;
          if (query < two.z || query >= two.w) s[1] = negative_infinity;
        }
        if constexpr (Kernel::shapes) keep_loads_apart();
      }
    } else {
      const Shape& shape = p_.forward.shape;
      const int first_key = work.template first_key<keys>(visit) + column();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = first + h * query_step();
        const int end = p_.forward.score.causal
                            ? min(query + shape.seqlen_k - shape.seqlen_q + 1, shape.seqlen_k)
                            : shape.seqlen_k;
#pragma unroll
        for (int i = 0; i < keys / 8; ++i) {
          float* const s = scores_ + 4 * i + 2 * h;
          if (first_key + 8 * i >= end) s[0] = negative_infinity;
          if (first_key + 8 * i + 1 >= end) s[1] = negative_infinity;
        }
      }
    }
  }

  // ---- Softmax -------------------------------------------------------------------------------------

  // The offset that is subtracted from a row's scores, times factor_: weights are exp2 of the difference. It is
  // finite for a row that sees no key so far.
  template <bool CanBeEmpty>
  __device__ float offset(int h) const {
    const float top = fmaf(max_[h], factor_, weight_shift<T>);
    return CanBeEmpty && max_[h] == negative_infinity ? weight_shift<T> : top;
  }

  // Turns scores into weights. The maximum is raised only if it has grown by max_growth in log2. That is exact, as
  // the sum has the same offset. `rescales_` and `rescale_`: whether O is rescaled, and its factors.
  template <bool Partial, bool First>
  __device__ void softmax(const WorkTile& work, int n, int visit) {
    if constexpr (Kernel::shapes) {
      if (shapes_) {
        p_.forward.score.form == ScoreForm::capped ? shape_scores<true>(n) : shape_scores<false>(n);
      }
    }
    if constexpr (Kernel::dense == DenseAccess::elements) {
      DenseElements<T, keys, has_ranks(head_dim)>(p_, work, work.template first_key<keys>(visit),
                                                  column())
          .apply(work.row + first_query(), scores_);
    }
    if constexpr (has_dense_tiles) add_dense_scores(n);
    if constexpr (Partial && Kernel::delays) add_delayed_biases(work, n, visit);
    if constexpr (Partial) mask_scores(work, n, visit);
    constexpr bool can_be_empty = Partial || has_info;
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = scores_[2 * h];
      float odd = scores_[2 * h + 1];
#pragma unroll
      for (int i = 1; i < keys / 8; ++i) {
        even = fmaxf(even, scores_[4 * i + 2 * h]);
        odd = fmaxf(odd, scores_[4 * i + 2 * h + 1]);
      }
      top[h] = fmaxf(even, odd);  // of this thread's columns
      if (First || !lanes_vote) top[h] = quad_max(top[h]);
    }
    if constexpr (First) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_[h] = top[h];
        sum_[h] = 0;
      }
    } else {
      rescales_ = warp_any((top[0] - max_[0]) * factor_ > max_growth ||
                           (top[1] - max_[1]) * factor_ > max_growth);
      if (rescales_) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float before = fmaf(max_[h], factor_, weight_shift<T>);
          max_[h] = fmaxf(max_[h], lanes_vote ? quad_max(top[h]) : top[h]);
          rescale_[h] = exp2_approx(before - offset<can_be_empty>(h));
          sum_[h] *= rescale_[h];
        }
      }
    }
    const float offsets[2] = {offset<can_be_empty>(0), offset<can_be_empty>(1)};
    float even[2] = {0, 0};
    float odd[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < keys / 8; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const s = scores_ + 4 * i + 2 * h;
        even[h] += s[0] = exp2_approx(fmaf(s[0], factor_, -offsets[h]));
        odd[h] += s[1] = exp2_approx(fmaf(s[1], factor_, -offsets[h]));
      }
    }
    sum_[0] += even[0] + odd[0];
    sum_[1] += even[1] + odd[1];
  }

  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) weights_[i] = pack<T>(scores_[2 * i], scores_[2 * i + 1]);
  }

  // The h-th (0 or 1) of the thread's rows.
  __device__ OutputRow row(const WorkTile& work, int h) const {
    return {work.head + (has_two_heads() ? h : 0), work.row + first_query() + h * query_step()};
  }

  __device__ void store(const WorkTile& work, const float (&sums)[2], const float (&offsets)[2]) {
    const OutputRow rows[2] = {row(work, 0), row(work, 1)};
    store_output<Kernel>(p_, work, rows, out_, sums, offsets);
  }

  // Recomputes the rows just stored and marked, the only ones of the block.
  __device__ void fix(const WorkTile& work) const {
    __syncwarp();
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const auto [head, query] = row(work, h);
      const bool has_row = lane() % 4 == 0 && query < p_.forward.shape.seqlen_q;
      fix_marked_rows<T>(p_.forward, has_row, work.batch, head, query);
    }
  }

  const ForwardKernelParams& p_;
  Storage& storage_;
  int warpgroup_;
  bool shapes_;
  float factor_;         // of scores, to units of log 2
  int warpgroup_query_;  // of this thread's first row

  float scores_[keys / 2];
  float out_[head_dim / 2];
  std::uint32_t weights_[keys / 4];
  float max_[2];
  float sum_[2];  // of this thread's columns
  float rescale_[2];
  bool rescales_ = false;
  DenseScores<T, typename Storage::DenseTile> dense_;
  std::uint32_t tile_flags_ = 0;  // of the tile whose scores have been issued last
};

}  // namespace flash_dmattn::cuda::sm90
