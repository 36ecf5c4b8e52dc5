#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace flash_dmattn::testing {

// Gives the same numbers on every platform, unlike the distributions of std (splitmix64, Steele et al. 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  // A uniform number in [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  // A uniform integer in [0, end).
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(end));
  }

  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  std::uint64_t state_;
};

}  // namespace flash_dmattn::testing
