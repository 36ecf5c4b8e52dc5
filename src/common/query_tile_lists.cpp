#include "common/query_tile_lists.h"

namespace flash_dmattn {

QueryTileLists view_of(const TileListBuffers& buffers, const TileListArgs& args) {
  return {.tile_rows = args.tile_rows,
          .tiles = args.tiles(),
          .begin = buffers.begin,
          .count = buffers.count,
          .full = buffers.full,
          .keys = buffers.keys,
          .stride_batch = args.batch == 1 ? 0 : args.heads * args.tiles(),
          .stride_head = args.heads == 1 ? 0 : args.tiles()};
}

TileListArgs tile_list_args(const Problem& problem, const Visibility& visibility,
                            std::int64_t tile_rows) {
  const auto [batch, heads] = problem.intervals_shape;
  return {.batch = batch,
          .heads = heads,
          .seqlen_q = problem.seqlen_q,
          .seqlen_k = problem.seqlen_k,
          .tile_rows = tile_rows,
          .causal = problem.causal,
          .intervals = visibility.intervals,
          .bound = visibility.bound};
}

}  // namespace flash_dmattn
