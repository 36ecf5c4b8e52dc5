#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/schedule.h"
#include "cpu/task.h"
#include "flash_dmattn/attention.h"

// The plan of a forward, which runs on the workers. With `slots`, the call has one query, the keys of a (batch, kv head) are
// the occupied slots of a KV cache, and the call also finds the cache's next victim.
namespace flash_dmattn::cpu {

class ForwardPlan {
 public:
  std::size_t bytes = 0;  // of the workspace

  ForwardPlan(const ForwardArgs& args, const Execution& execution, const Slots& slots = {});
  void run(const ForwardArgs& args, const Execution& execution) const;
  std::string kernel_name() const { return cpu::kernel_name("forward", candidate_->isa); }

 private:
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(void* base, int workers);

  ListSchedule schedule_;
  const Candidate* candidate_ = &chosen_instruction_set();
  ForwardTask task_{};
  int* splits_left_ = nullptr;  // few queries: [B, Hkv, tiles], splits not yet computed
  char* scratch_ = nullptr;
  std::int64_t scratch_bytes_ = 0;
};

}  // namespace flash_dmattn::cpu
