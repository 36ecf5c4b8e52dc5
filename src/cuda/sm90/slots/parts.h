#pragma once

#include <cstdint>

#include "cuda/primitives/integers.h"

namespace flash_dmattn::cuda::sm90 {

// The places at which the pieces that are divided among blocks are cut.
enum class RestCuts : std::uint8_t {
  even,    // all blocks have the same number of units
  common,  // every piece is cut at the same units, among the same number of blocks
};

// Units [unit_begin, unit_end) of a chain, the sequence of keys of a block's slots of a kv head. A unit is a segment of query
// tiles of the schedule (cuda/schedule/slots/key_slots.h).
struct SlotPart {
  int id;
  int chain;
  int unit_begin;
  int unit_end;
  int piece;
};

// The partition of the chains among the blocks of a persistent grid. If there are more blocks than chains, each chain
// is cut into `cuts` pieces, all at the same units. Blocks of a kv head then visit the same query tiles at the same
// time and share them through the L2. Each block takes the same number of whole pieces. The rest is divided evenly, in
// units, into at most two parts for each block, which it computes first.
struct SlotPartition {
  static constexpr int rest_parts = 2;  // most parts of a block

  int chains = 0;
  int units = 0;  // units of a chain
  int blocks = 1;
  int cuts = 1;
  int piece_units = 0;
  int whole = 0;        // pieces that are not divided
  int rest_units = 0;   // units of the divided pieces
  int rest_blocks = 1;  // blocks that take these units

  constexpr SlotPartition() = default;
  // Blocks that add in a fixed order use common cuts. Otherwise a part that begins within a part of the preceding chain
  // would wait until that part has reached the same tile, the next chain would wait for this one, and so on.
  constexpr SlotPartition(int chains_, int units_, int blocks_, RestCuts rest_cuts)
      : chains(chains_), units(units_), blocks(blocks_) {
    cuts = ceil_div(blocks, chains);
    if (cuts > units) cuts = units;
    piece_units = ceil_div(units, cuts);
    whole = chains * cuts / blocks * blocks;
    rest_units = (chains * cuts - whole) * piece_units;
    // There are fewer pieces than blocks, and pieces cannot be smaller.
    if (whole == 0 && piece_units == 1) {
      whole = chains * cuts;
      rest_units = 0;
    }
    const int rest_pieces = rest_units / piece_units;
    const bool common = rest_cuts == RestCuts::common && rest_pieces > 0;
    rest_blocks = common ? blocks / rest_pieces * rest_pieces : blocks;
  }

  // Parts that begin or end inside a chain have ids [0, cut_parts()).
  constexpr int cut_parts() const { return rest_parts * blocks + (cuts > 1 ? whole : 0); }

  // Part 0, 1, ... of block `block`, until a part has no chain. A part may have no units.
  constexpr SlotPart part(int block, int number) const {
    if (number < rest_parts) {
      const int begin = first_rest_unit(block);
      const int end = first_rest_unit(block + 1);
      const int piece = begin / piece_units + number;
      const int from = number == 0 ? begin : piece * piece_units;
      const int to = (piece + 1) * piece_units < end ? (piece + 1) * piece_units : end;
      if (from >= to) return {0, 0, 0, 0, 0};
      SlotPart result =
          in_piece(whole + piece, from - piece * piece_units, to - piece * piece_units);
      result.id = rest_parts * block + number;
      return result;
    }
    const int piece = block + (number - rest_parts) * blocks;
    if (piece >= whole) return {0, -1, 0, 0, 0};
    SlotPart result = in_piece(piece, 0, piece_units);
    result.id = rest_parts * blocks + piece;
    return result;
  }

  // The part that contains a unit of a chain.
  constexpr SlotPart part_of(int chain, int unit) const {
    const int cut = unit / piece_units;
    const int piece = cut * chains + chain;
    if (piece < whole) return part(piece % blocks, rest_parts + piece / blocks);
    const std::int64_t rest = (piece - whole) * piece_units + unit - cut * piece_units;
    const int block = static_cast<int>(((rest + 1) * rest_blocks - 1) / rest_units);
    return part(block, piece - whole - first_rest_unit(block) / piece_units);
  }

  // The number of the `row_blocks` chains of a kv head that precede a part in the fixed order of additions to the same
  // sums. Divided pieces come first, because blocks compute them first.
  constexpr int position(const SlotPart& part, int row_blocks) const {
    const int block = part.chain % row_blocks;
    const int first_piece = part.piece - block;
    const int divided = first_piece + row_blocks - whole;
    const int first = divided < 0 ? 0 : divided < row_blocks ? divided : row_blocks;
    return part.piece >= whole ? block - (row_blocks - first) : first + block;
  }

 private:
  constexpr int first_rest_unit(int block) const {
    const std::int64_t rest_block = block < rest_blocks ? block : rest_blocks;
    return static_cast<int>(rest_block * rest_units / rest_blocks);
  }

  // Pieces are numbered by cut, and within a cut by chain.
  constexpr SlotPart in_piece(int piece, int begin, int end) const {
    const int first = piece / chains * piece_units;
    const int last = first + end < units ? first + end : units;
    return {0, piece % chains, first + begin, last, piece};
  }
};

}  // namespace flash_dmattn::cuda::sm90
