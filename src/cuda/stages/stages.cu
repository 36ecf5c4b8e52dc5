#include "cuda/stages/stages.h"

#include "cuda/attention/bias_gradient.cuh"
#include "cuda/attention/problem.h"
#include "cuda/primitives/integers.h"
#include "cuda/primitives/launch.h"
#include "cuda/stages/dq_fixup.cuh"
#include "cuda/stages/key_ranges.cuh"
#include "cuda/stages/mask_states.cuh"
#include "cuda/stages/nonfinite_rows.cuh"
#include "cuda/stages/packed_mask.cuh"
#include "cuda/stages/preprocess.cuh"

namespace flash_dmattn::cuda {
namespace {

// Calls body.template operator()<T>() for the dtype of a problem.
template <class Body>
void with_dtype(DType dtype, const Body& body) {
  dtype == DType::bf16 ? body.template operator()<__nv_bfloat16>()
                       : body.template operator()<__half>();
}

template <class Kernel, class... Sizes>
void launch_for(const typename Kernel::Params& params, cudaStream_t stream, Sizes... sizes) {
  launch<Kernel>(Kernel::blocks(params, sizes...), params, stream);
}

KeyRangesParams key_range_params(const Problem& p, const Inputs& in,
                                 const KeyRangeWorkspace& workspace) {
  return {.intervals = in.visibility.intervals,
          .heads = static_cast<int>(p.intervals_shape[1]),
          .seqlen_q = static_cast<int>(p.seqlen_q),
          .seqlen_k = static_cast<int>(p.seqlen_k),
          .causal = p.causal,
          .blocks = workspace.blocks,
          .groups = workspace.groups,
          .key_ranges = workspace.ranges};
}

}  // namespace

ForwardParams params_of(const ForwardArgs& args) {
  ForwardParams params;
  params.shape = shape_of(args.problem);
  params.score = score_of(args.problem, args.in);
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.lse = static_cast<float*>(args.lse.data);
  params.lse_low = static_cast<float*>(args.lse_low.data);
  params.saturate = args.problem.nonfinite == NonFinite::saturate;
  return params;
}

BackwardParams params_of(const BackwardArgs& args) {
  BackwardParams params;
  params.shape = shape_of(args.problem);
  params.score = score_of(args.problem, args.in);
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.dout = rows_of(args.dout);
  params.dq = rows_of(args.dq);
  params.dk = rows_of(args.dk);
  params.dv = rows_of(args.dv);
  params.lse = static_cast<const float*>(args.lse.data);
  params.lse_low = static_cast<const float*>(args.lse_low.data);
  params.dlse = static_cast<const float*>(args.dlse.data);
  params.saturate = args.problem.nonfinite == NonFinite::saturate;
  return params;
}

// ---- Packed mask ----------------------------------------------------------------------------------------

PackedMask allocate_mask_states(const Problem& p, WorkspaceAllocator& workspace) {
  PackedMask packed;
  const std::int64_t batch = p.mask_shape[0], heads = p.mask_shape[1];
  const std::int64_t words = ceil_div(p.seqlen_k, PackedMask::side);
  const std::int64_t row_tiles = ceil_div(p.seqlen_q, PackedMask::side);
  packed.states = workspace.take<std::uint8_t>(batch * heads * row_tiles * words);
  packed.words = static_cast<int>(words);
  packed.batch = batch > 1 ? static_cast<int>(heads) : 0;
  if (heads > 1) (heads == p.heads_q ? packed.head_q : packed.head_kv) = 1;
  return packed;
}

PackedMask allocate_packed_mask(const Problem& p, bool has_lists, WorkspaceAllocator& workspace) {
  if (has_lists || !is_dense(p.mask_shape)) return {};
  PackedMask packed = allocate_mask_states(p, workspace);
  const std::int64_t batch = p.mask_shape[0], heads = p.mask_shape[1];
  const std::int64_t rows = ceil_div(p.seqlen_q, PackedMask::side) * PackedMask::side;
  packed.bits = workspace.take<std::uint64_t>(batch * heads * rows * packed.words);
  return packed;
}

PackMaskParams pack_mask_params(const Problem& p, const ScoreParams& score) {
  const std::int64_t batch = p.mask_shape[0], heads = p.mask_shape[1];
  PackMaskParams params;
  params.mask = score.mask;
  params.packed = score.packed_mask;
  params.matrices = static_cast<int>(batch * heads);
  params.heads = static_cast<int>(heads);
  params.group = heads == p.heads_q ? static_cast<int>(p.heads_q / p.heads_kv) : 1;
  params.rows = static_cast<int>(p.seqlen_q);
  params.keys = static_cast<int>(p.seqlen_k);
  params.aligned = score.mask.aligned_16B;
  params.causal = p.causal;
  params.shift = static_cast<int>(p.seqlen_k - p.seqlen_q);
  return params;
}

void pack_mask(const Problem& p, const ScoreParams& score, cudaStream_t stream) {
  if (score.packed_mask.states == nullptr || p.batch * p.heads_q == 0) return;
  const PackMaskParams params = pack_mask_params(p, score);
  if (score.packed_mask.bits == nullptr) {
    const FindMaskStates find{params};
    return for_each(find.items(), find, stream);
  }
  launch_for<PackMaskKernel>(params, stream);
}

// ---- Key ranges -----------------------------------------------------------------------------------------

// In most kernels this many keys fit in one tile, which is visited and tested in any case. Where tiles are smaller,
// ranges would skip only a few tiles, at the cost of two more launches.
constexpr std::int64_t few_keys = 2 * KeyRange::keys;

KeyRangeWorkspace allocate_key_ranges(const Problem& p, const Inputs& in, bool has_lists,
                                      WorkspaceAllocator& workspace) {
  if (in.visibility.intervals.data == nullptr || has_lists) return {};
  if (p.seqlen_k <= few_keys) return {};
  const std::int64_t rows = p.intervals_shape[0] * p.intervals_shape[1];
  const KeyRangesParams sizes = key_range_params(p, in, {});
  KeyRangeWorkspace result;
  result.blocks = workspace.take<KeyBlockQueries>(rows * sizes.key_blocks());
  if (sizes.key_blocks() > KeyRangesParams::few_blocks)
    result.groups = workspace.take<int2>(rows * sizes.key_groups());
  result.ranges = workspace.take<KeyRange>(rows * sizes.query_tiles());
  return result;
}

KeyRanges find_key_ranges(const Problem& p, const Inputs& in, const KeyRangeWorkspace& workspace,
                          cudaStream_t stream) {
  if (workspace.ranges == nullptr) return {};
  const KeyRangesParams params = key_range_params(p, in, workspace);
  const auto [batch, heads] = p.intervals_shape;
  launch_for<BoundKeyBlocksKernel>(params, stream, batch * heads);
  if (params.groups != nullptr) launch_for<BoundKeyGroupsKernel>(params, stream, batch * heads);
  launch_for<FindKeyRangesKernel>(params, stream, batch * heads);
  return {.data = params.key_ranges,
          .batch = batch > 1 ? static_cast<int>(heads) * params.query_tiles() : 0,
          .head = heads > 1 ? params.query_tiles() : 0};
}

// ---- Backward -------------------------------------------------------------------------------------------

void preprocess_backward(const BackwardParams& params, DType dtype, cudaStream_t stream) {
  with_dtype(dtype, [&]<class T>() { launch_for<BwdPreprocessKernel<T>>(params, stream); });
}

void fix_gradients(const BackwardParams& params, DType dtype, cudaStream_t stream) {
  with_dtype(dtype, [&]<class T>() {
    if (params.dq.data != nullptr) launch_for<DqFixupKernel<T>>(params, stream);
    if (!params.saturate) launch_for<NonFiniteRowsKernel<T>>(params, stream);
  });
}

BroadcastShape dbias_accum_shape(const Problem& p) {
  const BroadcastShape& bias = p.bias_shape;
  if (bias[2] <= 1) {
    return {p.batch, bias[1] == p.heads_q ? p.heads_q : p.heads_kv, 1, p.seqlen_k};
  }
  if (bias[3] <= 1) return {p.batch, p.heads_q, p.seqlen_q, 1};
  return bias;
}

OutputBroadcast dbias_sums(const Problem& p, float* sums) {
  const BroadcastShape shape = dbias_accum_shape(p);
  return broadcast_of<void>(p, shape, sums, contiguous_strides(shape), 4);
}

void store_dbias(const BackwardArgs& args, const float* sums, cudaStream_t stream) {
  const Problem& p = args.problem;
  with_dtype(p.dtype, [&]<class T>() {
    BwdPostprocessBias<T> store;
    for (std::size_t i = 0; i < 4; ++i) {
      store.shape[i] = p.bias_shape[i];
      store.stride[i] = args.dbias.stride[i];
    }
    store.to = static_cast<std::byte*>(args.dbias.data);
    store.sums = sums;
    store.f32 = p.bias_dtype == DType::f32;
    store.saturate = p.nonfinite == NonFinite::saturate;
    if (store.items() == 0) return;
    const BroadcastShape accum_shape = dbias_accum_shape(p);
    if (sums == nullptr || accum_shape == p.bias_shape) {
      for_each(store.items(), store, stream);
      return;
    }
    BwdPostprocessSummedBias<T> summed{.whole = store, .parts = {}};
    for (std::size_t i = 0; i < 4; ++i) summed.parts[i] = accum_shape[i] / p.bias_shape[i];
    for_each(summed.items(), summed, stream);
  });
}

}  // namespace flash_dmattn::cuda
