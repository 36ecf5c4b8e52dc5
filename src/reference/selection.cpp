#include "reference/selection.h"

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "common/float_types.h"

namespace flash_dmattn::reference {
namespace {

struct Key {
  double score;
  bool present;
  bool sink;  // among the first present keys
  // May compete: present, no sink, and its score is a number at or above the threshold.
  bool eligible;
};

std::vector<Key> load_keys(const SelectionArgs& args, std::int64_t batch, std::int64_t head) {
  std::vector<Key> keys;
  std::int64_t present_keys = 0;
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    const auto offset = [&](const std::array<std::int64_t, 3>& stride) {
      return batch * stride[0] + head * stride[1] + j * stride[2];
    };
    const double score = load(args.scores, args.scores_dtype, offset(args.scores_stride));
    const bool present =
        args.key_mask == nullptr || args.key_mask[offset(args.key_mask_stride)] != 0;
    const bool sink = present && present_keys++ < args.rule.sink_tokens;
    const bool eligible = present && !sink && score >= args.rule.score_threshold;
    keys.push_back({score, present, sink, eligible});
  }
  return keys;
}

}  // namespace

std::vector<std::uint8_t> visible_elements(const SelectionArgs& args, std::int64_t batch,
                                           std::int64_t head) {
  const SelectionRule& rule = args.rule;
  const std::vector<Key> keys = load_keys(args, batch, head);
  const std::size_t count = keys.size();
  const std::int64_t window = rule.head_windows == nullptr ? rule.window : rule.head_windows[head];
  const auto beats = [&](std::size_t a, std::size_t b) {
    return keys[a].score > keys[b].score || (keys[a].score == keys[b].score && a > b);
  };
  std::vector<std::uint8_t> visible;
  for (std::int64_t i = 0; i < args.seqlen_q; ++i) {
    const std::int64_t position = i + args.seqlen_k - args.seqlen_q;
    // The position at which the choice is made: `global` chooses once, from the row, and hides the future afterwards.
    const std::int64_t chosen_at =
        rule.selection == Selection::global ? args.seqlen_k - 1 : position;
    const std::int64_t delay = rule.recent_competes ? 0 : rule.recent_window;
    const auto candidate = [&](std::size_t j) {
      const auto age = chosen_at - static_cast<std::int64_t>(j);
      return keys[j].eligible && (!args.causal || age >= delay);
    };
    for (std::size_t j = 0; j < count; ++j) {
      const std::int64_t age = position - static_cast<std::int64_t>(j);
      std::int64_t beaten_by = 0;
      for (std::size_t other = 0; other < count; ++other) {
        if (candidate(other) && beats(other, j)) ++beaten_by;
      }
      const bool recent = args.causal && age < rule.recent_window;
      const bool kept = keys[j].sink || recent || (candidate(j) && beaten_by < window);
      visible.push_back(keys[j].present && kept && (!args.causal || age >= 0));
    }
  }
  return visible;
}

std::vector<KeyInterval> select_key_intervals(const SelectionArgs& args, std::int64_t batch,
                                              std::int64_t head) {
  const std::vector<std::uint8_t> visible = visible_elements(args, batch, head);
  std::vector<KeyInterval> intervals;
  for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
    KeyInterval interval{0, 0};
    for (std::int64_t i = 0; i < args.seqlen_q; ++i) {
      if (visible[static_cast<std::size_t>(i * args.seqlen_k + j)] == 0) continue;
      const auto query = static_cast<std::int32_t>(i);
      if (interval.last == 0) interval = {query, query};
      if (interval.last != query) {
        throw std::logic_error("key " + std::to_string(j) + " is visible to query " +
                               std::to_string(query) + " but not to the one before it");
      }
      ++interval.last;
    }
    intervals.push_back(interval);
  }
  return intervals;
}

}  // namespace flash_dmattn::reference
