#pragma once

#include <cstdint>

// Tile policies of the forward as data.
namespace flash_dmattn::cuda::sm90 {

// How K and V come to shared memory.
enum class KeyLoad : std::uint8_t {
  tma,     // consecutive keys, tiles by the TMA unit
  gather,  // rows of a key list, or of consecutive keys, by cp.async
  any,     // the same of rows with any strides, q included; the one with every form of a score
};

struct ForwardPolicy {
  int warpgroups;  // that compute, 64 queries each
  int keys;        // of a tile
  int stages;      // K and V tiles in shared memory, of each
  // Of a thread, by setmaxnreg: 128 producer + 128 warpgroups consumer <= 64512.
  int producer_registers;
  int consumer_registers;

  constexpr int rows() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (1 + warpgroups); }
};

// D 128, dense: 128 keys in two stages are the measured best of 128, 160 and 176. Gathered: tiles of 128
// queries, as the key lists have; 3 warpgroups of 192 queries against 80 keys would be 4 % quicker with lists
// of their own. 64 keys in four stages, a quarter slower; 56 registers for the producer, 7 %. D 64: three
// warpgroups, if scores need nothing but registers: with biases and ranges 160 do not suffice.
constexpr ForwardPolicy forward_policy(int head_dim_bucket, KeyLoad load, bool has_key_info) {
  const int stages = head_dim_bucket == 64 ? 4 : 2;
  if (head_dim_bucket == 64 && !has_key_info) {
    return {.warpgroups = 3,
            .keys = 128,
            .stages = stages,
            .producer_registers = 24,
            .consumer_registers = 160};
  }
  const bool gathers = load == KeyLoad::gather;
  return {.warpgroups = 2,
          .keys = 128,
          .stages = stages,
          .producer_registers = gathers ? 72 : 40,
          .consumer_registers = gathers ? 216 : 232};
}

}  // namespace flash_dmattn::cuda::sm90
