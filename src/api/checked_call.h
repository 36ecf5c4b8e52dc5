#pragma once

#include <cstddef>
#include <span>

#include "common/arguments.h"
#include "flash_dmattn/calls.h"

// The definition of CheckedCall.
namespace flash_dmattn {

// Each checks arguments, chooses a backend and has it plan the call. Returns the arguments as backends see them.
ForwardArgs plan_call(const ForwardArgs& args, const Execution& execution, std::string_view backend,
                      Plan<ForwardArgs>& plan);
BackwardArgs plan_call(const BackwardArgs& args, const Execution& execution,
                       std::string_view backend, Plan<BackwardArgs>& plan);
SelectionArgs plan_call(const SelectionArgs& args, const Execution& execution,
                        std::string_view backend, Plan<SelectionArgs>& plan);
ScoreProjectionArgs plan_call(const ScoreProjectionArgs& args, const Execution& execution,
                              std::string_view backend, Plan<ScoreProjectionArgs>& plan);
PendingIntervalsArgs plan_call(const PendingIntervalsArgs& args, const Execution& execution,
                               std::string_view backend, Plan<PendingIntervalsArgs>& plan);
CommitArgs plan_call(const CommitArgs& args, const Execution& execution, std::string_view backend,
                     Plan<CommitArgs>& plan);
DecodeStepArgs plan_call(const DecodeStepArgs& args, const Execution& execution,
                         std::string_view backend, Plan<DecodeStepArgs>& plan);

inline std::span<std::byte> workspace_of(const Execution& execution) {
  return {static_cast<std::byte*>(execution.workspace), execution.workspace_bytes};
}

// Returns the execution. Throws InvalidArgument if it has no worker.
inline const Execution& checked_execution(const Execution& execution) {
  require_workers(execution);
  return execution;
}

template <class Args>
CheckedCall<Args>::CheckedCall(const Args& args, const Execution& execution, std::string_view name)
    : execution_(checked_execution(execution)), args_(plan_call(args, execution, name, plan_)) {}

template <class Args>
void CheckedCall<Args>::run(std::span<std::byte> workspace) const {
  plan_.run(plan_, args_, with_workspace(execution_, workspace, plan_.workspace_size));
}

}  // namespace flash_dmattn
