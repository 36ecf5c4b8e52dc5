#include <string_view>

#include "cuda/attention/problem.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/launch.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/backward/plan.h"
#include "cuda/sm90/compiled.h"
#include "cuda/sm90/dense/rows.h"
#include "cuda/sm90/kernel_choice.h"
#include "cuda/stages/stages.h"

// Computes a backward, from its arguments to its launches.
namespace flash_dmattn::cuda::sm90 {
namespace {

std::string_view name_of(const BackwardVariant& variant) {
  if (variant.dense != DenseAccess::none) return sm90::name_of(variant.dense);
  switch (variant.placement) {
    case KeyPlacement::block: return "block";
    case KeyPlacement::block_key_info:
      return variant.delays ? "block_key_info_delayed" : "block_key_info";
    case KeyPlacement::slots: return variant.delays ? "slots_delayed" : "slots";
  }
  return "";
}

BackwardVariant choose_variant(const BackwardArgs& args, bool has_slots) {
  const Problem& p = args.problem;
  if (is_dense(p.mask_shape) || is_dense(p.bias_shape)) {
    const ScoreParams score = score_of(p, args.in);
    const bool tiles = !score.bias.dense || DenseRows(shape_of(p), score.bias).has_tensor_map();
    return {KeyPlacement::block_key_info, tiles ? DenseAccess::tiles : DenseAccess::elements};
  }
  const bool has_intervals = args.in.visibility.intervals.data != nullptr;
  // The heads of a group visit a slot together, so they must not differ.
  const auto differs_in_group = [&](const BroadcastShape& shape) {
    return shape[1] == p.heads_q && p.heads_q != p.heads_kv && shape[1] > 1;
  };
  if (has_slots && !differs_in_group(p.mask_shape) && !differs_in_group(p.bias_shape)) {
    return {.placement = KeyPlacement::slots, .delays = p.bias_delay != 0};
  }
  const bool has_info = has_intervals || has(p.mask_shape) || has(p.bias_shape);
  return {.placement = has_info ? KeyPlacement::block_key_info : KeyPlacement::block,
          .delays = p.bias_delay != 0};
}

}  // namespace

BackwardChoice choose_backward(const BackwardArgs& args, bool has_slots) {
  const Problem& p = args.problem;
  const BackwardVariant variant = choose_variant(args, has_slots);
  const int head_dim = head_dim_bucket(static_cast<int>(p.head_dim), variant);
  const int smallest = smallest_value_dim(head_dim);
  return {p.dtype, head_dim, value_dim_of(p) <= smallest ? smallest : head_dim,
          with_overlap(variant, overlaps(p.dtype, head_dim))};
}

std::string name(const BackwardChoice& choice) {
  return kernel_name("backward", choice.dtype, choice.head_dim, choice.value_dim,
                     name_of(choice.variant), choice.variant.overlaps);
}

std::string decline_backward(const Problem& p) {
  if (std::string reason = decline_shape(p); !reason.empty()) return reason;
  if (p.head_dim > 128 && (is_dense(p.mask_shape) || is_dense(p.bias_shape)))
    return "it has no backward for a mask or a bias with a query dimension and a head_dim above "
           "128";
  if (p.softcap > 0) return "it has no backward for a softcap";
  if (has(p.limit_shape)) return "it has no kernels for ranks";
  if (p.bias_delay != 0 && (p.head_dim > 128 || is_dense(p.mask_shape))) {
    return "it has no backward for a delayed bias under a dense mask or with a head_dim above 128";
  }
  if (p.batch * p.heads_q * p.seqlen_q * p.seqlen_k == 0) {
    return "it needs at least one query and one key";
  }
  if (is_dense(p.bias_shape) && p.bias_dtype != p.dtype) {
    return "it makes the gradient of a dense bias from dS in 16 bits";
  }
  if (p.deterministic && is_dense(p.bias_shape) && !is_dbias_of_one_block(p)) {
    return "it has no order for the gradient of a dense bias that key heads, batch elements or "
           "keys share";
  }
  return "";
}

void BackwardPlan::run(const BackwardArgs& args, const Execution& execution) const {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  BackwardPlan placed = *this;
  placed.place(args, execution.workspace);
  const BackwardParams& p = placed.common;
  if (variant().has_slots()) placed.schedule.build(execution);
  const Problem& problem = args.problem;
  const DType dtype = problem.dtype;
  const bool stores_dbias = p.dbias.data != nullptr && placed.has_dbias_sums();
  check(cudaMemsetAsync(placed.zeroed, 0, placed.zeroed_bytes, stream), "cudaMemsetAsync");
  for (const Source* source : {&placed.q, &placed.k, &placed.v, &placed.dout}) source->make(stream);
  dispatch_bucket(dtype, placed.choice.head_dim, [&]<class T, int D>() {
    using Preprocess = PreprocessKernel<T>;
    const typename Preprocess::Params params = placed.preprocess_params<T>();
    if (p.score.packed_mask.states != nullptr) {
      using Kernel = PackAndPreprocessKernel<T>;
      const typename Kernel::Params both{pack_mask_params(problem, p.score), params};
      launch<Kernel>(Kernel::blocks(both), both, stream);
    } else {
      launch<Preprocess>(Preprocess::blocks(params), params, stream);
    }
    launch_backward<T, D>(placed.choice, placed.params, stream);
  });
  placed.dk.store(p.shape, stream);
  placed.dv.store(p.shape, stream);
  fix_or_recompute_gradients(p, dtype, stream);
  if (stores_dbias) store_dbias(args, placed.dbias_sums, stream);
}

std::vector<std::string> backward_names(const DeviceProperties&) {
  std::vector<std::string> names;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int head_dim : head_dims) {
      for (const BackwardVariant& variant : backward_variants) {
        if (!has_kernel(head_dim, variant)) continue;
        const BackwardVariant chosen = with_overlap(variant, overlaps(dtype, head_dim));
        names.push_back(name({dtype, head_dim, head_dim, chosen}));
        const int value_dim = smallest_value_dim(head_dim);
        if (value_dim != head_dim) names.push_back(name({dtype, head_dim, value_dim, chosen}));
      }
    }
  }
  return names;
}

}  // namespace flash_dmattn::cuda::sm90
