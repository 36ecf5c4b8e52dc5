#include "backend.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "cuda/common/bias_gradient.cuh"
#include "cuda/common/dq_fixup.cuh"
#include "cuda/common/key_runs.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/nonfinite_rows.cuh"
#include "cuda/common/packed_mask.cuh"
#include "cuda/common/preprocess.cuh"
#include "cuda/selection/schedule.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/postprocess.cuh"
#include "cuda/workspace.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

// ---- Device -------------------------------------------------------------------------------------

int attribute(cudaDeviceAttr which) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// Why the current device cannot be used; "" = it can. Asked before every call, so nothing slow.
std::string decline_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();  // leave no error behind for the caller's own calls
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver";
    return std::string("no CUDA device: ") + cudaGetErrorString(error);
  }
  if (count == 0) return "no CUDA device";
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  if (major >= 8) return "";
  return "the GPU's compute capability, " + std::to_string(major) + ".x, is older than 8.0";
}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return std::string(properties.name) + ", compute capability " + std::to_string(properties.major) +
         "." + std::to_string(properties.minor);
}

// FLASH_DMATTN_MAX_SHARED_KB caps what a device offers, so that all policies can be run on one
// device.
SharedClass shared_class() {
  int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (const char* cap = std::getenv("FLASH_DMATTN_MAX_SHARED_KB"); cap != nullptr) {
    bytes = std::min(bytes, std::atoi(cap) * 1024);
  }
  return bytes >= 163 * 1024 ? SharedClass::kb163 : SharedClass::kb99;
}

// ---- Kernels of a problem -----------------------------------------------------------------------

// Calls body.template operator()<T, D>() for the dtype and the head-dim bucket of a problem.
template <class Body>
void dispatch(const Problem& p, const Body& body) {
  const auto with_dtype = [&]<class T>() {
    switch (head_dim_bucket(static_cast<int>(p.head_dim))) {
      case 64: return body.template operator()<T, 64>();
      case 128: return body.template operator()<T, 128>();
      default: return body.template operator()<T, 256>();
    }
  };
  if (p.dtype == DType::bf16) {
    with_dtype.template operator()<__nv_bfloat16>();
  } else {
    with_dtype.template operator()<__half>();
  }
}

KeyRuns find_key_runs(const Problem& p, const Inputs& in, const KeyRunsWorkspace& workspace,
                      cudaStream_t stream) {
  if (workspace.runs == nullptr) return {};
  const KeyRunsParams params = workspace.params(p, in);
  const auto [batch, heads] = p.intervals_shape;
  launch<SumKeyBlocksKernel>(SumKeyBlocksKernel::blocks(params, batch * heads), params, stream);
  launch<FindKeyRunsKernel>(FindKeyRunsKernel::blocks(params, batch * heads), params, stream);
  return {.data = params.runs,
          .batch = batch > 1 ? static_cast<int>(heads) * params.query_tiles() : 0,
          .head = heads > 1 ? params.query_tiles() : 0};
}

// ---- Forward ------------------------------------------------------------------------------------

void pack_mask(const Problem& p, const ScoreParams& score, cudaStream_t stream) {
  if (score.packed_mask.states == nullptr || p.batch * p.heads_q == 0) return;
  const auto [batch, heads] = packed_shape(p);
  const Broadcast& mask = score.mask;
  PackMaskParams params;
  params.mask = mask;
  params.key_rank = score.key_rank;
  params.rank_limit = score.rank_limit;
  params.packed = score.packed_mask;
  params.heads = static_cast<int>(heads);
  params.group = heads == p.heads_q ? static_cast<int>(p.heads_q / p.heads_kv) : 1;
  params.rows = static_cast<int>(p.seqlen_q);
  params.keys = static_cast<int>(p.seqlen_k);
  const bool ranked = has(p.limit_shape);
  params.aligned = mask.in_words && (!ranked || score.key_rank.in_fours);
  params.causal = p.causal;
  params.shift = static_cast<int>(p.seqlen_k - p.seqlen_q);
  const auto launch_kernel = [&]<class Kernel>() {
    launch<Kernel>(Kernel::blocks(params, batch * heads), params, stream);
  };
  if (ranked) {
    launch_kernel.template operator()<PackMaskKernel<true>>();
  } else {
    launch_kernel.template operator()<PackMaskKernel<false>>();
  }
}

void forward(const ForwardArgs& args, const Execution& execution) {
  Carver workspace(execution.workspace);
  ForwardParams params;
  params.shape = shape_of(args.problem);
  params.score = score_of(args.problem, args.in);
  params.score.packed_mask = carve_packed_mask(args.problem, !args.schedule.empty(), workspace);
  const KeyRunsWorkspace runs(args.problem, args.in, !args.schedule.empty(), workspace);
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.plan = query_tile_lists(args.schedule, args.in.visibility.key_list, plan_tile_rows);
  params.lse = static_cast<float*>(args.lse.data);
  params.lse_low = static_cast<float*>(args.lse_low.data);
  params.saturate = args.problem.nonfinite == NonFinite::saturate;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const SharedClass shared = shared_class();
  pack_mask(args.problem, params.score, stream);
  params.runs = find_key_runs(args.problem, args.in, runs, stream);
  dispatch(args.problem,
           [&]<class T, int D>() { sm80::launch_forward<T, D>(params, shared, stream); });
}

// ---- Backward -----------------------------------------------------------------------------------

template <class T>
void store_bias(const BackwardArgs& args, const float* sums, cudaStream_t stream) {
  BwdPostprocessBias<T> store;
  for (std::size_t i = 0; i < 4; ++i) {
    store.shape[i] = args.problem.bias_shape[i];
    store.stride[i] = args.dbias.stride[i];
  }
  store.to = static_cast<std::byte*>(args.dbias.data);
  store.sums = sums;
  store.f32 = args.problem.bias_dtype == DType::f32;
  store.saturate = args.problem.nonfinite == NonFinite::saturate;
  if (store.items() == 0) return;
  const BroadcastShape sum_shape = bias_sum_shape(args.problem);
  if (sums == nullptr || sum_shape == args.problem.bias_shape) {
    for_each(store.items(), store, stream);
    return;
  }
  BwdPostprocessSummedBias<T> summed{.whole = store, .parts = {}};
  for (std::size_t i = 0; i < 4; ++i) summed.parts[i] = sum_shape[i] / args.problem.bias_shape[i];
  for_each(summed.items(), summed, stream);
}

template <class T>
void store_rows(const Shape& shape, const float* sums, const Tensor4& to, float scale,
                bool saturate, cudaStream_t stream) {
  if (to.data == nullptr) return;
  const sm80::StoreRows<T> store{shape, sums, rows_of(to), scale, saturate};
  for_each(store.items(), store, stream);
}

template <class T, int D>
void store_query_rows(const sm80::KeyMajorParams& params, cudaStream_t stream) {
  if (params.dq.data == nullptr) return;
  const sm80::StoreQueryRows<T, D> store{params.shape,       params.dq_sum,   params.dq,
                                         params.score.scale, params.saturate, params.flags};
  for_each(store.items(), store, stream);
}

BackwardParams params_of(const BackwardArgs& args, const BackwardRoute& route,
                         const BackwardWorkspace& workspace) {
  const Problem& p = args.problem;
  BackwardParams params;
  params.shape = shape_of(p);
  params.score = score_of(p, args.in);
  params.score.packed_mask = workspace.packed_mask;
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.dout = rows_of(args.dout);
  params.dq = rows_of(args.dq);
  params.dk = rows_of(args.dk);
  params.dv = rows_of(args.dv);
  params.plan = query_tile_lists(args.schedule, args.in.visibility.key_list, plan_tile_rows);
  params.lse = static_cast<const float*>(args.lse.data);
  params.lse_low = static_cast<const float*>(args.lse_low.data);
  params.saturate = p.nonfinite == NonFinite::saturate;
  params.lse2 = workspace.lse2;
  params.lse2_low = workspace.lse2_low;
  params.delta = workspace.delta;
  params.flags = workspace.flags;
  params.dbias_add = route.adds_bias;
  if (has(p.bias_shape) && args.dbias.data != nullptr) {
    params.dbias = params.dbias_add ? broadcast_of<void>(p, bias_sum_shape(p), workspace.dbias_sum,
                                                         contiguous_strides(bias_sum_shape(p)), 4)
                                    : broadcast_of(p, p.bias_shape, args.dbias.data,
                                                   args.dbias.stride, size_of(p.bias_dtype));
  }
  return params;
}

void backward(const BackwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const SharedClass shared = shared_class();
  const bool planned = !args.schedule.empty();
  const BackwardRoute route(p, planned, shared, bias_in_fours(args));
  const BackwardWorkspace workspace(p, args.in, planned, route, shared, execution.workspace);
  const BackwardParams params = params_of(args, route, workspace);
  const bool wants_bias = params.dbias.data != nullptr;

  check(cudaMemsetAsync(workspace.flags, 0, workspace.zeroed_bytes, stream), "cudaMemsetAsync");
  pack_mask(p, params.score, stream);
  const KeyRuns runs = find_key_runs(p, args.in, workspace.runs, stream);
  dispatch(p, [&]<class T, int D>() {
    // The main loop clears what it does not visit, unless it follows a list.
    if (wants_bias && !params.dbias_add && params.plan.keys != nullptr) {
      store_bias<T>(args, nullptr, stream);
    }
    using Preprocess = BwdPreprocessKernel<T>;
    launch<Preprocess>(Preprocess::blocks(params), params, stream);
    if (route.key_major) {
      if constexpr (D <= 128) {
        sm80::KeyMajorParams by_keys(params);
        if (args.dq.data != nullptr) {
          by_keys.turns = workspace.turns;
          by_keys.dq_sum = workspace.dq_sum;
        }
        sm80::launch_backward<T, D>(by_keys, shared, stream);
        store_query_rows<T, D>(by_keys, stream);
      }
    } else {
      sm80::QueryMajorParams by_queries(params);
      by_queries.runs = runs;
      by_queries.turns = workspace.turns;
      if (args.dk.data != nullptr) by_queries.dk_sum = workspace.dk_sum;
      if (args.dv.data != nullptr) by_queries.dv_sum = workspace.dv_sum;
      sm80::launch_backward<T, D>(by_queries, shared, stream);
      store_rows<T>(params.shape, workspace.dk_sum, args.dk, p.scale, params.saturate, stream);
      store_rows<T>(params.shape, workspace.dv_sum, args.dv, 1, params.saturate, stream);
    }
    if (params.dq.data != nullptr) {
      using Fixup = DqFixupKernel<T>;
      launch<Fixup>(Fixup::blocks(params), params, stream);
    }
    if (!params.saturate) {
      using NonFiniteRows = NonFiniteRowsKernel<T>;
      launch<NonFiniteRows>(NonFiniteRows::blocks(params), params, stream);
    }
    if (wants_bias && params.dbias_add) store_bias<T>(args, workspace.dbias_sum, stream);
  });
}

// ---- Table --------------------------------------------------------------------------------------

BackendInfo info() {
  const std::string reason = decline_device();
  return {"cuda", reason.empty(), reason.empty() ? device_name() : reason};
}

std::string supports(const Problem& p) {
  if (p.device != Device::cuda) return decline_other_device(p, "cuda", Device::cuda);
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "cuda computes in bf16 and f16";
  if (p.head_dim % 8 != 0) return "cuda needs a head_dim that is a multiple of 8";
  if (std::max({p.seqlen_q, p.seqlen_k, p.batch * p.heads_q * ((p.seqlen_q + 31) / 32)}) >
      std::numeric_limits<std::int32_t>::max() / 2) {
    return "cuda counts rows and tiles in 31 bits";
  }
  return decline_device();
}

std::size_t schedule_size(const Problem& p, const Visibility& visibility, Direction direction,
                          const Execution&) {
  return tile_list_schedule_size(p, visibility, direction, plan_tile_rows);
}

std::size_t schedule_workspace_size(const Problem& p, const Visibility& visibility,
                                    Direction direction, const Execution&) {
  return tile_list_schedule_workspace_size(p, visibility, direction, plan_tile_rows);
}

Schedule build_schedule(const Problem& p, const Visibility& visibility, Direction direction,
                        std::span<std::byte> memory, const Execution& execution) {
  return build_tile_list_schedule(p, visibility, direction, plan_tile_rows, memory, execution);
}

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution&) {
  Carver workspace(nullptr);
  carve_packed_mask(args.problem, !args.schedule.empty(), workspace);
  KeyRunsWorkspace(args.problem, args.in, !args.schedule.empty(), workspace);
  return workspace.used();
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution&) {
  const SharedClass shared = shared_class();
  const auto bytes = [&](bool fours) {
    const bool planned = !args.schedule.empty();
    const BackwardRoute route(args.problem, planned, shared, fours);
    return BackwardWorkspace(args.problem, args.in, planned, route, shared, nullptr).bytes;
  };
  return bias_in_fours(args) ? bytes(true) : std::max(bytes(true), bytes(false));
}

}  // namespace
}  // namespace cuda

const Backend cuda_backend = {
    .name = "cuda",
    .device = Device::cuda,
    .info = cuda::info,
    .supports = cuda::supports,
    .schedule_size = cuda::schedule_size,
    .schedule_workspace_size = cuda::schedule_workspace_size,
    .build_schedule = cuda::build_schedule,
    .forward_workspace_size = cuda::forward_workspace_size,
    .backward_workspace_size = cuda::backward_workspace_size,
    .forward = cuda::forward,
    .backward = cuda::backward,
    .needs_schedule = false,
};

}  // namespace flash_dmattn
