#include <algorithm>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "device.h"

// The torch operators. Each one checks its tensors, makes the structs of the C++ API, allocates outputs
// and workspace from torch, and calls. Derivatives and shape inference are in python/flash_dmattn/_ops.py.
namespace flash_dmattn::binding {
namespace {

// What forward and backward have in common.
struct Attention {
  CallDevice device;
  Problem problem;
  Inputs in;
  Execution execution;
  std::vector<Tensor> owned;  // memory that `in` points to

  explicit Attention(const Tensor& q) : device(q) {}

  const void* own(const Tensor& tensor) {
    owned.push_back(tensor);
    return tensor.const_data_ptr();
  }
};

struct Options {
  const OptionalTensor& key_list;  // instead of key_intervals
  const OptionalTensor& key_count;
  const std::vector<std::int64_t>& key_bound;  // base and per_query of a KeyBound, or nothing
  bool causal;
  double scale;
  double softcap;
  bool saturate;
  bool deterministic;
  const std::string& backend;
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
  const Tensor dense = torch::stable::contiguous(intervals);
  const std::int64_t batch = dense.size(0), heads = dense.size(1);
  call.problem.intervals_shape = {batch, heads};
  call.in.intervals = {.data = static_cast<const KeyInterval*>(call.own(dense)),
                       .stride_batch = batch == 1 ? 0 : heads * p.seqlen_k,
                       .stride_head = heads == 1 ? 0 : p.seqlen_k};
}

// Ascending keys [B, H, n] and how many of them there are [B, H].
KeyList take_key_list(Attention& call, const Tensor& keys, const OptionalTensor& count,
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
  const Tensor dense = torch::stable::contiguous(keys);
  call.problem.intervals_shape = {keys.size(0), keys.size(1)};
  return {.keys = static_cast<const std::int32_t*>(call.own(dense)),
          .count = static_cast<const std::int32_t*>(call.own(torch::stable::contiguous(*count))),
          .stride = keys.size(2)};
}

KeyBound bound_of(const PlanArgs& args, const std::vector<std::int64_t>& given, Execution execution,
                  const Tensor& like) {
  if (given.size() == 2) return {given[0], given[1]};
  if (!given.empty()) {
    throw InvalidArgument("key_bound", std::to_string(given.size()) + " numbers",
                          "base and per_query, or none when unknown");
  }
  const Tensor workspace = give_workspace(execution, measure_workspace_size(args, execution), like);
  return measure_key_bound(args, execution);
}

// Not where lists of all keys would take more than this: intervals as wide as the keys (a prefix, padding)
// leave little to skip, and the GPU can also walk all keys and look at each one's interval.
bool is_worth_a_plan(const PlanArgs& args, const Execution& execution) {
  constexpr std::int64_t most_entries = std::int64_t{1} << 24;
  const std::int64_t entries = plan_entries(args, execution);
  const std::int64_t tiles = (args.seqlen_q + args.tile_rows - 1) / args.tile_rows;
  return entries <= most_entries || entries < args.batch * args.heads * tiles * args.seqlen_k;
}

// The plan lives as long as one call. Keeping it from forward to backward would save its construction,
// which is a small part of either, and cost its memory in every layer of a model in between.
void take_plan(Attention& call, const Tensor& like, const KeyList& list, const Options& options) {
  const Problem& p = call.problem;
  PlanArgs args{.device = p.device,
                .batch = p.intervals_shape[0],
                .heads = p.intervals_shape[1],
                .seqlen_q = p.seqlen_q,
                .seqlen_k = p.seqlen_k,
                .tile_rows = query_tile_rows(p, options.backend),
                .causal = p.causal,
                .intervals = call.in.intervals,
                .bound = {},
                .list = list};
  Execution execution = call.execution;
  if (p.device == Device::cuda && list.keys == nullptr) {
    args.bound = bound_of(args, options.key_bound, execution, like);
    if (!is_worth_a_plan(args, execution)) return;
  }
  const Tensor workspace = give_workspace(execution, plan_workspace_size(args, execution), like);
  const std::int64_t entries = plan_entries(args, execution);
  const std::int64_t tiles = (p.seqlen_q + args.tile_rows - 1) / args.tile_rows;
  const auto lists = static_cast<std::size_t>(args.batch * args.heads * tiles);

  const Tensor storage =
      allocate_bytes(lists * (sizeof(std::int64_t) + 2 * sizeof(std::int32_t)) +
                         static_cast<std::size_t>(entries) * sizeof(std::int32_t),
                     like);
  call.own(storage);
  auto* begin = static_cast<std::int64_t*>(storage.mutable_data_ptr());
  auto* count = reinterpret_cast<std::int32_t*>(begin + lists);
  const PlanBuffers buffers{
      .begin = begin, .count = count, .full = count + lists, .keys = count + 2 * lists};
  call.in.plan = build_plan(args, buffers, execution);
}

Attention prepare(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                  const OptionalTensor& bias, const OptionalTensor& key_intervals,
                  const Options& options, bool bias_needs_gradient) {
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
  p.scale = static_cast<float>(options.scale);
  p.softcap = static_cast<float>(options.softcap);
  p.causal = options.causal;
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
  if (key_intervals) {
    take_intervals(call, *key_intervals, q);
    take_plan(call, q, {}, options);
  } else if (options.key_list) {
    take_plan(call, q, take_key_list(call, *options.key_list, options.key_count, q), options);
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor> forward_op(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_intervals, const OptionalTensor& key_list,
    const OptionalTensor& key_count, std::vector<std::int64_t> key_bound, bool is_causal,
    double scale, double softcap, bool saturate, bool deterministic, std::string backend) {
  const Options options{key_list, key_count, key_bound,     is_causal, scale,
                        softcap,  saturate,  deterministic, backend};
  const Attention call = prepare(q, k, v, mask, bias, key_intervals, options, false);
  const Problem& p = call.problem;
  const ScalarType lse_type = p.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
  const Tensor out = torch::stable::new_empty(q, query_shape(p));
  const Tensor lse = torch::stable::new_empty(q, {p.batch, p.heads_q, p.seqlen_q}, lse_type);
  const Tensor lse_low = torch::stable::new_empty(q, {p.batch, p.heads_q, p.seqlen_q}, lse_type);

  const ForwardArgs args{.problem = p,
                         .in = call.in,
                         .out = mutable_view4(out),
                         .lse = static_cast<float*>(lse.mutable_data_ptr()),
                         .lse_low = static_cast<float*>(lse_low.mutable_data_ptr())};
  Execution execution = call.execution;
  const Tensor workspace =
      give_workspace(execution, forward_workspace_size(args, execution, backend), q);
  flash_dmattn::forward(args, execution, backend);
  return {out, lse, lse_low};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_intervals,
    const OptionalTensor& key_list, const OptionalTensor& key_count, const Tensor& out,
    const Tensor& lse, const Tensor& lse_low, std::vector<std::int64_t> key_bound, bool is_causal,
    double scale, double softcap, bool saturate, bool deterministic, std::string backend,
    bool need_dq, bool need_dk, bool need_dv, bool need_dbias) {
  const Options options{key_list, key_count, key_bound,     is_causal, scale,
                        softcap,  saturate,  deterministic, backend};
  Attention call = prepare(q, k, v, mask, bias, key_intervals, options, need_dbias);
  const Problem& p = call.problem;
  expect_like(dout, "dout", query_shape(p), q);
  expect_like(out, "out", query_shape(p), q);

  // An unwanted gradient is an empty tensor here and null data there.
  const auto gradient = [&](bool needed, const std::array<std::int64_t, 4>& shape,
                            ScalarType type) {
    return needed ? torch::stable::new_empty(q, shape, type)
                  : torch::stable::new_empty(q, {0}, type);
  };
  const ScalarType type = q.scalar_type();
  const Tensor dq = gradient(need_dq, query_shape(p), type);
  const Tensor dk = gradient(need_dk, key_shape(p), type);
  const Tensor dv = gradient(need_dv, key_shape(p), type);
  const Tensor dbias = gradient(need_dbias, p.bias_shape, bias ? bias->scalar_type() : type);
  const auto view = [](bool needed, const Tensor& tensor) {
    return needed ? mutable_view4(tensor) : Tensor4{};
  };

  const auto lse_data = [&](const Tensor& tensor, const char* name) {
    if (tensor.numel() != p.batch * p.heads_q * p.seqlen_q) {
      throw InvalidArgument(name, shape_text(tensor), "what forward returned");
    }
    return static_cast<const float*>(call.own(torch::stable::contiguous(tensor)));
  };
  BackwardArgs args;
  args.problem = p;
  args.in = call.in;
  args.out = take_rows(call, out);
  args.dout = take_rows(call, dout);
  args.lse = lse_data(lse, "lse");
  args.lse_low = lse_data(lse_low, "lse_low");
  args.dq = view(need_dq, dq);
  args.dk = view(need_dk, dk);
  args.dv = view(need_dv, dv);
  args.dbias = view(need_dbias, dbias);
  Execution execution = call.execution;
  const Tensor workspace =
      give_workspace(execution, backward_workspace_size(args, execution, backend), q);
  flash_dmattn::backward(args, execution, backend);
  return {dq, dk, dv, dbias};
}

Selection selection_of(const std::string& name) {
  if (name == "per_query") return Selection::per_query;
  if (name == "global") return Selection::global;
  throw InvalidArgument("selection", "\"" + name + "\"", "\"per_query\" or \"global\"");
}

SelectionArgs selection_args(const Tensor& scores, const OptionalTensor& key_mask,
                             std::int64_t window, const std::string& selection, bool is_causal) {
  if (scores.dim() != 3) throw InvalidArgument("scores", shape_text(scores), "shape [B, H, Sk]");
  SelectionArgs args;
  args.batch = scores.size(0);
  args.heads = scores.size(1);
  args.seqlen_k = scores.size(2);
  args.window = window;
  args.selection = selection_of(selection);
  args.causal = is_causal;
  args.scores = scores.const_data_ptr();
  args.scores_dtype = dtype_of(scores, "scores");
  for (std::size_t d = 0; d < 3; ++d) {
    args.scores_stride[d] = scores.stride(static_cast<std::int64_t>(d));
  }
  if (!key_mask) return args;
  expect_on_device_of(*key_mask, "key_mask", scores, "scores");
  if (key_mask->dim() != 3 || key_mask->scalar_type() != ScalarType::Bool) {
    throw InvalidArgument("key_mask", shape_text(*key_mask), "bool of shape [B or 1, H or 1, Sk]");
  }
  args.key_mask = static_cast<const std::uint8_t*>(key_mask->const_data_ptr());
  for (std::size_t d = 0; d < 3; ++d) {
    const auto dim = static_cast<std::int64_t>(d);
    const bool one = d < 2 && key_mask->size(dim) == 1;
    if (!one && key_mask->size(dim) != scores.size(dim)) {
      throw InvalidArgument("key_mask", shape_text(*key_mask),
                            "bool that broadcasts to " + shape_text(scores));
    }
    args.key_mask_stride[d] = one ? 0 : key_mask->stride(dim);
  }
  return args;
}

Tensor select_op(const Tensor& scores, const OptionalTensor& key_mask, std::int64_t window,
                 std::string selection, bool is_causal, std::int64_t query_length) {
  const CallDevice device(scores);
  SelectionArgs args = selection_args(scores, key_mask, window, selection, is_causal);
  args.device = device.device();
  args.seqlen_q = query_length;
  const Tensor intervals =
      torch::stable::new_empty(scores, {args.batch, args.heads, args.seqlen_k, 2}, ScalarType::Int);
  args.intervals = static_cast<KeyInterval*>(intervals.mutable_data_ptr());
  Execution execution = device.execution(scores.numel());
  const Tensor workspace =
      give_workspace(execution, select_workspace_size(args, execution), scores);
  select_key_intervals(args, execution);
  return intervals;
}

// Ascending keys [B, H, n] of a global selection and how many they are [B, H].
std::tuple<Tensor, Tensor> select_list_op(const Tensor& scores, const OptionalTensor& key_mask,
                                          std::int64_t window) {
  const CallDevice device(scores);
  SelectionArgs args = selection_args(scores, key_mask, window, "global", false);
  args.device = device.device();
  const Tensor keys = torch::stable::new_empty(
      scores, {args.batch, args.heads, key_list_stride(args)}, ScalarType::Int);
  const Tensor count = torch::stable::new_empty(scores, {args.batch, args.heads}, ScalarType::Int);
  Execution execution = device.execution(scores.numel());
  const Tensor workspace = give_workspace(execution, select_list_workspace_size(args), scores);
  select_key_list(args, static_cast<std::int32_t*>(keys.mutable_data_ptr()),
                  static_cast<std::int32_t*>(count.mutable_data_ptr()), execution);
  return {keys, count};
}

// {base, per_query} of intervals [B, H, Sk, 2].
std::vector<std::int64_t> measure_op(const Tensor& key_intervals, std::int64_t query_length) {
  if (key_intervals.dim() != 4 || key_intervals.size(3) != 2 ||
      key_intervals.scalar_type() != ScalarType::Int) {
    throw InvalidArgument("key_intervals", shape_text(key_intervals),
                          "int32 of shape [B, H, Sk, 2]");
  }
  const CallDevice device(key_intervals);
  const Tensor dense = torch::stable::contiguous(key_intervals);
  PlanArgs args;
  args.device = device.device();
  args.batch = dense.size(0);
  args.heads = dense.size(1);
  args.seqlen_k = dense.size(2);
  args.seqlen_q = query_length;
  args.tile_rows = 128;  // of the GPU's plans
  args.intervals = {.data = static_cast<const KeyInterval*>(dense.const_data_ptr()),
                    .stride_batch = args.heads * args.seqlen_k,
                    .stride_head = args.seqlen_k};
  const Execution execution = device.execution(dense.numel());
  const KeyBound bound = bound_of(args, {}, execution, dense);
  return {bound.base, bound.per_query};
}

// Offsets of packed documents: int32, non-decreasing from 0, the last one at most `total`.
const std::int32_t* offsets_of(const Tensor& cu_seqlens, std::string_view argument,
                               std::int64_t total) {
  const bool right_type = cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 &&
                          cu_seqlens.scalar_type() == ScalarType::Int && cu_seqlens.is_contiguous();
  if (!right_type) {
    throw InvalidArgument(argument, shape_text(cu_seqlens),
                          "contiguous int32 of shape [documents + 1]");
  }
  const auto* offsets = static_cast<const std::int32_t*>(cu_seqlens.const_data_ptr());
  const std::int64_t documents = cu_seqlens.size(0) - 1;
  bool rising = offsets[0] == 0;
  for (std::int64_t i = 0; i < documents; ++i) rising = rising && offsets[i] <= offsets[i + 1];
  if (!rising || offsets[documents] > total) {
    throw InvalidArgument(argument, "last offset " + std::to_string(offsets[documents]),
                          "offsets that rise from 0 to at most " + std::to_string(total));
  }
  return offsets;
}

// Selection within each of the documents packed into one row; scores and intervals [1, H, total_k]. On a
// GPU, where the offsets cannot be read, it is in python/flash_dmattn/packed.py.
Tensor select_varlen_op(const Tensor& scores, const Tensor& cu_seqlens_q,
                        const Tensor& cu_seqlens_k, std::int64_t window, std::string selection,
                        bool is_causal, std::int64_t query_length) {
  SelectionArgs args = selection_args(scores, std::nullopt, window, selection, is_causal);
  const std::int64_t total_k = args.seqlen_k;
  const std::int64_t documents = cu_seqlens_k.size(0) - 1;
  if (args.batch != 1 || cu_seqlens_q.numel() != cu_seqlens_k.numel()) {
    throw InvalidArgument("cu_seqlens_q", shape_text(cu_seqlens_q),
                          "the shape of cu_seqlens_k, and scores of shape [1, H, total_k]");
  }
  const std::int32_t* begin_q = offsets_of(cu_seqlens_q, "cu_seqlens_q", query_length);
  const std::int32_t* begin_k = offsets_of(cu_seqlens_k, "cu_seqlens_k", total_k);
  const Tensor intervals =
      torch::stable::new_zeros(scores, {1, args.heads, total_k, 2}, ScalarType::Int);
  auto* const packed = static_cast<KeyInterval*>(intervals.mutable_data_ptr());

  std::int64_t longest = 0;
  for (std::int64_t d = 0; d < documents; ++d) {
    longest = std::max<std::int64_t>(longest, begin_k[d + 1] - begin_k[d]);
  }
  Execution execution = CallDevice(scores).execution(scores.numel());
  args.seqlen_k = longest;
  args.seqlen_q = query_length;
  const Tensor workspace =
      give_workspace(execution, select_workspace_size(args, execution), scores);
  const Tensor scratch =
      allocate_bytes(static_cast<std::size_t>(args.heads * longest) * sizeof(KeyInterval), scores);
  args.intervals = static_cast<KeyInterval*>(scratch.mutable_data_ptr());
  for (std::int64_t d = 0; d < documents; ++d) {
    args.seqlen_q = begin_q[d + 1] - begin_q[d];
    args.seqlen_k = begin_k[d + 1] - begin_k[d];
    args.scores = static_cast<const char*>(scores.const_data_ptr()) +
                  begin_k[d] * args.scores_stride[2] * size_of(args.scores_dtype);
    select_key_intervals(args, execution);
    for (std::int64_t h = 0; h < args.heads; ++h) {
      for (std::int64_t j = 0; j < args.seqlen_k; ++j) {
        const KeyInterval own = args.intervals[h * args.seqlen_k + j];
        packed[h * total_k + begin_k[d] + j] = {own.first + begin_q[d], own.last + begin_q[d]};
      }
    }
  }
  return intervals;
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

STABLE_TORCH_LIBRARY(flash_dmattn, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? key_intervals, "
      "Tensor? key_list, Tensor? key_count, int[] key_bound, bool is_causal, float scale, float "
      "softcap, bool saturate, bool "
      "deterministic, str backend) "
      "-> (Tensor out, Tensor lse, Tensor lse_low)");
  m.def(
      "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, "
      "Tensor? key_intervals, Tensor? key_list, Tensor? key_count, Tensor out, Tensor lse, Tensor "
      "lse_low, int[] key_bound, bool "
      "is_causal, float scale, "
      "float softcap, bool saturate, bool deterministic, str backend, bool need_dq, bool need_dk, "
      "bool need_dv, bool need_dbias) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
  m.def(
      "select_key_intervals(Tensor scores, Tensor? key_mask, int window, str selection, "
      "bool is_causal, int query_length) -> Tensor");
  m.def(
      "select_key_intervals_varlen(Tensor scores, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "int window, str selection, bool is_causal, int query_length) -> Tensor");
  m.def(
      "select_key_list(Tensor scores, Tensor? key_mask, int window) -> (Tensor keys, Tensor "
      "count)");
  m.def("measure_key_bound(Tensor key_intervals, int query_length) -> int[]");
  m.def("backends() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("select_key_intervals", TORCH_BOX(&select_op));
  m.impl("measure_key_bound", TORCH_BOX(&measure_op));
  m.impl("select_key_intervals_varlen", TORCH_BOX(&select_varlen_op));
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
  m.impl("select_key_intervals", TORCH_BOX(&select_op));
  m.impl("select_key_list", TORCH_BOX(&select_list_op));
  m.impl("measure_key_bound", TORCH_BOX(&measure_op));
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CompositeExplicitAutograd, m) {
  m.impl("backends", TORCH_BOX(&backends_op));
}

}  // namespace flash_dmattn::binding
