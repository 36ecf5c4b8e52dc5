#pragma once

#include <cstdint>

#include "cpu/kernels/element.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/scratch.h"
#include "cpu/task.h"

// Products of few rows with rows of k and v as they lie in memory, each of which is read once: for few rows, packing a
// block costs more than multiplying it.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Adds the lanes of each vector whose index differs in bit Step. The sums of a are in the lanes with that bit clear, those
// of b in the others.
template <int Step, int... I>
Vec fold_lanes(Vec a, Vec b, std::integer_sequence<int, I...>) {
  const Vec low = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + (I ^ Step) : I)...});
  const Vec high = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + I : (I ^ Step))...});
  return low + high;
}

// Folds pairs of neighbouring vectors until one is left; its lane i is the sum of rows[i].
template <int Step = 1>
[[gnu::always_inline]] inline Vec row_sums(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes / (2 * Step); ++i) {
    rows[i] =
        fold_lanes<Step>(rows[2 * i], rows[2 * i + 1], std::make_integer_sequence<int, lanes>());
  }
  if constexpr (2 * Step < lanes) return row_sums<2 * Step>(rows);
  return rows[0];
}

// Rows are read one after another, each from its first line to its last: interleaving the lines of rows is a fifth slower.
// Each line read prefetches two lines, because products keep the out-of-order window from reaching far enough ahead. One
// is 5 KiB ahead in the array (at D 128) and goes into L1: farther ahead, an L1 of 32 KiB evicts lines before they are
// used; nearer, reads stall on fast memory. The other is 15 KiB ahead and goes into L2, which allows a core more requests
// in flight.
template <class Storage>
inline constexpr int prefetch_rows = sizeof(Storage) == 4 ? 10 : 20;
template <class Storage>
inline constexpr int far_prefetch_rows = 3 * prefetch_rows<Storage>;

// Prefetches the line of element d in the rows at these distances after rows[0], once per line: steps of `step` elements
// may share one.
template <class Storage>
[[gnu::always_inline]] inline void prefetch_lines(const Storage* const* rows, int d, int step) {
  constexpr int line = 64 / sizeof(Storage);
  if (step < line && d % line != 0) return;
  __builtin_prefetch(rows[prefetch_rows<Storage>] + d);
  __builtin_prefetch(rows[far_prefetch_rows<Storage>] + d, 0, 2);
}

// Row addresses of a block of k or v, followed by the first rows of the next block (`then`), which are prefetched, or read
// if products take whole vectors of keys. k and v are separate streams: the first rows of a block are in L2 while the
// other array is read, so products begin without a wait after the softmax.
template <class Storage>
struct RowAddresses {
  static constexpr int ahead = far_prefetch_rows<Storage> + lanes;
  const Storage* row[block_keys + ahead];

  // Every page_rows-th row is prefetched one block ahead to fill the TLB: with 4 KiB pages a stream waits longer for
  // translations than for lines.
  static constexpr int page_rows = 8;
  const Storage* page[block_keys / page_rows];

  template <class RowAt, class ThenAt>
  RowAddresses(const RowAt& row_at, int count, const ThenAt& then) {
    for (int n = 0; n < count; ++n) row[n] = row_at(n);
    for (int n = 0; n < ahead; ++n) row[count + n] = then(n);
    for (int n = 0; n < block_keys; n += page_rows) page[n / page_rows] = then(n);
  }

  const Storage* operator()(int n) const { return row[n]; }

  // Prefetches the pages of the next block at the indices of rows [n, n + count).
  void prefetch_pages(int n, int count) const {
    for (int i = n; i < n + count; i += page_rows) __builtin_prefetch(page[i / page_rows], 0, 2);
  }
};

// Where key rows are read from. Only rows in memory are prefetched.
enum class RowsIn : std::uint8_t { memory, cache };

// s[r][n] = q_r . k_n for Rows rows and lanes / Rows keys: as many sums as a vector has lanes. Four rows share the loads
// of q among all keys, because at four rows products cost more than memory.
template <class In, class Element, RowsIn where, int Rows>
[[gnu::always_inline]] inline void score_group(const float* q, std::int64_t ld,
                                               const typename In::Storage* const* keys,
                                               int head_dim, float* s) {
  constexpr int group = lanes / Rows;
  constexpr int together = Rows < 4 ? 1 : group;
  constexpr int step = lanes * Element::per_word;
  Vec sums[lanes];
  for (int n = 0; n < group; n += together) {
    Vec sum[Rows][together] = {};
    const auto add = [&](int d, int count) __attribute__((always_inline)) {
      Vec key[together];
#pragma GCC unroll 4
      for (int i = 0; i < together; ++i) {
        if constexpr (where == RowsIn::memory) prefetch_lines(keys + n + i, d, step);
        key[i] = Element::template load_words<In>(keys[n + i] + d, count);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Vec row = load(q + r * ld + d / Element::per_word);
#pragma GCC unroll 4
        for (int i = 0; i < together; ++i) sum[r][i] = Element::dot(sum[r][i], row, key[i]);
      }
    };
    int d = 0;
    for (; d + step <= head_dim; d += step) add(d, step);
    if (d < head_dim) add(d, head_dim - d);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < together; ++i) sums[r * group + n + i] = sum[r][i];
    }
  }
  const Vec total = row_sums(sums);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    __builtin_memcpy(s + r * block_keys, reinterpret_cast<const float*>(&total) + r * group,
                     group * sizeof(float));
  }
}

// Rows that are multiplied together, at most.
inline constexpr int row_group = lanes < 4 ? lanes : 4;

// Calls body<Rows>(row) for groups of 4, 2 and 1 rows.
template <class Body>
void for_each_row_group(int rows, const Body& body) {
  int row = 0;
  for (; row + row_group <= rows; row += row_group) body.template operator()<row_group>(row);
  for (; row + 2 <= rows; row += 2) body.template operator()<2>(row);
  for (; row < rows; ++row) body.template operator()<1>(row);
}

// s [rows, block_keys] = q [rows, ld words] times the keys, with zeros from `count` up to `columns`, a multiple of
// 2 * lanes. A function by itself, because its loops spill registers inside of a caller: with AVX2 one query of dimension 128
// then takes 9 % more instructions.
template <class In, class Element, RowsIn where>
[[gnu::noinline, gnu::flatten]] void multiply_keys(const float* q, std::int64_t ld, int rows,
                                                   const RowAddresses<typename In::Storage>& keys,
                                                   int count, int columns, int head_dim, float* s) {
  for (int n = 0; n < count; n += lanes) {
    if constexpr (where == RowsIn::memory) keys.prefetch_pages(n, lanes);
    for_each_row_group(rows, [&]<int Rows>(int row) {
      constexpr int group = lanes / Rows;
#pragma GCC unroll 4
      for (int i = 0; i < lanes; i += group) {
        score_group<In, Element, where, Rows>(q + row * ld, ld, keys.row + n + i, head_dim,
                                              s + row * block_keys + n + i);
      }
    });
  }
  for (int r = 0; r < rows; ++r) {
    for (int n = count; n < columns; ++n) s[r * block_keys + n] = 0;
  }
}

// The class of a row-major array.
inline Numbers numbers_of(const float* data, int rows, int columns, std::int64_t ld) {
  Int largest{};
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < columns; n += lanes) {
      largest = larger(largest, bits(load(data + r * ld + n)) & 0x7fffffff);
    }
  }
  return numbers_of(largest);
}

// Keys whose rows of v stay in the first-level cache while all rows and columns are multiplied.
inline constexpr int value_group = 16;

// out[r][d .. d + Vectors * lanes) += sum_n p[r][n] v_n.
template <class In, int Rows, int Vectors, bool Whole>
[[gnu::always_inline]] inline void value_group_columns(const float* p, std::int64_t p_ld,
                                                       const typename In::Storage* const* values,
                                                       int count, int d, int head_dim, float* out,
                                                       std::int64_t out_ld) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) sum[r][i] = load(out + r * out_ld + d + i * lanes);
  }
  for (int n = 0; n < count; ++n) {
    Vec value[Vectors];
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) {
      const auto* from = values[n] + d + i * lanes;
      prefetch_lines(values + n, d + i * lanes, lanes);
      value[i] = Whole ? In::widen(load_as<typename In::Packed>(from))
                       : load_widened<In>(from, head_dim - d - i * lanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = splat(p[r * p_ld + n]);
#pragma GCC unroll 16
      for (int i = 0; i < Vectors; ++i) sum[r][i] = fma(weight, value[i], sum[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < Vectors; ++i) store(out + r * out_ld + d + i * lanes, sum[r][i]);
  }
}

// Weighted sums of the columns [d, head_dim): Vectors at a time, then half as many.
template <class In, int Rows, int Vectors>
[[gnu::always_inline]] inline void value_group_rows(const float* p, std::int64_t p_ld,
                                                    const typename In::Storage* const* values,
                                                    int count, int d, int head_dim, float* out,
                                                    std::int64_t out_ld) {
  for (; d + Vectors * lanes <= head_dim; d += Vectors * lanes) {
    value_group_columns<In, Rows, Vectors, true>(p, p_ld, values, count, d, head_dim, out, out_ld);
  }
  if constexpr (Vectors > 1) {
    value_group_rows<In, Rows, Vectors / 2>(p, p_ld, values, count, d, head_dim, out, out_ld);
  } else if (d < head_dim) {
    value_group_columns<In, Rows, 1, false>(p, p_ld, values, count, d, head_dim, out, out_ld);
  }
}

// out [rows, out_ld] += p [rows, p_ld] times the values.
template <class In>
void multiply_values(const float* p, std::int64_t p_ld, int rows,
                     const RowAddresses<typename In::Storage>& values, int count, int head_dim,
                     float* out, std::int64_t out_ld) {
  // In registers: all of two rows of D = 128 with AVX-512.
  constexpr int sums = lanes == 16 ? 16 : 8;
  for (int n = 0; n < count; n += value_group) {
    const int keys = count - n < value_group ? count - n : value_group;
    values.prefetch_pages(n, value_group);
    for_each_row_group(rows, [&]<int Rows>(int row) {
      value_group_rows<In, Rows, sums / Rows>(p + row * p_ld + n, p_ld, values.row + n, keys, 0,
                                              head_dim, out + row * out_ld, out_ld);
    });
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
