#include "backend.h"

#include <stdexcept>

#include "cuda/attention/params.h"
#include "cuda/schedule/schedule.h"
#include "family_table.h"
#include "flash_dmattn/error.h"

// The backend "cuda": finds the family that computes a call, and calls it.
namespace flash_dmattn {
namespace cuda {
namespace {

std::span<const Family* const> capped_families() {
  const std::span<const Family* const> all = family_table;
  const std::string& cap = family_cap();
  if (cap.empty()) return all;
  std::string known;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i]->name == cap) return all.subspan(i);
    known.append(known.empty() ? "" : ", ").append(all[i]->name);
  }
  throw InvalidArgument("FLASH_DMATTN_CUDA_FAMILY", cap, known);
}

// The first kernels that compute a problem, where the first member of every family is tried before the second member of
// any. Null, with the reasons, if no kernels do.
template <class Args>
struct Choice {
  const Kernels<Args>* kernels = nullptr;
  std::string reasons;

  Choice(const Problem& p, std::initializer_list<Kernels<Args> Family::*> seats,
         const DeviceProperties& device) {
    for (const auto seat : seats) {
      for (const Family* family : families()) {
        const Kernels<Args>& candidate = family->*seat;
        if (!candidate) continue;
        std::string reason = family->decline_device(device);
        if (reason.empty()) reason = candidate.decline(p);
        if (reason.empty()) {
          kernels = &candidate;
          return;
        }
        reasons.append(reasons.empty() ? "" : "; ").append(family->name).append(": ");
        reasons.append(reason);
      }
    }
  }
};

Choice<ForwardArgs> choose_forward(const Problem& p, const DeviceProperties& device) {
  return {p, {&Family::few_queries, &Family::forward}, device};
}

Choice<BackwardArgs> choose_backward(const Problem& p, const DeviceProperties& device) {
  return {p, {&Family::backward}, device};
}

// Returns the kernels of a call that the backend is known to support.
template <class Args>
const Kernels<Args>& chosen(const Choice<Args>& choice) {
  if (choice.kernels != nullptr) return *choice.kernels;
  throw std::runtime_error("CUDA: the current device is not the one that the call was made for: " +
                           choice.reasons);
}

const Kernels<ForwardArgs>& kernels_of(const ForwardArgs& args, const DeviceProperties& device) {
  return chosen(choose_forward(args.problem, device));
}

const Kernels<BackwardArgs>& kernels_of(const BackwardArgs& args, const DeviceProperties& device) {
  return chosen(choose_backward(args.problem, device));
}

template <class Args>
std::size_t workspace_size(const Args& args, const Execution&) {
  const DeviceProperties& device = current_device();
  return kernels_of(args, device).workspace_size(args, device);
}

template <class Args>
void run(const Args& args, const Execution& execution) {
  const DeviceProperties& device = current_device();
  kernels_of(args, device).run(args, device, execution);
}

template <class Args>
std::string kernel_name(const Args& args) {
  const DeviceProperties& device = current_device();
  return kernels_of(args, device).name(args, device);
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> result;
  if (!decline_driver().empty()) return result;
  const DeviceProperties& device = current_device();
  const auto append = [&](const auto& kernels) {
    if (!kernels) return;
    for (std::string& name : kernels.names(device)) result.push_back(std::move(name));
  };
  for (const Family* family : families()) {
    if (!family->decline_device(device).empty()) continue;
    append(family->forward);
    append(family->few_queries);
    append(family->backward);
    append(family->decode_step);
  }
  return result;
}

BackendInfo info() {
  const std::span<const Family* const> table = families();
  if (!decline_driver().empty()) return {"cuda", false, decline_driver()};
  std::string reasons;
  for (const Family* family : table) {
    const std::string reason = family->decline_device(current_device());
    if (reason.empty()) return {"cuda", true, device_name()};
    reasons.append(reasons.empty() ? "" : "; ").append(family->name).append(": ").append(reason);
  }
  return {"cuda", false, reasons};
}

std::string supports(const Problem& p) {
  if (p.device != Device::cuda) return decline_other_device(p, "cuda", Device::cuda);
  if (!decline_driver().empty()) return decline_driver();
  const DeviceProperties& device = current_device();
  const Choice<ForwardArgs> forward = choose_forward(p, device);
  if (forward.kernels == nullptr) return "forward: " + forward.reasons;
  const Choice<BackwardArgs> backward = choose_backward(p, device);
  return backward.kernels == nullptr ? "backward: " + backward.reasons : "";
}

// With a key list, every family uses prefixes of the list as tile lists. With intervals, each family has its own form
// of schedule.
ScheduleForm schedule_form(const Problem& p, Direction direction) {
  if (p.key_list_shape[0] != 0) return {ScheduleKind::query_tile_lists, query_tile_rows};
  const DeviceProperties& device = current_device();
  return direction == Direction::forward ? chosen(choose_forward(p, device)).schedule
                                         : chosen(choose_backward(p, device)).schedule;
}

// Calls the body that belongs to a form's kind of schedule.
template <class Lists, class Slots>
auto with_kind(const ScheduleForm& form, const Lists& lists, const Slots& slots) {
  switch (form.kind) {
    case ScheduleKind::query_tile_lists: return lists();
    case ScheduleKind::key_slots:
      return slots(SlotGeometry{.tile_rows = form.tile_rows, .segments = form.segments});
    default: throw std::logic_error("a family of kernels names a schedule that it cannot have");
  }
}

std::size_t schedule_size(const Problem& p, const Visibility& visibility, Direction direction,
                          const Execution&) {
  const ScheduleForm form = schedule_form(p, direction);
  return with_kind(
      form, [&] { return tile_list_schedule_size(p, visibility, direction, form.tile_rows); },
      [&](const SlotGeometry& geometry) { return slot_schedule_size(p, visibility, geometry); });
}

std::size_t schedule_workspace_size(const Problem& p, const Visibility& visibility,
                                    Direction direction, const Execution&) {
  const ScheduleForm form = schedule_form(p, direction);
  return with_kind(
      form,
      [&] { return tile_list_schedule_workspace_size(p, visibility, direction, form.tile_rows); },
      [&](const SlotGeometry& geometry) {
        return slot_schedule_workspace_size(p, visibility, geometry);
      });
}

ScheduleContents build_schedule(const Problem& p, const Visibility& visibility, Direction direction,
                                std::span<std::byte> memory, const Execution& execution) {
  const ScheduleForm form = schedule_form(p, direction);
  ScheduleContents schedule = with_kind(
      form,
      [&] {
        return build_tile_list_schedule(p, visibility, direction, form.tile_rows, memory,
                                        execution);
      },
      [&](const SlotGeometry& geometry) {
        return build_slot_schedule(p, visibility, direction, geometry, memory, execution);
      });
  if (schedule_form(p, Direction::forward) != schedule_form(p, Direction::backward)) {
    schedule.serves_forward = direction == Direction::forward;
    schedule.serves_backward = direction == Direction::backward;
  }
  return schedule;
}

}  // namespace

std::span<const Family* const> families() {
  static const std::span<const Family* const> capped = capped_families();
  return capped;
}

}  // namespace cuda

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = cuda::info,
    .supports = cuda::supports,
    .schedule_size = cuda::schedule_size,
    .schedule_workspace_size = cuda::schedule_workspace_size,
    .build_schedule = cuda::build_schedule,
    .forward_workspace_size = cuda::workspace_size<ForwardArgs>,
    .backward_workspace_size = cuda::workspace_size<BackwardArgs>,
    .forward = cuda::run<ForwardArgs>,
    .backward = cuda::run<BackwardArgs>,
    .forward_kernel = cuda::kernel_name<ForwardArgs>,
    .backward_kernel = cuda::kernel_name<BackwardArgs>,
    .kernels = cuda::kernel_names,
    .needs_schedule = false,
    .kv = &cuda_kv_backend,
};

}  // namespace flash_dmattn
