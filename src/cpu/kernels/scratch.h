#pragma once

#include <cstddef>
#include <cstdint>

#include "common/workspace_allocator.h"
#include "cpu/kernels/keys.h"
#include "cpu/kernels/multiply.h"
#include "cpu/kernels/pack.h"

// The scratch memory of a worker: the sizes of its arrays, and addresses of rows.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Each instruction set has its own type of allocator (common/workspace_allocator.h).
struct ScratchLayout {
  static constexpr std::size_t alignment = workspace_alignment;
};
using ScratchAllocator = BasicWorkspaceAllocator<ScratchLayout>;

// The sizes that follow from a task and an element, for rows of q and k or, with `head_dim` of the values, of v and dout.
template <class Element>
struct Shape {
  static constexpr int key_words = block_keys / Element::per_word;

  int head_dim;
  int rows;          // of a tile
  int padded_rows;   // rounded up to a multiple of the strip
  int row_words;     // depth of a product over the rows
  int head_words;    // depth of a product over the head dimension
  int head_ld;       // words between rows of that depth
  int head_columns;  // columns of a product into the head dimension
  int head_panels;
  std::int64_t transposed_stride, key_stride, row_stride;  // of panels over each depth

  explicit Shape(const Task& t) : Shape(t, t.head_dim) {}
  Shape(const Task& t, int head_dim_)
      : head_dim(head_dim_),
        rows(t.tile_queries * static_cast<int>(t.group)),
        padded_rows(round_up(rows, Element::strip_rows)),
        row_words(padded_rows / Element::per_word),
        head_words(depth_words<Element>(head_dim)),
        head_ld(round_up(head_words, lanes)),
        head_columns(round_up(head_dim, lanes)),
        head_panels(round_up(head_columns, panel_columns) / panel_columns),
        transposed_stride(std::int64_t{head_words} * panel_columns),
        key_stride(std::int64_t{key_words} * panel_columns),
        row_stride(std::int64_t{row_words} * panel_columns) {}

  Panels take_transposed(ScratchAllocator& allocator) const {
    return {allocator.take<float>(block_keys / panel_columns * transposed_stride),
            transposed_stride};
  }
  Panels take_key_panels(ScratchAllocator& allocator) const {
    return {allocator.take<float>(head_panels * key_stride), key_stride};
  }
  Panels take_row_panels(ScratchAllocator& allocator) const {
    return {allocator.take<float>(head_panels * row_stride), row_stride};
  }
  Factor take_row_major(ScratchAllocator& allocator) const {
    return {allocator.take<float>(std::int64_t{padded_rows} * head_ld), head_ld};
  }
};

// Maps row r of a tile (query r / G, head r % G of the group) to its address in `rows`.
template <class In>
auto tile_rows(const Task& t, const Rows& rows, const Tile& tile) {
  return [&t, &rows, &tile](int r) {
    return static_cast<const typename In::Storage*>(rows.data) + tile.batch * rows.batch +
           (tile.first_query + r / t.group) * rows.row +
           (tile.head * t.group + r % t.group) * rows.head;
  };
}

// Maps key n of a block to the address of its row of k or v.
template <class In>
auto key_rows(const Rows& rows, std::int64_t batch, std::int64_t head, const KeyBlock& block) {
  const auto* first =
      static_cast<const typename In::Storage*>(rows.data) + batch * rows.batch + head * rows.head;
  return [first, &rows, &block](int n) { return first + block.key(n) * rows.row; };
}

template <class T>
void clear(T* data, std::int64_t count) {
  __builtin_memset(data, 0, sizeof(T) * static_cast<std::size_t>(count));
}

inline void take_columns(const Task& t, ScratchAllocator& allocator, KeyTerms& terms) {
  terms.columns = allocator.take<float>(t.group * block_keys);
  terms.delayed_biases = allocator.take<float>(t.bias_delay == 0 ? 0 : t.group * block_keys);
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
