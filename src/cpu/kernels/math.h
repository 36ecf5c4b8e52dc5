#pragma once

// exp and tanh in fp32.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// 2^-shift e^x for x <= 88, exactly 2^-shift at 0, and 0 where the factor 2^n would leave the normal numbers: below
// -86.6 without a shift. The result is 2^n * 2^r, |r| <= 1/2, with n from the low bits of x log2(e) + 1.5 * 2^23 - shift.
// The minimax polynomial of degree 6 is off by 2e-9. With the rounding of x log2(e) the error is below 2 ulp for |x| < 16.
template <int shift = 0>
Vec exp(Vec x) {
  constexpr float log2_e = 0x1.715476p0f;
  constexpr float round = 0x1.8p23f - shift;
  const Vec shifted = fma(x, splat(log2_e), splat(round));
  const Vec r = fma(x, splat(log2_e), splat(round) - shifted);
  Vec p = fma(splat(0.00015353361959569156f), r, splat(0.0013398873852565885f));
  p = fma(p, r, splat(0.00961843691766262f));
  p = fma(p, r, splat(0.055503323674201965f));
  p = fma(p, r, splat(0.24022647738456726f));
  p = fma(p, r, splat(0.6931471824645996f));
  p = fma(p, r, splat(1.0f));
  const Vec result = from_bits(wrapping_add(bits(p), bits(shifted) << 23));
  return x > splat(-86.6f + 0.693f * shift) ? result : Vec{};
}

// A polynomial below 5/8 and 1 - 2 / (e^2|x| + 1) above keep the relative error at 1e-7.
inline Vec tanh(Vec x) {
  const Vec magnitude = from_bits(bits(x) & 0x7fffffff);
  const Vec t = x * x;
  Vec p = fma(splat(0.002147539984434843f), t, splat(-0.008182677440345287f));
  p = fma(p, t, splat(0.021702969446778297f));
  p = fma(p, t, splat(-0.05394720286130905f));
  p = fma(p, t, splat(0.13333210349082947f));
  p = fma(p, t, splat(-0.3333333134651184f));
  const Vec small = fma(p * t, x, x);
  const Vec e = exp(min(magnitude + magnitude, splat(40.0f)));
  const Vec large = splat(1.0f) - splat(2.0f) / (e + 1.0f);
  const Vec signed_large =
      from_bits(bits(large) | (bits(x) & static_cast<std::int32_t>(0x80000000)));
  return magnitude < splat(0.625f) ? small : signed_large;
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
