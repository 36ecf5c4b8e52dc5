#pragma once

#include "cuda/sm90/forward/consumer_scores.cuh"
#include "cuda/sm90/forward/epilogue.cuh"
#include "cuda/sm90/forward/fix_rows.cuh"

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
// `RepeatsBlock`: the block has run another consumer before, whose last turn has not been taken.
template <class Kernel, bool RepeatsBlock>
class ForwardConsumer : ConsumerScores<Kernel, RepeatsBlock> {
  using Scores = ConsumerScores<Kernel, RepeatsBlock>;
  using Scores::factor_, Scores::max_, Scores::p_, Scores::scores_, Scores::storage_;
  using Scores::first_query, Scores::has_two_heads, Scores::lane, Scores::query_step;
  using Scores::has_dense_tiles, Scores::has_info;
  using Scores::head_dim, Scores::keys, Scores::warpgroup_, Scores::warpgroups;
  using typename Scores::Storage, typename Scores::T;
  static constexpr int value_dim = Kernel::value_dim;
  static constexpr float max_growth = 8;  // in log2: growth of a row's maximum that O tolerates
  // Whether each lane votes by the maximum of its own columns, and a quad compares maxima only when O is rescaled.
  // D 128: 2 % faster. D 64: 4 % slower over lists, level elsewhere.
  static constexpr bool lanes_vote = head_dim > 64;

 public:
  __device__ ForwardConsumer(const ForwardKernelParams& p, Storage& storage) : Scores(p, storage) {}

  __device__ void run() {
    if (!RepeatsBlock && warpgroup_ == 0) give_turn_to(0);
    storage_.q_pipeline.wait_full(0);
    // There is work for every block.
    WorkTile work = storage_.work[0];
    storage_.k_pipeline.wait_full(0);
    this->begin_scores(0);
    issue_scores(0, 0);
    this->load_dense_scores(0);
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
      const RowOffset offsets[2] = {row_offset(0), row_offset(1)};
      softmax<true, true>(next, n, 0);
      wait_out(n - 1);
      pack_weights();
      store(work, sums, offsets);
      clear_out();
      work = next;
    }
    storage_.v_pipeline.wait_full(n - 1);
    issue_out(n - 1);
    wait_out(n - 1);
    const RowOffset offsets[2] = {row_offset(0), row_offset(1)};
    store(work, sum_, offsets);
    if constexpr (Kernel::repetition == Repetition::by_block) {
      if (is_large_row(offsets[0].log2) || is_large_row(offsets[1].log2))
        storage_.has_large_rows = true;
    }
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
  // Whether the key tile whose scores were issued last is the last one of the work tile.
  __device__ bool is_last(const WorkTile& work, int visit) const {
    return has_dense_tiles ? (this->tile_flags_ & last_of_work_tile) != 0
                           : visit == work.visits - 1;
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
      for (int i = 0; i < value_dim / 2; ++i) out_[i] *= rescale_[i / 2 % 2];
    }
  }

  // Issues S of tile n and O of tile n - 1 together; returns when S is complete.
  __device__ void issue(int n, int work_count) {
    storage_.k_pipeline.wait_full(n);
    this->begin_scores(n);
    wait_for_turn();
    issue_scores(n, work_count);
    if constexpr (!Kernel::overlaps) wgmma_wait<0>();
    storage_.v_pipeline.wait_full(n - 1);
    issue_out(n - 1);
    if constexpr (!Kernel::overlaps) wgmma_wait<0>();
    give_turn_to((warpgroup_ + 1) % warpgroups);
    this->load_dense_scores(n);
    wait_scores<1>(n);
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
      wgmma<T>(scores_, q.at(i), k.at(i), Scores::begins_with_biases || i > 0);
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
    for (int i = 0; i < value_dim / 2; ++i) out_[i] = 0;
  }

  // ---- Softmax -------------------------------------------------------------------------------------

  // The offset that is subtracted from a row's scores, times factor_: weights are exp2 of the difference. It is
  // finite for a row that sees no key so far.
  template <bool CanBeEmpty>
  __device__ float offset(int h) const {
    const float top = fmaf(max_[h], factor_, weight_shift<T>);
    return CanBeEmpty && max_[h] == negative_infinity ? weight_shift<T> : top;
  }

  __device__ RowOffset row_offset(int h) const { return {offset<true>(h), this->reference(h)}; }

  // Turns scores into weights. The maximum is raised only if it has grown by max_growth in log2. That is exact, as
  // the sum has the same offset. `rescales_` and `rescale_`: whether O is rescaled, and its factors.
  template <bool Partial, bool First>
  __device__ void softmax(const WorkTile& work, int n, int visit) {
    Scores::template finish_scores<Partial, First>(work, n, visit);
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

  __device__ void store(const WorkTile& work, const float (&sums)[2],
                        const RowOffset (&offsets)[2]) {
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

  float out_[value_dim / 2];
  std::uint32_t weights_[keys / 4];
  float sum_[2];  // of this thread's columns
  float rescale_[2];
  bool rescales_ = false;
};

}  // namespace flash_dmattn::cuda::sm90
