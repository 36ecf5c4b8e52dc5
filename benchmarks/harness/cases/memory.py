"""Measures the memory of a training step on a GPU, with each form of mask and at a long sequence."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.check.memory import bytes_of, peak_bytes

from .. import record
from ..case import PER_QUERY, Case
from ..sides import Declined
from . import all_sides as side_names  # noqa: F401

_MASKED = Case(PER_QUERY, 4096, 128, 2048, heads_q=32, heads_kv=32, batch=2)
_LONG = Case(PER_QUERY, 131072, 128, 2048, heads_q=16, heads_kv=8)


def expect_case_runs(name: str, options: argparse.Namespace) -> None:
    """Raises Declined if the device is not a GPU."""
    if options.device != "cuda":
        raise Declined("it is about the memory of a GPU")


def measure_rows(name: str, options: argparse.Namespace) -> Iterator[dict]:
    batch, heads, n = _MASKED.batch, _MASKED.heads_kv, _MASKED.seqlen
    yield _row("no mask", _MASKED)
    yield _row("3-d mask", _MASKED, torch.rand(batch, heads, n, device="cuda") < 0.9)
    causal = torch.ones(batch, 1, n, n, dtype=torch.bool, device="cuda").tril()
    yield _row("4-d causal mask", _MASKED, causal)
    yield _row("4-d random mask", _MASKED, torch.rand(batch, 1, n, n, device="cuda") < 0.9)
    yield _row("no mask", _LONG)


def _row(mask_name: str, case: Case, mask: Tensor | None = None) -> dict:
    heads = (case.heads_q, case.heads_kv, case.heads_kv)
    shapes = [(case.batch, case.seqlen, h, case.head_dim) for h in heads]
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in (*shapes, (case.batch, case.heads_kv, case.seqlen))
    ]
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        q, k, v, bias = leaves
        choice = {"is_causal": True, "keep_window_size": case.window}
        out = flash_dmattn_func(q, k, v, attn_mask=mask, attn_bias=bias, **choice)
        return out, *torch.autograd.grad(out, leaves, dout)

    step()  # the first step also loads what is loaded lazily
    peak, results = peak_bytes(step, "cuda")
    sizes = {"peak_mb": peak / 1e6, "results_mb": bytes_of(results) / 1e6}
    return record.row(f"memory, {mask_name}, {case}", "cuda", "bfloat16", **sizes)
