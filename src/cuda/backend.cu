#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cuda/common/careful_queries.cuh"
#include "cuda/common/gradients.cuh"
#include "cuda/common/key_runs.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/packed_mask.cuh"
#include "cuda/common/scheduler.cuh"
#include "cuda/policy.h"
#include "cuda/sm80/launch.h"

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

// ---- Arguments -> parameters --------------------------------------------------------------------

Shape shape_of(const Problem& p) {
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  return {narrow(p.batch),    narrow(p.heads_q),  narrow(p.heads_kv),
          narrow(p.seqlen_q), narrow(p.seqlen_k), narrow(p.head_dim)};
}

HeadRows rows_of(const ConstTensor4& tensor) {
  HeadRows rows;
  rows.data = static_cast<std::byte*>(const_cast<void*>(tensor.data));
  rows.batch = tensor.stride[0] * 2;
  rows.row = tensor.stride[1] * 2;
  rows.head = tensor.stride[2] * 2;
  const auto address = reinterpret_cast<std::intptr_t>(tensor.data);
  rows.aligned = (address | rows.batch | rows.row | rows.head) % 16 == 0 &&
                 std::abs(rows.row) <= std::numeric_limits<std::int32_t>::max();
  rows.row_step = static_cast<int>(rows.row);
  return rows;
}

bool has(const BroadcastShape& shape) { return shape != BroadcastShape{}; }

Broadcast broadcast_of(const Problem& p, const BroadcastShape& shape, const void* data,
                       const std::array<std::int64_t, 4>& stride, std::int64_t element_bytes) {
  const bool f32 = element_bytes == 4;
  Broadcast b;
  if (!has(shape) || data == nullptr) return b;
  const auto step = [&](std::size_t i) { return shape[i] == 1 ? 0 : stride[i]; };
  b.data = static_cast<std::byte*>(const_cast<void*>(data));
  b.batch = step(0);
  (shape[1] == p.heads_q ? b.head_q : b.head_kv) = step(1);
  b.query = step(2);
  b.key = step(3);
  b.per_query = shape[2] > 1;
  b.f32 = f32;
  const auto address = reinterpret_cast<std::intptr_t>(data);
  const std::int64_t steps = b.batch | b.head_q | b.head_kv | b.query;
  b.in_pairs = b.key == 1 && steps % 2 == 0 && address % (2 * element_bytes) == 0;
  b.in_fours = b.key == 1 && steps % 4 == 0 && address % (4 * element_bytes) == 0 &&
               std::abs(b.query) <= std::numeric_limits<std::int32_t>::max() / 2;
  b.in_words = b.key == 1 && steps % 8 == 0 && address % 16 == 0 && element_bytes == 2;
  return b;
}

ScoreParams score_of(const Problem& p, const Inputs& in) {
  ScoreParams score;
  score.scale = p.scale;
  score.softcap = p.softcap;
  if (p.softcap > 0) {
    score.form = ScoreForm::capped;
    score.inner = 2 * log2e * p.scale / p.softcap;
    score.factor = p.softcap * log2e;
  } else if (p.scale > 0) {
    score.factor = p.scale * log2e;
  } else {
    score.form = ScoreForm::scaled;
    score.inner = p.scale * log2e;
    score.factor = 1;
  }
  score.pair_factor = p.softcap > 0 ? p.softcap : p.scale > 0 ? p.scale : 1 / log2e;
  score.mask_value = static_cast<float>(mask_value(p.dtype));
  score.mask = broadcast_of(p, p.mask_shape, in.mask.data, in.mask.stride, 1);
  score.bias = broadcast_of(p, p.bias_shape, in.bias.data, in.bias.stride, size_of(p.bias_dtype));
  score.key_rank = broadcast_of(p, p.rank_shape, in.key_rank.data, in.key_rank.stride, 4);
  score.rank_limit = broadcast_of(p, p.limit_shape, in.rank_limit.data, in.rank_limit.stride, 4);
  if (has(p.limit_shape)) score.mask.per_query = true;
  score.exponent = score.bias.data == nullptr ? score.factor : score.bias.per_query ? log2e : 1;
  score.intervals = in.intervals;
  score.causal = p.causal;
  return score;
}

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

// Hands out aligned pieces of the workspace; with a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class U>
  U* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(U) + 255) / 256 * 256;
    return base_ == nullptr ? nullptr : reinterpret_cast<U*>(base_ + at);
  }

  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

// ---- Key runs -----------------------------------------------------------------------------------

// What query tiles walk where there are intervals and no lists of keys.
struct KeyRunsWorkspace {
  KeyBlock* blocks = nullptr;
  KeyRun* runs = nullptr;

  KeyRunsWorkspace() = default;
  KeyRunsWorkspace(const Problem& p, const Inputs& in, Carver& carver) {
    if (in.intervals.data == nullptr || in.plan.keys != nullptr) return;
    const std::int64_t rows = p.intervals_shape[0] * p.intervals_shape[1];
    const KeyRunsParams sizes = params(p, in);
    blocks = carver.take<KeyBlock>(rows * sizes.key_blocks());
    runs = carver.take<KeyRun>(rows * sizes.query_tiles());
  }

  KeyRunsParams params(const Problem& p, const Inputs& in) const {
    return {.intervals = in.intervals,
            .heads = static_cast<int>(p.intervals_shape[1]),
            .seqlen_q = static_cast<int>(p.seqlen_q),
            .seqlen_k = static_cast<int>(p.seqlen_k),
            .causal = p.causal,
            .blocks = blocks,
            .runs = runs};
  }
};

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

bool has_pairs(const BroadcastShape& shape) { return has(shape) && shape[2] > 1; }

bool masks_pairs(const Problem& p) { return has_pairs(p.mask_shape) || has(p.limit_shape); }

// Batch and heads of the packed mask: of the mask and the ranks together.
std::array<std::int64_t, 2> packed_shape(const Problem& p) {
  std::array<std::int64_t, 2> shape{p.mask_shape[0], p.mask_shape[1]};
  for (const BroadcastShape& other : {p.rank_shape, p.limit_shape}) {
    for (std::size_t i = 0; i < 2; ++i) shape[i] = std::max(shape[i], other[i]);
  }
  return shape;
}

// The mask is packed where the kernels walk all keys; with a list they look at single elements.
PackedMask carve_packed_mask(const Problem& p, bool planned, Carver& workspace) {
  PackedMask packed;
  if (planned || !masks_pairs(p)) return packed;
  const auto shape = packed_shape(p);
  const std::int64_t words = (p.seqlen_k + PackedMask::side - 1) / PackedMask::side;
  const std::int64_t matrices = shape[0] * shape[1];
  const std::int64_t row_tiles = (p.seqlen_q + PackedMask::side - 1) / PackedMask::side;
  packed.bits = workspace.take<std::uint64_t>(matrices * row_tiles * PackedMask::side * words);
  packed.states = workspace.take<std::uint8_t>(matrices * row_tiles * words);
  packed.words = static_cast<int>(words);
  packed.batch = shape[0] > 1 ? static_cast<int>(shape[1]) : 0;
  if (shape[1] > 1) (shape[1] == p.heads_q ? packed.head_q : packed.head_kv) = 1;
  return packed;
}

void pack_mask(const Problem& p, const ScoreParams& score, cudaStream_t stream) {
  if (score.packed_mask.bits == nullptr || p.batch * p.heads_q == 0) return;
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
  const auto address = reinterpret_cast<std::intptr_t>(mask.data);
  const bool ranked = has(p.limit_shape);
  params.aligned = mask.key == 1 &&
                   (address | mask.batch | mask.head_q | mask.head_kv | mask.query) % 16 == 0 &&
                   (!ranked || score.key_rank.in_fours);
  params.causal = p.causal;
  params.shift = static_cast<int>(p.seqlen_k - p.seqlen_q);
  const auto launch_kernel = [&]<bool Ranked>() {
    using Kernel = PackMaskKernel<Ranked>;
    launch<Kernel>(Kernel::blocks(params, batch * heads), params, stream);
  };
  ranked ? launch_kernel.template operator()<true>() : launch_kernel.template operator()<false>();
}

void forward(const ForwardArgs& args, const Execution& execution) {
  Carver workspace(execution.workspace);
  ForwardParams params;
  params.shape = shape_of(args.problem);
  params.score = score_of(args.problem, args.in);
  params.score.packed_mask =
      carve_packed_mask(args.problem, args.in.plan.keys != nullptr, workspace);
  const KeyRunsWorkspace runs(args.problem, args.in, workspace);
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.plan = args.in.plan;
  params.lse = args.lse;
  params.lse_low = args.lse_low;
  params.saturate = args.problem.nonfinite == NonFinite::saturate;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const SharedClass shared = shared_class();
  pack_mask(args.problem, params.score, stream);
  params.runs = find_key_runs(args.problem, args.in, runs, stream);
  dispatch(args.problem,
           [&]<class T, int D>() { sm80::launch_forward<T, D>(params, shared, stream); });
}

// ---- Backward -----------------------------------------------------------------------------------

std::int64_t elements(const BroadcastShape& shape) {
  return shape[0] * shape[1] * shape[2] * shape[3];
}

// What the fp32 sums of dbias are of. Heads and batch elements have sums of their own where these are
// not pairs: then no two blocks add to the same one in an order that varies.
BroadcastShape bias_sum_shape(const Problem& p) {
  const BroadcastShape& bias = p.bias_shape;
  if (bias[2] <= 1) {
    return {p.batch, bias[1] == p.heads_q ? p.heads_q : p.heads_kv, 1, p.seqlen_k};
  }
  if (bias[3] <= 1) return {p.batch, p.heads_q, p.seqlen_q, 1};
  return bias;
}

// Whether the elements of the bias and of its gradient, if wanted, lie in fours.
bool bias_in_fours(const BackwardArgs& args) {
  const Problem& p = args.problem;
  const auto in_fours = [&](const void* data, const std::array<std::int64_t, 4>& stride) {
    return broadcast_of(p, p.bias_shape, data, stride, size_of(p.bias_dtype)).in_fours;
  };
  return in_fours(args.in.bias.data, args.in.bias.stride) &&
         (args.dbias.data == nullptr || in_fours(args.dbias.data, args.dbias.stride));
}

// Which kernel makes the gradients. It follows from shapes, but for elements of pairs that do not
// lie in fours.
struct BackwardRoute {
  bool key_major;  // the kernel that owns keys
  bool adds_bias;  // several pairs share an element of dbias: fp32 sums in memory

  // `fours`: the elements of pairs lie in fours, as far as alignment goes.
  BackwardRoute(const Problem& p, bool planned, SharedClass shared, bool fours) {
    const int bucket = head_dim_bucket(static_cast<int>(p.head_dim));
    const bool pairs = masks_pairs(p) || has_pairs(p.bias_shape);
    const bool bias_in_fours =
        !has_pairs(p.bias_shape) || (fours && p.bias_shape[3] > 1 && size_of(p.bias_dtype) == 2);
    // Not with a list, nor with a softcap's slope, which its warps would have to hand over with P, nor
    // where its additions to the gradient of a bias of pairs would have to take turns.
    key_major = has_key_major_backward(bucket, shared) && p.softcap <= 0 && !planned &&
                (!pairs || (!p.deterministic && p.seqlen_k % 4 == 0 && bias_in_fours));
    // The two heads of a group are walked together, unless their keys are seen by different queries.
    const bool apart =
        has(p.mask_shape) && !masks_pairs(p) && p.mask_shape[1] == p.heads_q && p.heads_q > 1;
    const bool sums_heads =
        key_major && sums_pair_gradients(bucket) && p.heads_q == 2 * p.heads_kv && !apart;
    const BroadcastShape& bias = p.bias_shape;
    const bool own_element = bias[0] == p.batch && bias[2] == p.seqlen_q && bias[3] == p.seqlen_k &&
                             (bias[1] == p.heads_q || (bias[1] == p.heads_kv && sums_heads));
    adds_bias = !own_element || p.seqlen_q == 1;
  }
};

// Blocks of the main loop.
std::int64_t backward_blocks(const Problem& p, bool key_major, SharedClass shared) {
  const int bucket = head_dim_bucket(static_cast<int>(p.head_dim));
  return key_major ? KeyTile::count(shape_of(p), owned_keys)
                   : QueryTile::count(shape_of(p), backward_policy(bucket, shared).rows);
}

std::int64_t query_sum_floats(const Shape& shape) {
  switch (head_dim_bucket(shape.head_dim)) {
    case 64: return QuerySumTile<64>::count(shape) * QuerySumTile<64>::floats;
    default: return QuerySumTile<128>::count(shape) * QuerySumTile<128>::floats;
  }
}

struct BackwardWorkspace {
  float* lse2;
  float* lse2_low;
  float* delta;
  // Zeroed before the main loop, together.
  std::uint32_t* flags;
  Turns turns;
  float* dk_sum;
  float* dv_sum;
  float* dq_sum;
  float* dbias_sum;
  std::size_t zeroed_bytes;
  PackedMask packed_mask;
  KeyRunsWorkspace runs;
  std::size_t bytes;

  BackwardWorkspace(const Problem& p, const Inputs& in, BackwardRoute route, SharedClass shared,
                    void* base) {
    Carver carver(base);
    const std::int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    lse2 = carver.take<float>(rows);
    lse2_low = carver.take<float>(rows);
    delta = carver.take<float>(rows);
    const std::size_t zeroed_begin = carver.used();
    const std::int64_t key_sums = route.key_major ? 0
                                                  : p.batch * p.heads_kv * p.seqlen_k *
                                                        sum_columns(static_cast<int>(p.head_dim));
    flags = carver.take<std::uint32_t>(1);
    if (p.deterministic) {
      turns.started = carver.take<int>(1);
      turns.passed = carver.take<int>(backward_blocks(p, route.key_major, shared));
      turns.across_heads = has_pairs(p.bias_shape) && p.bias_shape[3] > 1 &&
                           (p.bias_shape[0] < p.batch || p.bias_shape[1] < p.heads_kv);
    }
    dk_sum = carver.take<float>(key_sums);
    dv_sum = carver.take<float>(key_sums);
    dq_sum = carver.take<float>(route.key_major ? query_sum_floats(shape_of(p)) : 0);
    dbias_sum =
        carver.take<float>(has(p.bias_shape) && route.adds_bias ? elements(bias_sum_shape(p)) : 0);
    zeroed_bytes = carver.used() - zeroed_begin;
    packed_mask = carve_packed_mask(p, !route.key_major, carver);
    if (!route.key_major) runs = KeyRunsWorkspace(p, in, carver);
    bytes = carver.used();
  }
};

template <class T>
void store_bias(const BackwardArgs& args, const float* sums, cudaStream_t stream) {
  StoreBias<T> store;
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
  StoreSummedBias<T> summed{.whole = store, .parts = {}};
  for (std::size_t i = 0; i < 4; ++i) summed.parts[i] = sum_shape[i] / args.problem.bias_shape[i];
  for_each(summed.items(), summed, stream);
}

template <class T>
void store_rows(const Shape& shape, const float* sums, const Tensor4& to, float scale,
                bool saturate, cudaStream_t stream) {
  if (to.data == nullptr) return;
  const StoreRows<T> store{shape, sums, rows_of(to), scale, saturate};
  for_each(store.items(), store, stream);
}

template <class T, int D>
void store_query_rows(const BackwardParams& params, cudaStream_t stream) {
  if (params.dq.data == nullptr) return;
  const StoreQueryRows<T, D> store{params.shape,       params.dq_sum,   params.dq,
                                   params.score.scale, params.saturate, params.flags};
  for_each(store.items(), store, stream);
}

void backward(const BackwardArgs& args, const Execution& execution) {
  const Problem& p = args.problem;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const SharedClass shared = shared_class();
  BackwardParams params;
  params.shape = shape_of(p);
  params.score = score_of(p, args.in);
  const bool wants_bias = has(p.bias_shape) && args.dbias.data != nullptr;
  const BackwardRoute route(p, args.in.plan.keys != nullptr, shared, bias_in_fours(args));
  const BackwardWorkspace workspace(p, args.in, route, shared, execution.workspace);
  params.key_major = route.key_major;
  params.score.packed_mask = workspace.packed_mask;
  params.q = rows_of(args.in.q);
  params.k = rows_of(args.in.k);
  params.v = rows_of(args.in.v);
  params.out = rows_of(args.out);
  params.dout = rows_of(args.dout);
  params.dq = rows_of(args.dq);
  params.dk = rows_of(args.dk);
  params.dv = rows_of(args.dv);
  params.plan = args.in.plan;
  params.lse = args.lse;
  params.lse_low = args.lse_low;
  params.saturate = p.nonfinite == NonFinite::saturate;
  params.lse2 = workspace.lse2;
  params.lse2_low = workspace.lse2_low;
  params.delta = workspace.delta;
  params.flags = workspace.flags;
  if (args.dk.data != nullptr) params.dk_sum = workspace.dk_sum;
  if (args.dv.data != nullptr) params.dv_sum = workspace.dv_sum;
  if (args.dq.data != nullptr) params.dq_sum = workspace.dq_sum;
  if (!route.key_major || args.dq.data != nullptr) params.turns = workspace.turns;
  params.dbias_add = route.adds_bias;
  if (wants_bias) {
    params.dbias = params.dbias_add ? broadcast_of(p, bias_sum_shape(p), workspace.dbias_sum,
                                                   contiguous_strides(bias_sum_shape(p)), 4)
                                    : broadcast_of(p, p.bias_shape, args.dbias.data,
                                                   args.dbias.stride, size_of(p.bias_dtype));
  }

  check(cudaMemsetAsync(workspace.flags, 0, workspace.zeroed_bytes, stream), "cudaMemsetAsync");
  pack_mask(p, params.score, stream);
  params.runs = find_key_runs(p, args.in, workspace.runs, stream);
  dispatch(p, [&]<class T, int D>() {
    // The main loop clears what it does not visit, unless it follows a list.
    if (wants_bias && !params.dbias_add && params.plan.keys != nullptr) {
      store_bias<T>(args, nullptr, stream);
    }
    using Statistics = RowStatisticsKernel<T>;
    launch<Statistics>(Statistics::blocks(params), params, stream);
    sm80::launch_backward<T, D>(params, shared, stream);
    if (route.key_major) {
      if constexpr (D <= 128) store_query_rows<T, D>(params, stream);
    } else {
      store_rows<T>(params.shape, workspace.dk_sum, args.dk, p.scale, params.saturate, stream);
      store_rows<T>(params.shape, workspace.dv_sum, args.dv, 1, params.saturate, stream);
    }
    if (params.dq.data != nullptr) {
      using Careful = CarefulQueriesKernel<T>;
      launch<Careful>(Careful::blocks(params), params, stream);
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

std::int64_t query_tile_rows(const Problem&) { return plan_tile_rows; }

bool wants_plan(const Problem&, const KeyBound& bound) { return !bound.consecutive; }

std::size_t forward_workspace_size(const ForwardArgs& args, const Execution&) {
  Carver workspace(nullptr);
  carve_packed_mask(args.problem, args.in.plan.keys != nullptr, workspace);
  KeyRunsWorkspace(args.problem, args.in, workspace);
  return workspace.used();
}

std::size_t backward_workspace_size(const BackwardArgs& args, const Execution&) {
  const SharedClass shared = shared_class();
  const auto bytes = [&](bool fours) {
    const BackwardRoute route(args.problem, args.in.plan.keys != nullptr, shared, fours);
    return BackwardWorkspace(args.problem, args.in, route, shared, nullptr).bytes;
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
    .query_tile_rows = cuda::query_tile_rows,
    .wants_plan = cuda::wants_plan,
    .forward_workspace_size = cuda::forward_workspace_size,
    .backward_workspace_size = cuda::backward_workspace_size,
    .forward = cuda::forward,
    .backward = cuda::backward,
    .plan_use = PlanUse::used,
};

}  // namespace flash_dmattn
