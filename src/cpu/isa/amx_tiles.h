#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa/bf16_packed2.h"
#include "cpu/kernels/multiply.h"

// Products of bf16 in the eight tile registers of AMX, each with 16 rows of 16 words of two elements. A tile
// of b has 16 words of depth by 16 columns, the layout of a panel in memory.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct TilePacked2 : Bf16Packed2 {
  static constexpr int depth_step = 16;  // words
  static constexpr int strip_rows = 32;

  // The tile shape is state of the thread, which the session's destructor releases.
  struct Session {
    Session() {
      struct alignas(64) {
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shape;
      // GCC 12.2 declares that _tile_loadconfig reads only the first 8 bytes, and would remove the stores to
      // the others.
      __asm__ volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // multiply() of multiply.h. Rows are rounded up to strips; columns and depth are multiples of 16.
  template <Layout layout, Store mode>
  static void multiply(Factor a, Panels b, Product c, int rows, int columns, std::int64_t depth) {
    if constexpr (layout == Layout::row_major) {
      multiply_panels<mode>(a, b, c, rows, columns, depth);
    } else {
      alignas(64) float strip[strip_rows * transposed_depth];
      for (int row = 0; row < rows; row += strip_rows) {
        const Product c_strip{c.data + row * c.ld, c.ld};
        for (std::int64_t k = 0; k < depth; k += transposed_depth) {
          const std::int64_t left = depth - k < transposed_depth ? depth - k : transposed_depth;
          transpose_strip({a.words + k * a.ld + row, a.ld}, left, strip);
          const Factor factor{strip, transposed_depth};
          const Panels panels{b.words + k * panel_columns, b.panel_stride};
          if (mode == Store::add || k > 0) {
            multiply_panels<Store::add>(factor, panels, c_strip, strip_rows, columns, left);
          } else {
            multiply_panels<Store::replace>(factor, panels, c_strip, strip_rows, columns, left);
          }
        }
      }
    }
  }

 private:
  static constexpr int tile = 16;  // rows, and words of a row
  static constexpr int word_bytes = 4;
  // The words of depth that are transposed at a time take 8 KiB.
  static constexpr std::int64_t transposed_depth = 64;

  static void transpose_strip(Factor a, std::int64_t depth, float* strip) {
    for (std::int64_t k = 0; k < depth; k += lanes) {
      for (int row = 0; row < strip_rows; row += lanes) {
        Vec words[lanes];
        for (int i = 0; i < lanes; ++i) words[i] = load(a.words + (k + i) * a.ld + row);
        transpose(words);
        for (int i = 0; i < lanes; ++i) store(strip + (row + i) * transposed_depth + k, words[i]);
      }
    }
  }

  // A panel of b stays in the first-level cache for all rows.
  template <Store mode>
  static void multiply_panels(Factor a, Panels b, Product c, int rows, int columns,
                              std::int64_t depth) {
    // GCC does not declare that _tile_loadd reads memory, so its operands have to be stored by now.
    __asm__ volatile("" ::: "memory");
    for (int column = 0; column < columns; column += panel_columns) {
      const float* panel = b.words + column / panel_columns * b.panel_stride;
      for (int row = 0; row < rows; row += strip_rows) {
        multiply_tiles<mode>({a.words + row * a.ld, a.ld}, panel,
                             {c.data + row * c.ld + column, c.ld}, columns - column > tile, depth);
      }
    }
  }

  // Computes 32 rows of c and 32 or 16 columns. Tiles 0..3 are c, 4 and 5 a, 6 and 7 b.
  template <Store mode>
  static void multiply_tiles(Factor a, const float* panel, Product c, bool both,
                             std::int64_t depth) {
    const std::int64_t a_stride = a.ld * word_bytes;
    const std::int64_t c_stride = c.ld * word_bytes;
    float* const top = c.data;
    float* const bottom = top + tile * c.ld;
    if constexpr (mode == Store::add) {
      _tile_loadd(0, top, c_stride);
      _tile_loadd(2, bottom, c_stride);
      if (both) _tile_loadd(1, top + tile, c_stride);
      if (both) _tile_loadd(3, bottom + tile, c_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (std::int64_t k = 0; k < depth; k += tile) {
      const float* words = panel + k * panel_columns;
      _tile_loadd(4, a.words + k, a_stride);
      _tile_loadd(6, words, panel_columns * word_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a.words + tile * a.ld + k, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if (!both) continue;
      _tile_loadd(7, words + tile, panel_columns * word_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, top, c_stride);
    _tile_stored(2, bottom, c_stride);
    if (both) _tile_stored(1, top + tile, c_stride);
    if (both) _tile_stored(3, bottom + tile, c_stride);
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
