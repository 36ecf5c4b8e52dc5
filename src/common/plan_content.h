#pragma once

#include <new>
#include <type_traits>

#include "flash_dmattn/plan.h"

// Puts a class of a backend into a plan (flash_dmattn/plan.h).
namespace flash_dmattn {

namespace detail {

template <class Content, class Plan>
const Content& content_of(const Plan& plan) {
  return *std::launder(reinterpret_cast<const Content*>(plan.content.data()));
}

template <class Content, class Plan, class... Arguments>
const Content& emplace(Plan& plan, const Arguments&... arguments) {
  static_assert(std::is_trivially_copyable_v<Content> && alignof(Content) <= plan_alignment);
  static_assert(sizeof(Content) <= sizeof(plan.content));
  return *new (plan.content.data()) Content(arguments...);
}

}  // namespace detail

// Makes a plan whose content is a value of `Content`, a class of the backend, which has
//   Content(const Args&, const Execution&)           chooses and lays out
//   std::size_t bytes                                of the workspace
//   void run(const Args&, const Execution&) const
//   std::string kernel_name() const                  if the plan has a main kernel
template <class Content, class Args>
void make_plan(const Args& args, const Execution& execution, Plan<Args>& plan) {
  plan.workspace_size = detail::emplace<Content>(plan, args, execution).bytes;
  plan.run = [](const Plan<Args>& own, const Args& own_args, const Execution& own_execution) {
    detail::content_of<Content>(own).run(own_args, own_execution);
  };
  plan.kernel_name = [](const Plan<Args>& own) {
    if constexpr (requires(const Content& content) { content.kernel_name(); }) {
      return detail::content_of<Content>(own).kernel_name();
    } else {
      return std::string();
    }
  };
}

// A plan that decides nothing: one function sizes its workspace, another runs it.
template <class Args, auto workspace_size, auto function>
struct DirectPlan {
  std::size_t bytes;

  DirectPlan(const Args& args, const Execution& execution)
      : bytes(workspace_size(args, execution)) {}
  void run(const Args& args, const Execution& execution) const { function(args, execution); }
};

// The workspace size of a DirectPlan that needs none.
template <class Args>
std::size_t no_workspace(const Args&, const Execution&) {
  return 0;
}

}  // namespace flash_dmattn
