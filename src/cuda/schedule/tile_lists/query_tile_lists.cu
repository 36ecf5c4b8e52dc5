#include "cuda/schedule/tile_lists/partition_keys.cuh"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "cuda/schedule/tile_list_arguments.h"
#include "cuda/selection/selection.h"

namespace flash_dmattn::cuda {
namespace {

// The number of tiles of a node as a power of two, from the lowest level up. 8 tiles with two lists each keep a CTA's
// stores busy; above that a node has 32 children.
constexpr std::array<int, 3> node_tile_bits = {3, 8, key_tree::most_listed_bits};
constexpr int node_tiles = 1 << node_tile_bits[0];

// The steps of a warp's batch. Lists of nodes are mostly one batch of 4096 keys. Rows and the few nodes of the highest
// level are cut into parts, which are short as long as there are few of them.
constexpr int node_steps = 8;
constexpr int row_steps = 1;
constexpr std::int64_t max_parts = 128;
constexpr std::int64_t max_parts_of_long_row = 256;
constexpr std::int64_t max_parts_of_node = 64;

// The most keys that `queries` consecutive queries see.
std::int64_t max_keys(const TileListArgs& args, std::int64_t queries) {
  return std::min(
      args.seqlen_k,
      args.bound.base + args.bound.per_query * std::min(queries, args.tile_rows * args.tiles()));
}

void validate(const TileListArgs& args) {
  validate_tile_list_args(args);
  if (!args.bound.known()) {
    throw InvalidArgument("visibility.bound", "unknown", "one of key_bound or measure_key_bound");
  }
  require_length("visibility.bound.base", args.bound.base);
  require_length("visibility.bound.per_query", args.bound.per_query);
}

// The parts of lists of `items` keys, of whole batches of `steps` steps.
key_tree::Parts parts_of(std::int64_t items, int steps, std::int64_t max_parts) {
  const std::int64_t batch = key_tree::threads * steps;
  const std::int64_t batches = ceil_div(std::max<std::int64_t>(items, 1), batch);
  const std::int64_t part_batches = ceil_div(batches, max_parts);
  key_tree::Parts parts;
  parts.parts = static_cast<int>(ceil_div(batches, part_batches));
  parts.items = static_cast<int>(part_batches * batch);
  return parts;
}

// The lists between the intervals and the tiles, from the lowest level up.
struct Tree {
  std::array<key_tree::Level, node_tile_bits.size()> levels;
  std::size_t count = 0;
  key_tree::Parts row_parts;
  key_tree::Parts node_parts;  // of the highest level, if every level exists
  std::size_t bytes = 0;

  bool is_long() const { return count == levels.size(); }
};

Tree make_tree(const TileListArgs& args, void* workspace) {
  Tree tree;
  WorkspaceAllocator allocator(workspace);
  const std::int64_t rows = args.batch * args.heads;
  const std::int64_t tiles = args.tiles();
  // A root has at most 32 nodes as children, or 16 tiles.
  for (std::int64_t children = 2 * tiles;
       children > key_tree::max_lists && tree.count < tree.levels.size(); ++tree.count) {
    const int tile_bits = node_tile_bits[tree.count];
    const std::int64_t queries = args.tile_rows << tile_bits;
    key_tree::Level& level = tree.levels[tree.count];
    level = key_tree::Level(tile_bits, static_cast<int>(tiles),
                            static_cast<int>(max_keys(args, queries)));
    children = level.nodes();
  }
  for (std::size_t i = 0; i < tree.count; ++i) tree.levels[i].allocate(rows, allocator);
  tree.row_parts =
      parts_of(args.seqlen_k, row_steps, tree.is_long() ? max_parts_of_long_row : max_parts);
  std::int64_t parts =
      rows * key_tree::AllKeys<key_tree::Entry>(args).nodes() * tree.row_parts.parts;
  if (tree.is_long()) {
    const key_tree::Level& highest = tree.levels.back();
    tree.node_parts = parts_of(highest.capacity(), node_steps, max_parts_of_node);
    parts = std::max(parts, rows * highest.nodes() * tree.node_parts.parts);
  }
  // One level is counted after the other.
  tree.row_parts.counts = tree.node_parts.counts = allocator.take<int>(parts * key_tree::max_lists);
  tree.bytes = allocator.used();
  return tree;
}

// Partitions with a CTA for each of the parent's nodes.
template <class Parent, class Children>
void partition_nodes(const TileListArgs& args, const Parent& parent, const Children& children,
                     cudaStream_t stream) {
  key_tree::Parts whole;
  whole.items = std::numeric_limits<int>::max();
  launch_grid<key_tree::partition_keys<node_steps, Parent, Children>>(
      {args.batch * args.heads * parent.nodes(), key_tree::threads}, stream, parent, children,
      whole);
}

// Partitions with a CTA for each part of the parent's nodes.
template <int Steps, class Parent, class Children>
void partition_parts(const TileListArgs& args, const key_tree::Parts& parts, const Parent& parent,
                     const Children& children, cudaStream_t stream) {
  const Grid grid{args.batch * args.heads * parent.nodes() * parts.parts, key_tree::threads};
  launch_grid<key_tree::count_part<Steps, Parent, Children>>(grid, stream, parent, children, parts);
  launch_grid<key_tree::partition_keys<Steps, Parent, Children>>(grid, stream, parent, children,
                                                                 parts);
}

template <class Children>
void partition_rows(const TileListArgs& args, const Tree& tree, const Children& children,
                    cudaStream_t stream) {
  const key_tree::AllKeys<key_tree::Entry> all(args);
  if (args.seqlen_k <= key_tree::threads * node_steps) {  // one batch, counted while it is stored
    partition_nodes(args, all, children, stream);
  } else {
    partition_parts<row_steps>(args, tree.row_parts, all, children, stream);
  }
}

}  // namespace

std::int64_t tile_list_capacity(const TileListArgs& args) {
  validate(args);
  return ceil_div(max_keys(args, args.tile_rows), tile_list_block) * tile_list_block;
}

std::size_t tile_lists_workspace_size(const TileListArgs& args) {
  validate(args);
  return make_tree(args, nullptr).bytes;
}

QueryTileLists build_tile_lists(const TileListArgs& args, const TileListBuffers& buffers,
                                const Execution& execution) {
  const std::int64_t capacity = tile_list_capacity(args);
  const std::int64_t rows = args.batch * args.heads;
  const std::int64_t tiles = args.tiles();
  const bool has_tiles = rows * tiles > 0;
  require_pointer("begin", buffers.begin, has_tiles);
  require_pointer("count", buffers.count, has_tiles);
  require_pointer("full", buffers.full, has_tiles);
  require_pointer("keys", buffers.keys, has_tiles && capacity > 0);
  const QueryTileLists result = view_of(buffers, args);
  if (!has_tiles) return result;
  require_workspace(execution, tile_lists_workspace_size(args));

  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const Tree tree = make_tree(args, execution.workspace);
  const auto tiles_of_node = [&]<int NodeTiles>() {
    return key_tree::Tiles<NodeTiles>{.tiles = static_cast<int>(tiles),
                                      .by_position = args.by_position,
                                      .padding = static_cast<int>(tile_list_block),
                                      .capacity = static_cast<int>(capacity),
                                      .begin = buffers.begin,
                                      .count = buffers.count,
                                      .full = buffers.full,
                                      .keys = buffers.keys};
  };
  if (tree.count == 0) {
    partition_rows(args, tree, tiles_of_node.template operator()<key_tree::max_lists / 2>(),
                   stream);
    return result;
  }
  const auto tiles_of_nodes = tiles_of_node.template operator()<node_tiles>();
  const auto& [tile_nodes, middle, highest] = tree.levels;
  if (tree.is_long()) {
    partition_parts<row_steps>(args, tree.row_parts,
                               key_tree::AllKeys<key_tree::LongRowEntry>(args), highest, stream);
    partition_parts<node_steps>(args, tree.node_parts, highest, middle, stream);
  } else {
    partition_rows(args, tree, tree.levels[tree.count - 1], stream);
  }
  if (tree.count > 1) partition_nodes(args, middle, tile_nodes, stream);
  partition_nodes(args, tile_nodes, tiles_of_nodes, stream);
  return result;
}

}  // namespace flash_dmattn::cuda
