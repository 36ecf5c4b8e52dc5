#pragma once

#include <cstdint>

#include "cpu/task.h"
#include "flash_dmattn/types.h"

// There are two kinds of element. A dtype is the type of the arrays; it converts to and from fp32 vectors.
// A factor element is the type that products multiply, in words of 32 bits.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct F32 {
  using Storage = float;
  using Packed = Vec;  // `lanes` stored elements
  static constexpr DType dtype = DType::f32;
  static constexpr float largest = float_max;
  static constexpr float gradient_limit = cpu::gradient_limit(dtype);
  static Vec widen(Packed v) { return v; }
  static Packed narrow(Vec v) { return v; }
};

struct Bf16 {
  using Storage = std::uint16_t;
  using Packed = Half;
  static constexpr DType dtype = DType::bf16;
  static constexpr float largest = 0x1.fep127f;
  static constexpr float gradient_limit = cpu::gradient_limit(dtype);
  static Vec widen(Packed v) { return from_bf16(v); }
  static Packed narrow(Vec v) { return to_bf16(v); }
};

struct F16 {
  using Storage = std::uint16_t;
  using Packed = Half;
  static constexpr DType dtype = DType::f16;
  static constexpr float largest = 65504;
  static constexpr float gradient_limit = cpu::gradient_limit(dtype);
  static Vec widen(Packed v) { return from_f16(v); }
  static Packed narrow(Vec v) { return to_f16(v); }
};

// Loads the stored elements [0, min(count, lanes)) at p, followed by zeros. count >= 1.
template <class In>
typename In::Packed load_packed(const typename In::Storage* p, int count) {
  using Packed = typename In::Packed;
  if (count >= lanes) return load_as<Packed>(p);
  return load_bytes<Packed>(p, count * static_cast<int>(sizeof(typename In::Storage)));
}

template <class In>
Vec load_widened(const typename In::Storage* p, int count) {
  return In::widen(load_packed<In>(p, count));
}

template <class In>
void store_narrowed(typename In::Storage* p, Vec v, int count) {
  const typename In::Packed packed = In::narrow(v);
  if (count >= lanes) {
    __builtin_memcpy(p, &packed, sizeof packed);
  } else {
    store_bytes(p, packed, count * static_cast<int>(sizeof(typename In::Storage)));
  }
}

inline Vec finite_or_zero(Vec v) { return (bits(v) & 0x7fffffff) < 0x7f800000 ? v : Vec{}; }

// Clamps to the limit; min replaces a NaN by the upper limit.
inline Vec saturated(Vec v, float limit) { return max(min(v, splat(limit)), splat(-limit)); }

template <class In>
float load_scalar(const void* data, std::int64_t index) {
  typename In::Packed one{};
  one[0] = load_as<typename In::Storage>(static_cast<const typename In::Storage*>(data) + index);
  return In::widen(one)[0];
}

inline float load_scalar(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::bf16: return load_scalar<Bf16>(data, index);
    case DType::f16: return load_scalar<F16>(data, index);
    default: return load_scalar<F32>(data, index);
  }
}

template <class In>
void store_scalar(void* data, std::int64_t index, float value, bool saturate) {
  Vec one{};
  one[0] = value;
  if (saturate) one = saturated(one, In::gradient_limit);
  const typename In::Storage stored = In::narrow(one)[0];
  __builtin_memcpy(static_cast<typename In::Storage*>(data) + index, &stored, sizeof stored);
}

// Factors in fp32, one element per word. f16 uses them as well, because AVX512-FP16 accumulates in half
// precision, and AMX-FP16 is newer than the oldest supported compiler.
struct Single {
  static constexpr int per_word = 1;
  static constexpr int depth_step = 1;  // words
  static constexpr int strip_rows = vector_strip_rows;
  struct Session {};  // products need no setup

  static Vec dot(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }

  // Loads `lanes` words of a row that has `count` elements left.
  template <class In>
  static Vec load_words(const typename In::Storage* p, int count) {
    return load_widened<In>(p, count);
  }
  // Loads words for elements i of two rows: one element each here, two where a word holds two. second is null
  // after the last row.
  template <class In>
  static Vec load_interleaved(const typename In::Storage* first, const typename In::Storage*,
                              int count) {
    return load_widened<In>(first, count);
  }
  // The largest magnitude as the bits of an fp32, per lane.
  static Int magnitude(Vec words) { return bits(words) & 0x7fffffff; }
  // The words with 0 for inf and NaN.
  static Vec finite(Vec words) { return finite_or_zero(words); }

  // Stores elements [n, n + 2 * lanes) of a row of words.
  static void store_row(float* row, int n, Vec left, Vec right) {
    store(row + n, left);
    store(row + n + lanes, right);
  }
  static float element(const float* words, int index) { return words[index]; }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
