#pragma once

#include <cstdint>

#include "cpu/kernels/multiply.h"

// Copies rows of q, k, v and dout, wherever they are in memory, into the layouts of multiply.h. `row(i)` is
// the address of row i. Tails are filled with zeros, so that a product reads only written words.
//
// Every function returns the largest magnitude of its rows (the bits of an fp32, per lane), which magnitude.h sorts.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

inline Int larger(Int a, Int b) { return a > b ? a : b; }

// Elements that are inf or NaN, in the packed rows.
enum class NonFiniteElements : std::uint8_t { keep, drop };

// The number of words for `elements` neighbours along a depth.
template <class Element>
int depth_words(int elements) {
  return round_up(round_up(elements, Element::per_word) / Element::per_word, Element::depth_step);
}

// The number of rows of a factor of that depth, including the padding.
template <class Element>
int padded_depth(int elements) {
  return depth_words<Element>(elements) * Element::per_word;
}

// Packs `rows` rows of head_dim elements as a row-major factor, with zeros up to padded_rows and ld words
// (a multiple of lanes).
template <class In, class Element, NonFiniteElements nonfinite = NonFiniteElements::keep,
          class RowAt>
Int pack_rows(const RowAt& row, int rows, int padded_rows, int head_dim, float* to, int ld) {
  constexpr int step = lanes * Element::per_word;
  Int magnitude{};
  for (int r = 0; r < rows; ++r) {
    const auto* from = row(r);
    for (int w = 0, d = 0; w < ld; w += lanes, d += step) {
      Vec words = d < head_dim ? Element::template load_words<In>(from + d, head_dim - d) : Vec{};
      if constexpr (nonfinite == NonFiniteElements::drop) words = Element::finite(words);
      magnitude = larger(magnitude, Element::magnitude(words));
      store(to + std::int64_t{r} * ld + w, words);
    }
  }
  for (std::int64_t w = std::int64_t{rows} * ld; w < std::int64_t{padded_rows} * ld; w += lanes) {
    store(to + w, Vec{});
  }
  return magnitude;
}

// Packs rows as panels with rows as columns and the head dimension as depth: the b of q k^T.
template <class In, class Element, class RowAt>
Int pack_transposed(const RowAt& row, int rows, int head_dim, Panels to) {
  constexpr int step = lanes * Element::per_word;
  const int depth = depth_words<Element>(head_dim);
  Int magnitude{};
  for (int first = 0; first < round_up(rows, panel_columns); first += lanes) {
    float* panel = to.words + first / panel_columns * to.panel_stride + first % panel_columns;
    for (int w = 0, d = 0; w < depth; w += lanes, d += step) {
      Vec words[lanes];
      for (int i = 0; i < lanes; ++i) {
        words[i] = first + i < rows && d < head_dim
                       ? Element::template load_words<In>(row(first + i) + d, head_dim - d)
                       : Vec{};
        magnitude = larger(magnitude, Element::magnitude(words[i]));
      }
      transpose(words);
      const int count = depth - w < lanes ? depth - w : lanes;
      for (int i = 0; i < count; ++i) store(panel + std::int64_t{w + i} * panel_columns, words[i]);
    }
  }
  return magnitude;
}

// Packs rows as panels with rows as depth and the head dimension as columns: the b of p v. Rows up to
// `padded_rows`, which fills the last word, are zeros.
template <class In, class Element, NonFiniteElements nonfinite = NonFiniteElements::keep,
          class RowAt>
Int pack_panels(const RowAt& row, int rows, int padded_rows, int head_dim, Panels to) {
  Int magnitude{};
  for (int r = 0, word = 0; r < padded_rows; r += Element::per_word, ++word) {
    const auto* first = r < rows ? row(r) : nullptr;
    const auto* second = r + 1 < rows ? row(r + 1) : nullptr;
    for (int d = 0; d < head_dim; d += lanes) {
      Vec words = first == nullptr
                      ? Vec{}
                      : Element::template load_interleaved<In>(
                            first + d, second == nullptr ? nullptr : second + d, head_dim - d);
      if constexpr (nonfinite == NonFiniteElements::drop) words = Element::finite(words);
      magnitude = larger(magnitude, Element::magnitude(words));
      store(to.words + d / panel_columns * to.panel_stride + std::int64_t{word} * panel_columns +
                d % panel_columns,
            words);
    }
  }
  return magnitude;
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
