#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/schedule.h"
#include "cpu/task.h"
#include "flash_dmattn/attention.h"

namespace flash_dmattn::cpu {

// The plan of a backward, which runs on the workers.
class BackwardPlan {
 public:
  std::size_t bytes = 0;  // of the workspace

  BackwardPlan(const BackwardArgs& args, const Execution& execution);
  void run(const BackwardArgs& args, const Execution& execution) const;
  std::string kernel_name() const { return cpu::kernel_name("backward", candidate_->isa); }

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(void* base, int workers);

  ListSchedule schedule_;
  const Candidate* candidate_ = &chosen_instruction_set();
  BackwardTask task_{};
  std::int64_t* slot_begin_ = nullptr;
  std::int64_t* slot_count_ = nullptr;
  std::int32_t* slot_keys_ = nullptr;
  char* scratch_ = nullptr;
  std::int64_t scratch_bytes_ = 0;
};

}  // namespace flash_dmattn::cpu
