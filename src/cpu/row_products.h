#pragma once

#include <cstdint>

#include "cpu/element.h"
#include "cpu/pack.h"

// Products of few rows with rows of k and v as they lie in memory, each of which is read once: for few rows, packing a
// block costs more than multiplying it.
namespace flash_dmattn::cpu::FLASH_DMATTN_ISA {

// Adds neighbouring vectors, two and two, until one is left, whose lane i is the sum of rows[i].
template <int Step, int... I>
Vec add_two(Vec a, Vec b, std::integer_sequence<int, I...>) {
  // Lanes of a with bit Step clear fold onto themselves, of b into those with it set.
  const Vec low = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + (I ^ Step) : I)...});
  const Vec high = __builtin_shuffle(a, b, Int{((I & Step) != 0 ? lanes + I : (I ^ Step))...});
  return low + high;
}
template <int Step = 1>
[[gnu::always_inline]] inline Vec row_sums(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes / (2 * Step); ++i) {
    rows[i] = add_two<Step>(rows[2 * i], rows[2 * i + 1], std::make_integer_sequence<int, lanes>());
  }
  if constexpr (2 * Step < lanes) return row_sums<2 * Step>(rows);
  return rows[0];
}

// How many rows ahead memory is asked for, a line with every line that is used: rows are too short for the processor to
// foresee the next one. 8 KiB at D = 128: 28 to 45 GB/s a core instead of 12 to 20 (Zen 5; all of a row asked for at
// once: 15; copying: 35).
template <class Storage>
inline constexpr int prefetch_rows = 64 / sizeof(Storage);

// The addresses of rows [n, n + Count) and of those to ask for meanwhile: prefetch_rows later, or behind the last one
// those that are read `then`. Rows beyond the last one are the last one.
template <class Storage, int Count>
struct RowPointers {
  const Storage* row[Count];
  const Storage* next[Count];

  template <class RowAt, class ThenAt>
  RowPointers(const RowAt& row_at, const ThenAt& then, int n, int count) {
    for (int i = 0; i < Count; ++i) {
      row[i] = row_at(n + i < count ? n + i : count - 1);
      const int later = n + i + prefetch_rows<Storage>;
      next[i] = later < count ? row_at(later) : then(later - count);
    }
  }
};

// s[r][n] = q_r . k_n for Rows rows and lanes / Rows keys: as many sums as a vector has lanes.
template <class In, class Element, int Rows>
[[gnu::always_inline]] inline void score_group(const float* q, std::int64_t ld,
                                               const typename In::Storage* const* keys,
                                               const typename In::Storage* const* next,
                                               int head_dim, float* s, std::int64_t s_ld) {
  constexpr int group = lanes / Rows;
  constexpr int step = lanes * Element::per_word;
  Vec sum[lanes] = {};
  const auto add = [&](int d, const auto& load_key) {
    Vec row[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) row[r] = load(q + r * ld + d / Element::per_word);
#pragma GCC unroll 16
    for (int n = 0; n < group; ++n) {
      const Vec key = load_key(keys[n] + d);
      __builtin_prefetch(next[n] + d);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r)
        sum[r * group + n] = Element::dot(sum[r * group + n], row[r], key);
    }
  };
  int d = 0;
  for (; d + step <= head_dim; d += step) {
    add(d, [](const auto* p) { return Element::template load_words<In>(p, step); });
  }
  if (d < head_dim) {
    add(d, [&](const auto* p) { return Element::template load_words<In>(p, head_dim - d); });
  }
  const Vec total = row_sums(sum);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    __builtin_memcpy(s + r * s_ld, reinterpret_cast<const float*>(&total) + r * group,
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

// s [rows, s_ld] = q [rows, ld words] times the keys, with zeros from `count` up to `columns`, a multiple of 2 * lanes.
template <class In, class Element, class RowAt, class ThenAt>
void multiply_keys(const float* q, std::int64_t ld, int rows, const RowAt& key, const ThenAt& then,
                   int count, int columns, int head_dim, float* s, std::int64_t s_ld) {
  for (int n = 0; n < count; n += lanes) {
    const RowPointers<typename In::Storage, lanes> keys(key, then, n, count);
    for_each_row_group(rows, [&]<int Rows>(int row) {
      constexpr int group = lanes / Rows;
#pragma GCC unroll 4
      for (int i = 0; i < lanes; i += group) {
        score_group<In, Element, Rows>(q + row * ld, ld, keys.row + i, keys.next + i, head_dim,
                                       s + row * s_ld + n + i, s_ld);
      }
    });
  }
  for (int r = 0; r < rows; ++r) {
    for (int n = count; n < columns; ++n) s[r * s_ld + n] = 0;
  }
}

// Keys whose rows of v stay in the first-level cache while all rows and columns are multiplied.
inline constexpr int value_group = 16;

// out[r][d .. d + Vectors * lanes) += sum_n p[r][n] v_n.
template <class In, int Rows, int Vectors, bool Whole>
[[gnu::always_inline]] inline void value_group_columns(const float* p, std::int64_t p_ld,
                                                       const typename In::Storage* const* values,
                                                       const typename In::Storage* const* next,
                                                       int count, int d, int head_dim, float* out,
                                                       std::int64_t out_ld) {
  Vec sum[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) sum[r][i] = load(out + r * out_ld + d + i * lanes);
  }
  for (int n = 0; n < count; ++n) {
    Vec value[Vectors];
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) {
      const auto* from = values[n] + d + i * lanes;
      if constexpr (Whole) __builtin_prefetch(next[n] + d + i * lanes);
      value[i] = Whole ? In::widen(load_as<typename In::Packed>(from))
                       : load_widened<In>(from, head_dim - d - i * lanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = splat(p[r * p_ld + n]);
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; ++i) sum[r][i] = fma(weight, value[i], sum[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) store(out + r * out_ld + d + i * lanes, sum[r][i]);
  }
}

// out [rows, out_ld] += p [rows, p_ld] times the values.
template <class In, class RowAt, class ThenAt>
void multiply_values(const float* p, std::int64_t p_ld, int rows, const RowAt& value,
                     const ThenAt& then, int count, int head_dim, float* out, std::int64_t out_ld) {
  constexpr int vectors = lanes == 16 ? 4 : 2;  // with 4 rows, 16 or 8 sums
  for (int n = 0; n < count; n += value_group) {
    const int keys = count - n < value_group ? count - n : value_group;
    const RowPointers<typename In::Storage, value_group> values(value, then, n, count);
    for_each_row_group(rows, [&]<int Rows>(int row) {
      const float* weights = p + row * p_ld + n;
      float* sums = out + row * out_ld;
      int d = 0;
      for (; d + vectors * lanes <= head_dim; d += vectors * lanes) {
        value_group_columns<In, Rows, vectors, true>(weights, p_ld, values.row, values.next, keys,
                                                     d, head_dim, sums, out_ld);
      }
      for (; d < head_dim; d += lanes) {
        value_group_columns<In, Rows, 1, false>(weights, p_ld, values.row, values.next, keys, d,
                                                head_dim, sums, out_ld);
      }
    });
  }
}

}  // namespace flash_dmattn::cpu::FLASH_DMATTN_ISA
