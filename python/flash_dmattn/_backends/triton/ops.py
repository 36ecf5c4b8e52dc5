"""The torch operators of the Triton backend: shape inference and derivatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..._core.autograd import (
    NO_SECOND_DERIVATIVE,
    gradients_of_inputs,
    save_for_backward,
    saved_by_name,
)
from ..._core.load import NAMESPACE
from ..._core.numerics import Numerics
from ..._core.signatures import GRADIENTS, Signature
from ...keys.visible import Visible
from . import launch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible: Visible,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    """Computes out and the statistics [1, B, Hq, Sq], which are lse, for arguments in normal form."""
    value_dim = v.shape[3]
    if value_dim < q.shape[3]:  # the kernels have one head dimension
        v = F.pad(v, (0, q.shape[3] - value_dim))
    level = None
    if bias is not None and bias.dtype == torch.float32 and bias.numel() > 0:
        level = _row_level(bias.detach())
        bias = bias - level
    keys = visible.intervals
    out, lse, *_ = forward(
        q,
        k,
        v,
        visible.mask,
        bias,
        None if keys is None else keys.intervals,
        [] if keys is None or keys.bound is None else list(keys.bound),
        visible.is_causal,
        numerics.scale,
        numerics.softcap,
        numerics.saturate,
    )
    if level is not None:
        lse = lse + level[..., 0].repeat_interleave(q.shape[2] // level.shape[1], 1)
    return out if out.shape[3] == value_dim else out[..., :value_dim], lse.unsqueeze(0)


def _row_level(bias: Tensor) -> Tensor:
    """Returns the largest bias of each row if it exceeds 1,024 in magnitude and none is further than 1,024 below it, else 0.
    Biases beyond 2^24 do not count. [B or 1, H, Sq or 1, 1].

    The softmax of a row does not change if it is subtracted, and the kernels, which add biases to q . k, then keep the
    digits of biases that are large and close. If they are not close, queries may see the small ones alone, whose digits
    it would cost. Heads that see a score beyond 2^14 are then computed in fp64.
    """
    counts = bias.abs() <= 2.0**24
    largest = bias.masked_fill(~counts, -math.inf).amax(3, keepdim=True)
    least = bias.masked_fill(~counts, math.inf).amin(3, keepdim=True)
    close = (least <= largest) & (largest - least <= 1024)  # not where none counts
    return largest.where(close & (largest.abs() > 1024), 0)


def _problem(named: dict[str, object]) -> launch.Problem:
    q = named["q"]
    if q.dtype == torch.float64:
        raise TypeError(
            "query: got float64, expected float32, bfloat16 or float16; the reference backend has float64"
        )
    if q.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "query: got a tensor on the CPU, where Triton has no kernels; expected a GPU's"
        )
    return launch.Problem(**{name: named[name] for name in FORWARD.arguments if name != "saturate"})


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? key_intervals"
_RESULTS = "Tensor out, Tensor lse, Tensor lse_low, Tensor flags"
_OPTIONS = "SymInt[] key_bound, bool is_causal, float scale, float softcap, bool saturate"
_GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dbias"


@torch.library.custom_op(
    f"{NAMESPACE}::triton_forward", mutates_args=(),
    schema=f"({_INPUTS}, {_OPTIONS}) -> ({_RESULTS})",
)  # fmt: skip
def forward(*arguments):
    """Returns out, lse, lse_low, and int32 [B, Hkv], 1 for heads that were computed in fp64."""
    named = FORWARD.arguments_by_name(arguments)
    with _device_of(named["q"]):
        return launch.forward(_problem(named), named["saturate"])


@torch.library.custom_op(
    f"{NAMESPACE}::triton_backward", mutates_args=(),
    schema=f"(Tensor dout, {_INPUTS}, {_RESULTS}, Tensor? dlse, {_OPTIONS}, bool[] needs) -> ({_GRADIENTS})",
)  # fmt: skip
def backward(*arguments):
    """Returns dq, dk, dv and dbias, empty if `needs` is False."""
    named = BACKWARD.arguments_by_name(arguments)
    q = named["q"]
    problem = _problem(named)
    names = ("dout", *FORWARD.results, "dlse", "saturate", "needs")
    with _device_of(q):
        gradients = launch.backward(problem, **{name: named[name] for name in names})
    return tuple(q.new_empty(0) if g is None else g for g in gradients)


FORWARD, BACKWARD = (Signature(operator._opoverload) for operator in (forward, backward))


def _device_of(tensor: Tensor):
    """Returns a context in which the device of a tensor is current, because Triton launches on the current device."""
    if tensor.device.type == "cpu":
        return torch.device("cpu")
    return torch.get_device_module(tensor.device).device(tensor.device)


@forward.register_fake
def _forward_fake(*arguments):
    named = FORWARD.arguments_by_name(arguments)
    q, k = named["q"], named["k"]
    batch, seqlen_q, heads_q, _ = q.shape
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)
    flags = q.new_empty((batch, k.shape[2]), dtype=torch.int32)
    return q.new_empty(q.shape), lse, torch.empty_like(lse), flags


@backward.register_fake
def _backward_fake(*arguments):
    named = BACKWARD.arguments_by_name(arguments)
    tensors = (named["q"] if named[name] is None else named[name] for name in GRADIENTS)
    return tuple(
        t.new_empty(t.shape if needed else (0,))
        for t, needed in zip(tensors, named["needs"], strict=True)
    )


def _setup_context(ctx, inputs, output):
    save_for_backward(ctx, FORWARD, inputs, output)


def _forward_derivative(ctx, dout, dlse, dlse_low, dflags):
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    named = saved_by_name(FORWARD, ctx.saved_tensors, ctx.options)
    if dout is None:
        dout = torch.zeros_like(named["q"])
    needs = [ctx.needs_input_grad[i] for i in FORWARD.differentiable]
    named |= {"dout": dout, "dlse": dlse, "needs": needs}
    gradients = backward(*map(named.get, BACKWARD.arguments))
    return gradients_of_inputs(ctx, FORWARD, gradients, needs)


def _backward_derivative(ctx, *gradients):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


forward.register_autograd(_forward_derivative, setup_context=_setup_context)
backward.register_autograd(_backward_derivative)
