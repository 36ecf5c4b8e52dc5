#pragma once

#include <cstdint>

// Computes c = a b or c += a b in fp32, the only products on the CPU. Depth is counted in words.
//
//   a  rows x depth words, row-major, or transposed: word (r, k) at a[k * lda + r]
//   b  panels of panel_columns columns; panel p has its [depth][panel_columns] words at
//      b + p * panel_stride, so that a panel is read as one stream
//   c  rows x columns fp32, row-major
//
// Every element of c is one sum in ascending order of depth, whatever the tiling, so forward and backward
// compute bit-identical scores.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

inline constexpr int panel_columns = 2 * lanes;

struct Factor {
  const float* words;
  std::int64_t ld;  // words from one row to the next; transposed: from one depth to the next
};

struct Panels {
  float* words;
  std::int64_t panel_stride;
};

struct Product {
  float* data;
  std::int64_t ld;
};

enum class Layout : std::uint8_t { row_major, transposed };
enum class Store : std::uint8_t { replace, add };

// Keeps Rows x (Vectors * lanes) sums of c in registers over the whole depth. The depth is at least 1, because
// GCC spills the sums on both sides of a loop that may not run at all (4 % of the time at D = 128).
template <class Element, Layout layout, Store mode, int Rows, int Vectors>
[[gnu::noinline]] void multiply_block(const float* a, std::int64_t lda, const float* b, float* c,
                                      std::int64_t ldc, std::int64_t depth) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      sum[r][v] = mode == Store::add ? load(c + r * ldc + v * lanes) : Vec{};
  }
  do {
    Vec columns[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) columns[v] = load(b + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec word = splat(layout == Layout::transposed ? a[r] : a[r * lda]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Element::dot(sum[r][v], word, columns[v]);
    }
    b += panel_columns;
    a += layout == Layout::transposed ? lda : 1;
  } while (--depth > 0);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(c + r * ldc + v * lanes, sum[r][v]);
  }
}

// Rows are rounded up to a multiple of the strip; columns are a multiple of lanes.
template <class Element, Layout layout, Store mode>
void multiply(Factor a, Panels b, Product c, int rows, int columns, std::int64_t depth) {
  if constexpr (requires {
                  Element::template multiply<layout, mode>(a, b, c, rows, columns, depth);
                }) {
    return Element::template multiply<layout, mode>(a, b, c, rows, columns, depth);
  }
  constexpr int strip = Element::strip_rows;
  for (int column = 0; column < columns; column += panel_columns) {
    const float* panel = b.words + column / panel_columns * b.panel_stride;
    for (int row = 0; row < rows; row += strip) {
      const float* a_strip = a.words + (layout == Layout::transposed ? row : row * a.ld);
      float* c_block = c.data + row * c.ld + column;
      if (columns - column > lanes) {
        multiply_block<Element, layout, mode, strip, 2>(a_strip, a.ld, panel, c_block, c.ld, depth);
      } else {
        multiply_block<Element, layout, mode, strip, 1>(a_strip, a.ld, panel, c_block, c.ld, depth);
      }
    }
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
