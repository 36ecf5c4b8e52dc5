"""Attention with a cache of all keys that is updated in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._core import finite
from .._core.availability import check_backend_runs
from .._core.checks import (
    DTYPES,
    check_device,
    check_flag,
    check_head_dim,
    check_tensor,
    resolve_backend,
    resolve_flag,
)
from .._core.foreign_arguments import refuses_foreign_arguments
from .._core.kv_checks import (
    check_lengths,
    check_like,
    check_not_expanded,
    check_query,
    check_tokens,
    check_value_dim,
    refuse_gradients,
)
from .._core.numerics import Numerics
from .._dispatch import IN_PYTHON, run_backend, with_lse
from ..keys.intervals import KeyIntervals
from ..keys.rule import RuleParts, SelectionRule, takes_rule
from ..keys.select import select_key_intervals
from ..keys.visible import Visible


class _NewTokens(NamedTuple):
    """The new tokens of a call. All None: the cache holds them already."""

    key: Tensor | None
    value: Tensor | None
    scores: Tensor | None


class _AllKeys(NamedTuple):
    """A cache of all keys, by the arguments of flash_dmattn_with_kvcache."""

    k_cache: Tensor
    v_cache: Tensor
    score_cache: Tensor | None
    cache_seqlens: Tensor
    cache_leftpad: Tensor | None

    def hold_tokens(self, places: Tensor) -> Tensor:
        """Returns whether each of these places of a row holds a token, bool [B, places]."""
        held = places < self.cache_seqlens[:, None]
        return (
            held if self.cache_leftpad is None else held & (places >= self.cache_leftpad[:, None])
        )


@refuses_foreign_arguments
@takes_rule
def flash_dmattn_with_kvcache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    score_cache: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    cache_seqlens: Tensor,
    cache_leftpad: Tensor | None = None,
    keep_window_size: int | Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    scores_are_bias: bool = True,
    nonfinite: str = "saturate",
    return_lse: bool = False,
    backend: str | None = None,
    **rule: Unpack[RuleParts],
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds new tokens to a cache of all keys in place, and attends causally to it: the last query sees the last key.

    Token t is in place t. On a GPU the host does not read lengths, so that calls can be captured in a CUDA graph. A cache
    of the keys that a rule shows is a `KVSlots`.

    query: [B, n, Hq, D].
    k_cache: [B, S, Hkv, D]; v_cache: [B, S, Hkv, Dv] with Dv from 1 to D.
    score_cache: float32 [B, Hkv, S], one score per key. None: there is neither a bias nor a choice of keys.
    key, value, scores: the m new tokens: key [B, m, Hkv, D], value [B, m, Hkv, Dv], scores float32 [B, Hkv, m]. They
        are written to the places from cache_seqlens on. None: the cache holds the new tokens already.
    cache_seqlens: int32 [B], the number of tokens of each row before the call. The call does not change it.
    cache_leftpad: int32 [B], the place where the tokens of each row begin.
    keep_window_size, rule: a KeyRule. By default a query sees all keys.

    scale, softcap, nonfinite, backend: as in flash_dmattn_func.
    scores_are_bias: whether the score of a key is added to its attention score, as in dynamic mask attention.

    Returns out [B, n, Hq, Dv], or (out, lse [B, Hq, n]) with return_lse. The results have no gradient.
    """
    caches = {"k_cache": k_cache, "v_cache": v_cache, "score_cache": score_cache}
    for name, tensor in {"query": query, **caches, "cache_seqlens": cache_seqlens}.items():
        if name != "score_cache" or tensor is not None:
            check_tensor(tensor, name)
    refuse_gradients(**caches, query=query, key=key, value=value, scores=scores)
    new = _NewTokens(key, value, scores)
    _check_new_tokens(new, score_cache)
    backend = resolve_backend(backend)
    numerics = Numerics.from_arguments(scale, None, softcap, nonfinite, None)
    rule = SelectionRule.of_keywords(keep_window_size, rule).checked_per_query()
    scores_are_bias = check_flag(scores_are_bias, "scores_are_bias")
    return_lse = resolve_flag(return_lse, "return_lse")
    cache = _AllKeys(k_cache, v_cache, score_cache, cache_seqlens, cache_leftpad)
    _check_all_keys(query, cache, new)
    if score_cache is None and rule.hides_keys() and rule.reads_scores():
        raise ValueError(
            "score_cache: got None, expected the scores that keep_window_size chooses by"
        )
    backend = _check_backend(query, backend)
    out, lse = _attend_to_all_keys(query, cache, new, rule, numerics, scores_are_bias, backend)
    return (out, lse) if return_lse else out


def _attend_to_all_keys(
    query: Tensor,
    cache: _AllKeys,
    new: _NewTokens,
    rule: SelectionRule,
    numerics: Numerics,
    scores_are_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Writes new tokens into a cache of all keys, and returns (out, lse). The caller has checked the arguments."""
    finite.check_new_tokens(query, new.key, new.value)
    if new.key is not None:
        _write_tokens(cache, new)
        cache = cache._replace(cache_seqlens=cache.cache_seqlens + new.key.shape[1])
    k_cache, v_cache, score_cache, lengths, leftpad = cache
    everything = leftpad is None and not rule.hides_keys()
    length = _common_length(lengths, query.shape[1], k_cache.shape[1]) if everything else None
    if length is None:
        visible = Visible(intervals=_cache_intervals(cache, rule, query))
    else:
        visible = Visible(is_causal=query.shape[1] > 1)
        k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
    bias = None
    if scores_are_bias and score_cache is not None:
        bias = score_cache[:, :, None, :length].to(torch.promote_types(query.dtype, torch.float32))

    def held_keys() -> Tensor:
        places = torch.arange(k_cache.shape[1], device=query.device)
        return cache.hold_tokens(places)[:, None]

    out, statistics = run_backend(
        query, k_cache, v_cache, bias, visible, numerics, backend, held_keys=held_keys
    )
    return with_lse(out, statistics, True)


def _check_new_tokens(new: _NewTokens, score_cache: Tensor | None) -> None:
    """Raises unless key and value are both given or both None. With a score_cache, the same holds for scores."""
    key, value, scores = new
    if score_cache is None and scores is not None:
        raise ValueError("scores: got scores without score_cache, expected both or none")
    if (key is None) == (value is None) and (
        score_cache is None or (key is None) == (scores is None)
    ):
        return
    tensors = {"key": key, "value": value} | ({} if score_cache is None else {"scores": scores})
    given_names = [name for name, tensor in tensors.items() if tensor is not None]
    missing = [name for name, tensor in tensors.items() if tensor is None]
    verb = "is" if len(given_names) == 1 else "are"
    raise ValueError(
        f"{missing[0]}: got None, expected the new tokens': {' and '.join(given_names)} {verb} given"
    )


def _check_all_keys(query: Tensor, cache: _AllKeys, new: _NewTokens) -> None:
    k_cache, v_cache, score_cache, cache_seqlens, cache_leftpad = cache
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache: got shape {tuple(k_cache.shape)}, expected [B, S, Hkv, D]")
    batch, size, heads, head_dim = k_cache.shape
    device = k_cache.device
    if k_cache.dtype not in DTYPES:
        raise TypeError(
            f"k_cache: got {k_cache.dtype}, expected float32, bfloat16, float16 or float64"
        )
    check_head_dim(head_dim, "k_cache: got head dimension")
    value_dim = v_cache.shape[3] if v_cache.dim() == 4 else head_dim
    check_like(v_cache, "v_cache", (batch, size, heads, value_dim), k_cache.dtype, device)
    check_value_dim(value_dim, head_dim)
    if score_cache is not None:
        check_like(score_cache, "score_cache", (batch, heads, size), torch.float32, device)
    check_query(k_cache, query=query)
    tokens = 0
    if new.key is not None:
        tokens = check_tokens(k_cache, value_dim, **new._asdict())
        for name, tensor in zip(cache._fields, cache[:3], strict=False):
            if tensor is not None:
                check_not_expanded(tensor, name)
    if tokens > size:
        raise ValueError(
            f"key: got {tokens} tokens, expected at most {size}, the places of k_cache"
        )
    check_lengths(cache_seqlens, "cache_seqlens", batch, size - tokens, device)
    if cache_leftpad is not None:
        check_lengths(cache_leftpad, "cache_leftpad", batch, size, device)


def _check_backend(query: Tensor, backend: str) -> str:
    backend = check_device(query, backend)
    if backend not in ("", *IN_PYTHON) and not torch.compiler.is_compiling():
        check_backend_runs(backend)
    return backend


def _write_tokens(cache: _AllKeys, new: _NewTokens) -> None:
    """Writes the new tokens after the cached ones."""
    k_cache, v_cache, score_cache, lengths, _ = cache
    rows = torch.arange(new.key.shape[0], device=lengths.device)[:, None]
    places = lengths[:, None].long() + torch.arange(new.key.shape[1], device=lengths.device)
    k_cache[rows, places] = _without_aliasing(new.key, k_cache)
    v_cache[rows, places] = _without_aliasing(new.value, v_cache)
    if score_cache is not None:
        scores = _without_aliasing(new.scores, score_cache)
        score_cache.transpose(1, 2)[rows, places] = scores.transpose(1, 2)


def _without_aliasing(new: Tensor, cache: Tensor) -> Tensor:
    """Returns the new tokens, copied if they are a part of the cache itself."""
    shares = not torch.compiler.is_compiling() and torch._C._is_alias_of(new, cache)
    return new.clone() if shares else new


def _common_length(lengths: Tensor, queries: int, size: int) -> int | None:
    """Returns the length of the rows if all rows have the same one and the host can read it without waiting, else None.

    The host can read it on the CPU, outside of a trace. All keys up to this length are then visible, so no intervals
    are needed; making them takes a fifth of a call over 8,192 keys.
    """
    if type(lengths) is not Tensor or lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    distinct = set(lengths.tolist())
    length = distinct.pop() if len(distinct) == 1 else 0
    return length if queries <= length <= size else None


def _cache_intervals(cache: _AllKeys, rule: SelectionRule, query: Tensor) -> KeyIntervals:
    """Returns the intervals of the keys in a cache. The queries are the last tokens of each row."""
    scores, size, queries = cache.score_cache, cache.k_cache.shape[1], query.shape[1]
    place = torch.arange(size, device=query.device, dtype=torch.int32)
    real = cache.hold_tokens(place)
    lengths = cache.cache_seqlens.to(torch.int32)[:, None]
    if not rule.hides_keys():
        first = (place - (lengths - queries)).clamp(min=0)
        last = torch.where(real, queries, 0).to(torch.int32)
        intervals = torch.stack((first.expand_as(last), last), -1)[:, None]
        return KeyIntervals(intervals, queries, (size, 0), consecutive=True)
    # In selection, the last query belongs to the last key, so the rows are shifted until they end at the same place.
    shift = size - lengths
    from_end = (place - shift).clamp(min=0)
    if scores is None:
        scores = query.new_zeros((query.shape[0], 1, size))
    batch, heads = scores.shape[:2]
    index = from_end[:, None].expand(batch, heads, size).long()
    shown = (place >= shift) & real.gather(1, from_end.long())
    chosen = select_key_intervals(
        scores.gather(2, index),
        **rule._asdict(),
        key_mask=shown[:, None],
        query_length=queries,
    )
    back = (place + shift).clamp(max=size - 1)[:, None, :, None].expand(batch, heads, size, 2)
    intervals = chosen.intervals.gather(2, back.long()) * real[:, None, :, None]
    return KeyIntervals(intervals.to(torch.int32), queries, chosen.bound or (size, 0))
