#include <atomic>
#include <mutex>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "device.h"
#include "selection_ops.h"

// The torch operators. Each one checks its tensors, makes the structs of the C++ API, allocates outputs
// and workspace from torch, and calls. Derivatives are in python/flash_dmattn/_core/autograd.py,
// shapes in python/flash_dmattn/_core/shapes.py.
namespace flash_dmattn::binding {
namespace {

// The inputs that forward and backward share.
struct Attention {
  CallDevice device;
  Problem problem;
  Inputs in;
  Schedule schedule;
  Execution execution;
  std::vector<Tensor> owned;       // memory that `in`, `schedule` and `workspace` point to
  std::span<std::byte> workspace;  // in which the schedule was built, free for the steps after it

  explicit Attention(const Tensor& q) : device(q) { owned.reserve(8); }

  const void* own(const Tensor& tensor) {
    owned.push_back(tensor);
    return tensor.const_data_ptr();
  }
};

struct Options {
  const OptionalTensor& key_list;  // instead of key_intervals
  const OptionalTensor& key_count;
  const OptionalTensor& key_rank;
  const OptionalTensor& rank_limit;
  const std::vector<std::int64_t>& key_bound;  // the members of a KeyBound, or nothing
  bool causal;
  std::int64_t bias_delay;
  double scale;
  double softcap;
  bool saturate;
  bool deterministic;
  const std::string& backend;
  Direction direction;
};

std::array<std::int64_t, 4> query_shape(const Problem& p) {
  return {p.batch, p.seqlen_q, p.heads_q, p.head_dim};
}

std::array<std::int64_t, 4> key_shape(const Problem& p) {
  return {p.batch, p.seqlen_k, p.heads_kv, p.head_dim};
}

// Takes `tensor` into the call and returns its view.
ConstTensor4 take_rows(Attention& call, const Tensor& tensor) {
  const Tensor dense = with_dense_rows(tensor);
  call.own(dense);
  return view4(dense);
}

void take_intervals(Attention& call, const Tensor& intervals, const Tensor& q) {
  const Problem& p = call.problem;
  expect_on_device_of(intervals, "key_intervals", q, "q");
  if (intervals.dim() != 4 || intervals.size(2) != p.seqlen_k || intervals.size(3) != 2 ||
      intervals.scalar_type() != ScalarType::Int) {
    throw InvalidArgument(
        "key_intervals", shape_text(intervals),
        "int32 of shape [B or 1, Hkv or 1, " + std::to_string(p.seqlen_k) + ", 2]");
  }
  const Tensor dense = as_contiguous(intervals);
  call.problem.intervals_shape = {dense.size(0), dense.size(1)};
  call.in.visibility.intervals.data = static_cast<const KeyInterval*>(call.own(dense));
}

// Ascending keys [B, H, n] and how many of them there are [B, H].
void take_key_list(Attention& call, const Tensor& keys, const OptionalTensor& count,
                   const Tensor& q) {
  const bool fits = keys.dim() == 3 && keys.scalar_type() == ScalarType::Int && count &&
                    count->dim() == 2 && count->scalar_type() == ScalarType::Int &&
                    count->size(0) == keys.size(0) && count->size(1) == keys.size(1);
  if (!fits) {
    throw InvalidArgument(
        "key_list", shape_text(keys),
        "int32 of shape [B or 1, Hkv or 1, n], and key_count of [B or 1, Hkv or 1]");
  }
  expect_on_device_of(keys, "key_list", q, "q");
  expect_on_device_of(*count, "key_count", q, "q");
  const Tensor dense = as_contiguous(keys);
  call.problem.key_list_shape = {keys.size(0), keys.size(1)};
  call.in.visibility.key_list = {
      .keys = static_cast<const std::int32_t*>(call.own(dense)),
      .count = static_cast<const std::int32_t*>(call.own(as_contiguous(*count))),
      .stride = keys.size(2)};
}

// Ranks [B or 1, H or 1, 1, Sk] and limits [B or 1, H or 1, Sq, 1].
void take_ranks(Attention& call, const OptionalTensor& key_rank, const OptionalTensor& rank_limit,
                const Tensor& q) {
  const auto take = [&](const OptionalTensor& given, const char* name, BroadcastShape& shape) {
    if (!given) throw InvalidArgument(name, "none", "key_rank and rank_limit together");
    if (given->dim() != 4 || given->scalar_type() != ScalarType::Int) {
      throw InvalidArgument(name, shape_text(*given), "int32 of 4 dimensions");
    }
    expect_on_device_of(*given, name, q, "q");
    const Tensor dense = as_contiguous(*given);
    call.own(dense);
    for (std::size_t d = 0; d < 4; ++d) shape[d] = dense.size(static_cast<std::int64_t>(d));
    return view4(dense);
  };
  call.in.visibility.ranks.key_rank = take(key_rank, "key_rank", call.problem.rank_shape);
  call.in.visibility.ranks.rank_limit = take(rank_limit, "rank_limit", call.problem.limit_shape);
}

// The bound of the intervals as given, or measured where it is unknown and a GPU needs it.
KeyBound take_bound(const Attention& call, const Tensor& like, const Options& options) {
  const KeyBound bound = given_bound(options.key_bound);
  const Problem& p = call.problem;
  if (p.device == Device::cpu || bound.known() || bound.consecutive) return bound;
  return measured_bound({.device = p.device,
                         .batch = p.intervals_shape[0],
                         .heads = p.intervals_shape[1],
                         .seqlen_q = p.seqlen_q,
                         .seqlen_k = p.seqlen_k,
                         .causal = p.causal,
                         .intervals = call.in.visibility.intervals},
                        call.execution, like);
}

// The schedule lives as long as one call. Keeping it from forward to backward would save its construction,
// which is a small part of either, and cost its memory in every layer of a model in between. Its workspace lies behind
// it: one allocation of either size takes the host as long as a third of a launch.
void take_schedule(Attention& call, const Tensor& like, const Options& options) {
  const ScheduleCall scheduling(call.problem, call.in.visibility, options.direction, call.execution,
                                options.backend);
  const std::size_t bytes = scheduling.size();
  if (bytes == 0) return;
  const std::size_t end =
      (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
  const Tensor memory = allocate_bytes(end + scheduling.workspace_size(), like);
  call.owned.push_back(memory);
  call.workspace = bytes_of(memory).subspan(end);
  call.schedule = scheduling.build(bytes_of(memory).first(bytes), call.workspace);
}

// q, k, v, mask and bias.
Attention take_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                      const OptionalTensor& bias, const Options& options,
                      bool bias_needs_gradient) {
  if (q.dim() != 4) throw InvalidArgument("q", shape_text(q), "shape [B, Sq, Hq, D]");
  if (k.dim() != 4) throw InvalidArgument("k", shape_text(k), "shape [B, Sk, Hkv, D]");
  Attention call(q);
  Problem& p = call.problem;
  p.device = call.device.device();
  p.batch = q.size(0);
  p.seqlen_q = q.size(1);
  p.heads_q = q.size(2);
  p.head_dim = q.size(3);
  p.seqlen_k = k.size(1);
  p.heads_kv = k.size(2);
  p.dtype = dtype_of(q, "q");
  p.scale = options.scale;
  p.softcap = options.softcap;
  p.causal = options.causal;
  p.bias_delay = options.bias_delay;
  p.deterministic = options.deterministic;
  p.nonfinite = options.saturate ? NonFinite::saturate : NonFinite::propagate;

  call.execution = call.device.execution(q.numel() * p.seqlen_k);

  expect_like(k, "k", key_shape(p), q);
  expect_like(v, "v", key_shape(p), q);
  call.in.q = take_rows(call, q);
  call.in.k = take_rows(call, k);
  call.in.v = take_rows(call, v);
  if (mask) {
    if (mask->scalar_type() != ScalarType::Bool) {
      throw InvalidArgument("mask", torch::headeronly::toString(mask->scalar_type()), "bool");
    }
    expect_on_device_of(*mask, "mask", q, "q");
    const Broadcast m = broadcast_argument(*mask, "mask", true);
    call.own(m.tensor);
    call.in.mask = m.view;
    p.mask_shape = m.shape;
  }
  if (bias) {
    expect_on_device_of(*bias, "bias", q, "q");
    const Broadcast b = broadcast_argument(*bias, "bias", !bias_needs_gradient);
    call.own(b.tensor);
    call.in.bias = b.view;
    p.bias_shape = b.shape;
    p.bias_dtype = dtype_of(*bias, "bias");
  }
  return call;
}

// The same, what is visible, and its schedule.
Attention prepare(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                  const OptionalTensor& bias, const OptionalTensor& key_intervals,
                  const Options& options, bool bias_needs_gradient) {
  Attention call = take_inputs(q, k, v, mask, bias, options, bias_needs_gradient);
  if (options.key_rank || options.rank_limit) {
    take_ranks(call, options.key_rank, options.rank_limit, q);
  }
  if (key_intervals) {
    take_intervals(call, *key_intervals, q);
    call.in.visibility.bound = take_bound(call, q, options);
  } else if (options.key_list) {
    take_key_list(call, *options.key_list, options.key_count, q);
  }
  if (key_intervals || options.key_list) take_schedule(call, q, options);
  return call;
}

// The dtype of lse and lse_low.
ScalarType row_type(const Problem& p) {
  return p.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
}

// lse and lse_low, which are one tensor [2, B, Hq, Sq]: an allocation and a result less.
std::array<RowValues, 2> row_values(const Tensor& both) {
  const auto parts = [&]<class T>(T* lse) -> std::array<RowValues, 2> {
    return {lse, lse + both.numel() / 2};
  };
  void* const data = both.mutable_data_ptr();
  return both.scalar_type() == ScalarType::Double ? parts(static_cast<double*>(data))
                                                  : parts(static_cast<float*>(data));
}

// Dense numbers of rows [B, Hq, Sq].
Tensor take_dlse(const Problem& p, const Tensor& dlse, const Tensor& q) {
  const bool fits = dlse.dim() == 3 && dlse.size(0) == p.batch && dlse.size(1) == p.heads_q &&
                    dlse.size(2) == p.seqlen_q && dlse.scalar_type() == row_type(p);
  if (!fits) {
    throw InvalidArgument("dlse",
                          std::string(torch::headeronly::toString(dlse.scalar_type())) +
                              " of shape " + shape_text(dlse),
                          "the shape and the dtype of lse");
  }
  expect_on_device_of(dlse, "dlse", q, "q");
  return as_contiguous(dlse);
}

// The main kernels that calls have started while recording is on. Autograd calls backward on threads of its own, so
// there is one for the process.
class KernelRecorder {
 public:
  template <class Args>
  void add(const CheckedCall<Args>& call) {
    if (!on_.load(std::memory_order_relaxed)) return;
    const std::scoped_lock lock(mutex_);
    names_ += call.kernel_name() + '\n';
  }

  // The names recorded since the last switch, a line each.
  std::string switch_to(bool on) {
    const std::scoped_lock lock(mutex_);
    on_ = on;
    return std::exchange(names_, {});
  }

 private:
  std::atomic<bool> on_ = false;
  std::mutex mutex_;
  std::string names_;
};

KernelRecorder& kernel_recorder() {
  static KernelRecorder recorder;
  return recorder;
}

std::string record_kernels_op(bool on) { return kernel_recorder().switch_to(on); }

// The main kernels that a backend can run here, a line each.
std::string kernel_names_op(std::string backend) {
  std::string lines;
  for (const std::string& name : kernel_names(backend)) lines += name + '\n';
  return lines;
}

// Runs a call in `workspace`, or in one of its own if that is too small.
template <class Args>
void run(const CheckedCall<Args>& call, std::span<std::byte> workspace, const Tensor& like) {
  kernel_recorder().add(call);
  call.workspace_size() <= workspace.size() ? call.run(workspace) : binding::run(call, like);
}

// out and lse of a call that has its schedule.
std::tuple<Tensor, Tensor> attend(const Attention& call, const Tensor& q,
                                  const std::string& backend) {
  const Problem& p = call.problem;
  const Tensor out = allocate(query_shape(p), q.scalar_type(), q);
  const Tensor lse = allocate({2, p.batch, p.heads_q, p.seqlen_q}, row_type(p), q);
  const auto rows = row_values(lse);

  const ForwardArgs args{.problem = p,
                         .in = call.in,
                         .schedule = call.schedule,
                         .out = mutable_view4(out),
                         .lse = rows[0],
                         .lse_low = rows[1]};
  run(ForwardCall(args, call.execution, backend), call.workspace, q);
  return {out, lse};
}

std::tuple<Tensor, Tensor> forward_op(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_intervals, const OptionalTensor& key_list,
    const OptionalTensor& key_count, const OptionalTensor& key_rank,
    const OptionalTensor& rank_limit, std::vector<std::int64_t> key_bound, bool is_causal,
    std::int64_t bias_delay, double scale, double softcap, bool saturate, bool deterministic,
    std::string backend) {
  const Options options{
      key_list, key_count, key_rank, rank_limit,    key_bound, is_causal,         bias_delay,
      scale,    softcap,   saturate, deterministic, backend,   Direction::forward};
  return attend(prepare(q, k, v, mask, bias, key_intervals, options, false), q, backend);
}

// The choice of the `window` keys with the highest bias [B or 1, Hkv or 1, Sk] for each query, and attention to them: one
// trip through the dispatcher. The derivative is that of forward with the returned intervals.
std::tuple<Tensor, Tensor, Tensor> select_and_attend_op(const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& bias,
                                                        std::int64_t window, bool is_causal,
                                                        std::int64_t bias_delay, double scale,
                                                        double softcap, bool saturate,
                                                        bool deterministic, std::string backend) {
  const Options options{{},
                        {},
                        {},
                        {},
                        {},
                        is_causal,
                        bias_delay,
                        scale,
                        softcap,
                        saturate,
                        deterministic,
                        backend,
                        Direction::forward};
  Attention call = take_inputs(q, k, v, {}, bias, options, false);
  Problem& p = call.problem;
  const auto fits = [&](std::int64_t dim, std::int64_t size) {
    return bias.size(dim) == 1 || bias.size(dim) == size;
  };
  if (bias.dim() != 3 || !fits(0, p.batch) || !fits(1, p.heads_kv) || bias.size(2) != p.seqlen_k) {
    throw InvalidArgument("bias", shape_text(bias),
                          "shape [B or 1, Hkv or 1, " + std::to_string(p.seqlen_k) + "]");
  }
  const Tensor intervals =
      select_op(bias, {}, {window}, "per_query", is_causal, p.seqlen_q, 0, true, 0, {});
  p.intervals_shape = {intervals.size(0), intervals.size(1)};
  call.in.visibility.intervals.data = static_cast<const KeyInterval*>(call.own(intervals));
  call.in.visibility.bound = {.base = window, .per_query = is_causal ? 1 : 0};
  p.causal = false;  // intervals include causality
  take_schedule(call, q, options);
  const auto [out, lse] = attend(call, q, backend);
  return {out, lse, intervals};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_intervals,
    const OptionalTensor& key_list, const OptionalTensor& key_count, const OptionalTensor& key_rank,
    const OptionalTensor& rank_limit, const Tensor& out, const Tensor& lse,
    const OptionalTensor& dlse, std::vector<std::int64_t> key_bound, bool is_causal,
    std::int64_t bias_delay, double scale, double softcap, bool saturate, bool deterministic,
    std::string backend, bool need_dq, bool need_dk, bool need_dv, bool need_dbias) {
  const Options options{
      key_list, key_count, key_rank, rank_limit,    key_bound, is_causal,          bias_delay,
      scale,    softcap,   saturate, deterministic, backend,   Direction::backward};
  Attention call = prepare(q, k, v, mask, bias, key_intervals, options, need_dbias);
  const Problem& p = call.problem;
  expect_like(dout, "dout", query_shape(p), q);
  expect_like(out, "out", query_shape(p), q);

  // An unwanted gradient is an empty tensor here and null data there.
  using Shape = torch::headeronly::IntHeaderOnlyArrayRef;
  const auto gradient = [&](bool needed, Shape shape, ScalarType type) {
    return needed ? allocate(shape, type, q) : allocate({0}, type, q);
  };
  const ScalarType type = q.scalar_type();
  const Tensor dq = gradient(need_dq, query_shape(p), type);
  const Tensor dk = gradient(need_dk, key_shape(p), type);
  const Tensor dv = gradient(need_dv, key_shape(p), type);
  const std::array key_bias_shape{p.bias_shape[0], p.bias_shape[1], p.bias_shape[3]};
  const bool has_key_bias = bias && bias->dim() == 3;
  const Tensor dbias = gradient(need_dbias, has_key_bias ? Shape(key_bias_shape) : p.bias_shape,
                                bias ? bias->scalar_type() : type);
  const auto view = [](bool needed, const Tensor& tensor) {
    return needed ? mutable_view4(tensor) : Tensor4{};
  };

  const bool lse_fits = lse.dim() == 4 && lse.size(0) == 2 && lse.size(1) == p.batch &&
                        lse.size(2) == p.heads_q && lse.size(3) == p.seqlen_q &&
                        lse.scalar_type() == row_type(p);
  if (!lse_fits) {
    throw InvalidArgument("lse",
                          std::string(torch::headeronly::toString(lse.scalar_type())) +
                              " of shape " + shape_text(lse),
                          "what forward returned");
  }
  expect_on_device_of(lse, "lse", q, "q");
  const Tensor dense_lse = as_contiguous(lse);
  const auto rows = row_values(dense_lse);
  BackwardArgs args;
  args.problem = p;
  args.in = call.in;
  args.schedule = call.schedule;
  args.out = take_rows(call, out);
  args.dout = take_rows(call, dout);
  args.lse = rows[0];
  args.lse_low = rows[1];
  const OptionalTensor dense_dlse = dlse ? OptionalTensor(take_dlse(p, *dlse, q)) : std::nullopt;
  if (dense_dlse) {
    args.dlse.data = dense_dlse->const_data_ptr();
    args.dlse.dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  }
  args.dq = view(need_dq, dq);
  args.dk = view(need_dk, dk);
  args.dv = view(need_dv, dv);
  args.dbias = view(need_dbias, dbias);
  run(BackwardCall(args, call.execution, backend), call.workspace, q);
  return {dq, dk, dv, dbias};
}

// Subtracts from the nonzero elements of each row of a gradient [..., columns] their mean.
Tensor zero_sum_op(const Tensor& gradient) {
  if (gradient.dim() == 0 || gradient.scalar_type() != ScalarType::Float) {
    throw InvalidArgument("gradient", shape_text(gradient), "float32 of at least one dimension");
  }
  const CallDevice device(gradient);
  const Tensor dense = as_contiguous(gradient);
  const Tensor out = torch::stable::empty_like(dense);
  const std::int64_t columns = dense.size(dense.dim() - 1);
  const std::int64_t rows = columns == 0 ? 0 : dense.numel() / columns;
  zero_sum({.device = device.device(),
            .gradient = static_cast<const float*>(dense.const_data_ptr()),
            .out = static_cast<float*>(out.mutable_data_ptr()),
            .rows = rows,
            .columns = columns},
           device.execution(dense.numel()));
  return out;
}

// One line for each backend: name, 1 or 0, reason; separated by tabs.
std::string backends_op() {
  std::string lines;
  for (const BackendInfo& info : backends()) {
    lines +=
        std::string(info.name) + '\t' + (info.available ? '1' : '0') + '\t' + info.reason + '\n';
  }
  return lines;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(FLASH_DMATTN_NAMESPACE, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? key_intervals, "
      "Tensor? key_list, Tensor? key_count, Tensor? key_rank, Tensor? rank_limit, SymInt[] "
      "key_bound, "
      "bool is_causal, SymInt bias_delay, float scale, float softcap, bool saturate, bool "
      "deterministic, str backend) -> (Tensor out, Tensor lse)");
  m.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? key_intervals, Tensor? key_list, Tensor? key_count, Tensor? key_rank, "
      "Tensor? rank_limit, Tensor out, Tensor lse, Tensor? dlse, SymInt[] key_bound, "
      "bool is_causal, SymInt bias_delay, float scale, float softcap, bool saturate, bool "
      "deterministic, str backend, bool need_dq, bool need_dk, bool need_dv, bool need_dbias) -> "
      "(Tensor dq, Tensor dk, Tensor "
      "dv, Tensor dbias)");
  m.def(
      "select_and_attend(Tensor q, Tensor k, Tensor v, Tensor bias, SymInt window, bool is_causal, "
      "SymInt bias_delay, float scale, float softcap, bool saturate, bool deterministic, str "
      "backend) -> (Tensor out, "
      "Tensor lse, Tensor key_intervals)");
  m.def(
      "select_key_intervals(Tensor scores, Tensor? key_mask, SymInt[] windows, str selection, "
      "bool is_causal, SymInt query_length, SymInt recent_window=0, bool recent_competes=True, "
      "SymInt sink_tokens=0, float? score_threshold=None) -> Tensor");
  m.def(
      "select_key_list(Tensor scores, Tensor? key_mask, SymInt window) -> (Tensor keys, Tensor "
      "count)");
  m.def(
      "rank_keys(Tensor scores, Tensor? mask, Tensor? bias, SymInt window, "
      "bool is_causal) -> (Tensor key_rank, Tensor rank_limit)");
  m.def("measure_key_bound(Tensor key_intervals, SymInt query_length) -> int[]");
  m.def(
      "build_tile_lists(Tensor key_intervals, int tile_rows, SymInt query_length, SymInt[] "
      "key_bound) "
      "-> (Tensor keys, Tensor begin, Tensor count, Tensor full)");
  m.def("zero_sum(Tensor gradient) -> Tensor");
  m.def("backends() -> str");
  m.def("kernel_names(str backend) -> str");
  m.def("record_kernels(bool on) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("select_and_attend", TORCH_BOX(&select_and_attend_op));
  m.impl("select_key_intervals", TORCH_BOX(&select_op));
  m.impl("measure_key_bound", TORCH_BOX(&measure_op));
  m.impl("build_tile_lists", TORCH_BOX(&tile_lists_op));
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("select_and_attend", TORCH_BOX(&select_and_attend_op));
  m.impl("select_key_intervals", TORCH_BOX(&select_op));
  m.impl("select_key_list", TORCH_BOX(&select_list_op));
  m.impl("rank_keys", TORCH_BOX(&rank_op));
  m.impl("zero_sum", TORCH_BOX(&zero_sum_op));
  m.impl("measure_key_bound", TORCH_BOX(&measure_op));
  m.impl("build_tile_lists", TORCH_BOX(&tile_lists_op));
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("backends", TORCH_BOX(&backends_op));
  m.impl("kernel_names", TORCH_BOX(&kernel_names_op));
  m.impl("record_kernels", TORCH_BOX(&record_kernels_op));
}

}  // namespace flash_dmattn::binding
