"""Dynamic mask attention on torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _ops, check_finite
from ._arguments import (
    MASK_VALUE,
    attention_inputs,
    bias_argument,
    check_tensor,
    check_window,
    mask_argument,
    resolve_deterministic,
    resolve_flag,
    resolve_nonfinite,
    resolve_scale,
    resolve_softcap,
    selection_scores_argument,
)
from .allowed_keys import AllowedPairs, select_among
from .availability import get_available_backends, unavailable_reason
from .key_intervals import (
    KeyIntervals,
    check_offsets,
    check_selection,
    intersect,
    packed_documents,
    prefix_lm,
    select_key_intervals,
)
from .utils.mask import topk_mask


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    scale: float | None = None,
    keep_window_size: int | None = None,
    selection: str = "per_query",
    selection_scores: Tensor | None = None,
    key_intervals: KeyIntervals | None = None,
    nonfinite: str = "saturate",
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Exact softmax attention over the visible keys, with an additive bias.

    query: [B, Sq, Hq, D]; key, value: [B, Sk, Hkv, D], Hq a multiple of Hkv; D from 1 to 256; bfloat16 or
        float16, on the CPU float32 too (and float64 through the slow reference backend); any strides.
    attn_mask: bool, True where visible: [B, Sk] (padding), [B, H, Sk] (the same for every query) or
        [B, H, Sq, Sk]; H is Hq, Hkv or 1, every dimension may be 1.
    attn_bias: added to the scaled scores; shapes as attn_mask; dtype of query or float32. Values at or below
        -1e30 (bfloat16), -1e4 (float16) or finfo.min (float32) mask. Its gradient has its own shape.
    softmax_scale, scale: the factor on query . key, 1 / sqrt(D) by default. Two names of one thing.
    is_causal: query i sees keys up to i + Sk - Sq.
    softcap: c > 0 replaces a scaled score s by c * tanh(s / c).
    deterministic: gradients that are bit-identical from run to run; by default as set
        by torch.use_deterministic_algorithms. Always so on the CPU.
    return_attn_probs: also return the log-sum-exp of the scores (which is not differentiable).
    keep_window_size: every query keeps this many keys, those with the highest scores.
    selection: "per_query": the best among the keys the query may see; "global": the best of the row, the
        same for all queries. Of equal scores the more recent key wins.
    selection_scores: the scores by which keep_window_size chooses, one value per key: [B, H, Sk] or
        [B, H, 1, Sk]. By default the bias, which then must have one of these shapes. The choice has no
        gradient. With more heads than key has (H = Hq), every query head chooses for itself; key and value are
        then repeated, unless a mask with a query dimension makes the choice one of ranks.
    key_intervals: visible query rows of each key, instead of a mask or together with it.
    nonfinite: "saturate": gradients are always finite; "propagate": inf and NaN stay visible, as GradScaler
        needs them.

    Returns out [B, Sq, Hq, D], or (out, softmax_lse [B, Hq, Sq], None) with return_attn_probs. A query that
    sees no key has out = 0 and softmax_lse = -inf.
    """
    return _attention(
        query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic,
        return_attn_probs, scale=scale, keep_window_size=keep_window_size, selection=selection,
        selection_scores=selection_scores, key_intervals=key_intervals, nonfinite=nonfinite,
    )  # fmt: skip


def _attention(
    query, key, value, attn_mask=None, attn_bias=None, softmax_scale=None, is_causal=None, softcap=None,
    deterministic=None, return_attn_probs=None, *, scale=None, keep_window_size=None,
    selection="per_query", selection_scores=None, key_intervals=None, nonfinite="saturate", backend="",
):  # fmt: skip
    """flash_dmattn_func on one named backend; "" takes the first one that supports the problem."""
    query, key, value = attention_inputs(query, key, value, "B, S, H, D", backend)
    mask = mask_argument(attn_mask, query, key)
    bias = bias_argument(attn_bias, query, key)
    scores = selection_scores_argument(selection_scores, query, key)
    check_selection(selection)
    is_causal = resolve_flag(is_causal, "is_causal")
    if deterministic is not None:
        deterministic = resolve_flag(deterministic, "deterministic")
    intervals = None
    if key_intervals is not None:
        _check_intervals(key_intervals, query, key)
        intervals = key_intervals
    if keep_window_size is not None:
        if intervals is not None:
            raise ValueError(
                "key_intervals: got them together with keep_window_size, expected one of the two; "
                "keep_window_size chooses among all keys. Combine them with select_key_intervals and "
                "intersect, or use flash_dmattn_varlen_func for packed documents"
            )
        mask, intervals, is_causal = _select(
            query, key, mask, bias, is_causal, keep_window_size, selection, scores,
            by_library=backend not in ("triton", "flex"),
        )  # fmt: skip
        of_key_heads = intervals is not None and not isinstance(intervals, _KeyRanks)
        if of_key_heads and intervals.heads not in (1, key.shape[2]):
            key, value, mask, bias = _key_head_for_every_query_head(query, key, value, mask, bias)
    scale = resolve_scale(scale, softmax_scale, query.shape[3])
    out, lse = _forward(
        query, key, value, mask, bias, intervals, is_causal, scale, softcap, nonfinite, deterministic,
        backend,
    )  # fmt: skip
    return (out, lse, None) if resolve_flag(return_attn_probs, "return_attn_probs") else out


def _forward(
    query, key, value, mask, bias, intervals, is_causal, scale, softcap, nonfinite, deterministic,
    backend="",
):  # fmt: skip
    """out and lse of the operator."""
    softcap, saturate = resolve_softcap(softcap), resolve_nonfinite(nonfinite)
    if backend in ("triton", "flex"):
        return _forward_in_python(
            query, key, value, mask, bias, intervals, is_causal, scale, softcap, saturate,
            deterministic, backend,
        )  # fmt: skip
    head_dim = query.shape[3]
    # The GPU's kernels load 16 bytes at a time.
    padding = -head_dim % 8 if query.device.type == "cuda" else 0
    if padding:
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
    out, lse, _ = _ops.forward(
        query, key, value, mask, bias,
        *_choice_operands(intervals), is_causal, scale, softcap, saturate,
        resolve_deterministic(deterministic), backend,
    )  # fmt: skip
    return out[..., :head_dim] if padding else out, lse


def _forward_in_python(
    query, key, value, mask, bias, intervals, is_causal, scale, softcap, saturate, deterministic, backend,
):  # fmt: skip
    """out and lse of the backends in Python."""
    checked = check_finite.enabled()
    if checked:
        query, key, value, bias = check_finite.inputs(q=query, k=key, v=value, bias=bias)
    shown = None if intervals is None else intervals.intervals
    bound = [] if intervals is None or intervals.bound is None else [*intervals.bound]
    if backend == "triton":
        from .triton.ops import forward  # imports triton, which may be missing

        out, lse, *_ = forward(
            query, key, value, mask, bias, shown, bound, is_causal, scale, softcap, saturate
        )
    else:
        from .flash_dmattn_flex import forward

        out, lse = forward(
            query, key, value, mask, bias, shown, is_causal, scale, softcap, saturate,
            resolve_deterministic(deterministic),
        )  # fmt: skip
    return check_finite.outputs(out, lse) if checked else (out, lse)


def _choice_operands(choice):
    """key_intervals, key_list, key_count, key_rank, rank_limit and key_bound of the operator."""
    if isinstance(choice, _KeyList):
        return None, choice.keys, choice.count, None, None, []
    if isinstance(choice, _KeyRanks):
        return None, None, None, choice.rank, choice.limit, []
    if choice is None:
        return None, None, None, None, None, []
    bound = (-1, 0) if choice.bound is None else choice.bound  # -1: unknown
    return choice.intervals, None, None, None, None, [*bound, int(choice.consecutive)]


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    keep_window_size: int | None = None,
    selection: str = "per_query",
    nonfinite: str = "saturate",
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_dmattn_func for sequences of different lengths, packed one after the other.

    query: [total_q, Hq, D]; key, value: [total_k, Hkv, D].
    cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each sequence begins in the packed dimension,
        and the total at the end. Sequence lengths may differ between query and key and may be 0; causality
        is aligned to the bottom right corner of each sequence.
    max_seqlen_q, max_seqlen_k: the longest sequences. On a GPU max_seqlen_k saves a wait for the device
        when cu_seqlens_q is cu_seqlens_k and keep_window_size is not given; it must not be too small then.
    attn_bias: [total_k, H], one value per key, added to its scores; H is Hq, Hkv or 1.
    keep_window_size: chooses by attn_bias within each sequence.
    block_table: not supported.

    Returns out [total_q, Hq, D], or (out, softmax_lse [Hq, total_q], None) with return_attn_probs.
    """
    if block_table is not None:
        raise ValueError(
            "block_table: got a paged key cache, expected None; gather the pages into packed keys and values"
        )
    query, key, value = attention_inputs(query, key, value, "total, H, D")
    total_q, total_k = query.shape[0], key.shape[0]
    is_causal = resolve_flag(is_causal, "is_causal")
    if deterministic is not None:
        deterministic = resolve_flag(deterministic, "deterministic")
    check_selection(selection)
    if keep_window_size is not None:
        check_window(keep_window_size)
    same_offsets = cu_seqlens_q is cu_seqlens_k
    cu_seqlens_q = check_offsets(cu_seqlens_q, "cu_seqlens_q", total_q).to(torch.int32).contiguous()
    cu_seqlens_k = check_offsets(cu_seqlens_k, "cu_seqlens_k", total_k).to(torch.int32).contiguous()
    if same_offsets:
        cu_seqlens_q = cu_seqlens_k
    query, key, value = query[None], key[None], value[None]
    bias = None
    if attn_bias is not None:
        check_tensor(attn_bias, "attn_bias")
        if attn_bias.dim() != 2:
            raise ValueError(
                f"attn_bias: got shape {tuple(attn_bias.shape)}, expected [total_k, H]"
            )
        bias = bias_argument(attn_bias.t()[None], query, key)

    if keep_window_size is not None and bias is None:
        raise ValueError("keep_window_size: got no attn_bias, which has the scores to choose by")
    if keep_window_size is None or keep_window_size >= total_k:
        intervals = packed_documents(
            cu_seqlens_k, cu_seqlens_q, is_causal=is_causal, key_length=total_k,
            query_length=total_q, max_length=max_seqlen_k,
        )  # fmt: skip
    else:
        intervals = KeyIntervals(
            _ops.select_key_intervals_varlen(
                bias.detach()[:, :, 0], cu_seqlens_q, cu_seqlens_k, keep_window_size, selection,
                is_causal, total_q,
            ),
            total_q,
            _packed_bound(keep_window_size, selection, is_causal, same_offsets),
        )  # fmt: skip
        if intervals.heads not in (1, key.shape[2]):
            key, value, _, bias = _key_head_for_every_query_head(query, key, value, None, bias)
    scale = resolve_scale(scale, softmax_scale, query.shape[3])
    out, lse = _forward(
        query, key, value, None, bias, intervals, False, scale, softcap, nonfinite, deterministic
    )
    return_lse = resolve_flag(return_attn_probs, "return_attn_probs")
    return (out[0], lse[0], None) if return_lse else out[0]


def _packed_bound(keep_window_size, selection, is_causal, same_offsets):
    """KeyIntervals.bound of a selection within packed sequences, where it follows from the window."""
    if not same_offsets:
        return None  # every query may be of another sequence and see keys of its own
    # Of the sequences of n queries, the first and the last show the keys that they keep, those between no
    # more keys than they have queries; and where keys are kept per query, each query brings one at most.
    arriving = is_causal and selection == "per_query"
    return (keep_window_size if arriving else 2 * keep_window_size, 1)


def flash_dmattn_func_auto(backend: str | None = None, **options) -> Callable:
    """The attention function of a backend (see get_available_backends), by default of the best one: cuda,
    triton, flex, cpu.

    Keyword arguments become defaults of the function. Raises RuntimeError with the reason where a backend cannot
    run.
    """
    if backend is None and get_available_backends()[0] in ("triton", "flex"):
        backend = get_available_backends()[0]  # a GPU without kernels of the library
    if backend is None:
        return partial(flash_dmattn_func, **options) if options else flash_dmattn_func
    reason = unavailable_reason(backend)
    if reason:
        raise RuntimeError(f"flash_dmattn: the backend {backend!r} cannot run: {reason}")
    return partial(_attention, backend=backend, **options)


def _check_intervals(key_intervals, query, key) -> None:
    if not isinstance(key_intervals, KeyIntervals):
        raise TypeError(f"key_intervals: got {type(key_intervals).__name__}, expected KeyIntervals")
    batch, seqlen_q = query.shape[:2]
    seqlen_k, heads_kv = key.shape[1:3]
    shape = key_intervals.intervals.shape
    fits = shape[0] in (1, batch) and shape[1] in (1, heads_kv) and shape[2] == seqlen_k
    if not fits or key_intervals.query_length != seqlen_q:
        raise ValueError(
            f"key_intervals: got intervals of shape {tuple(shape)} for query length "
            f"{key_intervals.query_length}, expected [{batch} or 1, {heads_kv} or 1, {seqlen_k}, 2] for "
            f"{seqlen_q}"
        )
    if key_intervals.intervals.device != query.device:
        raise TypeError(
            f"key_intervals: got a tensor on {key_intervals.intervals.device}, expected {query.device}"
        )


def _select(
    query, key, mask, bias, is_causal, keep_window_size, selection, selection_scores, by_library=True
):  # fmt: skip
    """The mask, the choice (intervals, or another form that the library's backends support) and the causality
    that together show each query its best keys."""
    check_window(keep_window_size)
    scores, allowed = _scores_and_allowed(query, key, mask, bias, selection_scores)
    if keep_window_size >= key.shape[1] and selection_scores is None:
        return mask, None, is_causal  # a key whose bias is NaN is masked by it
    on_gpu = by_library and scores.device.type == "cuda"
    of_pairs = allowed is not None and allowed.shape[2] > 1
    if of_pairs and selection == "per_query":
        return _select_per_query(query, key, scores, keep_window_size, allowed, is_causal, on_gpu)
    key_mask = None
    if allowed is not None:
        scores, key_mask = _match_heads(query, key, scores, allowed.to_any_query())
    remaining_mask = mask if of_pairs else None  # its part outside the choice
    if on_gpu and selection == "global" and keep_window_size > 0:
        return remaining_mask, _select_list(scores, key_mask, keep_window_size), is_causal
    chosen = select_key_intervals(
        scores, keep_window_size, selection=selection, is_causal=is_causal, key_mask=key_mask,
        query_length=query.shape[1],
    )  # fmt: skip
    return remaining_mask, chosen, False


class _KeyList(NamedTuple):
    """The keys that every query sees (or with causality, those of them in its past), in ascending order.

    The form of a global selection on a GPU: less memory than intervals, and much less for its schedule.
    """

    keys: Tensor  # int32 [B or 1, Hkv or 1, n]
    count: Tensor  # int32 [B or 1, Hkv or 1]: how many of them there are

    @property
    def heads(self) -> int:
        return self.keys.shape[1]


def _select_list(scores, key_mask, keep_window_size) -> _KeyList:
    if key_mask is not None:
        shape = torch.broadcast_shapes(scores.shape, key_mask.shape)
        scores, key_mask = scores.expand(shape), key_mask.expand(shape)
    return _KeyList(*_ops.select_key_list(scores, key_mask, keep_window_size))


class _KeyRanks(NamedTuple):
    """A choice under a dense mask or bias: query i keeps the allowed keys whose rank is below its limit."""

    rank: Tensor  # int32 [B or 1, H or 1, 1, Sk]
    limit: Tensor  # int32 [B or 1, H or 1, Sq, 1]


def _select_per_query(query, key, scores, keep_window_size, allowed, is_causal, by_rank):
    """Mask, choice and causality of the best keys among those that a mask with a query dimension allows.

    They are intervals under the usual masks, which are recognised by reading the mask. That can neither be compiled
    nor captured in a CUDA graph; then, and under any other mask, they are ranks beside the mask, or without the
    GPU's kernels a mask of the size of the given one.
    """
    if any(map(torch._C._functorch.is_batchedtensor, allowed.parts())):
        raise RuntimeError(
            "keep_window_size: got it under torch.func.vmap over a mask with a query dimension, which attention "
            "does not support; expected the mask's own batch dimension"
        )
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]

    def past():
        return prefix_lm(seqlen_k, 0, query_length=seqlen_q, device=scores.device)

    shown = allowed.to_intervals() if _may_wait_for(scores) else None
    if shown is not None:
        shown = intersect(shown, past()) if is_causal else shown
        scores_of_heads, intervals = _match_heads(query, key, scores, shown.intervals)
        chosen = select_among(scores_of_heads, shown.with_intervals(intervals), keep_window_size)
        if chosen is not None:
            return None, chosen, False
    if by_rank:
        ranks = _KeyRanks(*_ops.rank_keys(scores, *allowed, keep_window_size, is_causal))
        mask = allowed.mask
        if mask is None:  # attention applies its bias itself
            mask = scores.new_ones((1, 1, 1, seqlen_k), dtype=torch.bool)
        return mask, ranks, is_causal
    scores, mask = _match_heads(query, key, scores, allowed.to_mask())
    mask = mask & past().to_mask() if is_causal else mask
    return topk_mask(scores[:, :, None], mask, keep_window_size, None), None, False


def _may_wait_for(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _scores_and_allowed(query, key, mask, bias, selection_scores):
    """Scores [B, H, Sk], and the dense mask to choose under, or None for all keys."""
    seqlen_k, mask_value = key.shape[1], MASK_VALUE[query.dtype]
    name, scores, hiding = "attn_bias", bias, None
    if selection_scores is not None:
        name, scores = "selection_scores", selection_scores
    if scores is None or scores.shape[2] != 1 or scores.shape[3] != seqlen_k:
        got = "no scores" if scores is None else f"{name} of shape {tuple(scores.shape)}"
        raise ValueError(
            f"keep_window_size: got {got}, expected one score per key in attn_bias or selection_scores: "
            f"[B, H, {seqlen_k}] or [B, H, 1, {seqlen_k}]. For scores per pair, build a mask with "
            "flash_dmattn.utils.mask.create_mask"
        )
    scores = scores.detach()
    # A bias that masks hides its keys from the choice. Where it is the score, these are the worst keys anyway.
    if selection_scores is not None and bias is not None:
        if bias.shape[2] > 1:
            hiding = bias.detach()
        else:
            unmasked = bias.detach() > mask_value
            scores, unmasked = _match_heads(query, key, scores, unmasked)
            scores = torch.where(unmasked, scores, float("nan"))
    mask, hiding = (
        t if t is None or t.shape[3] == seqlen_k else t.expand(-1, -1, -1, seqlen_k)
        for t in (mask, hiding)
    )
    nothing_hides = mask is None and hiding is None
    return scores[:, :, 0], None if nothing_hides else AllowedPairs(mask, hiding, mask_value)


def _match_heads(query, key, *parts):
    """The parts for every query head, unless all of them are one for each key head or for all."""
    if all(part.shape[1] in (1, key.shape[2]) for part in parts):
        return parts
    return tuple(_repeat_heads(part, query, key) for part in parts)


def _repeat_heads(tensor, query, key):
    """Repeats the key heads of a mask or bias for every query head of their groups."""
    heads_q, heads_kv = query.shape[2], key.shape[2]
    if tensor is None or tensor.shape[1] in (1, heads_q):
        return tensor
    return tensor.repeat_interleave(heads_q // heads_kv, 1)


def _key_head_for_every_query_head(query, key, value, mask, bias):
    """The inputs of attention when every query head chose for itself."""
    mask, bias = (_repeat_heads(t, query, key) for t in (mask, bias))
    group = query.shape[2] // key.shape[2]
    return key.repeat_interleave(group, 2), value.repeat_interleave(group, 2), mask, bias
