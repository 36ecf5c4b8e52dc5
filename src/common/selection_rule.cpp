#include "common/selection_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "common/arguments.h"

namespace flash_dmattn {
namespace {

void require_window(std::string_view argument, std::int64_t window) {
  if (window < 0) throw InvalidArgument(argument, std::to_string(window), "at least 0");
}

}  // namespace

void require_selection(const SelectionArgs& args) {
  const SelectionRule& rule = args.rule;
  if (rule.head_windows == nullptr) {
    require_window("window", rule.window);
  } else {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      require_window("head_windows", rule.head_windows[h]);
    }
  }
  if (rule.selection != Selection::per_query && rule.selection != Selection::global) {
    throw InvalidArgument("selection", std::to_string(static_cast<int>(rule.selection)),
                          "per_query or global");
  }
  require_length("recent_window", rule.recent_window);
  if (rule.recent_window > 0 && !args.causal) {
    throw InvalidArgument("recent_window", std::to_string(rule.recent_window),
                          "0 without causality, as no key is recent then");
  }
  require_length("sink_tokens", rule.sink_tokens);
  if (std::isnan(rule.score_threshold)) {
    throw InvalidArgument("score_threshold", "NaN", "a number, or -inf for none");
  }
}

std::int64_t window_of(const SelectionArgs& args, std::int64_t head) {
  const SelectionRule& rule = args.rule;
  return std::min(rule.head_windows == nullptr ? rule.window : rule.head_windows[head],
                  args.seqlen_k);
}

std::int64_t widest_window(const SelectionArgs& args) {
  if (args.rule.head_windows == nullptr) return window_of(args, 0);
  std::int64_t widest = 0;
  for (std::int64_t h = 0; h < args.heads; ++h) widest = std::max(widest, window_of(args, h));
  return widest;
}

float least_score(double threshold) {
  constexpr double largest = std::numeric_limits<float>::max();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  if (std::isinf(threshold) || threshold > largest) return threshold > 0 ? infinity : -infinity;
  const auto nearest = static_cast<float>(std::max(threshold, -largest));
  return double{nearest} < threshold ? std::nextafter(nearest, infinity) : nearest;
}

// A query sees its window, the recent keys and the sinks; each following query one more key. The keys that compete
// later than they are written have been counted as recent ones.
KeyBound key_bound(const SelectionArgs& args) {
  require_length("heads", args.heads);
  require_length("seqlen_k", args.seqlen_k);
  require_selection(args);
  const SelectionRule& rule = args.rule;
  const bool arriving = args.causal && rule.selection == Selection::per_query;
  const bool is_recent = rule.recent_window > 0;
  return {
      .base = std::min(widest_window(args) + rule.recent_window + rule.sink_tokens, args.seqlen_k),
      .per_query = arriving || is_recent ? 1 : 0};
}

}  // namespace flash_dmattn
