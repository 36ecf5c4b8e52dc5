#include "cpu/reduce_dbias.h"

#include <algorithm>
#include <cstdint>

#include "common/float_types.h"
#include "common/tasks.h"

namespace flash_dmattn::cpu {
namespace {

std::int64_t find_slot(const BackwardTask& t, std::int64_t unit, std::int64_t key) {
  const std::int64_t count = t.slot_count[unit];
  if (t.slot_keys == nullptr) return key < count ? key : -1;
  const std::int32_t* begin = t.slot_keys + t.slot_begin[unit];
  const std::int32_t* found =
      std::lower_bound(begin, begin + count, static_cast<std::int32_t>(key));
  return found != begin + count && *found == key ? found - begin : -1;
}

double sum_of_key(const BackwardTask& t, std::int64_t b, std::int64_t h, std::int64_t g,
                  std::int64_t key) {
  double sum = 0;
  for (int segment = 0; segment < t.segments; ++segment) {
    const std::int64_t unit = (segment * t.batch + b) * t.heads_kv + h;
    const std::int64_t slot = find_slot(t, unit, key);
    if (slot < 0) continue;
    sum += t.key_sums[t.slot_begin[unit] * t.key_sum_heads + g * t.slot_count[unit] + slot];
  }
  return sum;
}

double sum_of_query(const BackwardTask& t, std::int64_t b, std::int64_t h, std::int64_t g,
                    std::int64_t i) {
  return t.query_sums[((b * t.heads_kv + h) * t.group + g) * t.seqlen_q + i];
}

void store_dbias(const BackwardTask& t, std::int64_t at, double value) {
  if (t.saturate) {
    const double limit = gradient_limit(t.dbias.dtype);
    value = value < limit ? std::max(value, -limit) : limit;
  }
  store(t.dbias.data, t.dbias.dtype, at, value);
}

// An element of dbias, [batches, kv heads, heads of a group, keys or queries]. Where dbias broadcasts, its size is 1.
struct DbiasElement {
  std::int64_t b, h, g, i;
};

// Adds up the sums of all (batch element, kv head, head of the group, key or query) to which an element of the bias was
// added: in each dimension every n-th from the element's own, of a dbias of size n.
double sum_of_element(const BackwardTask& t, const DbiasElement& size, const DbiasElement& own) {
  const bool per_key = t.dbias_kind == DbiasKind::per_key;
  const std::int64_t members = per_key ? t.key_sum_heads : t.group;
  const std::int64_t length = per_key ? t.seqlen_k : t.seqlen_q;
  double sum = 0;
  for (std::int64_t b = own.b; b < t.batch; b += size.b) {
    for (std::int64_t h = own.h; h < t.heads_kv; h += size.h) {
      for (std::int64_t g = own.g; g < members; g += size.g) {
        for (std::int64_t i = own.i; i < length; i += size.i) {
          sum += per_key ? sum_of_key(t, b, h, g, i) : sum_of_query(t, b, h, g, i);
        }
      }
    }
  }
  return sum;
}

}  // namespace

void reduce_dbias(const BackwardTask& t, const Execution& execution) {
  const Term& d = t.dbias;
  const bool per_key = t.dbias_kind == DbiasKind::per_key;
  const std::int64_t stride = per_key ? d.key : d.query;
  const std::int64_t length = per_key ? t.seqlen_k : t.seqlen_q;
  const DbiasElement size{.b = d.batch != 0 ? t.batch : 1,
                          .h = d.kv_head != 0 ? t.heads_kv : 1,
                          .g = d.group_head != 0 ? t.group : 1,
                          .i = stride != 0 ? length : 1};
  constexpr std::int64_t chunk = 1024;  // elements of an item
  const std::int64_t chunks = (size.i + chunk - 1) / chunk;
  for_each_task(execution, size.b * size.h * size.g * chunks, [&](std::int64_t item, int) {
    DbiasElement own{.b = item / chunks / size.g / size.h,
                     .h = item / chunks / size.g % size.h,
                     .g = item / chunks % size.g,
                     .i = item % chunks * chunk};
    for (const std::int64_t end = std::min(own.i + chunk, size.i); own.i < end; ++own.i) {
      const std::int64_t at =
          own.b * d.batch + own.h * d.kv_head + own.g * d.group_head + own.i * stride;
      store_dbias(t, at, sum_of_element(t, size, own));
    }
  });
}

}  // namespace flash_dmattn::cpu
