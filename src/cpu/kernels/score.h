#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/math.h"

// Turns q . k into scores. Most blocks need one multiply-add per element, scale * (q . k) + column term,
// which the softmax contains. All others go through score_rows first.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Exponents of the powers of two by which rows of q and k were packed; null if there are none.
struct ScoreExponents {
  const std::int32_t* queries = nullptr;  // [rows of the tile]
  const std::int32_t* keys = nullptr;     // [block_keys]

  bool any() const { return queries != nullptr || keys != nullptr; }
};

// The form of a score before the softmax: multiplier * s + columns[n].
struct ScoreForm {
  float multiplier;
  bool final;  // score_rows has run, so the multiplier is 1 and there is no column term
};

inline Vec score(const ScoreForm& form, const float* s, const float* columns) {
  return form.final ? load(s) : fma(load(s), splat(form.multiplier), load(columns));
}

// Whether a block goes through score_rows. Without exponents q . k is below 2^64, and 2^38 times that cannot
// overflow, not even with the largest bias.
inline bool needs_score_rows(const Task& t, const KeyTerms& terms,
                             const ScoreExponents& exponents) {
  const bool huge_scale = !(t.scale < 0x1p38f && t.scale > -0x1p38f);
  return terms.test_intervals || terms.test_mask || is_dense(t.bias) ||
         terms.bias_use == BiasUse::some || t.softcap > 0 || exponents.any() || huge_scale ||
         terms.infinite_bias;
}

inline Int dense_mask(const Task& t, const std::uint8_t* row, const KeyBlock& block, int n) {
  Int visible{};
  for (int i = 0; i < lanes && n + i < block.count; ++i) {
    visible[i] = row[block.key(n + i) * t.mask.key] != 0 ? -1 : 0;
  }
  return visible;
}

// Whether a row of the tile sees a key of the block, by the tests of score_rows.
inline bool sees(const Task& t, const Tile& tile, const KeyBlock& block, const KeyTerms& terms,
                 int row, int n) {
  if (row >= tile.rows || !(terms.columns_of(row)[n] > -infinity)) return false;
  const int group_head = static_cast<int>(row % t.group);
  const std::int64_t query = tile.first_query + row / t.group;
  const int vector = n / lanes * lanes;
  const int lane = n - vector;
  if (is_dense(t.bias)) {
    const Vec bias = load_bias(t, bias_at(t, tile, group_head, query), block, vector);
    if (!(bias_term(t, bias)[lane] > -infinity)) return false;
  }
  if (terms.bias_use == BiasUse::some && terms.counts(query, vector)[lane] != 0 &&
      !(terms.delayed_biases_of(row)[n] > -infinity)) {
    return false;
  }
  if (terms.test_mask &&
      dense_mask(t, mask_at(t, tile, group_head, query), block, vector)[lane] == 0) {
    return false;
  }
  return !terms.test_intervals || (terms.first[n] <= query && query < terms.last[n]);
}

// Replaces q . k in s [rows, block_keys], for rows [row, row + rows) of the tile, by the score, or -inf where the
// element is masked. Writes the derivative of the softcap to slope unless it is null. Sets unknown [rows of the
// tile], unless it is null, to true for rows that see an element whose score came from inf or NaN.
inline void score_rows(const Task& t, const Tile& tile, const KeyBlock& block,
                       const KeyTerms& terms, const ScoreExponents& exponents, int row, int rows,
                       int columns, float* s, float* slope, bool* unknown) {
  for (int r = row; r < row + rows; ++r, s += block_keys) {
    const bool is_padding = r >= tile.rows;
    const int group_head = static_cast<int>(r % t.group);
    const std::int64_t query = is_padding ? 0 : tile.first_query + r / t.group;
    const float* column = terms.columns_of(r);
    const Int position = Int{} + static_cast<std::int32_t>(query);
    for (int n = 0; n < columns; n += lanes) {
      if (is_padding) {
        store(s + n, splat(-infinity));
        if (slope != nullptr) store(slope + std::int64_t{r - row} * block_keys + n, Vec{});
        continue;
      }
      Vec x = load(s + n);
      const Vec column_term = load(column + n);
      // q . k of finite elements is finite, because large elements are packed with exponents.
      Int nonfinite = (bits(x) & 0x7fffffff) >= 0x7f800000;
      nonfinite |= column_term == splat(infinity);
      if (exponents.any() || t.softcap > 0) {
        x = x * splat(t.scale);
        if (exponents.any()) {
          for (int i = 0; i < lanes; ++i) {
            const int exponent = (exponents.queries == nullptr ? 0 : exponents.queries[r]) +
                                 (exponents.keys == nullptr ? 0 : exponents.keys[n + i]);
            if (exponent != 0) x[i] = scaled(x[i], exponent);
          }
        }
        if (t.softcap > 0) {
          const Vec capped = tanh(x / splat(t.softcap));
          if (slope != nullptr) {
            store(slope + std::int64_t{r - row} * block_keys + n, splat(1.0f) - capped * capped);
          }
          x = capped * splat(t.softcap);
        }
        x = x + column_term;
      } else {
        x = fma(x, splat(t.scale), column_term);
      }
      Int visible = column_term > splat(-infinity);
      if (is_dense(t.bias)) {
        const Vec bias = bias_term(t, load_bias(t, bias_at(t, tile, group_head, query), block, n));
        x = x + bias;
        visible &= bias > splat(-infinity);
        nonfinite |= bias == splat(infinity);
      }
      if (terms.bias_use == BiasUse::some) {
        const Vec delayed = load(terms.delayed_biases_of(r) + n);
        const Vec bias = terms.counts(query, n) ? delayed : Vec{};
        x = x + bias;
        visible &= bias > splat(-infinity);
        nonfinite |= bias == splat(infinity);
      }
      if (terms.test_mask) {
        visible &= dense_mask(t, mask_at(t, tile, group_head, query), block, n);
      }
      if (terms.test_intervals) {
        const Int first = load_as<Int>(terms.first + n);
        const Int last = load_as<Int>(terms.last + n);
        visible &= (first <= position) & (position < last);
      }
      if (unknown != nullptr && any(visible & nonfinite)) unknown[r] = true;
      // max replaces a NaN by the lower limit.
      x = min(max(x, splat(-float_max)), splat(float_max));
      store(s + n, visible ? x : splat(-infinity));
    }
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
