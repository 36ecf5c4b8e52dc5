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

struct OnlineSoftmax {
  const ForwardTask& t;
  int rows;                 // allocated
  int head_columns;         // value_dim rounded up to vectors
  float* out;               // [rows, head_columns]
  float* row_max;           // [rows]
  float* row_sum;           // [rows, lanes]: partial sums
  bool* unknown;            // [rows]: a score came from inf or NaN, so the result is NaN
  std::int32_t* out_shift;  // out is in units of 2^out_shift

  OnlineSoftmax(const ForwardTask& task, int rows_, ScratchAllocator& allocator)
      : t(task), rows(rows_), head_columns(round_up(task.value_dim, lanes)) {
    out = allocator.take<float>(std::int64_t{rows} * head_columns);
    row_max = allocator.take<float>(rows);
    row_sum = allocator.take<float>(std::int64_t{rows} * lanes);
    unknown = allocator.take<bool>(rows);
    out_shift = allocator.take<std::int32_t>(1);
  }

  float* out_row(int row) const { return out + std::int64_t{row} * head_columns; }
  float* sum_of(int row) const { return row_sum + std::int64_t{row} * lanes; }

  void clear() const {
    for (int r = 0; r < rows; ++r) row_max[r] = -infinity;
    __builtin_memset(unknown, 0, static_cast<unsigned>(rows));
    __builtin_memset(row_sum, 0, sizeof(float) * lanes * static_cast<unsigned>(rows));
    __builtin_memset(
        out, 0, sizeof(float) * static_cast<unsigned>(rows) * static_cast<unsigned>(head_columns));
    *out_shift = 0;
  }

  // Computes p = exp(s - max) for `count` rows from `row` on, with scores s [count, block_keys], and passes it to
  // store_p(r, n, left, right), 2 * lanes columns at a time. Earlier sums are rescaled to the new maximum.
  template <class StoreP>
  void add_scores(int row, int count, int columns, const ScoreForm& form, const KeyTerms& terms,
                  const float* s, const StoreP& store_p) const {
    for (int r = 0; r < count; ++r) {
      const float* s_row = s + r * block_keys;
      const float* column = terms.columns_of(row + r);
      Vec left_max = splat(row_max[row + r]), right_max = left_max;
      for (int n = 0; n < columns; n += panel_columns) {
        left_max = max(left_max, score(form, s_row + n, column + n));
        right_max = max(right_max, score(form, s_row + n + lanes, column + n + lanes));
      }
      const float new_max =
          reduce(max(left_max, right_max), [](Vec a, Vec b) { return max(a, b); });
      const float subtracted = subtracted_max(new_max);
      if (new_max > row_max[row + r]) rescale(row + r, row_max[row + r] - subtracted);
      row_max[row + r] = new_max;

      float* sum = sum_of(row + r);
      Vec total = load(sum);
      for (int n = 0; n < columns; n += panel_columns) {
        const Vec left = exp(score(form, s_row + n, column + n) - splat(subtracted));
        const Vec right =
            exp(score(form, s_row + n + lanes, column + n + lanes) - splat(subtracted));
        total = total + (left + right);
        store_p(r, n, left, right);
      }
      store(sum, total);
    }
  }

  // Switches out to units of 2^sum_unit, because some v is large.
  void use_large_unit() const { use_unit(sum_unit); }

  // Adds the sums over other keys.
  void merge(const OnlineSoftmax& other) const {
    use_unit(*other.out_shift);
    const float unit = *out_shift == *other.out_shift ? 1.0f : power_of_two(-*out_shift);
    for (int r = 0; r < rows; ++r) {
      unknown[r] = unknown[r] || other.unknown[r];
      if (other.row_max[r] == -infinity) continue;
      const float new_max = row_max[r] > other.row_max[r] ? row_max[r] : other.row_max[r];
      if (new_max > row_max[r]) rescale(r, row_max[r] - new_max);
      row_max[r] = new_max;
      const Vec factor = exp(splat(other.row_max[r] - new_max));
      if (factor[0] == 0 && t.saturate) continue;  // 0 times inf would be NaN
      store(sum_of(r), fma(load(other.sum_of(r)), factor, load(sum_of(r))));
      const Vec out_factor = factor * splat(unit);
      for (int d = 0; d < head_columns; d += lanes) {
        store(out_row(r) + d, fma(load(other.out_row(r) + d), out_factor, load(out_row(r) + d)));
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
        if (*out_shift != 0) value = value * splat(power_of_two(*out_shift));
        if (t.saturate) value = saturated(value, In::largest);
        if (unknown[r]) value = splat(not_a_number);
        store_narrowed<In>(to + d, value, t.value_dim - d);
      }
      const std::int64_t head = tile.head * t.group + r % t.group;
      const std::int64_t index =
          (tile.batch * t.heads_kv * t.group + head) * t.seqlen_q + tile.first_query + r / t.group;
      const double log_sum = empty ? 0 : __builtin_log(static_cast<double>(sum));
      t.lse[index] = unknown[r] ? not_a_number : row_max[r] + static_cast<float>(log_sum);
      if (t.lse_low != nullptr) {
        const double rest = static_cast<double>(row_max[r]) - static_cast<double>(t.lse[index]);
        t.lse_low[index] = empty ? 0.0f : static_cast<float>(rest + log_sum);
      }
    }
  }

 private:
  // A row that has seen no key yet has the maximum -inf; all its p are 0.
  static float subtracted_max(float max) { return max == -infinity ? 0.0f : max; }

  // Multiplies the sums of a row by exp(old max - new max). A factor of 0 makes the sums 0, even an inf from v.
  void rescale(int row, float difference) const {
    const Vec factor = exp(splat(difference));
    const Int kept = factor > Vec{};
    store(sum_of(row), load(sum_of(row)) * factor);
    for (int d = 0; d < head_columns; d += lanes) {
      store(out_row(row) + d, kept ? load(out_row(row) + d) * factor : Vec{});
    }
  }

  void use_unit(int shift) const {
    if (*out_shift >= shift) return;
    scale_by_power(out, std::int64_t{rows} * head_columns, *out_shift - shift);
    *out_shift = shift;
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
