#pragma once

#include <cstdint>

#include "common/selection_rule.h"
#include "flash_dmattn/kv_cache.h"

// Computes how a token changes the slots of a KV cache, for the CPU and for GPUs. The SlotCount of a head determines the
// change, so that no key has to be read first.
namespace flash_dmattn {

// The rule of a cache for one head.
struct HeadRule {
  std::int32_t window;  // w of the head
  std::int32_t sinks;
  std::int32_t recent;
  bool delayed;  // keys compete when they are no longer recent, else when they are written
  float threshold;
  std::int32_t places;

  // Whether a key that is no sink competes. NaN does not.
  constexpr bool admits(float score) const { return window > 0 && score >= threshold; }
  // The number of tokens after which a key competes.
  constexpr std::int32_t delay() const { return delayed ? recent : 0; }
};

inline HeadRule rule_of_head(const KvCacheShape& shape, std::int64_t head) {
  const SelectionRule& rule = shape.rule;
  return {.window = static_cast<std::int32_t>(shape.window(head)),
          .sinks = static_cast<std::int32_t>(rule.sink_tokens),
          .recent = static_cast<std::int32_t>(rule.recent_window),
          .delayed = delay_of(rule) > 0,
          .threshold = least_score(rule.score_threshold),
          .places = static_cast<std::int32_t>(shape.places(head))};
}

// The number of slots that have been taken. A GPU's counts are not checked before a call, and in memory that was never
// cleared, or has the state of another rule, they can have any value.
constexpr std::int32_t taken_slots(const HeadRule& rule, const SlotCount& slots) {
  return slots.count < 0 ? 0 : slots.count < rule.places ? slots.count : rule.places;
}

// The slots that a token changes: its own, and perhaps one other.
struct StepChange {
  std::int32_t target = -1;  // the token's slot; -1: it has none
  std::int32_t entry = 0;    // of the token in `positions`
  std::int32_t other = -1;   // a slot whose entry becomes other_entry; -1: none
  std::int32_t other_entry = no_key;
  std::int32_t count = 0;  // the next two of SlotCount afterwards
  std::int32_t competed = 0;
};

// The key that begins to compete with the token (itself, or the one that is no longer recent) is more recent than all
// chosen ones, and wins if scores are equal.
constexpr StepChange change_of_step(const HeadRule& rule, const SlotCount& before,
                                    std::int32_t position, float score, bool is_present) {
  const std::int32_t taken = taken_slots(rule, before);
  const bool is_sink = is_present && taken < rule.sinks;
  const bool is_admitted = is_present && !is_sink && rule.admits(score);
  const bool has_leaving = rule.recent > 0 && 0 <= before.leaving && before.leaving < taken;
  const bool leaving_competes = has_leaving && before.leaving_score == before.leaving_score;

  const bool competes = rule.delayed ? leaving_competes : is_admitted;
  const bool is_full = before.competed >= rule.window;
  const float challenger = rule.delayed ? before.leaving_score : score;
  const bool beats_victim = competes && is_full && challenger >= before.victim_score;
  const bool is_chosen = competes && (!is_full || beats_victim);

  const bool leaves = has_leaving && !(rule.delayed ? is_chosen : leaving_competes);
  const bool victim_leaves = beats_victim && before.victim_position <= position - rule.recent;
  const bool is_stored = is_present && (is_sink || rule.recent > 0 || is_chosen);

  StepChange change;
  if (is_stored) {
    change.target = leaves ? before.leaving : victim_leaves ? before.victim : before.free;
    if (change.target >= rule.places) change.target = -1;
    change.entry = (rule.delayed ? is_admitted : is_chosen) ? position : ~position;
  }
  if (leaves && change.target != before.leaving) {
    change.other = before.leaving;
  } else if (beats_victim && change.target != before.victim) {
    // A beaten key stays visible while it is recent.
    change.other = before.victim;
    if (!victim_leaves) change.other_entry = ~before.victim_position;
  }
  change.count = change.target < taken ? taken : change.target + 1;
  change.competed = before.competed + (competes ? 1 : 0);
  return change;
}

}  // namespace flash_dmattn
