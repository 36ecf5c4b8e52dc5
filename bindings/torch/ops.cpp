#include <atomic>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_inputs.h"
#include "selection_ops.h"

// The torch operators. Each one checks its tensors, makes the structs of the C++ API, allocates outputs
// and workspace from torch, and calls. Derivatives are in python/flash_dmattn/_core/autograd.py,
// shapes in python/flash_dmattn/_core/fake_kernels.py.
namespace flash_dmattn::binding {
namespace {

// The dtype of lse and lse_low.
ScalarType row_type(const Problem& p) {
  return p.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
}

// Returns lse and lse_low, which share a tensor [2, B, Hq, Sq]. This saves an allocation and a result of the operator.
std::array<RowValues, 2> row_values(const Tensor& both) {
  const auto parts = [&]<class T>(T* lse) -> std::array<RowValues, 2> {
    return {lse, lse + both.numel() / 2};
  };
  void* const data = both.mutable_data_ptr();
  return both.scalar_type() == ScalarType::Double ? parts(static_cast<double*>(data))
                                                  : parts(static_cast<float*>(data));
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

// Runs a call in a workspace of its own.
template <class Args>
void run_recorded(const CheckedCall<Args>& call, const Tensor& like) {
  kernel_recorder().add(call);
  run(call, like);
}

// out and lse of a call.
std::tuple<Tensor, Tensor> attend(const Attention& call, const Tensor& q,
                                  const std::string& backend) {
  const Problem& p = call.problem;
  const Tensor out = allocate(out_shape(p), q.scalar_type(), q);
  const Tensor lse = allocate({2, p.batch, p.heads_q, p.seqlen_q}, row_type(p), q);
  const auto rows = row_values(lse);

  const ForwardArgs args{
      .problem = p, .in = call.in, .out = mutable_view4(out), .lse = rows[0], .lse_low = rows[1]};
  run_recorded(ForwardCall(args, call.execution, backend), q);
  return {out, lse};
}

std::tuple<Tensor, Tensor> forward_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const OptionalTensor& mask, const OptionalTensor& bias,
                                      const OptionalTensor& key_intervals,
                                      std::vector<std::int64_t> key_bound, bool is_causal,
                                      std::int64_t bias_delay, double scale, double softcap,
                                      bool saturate, bool deterministic, std::string backend) {
  const VisibleKeys keys{key_intervals, key_bound};
  const Options options{is_causal, bias_delay, scale, softcap, saturate, deterministic};
  return attend(prepare(q, k, v, mask, bias, keys, options, false), q, backend);
}

// The choice of the `window` keys with the highest bias [B or 1, Hkv or 1, Sk] for each query, and attention to them: one
// trip through the dispatcher. The derivative is that of forward with the returned intervals.
std::tuple<Tensor, Tensor, Tensor> select_and_attend_op(const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& bias,
                                                        std::int64_t window, bool is_causal,
                                                        std::int64_t bias_delay, double scale,
                                                        double softcap, bool saturate,
                                                        bool deterministic, std::string backend) {
  const Options options{is_causal, bias_delay, scale, softcap, saturate, deterministic};
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
      select_intervals(selection_args(bias, window, is_causal, p.seqlen_q), call.device, bias);
  p.intervals_shape = {intervals.size(0), intervals.size(1)};
  call.in.visibility.intervals.data = static_cast<const KeyInterval*>(call.own(intervals));
  call.in.visibility.bound = {.base = window, .per_query = is_causal ? 1 : 0};
  p.causal = false;  // intervals include causality
  const auto [out, lse] = attend(call, q, backend);
  return {out, lse, intervals};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_intervals,
    const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
    std::vector<std::int64_t> key_bound, bool is_causal, std::int64_t bias_delay, double scale,
    double softcap, bool saturate, bool deterministic, std::string backend, bool need_dq,
    bool need_dk, bool need_dv, bool need_dbias) {
  const VisibleKeys keys{key_intervals, key_bound};
  const Options options{is_causal, bias_delay, scale, softcap, saturate, deterministic};
  Attention call = prepare(q, k, v, mask, bias, keys, options, need_dbias);
  const Problem& p = call.problem;
  expect(dout, "dout", out_shape(p), q.scalar_type(), q, "q");
  expect(out, "out", out_shape(p), q.scalar_type(), q, "q");

  // An unwanted gradient is an empty tensor here and null data there.
  const auto gradient = [&](bool needed, Shape shape, ScalarType type) {
    return needed ? allocate(shape, type, q) : allocate({0}, type, q);
  };
  const ScalarType type = q.scalar_type();
  const Tensor dq = gradient(need_dq, query_shape(p), type);
  const Tensor dk = gradient(need_dk, key_shape(p), type);
  const Tensor dv = gradient(need_dv, value_shape(p), type);
  const std::array key_bias_shape{p.bias_shape[0], p.bias_shape[1], p.bias_shape[3]};
  const bool has_key_bias = bias && bias->dim() == 3;
  const Tensor dbias = gradient(need_dbias, has_key_bias ? Shape(key_bias_shape) : p.bias_shape,
                                bias ? bias->scalar_type() : type);
  const auto view = [](bool needed, const Tensor& tensor) {
    return needed ? mutable_view4(tensor) : Tensor4{};
  };

  expect(lse, "lse", {2, p.batch, p.heads_q, p.seqlen_q}, row_type(p), q, "q");
  const Tensor dense_lse = as_contiguous(lse);
  const auto rows = row_values(dense_lse);
  BackwardArgs args;
  args.problem = p;
  args.in = call.in;
  args.out = take_rows(call, out);
  args.dout = take_rows(call, dout);
  args.lse = rows[0];
  args.lse_low = rows[1];
  if (dlse) {
    expect(*dlse, "dlse", {p.batch, p.heads_q, p.seqlen_q}, row_type(p), q, "q");
    args.dlse.data = call.own(as_contiguous(*dlse));
    args.dlse.dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  }
  args.dq = view(need_dq, dq);
  args.dk = view(need_dk, dk);
  args.dv = view(need_dv, dv);
  args.dbias = view(need_dbias, dbias);
  run_recorded(BackwardCall(args, call.execution, backend), q);
  return {dq, dk, dv, dbias};
}

ScoreForm score_form_of(const std::string& name) {
  if (name == "projection") return ScoreForm::projection;
  if (name == "gelu") return ScoreForm::gelu;
  if (name == "gate") return ScoreForm::gate;
  if (name == "linear") return ScoreForm::linear;
  if (name == "doge") return ScoreForm::doge;
  throw InvalidArgument("form", "'" + name + "'", "projection, gelu, gate, linear or doge");
}

// Scores [B, H, S], float32 (float64 if hidden is), of hidden [B, S, F], weight [H, F], bias [H] and factor [H].
Tensor score_projection_op(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& factor, const std::string& form) {
  const CallDevice device(hidden);
  if (hidden.dim() != 3) throw InvalidArgument("hidden", shape_text(hidden), "shape [B, S, F]");
  if (weight.dim() != 2 || weight.size(1) != hidden.size(2)) {
    throw InvalidArgument("weight", shape_text(weight),
                          "shape [H, " + std::to_string(hidden.size(2)) + "]");
  }
  expect_on_device_of(weight, "weight", hidden, "hidden");
  const Tensor features = with_dense_rows(hidden), weights = with_dense_rows(weight);
  ScoreProjectionArgs args{.device = device.device(),
                           .batch = hidden.size(0),
                           .seqlen = hidden.size(1),
                           .features = hidden.size(2),
                           .heads = weight.size(0),
                           .hidden = features.const_data_ptr(),
                           .hidden_dtype = dtype_of(hidden, "hidden"),
                           .hidden_stride = {features.stride(0), features.stride(1)},
                           .weight = weights.const_data_ptr(),
                           .weight_dtype = dtype_of(weight, "weight"),
                           .weight_stride = weights.stride(0),
                           .form = score_form_of(form)};
  OptionalTensor biases, factors;
  const auto read_heads = [&](const OptionalTensor& given, const char* name, OptionalTensor& dense,
                              const void*& data, DType& dtype) {
    if (!given) return;
    expect(*given, name, {args.heads}, given->scalar_type(), hidden, "hidden");
    dense = as_contiguous(*given);
    data = dense->const_data_ptr();
    dtype = dtype_of(*given, name);
  };
  read_heads(bias, "bias", biases, args.bias, args.bias_dtype);
  read_heads(factor, "factor", factors, args.factor, args.factor_dtype);
  const bool is_double = args.hidden_dtype == DType::f64;
  const Tensor scores = allocate({args.batch, args.heads, args.seqlen},
                                 is_double ? ScalarType::Double : ScalarType::Float, hidden);
  args.scores = scores.mutable_data_ptr();
  run(ScoreProjectionCall(args, device.execution(hidden.numel() * args.heads)), hidden);
  return scores;
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
      "SymInt[] key_bound, bool is_causal, SymInt "
      "bias_delay, float scale, float softcap, bool saturate, bool "
      "deterministic, str backend) -> (Tensor out, Tensor lse)");
  m.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? key_intervals, Tensor out, Tensor lse, "
      "Tensor? dlse, SymInt[] key_bound, "
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
      "score_projection(Tensor hidden, Tensor weight, Tensor? bias, Tensor? factor, str form) -> "
      "Tensor");
  m.def(
      "select_key_intervals(Tensor scores, Tensor? key_mask, SymInt[] windows, str selection, "
      "bool is_causal, SymInt query_length, SymInt recent_window=0, bool recent_competes=False, "
      "SymInt sink_tokens=0, float? score_threshold=None) -> Tensor");
  m.def("measure_key_bound(Tensor key_intervals, SymInt query_length) -> int[]");
  m.def(
      "build_tile_lists(Tensor key_intervals, int tile_rows, SymInt query_length, SymInt[] "
      "key_bound) "
      "-> (Tensor keys, Tensor begin, Tensor count, Tensor full)");
  m.def("backends() -> str");
  m.def("kernel_names(str backend) -> str");
  m.def("record_kernels(bool on) -> str");
}

// The functions of every device: the library finds the backend.
static void implement(auto& m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("select_and_attend", TORCH_BOX(&select_and_attend_op));
  m.impl("score_projection", TORCH_BOX(&score_projection_op));
  m.impl("select_key_intervals", TORCH_BOX(&select_op));
  m.impl("measure_key_bound", TORCH_BOX(&measure_op));
  m.impl("build_tile_lists", TORCH_BOX(&tile_lists_op));
}

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CPU, m) { implement(m); }

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CUDA, m) { implement(m); }

STABLE_TORCH_LIBRARY_IMPL(FLASH_DMATTN_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("backends", TORCH_BOX(&backends_op));
  m.impl("kernel_names", TORCH_BOX(&kernel_names_op));
  m.impl("record_kernels", TORCH_BOX(&record_kernels_op));
}

}  // namespace flash_dmattn::binding
