#include "cpu/backward_plan.h"

#include <cstdint>

#include "common/float_types.h"
#include "common/tasks.h"
#include "common/workspace_allocator.h"
#include "cpu/backward_units.h"
#include "cpu/make_task.h"
#include "cpu/reduce_dbias.h"
#include "flash_dmattn/error.h"

namespace flash_dmattn::cpu {
namespace {

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

// Does nothing if the tensor has no data.
void store_zeros(const Tensor4& tensor, DType dtype, const std::array<std::int64_t, 4>& shape) {
  if (tensor.data == nullptr) return;
  const auto& stride = tensor.stride;
  for (std::int64_t i0 = 0; i0 < shape[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < shape[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < shape[2]; ++i2) {
        for (std::int64_t i3 = 0; i3 < shape[3]; ++i3) {
          const std::int64_t offset =
              i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
          store(tensor.data, dtype, offset, 0);
        }
      }
    }
  }
}

}  // namespace

BackwardPlan::BackwardPlan(const BackwardArgs& args, const Execution& execution)
    : schedule_(args.problem, args.in.visibility, execution) {
  const Problem& p = args.problem;
  if (is_empty(p)) return;
  BackwardTask& t = task_;
  static_cast<Task&>(t) = task_of(p, args.in);
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
  divide_into_units(t);
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
  // These two are written here, so the memory that the schedule is built in must not overlap them.
  slot_begin_ = space.take<std::int64_t>(units_of(t) + 1);
  slot_count_ = space.take<std::int64_t>(units_of(t));
  schedule_.place(space);
  t.tile_lists = schedule_.lists();
  std::int64_t slots = 0;
  for (std::int64_t unit = 0; unit < units_of(t); ++unit) {
    const std::int64_t count = count_slots(t, unit);
    if (base != nullptr) {
      slot_begin_[unit] = slots;
      slot_count_[unit] = count;
    }
    // Without intervals products add to whole blocks of slots, so their number is rounded up.
    slots +=
        t.intervals.data != nullptr ? count : (count + block_keys - 1) / block_keys * block_keys;
  }
  t.slot_begin = slot_begin_;
  t.slot_count = slot_count_;
  slot_keys_ = space.take<std::int32_t>(t.intervals.data == nullptr ? 0 : slots);
  if (t.intervals.data != nullptr) t.slot_keys = slot_keys_;
  t.dk_sums = space.take<float>(slots * t.head_dim_padded);
  t.dv_sums = space.take<float>(slots * t.head_dim_padded);
  t.key_sums = space.take<double>(t.dbias_kind == DbiasKind::per_key ? slots * t.key_sum_heads : 0);
  t.query_sums = space.take<double>(
      t.dbias_kind == DbiasKind::per_query ? t.batch * t.heads_kv * t.group * t.seqlen_q : 0);
  t.dbias_sums = space.take<double>(t.dbias_parts > 1 ? t.dbias_parts * t.slabs * t.slab_sums : 0);
  if (shares_keys(t)) t.packed_keys = space.take<char>(all_key_blocks(t) * t.packed_block_bytes);
  scratch_ = space.take<char>(scratch_bytes_ * workers);
  return space.bytes();
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
  const std::size_t needed = placed.place(execution.workspace, execution.workers);
  placed.schedule_.build(
      execution);  // in front of the slots, whose number follows from the intervals as well
  if (needed > bytes) {
    throw InvalidArgument("visibility.intervals", "keys that more queries see",
                          "intervals as when the call was made");
  }
  const BackwardTask& t = placed.task_;
  const std::int64_t units = units_of(t);
  const auto scratch_of = [&](int worker) { return placed.scratch_ + worker * scratch_bytes_; };
  if (t.packed_keys != nullptr) {
    for_each_task(execution, all_key_blocks(t),
                  [&](std::int64_t item, int) { kernels.pack_backward(t, item); });
  }
  const auto list_unit_keys = [&](std::int64_t unit) {
    list_keys(t, unit, placed.slot_keys_ + placed.slot_begin_[unit]);
  };
  if (t.dbias_kind == DbiasKind::dense_shared) {
    if (t.slot_keys != nullptr)
      for_each_task(execution, units, [&](std::int64_t unit, int) { list_unit_keys(unit); });
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
      if (t.slot_keys != nullptr) list_unit_keys(unit);
      kernels.backward(t, unit, scratch_of(worker));
    });
  }
  if (t.dbias_kind == DbiasKind::per_key || t.dbias_kind == DbiasKind::per_query) {
    reduce_dbias(t, execution);
  }
  for_each_task(execution, all_key_blocks(t),
                [&](std::int64_t item, int) { kernels.reduce(t, item); });
}

}  // namespace flash_dmattn::cpu
