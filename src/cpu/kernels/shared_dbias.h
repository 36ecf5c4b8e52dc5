#pragma once

#include <cstdint>

#include "cpu/kernels/backward.h"

// The backward where heads or batch elements share the elements of a dense dbias: its members. A slab is a (b, kv head)
// of dbias; a broadcast dimension has one slab. One worker visits a tile of all members of a part, one after another, so
// that their ds are summed in a fixed order.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// A tile of a slab's first member.
inline Tile tile_of_slab(const BackwardTask& t, std::int64_t slab, std::int64_t tile) {
  return Tile(t, slab / t.slab_heads, slab % t.slab_heads, tile);
}

// The number of sums of a slab's queries before those of a tile.
inline std::int64_t sums_before(const BackwardTask& t, const Tile& tile) {
  return tile.first_query * t.dbias_heads * t.seqlen_k;
}

template <class In, class Element>
void shared_dbias_item(const BackwardTask& t, std::int64_t item, void* scratch) {
  ScratchAllocator allocator(scratch);
  BackwardUnit<In, Element> unit(t, allocator);
  [[maybe_unused]] const typename Element::Session session;
  const std::int64_t part = item % t.dbias_parts;
  const std::int64_t slab = item / t.dbias_parts % t.slabs;
  const std::int64_t segment = item / t.dbias_parts / t.slabs;
  const std::int64_t heads = t.heads_kv / t.slab_heads;
  const std::int64_t members = t.batch * t.heads_kv / t.slabs;
  double* const own_sums =
      allocator.take<double>(t.dbias_parts > 1 ? 0 : t.tile_queries * t.dbias_heads * t.seqlen_k);
  const auto for_each_member = [&](std::int64_t tile, const auto& body) {
    const Tile first = tile_of_slab(t, slab, tile);
    for (std::int64_t m = members * part / t.dbias_parts; m < members * (part + 1) / t.dbias_parts;
         ++m) {
      const Tile member(t, first.batch + m / heads * (t.slabs / t.slab_heads),
                        first.head + m % heads * t.slab_heads, tile);
      unit.sums.select(segment, member.batch, member.head);
      body(member);
    }
  };
  for_each_member(0, [&](const Tile&) { unit.sums.set_to_zero(); });  // a segment may have no tile
  for (std::int64_t i = t.segment_tile[segment]; i < t.segment_tile[segment + 1]; ++i) {
    const Tile first = tile_of_slab(t, slab, i);
    double* const sums = t.dbias_parts == 1 ? own_sums
                                            : t.dbias_sums + (part * t.slabs + slab) * t.slab_sums +
                                                  sums_before(t, first);
    clear(sums, std::int64_t{first.queries} * t.dbias_heads * t.seqlen_k);
    unit.dbias.sums = sums;
    for_each_member(i, [&](const Tile& member) { unit.add_tile(member, i); });
    if (t.dbias_parts == 1) unit.dbias.store_sums(first, sums, 1, 0);
  }
}

// Adds the parts' sums of a tile.
inline void add_dbias_parts(const BackwardTask& t, std::int64_t tile, std::int64_t slab) {
  const Tile first = tile_of_slab(t, slab, tile);
  DenseDbias{t}.store_sums(first, t.dbias_sums + slab * t.slab_sums + sums_before(t, first),
                           t.dbias_parts, t.slabs * t.slab_sums);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
