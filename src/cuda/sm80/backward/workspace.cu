#include "cuda/sm80/backward/workspace.h"

#include "cuda/attention/problem.h"
#include "cuda/primitives/integers.h"

namespace flash_dmattn::cuda::sm80 {
namespace {

// The number of blocks of the main loop. If additions have a fixed order, each block publishes its progress.
std::int64_t block_count(const Problem& p, const BackwardChoice& choice) {
  if (is_key_major(choice.loop)) return p.batch * p.heads_kv * ceil_div(p.seqlen_k, owned_keys);
  const BackwardPolicy policy = backward_policy(choice.head_dim, choice.shared);
  return p.batch * p.heads_q * ceil_div(p.seqlen_q, policy.rows);
}

std::int64_t dq_accum_floats(const Problem& p, const BackwardChoice& choice) {
  const Shape shape = shape_of(p);
  return choice.head_dim == 64 ? DqAccumLayout<64>::count(shape) * DqAccumLayout<64>::floats
                               : DqAccumLayout<128>::count(shape) * DqAccumLayout<128>::floats;
}

ZeroedArrays take_zeroed(const Problem& p, const BackwardChoice& choice,
                         WorkspaceAllocator& workspace) {
  ZeroedArrays arrays;
  arrays.flags = workspace.take<std::uint32_t>(1);
  if (p.deterministic && choice.ordered) {
    arrays.semaphore.started = workspace.take<int>(1);
    arrays.semaphore.published = workspace.take<int>(block_count(p, choice));
    arrays.semaphore.across_heads = is_dense(p.bias_shape) && p.bias_shape[3] > 1 &&
                                    (p.bias_shape[0] < p.batch || p.bias_shape[1] < p.heads_kv);
  }
  if (is_key_major(choice.loop)) {
    arrays.dq_accum = workspace.take<float>(dq_accum_floats(p, choice));
  } else {
    const std::int64_t floats =
        p.batch * p.heads_kv * p.seqlen_k * accum_columns(static_cast<int>(p.head_dim));
    arrays.dk_accum = workspace.take<float>(floats);
    arrays.dv_accum = workspace.take<float>(floats);
  }
  if (accumulates_dbias(p, choice)) {
    arrays.dbias_accum = workspace.take<float>(elements(dbias_accum_shape(p)));
  }
  return arrays;
}

}  // namespace

BackwardWorkspace::BackwardWorkspace(const Problem& p, const Inputs& in,
                                     const ListSchedule& planned, const BackwardChoice& choice,
                                     void* base)
    : schedule(planned) {
  WorkspaceAllocator workspace(base);
  schedule.place(workspace);
  const bool has_lists = schedule.exists();
  const std::int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  lse_log2 = workspace.take<float>(rows);
  lse_log2_low = workspace.take<float>(rows);
  delta = workspace.take<float>(rows);

  WorkspaceAllocator measure(nullptr);
  take_zeroed(p, choice, measure);
  zeroed_bytes = measure.used();
  zeroed_begin = workspace.take<std::byte>(static_cast<std::int64_t>(zeroed_bytes));
  WorkspaceAllocator zeroed_memory(zeroed_begin);
  zeroed = take_zeroed(p, choice, zeroed_memory);

  if (is_key_major(choice.loop)) {
    packed_mask = allocate_packed_mask(p, has_lists, workspace);
  } else {
    key_ranges = allocate_key_ranges(p, in, has_lists, workspace);
  }
  bytes = workspace.bytes();
}

bool accumulates_dbias(const Problem& p, const BackwardChoice& choice) {
  const BroadcastShape& bias = p.bias_shape;
  if (!has(bias)) return false;
  // A block visits the two heads of a group together, unless different queries see their keys.
  const bool heads_differ =
      has(p.mask_shape) && !is_dense(p.mask_shape) && p.mask_shape[1] == p.heads_q && p.heads_q > 1;
  const bool sums_heads = is_key_major(choice.loop) && sums_dense_dbias(choice.head_dim) &&
                          p.heads_q == 2 * p.heads_kv && !heads_differ;
  const bool own_element = bias[0] == p.batch && bias[2] == p.seqlen_q && bias[3] == p.seqlen_k &&
                           (bias[1] == p.heads_q || (bias[1] == p.heads_kv && sums_heads));
  return !own_element || p.seqlen_q == 1;
}

}  // namespace flash_dmattn::cuda::sm80
