#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/kv_cache.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/scores.h"
#include "flash_dmattn/selection.h"

// A call checks its arguments and decides backend, kernel and memory once, before the caller allocates:
// `workspace_size`, `kernel_name` and `run` read one plan. Calls can be copied, and run more than once.
// On a GPU a call is for the device that was current when it was made: on another one it throws std::runtime_error.
//
//   const ForwardCall call(args, execution);
//   call.run(allocate(call.workspace_size()));
//
// On a CPU a forward or backward reads the intervals when it is made, with the Execution's workers, and is for the
// intervals as they were then: make it after whatever writes them has run.
//
// `forward`, `backward`, `select_key_intervals` and `project_scores` construct such a call.
namespace flash_dmattn {

template <class Args>
class CheckedCall {
 public:
  CheckedCall(const Args& args, const Execution& execution, std::string_view backend = {});

  std::size_t workspace_size() const noexcept { return plan_.workspace_size; }
  // The main kernel that `run` starts, one of kernel_names; "" for calls that have none.
  std::string kernel_name() const { return plan_.kernel_name(plan_); }
  void run(std::span<std::byte> workspace) const;

 private:
  Execution execution_;
  Plan<Args> plan_;
  Args args_;
};
using ForwardCall = CheckedCall<ForwardArgs>;
using BackwardCall = CheckedCall<BackwardArgs>;
// A selection runs on the device of its data, so `backend` must be empty.
using SelectCall = CheckedCall<SelectionArgs>;
using ScoreProjectionCall = CheckedCall<ScoreProjectionArgs>;
using PendingIntervalsCall = CheckedCall<PendingIntervalsArgs>;
using CommitCall = CheckedCall<CommitArgs>;
using DecodeStepCall = CheckedCall<DecodeStepArgs>;
extern template class CheckedCall<ForwardArgs>;
extern template class CheckedCall<BackwardArgs>;
extern template class CheckedCall<SelectionArgs>;
extern template class CheckedCall<ScoreProjectionArgs>;
extern template class CheckedCall<PendingIntervalsArgs>;
extern template class CheckedCall<CommitArgs>;
extern template class CheckedCall<DecodeStepArgs>;

}  // namespace flash_dmattn
