"""A step of an engine in which each sequence adds any number of tokens: one call for prompts, chunks and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import finite
from .._core.checks import (
    are_alike,
    check_flag,
    check_tensor,
    refuse_transforms,
    resolve_flag,
)
from .._core.kv_checks import (
    check_dtype_and_device,
    check_like,
)
from .._core.numerics import Numerics
from ..functional import flash_dmattn_func
from ..keys.select import select_key_intervals
from .cache import KVSlots
from .ragged_batch import Group, RaggedBatch, value_for_device


class PartSize(NamedTuple):
    """The size of the parts in which a later chunk is processed: max(per_place * places, least) tokens.

    A GPU compares every key of a part with every other one, which takes quadratic time, but each part costs extra
    kernel launches. A CPU launches no kernels.
    """

    per_place: int
    least: int

    def tokens(self, places: int) -> int:
        return max(self.per_place * places, self.least)


# The keys are device types. Other devices have the CPU's numbers.
_PART_SIZES = {"cuda": PartSize(4, 4096), "cpu": PartSize(1, 128)}


@torch.no_grad()
def extend_ragged(
    pool: KVSlots,
    batch: RaggedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    scores_are_bias: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the tokens of a step to the slots of their sequences, and attends to these slots. Returns out [T, Hq, Dv].

    Each sequence has the result that it would have alone, except for rounding. Only rows of the batch change.

    Args:
        pool: the states of one layer, without pending tokens.
        batch: the sequences of the step, and their rows.
        query: [T, Hq, D]; key: [T, Hkv, D]; value: [T, Hkv, Dv].
        scores: float32 [Hkv, T]. Heads come first as in KVSlots; flash_dmattn_varlen_func takes [total_k, H].
        scale, softcap, scores_are_bias: as in KVSlots.step.
        return_lse: whether to return (out, lse), with lse [Hq, T].

    Returns:
        out, or (out, lse). Tokens that belong to no sequence have zeros in out, and -inf in lse.

    Raises, before any row changes:
        ValueError: there are fewer tokens than the batch has, or shapes do not match. On a CPU also: the pool does not
            have a row, or a row occurs twice.
        TypeError: an argument has another type, dtype or device.
    """
    length = _check_step(pool, batch, query, key, value, scores)
    scale, softcap, *_ = Numerics.from_arguments(scale, None, softcap, "saturate", None)
    options = {
        "scale": scale, "softcap": softcap, "scores_are_bias": check_flag(scores_are_bias, "scores_are_bias"), "return_lse": True,
    }  # fmt: skip
    return_lse = resolve_flag(return_lse, "return_lse")
    states = (query, key, value)
    if finite.is_enabled():
        finite.check_new_tokens(*states, batch._rows_of_tokens(query))
    if length == batch._length and batch._decodes_in_order:
        (group,) = batch._groups
        one = (t.unsqueeze(1) for t in states)
        out, lse = pool.over(group.rows).step(*one, scores.T.unsqueeze(2), **options)
        return (out.squeeze(1), lse.squeeze(2).T) if return_lse else out.squeeze(1)
    if not batch._groups:
        out = query.new_zeros((*query.shape[:2], pool.value_dim))
        lse = scores.new_full((query.shape[1], length), -torch.inf)
        return (out, lse) if return_lse else out
    groups = batch._groups
    # The remaining checks run before the first write. On a CPU, a copy of rows checks the counts of the whole pool; on
    # a GPU, a decode step checks that its kernel takes this number of query heads.
    first = next((number for number, group in enumerate(groups) if group.continues), None)
    copies = {} if first is None else {first: _copy_rows(pool, groups[first])}
    places, results = [None] * len(groups), [None] * len(groups)
    for number in sorted(range(len(groups)), key=lambda n: (groups[n].begins, groups[n].continues)):
        group = groups[number]
        tokens, count = group.tokens, len(group.rows)
        if isinstance(tokens, slice):  # views
            own_states = [t[tokens].unflatten(0, (count, -1)) for t in states]
            own_scores = scores[:, tokens].unflatten(1, (count, -1)).transpose(0, 1)
        else:
            own_states = [t[tokens] for t in states]
            own_scores = scores[:, tokens].transpose(0, 1)
            tokens = tokens.flatten()
        if group.begins:
            own_out, own_lse = _begin_texts(pool, group, *own_states, own_scores, options)
        elif group.continues:
            slots = copies.pop(number, None) or _copy_rows(pool, group)
            own_out, own_lse = slots.extend(
                *own_states, own_scores, lengths=group.lengths, **options
            )
            pool.over(group.rows).restore(slots)
        else:
            own_out, own_lse = pool.over(group.rows).step(*own_states, own_scores, **options)
        parts = (own_out, own_lse.transpose(1, 2)) if return_lse else (own_out,)
        parts = [part.flatten(0, 1) for part in parts]
        if group.real is not None:
            tokens, parts = group.places, [part[group.real] for part in parts]
        places[number], results[number] = tokens, parts
    if length == batch._length and batch._is_in_order:
        places = None
    out, *lse = (
        _place_results(parts, places, length, absent)
        for parts, absent in zip(zip(*results, strict=True), (0, -torch.inf), strict=False)
    )
    return (out, lse[0].T) if return_lse else out


def _check_step(
    pool: object, batch: object, query: object, key: object, value: object, scores: object
) -> int:
    """Checks all groups before the first one runs and changes the pool. Returns the number of tokens."""
    if not isinstance(pool, KVSlots):
        raise TypeError(f"pool: got {type(pool).__name__}, expected KVSlots")
    if not isinstance(batch, RaggedBatch):
        raise TypeError(f"batch: got {type(batch).__name__}, expected RaggedBatch")
    if pool.rows is not None or pool.pending:
        state = "a view of some rows" if pool.rows is not None else f"{pool.pending} pending tokens"
        raise ValueError(f"pool: got {state}, expected a cache of its own without pending tokens")
    batch._check_rows(pool)
    if not _states_fit(pool, query, key, value, scores):
        _check_states(pool, query, key, value, scores)
    length = query.shape[0]
    if length < batch._length:
        raise ValueError(f"query: got {length} tokens, expected {batch._length} or more")
    refuse_transforms(query=query, key=key, value=value, scores=scores)
    return length


def _states_fit(pool: KVSlots, query: object, key: object, value: object, scores: object) -> bool:
    """Returns True if the tensors of a step are known to fit a pool.

    This quick test saves 4 µs of a step. It returns False for tensors that fit only by a slower test.
    """
    if not are_alike(query, key, value) or type(scores) is not Tensor or len(query.shape) != 3:
        return False
    slots, heads, head_dim = pool.k, pool.heads_kv, pool.head_dim
    length, heads_q, query_dim = query.shape
    return (
        query.dtype is slots.dtype
        and query.device == slots.device == scores.device
        and key.shape == (length, heads, head_dim)
        and value.shape == (length, heads, pool.value_dim)
        and query_dim == head_dim
        and heads > 0
        and heads_q % heads == 0
        and scores.dtype is torch.float32
        and scores.layout is torch.strided
        and scores.shape == (heads, length)
    )


def _check_states(pool: KVSlots, query: object, key: object, value: object, scores: object) -> None:
    check_tensor(query, "query")
    heads, head_dim, shape = pool.heads_kv, pool.head_dim, query.shape
    if len(shape) != 3 or shape[2] != head_dim or (shape[1] % heads if heads else shape[1]):
        raise ValueError(
            f"query: got shape {tuple(shape)}, expected [T, Hq, {head_dim}] with Hq a multiple of {heads}"
        )
    dtype, device, length = pool.k.dtype, pool.k.device, shape[0]
    check_dtype_and_device(query, "query", dtype, device, "pool")
    for name, state, columns in (("key", key, head_dim), ("value", value, pool.value_dim)):
        check_tensor(state, name)
        if state.dim() == 3 and state.shape[0] != length:
            raise ValueError(
                f"{name}: got {state.shape[0]} tokens, expected {length}, those of query"
            )
        check_like(state, name, (length, heads, columns), dtype, device, "pool")
    check_like(scores, "scores", (heads, length), torch.float32, device)


def _place_results(
    parts: Sequence[Tensor], places: list[slice | Tensor] | None, length: int, absent: float
) -> Tensor:
    """Puts the results of the groups, [tokens of the group, ...], at their places in a step of `length` tokens.

    places: None: the groups are in order. absent: the result of a token that belongs to no group.
    """
    if places is None:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    step = parts[0].new_full((length, *parts[0].shape[1:]), absent)
    for place, part in zip(places, parts, strict=True):
        step[place] = part
    return step


def _begin_texts(
    pool: KVSlots,
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    options: dict,
) -> tuple[Tensor, Tensor]:
    """Computes attention over prompts, [n, length, Hq, Dv], and then fills the rows with their keys.

    Padding comes after the tokens of each prompt, so that no query of a prompt sees padding.
    """
    rule = pool.rule
    options = dict(options)
    bias = scores[:, :, None] if options.pop("scores_are_bias") else None
    keys = None
    # A rule with room for all keys still hides those whose score is NaN. A bias of NaN masks its key.
    if bias is None or not rule.has_room_for(query.shape[1]):
        keys = select_key_intervals(scores, **rule._asdict())
    result = flash_dmattn_func(
        query, key, value, None, bias, is_causal=True, key_intervals=keys, backend=pool.backend or None, **options
    )  # fmt: skip
    if group.lengths is not None:
        keys = None  # these intervals are for the longest prompt
    pool.over(group.rows).fill(key, value, scores, keys, lengths=group.lengths)
    return result


def _copy_rows(pool: KVSlots, group: Group) -> KVSlots:
    """Copies the rows to a cache with room for pending tokens, which the pool lacks. Their attention takes longer."""
    most = value_for_device(_PART_SIZES, pool.k.device).tokens(pool.places)
    return pool.select(group.rows, chunk=min(group.length, most))
