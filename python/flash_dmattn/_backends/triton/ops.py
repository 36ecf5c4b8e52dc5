"""The torch operators of the Triton backend: shape inference and derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..._core.autograd import NO_SECOND_DERIVATIVE
from ..._core.library import NAMESPACE
from ..._core.numerics import Numerics
from ...keys.visibility import Visibility
from . import launch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Visibility,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    """out and lse of arguments in normal form."""
    value_dim = v.shape[3]
    if value_dim < q.shape[3]:  # the kernels have one head dimension
        v = F.pad(v, (0, q.shape[3] - value_dim))
    keys = visible.operands()
    base, per_query, _ = keys.key_bound or (-1, 0, 0)
    out, lse, *_ = forward(
        q,
        k,
        v,
        visible.mask,
        bias,
        keys.key_intervals,
        [] if base < 0 else [base, per_query],
        visible.is_causal,
        numerics.scale,
        numerics.softcap,
        numerics.saturate,
    )
    return out if out.shape[3] == value_dim else out[..., :value_dim], lse


def _problem(q, k, v, mask, bias, key_intervals, key_bound, is_causal, scale, softcap):
    if q.dtype == torch.float64:
        raise TypeError(
            "query: got float64, expected float32, bfloat16 or float16; the reference backend has float64"
        )
    if q.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "query: got a tensor on the CPU, where Triton has no kernels; expected a GPU's"
        )
    return launch.Problem(q, k, v, mask, bias, key_intervals, key_bound, is_causal, scale, softcap)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? key_intervals"
_RESULTS = "Tensor out, Tensor lse, Tensor lse_low, Tensor flags"
_OPTIONS = "SymInt[] key_bound, bool is_causal, float scale, float softcap, bool saturate"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op(
    f"{NAMESPACE}::triton_forward", mutates_args=(), schema=f"({_INPUTS}, {_OPTIONS}) -> {_FOUR}"
)
def forward(q, *others):
    """out, lse, lse_low, and int32 [B, Hkv]: 1 for heads that were computed in fp64."""
    *others, saturate = others
    with _device_of(q):
        return launch.forward(_problem(q, *others), saturate)


@torch.library.custom_op(
    f"{NAMESPACE}::triton_backward", mutates_args=(),
    schema=f"(Tensor dout, {_INPUTS}, {_RESULTS}, Tensor? dlse, {_OPTIONS}, bool[] needs) -> {_FOUR}",
)  # fmt: skip
def backward(dout, q, k, v, mask, bias, key_intervals, out, lse, lse_low, flags, dlse, *options):
    """dq, dk, dv, dbias; empty where `needs` is False."""
    *options, saturate, needs = options
    problem = _problem(q, k, v, mask, bias, key_intervals, *options)
    with _device_of(q):
        gradients = launch.backward(problem, dout, out, lse, lse_low, flags, dlse, saturate, needs)
    return tuple(q.new_empty(0) if g is None else g for g in gradients)


def _device_of(tensor: Tensor):
    """Triton launches on the current device."""
    if tensor.device.type == "cpu":
        return torch.device("cpu")
    return torch.get_device_module(tensor.device).device(tensor.device)


@forward.register_fake
def _forward_fake(q, k, *others):
    batch, seqlen_q, heads_q, _ = q.shape
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    flags = q.new_empty((batch, k.shape[2]), dtype=torch.int32)
    return q.new_empty(q.shape), lse, torch.empty_like(lse), flags


@backward.register_fake
def _backward_fake(dout, q, k, v, mask, bias, *others):
    needs = others[-1]
    tensors = (q, k, v, q if bias is None else bias)
    return tuple(
        t.new_empty(t.shape if needed else (0,)) for t, needed in zip(tensors, needs, strict=True)
    )


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[:6], inputs[6:]
    _, _, lse_low, flags = output
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(lse_low, flags)
    ctx.set_materialize_grads(False)


def _forward_derivative(ctx, dout, dlse, dlse_low, dflags):
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[0])
    wanted = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    gradients = backward(dout, *saved, dlse, *ctx.options, wanted)
    dq, dk, dv, dbias = (g if w else None for g, w in zip(gradients, wanted, strict=True))
    return dq, dk, dv, None, dbias, *(None,) * (len(ctx.needs_input_grad) - 5)


def _backward_derivative(ctx, *gradients):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


forward.register_autograd(_forward_derivative, setup_context=_setup_context)
backward.register_autograd(_backward_derivative)
