"""The measured sides of attention: our backends and the rivals. All get the same inputs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dmattn import (
    KeyIntervals,
    flash_dmattn_func_auto,
    forgetting_attention,
    get_available_backends,
    packed_documents,
    select_key_intervals,
    sliding_window,
)
from flash_dmattn._core.availability import unavailable_reason
from flash_dmattn.check.memory import bytes_of

from .case import (
    BIASED,
    BIASED_TOP,
    DELAYED,
    DELAYED_TOP,
    DENSE,
    DENSE_MASKS,
    DOCUMENTS,
    EVICTED,
    FORGETTING,
    GLOBAL,
    PER_QUERY,
    RECENT,
    SLIDING,
    THRESHOLD,
    Case,
)
from .clock import Step
from .side_table import SIDES

OURS = ("cuda", "triton", "cpu")
PRUNE = -16.0  # FORGETTING with a window prunes elements whose log decay is below it


class Declined(Exception):
    """Raised by a side that cannot run a case; the message has the reason."""


# The exceptions that drawing the inputs of a side, building it or timing it may raise. `declines` tells them from errors of ours.
REASONS = (Declined, MemoryError, RuntimeError, TypeError, ValueError)


def declines(reason: Exception, is_rival: bool = False) -> bool:
    """Returns whether an exception of REASONS declines a measurement, rather than being an error of our program.

    It is Declined, the lack of memory, a refusal by our library, or any exception of a rival.
    """
    if isinstance(reason, (Declined, MemoryError, torch.OutOfMemoryError)) or is_rival:
        return True
    if isinstance(reason, (TypeError, ValueError)):  # the library's errors name the argument
        return ": got " in str(reason)
    texts = ("expected one that supports", "can't allocate memory")
    return isinstance(reason, NotImplementedError) or any(text in str(reason) for text in texts)


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: Tensor  # [B, N, Hq, D]
    k: Tensor  # [B, N, Hkv, D]
    v: Tensor  # [B, N, Hkv, Dv]
    dout: Tensor  # [B, N, Hq, Dv]
    bias: Tensor | None = None  # [B, Hkv, N], with DENSE_MASKS [B, Hkv, N, N]
    mask: Tensor | None = None  # [B, Hkv, N, N]
    intervals: KeyIntervals | None = None
    log_fgate: Tensor | None = None  # float32 [B, N, Hq]
    scores: Tensor | None = None  # float32 [B, Hkv, N], only for EVICTED


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
    if case.kind == DENSE:
        return Inputs(case, q, k, v, dout)
    if case.kind == SLIDING:
        return Inputs(case, q, k, v, dout, intervals=sliding_window(n, case.window, device=device))
    if case.kind == DOCUMENTS:
        begins = torch.arange(0, n + 1, case.window, dtype=torch.int32, device=device)
        documents = packed_documents(begins, key_length=n, max_seqlen_k=case.window)
        return Inputs(case, q, k, v, dout, intervals=documents)
    if case.kind == FORGETTING:
        if case.window:  # gates at which an element fades at this distance
            gates = torch.full((batch, n, heads), PRUNE / (case.window - 0.5), device=device)
        else:
            gates = F.logsigmoid(6 + torch.randn(batch, n, heads, device=device))
        return Inputs(case, q, k, v, dout, log_fgate=gates)
    if case.kind == EVICTED:
        scores = torch.randn(batch, heads_kv, n, device=device)
        return Inputs(case, q, k, v, dout, scores=scores)
    if case.kind != DENSE_MASKS:
        return Inputs(case, q, k, v, dout, bias=normal(batch, heads_kv, n))
    bias = torch.empty(batch, heads_kv, n, n, device=device, dtype=dtype).normal_()
    mask = torch.empty(bias.shape, device=device, dtype=torch.bool)
    seen = torch.arange(1, n + 1, device=device)[:, None]
    for head_mask in mask.flatten(0, 1):  # keys are random, so that no tile is empty
        head_mask.copy_((torch.rand(n, n, device=device) * seen < case.window).tril())
    return Inputs(case, q, k, v, dout, bias, mask)


def rule_of(case: Case) -> dict[str, object]:
    """Returns the arguments that select keys by their scores; none for a case without selection."""
    if case.kind in (PER_QUERY, GLOBAL):
        return {"keep_window_size": case.window, "selection": case.kind}
    if case.kind in (BIASED_TOP, DELAYED_TOP):
        return {
            "keep_window_size": case.window, "recent_window": RECENT, "recent_competes": True,
        }  # fmt: skip
    if case.kind == EVICTED and case.window:
        return {"keep_window_size": case.window, "recent_window": RECENT}
    if case.kind == EVICTED:
        return {"score_threshold": THRESHOLD, "recent_window": RECENT}
    return {}


def _chosen(inputs: Inputs) -> KeyIntervals | None:
    """Returns the key intervals of a case, for a rival, or None if the case has none."""
    scores = inputs.bias if inputs.scores is None else inputs.scores
    rule = rule_of(inputs.case)
    return select_key_intervals(scores, **rule) if rule else inputs.intervals


def _leaves(*tensors: Tensor | None) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors if t is not None]


def _our_step(backend: str, inputs: Inputs) -> Step:
    """Returns a step with the call that a user makes, which includes selection, schedule and the gradient of the bias."""
    case, attention = inputs.case, flash_dmattn_func_auto(backend)
    if case.kind == FORGETTING:
        leaves = _leaves(inputs.q, inputs.k, inputs.v, inputs.log_fgate)
        prune = PRUNE if case.window else None
        return Step(
            lambda: forgetting_attention(*leaves, prune, backend=backend), leaves, inputs.dout
        )
    leaves = _leaves(inputs.q, inputs.k, inputs.v, inputs.bias)
    q, k, v, *bias = leaves
    options = {"attn_bias": bias[0] if bias else None, "is_causal": True} | rule_of(case)
    if case.kind == DENSE_MASKS:
        options["attn_mask"] = inputs.mask
    elif inputs.intervals is not None:
        options = {"key_intervals": inputs.intervals}
    elif inputs.scores is not None:
        options["selection_scores"] = inputs.scores
    elif case.kind in (DELAYED, DELAYED_TOP):
        options["bias_delay"] = RECENT
    return Step(
        lambda: attention(q, k, v, **options), leaves, inputs.dout, _bytes_of_elements(inputs)
    )


def _bytes_of_elements(inputs: Inputs) -> int:
    """Returns the bytes of the N x N mask and bias of DENSE_MASKS, 0 for other kinds."""
    is_dense = inputs.case.kind == DENSE_MASKS
    return bytes_of([inputs.mask, inputs.bias]) if is_dense else 0


def _sdpa_step(
    inputs: Inputs, mask: Tensor | None = None, backend: SDPBackend | None = None
) -> Step:
    """Returns a step of scaled_dot_product_attention, either causal or with a mask that is built before timing."""
    case = inputs.case
    q, k, v = _leaves(*(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)))
    leaves = [q, k, v] if mask is None or not mask.requires_grad else [q, k, v, mask]
    group = case.heads_q // case.heads_kv
    options = {"attn_mask": mask}
    if mask is None:
        options, group = {"is_causal": True, "enable_gqa": group > 1}, 1

    def forward():
        # With enable_gqa and a mask, torch would store the N x N scores. Its users avoid that by repeating the keys, and so do we.
        keys, values = k, v
        if group > 1:
            keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
        if backend is None:
            return F.scaled_dot_product_attention(q, keys, values, **options)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, keys, values, **options)

    mask_bytes = 0 if mask is None else bytes_of([mask])
    return Step(forward, leaves, inputs.dout.transpose(1, 2), mask_bytes)


def _per_query_head(mask: Tensor, case: Case) -> Tensor:
    """Repeats a mask per key head to one per query head, as torch requires."""
    if mask.shape[1] in (1, case.heads_q):
        return mask
    return mask.repeat_interleave(case.heads_q // mask.shape[1], 1)


def _sdpa(inputs: Inputs) -> Step:
    """Returns a step of whichever implementation torch chooses for an N x N mask."""
    case = inputs.case
    if case.kind == DENSE:
        return _sdpa_step(inputs)
    heads = 1 if case.kind in (SLIDING, DOCUMENTS) else case.heads_q
    # torch converts the mask to floating point.
    bytes_per_element = 9 if case.kind == FORGETTING else 5
    needed = bytes_per_element * case.batch * heads * case.seqlen**2
    expect_memory(2 * needed, "mask and a copy of it take", inputs.q.device)
    if case.kind == DENSE_MASKS:  # SDPA takes mask and bias as one tensor, with one gradient
        masked_bias = inputs.bias.masked_fill(~inputs.mask, -torch.inf)
        return _sdpa_step(inputs, _per_query_head(masked_bias, case).requires_grad_())
    if case.kind == FORGETTING:
        sums = inputs.log_fgate.cumsum(1).mT
        fading = sums[..., None] - sums[..., None, :]
        shown = torch.ones(fading.shape[2:], dtype=torch.bool, device=fading.device).tril()
        shown = shown & (fading >= PRUNE) if case.window else shown
        return _sdpa_step(inputs, fading.masked_fill(~shown, -torch.inf).to(inputs.q.dtype))
    if case.kind in (BIASED, BIASED_TOP, DELAYED, DELAYED_TOP):
        return _sdpa_step(inputs, _per_query_head(_key_bias_of_elements(inputs), case))
    return _sdpa_step(inputs, _per_query_head(_chosen(inputs).to_mask(), case))


def _key_bias_of_elements(inputs: Inputs) -> Tensor:
    """Expands a bias per key to [B, Hkv, N, N], with its delay, and with -inf where a query does not see the key."""
    case, chosen = inputs.case, _chosen(inputs)
    age = torch.arange(case.seqlen, device=inputs.bias.device)
    age = age[:, None] - age
    shown = age >= 0 if chosen is None else chosen.to_mask()
    counts = age >= (RECENT if case.kind in (DELAYED, DELAYED_TOP) else 0)
    return torch.where(counts, inputs.bias[:, :, None], 0.0).masked_fill(~shown, -torch.inf)


def _dense_only(backend: SDPBackend) -> Callable[[Inputs], Step]:
    def build(inputs: Inputs) -> Step:
        if inputs.case.kind != DENSE:
            raise Declined("has no masks")
        return _sdpa_step(inputs, backend=backend)

    return build


def _flex(inputs: Inputs) -> Step:
    """Returns a step of torch's FlexAttention. Its block mask and its mask of elements are built before timing."""
    from flash_dmattn._backends.flex import compiled_flex, flex_mask_options
    from flash_dmattn.keys.visibility import Visibility

    case = inputs.case
    if case.kind in (FORGETTING, DELAYED_TOP):
        raise Declined("has no gates, and no selection with a delay here")
    intervals = _chosen(inputs)
    leaves = _leaves(*(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)), inputs.bias)
    q, k, v, *bias = leaves
    dense = [t if t.dim() == 4 else t[:, :, None] for t in bias]
    visible = Visibility(inputs.mask, inputs.intervals is None, intervals)
    bias = dense[0] if bias else None
    options = flex_mask_options(q, k, bias, visible) | {"enable_gqa": case.heads_q != case.heads_kv}
    if case.kind == DELAYED:
        options["score_mod"] = _delayed(bias[:, :, 0], case.heads_q // case.heads_kv)
    dout = inputs.dout.transpose(1, 2)
    return Step(lambda: compiled_flex(q, k, v, **options), leaves, dout, _bytes_of_elements(inputs))


def _delayed(bias: Tensor, group: int) -> Callable:
    """Returns FlexAttention's score function. It adds a bias [B, Hkv, N] to the scores of keys at least RECENT queries back."""

    def score(score, b, h, q, k):
        return score + torch.where(q - k >= RECENT, bias[b, h // group, k], 0.0)

    return score


def _fa3(inputs: Inputs) -> Step:
    """Returns a step of FlashAttention-3 from the package fa3-fwd, which has no backward and no window."""
    if inputs.case.kind != DENSE:
        raise Declined("its package has no masks")
    attention = _imported("fa3").flash_attn_func
    q, k, v = inputs.q, inputs.k, inputs.v
    return Step(lambda: attention(q, k, v, causal=True), [], inputs.dout)


def _fa4(inputs: Inputs) -> Step:
    """Returns a causal step of FlashAttention-4 from the package flash-attn-4, with the case's window if it has one."""
    case = inputs.case
    if case.kind not in (DENSE, SLIDING):
        raise Declined("has no masks here")
    attention = _imported("fa4").flash_attn_func
    leaves = q, k, v = _leaves(inputs.q, inputs.k, inputs.v)
    window = (case.window - 1, 0) if case.kind == SLIDING else (None, None)

    def forward():
        out = attention(q, k, v, causal=True, window_size=window)
        return out[0] if isinstance(out, tuple) else out

    return Step(forward, leaves, inputs.dout)


def _fla(inputs: Inputs) -> Step:
    """Returns a step of flash-linear-attention's Triton kernel for forgetting attention. It has windows but does not prune."""
    case = inputs.case
    if case.kind != FORGETTING:
        raise Declined("has gates, and no masks")
    attention = _imported("fla").parallel_forgetting_attn
    leaves = _leaves(inputs.q, inputs.k, inputs.v, inputs.log_fgate)
    options = {"window_size": case.window} if case.window else {}
    return Step(lambda: attention(*leaves, **options), leaves, inputs.dout)


def _imported(rival: str):
    module = SIDES[rival].module
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
    "fa2": _dense_only(SDPBackend.FLASH_ATTENTION),
    "cudnn": _dense_only(SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "fa3": _fa3,
    "fa4": _fa4,
    "fla": _fla,
}


NAMES = (*OURS, *RIVALS)
_DEVICES = {"cpu": ("cpu",), "sdpa": ("cpu", "cuda")}  # all other sides need a GPU


def build(name: str, inputs: Inputs) -> Step:
    """Returns the step of a side. Raises Declined if the side cannot run the case."""
    return RIVALS[name](inputs) if name in RIVALS else _our_step(name, inputs)


def names_on(device: str) -> tuple[str, ...]:
    """Returns the sides that exist for a device."""
    return tuple(name for name in NAMES if device in _DEVICES.get(name, ("cuda",)))


def expect_runs(name: str, device: str) -> None:
    """Raises Declined if the side cannot run any case on this device."""
    if name not in names_on(device):
        raise Declined(f"does not run on {device}")
    if name in OURS and (reason := unavailable_reason(name)):
        raise Declined(reason)
    if name in RIVALS and SIDES[name].module:
        _imported(name)


def default_sides(device: str) -> list[str]:
    """Returns our best backend and torch's implementations that need no compilation."""
    if device == "cpu":
        return ["cpu", "sdpa"]
    ours = [name for name in get_available_backends() if name in OURS]
    return [*ours[:1], "sdpa", "fa2", "cudnn"]
