#include "support/selection_rules.h"

#include <iterator>
#include <limits>

namespace flash_dmattn::testing {

SelectionRule random_rule(const SelectionArgs& shape, std::vector<std::int64_t>& head_windows,
                          Random& random) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr std::int64_t longest = std::numeric_limits<std::int32_t>::max();
  constexpr double thresholds[] = {-infinity, 0.0, -0.5, 0.25, 2.0, 1e30, infinity};
  const std::int64_t keys = shape.seqlen_k;
  const auto length = [&](std::int64_t end) {
    return random.below(16) == 0 ? longest : random.below(end);
  };
  SelectionRule rule;
  rule.window = random.below(keys + 3);
  if (random.below(2) == 0) return rule;
  if (random.below(5) == 0) rule.window = every_key;
  rule.selection = random.below(4) == 0 ? Selection::global : Selection::per_query;
  if (shape.causal && random.below(4) != 0) rule.recent_window = length(keys + 3);
  rule.recent_competes = random.below(2) == 0;
  if (random.below(2) == 0) rule.sink_tokens = length(keys + 2);
  if (random.below(2) == 0) {
    rule.score_threshold =
        thresholds[random.below(static_cast<std::int64_t>(std::size(thresholds)))];
  }
  if (random.below(3) == 0) {
    for (std::int64_t h = 0; h < shape.heads; ++h) head_windows.push_back(random.below(keys + 3));
    rule.head_windows = head_windows.data();
  }
  return rule;
}

std::string text_of(const SelectionArgs& args) {
  const SelectionRule& rule = args.rule;
  return "B " + std::to_string(args.batch) + ", H " + std::to_string(args.heads) + ", Sq " +
         std::to_string(args.seqlen_q) + ", Sk " + std::to_string(args.seqlen_k) + ", causal " +
         std::to_string(args.causal) + ", w " + std::to_string(rule.window) +
         (rule.head_windows != nullptr ? " (by head)" : "") + ", selection " +
         std::to_string(static_cast<int>(rule.selection)) + ", recent " +
         std::to_string(rule.recent_window) + (rule.recent_competes ? "" : " (do not compete)") +
         ", sinks " + std::to_string(rule.sink_tokens) + ", threshold " +
         std::to_string(rule.score_threshold);
}

}  // namespace flash_dmattn::testing
