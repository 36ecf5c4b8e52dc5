#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "flash_dmattn/attention.h"

// Calls whose arguments are checked and whose backend is chosen once, before the caller allocates memory for
// them. The functions of attention.h and schedule.h do both anew each.
//
//   const ScheduleCall scheduling(problem, visibility, Direction::forward, execution);
//   args.schedule = scheduling.build(allocate(scheduling.size()), allocate(scheduling.workspace_size()));
//   const ForwardCall call(args, execution);
//   call.run(allocate(call.workspace_size()));
namespace flash_dmattn {

struct Backend;

class ScheduleCall {
 public:
  ScheduleCall(const Problem& problem, const Visibility& visibility, Direction direction,
               const Execution& execution, std::string_view backend = {});

  std::size_t size() const;
  std::size_t workspace_size() const noexcept { return workspace_size_; }
  Schedule build(std::span<std::byte> memory, std::span<std::byte> workspace) const;

 private:
  const Backend* backend_;
  Problem problem_;
  Visibility visibility_;
  Direction direction_;
  Execution execution_;
  std::size_t workspace_size_;
};

template <class Args>
class CheckedCall {
 public:
  CheckedCall(const Args& args, const Execution& execution, std::string_view backend = {});

  std::size_t workspace_size() const noexcept { return workspace_size_; }
  // The main kernel that `run` starts, one of kernel_names.
  std::string kernel_name() const;
  void run(std::span<std::byte> workspace) const;

 private:
  const Backend* backend_;
  Args args_;
  Execution execution_;
  std::size_t workspace_size_;
};
using ForwardCall = CheckedCall<ForwardArgs>;
using BackwardCall = CheckedCall<BackwardArgs>;
extern template class CheckedCall<ForwardArgs>;
extern template class CheckedCall<BackwardArgs>;

}  // namespace flash_dmattn
