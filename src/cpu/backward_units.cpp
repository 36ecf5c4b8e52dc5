#include "cpu/backward_units.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace flash_dmattn::cpu {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Enough units for 16 workers.
constexpr std::int64_t target_units = 16;

// Cuts the tiles into ranges of about equal work. Under a causal mask without intervals, the work up to a position
// grows with the square of the position.
void cut_segments(BackwardTask& t, std::int64_t wanted) {
  t.segments = static_cast<int>(
      std::clamp<std::int64_t>(std::min<std::int64_t>(wanted, t.tiles), 1, max_segments));
  const bool grows = t.causal && t.intervals.data == nullptr;
  for (int i = 0; i <= t.segments; ++i) {
    const double share = static_cast<double>(i) / t.segments;
    t.segment_tile[i] = static_cast<std::int64_t>(
        static_cast<double>(t.tiles) * (grows ? std::sqrt(share) : share) + 0.5);
  }
}

// Divides the work of a call with DbiasKind::dense_shared into segments and parts. Each segment has sums of dk and dv, and
// each of several parts has sums of dbias: of the divisions with the most items, up to target_units, the one whose sums
// take the least memory, and of those the one with the fewest parts.
void divide_members(BackwardTask& t) {
  t.slab_heads = t.dbias.kv_head != 0 ? t.heads_kv : 1;
  t.slabs = t.slab_heads * (t.dbias.batch != 0 ? t.batch : 1);
  t.slab_sums = t.seqlen_q * t.dbias_heads * t.seqlen_k;
  const std::int64_t heads = t.batch * t.heads_kv;
  const std::int64_t wanted = ceil_div(target_units, t.slabs);
  const std::int64_t part_bytes = t.slabs * t.slab_sums * std::int64_t{sizeof(double)};
  const std::int64_t segment_bytes =
      heads * t.seqlen_k * t.head_dim_padded * std::int64_t{2 * sizeof(float)};
  std::int64_t most_items = 0, least_bytes = 0, best_segments = 1;
  for (std::int64_t segments = 1; segments <= std::min(wanted, t.tiles); ++segments) {
    const std::int64_t parts = std::min(ceil_div(wanted, segments), heads / t.slabs);
    const std::int64_t items = std::min(segments * parts, wanted);
    const std::int64_t bytes = segments * segment_bytes + (parts > 1 ? parts * part_bytes : 0);
    if (items < most_items || (items == most_items && bytes > least_bytes)) continue;
    most_items = items;
    least_bytes = bytes;
    best_segments = segments;
    t.dbias_parts = static_cast<int>(parts);
  }
  cut_segments(t, best_segments);
}

// Calls take(key) for every key that a query of the unit may see, in ascending order.
template <class Take>
void for_each_key(const BackwardTask& t, std::int64_t unit, const Take& take) {
  const std::int64_t segment = unit / (t.batch * t.heads_kv);
  const std::int64_t begin = t.segment_tile[segment] * t.tile_queries;
  const std::int64_t end = std::min(t.segment_tile[segment + 1] * t.tile_queries, t.seqlen_q);
  const KeyInterval* intervals = t.intervals.data +
                                 unit / t.heads_kv % t.batch * t.intervals.stride_batch +
                                 unit % t.heads_kv * t.intervals.stride_head;
  for (std::int64_t key = 0; key < t.seqlen_k; ++key) {
    std::int64_t first = std::max<std::int64_t>(intervals[key].first, begin);
    if (t.causal) first = std::max(first, key - (t.seqlen_k - t.seqlen_q));
    if (first < std::min<std::int64_t>(intervals[key].last, end)) take(key);
  }
}

}  // namespace

void divide_into_units(BackwardTask& t) {
  if (t.dbias_kind == DbiasKind::dense_shared) {
    divide_members(t);
  } else {
    cut_segments(t, ceil_div(target_units, t.batch * t.heads_kv));
  }
}

std::int64_t count_slots(const BackwardTask& t, std::int64_t unit) {
  if (t.intervals.data != nullptr) {
    std::int64_t count = 0;
    for_each_key(t, unit, [&](std::int64_t) { ++count; });
    return count;
  }
  if (!t.causal) return t.seqlen_k;
  const std::int64_t segment = unit / (t.batch * t.heads_kv);
  const std::int64_t end = std::min(t.segment_tile[segment + 1] * t.tile_queries, t.seqlen_q);
  return std::clamp<std::int64_t>(end + t.seqlen_k - t.seqlen_q, 0, t.seqlen_k);
}

void list_keys(const BackwardTask& t, std::int64_t unit, std::int32_t* slot_keys) {
  for_each_key(t, unit, [&](std::int64_t key) { *slot_keys++ = static_cast<std::int32_t>(key); });
}

}  // namespace flash_dmattn::cpu
