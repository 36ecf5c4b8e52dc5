#pragma once

#include <cstdint>

namespace flash_dmattn::cuda {

// Divides many numbers by one divisor from 1 to 2^31 - 1, with a multiplication and a shift. It is exact for numbers
// from 0 to 2^31 - 1, after Granlund and Montgomery, Division by invariant integers using multiplication (PLDI 1994):
// with 2^(bits - 1) < divisor <= 2^bits, n / divisor is n * (2^(31 + bits) / divisor + 1) / 2^(31 + bits), all rounded
// down, and the multiplier has 32 bits.
class Divisor {
 public:
  explicit constexpr Divisor(std::int32_t divisor) {
    if (divisor == 1) return;
    int bits = 1;
    while ((std::int64_t{1} << bits) < divisor) ++bits;
    multiplier_ = static_cast<std::uint32_t>(
        (std::uint64_t{1} << (31 + bits)) / static_cast<std::uint64_t>(divisor) + 1);
    shift_ = bits - 1;
  }

  constexpr std::int32_t divide(std::int32_t n) const {
    if (multiplier_ == 0) return n;
    const std::uint64_t product =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(n)) * multiplier_;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(product >> 32) >> shift_);
  }

 private:
  std::uint32_t multiplier_ = 0;  // 0 if the divisor is 1
  int shift_ = 0;
};

}  // namespace flash_dmattn::cuda
