#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backend.h"
#include "device.h"
#include "flash_dmattn/flash_dmattn.h"
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

// Every kernel for a decode step, with a few and with many rows (heads of a group), and splits whose parts a second
// kernel combines.
inline std::vector<KvSizes> kv_sizes() {
  const auto shape = [](std::int64_t batch, std::int64_t heads, std::int64_t window,
                        std::int64_t chunk, std::int64_t head_dim, DType dtype) {
    return KvCacheShape{.batch = batch,
                        .heads_kv = heads,
                        .window = window,
                        .chunk = chunk,
                        .head_dim = head_dim,
                        .dtype = dtype};
  };
  return {{"one_slot", shape(2, 2, 1, 3, 64, DType::bf16), 2, 5},
          {"small", shape(2, 2, 33, 20, 24, DType::f16), 3, 20},
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
          {"many_splits_dim_200", shape(1, 1, 1500, 9, 200, DType::f16), 1, 1500}};
}

inline Execution with_workspace(std::optional<DeviceBuffer>& memory, std::size_t bytes) {
  memory.emplace(bytes);
  Execution execution;
  execution.workspace = memory->data();
  execution.workspace_bytes = bytes;
  return execution;
}

inline Execution with_workspace(GuardedBuffer& memory) {
  Execution execution;
  execution.workspace = memory.data();
  execution.workspace_bytes = memory.size();
  return execution;
}

// A cache on the host and one on the device, which see the same tokens.
class Caches {
 public:
  explicit Caches(const KvCacheShape& shape)
      : shape_(shape),
        host_memory_(kv_cache_size(shape), "cache"),
        device_memory_(host_memory_.size()),
        host(kv_cache_in({host_memory_.data(), host_memory_.size()}, shape)),
        device(kv_cache_in({device_memory_.data(), host_memory_.size()}, on_device(shape))) {
    clear(host, {}, "reference");
    clear(device, {}, "cuda");
  }

  static KvCacheShape on_device(KvCacheShape shape) {
    shape.device = Device::cuda;
    return shape;
  }

  // Expects the same keys with the same scores and rows, in whichever slots, and the worst of them as victim.
  void expect_same() const {
    GuardedBuffer copy(host_memory_.size(), "copy");
    device_memory_.download(copy.data());
    const KvCache got = kv_cache_in({copy.data(), copy.size()}, shape_);
    for (std::int64_t b = 0; b < shape_.batch; ++b) {
      ASSERT_EQ(got.seen[b], host.seen[b]) << "row " << b;
      for (std::int64_t h = 0; h < shape_.heads_kv; ++h) {
        SCOPED_TRACE("row " + std::to_string(b) + ", head " + std::to_string(h));
        const std::int64_t row = b * shape_.heads_kv + h;
        ASSERT_EQ(got.counts[row].count, host.counts[row].count);
        ASSERT_EQ(keys_of(got, b, h), keys_of(host, b, h));
        if (host.counts[row].count < shape_.window) continue;
        ASSERT_EQ(position_of(got, row, got.counts[row].victim),
                  position_of(host, row, host.counts[row].victim));
      }
    }
  }

  // The position of slot `slot` in the device's cache, by (batch, head) row; -1: it holds no key.
  std::vector<std::int32_t> positions(const KvCache& cache, bool is_device) const {
    GuardedBuffer copy(host_memory_.size(), "copy");
    if (is_device) device_memory_.download(copy.data());
    const KvCache read = is_device ? kv_cache_in({copy.data(), copy.size()}, shape_) : cache;
    std::vector<std::int32_t> result;
    for (std::int64_t row = 0; row < shape_.batch * shape_.heads_kv; ++row) {
      for (std::int64_t slot = 0; slot < shape_.window + cache.pending; ++slot) {
        const bool exists = slot < read.counts[row].count || slot >= shape_.window;
        result.push_back(exists ? position_of(read, row, slot) : -1);
      }
    }
    return result;
  }

  std::vector<std::byte> device_bytes() const {
    std::vector<std::byte> bytes(host_memory_.size());
    device_memory_.download(bytes.data());
    return bytes;
  }

 private:
  using Row = std::vector<std::uint16_t>;
  using Keys = std::map<std::int32_t, std::tuple<float, Row, Row>>;

  static std::int32_t position_of(const KvCache& cache, std::int64_t row, std::int64_t slot) {
    return cache.positions[row * cache.shape.slots() + slot];
  }
  static Row row_of(const Tensor4& t, std::int64_t b, std::int64_t h, std::int64_t slot,
                    std::int64_t head_dim) {
    const auto* const row = static_cast<const std::uint16_t*>(t.data) + b * t.stride[0] +
                            h * t.stride[1] + slot * t.stride[2];
    return {row, row + head_dim};
  }
  static Keys keys_of(const KvCache& cache, std::int64_t b, std::int64_t h) {
    const KvCacheShape& s = cache.shape;
    const std::int64_t row = b * s.heads_kv + h;
    Keys keys;
    for (std::int64_t slot = 0; slot < cache.counts[row].count; ++slot) {
      keys[position_of(cache, row, slot)] = {cache.scores[row * s.slots() + slot],
                                             row_of(cache.k, b, h, slot, s.head_dim),
                                             row_of(cache.v, b, h, slot, s.head_dim)};
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
        k("k", element(sizes), kv_shape(sizes, count), Layout::permuted),
        v("v", element(sizes), kv_shape(sizes, count)),
        scores("scores", Element::f32, {1, sizes.shape.batch, sizes.shape.heads_kv, count}),
        mask("mask", Element::u8, {1, 1, sizes.shape.batch, count}),
        device_q(fill(q, random)),
        device_k(fill(k, random)),
        device_v(fill(v, random)),
        device_scores(fill_scores(random, ordinary)),
        device_mask(fill_mask(random, ordinary)) {}

  ScoreRows score_rows(bool on_device) {
    return {on_device ? device_scores.data<float>() : scores.data<float>()};
  }
  TokenMask token_mask(bool on_device) {
    return {on_device ? device_mask.data<std::uint8_t>() : mask.data<std::uint8_t>()};
  }

 private:
  static Element element(const KvSizes& sizes) { return element_of(sizes.shape.dtype); }
  static Shape kv_shape(const KvSizes& sizes, std::int64_t count) {
    return {sizes.shape.batch, count, sizes.shape.heads_kv, sizes.shape.head_dim};
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

// Brings a prompt's keys into both caches.
inline void fill_both(const KvSizes& sizes, Caches& caches, Random& random, bool ragged) {
  const KvCacheShape& s = sizes.shape;
  Tokens tokens(sizes, sizes.prompt, random);
  const auto count = static_cast<std::size_t>(s.batch * s.heads_kv * sizes.prompt);
  std::vector<KeyInterval> intervals(count);
  const SelectionArgs select{.batch = s.batch,
                             .heads = s.heads_kv,
                             .seqlen_q = sizes.prompt,
                             .seqlen_k = sizes.prompt,
                             .window = s.window,
                             .scores = tokens.scores.data<float>(),
                             .scores_dtype = DType::f32,
                             .intervals = intervals.data()};
  GuardedBuffer workspace(select_workspace_size(select, {}), "workspace");
  select_key_intervals(select, with_workspace(workspace));
  DeviceBuffer device_intervals(count * sizeof(KeyInterval));
  device_intervals.upload(intervals.data());

  std::vector<std::int32_t> lengths(static_cast<std::size_t>(s.batch));
  for (std::int32_t& length : lengths) {
    length = static_cast<std::int32_t>(ragged ? random.below(sizes.prompt + 1) : sizes.prompt);
  }
  DeviceBuffer device_lengths(lengths.size() * 4);
  device_lengths.upload(lengths.data());

  FillArgs args{.cache = caches.host,
                .seqlen_k = sizes.prompt,
                .k = tokens.k.const_view(),
                .v = tokens.v.const_view(),
                .scores = tokens.score_rows(false),
                .intervals = {intervals.data()},
                .seqlen_q = sizes.prompt,
                .lengths = lengths.data()};
  fill(args, {}, "reference");
  args.cache = caches.device;
  args.k = tokens.device_k.view();
  args.v = tokens.device_v.view();
  args.scores = tokens.score_rows(true);
  args.intervals.data = reinterpret_cast<const KeyInterval*>(device_intervals.data());
  args.lengths = reinterpret_cast<const std::int32_t*>(device_lengths.data());
  fill(args, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
}

class KvCachesOfDevice : public ::testing::TestWithParam<KvSizes> {
 protected:
  void SetUp() override {
    const BackendInfo info = cuda_backend.info();
    if (!info.available) GTEST_SKIP() << info.reason;
  }
};

}  // namespace flash_dmattn::testing
