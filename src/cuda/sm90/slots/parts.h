#pragma once

#include <cstdint>

#include "cuda/primitives/integers.h"

#ifdef __CUDACC__
#define FLASH_DMATTN_HOST_DEVICE __host__ __device__
#else
#define FLASH_DMATTN_HOST_DEVICE
#endif

// The division of chains among blocks, which a block of threads makes on the device, since only the device knows how
// many slots each head uses and when their keys begin.
//
// A chain is the sequence of keys of a block's slots of a kv head. Its units are the segments of query tiles of the
// schedule (cuda/schedule/slots/key_slots.h) from its first key on. If the chains are too few for all blocks, they are
// cut into pieces, all at the same units, so that blocks of a kv head visit the same query tiles at the same time and
// share them through the L2. Blocks get as many whole pieces each as are about equal work, and the remaining pieces are
// divided so that all blocks have as many units. A block computes its parts of divided pieces first.
namespace flash_dmattn::cuda::sm90 {

// Units [unit_begin, unit_end) of a chain, by one block of threads. A part may have no units.
struct alignas(8) SlotPart {
  int head;   // batch element and kv head
  int block;  // number of the chain in its head
  int unit_begin;
  int unit_end;
  int id;        // among the parts that begin or end inside a chain; others have 0
  int position;  // number of the head's chains that precede the part in the fixed order of additions to the same sums
};

struct SlotPlanShape {
  int heads = 0;       // kv heads of all batch elements
  int row_blocks = 0;  // most chains of a head
  int units = 0;       // units of a chain that begins with the first query
  int blocks = 1;      // of a persistent grid
  // Whether blocks add in a fixed order. All chains of a head then begin with the first query. Divided pieces are cut at
  // the same units among as many blocks each: a part that begins within a part of the preceding chain would wait until
  // that part has reached the same tile, the next chain would wait for this one, and so on.
  bool ordered = false;

  constexpr int most_chains() const { return heads * row_blocks; }
  // Pieces that are cut from chains are at most two for each block.
  constexpr int most_pieces() const {
    return most_chains() > 2 * blocks ? most_chains() : 2 * blocks;
  }
  constexpr int most_parts() const { return most_pieces() + blocks; }
  constexpr int most_cut_parts() const { return 3 * blocks; }
  constexpr int scratch() const {
    return heads + 1 + 2 * most_chains() + most_chains() + 1 + 2 * most_pieces() + 1 + blocks +
           2 * (blocks + 1) + most_parts() + 1;
  }
};

struct SlotPlan {
  struct Counts {
    int whole;      // pieces that are not divided
    int cut_parts;  // parts with an id
  };

  SlotPart* parts =
      nullptr;  // [most_parts] the whole pieces, and then the parts of the others in the order of blocks
  SlotPart* cut =
      nullptr;  // [most_cut_parts] by id: parts of a chain are consecutive, in the order of time
  int* block_parts = nullptr;  // [blocks + 1] first parts of the blocks, of divided pieces
  Counts* counts = nullptr;    // [1]

  // Part 0, 1, ... of a block in `parts`; -1 after the last.
  FLASH_DMATTN_HOST_DEVICE int part(int blocks, int block, int number) const {
    const int divided = block_parts[block] + number;
    const int divided_end = block_parts[block + 1];
    if (divided < divided_end) return divided;
    const int piece = block + (divided - divided_end) * blocks;
    return piece < counts->whole ? piece : -1;
  }
};

// Makes a plan. A team is what computes it: `for_each` calls a function for [0, n), `sum` and `most` are over its results
// for [0, n), and `scan` turns n elements into their exclusive sums and stores the total behind them. Heads tell the
// number of their chains, and the first unit of each, which does not descend.
template <class Team, class Heads>
class SlotPlanner {
 public:
  FLASH_DMATTN_HOST_DEVICE SlotPlanner(const Team& team, const SlotPlanShape& shape,
                                       const Heads& heads, int* scratch)
      : team_(team), shape_(shape), heads_(heads) {
    const auto take = [&](int count) {
      int* const taken = scratch;
      scratch += count;
      return taken;
    };
    head_chains_ = take(shape.heads + 1);
    head_ = take(shape.most_chains());
    first_ = take(shape.most_chains());
    chain_pieces_ = take(shape.most_chains() + 1);
    chain_ = take(shape.most_pieces());
    units_before_ = take(shape.most_pieces() + 1);
    load_ = take(shape.blocks);
    divided_units_ = take(shape.blocks + 1);
    divided_parts_ = take(shape.blocks + 1);
    cut_ = take(shape.most_parts() + 1);
  }

  FLASH_DMATTN_HOST_DEVICE void make(const SlotPlan& plan) {
    list_chains();
    list_pieces();
    shape_.ordered ? divide_in_order() : divide_evenly();
    store_parts(plan);
  }

 private:
  // The last of ascending numbers that is not above x.
  static FLASH_DMATTN_HOST_DEVICE int last_not_above(const int* numbers, int count, int x) {
    int low = 0;
    while (count > 1) {
      const int half = count / 2;
      if (numbers[low + half] <= x) low += half;
      count -= half;
    }
    return low;
  }

  FLASH_DMATTN_HOST_DEVICE void list_chains() {
    team_.for_each(shape_.heads, [&](int head) { head_chains_[head] = heads_.chains(head); });
    team_.scan(head_chains_, shape_.heads);
    chains_ = head_chains_[shape_.heads];
    team_.for_each(chains_, [&](int chain) {
      const int head = last_not_above(head_chains_, shape_.heads, chain);
      const int first = shape_.ordered ? 0 : heads_.first_unit(head, chain - head_chains_[head]);
      head_[chain] = head;
      first_[chain] = first < shape_.units ? first : shape_.units - 1;
    });
  }

  FLASH_DMATTN_HOST_DEVICE int pieces_of(int chain) const {
    return ceil_div(shape_.units, piece_units_) - first_[chain] / piece_units_;
  }

  FLASH_DMATTN_HOST_DEVICE void list_pieces() {
    piece_units_ = shape_.units;
    if (0 < chains_ && chains_ < shape_.blocks) {
      const int all = team_.sum(chains_, [&](int chain) { return shape_.units - first_[chain]; });
      const auto pieces = [&] {
        return team_.sum(chains_, [&](int chain) { return pieces_of(chain); });
      };
      int cuts = ceil_div(shape_.blocks * shape_.units, all);
      if (cuts > shape_.units) cuts = shape_.units;
      piece_units_ = ceil_div(shape_.units, cuts);
      while (pieces() > 2 * shape_.blocks) piece_units_ = ceil_div(shape_.units, --cuts);
    }
    team_.for_each(chains_, [&](int chain) { chain_pieces_[chain] = pieces_of(chain); });
    team_.scan(chain_pieces_, chains_);
    pieces_ = chain_pieces_[chains_];
    team_.for_each(pieces_, [&](int piece) {
      const bool is_chain = piece_units_ == shape_.units;
      chain_[piece] = is_chain ? piece : last_not_above(chain_pieces_, chains_, piece);
      units_before_[piece] = shape_.ordered ? piece_units_ : end_of(piece) - begin_of(piece);
    });
    team_.scan(units_before_, pieces_);
  }

  FLASH_DMATTN_HOST_DEVICE int cut_of(int piece) const {
    const int chain = chain_[piece];
    return first_[chain] / piece_units_ + piece - chain_pieces_[chain];
  }
  FLASH_DMATTN_HOST_DEVICE int begin_of(int piece) const {
    const int begin = cut_of(piece) * piece_units_;
    const int first = first_[chain_[piece]];
    return begin < first ? first : begin;
  }
  FLASH_DMATTN_HOST_DEVICE int end_of(int piece) const {
    const int end = (cut_of(piece) + 1) * piece_units_;
    return end < shape_.units ? end : shape_.units;
  }
  FLASH_DMATTN_HOST_DEVICE int units_of(int piece) const {
    return units_before_[piece + 1] - units_before_[piece];
  }

  FLASH_DMATTN_HOST_DEVICE void divide_in_order() {
    const int blocks = shape_.blocks;
    whole_ = pieces_ / blocks * blocks;
    if (whole_ == 0 && piece_units_ == 1) whole_ = pieces_;
    const int divided = pieces_ - whole_;
    const int taking = divided > 0 ? blocks / divided * divided : 1;
    team_.for_each(blocks + 1, [&](int block) {
      const std::int64_t before = block < taking ? block : taking;
      divided_units_[block] = static_cast<int>(before * divided * piece_units_ / taking);
    });
  }

  FLASH_DMATTN_HOST_DEVICE void divide_evenly() {
    const int blocks = shape_.blocks;
    const int equal = ceil_div(units_before_[pieces_], blocks);
    // Whole pieces that give a block a little more than equal work cost less than dividing as many pieces, whose blocks
    // visit different query tiles.
    const int limit = equal + (equal < 32 ? 1 : equal / 32);
    const auto most_load = [&] {
      return team_.most(blocks, [&](int block) { return load_[block]; });
    };
    int rounds = pieces_ / blocks;
    team_.for_each(blocks, [&](int block) {
      load_[block] = 0;
      for (int r = 0; r < rounds; ++r) load_[block] += units_of(block + r * blocks);
    });
    int most = most_load();
    while (most > limit) {
      --rounds;
      team_.for_each(blocks, [&](int block) { load_[block] -= units_of(block + rounds * blocks); });
      most = most_load();
    }
    whole_ = rounds * blocks;

    // Divided pieces fill the blocks up to a common level.
    const int divided = units_before_[pieces_] - units_before_[whole_];
    int level = equal;
    while (level < most) {
      const int middle = level + (most - level) / 2;
      const int room = team_.sum(blocks, [&](int block) { return room_below(middle, block); });
      room < divided ? level = middle + 1 : most = middle;
    }
    team_.for_each(blocks, [&](int block) { divided_units_[block] = room_below(level, block); });
    team_.scan(divided_units_, blocks);
    team_.for_each(blocks + 1, [&](int block) {
      if (divided_units_[block] > divided) divided_units_[block] = divided;
    });
  }

  FLASH_DMATTN_HOST_DEVICE int room_below(int level, int block) const {
    return load_[block] < level ? level - load_[block] : 0;
  }

  // The piece that has a unit of the divided pieces.
  FLASH_DMATTN_HOST_DEVICE int divided_piece(int unit) const {
    return whole_ +
           last_not_above(units_before_ + whole_, pieces_ - whole_, units_before_[whole_] + unit);
  }

  FLASH_DMATTN_HOST_DEVICE SlotPart part_of(int piece, int begin, int end) const {
    const int chain = chain_[piece];
    const int head = head_[chain];
    const int from = begin_of(piece) + begin;
    const int to = begin_of(piece) + end < end_of(piece) ? begin_of(piece) + end : end_of(piece);
    return {head, chain - head_chains_[head],
            from, to > from ? to : from,
            0,    shape_.ordered ? position_of(piece) : 0};
  }

  // Divided pieces come first, because blocks compute them first.
  FLASH_DMATTN_HOST_DEVICE int position_of(int piece) const {
    const int head = head_[chain_[piece]];
    const int cuts = ceil_div(shape_.units, piece_units_);
    const int cut = cut_of(piece);
    const int begin = head_chains_[head];
    const int end = head_chains_[head + 1];
    int first_divided = whole_ > cut ? ceil_div(whole_ - cut, cuts) : 0;  // chain
    if (first_divided < begin) first_divided = begin;
    if (first_divided > end) first_divided = end;
    const int chain = chain_[piece];
    return piece >= whole_ ? chain - first_divided : end - first_divided + chain - begin;
  }

  FLASH_DMATTN_HOST_DEVICE bool is_cut(const SlotPart& part) const {
    if (part.unit_begin == part.unit_end) return false;
    const int chain = head_chains_[part.head] + part.block;
    return part.unit_begin > first_[chain] || part.unit_end < shape_.units;
  }

  FLASH_DMATTN_HOST_DEVICE void store_parts(const SlotPlan& plan) {
    const int blocks = shape_.blocks;
    team_.for_each(blocks, [&](int block) {
      const int begin = divided_units_[block];
      const int end = divided_units_[block + 1];
      divided_parts_[block] = begin < end ? divided_piece(end - 1) - divided_piece(begin) + 1 : 0;
    });
    team_.scan(divided_parts_, blocks);
    const int parts = whole_ + divided_parts_[blocks];
    team_.for_each(whole_, [&](int piece) {
      const SlotPart part = part_of(piece, 0, shape_.units);
      plan.parts[piece] = part;
      cut_[piece] = is_cut(part) ? 1 : 0;
    });
    team_.for_each(blocks + 1, [&](int block) {
      int place = whole_ + divided_parts_[block];
      plan.block_parts[block] = place;
      if (block == blocks) return;
      const int end = divided_units_[block + 1];
      for (int unit = divided_units_[block]; unit < end; ++place) {
        const int piece = divided_piece(unit);
        const int before = units_before_[piece] - units_before_[whole_];
        const int piece_end = before + units_of(piece);
        const int part_end = piece_end < end ? piece_end : end;
        const SlotPart part = part_of(piece, unit - before, part_end - before);
        plan.parts[place] = part;
        cut_[place] = is_cut(part) ? 1 : 0;
        unit = part_end;
      }
    });
    team_.scan(cut_, parts);
    team_.for_each(parts, [&](int place) {
      if (cut_[place] == cut_[place + 1]) return;
      plan.parts[place].id = cut_[place];
      plan.cut[cut_[place]] = plan.parts[place];
    });
    team_.for_each(1, [&](int) { *plan.counts = {whole_, cut_[parts]}; });
  }

  const Team& team_;
  const SlotPlanShape& shape_;
  const Heads& heads_;
  int chains_ = 0;
  int piece_units_ = 1;  // between cuts
  int pieces_ = 0;       // a chain's pieces are consecutive
  int whole_ = 0;        // the first pieces

  int* head_chains_;    // [heads + 1] chains before those of a head
  int* head_;           // by chain
  int* first_;          // first unit, by chain
  int* chain_pieces_;   // [chains + 1] pieces before those of a chain
  int* chain_;          // by piece
  int* units_before_;   // [pieces + 1] units of the preceding pieces
  int* load_;           // units of whole pieces, by block
  int* divided_units_;  // [blocks + 1] units of divided pieces before those of a block
  int* divided_parts_;  // [blocks + 1] their parts before those of a block
  int* cut_;            // [parts + 1] parts with an id before a part
};

}  // namespace flash_dmattn::cuda::sm90

#undef FLASH_DMATTN_HOST_DEVICE
