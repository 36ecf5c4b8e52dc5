#pragma once

#include <cstdint>
#include <utility>

// Vectors of `lanes` 32-bit lanes as compiler vectors, and the operations on them that need no particular
// instruction. The instruction set's header defines `lanes` before it includes this file, and adds the
// operations that compilers do not find by themselves.
//
// Each instruction set has its own namespace. If two translation units with different flags shared an inline
// function, the linker would keep one copy, possibly with the wrong instructions.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

using Vec [[gnu::vector_size(4 * lanes), gnu::may_alias]] = float;
using Int [[gnu::vector_size(4 * lanes), gnu::may_alias]] = std::int32_t;
using Half [[gnu::vector_size(2 * lanes), gnu::may_alias]] = std::uint16_t;

inline constexpr float infinity = __builtin_inff();
inline constexpr float not_a_number = __builtin_nanf("");
inline constexpr float float_max = 0x1.fffffep127f;

inline Int bits(Vec v) { return reinterpret_cast<Int>(v); }
inline Vec from_bits(Int v) { return reinterpret_cast<Vec>(v); }

// Adds modulo 2^32, because a lane whose result is discarded may overflow.
inline Int wrapping_add(Int a, Int b) {
  using Unsigned [[gnu::vector_size(4 * lanes), gnu::may_alias]] = std::uint32_t;
  return reinterpret_cast<Int>(reinterpret_cast<Unsigned>(a) + reinterpret_cast<Unsigned>(b));
}

template <class T>
T load_as(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

template <int... I>
Vec splat(float x, std::integer_sequence<int, I...>) {
  return Vec{(static_cast<void>(I), x)...};
}
inline Vec splat(float x) { return splat(x, std::make_integer_sequence<int, lanes>()); }

template <int... I>
Int lane_numbers(std::integer_sequence<int, I...>) {
  return Int{I...};
}
inline Int lane_numbers() { return lane_numbers(std::make_integer_sequence<int, lanes>()); }

template <int Step, int... I>
Vec swap_lanes(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(v, Int{(I ^ Step)...});
}

// Folds a vector with an associative operation into one lane.
template <int Step = lanes / 2, class Fold>
float reduce(Vec v, const Fold& fold) {
  v = fold(v, swap_lanes<Step>(v, std::make_integer_sequence<int, lanes>()));
  if constexpr (Step > 1) {
    return reduce<Step / 2>(v, fold);
  } else {
    return v[0];
  }
}
inline float reduce_add(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}

inline bool any(Int mask) {
  std::int32_t found = 0;
  for (int i = 0; i < lanes; ++i) found |= mask[i];
  return found != 0;
}

// Exchanges the off-diagonal quarters of every 2 Step x 2 Step block.
template <int Step, int... I>
void transpose_step(Vec* rows, std::integer_sequence<int, I...>) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if ((i & Step) != 0) continue;
    const Vec a = rows[i];
    const Vec b = rows[i + Step];
    rows[i] = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + I - Step : I)...});
    rows[i + Step] = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + I : I + Step)...});
  }
}

// Transposes lanes x lanes words.
template <int Step = lanes / 2>
void transpose(Vec* rows) {
  transpose_step<Step>(rows, std::make_integer_sequence<int, lanes>());
  if constexpr (Step > 1) transpose<Step / 2>(rows);
}

// Rounds to nearest even; NaN stays NaN, overflow becomes inf.
inline Half to_bf16(Vec v) {
  const Int b = bits(v);
  const Int rounded = wrapping_add(b, 0x7fff + ((b >> 16) & 1)) >> 16;
  const Int result = v == v ? rounded : (b >> 16) | 0x40;
  return __builtin_convertvector(result, Half);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
