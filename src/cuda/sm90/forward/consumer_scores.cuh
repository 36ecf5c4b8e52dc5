#pragma once

#include "cuda/attention/softmax.cuh"
#include "cuda/sm90/dense/elements.cuh"
#include "cuda/sm90/dense/forward_scores.cuh"
#include "cuda/sm90/forward/storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The scores of a consumer warpgroup: its thread's accumulators of a key tile, which it shapes, biases and masks.
// `RepeatsBlock`: the scores are products, of the second run of a short call.
template <class Kernel, bool RepeatsBlock>
class ConsumerScores {
 protected:
  using T = typename Kernel::Element;
  using Storage = typename Kernel::SharedStorage;
  static constexpr int head_dim = Kernel::head_dim;
  static constexpr int keys = Kernel::policy.keys;
  static constexpr int warpgroups = Kernel::policy.warpgroups;
  static constexpr bool has_info = Kernel::has_key_info;
  // With a dense mask the number of tiles is not known in advance, so the producer flags each tile.
  static constexpr bool has_dense_tiles = Kernel::dense == DenseAccess::tiles;
  // Whether the accumulators begin with the biases of keys, in their unit.
  static constexpr bool begins_with_biases = has_info && !has_dense_tiles && !Kernel::shapes;
  // Whether biases that are added later are less a reference of the row.
  static constexpr bool has_references = Kernel::has_references;
  // Whether a dense mask and bias are read while the scores are computed, and kept. Three warpgroups have no registers
  // for that, and need it less.
  static constexpr bool keeps_dense = has_dense_tiles && warpgroups == 2;

  __device__ ConsumerScores(const ForwardKernelParams& p, Storage& storage)
      : p_(p),
        storage_(storage),
        // The compiler must know that this is uniform over the warp.
        warpgroup_(shuffle(static_cast<int>(threadIdx.x) / 128 - 1, 0)),
        converts_(RepeatsBlock || Kernel::converts_scores(p.forward)),
        factor_(converts_ ? 1.0f : p.forward.score.factor),
        warpgroup_query_(first_warpgroup_query()) {
    // Keeps the sum in one register instead of its summands.
    if constexpr (has_dense_tiles) make_opaque(warpgroup_query_);
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

  // Initializes the scores with biases, before the warpgroup waits for its order to issue.
  __device__ void begin_scores(int n) {
    if constexpr (begins_with_biases) {
      const float* const biases = storage_.info.bias[Storage::info_stage(n)] + column();
#pragma unroll
      for (int i = 0; i < keys / 8; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
        scores_[4 * i] = scores_[4 * i + 2] = two.x;
        scores_[4 * i + 1] = scores_[4 * i + 3] = two.y;
      }
    }
    if constexpr (has_dense_tiles) tile_flags_ = storage_.dense.flags[Storage::info_stage(n)];
  }

  // Makes scores of the products: softcap, biases and masks. `Partial`: some elements may be hidden. `First`: the tile is
  // the first of its work tile.
  template <bool Partial, bool First>
  __device__ void finish_scores(const WorkTile& work, int n, int visit) {
    if constexpr (Kernel::shapes) {
      if (converts_) convert_scores();
      if constexpr (!has_references) add_biases<First>(n);
    }
    if constexpr (Kernel::dense == DenseAccess::elements) {
      DenseElements<T, keys>(p_, work, work.template first_key<keys>(visit), column())
          .apply(work.row + first_query(), scores_);
    }
    if constexpr (has_dense_tiles) add_dense_scores(n);
    if constexpr (Partial && Kernel::delays) add_delayed_biases(work, n, visit);
    if constexpr (Partial) mask_scores(work, n, visit);
    if constexpr (has_references) {
      if constexpr (First) reference_[0] = reference_[1] = 0;
      add_biases<First>(n);
    }
  }

  // The reference of row h (0 or 1), in the caller's units: its scores and their maximum lack it.
  __device__ float reference(int h) const { return has_references ? reference_[h] : 0; }

  // Reads the dense mask and bias of a tile while the products run.
  __device__ void load_dense_scores(int n) {
    if constexpr (keeps_dense) {
      visit_dense_tile(n, [&]<int Queries, bool HasBias, MaskForm Mask>(const auto& tile,
                                                                        std::uint32_t mask_values) {
        dense_.template load<Queries, HasBias, Mask>(tile, warpgroup_query_, mask_values);
      });
    }
  }

  const ForwardKernelParams& p_;
  Storage& storage_;
  int warpgroup_;
  bool converts_;
  float factor_;         // of scores, to units of log 2
  int warpgroup_query_;  // of this thread's first row

  float scores_[keys / 2];
  float max_[2];                  // of each row's scores
  std::uint32_t tile_flags_ = 0;  // of the tile whose scores have been issued last

 private:
  // Calls visit.operator()<Queries, HasBias, Mask>(tile, mask_values) for the dense mask and bias of a tile.
  template <class Visit>
  __device__ void visit_dense_tile(int n, const Visit& visit) {
    auto& pipeline = storage_.dense.pipeline;
    const int use = n * warpgroups + warpgroup_;
    pipeline.wait_full(use);
    const auto& tile = storage_.dense.tile_of_use(use);
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

  // Converts products to units of log 2, with softcap or a factor that is not positive. A product that has overflowed may
  // have the wrong sign, which a softcap would hide: it becomes NaN.
  __device__ void convert_scores() {
    const ScoreParams& score = p_.forward.score;
    if (RepeatsBlock || !shapes_scores(p_.forward)) {
#pragma unroll
      for (int i = 0; i < keys / 2; ++i) scores_[i] *= score.factor;
      return;
    }
    const float inner = score.form == ScoreForm::product ? 1.0f : score.inner;
    const bool capped = score.form == ScoreForm::capped;
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      const float s = fmaf(scores_[i], 0.0f, scores_[i]) * inner;
      scores_[i] = (capped ? tanh_from_log2(s) : s) * score.factor;
    }
  }

  // ---- Biases less a reference ---------------------------------------------------------------------

  // Calls visit(score, the caller's bias, h) for this thread's scores of a tile.
  template <class Visit>
  __device__ void visit_biases(int n, const Visit& visit) {
    const float* const biases = storage_.info.bias[Storage::info_stage(n)] + column();
#pragma unroll
    for (int i = 0; i < keys / 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(biases + 8 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(scores_[4 * i + e], e % 2 == 0 ? two.x : two.y, e / 2);
      keep_loads_apart();
    }
  }

  // Adds the biases of a tile, less the row's reference. Differences of large biases that are close to each other are
  // exact, so that their size costs no digits. The reference is the row's largest score of the first tile, until a later
  // tile has a bias that exceeds it by far.
  template <bool First>
  __device__ void add_biases(int n) {
    if (!has_key_biases(p_.forward.score)) return;
    constexpr float far = 1024;
    bool moves = has_references && First && converts_;
    if (has_references && !First && converts_) {
      const float largest = warp_max(lane_bias(n)) - far;
      moves = warp_any(largest > reference_[0] || max_[0] == negative_infinity ||
                       largest > reference_[1] || max_[1] == negative_infinity);
    }
    if (moves) move_references<First>(n);
    visit_biases(n, [&](float& s, float bias, int h) { s = fmaf(bias - reference(h), log2e, s); });
  }

  // The largest bias of a lane's part of a tile.
  __device__ float lane_bias(int n) const {
    static_assert(keys <= 4 * warp_size);
    if (keys < 4 * warp_size && lane() >= keys / 4) return negative_infinity;
    const float* const biases = storage_.info.bias[Storage::info_stage(n)];
    const float4 four = *reinterpret_cast<const float4*>(biases + 4 * lane());
    return fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
  }

  // Makes the largest scores of the rows in this tile their references, if these are larger.
  template <bool First>
  __device__ void move_references(int n) {
    float top[2] = {negative_infinity, negative_infinity};
    visit_biases(n,
                 [&](float s, float bias, int h) { top[h] = fmaxf(top[h], fmaf(bias, log2e, s)); });
    constexpr float ln2 = 0.693147181f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = quad_max(top[h]) * ln2;
      if (!(fabsf(next) < -negative_infinity)) continue;
      if (First || next > reference_[h] || max_[h] == negative_infinity) {
        if (!First) max_[h] += (reference_[h] - next) * log2e;
        reference_[h] = next;
      }
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
        constexpr float unit = Kernel::shapes ? log2e : 1;
        if (query >= begin.x) s[0] += two.x * unit;
        if (query >= begin.y) s[1] += two.y * unit;
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

  DenseScores<T, typename Storage::DenseTile> dense_;
  float reference_[2];
};

}  // namespace flash_dmattn::cuda::sm90
