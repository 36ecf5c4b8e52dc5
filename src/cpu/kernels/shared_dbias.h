#pragma once

#include <cstdint>

#include "cpu/kernels/backward.h"

namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Computes dbias for the queries of a tile, summed in order over all heads and batch elements that share it.
// A slab is a (b, hkv) of the bias; a broadcast dimension has one slab.
template <class In, class Element>
void shared_dbias_tile(const BackwardTask& t, std::int64_t tile_index, std::int64_t slab,
                       void* scratch) {
  ScratchAllocator allocator(scratch);
  BackwardUnit<In, Element> unit(t, allocator);
  [[maybe_unused]] const typename Element::Session session;
  unit.dense_heads = t.dbias.group_head != 0 ? static_cast<int>(t.group) : 1;
  unit.dense_sums = allocator.take<double>(t.tile_queries * t.group * t.seqlen_k);
  const std::int64_t heads = t.dbias.kv_head != 0 ? t.heads_kv : 1;
  const std::int64_t batches = t.dbias.batch != 0 ? t.batch : 1;
  const Tile first(t, slab / heads, slab % heads, tile_index);
  unit.clear(unit.dense_sums, std::int64_t{first.queries} * unit.dense_heads * t.seqlen_k);
  for (std::int64_t b = first.batch; b < t.batch; b += batches) {
    for (std::int64_t h = first.head; h < t.heads_kv; h += heads) {
      const Tile tile(t, b, h, tile_index);
      unit.load_tile(tile);
      KeyBlock block;
      for (KeyBlockIterator blocks(t, tile, tile_index, KeySource::tile_list);
           blocks.next(block);) {
        unit.add_block(tile, block);
      }
    }
  }
  for (int r = 0; r < first.queries * unit.dense_heads; ++r) {
    const int row = r / unit.dense_heads * static_cast<int>(t.group) + r % unit.dense_heads;
    for (std::int64_t key = 0; key < t.seqlen_k; ++key) {
      unit.store_dense(first, row, key, unit.dense_sums[r * t.seqlen_k + key]);
    }
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
