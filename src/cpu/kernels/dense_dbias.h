#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/kernels/keys.h"
#include "cpu/task.h"

// The gradient of a bias with a query and a key dimension, from rows of ds. It is stored at once where one unit has every
// term of an element, and is summed in double where several heads or batch elements share it.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

struct DenseDbias {
  const BackwardTask& t;
  // [queries of the tile, dbias_heads, Sk]; only with DbiasKind::dense_shared.
  double* sums = nullptr;

  bool is_wanted() const { return stores() || t.dbias_kind == DbiasKind::dense_shared; }

  // Called before the blocks of a tile.
  void begin_tile(const Tile& tile) const {
    if (!stores() || visits_every_element()) return;
    for_all_keys([&](const KeyBlock& block) { store_zeros(tile, block); });
  }

  // Adds ds of the first `count` keys of a block. ds has whole vectors.
  void add_row(const Tile& tile, const KeyBlock& block, int row, int count, const float* ds) const {
    if (sums == nullptr) return store_row(row_of(tile, row), block, count, ds);
    double* const to = sums_of(row);
    if (block.index == nullptr) {
      for (int n = 0; n < count; ++n) to[block.start + n] += static_cast<double>(ds[n]);
    } else {
      for (int n = 0; n < count; ++n) to[block.index[n]] += static_cast<double>(ds[n]);
    }
  }

  // Stores the sums of `parts` arrays that are `stride` numbers apart, for the queries of a tile.
  void store_sums(const Tile& tile, const double* from, int parts, std::int64_t stride) const {
    for (int r = 0; r < tile.queries * t.dbias_heads; ++r, from += t.seqlen_k) {
      const int row = r / t.dbias_heads * static_cast<int>(t.group) + r % t.dbias_heads;
      for_all_keys([&](const KeyBlock& block) {
        alignas(64) float values[block_keys];
        for (int n = 0; n < block.count; ++n) {
          double sum = from[block.start + n];
          for (int i = 1; i < parts; ++i) sum += from[i * stride + block.start + n];
          values[n] = static_cast<float>(sum);
        }
        store_row(row_of(tile, row), block, block.count, values);
      });
    }
  }

 private:
  bool stores() const { return t.dbias_kind == DbiasKind::dense; }
  bool visits_every_element() const {
    return !t.causal && t.intervals.data == nullptr && !is_dense(t.mask);
  }

  template <class Body>
  void for_all_keys(const Body& body) const {
    for (KeyBlock block; block.start < t.seqlen_k; block.start += block_keys) {
      const std::int64_t left = t.seqlen_k - block.start;
      block.count = left < block_keys ? static_cast<int>(left) : block_keys;
      body(block);
    }
  }

  double* sums_of(int row) const {
    const auto group = static_cast<int>(t.group);
    return sums + (row / group * t.dbias_heads + row % t.dbias_heads) * t.seqlen_k;
  }
  // The index of the first key's element in dbias.
  std::int64_t row_of(const Tile& tile, int row) const {
    return tile.batch * t.dbias.batch + tile.head * t.dbias.kv_head +
           row % t.group * t.dbias.group_head + (tile.first_query + row / t.group) * t.dbias.query;
  }

  void store_zeros(const Tile& tile, const KeyBlock& block) const {
    alignas(64) constexpr float zeros[block_keys] = {};
    for (int r = 0; r < tile.rows; ++r) store_row(row_of(tile, r), block, block.count, zeros);
  }

  void store_row(std::int64_t row, const KeyBlock& block, int count, const float* ds) const {
    switch (t.dbias.dtype) {
      case DType::bf16: return store_row<Bf16>(row, block, count, ds);
      case DType::f16: return store_row<F16>(row, block, count, ds);
      default: return store_row<F32>(row, block, count, ds);
    }
  }
  template <class Out>
  void store_row(std::int64_t row, const KeyBlock& block, int count, const float* ds) const {
    if (block.index != nullptr || t.dbias.key != 1) {
      for (int n = 0; n < count; ++n) {
        store_scalar<Out>(t.dbias.data, row + block.key(n) * t.dbias.key, ds[n], t.saturate);
      }
      return;
    }
    auto* const to = static_cast<typename Out::Storage*>(t.dbias.data) + row + block.start;
    for (int n = 0; n < count; n += lanes) {
      const Vec x = load(ds + n);
      store_narrowed<Out>(to + n, t.saturate ? saturated(x, Out::gradient_limit) : x, count - n);
    }
  }
};

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
