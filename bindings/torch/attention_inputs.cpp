#include "attention_inputs.h"

#include "selection_ops.h"

namespace flash_dmattn::binding {

ConstTensor4 take_rows(Attention& call, const Tensor& tensor) {
  const Tensor dense = with_dense_rows(tensor);
  call.own(dense);
  return view4(dense);
}

namespace {

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

// The bound of the intervals as given, or measured where it is unknown and a GPU needs it.
KeyBound take_bound(const Attention& call, const Tensor& like, const VisibleKeys& keys) {
  const KeyBound bound = given_bound(keys.bound);
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

}  // namespace

Attention take_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                      const OptionalTensor& bias, const Options& options,
                      bool bias_needs_gradient) {
  if (q.dim() != 4) throw InvalidArgument("q", shape_text(q), "shape [B, Sq, Hq, D]");
  if (k.dim() != 4) throw InvalidArgument("k", shape_text(k), "shape [B, Sk, Hkv, D]");
  if (v.dim() != 4 || v.size(3) == 0) {
    throw InvalidArgument("v", shape_text(v), "shape [B, Sk, Hkv, Dv], Dv from 1 to D");
  }
  Attention call(q);
  Problem& p = call.problem;
  p.device = call.device.device();
  p.batch = q.size(0);
  p.seqlen_q = q.size(1);
  p.heads_q = q.size(2);
  p.head_dim = q.size(3);
  p.value_dim = v.size(3);
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

  expect(k, "k", key_shape(p), q.scalar_type(), q, "q");
  expect(v, "v", value_shape(p), q.scalar_type(), q, "q");
  call.in.q = take_rows(call, q);
  call.in.k = take_rows(call, k);
  call.in.v = take_rows(call, v);
  if (mask) {
    if (mask->scalar_type() != ScalarType::Bool) {
      throw InvalidArgument("mask", dtype_text(mask->scalar_type()), "torch.bool");
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

Attention prepare(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                  const OptionalTensor& bias, const VisibleKeys& keys, const Options& options,
                  bool bias_needs_gradient) {
  Attention call = take_inputs(q, k, v, mask, bias, options, bias_needs_gradient);
  if (keys.intervals) {
    take_intervals(call, *keys.intervals, q);
    call.in.visibility.bound = take_bound(call, q, keys);
  }
  return call;
}

}  // namespace flash_dmattn::binding
