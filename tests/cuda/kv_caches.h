#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "device.h"
#include "flash_dmattn/flash_dmattn.h"
#include "support/kv_stream.h"
#include "support/random.h"
#include "support/tensor.h"

// KV caches on the device paired with caches of the reference, over the same random streams of tokens.
namespace flash_dmattn::testing {

struct KvSizes {
  const char* name;
  KvCacheShape shape;
  std::int64_t group;
  std::int64_t prompt;  // tokens that fill brings
};

// Windows for kv heads of their own.
inline constexpr std::int64_t windows_of_heads[] = {100, 17};
inline constexpr std::int64_t windows_of_8_heads[] = {3, 40, 1173, 0, 7, 64, 300, 90};
inline constexpr std::int64_t windows_for_many_splits[] = {70, 3000};

// Every kernel for a decode step, with a few and with many rows (heads of a group), and splits whose parts a second
// kernel combines; then rules with sinks, recent keys that compete or do not, thresholds and windows of heads, where
// clusters combine the parts and where a second kernel does.
inline std::vector<KvSizes> kv_sizes() {
  const auto under_rule = [](std::int64_t batch, std::int64_t heads, const SelectionRule& rule,
                             std::int64_t chunk, std::int64_t head_dim, DType dtype) {
    return KvCacheShape{.batch = batch,
                        .heads_kv = heads,
                        .rule = rule,
                        .chunk = chunk,
                        .head_dim = head_dim,
                        .dtype = dtype};
  };
  const auto shape = [&](std::int64_t batch, std::int64_t heads, std::int64_t window,
                         std::int64_t chunk, std::int64_t head_dim, DType dtype) {
    return under_rule(batch, heads, {.window = window}, chunk, head_dim, dtype);
  };
  // Values of another size than keys.
  const auto with_values = [](KvCacheShape cache, std::int64_t value_dim) {
    cache.value_dim = value_dim;
    return cache;
  };
  const auto rule = [](std::int64_t sinks, std::int64_t window, std::int64_t recent, bool competes,
                       double threshold = -std::numeric_limits<double>::infinity()) {
    return SelectionRule{.window = window,
                         .recent_window = recent,
                         .recent_competes = competes,
                         .sink_tokens = sinks,
                         .score_threshold = threshold};
  };
  SelectionRule by_head = rule(2, 100, 40, true);
  by_head.head_windows = windows_of_heads;
  SelectionRule by_head_delayed = rule(2, 100, 40, false, 0);
  by_head_delayed.head_windows = windows_of_heads;
  SelectionRule of_8_heads = rule(0, 1173, 0, true);
  of_8_heads.head_windows = windows_of_8_heads;
  SelectionRule of_8_heads_delayed = rule(4, 1173, 16, false, 0);
  of_8_heads_delayed.head_windows = windows_of_8_heads;
  SelectionRule for_many_splits = rule(1, 3000, 9, true);
  for_many_splits.head_windows = windows_for_many_splits;
  return {
      {"one_slot", shape(2, 2, 1, 3, 64, DType::bf16), 2, 5},
      {"small", with_values(shape(2, 2, 33, 20, 24, DType::f16), 16), 3, 20},
      {"values_128_of_192", with_values(shape(2, 2, 300, 40, 192, DType::bf16), 128), 4, 350},
      {"window_100", shape(3, 2, 100, 40, 128, DType::bf16), 2, 150},
      {"dim_256", shape(1, 2, 90, 17, 256, DType::bf16), 4, 0},
      {"dim_128_f16", shape(2, 1, 300, 64, 128, DType::f16), 20, 500},
      {"rows_2_dim_128_f16", shape(2, 1, 100, 5, 128, DType::f16), 2, 90},
      {"rows_20_dim_64", shape(2, 1, 100, 5, 64, DType::bf16), 20, 90},
      {"rows_20_dim_128", shape(1, 2, 130, 5, 128, DType::bf16), 20, 150},
      {"rows_20_dim_256", shape(1, 1, 1100, 5, 256, DType::bf16), 20, 1100},
      {"rows_20_dim_64_f16", shape(1, 1, 2100, 5, 64, DType::f16), 20, 2100},
      {"rows_20_dim_256_f16", shape(2, 1, 70, 5, 256, DType::f16), 20, 60},
      {"many_splits", shape(1, 1, 3000, 6, 64, DType::bf16), 2, 4000},
      {"many_splits_dim_128", shape(1, 2, 2500, 5, 128, DType::bf16), 2, 2400},
      {"many_splits_dim_128_f16", shape(1, 1, 2100, 5, 128, DType::f16), 2, 2100},
      {"many_splits_dim_200", with_values(shape(1, 1, 1500, 9, 200, DType::f16), 136), 1, 1500},
      {"recent_only", under_rule(2, 2, rule(0, 0, 9, true), 5, 64, DType::bf16), 2, 7},
      {"sinks_only", under_rule(2, 2, rule(6, 0, 0, true), 5, 64, DType::bf16), 2, 3},
      {"sinks_from_chunks", under_rule(3, 1, rule(9, 12, 8, true), 7, 64, DType::f16), 2, 0},
      {"recent_compete", under_rule(3, 2, rule(0, 60, 40, true), 50, 128, DType::bf16), 2, 150},
      {"recent_delayed", under_rule(3, 2, rule(4, 60, 40, false), 50, 128, DType::f16), 2, 150},
      {"threshold", under_rule(2, 2, rule(0, 50, 30, true, 0.25), 40, 64, DType::bf16), 2, 90},
      {"threshold_alone", under_rule(2, 2, rule(0, 50, 0, true, 0.25), 40, 64, DType::bf16), 2, 90},
      {"by_head", under_rule(2, 2, by_head, 30, 64, DType::bf16), 2, 300},
      {"by_head_delayed", with_values(under_rule(2, 2, by_head_delayed, 70, 64, DType::f16), 40), 2,
       300},
      {"of_8_heads", under_rule(2, 8, of_8_heads, 20, 128, DType::bf16), 2, 1400},
      {"of_8_heads_delayed",
       with_values(under_rule(3, 8, of_8_heads_delayed, 33, 64, DType::f16), 40), 2, 1400},
      {"by_head_many_splits", under_rule(2, 2, for_many_splits, 6, 64, DType::bf16), 2, 3500},
      {"many_recent", under_rule(1, 1, rule(4, 1500, 700, true), 9, 64, DType::bf16), 2, 2500},
      {"many_delayed", under_rule(1, 1, rule(4, 1500, 700, false), 9, 64, DType::bf16), 2, 2500}};
}

// A cache on the host and one on the device, which see the same tokens.
class Caches {
 public:
  explicit Caches(const KvCacheShape& shape)
      : shape_(shape),
        host_memory_(kv_cache_size(shape), "cache"),
        device_memory_(host_memory_.size()),
        host(kv_cache_in(host_memory_, shape)),
        device(kv_cache_in(device_memory_, on_device(shape))) {
    clear_cache(host, {}, "reference");
    clear_cache(device, {}, "cuda");
  }

  static KvCacheShape on_device(KvCacheShape shape) {
    shape.device = Device::cuda;
    return shape;
  }

  // Expects the same keys with the same scores and rows, in whichever slots, and the same of them as victim and as the
  // one that is recent for the last time.
  // Rows before `first_row` are not compared.
  void expect_same(std::int64_t first_row = 0) const {
    GuardedBuffer copy(host_memory_.size(), "copy");
    device_memory_.download(copy.data());
    const KvCache got = kv_cache_in(copy, shape_);
    for (std::int64_t b = first_row; b < shape_.batch; ++b) {
      ASSERT_EQ(got.seen[b], host.seen[b]) << "row " << b;
      for (std::int64_t h = 0; h < shape_.heads_kv; ++h) {
        SCOPED_TRACE("row " + std::to_string(b) + ", head " + std::to_string(h));
        const std::int64_t row = b * shape_.heads_kv + h;
        const SlotCount& slots = got.counts[row];
        const SlotCount& expected = host.counts[row];
        ASSERT_EQ(keys_of(got, b, h), keys_of(host, b, h));
        ASSERT_EQ(slots.competed, expected.competed);
        ASSERT_EQ(slots.free, first_free(got, b, h));
        // Before the first token, it is 0.
        const bool is_leaving = 0 <= expected.leaving && expected.leaving < expected.count;
        ASSERT_EQ(0 <= slots.leaving && slots.leaving < slots.count, is_leaving);
        if (is_leaving) {
          ASSERT_EQ(entry_of(got, b, h, slots.leaving), entry_of(host, b, h, expected.leaving));
          ASSERT_TRUE(slots.leaving_score == expected.leaving_score ||
                      (std::isnan(slots.leaving_score) && std::isnan(expected.leaving_score)));
        }
        const std::int64_t window = shape_.window(h);
        if (window == 0 || slots.competed < window) continue;
        ASSERT_EQ(entry_of(got, b, h, slots.victim), entry_of(host, b, h, expected.victim));
        ASSERT_EQ(slots.victim_score, expected.victim_score);
        ASSERT_EQ(slots.victim_position, expected.victim_position);
      }
    }
  }

  // The number of intervals of a head's slots.
  static std::int64_t interval_count(const KvCache& cache, std::int64_t h) {
    const KvCacheShape& s = cache.shape;
    return s.has_equal_heads() ? s.places(h) + cache.pending : s.slots(h);
  }

  // The position of the key in each slot that has an interval, in their order; -1: it holds no key.
  std::vector<std::int32_t> positions(const KvCache& cache, bool is_device) const {
    GuardedBuffer copy(host_memory_.size(), "copy");
    if (is_device) device_memory_.download(copy.data());
    const KvCache read = is_device ? kv_cache_in(copy, shape_) : cache;
    std::vector<std::int32_t> result;
    for (std::int64_t row = 0; row < shape_.batch * shape_.heads_kv; ++row) {
      const std::int64_t b = row / shape_.heads_kv, h = row % shape_.heads_kv;
      const std::int64_t places = shape_.places(h);
      for (std::int64_t slot = 0; slot < interval_count(cache, h); ++slot) {
        const bool is_pending = slot >= places && slot < places + cache.pending;
        const bool is_taken = slot < read.counts[row].count || is_pending;
        const std::int32_t entry = is_taken ? entry_of(read, b, h, slot) : no_key;
        result.push_back(entry == no_key ? -1 : position_of_entry(entry));
      }
    }
    return result;
  }

  // Sets the members of the counts of row 0 on the device, which no check reads, to a number.
  void spoil_counts(std::int32_t number) {
    const std::vector<std::int32_t> numbers(
        static_cast<std::size_t>(shape_.heads_kv) * sizeof(SlotCount) / sizeof(std::int32_t),
        number);
    check_cuda(cudaMemcpy(device.counts, numbers.data(), numbers.size() * sizeof(std::int32_t),
                          cudaMemcpyHostToDevice));
  }

  std::vector<std::byte> device_bytes() const {
    std::vector<std::byte> bytes(host_memory_.size());
    device_memory_.download(bytes.data());
    return bytes;
  }

 private:
  using Row = std::vector<std::uint16_t>;
  // By their entries: the bits of the score, which may be NaN, k and v.
  using Keys = std::map<std::int32_t, std::tuple<std::uint32_t, Row, Row>>;

  // The slots of dense arrays.
  static std::int64_t place_of(const KvCacheShape& s, std::int64_t b, std::int64_t h,
                               std::int64_t slot) {
    return b * s.total_slots() + s.first_slot(h) + slot;
  }
  static std::int32_t entry_of(const KvCache& cache, std::int64_t b, std::int64_t h,
                               std::int64_t slot) {
    return cache.positions[place_of(cache.shape, b, h, slot)];
  }
  static std::int32_t first_free(const KvCache& cache, std::int64_t b, std::int64_t h) {
    const std::int32_t count = cache.counts[b * cache.shape.heads_kv + h].count;
    std::int32_t slot = 0;
    while (slot < count && entry_of(cache, b, h, slot) != no_key) ++slot;
    return slot;
  }
  static Row row_of(const Tensor4& t, std::int64_t place, std::int64_t columns) {
    const auto* const row = static_cast<const std::uint16_t*>(t.data) + place * columns;
    return {row, row + columns};
  }
  static Keys keys_of(const KvCache& cache, std::int64_t b, std::int64_t h) {
    const KvCacheShape& s = cache.shape;
    Keys keys;
    for (std::int64_t slot = 0; slot < cache.counts[b * s.heads_kv + h].count; ++slot) {
      const std::int64_t place = place_of(s, b, h, slot);
      const std::int32_t entry = cache.positions[place];
      if (entry == no_key) continue;
      keys[entry] = {std::bit_cast<std::uint32_t>(cache.scores[place]),
                     row_of(cache.k, place, s.head_dim), row_of(cache.v, place, value_dim_of(s))};
    }
    return keys;
  }

  KvCacheShape shape_;
  GuardedBuffer host_memory_;
  DeviceBuffer device_memory_;

 public:
  KvCache host;
  KvCache device;
};

// Tokens on the host and on the device: few distinct scores, some of them NaN, some tokens masked.
struct Tokens {
  Tensor q, k, v, scores, mask;
  DeviceTensor device_q, device_k, device_v, device_scores, device_mask;

  Tokens(const KvSizes& sizes, std::int64_t count, Random& random, bool ordinary = false)
      : q("q", element(sizes),
          {sizes.shape.batch, count, sizes.shape.heads_kv * sizes.group, sizes.shape.head_dim}),
        k("k", element(sizes), kv_shape(sizes, count, sizes.shape.head_dim), Layout::permuted),
        v("v", element(sizes), kv_shape(sizes, count, value_dim_of(sizes.shape))),
        scores("scores", Element::f32, {1, sizes.shape.batch, sizes.shape.heads_kv, count}),
        mask("mask", Element::u8, {1, 1, sizes.shape.batch, count}),
        device_q(fill(q, random)),
        device_k(fill(k, random)),
        device_v(fill(v, random)),
        device_scores(fill_scores(random, ordinary)),
        device_mask(fill_mask(random, ordinary)) {}

  // Set the tokens of a call on the host, or on the device.
  template <class Args>
  void give_host(Args& args) const {
    args.k = k.const_view();
    args.v = v.const_view();
    args.scores = {scores.data<float>()};
    args.mask = {mask.data<std::uint8_t>()};
  }
  template <class Args>
  void give_device(Args& args) const {
    args.k = device_k.view();
    args.v = device_v.view();
    args.scores = {device_scores.data<float>()};
    args.mask = {device_mask.data<std::uint8_t>()};
  }

 private:
  static Element element(const KvSizes& sizes) { return element_of(sizes.shape.dtype); }
  static Shape kv_shape(const KvSizes& sizes, std::int64_t count, std::int64_t columns) {
    return {sizes.shape.batch, count, sizes.shape.heads_kv, columns};
  }
  static Tensor& fill(Tensor& tensor, Random& random) {
    tensor.fill([&](const Index&) { return random.normal(); });
    return tensor;
  }
  Tensor& fill_scores(Random& random, bool ordinary) {
    scores.fill([&](const Index&) {
      const bool nan = !ordinary && random.uniform() < 0.05;
      return nan ? std::nan("") : static_cast<double>(random.below(12)) / 8 - 0.5;
    });
    return scores;
  }
  Tensor& fill_mask(Random& random, bool ordinary) {
    mask.fill([&](const Index&) { return ordinary || random.uniform() < 0.9 ? 1.0 : 0.0; });
    return mask;
  }
};

// A number for each row of a batch: those of the host, and those that the device gets in their place.
struct RowNumbers {
  std::vector<std::int32_t> host;
  std::vector<std::int32_t> device = host;

  // A number out of the range [0, most] on the device, and the end of the range at its side on the host.
  static RowNumbers out_of_range(std::int64_t batch, std::int32_t number, std::int64_t most) {
    const auto rows = static_cast<std::size_t>(batch);
    const auto clamped = static_cast<std::int32_t>(number < 0 ? 0 : most);
    return {std::vector<std::int32_t>(rows, clamped), std::vector<std::int32_t>(rows, number)};
  }
};
inline constexpr std::int32_t numbers_out_of_range[] = {std::numeric_limits<std::int32_t>::min(),
                                                        -1, 1000000,
                                                        std::numeric_limits<std::int32_t>::max()};

// Brings a prompt's keys into both caches.
inline void fill_both(const KvSizes& sizes, Caches& caches, Random& random,
                      const RowNumbers& lengths) {
  const KvCacheShape& s = sizes.shape;
  Tokens tokens(sizes, sizes.prompt, random);
  const std::vector<KeyInterval> intervals = select_last_query(
      s, sizes.prompt, lengths.host, tokens.scores.data<float>(), tokens.mask.data<std::uint8_t>());
  const DeviceBuffer device_intervals(intervals), device_lengths(lengths.device);
  FillArgs args{.cache = caches.host,
                .seqlen_k = sizes.prompt,
                .intervals = {intervals.data()},
                .seqlen_q = 1,
                .lengths = lengths.host.data()};
  tokens.give_host(args);
  fill_cache(args, {}, "reference");
  args.cache = caches.device;
  args.intervals.data = device_intervals.as<KeyInterval>();
  args.lengths = device_lengths.as<std::int32_t>();
  tokens.give_device(args);
  fill_cache(args, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
}

inline void fill_both(const KvSizes& sizes, Caches& caches, Random& random, bool ragged) {
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(sizes.shape.batch));
  for (std::int32_t& length : lengths) {
    length = static_cast<std::int32_t>(ragged ? random.below(sizes.prompt + 1) : sizes.prompt);
  }
  fill_both(sizes, caches, random, RowNumbers{lengths});
}

class KvCachesOfDevice : public OnDevice, public ::testing::WithParamInterface<KvSizes> {};

}  // namespace flash_dmattn::testing
