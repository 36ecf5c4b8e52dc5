#include "backend.h"

#include <cstdint>
#include <string>

#include "common/plan_content.h"
#include "cpu/backward_plan.h"
#include "cpu/dispatch.h"
#include "cpu/forward_plan.h"
#include "cpu/kv_cache.h"
#include "cpu/make_task.h"
#include "cpu/score_projection.h"
#include "cpu/selection/selection.h"

// The CPU's row of the table of backends. Like everything except the kernels, it is compiled for the baseline.
namespace flash_dmattn::cpu {
namespace {

std::string decline(const Problem& p) {
  if (p.dtype == DType::f64) return "f64 is computed by the reference backend";
  if (p.heads_kv > 0 && p.heads_q / p.heads_kv > largest_group) {
    return "more than " + std::to_string(largest_group) + " query heads share a kv head";
  }
  return decline_other_device(p, "cpu", Device::cpu);
}

template <class Content, class Args>
PlanFunction<Args> find_plan(const Problem& p, std::string& reason) {
  reason = decline(p);
  if (!reason.empty()) return nullptr;
  chosen_instruction_set();  // throws for a FLASH_DMATTN_MAX_ISA that names none
  return make_plan<Content, Args>;
}

}  // namespace
}  // namespace flash_dmattn::cpu

namespace flash_dmattn {

const Backend cpu_backend = {
    .name = "cpu",
    .device = Device::cpu,
    .info =
        [] {
          return BackendInfo{"cpu", true, std::string(name_of(cpu::chosen_instruction_set().isa))};
        },
    .find_forward = cpu::find_plan<cpu::ForwardPlan, ForwardArgs>,
    .find_backward = cpu::find_plan<cpu::BackwardPlan, BackwardArgs>,
    .find_score_projection = cpu::find_score_projection,
    .kernels =
        [] {
          const cpu::InstructionSet isa = cpu::chosen_instruction_set().isa;
          return std::vector{cpu::kernel_name("forward", isa), cpu::kernel_name("backward", isa)};
        },
    .selection = &cpu::selection_backend,
    .kv = &cpu::kv_backend,
};

}  // namespace flash_dmattn
