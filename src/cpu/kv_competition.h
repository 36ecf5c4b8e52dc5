#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>

#include "common/arguments.h"
#include "cpu/kv_cache_row.h"

// The keys of a row of a KV cache while pending tokens come.
namespace flash_dmattn::cpu {

// The best keys of a row, at most w of them, while keys are added one by one.
class BestKeys {
 public:
  struct Key {
    NarrowRank rank;
    std::int64_t slot;
    friend bool operator<(const Key& a, const Key& b) { return a.rank < b.rank; }
    friend bool operator>(const Key& a, const Key& b) { return a.rank > b.rank; }
  };
  static constexpr std::int64_t none = -1;

  BestKeys(const CacheRow& row, Key* memory) : row_(row), keys_(memory) {}

  // Adds the key in `slot`. Returns the slot of the key that leaves, possibly `slot` itself, or none if there was room.
  std::int64_t add(std::int64_t slot) {
    const Key key{row_.rank(slot), slot};
    if (size_ < row_.rule.window) {
      keys_[size_++] = key;
      if (size_ == row_.rule.window) std::make_heap(keys_, keys_ + size_, std::greater<>());
      return none;
    }
    if (key < keys_[0]) return slot;  // the worst key comes first once the heap is full
    const std::int64_t leaving = keys_[0].slot;
    replace_top(keys_, size_, key);
    return leaving;
  }

 private:
  const CacheRow& row_;
  Key* keys_;
  std::int64_t size_ = 0;
};

// The fate of the keys of a row while its first `tokens` pending tokens come. A worker has memory for it.
class Competition {
 public:
  static constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max();

  static std::size_t bytes(const KvCache& cache) {
    return align_up(places_bytes(cache.shape.rule.window, sizeof(BestKeys::Key))) +
           align_up(places_bytes(cache.shape.most_places() + cache.pending, sizeof(std::int32_t))) +
           align_up(places_bytes(cache.pending, sizeof(std::int32_t)));
  }

  Competition(const CacheRow& row, std::int64_t tokens, char* memory)
      : row_(row), tokens_(static_cast<std::int32_t>(tokens)) {
    const KvCache& cache = row.cache;
    auto* const keys = reinterpret_cast<BestKeys::Key*>(memory);
    memory += align_up(places_bytes(cache.shape.rule.window, sizeof(BestKeys::Key)));
    beaten_by_ = reinterpret_cast<std::int32_t*>(memory);
    memory += align_up(places_bytes(row.places + cache.pending, sizeof(std::int32_t)));
    arrivals_ = reinterpret_cast<std::int32_t*>(memory);
    find_sinks();
    std::fill_n(beaten_by_, row.places + tokens, never);
    std::fill_n(arrivals_, tokens, -1);
    BestKeys best(row, keys);
    for (std::int64_t slot = 0; slot < row.count.count; ++slot) arrive(slot, best);
    for (std::int64_t i = sink_end_; i < tokens; ++i) arrive(row.places + i, best);
    for (std::int32_t i = 0; i < tokens_; ++i) {
      if (arrivals_[i] < 0) continue;
      ++competed_;
      const std::int64_t leaving = best.add(arrivals_[i]);
      if (leaving != BestKeys::none) beaten_by_[leaving] = i;
    }
  }

  // Whether the key in `slot` is a sink.
  bool is_sink(std::int64_t slot) const {
    return slot < row_.places ? slot < row_.rule.sinks : slot - row_.places < sink_end_;
  }
  // The pending token that is the first to see the key no longer. That may be the token itself.
  std::int32_t end_of(std::int64_t slot) const {
    if (is_sink(slot)) return never;
    const std::int32_t entry = row_.entries[slot];
    const std::int32_t recent_end = position_of_entry(entry) - row_.seen() + row_.rule.recent;
    return entry < 0 ? recent_end : std::max(recent_end, beaten_by_[slot]);
  }
  // Whether a key that is no sink is or may become one of the best.
  bool may_be_chosen(std::int64_t slot) const {
    return row_.entries[slot] >= 0 && beaten_by_[slot] == never;
  }
  // The number of keys that began to compete.
  std::int32_t competed() const { return competed_; }

 private:
  static std::size_t places_bytes(std::int64_t places, std::size_t size) {
    return static_cast<std::size_t>(places) * size;
  }

  // The first keys of a text are sinks. Until there are enough of them, no slot but theirs is taken.
  void find_sinks() {
    std::int32_t missing = row_.rule.sinks - row_.count.count;
    for (; missing > 0 && sink_end_ < tokens_; ++sink_end_) {
      missing -= row_.entries[row_.places + sink_end_] == no_key ? 0 : 1;
    }
  }

  // Adds a key that competes before the first token, or notes when it begins to.
  void arrive(std::int64_t slot, BestKeys& best) {
    const std::int32_t entry = row_.entries[slot];
    if (entry < 0) return;
    const std::int32_t token = entry - row_.seen() + row_.rule.delay();
    if (token < 0) {
      best.add(slot);
    } else if (token < tokens_) {
      arrivals_[token] = static_cast<std::int32_t>(slot);
    }
  }

  const CacheRow& row_;
  std::int32_t tokens_;
  std::int32_t sink_end_ = 0;  // the pending keys before it are sinks
  std::int32_t competed_ = 0;
  std::int32_t* beaten_by_;  // [places + pending]: the token with which w better keys compete
  // [pending]: the slot of the key that begins to compete with a token, -1 for none.
  std::int32_t* arrivals_;
};

}  // namespace flash_dmattn::cpu
