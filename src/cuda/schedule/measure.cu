#include <cstdint>

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/schedule/key_tree.cuh"
#include "cuda/schedule/tile_list_arguments.h"
#include "cuda/selection/selection.h"

// Measures a bound of the intervals. Keys that are visible from query 0 on count before the first tile. For other keys,
// `entered` is the number that become visible in each tile, and `left` the number that are no longer visible when it
// begins. Consecutive tiles see the keys from before them and the keys that enter in them.
namespace flash_dmattn::cuda {
namespace {

using Keys = key_tree::AllKeys<key_tree::LongRowEntry>;
constexpr int threads = 512;

// The largest number of keys from before a tile, and the largest number that enter in a tile.
struct Most {
  int before;
  int entered;
};

struct Counts {
  int* entered;  // [rows, tiles + 1]; its first element counts the keys from before the first tile
  int* left;     // [rows, tiles + 1]
  Most* most;    // [1]
  int tiles;
  std::size_t bytes;

  Counts(const TileListArgs& args, void* workspace) : tiles(static_cast<int>(args.tiles())) {
    WorkspaceAllocator allocator(workspace);
    const std::int64_t lists = args.batch * args.heads * (tiles + 1);
    entered = allocator.take<int>(lists);
    left = allocator.take<int>(lists);
    most = allocator.take<Most>(1);
    bytes = allocator.used();
  }
};

__global__ void __launch_bounds__(threads)
    count_keys(Keys all, Counts counts, int seqlen_k, int ctas_per_row) {
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x) / ctas_per_row;
  const int key =
      static_cast<int>(blockIdx.x) % ctas_per_row * threads + static_cast<int>(threadIdx.x);
  if (key >= seqlen_k) return;
  const key_tree::HalfTiles tiles = all.items(row, 0)[key].within(0, counts.tiles);
  if (tiles.first_touched() >= tiles.end_touched()) return;
  const std::int64_t first = static_cast<std::int64_t>(row) * (counts.tiles + 1);
  atomicAdd(&counts.entered[first + (tiles.begin == 0 ? 0 : tiles.first_touched() + 1)], 1);
  atomicAdd(&counts.left[first + tiles.end_touched()], 1);
}

__global__ void __launch_bounds__(threads) find_most(Counts counts) {
  wait_for_previous_kernel();
  using Scan = cub::BlockScan<int, threads>;
  using Reduce = cub::BlockReduce<int, threads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ typename Reduce::TempStorage reduce;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (counts.tiles + 1);
  Most most{0, 0};
  int carried = 0;
  for (int begin = 0; begin < counts.tiles; begin += threads) {
    const int tile = begin + static_cast<int>(threadIdx.x);
    const bool exists = tile < counts.tiles;
    // entered[tile] counts the keys of the preceding tile, or the keys from the start.
    const int change = exists ? counts.entered[first + tile] - counts.left[first + tile] : 0;
    int before = 0;
    int total = 0;
    __syncthreads();  // the scan's memory is in use until all threads have their result
    Scan(scan).InclusiveSum(change, before, total);
    if (exists) {
      most.before = max(most.before, carried + before);
      most.entered = max(most.entered, counts.entered[first + tile + 1]);
    }
    carried += total;
  }
  const auto larger = [](int a, int b) { return a > b ? a : b; };
  const int before = Reduce(reduce).Reduce(most.before, larger);
  __syncthreads();
  const int entered = Reduce(reduce).Reduce(most.entered, larger);
  if (threadIdx.x != 0) return;
  atomicMax(&counts.most->before, before);
  atomicMax(&counts.most->entered, entered);
}

}  // namespace

std::size_t measure_workspace_size(const TileListArgs& args) {
  validate_tile_list_args(args);
  return Counts(args, nullptr).bytes;
}

KeyBound measure_key_bound(const TileListArgs& args, const Execution& execution) {
  const std::size_t bytes = measure_workspace_size(args);
  const std::int64_t rows = args.batch * args.heads;
  if (rows * args.seqlen_q * args.seqlen_k == 0) return {0, 0};
  require_workspace(execution, bytes);
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  refuse_capture(stream, "measuring a key bound waits for the device; give the bound instead");

  const Counts counts(args, execution.workspace);
  check(cudaMemsetAsync(counts.entered, 0, bytes, stream), "clearing counts");
  const auto ctas_per_row = static_cast<int>(ceil_div<std::int64_t>(args.seqlen_k, threads));
  launch_grid<count_keys>({rows * ctas_per_row, threads}, stream, Keys(args), counts,
                          static_cast<int>(args.seqlen_k), ctas_per_row);
  launch_grid<find_most>({rows, threads}, stream, counts);
  Most most;
  check(cudaMemcpyAsync(&most, counts.most, sizeof(most), cudaMemcpyDeviceToHost, stream),
        "reading the bound");
  check(cudaStreamSynchronize(stream), "measuring a key bound");
  return {.base = most.before, .per_query = ceil_div<std::int64_t>(most.entered, args.tile_rows)};
}

}  // namespace flash_dmattn::cuda
