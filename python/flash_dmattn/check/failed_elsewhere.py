"""Calls for which other implementations of dynamic mask attention failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import flash_dmattn_func
from ..integrations.attention_interface.dtypes import fdma_peft_integration_check
from .compare import Verdict, compare_result
from .memory import bytes_of, peak_bytes
from .oracle import Problem, Result, causal_elements, select


@dataclass(frozen=True)
class Setting:
    """The subject of a check: the attention function of a backend, on a device, small or not."""

    function: Callable
    device: str
    dtype: torch.dtype
    full: bool
    small: bool = False  # so that an interpreter finishes

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def problem(self, seqlen_q, seqlen_k, head_dim, heads=(2, 1), batch=1, **parts) -> Problem:
        heads_q, heads_kv = heads
        q, dout = (self.normal(batch, seqlen_q, heads_q, head_dim) for _ in range(2))
        k, v = (self.normal(batch, seqlen_k, heads_kv, head_dim) for _ in range(2))
        return Problem(q, k, v, dout, causal=True, **parts)


def forward_and_backward(
    problem: Problem, function: Callable = flash_dmattn_func, **options
) -> Result:
    """Runs both. All inputs require gradients; mask and bias are passed in the 4-d form of the problem."""
    q, k, v = (t.detach().requires_grad_() for t in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else problem.bias.detach().requires_grad_()
    out, lse = function(
        q, k, v, attn_mask=problem.mask, attn_bias=bias, is_causal=problem.causal,
        return_lse=True, **options,
    )  # fmt: skip
    out.backward(problem.dout)
    return Result(out, lse, q.grad, k.grad, v.grad, None if bias is None else bias.grad)


def wide_mask_and_bias(setting: Setting) -> Iterator[Verdict]:
    """Compares a call with a 4-d mask and bias (length 4096, window 2048, D 128), whose results were wrong elsewhere."""
    length = 64 if setting.small else 4096 if setting.full or setting.device != "cpu" else 1024
    bias = setting.normal(1, 1, length, length)
    causal = causal_elements(length, length).to(setting.device)
    best = bias.masked_fill(~causal, -torch.inf).topk(length // 2, dim=-1).indices
    mask = torch.zeros_like(bias, dtype=torch.bool).scatter_(-1, best, True) & causal
    problem = setting.problem(length, length, 128, mask=mask, bias=bias)
    yield from compare_result(forward_and_backward(problem, setting.function), problem)


_JUDGED_SEEDS = 12
_SIZES = ((256, 256, 64), (256, 192, 64), (192, 192, 64), (256, 256, 80), (100, 192, 80))


def sizes_without_full_tiles(setting: Setting) -> Iterator[Verdict]:
    """Compares lengths and head dimensions that fill no tile. Elsewhere some seeds gave NaN and inf in dv."""
    seeds = 200 if setting.full else 2 if setting.small else _JUDGED_SEEDS
    for seqlen_q, seqlen_k, head_dim in _SIZES:
        if setting.small:
            seqlen_q, seqlen_k = seqlen_q // 8, seqlen_k // 8
        for seed in range(seeds):
            torch.manual_seed(seed)
            problem = setting.problem(seqlen_q, seqlen_k, head_dim)
            result = forward_and_backward(problem, setting.function)
            yield from all_finite(
                result, f"Sq {seqlen_q}, Sk {seqlen_k}, D {head_dim}, seed {seed}"
            )
            if seed < _JUDGED_SEEDS:
                yield from compare_result(result, problem)


def all_finite(result: Result, where: str) -> Iterator[Verdict]:
    """Yields a verdict for each gradient that is not finite."""
    for name in ("dq", "dk", "dv", "dbias"):
        gradient = getattr(result, name)
        if gradient is None or gradient.isfinite().all():
            continue
        worst = tuple(int(i) for i in (~gradient.isfinite()).nonzero()[0])
        message = (
            f"{name}{list(worst)}: got {gradient[worst].item()}, expected a finite number ({where})"
        )
        yield Verdict(name, message=message)


def choice_of_keys(setting: Setting) -> Iterator[Verdict]:
    """Compares a call with keep_window_size. Elsewhere the gradient passed through the top-k, and as NaN through the fill
    value of padding."""
    length, window, padding = (60, 8, 10) if setting.small else (300, 32, 40)
    bias = setting.normal(2, 2, length)
    bias[0, :, :padding] = torch.finfo(setting.dtype).min  # the usual fill of padding
    allowed = causal_elements(length, length).to(setting.device)
    allowed = allowed & (bias > torch.finfo(setting.dtype).min)[:, :, None]
    problem = setting.problem(length, length, 32, heads=(2, 2), batch=2, bias=bias[:, :, None])
    problem.shown = select(bias, window, allowed)
    result = forward_and_backward(problem, setting.function, keep_window_size=window)
    yield from compare_result(result, problem)
    yield from all_finite(result, "padding filled with finfo.min")
    leak = result.dbias[0, :, :, :padding].abs().max().item()
    yield Verdict("dbias", leak, 0.0, f"dbias of padding: got {leak}, expected 0" if leak else "")


def cast_of_peft(setting: Setting) -> Iterator[Verdict]:
    """Checks the cast of the inputs that PEFT leaves in float32 next to 16-bit ones. None must stay None."""
    problem = setting.problem(64, 64, 32)
    wide = (problem.q.float(), problem.k.float(), problem.v.float(), None)
    *cast, none = fdma_peft_integration_check(*wide, setting.dtype)
    same = none is None and all(
        t.dtype == setting.dtype and torch.equal(t, kept)
        for t, kept in zip(cast, (problem.q, problem.k, problem.v), strict=True)
    )
    yield Verdict("cast", message="" if same else f"cast: got {[t.dtype for t in cast]}, {none}")
    problem.q, problem.k, problem.v = cast
    yield from compare_result(forward_and_backward(problem, setting.function), problem)


def determinism(setting: Setting) -> Iterator[Verdict]:
    """Checks that two runs with deterministic=True agree bit for bit."""
    length = 50 if setting.small else 500
    bias = setting.normal(1, 2, 1, length)
    problem = setting.problem(length, length, 64, heads=(4, 2), bias=bias)
    for window in (None, length // 5):
        runs = [
            forward_and_backward(
                problem, setting.function, keep_window_size=window, deterministic=True
            )
            for _ in range(2)
        ]
        for name in ("out", "dq", "dk", "dv", "dbias"):
            one, two = (getattr(run, name) for run in runs)
            differ = int((one != two).sum())
            message = f"{name}: {differ} of {one.numel()} values differ from run to run"
            yield Verdict(name, message=message if differ else "")


def memory(setting: Setting) -> Iterator[Verdict]:
    """Checks that a 3-d bias with no, a 3-d and a 4-d mask allocates no N x N tensor.

    The memory allowed in addition to inputs, results and gradients is the gradients once more in float32, one bit
    for every element (a packed mask) and a mebibyte per thread for tiles.
    """
    if setting.small:
        raise NotImplementedError("the interpreter takes memory of its own")
    batch, heads, heads_kv, length, head_dim, window = 1, 4, 2, 8192, 64, 256
    if setting.device != "cpu":  # each multiprocessor has sums of its own, 100 MB in all
        batch, heads, heads_kv, length, head_dim, window = 2, 32, 32, 4096, 128, 2048
    keys = torch.arange(length, device=setting.device)
    masks = {
        "no mask": None,
        "3-d mask": (keys >= length // 7).expand(batch, heads_kv, length),
        "4-d mask": (keys <= keys[:, None])[None, None],
    }
    q = setting.normal(batch, length, heads, head_dim).requires_grad_()
    k, v = (setting.normal(batch, length, heads_kv, head_dim).requires_grad_() for _ in range(2))
    bias = setting.normal(batch, heads_kv, length).requires_grad_()
    dout = torch.ones_like(q)
    leaves = (q, k, v, bias)
    bound = 4 * sum(t.numel() for t in leaves) + length * length // 8
    bound += 2**20 * (torch.get_num_threads() if setting.device == "cpu" else 1)
    for name, mask in masks.items():

        def step(mask=mask):
            out, lse = setting.function(
                q, k, v, attn_mask=mask, attn_bias=bias, is_causal=True, keep_window_size=window,
                return_lse=True,
            )  # fmt: skip
            return out, lse, *torch.autograd.grad(out, leaves, dout)

        step()  # modules loaded at first use do not count
        peak, kept = peak_bytes(step, setting.device)
        extra = peak - bytes_of(kept)
        message = (
            f"{name}: {extra / 1e6:.1f} MB in addition to inputs, results and gradients, expected at most "
            f"{bound / 1e6:.1f} (one N x N mask of bytes: {length * length / 1e6:.1f})"
        )
        yield Verdict(name, extra, bound, message if extra > bound else "")


FAILED_ELSEWHERE: dict[str, Callable[[Setting], Iterator[Verdict]]] = {
    "4-d mask and bias": wide_mask_and_bias,
    "tails": sizes_without_full_tiles,
    "choice of keys": choice_of_keys,
    "PEFT cast": cast_of_peft,
    "determinism": determinism,
    "memory, MB": memory,
}
