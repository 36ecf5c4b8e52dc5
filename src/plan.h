#pragma once

#include <new>
#include <type_traits>

#include "flash_dmattn/plan.h"

// How backends write plans (flash_dmattn/plan.h).
namespace flash_dmattn {

struct KernelSet;  // src/backend.h

namespace detail {

template <class Call, class Plan>
const Call& call_of(const Plan& plan) {
  return *std::launder(reinterpret_cast<const Call*>(plan.call.data()));
}

template <class Call, class Plan, class... Arguments>
const Call& emplace(Plan& plan, const Arguments&... arguments) {
  static_assert(std::is_trivially_copyable_v<Call> && alignof(Call) <= plan_alignment);
  static_assert(sizeof(Call) <= sizeof(plan.call));
  return *new (plan.call.data()) Call(arguments...);
}

}  // namespace detail

// Plans a call as a value of `Call`, which has
//   Call(const Args&, const Context&)                chooses and lays out; the context is an Execution or a device
//   std::size_t bytes                                of the workspace
//   void run(const Args&, const Execution&) const
//   std::string kernel_name() const                  if the call has a main kernel
template <class Call, class Args, class Context>
void make_plan(const Args& args, const Context& context, Plan<Args>& plan) {
  plan.workspace_size = detail::emplace<Call>(plan, args, context).bytes;
  plan.run = [](const Plan<Args>& own, const Args& own_args, const Execution& execution) {
    detail::call_of<Call>(own).run(own_args, execution);
  };
  plan.kernel_name = [](const Plan<Args>& own) {
    if constexpr (requires(const Call& call) { call.kernel_name(); }) {
      return detail::call_of<Call>(own).kernel_name();
    } else {
      return std::string();
    }
  };
}

// Plans a call of a backend whose kernels are for every problem.
template <class Call, class Args>
void plan_with_any_kernels(const KernelSet&, const Args& args, const Execution& execution,
                           Plan<Args>& plan) {
  make_plan<Call>(args, execution, plan);
}

// Plans a schedule as a value of `Call`, which has members size and bytes, the workspace's, and
//   Schedule build(std::span<std::byte> memory, const Execution&) const
template <class Call>
void make_schedule_plan(const Call& call, SchedulePlan& plan) {
  detail::emplace<Call>(plan, call);
  plan.size = call.size;
  plan.workspace_size = call.bytes;
  plan.build = [](const SchedulePlan& own, std::span<std::byte> memory,
                  const Execution& execution) {
    return detail::call_of<Call>(own).build(memory, execution).schedule();
  };
}

// A call that decides nothing: one function sizes its workspace, another runs it.
template <class Args, auto workspace_size, auto function>
struct DirectCall {
  std::size_t bytes;

  DirectCall(const Args& args, const Execution& execution)
      : bytes(workspace_size(args, execution)) {}
  void run(const Args& args, const Execution& execution) const { function(args, execution); }
};

// The workspace size of a DirectCall that needs none.
template <class Args>
std::size_t no_workspace(const Args&, const Execution&) {
  return 0;
}

}  // namespace flash_dmattn
