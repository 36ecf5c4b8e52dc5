"""The measured sides of attention: our backends and the rivals. All get the same inputs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import (
    KeyIntervals,
    backends,
    flash_dmattn_func_auto,
    packed_documents,
    prefix_lm,
    select_key_intervals,
    sliding_window,
)

from .case import (
    DENSE,
    DENSE_MASKS,
    EVICTED,
    GLOBAL,
    PER_QUERY,
    PREFIX,
    RECENT,
    SLIDING,
    THRESHOLD,
    WINDOWED_DOCUMENTS,
    Case,
)
from .clock import Step

OURS = ("cuda", "triton", "cpu")
# torch's implementations of dense attention on a GPU.
SDPA_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Declined(Exception):
    """Raised by a side that cannot run a case; the message has the reason."""


def is_reason(side: str, error: Exception) -> bool:
    """Whether an exception is a reason not to measure a side, rather than an error of our program: Declined, too little memory, a
    work that our backend does not support, or any exception of a rival."""
    if side.removesuffix("_compiled") in ("eager", "formula", "cuequivariance", *RIVALS):
        return True
    if isinstance(error, (Declined, MemoryError, torch.OutOfMemoryError, NotImplementedError)):
        return True
    texts = ("expected one that supports", "can't allocate memory")
    return any(text in str(error) for text in texts)


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: Tensor  # [B, N, Hq, D]
    k: Tensor  # [B, N, Hkv, D]
    v: Tensor  # [B, N, Hkv, Dv]
    dout: Tensor  # [B, N, Hq, Dv]
    bias: Tensor | None = None  # [B, Hkv, N], with DENSE_MASKS [B, Hkv, N, N]
    mask: Tensor | None = None  # [B, Hkv, N, N]
    keys: KeyIntervals | None = None
    rule: dict = field(default_factory=dict)  # arguments that select keys by the bias or the scores
    scores: Tensor | None = None  # float32 [B, Hkv, N], only for EVICTED

    def chosen(self) -> KeyIntervals | None:
        """Returns the visible keys as intervals, for a rival; None if all earlier keys or a mask are visible."""
        scores = self.bias if self.scores is None else self.scores
        return select_key_intervals(scores, **self.rule) if self.rule else self.keys

    def bytes_of_elements(self) -> int:
        """Returns the bytes of an N x N mask and bias."""
        return 0 if self.mask is None else self.mask.nbytes + self.bias.nbytes


def draw(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Draws the inputs of a case. Raises Declined if the device cannot hold them."""
    batch, n, heads, heads_kv = case.batch, case.seqlen, case.heads_q, case.heads_kv
    needed = 4 * batch * n * (heads + heads_kv) * case.head_dim * dtype.itemsize
    if case.kind == DENSE_MASKS:
        needed += batch * heads_kv * n**2 * (dtype.itemsize + 1)
    expect_memory(needed, "inputs, output and gradients take", device)

    def normal(*shape):
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    dims = (case.head_dim, case.value_dim or case.head_dim)
    q, dout = (normal(batch, n, heads, d) for d in dims)
    k, v = (normal(batch, n, heads_kv, d) for d in dims)
    return Inputs(case, q, k, v, dout, **_visibility(case, normal, device))


def _visibility(case: Case, normal: Callable[..., Tensor], device: str) -> dict:
    """Returns the fields of Inputs that say which keys are visible and what is added to their scores."""
    batch, n, heads_kv, window = case.batch, case.seqlen, case.heads_kv, case.window
    if case.kind in (PER_QUERY, GLOBAL):
        rule = {"keep_window_size": window, "selection": case.kind}
        return {"bias": normal(batch, heads_kv, n), "rule": rule}
    if case.kind == SLIDING:
        return {"keys": sliding_window(n, window, device=device)}
    if case.kind == PREFIX:
        return {"keys": prefix_lm(n, window, device=device)}
    if length := case.document_length:
        begins = _begins_of_documents(case, device)
        if case.kind == WINDOWED_DOCUMENTS:
            return {"keys": sliding_window(n, window, cu_seqlens_k=begins)}
        return {"keys": packed_documents(begins, key_length=n, max_seqlen_k=length)}
    if case.kind == EVICTED:
        kept = {"keep_window_size": window, "recent_competes": False} if window else {"score_threshold": THRESHOLD}  # fmt: skip
        scores = torch.randn(batch, heads_kv, n, device=device)
        return {"scores": scores, "rule": {"recent_window": RECENT} | kept}
    if case.kind == DENSE_MASKS:
        bias = normal(1).new_empty(batch, heads_kv, n, n).normal_()
        mask = torch.empty(bias.shape, device=device, dtype=torch.bool)
        seen = torch.arange(1, n + 1, device=device)[:, None]
        for head_mask in mask.flatten(0, 1):  # keys are random, so that no tile is empty
            head_mask.copy_((torch.rand(n, n, device=device) * seen < window).tril())
        return {"bias": bias, "mask": mask}
    return {}


def _begins_of_documents(case: Case, device: torch.device | str) -> Tensor:
    begins = [*range(0, case.seqlen, case.document_length), case.seqlen]
    return torch.tensor(begins, dtype=torch.int32, device=device)


def _leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors if t is not None]


def _our_step(backend: str, inputs: Inputs) -> Step:
    """Returns a step with the call that a user makes, which includes selection, schedule and the gradient of the bias."""
    attention = flash_dmattn_func_auto(backend)
    leaves = _leaves(inputs.q, inputs.k, inputs.v, inputs.bias)
    q, k, v, *bias = leaves
    options = {"is_causal": inputs.keys is None, "attn_mask": inputs.mask, "key_intervals": inputs.keys}  # fmt: skip
    options |= inputs.rule | ({"attn_bias": bias[0]} if bias else {})
    if inputs.scores is not None:
        options["selection_scores"] = inputs.scores
    mask_bytes = inputs.bytes_of_elements()
    return Step(lambda: attention(q, k, v, **options), leaves, inputs.dout, mask_bytes)


def _sdpa_step(
    inputs: Inputs, mask: Tensor | None = None, backend: SDPBackend | None = None
) -> Step:
    """Returns a step of scaled_dot_product_attention, either causal or with a mask that is built before timing."""
    case = inputs.case
    group = case.heads_q // case.heads_kv
    q, k, v = _leaves(*(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)))
    if mask is not None and mask.shape[1] not in (1, case.heads_q):
        mask = mask.repeat_interleave(group, 1)
    if mask is not None and case.kind == DENSE_MASKS:
        mask = mask.detach().requires_grad_()
    leaves = [q, k, v] if mask is None or not mask.requires_grad else [q, k, v, mask]

    def forward():
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        # With enable_gqa and a mask, torch would store the N x N scores.
        # Its users avoid that by repeating the keys, and so do we.
        keys, values = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    call = forward if backend is None else sdpa_kernel(backend)(forward)
    return Step(call, leaves, inputs.dout.transpose(1, 2), 0 if mask is None else mask.nbytes)


def _sdpa(inputs: Inputs) -> Step:
    """Returns a step of whichever implementation torch chooses for an N x N mask."""
    case = inputs.case
    if case.kind == DENSE:
        return _sdpa_step(inputs)
    heads = 1 if inputs.keys is not None else case.heads_q
    # torch converts the mask to floating point.
    needed = 5 * case.batch * heads * case.seqlen**2
    expect_memory(2 * needed, "mask and a copy of it take", inputs.q.device)
    if case.kind == DENSE_MASKS:  # SDPA takes mask and bias as one tensor, with one gradient
        return _sdpa_step(inputs, inputs.bias.masked_fill(~inputs.mask, -torch.inf))
    return _sdpa_step(inputs, inputs.chosen().to_mask())


def _dense_only(backend: SDPBackend) -> Callable[[Inputs], Step]:
    def build(inputs: Inputs) -> Step:
        if inputs.case.kind != DENSE:
            raise Declined("has no masks")
        return _sdpa_step(inputs, backend=backend)

    return build


def _flex(inputs: Inputs) -> Step:
    """Returns a step of torch's compiled FlexAttention. Its block mask, which reads the same intervals or mask, is built before
    timing; the bias is added by its score function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, n = inputs.case, inputs.case.seqlen
    group = case.heads_q // case.heads_kv
    leaves = _leaves(*(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)), inputs.bias)
    q, k, v, *bias = leaves
    chosen, mask = inputs.chosen(), inputs.mask
    first = last = None
    if chosen is not None:
        first, last = chosen.intervals.expand(case.batch, case.heads_kv, -1, -1).unbind(-1)

    def is_visible(b, h, i, j):
        if first is not None:
            return (first[b, h // group, j] <= i) & (i < last[b, h // group, j])
        return j <= i if mask is None else mask[b, h // group, i, j]

    added = bias[0] if bias else None

    def add_bias(score, b, h, i, j):
        at = (b, h // group, i, j) if case.kind == DENSE_MASKS else (b, h // group, j)
        return score + added[at]

    make_mask = torch.compile(create_block_mask)  # eager code would allocate N x N
    options = {
        "block_mask": make_mask(is_visible, case.batch, case.heads_q, n, n, device=q.device),
        "score_mod": add_bias if bias else None,
        "enable_gqa": group > 1,
    }
    # With torch's number of stages, tiles of mask and bias exceed the shared memory.
    if mask is not None:
        stages = {"bwd_num_stages": 1} | ({"fwd_num_stages": 2} if case.head_dim <= 64 else {})
        options["kernel_options"] = stages
    attend = torch.compile(flex_attention, dynamic=False)
    dout, mask_bytes = inputs.dout.transpose(1, 2), inputs.bytes_of_elements()
    return Step(lambda: attend(q, k, v, **options), leaves, dout, mask_bytes)


def _fa4(inputs: Inputs) -> Step:
    """Returns a causal step of FlashAttention-4 from the package flash-attn-4, with the case's window and
    documents if it has them."""
    case = inputs.case
    if case.kind not in (DENSE, SLIDING) and not case.document_length:
        raise Declined("has no masks here")
    if case.document_length and case.batch > 1:
        raise Declined("has documents of one row of a batch here")
    package = imported("flash_attn.cute")
    leaves = _leaves(inputs.q, inputs.k, inputs.v)
    has_window = case.kind in (SLIDING, WINDOWED_DOCUMENTS)
    options = {"causal": True, "window_size": (case.window - 1, 0) if has_window else (None, None)}
    if length := case.document_length:
        begins = _begins_of_documents(case, inputs.q.device)
        options |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": length, "max_seqlen_k": length}  # fmt: skip

    def forward():
        if not case.document_length:
            out = package.flash_attn_func(*leaves, **options)
            return out[0] if isinstance(out, tuple) else out
        out = package.flash_attn_varlen_func(*(t.flatten(0, 1) for t in leaves), **options)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (case.batch, -1))

    return Step(forward, leaves, inputs.dout)


def _cudnn_flex(inputs: Inputs) -> Step:
    """Returns a step of FlexAttention from the package nvidia-cudnn-frontend. Its plan is built from the same intervals before
    timing and counts as its mask; a bias only selects keys."""
    case = inputs.case
    if case.kind == DENSE_MASKS:
        raise Declined("has no bias")
    package = imported("cudnn.flex_attention")
    leaves = q, k, v = _leaves(inputs.q, inputs.k, inputs.v)
    chosen = inputs.chosen()
    if chosen is None:
        chosen = prefix_lm(case.seqlen, 0, device=q.device)
    before = torch.cuda.memory_allocated()
    plan = package.create_mask_plan(ends_of_runs(chosen, case.batch, case.heads_q), q, k, v)
    plan_bytes = torch.cuda.memory_allocated() - before
    attend = package.flex_attn_func
    return Step(lambda: attend(q, k, v, mask_plan=plan), leaves, inputs.dout, plan_bytes)


def ends_of_runs(chosen: KeyIntervals, batch: int, heads: int) -> Tensor:
    """Returns the visible keys of each query as runs, the form that cuDNN takes: [0, F0), [F1, F2), ... and then empty ones at
    the last key. int32 [heads, F, B * N], or [1, F, B * N] for keys that all heads share.
    Raises Declined if int32 cannot count them."""
    first, last = chosen.intervals.expand(batch, -1, -1, -1).unsqueeze(2).unbind(-1)
    n, parts = chosen.key_length, []
    for rows in torch.arange(chosen.query_length, device=first.device)[:, None].split(256):
        shown = (first <= rows) & (rows < last)  # [B, Hkv or 1, rows, N]
        changed = F.pad(shown, (0, 1)) ^ F.pad(shown, (1, 0), value=True)
        counts = changed.sum(-1, keepdim=True)
        part = torch.full((*shown.shape[:3], int(counts.max())), n, dtype=torch.int32, device=first.device)  # fmt: skip
        part[torch.arange(part.shape[3], device=first.device) < counts] = changed.nonzero()[:, 3].int()  # fmt: skip
        parts.append(part)
    most = max(part.shape[3] for part in parts)
    copies = heads // first.shape[1] if first.shape[1] > 1 else 1
    if parts[0].shape[1] * copies * most * batch * chosen.query_length >= 2**31:
        raise Declined(f"its {most} ends of runs for each query and head are 2^31 or more")
    ends = torch.cat([F.pad(part, (0, most - part.shape[3]), value=n) for part in parts], 2)
    return ends.permute(1, 3, 0, 2).flatten(2).repeat_interleave(copies, 0).contiguous()


def imported(module: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Declined(f"cannot import {module}: {error}") from error


def expect_memory(needed: int, what: str, device: torch.device | str) -> None:
    """Raises Declined if `needed` bytes are more than the device has."""
    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > total:
        raise Declined(f"its {what} {needed / 1e9:.0f} of {total / 1e9:.0f} GB")


RIVALS: dict[str, Callable[[Inputs], Step]] = {
    "sdpa": _sdpa,
    **{name: _dense_only(backend) for name, backend in SDPA_BACKENDS.items()},
    "flex": _flex,
    "fa4": _fa4,
    "cudnn_flex": _cudnn_flex,
}
NAMES = (*OURS, *RIVALS)


def build(name: str, inputs: Inputs) -> Step:
    """Returns the step of a side. Raises Declined if the side cannot run the case."""
    return RIVALS[name](inputs) if name in RIVALS else _our_step(name, inputs)


def default_sides(device: str) -> list[str]:
    """Returns our best backend and torch's implementations that need no compilation."""
    if device == "cpu":
        return ["cpu", "sdpa"]
    ours = [backend.name for backend in backends() if backend.available and backend.name in OURS]
    return [*ours[:1], "sdpa", "fa2", "cudnn"]
