#include <cstdint>
#include <vector>

#include "cuda/primitives/warp.cuh"
#include "unit.cuh"

// Warp primitives against loops over the lanes.
namespace flash_dmattn::cuda::unit {
namespace {

class Warp : public CudaUnit {
 protected:
  static constexpr std::size_t lanes = 32;

  // Words with few, many and all bits.
  static std::vector<std::uint32_t> words() {
    std::vector<std::uint32_t> result;
    std::uint32_t state = 12345;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      state = state * 1664525u + 1013904223u;
      result.push_back(lane % 3 == 0 ? state : lane % 3 == 1 ? state & state >> 7 : ~state);
    }
    result[5] = 0xffffffffu;
    return result;
  }
};

struct WarpResults {
  float sum, quad_sum, quad_max;
  int inclusive_sum;
  std::uint32_t exclusive_or, transposed, range;
  int selected;
};

struct AllPrimitives {
  const std::uint32_t* words;
  WarpResults* results;

  __device__ void operator()(std::byte*) const {
    const int lane = lane_id();
    const std::uint32_t word = words[lane];
    const float x = static_cast<float>(word & 0xff);
    results[lane] = {
        .sum = warp_sum(x),
        .quad_sum = quad_sum(x),
        .quad_max = quad_max(x),
        .inclusive_sum = warp_inclusive_sum(static_cast<int>(word & 0xff), lane),
        .exclusive_or = warp_exclusive_or(1u << (word % 32), lane),
        .transposed = transpose_bits(word, lane),
        .range = bit_range(lane / 2, 32 - lane / 3),
        .selected = select_bit(word | 0x80000000u, __popc(word | 0x80000000u) / 2),
    };
  }
};

TEST_F(Warp, PrimitivesMatchDefinition) {
  const std::vector<std::uint32_t> input = words();
  const DeviceArray<std::uint32_t> from(input);
  const DeviceArray<WarpResults> to(lanes);
  run(1, 32, 0, AllPrimitives{from.data(), to.data()});
  const std::vector<WarpResults> results = to.values();
  const auto number = [&](std::size_t lane) { return static_cast<float>(input[lane] & 0xff); };
  float sum = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) sum += number(lane);
  int inclusive = 0;
  std::uint32_t bits_before = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    SCOPED_TRACE("lane " + std::to_string(lane));
    const WarpResults& r = results[lane];
    EXPECT_EQ(r.sum, sum);
    float quad_sum = 0;
    float quad_max = 0;
    for (std::size_t i = lane / 4 * 4; i < lane / 4 * 4 + 4; ++i) {
      quad_sum += number(i);
      quad_max = std::max(quad_max, number(i));
    }
    EXPECT_EQ(r.quad_sum, quad_sum);
    EXPECT_EQ(r.quad_max, quad_max);
    inclusive += static_cast<int>(input[lane] & 0xff);
    EXPECT_EQ(r.inclusive_sum, inclusive);
    EXPECT_EQ(r.exclusive_or, bits_before);
    bits_before |= 1u << (input[lane] % 32);
    std::uint32_t transposed = 0;
    std::uint32_t range = 0;
    for (std::size_t bit = 0; bit < lanes; ++bit) {
      transposed |= (input[bit] >> lane & 1u) << bit;
      if (bit >= lane / 2 && bit < 32 - lane / 3) range |= 1u << bit;
    }
    EXPECT_EQ(r.transposed, transposed);
    EXPECT_EQ(r.range, range);
    const std::uint32_t word = input[lane] | 0x80000000u;
    int count = 0;
    for (std::size_t bit = 0; bit < lanes; ++bit) count += static_cast<int>(word >> bit & 1u);
    int place = 0;
    for (int left = count / 2; (word >> place & 1u) == 0 || left-- > 0;) ++place;
    EXPECT_EQ(r.selected, place);
  }
}

}  // namespace
}  // namespace flash_dmattn::cuda::unit
