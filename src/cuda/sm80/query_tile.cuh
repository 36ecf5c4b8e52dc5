#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/common/tile_copy.cuh"
#include "cuda/sm80/tile.cuh"

// Query tiles that a block of keys visits, and their rows of q and dout on the way to shared memory.
namespace flash_dmattn::cuda::sm80 {

// Query tile of a walk.
struct QueryPlace {
  int head;
  int row;
  bool masked;  // by the packed mask, somewhere
};

// The tiles of `rows` queries that a block of 128 keys visits: those of one head after those of the
// other.
class EveryQueryTile {
 public:
  __device__ EveryQueryTile(int first_head, int heads, int begin, int end, int rows)
      : heads_end_(first_head + heads),
        begin_(begin),
        end_(end),
        rows_(rows),
        place_{end > begin ? first_head : heads_end_, begin, false} {}

  __device__ bool has() const { return place_.head < heads_end_; }
  __device__ int number() const { return 0; }  // it passes no tile
  __device__ QueryPlace place() const { return place_; }
  __device__ void advance() {
    place_.row += rows_;
    if (place_.row >= end_) place_ = {place_.head + 1, begin_, false};
  }

 private:
  int heads_end_;
  int begin_;
  int end_;
  int rows_;
  QueryPlace place_;
};

// The `size` rows of a tile at `place` that exist, by the first `Threads` threads; zeros past them.
// `whole_rows`: they are aligned and as wide as the tile.
template <class Rows, int Threads>
__device__ inline void copy_query_rows(const InputRows& from, int batch, int head_dim,
                                       bool whole_rows, QueryPlace place, int size,
                                       std::uint32_t to) {
  if (whole_rows && size >= Rows::rows) {
    constexpr int rows_at_once = Threads / Rows::chunks;
    static_assert(rows_at_once % 8 == 0);  // these have the same swizzle
    const int row = static_cast<int>(threadIdx.x) / Rows::chunks;
    const int chunk = static_cast<int>(threadIdx.x) % Rows::chunks;
    const std::byte* data = from.data + batch * from.batch + place.head * from.head +
                            static_cast<std::int64_t>(place.row + row) * from.row_step + chunk * 16;
    to += Rows::offset(row, chunk);
#pragma unroll
    for (int i = 0; i < Rows::rows / rows_at_once; ++i) {
      cp_async_16(to + static_cast<std::uint32_t>(i * rows_at_once * Rows::row_bytes),
                  data + static_cast<std::int64_t>(i * rows_at_once) * from.row_step);
    }
  } else {
    using Group = ThreadGroup<Threads>;
    const Group group = Group::of_block();
    copy_g2s(group, RowSource<Rows, Group>(group, from, batch, place.head, head_dim), to, size,
             [&](int r) { return place.row + r; });
  }
}

// What is not finite in a tile of dout counts as 0.
template <class T, class Rows, int Threads>
__device__ inline void clear_non_finite(std::uint32_t dout) {
  const auto clean = [](std::uint32_t pair) {
    constexpr std::uint32_t exponent = Element<T>::exponent_mask;
    if ((pair & exponent) == exponent) pair &= 0xffff0000u;
    if ((pair >> 16 & exponent) == exponent) pair &= 0x0000ffffu;
    return pair;
  };
  for (int i = static_cast<int>(threadIdx.x); i < Rows::bytes / 16; i += Threads) {
    const std::uint32_t address = dout + static_cast<std::uint32_t>(i) * 16;
    const uint4 value = load_shared_16(address);
    store_shared_16(address, {clean(value.x), clean(value.y), clean(value.z), clean(value.w)});
  }
}

}  // namespace flash_dmattn::cuda::sm80
