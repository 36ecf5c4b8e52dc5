#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "cpu/dispatch.h"
#include "cpu/forward_plan.h"
#include "cpu/kv_cache.h"
#include "cpu/make_task.h"
#include "cpu/schedule.h"
#include "cpu/selection/selection.h"
#include "cpu/task.h"
#include "flash_dmattn/error.h"
#include "float_types.h"
#include "plan.h"
#include "tasks.h"
#include "workspace_allocator.h"

// The CPU's row of the table of backends, and the backward on the workers: it lays out the workspace and runs items.
// Like everything except the kernels, this file is compiled for the baseline.
namespace flash_dmattn::cpu {

namespace {

std::string decline(const Problem& p) {
  if (p.dtype == DType::f64) return "f64 is computed by the reference backend";
  if (p.heads_kv > 0 && p.heads_q / p.heads_kv > largest_group) {
    return "more than " + std::to_string(largest_group) + " query heads share a kv head";
  }
  if (p.limit_shape != BroadcastShape{})
    return "cpu takes a choice as a mask, not as ranks of keys";
  if (p.key_list_shape != std::array<std::int64_t, 2>{}) {
    return "cpu takes key intervals, not key lists";
  }
  return decline_other_device(p, "cpu", Device::cpu);
}

// ---- Backward ------------------------------------------------------------------------------------

// No single unit can write the gradient of a bias that several heads or batch elements share.
DbiasKind dbias_kind(const Task& t, const Term& dbias) {
  if (dbias.data == nullptr) return DbiasKind::none;
  // A delayed bias is in a part of a row's scores, so sums of rows are not its gradient.
  if (dbias.query == 0 && (dbias.key != 0 || t.bias_delay > 0)) return DbiasKind::per_key;
  if (dbias.key == 0) return DbiasKind::per_query;
  const bool owned = (dbias.batch != 0 || t.batch == 1) &&
                     (dbias.kv_head != 0 || t.heads_kv == 1) &&
                     (dbias.group_head != 0 || t.group == 1);
  return owned ? DbiasKind::dense : DbiasKind::dense_shared;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Enough units for 16 workers. The number does not depend on the actual number of workers, so that results do
// not either.
constexpr std::int64_t target_units = 16;

// Cuts the tiles into ranges of about equal work. Under a causal mask without intervals, the work up to a position
// grows with the square of the position.
void cut_segments(BackwardTask& t, std::int64_t wanted) {
  t.segments = static_cast<int>(
      std::clamp<std::int64_t>(std::min<std::int64_t>(wanted, t.tiles), 1, max_segments));
  const bool grows = t.causal && t.tile_lists.begin == nullptr;
  for (int i = 0; i <= t.segments; ++i) {
    const double share = static_cast<double>(i) / t.segments;
    t.segment_tile[i] = static_cast<std::int64_t>(
        static_cast<double>(t.tiles) * (grows ? std::sqrt(share) : share) + 0.5);
  }
}

// Divides the work of a call with DbiasKind::dense_shared into segments and parts. Each segment has sums of dk and dv, and
// each of several parts has sums of dbias: of the divisions with the most items, up to target_units, the one whose sums
// take the least memory, and of those the one with the fewest parts.
void divide_members(BackwardTask& t) {
  t.slab_heads = t.dbias.kv_head != 0 ? t.heads_kv : 1;
  t.slabs = t.slab_heads * (t.dbias.batch != 0 ? t.batch : 1);
  t.slab_sums = t.seqlen_q * t.dbias_heads * t.seqlen_k;
  const std::int64_t heads = t.batch * t.heads_kv;
  const std::int64_t wanted = ceil_div(target_units, t.slabs);
  const std::int64_t part_bytes = t.slabs * t.slab_sums * std::int64_t{sizeof(double)};
  const std::int64_t segment_bytes =
      heads * t.seqlen_k * t.head_dim_padded * std::int64_t{2 * sizeof(float)};
  std::int64_t most_items = 0, least_bytes = 0, best_segments = 1;
  for (std::int64_t segments = 1; segments <= std::min(wanted, t.tiles); ++segments) {
    const std::int64_t parts = std::min(ceil_div(wanted, segments), heads / t.slabs);
    const std::int64_t items = std::min(segments * parts, wanted);
    const std::int64_t bytes = segments * segment_bytes + (parts > 1 ? parts * part_bytes : 0);
    if (items < most_items || (items == most_items && bytes > least_bytes)) continue;
    most_items = items;
    least_bytes = bytes;
    best_segments = segments;
    t.dbias_parts = static_cast<int>(parts);
  }
  cut_segments(t, best_segments);
}

// Calls take(key) for every key that a query of the unit may see, in ascending order.
template <class Take>
void for_each_key(const BackwardTask& t, std::int64_t unit, const Take& take) {
  const std::int64_t segment = unit / (t.batch * t.heads_kv);
  const std::int64_t begin = t.segment_tile[segment] * t.tile_queries;
  const std::int64_t end = std::min(t.segment_tile[segment + 1] * t.tile_queries, t.seqlen_q);
  const KeyInterval* intervals = t.intervals.data +
                                 unit / t.heads_kv % t.batch * t.intervals.stride_batch +
                                 unit % t.heads_kv * t.intervals.stride_head;
  for (std::int64_t key = 0; key < t.seqlen_k; ++key) {
    std::int64_t first = std::max<std::int64_t>(intervals[key].first, begin);
    if (t.causal) first = std::max(first, key - (t.seqlen_k - t.seqlen_q));
    if (first < std::min<std::int64_t>(intervals[key].last, end)) take(key);
  }
}

std::int64_t unit_slots(const BackwardTask& t, std::int64_t unit) {
  if (t.intervals.data != nullptr) {
    std::int64_t count = 0;
    for_each_key(t, unit, [&](std::int64_t) { ++count; });
    return count;
  }
  if (!t.causal) return t.seqlen_k;
  const std::int64_t segment = unit / (t.batch * t.heads_kv);
  const std::int64_t end = std::min(t.segment_tile[segment + 1] * t.tile_queries, t.seqlen_q);
  return std::clamp<std::int64_t>(end + t.seqlen_k - t.seqlen_q, 0, t.seqlen_k);
}

class BackwardPlan {
 public:
  std::size_t bytes = 0;  // of the workspace

  BackwardPlan(const BackwardArgs& args, const Execution& execution);
  void run(const BackwardArgs& args, const Execution& execution) const;
  std::string kernel_name() const { return cpu::kernel_name("backward", candidate_->isa); }

 private:
  std::int64_t units() const { return task_.segments * task_.batch * task_.heads_kv; }
  // Sets the pointers into the workspace, and returns its size. With a null base it only counts.
  std::size_t place(void* base, int workers);

  const Candidate* candidate_ = &chosen_instruction_set();
  BackwardTask task_{};
  std::int64_t* slot_begin_ = nullptr;
  std::int64_t* slot_count_ = nullptr;
  std::int32_t* slot_keys_ = nullptr;
  char* scratch_ = nullptr;
  std::int64_t scratch_bytes_ = 0;
};

BackwardPlan::BackwardPlan(const BackwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  if (is_empty(p)) return;
  BackwardTask& t = task_;
  static_cast<Task&>(t) = task_of(p, args.in, args.schedule);
  t.out = rows_of(args.out);
  t.dout = rows_of(args.dout);
  t.lse = static_cast<const float*>(args.lse.data);
  t.lse_low = static_cast<const float*>(args.lse_low.data);
  t.dlse = static_cast<const float*>(args.dlse.data);
  t.dq = rows_of(args.dq);
  t.dk = rows_of(args.dk);
  t.dv = rows_of(args.dv);
  t.dbias = term_of(args.dbias, p.bias_dtype, p, p.bias_shape);
  t.dbias_kind = dbias_kind(t, t.dbias);
  t.key_sum_heads = t.dbias.group_head != 0 ? static_cast<int>(t.group) : 1;
  t.dbias_heads = t.key_sum_heads;
  if (t.dbias_kind == DbiasKind::dense_shared) {
    divide_members(t);
  } else {
    cut_segments(t, ceil_div(target_units, t.batch * t.heads_kv));
  }
  static constexpr std::int32_t some_keys = 0;  // scratch depends only on whether slots have keys
  t.slot_keys = t.intervals.data == nullptr ? nullptr : &some_keys;
  const Kernels& kernels = candidate_->kernels_of(args.problem.dtype);
  if (shares_keys(t)) t.packed_block_bytes = kernels.backward_block_bytes(t);
  scratch_bytes_ = kernels.backward_scratch(t);
  bytes = place(nullptr, execution.workers);
}

std::size_t BackwardPlan::place(void* base, int workers) {
  BackwardTask& t = task_;
  WorkspaceAllocator space(base);
  slot_begin_ = space.take<std::int64_t>(units() + 1);
  slot_count_ = space.take<std::int64_t>(units());
  std::int64_t slots = 0;
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    const std::int64_t count = unit_slots(t, unit);
    if (base != nullptr) {
      slot_begin_[unit] = slots;
      slot_count_[unit] = count;
    }
    // Without intervals products add to whole blocks of slots, so their number is rounded up.
    slots += t.intervals.data != nullptr ? count : ceil_div(count, block_keys) * block_keys;
  }
  t.slot_begin = slot_begin_;
  t.slot_count = slot_count_;
  slot_keys_ = space.take<std::int32_t>(t.intervals.data == nullptr ? 0 : slots);
  if (t.intervals.data != nullptr) t.slot_keys = slot_keys_;
  t.dk_sums = space.take<float>(slots * t.head_dim_padded);
  t.dv_sums = space.take<float>(slots * t.head_dim_padded);
  t.slot_forms = space.take<SlotForm>(slots);
  t.key_sums = space.take<double>(t.dbias_kind == DbiasKind::per_key ? slots * t.key_sum_heads : 0);
  t.query_sums = space.take<double>(
      t.dbias_kind == DbiasKind::per_query ? t.batch * t.heads_kv * t.group * t.seqlen_q : 0);
  t.dbias_sums = space.take<double>(t.dbias_parts > 1 ? t.dbias_parts * t.slabs * t.slab_sums : 0);
  if (shares_keys(t)) t.packed_keys = space.take<char>(all_key_blocks(t) * t.packed_block_bytes);
  scratch_ = space.take<char>(scratch_bytes_ * workers);
  return space.used();
}

// ---- The gradient of a bias without a key or without a query dimension -----------------------------

std::int64_t find_slot(const BackwardTask& t, std::int64_t unit, std::int64_t key) {
  const std::int64_t count = t.slot_count[unit];
  if (t.slot_keys == nullptr) return key < count ? key : -1;
  const std::int32_t* begin = t.slot_keys + t.slot_begin[unit];
  const std::int32_t* found =
      std::lower_bound(begin, begin + count, static_cast<std::int32_t>(key));
  return found != begin + count && *found == key ? found - begin : -1;
}

double sum_of_key(const BackwardTask& t, std::int64_t b, std::int64_t h, std::int64_t g,
                  std::int64_t key) {
  double sum = 0;
  for (int segment = 0; segment < t.segments; ++segment) {
    const std::int64_t unit = (segment * t.batch + b) * t.heads_kv + h;
    const std::int64_t slot = find_slot(t, unit, key);
    if (slot < 0) continue;
    sum += t.key_sums[t.slot_begin[unit] * t.key_sum_heads + g * t.slot_count[unit] + slot];
  }
  return sum;
}

double sum_of_query(const BackwardTask& t, std::int64_t b, std::int64_t h, std::int64_t g,
                    std::int64_t i) {
  return t.query_sums[((b * t.heads_kv + h) * t.group + g) * t.seqlen_q + i];
}

void store_dbias(const BackwardTask& t, std::int64_t at, double value) {
  if (t.saturate) {
    const double limit = t.dbias.dtype == DType::bf16  ? 0x1.fep126
                         : t.dbias.dtype == DType::f16 ? 65504.0
                                                       : 0x1.fffffep127;
    value = value < limit ? std::max(value, -limit) : limit;
  }
  store(t.dbias.data, t.dbias.dtype, at, value);
}

// Sums over the broadcast dimensions of the bias, one element of dbias at a time.
void reduce_dbias(const BackwardTask& t, const Execution& execution) {
  const bool per_key = t.dbias_kind == DbiasKind::per_key;
  const Term& d = t.dbias;
  const std::int64_t batches = d.batch != 0 ? t.batch : 1;
  const std::int64_t heads = d.kv_head != 0 ? t.heads_kv : 1;
  const std::int64_t members = d.group_head != 0 ? t.group : 1;
  const std::int64_t stride = per_key ? d.key : d.query;
  const std::int64_t length = per_key ? t.seqlen_k : t.seqlen_q;
  const std::int64_t elements = stride != 0 ? length : 1;
  // If the bias has no such dimension, all elements of a row form one sum.
  constexpr std::int64_t chunk = 1024;
  const std::int64_t chunks = ceil_div(elements, chunk);
  for_each_task(execution, batches * heads * members * chunks, [&](std::int64_t item, int) {
    const std::int64_t own_g = item / chunks % members;
    const std::int64_t own_h = item / chunks / members % heads;
    const std::int64_t own_b = item / chunks / members / heads;
    const std::int64_t begin = item % chunks * chunk;
    for (std::int64_t e = begin; e < std::min(begin + chunk, elements); ++e) {
      double sum = 0;
      for (std::int64_t b = own_b; b < t.batch; b += batches) {
        for (std::int64_t h = own_h; h < t.heads_kv; h += heads) {
          if (per_key) {
            for (std::int64_t g = own_g; g < t.key_sum_heads; g += members) {
              for (std::int64_t j = e; j < length; j += elements) sum += sum_of_key(t, b, h, g, j);
            }
            continue;
          }
          for (std::int64_t g = own_g; g < t.group; g += members) {
            for (std::int64_t i = e; i < length; i += elements) sum += sum_of_query(t, b, h, g, i);
          }
        }
      }
      store_dbias(t, own_b * d.batch + own_h * d.kv_head + own_g * d.group_head + e * stride, sum);
    }
  });
}

// Calls body(place, offset) for each element in row-major order, until it returns false.
template <class Body>
void for_each_element(const std::array<std::int64_t, 4>& shape,
                      const std::array<std::int64_t, 4>& stride, const Body& body) {
  std::int64_t place = 0;
  for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
        for (std::int64_t i3 = 0; i3 < shape[3]; ++i3) {
          const std::int64_t offset =
              i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
          if (!body(place++, offset)) return;
        }
      }
    }
  }
}

void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape) {
  if (tensor.data == nullptr) return;
  for_each_element(shape, tensor.stride, [&](std::int64_t, std::int64_t offset) {
    store(tensor.data, dtype, offset, 0);
    return true;
  });
}

NonFiniteElement first_nonfinite(const ConstTensor4& tensor,
                                 const std::array<std::int64_t, 4>& shape, DType dtype,
                                 bool minus_inf, const Execution&) {
  NonFiniteElement found;
  for_each_element(shape, tensor.stride, [&](std::int64_t place, std::int64_t offset) {
    const double value = load(tensor.data, dtype, offset);
    if (std::isfinite(value) || (minus_inf && value < 0)) return true;  // a NaN is not below 0
    found = {place, value};
    return false;
  });
  return found;
}

void BackwardPlan::run(const BackwardArgs& args, const Execution& execution) const {
  if (const Problem& p = args.problem; is_empty(p)) {
    store_zeros(args.dk, p.dtype, {p.batch, p.seqlen_k, p.heads_kv, p.head_dim});
    store_zeros(args.dv, p.dtype, {p.batch, p.seqlen_k, p.heads_kv, value_dim_of(p)});
    store_zeros(args.dbias, p.bias_dtype, p.bias_shape);
    return;
  }
  const Kernels& kernels = candidate_->kernels_of(args.problem.dtype);
  BackwardPlan placed = *this;
  placed.place(execution.workspace, execution.workers);
  const BackwardTask& t = placed.task_;
  const std::int64_t units = this->units();
  const auto scratch_of = [&](int worker) { return placed.scratch_ + worker * scratch_bytes_; };
  if (t.packed_keys != nullptr) {
    for_each_task(execution, all_key_blocks(t),
                  [&](std::int64_t item, int) { kernels.pack_backward(t, item); });
  }
  const auto list_keys = [&](std::int64_t unit) {
    std::int32_t* to = placed.slot_keys_ + placed.slot_begin_[unit];
    for_each_key(t, unit, [&](std::int64_t key) { *to++ = static_cast<std::int32_t>(key); });
  };
  if (t.dbias_kind == DbiasKind::dense_shared) {
    if (t.slot_keys != nullptr)
      for_each_task(execution, units, [&](std::int64_t unit, int) { list_keys(unit); });
    const std::int64_t items = t.segments * t.slabs * t.dbias_parts;
    for_each_task(execution, items, [&](std::int64_t item, int worker) {
      kernels.shared_dbias(t, items - 1 - item, scratch_of(worker));
    });
    if (t.dbias_parts > 1) {
      for_each_task(execution, t.slabs * t.tiles, [&](std::int64_t item, int) {
        kernels.add_dbias_parts(t, item / t.slabs, item % t.slabs);
      });
    }
  } else {
    for_each_task(execution, units, [&](std::int64_t item, int worker) {
      // The last units take longest under a causal mask.
      const std::int64_t unit = units - 1 - item;
      if (t.slot_keys != nullptr) list_keys(unit);
      kernels.backward(t, unit, scratch_of(worker));
    });
  }
  if (t.dbias_kind == DbiasKind::per_key || t.dbias_kind == DbiasKind::per_query) {
    reduce_dbias(t, execution);
  }
  for_each_task(execution, all_key_blocks(t),
                [&](std::int64_t item, int) { kernels.reduce(t, item); });
}

// One set of kernels for every problem, of the chosen instruction set.
const KernelSet* find_kernels(const Problem& p, Direction, std::string& reason) {
  reason = decline(p);
  return reason.empty() ? kernel_set() : nullptr;
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
    .find_kernels = cpu::find_kernels,
    .plan_schedule = [](const KernelSet&, const Problem& p, const Visibility& visibility, Direction,
                        const Execution& execution,
                        SchedulePlan& plan) { cpu::plan_schedule(p, visibility, execution, plan); },
    .plan_forward = plan_with_any_kernels<cpu::ForwardPlan>,
    .plan_backward = plan_with_any_kernels<cpu::BackwardPlan>,
    .kernels =
        [] {
          const cpu::InstructionSet isa = cpu::chosen_instruction_set().isa;
          return std::vector{cpu::kernel_name("forward", isa), cpu::kernel_name("backward", isa)};
        },
    .needs_schedule = true,
    .selection = &cpu::selection_backend,
    .kv = &cpu::kv_backend,
    .first_nonfinite = cpu::first_nonfinite,
};

}  // namespace flash_dmattn
