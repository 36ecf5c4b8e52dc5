"""Forgetting attention (FoX): the weight of a key is multiplied by all forget gates that follow it."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from ._core.checks import check_integer, check_tensor
from ._core.gradients import prefixes, widen
from .functional import flash_dmattn_func
from .keys.intervals import KeyIntervals, cut_query_rows, intersect
from .keys.patterns import packed_documents, sliding_window, until_faded
from .keys.positions import check_batches, check_offsets
from .scores import with_zero_sum_gradient

# Query rows per call. A score is at most the sum of half as many log gates. In 16 bits the error of the gates' gradient
# grows with the root of this number. More calls cost time, because each writes the gradients of all earlier keys.
ROWS = 2**13
LOWEST = -1e3  # log of a gate: smaller ones, and -inf, count as this one


def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_fgate: Tensor,
    prune: float | None = None,
    *,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """Computes causal attention with forget gates f in (0, 1]. For query i, the weight of key j is multiplied by
    f[j + 1] · … · f[i].

    The scores are scale * q_i . k_j + c_i - c_j with c = cumsum(log_fgate). c_i is the same for all keys of a query and
    cancels in the softmax, so -c_j is a bias per key, with the gradient of the gates.

        log_fgate = F.logsigmoid(f_proj(hidden).float())
        out = forgetting_attention(q, k, v, log_fgate, prune=-40.0)

    query: [B, Sq, Hq, D]; key, value: [B, Sk, Hkv, D]: as in flash_dmattn_func. The last query is at the last key.
    log_fgate: [B, Sk, H], at most 0, best float32; H is Hq (as in the paper), Hkv (shared by the heads of a group) or 1.
        -inf, of a gate that is 0, counts as -1000. The first gate of a sequence has no effect.
    prune: at most 0; a query sees key j only if c_i - c_j >= prune; other elements are not computed (adaptive computation
        pruning). Heads of a group that share a key see it until it has faded for all of them. If scaled products are
        within +-U, each omitted key has at most exp(2 U + prune) times the weight of the query's own key.
    scale: the factor on query . key, 1 / sqrt(D) by default.
    window_size: a query sees at most this many keys: its own and those before it. All keys before it by default.
    cu_seqlens: where packed sequences begin, and the total at the end: int32 [sequences + 1], or [B, sequences + 1] if rows
        of the batch have different sequences. Sq must then equal Sk.
    deterministic, backend: as in flash_dmattn_func.

    c is summed in double. Each 8,192 queries are a separate call, which subtracts c of the middle row before c is rounded to
    float32: the error of a score is 2^-24 |c_i - c_middle|, at any length. With bf16 q, k and v the gradient of the
    gates has an error of 1 to 7 % (docs/numerics.md).

    Returns out [B, Sq, Hq, D].
    """
    cumulative = _cumulative_gates(log_fgate, query, key)
    length, rows = key.shape[1], query.shape[1]
    shown = _visible_intervals(cumulative.detach(), prune, window_size, cu_seqlens, query, key)
    begins = range(0, max(rows, 1), ROWS)
    ends = [min(begin + ROWS, rows) for begin in begins]
    seen_lengths = [length - rows + end for end in ends]  # by the last of these rows
    parts = []
    for begin, end, seen, seen_key, seen_value in zip(
        begins,
        ends,
        seen_lengths,
        prefixes(key, seen_lengths),
        prefixes(value, seen_lengths),
        strict=True,
    ):
        middle = max(seen - (end - begin + 1) // 2 - 1, 0)
        bias = cumulative[..., middle : middle + 1].detach() - cumulative[..., :seen]
        parts.append(
            flash_dmattn_func(
                query[:, begin:end],
                seen_key,
                seen_value,
                attn_bias=with_zero_sum_gradient(
                    bias.to(torch.promote_types(query.dtype, torch.float32))
                ),
                is_causal=shown is None,
                key_intervals=None if shown is None else cut_query_rows(shown, begin, end, seen),
                scale=scale,
                deterministic=deterministic,
                backend=backend,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _cumulative_gates(log_fgate: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns cumsum(log_fgate), float64 [B or 1, H, Sk]."""
    for name, tensor in (("query", query), ("key", key), ("log_fgate", log_fgate)):
        check_tensor(tensor, name)
        if tensor.dim() != (3 if name == "log_fgate" else 4):
            layout = "[B, Sk, H]" if name == "log_fgate" else "[B, S, H, D]"
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {layout}")
    batch, length, heads = log_fgate.shape
    allowed = (query.shape[2], key.shape[2], 1)
    if batch not in (1, key.shape[0]) or length != key.shape[1] or heads not in allowed:
        batches = "1" if key.shape[0] == 1 else f"{key.shape[0]} or 1"
        raise ValueError(
            f"log_fgate: got shape {tuple(log_fgate.shape)}, expected [B, Sk, H] with B = {batches}, "
            f"Sk = {key.shape[1]} and H = {allowed[0]}, {allowed[1]} or 1"
        )
    if not log_fgate.is_floating_point():
        raise TypeError(f"log_fgate: got {log_fgate.dtype}, expected a floating dtype")
    if query.shape[1] > length:
        raise ValueError(
            f"query: got {query.shape[1]} queries, expected at most {length}, one for each key"
        )
    return widen(log_fgate.transpose(1, 2), torch.float64).clamp(min=LOWEST).cumsum(-1)


def _visible_intervals(
    cumulative: Tensor,
    prune: float | None,
    window_size: int | None,
    cu_seqlens: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> KeyIntervals | None:
    """Returns the keys that queries see as intervals, or None if causality alone decides."""
    rows, length, heads = query.shape[1], key.shape[1], key.shape[2]
    if cu_seqlens is not None:
        if rows != length:
            raise ValueError(
                f"cu_seqlens: got offsets with {rows} queries and {length} keys, expected as many queries as keys"
            )
        check_offsets(cu_seqlens, "cu_seqlens", length, batched=True)
        check_batches(key.shape[:1], {"cu_seqlens": cu_seqlens})
    shown: list[KeyIntervals] = []
    if prune is not None:
        if isinstance(prune, bool) or not isinstance(prune, Real) or not prune <= 0:
            raise ValueError(f"prune: got {prune!r}, expected a number of at most 0, or None")
        shown.append(until_faded(cumulative, prune, heads, rows, cu_seqlens_k=cu_seqlens))
    if window_size is not None:
        check_integer(window_size, "window_size")
        if window_size < 1:
            raise ValueError(f"window_size: got {window_size}, expected 1 or more, or None")
        window = sliding_window(
            length, window_size, query_length=rows, device=key.device, cu_seqlens_k=cu_seqlens
        )
        shown.append(window)
    elif prune is None and cu_seqlens is not None:
        shown.append(packed_documents(cu_seqlens, key_length=length, query_length=rows))
    return intersect(*shown) if shown else None
