#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/selection/best_keys.h"
#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"

namespace flash_dmattn::cuda {

// Whether a rule shows keys that were not chosen (recent keys and sinks), or has a window for each head.
inline bool widens(const SelectionRule& rule) {
  return rule.recent_window > 0 || rule.sink_tokens > 0 || rule.head_windows != nullptr;
}

// A selection by such a rule, as a call that a plan holds. The keys that compete are a selection of their own; a last
// pass over its intervals adds the others. The arguments have been validated.
//
// With a delay of W, the query at position t selects among the keys up to t - W. That is a selection over a row that is
// W keys shorter, with the queries at its end. The sinks of a row
// without a mask are its first keys, and the row of the others begins after them.
class WidenedSelection {
 public:
  std::size_t bytes = 0;  // of the workspace

  WidenedSelection(const SelectionArgs& args, const Execution&);
  void run(const SelectionArgs& args, const Execution& execution) const;

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(const SelectionArgs& args, void* base);
  void launch_all(const SelectionArgs& args, const Execution& execution) const;
  void select_competing(const SelectionArgs& args, const Execution& execution) const;
  SelectionArgs competing_of_head(const SelectionArgs& args, std::int64_t head) const;

  SelectionArgs competing_;  // of all heads
  bool by_head_ = false;     // heads with windows of their own are selected one after the other
  BestKeys best_;            // of `competing_` otherwise
  std::int64_t begin_ = 0;   // the first key that competes
  std::int32_t* sink_ends_ = nullptr;
  std::uint8_t* competes_ = nullptr;
  KeyInterval* chosen_ = nullptr;
  char* step_ = nullptr;  // the workspace of the selection among the keys that compete
  std::size_t step_bytes_ = 0;
};

}  // namespace flash_dmattn::cuda
