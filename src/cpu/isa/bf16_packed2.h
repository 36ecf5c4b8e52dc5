#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa/avx512.h"

#include "cpu/kernels/element.h"

// Factors in bf16. A word holds two elements that are neighbours along the depth of a product.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct Bf16Packed2 {
  static constexpr int per_word = 2;
  static constexpr int depth_step = 1;  // words
  static constexpr int strip_rows = vector_strip_rows;
  struct Session {};

  static Vec dot(Vec sum, Vec a, Vec b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }

  // Loads `lanes` words of a row that has `count` elements left.
  template <class In>
  static Vec load_words(const std::uint16_t* p, int count) {
    return count >= 2 * lanes ? load_as<Vec>(p) : load_bytes<Vec>(p, 2 * count);
  }
  // Loads the words (first[i], second[i]); second is null after the last row.
  template <class In>
  static Vec load_interleaved(const std::uint16_t* first, const std::uint16_t* second, int count) {
    Int words = __builtin_convertvector(load_packed<In>(first, count), Int);
    if (second != nullptr) {
      words |= __builtin_convertvector(load_packed<In>(second, count), Int) << 16;
    }
    return from_bits(words);
  }
  // The larger magnitude of a word's two elements as the bits of an fp32, per lane.
  static Int magnitude(Vec words) {
    const Int low = (bits(words) & 0x7fff) << 16;
    const Int high = bits(words) & 0x7fff0000;
    return low > high ? low : high;
  }
  // The words with 0 for elements that are inf or NaN.
  static Vec finite(Vec words) {
    const Int low = (bits(words) & 0x7f80) == 0x7f80 ? Int{} : bits(words) & 0xffff;
    const Int high = (bits(words) & 0x7f800000) == 0x7f800000 ? Int{} : bits(words) & ~0xffff;
    return from_bits(low | high);
  }

  // Stores elements [n, n + 2 * lanes) of a row of words.
  static void store_row(float* row, int n, Vec left, Vec right) {
    store(row + n / 2, row_words(left, right));
  }
  static float element(const float* words, int index) { return load_scalar<Bf16>(words, index); }

  // Rounds 2 * lanes elements of a row to words, in order.
  static Vec row_words(Vec left, Vec right) {
    return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(right, left));
  }
  // The words (first[i], second[i]) of `lanes` columns of two rows.
  static Vec interleaved_words(Vec first, Vec second) {
    return from_bits(interleave(row_words(first, second)));
  }

  // Stores fp32 rows [rows, ld] as words of two neighbouring rows, [rows / 2, ld].
  static void store_columns(const float* rows, int count, int columns, int ld, float* words) {
    for (int r = 0; r < count; r += 2) {
      for (int n = 0; n < columns; n += lanes) {
        store(words + r / 2 * ld + n,
              interleaved_words(load(rows + r * ld + n), load(rows + (r + 1) * ld + n)));
      }
    }
  }

 private:
  static Int interleave(Vec words) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return reinterpret_cast<Int>(_mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(words)));
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
