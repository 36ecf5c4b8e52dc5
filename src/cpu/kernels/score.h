#pragma once

#include <cstdint>

#include "cpu/kernels/keys.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/math.h"

// Turns q . k into scores: a multiple of q . k plus a term of the key, which the softmax adds. Elements that are tested
// have terms of their own, -inf where the element is masked.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

alignas(64) inline constexpr float no_terms[block_keys] = {};

// A row of scores: multiplier * s[n] + terms[n].
struct ScoreRow {
  float* s;
  float multiplier;
  const float* terms;

  Vec operator()(int n) const { return fma(load(s + n), splat(multiplier), load(terms + n)); }

  // The row after subtract_reference.
  ScoreRow differences() const { return {s, 1, no_terms}; }
};

// Replaces the scores of `columns` keys by their differences from `reference`, and returns the largest one. The difference
// of a term is exact (Knuth's sum of two numbers), so that a difference of scores is rounded once, whichever of the numbers
// are large. Takes a copy, so that the caller's row stays in registers.
inline float subtract_reference(ScoreRow row, float reference, int columns) {
  const Vec b = splat(reference);
  Vec largest = splat(-infinity);
  for (int n = 0; n < columns; n += lanes) {
    const Vec a = max(load(row.terms + n), splat(-float_max));
    const Vec high = a - b;
    const Vec subtracted = a - high;  // b, as rounded
    const Vec low = (a - (high + subtracted)) + (subtracted - b);
    const Vec difference = fma(load(row.s + n), splat(row.multiplier), high) + low;
    largest = max(largest, difference);
    store(row.s + n, difference);
  }
  return reduce(largest, [](Vec x, Vec y) { return max(x, y); });
}

// From here on, differences of scores are rounded less than the scores: below, the rounding of a score is invisible in
// the results. Beyond 2^24 a difference of large numbers that are not close may be rounded by more than 1, and the
// rounded scores have to do.
inline bool subtracts_first(DType dtype, float reference) {
  const float magnitude = reference < 0 ? -reference : reference;
  return magnitude > (dtype == DType::f32 ? 32.0f : 1024.0f) && magnitude <= large_term;
}

// The scores of a strip of rows, whose q . k is s [rows, block_keys].
struct StripScores {
  float* s;
  float multiplier;
  const KeyTerms* key_terms;
  int row;                 // of the tile, the first one
  const float* row_terms;  // [rows, block_keys], or null: the terms of the keys
  bool final;              // s has the scores, limited to fp32

  const float* terms_of(int r) const {
    return row_terms == nullptr ? key_terms->columns_of(row + r)
                                : row_terms + std::int64_t{r} * block_keys;
  }
  bool sees(int r, int n) const { return terms_of(r)[n] > -infinity; }
  ScoreRow operator[](int r) const {
    return {s + std::int64_t{r} * block_keys, multiplier, final ? no_terms : terms_of(r)};
  }
};

inline Int dense_mask(const Task& t, const std::uint8_t* row, const KeyBlock& block, int n) {
  Int visible{};
  for (int i = 0; i < lanes && n + i < block.count; ++i) {
    visible[i] = row[block.key(n + i) * t.mask.key] != 0 ? -1 : 0;
  }
  return visible;
}

inline bool has_row_terms(const Task& t, const KeyTerms& terms) {
  return terms.test_intervals || terms.test_mask || is_dense(t.bias) ||
         terms.bias_use == BiasUse::some;
}

// Writes the terms of `rows` rows of the tile from `row` on to `to` [rows, block_keys]. Returns whether some are large.
inline bool write_row_terms(const Task& t, const Tile& tile, const KeyBlock& block,
                            const KeyTerms& terms, int row, int rows, int columns, float* to) {
  Int large{};
  for (int r = row; r < row + rows; ++r, to += block_keys) {
    if (r >= tile.rows) {
      for (int n = 0; n < columns; n += lanes) store(to + n, splat(-infinity));
      continue;
    }
    const int group_head = static_cast<int>(r % t.group);
    const std::int64_t query = tile.first_query + r / t.group;
    const float* column = terms.columns_of(r);
    const Int position = Int{} + static_cast<std::int32_t>(query);
    for (int n = 0; n < columns; n += lanes) {
      Vec term = load(column + n);
      if (is_dense(t.bias)) {
        term = term + bias_term(t, load_bias(t, bias_at(t, tile, group_head, query), block, n));
      }
      if (terms.bias_use == BiasUse::some) {
        term = term + (terms.counts(query, n) ? load(terms.delayed_biases_of(r) + n) : Vec{});
      }
      Int visible = load(column + n) > splat(-infinity);
      if (terms.test_mask) {
        visible &= dense_mask(t, mask_at(t, tile, group_head, query), block, n);
      }
      if (terms.test_intervals) {
        const Int first = load_as<Int>(terms.first + n);
        const Int last = load_as<Int>(terms.last + n);
        visible &= (first <= position) & (position < last);
      }
      term = visible ? term : splat(-infinity);
      large |= is_large_term(term);
      store(to + n, term);
    }
  }
  return any(large);
}

// Replaces s by c tanh(scale s / c), and writes the derivative to `slope` unless it is null.
inline void cap_scores(const Task& t, int rows, int columns, float* s, float* slope) {
  for (int r = 0; r < rows; ++r) {
    for (int n = r * block_keys; n < r * block_keys + columns; n += lanes) {
      const Vec x = load(s + n) * splat(t.scale);
      const Vec capped = tanh(x / splat(t.softcap));
      if (slope != nullptr) store(slope + n, splat(1.0f) - capped * capped);
      store(s + n, x == x ? capped * splat(t.softcap) : x);
    }
  }
}

// Sets unknown [rows of the tile] to true for rows that see an element whose score inf or NaN enters. `scores` still has
// q . k, which may be infinite only where q and k are.
inline void find_unknown(const StripScores& scores, Numbers numbers, int rows, int columns,
                         bool* unknown) {
  for (int r = 0; r < rows; ++r) {
    const ScoreRow score = scores[r];
    for (int n = 0; n < columns; n += lanes) {
      const Vec x = load(score.s + n);
      const Vec term = load(score.terms + n);
      Int nonfinite = term == splat(infinity);
      if (numbers == Numbers::nonfinite) nonfinite |= x - x != Vec{};
      if (any((term > splat(-infinity)) & nonfinite)) unknown[scores.row + r] = true;
    }
  }
}

// Replaces s by scores within the range of fp32, a NaN by the lower limit.
inline void limit_scores(const StripScores& scores, int rows, int columns) {
  for (int r = 0; r < rows; ++r) {
    const ScoreRow score = scores[r];
    for (int n = 0; n < columns; n += lanes) {
      const Vec limited = min(max(score(n), splat(-float_max)), splat(float_max));
      store(score.s + n, load(score.terms + n) > splat(-infinity) ? limited : splat(-infinity));
    }
  }
}

// Turns q . k of a strip of rows into its scores. `numbers` is the class of q and k. row_terms, and slope unless it is null,
// are [rows, block_keys]; unknown unless it is null is [rows of the tile].
inline StripScores make_scores(const Task& t, const Tile& tile, const KeyBlock& block,
                               const KeyTerms& terms, Numbers numbers, int row, int rows,
                               int columns, float* s, float* row_terms, float* slope,
                               bool* unknown) {
  StripScores scores{s, t.scale, &terms, row, nullptr, false};
  bool large = numbers != Numbers::ordinary || !(t.scale < 0x1p38f && t.scale > -0x1p38f);
  if (has_row_terms(t, terms)) {
    large |= write_row_terms(t, tile, block, terms, row, rows, columns, row_terms);
    scores.row_terms = row_terms;
  } else {
    large |= terms.some_large;
  }
  if (unknown != nullptr && large) find_unknown(scores, numbers, rows, columns, unknown);
  if (t.softcap > 0) {
    cap_scores(t, rows, columns, s, slope);
    scores.multiplier = 1;
  }
  if (large) {
    limit_scores(scores, rows, columns);
    scores.multiplier = 1;
    scores.final = true;
  }
  return scores;
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
