#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/execution.h"
#include "flash_dmattn/selection.h"

namespace flash_dmattn::cuda {

// A selection by a window and a threshold alone, as a call that a plan holds (select.cu). The arguments have been
// validated.
class BestKeys {
 public:
  std::size_t bytes = 0;  // of the workspace

  BestKeys() = default;
  // Whether one call may select for heads with different windows (SelectionRule::head_windows).
  static bool takes_windows(const SelectionArgs& args);
  explicit BestKeys(const SelectionArgs& args, const Execution& = {});
  void run(const SelectionArgs& args, const Execution& execution) const;

 private:
  // The way in which the keys are selected. The selection is global, that is, the same for all queries, without
  // causality, with a single query, or if the window has room for every key. A few queries after more keys than the
  // window are a chunk.
  enum class Method : std::uint8_t { none, global, chunk, per_query };

  Method method_ = Method::none;
  int chunk_blocks_ = 0;  // blocks of the cluster that selects a row of a chunk
};

}  // namespace flash_dmattn::cuda
