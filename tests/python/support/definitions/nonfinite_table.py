"""The table of docs/numerics.md, which has the results of non-finite inputs under saturation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_dmattn.check.compare import GRADIENT_LIMIT

AT = 20  # the row of q, k or v, and the key of a bias
_INF, _NAN = torch.inf, torch.nan
_FLOAT_MAX = torch.finfo(torch.float32).max
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Values by tensor and column; the column of a bias is ignored.
ROWS: dict[str, dict[str, dict[int, float]]] = {
    **{
        f"{name} = {value}": {name: {3: value}}
        for name in ("q", "k", "bias", "v", "dout")
        for value in (_INF, -_INF, _NAN)
    },
    "q: inf - inf": {"q": {3: _INF, 4: _INF}},
    "k: inf - inf": {"k": {3: _INF, 4: _INF}},
    "q: 0 * inf": {"q": {3: _INF}, "zeros of k": {3: 0.0}},
    "k: 0 * inf": {"k": {3: _INF}, "zeros of q": {3: 0.0}},
    "q and k = inf": {"q": {3: _INF}, "k": {5: _INF}},
    "k = inf, bias = inf": {"k": {3: _INF}, "bias": {3: _INF}},
    "v = inf, bias = -inf": {"v": {3: _INF}, "bias": {3: -_INF}},
}


def make_inputs(
    row: str,
    length: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    heads: tuple[int, int] = (4, 2),
) -> dict:
    query_heads, key_heads = heads
    shapes = {"q": query_heads, "k": key_heads, "v": key_heads, "dout": query_heads}
    inputs = {name: torch.randn(1, length, n, head_dim) for name, n in shapes.items()}
    inputs["bias"] = torch.randn(1, query_heads, length)
    for name, values in ROWS[row].items():
        for column, value in values.items():
            if name == "bias":
                inputs["bias"][..., AT] = value
            elif name.startswith("zeros"):  # every second row
                inputs[name[-1]][:, ::2, :, column] = value
            else:
                inputs[name][:, AT, :, column] = value
    return {name: t.to(dtype).to(device) for name, t in inputs.items()}


def expected(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Computes out [1, S, H, D] and lse [1, H, S] by the table, in double. All queries see all keys."""
    dtype = inputs["q"].dtype
    q, k, v, bias = (inputs[name].double().cpu() for name in ("q", "k", "v", "bias"))
    q, k, v = (
        t.repeat_interleave(bias.shape[1] // t.shape[2], 2).transpose(1, 2) for t in (q, k, v)
    )
    # One product at a time: a sum of the matrix unit need not keep inf - inf apart.
    product = (q[:, :, :, None] * k[:, :, None]).sum(-1) / q.shape[-1] ** 0.5
    visible = bias[:, :, None] > -_INF
    score = product + bias[:, :, None].nan_to_num(0, _FLOAT_MAX, 0)
    score = score.nan_to_num(-_FLOAT_MAX).clamp(-_FLOAT_MAX, _FLOAT_MAX)
    score = torch.where(visible, score, -_INF)
    p = score.softmax(-1)
    weighed = torch.where((p > 0)[..., None], p[..., None] * v[:, :, None], 0).sum(-2)
    limit = torch.finfo(dtype).max
    return weighed.nan_to_num(limit, limit, -limit).transpose(1, 2), score.logsumexp(-1)


def assert_row(
    attend: Callable,
    row: str,
    dtype: torch.dtype,
    *,
    length: int = 41,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    device: str = "cpu",
    backward: bool = True,
) -> None:
    """Compares `attend`(q, k, v, bias) -> (out, lse) with the table.
    Gradients must be finite, and a non-finite dout counts as 0."""
    inputs = make_inputs(row, length, head_dim, dtype, device, heads)
    where = f"{row}, {dtype}, {length} x {head_dim}"
    leaves = [inputs[name].requires_grad_(backward) for name in ("q", "k", "v", "bias")]
    out, lse = attend(*leaves)
    with torch.no_grad():
        wanted = expected(inputs)
    assert_close(f"{where}: out", out.detach(), wanted[0], dtype)
    assert_close(f"{where}: lse", lse, wanted[1], dtype)
    if not backward:
        return
    dout = inputs["dout"]
    gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    cleaned = torch.autograd.grad(out, leaves, dout.nan_to_num(0, 0, 0))
    limit = GRADIENT_LIMIT.get(dtype, torch.finfo(dtype).max)
    for name, got, wanted in zip(("dq", "dk", "dv", "dbias"), gradients, cleaned, strict=True):
        largest = got.abs().max().double().item()
        assert largest <= limit, f"{where}: {name} has {largest}"
        if "dout" in ROWS[row]:  # bits differ, because on a GPU the order of additions varies
            assert_close(f"{where}: {name}", got, wanted, dtype)


def assert_close(where: str, got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    got, wanted = got.double().cpu(), wanted.double().cpu()
    wrong = ~((got - wanted).abs() <= _TOLERANCE[dtype] * (1 + wanted.abs()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{where}: {wrong.sum().item()} of {wrong.numel()} are wrong; at {at} got {got[at].item()}, "
            f"expected {wanted[at].item()}"
        )
