#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/math.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

// The online softmax of the rows of a tile: sums over the keys so far, relative to each row's largest score
// (Milakov, Gimelshein, arXiv 1805.02867).
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Weights are at most 2^-24, so that sums of values over any number of keys stay inside fp32.
inline constexpr int weight_shift = 24;

struct OnlineSoftmax {
  const ForwardTask& t;
  int rows;          // allocated
  int head_columns;  // value_dim rounded up to vectors
  float* out;        // [rows, head_columns]
  float* row_max;    // [rows]: the largest score, as rounded
  float* row_low;    // [rows]: what rounding removed from it, if it is large
  float* row_sum;    // [rows, lanes]: partial sums
  bool* unknown;     // [rows]: a score came from inf or NaN, so the result is NaN

  OnlineSoftmax(const ForwardTask& task, int rows_, ScratchAllocator& allocator)
      : t(task), rows(rows_), head_columns(round_up(task.value_dim, lanes)) {
    out = allocator.take<float>(std::int64_t{rows} * head_columns);
    row_max = allocator.take<float>(rows);
    row_low = allocator.take<float>(rows);
    row_sum = allocator.take<float>(std::int64_t{rows} * lanes);
    unknown = allocator.take<bool>(rows);
  }

  float* out_row(int row) const { return out + std::int64_t{row} * head_columns; }
  float* sum_of(int row) const { return row_sum + std::int64_t{row} * lanes; }

  void clear() const {
    for (int r = 0; r < rows; ++r) {
      row_max[r] = -infinity;
      row_low[r] = 0;
    }
    __builtin_memset(unknown, 0, static_cast<unsigned>(rows));
    __builtin_memset(row_sum, 0, sizeof(float) * lanes * static_cast<unsigned>(rows));
    __builtin_memset(
        out, 0, sizeof(float) * static_cast<unsigned>(rows) * static_cast<unsigned>(head_columns));
  }

  // Computes p = 2^-weight_shift exp(s - max) for the first `count` rows of a strip, and passes it to
  // store_p(r, n, left, right), 2 * lanes columns at a time. Earlier sums are rescaled to the new maximum.
  template <class StoreP>
  void add_scores(const StripScores& scores, int count, int columns, const StoreP& store_p) const {
    for (int r = 0; r < count; ++r) {
      const int row = scores.row + r;
      ScoreRow score = scores[r];
      Vec left_max = splat(row_max[row]), right_max = left_max;
      for (int n = 0; n < columns; n += panel_columns) {
        left_max = max(left_max, score(n));
        right_max = max(right_max, score(n + lanes));
      }
      const float new_max =
          reduce(max(left_max, right_max), [](Vec a, Vec b) { return max(a, b); });
      // A row that has seen no key yet has the maximum -inf; all its p are 0.
      float subtracted = new_max == -infinity ? 0.0f : new_max;
      const bool is_larger = new_max > row_max[row];
      float new_low = is_larger ? 0.0f : row_low[row];
      if (!scores.final && subtracts_first(t.dtype, new_max)) {
        const float largest = subtract_reference(score, new_max, columns);
        score = score.differences();
        if (is_larger) new_low = largest;
        subtracted = new_low;
      }
      if (is_larger) raise_max(row, new_max, new_low);

      float* sum = sum_of(row);
      Vec total = load(sum);
      for (int n = 0; n < columns; n += panel_columns) {
        const Vec left = exp<weight_shift>(score(n) - splat(subtracted));
        const Vec right = exp<weight_shift>(score(n + lanes) - splat(subtracted));
        total = total + (left + right);
        store_p(r, n, left, right);
      }
      store(sum, total);
    }
  }

  // Adds the sums over other keys.
  void merge(const OnlineSoftmax& other) const {
    for (int r = 0; r < rows; ++r) {
      unknown[r] = unknown[r] || other.unknown[r];
      if (other.row_max[r] == -infinity) continue;
      if (other.row_max[r] > row_max[r]) raise_max(r, other.row_max[r], other.row_low[r]);
      const Vec factor =
          exp(splat((other.row_max[r] - row_max[r]) + (other.row_low[r] - row_low[r])));
      if (factor[0] == 0 && t.saturate) continue;  // 0 times inf would be NaN
      store(sum_of(r), fma(load(other.sum_of(r)), factor, load(sum_of(r))));
      for (int d = 0; d < head_columns; d += lanes) {
        store(out_row(r) + d, fma(load(other.out_row(r) + d), factor, load(out_row(r) + d)));
      }
    }
  }

  // Writes out, lse and lse_low of the tile.
  template <class In, class RowAt>
  void finish(const Tile& tile, const RowAt& row_at) const {
    for (int r = 0; r < tile.rows; ++r) {
      const float sum = reduce_add(load(sum_of(r)));
      const bool empty = row_max[r] == -infinity;
      const Vec factor = splat(empty ? 0.0f : 1.0f / sum);
      auto* to = const_cast<typename In::Storage*>(row_at(r));
      for (int d = 0; d < t.value_dim; d += lanes) {
        Vec value = load(out_row(r) + d) * factor;
        if (t.saturate) value = saturated(value, In::largest);
        if (unknown[r]) value = splat(not_a_number);
        store_narrowed<In>(to + d, value, t.value_dim - d);
      }
      const std::int64_t head = tile.head * t.group + r % t.group;
      const std::int64_t index =
          (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
      constexpr double unit = 1 << weight_shift;
      const double log_sum =
          empty ? 0
                : static_cast<double>(row_low[r]) + __builtin_log(unit * static_cast<double>(sum));
      t.lse[index] = unknown[r] ? not_a_number : row_max[r] + static_cast<float>(log_sum);
      if (t.lse_low != nullptr) {
        const double rest = static_cast<double>(row_max[r]) - static_cast<double>(t.lse[index]);
        t.lse_low[index] = empty ? 0.0f : static_cast<float>(rest + log_sum);
      }
    }
  }

 private:
  // Multiplies the sums of a row by exp(old max - new max). A factor of 0 makes the sums 0, even an inf from v.
  void raise_max(int row, float new_max, float new_low) const {
    const Vec factor = exp(splat((row_max[row] - new_max) + (row_low[row] - new_low)));
    row_max[row] = new_max;
    row_low[row] = new_low;
    const Int kept = factor > Vec{};
    store(sum_of(row), load(sum_of(row)) * factor);
    for (int d = 0; d < head_columns; d += lanes) {
      store(out_row(row) + d, kept ? load(out_row(row) + d) * factor : Vec{});
    }
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
