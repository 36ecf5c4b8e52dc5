#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "device.h"
#include "flash_dmattn/flash_dmattn.h"
#include "support/random.h"
#include "support/tensor.h"

// KV caches on the device against those of the reference, over the same random streams of tokens.
namespace flash_dmattn {
namespace {

using testing::check_cuda;
using testing::DeviceBuffer;
using testing::DeviceTensor;
using testing::Layout;
using testing::Random;
using testing::Tensor;

struct Sizes {
  const char* name;
  KvCacheShape shape;
  std::int64_t group;
  std::int64_t prompt;  // tokens that fill brings
};

std::vector<Sizes> sizes() {
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
          {"many_splits", shape(1, 1, 3000, 6, 64, DType::bf16), 2, 4000},
          {"many_splits_dim_128", shape(1, 2, 2500, 5, 128, DType::bf16), 2, 2400},
          {"many_splits_dim_200", shape(1, 1, 1500, 9, 200, DType::f16), 1, 1500}};
}

Execution with_workspace(std::optional<DeviceBuffer>& memory, std::size_t bytes) {
  memory.emplace(bytes);
  Execution execution;
  execution.workspace = memory->data();
  execution.workspace_bytes = bytes;
  return execution;
}

Execution with_workspace(testing::GuardedBuffer& memory) {
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
    testing::GuardedBuffer copy(host_memory_.size(), "copy");
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
    testing::GuardedBuffer copy(host_memory_.size(), "copy");
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
  testing::GuardedBuffer host_memory_;
  DeviceBuffer device_memory_;

 public:
  KvCache host;
  KvCache device;
};

// Tokens on the host and on the device: few distinct scores, some of them NaN, some tokens masked.
struct Tokens {
  Tensor q, k, v, scores, mask;
  DeviceTensor device_q, device_k, device_v, device_scores, device_mask;

  Tokens(const Sizes& sizes, std::int64_t count, Random& random, bool ordinary = false)
      : q("q", element(sizes),
          {sizes.shape.batch, count, sizes.shape.heads_kv * sizes.group, sizes.shape.head_dim}),
        k("k", element(sizes), kv_shape(sizes, count), Layout::permuted),
        v("v", element(sizes), kv_shape(sizes, count)),
        scores("scores", testing::Element::f32,
               {1, sizes.shape.batch, sizes.shape.heads_kv, count}),
        mask("mask", testing::Element::u8, {1, 1, sizes.shape.batch, count}),
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
  static testing::Element element(const Sizes& sizes) {
    return testing::element_of(sizes.shape.dtype);
  }
  static testing::Shape kv_shape(const Sizes& sizes, std::int64_t count) {
    return {sizes.shape.batch, count, sizes.shape.heads_kv, sizes.shape.head_dim};
  }
  static Tensor& fill(Tensor& tensor, Random& random) {
    tensor.fill([&](const testing::Index&) { return random.normal(); });
    return tensor;
  }
  Tensor& fill_scores(Random& random, bool ordinary) {
    scores.fill([&](const testing::Index&) {
      const bool nan = !ordinary && random.uniform() < 0.05;
      return nan ? std::nan("") : static_cast<double>(random.below(12)) / 8 - 0.5;
    });
    return scores;
  }
  Tensor& fill_mask(Random& random, bool ordinary) {
    mask.fill(
        [&](const testing::Index&) { return ordinary || random.uniform() < 0.9 ? 1.0 : 0.0; });
    return mask;
  }
};

void expect_close(const Tensor& got, const Tensor& expected, double tolerance) {
  expected.for_each([&](const testing::Index& i, double value) {
    const double actual = got.get(i);
    const double error = std::abs(actual - value);
    ASSERT_TRUE(actual == value || error <= tolerance * std::max(1.0, std::abs(value)))
        << got.name() << ": expected " << value << ", actual " << actual;
  });
}

// Inserts one token of every row and compares what its query sees.
void step(const Sizes& sizes, Caches& caches, Random& random, ScoreUse use) {
  Tokens tokens(sizes, 1, random);
  const KvCacheShape& s = sizes.shape;
  const std::int64_t heads_q = s.heads_kv * sizes.group;
  const auto element = testing::element_of(s.dtype);
  Tensor out("out", element, {s.batch, 1, heads_q, s.head_dim});
  Tensor lse("lse", testing::Element::f32, {1, s.batch, heads_q, 1});
  Tensor got_out("out", element, {s.batch, 1, heads_q, s.head_dim});
  Tensor got_lse("lse", testing::Element::f32, {1, s.batch, heads_q, 1});
  DeviceTensor device_out(got_out);
  DeviceTensor device_lse(got_lse);

  DecodeStepArgs args{.cache = caches.host,
                      .heads_q = heads_q,
                      .scale = default_scale(s.head_dim),
                      .score_use = use,
                      .q = tokens.q.const_view(),
                      .k = tokens.k.const_view(),
                      .v = tokens.v.const_view(),
                      .scores = tokens.score_rows(false),
                      .mask = tokens.token_mask(false),
                      .out = out.view(),
                      .lse = lse.data<float>()};
  testing::GuardedBuffer workspace(decode_step_workspace_size(args, {}, "reference"), "workspace");
  decode_step(args, with_workspace(workspace), "reference");

  args.cache = caches.device;
  args.q = tokens.device_q.view();
  args.k = tokens.device_k.view();
  args.v = tokens.device_v.view();
  args.scores = tokens.score_rows(true);
  args.mask = tokens.token_mask(true);
  args.out = device_out.view();
  args.lse = device_lse.data<float>();
  std::optional<DeviceBuffer> memory;
  decode_step(args, with_workspace(memory, decode_step_workspace_size(args, {}, "cuda")), "cuda");
  check_cuda(cudaDeviceSynchronize());
  device_out.download();
  device_lse.download();
  expect_close(got_lse, lse, 1e-4);
  expect_close(got_out, out, s.dtype == DType::bf16 ? 0.02 : 0.004);
}

// Brings a prompt's keys into both caches.
void fill_both(const Sizes& sizes, Caches& caches, Random& random, bool ragged) {
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
                             .intervals = intervals.data()};
  testing::GuardedBuffer workspace(select_workspace_size(select, {}), "workspace");
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

void append_both(const Sizes& sizes, Caches& caches, Random& random, std::int64_t count) {
  Tokens tokens(sizes, count, random);
  AppendArgs args{.cache = caches.host,
                  .seqlen = count,
                  .k = tokens.k.const_view(),
                  .v = tokens.v.const_view(),
                  .scores = tokens.score_rows(false),
                  .mask = tokens.token_mask(false)};
  append(args, {}, "reference");
  args.cache = caches.device;
  args.k = tokens.device_k.view();
  args.v = tokens.device_v.view();
  args.scores = tokens.score_rows(true);
  args.mask = tokens.token_mask(true);
  append(args, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
  caches.host.pending += count;
  caches.device.pending += count;
}

// The intervals of the pending tokens as queries: the same for the same keys, in whichever slots.
void expect_same_intervals(const Caches& caches, std::int64_t queries) {
  const KvCacheShape& s = caches.host.shape;
  const std::int64_t keys = s.window + caches.host.pending;
  std::vector<KeyInterval> expected(static_cast<std::size_t>(s.batch * s.heads_kv * keys));
  std::vector<KeyInterval> got(expected.size());
  DeviceBuffer on_device(expected.size() * sizeof(KeyInterval));
  PendingIntervalsArgs args{
      .cache = caches.host, .seqlen_q = queries, .intervals = expected.data()};
  pending_intervals(args, {}, "reference");
  args.cache = caches.device;
  args.intervals = reinterpret_cast<KeyInterval*>(on_device.data());
  pending_intervals(args, {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
  on_device.download(got.data());
  const std::vector<std::int32_t> host_positions = caches.positions(caches.host, false);
  const std::vector<std::int32_t> device_positions = caches.positions(caches.device, true);
  for (std::int64_t row = 0; row < s.batch * s.heads_kv; ++row) {
    std::map<std::int32_t, std::pair<int, int>> want, have;
    for (std::int64_t i = row * keys; i < (row + 1) * keys; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (host_positions[at] >= 0)
        want[host_positions[at]] = {expected[at].first, expected[at].last};
      if (device_positions[at] >= 0) have[device_positions[at]] = {got[at].first, got[at].last};
      if (device_positions[at] < 0) {
        ASSERT_EQ(got[at].last, 0) << "a slot without a key";
      }
    }
    ASSERT_EQ(have, want) << "row " << row;
  }
}

void commit_both(Caches& caches, Random& random, bool all) {
  const KvCacheShape& s = caches.host.shape;
  std::vector<std::int32_t> keep(static_cast<std::size_t>(s.batch));
  for (std::int32_t& count : keep) {
    count = static_cast<std::int32_t>(random.below(caches.host.pending + 1));
  }
  DeviceBuffer device_keep(keep.size() * 4);
  device_keep.upload(keep.data());
  CommitArgs args{.cache = caches.host, .keep = all ? nullptr : keep.data()};
  commit(args, {}, "reference");
  args.cache = caches.device;
  if (!all) args.keep = reinterpret_cast<const std::int32_t*>(device_keep.data());
  std::optional<DeviceBuffer> memory;
  commit(args, with_workspace(memory, commit_workspace_size(args, {}, "cuda")), "cuda");
  check_cuda(cudaDeviceSynchronize());
  caches.host.pending = 0;
  caches.device.pending = 0;
}

class CudaKvCache : public ::testing::TestWithParam<Sizes> {
 protected:
  void SetUp() override {
    const BackendInfo info = cuda_backend.info();
    if (!info.available) GTEST_SKIP() << info.reason;
  }
};

TEST_P(CudaKvCache, StepsEqualTheReference) {
  const Sizes& sizes = GetParam();
  Random random(1);
  Caches caches(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, false);
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    step(sizes, caches, random, i % 7 == 3 ? ScoreUse::choose : ScoreUse::choose_and_bias);
    caches.expect_same();
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaKvCache, ChunksEqualTheReference) {
  const Sizes& sizes = GetParam();
  Random random(2);
  Caches caches(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, caches, random, true);
  caches.expect_same();
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE("chunk " + std::to_string(i));
    const std::int64_t first = 1 + random.below(sizes.shape.chunk);
    append_both(sizes, caches, random, first);
    if (first < sizes.shape.chunk) {
      append_both(sizes, caches, random, 1 + random.below(sizes.shape.chunk - first));
    }
    expect_same_intervals(caches, caches.host.pending);
    expect_same_intervals(caches, 1 + random.below(caches.host.pending));
    commit_both(caches, random, i % 3 == 0);
    caches.expect_same();
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaKvCache, RowsAreCopied) {
  const Sizes& sizes = GetParam();
  Random random(3);
  Caches from(sizes.shape);
  if (sizes.prompt > 0) fill_both(sizes, from, random, true);
  append_both(sizes, from, random, sizes.shape.chunk);
  Sizes larger = sizes;
  larger.shape.batch = 2 * sizes.shape.batch + 1;
  Caches to(larger.shape);
  std::vector<std::int32_t> index(static_cast<std::size_t>(larger.shape.batch));
  for (std::int32_t& b : index) b = static_cast<std::int32_t>(random.below(sizes.shape.batch));
  DeviceBuffer device_index(index.size() * 4);
  device_index.upload(index.data());
  to.host.pending = to.device.pending = from.host.pending;
  copy_rows({from.host, to.host, index.data()}, {}, "reference");
  copy_rows({from.device, to.device, reinterpret_cast<const std::int32_t*>(device_index.data())},
            {}, "cuda");
  check_cuda(cudaDeviceSynchronize());
  to.expect_same();
  expect_same_intervals(to, to.host.pending);
  commit_both(to, random, false);
  to.expect_same();
}

// The same steps one by one, and as a graph that is replayed.
TEST_P(CudaKvCache, GraphsOfStepsEqualSteps) {
  const Sizes& sizes = GetParam();
  const KvCacheShape& s = sizes.shape;
  Random random(4);
  Caches eager(s);
  if (sizes.prompt > 0) fill_both(sizes, eager, random, false);
  Random again(4);
  Caches captured(s);
  if (sizes.prompt > 0) fill_both(sizes, captured, again, false);

  Tokens tokens(sizes, 1, random, true);
  const std::int64_t heads_q = s.heads_kv * sizes.group;
  Tensor out("out", testing::element_of(s.dtype), {s.batch, 1, heads_q, s.head_dim});
  Tensor graph_out("out", testing::element_of(s.dtype), {s.batch, 1, heads_q, s.head_dim});
  DeviceTensor device_out(out);
  DeviceTensor device_graph_out(graph_out);
  DeviceBuffer lse(static_cast<std::size_t>(s.batch * heads_q) * 4);
  DecodeStepArgs args{.cache = eager.device,
                      .heads_q = heads_q,
                      .scale = default_scale(s.head_dim),
                      .q = tokens.device_q.view(),
                      .k = tokens.device_k.view(),
                      .v = tokens.device_v.view(),
                      .scores = tokens.score_rows(true),
                      .out = device_out.view(),
                      .lse = reinterpret_cast<float*>(lse.data())};
  std::optional<DeviceBuffer> memory;
  Execution execution = with_workspace(memory, decode_step_workspace_size(args, {}, "cuda"));
  constexpr int steps = 1000;
  for (int i = 0; i < steps; ++i) decode_step(args, execution, "cuda");
  check_cuda(cudaDeviceSynchronize());

  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream));
  execution.stream = stream;
  args.cache = captured.device;
  args.out = device_graph_out.view();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  decode_step(args, execution, "cuda");
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < steps; ++i) check_cuda(cudaGraphLaunch(executable, stream));
  check_cuda(cudaStreamSynchronize(stream));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  EXPECT_EQ(eager.device_bytes(), captured.device_bytes());
  device_out.download();
  device_graph_out.download();
  EXPECT_TRUE(graph_out.same_bits(out));
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaKvCache, ::testing::ValuesIn(sizes()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace flash_dmattn
