#pragma once

#include <bit>
#include <compare>
#include <cstdint>

// The order of keys, and the heap of the best keys.
namespace flash_dmattn::cpu {

// A key's rank as one comparable value, with the score above the position, so that the more recent of two
// equal scores is better. No two keys of a row are equal.
using NarrowRank = std::uint64_t;  // 32 bits of score, 32 of position

struct WideRank {
  std::uint64_t score;
  std::uint32_t position;
  auto operator<=>(const WideRank&) const = default;
};

// Maps scores to unsigned integers in the same order. Adding 0 makes -0 a +0.
inline NarrowRank rank_of(float score, std::int64_t position) {
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);
  const std::uint32_t ordered = bits ^ ((bits >> 31) != 0 ? ~0u : 1u << 31);
  return std::uint64_t{ordered} << 32 | static_cast<std::uint32_t>(position);
}

inline WideRank rank_of(double score, std::int64_t position) {
  const auto bits = std::bit_cast<std::uint64_t>(score + 0.0);
  return {bits ^ ((bits >> 63) != 0 ? ~std::uint64_t{0} : std::uint64_t{1} << 63),
          static_cast<std::uint32_t>(position)};
}

inline std::uint32_t position_of(NarrowRank rank) { return static_cast<std::uint32_t>(rank); }
inline std::uint32_t position_of(WideRank rank) { return rank.position; }

// Replaces the top of a min-heap by `value`.
template <class T>
void replace_top(T* heap, std::int64_t size, const T& value) {
  std::int64_t hole = 0;
  for (std::int64_t child = 1; child < size; child = 2 * hole + 1) {
    if (child + 1 < size) child += heap[child + 1] < heap[child] ? 1 : 0;
    if (value < heap[child]) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = value;
}

}  // namespace flash_dmattn::cpu
