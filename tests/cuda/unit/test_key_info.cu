#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/float_types.h"
#include "cuda/sm80/tile/key_info.cuh"
#include "support/random.h"
#include "unit.cuh"

// Which rows see a key, and a tile's summary of that: against the definition, element by element.
namespace flash_dmattn::cuda::unit {
namespace {

struct KeyInfo : CudaUnit {};

constexpr int tile_keys = 64;
constexpr int batch = 1, kv_head = 1;  // of two each

struct KeyInfoCase {
  int seqlen_q, seqlen_k;
  bool causal, has_intervals, has_mask, has_bias, bias_f32;
};

struct KeyInfoResults {
  int sees[tile_keys * 128];  // [keys, rows]
  float bias[tile_keys];
  std::uint32_t state[tile_keys / 32];
};

struct StoreTile {
  ScoreParams score;
  Shape shape;
  int first_key, row_begin, row_end;
  KeyInfoResults* results;

  __device__ void operator()(std::byte* shared) const {
    auto& tile = *reinterpret_cast<KeyInfoTile<tile_keys>*>(shared);
    KeyInfoLoader<__nv_bfloat16> loader(score, shape, batch, kv_head, kv_head);
    const int column = static_cast<int>(threadIdx.x);
    loader.load(first_key + column, first_key + column < shape.seqlen_k);
    loader.store(tile, column, row_begin, row_end);
    __syncthreads();
    for (int row = 0; row < shape.seqlen_q; ++row) {
      results->sees[column * 128 + row] = tile.range[column].sees(row) ? 1 : 0;
    }
    results->bias[column] = tile.bias[column];
    if (column < tile_keys / 32) results->state[column] = tile.state[column];
  }
};

// The host's copy of everything that belongs to a key; [2 batches, 2 heads, keys].
struct KeyData {
  std::vector<KeyInterval> intervals;
  std::vector<std::uint8_t> mask;
  std::vector<float> bias;

  KeyData(const KeyInfoCase& c, testing::Random& random) {
    using Limits = std::numeric_limits<std::int32_t>;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const float special[] = {-infinity, std::numeric_limits<float>::quiet_NaN(), -1e30f, -0.99e30f,
                             3.3e38f};
    for (int i = 0; i < 4 * c.seqlen_k; ++i) {
      const auto end = static_cast<std::int64_t>(c.seqlen_q + 1);
      intervals.push_back({.first = static_cast<std::int32_t>(random.below(end)),
                           .last = static_cast<std::int32_t>(random.below(end))});
      if (i % 5 == 0) intervals.back() = {0, c.seqlen_q};
      if (i % 7 == 0) intervals.back().last = Limits::min() + i;
      if (i % 11 == 0) intervals.back().first = Limits::min() + i;
      if (i % 13 == 0) intervals.back().last = Limits::max() - i;
      if (i % 17 == 0) intervals.back().first = Limits::max() - i;
      mask.push_back(random.uniform() < 0.7 ? static_cast<std::uint8_t>(1 + random.below(255)) : 0);
      const float value =
          i % 4 == 0 ? special[random.below(5)] : static_cast<float>(random.normal());
      bias.push_back(c.bias_f32 ? value : bf16_to_float(float_to_bf16(value)));
    }
  }
};

void expect_tile(const KeyInfoCase& c, const KeyData& data, const KeyInfoResults& results,
                 int first_key, int row_begin, int row_end) {
  const float mask_value = -1e30f;
  std::uint32_t state[tile_keys / 32] = {};
  for (int column = 0; column < tile_keys; ++column) {
    const int key = first_key + column;
    const bool exists = key < c.seqlen_k;
    const std::size_t at = static_cast<std::size_t>((2 * batch + kv_head) * c.seqlen_k + key);
    const bool allowed = exists && (!c.has_mask || data.mask[at] != 0) &&
                         (!c.has_bias || data.bias[at] > mask_value);
    bool is_touched = false;
    for (int row = 0; row < c.seqlen_q; ++row) {
      const bool sees =
          allowed && (!c.causal || key <= row + c.seqlen_k - c.seqlen_q) &&
          (!c.has_intervals || (data.intervals[at].first <= row && row < data.intervals[at].last));
      ASSERT_EQ(results.sees[column * 128 + row] != 0, sees) << "key " << key << ", row " << row;
      if (row < row_begin || row >= row_end) continue;
      state[column / 32] |= sees ? KeyInfoTile<tile_keys>::touched : 0u;
      state[column / 32] |= sees ? 0u : KeyInfoTile<tile_keys>::partial;
      is_touched = is_touched || sees;
    }
    const float bias = allowed && c.has_bias ? std::min(data.bias[at], largest_key_bias) : 0.0f;
    ASSERT_EQ(results.bias[column], bias) << "key " << key;
    if (is_touched && std::abs(bias) > far_bias) state[column / 32] |= KeyInfoTile<tile_keys>::far;
  }
  for (int i = 0; i < tile_keys / 32; ++i) ASSERT_EQ(results.state[i], state[i]) << "state " << i;
}

void expect_key_info(const KeyInfoCase& c) {
  testing::Random random(3);
  const KeyData data(c, random);
  const DeviceArray<KeyInterval> intervals(data.intervals);
  const DeviceArray<std::uint8_t> mask(data.mask);
  const DeviceArray<float> bias32(data.bias);
  std::vector<std::uint16_t> halves;
  for (const float value : data.bias) halves.push_back(float_to_bf16(value));
  const DeviceArray<std::uint16_t> bias16(halves);
  const auto view = [&](const void* elements) {
    Broadcast result;
    result.data = static_cast<const std::byte*>(elements);
    result.batch = 2 * c.seqlen_k;
    result.head_kv = c.seqlen_k;
    result.key = 1;
    return result;
  };
  ScoreParams score;
  score.causal = c.causal;
  score.mask_value = -1e30f;
  if (c.has_intervals) score.intervals = {intervals.data(), 2 * c.seqlen_k, c.seqlen_k};
  if (c.has_mask) score.mask = view(mask.data());
  if (c.has_bias) {
    score.bias = c.bias_f32 ? view(bias32.data()) : view(bias16.data());
    score.bias.f32 = c.bias_f32;
  }
  Shape shape;
  shape.batch = shape.heads_q = shape.heads_kv = 2;
  shape.seqlen_q = c.seqlen_q;
  shape.seqlen_k = c.seqlen_k;
  const DeviceArray<KeyInfoResults> to(1);
  for (int first_key = 0; first_key < c.seqlen_k; first_key += tile_keys) {
    for (int row_begin = 0; row_begin < c.seqlen_q; row_begin += 32) {
      const int row_end = std::min(row_begin + 32, c.seqlen_q);
      SCOPED_TRACE("keys from " + std::to_string(first_key) + ", rows from " +
                   std::to_string(row_begin));
      run(1, tile_keys, sizeof(KeyInfoTile<tile_keys>),
          StoreTile{score, shape, first_key, row_begin, row_end, to.data()});
      expect_tile(c, data, to.values()[0], first_key, row_begin, row_end);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_F(KeyInfo, MatchesDefinition) {
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{50, 141}, {100, 61}, {1, 64}, {128, 128}}) {
    for (int form = 0; form < 32; ++form) {
      const KeyInfoCase c{.seqlen_q = seqlen_q,
                          .seqlen_k = seqlen_k,
                          .causal = (form & 1) != 0,
                          .has_intervals = (form & 2) != 0,
                          .has_mask = (form & 4) != 0,
                          .has_bias = (form & 8) != 0,
                          .bias_f32 = (form & 16) != 0};
      SCOPED_TRACE(std::to_string(seqlen_q) + " queries, " + std::to_string(seqlen_k) +
                   " keys, form " + std::to_string(form));
      expect_key_info(c);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
