#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/selection/selection.h"
#include "device.h"
#include "support/expect_invalid.h"
#include "support/random.h"

// Ranks of keys and limits of queries against the choice made by sorting.
namespace flash_dmattn::testing {
namespace {

class SmallCudaRanks : public OnDevice {};
class CudaRanks : public OnDevice {};

struct RankShape {
  std::array<std::int64_t, 2> scores;
  std::array<std::int64_t, 2> mask;
  std::int64_t seqlen_q;
  std::int64_t seqlen_k;
  std::int64_t window;
  std::int64_t padding;  // of the rows of mask and bias
  std::array<std::int64_t, 2> bias{};
  DType bias_dtype = DType::f32;
};

// Values of a bias: 0, 1 and the lowest number of the dtype that does not mask, then the one below it, -inf and NaN.
constexpr int shown_values = 3;
constexpr std::array<std::uint32_t, 6> bias_values(DType dtype) {
  switch (dtype) {
    case DType::bf16: return {0, 0x3f80, 0xf149, 0xf14a, 0xff80, 0x7fc0};
    case DType::f16: return {0, 0x3c00, 0xf0e1, 0xf0e2, 0xfc00, 0x7e00};
    default: return {0, 0x3f800000, 0xf149f2c9, 0xf149f2ca, 0xff800000, 0x7fc00000};
  }
}

// The elements of a bias, and whether each of them shows its key.
struct Bias {
  std::vector<std::byte> bytes;
  std::vector<bool> shows;

  Bias(std::int64_t elements, DType dtype, Random& random) {
    const auto size = static_cast<std::size_t>(size_of(dtype));
    for (std::int64_t i = 0; i < elements; ++i) {
      const auto which =
          static_cast<std::size_t>(random.below(3) != 0 ? random.below(3) : 3 + random.below(3));
      const std::uint32_t bits = bias_values(dtype)[which];
      const auto* const begin = reinterpret_cast<const std::byte*>(&bits);
      bytes.insert(bytes.end(), begin, begin + size);
      shows.push_back(which < shown_values);
    }
  }
};

RankArgs args_of(const RankShape& shape, bool causal) {
  RankArgs args;
  args.batch = std::max({shape.scores[0], shape.mask[0], shape.bias[0]});
  args.heads = std::max({shape.scores[1], shape.mask[1], shape.bias[1]});
  args.seqlen_q = shape.seqlen_q;
  args.seqlen_k = shape.seqlen_k;
  args.window = shape.window;
  args.causal = causal;
  args.scores_shape = shape.scores;
  args.scores_dtype = DType::f32;
  args.scores_stride = {shape.scores[1] * shape.seqlen_k, shape.seqlen_k, 1};
  args.mask_shape = shape.mask;
  const std::int64_t row = shape.seqlen_k + shape.padding;
  args.mask_stride = {shape.mask[1] * shape.seqlen_q * row, shape.seqlen_q * row, row, 1};
  args.bias_shape = shape.bias;
  args.bias_stride = {shape.bias[1] * shape.seqlen_q * row, shape.seqlen_q * row, row, 1};
  args.bias_dtype = shape.bias_dtype;
  return args;
}

float score(Random& random) {
  switch (random.below(8)) {
    case 0: return std::nanf("");
    case 1: return -std::numeric_limits<float>::infinity();
    case 2: return random.below(2) == 0 ? 0.0f : -0.0f;
    default: return static_cast<float>(random.below(20)) - 10;
  }
}

// Keys of a row, the best first, without those that are never chosen.
std::vector<std::int64_t> sorted_keys(const float* scores, std::int64_t seqlen_k) {
  std::vector<std::int64_t> keys(static_cast<std::size_t>(seqlen_k));
  std::iota(keys.begin(), keys.end(), 0);
  std::erase_if(keys, [&](std::int64_t j) { return std::isnan(scores[j]); });
  std::sort(keys.begin(), keys.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
  });
  return keys;
}

void expect_the_choice(const RankShape& shape, bool causal, Random& random) {
  RankArgs args = args_of(shape, causal);
  const std::int64_t score_rows = shape.scores[0] * shape.scores[1];
  std::vector<float> scores(static_cast<std::size_t>(score_rows * shape.seqlen_k));
  for (float& x : scores) x = score(random);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(shape.mask[0] * args.mask_stride[0]));
  for (auto& visible : mask) visible = random.below(3) != 0 ? 2 : 0;

  const Bias bias(shape.bias[0] * args.bias_stride[0], shape.bias_dtype, random);

  const DeviceBuffer device_scores(scores), device_mask(mask), device_bias(bias.bytes);
  const std::int64_t limits = args.batch * args.heads * shape.seqlen_q;
  const DeviceBuffer rank(scores.size() * sizeof(std::int32_t));
  const DeviceBuffer limit(static_cast<std::size_t>(limits) * sizeof(std::int32_t));
  args.scores = device_scores.data();
  args.mask = device_mask.as<std::uint8_t>();
  args.bias = device_bias.data();
  args.key_rank = rank.as<std::int32_t>();
  args.rank_limit = limit.as<std::int32_t>();
  cuda::rank_keys(args, DeviceWorkspace(cuda::rank_workspace_size(args)));

  const auto ranks = download<std::int32_t>(rank, score_rows * shape.seqlen_k);
  const auto queries = download<std::int32_t>(limit, limits);
  for (std::int64_t row = 0; row < args.batch * args.heads; ++row) {
    const std::int64_t b = row / args.heads, h = row % args.heads;
    const auto row_of = [&](const std::array<std::int64_t, 2>& of) {
      return (of[0] == 1 ? 0 : b) * of[1] + h * of[1] / args.heads;
    };
    const std::int64_t first = row_of(shape.scores) * shape.seqlen_k;
    const auto keys = sorted_keys(scores.data() + first, shape.seqlen_k);
    for (std::int64_t i = 0; i < shape.seqlen_q; ++i) {
      const auto shows = [&](const auto& elements, const auto& of, const auto& stride,
                             std::int64_t j) {
        if (of[1] == 0) return true;
        return elements[static_cast<std::size_t>(row_of(of) * stride[1] + i * stride[2] + j)] != 0;
      };
      std::vector<bool> expected(static_cast<std::size_t>(shape.seqlen_k));
      const auto sees = [&](std::int64_t j) {
        return shows(mask, shape.mask, args.mask_stride, j) &&
               shows(bias.shows, shape.bias, args.bias_stride, j) &&
               (!causal || j <= i + shape.seqlen_k - shape.seqlen_q);
      };
      std::int64_t kept = 0;
      for (const std::int64_t j : keys) {
        if (sees(j) && kept < shape.window) expected[static_cast<std::size_t>(j)] = ++kept > 0;
      }
      const std::int32_t below = queries[static_cast<std::size_t>(row * shape.seqlen_q + i)];
      for (std::int64_t j = 0; j < shape.seqlen_k; ++j) {
        const bool chosen = sees(j) && ranks[static_cast<std::size_t>(first + j)] < below;
        ASSERT_EQ(chosen, expected[static_cast<std::size_t>(j)])
            << "row " << row << ", query " << i << ", key " << j;
      }
    }
  }
}

TEST_F(SmallCudaRanks, RanksMatchDefinition) {
  Random random(1);
  const std::vector<RankShape> shapes = {
      {{7, 9}, {1, 1}, 5, 1, 1, 0},
      {{2, 2}, {2, 1}, 65, 132, 20, 4},
      {{1, 4}, {2, 2}, 40, 67, 9, 0},
      {{2, 1}, {1, 3}, 100, 36, 36, 3},
      {{1, 2}, {1, 2}, 33, 200, 0, 0},
      {{1, 1}, {1, 1}, 70, 700, 1000, 0},
      {{1, 1}, {1, 1}, 0, 3, 1, 0},
      {{1, 1}, {1, 1}, 3, 0, 1, 0},
      {{1, 2}, {}, 70, 132, 20, 4, {2, 4}, DType::f32},
      {{2, 2}, {2, 1}, 70, 132, 20, 4, {1, 2}, DType::bf16},
      {{1, 6}, {1, 3}, 40, 67, 9, 0, {2, 2}, DType::f16},
      {{2, 1}, {2, 4}, 33, 290, 50, 0, {1, 2}, DType::bf16},
      {{1, 1}, {}, 65, 33, 7, 1, {1, 1}, DType::bf16},
  };
  for (const RankShape& shape : shapes) {
    for (const bool causal : {false, true}) {
      expect_the_choice(shape, causal, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaRanks, DigitSortedRowsMatchDefinition) {
  Random random(2);
  expect_the_choice({{2, 3}, {2, 1}, 70, 9000, 700, 0}, true, random);
}

TEST_F(CudaRanks, InvalidArgumentIsNamed) {
  const RankArgs good = args_of({{2, 2}, {1, 4}, 5, 7, 3, 0}, true);
  const auto expect_rejected = [&](const std::string& argument, const auto& change) {
    RankArgs args = good;
    change(args);
    expect_invalid([&] { cuda::rank_keys(args, {}); }, argument);
  };
  expect_rejected("scores_shape", [](RankArgs& args) { args.scores_shape = {2, 3}; });
  expect_rejected("mask_shape", [](RankArgs& args) { args.mask_shape = {3, 4}; });
  // Without a bias the mask is missed.
  expect_rejected("mask_shape", [](RankArgs& args) { args.mask_shape = {}; });
  expect_rejected("bias_shape",
                  [](RankArgs& args) { args.mask_shape = {}, args.bias_shape = {2, 3}; });
  expect_rejected("bias_dtype", [](RankArgs& args) {
    args.mask_shape = {};
    args.bias_shape = {2, 4};
    args.bias_dtype = DType::f64;
  });
  expect_rejected("window", [](RankArgs& args) { args.window = -1; });
  expect_rejected("execution.workspace_bytes", [](RankArgs&) {});
}

}  // namespace
}  // namespace flash_dmattn::testing
