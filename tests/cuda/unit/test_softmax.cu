#include <cmath>
#include <limits>
#include <vector>

#include "cuda/attention/softmax.cuh"
#include "support/random.h"
#include "unit.cuh"

// The running softmax of a warp's 16 rows against sums in double.
namespace flash_dmattn::cuda::unit {
namespace {

constexpr int rows = 16;
constexpr int tile_columns = 32;
constexpr int tiles = 4;
constexpr int columns = tiles * tile_columns;

struct Softmax : CudaUnit {};

struct SoftmaxResults {
  double log_sum_exp[rows];
  float sum[rows];                          // after all tiles
  float rescaled_sum[rows];                 // the same, summed and rescaled as outputs are
  float last_weights[rows * tile_columns];  // of the last tile
};

template <class T>
struct RunSoftmax {
  const float* scores;  // [rows, columns]
  float factor;
  SoftmaxResults* results;

  __device__ void operator()(std::byte*) const {
    constexpr int n8 = tile_columns / 8;
    const int lane = lane_id();
    OnlineSoftmax<T, 1> softmax;
    float out[1][1][4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      float s[1][n8][4];
      for (int n = 0; n < n8; ++n) {
        for (int e = 0; e < 4; ++e) {
          const int row = lane / 4 + 8 * (e / 2);
          const int column = 8 * n + 2 * (lane % 4) + e % 2;
          s[0][n][e] = scores[row * columns + tile * tile_columns + column];
        }
      }
      softmax.update(s, factor, out);
      for (int n = 0; n < n8; ++n) {
        for (int e = 0; e < 4; ++e) {
          const int row = lane / 4 + 8 * (e / 2);
          const int column = 8 * n + 2 * (lane % 4) + e % 2;
          out[0][0][e / 2 * 2] += s[0][n][e];
          if (tile + 1 == tiles) results->last_weights[row * tile_columns + column] = s[0][n][e];
        }
      }
    }
    softmax.add_lanes();
    for (int h = 0; h < 2; ++h) {
      const float rescaled = quad_sum(out[0][0][2 * h]);
      if (lane % 4 != 0) continue;
      const int row = lane / 4 + 8 * h;
      results->log_sum_exp[row] = softmax.log_sum_exp(0, h, factor);
      results->sum[row] = softmax.sum[0][h];
      results->rescaled_sum[row] = rescaled;
    }
  }
};

// Row 0 sees nothing, row 1 nothing before the last tile, row 2 one key, row 3 nothing after the first
// tile; the scores of row 4 grow, those of row 5 fall; all of row 6 are equal; those of row 7 are large.
std::vector<float> make_scores() {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  testing::Random random(7);
  std::vector<float> scores;
  for (int row = 0; row < rows; ++row) {
    for (int j = 0; j < columns; ++j) {
      float score = static_cast<float>(4 * random.normal());
      if (row == 0 || (row == 1 && j < columns - tile_columns) || (row == 2 && j != 40) ||
          (row == 3 && j >= tile_columns)) {
        score = -infinity;
      }
      if (row == 4) score += static_cast<float>(j);
      if (row == 5) score -= static_cast<float>(j);
      if (row == 6) score = 0.5f;
      if (row == 7) score *= 1000;
      scores.push_back(score);
    }
  }
  return scores;
}

template <class T>
void expect_softmax(float factor) {
  const std::vector<float> scores = make_scores();
  const DeviceArray<float> from(scores);
  const DeviceArray<SoftmaxResults> to(1);
  run(1, 32, 0, RunSoftmax<T>{from.data(), factor, to.data()});
  const SoftmaxResults results = to.values()[0];
  for (int row = 0; row < rows; ++row) {
    SCOPED_TRACE("row " + std::to_string(row) + ", factor " + std::to_string(factor));
    const float* const s = scores.data() + row * columns;
    const auto exponent = [&](int j) {
      return static_cast<double>(factor) * static_cast<double>(s[j]);
    };
    double max = -std::numeric_limits<double>::infinity();
    for (int j = 0; j < columns; ++j) max = std::max(max, exponent(j));
    if (std::isinf(max)) {
      EXPECT_EQ(results.log_sum_exp[row], -std::numeric_limits<double>::infinity());
      EXPECT_EQ(results.sum[row], 0);
      for (int j = 0; j < tile_columns; ++j) {
        EXPECT_EQ(results.last_weights[row * tile_columns + j], 0);
      }
      continue;
    }
    double sum = 0;
    for (int j = 0; j < columns; ++j) sum += std::exp2(exponent(j) - max);
    const double lse = (max + std::log2(sum)) * std::log(2.0);
    EXPECT_NEAR(results.log_sum_exp[row], lse, 4e-6 + 4e-7 * std::abs(lse));
    // The columns of a lane are added in one order for both.
    EXPECT_FLOAT_EQ(results.sum[row], results.rescaled_sum[row]);
    for (int j = 0; j < tile_columns; ++j) {
      const double probability = std::exp2(exponent(columns - tile_columns + j) - max) / sum;
      const double actual = static_cast<double>(results.last_weights[row * tile_columns + j]) /
                            static_cast<double>(results.sum[row]);
      // The difference is rounded to fp32; weights below 2^-126 are 0, in bf16 with a factor of 2^-24.
      const double bound =
          2e-6 + 2e-7 * (std::abs(exponent(columns - tile_columns + j)) + std::abs(max));
      EXPECT_NEAR(actual, probability, std::min(bound, 1.0) * probability + 4e-31);
    }
  }
}

TEST_F(Softmax, Bf16RowsMatchDouble) {
  for (const float factor : {1.4426950408889634f, 0.1803f, 37.5f}) {
    expect_softmax<__nv_bfloat16>(factor);
  }
}
TEST_F(Softmax, F16RowsMatchDouble) {
  for (const float factor : {1.4426950408889634f, 0.1803f, 37.5f}) expect_softmax<__half>(factor);
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
